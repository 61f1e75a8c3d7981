"""The script that measures several GPUs: what it compares, counts and prints; and its jobs of two gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def script():
    return toys.script("bench_ranks", "scripts")


def run(folder: Path, *, loss: float = 2.0, coverage: float = 0.5, weight: float = 1.0, step: int = 2) -> Path:
    rows = [
        {"step": n, "train/loss": 3.0, "train/base_loss": 2.0 if n < step else loss, "train/selector_loss": 0.0, "train/grad_norm": 1.0, "data/coverage": coverage}
        for n in (1, 2)
    ]  # fmt: skip
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    toys.write_jsonl(folder / "metrics.jsonl", [*rows, {"step": 2, "heldout/walk_tau": 1.0}])
    save_file({"w": torch.tensor([weight, 1.0])}, folder / "checkpoints" / "step-00000002" / "model.safetensors")
    return folder


def test_runs_are_compared_by_rows_losses_and_weights(script, tmp_path):
    one = run(tmp_path / "one")
    assert script.compare(one, run(tmp_path / "same")) == {
        "same_rows": True, "first_loss": 0.0, "losses": 0.0, "grad_norms": 0.0, "weights": 0.0
    }  # fmt: skip
    later = script.compare(one, run(tmp_path / "later", loss=2.02, weight=1.1))
    assert later["first_loss"] == 0.0
    assert later["losses"] == pytest.approx(0.02 / 2.02) and later["weights"] == pytest.approx(0.1 / 2**0.5)
    at_once = script.compare(one, run(tmp_path / "at_once", loss=1.0, step=1))
    assert at_once["first_loss"] == at_once["losses"] == 0.5
    assert not script.compare(one, run(tmp_path / "others", coverage=0.25))["same_rows"]
    short = run(tmp_path / "short")
    (short / "metrics.jsonl").write_text((short / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
    with pytest.raises(RuntimeError, match="have logged other steps"):
        script.compare(one, short)


@pytest.mark.parametrize(
    ("worse", "told"),
    [
        ({}, [True, True, True, True]),
        ({"losses": 2e-4}, [True, True, False, False]),
        ({"losses": 3e-2}, [False, True, False, False]),
        ({"first_loss": 2e-6}, [True, True, False, False]),
        ({"first_loss": 6e-6}, [False, True, False, False]),
        ({"same_rows": False}, [False, False, False, False]),
    ],
)
def test_ranks_are_held_to_bounds_and_other_micro_batches_to_the_same_rows(script, monkeypatch, tmp_path, worse, told):
    near = {"same_rows": True, "first_loss": 5e-7, "losses": 5e-5, "grad_norms": 0.0, "weights": 0.0}
    monkeypatch.setattr(script, "compare", lambda a, b: near | worse)
    monkeypatch.setattr(script, "shortened", lambda run, copy, step: None)
    kept: list[dict] = []
    script.parity(
        SimpleNamespace(
            ranks=2,
            gpus=[0, 1],
            out=tmp_path,
            train=lambda *words, **more: None,
            wait=lambda *jobs: None,
            keep=lambda **result: kept.append(result),
        )
    )
    assert [result["ok"] for result in kept] == told
    assert [result["tolerance"] for result in kept] == [2e-2, None, 1e-4, 1e-4]


@pytest.mark.parametrize(("ranks", "gpu"), [(1, 3), (2, None)])
def test_one_process_trains_on_the_gpu_it_is_given(script, tmp_path, ranks, gpu):
    run(tmp_path / "trained")
    given, ends = [], iter([None, 0])
    script.train(
        SimpleNamespace(
            ranks=ranks, gpus=[3, 4], out=tmp_path, overrides=["train.max_steps=2"], shapes={"rows": []}, results=tmp_path / "none",
            deadline=float("inf"), keep=lambda **result: None, wait=lambda job: [1.0],
            train=lambda *words, **more: given.append(more) or SimpleNamespace(process=SimpleNamespace(poll=lambda: next(ends))),
        )
    )  # fmt: skip
    assert given == [{"ranks": ranks, "gpu": gpu}]


def test_a_training_that_logs_nothing_is_told(script, tmp_path):
    (tmp_path / "log").write_text("nothing to train on")
    job = SimpleNamespace(process=SimpleNamespace(poll=lambda: 0), log=tmp_path / "log")
    bench = SimpleNamespace(
        ranks=1, gpus=[0], out=tmp_path, overrides=["train.max_steps=2"], shapes={"rows": []}, results=tmp_path / "none",
        train=lambda *words, **more: job, wait=lambda job: [1.0],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no step was logged while it ran: nothing to train on"):
        script.train(bench)


def test_a_shortened_run_is_what_a_stop_would_have_left(script, tmp_path):
    whole = run(tmp_path / "whole")
    (whole / "checkpoints" / "step-00000001").mkdir()
    (whole / "export").mkdir()
    script.shortened(whole, tmp_path / "half", 1)
    assert sorted(p.name for p in (tmp_path / "half" / "checkpoints").iterdir()) == ["step-00000001"]
    assert not (tmp_path / "half" / "export").exists() and (tmp_path / "half" / "metrics.jsonl").exists()


def test_what_shows_of_an_exchange(monkeypatch):
    exchange = toys.script("bench_step", "scripts").exchange
    work, nccl = "gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert exchange([(0, 1000, work)]) == (0.0, 0.0)
    # Two exchanges overlap each other and the work: from 500 to 2500 one of them runs, from 1000 to 1500 and from 2000 on nothing else does.
    kernels = [(0, 1000, work), (500, 1800, nccl), (1500, 2000, work), (1700, 2500, nccl)]
    assert exchange(kernels) == pytest.approx((2.0, 1.0))


def test_what_graphs_keep_is_counted_apart(monkeypatch):
    part = lambda device, pool, total, used: {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": used}  # fmt: skip
    parts = [part(0, (0, 0), 100, 10), part(0, (1, 0), 50, 20), part(0, (0, 7), 8, 0), part(1, (1, 0), 1000, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: parts)
    held = toys.script("bench_step", "scripts").held_by_graphs
    assert (held(0), held(1)) == (38, 1000)


def test_tables_hold_what_was_measured(script):
    step = {"ms": 50.0, "ms_wall": 51.0, "above_static_gib": 2.0, "peak_gib_by_gpu": [9.5]}
    results = [
        {"part": "alone", "label": "big: alone", "ranks": 1, "blocks_per_s": 1000.0, **step},
        {"part": "alone", "label": "big: alone, profiled", "ranks": 1, "blocks_per_s": 10.0, **step},
        {"part": "engines", "label": "big: ddp", "ranks": 2, "blocks_per_s": 100.0, **step},
        {"part": "engines", "label": "big: ddp", "ranks": 2, "blocks_per_s": 970.0, **step, "host_syncs": 0},
        {"part": "split", "label": "big: target on the other GPU", "ranks": 1, "blocks_per_s": 1900.0, **step | {"peak_gib_by_gpu": [7.0, 8.5]}},
        {"part": "parity", "what": "2 ranks against one", "format": "fp32", "first_loss": 1e-8, "losses": 2e-7, "grad_norms": 0, "weights": 0, "tolerance": 1e-4, "same_rows": True, "ok": True},
        {"part": "parity", "what": "one otherwise", "format": "bf16", "first_loss": 0, "losses": 7e-3, "grad_norms": 0, "weights": 0, "tolerance": None, "same_rows": True, "ok": True},
        {"part": "kill", "seconds": 4.5, "messages": 1},
        {"part": "zero2", "failed": "no such library"},
    ]  # fmt: skip
    text = script.markdown(results)
    assert "| big: ddp | 2 | 50.0 | 51.0 | 970.0 | 97.0% | - | - | 9.5 | 2.0 | 0 |" in text and "10.0%" not in text
    assert "| big: target on the other GPU | 2 | 50.0 | 51.0 | 950.0 | 95.0% | - | - | 7.0 + 8.5 | 2.0 | - |" in text
    assert "| 2 ranks against one | fp32 | 1.0e-08 | 2.0e-07 | 0.0e+00 | 0.0e+00 | 1.0e-04 | yes | ok |" in text
    assert "| one otherwise | bf16 | 0.0e+00 | 7.0e-03 | 0.0e+00 | 0.0e+00 | - | yes | ok |" in text
    assert 'kill: {"seconds": 4.5, "messages": 1}' in text and "zero2: FAILED: no such library" in text


def test_an_unknown_part_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["allone", "--out", "unused"])
    assert "no such part: allone; there are alone, ddp" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_are_timed_beside_one_and_a_failure_is_a_result(tmp_path):
    """The library of the last part is not there, or rather is not to be found."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError('not here')")
    command = [
        sys.executable,
        "scripts/bench_ranks.py",
        "alone",
        "ddp",
        "zero2",
        "--tiny",
        "--steps",
        "1",
        "--warmup",
        "1",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--table"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400, env=toys.os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").open()]
    labels = {r["label"]: r for r in results if "label" in r}
    assert labels["tiny: alone"]["rows"] == 1 and labels["tiny: ddp"]["rows"] == 2
    assert labels["tiny: ddp"]["blocks"] == labels["tiny: alone"]["blocks"] == 4  # of one rank
    assert {"tiny: ddp, buckets of 100 MiB", "tiny: ddp, gradients in bf16", "short documents: ddp"} <= set(labels)
    assert labels["tiny, 8 rows a step: alone"]["rows"] == labels["tiny, 8 rows a step: ddp"]["rows"] == 8
    assert labels["tiny, 8 rows a step: alone"]["blocks"] == 2 * labels["tiny, 8 rows a step: ddp"]["blocks"] == 32
    assert (tmp_path / "out" / "tiny, ddp, profiled.txt").exists() == torch.cuda.is_available()
    assert [r["part"] for r in results if "failed" in r] == ["zero2"] and "needs the deepspeed library" in results[-1][
        "failed"
    ]
    assert "| tiny: ddp | 2 |" in done.stdout
