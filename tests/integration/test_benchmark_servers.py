"""The benchmark against real servers: our own, held against its own counters and z-lab's client, and llama.cpp's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import toys
from stubs import free_port

from dflash_train.assets import resolve
from dflash_train.benchmark import output

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24


@contextmanager
def running(folder: Path, name: str, *command: str) -> Iterator[str]:
    """Address of a server that is ready; killed at the end. The port stands for PORT in its command."""
    port, log = free_port(), folder / f"{name}.log"
    with log.open("w") as stream:
        said = [word.replace("PORT", str(port)) for word in command]
        process = subprocess.Popen([sys.executable, *said], stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def counters(url: str) -> dict[str, float]:
    lines = re.findall(
        r"^\w+:(spec_decode_num_\w+?)(?:_total)?(?:\{.*\})? (\S+)$", httpx.get(f"{url}/metrics").text, re.M
    )
    return {name: sum(float(v) for n, v in lines if n == name) for name, _ in lines}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """In the words that the toy tokenizer has."""
    file = tmp_path_factory.mktemp("prompts") / "toy.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"w{20 + i} w{60 - i}"]}) + "\n" for i in range(24)))
    return file


@pytest.fixture(scope="module")
def pair(overfitted, target_dir, tmp_path_factory):
    """(plain, with the drafter): our server with the toy target."""
    pytest.importorskip("uvicorn", reason="the extra serve")
    folder = tmp_path_factory.mktemp("served")
    common = ["-m", "dflash_train.serve", "--target", str(target_dir), "--port", "PORT", "--served-model-name", "toy"]
    with (
        running(folder, "plain", *common, "--no-drafter") as plain,
        running(folder, "draft", *common, "--drafter", str(overfitted.export)) as draft,
    ):
        yield plain, draft


def test_plain_and_drafter_arms_of_our_server(pair, prompts, tmp_path, capsys):
    plain, draft = pair
    before = counters(draft)
    code = toys.script("benchmark", "scripts").main(
        ["--arm", f"plain={plain}", "--arm", f"dflash={draft}/v1", "--dataset", str(prompts), "--concurrency", "1", "8", "--num-prompts", "24",
         "--max-new-tokens", str(TOKENS), "--warmup", "0", "--no-progress", "--output", str(tmp_path / "out.json")]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0 and "not reported" not in printed and "serving others" not in printed
    report, after = output.read(tmp_path / "out.json"), counters(draft)
    rounds = accepted = 0
    for cell, n in zip(report["cells"], (1, 8), strict=True):
        base, arm = cell["arms"]["plain"], cell["arms"]["dflash"]
        assert (cell["concurrency"], base["failed"], arm["failed"], base["acceptance"]) == (n, 0, 0, None)
        # Greedy decoding with a drafter writes what it writes without.
        speed = cell["speed_up"]["dflash"]
        assert speed["same_answers"] == speed["pairs"] == 24 and arm["output_tokens"] == base["output_tokens"] > 24
        assert speed["value"] > 0 and speed["verdict"] in ("faster", "slower", "no difference shown", "parts disagree")
        told = arm["acceptance"]
        assert not told["derived"] and len(told["per_position"]) == 7 and sum(told["per_position"]) == told["accepted"]
        assert told["accept_len"] == 1 + told["accepted"] / told["rounds"] >= 1
        rounds, accepted = rounds + told["rounds"], accepted + told["accepted"]
    assert rounds == after["spec_decode_num_drafts"] - before["spec_decode_num_drafts"]
    assert accepted == after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"]


def test_the_reference_client_on_our_server(pair, tmp_path, capsys, monkeypatch):
    """dflash 0.1.0's benchmark and ours with the same prompts: greedy answers, so rounds and accept length are the same to the last digit that
    it prints; throughput within a factor of two, for this machine runs other tests too."""
    reference = pytest.importorskip("dflash.cli", reason="make rivals installs it")
    rows = [{"prompt": f"w{20 + i} w{60 - i}"} for i in range(40)]
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: rows)
    common = ["--dataset", "mbpp", "--model", "toy", "--num-prompts", "24", "--concurrency", "4", "--max-new-tokens", str(TOKENS), "--base-url", pair[1]]  # fmt: skip
    reference.main(["benchmark", "openai", *common])
    theirs = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line)
    file = tmp_path / "out.json"
    assert (
        toys.script("benchmark", "scripts").main([*common, "--parts", "1", "--no-progress", "--output", str(file)]) == 0
    )
    (cell,) = output.read(file)["cells"]
    arm = cell["arms"]["server"]
    assert arm["output_tokens"] == int(theirs["Output tokens"]) and arm["acceptance"]["rounds"] == int(
        theirs["Spec verify ct"]
    )
    assert f"{arm['engine_accept_len_mean']:.3f}" == theirs["Accept length"].strip()
    assert 0.5 < arm["tok_s"] / float(theirs["Throughput"].split()[0].replace(",", "")) < 2


def test_llama_cpp_tells_its_version_and_counts_tokens(tmp_path, capsys):
    pytest.importorskip("xllamacpp", reason="make rivals installs llama.cpp's server")
    pytest.importorskip("sentencepiece", reason="make rivals installs it")
    convert = toys.script("convert_gguf", "scripts")
    convert.convert_target(Path(resolve("embedded", "target")), tmp_path / "tiny.gguf", outtype="f32")
    file = tmp_path / "out.json"
    with running(tmp_path, "llama", "tests/llama_server.py", str(tmp_path / "tiny.gguf"), "PORT") as url:
        arguments = ["--arm", f"plain={url}", "--dataset", resolve("embedded", "heldout"), "--num-prompts", "12", "--max-new-tokens", "24",
                     "--concurrency", "2", "--no-progress", "--output", str(file)]  # fmt: skip
        assert toys.script("benchmark", "scripts").main(arguments) == 0
        written = httpx.get(f"{url}/metrics").text
    report = output.read(file)
    arm = report["cells"][0]["arms"]["plain"]
    assert report["arms"]["plain"]["engine"] == "llamacpp" and report["arms"]["plain"]["counters"] == "/metrics"
    assert (
        arm["failed"] == 0 and 12 < arm["output_tokens"] <= 12 * 24 and arm["acceptance"] is None and not arm["notes"]
    )
    # The warm-up's two answers are in the engine's count alone.
    assert 0 <= int(re.search(r"^llamacpp:tokens_predicted_total (\d+)", written, re.M)[1]) - arm["output_tokens"] <= 48
