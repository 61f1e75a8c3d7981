"""The sources of a recipe -> tokenised documents, made once and found again.

What is made is kept in `cache_dir` under a key of everything that decides the result: the content of the files, template, arguments,
tokenizer, lengths, the code here and the libraries. Processes that want the same data wait on a file lock, not in a collective, which
would time out: the first one makes it, all of them map it. The result does not depend on the number of workers.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from dflash_train import ranks
from dflash_train.assets import resolve
from dflash_train.config.schema import DataConfig, LongDocuments
from dflash_train.config.sources import Source, read_sources
from dflash_train.data.answers import SpansNotFound
from dflash_train.data.chat import check_supervised, tokenize
from dflash_train.data.corpus import Corpus, CorpusWriter, Damaged
from dflash_train.data.files import Located, content_hash, locate, signature
from dflash_train.data.provenance import Expected, compare_provenance, origin_of
from dflash_train.data.read import Kept, iter_conversations
from dflash_train.data.template import NotEncodable, Template, template_hash, tokenizer_hash
from dflash_train.data.workers import spread
from dflash_train.types import Conversation, TokenizedExample

# The files whose code decides what a row becomes; a change of any of them makes new data.
CODE = (
    "answers.py", "chat.py", "corpus.py", "files.py", "layouts.py", "prepare.py", "provenance.py", "read.py", "template.py", "windows.py",
)  # fmt: skip
# As it was when this process began, whatever happens to the files later.
CODE_HASH = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in CODE)).hexdigest()[:16]
CHUNK_ROWS = 128
ROWS_FOR_WORKERS = 8000  # below, starting a process (seconds of imports) costs more than it saves
MOST_WORKERS = 16
SECONDS_PER_NOTE = 30


def located_sources(entries: list[Any], what: str) -> list[Source]:
    """The entries of `data.train` or `data.heldout` as Sources, with "embedded" replaced by where the package keeps it."""
    named = read_sources(entries, f"data.{what}")
    return [dataclasses.replace(source, path=resolve(source.path, what)) for source in named]


def prepare(
    sources: list[Source],
    template: Template,
    data: DataConfig,
    *,
    what: str,
    vocab_size: int | None,
    limit: int | None = None,
) -> Corpus:
    """The documents of `sources` in their order, and what became of the rows.

    what: `train` or `heldout`, for messages; only training documents are made into windows. vocab_size: that of the target, None
    where it is not known. Raises ValueError for what cannot be read, for token ids that the target does not have, and for a cache
    folder that cannot be written. Whether enough rows can be used is for `examine` to say.
    """
    located = [locate(source.path) for source in sources]
    before = [signature(place) for place in located]
    window_overlap = None
    if data.long_documents is LongDocuments.window and what == "train":
        window_overlap = data.max_length // 4 if data.window_overlap is None else data.window_overlap
    options = {
        "chat_template_kwargs": data.chat_template_kwargs,
        "reasoning_rows": data.reasoning_rows,
        "max_length": data.max_length,
        "drop_truncated": data.drop_truncated,
        "window_overlap": window_overlap,
    }
    inputs = key_inputs(located, template, options, limit)
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]

    def make(folder: Path) -> None:
        started = time.perf_counter()
        documents = _make(folder, sources, template, vocab_size, options, limit, data, what)
        if [signature(place) for place in located] != before:
            raise ValueError(f"data.{what}: a file was written while it was read; start again when it is complete")
        print(f"{what}: {documents:,} documents tokenised in {time.perf_counter() - started:.1f} s", flush=True)

    if ranks.is_rank0():
        told = ", ".join(f"{name} {_short(value)}" for name, value in inputs.items())
        print(f"{what}: tokenised data {key} of {told}", flush=True)
    if data.cache_dir is None:
        folder = Path(tempfile.mkdtemp(prefix="dflash_train-"))
        try:
            make(folder)
            return Corpus(folder, sources)  # mapped, so it stays when its name is gone
        finally:
            shutil.rmtree(folder)
    corpus = _kept_in(_home_of(data.cache_dir), key, sources, make)
    # It may have been made where the target was not known.
    _check_range(corpus, corpus.header["highest"], template, vocab_size, what)
    return corpus


def key_inputs(
    located: list[Located], template: Template, options: dict[str, Any], limit: int | None
) -> dict[str, Any]:
    """Everything that decides what the documents are, as JSON."""
    return {
        "content": [content_hash(place)[:16] for place in located],
        "tokenizer": tokenizer_hash(template.tokenizer),
        "template": template_hash(template.tokenizer, {}),
        "stops": sorted(template.stops),
        **options,
        "reasoning_rows": options["reasoning_rows"].value,
        "limit": limit,
        "code": CODE_HASH,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def _short(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")


def check_token_ids(c: Conversation, vocab_size: int, target: str) -> None:
    """Raise ValueError for a row whose token ids the target does not have: another tokenizer made them."""
    turns = c.metadata.get("turn_ids", [])
    given = [c.prompt_ids, c.response_ids, *(turn[key] for turn in turns for key in ("prompt_ids", "response_ids"))]
    highest = max((max(ids) for ids in given if ids), default=0)
    if highest >= vocab_size:
        raise ValueError(
            f"{c.source}: token id {highest} is outside the vocabulary of {target}, [0, {vocab_size}): "
            "the row was made with another tokenizer; regenerate it with this target"
        )


def examine(corpus: Corpus, data: DataConfig, expected: Expected, what: str) -> tuple[list[str], list[str]]:
    """(what is to be said about the rows, what they are refused for)."""
    notes: list[str] = []
    problems: list[str] = []

    def tell() -> None:
        notes.extend(compare_provenance(corpus.origins, expected, what=what))

    def usable() -> None:
        if corpus.error is not None:
            raise ValueError(corpus.error)

    for check in (tell, usable, lambda: corpus.kept.check(data.max_dropped), lambda: check_supervised(corpus, what)):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return notes, problems


# --- making ---


@dataclass(kw_only=True)
class _Done:
    """What a chunk of rows became. kept: rejections and notes alone; error: why the first row without documents has none."""

    examples: list[TokenizedExample] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    error: str | None = None


def tokenize_chunk(chunk: list[tuple[int, Conversation]], template: Template, options: dict[str, Any]) -> _Done:
    """Documents of (source number, conversation) pairs. A row whose spans cannot be found, or that has no tokens, is rejected."""
    done = _Done()
    for number, conversation in chunk:
        try:
            found = tokenize(conversation, template, kept=done.kept, **options)
        except SpansNotFound as error:
            done.kept.reject("spans_not_found", conversation.source)
            done.error = done.error or str(error)
            continue
        except NotEncodable as error:
            done.kept.reject("not_encodable", conversation.source)
            done.error = done.error or f"row {conversation.id} ({conversation.source}): {error}"
            continue
        done.examples += found
        done.sources += [number] * len(found)
    return done


def _make(
    folder: Path,
    sources: list[Source],
    template: Template,
    vocab_size: int | None,
    options: dict[str, Any],
    limit: int | None,
    data: DataConfig,
    what: str,
) -> int:
    """Write the documents into a folder; returns how many."""
    paths = [source.path for source in sources]
    read, after = Kept(), Kept()
    rows, origins = Counter[int](), Counter[str]()
    writer, first, noted = CorpusWriter(folder), None, time.perf_counter()
    chunks = _chunks(_counted(iter_conversations(paths, read, limit=limit), template, vocab_size, rows, origins))
    chunks, workers = _share(chunks, data)
    tokenised = spread(partial(tokenize_chunk, template=template, options=options), chunks, workers)
    with closing(tokenised):  # whatever happens, no process is left
        for done in tokenised:
            writer.add(done.examples, done.sources)
            _check_range(done.examples, writer.highest, template, vocab_size, what)
            after.add(done.kept)
            first = first or done.error
            if time.perf_counter() - noted > SECONDS_PER_NOTE:
                noted = time.perf_counter()
                print(f"{what}: {writer.documents:,} documents tokenised so far, in {workers} processes", flush=True)
    read.add(after)
    # An odd row among good ones is counted; where no row at all gives a document, the template is at fault.
    error = None if writer.documents else first
    rows_of = [rows[i] for i in range(len(sources))]
    writer.finish_with(read, paths=paths, rows=rows_of, origins=origins, error=error)
    return writer.documents


def _counted(
    found: Iterator[tuple[int, Conversation]],
    template: Template,
    vocab_size: int | None,
    rows: Counter[int],
    origins: Counter[str],
) -> Iterator[tuple[int, Conversation]]:
    """The same conversations, checked and counted, without what tokenising does not need."""
    for number, conversation in found:
        if vocab_size is not None:
            check_token_ids(conversation, vocab_size, template.tokenizer.name_or_path)
        rows[number] += 1
        origins[origin_of(conversation)] += 1
        metadata = conversation.metadata
        conversation.metadata = {key: metadata[key] for key in ("turn_ids",) if key in metadata}
        yield number, conversation


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(items, CHUNK_ROWS)):
        yield chunk


def _share(chunks: Iterator[list[Any]], data: DataConfig) -> tuple[Iterator[list[Any]], int]:
    """(the same chunks, number of processes). Reads ahead until it knows whether there is work for several."""
    if data.workers is not None:
        return chunks, data.workers
    most = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    if data.cache_dir is None:  # then every rank of this machine tokenises for itself
        most = max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    ahead = list(itertools.islice(chunks, ROWS_FOR_WORKERS // CHUNK_ROWS)) if most > 1 else []
    enough = len(ahead) == ROWS_FOR_WORKERS // CHUNK_ROWS
    return itertools.chain(ahead, chunks), most if enough else 1


def _check_range(
    examples: Iterable[TokenizedExample], highest: int, template: Template, vocab_size: int | None, what: str
) -> None:
    """Raise ValueError for the first document with a token that the target does not have. highest: of all their tokens."""
    if vocab_size is not None and highest >= vocab_size:
        e = next(e for e in examples if e.token_ids.max() >= vocab_size)
        raise ValueError(
            f"{what} row {e.id}: the tokenizer of {template.tokenizer.name_or_path} gives token id {e.token_ids.max()}, but the target's "
            f"embedding has only {vocab_size} rows; use the tokenizer that belongs to the target"
        )


# --- keeping ---


def _home_of(cache_dir: str) -> Path:
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError:  # a container's user without an account, and no HOME
        raise ValueError(
            f"data.cache_dir = {cache_dir}: this user has no home folder; set HOME, name a folder that can be written, or null"
        ) from None


def _kept_in(cache: Path, key: str, sources: list[Source], make: Any) -> Corpus:
    """The documents under a key, made by whoever gets the lock first."""
    folder = cache / key
    found = _open(folder, sources)
    if found is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache / f"{key}.lock"):
                found = _open(folder, sources, say=True)
                if found is None:
                    _put(folder, make)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).is_relative_to(cache):
                raise  # about the data itself
            raise ValueError(
                f"data.cache_dir = {cache}: {error.strerror or error}; name a folder that can be written, or null"
            ) from error
    return found or Corpus(folder, sources)


def _open(folder: Path, sources: list[Source], say: bool = False) -> Corpus | None:
    """What is there, or None where it has to be made."""
    if not folder.exists():
        return None
    try:
        return Corpus(folder, sources)
    except Damaged as error:
        if say:
            print(f"tokenised data {folder} is damaged ({error}): it is made again", flush=True)
        return None


def _put(folder: Path, make: Any) -> None:
    """Make the folder under another name first, so that it is never seen half written."""
    for old in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(old)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        make(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock; it is free again when the process ends, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if ranks.is_rank0():
                print(f"waiting for another process that tokenises the same data ({path})", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
