"""Micro-batches with features, ready ahead, and the clock of a step's parts."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import toys

from dflash_train.clock import Clock
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.feed import Feed
from dflash_train.objective.loss import decay

CPU = torch.device("cpu")


def stream() -> RowStream:
    documents = [toys.document(20 + i, slice(4, None), name=f"d{i}", seed=i) for i in range(9)]
    decay_S = np.array(decay(8, 4.0))
    config = dict(row_length=64, num_anchors=4, decay_S=decay_S, global_batch_size=3, micro_batch_size=2, seed=0)
    return RowStream(documents, StreamConfig(**config))


def feed(end: int = 4) -> Feed:
    return Feed(stream(), toys.FixedTarget(), CPU, Clock(CPU), end=end, read_ahead=True)


def test_steps_are_those_of_the_stream_with_their_features():
    mine, plain = feed(), stream()
    for step in (0, 1, 3, 2, 7):  # a resumed run begins anywhere; one may ask beyond the end
        expected = list(plain.micro_batches(step, 0, 1))
        got = list(mine.step(step))
        assert len(got) == len(expected) == 2
        for (batch, features), other in zip(got, expected, strict=True):
            assert torch.equal(batch.token_ids_BT, other.token_ids_BT)
            assert torch.equal(batch.blocks.anchors_BN, other.blocks.anchors_BN)
            assert torch.equal(features.features_BTF, toys.FixedTarget().read(other).features_BTF)


def test_the_next_step_is_assembled_ahead_but_never_one_beyond_the_end():
    mine = feed(end=2)
    mine.batches(0)
    assert sorted(mine._rows) == [0, 1]
    mine.batches(1)
    assert sorted(mine._rows) == [1]


def test_a_feed_that_is_left_keeps_no_thread_and_no_rows():
    with feed() as mine:
        mine.batches(0)
    assert mine._rows == {}
    with pytest.raises(RuntimeError, match="shutdown"):
        mine.batches(1)


def test_what_fails_while_assembling_is_raised_where_it_is_asked_for():
    mine = feed()
    mine.stream.micro_batches = lambda *_: (_ for _ in ()).throw(ValueError("no such row"))
    with pytest.raises(ValueError, match="no such row"):
        mine.batches(0)


def test_the_clock_tells_every_use_of_a_name_once():
    clock = Clock(CPU)
    for _ in range(2):
        with clock("sleep"):
            time.sleep(0.01)
    times = clock.report()
    assert list(times) == ["sleep"] and len(times["sleep"]) == 2 and min(times["sleep"]) >= 10
    assert clock.report() == {}
