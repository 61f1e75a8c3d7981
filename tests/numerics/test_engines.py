"""Every engine trains what one process trains, and each of them continues from any other's state."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import toys

from dflash_train import ranks
from dflash_train.config.schema import EngineKind
from dflash_train.types import Saved

STEPS = 4
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
KINDS = [
    ("ddp", False),
    ("fsdp2", False),
    pytest.param(("deepspeed_zero1", False), marks=DEEPSPEED),
    pytest.param(("deepspeed_zero1", True), marks=DEEPSPEED),
    pytest.param(("deepspeed_zero2", False), marks=DEEPSPEED),
    pytest.param(("deepspeed_zero2", True), marks=DEEPSPEED),
]


def stream(rows_per_step: int = 4, micro: int = 1):
    """Rows of very different weight: one has a single supervised slot, two have no legal anchor; every second step has one row only."""
    spans = [slice(4, None), slice(20, 22), slice(2, 9), slice(11, 12), slice(10, 30)]
    made = [toys.document(30, spans[i % 5], name=f"d{i}", seed=i) for i in range(rows_per_step + 1)]
    return toys.stream_of(made, global_batch_size=rows_per_step, micro_batch_size=micro)


def trained(kind: str, offload: bool, micro: int = 1, rows_per_step: int = 4, steps: int = STEPS, **spec):
    """What each rank logged, and on rank 0 what the engine gathered."""
    step = toys.toy_step(**spec)
    engine, logged = toys.train_steps(
        step, stream(rows_per_step, micro), steps, kind=EngineKind(kind), offload=offload
    )
    return logged, engine.gather()


def all_of(cases):
    return [trained(*case[:-1], **case[-1]) for case in cases]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def assert_equal(one, other):
    (logged, saved), (other_logged, other_saved) = one, other
    for a, b in zip(logged, other_logged, strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=1e-6)
    assert difference(saved.weights, other_saved.weights) < 1e-6
    assert difference(saved.moments, other_saved.moments) < 1e-6
