"""The server as a process: streams side by side, clients that leave, signals, and z-lab's command line as its client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import toys
from own_server import Server, serving, stream

from dflash_train import __version__
from dflash_train.rollout.server import Server as RolloutServer

pytest.importorskip("uvicorn", reason="the extra serve")
pytestmark = pytest.mark.slow

AT_ONCE = 8


def in_work(server: Server) -> float:
    counts = server.metrics()
    return counts["num_requests_running"] + counts["num_requests_waiting"]


@pytest.fixture(scope="module")
def asked(overfitted) -> list[list[int]]:
    """Prompts that the drafter knows, and others."""
    return [row["prompt_ids"] for row in overfitted.rows] + toys.prompts(3 * AT_ONCE - len(overfitted.rows), seed=1)


@pytest.fixture(scope="module")
def with_drafter(overfitted, target_dir, tmp_path_factory):
    """No recipe lies beside the copied export."""
    folder = tmp_path_factory.mktemp("served")
    export = folder / "drafter"
    export.mkdir()
    for file in overfitted.export.iterdir():
        (export / file.name).write_bytes(file.read_bytes())
    name = ["--served-model-name", "toy", "--slots", str(AT_ONCE)]
    with serving(folder, "--target", str(target_dir), "--drafter", str(export), *name) as server:
        yield server


def test_the_rollout_knows_engine_and_version(with_drafter):
    server = RolloutServer.open(f"{with_drafter.url}/v1")
    server.close()
    assert (server.engine, server.version, server.model) == ("dflash-train", __version__, "toy")


def test_with_and_without_drafter_the_answers_are_the_same_alone_and_together(
    with_drafter, target_dir, tmp_path, asked
):
    line = next(line for line in with_drafter.log.splitlines() if line.startswith("serving "))
    assert f"serving toy at {with_drafter.url}/v1: speculation with" in line and "block size 8 (7 drafted)" in line
    assert "8 slots of 512 tokens" in line and "caches" in line
    with ThreadPoolExecutor(AT_ONCE) as pool:
        fast = list(pool.map(lambda prompt: stream(with_drafter.url, prompt), asked))
    counts = with_drafter.metrics()
    alone = [stream(with_drafter.url, prompt) for prompt in asked[:6]]
    assert alone == fast[:6]
    # What it counts is what it told its clients.
    usages = [usage for _, usage in fast]
    total = lambda *path: sum(u[path[0]] if len(path) == 1 else u[path[0]][path[1]] for u in usages)  # noqa: E731
    accepted = total("completion_tokens_details", "accepted_prediction_tokens")
    assert counts["prompt_tokens_total"] == total("prompt_tokens")
    assert counts["generation_tokens_total"] == total("completion_tokens")
    assert counts["spec_decode_num_accepted_tokens_total"] == accepted > len(asked)
    rejected = total("completion_tokens_details", "rejected_prediction_tokens")
    assert counts["spec_decode_num_draft_tokens_total"] == accepted + rejected
    assert sum(counts[f"spec_decode_num_accepted_tokens_per_pos_total/{i}"] for i in range(7)) == accepted
    # Each answer's first token is the prompt's, each verification gains its accepted drafts and, unless the answer ends within them, one more.
    gained = total("completion_tokens") - len(asked)
    assert gained - accepted <= counts["spec_decode_num_drafts_total"] <= gained - accepted + len(asked)
    assert counts["time_to_first_token_seconds_count"] == counts["e2e_request_latency_seconds_count"] == len(asked)
    assert counts["request_success_total/stop"] + counts["request_success_total/length"] == len(asked)

    arguments = ["--target", str(target_dir), "--no-drafter", "--served-model-name", "toy"]
    with serving(tmp_path, *arguments) as plain:
        assert "no drafter" in plain.log
        with ThreadPoolExecutor(AT_ONCE) as pool:
            slow = list(pool.map(lambda prompt: stream(plain.url, prompt), asked))
        assert [text for text, _ in slow] == [text for text, _ in fast]
        assert [u["completion_tokens"] for _, u in slow] == [u["completion_tokens"] for _, u in fast]
        assert stream(plain.url, asked[0])[0] == fast[0][0]
        assert not any(name.startswith("spec_decode") for name in plain.metrics())


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(with_drafter, streamed: bool):
    before = with_drafter.metrics()["request_success_total/abort"]
    body = {"prompt": [20, 21], "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": streamed}
    if streamed:
        with httpx.stream("POST", f"{with_drafter.url}/v1/completions", json=body, timeout=60) as got:
            next(got.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{with_drafter.url}/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 20
    while in_work(with_drafter):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    counts = with_drafter.metrics()
    assert counts["request_success_total/abort"] == before + 1


def dflash(arguments: list[str], cwd: Path) -> str:
    """What z-lab's command line prints; without a Hub."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from dflash.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_z_labs_command_line_runs_against_it(with_drafter, tmp_path):
    pytest.importorskip("dflash.cli", reason="make rivals installs z-lab's client")
    where = ["openai", "--model", "toy", "--base-url", with_drafter.url, "--max-new-tokens", "24"]
    told = {"model": "toy", "messages": [{"role": "user", "content": "w30 w31"}], "max_tokens": 24, "temperature": 0}
    for more, reasoning in ((["--top-k", "5"], {}), (["--reasoning", "off"], {"enable_thinking": False})):
        expected = httpx.post(
            f"{with_drafter.url}/v1/chat/completions", json=told | {"chat_template_kwargs": reasoning}, timeout=60
        ).json()["choices"][0]["message"]["content"]
        assert dflash(["generate", *where, *more, "w30 w31"], tmp_path).strip() == expected
    # The name of its data set is also that of a folder beside it, which the datasets library prefers to the Hub.
    data = tmp_path / "HuggingFaceH4" / "mt_bench_prompts"
    data.mkdir(parents=True)
    toys.write_jsonl(data / "train.jsonl", [{"prompt": [f"w{40 + i} w{60 + i}"]} for i in range(6)])
    before = with_drafter.metrics()
    benchmark = ["benchmark", *where, "--dataset", "mt-bench", "--num-prompts", "6", "--concurrency", "3"]
    said = dflash(benchmark, tmp_path)
    after = with_drafter.metrics()
    value = lambda label: float(re.search(rf"{label}:\s+([\d.,]+)", said)[1].replace(",", ""))  # noqa: E731
    # It warms up with three requests, which the server counts too.
    assert 0 < value("Output tokens") < after["generation_tokens_total"] - before["generation_tokens_total"]
    assert 0 < value("Spec verify ct") < after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
    assert 1 <= value("Accept length") <= 8 and value("Num prompts") == 6


def test_a_signal_drains_and_ends_well(target_dir, tmp_path):
    with serving(
        tmp_path, "--target", str(target_dir), "--no-drafter", "--slots", "1", "--served-model-name", "toy"
    ) as server:
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(stream, server.url, prompt) for prompt in toys.prompts(2)]  # one decodes, one waits
            deadline = time.monotonic() + 20
            while in_work(server) < 2 and not all(one.done() for one in running):
                assert time.monotonic() < deadline
            server.process.send_signal(signal.SIGTERM)
            ended = [one.result() for one in running]
        assert all(text and usage["completion_tokens"] for text, usage in ended)
        assert server.process.wait(timeout=30) == 0, server.log[-2000:]
        assert "Traceback" not in server.log
