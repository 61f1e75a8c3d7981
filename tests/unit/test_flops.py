"""The arithmetic that a step needs, against what torch counts while it runs."""

from __future__ import annotations

import pytest
import toys
from torch.utils.flop_counter import FlopCounterMode

from dflash_train.flops import batch_flops, draft_flops, peak, target_flops


def batch():
    rows = [[toys.document(20, slice(4, None)), toys.document(12, slice(3, None), name="e", seed=1)]]
    return toys.batch_of(rows, [[5, 9, 24]], block_size=8, length=40)


def test_reading_is_counted_as_torch_counts_it():
    target, b = toys.toy_target(attention="eager"), batch()
    with FlopCounterMode(display=False) as counter:
        target.read(b)
    T = b.token_ids_BT.numel()
    expected = target_flops(target.info, 4, T, T * T)  # every pair is computed
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)  # torch also counts the rotary angles


def test_drafting_is_counted_as_torch_counts_it():
    b = batch()
    step = toys.toy_step(toys.toy_target())
    features = step.target.read(b)
    with FlopCounterMode(display=False) as forward:
        report = step(b, features, toys.weight_of(b))
    with FlopCounterMode(display=False) as backward:
        report.loss.backward()
    spec, T = step.drafter.spec, b.token_ids_BT.numel()
    slots, M = b.blocks.labels_BNS.numel(), len(b.blocks.scored_M)
    pairs = slots * (T + spec.block_size)  # the dense kernel computes every pair
    own = draft_flops(spec, T, slots, M, pairs)
    forward, backward = forward.get_total_flops(), backward.get_total_flops()
    # Gathered dot products of the candidates count as matrix products for torch, and are left out here.
    extra = 2 * M * spec.selector_top_k * spec.hidden_size
    assert forward == pytest.approx(own["draft"] + own["head"] + extra, rel=0.02)
    again = (
        4 * spec.num_attention_heads * spec.head_dim * pairs * spec.num_hidden_layers // 2
    )  # kept, not computed again
    assert backward == pytest.approx(own["backward"] - again + 2 * extra, rel=0.03)


def test_a_batch_counts_what_its_documents_and_anchors_need():
    b = batch()
    assert b.pairs == 20 * 21 // 2 + 12 * 13 // 2
    assert b.context == 5 + 9 + 4  # the third anchor stands at 24 - 20 in its document
    spec, info = toys.toy_spec(), toys.toy_info()
    drafted = draft_flops(spec, 32, 24, len(b.blocks.scored_M), 8 * (18 + 24))
    assert batch_flops(b, spec, info) == target_flops(info, 4, 32, b.pairs) + sum(drafted.values())


def test_peaks_are_found_by_name():
    assert peak("NVIDIA H200") == 989.5e12 and peak("NVIDIA H100 PCIe") == 756e12 and peak("an abacus") is None
