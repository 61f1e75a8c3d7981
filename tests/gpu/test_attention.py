"""The draft's attention kernels against their plain twin: values and gradients over all kinds of masks. On a machine without CUDA they can be
rehearsed with Triton's interpreter (TRITON_INTERPRET=1; it multiplies no bf16, so fp16 stands in)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from dflash_train.kernels.attention import block_attention, block_attention_reference, block_spans
from dflash_train.types import DraftBlocks

CUDA = torch.cuda.is_available()
REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
HALF = torch.bfloat16 if CUDA else torch.float16
pytestmark = pytest.mark.skipif(not (CUDA or REHEARSED), reason="needs CUDA")


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


def inputs(B: int, T: int, Q: int, heads: int, kv: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((Q, heads), (T, kv), (T, kv), (Q, kv), (Q, kv))
    made = [torch.randn(B, n, h, D, generator=generator, device=DEVICE) for n, h in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def both(blocks, documents, S, window, causal, tensors, change=lambda x: x) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ours, the twin's in fp32) of the output and of the five gradients."""
    sees = block_spans(blocks, documents, S, window, causal)
    generator = torch.Generator(DEVICE).manual_seed(1)
    d = torch.randn(tensors[0].shape, generator=generator, device=DEVICE).to(tensors[0].dtype)
    ours = block_attention(*map(change, tensors), sees)
    wide = [x.detach().float().requires_grad_() for x in tensors]
    theirs = block_attention_reference(*wide, sees)
    return list(
        zip(
            [ours, *torch.autograd.grad(ours, tensors, d)],
            [theirs, *torch.autograd.grad(theirs, wide, d.float())],
            strict=True,
        )
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach()).norm() / b.detach().norm().clamp_min(1e-6))


SIZES = [  # B, T, N, S, heads, kv heads, head dim
    (1, 300, 40, 8, 4, 1, 16),
    (2, 260, 19, 7, 6, 2, 24),  # neither blocks, heads of a group, nor head dim are powers of two
    (1, 150, 9, 16, 2, 2, 32),
    *[(2, 700, 90, 8, 32, 8, 128), (1, 4096, 512, 8, 8, 2, 128), (1, 1000, 50, 16, 28, 4, 128), (1, 700, 64, 4, 8, 1, 64)] * CUDA,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 30, 150])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)], ids=["float32", "half"])
def test_values_and_gradients_equal_the_twins(size, causal, window, whole, dtype, tolerance):
    B, T, N, S, heads, kv, D = size
    blocks, documents = some_blocks(B, T, N, S, whole=whole)
    tensors = inputs(B, T, N * S, heads, kv, D, dtype)
    errors = [relative(a, b) for a, b in both(blocks, documents, S, window, causal, tensors)]
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_in_any_order_are_slow_and_right(window):
    blocks, documents = some_blocks(1, 400, 40, 8, whole=False, ordered=False)
    tensors = inputs(1, 400, 320, 4, 2, 16, torch.float32)
    assert max(relative(a, b) for a, b in both(blocks, documents, 8, window, False, tensors)) < 1e-5


def test_heads_before_positions_are_read_where_they_are():
    """Keys and values as a joined projection and RoPE leave them: other strides than a tensor of its own has."""
    blocks, documents = some_blocks(2, 200, 20, 8, whole=False)
    tensors = inputs(2, 200, 160, 4, 2, 16, torch.float32)

    def moved(x):
        return (
            torch.cat([x, x], 2)[:, :, : x.shape[2]]
            if x.shape[1] == 200
            else x.transpose(1, 2).contiguous().transpose(1, 2)
        )

    assert max(relative(a, b) for a, b in both(blocks, documents, 8, None, False, tensors, moved)) < 1e-5


def test_a_query_that_sees_nothing_gives_zero_and_gets_zero():
    blocks, documents = some_blocks(1, 100, 6, 8, whole=True)
    blocks.slots_BN[0, 0], blocks.valid_BN[0, 0] = 0, False
    tensors = inputs(1, 100, 48, 4, 2, 16, torch.float32)
    found = both(blocks, documents, 8, None, False, tensors)
    assert all(torch.isfinite(a).all() for a, _ in found)
    assert not found[0][0][:, :8].any() and not found[1][0][:, :8].any()
    assert max(relative(a, b) for a, b in found) < 1e-5


def test_the_gradients_are_the_same_twice():
    blocks, documents = some_blocks(2, 300, 40, 8, whole=False)
    tensors = inputs(2, 300, 320, 4, 1, 16, HALF)
    first, second = (both(blocks, documents, 8, None, False, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))


def test_the_operation_is_one_node_of_a_compiled_graph():
    blocks, documents = some_blocks(1, 130, 8, 8, whole=False)
    tensors = inputs(1, 130, 64, 4, 2, 16, torch.float32)
    sees = block_spans(blocks, documents, 8, None, False)
    torch.library.opcheck(torch.ops.dflash_train.block_attention.default, (*tensors, *sees))
    run = torch.compile(block_attention, backend="inductor" if CUDA else "aot_eager", fullgraph=True, dynamic=False)
    found = [(f(*tensors, sees)) for f in (block_attention, run)]
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in found]
    assert torch.equal(*found) and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
