"""A long document as windows: every token is some window's own once, and what is before it is context."""

from __future__ import annotations

import numpy as np
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.chat import tokenize
from dflash_train.data.read import Kept
from dflash_train.data.template import Template
from dflash_train.data.windows import windows
from dflash_train.types import Conversation


@given(st.integers(1, 300), st.integers(2, 60), st.data())
def test_every_token_is_own_in_one_window_and_windows_overlap_by_what_was_asked(length, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    found = windows(length, size, overlap)
    owned = [i for begin, own, end in found for i in range(own, end)]
    assert owned == list(range(length))
    assert all(end - begin <= size and begin <= own < end for begin, own, end in found)
    assert all(b[0] == a[2] - overlap for a, b in zip(found, found[1:], strict=False))


def made(prompt: int, answer: int, **options):
    kept = Kept(kept=1)
    row = Conversation(id="a", source="f:1", prompt_ids=[20] * prompt, response_ids=list(range(30, 30 + answer)))
    options = {"chat_template_kwargs": {}, "reasoning_rows": ReasoningRows.per_turn, "max_length": 16} | options
    return tokenize(row, Template(toys.toy_tokenizer()), kept=kept, **options), kept


def test_a_supervised_token_is_supervised_once_and_keeps_its_context():
    examples, kept = made(10, 40, window_overlap=4)
    assert [e.id for e in examples] == ["a@0", "a@1", "a@2", "a@3"]
    assert [len(e.token_ids) for e in examples] == [16, 16, 16, 14]
    supervised = np.concatenate([e.token_ids[e.supervised] for e in examples])
    assert supervised.tolist() == list(range(30, 70))
    for before, after in zip(examples, examples[1:], strict=False):
        assert after.token_ids[:4].tolist() == before.token_ids[-4:].tolist() and not after.supervised[:4].any()
    assert [e.finish_reason for e in examples] == ["length"] * 3 + ["stop"]
    assert kept.notes == {"made_into_windows": 1} and kept.kept == 1


def test_windows_with_nothing_to_predict_are_left_out_and_counted():
    examples, kept = made(40, 6, window_overlap=4)
    assert [e.id for e in examples] == ["a@3"]
    assert kept.notes == {"made_into_windows": 1, "window_with_nothing_to_predict": 3}


@pytest.mark.parametrize("overlap", [None, 4])
def test_what_fits_is_one_document_with_its_own_name(overlap):
    [example], kept = made(6, 10, window_overlap=overlap)
    assert example.id == "a" and len(example.token_ids) == 16 and not kept.notes


def test_without_windows_it_is_cut_and_counted():
    [example], kept = made(10, 40)
    assert len(example.token_ids) == 16 and example.finish_reason == "length" and kept.notes == {"cut_at_max_length": 1}
