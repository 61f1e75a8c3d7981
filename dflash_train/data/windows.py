"""Long documents as overlapping windows."""

from __future__ import annotations


def windows(length: int, size: int, overlap: int) -> list[tuple[int, int, int]]:
    """(begin, first own token, end) of each window over `length` tokens.

    Windows hold at most `size` tokens and begin size - overlap apart. Each token is some window's own once: the first `overlap`
    tokens of a later window belong to the one before it and are context only. So the token right before a window's own ones can be
    no anchor in it, and the first of them is an anchor but never drafted.
    """
    assert 0 <= overlap < size
    found, begin, own = [], 0, 0
    while own < length:
        end = min(begin + size, length)
        found.append((begin, own, end))
        begin, own = end - overlap, end
    return found
