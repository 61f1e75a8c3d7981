"""Loss, metrics and parameters do not depend on how a step's rows are cut into micro-batches and ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

STEPS = 3


def rows(count: int = 5):
    """Rows of very different weight: one has a single supervised slot, one has no legal anchor."""
    spans = [slice(4, None), slice(20, 22), slice(2, 9), slice(11, 12), slice(10, 30)]
    return [toys.document(30, spans[i % 5], name=str(i), seed=i) for i in range(count)]


def run(micro_batch_size: int, *, rank: int = 0, world_size: int = 1, **spec):
    """5 rows in steps of 4: the second step has one row, so a second rank has only empty rows in it."""
    step = toys.toy_step(**spec)
    logged = toys.train_steps(
        step, toys.stream_of(rows(), micro_batch_size=micro_batch_size), STEPS, rank=rank, world_size=world_size
    )
    return logged, {n: p.detach().clone() for n, p in step.drafter.named_parameters()}


def assert_equal(one, other):
    (logged, parameters), (other_logged, other_parameters) = one, other
    for a, b in zip(logged, other_logged, strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=1e-6)
    for name, p in parameters.items():
        torch.testing.assert_close(p, other_parameters[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("spec", [{}, toys.V1], ids=["dflash2", "v1"])
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batch_size_changes_nothing(size, spec):
    whole, cut = run(4, **spec), run(size, **spec)
    assert_equal(whole, cut)
    start = dict(toys.toy_step(**spec).drafter.named_parameters())
    assert all(not torch.equal(p, start[n]) for n, p in whole[1].items())


def test_a_mean_of_means_would_be_another_loss():
    """Guards the test above: the rows' own losses differ enough that weighting them wrongly would show."""
    step = toys.toy_step()
    losses, weights = [], []
    for batch in toys.stream_of(rows()).micro_batches(0, 0, 1):
        weights.append(batch.weight)
        losses.append(
            toys.mean(step(batch, step.target.read(batch), toys.weight_of(batch)), "base_loss") if batch.weight else 0.0
        )
    pooled = sum(a * w for a, w in zip(losses, weights, strict=True)) / sum(weights)
    assert abs(pooled - sum(losses) / len(losses)) > 0.01


def one_rank(rank: int, port: int, folder: str) -> None:
    """A process of a two-rank run: writes, per micro-batch size, what it logged and its parameters."""
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    from dflash_train import ranks

    ranks.start(timeout_minutes=1)
    for size in (1, 2):
        logged, parameters = run(size, rank=rank, world_size=2)
        save_file(parameters, f"{folder}/{size}-{rank}.safetensors")
        Path(f"{folder}/{size}-{rank}.json").write_text(json.dumps(logged))
    ranks.stop()


def test_two_ranks_are_one_process(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(one_rank, (port, str(tmp_path)), nprocs=2)
    whole = run(4)
    for size in (1, 2):
        for rank in (0, 1):
            name = f"{tmp_path}/{size}-{rank}"
            assert_equal(whole, (json.loads(Path(f"{name}.json").read_text()), load_file(f"{name}.safetensors")))
