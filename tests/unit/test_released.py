"""What a released folder says, in every format; what it leaves open; what contradicts it."""

from __future__ import annotations

import json

import pytest
import released_drafters
import torch
import toys
from released_drafters import published_config, write
from safetensors.torch import save_file

from dflash_train.build import build_step, outline
from dflash_train.config.load import load_recipe, to_yaml
from dflash_train.drafter.spec import FULL, SLIDING, from_hf_config, tensor_shapes
from dflash_train.folder import normalised
from dflash_train.released.read import Released, read_released
from dflash_train.released.start import derive

WINDOW = {"layer_types": [SLIDING, SLIDING], "sliding_window": 12, "use_sliding_window": True}


def random_tensors(**settings) -> dict[str, torch.Tensor]:
    config = normalised(published_config(**settings))
    g = torch.Generator().manual_seed(0)
    spec = from_hf_config(config | {"is_causal": bool(config.get("is_causal"))})
    return {name: torch.randn(shape, generator=g) for name, shape in tensor_shapes(spec).items()}


@pytest.fixture
def released(tmp_path):
    """A function that writes a published folder: released(settings of its config, tensors=..., card=...)."""

    def make(*, tensors=None, card="---\nlicense: mit\n---\n", name="released", **settings):
        return write(tmp_path / name, published_config(**settings), tensors or random_tensors(**settings), card)

    return make


def recipe(folder, *knobs):
    return load_recipe(None, [f"drafter.init_from={folder}", *knobs])


def knobs_of(folder, *knobs):
    return derive(recipe(folder, *knobs))[0].drafter


# --- deriving --------------------------------------------------------------------------------------------------------


def test_every_knob_left_open_is_the_released_drafters(released):
    d = knobs_of(
        released(**WINDOW, num_attention_heads=8, rms_norm_eps=1e-5, block={"output_multiplier": 0.5}, is_causal=False)
    )
    assert (d.block_size, d.mask_token_id, d.target_layer_ids, d.num_hidden_layers) == (8, toys.MASK, [1, 3], 2)
    assert (d.sliding_window, d.layer_types, d.is_causal) == (12, [SLIDING, SLIDING], False)
    assert (d.num_attention_heads, d.num_key_value_heads, d.head_dim, d.intermediate_size) == (8, 2, 16, 96)
    assert (d.conv_kernel_size, d.conv_group_size, d.selector_rank, d.selector_top_k) == (2, 16, 12, 8)
    assert (d.rope_theta, d.rms_norm_eps, d.output_multiplier, d.input_embedding_scale) == (10000.0, 1e-5, 0.5, 1.0)


def test_a_v1_drafter_gets_the_convolution_and_selector_of_the_schema_or_of_the_recipe(released):
    folder = released(two=False)
    d = knobs_of(folder)
    assert (d.conv_kernel_size, d.conv_group_size, d.selector_rank, d.selector_top_k, d.is_causal) == (
        2,
        16,
        256,
        16,
        False,
    )
    d = knobs_of(folder, "drafter.conv_kernel_size=0", "drafter.selector_rank=8")
    assert (d.conv_kernel_size, d.selector_rank) == (0, 8)


def test_the_derived_recipe_is_complete_and_reads_the_same_again(released, tmp_path):
    derived, _ = derive(
        recipe(released(**WINDOW, is_causal=False), "drafter.num_hidden_layers=3", "drafter.block_size=4")
    )
    (tmp_path / "saved.yaml").write_text(to_yaml(derived))
    again, start = derive(load_recipe(str(tmp_path / "saved.yaml")))
    assert again == derived and again.drafter.layer_types == [SLIDING] * 3
    assert len(start.notes) == 2


CONTRADICTIONS = {
    "drafter.mask_token_id = 156, the released drafter has 155": ["drafter.mask_token_id=156"],
    r"drafter.target_layer_ids = \[0, 3\], the released drafter has \[1, 3\]": ["drafter.target_layer_ids=[0,3]"],
    "drafter.head_dim = 32, the released drafter has 16": ["drafter.head_dim=32"],
    "drafter.conv_kernel_size = 0, the released drafter has 2": ["drafter.conv_kernel_size=0"],
    "drafter.selector_rank = 256, the released drafter has 12": ["drafter.selector_rank=256"],
    "drafter.num_hidden_layers = 1, the released drafter has 2": ["drafter.num_hidden_layers=1"],
    "drafter.sliding_window = None, the released drafter has 12": ["drafter.sliding_window=null"],
    "drafter.is_causal = True, the released drafter has False": ["drafter.is_causal=true"],
    "drafter.rope_theta = 5.0, the released drafter has 10000.0": ["drafter.rope_theta=5"],
    "head_dim = 32.*; drafter.selector_top_k = 4,": ["drafter.head_dim=32", "drafter.selector_top_k=4"],  # all of them at once
    "the first 2 layers are those of released": [
        "drafter.num_hidden_layers=3",
        f"drafter.layer_types=[{FULL},{SLIDING},{SLIDING}]",
    ],
    r"drafter.block_size = 16|drafter.sliding_window = 12: must be null or at least block_size = 16": ["drafter.block_size=16"],
    "there is one window for all layers": ["drafter.num_hidden_layers=3", "drafter.sliding_window=20"],
}  # fmt: skip


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_knob_that_contradicts_the_released_drafter_is_refused_with_both_values(released, message):
    with pytest.raises(ValueError, match=message):
        knobs_of(released(**WINDOW, is_causal=False), *CONTRADICTIONS[message])


def test_a_default_is_no_contradiction_but_the_same_value_given_is(released, tmp_path):
    folder = released()
    assert knobs_of(folder).block_size == 8  # the schema's default is 16
    (tmp_path / "r.yaml").write_text(f"drafter: {{init_from: {folder}, selector_rank: 256}}")
    with pytest.raises(ValueError, match="selector_rank = 256"):
        derive(load_recipe(str(tmp_path / "r.yaml")))


def test_knobs_of_a_start_without_a_start_are_refused():
    with pytest.raises(ValueError, match=r"drafter.init_revision = main: has no effect without drafter.init_from"):
        derive(load_recipe(None, ["drafter.init_revision=main"]))


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": 170}, "vocab_size 170, the target .* has 160"),
    ({"hidden_size": 32}, "hidden_size 32, the target .* has 64"),
    ({"num_target_layers": 7}, "num_target_layers 7, the target .* has 5"),
])  # fmt: skip
def test_a_drafter_of_another_target_is_refused(released, target_dir, changes, message):
    folder = released(**changes)
    with pytest.raises(ValueError, match=message):
        outline(recipe(folder, f"target.path={target_dir}"))


# --- the licence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [
    "---\nlicense: cc-by-nd-4.0\n---\n", "---\nlicense: cc-by-nc-nd-4.0\n---\n", "---\nlicense: [mit, cc-by-nd-4.0]\n---\n",
    "---\nlicense: other\nlicense_name: acme-no-derivatives\n---\n",
])  # fmt: skip
def test_a_no_derivatives_drafter_is_refused_unless_owned(released, card):
    folder = released(card=card)
    with pytest.raises(ValueError, match=r"allows no derivatives.*export.owned=true"):
        knobs_of(folder)
    assert knobs_of(folder, "export.owned=true").block_size == 8


@pytest.mark.parametrize(("card", "license"), [
    ("---\nlicense: apache-2.0\n---\n", "apache-2.0"), ("---\nlicense: other\nlicense_name: acme\n---\n", "other (acme)"), ("# none", None),
    ("---\nlicense: [\n---\n", None), (None, None), ("---\nlicense: cc-by-sa-4.0\n---\nnd", "cc-by-sa-4.0"),
])  # fmt: skip
def test_other_licences_are_recorded(released, card, license):
    found = read_released(str(released(card=card)))
    assert found.license == license and not found.licence.terms.no_derivatives


# --- what is refused by name -----------------------------------------------------------------------------------------

REFUSED = {
    "attention_sink_bias = True: attention sinks": {"attention_sink_bias": True},
    "use_swa = True: a window under another name": {"use_swa": True, "swa_window_size": 1024},
    "attention_value_scale = 0.612: scaled attention values": {"attention_value_scale": 0.612},
    "quantised weights": {"quantization_config": {"bits": 4}},
    "a partial, sectioned or scaled one": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "attention_bias = true": {"attention_bias": True},
    "hidden_act = gelu": {"hidden_act": "gelu"},
    "dflash_config.tap_shift = 1: our drafters have 0": {"block": {"tap_shift": 1}},
    "dflash_config.projector_type = domino": {"block": {"projector_type": "domino"}},
    "dflash_config.block_sise = 4: not known here.*did you mean 'block_size'": {"block": {"block_sise": 4}},
    "is_causal = False at the top, True in dflash_config": {"block": {"causal": True}},
    "use_sliding_window is not true": {"layer_types": [FULL, SLIDING], "sliding_window": 12},
    "no rope_theta": {"rope_parameters": {"rope_type": "default"}},
    "in two places": {"block_size": 16},
    "selector_top_k: .* in two places": {"selector_top_k": 64},
    "mask_token_id: .* in two places": {"mask_token_id": 3},
    "output_multiplier = 0.0: must be a finite number above 0": {"block": {"output_multiplier": 0}},
    "final_logit_softcapping = -3.0: must be": {"block": {"final_logit_softcapping": -3.0}},
    "rms_norm_eps = 0.0: must be": {"rms_norm_eps": 0},
    "rope_theta = -1.0: must be": {"rope_parameters": {"rope_theta": -1.0}},
    "conv_group_size = 0: must be at least 1": {"block": {"conv_group_size": 0}},
    "use_sliding_window = 'false': must be": {"use_sliding_window": "false"},
    "rope_scaling = .* beside rope_parameters": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_our_layers_do_not_compute_is_refused_by_name(tmp_path, message):
    config = published_config(**REFUSED[message])
    with pytest.raises(ValueError, match=message):
        derive(recipe(write(tmp_path / "x", config, {"a": torch.zeros(1)})))


def test_what_the_reference_reads_at_the_top_is_read(tmp_path):
    config = published_config(output_multiplier=0.5, final_logit_softcapping=20.0)
    found = read_released(str(write(tmp_path / "x", config, {"a": torch.zeros(1)}))).spec()
    assert (found.output_multiplier, found.final_logit_softcapping) == (0.5, 20.0)


def test_a_learned_mask_embedding_is_refused(released):
    folder = released()
    torch.save(torch.zeros(4), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"mask_embedding.pt: a learned embedding"):
        knobs_of(folder)


def test_what_is_no_drafter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder, and no Hub id"):
        knobs_of(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config.json"):
        knobs_of(tmp_path / "empty")
    llama = write(tmp_path / "llama", {"architectures": ["LlamaForCausalLMEagle3"]}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no DFlash drafter: architectures \['LlamaForCausalLMEagle3'\]"):
        knobs_of(llama)


def test_the_hub_without_a_network_is_one_message(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("offline"))
    )
    with pytest.raises(
        ValueError, match=r"init_from = acme/drafter: neither a folder nor to be had from the Hub \(offline\)"
    ):
        knobs_of("acme/drafter")


def test_of_the_hub_only_the_config_is_read_until_the_weights_are_needed(released, monkeypatch, tmp_path):
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    released(name=f"snapshots/{'a' * 40}")
    asked = []

    def download(source, revision, allow_patterns):
        asked.append((source, revision, "*.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = read_released("acme/drafter", "main")
    assert (found.name, found.revision, asked) == ("acme/drafter", "a" * 40, [("acme/drafter", "main", False)])
    found.tensors(found.spec())
    assert asked[1:] == [("acme/drafter", "a" * 40, True)]  # of that very commit


# --- tensors ---------------------------------------------------------------------------------------------------------


def load(folder) -> dict[str, torch.Tensor]:
    found = read_released(str(folder))
    return found.tensors(found.spec())[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("rename", [
    lambda n: n + ".weight" if n.endswith("_codebook") else n, lambda n: "model." + n, lambda n: "module._orig_mod." + n,
    lambda n: "draft_model.model." + n,
], ids=["dotted codebooks", "model.", "wrapped", "draft_model."])  # fmt: skip
def test_names_of_wrappers_are_stripped(released, rename):
    tensors = random_tensors()
    assert same(load(released(tensors={rename(k): v for k, v in tensors.items()})), tensors)


def test_a_sharded_set_is_read(released):
    folder, tensors = released(), random_tensors()
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load(folder), tensors)


def test_missing_unknown_and_broken_tensors_are_refused_together(released):
    tensors = random_tensors()
    del tensors["norm.weight"]
    tensors["layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], float("nan"))
    folder = released(tensors=tensors)
    with pytest.raises(ValueError) as error:
        load(folder)
    for text in ("norm.weight: missing", "layers.7.mlp.up_proj.weight: unexpected", "fc.weight: has NaN"):
        assert text in str(error.value)


def test_quantised_tensors_are_refused(released):
    tensors = random_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    folder = released(tensors=tensors)
    with pytest.raises(ValueError, match=r"fc.weight: torch.float8_e4m3fn"):
        load(folder)


@pytest.mark.parametrize("own", ["embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"])
def test_the_targets_own_embedding_and_head_are_dropped_and_others_refused(released, target_dir, own):
    model = toys.toy_model()
    target = (model.get_input_embeddings() if own.startswith("embed") else model.get_output_embeddings()).weight
    folder = released(tensors=random_tensors() | {own: target.to(torch.bfloat16)})
    o = outline(recipe(folder, f"target.path={target_dir}"))
    step = build_step(o, torch.device("cpu"))
    assert torch.equal(step.drafter.fc.weight, random_tensors()["fc.weight"])
    folder = released(tensors=random_tensors() | {own: target + 0.1}, name="other")
    with pytest.raises(ValueError, match=rf"its {own} is not the target's"):
        build_step(outline(recipe(folder, f"target.path={target_dir}")), torch.device("cpu"))


# --- DFlash v1 and what its files leave out ---------------------------------------------------------------------------


def v1(**more):
    """As Qwen3-4B-DFlash-b16 is written: block size at the top, flat rope_theta, no is_causal."""
    config = published_config(two=False, block_size=16, rope_scaling=None, **more) | {"rope_theta": 1e6}
    del config["dflash_config"]["block_size"], config["rope_parameters"]
    return config | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}


def test_the_first_published_form(tmp_path):
    d = knobs_of(write(tmp_path / "v1", v1(), random_tensors(two=False)))
    assert (d.block_size, d.rope_theta, d.is_causal, d.layer_types) == (16, 1e6, False, [FULL, FULL])


def test_without_layer_types_transformers_rule_is_followed(tmp_path):
    config = v1(sliding_window=64, use_sliding_window=True, max_window_layers=2)
    del config["layer_types"]
    d = knobs_of(write(tmp_path / "full", config, random_tensors(two=False)))
    assert (d.layer_types, d.sliding_window) == ([FULL, FULL], None)  # on, and yet no layer slides
    config["max_window_layers"] = 0
    d = knobs_of(write(tmp_path / "sliding", config, random_tensors(two=False)))
    assert (d.layer_types, d.sliding_window, d.is_causal) == ([SLIDING, SLIDING], 64, True)


def test_absent_is_causal_on_sliding_layers_is_causal_and_may_be_changed_knowingly(tmp_path):
    config = v1(**(WINDOW | {"sliding_window": 32}))
    folder = write(tmp_path / "v1", config, random_tensors(two=False))
    _, start = derive(recipe(folder))
    assert start.spec.is_causal is True and any("causal inside the block" in n for n in start.notes)
    _, start = derive(recipe(folder, "drafter.is_causal=false"))
    assert start.spec.is_causal is False and any("not equal" in n for n in start.notes)


def test_absent_layer_ids_are_the_references_and_an_absent_mask_must_be_given(tmp_path):
    config = v1()
    del config["dflash_config"]["target_layer_ids"], config["dflash_config"]["mask_token_id"]
    folder = write(tmp_path / "specforge", config, random_tensors(two=False))
    with pytest.raises(ValueError, match=r"set drafter.mask_token_id; its config.json names none"):
        knobs_of(folder)
    d = knobs_of(folder, "drafter.mask_token_id=155")
    assert (d.target_layer_ids, d.mask_token_id) == ([1, 2], 155)


def test_specforge_names_are_understood(tmp_path):
    """SpecForge writes these beside the published keys, at their neutral values."""
    block = {"projector_type": None, "shift_label": False, "pure_draft_prefix_len": 0}
    folder = write(tmp_path / "x", published_config(two=False, block=block), random_tensors(two=False))
    assert knobs_of(folder).block_size == 8


# --- Speculators ------------------------------------------------------------------------------------------------------


def speculators(kind: str = "dflash2", layer: dict | None = None, **more) -> dict:
    """config.json as Speculators 0.9.0 saves it: the layers' config without what its class has by default, ids from 1."""
    config = {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy", "verifier": {"name_or_path": "toy", "architectures": []},
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]},
        "block_size": 8, "draft_vocab_size": toys.VOCAB, "mask_token_id": toys.MASK, "aux_hidden_state_layer_ids": [2, 4],
        "sample_from_anchor": False, "target_hidden_size": None, "sliding_window_non_causal": kind == "dflash2", "dtype": "float32",
        "transformer_layer_config": {
            "model_type": "qwen3", "hidden_size": toys.HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "num_hidden_layers": 2, "vocab_size": toys.VOCAB, "max_position_embeddings": 512,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, **(layer or {}),
        },
    }  # fmt: skip
    if kind == "dflash2":
        config |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 8}
    return config | more


def test_speculators_ids_count_the_embedding_and_its_missing_keys_are_its_classes_defaults(tmp_path, target_dir):
    folder = write(tmp_path / "s", speculators(), random_tensors())
    o = outline(recipe(folder, f"target.path={target_dir}"))
    assert o.spec.target_layer_ids == (1, 3) and o.spec.rms_norm_eps == 1e-6 and not o.spec.is_causal
    step = build_step(o, torch.device("cpu"))
    assert same(dict(step.drafter.state_dict()), random_tensors())
    assert o.start.released.format == "Speculators" and o.spec.num_target_layers == toys.LAYERS


def test_speculators_windows_and_causality(tmp_path):
    layer = WINDOW
    two = read_released(str(write(tmp_path / "two", speculators(layer=layer), random_tensors())))
    assert two.config["is_causal"] is False and two.config["sliding_window"] == 12
    assert any("from the anchor" in n for n in two.notes)
    one = read_released(str(write(tmp_path / "one", speculators("dflash", layer=layer), random_tensors(two=False))))
    assert one.config["is_causal"] is True
    mixed = speculators("dflash", layer={**layer, "layer_types": [SLIDING, FULL]})
    assert "is_causal" in read_released(str(write(tmp_path / "mixed", mixed, random_tensors(two=False)))).unstated
    full = read_released(str(write(tmp_path / "full", speculators("dflash"), random_tensors(two=False))))
    assert full.config["is_causal"] is False and full.config["sliding_window"] is None


@pytest.mark.parametrize(("changes", "message"), [
    ({"draft_vocab_size": 100}, "draft_vocab_size = 100: a reduced vocabulary"),
    ({"sample_from_anchor": True}, "sample_from_anchor = true"),
    ({"aux_hidden_state_layer_ids": [0, 2]}, "0 is the token embedding"),
    ({"aux_hidden_state_layer_ids": None}, "which layers it captures is unknown"),
    ({"target_hidden_size": 128}, "target_hidden_size = 128"),
    ({"speculators_model_type": "eagle3"}, "a Speculators eagle3 drafter"),
])  # fmt: skip
def test_speculators_drafters_that_ours_cannot_be(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_released(str(write(tmp_path / "s", speculators(**changes), random_tensors())))


def test_speculators_extra_tensors(tmp_path):
    whole = {
        "t2d": torch.ones(toys.VOCAB, dtype=torch.bool),
        "d2t": torch.zeros(toys.VOCAB, dtype=torch.long),
        "verifier_norm.weight": torch.ones(64),
    }
    assert same(load_with_layers(write(tmp_path / "whole", speculators(), random_tensors() | whole)), random_tensors())
    part = {"t2d": torch.arange(toys.VOCAB) < 100}
    folder = write(tmp_path / "part", speculators(), random_tensors() | part)
    with pytest.raises(ValueError, match=r"reduced vocabulary \(tensor t2d\)"):
        load_with_layers(folder)


def load_with_layers(folder) -> dict[str, torch.Tensor]:
    found: Released = read_released(str(folder))
    return found.tensors(found.spec(num_target_layers=toys.LAYERS))[0]


def test_the_last_layer_of_speculators_is_refused_where_the_target_is_known(tmp_path, target_dir):
    folder = write(tmp_path / "s", speculators(aux_hidden_state_layer_ids=[2, 5]), random_tensors())
    with pytest.raises(ValueError, match=r"has the last layer \(4\)"):
        outline(recipe(folder, f"target.path={target_dir}"))


# --- NeMo AutoModel ---------------------------------------------------------------------------------------------------


def nemo(*, two: bool = True, **more) -> dict:
    """config.json of a real NeMo AutoModel 0.7.0 export for a Qwen3.5 target: wrong class, all full, extras of the target."""
    config = published_config(two=two, block_size=8, max_window_layers=2, **more) | {
        "architectures": ["Qwen3DFlashDraftModel"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "partial_rotary_factor": 0.25,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    config["dflash_config"] |= {"output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1.0}
    config.pop("is_causal", None)
    return config


def test_a_nemo_export_is_recognised_explained_and_asks_for_its_window(tmp_path):
    folder = tmp_path / "checkpoint" / "model" / "consolidated"
    write(folder, nemo(), random_tensors())
    with pytest.raises(
        ValueError,
        match=r"set drafter.sliding_window to the window .* or to null for none; NeMo AutoModel 0.7.0 does not",
    ):
        knobs_of(tmp_path / "checkpoint")
    derived, start = derive(recipe(tmp_path / "checkpoint", "drafter.sliding_window=16"))
    d = derived.drafter
    assert (d.sliding_window, d.layer_types, d.is_causal) == (16, [SLIDING, SLIDING], False)
    said = " ".join(start.notes)
    assert "Qwen3DFlashDraftModel" in said and "partial_rotary_factor" in said and "linear_conv_kernel_dim" in said
    d = knobs_of(folder, "drafter.sliding_window=null")
    assert (d.sliding_window, d.layer_types) == (None, [FULL, FULL])


def test_a_nemo_folder_that_states_its_contract_is_believed(tmp_path):
    config = nemo(**WINDOW) | {"architectures": ["Qwen3DFlash2DraftModel"], "is_causal": False}
    d = knobs_of(write(tmp_path / "n", config, random_tensors()))
    assert (d.sliding_window, d.layer_types) == (12, [SLIDING, SLIDING])


def test_the_fixtures_of_the_reference_are_named_as_published():
    model = released_drafters.reference_drafter()
    assert released_drafters.tensors_of(model).keys() == random_tensors().keys()


ODD = [None, True, 0, -1, 1.5, "x", [], ["a"], {"a": 1}, 10**30, "absent"]


@pytest.mark.parametrize("base", ["published", "first form", "nemo", "speculators"])
def test_whatever_stands_in_a_config_is_a_drafter_or_one_message(tmp_path, base):
    """One key after another, each with values of every type."""
    config = {
        "published": published_config(**WINDOW, is_causal=False),
        "first form": v1(),
        "nemo": nemo(),
        "speculators": speculators(),
    }[base]
    (tmp_path / "x").mkdir()
    asked = recipe(tmp_path / "x", "drafter.sliding_window=16")
    refused = 0
    for place in (config, *(v for v in config.values() if isinstance(v, dict))):
        for key, value in list(place.items()):
            for odd in ODD:
                if odd == "absent":
                    del place[key]
                else:
                    place[key] = odd
                (tmp_path / "x" / "config.json").write_text(json.dumps(config))
                try:
                    derive(asked)
                except ValueError:
                    refused += 1
                place[key] = value
    assert refused > 50
