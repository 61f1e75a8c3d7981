"""Every fault that is planted in an exported folder is found by name, by the real command; the folder as exported is clean."""

from __future__ import annotations

import shutil

import pytest
import torch
from planted import TINY_TARGET, drop, exported, lift, lose, nest, plant, put, rename, tensor

import dflash_train.target.info
from dflash_train.check import NOTE, RULES, main
from dflash_train.drafter.spec import FULL, SLIDING

FC, PREDECESSOR = "fc.weight", "candidate_selector.predecessor_codebook"
SUCCESSOR = "candidate_selector.successor_codebook"
INDEX = "model.safetensors.index.json"


def rope(**values):
    return lambda c, t: c["rope_parameters"].update(values)


def ones(*shape):
    return lambda t: torch.ones(shape, dtype=torch.bfloat16)


def both(*changes):
    def change(c, t):
        for one in changes:
            one(c, t)

    return change


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


CAUSAL_NESTED = both(drop("is_causal"), nest("is_causal", False))
NO_BASE = both(lambda c, t: c["rope_parameters"].pop("rope_theta"))
FAULTS = [
    # the folder's record and its target
    ("training record", nest("target_layer_ids", [1, 3])), ("training record", nest("mask_token_id", 151)), ("training record", nest("block_size", 4)),
    ("training record", rope(rope_theta=5e5)), ("training record", put("sliding_window", 16)), ("training record", put("is_causal", True)),
    ("target pairing", put("num_target_layers", 6)), ("target pairing", put("vocab_size", 161)), ("target pairing", put("hidden_size", 80)),
    # what it is
    ("architecture", put("architectures", ["Qwen3DFlash2DraftModel"])), ("architecture", put("architectures", ["DFlashDraftModel"])),
    ("architecture", put("architectures", ["Qwen3ForCausalLM"])), ("model_type", put("model_type", "llama")),
    ("dflash_config", put("dflash_config", {})), ("v2 keys", drop("selector_rank")), ("v2 keys nested", lift("conv_kernel_size")),
    ("v2 keys empty", nest("conv_group_size", 0)), ("sizes", drop("intermediate_size")), ("tensors not compared", drop("intermediate_size")),
    ("head_dim", drop("head_dim")), ("heads", put("num_key_value_heads", 3)), ("num_target_layers", drop("num_target_layers")),
    ("attention_bias", put("attention_bias", True)), ("hidden_act", put("hidden_act", "gelu")), ("types", put("sliding_window", "32")),
    # block, mask, layers
    ("block_size", drop("block_size")), ("block_size twice", put("block_size", 16)), ("block_size range", both(nest("block_size", 1), put("block_size", 1))),
    ("mask_token_id", drop("mask_token_id")), ("mask range", nest("mask_token_id", 160)), ("mask special", nest("mask_token_id", 2)),
    ("mask special", nest("mask_token_id", 0)), ("target_layer_ids", drop("target_layer_ids")), ("ids order", nest("target_layer_ids", [2, 0])),
    ("ids duplicate", nest("target_layer_ids", [2, 2])), ("ids range", nest("target_layer_ids", [0, 5])), ("ids last layer", nest("target_layer_ids", [0, 4])),
    # attention
    ("is_causal missing", drop("is_causal")), ("is_causal missing", CAUSAL_NESTED), ("is_causal type", put("is_causal", "false")),
    ("is_causal twice", nest("causal", True)), ("layer_types missing", drop("layer_types")), ("layer_types length", put("layer_types", [SLIDING])),
    ("layer_types values", put("layer_types", [SLIDING, "chunked_attention"])), ("window off", put("use_sliding_window", False)),
    ("window off", put("sliding_window", None)), ("window off, llama.cpp", drop("sliding_window")), ("window unused", put("layer_types", [FULL, FULL])),
    ("window below block", put("sliding_window", 7)), ("foreign parts", put("attention_sink_bias", True)), ("foreign parts", nest("use_swa", True)),
    ("foreign parts", put("rope_interleaved", True)), ("tap_shift", nest("tap_shift", 1)),
    # rope and scalars
    ("rope theta", NO_BASE), ("rope twice", put("rope_theta", 500.0)), ("rope partial", put("partial_rotary_factor", 0.25)),
    ("rope partial", rope(partial_rotary_factor=0.25)), ("rope sections", rope(mrope_section=[11, 11, 10])), ("rope type", rope(rope_type="yarn")),
    ("scalars nested", put("output_multiplier", 0.5)), ("embedding scale", nest("input_embedding_scale", 2.0)),
    ("quantised", put("quantization_config", {"quant_method": "compressed-tensors"})),
    # convolution and selector
    ("conv groups", nest("conv_group_size", 48)), ("conv kernel", nest("conv_kernel_size", 9)), ("top_k power", nest("selector_top_k", 6)),
    ("top_k hidden", nest("selector_top_k", 8)), ("top_k vocabulary", nest("selector_top_k", 256)), ("reduced vocabulary", put("draft_vocab_size", 32)),
    ("reduced vocabulary", tensor("d2t", lambda t: torch.arange(32))),
    # tensors
    ("config dtype", put("dtype", "float32")), ("config dtype", drop("dtype")), ("config dtype", tensor("norm.weight", lambda t: t["norm.weight"].float())),
    ("codebook name", rename("_codebook", lambda n: n + ".weight")), ("codebook name, strict", rename("_codebook", lambda n: n + ".weight")),
    ("codebook missing", lose("successor_codebook")), ("conv missing", lose("layers.1.mlp_conv.base_kernel")), ("tensors missing", lose("layers.1.self_attn.q_norm")),
    ("model prefix", rename("", lambda n: "model." + n)), ("wrapper prefix", rename("", lambda n: "module." + n)),
    ("wrapper prefix", rename("layers.0.", lambda n: n.replace("layers.0.", "layers.0._orig_mod."))),
    ("own head", tensor("lm_head.weight", ones(160, 64))), ("strict extras", tensor("embed_tokens.weight", ones(160, 64))),
    ("strict extras", tensor("rotary_emb.inv_freq", ones(8))), ("unexpected", tensor("layers.0.self_attn.q_proj.bias", ones(64))),
    ("unexpected", tensor("layers.2.input_layernorm.weight", ones(64))), ("shapes", tensor(FC, ones(64, 64))),
    ("shapes", tensor(PREDECESSOR, lambda t: t[PREDECESSOR][:32])), ("not finite", tensor(FC, lambda t: t[FC] * float("nan"))),
    ("values", nest("output_multiplier", 0)), ("values", nest("final_logit_softcapping", -30.0)), ("values", put("rms_norm_eps", 0)),
    ("values", rope(rope_theta=-1.0)), ("values", put("head_dim", 15)), ("values", nest("input_embedding_scale", 0)),
    ("types", put("use_sliding_window", "false")), ("types", rope(rope_theta="10000")), ("types", put("rms_norm_eps", "1e-6")),
    ("types", nest("output_multiplier", "0.5")), ("types", put("max_position_embeddings", "512")), ("types", put("partial_rotary_factor", "0.25")),
    ("types", put("target_layer_ids", 3)), ("types", nest("final_logit_softcapping", True)), ("types", put("rope_scaling", "yarn")),
    ("key twice", put("conv_group_size", 8)), ("key twice", put("mask_token_id", 3)), ("key twice", put("target_layer_ids", [1, 3])),
    ("key twice", both(put("output_multiplier", 0.5), nest("output_multiplier", 1.0))),
    ("rope_scaling", put("rope_scaling", {"rope_type": "yarn", "factor": 4.0})), ("config dtype", put("torch_dtype", "float32")),
    ("quantised", put("compression_config", {"quant_method": "x"})), ("reduced vocabulary", put("draft_vocab_size", 159)),
    ("training record, weights", both(tensor("swap", lambda t: t[PREDECESSOR].clone()), rename(PREDECESSOR, lambda n: "spare"),
                                      rename(SUCCESSOR, lambda n: PREDECESSOR), rename("swap", lambda n: SUCCESSOR), lose("spare"))),
    ("training record, weights", tensor(FC, lambda t: t[FC].flip(1))),
    ("not finite", tensor(FC, lambda t: t[FC] / 0)), ("all zero", tensor(FC, lambda t: t[FC] * 0)),
]  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("clean") / "out")


@pytest.fixture
def command(monkeypatch, capsys):
    """The command with the tiny target: (exit code, what it printed)."""
    monkeypatch.setattr(dflash_train.target.info, "read_target_info", lambda path, revision=None: TINY_TARGET)

    def run(*argv):
        code = main([str(a) for a in argv])
        return code, capsys.readouterr().out

    return run


def named(text: str) -> set[str]:
    """The rules that a report names as faults."""
    rules, title = set(), ""
    for line in text.splitlines():
        title = line if line and not line.startswith(" ") else title
        if title in ("Refused", "Silently misread") and line.startswith("  "):
            rules.add(line.strip().split(" - ")[0])
    return rules


def test_the_folder_as_exported_is_clean(clean, command):
    for more in ([], ["--target", "acme/tiny"]):
        code, text = command(clean, *more)
        assert code == 0 and named(text) == set() and text.splitlines()[-1] == "No faults."


@pytest.mark.parametrize(("rule", "change"), FAULTS, ids=[f"{i}-{r}" for i, (r, _) in enumerate(FAULTS)])
def test_a_planted_fault_is_found(clean, tmp_path, command, rule, change):
    folder = shutil.copytree(clean, tmp_path / "out")
    plant(folder, change)
    code, text = command(folder, "--target", "acme/tiny")
    assert code == 1 and rule in named(text), text
    assert "{}" not in text and text.splitlines()[-1].endswith(("fault.", "faults."))


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("weights", lambda d: (d / "model.safetensors").unlink()),
        ("weights", lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:900])),
        ("mask embedding", lambda d: torch.save({}, d / "mask_embedding.pt")),
        ("mask string", lambda d: (d / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|MASK|>", "id": 7}]}')),
        ("tokenizer", lambda d: (d / "tokenizer.json").write_text('{"added_tokens": [{"content": "x", "id": 160}]}')),
        ("quantised", lambda d: (d / "hf_quant_config.json").write_text("{}")),
        ("other weights", lambda d: shutil.copy(d / "model.safetensors", d / "older.safetensors")),
        ("other weights", lambda d: (d / INDEX).write_text('{"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}')),
        ("launch: num_speculative_tokens", None),
    ],
)  # fmt: skip
def test_a_spoilt_file_is_found(clean, tmp_path, command, rule, spoil):
    folder = shutil.copytree(clean, tmp_path / "out")
    line = tmp_path / "serve.sh"
    line.write_text("vllm serve T --speculative-config '{\"num_speculative_tokens\": 8}'\n")
    if spoil:
        spoil(folder)
    code, text = command(folder, *([] if spoil else ["--launch", line]))
    assert code == 1 and rule in named(text), text


@pytest.mark.parametrize("change", [put("draft_vocab_size", 160), put("partial_rotary_factor", None), put("output_multiplier", None),
                                    put("rope_scaling", None), put("torch_dtype", "bfloat16"), put("block_size", 8)])  # fmt: skip
def test_what_says_the_same_is_no_fault(clean, tmp_path, command, change):
    folder = shutil.copytree(clean, tmp_path / "out")
    plant(folder, change)
    code, text = command(folder, "--target", "acme/tiny")
    assert code == 0, text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", '{"added_tokens": [{"content": "x"}]}'),
        ("tokenizer.json", '{"model": {"vocab": [1, 2]}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "x"}}}'),
        ("tokenizer_config.json", '{"eos_token": [1]}'),
        ("tokenizer_config.json", '{"eos_token": {"content": {}}}'),
        ("dflash_train.json", '{"target": [1]}'),
    ],
)
def test_files_that_cannot_be_read_are_named(clean, tmp_path, capsys, file, text):
    folder = shutil.copytree(clean, tmp_path / "out")
    (folder / file).write_text(text)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert ("tokenizer files" if "tokenizer" in file else file) in error


def test_another_target_of_the_same_shape_is_named(clean, tmp_path, command):
    folder = shutil.copytree(clean, tmp_path / "out")
    assert "trained on" not in command(folder, "--target", "acme/tiny")[1]
    edit(folder / "dflash_train.json", '"name": "acme/tiny"', '"name": "acme/other"')
    code, text = command(folder, "--target", "acme/tiny")
    assert code == 0 and "trained on acme/other, not acme/tiny" in text
    edit(folder / "dflash_train.json", '"model_type": "qwen3"', '"model_type": "llama"')
    code, text = command(folder, "--target", "acme/tiny")
    assert code == 1 and named(text) == {"target pairing"} and "trained with model_type llama, target qwen3" in text


def test_every_rule_has_its_planted_fault():
    planted = {rule for rule, _ in FAULTS} | {
        "weights",
        "mask embedding",
        "mask string",
        "types",
        "other weights",
        "tokenizer",
    }
    assert {r.name for r in RULES if r.severity != NOTE} <= planted
