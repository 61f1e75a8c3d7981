"""The training step's kernels against their plain twins: values and gradients. On a machine without CUDA they can be rehearsed with Triton's
interpreter (TRITON_INTERPRET=1) at small sizes."""

from __future__ import annotations

import os

import pytest
import torch

from dflash_train.kernels.adamw import update, update_reference
from dflash_train.kernels.gather import gather_dot, gather_dot_reference, take_rows
from dflash_train.kernels.head import score_rows_kernel, score_rows_reference, transform_logits
from dflash_train.kernels.swiglu import quantised_swiglu, quantised_swiglu_reference
from dflash_train.optim import AdamW

CUDA = torch.cuda.is_available()
REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = pytest.mark.skipif(not (CUDA or REHEARSED), reason="needs CUDA")
only_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA")
VOCABULARIES = [50, 2048, 5000] + [151_936, 248_320, 262_145] * CUDA


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.7, None), (1.0, 4.0), (2.5, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [16, 4])
def test_the_head_kernel_scores_rows_as_its_reference(vocab, multiplier, softcap, dtype, top_k):
    rows = 70 if CUDA else 5
    logits = (randn(rows, vocab) * 3).to(dtype)
    labels = torch.randint(vocab, (rows,), device=DEVICE)
    nll, candidates, gradient = score_rows_reference(logits, labels, top_k, multiplier, softcap, gradient=True)
    ours = logits.clone()
    got = score_rows_kernel(ours, labels, top_k, multiplier, softcap, gradient=True)
    torch.testing.assert_close(got[0], nll, rtol=2e-5, atol=2e-5)
    # Equal logits may change places; their values may not, and no token may be named twice.
    transformed = transform_logits(logits.float(), multiplier, softcap)
    values = transformed.gather(1, got[1])
    torch.testing.assert_close(values, transformed.gather(1, candidates), rtol=1e-5, atol=1e-5)
    if softcap is None:
        assert torch.equal(values, transformed.gather(1, candidates))
    assert all(len(set(row)) == top_k for row in got[1].tolist())
    assert got[2] is ours
    torch.testing.assert_close(
        got[2].float(), gradient.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6
    )


def test_the_head_kernel_without_a_gradient_leaves_the_logits_alone():
    logits, labels = randn(3, 3000), torch.tensor([0, 7, 2999], device=DEVICE)
    before = logits.clone()
    nll, candidates, gradient = score_rows_kernel(logits, labels, 8, 1.0, None, gradient=False)
    assert gradient is None and torch.equal(logits, before)
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(before, labels, reduction="none"))
    assert torch.equal(candidates, before.topk(8).indices)


def test_equal_logits_are_all_different_candidates():
    logits = torch.zeros(2, 5000, device=DEVICE, dtype=torch.bfloat16)
    logits[:, [3, 2051, 4099]] = 1.0  # all in one lane
    _, candidates, _ = score_rows_kernel(logits, torch.tensor([0, 1], device=DEVICE), 16, 1.0, None, gradient=False)
    assert candidates[:, :3].tolist() == [[3, 2051, 4099]] * 2
    assert all(len(set(row)) == 16 for row in candidates.tolist())


@pytest.mark.parametrize(("M", "C", "V", "H"), [(7, 16, 60, 256), (9, 4, 30, 40), (5, 16, 9, 300), (40, 3, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_products_and_their_gradients_equal_autograd(M, C, V, H, dtype):
    index = torch.randint(V, (M, C), device=DEVICE)
    d = randn(M, C, seed=2)
    both = []
    for function in (gather_dot_reference, gather_dot):
        x, table = randn(M, H).to(dtype).requires_grad_(), (randn(V, H, seed=1) * 0.3).requires_grad_()
        out = function(x, table, index)
        (out * d).sum().backward()
        both.append((out, x.grad, table.grad))
    for ours, theirs in zip(both[1], both[0], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype is torch.bfloat16 else 1e-4, atol=1e-4)


def test_taken_rows_give_their_gradient_to_the_table():
    index = torch.tensor([3, 3, 0, 5, 3] * 20, device=DEVICE)
    table, other, d = randn(9, 70).requires_grad_(), randn(9, 70).requires_grad_(), randn(100, 70, seed=3)
    (take_rows(table, index) * d).sum().backward()
    (other[index] * d).sum().backward()
    torch.testing.assert_close(table.grad, other.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(take_rows(table, index), table[index])


def test_the_gradient_of_a_table_is_the_same_twice():
    index = torch.randint(4, (200, 16), device=DEVICE)
    gradients = []
    for _ in range(2):
        table = randn(50, 64).requires_grad_()
        gather_dot(randn(200, 64, seed=1), table, index).square().sum().backward()
        gradients.append(table.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(3,), (1024,), (70, 33)])
@pytest.mark.parametrize("decay", [1.0, 0.999])
@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_the_adamw_kernel_updates_as_its_reference(shape, decay, skipped):
    scalar = lambda x: torch.tensor(x, device=DEVICE)  # noqa: E731
    numbers = {"rate": scalar(2e-3), "root": scalar(0.3), "divisor": scalar(1.7), "decay": scalar(decay)}
    numbers["skipped"] = scalar(skipped)
    both = []
    for function in (update_reference, update):
        tensors = [randn(*shape, seed=i) for i in range(4)]
        tensors[3].abs_()
        before = [t.clone() for t in tensors]
        function(*tensors, beta1=0.9, beta2=0.95, eps=1e-8, **numbers)
        assert [torch.equal(t, was) for t, was in zip(tensors, before, strict=True)][0] is bool(skipped)
        both.append(tensors)
    for ours, theirs in zip(both[1], both[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("skipped", [(), (0, 3), (2,)])
def test_the_optimizer_is_torchs(weight_decay, skipped, monkeypatch):
    """Also where a step is not to be taken: its gradient is not a number then, as the guard finds it."""
    if not CUDA:  # rehearse what CUDA takes
        monkeypatch.setattr(AdamW, "step", lambda self: [self._update(g["params"], g) for g in self.param_groups])
    ours, theirs = ([randn(300, 50).requires_grad_(), randn(7, seed=1).requires_grad_()] for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay, "fused": True}
    mine, torchs = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = randn(*p.shape, seed=10 + step) * (torch.nan if step in skipped else 1.0)
            q.grad = p.grad.clone()
        divisor = torch.tensor(torch.nan if step in skipped else 2.0, device=DEVICE)
        for optimizer in (mine, torchs):
            optimizer.grad_scale = divisor
            optimizer.found_inf = torch.tensor(float(step in skipped), device=DEVICE)
            with torch.no_grad():
                optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for name, value in torchs.state[q].items():
            torch.testing.assert_close(mine.state[p][name], value, rtol=1e-5, atol=1e-7)
    again = AdamW([p.detach().clone().requires_grad_() for p in ours], **options)
    again.load_state_dict(mine.state_dict())
    assert float(again.state[again.param_groups[0]["params"][0]]["step"]) == 5 - len(skipped)


@pytest.mark.parametrize("width", [96, 1000] + [9728, 17408] * CUDA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantised_gated_product_is_its_reference(width, dtype):
    gate_up = (randn(5, 2 * width) * 2).to(dtype)
    gate_up[3] = 0
    both = [do(gate_up) for do in (quantised_swiglu, quantised_swiglu_reference)]
    (ours, our_scale), (eight, scale) = both
    assert ours.dtype is eight.dtype and our_scale.dtype is torch.float32
    torch.testing.assert_close(our_scale, scale, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
    # A rounding may fall to the neighbour, which is an eighth away, where silu differs in its last bit.
    assert (ours.float() == eight.float()).float().mean() > 0.97
    torch.testing.assert_close(ours.float() * our_scale, eight.float() * scale, rtol=0.13, atol=float(scale.max()) / 64)
