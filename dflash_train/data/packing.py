"""Several whole documents per row: best-fit decreasing."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of document indices whose lengths sum to at most `capacity`; each document in exactly one row.

    lengths: int (documents,), each from 1 to capacity. Longest first, each into the fullest row that still
    has room for it; equal lengths in input order, so the result depends on the input alone. Raises ValueError
    for a length out of range.
    """
    lengths = np.asarray(lengths)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(
            f"lengths {lengths.min()}..{lengths.max()} do not fit rows of {capacity}; "
            "cut documents to data.max_length first"
        )
    rows: list[list[int]] = []
    # Rows that still have room, by how much: `free` lists the amounts in ascending order, `open_rows` the rows of each. There
    # are never more amounts than `capacity`, so the search stays short however many documents there are.
    free: list[int] = []
    open_rows: dict[int, list[int]] = {}
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(free, length)
        if place == len(free):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = free[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], free[place]
        rows[row].append(document)
        room -= length
        if room:
            if room not in open_rows:
                open_rows[room] = []
                insort(free, room)
            open_rows[room].append(row)
    return rows
