"""Released drafters as folders, made with z-lab's own classes or by hand in the formats of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import save_file
from transformers import Qwen3Config

from dflash_train.drafter.spec import FULL


def published_config(*, two: bool = True, block: dict[str, Any] | None = None, **more) -> dict[str, Any]:
    """config.json of a drafter for the toy target, with the keys of the published files."""
    nested = {"block_size": 8, "mask_token_id": toys.MASK, "target_layer_ids": [1, 3]}
    if two:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 8}
    config = {
        "architectures": ["DFlash2DraftModel" if two else "DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False,
        "dflash_config": nested | (block or {}), "dtype": "float32", "head_dim": 16, "hidden_act": "silu", "hidden_size": toys.HIDDEN,
        "intermediate_size": 96, "layer_types": [FULL, FULL], "max_position_embeddings": 512, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": toys.LAYERS, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "vocab_size": toys.VOCAB,
    }  # fmt: skip
    if two:
        config["is_causal"] = False
    if "rope_theta" in more:
        config["rope_parameters"]["rope_theta"] = more.pop("rope_theta")
    return config | more


@torch.no_grad()
def reference_drafter(seed: int = 0, **settings):
    """z-lab's class with random weights, of which none is the identity."""
    reference = pytest.importorskip("dflash.model")
    config = published_config(**settings)
    cls = reference.DFlash2DraftModel if settings.get("two", True) else reference.DFlashDraftModel
    model = cls(Qwen3Config(**{k: v for k, v in config.items() if k != "model_type"})).float().eval()
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        p.copy_(
            1 + 0.3 * noise
            if name.endswith("norm.weight")
            else noise * (0.5 if "kernel" in name or "codebook" in name else 0.2)
        )
    return model


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Named as in the published files."""
    return {n.replace("_codebook.weight", "_codebook"): t.detach().clone() for n, t in model.state_dict().items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], card: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def save(folder: Path, model, **settings) -> Path:
    """A folder as published."""
    return write(folder, published_config(**settings), tensors_of(model), "---\nlicense: mit\n---\n# a drafter\n")
