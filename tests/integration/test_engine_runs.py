"""The recipe of every engine, as a user runs it: the same curve and the same drafter; a run may go on with another engine."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file

from dflash_train.config.load import load_recipe
from dflash_train.regenerate import regenerate
from dflash_train.train import train

STEPS = 6
KINDS = ["ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2"]
no_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
every_engine = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=no_deepspeed) if k.startswith("deepspeed") else k for k in KINDS]
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """Few rows, few steps. With a small epsilon AdamW makes steps out of the rounding errors of vanishing gradients."""
    rows = tmp_path_factory.mktemp("engines") / "rows.jsonl"
    regenerate(load_recipe("debug_cpu", [f"regenerate.output={rows}", "regenerate.limit=40"]))
    return [f"data.train=[{rows}]", f"train.max_steps={STEPS}", "train.log_every_steps=1", "train.checkpoint_every_steps=3",
            "optimizer.eps=1e-4", "train.num_anchors=16", "data.max_length=192", "train.eval_every_steps=3",
            "evaluate.max_prompts=1", "evaluate.max_new_tokens=16", "evaluate.client=off", "track.progress=false"]  # fmt: skip


def run(name: str, folder: Path, overrides: list[str], *more: str) -> None:
    train(load_recipe(name, [f"output_dir={folder}", *overrides, *more]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, overrides) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    run("engine_single", folder, overrides)
    return folder


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory, overrides) -> Path:
    folder = tmp_path_factory.mktemp("ddp") / "run"
    toys.run_ranks(run, 2, "engine_ddp", folder, overrides, seconds=300)
    return folder


def assert_same(folder: Path, other: Path) -> None:
    one, two = ([json.loads(line) for line in (f / "metrics.jsonl").open()] for f in (folder, other))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two, strict=True):
        names = {n for n in a if not n.startswith(("perf/", "data/"))}
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, abs=1e-4)
    first, second = (load_file(f / "export" / "model.safetensors") for f in (folder, other))
    assert max(float((first[n] - t).abs().max()) for n, t in second.items()) < 1e-5
    losses = [line["train/loss"] for line in two if "train/loss" in line]
    assert losses[0] - losses[-1] > 1e-2  # it did train


@every_engine
def test_the_recipe_of_every_engine_trains_what_one_process_trains(kind, tmp_path, overrides, alone, request):
    if kind == "ddp":
        folder = request.getfixturevalue("with_ddp")
    else:
        folder = tmp_path / "run"
        toys.run_ranks(run, 2, f"engine_{kind}", folder, overrides, seconds=300)
    assert_same(folder, alone)


@every_engine
def test_a_run_of_ddp_goes_on_with_any_engine(kind, tmp_path, overrides, with_ddp, alone):
    folder = tmp_path / "run"
    shutil.copytree(with_ddp, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
    toys.run_ranks(run, 2, f"engine_{kind}", folder, overrides, "train.resume=true", seconds=300)
    assert_same(folder, alone)


def test_an_engine_that_shards_runs_in_one_process_too(tmp_path, overrides, alone):
    done = toys.call(_main, "-c", "engine_fsdp2", f"output_dir={tmp_path}/run", *overrides)
    assert done.code == 0, done.err
    assert_same(tmp_path / "run", alone)


def _main(argv: list[str]) -> int:
    from dflash_train.train import main

    return main(argv)
