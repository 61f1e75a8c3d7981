"""The target's config.json, read without its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import xxhash

from dflash_train.config.hub import check_place
from dflash_train.config.values import trusted
from dflash_train.types import TargetInfo


def read_config(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The transformers config of a folder or Hub id. Raises ValueError with the remedy when there is none."""
    from transformers import AutoConfig

    check_place("target.path", path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trusted(path, trust_remote_code))
    except (OSError, ValueError, KeyError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"target.path = {path}: needs Python code that comes with it; read that code, then set target.trust_remote_code=true if you trust it"
            ) from None
        raise ValueError(
            f"target.path = {path}: no usable config.json ({str(error).splitlines()[0]}); give a local folder or a Hub id, with target.revision if needed"
        ) from error


def text_config(config: Any) -> Any:
    """The language model's part of a (possibly multimodal) config."""
    return config.get_text_config()


def read_target_info(path: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetInfo:
    """Everything about the target that a drafter depends on. No weights are read."""
    config = text_config(read_config(path, revision, trust_remote_code))
    try:
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    except AttributeError as error:
        raise ValueError(f"target.path = {path}: {error}; only decoder-only transformers are supported") from error
    eos = config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return TargetInfo(
        path=path,
        revision=revision or getattr(config, "_commit_hash", None),
        model_type=config.model_type,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config, path),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos_ids,
        pad_token_id=config.pad_token_id,
        output_multiplier=_multiplier(config),
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        input_embedding_scale=_embedding_scale(config),
    )


_SAMPLES, _SAMPLE = 16, 2**16


def weights_sample(path: str) -> str | None:
    """16 hex digits over names, sizes and samples of a local target's weight files: beginnings with their headers, and evenly spaced parts of
    64 KiB. Tells another fine-tune in the same place without reading all of it. None for a Hub id, which has a revision."""
    if not Path(path).is_dir():
        return None
    digest = xxhash.xxh3_64()
    for file in sorted(p for p in Path(path).iterdir() if re.fullmatch(r".*\.(safetensors|bin)", p.name)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(_SAMPLES):
                stream.seek(i * max(0, size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def rope_theta(config: Any, path: str) -> float:
    """One base, from `rope_parameters` or the flat field; an error where the two disagree."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:  # per layer type: {"full_attention": {...}, "sliding_attention": {...}}
        nested = [v for k, v in sorted(parameters.items()) if isinstance(v, dict) and "rope_theta" in v]
        parameters = nested[0] if nested else {}
    flat = getattr(config, "rope_theta", None)
    if "rope_theta" in parameters and flat is not None and float(flat) != float(parameters["rope_theta"]):
        raise ValueError(
            f"target.path = {path}: rope_theta is {flat} at the top and {parameters['rope_theta']} in rope_parameters; set drafter.rope_theta and mend the target's config"
        )
    return float(parameters["rope_theta"] if "rope_theta" in parameters else 10000.0 if flat is None else flat)


def _multiplier(config: Any) -> float:
    scaling = getattr(config, "logits_scaling", None)  # Granite divides its logits by it
    return 1.0 / scaling if scaling else float(getattr(config, "logit_scale", None) or 1.0)


def _embedding_scale(config: Any) -> float:
    if config.model_type.startswith("gemma"):
        return float(config.hidden_size**0.5)
    return float(getattr(config, "embedding_multiplier", None) or 1.0)
