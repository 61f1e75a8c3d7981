"""Decoding caches that append in place, and attention that shares a read of its keys."""

from __future__ import annotations

import pytest
import torch
import toys
from transformers import DynamicCache

from dflash_train.target.cache import ROOM, crop, grouped_attention, make_cache


@pytest.mark.parametrize("window", [None, 12])
def test_a_growing_cache_gives_the_logits_of_a_fresh_one_after_any_crop(window):
    model = toys.toy_model(window=window)
    ids = torch.randint(9, 150, (1, 2 * ROOM + 20), generator=torch.Generator().manual_seed(0))
    cache, length = make_cache(model.config), 0
    with torch.inference_mode():
        for size, keep in ((7, 7), (60, 40), (80, 79), (1, 1), (9, 3)):
            logits = model(input_ids=ids[:, length : length + size], past_key_values=cache, use_cache=True).logits
            want = model(input_ids=ids[:, : length + size], use_cache=False).logits[:, -size:]
            torch.testing.assert_close(logits, want, atol=2e-4, rtol=1e-4)
            length += keep
            crop(cache, length)
            assert cache.get_seq_length() == length


def test_rows_can_leave_a_growing_cache():
    model = toys.toy_model()
    ids = torch.randint(9, 150, (3, 20), generator=torch.Generator().manual_seed(1))
    cache, plain = make_cache(model.config), DynamicCache(config=model.config)
    with torch.inference_mode():
        for c in (cache, plain):
            model(input_ids=ids, past_key_values=c, use_cache=True)
            c.batch_select_indices(torch.tensor([2, 0]))
        ours = model(input_ids=ids[[2, 0], :1], past_key_values=cache, use_cache=True).logits
        want = model(input_ids=ids[[2, 0], :1], past_key_values=plain, use_cache=True).logits
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_grouped_attention_equals_the_models_own(padded):
    model = toys.toy_model(attention="sdpa", seed=3)
    ids = torch.randint(9, 150, (2, 15), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :6] = 0
    try:
        with torch.inference_mode():
            want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            model.set_attn_implementation("grouped")
            ours = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    finally:
        model.set_attn_implementation("sdpa")
    real = mask.bool()
    torch.testing.assert_close(ours[real], want[real], atol=1e-4, rtol=1e-4)


def test_grouped_attention_is_causal_without_a_mask():
    q = torch.randn(1, 4, 3, 8)
    k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out, _ = grouped_attention(torch.nn.Identity(), q, k, v, None)
    changed = v.clone()
    changed[:, :, 3:] += 1.0  # queries are the last three of five positions: the first of them sees keys 0..2
    after, _ = grouped_attention(torch.nn.Identity(), q, k, changed, None)
    assert torch.equal(out[:, 0], after[:, 0])
    assert not torch.equal(out[:, 1], after[:, 1])
