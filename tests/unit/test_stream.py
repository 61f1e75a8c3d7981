"""Rows and anchors of a step: a function of documents, seed and step, not of ranks or micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toys

from dflash_train.data.stream import RowStream


def documents(count: int = 13):
    lengths = np.random.default_rng(0).integers(6, 20, count)
    return [toys.document(int(n), slice(3, None), name=f"d{i}", seed=i) for i, n in enumerate(lengths)]


def seen(stream, step: int, world_size: int):
    """(ids, tokens, anchors) of each row of a step, in order, without the empty rows."""
    rows = []
    for rank in range(world_size):
        for batch in stream.micro_batches(step, rank, world_size):
            for b, ids in enumerate(batch.sample_ids):
                if ids:
                    anchors = batch.blocks.anchors_BN[b][batch.blocks.valid_BN[b]].tolist()
                    rows.append((ids, batch.token_ids_BT[b].tolist(), anchors))
    return rows


@pytest.mark.parametrize("pack", [True, False])
def test_a_step_has_the_same_rows_and_anchors_however_it_is_split(pack):
    def make(micro):
        return toys.stream_of(documents(), pack=pack, row_length=24, micro_batch_size=micro, num_anchors=7)

    for step in (0, 1, 2, 5, 9):
        expected = seen(make(1), step, 1)
        assert expected
        for micro, world_size in [(4, 1), (3, 1), (2, 2), (1, 4), (2, 3)]:
            assert seen(make(micro), step, world_size) == expected


def test_every_rank_does_equally_many_forwards_and_empty_rows_weigh_nothing():
    stream = toys.stream_of(documents(5), pack=False, row_length=24, micro_batch_size=1)
    assert stream.steps_per_epoch == 2
    last = [list(stream.micro_batches(1, rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in last] == [2, 2]
    full, *empty = [b for batches in last for b in batches]
    assert full.tokens > 0
    for batch in empty:
        assert (batch.tokens, batch.weight, batch.drafted, batch.covered, len(batch.blocks.scored_M)) == (
            0,
            0.0,
            0,
            0,
            0,
        )
        assert batch.token_ids_BT.shape == full.token_ids_BT.shape
        assert (batch.document_ids_BT == -1).all()


def test_an_empty_row_gives_no_loss_and_zero_gradients():
    step = toys.toy_step()
    stream = toys.stream_of([toys.document(20, slice(4, None))], micro_batch_size=1)
    empty = list(stream.micro_batches(0, 0, 1))[1]
    report = step(empty, step.target.read(empty), toys.weight_of(empty))
    assert report.loss.item() == 0.0
    report.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in step.drafter.parameters())


def test_fewer_rows_than_ranks_still_give_every_rank_a_batch():
    stream = toys.stream_of(documents(2), pack=False, row_length=24)
    batches = [list(stream.micro_batches(0, rank, 4)) for rank in range(4)]
    assert [len(b) for b in batches] == [1, 1, 1, 1]
    assert [b[0].drafted > 0 for b in batches] == [True, True, False, False]


def test_an_epoch_shows_every_document_once_and_the_next_in_another_order():
    stream = toys.stream_of(documents(), row_length=24)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        epochs.append([i for step in steps for row in seen(stream, step, 1) for i in row[0]])
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"d{i}" for i in range(13))
    assert epochs[0] != epochs[1]


def test_any_step_can_be_asked_for_again():
    stream = toys.stream_of(documents(), row_length=24)
    forward = [seen(stream, step, 1) for step in range(8)]
    assert [seen(stream, step, 1) for step in reversed(range(8))] == forward[::-1]
    assert seen(toys.stream_of(documents(), row_length=24), 7, 1) == forward[7]


def test_documents_lie_side_by_side_and_padding_belongs_to_none():
    a, b = toys.document(7, slice(2, None), name="a"), toys.document(5, slice(1, None), name="b", seed=1)
    batch = toys.batch_of([[a, b]], [[3, 9]], block_size=4, length=16)
    assert batch.document_ids_BT[0].tolist() == [0] * 7 + [1] * 5 + [-1] * 4
    assert batch.position_ids_BT[0].tolist() == [*range(7), *range(5), 0, 0, 0, 0]
    assert batch.token_ids_BT[0, :12].tolist() == [*a.token_ids.tolist(), *b.token_ids.tolist()]
    assert not batch.supervised_BT[0, 12:].any()
    assert batch.tokens == 12
    assert batch.sample_ids == [["a", "b"]]
    assert batch.weight == pytest.approx(float(batch.blocks.weights_BNS.sum()))


def test_coverage_counts_tokens_not_slots():
    batch = toys.batch_of([[toys.document(20, slice(10, None))]], [[10, 11, 12]], block_size=4)
    assert batch.covered == 5  # 11..15, of which three are in several blocks
    assert batch.coverable == 9


def test_no_documents_is_an_error():
    with pytest.raises(ValueError, match="no training rows"):
        RowStream([], toys.stream_of(documents(1)).config)


def test_blocks_of_an_epoch_differ_from_the_next():
    stream = toys.stream_of([toys.document(60, slice(4, None))], num_anchors=6)
    first, second = stream.batch([[0]], 0), stream.batch([[0]], 1)
    assert not torch.equal(first.blocks.anchors_BN, second.blocks.anchors_BN)
