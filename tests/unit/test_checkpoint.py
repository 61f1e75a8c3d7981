"""Checkpoints: whole or not at all, and refused where they belong to another run."""

from __future__ import annotations

import pytest
import torch
import toys

from dflash_train.checkpoint import TrainState, checkpoints, identity_of, load_checkpoint, read_state, save_checkpoint
from dflash_train.types import Saved


def saved_of(seed: int = 0) -> Saved:
    """A drafter and its optimizer after two steps."""
    documents = [toys.document(20, name=str(i), seed=i) for i in range(4)]
    engine, _ = toys.train_steps(toys.toy_step(seed=seed), toys.stream_of(documents), 2)
    return engine.gather()


IDENTITY = identity_of(toys.toy_spec(), seed=0, rows=7)


def save(folder, number: int, keep: int = 9):
    return save_checkpoint(folder, saved_of(), TrainState(step=number, identity=IDENTITY), keep)


def test_weights_optimizer_and_step_come_back(tmp_path):
    state, saved = load_checkpoint(save(tmp_path, 12), IDENTITY)
    assert (state.step, state.identity) == (12, IDENTITY)
    for kind in ("weights", "moments"):
        here, there = getattr(saved, kind), getattr(saved_of(), kind)
        assert here.keys() == there.keys() and all(torch.equal(t, there[n]) for n, t in here.items())


def test_another_identity_is_refused_with_every_field_that_differs(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(
        ValueError, match=r"block_size: checkpoint has 8, recipe has 16.*seed: checkpoint has 0, recipe has 3"
    ) as error:
        load_checkpoint(path, {**IDENTITY, "block_size": 16, "seed": 3})
    assert "rows" not in str(error.value)


def test_a_missing_or_new_field_is_a_difference_too(tmp_path):
    path = save(tmp_path, 1)
    less = {k: v for k, v in IDENTITY.items() if k != "rows"}
    for identity in (less, {**IDENTITY, "tokens": 5}):
        with pytest.raises(
            ValueError, match=r"rows: checkpoint has 7, recipe has None|tokens: checkpoint has None, recipe has 5"
        ):
            load_checkpoint(path, identity)


def test_only_the_newest_are_kept_in_order(tmp_path):
    for number in (5, 100, 20, 3000):
        save(tmp_path, number, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000100", "step-00003000"]
    assert read_state(checkpoints(tmp_path)[-1]).step == 3000


def test_a_half_written_checkpoint_is_none(tmp_path):
    whole = save(tmp_path, 1)
    broken = save(tmp_path, 2)
    (broken / "complete").unlink()
    (tmp_path / ".step-00000003.partial").mkdir()
    assert checkpoints(tmp_path) == [whole]
    again = save(tmp_path, 2)
    assert checkpoints(tmp_path) == [whole, again]
    assert not list(tmp_path.glob(".*.partial")) or [p.name for p in tmp_path.glob(".*.partial")] == [
        ".step-00000003.partial"
    ]
