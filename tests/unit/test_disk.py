"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from dflash_train import disk


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "file"
    disk.replace(path, [b"one", b"two"])
    assert path.read_bytes() == b"onetwo"

    def broken():
        yield b"half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        disk.replace(path, broken())
    assert path.read_bytes() == b"onetwo" and [p.name for p in tmp_path.iterdir()] == ["file"]
    (tmp_path / ".file.tmp").write_bytes(b"of one that was killed")
    disk.replace(path, [b"three"])
    assert path.read_bytes() == b"three" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_only_what_dead_processes_left_is_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [
        f".export.writing-{dead.pid}",
        f".export.writing-{os.getpid()}",
        ".export.writing-my",
        f"export.writing-{dead.pid}",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / f".page.{dead.pid}.partial").touch()
    disk.sweep(tmp_path, ".export.writing-")
    disk.sweep(tmp_path, ".page.", ".partial")
    disk.sweep(tmp_path / "nowhere", ".page.")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])


@pytest.mark.parametrize(
    ("error", "disks"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EIO, "broken"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EACCES, "not yours"), False),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), False),
        (SafetensorError("no tensors"), False),
    ],
)
def test_which_errors_are_the_disks(error, disks):
    assert disk.failed(error) is disks
