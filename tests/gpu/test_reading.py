"""The fast ways of reading the target and of feeding the step against the plain ones, on CUDA."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import toys

from dflash_train.clock import Clock
from dflash_train.config.schema import ObjectiveConfig
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.drafter.model import Drafter, initialise
from dflash_train.feed import Feed
from dflash_train.method import DraftStep
from dflash_train.objective.loss import decay
from dflash_train.target.elsewhere import Elsewhere, current
from dflash_train.target.hf import HFTarget
from dflash_train.target.linear import Float8Linear, join_linears, scaled_product, scaled_product_reference
from dflash_train.target.varlen import enable_varlen
from dflash_train.walk import move

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

ONE_EACH = [[toys.document(48)], [toys.document(48, seed=1)]]
PACKED = [
    [toys.document(20), toys.document(9, seed=2), toys.document(19, seed=3)],
    [toys.document(33), toys.document(11, seed=4)],
]


def wide_model(dtype: torch.dtype, window: int | None = None):
    """A toy whose widths suit the 8-bit units and flash attention."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = toys.toy_config(window=window)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 64
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).eval().requires_grad_(False).to("cuda", dtype)


def wide_info():
    return toys.toy_info(hidden_size=128, intermediate_size=256, head_dim=64)


def features(
    rows, dtype=torch.bfloat16, *, window=None, join=False, eight_bits=False, compiled=False, side_by_side=True
):
    model = wide_model(dtype, window)
    if side_by_side:
        assert enable_varlen(model) is None
    if join or eight_bits:
        join_linears(model.model.layers, eight_bits=eight_bits)
    target = HFTarget(model, wide_info(), (1, 3))
    batch = move(toys.batch_of(rows, [[], []], block_size=4, length=48), torch.device("cuda"))
    if compiled:
        target.compile(batch.token_ids_BT.numel(), record=False)
    real = batch.document_ids_BT >= 0
    return target.read(batch).features_BTF[real].float()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("rows", [ONE_EACH, PACKED], ids=["one document per row", "packed"])
def test_joined_and_compiled_layers_read_as_the_plain_model_does(rows, window, capsys):
    exact = features(rows, torch.float32, window=window, side_by_side=False)
    plain = difference(features(rows, window=window, side_by_side=False), exact)
    fast = difference(features(rows, window=window, join=True, compiled=True), exact)
    with capsys.disabled():
        print(f"\nfeatures against float32: plain bfloat16 {plain:.1e}, joined and compiled {fast:.1e}")
    assert fast < 1.5 * plain + 1e-3


def test_eight_bit_features_are_near_and_exactly_what_the_reference_says(capsys):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(96, 256, device="cuda", generator=generator).bfloat16()
    layer = Float8Linear(torch.randn(512, 256, device="cuda", generator=generator) * 0.05, None)
    from dflash_train.kernels.swiglu import quantise

    eight, scale = quantise(x)
    arguments = (eight, scale, layer.weight, layer.scale, torch.bfloat16)
    assert difference(scaled_product(*arguments).float(), scaled_product_reference(*arguments).float()) < 5e-3
    near = difference(
        features(PACKED, eight_bits=True, compiled=True), features(PACKED, torch.float32, side_by_side=False)
    )
    with capsys.disabled():
        print(f"\n8-bit features differ by {near:.1e} from float32")
    assert 1e-3 < near < 0.3  # the toy has ten times the usual weights, which amplify every difference


@pytest.mark.parametrize("eight_bits", [False, True])
def test_recorded_reads_equal_compiled_ones_whatever_the_documents_are(eight_bits):
    batches = [
        move(toys.batch_of(rows, [[], []], block_size=4, length=48), torch.device("cuda"))
        for rows in (ONE_EACH, PACKED, [*PACKED[:1], *ONE_EACH[:1]], ONE_EACH[::-1], PACKED[::-1])
    ]
    model = wide_model(torch.bfloat16)
    assert enable_varlen(model) is None
    join_linears(model.model.layers, eight_bits=eight_bits)
    plain, recorded = (HFTarget(model, wide_info(), (1, 3)) for _ in range(2))
    plain.compile(96, record=False)
    recorded.compile(96, record=True)
    for target in (plain, recorded):
        first = target.read(batches[0]).features_BTF
        assert torch.equal(target.read(batches[0]).features_BTF, first)
    for batch in [*batches, *batches]:
        real = batch.document_ids_BT >= 0
        # Read twice at once on two streams: neither may find the other's rows.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = recorded.read(batches[1]).features_BTF
        found = recorded.read(batch).features_BTF
        torch.cuda.synchronize()
        assert difference(found[real].float(), plain.read(batch).features_BTF[real].float()) < 1e-2
        real = batches[1].document_ids_BT >= 0
        assert difference(other[real].float(), plain.read(batches[1]).features_BTF[real].float()) < 1e-2
    assert recorded._recorder is not None and len(recorded._recorder.graphs) == 2


def made(*, read_ahead: bool, steps: int = 4, place: torch.device | None = None):
    """A small step on CUDA in bf16 with its feed. place: of the target, where it is not the drafter's."""
    device = torch.device("cuda", 0)
    spec = toys.toy_spec(block_size=8, head_dim=64, hidden_size=128, intermediate_size=256)
    model = copy.deepcopy(wide_model(torch.bfloat16)).to(place or device)
    with current(place or device):
        join_linears(model.model.layers, eight_bits=False)
        assert enable_varlen(model) is None
    target = HFTarget(model, wide_info(), spec.target_layer_ids)
    target.compile(256, record=True)
    if place is not None:
        target = Elsewhere(target, device)
    drafter = Drafter(spec)
    initialise(drafter, 0)
    step = DraftStep(drafter.to(device), target, ObjectiveConfig(), dtype=torch.bfloat16)
    documents = [toys.document(40 + i % 17, slice(4, None), name=f"d{i}", seed=i) for i in range(40)]
    config = StreamConfig(
        row_length=128, num_anchors=16, decay_S=np.array(decay(8, 4.0)), global_batch_size=4, micro_batch_size=2, seed=0
    )
    stream = RowStream(documents, config)
    engine = toys.toy_engine(step, stream.micro_batches_per_rank(1))
    return step, engine, Feed(stream, target, device, Clock(device), end=steps, read_ahead=read_ahead)


def one_step(engine, feed: Feed, number: int, features: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The step's loss; features: where those of its real tokens are put as well."""
    weight = torch.full((), sum(b.weight for b in feed.batches(number)), device="cuda")
    total = torch.zeros((), device="cuda")
    for batch, found in feed.step(number):
        if features is not None:
            features.append(found.features_BTF.float() * (batch.document_ids_BT >= 0)[..., None])
        report = engine.forward(batch, found, weight)
        engine.backward(report.loss)
        total += report.loss.detach()
    engine.update(1e-3)
    return total


def test_reading_ahead_changes_nothing():
    losses = []
    for ahead in (False, True):
        _, engine, feed = made(read_ahead=ahead)
        losses.append([float(one_step(engine, feed, n)) for n in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][3]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_recorded_target_on_another_gpu_feeds_what_one_beside_the_drafter_does(capsys):
    """Compiled for each GPU, so that features are rounded otherwise; those of other rows would be as far from these as they are long."""
    losses, read = [], []
    for place in (None, torch.device("cuda", 1)):
        step, engine, feed = made(read_ahead=True, steps=8, place=place)
        features: list[torch.Tensor] = []
        losses.append([float(one_step(engine, feed, n, features)) for n in range(8)])
        read.append(features)
    apart = max(difference(there, here) for here, there in zip(*read, strict=True))
    others = min(difference(here, other) for here, other in zip(read[0], read[0][1:], strict=False))
    with capsys.disabled():
        print(
            f"\nfeatures read on another GPU {apart:.1e}, those of the next rows at least {others:.1e} from these; losses {losses}"
        )
    assert step.target.there._recorder.graphs
    assert apart < 5e-2 < 0.5 < others
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_step_never_waits_for_the_device():
    _, engine, feed = made(read_ahead=True, steps=6)
    for n in range(2):
        one_step(engine, feed, n)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one_step(engine, feed, 2)
            one_step(engine, feed, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    assert not waits
