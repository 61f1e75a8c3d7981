"""A prompt set for a real target, from a mixture of Hub data sets: streamed, normalised, decontaminated, accounted for.

Only prompts are taken: the target writes the answers (data_prep/regenerate.py). In a conversation of several turns the
assistant's are empty placeholders that regeneration fills; it ends with a user turn, and before the first tool result,
which would answer a call that the target did not make.

Sources are read in the mixture's order, each shuffled by (seed, buffer) and read until it has given its number of rows, so
the result is a function of the mixture, the revisions and the seed. A finished source is kept in `<output>.parts/`; after a
crash the same command goes on with the next one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from dflash_train.config.values import check_keys, check_range, fits, nearest
from dflash_train.data.clean import HeldOut, read_heldout
from dflash_train.data.files import file_hash, without_nulls
from dflash_train.data.layouts import BadRow, find_messages
from dflash_train.data.rows import (
    atomic_file,
    check_output,
    normalise,
    parse_row,
    prompt_digest,
    read_lines,
    words_of,
    write_json,
)

MOST_ROWS = 10**9
MIXTURES = Path(__file__).resolve().parent.parent / "assets" / "mixtures"
BENCHMARKS = MIXTURES / "benchmarks.yaml"
# Licences that let the prompts be used and passed on for any purpose with at most attribution.
PERMISSIVE = {
    "Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CC-BY-3.0", "CC-BY-4.0", "ODC-By-1.0", "CDLA-Permissive-2.0",
}  # fmt: skip
CARD_SPELLING = {"odc-by": "ODC-By-1.0", "cdla-permissive-2.0": "CDLA-Permissive-2.0", "pddl": "PDDL-1.0"}
TOOL_ROLES = {"tool", "function", "ipython"}
FIELDS = {"messages", "conversations", "prompt", "system", "tools", "drop_system"}
# How many rows are enough, from public sources only.
EVIDENCE = [
    ("5 k", "a check that training works, no more: acceptance length 1.47 on MT-Bench (vLLM Speculators' tutorial)"),
    (
        "1.6 k long",
        "enough to adapt to long context: 3.61 -> 6.05 at 16 K tokens after 3 epochs (DFlash, arXiv 2602.06036)",
    ),
    ("800 k", "DFlash's drafters, 6 epochs on answers of their targets (arXiv 2602.06036)"),
    ("1.3 M", "DSpark's, 95 % of open-perfectblend, answers of their targets (arXiv 2607.05147 and its repository)"),
]


@dataclass(kw_only=True)
class Place:
    """Where rows are: a Hub data set or a local path, with what `datasets.load_dataset` needs to find them.

    `files` and `format` name files inside it, for data sets that are not loadable as a whole.
    """

    name: str
    hub: str | None = None
    path: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    format: str | None = None
    files: list[str] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name {self.name!r}: use letters, digits, '.', '_' and '-'")
        if (self.hub is None) == (self.path is None):
            raise ValueError(f"{self.name}: give either hub (owner/name) or path (a local folder)")
        if (self.files is None) != (self.format is None):
            raise ValueError(f"{self.name}: files needs format (json, parquet), and format needs files")


@dataclass(kw_only=True)
class Source(Place):
    """A data set of a mixture: how much of it, under which licence, and which columns hold the prompt.

    fields: one of `messages` (a column of role/content), `conversations` (ShareGPT's from/value) and `prompt` (a column, or
    a text with {column} in it); besides `system` and `tools` (columns) and `drop_system: true`.
    """

    license: str
    domain: str
    weight: float
    fields: dict[str, Any]
    what: str
    note: str = ""
    checked: str = ""
    min_chars: int = 1
    max_chars: int = 32_000

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.fields) - FIELDS
        if unknown:
            raise ValueError(f"{self.name}: unknown field {sorted(unknown)[0]!r}; known: {', '.join(sorted(FIELDS))}")
        if len({"messages", "conversations", "prompt"} & set(self.fields)) != 1:
            raise ValueError(f"{self.name}: fields must have exactly one of messages, conversations and prompt")
        for name, value in self.fields.items():
            if not isinstance(value, bool if name == "drop_system" else str):
                raise ValueError(f"{self.name}: fields.{name} = {value!r} has the wrong type; a column is a text")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"{self.name}: weight {self.weight} must be above 0; take the source out instead")


@dataclass(kw_only=True)
class Benchmark(Place):
    """A benchmark: `text` are the columns that hold its prompts."""

    text: list[str]


@dataclass(kw_only=True)
class Mixture:
    """Sources in order and how many rows to take of them together."""

    name: str
    rows: int
    sources: list[Source]


def shipped() -> list[str]:
    """Names of the mixtures that come with the package."""
    return sorted(p.stem for p in MIXTURES.glob("*.yaml") if p != BENCHMARKS)


def load_mixture(name: str) -> Mixture:
    """A shipped mixture by name, or a YAML file. Raises ValueError naming the entry and key that is wrong."""
    path = Path(name)
    if not path.is_file():
        path = MIXTURES / f"{name}.yaml"
        if name not in shipped():
            raise ValueError(
                f"mixture {name}: no such file, and shipped are {', '.join(shipped())}{nearest(name, shipped())}"
            )
    content = _read_yaml(path, {"rows", "sources"})
    if not fits(content["rows"], int) or content["rows"] < 1:
        raise ValueError(f"{path}: rows {content['rows']!r} is not a positive number")
    sources = [_typed(Source, entry, f"{path}: source {number}") for number, entry in enumerate(content["sources"], 1)]
    _check_names(path, sources)
    return Mixture(name=path.stem, rows=content["rows"], sources=sources)


def load_benchmarks(path: Path = BENCHMARKS) -> list[Benchmark]:
    """The benchmarks of a YAML file."""
    content = _read_yaml(path, {"benchmarks"})
    found = [_typed(Benchmark, e, f"{path}: benchmark {number}") for number, e in enumerate(content["benchmarks"], 1)]
    _check_names(path, found)
    return found


def _read_yaml(path: Path, keys: set[str]) -> dict[str, Any]:
    """A mapping with these keys; all but `rows` hold lists."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or set(content) != keys:
        raise ValueError(f"{path}: must have exactly the keys {', '.join(sorted(keys))}")
    for key in keys - {"rows"}:
        if not isinstance(content[key], list):
            raise ValueError(f"{path}: {key} must be a list of mappings")
    return content


def _typed(cls: type, entry: Any, where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a mapping of keys")
    check_keys(entry, list(known), f"{where} ({entry.get('name')})")
    required = [f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in entry]
    if missing:
        raise ValueError(f"{where} ({entry.get('name')}): has no {missing[0]}")
    for name, kind in get_type_hints(cls).items():
        if name in entry and not fits(entry[name], kind):
            raise ValueError(
                f"{where} ({entry.get('name')}): {name} = {entry[name]!r} has the wrong type; compare with general.yaml"
            )
    return cls(**entry)


def _check_names(path: Path, entries: list[Any]) -> None:
    twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: the name {twice[0]!r} is used twice")


def without(mixture: Mixture, names: Iterable[str]) -> Mixture:
    """The mixture without some of its sources; the others share their weight."""
    names = list(names)
    _known(names, [s.name for s in mixture.sources], "--without")
    rest = [source for source in mixture.sources if source.name not in names]
    if not rest:
        raise ValueError(f"mixture {mixture.name}: no source is left")
    return dataclasses.replace(mixture, sources=rest)


def _known(names: Iterable[str], known: list[str], option: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name}: not one of {', '.join(known)}")


def check_licenses(mixture: Mixture, allowed: Iterable[str] = ()) -> None:
    """Raise ValueError for sources under a licence that restricts use (share-alike, non-commercial, none stated)."""
    allowed = PERMISSIVE | set(allowed)
    refused = [source for source in mixture.sources if source.license not in allowed]
    if refused:
        lines = [f"  {s.name}: {s.license}; --without {s.name}, or --allow-license {s.license}" for s in refused]
        raise ValueError(
            f"mixture {mixture.name} has sources whose licence restricts what may be done with the prompts:\n"
            + "\n".join(lines)
        )


def check_card(source: Source, tags: Iterable[str]) -> None:
    """Raise ValueError when the Hub card's licence (tags such as `license:mit`) is not the one that the mixture states."""
    stated = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    same = {CARD_SPELLING.get(name, name).lower() for name in stated}
    if stated and source.license.lower() not in same:
        raise ValueError(
            f"source {source.name}: the card of {source.hub} says licence {', '.join(stated)}, the mixture {source.license}; "
            "read the card and correct the mixture, or take the source out"
        )


def shares(mixture: Mixture, rows: int) -> dict[str, int]:
    """Rows of each source by weight, summing to `rows` (largest remainders)."""
    total = sum(source.weight for source in mixture.sources)
    exact = {source.name: rows * source.weight / total for source in mixture.sources}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: rows - sum(counts.values())]:
        counts[name] += 1
    return counts


def to_row(source: Source, row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(prompt row, whether it was cut before a tool result). Raises BadRow for a row without a usable prompt."""
    messages = _messages(source, row)
    cut = next((i for i, message in enumerate(messages) if message["role"] in TOOL_ROLES), None)
    if cut is not None:
        messages = messages[:cut]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise BadRow("no_prompt")
    system = [m for m in messages[:1] if m["role"] == "system"]
    rest = list(itertools.dropwhile(lambda m: m["role"] == "assistant", messages[len(system) :]))
    if any(m["role"] == "user" and not m["content"].strip() for m in rest):
        raise BadRow("empty_user_turn")
    messages = system + [{"role": m["role"], "content": "" if m["role"] == "assistant" else m["content"]} for m in rest]
    length = sum(len(m["content"]) for m in messages)
    if length < source.min_chars:
        raise BadRow("short_prompt")
    if length > source.max_chars:
        raise BadRow("long_prompt")
    found = {"id": "", "domain": source.domain, "messages": messages, "source": source.hub or source.path}
    found["license"] = source.license
    tools = _tools(row.get(source.fields["tools"])) if "tools" in source.fields else None
    if tools:
        found["tools"] = tools
    return found, cut is not None


def _messages(source: Source, row: dict[str, Any]) -> list[dict[str, Any]]:
    fields = source.fields
    if "prompt" in fields:
        messages = [{"role": "user", "content": _filled(fields["prompt"], row)}]
    else:
        column = fields.get("messages", fields.get("conversations"))
        if not isinstance(row[column], list) or not row[column]:
            raise BadRow("no_messages")
        messages, _ = find_messages({"messages": row[column]}, Counter())
    if fields.get("drop_system"):
        messages = [message for message in messages if message["role"] != "system"]
    if "system" in fields and isinstance(row[fields["system"]], str) and row[fields["system"]].strip():
        messages = [{"role": "system", "content": row[fields["system"]]}, *messages]
    return messages


def _filled(template: str, row: dict[str, Any]) -> str:
    """The prompt of a row: a column's text, or a text with {column} replaced."""
    names = re.findall(r"\{(\w+)\}", template) or [template]
    for name in names:
        if not isinstance(row[name], str) or not row[name].strip():
            raise BadRow("no_prompt")
    return re.sub(r"\{(\w+)\}", lambda match: row[match[1]], template) if "{" in template else row[template]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("bad_tools") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("bad_tools")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def columns_of(source: Source) -> list[str]:
    """The columns that a source's fields name."""
    fields = source.fields
    named = [fields[key] for key in ("messages", "conversations", "system", "tools") if key in fields]
    if "prompt" in fields:
        named += re.findall(r"\{(\w+)\}", fields["prompt"]) or [fields["prompt"]]
    return named


def resolve(place: Place) -> tuple[str | None, list[str]]:
    """(commit, card tags) of a Hub data set at its revision; of a local one (a hash of its files, none)."""
    if place.path is not None:
        return _content_hash(Path(place.path)), []
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(place.hub, revision=place.revision)
    return info.sha, list(info.tags or [])


def _content_hash(folder: Path) -> str:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {file_hash(path)}\n".encode())
    return "sha256:" + digest.hexdigest()


def open_rows(
    place: Place, revision: str | None, columns: list[str], shuffle: tuple[int, int] | None = None
) -> Iterator[dict]:
    """The rows of a data set, streamed with the named columns only; `shuffle` is (seed, buffer size).

    Raises ValueError when a column is missing.
    """
    from datasets import load_dataset

    name, options = place.path or place.hub, {"split": place.split, "streaming": True}
    if place.path is None:
        options["revision"] = revision
    if place.files is not None:
        root = place.path or f"hf://datasets/{place.hub}" + (f"@{revision}" if revision else "")
        name, options = (
            place.format,
            {**options, "data_files": {place.split: [f"{root}/{file}" for file in place.files]}},
        )
        options.pop("revision", None)
    elif place.config is not None:
        options["name"] = place.config
    rows = load_dataset(name, **options)
    known = rows.column_names or list(next(iter(rows), {}))  # JSON lines name their columns only when read
    missing = [column for column in columns if column not in known]
    if missing:
        raise ValueError(f"{place.name}: no column {missing[0]!r}; the columns are {', '.join(known)}")
    rows = rows.select_columns(columns)
    if shuffle is not None:
        rows = rows.shuffle(seed=shuffle[0], buffer_size=shuffle[1])
    for row in rows:
        yield {key: without_nulls(value) for key, value in row.items()}


def is_network(error: BaseException) -> bool:
    """Whether an error may go away by itself: no connection, a timeout, a busy server."""
    from huggingface_hub.utils import httpx

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:  # an answer, of httpx or in huggingface_hub's own class of errors
        return status in (408, 429) or status >= 500
    return isinstance(error, ConnectionError | TimeoutError | httpx.TransportError)


class Patience:
    """How often and how long to wait for the network: `retries` times, `wait`, 2 `wait`, 4 `wait` ... seconds."""

    def __init__(self, retries: int = 5, wait: float = 2.0, say: Callable[[str], None] = lambda text: None) -> None:
        check_range("retries", retries, 0, 16)  # the last of them waits 2**15 times as long as the first
        check_range("retry wait in seconds", wait, 0, 600)
        self.retries, self.wait, self.say = retries, wait, say

    def pause(self, failures: int, what: str, error: BaseException) -> None:
        """Sleep before the next attempt, or raise `error` when there is none."""
        if failures > self.retries or not is_network(error):
            raise error
        seconds = self.wait * 2 ** (failures - 1)
        self.say(f"{what}: {_short(error)}; attempt {failures + 1} in {seconds:g} s")
        time.sleep(seconds)

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """What `function` returns, trying again after network errors."""
        failures = 0
        while True:
            try:
                return function()
            except Exception as error:
                failures += 1
                self.pause(failures, what, error)

    def rows(self, what: str, function: Callable[[], Iterator[dict]]) -> Iterator[dict]:
        """The rows that `function` streams; after a network error it starts anew and skips what has been given."""
        given = failures = 0
        while True:
            try:
                for row in itertools.islice(function(), given, None):
                    yield row
                    given += 1
                    failures = 0
                return
            except Exception as error:
                failures += 1
                self.pause(failures, what, error)


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]


def texts(value: Any) -> list[str]:
    """The prompts in a benchmark's column: a string, a list of turns, or turns with a content."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return texts(value.get("content", value.get("value")))
    return [text for part in value for text in texts(part)] if isinstance(value, list) else []


def read_benchmarks(benchmarks: list[Benchmark], heldout: HeldOut, patience: Patience) -> dict[str, dict[str, Any]]:
    """Add every benchmark's prompts to `heldout`. Returns {name: rows and revision}.

    Raises ValueError naming each benchmark that cannot be loaded: a set that was not compared is not clean.
    """
    found, failed = {}, []
    for benchmark in benchmarks:
        try:
            revision, _ = patience.call(benchmark.name, lambda b=benchmark: resolve(b))
            rows = patience.rows(benchmark.name, lambda b=benchmark, r=revision: open_rows(b, r, b.text))
            count = 0
            for number, row in enumerate(rows, start=1):
                turns = [text for column in benchmark.text for text in texts(row[column]) if text.strip()]
                if turns:
                    heldout.add(turns, f"{benchmark.name}:{number}")
                    count += 1
            if not count:
                raise ValueError("it has no prompt")
        except Exception as error:
            failed.append(f"  {benchmark.name} ({benchmark.hub or benchmark.path}): {_short(error)}")
            if is_network(error):
                patience = Patience(0)  # the next ones get one attempt
            continue
        found[benchmark.name] = {"prompts": count, "revision": revision}
    if failed:
        raise ValueError(
            "benchmarks that cannot be loaded, so prompts cannot be compared with them:\n" + "\n".join(failed) + "\n"
            "mend the connection, accept a gated set's terms on the Hub (hf auth login), give the prompts as a file with "
            "--against, or leave a benchmark out with --skip-benchmark NAME"
        )
    return found


@dataclass(kw_only=True)
class Taken:
    """What a source gave: rows asked for, read and kept, and those dropped by reason."""

    asked: int
    read: int = 0
    kept: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    contaminated: list[str] = field(default_factory=list)
    revision: str | None = None

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {**vars(self), "dropped": dict(self.dropped.most_common())}


class Builder:
    """Takes rows from one source after the other; holds what they have in common, the prompts already taken."""

    def __init__(self, heldout: HeldOut, *, seed: int, buffer: int, patience: Patience) -> None:
        self.heldout, self.seed, self.buffer, self.patience = heldout, seed, buffer, patience
        self._seen: set[bytes] = set()

    def take(self, source: Source, revision: str | None, taken: Taken) -> Iterator[dict[str, Any]]:
        """Rows of a source until there are as many as asked for; `taken` is brought up to date with each."""
        columns, shuffle = columns_of(source), (self.seed, self.buffer)
        rows = self.patience.rows(source.name, lambda: open_rows(source, revision, columns, shuffle))
        for number, row in enumerate(rows, start=1):
            if taken.kept == taken.asked:
                break
            taken.read = number
            try:
                found, cut = to_row(source, row)
                self._check(found, taken, number)
            except BadRow as reason:
                taken.dropped[str(reason)] += 1
                continue
            taken.kept += 1
            taken.cut += cut
            yield found

    def _check(self, row: dict[str, Any], taken: Taken, number: int) -> None:
        """Raise BadRow for a prompt seen before or held out; else remember it and name the row after it."""
        digest, turns = self._digest(row)
        if digest in self._seen:
            raise BadRow("duplicate")
        hit = self.heldout.find(turns, [words_of(turn) for turn in turns])
        if hit is not None:
            taken.contaminated.append(f"row {number}: {hit[0]}: {hit[1]}")
            raise BadRow("contaminated")
        self._seen.add(digest)
        row["id"] = f"{row['domain']}-{digest.hex()}"

    def _digest(self, row: dict[str, Any]) -> tuple[bytes, list[str]]:
        parsed = parse_row("", json.dumps(row).encode())
        turns = [normalise(turn) for turn in parsed.turns]
        return prompt_digest(turns, parsed.context), turns

    def remember(self, line: bytes) -> None:
        """A row that an earlier run took."""
        self._seen.add(bytes.fromhex(json.loads(line)["id"].rpartition("-")[2]))


def build(
    mixture: Mixture,
    output: Path,
    *,
    rows: int | None = None,
    seed: int = 0,
    buffer: int = 10_000,
    allowed: Iterable[str] = (),
    against: Iterable[str | Path] = (),
    benchmarks: list[Benchmark] | None = None,
    skip: Iterable[str] = (),
    overlap: int = 13,
    patience: Patience | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the mixture's prompts to `output` and `<output>.manifest.json`; returns the manifest.

    Raises ValueError, naming it, for a licence that is not allowed, a benchmark or a source that cannot be loaded, and a
    result without rows. Sources that gave fewer rows than asked for are reported, not replaced.
    """
    check_output(output, against)
    check_licenses(mixture, allowed)
    patience = patience or Patience(say=say)
    benchmarks = load_benchmarks() if benchmarks is None else benchmarks
    skip = list(skip)
    _known(skip, [b.name for b in benchmarks], "--skip-benchmark")
    rows = mixture.rows if rows is None else rows
    check_range("rows", rows, 1, MOST_ROWS)
    check_range("seed", seed, 0, 2**63 - 1)
    check_range("buffer", buffer, 1, MOST_ROWS)
    asked = shares(mixture, rows)
    parts = output.with_name(output.name + ".parts")
    with atomic_file(output) as stream:  # from the first moment, so that two runs do not share the parts
        heldout = read_heldout(against, overlap)
        compared = read_benchmarks([b for b in benchmarks if b.name not in skip], heldout, patience)
        builder = Builder(heldout, seed=seed, buffer=buffer, patience=patience)
        key = hashlib.sha256(repr((seed, buffer, heldout.digest())).encode()).hexdigest()
        taken: dict[str, Taken] = {}
        content = hashlib.sha256()
        for source in mixture.sources:
            revision = _resolved(source, patience)
            key = hashlib.sha256(repr((key, source, asked[source.name], revision)).encode()).hexdigest()
            part = parts / f"{source.name}.jsonl"
            account = _finished(part, key, builder)
            if account is None:
                account = _take(builder, source, asked[source.name], revision, part, key)
            taken[source.name] = account
            say(_line(source, account))
            for _, line in read_lines([part]):
                stream.write(line + b"\n")
                content.update(line + b"\n")
        if not any(account.kept for account in taken.values()):
            raise ValueError(f"mixture {mixture.name}: no row is left; the lines above say why")
        manifest = _manifest(mixture, taken, seed=seed, buffer=buffer, overlap=overlap)
        manifest |= {"against": [str(p) for p in against], "benchmarks": compared, "skipped_benchmarks": sorted(skip)}
        manifest["sha256"] = content.hexdigest()
        manifest["template_runs_ignored"] = heldout.template_runs
    write_json(output.with_name(output.name + ".manifest.json"), manifest)
    shutil.rmtree(parts)
    return manifest


def _resolved(source: Source, patience: Patience) -> str | None:
    try:
        revision, tags = patience.call(source.name, lambda: resolve(source))
    except Exception as error:
        raise ValueError(_unloadable(source, error)) from error
    check_card(source, tags)
    return revision


def _unloadable(source: Source, error: Exception) -> str:
    return (
        f"source {source.name} ({source.hub or source.path}) cannot be loaded: {_short(error)}; "
        f"mend that and run the same command again, or leave it out with --without {source.name}"
    )


def _take(builder: Builder, source: Source, asked: int, revision: str | None, part: Path, key: str) -> Taken:
    account = Taken(asked=asked, revision=revision)
    try:
        with atomic_file(part) as stream:
            for row in builder.take(source, revision, account):
                stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    except Exception as error:
        raise ValueError(_unloadable(source, error)) from error
    write_json(part.with_suffix(".json"), {"key": key, "account": account.as_json()})
    return account


def _finished(part: Path, key: str, builder: Builder) -> Taken | None:
    """The account of a source that an earlier run finished under the same conditions."""
    note = part.with_suffix(".json")
    if not note.is_file() or not part.is_file():
        return None
    found = json.loads(note.read_text())
    if found["key"] != key:
        return None
    for _, line in read_lines([part]):
        builder.remember(line)
    account = found["account"]
    return Taken(**{**account, "dropped": Counter(account["dropped"])})


def _line(source: Source, account: Taken) -> str:
    dropped = ", ".join(f"{count} {reason}" for reason, count in account.dropped.most_common())
    short = (
        f"; {account.asked - account.kept} fewer than asked for: it has no more" if account.kept < account.asked else ""
    )
    return f"{source.name}: {account.kept} rows of {account.read} read" + (f" ({dropped})" if dropped else "") + short


def _manifest(mixture: Mixture, taken: dict[str, Taken], **settings: Any) -> dict[str, Any]:
    import datasets

    rows = sum(account.kept for account in taken.values())
    domains, licenses, dropped = Counter(), Counter(), Counter()
    sources = []
    for source in mixture.sources:
        account = taken[source.name]
        domains[source.domain] += account.kept
        licenses[source.license] += account.kept
        dropped += account.dropped
        place = {"hub": source.hub, "path": source.path, "config": source.config, "split": source.split}
        about = {"name": source.name, **place, "license": source.license, "note": source.note}
        sources.append({**about, **account.as_json()})
    return {
        "mixture": mixture.name,
        "rows": rows,
        **settings,
        "domains": dict(domains.most_common()),
        "licenses": dict(licenses.most_common()),
        "dropped": dict(dropped.most_common()),
        "sources": sources,
        "datasets_version": datasets.__version__,
    }


def describe(mixture: Mixture) -> str:
    """The mixture as a Markdown table."""
    lines = ["| source | data set | licence | domain | rows | what it is |", "|---|---|---|---|---|---|"]
    asked = shares(mixture, mixture.rows)
    for s in mixture.sources:
        where = f"[{s.hub}](https://huggingface.co/datasets/{s.hub})" if s.hub else f"`{s.path}`"
        where += f" `{s.config}`" if s.config else ""
        pin = f"@{s.revision[:7]}" if s.revision else "newest"
        what = " ".join(part for part in (f"{s.what}.", s.note) if part)
        checked = f" *{s.checked}*" if s.checked else ""
        lines.append(
            f"| {s.name} | {where} `{s.split}` {pin} | {s.license} | {s.domain} | {asked[s.name]:,} | {what}{checked} |"
        )
    return "\n".join(lines)


def enough() -> str:
    """What is published about how many rows a drafter needs, as text."""
    width = max(len(rows) for rows, _ in EVIDENCE)
    return "\n".join(f"  {rows:>{width}}  {what}" for rows, what in EVIDENCE)
