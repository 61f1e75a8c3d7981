"""Loss, metrics and parameters do not depend on how a step's rows are cut into micro-batches (nor into ranks: test_engines.py)."""

from __future__ import annotations

import pytest
import torch
import toys

STEPS = 3


def rows(count: int = 5):
    """Rows of very different weight: one has a single supervised slot, one has no legal anchor."""
    spans = [slice(4, None), slice(20, 22), slice(2, 9), slice(11, 12), slice(10, 30)]
    return [toys.document(30, spans[i % 5], name=str(i), seed=i) for i in range(count)]


def run(micro_batch_size: int, **spec):
    """5 rows in steps of 4: the second step has one row only."""
    step = toys.toy_step(**spec)
    _, logged = toys.train_steps(step, toys.stream_of(rows(), micro_batch_size=micro_batch_size), STEPS)
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
