"""The chunked head and the selector's loss against plain autograd over all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash_train.objective.loss import candidate_logits, leading_hits, linear_cross_entropy, selector_cross_entropy

M, H, V, K = 11, 24, 50, 8
TRANSFORMS = [(1.0, None), (0.7, None), (1.0, 4.0), (2.5, 3.0)]


def inputs(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, H, generator=g, dtype=torch.float32).requires_grad_()
    head = torch.randn(V, H, generator=g) * 0.3
    return hidden, head, torch.randint(V, (M,), generator=g), torch.rand(M, generator=g)


def dense(hidden, head, multiplier, softcap):
    logits = hidden @ head.T * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("chunk", [1, 3, 11, 1000])
@pytest.mark.parametrize(("multiplier", "softcap"), TRANSFORMS)
def test_loss_gradient_and_candidates_equal_the_dense_head(multiplier, softcap, chunk):
    hidden, head, labels, weights = inputs()
    out = linear_cross_entropy(hidden, head, labels, top_k=K, multiplier=multiplier, softcap=softcap, chunk=chunk)
    (weights * out.nll_M).sum().backward()
    ours, hidden.grad = hidden.grad, None
    logits = dense(hidden, head, multiplier, softcap)
    nll = F.cross_entropy(logits, labels, reduction="none")
    (weights * nll).sum().backward()
    torch.testing.assert_close(out.nll_M, nll)
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(out.candidates_MC, logits.topk(K).indices)
    assert torch.equal(out.top1_M, logits.argmax(-1))


def test_gradient_agrees_with_finite_differences():
    hidden, head, labels, _ = inputs()
    hidden = hidden.detach().double().requires_grad_()
    step, direction = 1e-3, torch.randn(M, H, generator=torch.Generator().manual_seed(4)).double()

    def loss(x):
        out = linear_cross_entropy(x, head.double(), labels, top_k=K, multiplier=2.5, softcap=3.0)
        return out.nll_M.double().sum()

    loss(hidden).backward()
    with torch.no_grad():
        slope = (loss(hidden + step * direction) - loss(hidden - step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float((hidden.grad * direction).sum()), rel=1e-2)


def test_no_slots_give_no_loss_and_zero_gradient():
    hidden, head, _, _ = inputs()
    none = linear_cross_entropy(hidden[:0], head, torch.empty(0, dtype=torch.long), top_k=K)
    none.nll_M.sum().backward()
    assert none.candidates_MC.shape == (0, K)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize(("multiplier", "softcap"), TRANSFORMS)
def test_candidate_logits_and_their_gradient_equal_gathered_dense_logits(multiplier, softcap):
    hidden, head, _, _ = inputs()
    candidates = dense(hidden, head, multiplier, softcap).topk(K).indices
    weights = torch.randn(M, K, generator=torch.Generator().manual_seed(3))
    unary = candidate_logits(hidden, head, candidates, multiplier=multiplier, softcap=softcap)
    (unary * weights).sum().backward()
    ours, hidden.grad = hidden.grad, None
    expected = dense(hidden, head, multiplier, softcap).gather(1, candidates)
    (expected * weights).sum().backward()
    torch.testing.assert_close(unary, expected)
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-5, atol=1e-6)


def test_a_token_missing_from_the_candidates_gives_the_selector_no_loss_and_no_gradient():
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.5, 0.2, 0.1]], requires_grad=True)
    candidates = torch.tensor([[4, 7, 9], [4, 7, 9]])
    nll, covered = selector_cross_entropy(scores, candidates, torch.tensor([7, 8]))
    assert covered.tolist() == [True, False]
    assert nll[0].item() == pytest.approx(F.cross_entropy(scores[:1], torch.tensor([1])).item())
    assert nll[1].item() == 0.0
    nll.sum().backward()
    assert torch.equal(scores.grad[1], torch.zeros(3))
    assert float(scores.grad[0].abs().sum()) > 0.1


def test_a_missing_token_with_infinite_scores_stays_without_gradient():
    scores = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    nll, _ = selector_cross_entropy(scores, torch.tensor([[1, 2, 3]]), torch.tensor([9]))
    nll.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(1, 3))


HITS = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("split", [[0, 1, 2, 3], [[0], [1, 2, 3]], [[0, 1], [2, 3]]])
def test_accepted_length_is_counted_per_block_and_adds_up_over_micro_batches(split):
    total = count = 0
    for part in [split] if isinstance(split[0], int) else split:
        correct = torch.cat([torch.ones(len(part), 1, dtype=torch.bool), HITS[part]], 1)[None]
        supervised = torch.ones_like(correct)
        supervised[:, :, 0] = False
        total += int(leading_hits(correct, supervised).sum())
        count += len(part)
    assert total / count == 2.0  # 1.80 from pooled marginals, 1.92 from the mean of per-micro-batch products


def test_accepted_length_ends_at_the_first_unsupervised_slot():
    correct = torch.ones(1, 1, 5, dtype=torch.bool)
    supervised = torch.tensor([[[False, True, True, False, True]]])
    assert leading_hits(correct, supervised).tolist() == [[2]]
