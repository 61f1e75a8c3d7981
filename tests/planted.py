"""A small exported drafter, and changes that spoil it: what `test_planted_faults.py` plants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_train.card import CardFacts
from dflash_train.drafter.spec import SLIDING, DrafterSpec, tensor_shapes
from dflash_train.export import write_export
from dflash_train.types import TargetInfo

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]

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


def exported(output: Path, **changes: Any) -> Path:
    """The tiny drafter with random weights, exported to `output`."""
    g = torch.Generator().manual_seed(0)
    state = {n: torch.randn(s, generator=g) for n, s in tensor_shapes(TINY).items()}
    card = CardFacts(name="acme/tiny-dflash2", base_model="acme/tiny", license="mit")
    arguments = {
        "state": state,
        "spec": TINY,
        "target": TINY_TARGET,
        "dtype": torch.bfloat16,
        "tokenizer_dir": None,
        "card": card,
    }
    return write_export(output, **(arguments | changes))


def plant(folder: Path, change: Change) -> None:
    """Rewrite config and tensors of a folder as `change` says."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def put(key: str, value: Any) -> Change:
    return lambda c, t: c.update({key: value})


def nest(key: str, value: Any) -> Change:
    return lambda c, t: c["dflash_config"].update({key: value})


def drop(*keys: str) -> Change:
    """Take keys out of config.json, wherever they are."""

    def change(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
        for key in keys:
            assert key in c or key in c["dflash_config"]
            c.pop(key, None)
            c["dflash_config"].pop(key, None)

    return change


def lift(key: str) -> Change:
    """Move a key from dflash_config to the top level."""
    return lambda c, t: c.update({key: c["dflash_config"].pop(key)})


def rename(pattern: str, new: Callable[[str], str]) -> Change:
    def change(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
        found = [n for n in t if pattern in n]
        assert found
        for n in found:
            t[new(n)] = t.pop(n)

    return change


def tensor(name: str, value: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    """Set a tensor from the others."""
    return lambda c, t: t.update({name: value(t)})


def lose(pattern: str) -> Change:
    def change(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
        found = [n for n in t if pattern in n]
        assert found
        for n in found:
            del t[n]

    return change
