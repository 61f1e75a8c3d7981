"""NeMo AutoModel's consolidated folders: 0.7.0's repaired so that engines load them as they were trained, and ours written like them.

What 0.7.0 writes of a DFlash 2 run: tensors that are right, under a config.json that names a class no engine has, takes every layer for
full attention, leaves causality and window out, and copies what the target's config has and a drafter has not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dflash_train.config.nemo import read_nemo
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, from_hf_config, tensor_shapes, to_hf_config
from dflash_train.folder import (
    INDEX,
    RECORD,
    WEIGHTS,
    config_faults,
    read_config,
    read_headers,
    read_json,
    tensor_faults,
)
from dflash_train.released.read import NEMO_CLASS, read_released, refuse

BACKUP = "config.nemo.json"
UNKNOWN = "unknown"  # a window that nobody has named yet; None is one: no window
SHARD = "model-00001-of-00001.safetensors"


def repair(
    folder: Path, *, window: int | None | str = UNKNOWN, is_causal: bool | None = None, recipe: Path | None = None
) -> list[str]:
    """Rewrite config.json of a NeMo AutoModel 0.7.0 export as what was trained; returns what was changed and why, line by line.

    window: the trained one, None for none. recipe: the YAML that it was trained with, which names it. The file as NeMo wrote it stays
    as config.nemo.json. Raises ValueError, and writes nothing, for another kind of folder and for what cannot be known.
    """
    folder = Path(folder)
    before = read_config(folder)
    name = folder.resolve().name
    architecture = str((before.get("architectures") or ["none"])[0])
    if not architecture.startswith(NEMO_CLASS):
        raise ValueError(
            f"{folder}: --fix mends exports of NeMo AutoModel, whose class is {NEMO_CLASS}...; this one says {architecture}"
        )
    found = read_released(str(folder))
    refuse(name, [f"{k}: {why}" for k, why in found.unstated.items() if k == "mask_token_id"])
    headers = read_headers(folder)
    two = any(n.startswith("candidate_selector.") for n in headers)
    lines = [f"{found.format} export, {'DFlash 2' if two else 'DFlash v1'} by its tensors"]
    stated = None if recipe is None else _trained_with(recipe, found.config, lines)
    if "sliding_window" in found.unstated:
        if stated is not None and window not in (UNKNOWN, stated["sliding_window"]):
            raise ValueError(
                f"--window {window}: {recipe} says draft_sliding_window = {stated['sliding_window']}; leave one of them out"
            )
        window = stated["sliding_window"] if stated is not None else window
        if window == UNKNOWN:
            raise ValueError(
                f"{folder}: the window it was trained with is not in the export; give the recipe (--recipe nemo.yaml), or --window W with its "
                "draft_sliding_window, or --window none where that was not set"
            )
    elif window != UNKNOWN or (is_causal is not None and is_causal != before["is_causal"]):
        raise ValueError(
            f"{folder}: its config.json states window and is_causal itself; leave --window and --is-causal out"
        )
    config = {**found.config, "is_causal": found.config["is_causal"] if is_causal is None else is_causal}
    if "sliding_window" in found.unstated:
        layers = config["num_hidden_layers"]
        config |= {"layer_types": [FULL if window is None else SLIDING] * layers, "sliding_window": window}
        config["use_sliding_window"] = window is not None
    spec = from_hf_config(config)
    faults = config_faults(config, spec) + tensor_faults({n: h.shape for n, h in headers.items()}, spec)
    if spec.sliding_window is not None and spec.sliding_window < spec.block_size:
        faults.append(
            f"sliding_window = {spec.sliding_window}: below block_size = {spec.block_size} the engines' masks differ"
        )
    refuse(name, faults)
    after = _rewritten(spec, before)
    lines += list(found.notes) + _changes(before, after)
    if not (folder / BACKUP).exists():
        shutil.copyfile(folder / "config.json", folder / BACKUP)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")
    return [*lines, f"NeMo's own file stays as {BACKUP}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `check` that repair a folder before it is looked at."""
    parser.add_argument(
        "--fix",
        action="store_true",
        help=f"first mend an export of NeMo AutoModel 0.7.0; its config.json stays as {BACKUP}",
    )
    parser.add_argument(
        "--recipe", type=Path, metavar="NEMO_YAML", help="with --fix: the recipe it was trained with, for its window"
    )
    parser.add_argument(
        "--window", metavar="W", help="with --fix, instead of --recipe: draft_sliding_window of that recipe, or none"
    )
    parser.add_argument(
        "--is-causal",
        choices=("true", "false"),
        help="with --fix: causality inside the block, if it was not NeMo's own",
    )


def run(args: argparse.Namespace) -> None:
    """Repair as the options say, and print what changed. Raises ValueError for options that contradict each other."""
    chosen = [name for name in ("recipe", "window", "is_causal") if getattr(args, name) is not None]
    if not args.fix:
        if chosen:
            raise ValueError(f"--{chosen[0].replace('_', '-')} belongs to --fix")
        return
    window: int | None | str = UNKNOWN
    if args.window is not None:
        if args.window != "none" and not args.window.isdecimal():
            raise ValueError(f"--window {args.window}: must be a number of tokens, or none")
        window = None if args.window == "none" else int(args.window)
    causal = None if args.is_causal is None else args.is_causal == "true"
    print(
        "Repaired",
        *(f"  {line}" for line in repair(args.folder, window=window, is_causal=causal, recipe=args.recipe)),
        "",
        sep="\n",
    )


def _trained_with(path: Path, config: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Drafter knobs of the NeMo recipe, if the export can be its. Raises ValueError for one of another run."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--recipe {path}: cannot be read as YAML ({error})") from None
    drafter = read_nemo(recipe, str(path)).recipe["drafter"]
    block = config["dflash_config"]
    wrong = [
        f"{key} {drafter[key]} in the recipe, {block[key]} in the export"
        for key in (
            "block_size",
            "mask_token_id",
            "target_layer_ids",
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
        )
        if drafter.get(key) is not None and key in block and drafter[key] != block[key]
    ]
    if drafter["num_hidden_layers"] != config["num_hidden_layers"]:
        wrong.append(
            f"{drafter['num_hidden_layers']} draft layers in the recipe, {config['num_hidden_layers']} in the export"
        )
    if wrong:
        raise ValueError(f"--recipe {path}: not the recipe of this export: {'; '.join(wrong)}")
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if drafter.get(key) not in (None, config[key]):
            lines.append(
                f"draft_{key} = {drafter[key]} of the recipe never took effect: the tensors have {config[key]}, NeMo AutoModel 0.7.0 ignores it"
            )
    lines.append(f"draft_sliding_window = {drafter['sliding_window']}, from {path.name}")
    return drafter


def _rewritten(spec: DrafterSpec, before: dict[str, Any]) -> dict[str, Any]:
    ids = {key: before.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
    eos = ids["eos"][0] if isinstance(ids["eos"], list) else ids["eos"]
    dtype = str(before.get("dtype") or before.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    after = to_hf_config(spec, dtype=dtype, bos=ids["bos"], eos=eos, pad=ids["pad"])
    return after | {"transformers_version": before.get("transformers_version") or version("transformers")}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    why = {
        "architectures": "the class that engines dispatch on",
        "is_causal": "engines take an absent key for causal on sliding layers",
        "layer_types": "explicit, as trained",
        "sliding_window": "as trained",
        "use_sliding_window": "engines ignore or refuse a window without it",
        "rope_parameters": "over the whole head, as trained; vLLM, SGLang and llama.cpp would honour the target's extras",
    }
    lines = []
    for key in sorted({*before, *after}):
        old, new = before.get(key, "absent"), after.get(key, "removed")
        if old != new and not (old == "absent" and new is None):
            lines.append(f"{key}: {json.dumps(old)} -> {json.dumps(new)}" + (f" ({why[key]})" if key in why else ""))
    return lines


def nemo_style(folder: Path) -> Path:
    """Turn an export of ours into a folder as NeMo AutoModel consolidates: its class name, a numbered shard and an index.

    Its own class loads it whole; engines that dispatch on the class name do not (docs/nemo.md).
    """
    config = read_config(folder)
    two = config["architectures"] == ["DFlash2DraftModel"]
    config["architectures"] = ["Qwen3DFlash2DraftModel" if two else "Qwen3DFlashDraftModel"]
    # NeMo's classes read these from dflash_config alone, and have no defaults of their own for them elsewhere
    config["dflash_config"] = {
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
    } | config["dflash_config"]
    size = (folder / WEIGHTS).stat().st_size
    (folder / WEIGHTS).rename(folder / SHARD)
    spec = from_hf_config(config)
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensor_shapes(spec)), SHARD)}
    for name, value in (("config.json", config), (INDEX, index)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    record = read_json(folder / RECORD)
    record["files"] = sorted({*record["files"], SHARD, INDEX} - {WEIGHTS})
    (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder
