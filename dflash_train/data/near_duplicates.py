"""Near-duplicate texts by MinHash and locality-sensitive hashing, in bounded memory per text.

A text is the set of its 5-word shingles. `PERMUTATIONS` minima estimate the Jaccard similarity of two sets (standard
deviation 0.037 at 0.8); texts that agree on all `ROWS` minima of one of `BANDS` bands are compared. The chance that two
texts of similarity s are compared is 1 - (1 - s^6)^20: 0.998 at 0.8, 0.27 at 0.5. After Broder, "On the resemblance and
containment of documents", 1997. (datasketch does the same, text by text in Python dictionaries, and needs scipy.)
"""

from __future__ import annotations

import numpy as np

SHINGLE = 5
BANDS, ROWS = 20, 6
PERMUTATIONS = BANDS * ROWS
# In a bucket of many texts that agree by chance, each is compared with so many before it: linear, not quadratic, time.
LAGS = 32
_CHUNK = 4096

_random = np.random.Generator(np.random.PCG64(20240607))
_MULTIPLIERS = _random.integers(0, 2**63, PERMUTATIONS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _random.integers(0, 2**63, PERMUTATIONS, dtype=np.uint64)


def signature(shingles: np.ndarray) -> np.ndarray:
    """uint64 (PERMUTATIONS,): the minimum of each hash function over the shingles (uint64, at least one)."""
    minima = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(shingles), _CHUNK):  # bounds the table of a very long text
        part = shingles[start : start + _CHUNK, None]
        np.minimum(minima, (part * _MULTIPLIERS + _OFFSETS).min(axis=0), out=minima)
    return minima


class NearDuplicates:
    """Collects texts in order, then says which are near duplicates of an earlier text that is kept.

    Memory is 400 bytes a text: 16 bits of every minimum and 64 bits of every band.
    """

    def __init__(self, threshold: float) -> None:
        if not 0.5 <= threshold <= 1:
            raise ValueError(
                f"near-duplicate threshold {threshold} is not in 0.5..1, where the bands find pairs; choose 0.8"
            )
        self.threshold = threshold
        self._count = 0
        self._minima = np.empty((1024, PERMUTATIONS), np.uint16)
        self._bands = np.empty((1024, BANDS), np.uint64)

    def __len__(self) -> int:
        return self._count

    def add(self, shingles: np.ndarray) -> None:
        """The next text, as hashes of its shingles."""
        if self._count == len(self._minima):
            self._minima = np.resize(self._minima, (2 * self._count, PERMUTATIONS))
            self._bands = np.resize(self._bands, (2 * self._count, BANDS))
        minima = signature(shingles)
        mixed = minima * np.uint64(0xD6E8FEB86659FD93)
        self._minima[self._count] = (mixed >> np.uint64(48)).astype(np.uint16)
        rows = (mixed ^ (mixed >> np.uint64(29))).reshape(BANDS, ROWS)
        band = np.zeros(BANDS, np.uint64)
        for column in range(ROWS):
            band = band * np.uint64(0x9E3779B97F4A7C15) + rows[:, column]
        self._bands[self._count] = band
        self._count += 1

    def similarity(self, left: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
        """Estimated Jaccard similarity of texts, by their numbers in the order of `add`."""
        return (self._minima[left] == self._minima[right]).mean(axis=-1)

    def duplicates(self) -> dict[int, int]:
        """number of a text to drop -> number of the earlier kept text that it is like. The first of a group is kept."""
        kept_by: dict[int, int] = {}
        for later, earlier in self._pairs():
            if later in kept_by:
                continue
            kept = kept_by.get(earlier, earlier)
            if kept == earlier or self.similarity(later, kept) >= self.threshold:
                kept_by[later] = kept
        return kept_by

    def _pairs(self) -> list[tuple[int, int]]:
        """(later, earlier) of all texts found to be alike, in order of the later one."""
        found: list[np.ndarray] = []
        for band in range(BANDS):
            hashes = self._bands[: self._count, band]
            order = np.argsort(hashes, kind="stable")
            ordered = hashes[order]
            for lag in range(1, LAGS + 1):
                same = np.flatnonzero(ordered[lag:] == ordered[:-lag])
                if not len(same):
                    break
                for start in range(0, len(same), 1 << 16):
                    at = same[start : start + (1 << 16)]
                    later, earlier = order[at + lag], order[at]
                    alike = self.similarity(later, earlier) >= self.threshold
                    found.append(np.stack([later[alike], earlier[alike]], axis=1))
        if not found:
            return []
        pairs = np.unique(np.concatenate(found), axis=0)
        return [(int(later), int(earlier)) for later, earlier in pairs]
