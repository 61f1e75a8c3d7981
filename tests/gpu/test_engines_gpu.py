"""The engines on CUDA under NCCL: each trains what one process trains, on one GPU and, where there are two, on two."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time

import pytest
import torch
import toys

from dflash_train import ranks
from dflash_train.config.schema import EngineKind, ObjectiveConfig
from dflash_train.drafter.mask import dense_mask, flex_mask, span_mask
from dflash_train.drafter.model import Drafter
from dflash_train.kernels.attention import why_not
from dflash_train.method import DraftStep
from dflash_train.target.hf import HFTarget

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
GPUS = torch.cuda.device_count()
STEPS = 5
no_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ENGINES = [
    ("ddp", False),
    ("fsdp2", False),
    *(
        pytest.param((f"deepspeed_zero{stage}", offload), marks=no_deepspeed)
        for stage in (1, 2)
        for offload in (False, True)
    ),
]


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch):
    """By the compiler, which would choose tiles by it and so how sums are rounded."""
    for name, value in toys.script("bench_ranks", "scripts").NOTHING_TIMED.items():
        monkeypatch.setenv(name, value)


MASKS = {"dense": dense_mask, "flex": flex_mask, "own": span_mask}


def trained(
    engine: tuple[str, bool],
    precision: str,
    attention: str,
    compiled: bool,
    poisoned: bool = False,
    record: bool = False,
):
    """(losses and gradient norms, steps taken, state, a figure from the whole drafter) after a few steps, the third of them spoiled if asked."""
    device = torch.device("cuda", ranks.local_rank())
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = toys.toy_spec(head_dim=64)
    dtype = getattr(torch, precision)
    target = HFTarget(toys.toy_model().to(device), toys.toy_info(), spec.target_layer_ids)
    drafter = toys.randomise(Drafter(spec), scale=0.05).to(device)
    step = DraftStep(
        drafter, target, ObjectiveConfig(), dtype=dtype, mask=MASKS[attention], fuse=compiled, record=record
    )
    spans = [slice(4, None), slice(20, 22), slice(2, 90), slice(11, 12), slice(10, 100)]
    rows = [toys.document(128, spans[i % 5], name=f"d{i}", seed=i) for i in range(5)]
    stream = toys.stream_of(rows, num_anchors=16)
    kind, offload = engine
    micro_batches = stream.micro_batches_per_rank(ranks.world_size())
    made = toys.toy_engine(step, micro_batches, kind=EngineKind(kind), offload=offload)

    def spoil(i: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.nan if ranks.rank() == ranks.world_size() - 1 and i == micro_batches - 1 else loss

    norms, taken = [], []
    for n in range(STEPS):
        change = {"change": spoil} if poisoned and n == 2 else {}
        taken.append(toys.train_step(made, stream, n, **change))
        norms.append(made.guard.norm)
    assert not record or (step.recorded._recorded is not None and not step.recorded.why_not)
    with made.whole() as whole, torch.no_grad():
        from dflash_train.walk import move

        batch = move(next(stream.micro_batches(0, 0, 1)), device)
        with whole.autocast():
            figure = float(whole.score(batch, target.read(batch), exact=True)["base_nll_M"].sum())
    skips, _ = made.guard.report(STEPS)
    return [float(n) for n in norms], [bool(t) for t in taken], made.gather(), figure, [s.step for s in skips]


def on_ranks(*arguments):
    began = time.monotonic()
    result = toys.run_ranks(trained, int(os.environ.get("DFLASH_TEST_GPUS", min(GPUS, 2))), *arguments, seconds=300)
    print(f"{arguments}: {time.monotonic() - began:.1f} s")
    return result


@pytest.fixture(scope="module")
def alone():
    known = {}

    def alone(*arguments):
        if arguments not in known:
            (known[arguments],) = toys.run_ranks(trained, 1, ("single", False), *arguments, seconds=300)
        return known[arguments]

    return alone


def assert_close(one, other, rtol: float, atol: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=rtol)
    assert one[1] == other[1] and one[4] == other[4]
    assert one[3] == pytest.approx(other[3], rel=rtol)
    worst = max(float((one[2].weights[n] - w).abs().max()) for n, w in other[2].weights.items())
    norms = max(abs(a - b) / b for a, b in zip(one[0], other[0], strict=True) if b == b)
    print(f"largest difference of a weight {worst:.1e}, of a gradient norm {norms:.1e}")
    assert worst < atol


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("poisoned", [False, True], ids=["clean", "poisoned"])
def test_float32(engine, poisoned, alone):
    setting = ("float32", "dense", False, poisoned)
    whole = alone(*setting)
    assert whole[4] == ([3] if poisoned else [])
    assert_close(on_ranks(engine, *setting)[0], whole, 1e-4, 1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("attention", ["flex", "own"])
def test_bfloat16_with_the_block_sparse_kernels_and_compiled_layers(engine, attention, alone):
    if attention == "own" and (refused := why_not(torch.device("cuda", 0), torch.bfloat16, 64, 8)):
        pytest.skip(refused)
    setting = ("bfloat16", attention, True)
    assert_close(on_ranks(engine, *setting)[0], alone(*setting), 3e-2, 2e-3)


def launched_and_recorded(*arguments):
    """`trained` twice in a process, by the same compiled code: what is compiled again, by itself or by another rank, may round otherwise."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return [trained(*arguments, False, record) for record in (False, True)]


@pytest.mark.parametrize("kind", ["single", "ddp"])
@pytest.mark.parametrize("attention", ["flex", "own"])
def test_a_drafter_that_is_recorded_learns_what_one_that_is_run_does(kind, attention):
    if attention == "own" and (refused := why_not(torch.device("cuda", 0), torch.bfloat16, 64, 8)):
        pytest.skip(refused)
    if kind == "ddp" and GPUS < 2:
        pytest.skip("needs two GPUs")
    processes = 2 if kind == "ddp" else 1
    arguments = ((kind, False), "bfloat16", attention, True)
    launched, recorded = toys.run_ranks(launched_and_recorded, processes, *arguments, seconds=300)[0]
    assert_close(recorded, launched, 1e-6, 1e-7)


def test_sharding_takes_less_memory():
    """Weights, gradients and moments of a large drafter after a step: 16 bytes per parameter in one process, a share of that in each of several."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    one = toys.run_ranks(memory, 1, "single", seconds=300)[0]
    two = toys.run_ranks(memory, 2, "fsdp2", seconds=300)[0]
    print(
        f"between steps: one process {one[0] / 2**20:.0f} MiB, two with fsdp2 {two[0] / 2**20:.0f} MiB; peak {one[1] / 2**20:.0f}, {two[1] / 2**20:.0f}"
    )
    assert two[0] < 0.55 * one[0] and two[1] < 0.8 * one[1]


def memory(kind: str) -> tuple[int, int]:
    """Bytes that the drafter and its optimizer hold between steps, and at most."""
    device = torch.device("cuda", ranks.local_rank())
    spec = toys.toy_spec(num_hidden_layers=8, intermediate_size=262144, selector_rank=4096)
    target = HFTarget(toys.toy_model().to(device), toys.toy_info(), spec.target_layer_ids)
    before = torch.cuda.memory_allocated()
    step = DraftStep(Drafter(spec).to(device), target, ObjectiveConfig(), dtype=torch.float32)
    toys.randomise(step.drafter.cpu(), scale=0.01).to(device)
    stream = toys.stream_of([toys.document(64, name=str(i), seed=i) for i in range(2)], global_batch_size=2)
    engine = toys.toy_engine(step, stream.micro_batches_per_rank(ranks.world_size()), kind=EngineKind(kind))
    torch.cuda.reset_peak_memory_stats()
    for n in range(2):
        toys.train_step(engine, stream, n)
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
