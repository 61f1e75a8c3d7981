"""Who sees whom: masks against plain loops; packing, batching and the answer itself leave no trace."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import toys
from gluon_on_cpu import interpreted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash_train.drafter.layers import compiled, dense_attention
from dflash_train.drafter.mask import dense_mask, flex_mask, span_mask
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.kernels.attention import KEYS, QUERIES, block_attention_reference
from dflash_train.types import DraftBlocks, TargetFeatures


@st.composite
def layouts(draw):
    B, N, S = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    T = draw(st.integers(3, 14))
    documents = []
    for _ in range(B):
        cuts = sorted(draw(st.lists(st.integers(1, T), max_size=2)))
        row = np.searchsorted(np.array(cuts), np.arange(T), side="right")
        padding = draw(st.integers(0, T // 2))
        documents.append(np.where(np.arange(T) >= T - padding, -1, row))

    def grid(values):
        return torch.tensor(draw(st.lists(st.lists(values, min_size=N, max_size=N), min_size=B, max_size=B)))

    blocks = DraftBlocks(
        anchors_BN=grid(st.integers(0, T - 1)),
        valid_BN=grid(st.sampled_from([True, True, True, False])),
        slots_BN=grid(st.integers(1, S)),
        labels_BNS=torch.zeros(B, N, S, dtype=torch.long),
        weights_BNS=torch.zeros(B, N, S),
        supervised_BNS=torch.zeros(B, N, S, dtype=torch.bool),
        scored_M=torch.empty(0, dtype=torch.long),
    )
    window = draw(st.sampled_from([None, S, S + 1, S + 2, T + S]))
    return blocks, torch.tensor(np.array(documents)), S, window, draw(st.booleans())


def looped(blocks, documents, S, window, causal):
    """(B, N*S, T + N*S): the rule, written out."""
    B, T = documents.shape
    N = blocks.anchors_BN.shape[1]
    seen = torch.zeros(B, N * S, T + N * S, dtype=torch.bool)
    for b in range(B):
        for q in range(N * S):
            n, s = divmod(q, S)
            a = int(blocks.anchors_BN[b, n])
            for k in range(T):
                near = window is None or a + s - k < window
                seen[b, q, k] = bool(blocks.valid_BN[b, n]) and k < a and documents[b, k] == documents[b, a] and near
            for j in range(int(blocks.slots_BN[b, n])):
                seen[b, q, T + n * S + j] = not causal or j <= s
    return seen


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_dense_mask_is_the_rule(layout):
    blocks, documents, S, window, causal = layout
    B, T = documents.shape
    mask = dense_mask(blocks, documents, S, window, causal)
    expected = looped(*layout)
    assert torch.equal(mask.context_BQT, expected[:, :, :T])
    N = blocks.anchors_BN.shape[1]
    own = expected[:, :, T:].view(B, N, S, N, S)
    for n in range(N):
        assert torch.equal(mask.block_BNSS[:, n], own[:, n, :, n])
        others = [m for m in range(N) if m != n]
        assert not own[:, n][:, :, others].any()


@settings(max_examples=10, deadline=None)
@given(layouts())
def test_flex_mask_is_the_rule(layout):
    blocks, documents, S, window, causal = layout
    expected = looped(*layout)
    built = flex_mask(blocks, documents, S, window, causal)
    B, Q, K = expected.shape
    assert torch.equal(create_mask(built.mask_mod, B, 1, Q, K, device="cpu")[:, 0], expected)


def seen_in(sees, T: int) -> torch.Tensor:
    """(B, Q, T + Q): the pairs that spans let see each other."""
    Q = sees.first_BQ.shape[1]
    at, own = torch.arange(T), torch.arange(Q)
    context = (at >= sees.first_BQ[..., None]) & (at < sees.last_BQ[..., None])
    block = (own[:, None] // sees.size == own // sees.size) & (own % sees.size < sees.seen_BQ[..., None])
    return torch.cat([context, block], -1)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_spans_are_the_rule_and_the_twin_is_dense_attention(layout):
    blocks, documents, S, window, causal = layout
    sees = span_mask(blocks, documents, S, window, causal)
    (B, T), Q = documents.shape, sees.first_BQ.shape[1]
    assert torch.equal(seen_in(sees, T), looped(*layout))
    random = torch.Generator().manual_seed(0)
    q, kc, vc, kb, vb = (torch.randn(B, n, h, 8, generator=random) for n, h in ((Q, 4), (T, 2), (T, 2), (Q, 2), (Q, 2)))
    twin = block_attention_reference(q, kc, vc, kb, vb, sees)
    q, kc, vc, kb, vb = (x.transpose(1, 2) for x in (q, kc, vc, kb, vb))
    dense = dense_attention(q, (kc, vc), (kb, vb), dense_mask(*layout))
    torch.testing.assert_close(twin.transpose(1, 2), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [None, 8, 130, 300])
@pytest.mark.parametrize(("T", "N", "S"), [(1024, 128, 8), (300, 40, 8), (700, 21, 16), (640, 9, 7)])
def test_key_tiles_meet_all_queries_that_see_them_and_mask_those_that_do_not(T, N, S, window, ordered):
    blocks, documents = many_blocks(T, N, S, ordered=ordered)
    sees = span_mask(blocks, documents, S, window, False)
    pairs = torch.nn.functional.pad(seen_in(sees, T)[:, :, :T], (0, -T % KEYS, 0, -(N * S) % QUERIES))
    tiles = pairs.unflatten(1, (-1, QUERIES)).unflatten(3, (-1, KEYS)).permute(0, 3, 1, 2, 4).flatten(3)
    at = torch.arange(tiles.shape[2])
    low, left, right, high = (x[..., None] for x in sees.tiles.unbind(-1))
    assert ((low <= left) & (left <= right) & (right <= high)).all()
    assert not (tiles.any(-1) & ~((low <= at) & (at < high))).any()
    unmasked = (left <= at) & (at < right)
    assert not (unmasked & ~tiles.all(-1)).any()
    if ordered and window is None:  # nothing is masked in vain
        assert torch.equal(unmasked, tiles.all(-1))
        assert T != 1024 or unmasked[0].any()


def many_blocks(T: int, N: int, S: int, *, ordered: bool = True) -> tuple[DraftBlocks, torch.Tensor]:
    """Three rows: one document; four; seven and padding. Unused blocks at the end of the last two."""
    random = np.random.default_rng(T + N)
    documents = np.stack([np.searchsorted(np.sort(random.integers(1, T, n)), np.arange(T), "right") for n in (0, 3, 6)])
    documents[2, T - T // 5 :] = -1
    anchors = random.integers(0, T, (3, N))
    valid = np.arange(N) < np.array([N, N - 3, N // 2])[:, None]
    blocks = DraftBlocks(
        anchors_BN=torch.from_numpy(np.where(valid, np.sort(anchors, -1) if ordered else anchors, 0)),
        valid_BN=torch.from_numpy(valid),
        slots_BN=torch.from_numpy(random.integers(1, S + 1, (3, N))),
        labels_BNS=torch.zeros(3, N, S, dtype=torch.long),
        weights_BNS=torch.zeros(3, N, S),
        supervised_BNS=torch.zeros(3, N, S, dtype=torch.bool),
        scored_M=torch.empty(0, dtype=torch.long),
    )
    return blocks, torch.from_numpy(documents)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 8, 130, 300])
@pytest.mark.parametrize(("T", "N", "S"), [(512, 64, 8), (300, 40, 8), (700, 21, 16), (640, 9, 7)])
def test_the_tiles_of_the_flex_mask_are_those_found_pair_by_pair(T, N, S, window, causal):
    blocks, documents = many_blocks(T, N, S)
    dense = dense_mask(blocks, documents, S, window, causal)
    Q = N * S
    own = torch.zeros(3, N, S, N, S, dtype=torch.bool)
    own[:, range(N), :, range(N)] = dense.block_BNSS.transpose(0, 1)
    pairs = torch.cat([dense.context_BQT, own.view(3, Q, Q)], -1)
    wanted = create_block_mask(lambda b, h, q, k: pairs[b, q, k], 3, None, Q, T + Q, device="cpu")
    built = flex_mask(blocks, documents, S, window, causal)
    assert torch.equal(create_mask(built.mask_mod, 3, 1, Q, T + Q, device="cpu")[:, 0], pairs)
    assert built.seq_lengths == wanted.seq_lengths and built.BLOCK_SIZE == wanted.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(built, f"{kind}_num_blocks"), getattr(built, f"{kind}_indices")
        assert torch.equal(counts, getattr(wanted, f"{kind}_num_blocks")), kind
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[used], getattr(wanted, f"{kind}_indices")[used]), kind
    assert (T, window) != (512, None) or built.full_kv_num_blocks.any()


# --- the answer does not leak -------------------------------------------------------------------------------

VARIANTS = {
    "full": {},
    "sliding": {"sliding_window": 9},
    "mixed": {"sliding_window": 9, "layer_types": (SLIDING, FULL)},
    "v1": toys.V1,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_at_or_after_the_anchor_reaches_its_block(variant):
    step = toys.toy_step(**VARIANTS[variant])
    example = toys.document(40)
    anchors = [[10, 13, 30]]
    batch = toys.batch_of([[example]], anchors, block_size=8)
    features = toys.random_features(batch)

    def hidden(first: int, last: int):
        changed = features.features_BTF.clone()
        changed[:, first:last] += 1.0
        return toys.slot_hidden(step, batch, TargetFeatures(changed))[0]

    plain = toys.slot_hidden(step, batch, features)[0]
    assert torch.equal(hidden(10, 40)[0], plain[0])  # at and after the anchor
    assert not torch.allclose(hidden(9, 10)[0], plain[0], atol=1e-3)  # just before it
    assert torch.equal(hidden(13, 40)[1], plain[1])
    assert not torch.allclose(hidden(10, 13)[1], plain[1], atol=1e-3)  # 10..12 are context of the block at 13
    assert torch.equal(hidden(30, 40)[2], plain[2])

    other = toys.document(40)
    other.token_ids = example.token_ids.copy()
    other.token_ids[11:13] = 140
    other.token_ids[14:18] = 141
    answered = toys.batch_of([[other]], anchors, block_size=8)
    assert torch.equal(toys.slot_hidden(step, answered, features)[0], plain)  # the ids to be predicted are not read


def test_a_window_ends_where_the_rule_says_for_each_slot():
    W, S = 9, 8
    step = toys.toy_step(sliding_window=W, num_hidden_layers=1, **toys.V1)
    batch = toys.batch_of([[toys.document(40)]], [[30]], block_size=S)
    features = toys.random_features(batch)
    plain = toys.slot_hidden(step, batch, features)[0, 0]
    for key in (30 - W, 31 - W, 33 - W):
        changed = features.features_BTF.clone()
        changed[:, key] += 5.0
        moved = (toys.slot_hidden(step, batch, TargetFeatures(changed))[0, 0] - plain).abs().amax(-1) > 0
        assert moved.nonzero().flatten().tolist() == [s for s in range(S) if 30 + s - key < W], key


# --- packing and batching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_row_is_its_documents(variant, window):
    target = toys.toy_target(window=window)
    documents = [toys.document(n, slice(4, None), name=str(n), seed=n) for n in (17, 11, 23)]
    anchors = [[5, 9, 15], [4, 9], [6, 12, 20]]
    together = toys.toy_step(target, **VARIANTS[variant])
    alone = toys.toy_step(target, **VARIANTS[variant])
    starts = np.cumsum([0, 17, 11])
    packed = toys.batch_of(
        [documents],
        [np.concatenate([np.array(a) + s for a, s in zip(anchors, starts, strict=True)])],
        block_size=8,
        length=60,
    )
    features = target.read(packed)
    whole = together(packed, features, toys.weight_of(packed))
    whole.loss.backward()
    separate = [toys.batch_of([[d]], [a], block_size=8) for d, a in zip(documents, anchors, strict=True)]
    total = toys.weight_of(*separate)
    sums: dict[str, torch.Tensor] = {}
    for batch, d, start in zip(separate, documents, starts, strict=True):
        read = target.read(batch)
        torch.testing.assert_close(
            read.features_BTF[0], features.features_BTF[0, start : start + len(d.token_ids)], rtol=1e-4, atol=1e-4
        )
        report = alone(batch, read, total)
        report.loss.backward()
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0) + value
    assert float(total) == pytest.approx(packed.weight)
    for name, value in whole.sums.items():
        torch.testing.assert_close(value, sums[name], rtol=1e-4, atol=1e-5, msg=name)
    expected = toys.gradients(alone)
    for name, value in toys.gradients(together).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_target_reads_packed_documents_apart(attention):
    target = toys.toy_target(attention=attention)
    a, b = toys.document(9, seed=1), toys.document(12, seed=2)
    together = target.read(toys.batch_of([[a, b]], [[]], block_size=4, length=25)).features_BTF
    for example, at in ((a, 0), (b, 9)):
        alone = target.read(toys.batch_of([[example]], [[]], block_size=4)).features_BTF
        torch.testing.assert_close(together[0, at : at + len(example.token_ids)], alone[0], rtol=1e-4, atol=1e-4)


def test_a_batch_is_its_rows():
    step = toys.toy_step(toys.toy_target(), sliding_window=9)
    documents = [toys.document(n, slice(3, None), seed=n) for n in (12, 30, 21)]
    anchors = [[4, 7], [5, 17, 28], [10]]
    batch = toys.batch_of([[d] for d in documents], anchors, block_size=8)
    features = step.target.read(batch)
    hidden = toys.slot_hidden(step, batch, features)
    report = step(batch, features, torch.tensor(1.0))
    loss = 0.0
    for i, (d, a) in enumerate(zip(documents, anchors, strict=True)):
        row = toys.batch_of([[d]], [a], block_size=8)
        read = step.target.read(row)
        torch.testing.assert_close(hidden[i, : len(a)], toys.slot_hidden(step, row, read)[0], rtol=1e-4, atol=1e-4)
        loss += step(row, read, torch.tensor(1.0)).loss.item()
    assert report.loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("variant", ["full", "mixed"])
def test_a_step_by_the_kernels_for_hopper_is_one_by_dense_attention(variant, monkeypatch):
    """Compiled layers, gradients of all weights; the kernels by stand-ins for Gluon's functions, the layers by a backend that a CPU has at once."""
    compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    documents = [[toys.document(70, seed=1), toys.document(50, seed=2)], [toys.document(90, seed=3)]]
    batch = toys.batch_of(documents, [[5, 20, 69, 90, 110], [1, 60, 88]], block_size=8, length=130)
    features = toys.random_features(batch)
    exact, plain, ours = (toys.toy_step(head_dim=64, **VARIANTS[variant]) for _ in range(3))
    plain.dtype = ours.dtype = torch.bfloat16
    ours.mask, ours.fuse = compiled(span_mask), True
    found = []
    with interpreted():
        for step in (exact, plain, ours):
            report = step(batch, features, toys.weight_of(batch))
            report.loss.backward()
            found.append({"loss": report.loss.detach()} | toys.gradients(step))
    compiled.cache_clear()
    exact, plain, ours = found
    assert ours["loss"] == pytest.approx(float(exact["loss"]), rel=3e-3)
    for name, value in exact.items():  # what 16 bits cost, whoever computes in them
        off, usual = ((other[name] - value).norm() / value.norm().clamp_min(1e-6) for other in (ours, plain))
        assert off < 1.5 * usual + 1e-2, f"{name}: {off:.1e}, dense {usual:.1e}"
