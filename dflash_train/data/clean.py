"""Remove rows that do a training set no good: unreadable, empty, looping, repeated, or held out elsewhere.

Rows are only ever removed; a line that stays is the line that was read, byte for byte, in its place. Two passes over the
inputs: the first decides, the second copies. Memory grows by less than 1 kB a row, whatever the rows' length.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_train.config.values import check_range
from dflash_train.data.layouts import BadRow
from dflash_train.data.near_duplicates import SHINGLE, NearDuplicates
from dflash_train.data.rows import (
    Row,
    atomic_file,
    check_output,
    ngrams,
    normalise,
    parse_row,
    prompt_digest,
    read_lines,
    text_hash,
    words_of,
    write_json,
)

EXAMPLES = 5
MOST_LENGTH = 10**9  # characters or tokens of a prompt or an answer
# A run of words that stands in more held-out prompts than this is their template, not their content.
TEMPLATE_PROMPTS = 10
# Below these lengths a text repeats itself, or compresses, by chance.
LOOP_WORDS, LOOP_BYTES = 50, 256
REFUSAL = re.compile(
    r"\W*(?:(?:i['’]?\s?a?m|i am)?\s*(?:very |really |so )?sorry|i apologi[sz]e|unfortunately)?[\s,.;:!—-]*(?:but|however)?[\s,]*"
    r"(?:i|as an ai(?: language)?(?: model| assistant)?[\s,]+i)\s*(?:['’]m| am)?\s*"
    r"(?:can['’]?t|can ?not|won['’]?t|will not|not able to|unable to|do not feel comfortable|don['’]t feel comfortable)\b"
    r"[^.!?]{0,60}?\b(?:assist|help|comply|provide|fulfil|fulfill|create|generate|write|answer|discuss|engage|support|do that)\b",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class CleanSettings:
    """What is removed. Lengths are characters, or tokens where a tokenizer is given; None switches a filter off."""

    near_threshold: float | None = 0.8
    min_prompt: int | None = None
    max_prompt: int | None = None
    min_answer: int | None = None
    max_answer: int | None = None
    max_repetition: float | None = 0.5
    max_compression: float | None = 10.0
    need_answer: bool = False
    drop_truncated: bool = False
    drop_refused: bool = False
    overlap: int = 13

    def __post_init__(self) -> None:
        for side in ("prompt", "answer"):
            low, high = getattr(self, f"min_{side}"), getattr(self, f"max_{side}")
            check_range(f"min_{side}", low or 0, 0, MOST_LENGTH)
            check_range(f"max_{side}", 1 if high is None else high, 1, MOST_LENGTH)
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{side} {low} > max_{side} {high}: no row could pass; swap them")
        if self.max_repetition is not None and not 0 < self.max_repetition <= 1:
            raise ValueError(f"max_repetition {self.max_repetition} is not in (0, 1]; it is a share of the answer")
        if self.max_compression is not None and not 1 < self.max_compression < math.inf:
            raise ValueError(
                f"max_compression {self.max_compression} must be above 1, and finite; text alone compresses 2 to 4 times"
            )


@dataclass(kw_only=True)
class CleanReport:
    """Rows kept and dropped by reason; examples are {id, place, why}; notes count what was seen and kept."""

    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    contaminated: list[dict[str, str]] = field(default_factory=list)

    def drop(self, reason: str, row_id: str, place: str, why: str = "") -> None:
        self.dropped[reason] += 1
        found = self.examples.setdefault(reason, [])
        if len(found) < EXAMPLES:
            found.append({"id": row_id, "place": place, "why": why})

    def table(self) -> str:
        """The report as a person reads it: a line for each reason, then its first rows."""
        lines = [f"kept {self.kept} of {self.rows} rows"]
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"  dropped {count:>8}  {reason}")
            for example in self.examples[reason][:3]:
                lines.append(f"            {example['place']}  {example['id']}  {example['why'][:80]}".rstrip())
        lines += [f"  note    {count:>8}  {note}" for note, count in sorted(self.notes.items())]
        return "\n".join(lines)

    def check(self, max_dropped: float) -> None:
        """Raise ValueError when no row is left or a larger share than `max_dropped` would go."""
        if not self.kept:
            raise ValueError(f"no row of {self.rows} is left: nothing was written; see the reasons\n{self.table()}")
        share = 1 - self.kept / self.rows
        if not share <= max_dropped:  # also where that is no number
            raise ValueError(
                f"share dropped {share:.3f} > max_dropped {max_dropped}, {self.kept} rows left: nothing was written; "
                f"see the reasons, change a filter or raise --max-dropped\n{self.table()}"
            )


class HeldOut:
    """Held-out prompts, to find what repeats them: the same prompt, or `size` words in a row of one of its turns.

    Runs of words that more than `TEMPLATE_PROMPTS` held-out prompts share are ignored. Prompts of fewer than `size` words
    are found only by equality. A paraphrase or a translation is not found.
    """

    def __init__(self, size: int) -> None:
        if not 5 <= size <= 100:
            raise ValueError(
                f"overlap {size}: must be 5 to 100 words; everyday phrases match in fewer, and next to nothing in more: choose 8 to 13"
            )
        self.size = size
        self.places: list[str] = []
        self._content = hashlib.blake2b(str(size).encode(), digest_size=16)
        self._exact: dict[int, int] = {}
        self._grams: list[np.ndarray] = []
        self._owners: list[np.ndarray] = []
        self._table: tuple[np.ndarray, np.ndarray] | None = None
        self.template_runs = 0

    def add(self, turns: list[str], place: str) -> None:
        """One held-out prompt with all its user turns."""
        number = len(self.places)
        self.places.append(place)
        turns = [normalise(turn) for turn in turns]
        self._content.update("\x1f".join([place, *turns, ""]).encode("utf-8", "surrogatepass"))
        for text in {turns[0], "\n".join(turns)}:
            self._exact.setdefault(text_hash(text), number)
        for turn in turns:
            words = words_of(turn)
            if len(words) >= self.size:
                grams = np.unique(ngrams(words, self.size))
                self._grams.append(grams)
                self._owners.append(np.full(len(grams), number, np.int64))
        self._table = None

    def digest(self) -> str:
        """A hash of all prompts and the size: two that find the same things have the same."""
        return self._content.hexdigest()

    def find(self, turns: list[str], words: list[list[str]]) -> tuple[str, str] | None:
        """(place of the held-out prompt, what was found) for normalised turns and their words, or None."""
        if not self.places:
            return None
        for text in (turns[0], "\n".join(turns)):
            number = self._exact.get(text_hash(text))
            if number is not None:
                return self.places[number], "the same prompt"
        hashes, owners = self._lookup()
        for turn in words:
            if len(turn) < self.size or not len(hashes):
                continue
            grams = ngrams(turn, self.size)
            at = np.minimum(np.searchsorted(hashes, grams), len(hashes) - 1)
            hits = np.flatnonzero(hashes[at] == grams)
            if len(hits):
                first = hits[0]
                return self.places[owners[at[first]]], " ".join(turn[first : first + self.size])
        return None

    def _lookup(self) -> tuple[np.ndarray, np.ndarray]:
        """Sorted hashes of the runs of words and the first prompt that has each, without the templates."""
        if self._table is None:
            if not self._grams:
                self._table = np.empty(0, np.uint64), np.empty(0, np.int64)
                return self._table
            pairs = np.concatenate(self._grams), np.concatenate(self._owners)
            hashes, first, counts = np.unique(pairs[0], return_index=True, return_counts=True)
            content = counts <= TEMPLATE_PROMPTS
            self.template_runs = int((~content).sum())
            self._table = hashes[content], pairs[1][first][content]
        return self._table


def read_heldout(paths: Iterable[str | Path], size: int) -> HeldOut:
    """The prompts of held-out files. Raises ValueError for a row that cannot be read and for a file without rows: a check with
    holes proves nothing.
    """
    heldout = HeldOut(size)
    for path in paths:
        before = len(heldout.places)
        for place, line in read_lines([path]):
            try:
                row = parse_row(place, line)
            except BadRow as reason:
                raise ValueError(f"held-out row {place} cannot be compared ({reason}); mend or remove it") from None
            heldout.add(row.turns, place)
        if len(heldout.places) == before:
            raise ValueError(
                f"held-out file {path} holds no row: nothing would be kept out; give the whole file, or leave it out"
            )
    return heldout


def repetition(answer: str, size: int = 8) -> float:
    """Share of an answer's 8-word runs that stood in it before; 0 for fewer than LOOP_WORDS words."""
    words = words_of(answer)
    if len(words) < LOOP_WORDS:
        return 0.0
    grams = ngrams(words, size)
    return 1 - len(np.unique(grams)) / len(grams)


def compression(answer: str) -> float:
    """How many times smaller zlib makes an answer; 1 for fewer than LOOP_BYTES bytes. Finds loops that have no words."""
    text = answer.encode("utf-8", "surrogatepass")
    return len(text) / len(zlib.compress(text, 6)) if len(text) >= LOOP_BYTES else 1.0


def is_refusal(answer: str) -> bool:
    """Whether an answer begins by declining, in English."""
    return REFUSAL.match(answer[:300]) is not None


class Cleaner:
    """The first pass: one row after the other, why it goes or that it stays. `measure` is the length of a text."""

    def __init__(self, settings: CleanSettings, heldout: HeldOut, measure: Callable[[str], int]) -> None:
        self.settings, self.heldout, self.measure = settings, heldout, measure
        self.report = CleanReport()
        self._seen: dict[bytes, int] = {}
        self._stays = bytearray()
        self._near = NearDuplicates(settings.near_threshold) if settings.near_threshold is not None else None
        self._compared: list[int] = []

    def look_at(self, place: str, line: bytes | str) -> None:
        """Judge the next row, all but its near duplicates, which need all rows."""
        number = len(self._stays)
        self._stays.append(0)
        self.report.rows += 1
        try:
            row = parse_row(place, line)
        except BadRow as reason:
            self.report.drop(str(reason), "", place)
            return
        found = self._fault(row)
        if found is None:
            turns = [normalise(turn) for turn in row.turns]
            words = [words_of(turn) for turn in turns]
            found = self._contamination(row, turns, words) or self._duplicate(row, turns, number)
        if found is not None:
            self.report.drop(found[0], row.id, place, found[1])
            return
        self._stays[number] = 1
        shingles = ngrams([word for turn in words for word in turn], SHINGLE)
        if self._near is not None and len(shingles):
            self._near.add(shingles)
            self._compared.append(number)

    def _fault(self, row: Row) -> tuple[str, str] | None:
        settings = self.settings
        if row.answered is False:
            return "empty_answer", ""
        if settings.need_answer and row.answered is None:
            return "no_answer", ""
        if row.fields.get("finish_reason") == "length":
            if settings.drop_truncated:
                return "truncated", ""
            self.report.notes["truncated answers kept"] += 1
        if row.answer and is_refusal(row.answer):
            if settings.drop_refused:
                return "refused", row.answer[:80].replace("\n", " ")
            self.report.notes["refusals kept"] += 1
        return self._length(row) or self._loop(row)

    def _length(self, row: Row) -> tuple[str, str] | None:
        settings = self.settings
        for side, text in (("prompt", row.prompt), ("answer", row.answer)):
            low, high = getattr(settings, f"min_{side}"), getattr(settings, f"max_{side}")
            if (low is None and high is None) or (side == "answer" and row.answered is None):
                continue
            length = self.measure(text)
            if low is not None and length < low:
                return f"short_{side}", f"length {length} < {low}"
            if high is not None and length > high:
                return f"long_{side}", f"length {length} > {high}"
        return None

    def _loop(self, row: Row) -> tuple[str, str] | None:
        limit, ratio = self.settings.max_repetition, self.settings.max_compression
        if limit is not None and (share := repetition(row.answer)) > limit:
            return "repetitive", f"{share:.0%} of its 8-word runs stood there before"
        if ratio is not None and (times := compression(row.answer)) > ratio:
            return "repetitive", f"compresses {times:.1f} times"
        return None

    def _contamination(self, row: Row, turns: list[str], words: list[list[str]]) -> tuple[str, str] | None:
        found = self.heldout.find(turns, words)
        if found is None:
            return None
        against, text = found
        self.report.contaminated.append({"id": row.id, "place": row.place, "against": against, "found": text})
        return "contaminated", f"{against}: {text}"

    def _duplicate(self, row: Row, turns: list[str], number: int) -> tuple[str, str] | None:
        first = self._seen.setdefault(prompt_digest(turns, row.context), number)
        return None if first == number else ("duplicate", f"of row {first + 1} of the input")

    def settle(self) -> tuple[bytearray, dict[int, int]]:
        """(1 for each row that stays, near duplicate -> the row it is like), by the rows' numbers from 0."""
        alike = self._near.duplicates() if self._near is not None else {}
        numbers = {self._compared[later]: self._compared[earlier] for later, earlier in alike.items()}
        for number in numbers:
            self._stays[number] = 0
        self.report.kept = sum(self._stays)
        return self._stays, numbers


def clean(
    inputs: list[str | Path],
    output: Path,
    settings: CleanSettings,
    *,
    against: Iterable[str | Path] = (),
    max_dropped: float = 0.5,
    measure: Callable[[str], int] = len,
) -> CleanReport:
    """Write the rows of `inputs` that stay to `output`, and `<output>.report.json` beside it. Returns the report.

    `against` are held-out files whose prompts must not be trained on. Raises ValueError, and writes nothing, when more
    than the share `max_dropped` would go or when an input changes while it is read.
    """
    check_range("max_dropped", max_dropped, 0, 1)
    check_output(output, [*inputs, *against])
    cleaner = Cleaner(settings, read_heldout(against, settings.overlap), measure)
    first = _Digest(inputs)
    for place, line in tqdm(first, desc="reading", unit=" rows", disable=None):
        cleaner.look_at(place, line)
    stays, alike = cleaner.settle()
    report = cleaner.report
    for later in sorted(alike):
        report.drop("near_duplicate", "", "", str(alike[later]))
    report.check(max_dropped)
    with atomic_file(output) as stream:
        second = _Digest(inputs)
        shown = sorted(alike)[:EXAMPLES]
        wanted = {number: ("", "") for later in shown for number in (later, alike[later])}
        for number, (place, line) in enumerate(second):
            if number < len(stays) and stays[number]:
                stream.write(line + b"\n")
            if number in wanted:
                wanted[number] = (parse_row(place, line).id, place)
        if second.hexdigest() != first.hexdigest():
            raise ValueError(
                f"{', '.join(map(str, inputs))}: changed while being read; run again when they are at rest"
            )
    for later, example in zip(shown, report.examples.get("near_duplicate", [])):
        row_id, place = wanted[later]
        example.update(id=row_id, place=place, why="like " + " ".join(reversed(wanted[alike[later]])).strip())
    write_json(
        output.with_name(output.name + ".report.json"), as_json(report, settings, inputs, against, first.hexdigest())
    )
    return report


def as_json(
    report: CleanReport,
    settings: CleanSettings,
    inputs: Iterable[str | Path],
    against: Iterable[str | Path],
    digest: str,
) -> dict[str, Any]:
    """The report file: counts, examples, every contaminated row, and what they came from."""
    return {
        "inputs": [str(path) for path in inputs],
        "input_hash": digest,
        "against": [str(path) for path in against],
        "settings": asdict(settings),
        "rows": report.rows,
        "kept": report.kept,
        "dropped": dict(report.dropped.most_common()),
        "notes": dict(report.notes),
        "examples": report.examples,
        "contaminated": report.contaminated,
    }


class _Digest:
    """The lines of files, with a hash over all that went by."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = list(paths)
        self._hash = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[str, bytes | str]]:
        for place, line in read_lines(self._paths):
            self._hash.update((line if isinstance(line, bytes) else line.encode()) + b"\n")
            yield place, line

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
