"""What a data set looks like to the trainer: rows kept and dropped, what is supervised, how long, who wrote it, how it packs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, TextIO

import numpy as np

from dflash_train.assets import public_name, resolve
from dflash_train.config.schema import Recipe
from dflash_train.data.blocks import legal_anchors
from dflash_train.data.certificate import Certificate, certify
from dflash_train.data.chat import (
    check_supervised,
    load_tokenizer,
    mask_strategy,
    read_stop_ids,
    template_hash,
    tokenize_all,
)
from dflash_train.data.provenance import compare_provenance, count_origins, expected_of, read_origins, settings_table
from dflash_train.data.read import Kept, read_conversations
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.types import TokenizedExample

GREEN, GREY, RESET = "\033[32m", "\033[90m", "\033[0m"


@dataclass
class Share:
    """Documents of a domain, their tokens and how many of these are supervised."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0

    @property
    def ratio(self) -> float:
        return self.supervised / max(1, self.tokens)


class Packing(NamedTuple):
    """The first epoch: rows; share of padding; legal anchors; blocks that num_anchors a row leaves of them."""

    rows: int
    padding: float
    anchors: int
    blocks: int


@dataclass(kw_only=True)
class Inspection:
    """`data.train` as training would see it. problems: what training would refuse; notes: what it would say.

    stream and certificate are None where no row is usable.
    """

    recipe: Recipe
    tokenizer: Any
    kept: Kept
    origins: Counter[str]
    stream: RowStream | None = None
    certificate: Certificate | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def examples(self) -> list[TokenizedExample]:
        return self.stream.examples if self.stream else []

    @property
    def template(self) -> str:
        return template_hash(self.tokenizer, dict(self.recipe.data.chat_template_kwargs))

    def domains(self) -> dict[str, Share]:
        shares: dict[str, Share] = {}
        for example in self.examples:
            share = shares.setdefault(example.domain, Share())
            share.documents += 1
            share.tokens += len(example.token_ids)
            share.supervised += int(example.supervised.sum())
        return shares

    def generators(self) -> dict[str, int]:
        """Rows by the public name of the model that wrote them."""
        names: Counter[str] = Counter()
        for origin, rows in read_origins(self.origins):
            names[public_name(origin.generator["model"]) if origin.generator else "not recorded"] += rows
        return dict(names)

    def counts(self) -> dict[str, Any]:
        """The figures of the report; None for what an unset mask token or an empty data set has not."""
        shares = self.domains()
        tokens, supervised = (sum(getattr(s, name) for s in shares.values()) for name in ("tokens", "supervised"))
        return {
            "rows": self.kept.total,
            "kept": self.kept.kept,
            "dropped": dict(self.kept.dropped),
            "notes": dict(self.kept.notes),
            "examples": len(self.examples),
            "tokens": tokens,
            "supervised": supervised,
            "ratio": supervised / max(1, tokens),
            "mask_token_occurrences": self.certificate.mask_token_occurrences if self.certificate else None,
            "domains": {domain: share.documents for domain, share in shares.items()},
            "generators": self.generators(),
            "packing": packing(self.stream)._asdict() if self.stream else None,
            "certificate": self.certificate.digest if self.certificate else None,
        }

    def check(self) -> None:
        """Raise ValueError for the first thing that training would refuse."""
        if self.problems:
            raise ValueError(self.problems[0])


def look(recipe: Recipe) -> Inspection:
    """Read and tokenise `data.train` as training would. What training would refuse is kept in `problems`, so that it can be shown;
    raises ValueError only where nothing can be: no usable tokenizer or file, or a template that fits no row.
    """
    data = recipe.data
    target = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(target, recipe.target.revision, recipe.target.trust_remote_code, data.chat_template)
    conversations, kept = read_conversations([resolve(path, "train") for path in data.train], limit=data.limit)
    found = Inspection(recipe=recipe, tokenizer=tokenizer, kept=kept, origins=count_origins(conversations))
    examples = tokenize_all(
        conversations,
        tokenizer,
        chat_template_kwargs=data.chat_template_kwargs,
        reasoning_rows=data.reasoning_rows,
        max_length=data.max_length,
        drop_truncated=data.drop_truncated,
        kept=kept,
        stop_ids=read_stop_ids(target, recipe.target.revision, tokenizer),
    )
    try:
        kept.check(data.max_dropped)
    except ValueError as error:
        found.problems.append(str(error))
    try:
        found.notes += compare_provenance(found.origins, expected_of(recipe, target, tokenizer), what="train")
    except ValueError as error:
        found.problems.append(str(error))
    if examples:
        found.stream = _stream(recipe, examples)
        found.certificate = certify(
            data,
            tokenizer,
            kept=kept,
            examples=examples,
            fingerprint=found.stream.fingerprint,
            mask_token_id=recipe.drafter.mask_token_id,
        )
        try:
            check_supervised(examples, "train")
        except ValueError as error:
            found.problems.append(str(error))
    return found


def _stream(recipe: Recipe, examples: list[TokenizedExample]) -> RowStream:
    train, block_size = recipe.train, recipe.drafter.block_size
    config = StreamConfig(
        row_length=recipe.data.max_length,
        num_anchors=train.num_anchors,
        decay_S=(np.arange(block_size) > 0).astype(float),  # which slots are trained is shown, not their weight
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        seed=train.seed,
        pack=recipe.data.pack,
    )
    return RowStream(examples, config)


def inspect(
    recipe: Recipe, *, samples: int = 3, ids: list[str] | None = None, color: bool = False, out: TextIO | None = None
) -> dict[str, Any]:
    """Print the report on `data.train` to `out` (default stdout) and return its counts (`Inspection.counts`).

    Raises ValueError for what training would refuse, after the report.
    """
    found = look(recipe)
    write_report(found, chosen(found, samples, ids), color=color, out=out or sys.stdout)
    found.check()
    return found.counts()


def write_report(found: Inspection, shown: list[TokenizedExample], *, color: bool, out: TextIO) -> None:
    """The report as text. Without colour, supervised text stands between `⟦` and `⟧`."""
    data, stream, certificate = found.recipe.data, found.stream, found.certificate
    print(found.kept.table(), file=out)
    print(
        f"template {found.template}, arguments {dict(data.chat_template_kwargs)}; masks: {mask_strategy(found.tokenizer, found.kept)}",
        file=out,
    )
    if stream and certificate:
        print(
            f"{certificate.documents} examples, {certificate.tokens} tokens, supervised {certificate.supervised} ({certificate.ratio:.1%})",
            file=out,
        )
        for domain, share in found.domains().items():
            print(
                f"  {domain:<20} {share.documents:>7} examples {share.tokens:>9} tokens {share.ratio:>6.1%}", file=out
            )
        rows = packing(stream)
        print(
            f"packed: {rows.rows} rows of {data.max_length} tokens, {rows.padding:.1%} padding; "
            f"{rows.blocks} blocks per epoch at {rows.anchors} legal anchors",
            file=out,
        )
    print(f"answers by {found.generators()}", file=out)
    print(settings_table(found.origins, data.chat_template_kwargs), file=out)
    for note in found.notes:
        if note.startswith("WARNING"):
            print(note, file=out)
    if stream and certificate:
        if certificate.mask_token_occurrences is not None:
            print(
                f"drafter.mask_token_id {certificate.mask_token_id} occurs {certificate.mask_token_occurrences} times in the data",
                file=out,
            )
        print(histogram(stream.lengths, data.max_length), file=out)
        print(certificate.line(), file=out)
    for example in shown:
        print(f"\n--- {example.id} ({example.finish_reason})\n{show(example, found.tokenizer, color)}", file=out)


def chosen(found: Inspection, samples: int, ids: list[str] | None = None) -> list[TokenizedExample]:
    """The examples of the named rows, or `samples` of them: the first of each domain, then the second, and so on.

    Raises ValueError for an id that no example has.
    """
    if ids:
        return [example for name in ids for example in _named(found, name)]
    seen: Counter[str] = Counter()
    ranked = []
    for number, example in enumerate(found.examples):
        ranked.append((seen[example.domain], number))
        seen[example.domain] += 1
    return [found.examples[number] for _, number in sorted(sorted(ranked)[:samples], key=lambda pair: pair[1])]


def _named(found: Inspection, name: str) -> list[TokenizedExample]:
    """One example, or several where the row gave one for each turn (`name/0`, `name/1`)."""
    examples = [e for e in found.examples if e.id == name or e.id.startswith(f"{name}/")]
    if not examples:
        known = [e.id for e in found.examples]
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known[:3])} ..." if known else ""
        raise ValueError(f"--ids {name}: no example has this id{hint} A dropped row has none: see the table of reasons")
    return examples


def packing(stream: RowStream) -> Packing:
    """How the first epoch packs."""
    anchors = np.array([len(legal_anchors(example.supervised)) for example in stream.examples])
    rows = [row for step in range(stream.steps_per_epoch) for row in stream.rows_of_step(step)[1]]
    return Packing(
        rows=stream.rows_per_epoch,
        padding=1 - stream.tokens_per_epoch / (stream.rows_per_epoch * stream.config.row_length),
        anchors=int(anchors.sum()),
        blocks=sum(min(stream.config.num_anchors, int(anchors[row].sum())) for row in rows),
    )


def position_shares(examples: list[TokenizedExample], bins: int) -> tuple[np.ndarray, np.ndarray]:
    """(edges (n + 1,), supervised share of the tokens between them (n,)), by position in the document; n is at most `bins`."""
    longest = max(len(example.token_ids) for example in examples)
    present, supervised = np.zeros(longest), np.zeros(longest)
    for example in examples:
        present[: len(example.token_ids)] += 1
        supervised[: len(example.token_ids)] += example.supervised
    edges = np.unique(np.linspace(0, longest, min(bins, longest) + 1).astype(int))
    return edges, np.add.reduceat(supervised, edges[:-1]) / np.add.reduceat(present, edges[:-1])


def histogram(lengths: np.ndarray, max_length: int, bins: int = 8, width: int = 40) -> str:
    """Text histogram of lengths in tokens, from 0 to max_length."""
    counts, edges = np.histogram(lengths, bins=bins, range=(0, max_length))
    rows = [
        f"{int(low):>7}..{int(high):<7} {count:>7} {'#' * int(np.ceil(width * count / max(1, counts.max())))}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    return "\n".join(["length in tokens", *rows])


def show(example: TokenizedExample, tokenizer: Any, color: bool) -> str:
    """The example's text with what is supervised in green (or between brackets); whole runs are decoded,
    never half a character.
    """
    begin, end, other = (GREEN, RESET, GREY) if color else ("⟦", "⟧", "")
    changes = np.flatnonzero(np.diff(example.supervised.astype(np.int8))) + 1
    parts = []
    for ids, supervised in zip(
        np.split(example.token_ids, changes), np.split(example.supervised, changes), strict=True
    ):
        text = tokenizer.decode(ids.tolist())
        parts.append(f"{begin}{text}{end}" if supervised[0] else f"{other}{text}{RESET if color else ''}")
    return "".join(parts)


class Piece(NamedTuple):
    """Tokens [begin, end) and the text that they add."""

    begin: int
    end: int
    text: str


def pieces(token_ids: list[int], breaks: set[int], tokenizer: Any, most: int = 8) -> Iterator[Piece]:
    """Every token with its text; tokens that only together make a character are one piece, which never crosses a position in `breaks`.

    A token's text depends on what stands before it (leading spaces), so each is decoded with its predecessors and without.
    """
    begin = 0
    while begin < len(token_ids):
        before = token_ids[max(0, begin - 4) : begin]
        known = tokenizer.decode(before)
        for end in range(begin + 1, min(begin + most, len(token_ids)) + 1):
            text = tokenizer.decode(before + token_ids[begin:end])
            if not text.endswith("\ufffd") or end in breaks:
                break
        text = text[len(known) :] if text.startswith(known) else tokenizer.decode(token_ids[begin:end])
        yield Piece(begin, end, text)
        begin = end
