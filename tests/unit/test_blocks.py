"""Legal anchors, their order and their share of a row; labels and weights of the slots."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st

from dflash_train.config.schema import ObjectiveConfig
from dflash_train.data.blocks import anchor_order, build_blocks, legal_anchors, share
from dflash_train.objective.loss import decay


def mask(length: int, *positions) -> np.ndarray:
    out = np.zeros(length, bool)
    out[list(positions)] = True
    return out


def test_the_first_answer_token_is_the_first_anchor_and_the_last_is_none():
    supervised = mask(20, *range(10, 20))
    assert legal_anchors(supervised).tolist() == list(range(10, 19))
    example = toys.document(20, slice(10, None))
    batch = toys.batch_of([[example]], [list(range(10, 19))], block_size=8)
    reached = {a + k for n, a in enumerate(range(10, 19)) for k in range(8) if batch.blocks.supervised_BNS[0, n, k]}
    assert reached == set(range(11, 20))
    assert batch.blocks.labels_BNS[0, 0, 1] == int(example.token_ids[11])
    assert (batch.covered, batch.coverable) == (9, 9)


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_legal_anchors_are_supervised_with_a_supervised_successor(values):
    supervised = np.array(values)
    assert legal_anchors(supervised).tolist() == [i for i in range(len(values) - 1) if values[i] and values[i + 1]]


@pytest.mark.parametrize(("length", "answer", "anchors", "slots"), [(13, 3, [10, 11], [2, 1]), (12, 2, [10], [1])])
def test_an_answer_shorter_than_the_block_is_trained_on_what_it_has(length, answer, anchors, slots):
    example = toys.document(length, slice(length - answer, None))
    assert legal_anchors(example.supervised).tolist() == anchors
    batch = toys.batch_of([[example]], [anchors], block_size=8, gamma=7.0)
    assert batch.blocks.supervised_BNS.sum(-1)[0].tolist() == slots
    weights = [sum(math.exp(-(k - 1) / 7) for k in range(1, n + 1)) for n in slots]
    assert batch.blocks.weights_BNS.sum(-1)[0].tolist() == pytest.approx(weights, abs=1e-6)
    if answer == 3:
        assert weights[0] == pytest.approx(1.8669, abs=1e-4)
    step = toys.toy_step(objective=ObjectiveConfig(selector_loss_weight=0.0))
    step.target._head.zero_()  # uniform logits
    report = step(batch, step.target.read(batch), toys.weight_of(batch))
    assert report.loss.item() == pytest.approx(math.log(160), abs=1e-5)


def test_a_text_of_exactly_one_block_gives_a_full_block():
    example = toys.document(8)
    stream = toys.stream_of([example], num_anchors=4)
    batch = stream.batch([[0]], 0)
    assert batch.drafted == 4
    whole = toys.batch_of([[example]], [[0]], block_size=8)
    assert whole.blocks.supervised_BNS[0, 0].tolist() == [False] + [True] * 7


def test_supervision_at_the_very_end_is_used():
    batch = toys.stream_of([toys.document(64, slice(60, None))], block_size=16).batch([[0]], 0)
    assert batch.blocks.anchors_BN[batch.blocks.valid_BN].tolist() == [60, 61, 62]
    assert batch.blocks.supervised_BNS.sum() == 3 + 2 + 1


def test_a_block_is_supervised_up_to_its_first_hole():
    example = toys.document(30, [i for i in range(5, 30) if i != 12])
    blocks = toys.batch_of([[example]], [[9, 13]], block_size=6).blocks
    assert blocks.supervised_BNS[0].int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert 11 not in legal_anchors(example.supervised)


def test_a_block_ends_with_its_document_and_with_its_budget():
    a, b = toys.document(10, name="a"), toys.document(10, name="b", seed=1)
    blocks = toys.batch_of([[a, b]], [[7, 12]], block_size=6, slots=[np.array([6, 3])]).blocks
    assert blocks.supervised_BNS[0].int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert blocks.slots_BN.tolist() == [[6, 3]]


def test_unused_blocks_carry_nothing():
    blocks = toys.batch_of([[toys.document(12)], [toys.document(12)]], [[1, 4, 6], [2]], block_size=4).blocks
    assert blocks.valid_BN.tolist() == [[True] * 3, [True, False, False]]
    assert not blocks.weights_BNS[1, 1:].any()
    assert not blocks.supervised_BNS[1, 1:].any()
    assert torch.equal(blocks.scored_M, blocks.supervised_BNS.flatten().nonzero()[:, 0])


@given(st.data())
def test_labels_weights_and_scored_slots_against_loops(data):
    T, S, N = data.draw(st.integers(2, 14)), data.draw(st.integers(2, 5)), 3
    documents = np.sort(data.draw(st.lists(st.integers(0, 2), min_size=T, max_size=T)))[None]
    supervised = np.array(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)))[None]
    anchors = sorted(data.draw(st.sets(st.integers(0, T - 1), max_size=N)))
    ids = np.arange(100, 100 + T)[None]
    w = np.array(decay(S, 3.0))
    blocks = build_blocks(ids, documents, supervised, [np.array(anchors, np.int64)], num_blocks=N, decay_S=w)
    for n, a in enumerate(anchors):
        alive = True
        for k in range(1, S):
            t = a + k
            alive = alive and t < T and bool(supervised[0, t]) and documents[0, t] == documents[0, a]
            assert bool(blocks.supervised_BNS[0, n, k]) == alive
            assert float(blocks.weights_BNS[0, n, k]) == pytest.approx(w[k] if alive else 0.0)
            if alive:
                assert int(blocks.labels_BNS[0, n, k]) == 100 + t
        assert int(blocks.labels_BNS[0, n, 0]) == 100 + a
    assert torch.equal(blocks.scored_M, blocks.supervised_BNS.flatten().nonzero()[:, 0])


# --- order and share ----------------------------------------------------------------------------------------


def test_anchor_order_is_a_function_of_seed_epoch_and_sample():
    supervised = mask(60, *range(10, 60))
    order = anchor_order(supervised, 1, 2, "a")
    assert sorted(order.tolist()) == list(range(10, 59))
    assert order.tolist() == anchor_order(supervised, 1, 2, "a").tolist()
    for other in [(2, 2, "a"), (1, 3, "a"), (1, 2, "b")]:
        assert order.tolist() != anchor_order(supervised, *other).tolist()


def test_anchors_of_a_document_do_not_depend_on_what_it_is_packed_with():
    documents = [toys.document(20, slice(4, None), name=n, seed=i) for i, n in enumerate("abc")]
    alone = toys.stream_of(documents, num_anchors=5).batch([[1]], 0)
    packed = toys.stream_of(documents, num_anchors=15, row_length=60).batch([[0, 1, 2]], 0)
    inside = [a - 20 for a in packed.blocks.anchors_BN[0].tolist() if 20 <= a < 40]
    assert inside == alone.blocks.anchors_BN[0].tolist()


def test_share_is_proportional():
    assert share([30, 10], 20) == [15, 5]
    assert share([3, 5], 100) == [3, 5]
    assert share([1, 1, 1], 2) == [1, 1, 0]
    assert share([], 4) == []
    assert share([0, 7], 3) == [0, 3]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 80))
def test_share_spends_the_budget_within_one_block_of_the_exact_part(counts, budget):
    given_ = share(counts, budget)
    total = sum(counts)
    assert sum(given_) == min(total, budget)
    for have, got in zip(counts, given_, strict=True):
        assert 0 <= got <= have
        assert abs(got - have * min(1.0, budget / max(total, 1))) < 1 + 1e-9
