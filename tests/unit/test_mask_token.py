"""The mask token must be a real, unused row of the embedding."""

from __future__ import annotations

import numpy as np
import pytest
import toys

from dflash_train.data.mask_token import check_mask_absent, check_mask_token, unused_ids


@pytest.fixture(scope="module")
def tokenizer():
    return toys.toy_tokenizer()


def test_the_toy_tokenizer_has_the_ids_that_the_tests_rely_on(tokenizer):
    assert len(tokenizer) == 150
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<|im_end|>", "<|spare0|>", "<|spare1|>"]) == [
        0,
        1,
        2,
        4,
        7,
        8,
    ]
    assert tokenizer("w12 w149 <|im_end|>", add_special_tokens=False)["input_ids"] == [12, 149, 4]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (None, "mask_token_id = null: it is required"),
        (0, r"mask_token_id = 0: this is the pad token \(<pad>\)"),
        (1, r"mask_token_id = 1: this is the bos token \(<bos>\)"),
        (2, r"mask_token_id = 2: this is the eos token \(<eos>\)"),
        (160, r"mask_token_id = 160: must be in \[0, 160\)"),
        (-1, r"mask_token_id = -1: must be in \[0, 160\)"),
    ],
)
def test_an_unusable_mask_token_is_refused_and_two_usable_ones_are_named(tokenizer, mask, text):
    with pytest.raises(ValueError, match=text + ".*unused here: 7 or 8"):
        check_mask_token(mask, tokenizer, toys.toy_info())


def test_any_of_several_end_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="this is the eos token"):
        check_mask_token(4, tokenizer, toys.toy_info(eos_token_ids=[2, 4]))


def test_a_row_without_a_token_is_accepted_with_a_note(tokenizer):
    assert "155: an embedding row without a token" in check_mask_token(155, tokenizer, toys.toy_info())
    assert check_mask_token(7, tokenizer, toys.toy_info()) is None


def test_without_spare_tokens_rows_without_a_token_are_offered(tokenizer):
    class Bare:
        """The tokenizer, as if it had no spare tokens."""

        def __init__(self):
            self.added_tokens_decoder = {i: t for i, t in tokenizer.added_tokens_decoder.items() if i not in (7, 8)}

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __len__(self):
            return len(tokenizer)

    assert unused_ids(Bare(), toys.toy_info()) == [150, 151]


def test_a_mask_token_in_the_data_is_refused_with_its_count():
    rows = [toys.document(10, name="a"), toys.document(10, name="b", seed=1), toys.document(10, name="c", seed=2)]
    for row in rows:
        row.token_ids = np.where(row.token_ids == 12, 13, row.token_ids)
    check_mask_absent(12, rows, "w12")
    rows[1].token_ids[[2, 5]] = 12
    rows[2].token_ids[0] = 12
    with pytest.raises(
        ValueError, match=r"mask_token_id = 12 \(w12\) occurs 3 times in 2 of 3 training rows \(first: b\)"
    ):
        check_mask_absent(12, rows, "w12")
