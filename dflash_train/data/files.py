"""What an entry of `data.train` names -> JSON rows, each with its place. Nothing here looks at a row's fields.

An entry is a file of JSON lines or of one JSON array (plain, gzip or zstd: the content decides, not the name), a Parquet file, a folder
of such files, a folder that `datasets.save_to_disk` wrote, or a Hub data set `owner/name[:split]`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dflash_train.config.hub import check_place, hub_name

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]+)?")
DATA_FILES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")
# What the commands here write beside data: about it, not of it.
COMPANIONS = (".failed.jsonl", ".manifest.json", ".report.json")
RECORDS = ("split.json", "certificate.json")
NAMES_OF_FILES = {".jsonl", ".json", ".ndjson", ".gz", ".zst", ".parquet"}
LONGEST_LINE = 64 * 2**20
# Compressed bytes at a time: what they become is in memory at once, and a frame of zeros becomes 30,000 times as many.
ZSTD_INPUT = 2**12
# What a file of another kind begins with, and what to do about it.
STRANGERS = [
    (rb"PK\x03\x04", "is a zip archive; unpack it and name the file inside"),
    (rb"BZh[1-9]1AY", "is compressed with bzip2; unpack it, or compress it with gzip or zstd"),
    (rb"\xfd7zXZ", "is compressed with xz; unpack it, or compress it with gzip or zstd"),
    (rb"7z\xbc\xaf", "is a 7z archive; unpack it and name the file inside"),
    (
        rb"ARROW1|\xff\xff\xff\xff",
        "is an Arrow file; name the folder that save_to_disk wrote, or convert it to Parquet",
    ),
    (rb"version https://git-lfs", "is a Git LFS pointer, not the data; run git lfs pull where it came from"),
    (rb"(?i)\s*<(!doctype|html)", "is a web page, not data; download the file itself"),
    (rb"\xff\xfe|\xfe\xff|[\[{]\x00|\x00[\[{]", "is UTF-16 or UTF-32; write it as UTF-8"),
    (rb".{257}ustar", "is a tar archive; unpack it and name the files inside"),
]


@dataclass(kw_only=True)
class Located:
    """An entry, found. kind: `files` (line or Parquet files), `disk` (a save_to_disk folder) or `hub`.

    files: what has to stay the same for the rows to be the same, in the order of reading (none for `hub`).
    """

    entry: str
    kind: str
    files: list[Path]
    name: str = ""
    split: str | None = None


def locate(entry: str | Path) -> Located:
    """Find what an entry names. Raises ValueError for one that does not exist or holds no data."""
    text = str(entry)
    path = Path(text).expanduser()
    if path.is_file():
        return Located(entry=text, kind="files", files=[path])
    folder, _, split = text.rpartition(":") if not path.is_dir() and ":" in text else (text, "", "")
    at = Path(folder).expanduser()
    if at.is_dir():
        if any((at / name).is_file() for name in ("dataset_dict.json", "state.json")):
            files = sorted(p for p in at.rglob("*") if p.is_file())
            return Located(entry=text, kind="disk", files=files, name=str(at), split=split or None)
        if at == path:
            return Located(entry=text, kind="files", files=_listing(path))
    name, _, split = text.partition(":")
    if HUB_ID.fullmatch(text) and hub_name(name) and path.suffix not in NAMES_OF_FILES:
        return Located(entry=text, kind="hub", files=[], name=name, split=split or "train")
    raise ValueError(
        f"data file {entry} does not exist; correct the path, or write the file first (answers come from data_prep/regenerate.py, prompts from data_prep/prompts.py or you)"
    )


def _listing(folder: Path) -> list[Path]:
    """The data files in a folder and those below it, by name. Hidden files and what commands write about data are left out."""
    found = [
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file()
        and p.name.endswith(DATA_FILES)
        and not (p.name.endswith(COMPANIONS) or p.name in RECORDS)
        and not any(part.startswith((".", "_")) for part in p.relative_to(folder).parts)
    ]
    if not found:
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise ValueError(f"data folder {folder} has no file that ends in {', '.join(DATA_FILES)}; it holds {there}")
    return found


def signature(located: Located) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change) of each file: differs if one was written meanwhile."""
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in located.files]


def file_hash(path: Path) -> str:
    """sha256 of the bytes as they lie there; read once, unless the file changes."""
    about = path.stat()
    return _file_hash(path, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def names_within(located: Located) -> list[str]:
    """Of each file its path within the entry's folder; "" where the entry is the file."""
    base = Path(located.name or located.entry).expanduser()
    return [p.relative_to(base).as_posix() if base.is_dir() else "" for p in located.files]


def content_hash(located: Located) -> str:
    """64 hex digits of what the entry's rows are read from, whatever its path."""
    digest = hashlib.sha256()
    if located.kind == "hub":
        rows = _dataset(located)
        files = [Path(file["filename"]) for file in rows.cache_files]
        if not files:
            for _, row in _numbered(located.entry, rows):
                digest.update(row + b"\n")
        names = [p.name for p in files]
    else:
        files, names = located.files, names_within(located)
    digest.update(f"{located.kind} {located.split}\n".encode())
    for name, path in zip(names, files, strict=True):
        digest.update(f"{name} {file_hash(path)}\n".encode())
    return digest.hexdigest()


def rows(entry: str | Path) -> Iterator[tuple[str, bytes | str]]:
    """(place, JSON of a row), or (place, reason) for a row that cannot be read. Blank lines are no rows.

    A place is "file:line", "file[index]" in a JSON array, or "data set:number". Raises ValueError for what cannot be opened or is
    not whole.
    """
    located = locate(entry)
    if located.kind != "files":
        yield from _numbered(located.entry, _dataset(located))
        return
    for path in located.files:
        with path.open("rb") as stream:
            head = stream.read(4)
        if head == b"PAR1" or path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            yield from _json(path)


# --- tables ---


def _dataset(located: Located) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    if located.kind == "hub":
        check_place("data set", located.name, data=True)
    try:
        if located.kind == "hub":
            return load_dataset(located.name, split=located.split)
        found = load_from_disk(located.name)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"data set {located.entry} cannot be loaded: {reason}; give a JSONL or Parquet file, or owner/name:split"
        ) from error
    if not isinstance(found, DatasetDict):
        if located.split:
            raise ValueError(f"data set {located.entry}: it has no splits; leave out :{located.split}")
        return found
    split = located.split or "train"
    if split not in found:
        raise ValueError(f"data set {located.entry} has no split {split}; name one of {', '.join(found)} after a colon")
    return found[split]


def _parquet(path: Path) -> Iterator[tuple[str, bytes]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield from _numbered(str(path), (row for part in table.iter_batches(1024) for row in part.to_pylist()))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"data file {path} is not a whole Parquet file ({str(error).splitlines()[0]}); copy it again"
        ) from error


def _numbered(name: str, table: Any) -> Iterator[tuple[str, bytes]]:
    for number, row in enumerate(table, start=1):
        # Columns fill what a row does not have with nulls: a message without tool calls must not get the key.
        yield f"{name}:{number}", json.dumps(without_nulls(row), default=str).encode()


def without_nulls(value: Any) -> Any:
    """The same without the nulls in mappings."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


# --- JSON ---


def _json(path: Path) -> Iterator[tuple[str, bytes | str]]:
    """Rows of a file of JSON lines, or of one JSON array of objects."""
    import zstandard

    if path.suffix in (".csv", ".tsv"):
        raise ValueError(f"data file {path}: {path.suffix} files are not read; convert it to JSONL or Parquet")
    try:
        with _open(path) as stream:
            head = stream.peek(512)[:512]
            for pattern, remedy in STRANGERS:
                if re.match(pattern, head, re.DOTALL):
                    raise ValueError(f"data file {path} {remedy}")
            # Lines that are arrays of messages begin alike: their objects have a role.
            if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*(\{(?!\s*\"(role|from)\")|$)", head):
                yield from _array(path, stream)
            else:
                yield from _lines(path, stream)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"data file {path} is not a complete gzip file ({error}); copy it again") from error
    except zstandard.ZstdError as error:
        raise ValueError(f"data file {path} is not a complete zstd file ({error}); copy it again") from error


def _open(path: Path) -> io.BufferedReader:
    file = path.open("rb")
    head = file.peek(4)[:4]
    if head == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_Zstd(file))
    if head.startswith(b"\x1f\x8b"):
        file.close()
        return io.BufferedReader(gzip.open(path, "rb"))
    return file


class _Zstd(io.RawIOBase):
    """Decompressed frames of a file. The library's own reader takes a file that was cut off for one that ends there."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file, self._new = file, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._rest, self._error = self._new(), b"", zstandard.ZstdError
        self._ready = memoryview(b"")  # cut off piece by piece without being copied
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._rest or self._file.read(ZSTD_INPUT)
            if not data:
                if self._begun:
                    raise self._error("it ends in the middle of a frame")
                return 0
            self._ready, self._begun, self._rest = memoryview(self._frame.decompress(data)), True, b""
            if self._frame.eof:
                self._rest, self._frame, self._begun = self._frame.unused_data, self._new(), False
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(path: Path, stream: io.BufferedReader) -> Iterator[tuple[str, bytes | str]]:
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        place = f"{path}:{number}"
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield place, f"line_over_{LONGEST_LINE >> 20}_MiB"
        elif line.strip():
            # A machine that lost power leaves blocks of zeros where it had not written yet.
            yield place, "nul_bytes" if b"\x00" in line else line


def _array(path: Path, stream: io.BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Objects of one JSON array, without holding more than a few of them."""
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig")
    text, index, last = _read(path, reader, 2**20), 0, False
    at = text.index("[") + 1
    while not last:
        try:
            start, end, at, last = _item(text, at)
        except json.JSONDecodeError as error:
            more = _read(path, reader, max(2**20, len(text))) if len(text) - at < 2 * LONGEST_LINE else ""
            if not more:
                raise ValueError(
                    f"data file {path}: its JSON array is broken at [{index}] ({error.msg}); mend it, or write one row per line"
                ) from error
            text, at = text[at:] + more, 0
            continue
        if end > start:
            yield f"{path}[{index}]", text[start:end].encode("utf-8", "surrogatepass")
            index += 1
    if (text[at:] + _read(path, reader, 2**10)).strip():
        raise ValueError(f"data file {path}: more follows its JSON array; write one array, or one row per line")


_DECODE = json.JSONDecoder().raw_decode
_SPACE, _NEXT = re.compile(r"\s*"), re.compile(r"\s*([,\]])")


def _item(text: str, at: int) -> tuple[int, int, int, bool]:
    """(begin, end, begin of what follows, whether it was the last) of the array's item at `at`; empty where the array ends."""
    start = _SPACE.match(text, at).end()
    if text[start : start + 1] == "]":
        return start, start, start + 1, True
    _, end = _DECODE(text, start)
    closing = _NEXT.match(text, end)
    if closing is None:
        raise json.JSONDecodeError("neither , nor ] follows", text, end)
    return start, end, closing.end(), closing[1] == "]"


def _read(path: Path, reader: io.TextIOWrapper, size: int) -> str:
    try:
        return reader.read(size)
    except UnicodeDecodeError as error:
        raise ValueError(f"data file {path} is not UTF-8 ({error}); write it as UTF-8") from error
