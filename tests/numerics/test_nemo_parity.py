"""The numbers of NeMo AutoModel's DFlash 2 trainer where both define the same, and the differences, pinned.

Same: full blocks in a supervised answer without holes. Different: a block with a hole (NeMo goes on after
it), and the selector's denominator (NeMo's is the covered weight, ours the supervised weight by default).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from torch import nn

from dflash_train.config.schema import Denominator, ObjectiveConfig
from dflash_train.types import PackedBatch

pytest.importorskip("nemo_automodel")
from nemo_automodel.components.speculative.dflash.dflash2_core import DFlash2TrainerModule
from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel

LENGTH, PROMPT = 34, 9
METRICS = [
    "base_loss",
    "selector_loss",
    "accuracy",
    "base_accuracy",
    "accept_len",
    "base_accept_len",
    "candidate_recall",
]


def nemo(step, batch: PackedBatch, features, *, gamma: float, backend: str, packed: bool = False):
    """NeMo's trainer with our weights and our anchors, run on the batch: (metrics, gradients)."""
    spec, target = step.drafter.spec, step.target
    config = toys.toy_config(attention_bias=False)
    block = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "conv_kernel_size": spec.conv_kernel_size,
        "conv_group_size": spec.conv_group_size,
        "selector_rank": spec.selector_rank,
        "selector_top_k": spec.selector_top_k,
        "output_multiplier": spec.output_multiplier,
        "final_logit_softcapping": spec.final_logit_softcapping,
        "input_embedding_scale": spec.input_embedding_scale,
    }
    config.num_hidden_layers, config.num_target_layers, config.dflash_config = (
        spec.num_hidden_layers,
        spec.num_target_layers,
        block,
    )
    config.layer_types, config.rms_norm_eps = list(spec.layer_types), spec.rms_norm_eps
    config.sliding_window = spec.sliding_window
    config._attn_implementation = backend
    draft = Qwen3DFlash2DraftModel(config).float()
    draft.load_state_dict(step.drafter.state_dict())
    head, embedding = nn.Linear(toys.HIDDEN, toys.VOCAB, bias=False), nn.Embedding(toys.VOCAB, toys.HIDDEN)
    head.weight, embedding.weight = (nn.Parameter(target.head_VH, False), nn.Parameter(target._embedding, False))
    trainer = DFlash2TrainerModule(
        draft,
        head,
        embedding,
        spec.mask_token_id,
        block_size=spec.block_size,
        attention_backend=backend,
        loss_decay_gamma=gamma,
        selector_loss_weight=step.objective.selector_loss_weight,
        sliding_window=spec.sliding_window,
    )
    trainer._sample_anchor_positions = lambda *args, **kwargs: (batch.blocks.anchors_BN, batch.blocks.valid_BN)
    more = {}
    if packed:
        rows = [[int(n) for n in np.bincount(row[row >= 0])] for row in batch.document_ids_BT.numpy()]
        left = [np.concatenate([np.arange(n)[::-1] for n in row]) for row in rows]
        more = {
            "position_ids": batch.position_ids_BT,
            "seq_lens": torch.tensor(rows),
            "doc_remaining": torch.tensor(np.array(left)),
        }
    out = trainer(batch.token_ids_BT, features.features_BTF, batch.supervised_BT.float(), **more)
    out.loss.backward()
    return out, {n: p.grad for n, p in draft.named_parameters()}


def ours(step, batch, features):
    report = step(batch, features, toys.weight_of(batch))
    report.loss.backward()
    values = {name: toys.mean(report, name) for name in METRICS} | {"loss": report.loss.item()}
    return SimpleNamespace(**values), toys.gradients(step)


def full_blocks(block_size: int, gamma: float):
    documents = [toys.document(LENGTH, slice(PROMPT, None), name=str(i), seed=i) for i in range(2)]
    last = LENGTH - block_size
    anchors = [[PROMPT, PROMPT + 1, PROMPT + 5, last], [PROMPT + 3, last - 2, last]]
    return toys.batch_of([[d] for d in documents], anchors, block_size=block_size, gamma=gamma)


def covering_step(block_size: int, selector_loss_weight: float = 0.7, **spec):
    """NeMo's denominator, and so many candidates that some gold tokens are covered and some are not."""
    objective = ObjectiveConfig(selector_denominator=Denominator.covered, selector_loss_weight=selector_loss_weight)
    return toys.toy_step(objective=objective, block_size=block_size, selector_top_k=64, **spec)


CASES = {
    "plain": {},
    "window": {"sliding_window": 11},
    "transformed": {"final_logit_softcapping": 6.0, "output_multiplier": 1.7, "input_embedding_scale": 3.0},
    "all": {
        "sliding_window": 9,
        "final_logit_softcapping": 6.0,
        "output_multiplier": 0.6,
        "input_embedding_scale": 8.0,
    },
}


def compare(step, batch, features, *, gamma: float, backend: str, packed: bool = False):
    mine, gradients = ours(step, batch, features)
    theirs, expected = nemo(step, batch, features, gamma=gamma, backend=backend, packed=packed)
    for name in ["loss", *METRICS]:
        assert getattr(mine, name) == pytest.approx(float(getattr(theirs, name)), rel=1e-5, abs=1e-5), name
    assert 0.05 < mine.candidate_recall < 0.95
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        assert scale > 0, name
        assert float((gradient - expected[name]).abs().max()) < 1e-5 * max(1.0, scale), name


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("block_size", "gamma"), [(4, 4.0), (8, 7.0)])
@pytest.mark.parametrize("case", CASES)
def test_loss_metrics_and_every_gradient_are_equal(case, block_size, gamma, backend):
    step = covering_step(block_size, **CASES[case])
    batch = full_blocks(block_size, gamma)
    compare(step, batch, toys.random_features(batch, seed=3), gamma=gamma, backend=backend)


def test_packed_documents_are_equal():
    rows = [
        [toys.document(n, slice(3, None), name=f"{i}{n}", seed=i) for n in pair]
        for i, pair in enumerate([(14, 20), (19, 15)])
    ]
    batch = toys.batch_of(rows, [[3, 10, 18, 30], [5, 15, 24, 30]], block_size=4, gamma=4.0)
    compare(
        covering_step(4, sliding_window=6), batch, toys.random_features(batch), gamma=4.0, backend="eager", packed=True
    )


def test_hits_count_equally_when_there_are_some():
    """Labels chosen as what the drafter says, so that acceptance is not all zero."""
    step, batch = covering_step(8), full_blocks(8, 4.0)
    features = toys.random_features(batch)
    hidden = toys.slot_hidden(step, batch, features)
    best = (hidden @ step.target.head_VH.T).argmax(-1)
    for n, a in enumerate(batch.blocks.anchors_BN[0].tolist()):
        if n % 2:  # blocks 1 and 3 do not touch each other
            batch.token_ids_BT[0, a + 1 : a + 5] = best[0, n, 1:5]
    index = batch.blocks.anchors_BN[:, :, None] + torch.arange(8)
    labels = batch.token_ids_BT[torch.arange(2)[:, None, None], index]
    batch.blocks.labels_BNS[:] = torch.where(batch.blocks.valid_BN[:, :, None], labels, 0)
    mine, _ = ours(step, batch, features)
    theirs, _ = nemo(step, batch, features, gamma=4.0, backend="eager")
    assert mine.base_accept_len > 1.2
    assert mine.base_accuracy > 0.05
    for name in METRICS:
        assert getattr(mine, name) == pytest.approx(float(getattr(theirs, name)), abs=1e-5), name


def test_a_block_ends_at_a_hole_here_and_goes_on_after_it_in_nemo():
    hole = 15
    example = toys.document(LENGTH, [i for i in range(PROMPT, LENGTH) if i != hole])
    step = covering_step(8)
    batch = toys.batch_of([[example]], [[11, 20]], block_size=8, gamma=4.0)
    features = toys.random_features(batch)
    theirs, _ = nemo(step, batch, features, gamma=4.0, backend="eager")
    assert batch.blocks.supervised_BNS[0, 0].tolist() == [False, True, True, True, False, False, False, False]
    assert len(batch.blocks.scored_M) == 3 + 7
    assert int(theirs.valid_tokens) == 6 + 7
    w = np.exp(-np.arange(7) / 4.0)
    assert batch.weight == pytest.approx(w[:3].sum() + w.sum())
    assert float(theirs.loss_weight) == pytest.approx(w.sum() - w[3] + w.sum())


def test_the_selector_is_divided_by_all_supervised_weight_unless_nemos_denominator_is_asked_for():
    batch = full_blocks(8, 4.0)
    features = toys.random_features(batch)
    covered = covering_step(8)
    supervised = toys.toy_step(objective=ObjectiveConfig(selector_loss_weight=0.7), block_size=8, selector_top_k=64)
    slots = covered.score(batch, features)
    share = float((slots["weights_M"] * slots["covered_M"]).sum() / slots["weights_M"].sum())
    assert 0.05 < share < 0.95
    theirs, _ = nemo(covered, batch, features, gamma=4.0, backend="eager")
    mine, _ = ours(supervised, batch, features)
    assert mine.base_loss == pytest.approx(float(theirs.base_loss), rel=1e-5)
    assert mine.selector_loss == pytest.approx(share * float(theirs.selector_loss), rel=1e-5)
    assert mine.loss == pytest.approx(mine.base_loss + 0.7 * mine.selector_loss, rel=1e-5)
