"""Export: what is written, what is refused, and that it comes back as it was."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from planted import TINY, TINY_TARGET, exported
from published import MUSE, QWEN
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_train.card import CardFacts, model_card, serving, target_record
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, from_hf_config, tensor_shapes, to_hf_config
from dflash_train.engines import ENGINES, contradictions, lines
from dflash_train.export import check_output, write_export
from dflash_train.folder import hash_weights, load_drafter_folder, public_name
from dflash_train.licences import front_matter_of
from dflash_train.types import TargetInfo

SPEC = DrafterSpec(
    block_size=8, mask_token_id=150, target_layer_ids=(0, 2), num_hidden_layers=2, hidden_size=64, vocab_size=160,
    intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=512, sliding_window=32, layer_types=(SLIDING, SLIDING), is_causal=False, conv_kernel_size=2,
    conv_group_size=16, selector_rank=8, selector_top_k=4, output_multiplier=1.0, final_logit_softcapping=None,
    input_embedding_scale=1.0, num_target_layers=5,
)  # fmt: skip
TARGET = TargetInfo(
    path="acme/tiny", revision="abc", model_type="qwen3", num_layers=5, hidden_size=64, vocab_size=160,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=[2, 3], pad_token_id=0,
    output_multiplier=1.0, final_logit_softcapping=None, input_embedding_scale=1.0,
)  # fmt: skip
CARD = CardFacts(name="acme/tiny-dflash2", base_model="acme/tiny", license="apache-2.0", provenance={"git": "deadbeef"})


CLIENT = {
    "decoder": "z-lab's dflash 0.1.0", "independent": True, "prompts": 6, "gap": False,
    "tau": {"value": 4.22, "rounds": 68, "tokens": 287}, "expected": {"value": 4.22, "rounds": 68, "tokens": 287},
}  # fmt: skip


def decoded(**changes) -> dict:
    """A report of real decoding, as far as a card reads it."""
    return {
        "temperature": 0.0, "prompts": 6, "lossless": True, "identical": 5, "near_ties": 1, "different": 0, "speedup": 1.52,
        "tau": {
            "math": {"value": 3.5, "rounds": 10, "tokens": 35, "prompts": 5, "interval": [3.01, 4.12]},
            "chat": {"value": 2.0, "rounds": 20, "tokens": 40, "prompts": 1, "interval": None},
        },
        "tau_all": {"value": 2.5, "rounds": 30, "tokens": 75, "prompts": 6, "interval": [2.1, 3.0]},
        "walk_tau": {"value": 2.6, "rounds": 30, "tokens": 78}, "tokens_per_second": 391.2, "decoded_together": 1,
        "cost": {"cycle_ms": 12.4, "draft_ms": 3.1, "draft_share": 0.25},
        "memory": {"drafter_mib": 12.5, "context_bytes_per_token": 1024},
        "repetition": {"looping": 2, "tau_without_looping": {"value": 2.2, "rounds": 20, "tokens": 44}},
        **changes,
    }  # fmt: skip


def random_state(spec: DrafterSpec = SPEC) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=g) for n, s in tensor_shapes(spec).items()}


def export(output, state=None, spec=SPEC, dtype=torch.bfloat16, tokenizer_dir=None, card=CARD, target=TARGET):
    state = random_state(spec) if state is None else state
    return write_export(
        output, state=state, spec=spec, target=target, dtype=dtype, tokenizer_dir=tokenizer_dir, card=card
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, conv_kernel_size=0, selector_rank=0, sliding_window=None, layer_types=(FULL, FULL))]
)
def test_round_trip(tmp_path, dtype, spec):
    state = random_state(spec)
    folder = export(tmp_path / "out", state, spec, dtype)
    loaded, tensors, config = load_drafter_folder(folder)
    # a DFlash v1 config does not carry the settings of the parts it lacks
    assert loaded == (spec if spec.conv_kernel_size else replace(spec, selector_top_k=16))
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert list(tensors) == list(tensor_shapes(spec))
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name].to(dtype)), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("published", [QWEN, MUSE], ids=["Qwen3.8-27B", "Muse-Glimmer-30B"])
def test_config_is_the_published_one_key_for_key(published):
    """Of the same drafter we write what z-lab wrote, and block_size a second time for exllamav3 and for engines that look at the top alone."""
    ids = {name: published[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    config = to_hf_config(from_hf_config(published), dtype="bfloat16", **ids)
    ours = {k: v for k, v in config.items() if k not in ("block_size", "use_cache")}
    assert ours == {k: v for k, v in published.items() if k not in ("transformers_version", "use_cache")}
    assert config["block_size"] == published["dflash_config"]["block_size"]


def test_config_contract(tmp_path):
    config = json.loads((export(tmp_path / "out") / "config.json").read_text())
    assert config.pop("transformers_version")
    assert config == {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 8, "bos_token_id": 1,
        "dflash_config": {
            "block_size": 8, "mask_token_id": 150, "target_layer_ids": [0, 2], "conv_kernel_size": 2, "conv_group_size": 16,
            "selector_rank": 8, "selector_top_k": 4,
        },
        "dtype": "bfloat16", "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "is_causal": False, "layer_types": [SLIDING, SLIDING], "max_position_embeddings": 512,
        "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_target_layers": 5, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "sliding_window": 32, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": True, "vocab_size": 160,
    }  # fmt: skip


# Of z-lab/Qwen3.8-27B-DFlash2: 81 tensors.
LAYER = {
    "input_layernorm.weight": (5120,), "post_attention_layernorm.weight": (5120,), "self_attn.q_proj.weight": (4096, 5120),
    "self_attn.k_proj.weight": (1024, 5120), "self_attn.v_proj.weight": (1024, 5120), "self_attn.o_proj.weight": (5120, 4096),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120), "mlp.down_proj.weight": (5120, 17408), "attention_conv.base_kernel": (2, 2, 5120),
    "attention_conv.kernel_projection.weight": (1280, 5120), "mlp_conv.base_kernel": (2, 2, 5120), "mlp_conv.kernel_projection.weight": (1280, 5120),
}  # fmt: skip
PUBLISHED_TENSORS = {
    "fc.weight": (5120, 25600), "hidden_norm.weight": (5120,), "norm.weight": (5120,),
    "candidate_selector.predecessor_codebook": (248320, 256), "candidate_selector.successor_codebook": (248320, 256),
    "candidate_selector.hidden_projection.weight": (256, 5120),
} | {f"layers.{n}.{name}": shape for n in range(5) for name, shape in LAYER.items()}  # fmt: skip


def test_tensors_are_the_published_ones():
    assert tensor_shapes(from_hf_config(QWEN)) == PUBLISHED_TENSORS and len(PUBLISHED_TENSORS) == 81


@pytest.mark.parametrize(("published", "payload"), [(QWEN, 3_848_817_896), (MUSE, 5_544_328_424)])
def test_size_is_the_published_one(published, payload):
    """The files' sizes, less the header that names the tensors."""
    ours = 2 * sum(math.prod(shape) for shape in tensor_shapes(from_hf_config(published)).values())
    assert 0 <= payload - ours < 20_000


def test_all_full_has_no_window(tmp_path):
    config = json.loads(
        (
            export(tmp_path / "o", spec=replace(SPEC, sliding_window=None, layer_types=(FULL, FULL))) / "config.json"
        ).read_text()
    )
    assert (config["sliding_window"], config["use_sliding_window"], config["layer_types"]) == (
        None,
        False,
        [FULL, FULL],
    )


def test_tensor_file_contract(tmp_path):
    path = export(tmp_path / "out") / "model.safetensors"
    with safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt"}
        names = set(f.keys())
        assert {f.get_slice(n).get_dtype() for n in names} == {"BF16"}
    assert path.stat().st_mode == (path.parent / "config.json").stat().st_mode
    assert names == set(tensor_shapes(SPEC))
    assert {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"} <= names
    assert not [
        n for n in names if "embed_tokens" in n or "lm_head" in n or n.startswith("module.") or "_orig_mod" in n
    ]


def test_wrapper_prefixes_are_stripped(tmp_path):
    state = random_state()
    wrapped = {"module._orig_mod." + n.replace("layers.1.", "layers.1._orig_mod."): t for n, t in state.items()}
    _, tensors, _ = load_drafter_folder(export(tmp_path / "out", wrapped, dtype=torch.float32))
    assert all(torch.equal(tensors[n], state[n]) for n in state)


def break_state(state, how):
    if how == "missing":
        del state["layers.1.mlp_conv.base_kernel"]
    elif how == "unexpected":
        state["lm_head.weight"] = torch.zeros(160, 64)
    elif how == "codebook":
        state["candidate_selector.successor_codebook.weight"] = state.pop("candidate_selector.successor_codebook")
    elif how == "shape":
        state["fc.weight"] = torch.zeros(64, 64)
    elif how == "nan":
        state["norm.weight"][3] = float("nan")
    else:
        state["module.fc.weight"] = state["fc.weight"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "layers.1.mlp_conv.base_kernel: missing"), ("unexpected", "lm_head.weight: unexpected"),
        ("codebook", "rename it to candidate_selector.successor_codebook"), ("shape", "fc.weight: shape"),
        ("nan", "norm.weight: has NaN"), ("twice", "fc.weight: given twice"),
    ],
)  # fmt: skip
def test_bad_tensors_are_refused_and_leave_nothing(tmp_path, how, message):
    state = random_state()
    break_state(state, how)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "out", state)
    assert list(tmp_path.iterdir()) == []


def test_wrong_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_target_layers = 5"):
        export(tmp_path / "out", target=replace(TARGET, num_layers=6))


@pytest.mark.parametrize(("ids", "says"), [((0, 4), "last layer"), ((2, 0), "ascending"), ((0, 7), "does not exist")])
def test_wrong_layers_are_refused(tmp_path, ids, says):
    with pytest.raises(ValueError, match=says):
        export(tmp_path / "out", spec=replace(SPEC, target_layer_ids=ids))


def test_replaces_only_an_earlier_export(tmp_path):
    out = tmp_path / "out"
    export(out)
    state = random_state()
    state["norm.weight"] += 1
    export(out, state, dtype=torch.float32)
    assert torch.equal(load_drafter_folder(out)[1]["norm.weight"], state["norm.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    (out / "drafter.gguf").write_text("mine")
    with pytest.raises(ValueError, match="drafter.gguf"):
        export(out)
    assert (out / "drafter.gguf").read_text() == "mine"

    other = tmp_path / "other"
    other.mkdir()
    export(other)  # an empty folder is fine
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="not an earlier export"):
        check_output(tmp_path / "notes")
    with pytest.raises(ValueError, match="is a file"):
        export(tmp_path / "notes" / "a.txt")


def test_failed_replacement_keeps_the_old_export(tmp_path, monkeypatch):
    out = export(tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("dflash_train.export.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tokenizer_files_go_along(tmp_path):
    source = tmp_path / "target"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "merges.txt",
        "config.json",
        "model.safetensors",
        "evil.py",
    ):
        (source / name).write_text("{}")
    out = export(tmp_path / "out", tokenizer_dir=source)
    names = {p.name for p in out.iterdir()}
    assert names == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "config.json", "model.safetensors",
        "README.md", "dflash_train.json",
    }  # fmt: skip
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"


def test_record(tmp_path):
    card = replace(CARD, decoded=decoded(walk_tau={"value": 3.6, "rounds": 30, "tokens": 108}))
    local = tmp_path / "home" / "my-target"
    local.mkdir(parents=True)
    out = export(tmp_path / "out", card=card, target=replace(TARGET, path=str(local)))
    record = json.loads((out / "dflash_train.json").read_text())
    assert record["spec"]["target_layer_ids"] == [0, 2]
    assert record["target"] == {
        "name": "my-target", "revision": "abc", "model_type": "qwen3", "num_layers": 5, "hidden_size": 64, "vocab_size": 160,
        "tie_word_embeddings": True,
    }  # fmt: skip
    assert record["tau"]["math"]["rounds"] == 10 and record["walk_tau"] == 3.6
    assert record["weights"] == hash_weights(random_state())
    assert record["provenance"] == {"git": "deadbeef"}
    assert record["card"]["license"] == "apache-2.0" and record["card"]["decoded"]["tau"]["math"]["rounds"] == 10
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "dflash_train.json").read_text()


def test_card():
    text = model_card(SPEC, replace(CARD, decoded=decoded(), client=CLIENT))
    assert text.startswith("---\nbase_model: acme/tiny\nlicense: apache-2.0\n")
    for line in (
        "--speculative-num-draft-tokens 8", '"num_speculative_tokens": 7', "max_draft_len=7", "max_draft_len: 7",
        "--spec-draft-n-max 7", "--spec-type draft-dflash", "--target-model-dir", "draft_num_predict 7", "--block-size 5",
        "0.5.19", "0.28.0", "1.3.0rc28", "| math | 3.50 | 10 | 35 | 5 | 3.01 to 4.12 |", "| chat | 2.00 | 20 | 40 | 1 | - |",
        "| pooled | 2.50 | 30 | 75 | 6 | 2.10 to 3.00 |", "greedy, on 6 held-out prompts", "walk over the same text: 2.60",
        "- Lossless: 5 of 6 outputs token-identical to plain greedy decoding, 1 parted at near ties of the target, 0 different.",
        "- Speed: 1.52 times plain decoding, 391 tokens/s, one prompt at a time.", "- Cost: 3.1 of 12.4 ms per pass go into drafting (25%).",
        "- Memory: 12.5 MiB of weights in 16 bits, and 1024 bytes of cache per token of context.",
        "- 2 outputs mostly repeat themselves; tau without them 2.20 (44/20).",
        "- Train-to-serve check passed: z-lab's dflash 0.1.0 decoded 6 held-out prompts from this folder, tau 4.22 (287/68), 4.22 expected",
        "would load a plain Qwen3 and drop the draft tensors", "shared from the target", "(0-based, outputs)",
    ):  # fmt: skip
        assert line in text, line
    assert "Not measured yet." in model_card(SPEC, CARD)
    assert "--spec-draft-n-max 15" in model_card(replace(SPEC, block_size=16), CARD)
    sampled = decoded(temperature=0.7, lossless=None, speedup=None, cost={})
    del sampled["walk_tau"]
    text = model_card(SPEC, replace(CARD, decoded=sampled, client=CLIENT | {"independent": False, "gap": True}))
    assert "temperature 0.7" in text and not any(w in text for w in ("ossless", "walk", "Speed", "Cost"))
    assert "check FAILED" in text and "not an independent check" in text
    v1 = model_card(replace(SPEC, conv_kernel_size=0, selector_rank=0), CARD)
    assert "A DFlash drafter" in v1 and "DFlash2DraftModel" not in v1


@pytest.mark.parametrize(
    "change", [{"memory": None}, {"walk_tau": {}}, {"tau": [1]}, {"repetition": "none"}, {"speedup": "fast"}]
)
def test_measurements_that_no_card_can_state_are_an_error(change):
    with pytest.raises(ValueError, match="what was measured of .* measure again, or delete it"):
        replace(CARD, decoded=decoded(**change) | ({"lossless": None} if "tau" in change else {}))
    with pytest.raises(ValueError, match="what was measured of"):
        replace(CARD, client={k: v for k, v in CLIENT.items() if k != "expected"})


def test_card_states_target_and_trained_length():
    text = model_card(SPEC, replace(CARD, target=target_record(TARGET), provenance={"row_length": 3072}))
    assert "`acme/tiny` at abc: 5 layers, hidden size 64, vocabulary 160, tied embeddings" in text
    assert "rows of up to 3072 tokens" in text and "- row_length: 3072" in text


def test_card_has_settings_for_this_drafter_and_target():
    text = model_card(SPEC, CARD)
    assert (
        "--speculative-draft-attention-backend fa4" in text
        and "never attention_backend" in text
        and "linear-attn" not in text
    )
    for floor in (
        "SGLang 0.5.19",
        "vLLM 0.28.0 with the V2 model runner",
        "after 2026-08-27",
        "TensorRT-LLM 1.3.0rc28",
        "pull request 17865",
        "oMLX 0.6.3rc1",
    ):
        assert floor in text, floor
    full = model_card(replace(SPEC, sliding_window=None, layer_types=(FULL, FULL)), CARD)
    assert "--speculative-draft-attention-backend" not in full and "never attention_backend" not in full
    hybrid = replace(CARD, target=target_record(replace(TARGET, model_type="qwen3_5_text")))
    assert "--mamba-scheduler-strategy" in model_card(SPEC, hybrid)
    assert "### Splash" not in text and "### Splash" in model_card(from_hf_config(QWEN), CARD)


def test_every_launch_line_of_the_card_agrees_with_the_drafter():
    """What `check --launch` says of the card's own lines."""
    for k in (4, 8, 16):
        spec = replace(SPEC, block_size=k)
        s = serving(spec, target="acme/tiny", draft="acme/drafter", family="qwen3")
        for engine in ENGINES:
            for _, text in lines(engine, s):
                assert "$" not in text
                found = [
                    f
                    for f, _ in contradictions(text, s)
                    if f.fatal and f.engine.split(",")[0] in (engine.name, "dflash client")
                ]
                assert found == [], (engine.name, text)


@pytest.mark.parametrize("licence", ["other", "unknown", "apache-2.0", "cc-by-nc-4.0"])
def test_card_front_matter_is_yaml(licence):
    front = front_matter_of(model_card(SPEC, replace(CARD, license=licence, base_model="1on/no")))
    assert (front["license"], front["base_model"], front["library_name"]) == (licence, "1on/no", "dflash")
    assert ("license_name" in front) == (licence == "other")


def test_public_name(tmp_path):
    assert public_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert public_name(str(tmp_path / "x" / "tiny")) == "tiny"


def test_load_sharded(tmp_path):
    out = export(tmp_path / "out", dtype=torch.float32)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, out / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(load_drafter_folder(out)[1]) == set(names)
    (out / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="b.safetensors"):
        load_drafter_folder(out)


@pytest.mark.parametrize("how", ["missing", "unexpected", "codebook", "shape"])
def test_load_is_strict(tmp_path, how):
    out = export(tmp_path / "out", dtype=torch.float32)
    state = load_file(out / "model.safetensors")
    break_state(state, how)
    save_file(state, out / "model.safetensors")
    with pytest.raises(ValueError, match="missing|unexpected|shape"):
        load_drafter_folder(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": False}, "use_sliding_window"), ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"), ({"block_size": 16}, "two places"), ({"layer_types": [SLIDING]}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "rope"), ({"output_multiplier": 0.5}, "at the top"),
        ({"selector_top_k": 16}, "two places"), ({"rms_norm_eps": 0.0}, "above 0"), ({"use_sliding_window": "no"}, "true or false"),
    ],
)  # fmt: skip
def test_load_refuses_what_a_spec_cannot_say(tmp_path, change, message):
    out = export(tmp_path / "out")
    config = json.loads((out / "config.json").read_text()) | change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter_folder(out)


def test_load_old_full_attention_config(tmp_path):
    """DFlash v1 files write neither is_causal nor a nested block_size."""
    out = export(
        tmp_path / "out",
        spec=replace(SPEC, conv_kernel_size=0, selector_rank=0, sliding_window=None, layer_types=(FULL, FULL)),
    )
    config = json.loads((out / "config.json").read_text())
    del config["is_causal"], config["dflash_config"]["block_size"]
    (out / "config.json").write_text(json.dumps(config))
    spec = load_drafter_folder(out)[0]
    assert (spec.is_causal, spec.block_size) == (False, 8)


def test_load_without_files(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_drafter_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_drafter_folder(tmp_path)


@pytest.mark.parametrize("name", ["it's mine", 'a"b', "x\n---\nlicense: other", "a b", "$(rm x)", "-x", "a`b|c", "a;b"])
def test_names_that_a_shell_reads_otherwise_do_not_reach_launch_lines(name):
    for facts in ({"name": name, "base_model": "acme/tiny"}, {"name": "acme/d", "base_model": name}):
        text = model_card(TINY, CardFacts(license="mit", target=target_record(TINY_TARGET), **facts))
        assert front_matter_of(text)["license"] == "mit"
        assert front_matter_of(text)["base_model"] == " ".join(facts["base_model"].split())
        blocks = re.findall(r"```(\w*)\n(.*?)\n```", text, re.DOTALL)
        assert len(blocks) > 8 and not [b for _, b in blocks if name in b]
        for language, block in blocks:
            if language == "bash":
                words = shlex.split(block, comments=True)
                if "--speculative-config" in words:
                    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 7
            elif language == "python":
                compile(block, "card", "exec")
            elif language == "yaml":
                assert yaml.safe_load(block)["speculative_config"]["max_draft_len"] == 7


def test_an_export_that_stepped_aside_for_one_that_was_killed_comes_back(tmp_path, monkeypatch):
    output = exported(tmp_path / "out")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    output.rename(tmp_path / f".out.replaced-{int(gone.stdout)}")
    (tmp_path / f".out.writing-{int(gone.stdout)}").mkdir()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("dflash_train.export.save_file", full)
        exported(output)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and load_drafter_folder(output)[0] == TINY
    exported(output)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
