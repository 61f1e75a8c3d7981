"""The whole rollout against real servers: ours and llama.cpp, each plain and with the same drafter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import toys
import yaml
from stubs import free_port

from dflash_train.advise import against, measure
from dflash_train.assets import resolve
from dflash_train.build import open_source
from dflash_train.config.load import load_recipe
from dflash_train.regenerate import regenerate
from dflash_train.rollout import traffic
from dflash_train.rollout.command import main
from dflash_train.rollout.server import Server
from dflash_train.train import train

pytestmark = pytest.mark.slow  # about a minute and a half on two cores

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def drafter(place):
    """A drafter for the embedded target that has learned a little, and its licence."""
    knobs = [f"output_dir={place}/run", "regenerate.limit=24", f"regenerate.output={place}/rows.jsonl", "regenerate.max_new_tokens=48",
             f"data.train=[{place}/rows.jsonl]", "data.heldout=[]", "train.max_steps=40", "train.log_every_steps=20", "evaluate.client=off",
             "export.precision=float32", "track.progress=false"]  # fmt: skip
    recipe = load_recipe("demo", knobs)
    regenerate(recipe)
    return train(recipe)


@pytest.fixture(scope="module")
def prompts(place):
    """Some of the demo's, as the greedy test and the benchmark take them."""
    rows = [json.loads(line) for line in Path(resolve("embedded", "heldout")).read_text().splitlines()[:8]]
    rows = [{"id": row["id"], "messages": row["messages"], "max_tokens": 24} for row in rows]
    return toys.write_jsonl(place / "prompts.jsonl", rows)


@contextmanager
def running(*commands: list[str]):
    """Base URLs of servers that listen on the last word of their command; stopped at the end."""
    with ExitStack() as stack:
        urls = []
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            urls.append(
                (
                    process,
                    f"http://127.0.0.1:{command[command.index('--port') + 1] if '--port' in command else command[2]}",
                )
            )
        deadline = time.monotonic() + 120
        for process, url in urls:
            while True:
                assert process.poll() is None and time.monotonic() < deadline, f"{url} does not start"
                try:
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.1)
        yield [f"{url}/v1" for _, url in urls]


@pytest.fixture(scope="module")
def ours(drafter):
    pytest.importorskip("uvicorn", reason="the extra `serve` installs it")
    serve = ["-m", "dflash_train.serve", "--target", "embedded", "--max-length", "512", "--port"]
    with running(
        [*serve, str(free_port()), "--no-drafter"], [*serve, str(free_port()), "--drafter", str(drafter)]
    ) as urls:
        yield urls


@pytest.fixture(scope="module")
def llama(place, drafter):
    pytest.importorskip("xllamacpp", reason="make rivals installs llama.cpp's server")
    pytest.importorskip("sentencepiece", reason="make rivals installs it")
    convert_gguf = toys.script("convert_gguf", "scripts")
    target = Path(resolve("embedded", "target"))
    convert_gguf.convert_target(target, place / "target.gguf", outtype="f32")
    convert_gguf.convert_drafters({drafter: place / "drafter.gguf"}, target, outtype="f32")
    serve = ["tests/llama_server.py", str(place / "target.gguf")]
    with running([*serve, str(free_port())], [*serve, str(free_port()), str(place / "drafter.gguf")]) as urls:
        yield urls


def rollout(urls, drafter, prompts, output, *more):
    return toys.call(main, drafter, "--target", "embedded", "--plain", urls[0], "--speculative", urls[1], "--output", output, "--precision", "float32",
                     "--engine-version", "1.0.0", "--prompts", prompts, "--traffic", prompts, "--concurrency", "1,2", "--num-prompts", "8", "--max-new-tokens", "24",
                     *more)  # fmt: skip


# What a tiny target gains on a busy machine is not the question here; that every step runs and is recorded is.
ALL_ON = ("--least", "0.01", "--label", "job=tiny")


@pytest.fixture(scope="module")
def our_rollout(ours, drafter, prompts, place):
    return ours, place / "ours", rollout(ours, drafter, prompts, place / "ours", *ALL_ON)


@pytest.fixture(scope="module")
def llama_rollout(llama, drafter, prompts, place):
    return llama, place / "llama", rollout(llama, drafter, prompts, place / "llama", *ALL_ON)


@pytest.mark.parametrize("engine", ["our", "llama"])
def test_from_a_drafter_to_alerts(engine, request, drafter, prompts):
    urls, output, done = request.getfixturevalue(f"{engine}_rollout")
    assert done.code == 0 and done.out.splitlines()[-1] == "go", done
    record = json.loads((output / "rollout.json").read_text())
    assert list(record["steps"]) == ["drafter", "licence", "pins", "greedy", "benchmark", "watch"]
    assert record["verdict"] == "go" and record["engine"]["version"] == "1.0.0" and record["date"]
    steps = {name: step["facts"] for name, step in record["steps"].items()}
    assert steps["licence"]["drafter"] == steps["licence"]["target"] == "apache-2.0"
    assert len(steps["pins"]["drafter"]["sha256"]["model.safetensors"]) == 64
    assert steps["greedy"]["identical"] == 8 and steps["greedy"]["drafted"] > steps["greedy"]["accepted"] > 0
    rows = steps["benchmark"]["rows"]
    assert [row["concurrency"] for row in rows] == [1, 2] and all(
        row["tau"] > 1 and row["speed_up"] > 0 for row in rows
    )
    assert (
        yaml.safe_load((output / "alerts.yaml").read_text())["groups"]
        and json.loads((output / "dashboard.json").read_text())["panels"]
    )
    assert ("does not scale" in done.out) == (engine == "llama")
    # Again: everything is known, and no server is asked for an answer.
    counted = Server.open(urls[1])
    before = counted.drafts()
    again = rollout(urls, drafter, prompts, output, *ALL_ON)
    assert again.code == 0 and again.out.count("(known)") == 6 and counted.drafts() == before
    # Of what changed, and what depends on it, alone.
    more = rollout(urls, drafter, prompts, output, "--least", "0.01", "--label", "job=other")
    assert more.out.count("(known)") == 5 and 'job="other"' in (output / "alerts.yaml").read_text()
    counted.close()


def test_a_server_without_its_drafter_is_found_out(ours, drafter, prompts, tmp_path):
    done = rollout([ours[0], ours[0]], drafter, prompts, tmp_path)
    assert done.code == 1 and "THE SPECULATIVE SERVER DRAFTED NOTHING" in done.out.splitlines()[-1]


def test_the_adviser_knows_our_server(our_rollout, drafter):
    """Predicted against measured, on a machine that does other things too: docs/rollout.md has the figures of a quiet one."""
    report = json.loads((our_rollout[1] / "benchmark.json").read_text())
    costs = measure(open_source(str(drafter), None, []).step, [1, 2], [8], 100)
    rows = against(report, costs, "benchmark.json")
    assert [row.concurrency for row in rows] == [1, 2] and {row["verdict"] for row in traffic.judge_cells(report)} <= {
        "on",
        "off",
        "unsure",
    }
    assert all(0.33 < 1 + row.error < 3 for row in rows), rows
