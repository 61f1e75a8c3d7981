"""Learning rate as a function of the step, and which tensors decay."""

from __future__ import annotations

import itertools
import math

import pytest
import toys

from dflash_train.config.schema import OptimizerConfig
from dflash_train.drafter.model import Drafter
from dflash_train.optim import build_optimizer, lr_at


def test_the_rate_rises_linearly_then_falls_by_a_cosine_to_its_floor():
    config = OptimizerConfig(lr=1.0, warmup_ratio=0.04, min_lr_ratio=0.1)
    rates = [lr_at(s, 100, config) for s in range(100)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4 + 19] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 19 / 95)))
    assert all(b <= a for a, b in itertools.pairwise(rates[4:]))


@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_a_finite_positive_rate(total):
    rates = [lr_at(s, total, OptimizerConfig(lr=1.0)) for s in range(total)]
    assert rates[0] == 1.0
    assert all(0 < r <= 1 for r in rates)


def test_only_matrices_decay():
    drafter = Drafter(toys.toy_spec())
    decayed, plain = build_optimizer(drafter.named_parameters(), OptimizerConfig(weight_decay=0.1)).param_groups
    names = {id(p): n for n, p in drafter.named_parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(names[id(p)].endswith("weight") and p.ndim == 2 for p in decayed["params"])
    rest = {names[id(p)] for p in plain["params"]}
    assert {"candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel", "norm.weight"} <= rest
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
