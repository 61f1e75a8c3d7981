"""Two processes under torchrun are one process."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file

from dflash_train.build import build_stream, outline
from dflash_train.config.load import load_recipe
from dflash_train.train import train

# Five rows, four to a step: in every second step there is one row for two ranks.
ROWS, STEPS = 5, 6
REFUSAL = "has checkpoints of an earlier run; continue it with train.resume=true"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, target_dir) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    documents = [p + p[::-1] + p[: i + 1] for i, p in enumerate(toys.prompts(ROWS))]
    rows = [{"id": f"r{i}", "prompt_ids": x[:3], "response_ids": x[3:]} for i, x in enumerate(documents)]
    toys.write_jsonl(folder / "rows.jsonl", rows)
    path = folder / "recipe.yaml"
    # With a small epsilon AdamW makes steps out of the rounding errors of vanishing gradients.
    path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{folder}/rows.jsonl], heldout: [{folder}/rows.jsonl], max_length: 24, pack: false}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3, eps: 1e-2}}
train: {{max_steps: {STEPS}, global_batch_size: 4, num_anchors: 4, log_every_steps: 1, eval_every_steps: 3,
        decode_every_steps: 6, decode_prompts: 3}}
evaluate: {{max_new_tokens: 12}}
engine: {{timeout_minutes: 1}}
track: {{wandb: disabled, progress: false}}
""")
    return path


def torchrun(*command: str, timeout: float = 120) -> subprocess.CompletedProcess:
    process = toys.torchrun(*command, stderr=subprocess.PIPE)
    try:
        said = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def curve(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_two_processes_train_what_one_trains(recipe, tmp_path):
    """In every second step rank 1 has nothing to learn from."""
    done = torchrun("-m", "dflash_train.train", "-c", str(recipe), f"output_dir={tmp_path}/two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exported to") == 1  # rank 0 speaks for all
    train(load_recipe(str(recipe), [f"output_dir={tmp_path}/one"]))

    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [line["step"] for line in two] == [line["step"] for line in one] and len(one) == STEPS + 3
    assert [line["step"] for line in one if "decoded/tau" in line] == [6] and "client/tau" in one[-1]
    for a, b in zip(one, two, strict=True):
        # Rank 1 adds the empty micro-batches that keep it in step; nothing else may show.
        names = {n for n in a if not n.startswith(("perf/", "data/empty", "data/micro"))}
        assert names == {n for n in b if not n.startswith(("perf/", "data/empty", "data/micro"))}
        assert {n: b[n] for n in names} == pytest.approx({n: a[n] for n in names}, abs=1e-5)
    assert [line["data/skipped_microbatches"] for line in two if "train/loss" in line] == [0, 3] * (STEPS // 2)
    for place in ("export", f"checkpoints/step-{STEPS:08d}"):
        first, second = (load_file(tmp_path / n / place / "model.safetensors") for n in ("one", "two"))
        assert first.keys() == second.keys()
        assert max(float((first[k].float() - second[k].float()).abs().max()) for k in first) < 1e-5, place
    worlds = [load_recipe(str(tmp_path / name)).provenance["world_size"] for name in ("one", "two")]
    assert worlds == [1, 2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_samples_and_anchors_of_one_process(recipe, ranks):
    stream = build_stream(outline(load_recipe(str(recipe), ["output_dir=unused"])))

    def blocks(step: int, rank: int, world_size: int) -> list[tuple[str, list[int]]]:
        return [
            (ids[0], batch.blocks.anchors_BN[i][batch.blocks.valid_BN[i]].tolist())
            for batch in stream.micro_batches(step, rank, world_size)
            for i, ids in enumerate(batch.sample_ids)
            if ids
        ]

    for step in range(STEPS):
        whole = blocks(step, 0, 1)
        assert [b for rank in range(ranks) for b in blocks(step, rank, ranks)] == whole
        assert len(whole) == (4, 1)[step % 2] and all(anchors for _, anchors in whole)
        assert len({sum(1 for _ in stream.micro_batches(step, rank, ranks)) for rank in range(ranks)}) == 1


@pytest.mark.parametrize(
    ("world_size", "note"),
    [
        (2, None),
        (3, "each does 2 rows per step, of which 2 in all are empty, all of them for 1 of the ranks"),
        (6, "each does 1 rows per step, of which 2 in all are empty, all of them for 2 of the ranks"),
    ],
)
def test_rows_that_ranks_cannot_share_evenly_are_mentioned(recipe, world_size, note):
    stream = build_stream(outline(load_recipe(str(recipe), ["output_dir=unused"])))
    said = stream.sharing_note(world_size)
    assert said is None if note is None else note in said
    counts = {len(stream.shares(1, rank, world_size)[1]) for rank in range(world_size)}
    assert counts == {stream.micro_batches_per_rank(world_size)}


def spoiled(path: Path, body: str) -> str:
    """A command that trains, with something happening before the forward of a micro-batch: `call` is its number on this rank."""
    path.write_text(f"""
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
import dflash_train.train as training
from dflash_train import ranks
from dflash_train.config.load import run_command
from dflash_train.engine.torch import TorchEngine

forward, calls = TorchEngine.forward, []

def spoiled(self, batch, features, weight):
    calls.append(1)
    rank, call = ranks.rank(), len(calls)
    report = forward(self, batch, features, weight)
{body}
    return report

TorchEngine.forward = spoiled
run_command(training.main)
""")
    return str(path)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_both(recipe, tmp_path):
    """Rank 1's second micro-batch of step 1 has the fourth row of the step."""
    body = "    if (rank, call) == (1, 2): report = report._replace(loss=report.loss * torch.nan)"
    script = spoiled(tmp_path / "poisoned.py", body)
    done = torchrun(script, "-c", str(recipe), f"output_dir={tmp_path}/run", timeout=120)
    assert done.returncode == 0, done.stderr
    skipped = [line["train/skipped_steps"] for line in curve(tmp_path / "run") if "train/skipped_steps" in line]
    assert skipped == [1, 0, 0, 0, 0, 0]
    stream = build_stream(outline(load_recipe(str(recipe), ["output_dir=unused"])))
    (noted,) = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").open()]
    names = stream.documents(stream.rows_of_step(0)[1][3])
    assert noted == {"step": 1, "cause": "loss", "ranks": [1], "rows": [names]}
    said = f"step 1 skipped by all ranks: loss of rank 1 not finite; documents {names[0]}"
    assert done.stderr.count("skipped by all ranks") == done.stderr.count(said) == 1
    counts = load_file(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "optimizer.safetensors")
    assert {float(v) for n, v in counts.items() if n.startswith("step.")} == {STEPS - 1}


def test_a_killed_rank_is_missed_once_and_torchrun_continues_from_the_checkpoint(recipe, tmp_path):
    """Rank 1 kills itself in the fifth of six steps, the first time; the recipe does not ask for train.resume."""
    body = f"""
    if (rank, call) == (1, 9) and not Path("{tmp_path}/dead").exists():
        Path("{tmp_path}/dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)"""
    script = spoiled(tmp_path / "killed.py", body)
    often = "train.checkpoint_every_steps=2"
    asked = (
        "-c",
        str(recipe),
        f"output_dir={tmp_path}/run",
        often,
        "engine.timeout_minutes=60",
    )  # which nobody waits for
    done = torchrun("--max-restarts", "1", script, *asked, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("failed: rank 0 lost contact with another rank") == 1, done.stderr
    assert f"resumed from {tmp_path}/run/checkpoints/step-00000004 at step 4" in done.stdout
    train(load_recipe(str(recipe), [f"output_dir={tmp_path}/one", often]))
    steps = [line["step"] for line in curve(tmp_path / "run")]
    assert steps == [line["step"] for line in curve(tmp_path / "one")]
    first, second = (load_file(tmp_path / n / "export" / "model.safetensors") for n in ("one", "run"))
    assert max(float((first[k].float() - second[k].float()).abs().max()) for k in first) < 1e-5

    again = torchrun("--max-restarts", "1", "-m", "dflash_train.train", "-c", str(recipe), f"output_dir={tmp_path}/run")
    assert again.returncode != 0 and again.stderr.count(REFUSAL) == 2, (
        again.stderr
    )  # torchrun does not ask to go on with another run


def test_one_process_that_torchrun_starts_again_continues_its_own_run_and_no_other(recipe, tmp_path):
    saved = f"{tmp_path}/run/checkpoints/step-00000002"
    body = f"""
    if call == 9 and not Path("{tmp_path}/dead").exists():
        Path("{tmp_path}/dead").touch()
        while not Path("{saved}").exists():  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)"""
    script, often = spoiled(tmp_path / "killed.py", body), "train.checkpoint_every_steps=2"
    command = ("--nproc-per-node", "1", "--max-restarts", "1", script, "-c", str(recipe), f"output_dir={tmp_path}/run", often)  # fmt: skip
    done = torchrun(*command)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {saved} at step 2" in done.stdout
    again = torchrun(*command)
    assert again.returncode != 0 and again.stderr.count(REFUSAL) == 2, again.stderr


def test_a_mistake_is_said_once_and_no_rank_aborts(recipe, tmp_path):
    """Each rank's watch still waits for the other when both end."""
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    done = torchrun("-m", "dflash_train.train", "-c", str(recipe), f"output_dir={tmp_path}/run")
    assert done.stderr.count("has checkpoints of an earlier run") == 1, done.stderr
    assert "SIGABRT" not in done.stderr and "Fatal Python error" not in done.stderr, done.stderr


@pytest.mark.parametrize(("module", "what"), [("start", "write_certificate"), ("train", "export_run")])
def test_what_rank_0_alone_meets_ends_all_ranks_with_its_word(recipe, tmp_path, module, what):
    """Before the first step, and behind the last one, where the others wait without a time-out: at once, not when torchrun kills them."""
    script = tmp_path / "failing.py"
    script.write_text(f"""
import errno
import dflash_train.{module} as patched
import dflash_train.train as training
from dflash_train.config.load import run_command

def failing(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied", "/its/file")

patched.{what} = failing
run_command(training.main)
""")
    done = torchrun(str(script), "-c", str(recipe), f"output_dir={tmp_path}/run", "evaluate.client=off")
    assert done.returncode != 0 and done.stderr.count("error: /its/file: Permission denied") == 1, done.stderr
    assert "lost contact" not in done.stderr and "SIGKILL" not in done.stderr, done.stderr


def test_a_killed_rank_is_missed_by_a_rank_that_waits_for_its_device(recipe, tmp_path):
    """As under NCCL, where the main thread hears neither signals nor closed connections while the GPU waits for the lost rank."""
    body = """
    if call == 3:
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else ctypes.CDLL(None).sleep(100)"""
    script = spoiled(tmp_path / "waiting.py", body)
    began = time.monotonic()
    done = torchrun(script, "-c", str(recipe), f"output_dir={tmp_path}/run", "engine.timeout_minutes=60")
    assert done.returncode == 1 and done.stderr.count("failed: rank 0 lost contact with another rank") == 1, done.stderr
    assert time.monotonic() - began < 28, "torchrun ended it, by its own time-out"
