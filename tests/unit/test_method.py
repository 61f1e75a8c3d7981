"""The step: two terms with their own denominators, and metrics that see the selector."""

from __future__ import annotations

import pytest
import torch
import toys

from dflash_train.config.schema import Denominator, ObjectiveConfig
from dflash_train.metrics import MetricWindow


def one_batch(seed: int = 0):
    batch = toys.batch_of([[toys.document(30, slice(4, None), seed=seed)]], [[4, 9, 20, 27]], block_size=8)
    return batch, toys.random_features(batch, seed=seed)


def test_a_selector_without_weight_leaves_the_backbone_alone():
    batch, features = one_batch()
    off = toys.toy_step(objective=ObjectiveConfig(selector_loss_weight=0.0))
    plain = toys.toy_step(selector_rank=0)
    plain.drafter.load_state_dict({n: p for n, p in off.drafter.state_dict().items() if "selector" not in n})
    losses = []
    for step in (off, plain):
        report = step(batch, features, toys.weight_of(batch))
        report.loss.backward()
        losses.append(report.loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    gradients = toys.gradients(off)
    for name, gradient in toys.gradients(plain).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_the_loss_is_the_sum_of_both_terms():
    batch, features = one_batch()
    step = toys.toy_step(objective=ObjectiveConfig(selector_loss_weight=0.3))
    report = step(batch, features, toys.weight_of(batch))
    s = step.score(batch, features)
    w = s["weights_M"]
    base, selector = (w * s["base_nll_M"]).sum() / w.sum(), (w * s["selector_nll_M"]).sum() / w.sum()
    assert report.loss.item() == pytest.approx((base + 0.3 * selector).item(), rel=1e-6)
    assert toys.mean(report, "base_loss") == pytest.approx(base.item(), rel=1e-6)
    assert toys.mean(report, "selector_loss") == pytest.approx(selector.item(), rel=1e-6)


def test_the_covered_denominator_divides_by_covered_weight():
    batch, features = one_batch()
    step = toys.toy_step(objective=ObjectiveConfig(selector_denominator=Denominator.covered), selector_top_k=64)
    report = step(batch, features, toys.weight_of(batch))
    s = step.score(batch, features)
    assert 0 < int(s["covered_M"].sum()) < len(s["covered_M"])
    expected = (s["weights_M"] * s["selector_nll_M"]).sum() / (s["weights_M"] * s["covered_M"]).sum()
    assert toys.mean(report, "selector_loss") == pytest.approx(expected.item(), rel=1e-5)


def test_metrics_follow_the_selectors_choice():
    batch, features = one_batch()
    step = toys.toy_step()
    with torch.no_grad():
        step.drafter.candidate_selector.successor_codebook.zero_()
    silent = step.score(batch, features)
    # Label every slot with the drafter's second-best token, and let the selector prefer just those tokens.
    hidden = toys.slot_hidden(step, batch, features)
    second = (hidden @ step.target.head_VH.T).topk(2, -1).indices[..., 1]
    batch.blocks.labels_BNS[:, :, 1:] = second[:, :, 1:]
    before = step(batch, features, toys.weight_of(batch))
    assert toys.mean(before, "accept_len") == toys.mean(before, "base_accept_len") == 1.0
    selector = step.drafter.candidate_selector
    torch.manual_seed(0)
    with torch.no_grad():
        selector.predecessor_codebook.fill_(1.0)
        selector.hidden_projection.weight.copy_(torch.randn_like(selector.hidden_projection.weight))
        path = hidden.flatten(0, 1).flatten(0, 1)[batch.blocks.scored_M] @ selector.hidden_projection.weight.T
        wanted = batch.blocks.labels_BNS.flatten()[batch.blocks.scored_M]
        for query, token in zip(path[:3], wanted[:3], strict=True):
            selector.successor_codebook[token] += 1e3 * query
    after = step(batch, features, toys.weight_of(batch))
    assert toys.mean(after, "base_accept_len") == toys.mean(before, "base_accept_len")
    assert toys.mean(after, "accept_len") > toys.mean(before, "accept_len")
    assert len(silent["hit_M"]) == len(batch.blocks.scored_M)


def test_accept_len_leaves_out_blocks_without_a_supervised_slot():
    step = toys.toy_step()
    example = toys.document(30, slice(4, 20))
    batch = toys.batch_of([[example]], [[4, 9]], block_size=8)
    with_dead = toys.batch_of([[example]], [[4, 9, 19]], block_size=8)
    features = toys.random_features(batch)
    a, b = (step(x, features, toys.weight_of(batch)) for x in (batch, with_dead))
    torch.testing.assert_close(a.sums["accept_len"], b.sums["accept_len"])
    assert b.sums["accept_len"][1] == 2


HITS = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]]])
def test_accept_len_is_pooled_over_blocks_whatever_their_weights_and_follows_the_selector(split):
    """Drafted (5 + 0 + 2 + 1) / 4 and the bonus token are 3.0; pooled marginals would give 2.80, the mean of micro-batches 2.92."""
    step = toys.toy_step(block_size=6)
    with torch.no_grad():
        step.drafter.candidate_selector.successor_codebook.zero_()
    example = toys.document(60, slice(4, None))

    def logged(*, weightless_from: int = 6) -> tuple[float, float]:
        window = MetricWindow()
        for part in split:
            batch = toys.batch_of([[example]], [[(6, 16, 26, 36)[i] for i in part]], block_size=6)
            features = step.target.read(batch)
            best = (toys.slot_hidden(step, batch, features) @ step.target.head_VH.T).argmax(-1)[0, :, 1:]
            batch.blocks.labels_BNS[0, :, 1:] = torch.where(HITS[part], best, (best + 1) % toys.VOCAB)
            batch.blocks.weights_BNS[..., weightless_from:] = 0
            window.add(step(batch, features, toys.weight_of(batch)).sums)
        window.end_step(torch.tensor(True))
        means = window.report()
        return means["accept_len"], means["base_accept_len"]

    assert logged() == logged(weightless_from=3) == (3.0, 3.0)
    second = lambda hidden, unary_MC, candidates, before: torch.eye(unary_MC.shape[1])[1].expand_as(unary_MC)
    step.drafter.candidate_selector.forward = second
    path, base = logged()
    assert path < 3.0 and base == 3.0


def test_slot_metrics_add_up_to_the_accuracy():
    batch, features = one_batch()
    report = toys.toy_step()(batch, features, toys.weight_of(batch))
    slots = [report.sums[f"base_accuracy/slot_{k:02d}"] for k in range(1, 8)]
    assert torch.equal(sum(slots), report.sums["base_accuracy"])


def test_the_target_stays_out_of_the_step():
    step = toys.toy_step(toys.toy_target())
    assert all(name.startswith("drafter.") for name in step.state_dict())
    assert all(name.startswith("drafter.") for name, _ in step.named_parameters())
    batch = toys.batch_of([[toys.document(20, slice(4, None))]], [[4]], block_size=8)
    step(batch, step.target.read(batch), toys.weight_of(batch)).loss.backward()
    assert all(p.grad is None for p in step.target.model.parameters())
