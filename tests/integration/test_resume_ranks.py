"""A run that is stopped on two ranks and continued on one is the run that one did alone, up to rounding; and the other way round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file

from dflash_train.checkpoint import checkpoints, read_state
from dflash_train.config.load import load_recipe
from dflash_train.train import train

STEPS = 8
TOLERANCE = 1e-6  # of a weight; measured: docs/reliability.md


@pytest.fixture
def recipe(tmp_path, target_dir) -> Path:
    documents = [p + p[::-1] + p[: i + 1] for i, p in enumerate(toys.prompts(5))]
    rows = [{"id": f"r{i}", "prompt_ids": x[:3], "response_ids": x[3:]} for i, x in enumerate(documents)]
    toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "recipe.yaml"
    # With a small epsilon AdamW makes steps out of the rounding errors of vanishing gradients.
    path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{tmp_path}/rows.jsonl], heldout: [{tmp_path}/rows.jsonl], max_length: 24, pack: false}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3, eps: 1e-2}}
train: {{max_steps: {STEPS}, global_batch_size: 4, num_anchors: 4, log_every_steps: 3, eval_every_steps: 4, checkpoint_every_steps: null,
        resume: true}}
evaluate: {{client: 'off'}}
engine: {{timeout_minutes: 2}}
track: {{wandb: disabled, progress: false}}
""")
    return path


def torchrun(recipe: Path, folder: Path, patch: str = "") -> subprocess.Popen:
    script = folder.parent / "script.py"
    script.write_text(f"""
import time
import torch
import dflash_train.train as training
from dflash_train import ranks
from dflash_train.config.load import run_command
{patch}
run_command(training.main)
""")
    return toys.torchrun(str(script), "-c", str(recipe), f"output_dir={folder}", stderr=subprocess.STDOUT)


AT_STEP = """
step = training.train_step
def slow(run, number):
    if number == {step}:
        print("HERE", flush=True)
        time.sleep(3)
    return step(run, number)
training.train_step = slow
"""


def curve(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    # Empty micro-batches that keep a second rank in step are counted.
    return [
        {k: v for k, v in line.items() if not k.startswith(("perf/", "data/skipped", "data/microb"))} for line in lines
    ]


def largest_difference(one: Path, other: Path) -> float:
    first, second = (load_file(p / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors") for p in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[k] - second[k]).abs().max()) for k in first)


@pytest.mark.slow
def test_stopped_on_two_ranks_and_continued_on_one(recipe, tmp_path):
    process = torchrun(recipe, tmp_path / "two", AT_STEP.format(step=4))
    for line in process.stdout:
        if "HERE" in line:
            break
    process.send_signal(signal.SIGTERM)  # torchrun hands it on to both, and would kill them 30 s later
    said = process.communicate(timeout=60)[0]
    assert "stopped at step 5 of 8; the same command with train.resume=true goes on from there" in said, said
    assert process.returncode != 0
    state = read_state(checkpoints(tmp_path / "two" / "checkpoints")[-1])
    assert state.step == 5 and len(state.window) == 2  # of both ranks: step 5 is between two log lines

    again = torchrun(recipe, tmp_path / "two_again")
    train(load_recipe(str(recipe), [f"output_dir={tmp_path}/one"]))
    train(load_recipe(str(recipe), [f"output_dir={tmp_path}/two"]))
    assert "exported to" in again.communicate(timeout=120)[0] and again.returncode == 0
    for other in ("two", "two_again"):
        one, two = curve(tmp_path / "one"), curve(tmp_path / other)
        assert [line["step"] for line in two] == [line["step"] for line in one]
        for a, b in zip(one, two, strict=True):
            assert b == pytest.approx(a, abs=1e-5)
    print(
        "largest difference of a weight",
        [largest_difference(tmp_path / "one", tmp_path / n) for n in ("two", "two_again")],
    )
    assert largest_difference(tmp_path / "one", tmp_path / "two") < TOLERANCE


@pytest.mark.slow
def test_stopped_on_one_and_continued_on_two(recipe, tmp_path, monkeypatch):
    import dflash_train.train as training

    step = training.train_step

    def stopped(run, number):
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, number)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(training, "train_step", stopped)
        train(load_recipe(str(recipe), [f"output_dir={tmp_path}/parts"]))
    assert ended.value.code == 143
    process = torchrun(recipe, tmp_path / "parts")
    train(load_recipe(str(recipe), [f"output_dir={tmp_path}/one"]))
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "at step 5" in said, said
    one, two = curve(tmp_path / "one"), curve(tmp_path / "parts")
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, abs=1e-5)
    print("largest difference of a weight", largest_difference(tmp_path / "one", tmp_path / "parts"))
    assert largest_difference(tmp_path / "one", tmp_path / "parts") < TOLERANCE
