"""The sources of a recipe -> tokenised documents, made once and found again.

What is made is kept in `cache_dir` under a key of everything that decides the result: the content of the files, template, arguments,
tokenizer, lengths, the code here and the libraries. Processes that want the same data wait on a file lock, not in a collective, which
would time out: the first one makes it, all of them map it. The result does not depend on the number of workers.
"""

from __future__ import annotations

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
from dflash_train.config.schema import DataConfig, LongDocuments
from dflash_train.config.sources import Source
from dflash_train.data.chat import template_hash, tokenize_or_reject
from dflash_train.data.corpus import Corpus, CorpusWriter, Damaged
from dflash_train.data.files import Located, content_hash, locate, signature
from dflash_train.data.read import Kept, iter_conversations
from dflash_train.data.workers import spread
from dflash_train.types import Conversation, TargetInfo, TokenizedExample

# The files whose code decides what a row becomes; a change of any of them makes new data.
CODE = ("chat.py", "corpus.py", "files.py", "layouts.py", "prepare.py", "read.py", "windows.py")
# As it was when this process began, whatever happens to the files later.
CODE_HASH = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in CODE)).hexdigest()[:16]
CHUNK_ROWS = 128
ROWS_FOR_WORKERS = 8000  # below, starting a process (seconds of imports) costs more than it saves
MOST_WORKERS = 16
SECONDS_PER_NOTE = 30


def prepare(
    sources: list[Source], tokenizer: Any, info: TargetInfo, data: DataConfig, *, what: str, limit: int | None = None
) -> Corpus:
    """The documents of `sources` in their order, and what became of the rows.

    what: `train` or `heldout`, for messages; only training documents are made into windows. Raises ValueError for what cannot be read,
    for token ids that the target does not have, for a cache folder that cannot be written, and SpansNotFound where no row can be used.
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
    inputs = key_inputs(located, tokenizer, info, options, limit)
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]

    def make(folder: Path) -> None:
        started = time.perf_counter()
        documents = _make(folder, sources, tokenizer, info, options, limit, data, what)
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
    return _kept_in(Path(data.cache_dir).expanduser(), key, sources, make)


def key_inputs(
    located: list[Located], tokenizer: Any, info: TargetInfo, options: dict[str, Any], limit: int | None
) -> dict[str, Any]:
    """Everything that decides what the documents are, as JSON."""
    tokenizer("", add_special_tokens=False)  # the first call takes truncation and padding out of the backend's state
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(json.dumps([type(tokenizer).__name__, tokenizer.special_tokens_map], default=str).encode())
    return {
        "content": [content_hash(place)[:16] for place in located],
        "tokenizer": digest.hexdigest()[:16],
        "template": template_hash(tokenizer, {}),
        **options,
        "reasoning_rows": options["reasoning_rows"].value,
        "limit": limit,
        "vocab_size": info.vocab_size,
        "code": CODE_HASH,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def _short(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")


def check_token_ids(conversations: Iterable[Conversation], info: TargetInfo) -> None:
    """Raise ValueError for a row whose token ids the target does not have: another tokenizer made them."""
    for c in conversations:
        turns = c.metadata.get("turn_ids", [])
        given = [c.prompt_ids, c.response_ids, *(turn[key] for turn in turns for key in ("prompt_ids", "response_ids"))]
        highest = max((max(ids) for ids in given if ids), default=0)
        if highest >= info.vocab_size:
            raise ValueError(
                f"{c.source}: token id {highest} is outside the vocabulary of {info.path}, [0, {info.vocab_size}): "
                "the row was made with another tokenizer; regenerate it with this target"
            )


# --- making ---


@dataclass(kw_only=True)
class _Done:
    """What a chunk of rows became. kept: rejections and notes alone; error: why the first row without spans has none."""

    examples: list[TokenizedExample] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    error: Exception | None = None


def tokenize_chunk(chunk: list[tuple[int, Conversation]], tokenizer: Any, options: dict[str, Any]) -> _Done:
    """Documents of (source number, conversation) pairs."""
    done = _Done()
    for number, conversation in chunk:
        found, error = tokenize_or_reject(conversation, tokenizer, kept=done.kept, **options)
        done.examples += found
        done.sources += [number] * len(found)
        done.error = done.error or error
    return done


def _make(
    folder: Path,
    sources: list[Source],
    tokenizer: Any,
    info: TargetInfo,
    options: dict[str, Any],
    limit: int | None,
    data: DataConfig,
    what: str,
) -> int:
    """Write the documents into a folder; returns how many."""
    paths = [source.path for source in sources]
    read, after = Kept(), Kept()
    rows, generators = Counter[int](), Counter[str]()
    writer, first, noted = CorpusWriter(folder), None, time.perf_counter()
    chunks = _chunks(_counted(iter_conversations(paths, read, limit=limit), info, rows, generators))
    chunks, workers = _share(chunks, data)
    tokenised = spread(partial(tokenize_chunk, tokenizer=tokenizer, options=options), chunks, workers)
    with closing(tokenised):  # whatever happens, no process is left
        for done in tokenised:
            _check_range(done.examples, info, what)
            writer.add(done.examples, done.sources)
            after.add(done.kept)
            first = first or done.error
            if time.perf_counter() - noted > SECONDS_PER_NOTE:
                noted = time.perf_counter()
                print(f"{what}: {writer.documents:,} documents tokenised so far, in {workers} processes", flush=True)
    if first is not None and not writer.documents:
        raise first
    read.add(after)
    made_by = [[*json.loads(text), count] for text, count in generators.items()]
    rows_of = [rows[i] for i in range(len(sources))]
    writer.finish_with(read, paths=paths, rows=rows_of, generators=made_by)
    return writer.documents


def _counted(
    found: Iterator[tuple[int, Conversation]], info: TargetInfo, rows: Counter[int], generators: Counter[str]
) -> Iterator[tuple[int, Conversation]]:
    """The same conversations, checked and counted, without what tokenising does not need."""
    for number, conversation in found:
        check_token_ids([conversation], info)
        rows[number] += 1
        metadata = conversation.metadata
        if isinstance(metadata.get("generator"), dict):
            made_by = metadata["generator"]
            told = [made_by.get(name) for name in ("model", "template_hash", "chat_template_kwargs")]
            generators[json.dumps(told, sort_keys=True)] += 1
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


def _check_range(examples: list[TokenizedExample], info: TargetInfo, what: str) -> None:
    for e in examples:
        if e.token_ids.max() >= info.vocab_size:
            raise ValueError(
                f"{what} row {e.id}: the tokenizer of {info.path} gives token id {e.token_ids.max()}, but its embedding has only "
                f"{info.vocab_size} rows; use the tokenizer that belongs to the target"
            )


# --- keeping ---


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
