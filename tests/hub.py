"""A stand-in for the Hub: the endpoints that huggingface_hub calls when a folder is pushed, on this machine, with faults on demand."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"


@dataclass
class Repo:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    def oid(self, index: int = -1) -> str:
        return hashlib.sha1(str(index % len(self.commits)).encode()).hexdigest()


class Hub:
    """repos; objects: LFS content by sha256; sent: object -> how often it was uploaded; fail: path part -> statuses to answer first (0: hang up)."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.fail: dict[str, list[int]] = {}
        self.requests: list[str] = []
        self.url = ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, value: Any, status: int = 200, **headers: str) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(data)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                data = b""
                while size := int(self.rfile.readline(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return data
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def handle_any(self) -> None:
            path = self.path.split("?")[0]
            data = self.body()
            hub.requests.append(f"{self.command} {path}")
            for part, statuses in hub.fail.items():
                if part in path and statuses:
                    status = statuses.pop(0)
                    if status == 0:
                        self.close_connection = True
                        self.connection.close()
                        return
                    return self.answer({"error": f"planted {status}"}, status)
            if path.startswith("/lfs/"):  # as S3: authorised by the URL alone
                return self.store(path.removeprefix("/lfs/"), data)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid credentials"}, 401)
            self.route(path, data)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def store(self, oid: str, data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != oid:
                return self.answer({"error": "hash"}, 400)
            hub.objects[oid] = data
            hub.sent[oid] = hub.sent.get(oid, 0) + 1
            self.answer({})

        def route(self, path: str, data: bytes) -> None:
            if path == "/api/repos/create":
                wanted = json.loads(data)
                name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
                url = {"url": f"{hub.url}/{name}"}
                if name in hub.repos:
                    return self.answer(url | {"error": "You already created this model repo"}, 409)
                private = wanted.get("private", wanted.get("visibility") == "private")
                hub.repos[name] = Repo(private=bool(private))
                return self.answer(url)
            if path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(data)["objects"]
                return self.answer({"transfer": "basic", "objects": [self.action(o) for o in objects]})
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if not path.startswith("/api/models/"):
                return self.answer({"error": f"no endpoint {path}"}, 404)
            name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            rest = path.removeprefix(f"/api/models/{name}")
            if name not in hub.repos:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            self.of_repo(name, hub.repos[name], rest, data)

        def action(self, o: dict[str, Any]) -> dict[str, Any]:
            upload = {"actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}}
            return o if o["oid"] in hub.objects else o | upload

        def of_repo(self, name: str, repo: Repo, rest: str, data: bytes) -> None:
            if rest == "":
                return self.answer(
                    {
                        "id": name,
                        "modelId": name,
                        "private": repo.private,
                        "sha": repo.oid(),
                        "siblings": [],
                        "tags": [],
                    }
                )
            if rest == "/refs":
                tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": c} for t, c in repo.tags.items()]
                return self.answer({"branches": [], "converts": [], "tags": tags})
            if rest.startswith("/preupload/"):
                large = (".safetensors", ".gguf", "tokenizer.json")
                files = [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith(large) else "regular",
                        "shouldIgnore": False,
                    }
                    for f in json.loads(data)["files"]
                ]
                return self.answer({"files": files})
            if rest.startswith("/commit/"):
                new = dict(repo.files)
                for line in data.decode().splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "file":
                        new[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        new[value["path"]] = hub.objects[value["oid"]]
                repo.commits.append(new)
                return self.answer(
                    {"commitUrl": f"{hub.url}/{name}/commit/{repo.oid()}", "commitOid": repo.oid(), "success": True}
                )
            if rest.startswith("/tag/"):
                repo.tags[json.loads(data)["tag"]] = rest.removeprefix("/tag/")
                return self.answer({})
            self.answer({"error": f"no endpoint {rest}"}, 404)

    return Handler


@contextlib.contextmanager
def standin() -> Iterator[Hub]:
    """A running stand-in; `hub.url` is its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
