"""Packing: every document once, whole, within capacity, and as tight as best-fit decreasing gets."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_train.data.packing import pack


def slow_pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing by looking at every row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [i for i in range(len(rows)) if room[i] >= lengths[document]]
        if not fits:
            rows.append([])
            room.append(capacity)
            fits = [len(rows) - 1]
        best = min(fits, key=lambda i: room[i])
        rows[best].append(document)
        room[best] -= lengths[document]
    return rows


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 70))
def test_packing_is_complete_and_as_tight_as_the_slow_way(lengths: list[int], capacity: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fill = [sum(lengths[i] for i in row) for row in rows]
    assert all(total <= capacity for total in fill)
    slow = slow_pack(lengths, capacity)
    assert sorted(fill) == sorted(sum(lengths[i] for i in row) for row in slow)
    assert rows == pack(np.array(lengths, dtype=np.int64), capacity)


def test_equal_lengths_keep_input_order() -> None:
    assert pack(np.array([5, 5, 5, 5]), 10) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_out_of_range_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="max_length"):
        pack(np.array([3, length]), 10)


def test_a_hundred_thousand_documents_take_little_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 3072, 100_000)
    started = time.perf_counter()
    rows = pack(lengths, 3072)
    assert time.perf_counter() - started < 2
    assert lengths.sum() / (len(rows) * 3072) > 0.98
