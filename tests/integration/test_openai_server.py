"""Regeneration through a real OpenAI-compatible server: llama.cpp serving the embedded target, held against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import toys
from stubs import free_port

from dflash_train.assets import resolve
from dflash_train.config.load import load_recipe
from dflash_train.config.schema import Api, Recipe
from dflash_train.data.chat import load_tokenizer, prompt_ids
from dflash_train.data.read import read_conversations
from dflash_train.generation.base import Answer, Backend, Request
from dflash_train.generation.embedded import Embedded
from dflash_train.generation.openai import OpenAIBackend

pytest.importorskip("xllamacpp", reason="make rivals installs llama.cpp's server")
pytest.importorskip("sentencepiece", reason="make rivals installs it")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 40
KNOBS = ["target=embedded", "target.precision=float32", "regenerate.prompts=embedded", "regenerate.max_new_tokens=192",
         "regenerate.max_length=512", f"regenerate.limit={PROMPTS}", "track.progress=false"]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Base URL of llama.cpp serving the embedded target in fp32; killed at the end."""
    folder = tmp_path_factory.mktemp("llama")
    convert_gguf = toys.script("convert_gguf", "scripts")
    convert_gguf.convert_target(Path(resolve("embedded", "target")), folder / "tiny.gguf", outtype="f32")
    port, log = free_port(), folder / "server.log"
    command = [sys.executable, str(ROOT / "tests/llama_server.py"), str(folder / "tiny.gguf"), str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield f"{url}/v1"
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("demo.yaml", KNOBS)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve("embedded", "target"))


@pytest.fixture(scope="module")
def requests(recipe, tokenizer) -> list[Request]:
    """The first user turn of each demo prompt, and what leads up to it."""
    conversations, _ = read_conversations([resolve("embedded", "prompts")], limit=PROMPTS, need_answer=False)
    found = []
    for c in conversations:
        last = next(i for i, m in enumerate(c.messages) if m["role"] == "user") + 1
        messages = c.messages[:last]
        found.append(
            Request(
                messages=messages,
                prompt_ids=prompt_ids(messages, tokenizer, tools=None, kwargs={}),
                max_new_tokens=192,
                seed=len(found),
            )
        )
    return found


@pytest.fixture(scope="module")
def expected(recipe, tokenizer, requests) -> list[Answer]:
    return answers(Embedded(recipe, resolve("embedded", "target"), tokenizer), requests)


def answers(backend: Backend, requests: list[Request]) -> list[Answer]:
    """Answers in the order of the requests."""
    try:
        for key, request in enumerate(requests):
            backend.submit(key, request)
        found: dict[int, Answer] = {}
        while len(found) < len(requests):
            found |= dict(backend.collect())
        return [found[key] for key in range(len(requests))]
    finally:
        backend.close()


@pytest.mark.parametrize("api", list(Api))
def test_a_server_answers_as_transformers_does(server, recipe, tokenizer, requests, expected, api):
    recipe.regenerate.base_urls, recipe.regenerate.api, recipe.regenerate.concurrency = [server], api, 4
    backend = OpenAIBackend(recipe, tokenizer)
    found = answers(backend, requests)
    assert [a.error for a in found] == [None] * PROMPTS
    assert [a.prompt_ids for a in found] == [r.prompt_ids for r in requests]
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert [a.message for a in found] == [a.message for a in expected]
    assert [a.finish_reason for a in found] == [a.finish_reason for a in expected]
    stats = backend.stats()
    assert stats["prompt_mismatches"] == stats["failed"] == 0 and stats["dropped_fields"] == []
    assert stats["completion_tokens"] == sum(len(a.token_ids) for a in expected)


def test_a_cut_answer(server, recipe, tokenizer, requests):
    recipe.regenerate.base_urls, recipe.regenerate.api = [server], Api.chat
    requests = [Request(**(vars(request) | {"max_new_tokens": 5})) for request in requests[:4]]
    found = answers(OpenAIBackend(recipe, tokenizer), requests)
    assert [(a.finish_reason, len(a.token_ids)) for a in found] == [("length", 5)] * 4


def test_sampling_follows_the_seed(server, recipe, tokenizer, requests):
    recipe.regenerate.base_urls, recipe.regenerate.api = [server], Api.chat
    requests = [
        Request(**(vars(request) | {"temperature": 1.5, "seed": seed}))
        for request in requests[:3]
        for seed in (1, 1, 2)
    ]
    found = [a.token_ids for a in answers(OpenAIBackend(recipe, tokenizer), requests)]
    assert found[0::3] == found[1::3] != found[2::3]


def test_the_command(server, tmp_path, recipe, requests, expected):
    """data_prep/regenerate.py with regenerate.backend=openai writes the rows that the transformers backend would."""
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "data_prep/regenerate.py"), "-c", "demo.yaml", *KNOBS, "regenerate.backend=openai",
               f"regenerate.base_urls=[{server}]", "regenerate.concurrency=4", f"regenerate.output={output}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == PROMPTS
    said = {json.dumps(request.prompt_ids): answer.token_ids for request, answer in zip(requests, expected)}
    for row in rows:
        first = row["turn_ids"][0] if "turn_ids" in row else row
        assert first["response_ids"] == said[json.dumps(first["prompt_ids"])]
    assert json.loads(Path(f"{output}.manifest.json").read_text())["rows"] == PROMPTS
