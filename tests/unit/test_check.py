"""The checker: published drafters pass, and each planted fault is found."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_train.check import MISREAD, NOTE, REFUSE, RULES, Facts, check, check_facts, main
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, from_hf_config, tensor_shapes, to_hf_config
from dflash_train.export import CardFacts, write_export
from dflash_train.folder import Header
from dflash_train.types import TargetInfo

COMMON = {
    "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "is_causal": False, "layer_types": [SLIDING] * 5,
    "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "sliding_window": 2048, "tie_word_embeddings": False, "use_sliding_window": True,
}  # fmt: skip
QWEN = COMMON | {
    "bos_token_id": None, "eos_token_id": 248044, "pad_token_id": 248044, "hidden_size": 5120, "intermediate_size": 17408,
    "max_position_embeddings": 262144, "num_target_layers": 64, "rms_norm_eps": 1e-6, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "transformers_version": "5.15.0",
    "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
    },
}  # fmt: skip
MUSE = COMMON | {
    "bos_token_id": 200000, "eos_token_id": 200001, "pad_token_id": 200018, "hidden_size": 6656, "intermediate_size": 19968,
    "max_position_embeddings": 131072, "num_target_layers": 52, "rms_norm_eps": 1e-5, "use_cache": False, "vocab_size": 202048,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
        "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
}  # fmt: skip
V1 = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
    "attention_bias": False, "block_size": 16, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
    "layer_types": [FULL] * 5, "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip
QWEN_TARGET = TargetInfo(
    path="Qwen/Qwen3.8-27B", revision=None, model_type="qwen3_5", num_layers=64, hidden_size=5120, vocab_size=248320,
    num_attention_heads=24, num_key_value_heads=4, head_dim=256, intermediate_size=17408, rms_norm_eps=1e-6, rope_theta=1e7,
    max_position_embeddings=262144, tie_word_embeddings=False, bos_token_id=None, eos_token_ids=[248044, 248046],
    pad_token_id=248044, output_multiplier=1.0, final_logit_softcapping=None, input_embedding_scale=1.0,
)  # fmt: skip


def headers_of(config, dtype="BF16"):
    spec = from_hf_config({"is_causal": False, **config})
    return {n: Header(dtype, s, "model.safetensors") for n, s in tensor_shapes(spec).items()}


@pytest.mark.parametrize(("config", "target", "count"), [(QWEN, QWEN_TARGET, 81), (MUSE, None, 81), (V1, None, 58)])
def test_published_drafters_pass(config, target, count):
    headers = headers_of(config)
    report = check_facts(Facts(config=config, headers=headers, target=target))
    assert len(headers) == count
    assert report.faults == []
    assert report.text().endswith("No faults.")


def test_own_config_passes():
    config = to_hf_config(from_hf_config(QWEN), dtype="bfloat16", bos=None, eos=248044, pad=248044)
    assert check_facts(Facts(config=config, headers=headers_of(config), target=QWEN_TARGET)).faults == []


def views(config):
    return {
        k.split()[0]: "\n".join(v)
        for k, v in check_facts(Facts(config=config, headers=headers_of(config))).views.items()
    }


def test_views_differ_where_the_engines_do():
    config = copy.deepcopy(QWEN)
    del config["is_causal"]
    config["block_size"] = 16
    config["partial_rotary_factor"] = 0.25
    v = views(config)
    assert "window 2048, causal in the block" in v["SGLang"]
    assert "window 2048, bidirectional in the block" in v["llama.cpp"]
    assert (
        v["exllamav3"].startswith("block 16")
        and v["SGLang"].startswith("block 8")
        and v["vLLM"].startswith("block not read")
    )
    assert "over 0.25 of the head" in v["vLLM"] and "of the head" not in v["reference"]
    assert "num_speculative_tokens 7" in v["vLLM"] and "--speculative-num-draft-tokens 8" in v["SGLang"]

    config = copy.deepcopy(QWEN) | {"use_sliding_window": False}
    v = views(config)
    assert "refused" in v["vLLM"] and "full attention" in v["llama.cpp"] and "window 2048" in v["MLX"]


def put(key, value):
    def change(c, h):
        c[key] = value

    return change


def nest(key, value):
    def change(c, h):
        c["dflash_config"][key] = value

    return change


def drop(key):
    def change(c, h):
        (c["dflash_config"] if key in c["dflash_config"] else c).pop(key)

    return change


def lift(key):
    def change(c, h):
        c[key] = c["dflash_config"].pop(key)

    return change


def rename(pattern, new):
    def change(c, h):
        for n in [n for n in h if pattern in n]:
            h[new(n)] = h.pop(n)

    return change


def extra(name, shape=(4, 4)):
    def change(c, h):
        h[name] = Header("BF16", shape, "model.safetensors")

    return change


def lose(pattern):
    def change(c, h):
        for n in [n for n in h if pattern in n]:
            del h[n]

    return change


def full_with_window(c, h):
    c["layer_types"] = [FULL] * 5


def one_float(c, h):
    h["norm.weight"] = Header("F32", (5120,), "model.safetensors")


def wrong_shape(c, h):
    h["fc.weight"] = Header("BF16", (5120, 5120), "model.safetensors")


FAULTS = [
    ("architecture", put("architectures", ["Qwen3DFlash2DraftModel"])), ("architecture", put("architectures", ["DFlashDraftModel"])),
    ("model_type", put("model_type", "llama")), ("dflash_config", put("dflash_config", {})), ("v2 keys", drop("selector_rank")),
    ("v2 keys nested", lift("conv_kernel_size")), ("v2 keys empty", nest("conv_group_size", 0)),
    ("sizes", drop("intermediate_size")), ("tensors not compared", drop("intermediate_size")), ("head_dim", drop("head_dim")),
    ("heads", put("num_key_value_heads", 7)), ("num_target_layers", drop("num_target_layers")),
    ("target pairing", put("num_target_layers", 65)), ("target pairing", put("vocab_size", 248321)),
    ("attention_bias", put("attention_bias", True)), ("hidden_act", put("hidden_act", "gelu")), ("block_size", drop("block_size")),
    ("block_size twice", put("block_size", 16)), ("block_size range", nest("block_size", 1)),
    ("mask_token_id", drop("mask_token_id")), ("mask range", nest("mask_token_id", 248320)),
    ("mask special", nest("mask_token_id", 248044)), ("mask special", nest("mask_token_id", 248046)),
    ("target_layer_ids", drop("target_layer_ids")), ("ids order", nest("target_layer_ids", [19, 5, 33, 47, 61])),
    ("ids duplicate", nest("target_layer_ids", [5, 5, 33, 47, 61])), ("ids range", nest("target_layer_ids", [5, 19, 33, 47, 64])),
    ("ids last layer", nest("target_layer_ids", [5, 19, 33, 47, 63])), ("is_causal missing", drop("is_causal")),
    ("is_causal missing", lambda c, h: c["dflash_config"].update(is_causal=c.pop("is_causal"))),
    ("is_causal type", put("is_causal", "false")), ("is_causal twice", nest("causal", True)),
    ("layer_types missing", drop("layer_types")), ("layer_types length", put("layer_types", [SLIDING] * 4)),
    ("layer_types values", put("layer_types", [SLIDING] * 4 + ["chunked_attention"])),
    ("window off", put("use_sliding_window", False)), ("window off, llama.cpp", put("sliding_window", None)),
    ("window unused", full_with_window), ("window below block", put("sliding_window", 7)),
    ("rope theta", put("rope_parameters", {"rope_type": "default"})), ("rope twice", put("rope_theta", 1e4)),
    ("rope partial", put("partial_rotary_factor", 0.25)),
    ("rope partial", lambda c, h: c["rope_parameters"].update(partial_rotary_factor=0.25)),
    ("rope sections", lambda c, h: c["rope_parameters"].update(mrope_section=[11, 11, 10])),
    ("rope type", lambda c, h: c["rope_parameters"].update(rope_type="yarn")), ("conv groups", nest("conv_group_size", 48)),
    ("conv kernel", nest("conv_kernel_size", 9)), ("top_k power", nest("selector_top_k", 12)), ("top_k hidden", nest("selector_top_k", 128)),
    ("scalars nested", put("output_multiplier", 0.5)), ("embedding scale", nest("input_embedding_scale", 2.0)),
    ("tap_shift", nest("tap_shift", 1)), ("config dtype", put("dtype", "float32")), ("config dtype", one_float),
    ("config dtype", drop("dtype")), ("codebook name", rename("codebook", lambda n: n + ".weight")),
    ("codebook name, strict", rename("codebook", lambda n: n + ".weight")), ("codebook missing", lose("successor_codebook")),
    ("conv missing", lose("layers.2.mlp_conv.base_kernel")), ("tensors missing", lose("layers.4.self_attn.q_norm")),
    ("model prefix", rename("", lambda n: "model." + n)), ("wrapper prefix", rename("", lambda n: "module." + n)),
    ("wrapper prefix", rename("layers.0.", lambda n: n.replace("layers.0.", "layers.0._orig_mod."))),
    ("own head", extra("lm_head.weight")), ("strict extras", extra("rotary_emb.inv_freq")), ("strict extras", extra("embed_tokens.weight")),
    ("unexpected", extra("layers.0.self_attn.q_proj.bias")), ("unexpected", extra("layers.5.input_layernorm.weight")), ("shapes", wrong_shape),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change"), FAULTS, ids=[f"{i}-{r}" for i, (r, _) in enumerate(FAULTS)])
def test_planted_faults(rule, change):
    config, headers = copy.deepcopy(QWEN), headers_of(QWEN)
    change(config, headers)
    report = check_facts(Facts(config=config, headers=headers, target=QWEN_TARGET))
    found = {f.rule for f in report.faults}
    assert rule in found, found
    assert "{}" not in report.text()


def test_rules_are_well_formed():
    assert {r.severity for r in RULES} == {REFUSE, MISREAD, NOTE}
    assert len({r.name for r in RULES}) == len(RULES)
    assert all(r.engines and r.message and r.source for r in RULES)


TINY = DrafterSpec(
    block_size=8, mask_token_id=150, target_layer_ids=(0, 2), num_hidden_layers=2, hidden_size=64, vocab_size=160,
    intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=512, sliding_window=32, layer_types=(SLIDING, SLIDING), is_causal=False, conv_kernel_size=2,
    conv_group_size=16, selector_rank=8, selector_top_k=4, output_multiplier=1.0, final_logit_softcapping=None,
    input_embedding_scale=1.0, num_target_layers=5,
)  # fmt: skip
TINY_TARGET = TargetInfo(
    path="acme/tiny", revision=None, model_type="qwen3", num_layers=5, hidden_size=64, vocab_size=160, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=96, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512,
    tie_word_embeddings=True, bos_token_id=1, eos_token_ids=[2], pad_token_id=0, output_multiplier=1.0,
    final_logit_softcapping=None, input_embedding_scale=1.0,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    g = torch.Generator().manual_seed(0)
    state = {n: torch.randn(s, generator=g) for n, s in tensor_shapes(TINY).items()}
    card = CardFacts(name="acme/tiny-dflash2", base_model="acme/tiny", license="mit")
    return write_export(
        tmp_path / "out",
        state=state,
        spec=TINY,
        target=TINY_TARGET,
        dtype=torch.bfloat16,
        tokenizer_dir=None,
        card=card,
    )


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})


def rules(report):
    return {f.rule for f in report.faults}


def test_own_export_passes(folder, capsys):
    assert check(folder, TINY_TARGET).faults == []
    assert main([str(folder)]) == 0
    assert "No faults." in capsys.readouterr().out


def test_fresh_drafter_is_only_noted(folder):
    base = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
    base[:, 0] = 1
    edit_tensors(folder, **{
        "layers.0.mlp_conv.base_kernel": base,
        "layers.0.mlp_conv.kernel_projection.weight": torch.zeros(16, 64, dtype=torch.bfloat16),
        "candidate_selector.successor_codebook": torch.zeros(160, 8, dtype=torch.bfloat16),
    })  # fmt: skip
    report = check(folder)
    assert report.faults == []
    note = next(f for f in report.findings if f.rule == "fresh parts")
    assert "base_kernel" in note.message and "successor_codebook" in note.message


@pytest.mark.parametrize(
    ("value", "rule"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_tensor_values(folder, value, rule):
    edit_tensors(folder, **{"layers.1.mlp.down_proj.weight": torch.full((64, 96), value, dtype=torch.bfloat16)})
    assert rules(check(folder)) == {rule}


def test_training_record(folder):
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, dflash_config=config["dflash_config"] | {"target_layer_ids": [1, 3]})
    report = check(folder)
    assert rules(report) == {"training record"}
    assert "[0, 2]" in report.text() and "[1, 3]" in report.text()


def test_tokenizer_rules(folder):
    data = {
        "model": {"vocab": {"a": 5}},
        "added_tokens": [{"content": "<|MASK|>", "id": 151}, {"content": "<eos>", "id": 150}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert rules(check(folder)) == {"mask string", "mask special"}


def test_malformed_values(folder, capsys):
    edit_config(folder, sliding_window="2048", layer_types="sliding_attention", dflash_config={"block_size": "8"})
    report = check(folder)
    assert rules(report) == {"types"}
    assert all(k in report.text() for k in ("sliding_window", "layer_types", "dflash_config.block_size"))
    assert main([str(folder)]) == 1


def test_broken_files(folder, tmp_path, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "weights" in rules(check(folder))
    path.unlink()
    assert "weights" in rules(check(folder))
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "config.json" in capsys.readouterr().err
