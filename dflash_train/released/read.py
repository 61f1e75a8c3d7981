"""A released drafter's folder -> the contract it states, in the words of the published DFlash 2 files, and its tensors.

Formats: the published one (z-lab, incoai, SpecForge, ours; DFlash v1 and 2), Speculators', NeMo AutoModel's. What a drafter computes
is what z-lab's reference would compute from the folder; what our layers cannot compute is refused by name. Nothing is guessed: what a
folder does not say is listed in `unstated`, for the recipe to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_train.config.hub import hub_name
from dflash_train.config.values import nearest
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, default_target_layer_ids, from_hf_config
from dflash_train.folder import PLACES, config_faults, public_name, read_config, read_headers, tensor_faults
from dflash_train.licences import Source, card_licence

# Everything that dflash_config may say without changing what is computed beyond what our spec expresses; None: any value.
NESTED: dict[str, Any] = {
    "block_size": None, "mask_token_id": None, "target_layer_ids": None, "conv_kernel_size": None, "conv_group_size": None,
    "selector_rank": None, "selector_top_k": None, "output_multiplier": None, "final_logit_softcapping": None,
    "input_embedding_scale": None, "causal": None, "is_causal": None, "attention_mode": ("gqa",), "tap_shift": (0,),
    "projector_type": ("dflash",), "shift_label": (False,), "pure_draft_prefix_len": (0,),
}  # fmt: skip
# Top-level keys of drafters whose layers compute something else, and what that is.
STRANGE = {
    "attention_sink_bias": "attention sinks",
    "attention_sinks": "attention sinks",
    "use_swa": "a window under another name (use_swa, swa_window_size)",
    "swa_window_size": "a window under another name (use_swa, swa_window_size)",
    "attention_value_scale": "scaled attention values",
    "quantization_config": "quantised weights; start from the drafter that was quantised",
}
SHARED = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", "verifier_lm_head.weight": "head"}
DROPPED = ("verifier_norm.weight", "rotary_emb.inv_freq")  # the target's, or a function of the config
LEAKED = re.compile(
    r"linear_\w+|partial_rotary_factor|mtp_\w+|attn_output_gate|full_attention_interval|mlp_only_layers"
)
MOST_LAYERS = 10_000
NEMO_CLASS = "Qwen3DFlash"  # how the names of NeMo AutoModel's own classes begin, which no engine has
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(kw_only=True)
class Released:
    """A drafter that somebody trained.

    config: canonical, as `from_hf_config` reads it, except that num_target_layers, mask_token_id and is_causal may be absent.
    unstated: knobs of `drafter` that the folder leaves open, with why. notes: what was read otherwise than it stands there.
    """

    name: str
    folder: Path
    source: str
    revision: str | None
    format: str
    architecture: str
    license: str | None
    config: dict[str, Any]
    unstated: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def licence(self) -> Source:
        """What it says of the terms of a drafter that begins from it."""
        return Source("init_from", self.name, self.license)

    def spec(self, **filled: Any) -> DrafterSpec:
        """What the folder states, completed by the fields named. Raises ValueError for what no DrafterSpec can express."""
        config = {**self.config, "dflash_config": dict(self.config["dflash_config"])}
        for name, value in filled.items():
            (config["dflash_config"] if name == "mask_token_id" else config)[name] = value
        try:
            spec = from_hf_config(config)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        refuse(self.name, config_faults(config, spec))
        return spec

    def tensors(self, spec: DrafterSpec) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(the drafter's tensors named as in `tensor_shapes(spec)`, copies of the target's that came along: see SHARED).

        Raises ValueError for a tensor that is missing, unknown, mis-shaped, not finite, or of a narrow type.
        """
        folder = weights_folder(self)
        found: dict[str, torch.Tensor] = {}
        headers = read_headers(folder)
        for file in sorted({h.file for h in headers.values()}):
            with safe_open(folder / file, framework="pt") as f:
                for key in (k for k, h in headers.items() if h.file == file):
                    name = bare_name(key)
                    if name in DROPPED:
                        continue
                    if name in found:
                        raise ValueError(f"{folder}: tensor {name} is there twice, once as {key}")
                    found[name] = f.get_tensor(key)
        for name in ("t2d", "d2t"):  # all true, all zero: the whole vocabulary after all
            whole = found.pop(name, None)
            if whole is not None and not (whole.all() if name == "t2d" else not whole.any()):
                raise ValueError(
                    f"{self.name}: has a reduced vocabulary (tensor {name}); our drafters use the target's head, so all of it. "
                    "Start from a drafter with the full vocabulary"
                )
        shared = {name: found.pop(name) for name in SHARED if name in found}
        faults = tensor_faults({name: tuple(t.shape) for name, t in found.items()}, spec)
        faults += [f"{name}: {t.dtype}, must be one of {FLOATS}" for name, t in found.items() if t.dtype not in FLOATS]
        faults += [
            f"{name}: has NaN or infinite values"
            for name, t in found.items()
            if t.dtype in FLOATS and not torch.isfinite(t).all()
        ]
        refuse(self.name, faults)
        return found, shared


def refuse(name: str, faults: Iterable[str]) -> None:
    """Raise ValueError with all the faults of a drafter, if it has any."""
    listed = list(faults)
    if listed:
        raise ValueError(f"{name} cannot be started from:\n  " + "\n  ".join(listed))


def bare_name(key: str) -> str:
    """A tensor's name without what wrappers put before it, and a codebook's without `.weight`."""
    key = re.sub(r"^((module|model|draft_model)\.)+", "", key.replace("_orig_mod.", ""))
    return re.sub(r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1", key)


# ------------------------------------------------------------------------------------------------------------ where it is


def read_released(source: str, revision: str | None = None) -> Released:
    """Read a folder or Hub id; of the Hub only what is not weights. Raises ValueError for what is no DFlash drafter."""
    folder, revision = _locate(source, revision)
    config = read_config(folder)
    name = public_name(source)
    refuse(name, _malformed(config))
    found = Released(
        name=name,
        folder=folder,
        source=source,
        revision=revision,
        format="",
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        license=card_licence(str(folder)),
        config={},
    )
    if (folder / "mask_embedding.pt").exists():
        refuse(
            name,
            [
                "mask_embedding.pt: a learned embedding of the mask token; ours is the target's embedding of an unused token"
            ],
        )
    if "speculators_model_type" in config or "speculators_config" in config:
        return _speculators(found, config)
    if found.architecture.startswith(NEMO_CLASS):
        return nemo_contract(found, config)
    found.format = "published (z-lab)"
    return _published(found, config)


def _locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"drafter.init_revision = {revision}: {source} is a folder, which has no revisions; leave it out"
            )
        for place in (path, path / "model" / "consolidated", path / "consolidated"):
            if (place / "config.json").is_file():
                return place, None
        raise ValueError(f"drafter.init_from = {source}: the folder has no config.json, also not in model/consolidated")
    if "/" not in source or not hub_name(source):
        raise ValueError(f"drafter.init_from = {source}: no such folder, and no Hub id (owner/name)")
    folder = _download(source, revision, ["*.json", "README.md", "mask_embedding.pt"])
    return folder, folder.name  # the cache names a snapshot after its commit


def weights_folder(found: Released) -> Path:
    """The folder with the weights; downloads them where it is on the Hub."""
    if found.revision is None:
        return found.folder
    return _download(found.source, found.revision, ["*.json", "*.safetensors"])


def _download(source: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the network, of the Hub, of its cache: a dozen unrelated classes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"drafter.init_from = {source}: neither a folder nor to be had from the Hub ({reason}); give a folder"
        ) from error


# ------------------------------------------------------------------------------------------------------------- the formats


def _published(found: Released, config: dict[str, Any]) -> Released:
    """Fill in what z-lab's reference assumes where a key is absent, and refuse what our layers do not compute."""
    c = dict(config)
    nested = c.get("dflash_config") or {}
    if not isinstance(nested, dict) or (not nested and "block_size" not in c):
        raise ValueError(
            f"{found.name}: no DFlash drafter: architectures {c.get('architectures')} without a dflash_config; "
            "give a released DFlash or DFlash 2 drafter"
        )
    nested = {k: v for k, v in nested.items() if v is not None}
    faults = [f"{k} = {c[k]}: {what}" for k, what in STRANGE.items() if not _neutral(c.get(k))]
    for key, value in nested.items():
        if key not in NESTED:
            faults.append(
                f"dflash_config.{key} = {value}: not known here, so what it changes is not{nearest(key, list(NESTED))}"
            )
        elif NESTED[key] is not None and value not in NESTED[key]:
            faults.append(f"dflash_config.{key} = {value}: our drafters have {NESTED[key][0]}")
    refuse(found.name, faults)
    for key in PLACES:  # the reference looks in both
        if key not in nested and c.get(key) is not None:
            nested[key] = c[key]
    if "block_size" not in nested:
        nested["block_size"] = 16
        found.notes.append("block_size is absent: 16, as the reference takes it")
    c |= {
        k: v for k, v in {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}.items() if k not in c
    }
    c["dflash_config"] = nested
    _kinds(found, c)
    _causality(found, c, nested)
    if "target_layer_ids" not in nested and isinstance(c.get("num_target_layers"), int):
        nested["target_layer_ids"] = default_target_layer_ids(c["num_target_layers"], c["num_hidden_layers"])
        found.notes.append(f"target_layer_ids is absent: {nested['target_layer_ids']}, the reference's spacing")
    if "mask_token_id" not in nested:
        found.unstated["mask_token_id"] = "its config.json names none"
    found.config = c
    return found


def _malformed(config: dict[str, Any]) -> list[str]:
    """Values of a type that the readers below rely on not meeting; `from_hf_config` looks at the others."""
    objects = ("dflash_config", "rope_parameters", "rope_scaling", "transformer_layer_config")
    faults = [f"{k} = {config[k]!r}: must be an object" for k in objects if not isinstance(config.get(k) or {}, dict)]
    if faults:
        return faults
    layers = config.get("transformer_layer_config") or config
    for key in ("num_hidden_layers", "num_target_layers", "max_window_layers"):
        value = layers.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_LAYERS:
            faults.append(f"{key} = {value!r}: must be a whole number of layers")
    nested = config.get("dflash_config") or {}
    lists = [(config, "architectures", str), (layers, "layer_types", str), (nested, "target_layer_ids", int)]
    for place, key, kind in [*lists, (config, "aux_hidden_state_layer_ids", int)]:
        value = place.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, kind) for v in value)):
            faults.append(f"{key} = {value!r}: must be a list of {kind.__name__}")
    return faults


def _neutral(value: Any) -> bool:
    """Whether a key says no more than its absence."""
    if isinstance(value, bool):  # True == 1.0, which would be neutral
        return not value
    return value in (None, 0, 1.0, [], {}, "")


def _kinds(found: Released, c: dict[str, Any]) -> None:
    """`layer_types` as transformers derives it where it is absent."""
    if c.get("layer_types") is not None:
        return
    layers = c.get("num_hidden_layers")
    if not isinstance(layers, int):
        return  # from_hf_config says so
    on = c.get("use_sliding_window") and c.get("sliding_window") is not None
    first = c.get("max_window_layers", 28)
    c["layer_types"] = [SLIDING if on and n >= first else FULL for n in range(layers)]
    if on and SLIDING not in c["layer_types"]:
        found.notes.append(
            "layer_types is absent: all layers see everything, whatever sliding_window says, as in every engine"
        )
        c |= {"use_sliding_window": False, "sliding_window": None}


def _causality(found: Released, c: dict[str, Any], nested: dict[str, Any]) -> None:
    """`is_causal` where it is absent: engines then take sliding layers for causal and full ones not."""
    inner = next((nested[k] for k in ("is_causal", "causal") if nested.get(k) is not None), None)
    top, kinds = c.get("is_causal"), set(c.get("layer_types") or [])
    if top is not None:
        if inner is not None and bool(inner) != bool(top):
            refuse(found.name, [f"is_causal = {top} at the top, {inner} in dflash_config: engines read either"])
        return
    if inner is not None:
        c["is_causal"] = bool(inner)
        found.notes.append(f"is_causal is absent at the top; dflash_config says {inner}")
    elif kinds <= {FULL}:
        c["is_causal"] = False
    elif kinds == {SLIDING}:
        c["is_causal"] = True
        found.unstated["is_causal"] = (
            "it is absent, and engines take sliding layers without it for causal (llama.cpp does not)"
        )
        found.notes.append(
            "is_causal is absent on sliding layers: causal inside the block, as the reference computes it"
        )
    else:
        c.pop("is_causal", None)
        found.unstated["is_causal"] = (
            "it is absent, and the reference then computes sliding layers causally and full ones not, which one key cannot say (llama.cpp: "
            "none causal). false trains it bidirectional from these weights, true causal; neither is exactly the released drafter at step 0"
        )


def nemo_contract(found: Released, config: dict[str, Any]) -> Released:
    """NeMo AutoModel's consolidated folder. 0.7.0 names the wrong class, and leaves out causality and window (see released/nemo.py)."""
    found.format = "NeMo AutoModel"
    c = dict(config)
    leaked = sorted(k for k in c if LEAKED.fullmatch(k))
    for key in leaked:
        del c[key]
    rope = dict(c.get("rope_parameters") or {})
    extras = sorted(k for k in rope if k.startswith("mrope_") or k == "partial_rotary_factor")
    if leaked or extras:
        found.notes.append(
            f"{', '.join(leaked + [f'rope_parameters.{k}' for k in extras])}: the target's, leaked into the drafter's config; dropped, as NeMo "
            "trains with RoPE over the whole head"
        )
    c["rope_parameters"] = {k: v for k, v in rope.items() if k not in extras}
    if c.get("is_causal") is None:
        # its JetSpec recipe trains causal blocks and stamps that there; its DFlash recipes do not
        c["is_causal"] = bool((c.get("dflash_config") or {}).get("causal", False))
        c |= {
            "layer_types": [FULL] * int(c.get("num_hidden_layers") or 0),
            "use_sliding_window": False,
            "sliding_window": None,
        }
        found.notes.append(
            f"exported by NeMo AutoModel 0.7.0: architectures {c.get('architectures')} is a class that engines do not have, is_causal is missing "
            f"({'its JetSpec recipe trains causal' if c['is_causal'] else 'its DFlash recipes train bidirectional'} blocks) and so is the window it trained with"
        )
        found.unstated["sliding_window"] = (
            "NeMo AutoModel 0.7.0 does not write the window it trained with: its recipe's draft_sliding_window, null where that is absent"
        )
    return _published(found, c)


def _speculators(found: Released, config: dict[str, Any]) -> Released:
    """Speculators' folder: its own key names, and layer ids that count the embedding as 0."""
    from transformers import AutoConfig

    found.format = "Speculators"
    kind = config.get("speculators_model_type")
    if kind not in ("dflash", "dflash2"):
        raise ValueError(f"{found.name}: a Speculators {kind} drafter; only dflash and dflash2 can be started from")
    stated = dict(config.get("transformer_layer_config") or {})
    model_type = stated.pop("model_type", "qwen3")
    rotary = [k for k in ("partial_rotary_factor",) if stated.pop(k, None) is not None]
    if isinstance(stated.get("rope_parameters"), dict) and "partial_rotary_factor" in stated["rope_parameters"]:
        rotary.append("rope_parameters.partial_rotary_factor")
        stated["rope_parameters"] = {k: v for k, v in stated["rope_parameters"].items() if k != "partial_rotary_factor"}
    try:  # it saves only what differs from the class's defaults
        layer = AutoConfig.for_model(model_type, **stated).to_dict()
    except Exception as error:  # of transformers' validators: several unrelated classes
        reason = " ".join(str(error).split())
        raise ValueError(f"{found.name}: transformer_layer_config is no config of {model_type!r}: {reason}") from error
    if rotary:
        found.notes.append(f"{', '.join(rotary)}: dropped, as Speculators trains with RoPE over the whole head")
    ids = config.get("aux_hidden_state_layer_ids")
    vocabulary = (config.get("draft_vocab_size"), layer.get("vocab_size"))
    faults = []
    if not ids:
        faults.append("aux_hidden_state_layer_ids is absent: which layers it captures is unknown")
    elif min(ids) < 1:
        faults.append(
            f"aux_hidden_state_layer_ids = {ids}: 0 is the token embedding, which our drafters do not capture"
        )
    if vocabulary[0] is not None and vocabulary[0] != vocabulary[1]:
        faults.append(
            f"draft_vocab_size = {vocabulary[0]}: a reduced vocabulary (the target's has {vocabulary[1]}); our drafters use all of it"
        )
    if config.get("sample_from_anchor"):
        faults.append("sample_from_anchor = true: the anchor's slot drafts too; ours drafts from the mask slots alone")
    if config.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        faults.append(
            f"target_hidden_size = {config['target_hidden_size']}: the drafter has {layer.get('hidden_size')}"
        )
    refuse(found.name, faults)
    kinds = layer.get("layer_types") or [FULL] * layer["num_hidden_layers"]
    slides = SLIDING in kinds
    bidirectional = config.get("sliding_window_non_causal", kind == "dflash2")
    c = {k: v for k, v in layer.items() if k not in ("architectures", "is_causal", "rope_scaling")}
    c |= {
        "layer_types": kinds,
        "use_sliding_window": slides,
        "sliding_window": layer.get("sliding_window") if slides else None,
    }
    if slides:
        found.notes.append(
            "Speculators trained the window from the anchor: slot i saw i + 1 more context tokens than any engine shows it; the window here "
            "is the engines', per query"
        )
        if bidirectional:
            c["is_causal"] = False
    block = {name: config.get(name) for name in ("block_size", "mask_token_id")} | {
        "target_layer_ids": [i - 1 for i in ids]
    }
    if kind == "dflash2":
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        block |= {name: config.get(name, value) for name, value in defaults.items()}
    c["dflash_config"] = {k: v for k, v in block.items() if v is not None}
    found.architecture = str((config.get("architectures") or [kind])[0])
    return _published(found, c)
