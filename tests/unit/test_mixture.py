"""Weights of sources: how often a document is in an epoch, and that nothing moves where all are one."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
import toys

from dflash_train.config.sources import Source, read_sources
from dflash_train.data import stream as streams
from dflash_train.data.blocks import anchor_order, legal_anchors


def documents(count: int):
    lengths = np.random.default_rng(0).integers(6, 40, count)
    return [toys.document(int(n), slice(3, None), name=f"d{i}", seed=i) for i, n in enumerate(lengths)]


@pytest.fixture
def mixed(monkeypatch):
    """A stream of documents with these weights."""

    def mixed(weights, **options):
        monkeypatch.setattr(streams, "weights_of", lambda examples: np.array(weights, float))
        return toys.stream_of(documents(len(weights)), row_length=64, **options)

    return mixed


def seen(stream, epoch: int) -> Counter[str]:
    first, after = stream._first_step(epoch), stream._first_step(epoch + 1)
    batches = [b for step in range(first, after) for b in stream.micro_batches(step, 0, 1)]
    return Counter(name for b in batches for row in b.sample_ids for name in row)


@pytest.mark.parametrize(
    ("pack", "digest"),
    [
        (True, "26b9fc13596fe58881e188eb098e00a4853d2a1f4d1927172a6fdd7f91c3a3c6"),
        (False, "609a9ccf289ae4be26a1ae22cfd7a1cde78c7734e9b289cc0e85b12466912fd7"),
    ],
)
def test_with_all_weights_one_rows_and_anchors_are_what_they_were_before_there_were_weights(pack, digest):
    """Golden: runs of earlier versions can be continued."""
    stream, found = toys.stream_of(documents(57), pack=pack, row_length=64, num_anchors=11), hashlib.sha256()
    for step in range(3 * stream.steps_per_epoch + 1):
        for b in stream.micro_batches(step, 0, 1):
            rows = b.token_ids_BT.numpy().tobytes() + b.blocks.anchors_BN.numpy().tobytes()
            found.update(rows + str(b.sample_ids).encode())
    assert (stream.fingerprint, found.hexdigest()) == ("286d55e346bb611b", digest)


def test_half_the_documents_are_in_an_epoch_and_the_others_in_the_next(mixed):
    stream = mixed([0.5] * 400)
    first, second, third = (seen(stream, epoch) for epoch in range(3))
    assert set(first.values()) == set(second.values()) == {1}
    assert not set(first) & set(second) and set(first) | set(second) == {f"d{i}" for i in range(400)}
    assert 150 < len(first) < 250 and first == third


@pytest.mark.parametrize("weight", [0.3, 0.75, 1.4, 2.25])
def test_over_epochs_a_document_is_seen_as_often_as_its_weight_says(mixed, weight):
    stream = mixed([weight] * 60)
    total = sum((seen(stream, epoch) for epoch in range(20)), Counter())
    assert all(abs(total[f"d{i}"] - 20 * weight) <= 1 for i in range(60))
    assert sum(total.values()) == pytest.approx(60 * 20 * weight, rel=0.02)


def test_whole_weights_repeat_a_document_with_other_anchors(mixed):
    stream = mixed([2] * 4 + [1] * 4, num_anchors=5, pack=False)
    assert seen(stream, 0) == {f"d{i}": 2 if i < 4 else 1 for i in range(8)}
    assert stream.same_every_epoch and stream.tokens_per_epoch == stream.lengths[:4].sum() + stream.lengths.sum()
    again = stream.batch([[0], [0 + 8]], 0)
    assert again.sample_ids == [["d0"], ["d0"]]
    assert not again.blocks.anchors_BN[0].equal(again.blocks.anchors_BN[1])


def test_the_first_repetition_has_the_anchors_that_a_document_always_had():
    mask = np.ones(30, bool)
    assert anchor_order(mask, 0, 1, "a").tolist() == anchor_order(mask, 0, 1, "a", 0).tolist()
    orders = {tuple(anchor_order(mask, 0, 1, "a", repetition).tolist()) for repetition in range(5)}
    assert len(orders) == 5 and all(sorted(order) == list(range(29)) for order in orders)


@pytest.mark.parametrize("weights", [[0.5] * 30, [0.2, 1, 3] * 7, [1] * 9, [0.01] * 3])
def test_any_step_can_be_asked_for_and_every_step_belongs_to_one_epoch(mixed, weights):
    stream, fresh = mixed(weights), mixed(weights)
    steps = [stream.rows_of_step(step) for step in range(25)]
    assert [fresh.rows_of_step(step) for step in reversed(range(25))] == steps[::-1]
    assert all(rows for _, rows in steps)
    epochs = [epoch for epoch, _ in steps]
    assert epochs == sorted(epochs)
    for step, (epoch, _) in enumerate(steps):
        assert stream._first_step(epoch) <= step < stream._first_step(epoch + 1)
        assert int(stream.epoch_at(step)) == epoch


def test_the_length_of_a_run_follows_the_epochs_that_it_has(mixed):
    stream = mixed([0.5] * 30)
    starts = [stream._first_step(epoch) for epoch in range(4)]
    assert [stream.steps_of(n) for n in (1, 2, 3)] == starts[1:]
    assert starts[1] < stream.steps_of(1.5) < starts[2]
    whole = mixed([1] * 30)
    assert whole.steps_of(2.5) == -(-5 * whole.steps_per_epoch // 2)


def test_coverage_is_even_over_documents_and_over_places_in_them():
    """Blocks are shared by legal anchors and drawn per document: what is covered depends little on the company in a row.

    Only the row that is not full, of which there is one, gives its documents more.
    """
    rng, epochs = np.random.default_rng(0), 12
    examples = []
    for i in range(300):
        prompt, answer = int(rng.integers(10, 60)), int(rng.integers(20, 120))
        examples.append(toys.document(prompt + answer, slice(prompt, None), name=f"d{i}", seed=i))
    stream = toys.stream_of(examples, row_length=512, num_anchors=64, pack=True, block_size=8)
    covered = [np.zeros(n) for n in stream.lengths]
    for epoch in range(epochs):
        for row in stream._pack_epoch(epoch):
            blocks = stream.batch([row], epoch).blocks
            places = (blocks.anchors_BN[0].numpy()[:, None] + np.arange(8))[blocks.supervised_BNS[0].numpy()]
            reached = np.isin(np.arange(512), places)
            ends = np.cumsum(stream.lengths[row])
            for document, end in zip(row, ends, strict=True):
                covered[document] += reached[end - stream.lengths[document] : end]
    legal = [legal_anchors(e.supervised) + 1 for e in examples]  # what a block can predict
    shares = np.array([c[at].mean() / epochs for c, at in zip(covered, legal, strict=True)])
    assert 0.7 < shares.mean() < 0.85
    assert shares.std() / shares.mean() < 0.08 and shares.min() / shares.mean() > 0.75
    within = [c[at[8:]] / epochs for c, at in zip(covered, legal, strict=True)]  # the first ones lie in fewer blocks
    halves = np.array([(x[: len(x) // 2].mean(), x[len(x) // 2 :].mean()) for x in within]).mean(0)
    assert abs(halves[0] / halves[1] - 1) < 0.03


# --- the entries of data.train ---


def test_an_entry_is_a_path_or_has_a_weight_and_a_domain():
    assert read_sources(["a", {"path": "b", "weight": 2, "domain": "code"}, {"path": "c", "weight": "5e-1"}]) == [
        Source(path="a"),
        Source(path="b", weight=2.0, domain="code"),
        Source(path="c", weight=0.5),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a", "wieght": 2}, r"data.train\[1\]: unknown key 'wieght'; did you mean 'weight'\?"),
        ({"path": "a", "foo": 2}, r"unknown key 'foo'; known: path, weight, domain"),
        ({"weight": 2}, r"data.train\[1\].path = None: must name"),
        ({"path": ""}, "must name a file"),
        ({"path": "a", "weight": 0}, r"weight = 0: passes over the rows per epoch.*leave the entry out"),
        ({"path": "a", "weight": -1}, "above 0"),
        ({"path": "a", "weight": float("nan")}, "a number above 0"),
        ({"path": "a", "weight": True}, "a number above 0"),
        ({"path": "a", "weight": "much"}, "a number above 0"),
        ({"path": "a", "weight": 1001}, "at most 1000"),
        ({"path": "a", "domain": 3}, r"domain = 3: must be a word"),
        (7, r"data.train\[1\] = 7: an entry is a path or"),
    ],
)
def test_an_entry_that_says_something_else_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        read_sources(["good", entry])


def test_weights_that_leave_epochs_empty_are_refused_instead_of_searched_through(mixed):
    with pytest.raises(ValueError, match="documents per epoch of the 20"):
        mixed([1e-9] * 20)
