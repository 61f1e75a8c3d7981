"""MinHash against the sets themselves, and which of a group stays."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.data.near_duplicates import BANDS, SHINGLE, NearDuplicates, signature
from dflash_train.data.rows import ngrams, normalise, words_of


def shingles(text: str) -> np.ndarray:
    return ngrams(words_of(normalise(text)), SHINGLE)


def words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(5000)}" for _ in range(count)]


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    a, b = set(left.tolist()), set(right.tolist())
    return len(a & b) / len(a | b)


def perturbed(text: list[str], changes: int, rng: random.Random) -> list[str]:
    other = list(text)
    for at in rng.sample(range(len(text)), changes):
        other[at] = rng.choice(words(rng, 1))
    return other


def test_the_estimate_is_the_similarity_of_the_sets():
    rng, index, exact = random.Random(0), NearDuplicates(0.8), []
    for changes in range(0, 40, 2):
        text = words(rng, 200)
        pair = [shingles(" ".join(t)) for t in (text, perturbed(text, changes, rng))]
        exact.append(jaccard(*pair))
        for one in pair:
            index.add(one)
    estimate = [float(index.similarity(2 * i, 2 * i + 1)) for i in range(len(exact))]
    assert np.abs(np.array(estimate) - exact).max() < 0.15
    assert np.abs(np.array(estimate) - exact).mean() < 0.04


@pytest.mark.parametrize(("changes", "low", "high"), [(0, 1.0, 1.0), (2, 0.99, 1.0), (10, 0.0, 0.01), (40, 0.0, 0.0)])
def test_what_is_alike_is_found_and_what_is_not_is_not(changes, low, high):
    """200 words with 0, 2, 10 and 40 replaced: similarity 1, 0.91, 0.63 and 0.23 against a threshold of 0.8."""
    rng, index = random.Random(1), NearDuplicates(0.8)
    for _ in range(200):
        text = words(rng, 200)
        index.add(shingles(" ".join(text)))
        index.add(shingles(" ".join(perturbed(text, changes, rng))))
    found = index.duplicates()
    assert all(later == earlier + 1 for later, earlier in found.items())
    assert low <= len(found) / 200 <= high


def test_all_pairs_over_the_threshold_are_found_among_many():
    """The bands against comparing every text with every other."""
    rng = random.Random(2)
    texts = [words(rng, 60) for _ in range(60)]
    texts += [perturbed(rng.choice(texts), 1, rng) for _ in range(60)]
    sets, index = [shingles(" ".join(text)) for text in texts], NearDuplicates(0.8)
    for one in sets:
        index.add(one)
    found = index.duplicates()
    for later in range(len(sets)):
        best = max((jaccard(sets[later], sets[e]) for e in range(later) if e not in found), default=0.0)
        if best >= 0.93:
            assert later in found
        elif best <= 0.67:
            assert later not in found


def test_the_first_of_a_large_group_stays():
    """More members than LAGS, each like the first: comparing with neighbours only must not bring any back."""
    rng, index = random.Random(3), NearDuplicates(0.8)
    text = words(rng, 300)
    for _ in range(150):
        index.add(shingles(" ".join(perturbed(text, 1, rng))))
    found = index.duplicates()
    assert 0 not in found and len(found) == 149 and set(found.values()) == {0}


def test_a_chain_is_cut_where_it_has_left_its_first_member():
    rng, index, text = random.Random(4), NearDuplicates(0.8), words(random.Random(5), 200)
    texts = [text]
    for _ in range(12):
        texts.append(perturbed(texts[-1], 2, rng))
    sets = [shingles(" ".join(t)) for t in texts]
    for one in sets:
        index.add(one)
    found = index.duplicates()
    assert 1 in found and len(sets) - len(found) > 1
    for later, kept in found.items():
        assert kept not in found and jaccard(sets[later], sets[kept]) > 0.7


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_a_signature_is_that_of_the_set(hashes):
    values = np.array(hashes, np.uint64)
    again = np.array(sorted(set(hashes)) * 2, np.uint64)
    assert (signature(values) == signature(again)).all()


def test_long_texts_are_taken_in_pieces():
    many = np.arange(10_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    whole = np.minimum(signature(many[:5000]), signature(many[5000:]))
    assert (signature(many) == whole).all()


def test_growing_keeps_what_was_added():
    index = NearDuplicates(0.8)
    for number in range(3000):
        index.add(np.array([number % 2500], np.uint64))
    assert len(index) == 3000 and index._bands.shape[1] == BANDS
    assert index.duplicates() == {2500 + i: i for i in range(500)}


@pytest.mark.parametrize("threshold", [0.4, 1.1, -1])
def test_a_threshold_that_the_bands_cannot_serve_is_refused(threshold):
    with pytest.raises(ValueError, match="not in 0.5..1.*choose 0.8"):
        NearDuplicates(threshold)
