"""The draft's attention kernels against their plain twin: values and gradients over all kinds of masks. Without a Hopper they are rehearsed at
small sizes by the stand-ins of gluon_on_cpu.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gluon_on_cpu import interpreted

from dflash_train.drafter.mask import span_mask
from dflash_train.kernels.attention import block_attention, block_attention_reference, is_hopper
from dflash_train.types import DraftBlocks

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(CUDA and not is_hopper(DEVICE), reason="needs a Hopper, or no GPU")


@pytest.fixture(autouse=True, scope="module")
def kernels():
    if CUDA:
        yield
    else:
        with interpreted():
            yield


def some_blocks(
    B: int, T: int, N: int, S: int, *, whole: bool, ordered: bool = True
) -> tuple[DraftBlocks, torch.Tensor]:
    """Rows of one document, or of several with padding; unused blocks at the end; blocks of fewer slots."""
    random = np.random.default_rng(T + N)
    documents = np.stack(
        [np.searchsorted(np.sort(random.integers(1, T, 0 if whole else 3)), np.arange(T), "right")] * B
    )
    anchors = random.integers(0, T, (B, N))
    valid = np.ones((B, N), bool)
    if not whole:
        documents[-1, T - T // 5 :] = -1
        valid[:, N - N // 4 :] = False
    anchors = np.where(valid, np.sort(anchors, -1) if ordered else anchors, 0)
    slots = np.full((B, N), S) if whole else random.integers(1, S + 1, (B, N))
    blocks = DraftBlocks(
        anchors_BN=torch.from_numpy(anchors).to(DEVICE),
        valid_BN=torch.from_numpy(valid).to(DEVICE),
        slots_BN=torch.from_numpy(slots).to(DEVICE),
        labels_BNS=torch.zeros(B, N, S, dtype=torch.long),
        weights_BNS=torch.zeros(B, N, S),
        supervised_BNS=torch.zeros(B, N, S, dtype=torch.bool),
        scored_M=torch.empty(0, dtype=torch.long),
    )
    return blocks, torch.from_numpy(documents).to(DEVICE)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def inputs(B: int, T: int, Q: int, heads: int, kv: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((Q, heads), (T, kv), (T, kv), (Q, kv), (Q, kv))
    return [randn(B, n, h, D, seed=i, dtype=dtype).requires_grad_() for i, (n, h) in enumerate(shapes)]


def ours(tensors, sees, change=lambda x: x) -> list[torch.Tensor]:
    """The output and the five gradients."""
    out = block_attention(*map(change, tensors), sees)
    return [out, *torch.autograd.grad(out, tensors, randn(*out.shape, seed=9, dtype=out.dtype))]


def twins(tensors, sees) -> list[torch.Tensor]:
    """The same of the twin in fp32."""
    wide = [x.detach().float().requires_grad_() for x in tensors]
    out = block_attention_reference(*wide, sees)
    d = randn(*out.shape, seed=9, dtype=tensors[0].dtype).float()
    return [out, *torch.autograd.grad(out, wide, d)]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dkc", "dvc", "dkb", "dvb"), found, wanted, strict=True):
        error = float((a.detach().float() - b.detach()).norm() / b.detach().norm().clamp_min(1e-6))
        assert error < TOLERANCE[a.dtype], f"{name}: {error:.1e}"


SMALL = [  # B, T, N, S, heads, key heads, head dim
    (1, 300, 40, 8, 4, 1, 64),  # a group of 4: two blocks of a key head in a warp group
    (
        2,
        260,
        19,
        7,
        6,
        2,
        64,
    ),  # blocks and groups that are no powers of two; a number of queries the copy engine cannot step by
    (1, 150, 9, 16, 2, 2, 128),  # no groups
    (1, 200, 10, 16, 4, 2, 64),  # a group of 2
    (2, 140, 5, 16, 8, 1, 64),  # a group of 8, of which a program takes 4
    (1, 140, 9, 8, 7, 1, 64),  # a group of 7
    (1, 140, 3, 33, 4, 2, 64),  # a block that fills a warp group alone
    (1, 40, 1, 8, 4, 2, 64),  # less than a tile of everything
]
SIZES = SMALL + [
    (2, 700, 90, 8, 32, 8, 128), (1, 4096, 512, 8, 8, 2, 128), (1, 1000, 50, 16, 28, 4, 128), (1, 700, 64, 4, 8, 1, 64), (3, 515, 33, 5, 12, 12, 128),
    (2, 900, 61, 16, 16, 2, 128), (1, 900, 20, 64, 4, 1, 128),
] * CUDA  # fmt: skip
MASKS = [  # window, causal, whole
    (None, False, True), (None, True, False), (30, False, False), (150, False, True), (150, True, False), (None, False, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("window", "causal", "whole"), MASKS if CUDA else MASKS[:3])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_values_and_gradients_equal_the_twins(size, window, causal, whole, dtype):
    B, T, N, S, heads, kv, D = size
    sees = span_mask(*some_blocks(B, T, N, S, whole=whole), S, window and max(window, S), causal)
    tensors = inputs(B, T, N * S, heads, kv, D, dtype)
    assert_close(ours(tensors, sees), twins(tensors, sees))


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_in_any_order_are_slow_and_right(window):
    sees = span_mask(*some_blocks(1, 400, 40, 8, whole=False, ordered=False), 8, window, False)
    tensors = inputs(1, 400, 320, 4, 2, 64, torch.bfloat16)
    assert_close(ours(tensors, sees), twins(tensors, sees))


def test_other_strides_give_the_same():
    """Values as the split of a joined projection leaves them, keys and queries as heads before positions."""
    sees = span_mask(*some_blocks(2, 200, 20, 8, whole=False), 8, None, False)
    tensors = inputs(2, 200, 160, 4, 2, 64, torch.bfloat16)

    def moved(x):
        joined = torch.cat([x, x], 2)[:, :, : x.shape[2]]
        return joined if x.shape[1] == 200 else x.transpose(1, 2).contiguous().transpose(1, 2)

    assert all(torch.equal(a, b) for a, b in zip(ours(tensors, sees, moved), ours(tensors, sees), strict=True))


def test_a_query_that_sees_nothing_gives_zero_and_gets_zero():
    blocks, documents = some_blocks(1, 100, 6, 8, whole=True)
    blocks.slots_BN[0, 0], blocks.valid_BN[0, 0] = 0, False
    sees = span_mask(blocks, documents, 8, None, False)
    tensors = inputs(1, 100, 48, 4, 2, 64, torch.bfloat16)
    found = ours(tensors, sees)
    assert not found[0][:, :8].any() and not found[1][:, :8].any()
    assert_close(found, twins(tensors, sees))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [(2, 300, 40, 8, 4, 1, 64), (2, 260, 19, 7, 8, 1, 64)], ids=str)
def test_runs_are_the_same_whatever_the_memory_held(size, whole):
    """Bit for bit; what was not written before it is read is not a number then."""
    B, T, N, S, heads, kv, D = size
    sees = span_mask(*some_blocks(B, T, N, S, whole=whole), S, None, False)
    tensors = inputs(B, T, N * S, heads, kv, D, torch.bfloat16)
    first = ours(tensors, sees)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert tensors[0].new_empty(3).isnan().all()
        for _ in range(10 if CUDA else 1):
            assert all(torch.equal(a, b) for a, b in zip(ours(tensors, sees), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [False, True])
def test_the_operation_is_one_node_of_a_compiled_graph(fused):
    blocks, documents = some_blocks(1, 130, 8, 8, whole=False)
    tensors = inputs(1, 130, 64, 4, 2, 64, torch.bfloat16)
    sees = span_mask(blocks, documents, 8, None, False)
    torch.library.opcheck(torch.ops.dflash_train.block_attention.default, (*tensors, *sees))

    def both(*tensors):
        return block_attention(*tensors, span_mask(blocks, documents, 8, None, False) if fused else sees)

    run = torch.compile(both, backend="inductor" if CUDA else "aot_eager", fullgraph=True, dynamic=False)
    found = [f(*tensors) for f in (both, run)]
    gradients = [torch.autograd.grad(out.float().square().sum(), tensors) for out in found]
    assert torch.equal(*found) and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("dtype", "D", "S", "said"),
    [(torch.float32, 64, 8, "16 bits"), (torch.bfloat16, 32, 8, "not of 32"), (torch.bfloat16, 64, 65, "not of 65")],
)
def test_what_the_kernels_cannot_do_is_refused(dtype, D, S, said):
    sees = span_mask(*some_blocks(1, 130, 2, S, whole=True), S, None, False)
    with pytest.raises(ValueError, match=said):
        block_attention(*inputs(1, 130, 2 * S, 4, 2, D, dtype), sees)
