"""The drafter's spec: defaults from the target, rules by name, and a fresh drafter's start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys

from dflash_train.config.schema import DrafterConfig
from dflash_train.drafter.model import Drafter, initialise
from dflash_train.drafter.spec import (
    FULL,
    SLIDING,
    check_target_layer_ids,
    default_target_layer_ids,
    from_hf_config,
    resolve_spec,
    tensor_shapes,
    to_hf_config,
)


def test_default_layers_are_the_published_ones():
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(28, 5) == [1, 7, 13, 19, 25]
    assert default_target_layer_ids(36, 1) == [18]


@pytest.mark.parametrize("layers", range(2, 13))
@pytest.mark.parametrize("draft", range(1, 7))
def test_default_layers_are_legal_for_every_depth(layers, draft):
    ids = default_target_layer_ids(layers, draft)
    check_target_layer_ids(ids, layers)
    assert len(ids) <= draft


def test_a_shallow_target_gives_fewer_layers_without_duplicates():
    assert default_target_layer_ids(5, 5) == [1, 2]
    assert default_target_layer_ids(6, 5) == [1, 2, 3]
    with pytest.raises(ValueError, match="1 decoder layer"):
        default_target_layer_ids(1, 2)


RULES = {
    "duplicate": [1, 1, 3],
    "negative": [-1, 2],
    "does not exist, num_layers = 5": [0, 5],
    "ascending": [3, 1],
    "must not be empty": [],
    r"last layer \(4\), which engines capture differently": [0, 4],
}


@pytest.mark.parametrize("rule", RULES)
def test_layers_are_refused_by_rule(rule):
    with pytest.raises(ValueError, match=rule) as error:
        resolve_spec(DrafterConfig(mask_token_id=155, target_layer_ids=RULES[rule]), toys.toy_info())
    assert "drafter.target_layer_ids" in str(error.value)


def test_layers_in_range_are_accepted_and_set_the_width_of_fc():
    spec = resolve_spec(DrafterConfig(mask_token_id=155, target_layer_ids=[0, 1, 2, 3]), toys.toy_info())
    assert Drafter(spec).fc.in_features == 4 * 64


def test_nulls_are_the_targets_and_values_are_kept():
    info = toys.toy_info(final_logit_softcapping=30.0, input_embedding_scale=8.0, rope_theta=5e5)
    spec = resolve_spec(DrafterConfig(mask_token_id=155, selector_top_k=8), info)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.intermediate_size) == (4, 2, 16, 96)
    assert (spec.rope_theta, spec.final_logit_softcapping, spec.input_embedding_scale) == (5e5, 30.0, 8.0)
    assert spec.layer_types == (FULL,) * 5
    own = resolve_spec(
        DrafterConfig(mask_token_id=155, rope_theta=1e4, head_dim=32, sliding_window=64, num_hidden_layers=2), info
    )
    assert (own.rope_theta, own.head_dim, own.layer_types) == (1e4, 32, (SLIDING, SLIDING))
    assert [own.window(n) for n in range(2)] == [64, 64]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads = 3: must be a multiple of num_key_value_heads = 2"),
        ({"head_dim": 15}, "head_dim = 15: must be even"),
        ({"conv_group_size": 48}, "conv_group_size = 48: must divide the target's hidden size 64"),
        ({"selector_top_k": 256}, "selector_top_k = 256: the vocabulary has only 160"),
    ],
)
def test_what_the_target_rules_out_is_named(config, text):
    with pytest.raises(ValueError, match=text):
        resolve_spec(DrafterConfig(mask_token_id=155, **config), toys.toy_info())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 32},
        {"sliding_window": 32, "layer_types": (SLIDING, FULL)},
        {"is_causal": True},
        {"final_logit_softcapping": 6.0, "output_multiplier": 0.5, "input_embedding_scale": 3.0},
        {"conv_kernel_size": 0, "selector_rank": 0, "selector_top_k": 16},
    ],
)
def test_the_public_config_says_the_whole_spec(changes):
    spec = toys.toy_spec(**changes)
    config = to_hf_config(spec, dtype="float32", bos=1, eos=2, pad=0)
    assert from_hf_config(config) == spec
    assert from_hf_config(config | {"is_causal": not spec.is_causal}).differences(spec) == [
        f"is_causal: {not spec.is_causal} against {spec.is_causal}"
    ]


@pytest.mark.parametrize("changes", [{}, toys.V1])
def test_a_drafter_has_exactly_the_tensors_of_the_contract(changes):
    drafter = Drafter(toys.toy_spec(**changes))
    assert {n: tuple(t.shape) for n, t in drafter.state_dict().items()} == tensor_shapes(drafter.spec)


# --- initialisation -----------------------------------------------------------------------------------------


def fresh(seed: int = 0, **spec) -> Drafter:
    drafter = Drafter(toys.toy_spec(**spec))
    initialise(drafter, seed)
    return drafter


def test_initialisation_is_seeded_by_name():
    a, b, other = fresh(1).state_dict(), fresh(1).state_dict(), fresh(2).state_dict()
    torch.manual_seed(99)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["fc.weight"], other["fc.weight"])
    deeper = fresh(1, num_hidden_layers=3).state_dict()
    assert all(torch.equal(a[n], deeper[n]) for n in a)  # a tensor does not depend on the others
    assert not torch.equal(a["layers.0.mlp.up_proj.weight"], a["layers.0.mlp.gate_proj.weight"])
    assert float(a["layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)


def test_a_fresh_drafter_is_plain_dflash():
    """The convolution is the identity and the selector silent; both still receive gradient."""
    two, one = toys.toy_step(), toys.toy_step(**toys.V1)
    initialise(two.drafter, 7)
    initialise(one.drafter, 7)
    batch = toys.batch_of([[toys.document(30, slice(4, None))]], [[4, 9, 20]], block_size=8)
    features = toys.random_features(batch)
    assert torch.equal(toys.slot_hidden(two, batch, features), toys.slot_hidden(one, batch, features))
    report = two(batch, features, toys.weight_of(batch))
    assert toys.mean(report, "accept_len") == toys.mean(report, "base_accept_len")
    assert toys.mean(report, "accuracy") == toys.mean(report, "base_accuracy")
    report.loss.backward()
    gradients = toys.gradients(two)
    for name in ("layers.0.attention_conv.base_kernel", "layers.1.mlp_conv.kernel_projection.weight"):
        assert float(gradients[name].abs().max()) > 0
    selected = replace(two.drafter.spec, selector_top_k=160)
    everything = toys.toy_step(**{k: getattr(selected, k) for k in ("selector_top_k",)})
    initialise(everything.drafter, 7)
    everything(batch, features, toys.weight_of(batch)).loss.backward()
    assert float(toys.gradients(everything)["candidate_selector.successor_codebook"].abs().max()) > 0
