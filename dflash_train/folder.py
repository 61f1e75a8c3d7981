"""An exported folder, read back strictly: the public contract as code that reads.

Engines differ in what they let pass (SGLang and vLLM load a drafter with missing tensors and say nothing); here the first
difference from `tensor_shapes` is an error.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from dflash_train.assets import public_name as public_name
from dflash_train.config.values import parse_json
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, from_hf_config, tensor_shapes

RECORD, WEIGHTS, INDEX = "dflash_train.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}  # safetensors' names -> config.json's
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


# Keys that engines look for in dflash_config, some of them also or first at the top.
PLACES = (
    "block_size", "mask_token_id", "target_layer_ids", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "output_multiplier", "final_logit_softcapping", "input_embedding_scale",
)  # fmt: skip


class Header(NamedTuple):
    """One tensor as its file's header states it: dtype in safetensors' spelling ("BF16"), shape, and the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str


def load_drafter_folder(path: str | Path) -> tuple[DrafterSpec, dict[str, torch.Tensor], dict[str, Any]]:
    """Spec, tensors (on the host, in the file's dtype, named as in `tensor_shapes`) and config.json of a drafter folder.

    DFlash v1 folders (no convolution, no selector) load too. Raises ValueError naming every missing, unused or mis-shaped
    tensor, and for a config that says something no DrafterSpec can.
    """
    folder = Path(path)
    config = read_config(folder)
    spec = from_hf_config(normalised(config))
    headers = read_headers(folder)
    faults = config_faults(config, spec) + tensor_faults({n: h.shape for n, h in headers.items()}, spec)
    if faults:
        raise ValueError(f"{folder} is not a drafter that loads completely:\n  " + "\n  ".join(faults))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({h.file for h in headers.values()}):
        with safe_open(folder / file, framework="pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys() if headers[name].file == file}  # noqa: SIM118
    return spec, {name: tensors[name] for name in tensor_shapes(spec)}, config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict. Raises ValueError if there is none or it is not a JSON object."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: has no config.json; name the folder of an exported drafter")
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def read_headers(folder: Path) -> dict[str, Header]:
    """dtype and shape of every tensor in a folder, from the files' headers alone; single file or sharded with an index.

    Raises ValueError for missing or broken files and for an index that disagrees with them.
    """
    index: dict[str, str] = {}
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise ValueError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
        index = read_json(folder / INDEX).get("weight_map", {})
        # Names of files beside the index: a path would lead out of the folder.
        if not isinstance(index, dict) or not all(
            isinstance(f, str) and f and f == Path(f).name for f in index.values()
        ):
            raise ValueError(f"{folder / INDEX}: weight_map must name a file of this folder for each tensor")
        files = sorted(set(index.values()))
    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    part = f.get_slice(name)
                    if name in headers:
                        raise ValueError(f"{folder}: tensor {name} is in {headers[name].file} and in {file}")
                    headers[name] = Header(part.get_dtype(), tuple(part.get_shape()), file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file}: cannot be read ({error}); copy or download it again") from None
    wrong = [name for name, file in index.items() if name not in headers or headers[name].file != file]
    if wrong:
        raise ValueError(f"{folder}: {INDEX} names tensors that its files do not hold: {', '.join(wrong[:3])}")
    return headers


def hash_weights(state: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits of the tensors as bfloat16, so that a checkpoint and its export agree."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(
            name.encode()
            + state[name].detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        )
    return digest.hexdigest()[:16]


def read_record(folder: Path) -> dict[str, Any]:
    """The training record of one of our exports; empty for a folder that somebody else made."""
    record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    for key in ("spec", "target", "provenance", "card"):
        if not isinstance(record.get(key, {}), dict):
            raise ValueError(f"{folder / RECORD}: {key} = {record[key]!r}: must be an object; export the drafter again")
    return record


def normalised(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the keys filled in that older drafters leave out and that every engine then takes alike."""
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    filled = dict(config)
    if kinds is None and isinstance(layers, int) and not config.get("use_sliding_window"):
        filled["layer_types"] = kinds = [FULL] * layers
    if config.get("is_causal") is None and isinstance(kinds, list) and kinds and SLIDING not in kinds:
        filled["is_causal"] = False  # on a sliding layer engines disagree about an absent key, on full ones they do not
    return filled


def config_faults(config: dict[str, Any], spec: DrafterSpec) -> list[str]:
    """What config.json says that a DrafterSpec cannot express, or that contradicts itself."""
    faults = []
    if config.get("attention_bias"):
        faults.append("attention_bias = true: drafters have no attention biases")
    if config.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act = {config['hidden_act']}: must be silu")
    if len(spec.layer_types) != spec.num_hidden_layers or not set(spec.layer_types) <= {SLIDING, FULL}:
        faults.append(
            f"layer_types = {list(spec.layer_types)}: needs {spec.num_hidden_layers} entries, {SLIDING} or {FULL}"
        )
    outside = [i for i in spec.target_layer_ids if not 0 <= i < spec.num_target_layers]
    if outside or not spec.target_layer_ids:
        faults.append(
            f"target_layer_ids = {list(spec.target_layer_ids)}: must be layers of the target, 0 to {spec.num_target_layers - 1}"
        )
    if spec.num_key_value_heads < 1 or spec.num_attention_heads % spec.num_key_value_heads:
        faults.append(
            f"num_attention_heads = {spec.num_attention_heads}: must be a multiple of num_key_value_heads = {spec.num_key_value_heads}"
        )
    if spec.block_size < 2:
        faults.append(f"block_size = {spec.block_size}: a block is an anchor and at least one draft")
    if SLIDING in spec.layer_types and spec.sliding_window is None:
        faults.append("sliding_attention layers, but use_sliding_window is not true or sliding_window is null")
    nested = config.get("dflash_config") or {}
    for key in PLACES:
        both = [place[key] for place in (config, nested) if place.get(key) is not None]
        if any(value != both[0] for value in both):
            faults.append(f"{key}: {sorted(both, key=str)} in two places; engines choose differently")
    for key in PLACES[-3:]:
        if config.get(key) is not None and key not in nested:
            faults.append(f"{key} = {config[key]} at the top: most engines read dflash_config alone; move it there")
    for key in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "rms_norm_eps", "rope_theta"):
        value = getattr(spec, key)
        if value is not None and not 0 < value < math.inf:
            faults.append(f"{key} = {value}: must be a finite number above 0")
    parts = {"conv_group_size": spec.conv_kernel_size, "selector_top_k": spec.selector_rank}
    faults += [
        f"{key} = {getattr(spec, key)}: must be at least 1"
        for key, on in parts.items()
        if on and getattr(spec, key) < 1
    ]
    if not isinstance(config.get("use_sliding_window", False), bool | None):
        faults.append(f"use_sliding_window = {config['use_sliding_window']!r}: must be true or false")
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if new and any(new.get(key) != value for key, value in old.items()):
        faults.append(
            f"rope_scaling = {old} beside rope_parameters = {new}: transformers takes the first, llama.cpp the second"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("mrope_section") or kind != "default":
        faults.append(
            "rope: drafters use the default RoPE over the whole head; this config has a partial, sectioned or scaled one"
        )
    return faults


def tensor_faults(found: dict[str, tuple[int, ...]], spec: DrafterSpec) -> list[str]:
    """One line per tensor that is missing, unexpected or mis-shaped, with the remedy where the name gives it away."""
    expected = tensor_shapes(spec)
    faults = [f"{n}: shape {found[n]}, expected {s}" for n, s in expected.items() if n in found and found[n] != s]
    faults += [f"{n}: missing" for n in expected if n not in found]
    for name in sorted(set(found) - set(expected)):
        remedy = ""
        if re.fullmatch(r"candidate_selector\.\w+_codebook\.weight", name):
            remedy = "; codebooks are bare parameters: rename it to " + name.removesuffix(".weight")
        elif "_orig_mod." in name or name.startswith(("module.", "model.")):
            remedy = "; drafters have bare names: strip the wrapper's prefix"
        elif any(part in name for part in ("embed_tokens", "lm_head", "rotary_emb")):
            remedy = "; the target's is used: leave it out"
        faults.append(f"{name}: unexpected{remedy}")
    return faults
