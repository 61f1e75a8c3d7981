"""Tokenised documents in a folder, mapped into memory: a sequence of TokenizedExamples that are made when they are asked for.

tokens.bin    int32, all documents one after the other
masks.bin     one bit per token, 1 where supervised; each document begins at a byte
ids.bin       UTF-8, one after the other
NAME.bin      a column of one number per document, see COLUMNS
header.json   everything else, with size and checksum of each file
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.config.sources import Source
from dflash_train.data.read import Kept
from dflash_train.types import TokenizedExample

# length and supervised in tokens; source, domain, finish index a list; id_length in bytes.
COLUMNS = {"length": "<i4", "supervised": "<i4", "source": "<i4", "domain": "<i4", "finish": "<i4", "id_length": "<i4"}
STREAMS = ("tokens", "masks", "ids")
SLICE = 2**22
FIRST_BIT = np.array([8, *(8 - value.bit_length() for value in range(1, 256))])  # of a byte, from its highest


class Damaged(Exception):
    """A folder that is not what its writer left; the text says why."""


class CorpusWriter:
    """Writes a folder that `Corpus` reads. Holds no tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.streams = {name: (folder / f"{name}.bin").open("wb") for name in (*STREAMS, *COLUMNS)}
        self.digest = hashlib.sha256()
        self.domains: dict[str, int] = {}
        self.finish: dict[str, int] = {}
        self.documents, self.highest = 0, 0

    def add(self, examples: Iterable[TokenizedExample], sources: Iterable[int]) -> None:
        """Append documents, each with the number of its source."""
        columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
        for example, source in zip(examples, sources, strict=True):
            name = example.id.encode()
            self.streams["tokens"].write(example.token_ids.astype("<i4").tobytes())
            self.streams["masks"].write(np.packbits(example.supervised).tobytes())
            self.streams["ids"].write(name)
            feed(self.digest, example)
            row = (
                len(example.token_ids),
                int(example.supervised.sum()),
                source,
                self.domains.setdefault(example.domain, len(self.domains)),
                self.finish.setdefault(example.finish_reason, len(self.finish)),
                len(name),
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            self.documents, self.highest = self.documents + 1, max(self.highest, int(example.token_ids.max()))
        for name, values in columns.items():
            self.streams[name].write(np.array(values, COLUMNS[name]).tobytes())

    def finish_with(self, kept: Kept, **more: Any) -> None:
        """Close the files and write the header; `more` is JSON that the reader gets back in `Corpus.header`."""
        for stream in self.streams.values():
            stream.close()
        files = {name: _size_and_checksum(self.folder / f"{name}.bin") for name in self.streams}
        body = {
            **more,
            "documents": self.documents,
            "highest": self.highest,
            "domains": list(self.domains),
            "finish_reasons": list(self.finish),
            "fingerprint": self.digest.hexdigest()[:16],
            "kept": {"kept": kept.kept, "dropped": kept.dropped, "examples": kept.examples, "notes": kept.notes},
            "files": files,
        }
        text = json.dumps(body)
        header = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}
        (self.folder / "header.json").write_text(json.dumps(header))


class Corpus(Sequence[TokenizedExample]):
    """The documents of a folder. Raises Damaged where the folder is not whole.

    lengths, supervised_counts, source_of: int (documents,). sources: as given, their domains win over the rows'. kept: what became
    of the rows, with places in the files as they are named now. origins: who wrote the rows (`provenance.origin_of`), counted.
    error: why no row can be used, where the first of them is to blame.
    """

    def __init__(self, folder: Path, sources: list[Source]) -> None:
        self.header = header = _header(folder)
        column = {name: _checked(folder, name, header) for name in (*STREAMS, *COLUMNS)}
        numbers = {name: column[name].view(kind) for name, kind in COLUMNS.items()}
        self.tokens, self._masks, self._ids = column["tokens"].view("<i4"), column["masks"], column["ids"]
        self.lengths = numbers["length"].astype(np.int64)
        self.supervised_counts = numbers["supervised"].astype(np.int64)
        self.source_of, self.sources = numbers["source"], sources
        self._domain, self._finish = numbers["domain"], numbers["finish"]
        self._at = _offsets(self.lengths)
        self._mask_at, self._id_at = _offsets((self.lengths + 7) // 8), _offsets(numbers["id_length"])
        whole = {len(values) for values in numbers.values()} == {header["documents"]}
        ends = (self._at[-1], self._mask_at[-1], self._id_at[-1])
        if not whole or ends != (len(self.tokens), len(self._masks), len(self._ids)):
            raise Damaged("its columns do not belong together")
        self.fingerprint: str = header["fingerprint"]
        moved = _Moved(header["paths"], [s.path for s in sources])
        self.kept = _kept(header["kept"], moved)
        self.origins: Counter[str] = Counter(header["origins"])
        self.error: str | None = header["error"] and moved(header["error"], "(")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        packed = self._masks[self._mask_at[i] : self._mask_at[i + 1]]
        domain = self.sources[self.source_of[i]].domain
        return TokenizedExample(
            id=self.name(i),
            domain=self.header["domains"][self._domain[i]] if domain is None else domain,
            token_ids=self.tokens[self._at[i] : self._at[i + 1]],
            supervised=np.unpackbits(packed, count=int(self.lengths[i])).view(bool),
            finish_reason=self.header["finish_reasons"][self._finish[i]],
        )

    def __iter__(self) -> Iterator[TokenizedExample]:
        return (self[i] for i in range(len(self)))

    def domains(self) -> tuple[list[str], np.ndarray]:
        """(names, which of them each document has)."""
        names, which = list(self.header["domains"]), self._domain.copy()
        for i, source in enumerate(self.sources):
            if source.domain is not None:
                names += [] if source.domain in names else [source.domain]
                which[self.source_of == i] = names.index(source.domain)
        return names, which

    def name(self, i: int) -> str:
        """The id of document i."""
        return self._ids[self._id_at[i] : self._id_at[i + 1]].tobytes().decode()

    def prompts(self) -> Iterator[bytes]:
        """Of each document the int32 bytes of what stands before its first supervised token."""
        set_bytes = np.flatnonzero(self._masks)
        at = set_bytes[np.searchsorted(set_bytes, self._mask_at[:-1])]  # every document has a supervised token
        first = (at - self._mask_at[:-1]) * 8 + FIRST_BIT[self._masks[at]]
        for begin, length in zip(self._at[:-1].tolist(), first.tolist(), strict=True):
            yield self.tokens[begin : begin + length].tobytes()

    def occurrences(self, token: int) -> tuple[int, int, str | None]:
        """(how often, in how many documents, id of the first of them) a token occurs."""
        found = [at + np.flatnonzero(self.tokens[at : at + SLICE] == token) for at in range(0, len(self.tokens), SLICE)]
        places = np.concatenate(found) if found else np.empty(0, np.int64)
        documents = np.unique(np.searchsorted(self._at, places, side="right") - 1)
        return len(places), len(documents), self.name(int(documents[0])) if len(documents) else None


# --- what is asked of any sequence of documents ---


def lengths_of(examples: Sequence[TokenizedExample]) -> np.ndarray:
    """int64 (documents,): tokens of each."""
    if isinstance(examples, Corpus):
        return examples.lengths
    return np.array([len(e.token_ids) for e in examples], np.int64)


def supervised_of(examples: Sequence[TokenizedExample]) -> np.ndarray:
    """int64 (documents,): supervised tokens of each."""
    if isinstance(examples, Corpus):
        return examples.supervised_counts
    return np.array([int(e.supervised.sum()) for e in examples], np.int64)


def fingerprint_of(examples: Sequence[TokenizedExample]) -> str:
    """16 hex digits of the documents' ids, tokens and masks, in order."""
    if isinstance(examples, Corpus):
        return examples.fingerprint
    digest = hashlib.sha256()
    for example in examples:
        feed(digest, example)
    return digest.hexdigest()[:16]


def feed(digest: Any, example: TokenizedExample) -> None:
    for part in (example.id.encode(), example.token_ids.astype(np.int32).tobytes(), example.supervised.tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)


def occurrences(examples: Sequence[TokenizedExample], token: int) -> tuple[int, int, str | None]:
    """As `Corpus.occurrences`."""
    if isinstance(examples, Corpus):
        return examples.occurrences(token)
    counts = [(e.id, int((e.token_ids == token).sum())) for e in examples]
    hit = [(name, n) for name, n in counts if n]
    return sum(n for _, n in hit), len(hit), hit[0][0] if hit else None


def weights_of(examples: Sequence[TokenizedExample]) -> np.ndarray:
    """float64 (documents,): passes over each per epoch."""
    if isinstance(examples, Corpus):
        return np.array([s.weight for s in examples.sources])[examples.source_of]
    return np.ones(len(examples))


# --- the folder ---


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / "header.json").read_text())
        body = header["body"]
        if hashlib.sha256(body.encode()).hexdigest() != header["sha256"]:
            raise Damaged("header.json has another checksum")
        return json.loads(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"header.json: {error}") from error


def _checked(folder: Path, name: str, header: dict[str, Any]) -> np.ndarray:
    """The bytes of a file, mapped, after comparing them with what the header says."""
    path = folder / f"{name}.bin"
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error
    expected = header["files"].get(name)
    if expected is None or size != expected[0]:
        raise Damaged(f"{path.name} has {size} bytes, not {expected and expected[0]}")
    if _checksum(data) != expected[1]:
        raise Damaged(f"{path.name} has another checksum")
    # A plain view: numpy's memmap class makes every slice slow.
    return data.view(np.ndarray)


def _size_and_checksum(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    return size, _checksum(np.memmap(path, np.uint8, mode="r")) if size else 0


def _checksum(data: np.ndarray) -> int:
    value = 0
    for at in range(0, len(data), SLICE):
        value = zlib.crc32(data[at : at + SLICE], value)
    return value


class _Moved:
    """Places under the paths that the sources had, as they are named now."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        self.pairs = [(before, now) for before, now in zip(old, new, strict=True) if before != now]

    def __call__(self, text: str, opening: str = "") -> str:
        """opening: what stands before the place in `text`; nothing where it begins with it."""
        for before, now in self.pairs:
            at = text.find(opening + before) + len(opening) if opening else 0
            end = at + len(before)
            if text[at:end] == before and text[end : end + 1] in (":", "[", "/"):
                return text[:at] + now + text[end:]
        return text


def _kept(saved: dict[str, Any], moved: _Moved) -> Kept:
    examples = {reason: [moved(p) for p in places] for reason, places in saved["examples"].items()}
    return Kept(kept=saved["kept"], dropped=Counter(saved["dropped"]), examples=examples, notes=Counter(saved["notes"]))
