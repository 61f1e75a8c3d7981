"""The decay and its default gamma."""

from __future__ import annotations

import itertools
import math

import pytest

from dflash_train.objective.loss import decay, default_gamma, transform_logits


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0), (4, 2.0), (2, 1.0), (9, 4.5), (13, 6.0), (22, 9.0)]
)
def test_default_gamma_is_published_at_8_10_16_and_linear_between(block_size, gamma):
    assert default_gamma(block_size) == pytest.approx(gamma)


def test_default_gamma_rises_with_the_block():
    values = [default_gamma(k) for k in range(2, 64)]
    assert all(b > a for a, b in itertools.pairwise(values))


def test_decay_begins_with_one_at_the_first_drafted_slot():
    assert decay(5, 4.0) == pytest.approx([0.0, 1.0, math.exp(-1 / 4), math.exp(-2 / 4), math.exp(-3 / 4)])


def test_the_multiplier_comes_before_the_soft_cap():
    import torch

    x = torch.tensor([2.0])
    assert transform_logits(x, 3.0, 4.0).item() == pytest.approx(4 * math.tanh(6 / 4))
    assert torch.equal(transform_logits(x, 1.0, None), x)
