"""Drafter configurations that are public, as far as they are known, and what `check` has to say about each."""

from __future__ import annotations

from dflash_train.drafter.spec import FULL, SLIDING, from_hf_config, tensor_shapes
from dflash_train.folder import Header, normalised
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
    spec = from_hf_config({"is_causal": False, **normalised(config)})
    return {n: Header(dtype, s, "model.safetensors") for n, s in tensor_shapes(spec).items()}


# Qwen3.6-35B-A3B, as far as Splash's table of drafters states it; the rest is the family's.
QWEN_MOE = QWEN | {
    "num_hidden_layers": 6, "layer_types": [SLIDING] * 6, "max_window_layers": 6, "hidden_size": 2048, "intermediate_size": 6144,
    "num_target_layers": 40, "dflash_config": QWEN["dflash_config"] | {
        "mask_token_id": 248077, "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
    },
}  # fmt: skip
# GLM-5.3: block, ids and attention_mode are known from a third party's check; sizes are stand-ins.
GLM = QWEN | {
    "num_target_layers": 92, "dflash_config": QWEN["dflash_config"] | {"target_layer_ids": [5, 19, 33, 47, 61, 75], "attention_mode": "gqa"},
}  # fmt: skip
V1_8B = V1 | {"hidden_size": 4096, "intermediate_size": 12288}
V1_QWEN35 = V1 | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_target_layers": 64, "vocab_size": 248320, "rope_theta": 10000000,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}  # fmt: skip
V1_WINDOWED = {k: v for k, v in V1_QWEN35.items() if k != "auto_map"} | {
    "layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048, "use_sliding_window": True,
}  # fmt: skip
MIMO = {k: v for k, v in V1_QWEN35.items() if k != "layer_types"} | {
    "use_swa": True, "swa_window_size": 1024, "attention_sink_bias": True, "attention_value_scale": 0.612, "partial_rotary_factor": 0.5,
    "dflash_config": V1_QWEN35["dflash_config"] | {"block_size": 16},
}  # fmt: skip
# What NeMo AutoModel 0.7.0 writes for a DFlash 2 drafter of a Qwen3.5-class target.
NEMO = {k: v for k, v in QWEN.items() if k != "is_causal"} | {
    "architectures": ["Qwen3DFlashDraftModel"], "layer_types": [FULL] * 5, "use_sliding_window": False, "sliding_window": None,
    "partial_rotary_factor": 0.25,
}  # fmt: skip

# name -> (config, faults, further files): the rules that `check` must name, and no other.
PUBLISHED: dict[str, tuple[dict, set[str], tuple[str, ...]]] = {
    "z-lab/Qwen3.8-27B-DFlash2": (QWEN, set(), ()),
    "z-lab/Muse-Glimmer-30B-DFlash2": (MUSE, set(), ()),
    "incoai/Qwen3.6-35B-A3B-DFlash2": (QWEN_MOE, set(), ()),
    "GLM-5.3 DFlash2": (GLM, set(), ()),
    "z-lab/Qwen3-4B-DFlash-b16": (V1, set(), ()),
    "z-lab/Qwen3-8B-DFlash-b16": (V1_8B, set(), ()),
    "z-lab/Qwen3.5-27B-DFlash": (V1_QWEN35, set(), ()),
    "z-lab/Qwen3.6-27B-DFlash": (V1_WINDOWED, {"is_causal missing"}, ()),
    "MiMo-V2.5-Pro-FP4-DFlash": (MIMO, {"rope partial", "foreign parts", "mask embedding"}, ("mask_embedding.pt",)),
    "NeMo AutoModel 0.7.0, DFlash 2": (NEMO, {"architecture", "rope partial"}, ()),
}
