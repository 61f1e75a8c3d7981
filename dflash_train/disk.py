"""Files that are there whole or not at all, whenever a process is killed or a machine loses its power."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from dflash_train.config.load import NO_SPACE


def replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file beside `path` and put it in its place; a kill leaves the old one or the new one. For files that one process writes:
    what a killed one left beside it is written over."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, text: bytes) -> None:
    """Append all of it. Raises OSError, with nothing appended, where the disk does not take it."""
    whole = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:
            if file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if path.exists():
            os.truncate(path, whole)  # no half line, which a later whole one would be joined to
        raise


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, prefix: str, suffix: str = "") -> None:
    """Remove the files and folders `prefix` + process id + `suffix` that processes of this machine left behind when they were killed."""
    if not Path("/proc/self").exists():
        return  # nobody can tell whose they are
    for path in folder.iterdir() if folder.is_dir() else ():
        number = path.name.removeprefix(prefix).removesuffix(suffix)
        if path.name != f"{prefix}{number}{suffix}" or not number.isdecimal() or Path(f"/proc/{number}").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def failed(error: Exception) -> bool:
    """Whether a write failed for the disk's sake: no room, or an error of the device. safetensors gives the system's error as text only."""
    if isinstance(error, OSError) and error.errno is not None:
        code = error.errno
    else:
        found = re.search(r"\(os error (\d+)\)", str(error))
        code = int(found[1]) if found else 0
    return code in (*NO_SPACE, errno.EIO)
