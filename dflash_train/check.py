"""What each engine makes of a drafter folder: `python -m dflash_train.check DIR [--target T] [--launch LINE_OR_FILE]`.

Engines read the same folder differently, and most say nothing when they misread it. What is known about them is data: ENGINES
(engines.py) says where each looks and how it is started, RULES what each refuses or silently misreads. A new engine release is a few
lines there.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_train.assets import public_name, resolve
from dflash_train.config.values import fits
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, from_hf_config, tensor_shapes
from dflash_train.engines import ENGINES, FLAGS, Engine, Serving, contradictions, fill, settings, splash_difference
from dflash_train.folder import (
    DTYPES,
    INDEX,
    RECORD,
    TOKENIZER_FILES,
    WEIGHTS,
    Header,
    hash_weights,
    normalised,
    read_config,
    read_headers,
    read_json,
    read_record,
)
from dflash_train.released import nemo as repair
from dflash_train.released.read import NEMO_CLASS
from dflash_train.types import TargetInfo

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
V2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
SCALARS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")


# ------------------------------------------------------------------------------------------------------------------ facts


@dataclass(kw_only=True)
class Facts:
    """Everything the rules look at.

    odd: tensor name -> "NaN", "infinite", "zero" or "identity" (a convolution that passes its input through). weights: their hash, where the
    record has one. other: weight files that some engine reads though the reference does not.
    tokens: token string -> id of the folder's tokenizer; special: its eos/pad/bos strings. spec: None if the config is too
    broken to have one; where a key is missing that some engine defaults, that default is in it.
    """

    config: dict[str, Any]
    headers: dict[str, Header] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    target: TargetInfo | None = None
    record: dict[str, Any] | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    weights_error: str | None = None
    weights: str | None = None
    other: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.config
        nested = c.get("dflash_config")
        self.nested: dict[str, Any] = nested if isinstance(nested, dict) else {}
        self.rope: dict[str, Any] = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
        self.kinds: list[str] = c.get("layer_types") or [FULL] * (c.get("num_hidden_layers") or 0)
        self.sliding = SLIDING in self.kinds
        self.window: int | None = c.get("sliding_window")
        self.windowed = bool(c.get("use_sliding_window")) and self.window is not None
        self.block: int = self.nested.get("block_size", c.get("block_size", 16))
        arch = c.get("architectures")
        self.two = (
            arch == ["DFlash2DraftModel"]
            or any(k in self.nested or k in c for k in V2_KEYS)
            or any("_conv." in n or n.startswith("candidate_selector.") for n in self.headers)
        )
        try:
            rope = {"rope_theta": 10000.0, **{k: c[k] for k in ("rope_theta",) if k in c}, **self.rope}
            defaults = {"num_target_layers": 0, "is_causal": False, "rope_parameters": rope}
            known = {k: v for k, v in normalised(c).items() if v is not None or k not in defaults}
            block = {k: v for k, v in {**c, **self.nested}.items() if v is not None}
            whole = {**defaults, **known, "rope_parameters": rope, "layer_types": self.kinds, "dflash_config": block}
            self.spec: DrafterSpec | None = from_hf_config(whole)
            self.expected = tensor_shapes(self.spec) if self.headers else {}
            self.spec_error = None
        except (ValueError, TypeError, ZeroDivisionError) as problem:
            self.spec, self.expected, self.spec_error = None, {}, str(problem)

    def value(self, key: str) -> Any:
        return self.nested.get(key)

    def serving(self) -> Serving:
        """What launch lines and settings depend on."""
        causal = self.config.get("is_causal")
        named = ((self.record or {}).get("target") or {}).get("model_type")
        return Serving(
            block=self.block,
            sliding=self.sliding,
            bidirectional=not causal if causal is not None else not self.sliding,
            two=self.two,
            family=self.target.model_type if self.target else named,
        )

    def missing(self) -> list[str]:
        """Expected tensors that are there under no usual name."""
        return [
            n
            for n in self.expected
            if n not in self.headers and n + ".weight" not in self.headers and not self.prefixed()
        ]

    def prefixed(self) -> list[str]:
        return [n for n in self.headers if n.startswith(("model.", "module.", "_orig_mod.")) or "._orig_mod." in n]

    def extra(self) -> list[str]:
        known = {*self.expected, *(c + ".weight" for c in CODEBOOKS), *self.prefixed()}
        return [n for n in self.headers if n not in known] if self.spec else []


def read_facts(folder: Path, target: TargetInfo | None) -> Facts:
    """Read config, headers, record and tokenizer of a folder and scan its tensors one at a time."""
    files = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    config = read_config(folder)
    headers: dict[str, Header] = {}
    odd: dict[str, str] = {}
    error = weights = None
    record = read_record(folder) if RECORD in files else None
    try:
        headers = read_headers(folder)
        odd = dict(_scan(Tensors(folder, headers)))
        weights = hash_weights(Tensors(folder, headers)) if (record or {}).get("weights") else None
    except ValueError as problem:
        error = str(problem)
    tokens, special = _tokenizer(folder)
    return Facts(
        config=config, headers=headers, odd=odd, target=target, record=record, tokens=tokens, special=special,
        files=files, weights_error=error, weights=weights, other=_other_weights(folder, files, {h.file for h in headers.values()}) if headers else [],
    )  # fmt: skip


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path, headers: dict[str, Header]):
        self.headers = headers
        self.files = {name: safe_open(folder / name, framework="pt") for name in {h.file for h in headers.values()}}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.files[self.headers[name].file].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _scan(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """(name, what is odd) per tensor; one tensor in memory at a time."""
    for name, t in tensors.items():
        if not t.is_floating_point() or t.numel() == 0:
            continue
        if t.element_size() == 1:
            t = t.float()  # 8-bit floats have no isfinite
        if not torch.isfinite(t).all():
            yield name, "NaN" if torch.isnan(t).any() else "infinite"
        elif not t.any():
            yield name, "zero"
        elif name.endswith("base_kernel") and t.dim() == 3 and (t[:, 0] == 1).all() and not t[:, 1:].any():
            yield name, "identity"


def _other_weights(folder: Path, files: set[str], read: set[str]) -> list[str]:
    """Weight files that some engine loads though transformers does not: those of an index beside model.safetensors, and strays."""
    found = {n for n in files if n.endswith(".safetensors")}
    if WEIGHTS in files and INDEX in files:
        stated = read_json(folder / INDEX).get("weight_map")
        found |= set(map(str, stated.values())) if isinstance(stated, dict) else set()
    return sorted(found - read)


def _tokenizer(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    try:
        return _read_tokenizer(folder)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{folder}: its tokenizer files cannot be read ({error!r}); take the target's again") from None


def _read_tokenizer(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    tokens: dict[str, int] = {}
    special: dict[str, str] = {}
    if (folder / "tokenizer.json").is_file():
        data = read_json(folder / "tokenizer.json")
        vocab = (data.get("model") or {}).get("vocab") or {}
        tokens |= vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        tokens |= {t["content"]: int(t["id"]) for t in data.get("added_tokens") or []}
    if (folder / "tokenizer_config.json").is_file():
        data = read_json(folder / "tokenizer_config.json")
        tokens |= {t["content"]: int(i) for i, t in (data.get("added_tokens_decoder") or {}).items()}
        for key in ("bos_token", "eos_token", "pad_token"):
            token = data.get(key)
            if token:
                special[key] = token["content"] if isinstance(token, dict) else token
                if not isinstance(special[key], str):
                    raise TypeError(f"{key} is {special[key]!r}")
    return tokens, special


# ---------------------------------------------------------------------------------------------------------------- engines


def engine_view(engine: Engine, f: Facts) -> list[str]:
    """Lines: what this engine will really use."""
    if engine.only:
        name, differ = splash_difference(f.config)
        differ += [f"{n} in {h.dtype}, not BF16" for n, h in f.headers.items() if h.dtype != "BF16"][:1]
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            return [
                f"not loaded: only drafters shaped like its own are; from that of {name} this differs in {', '.join(differ[:3])}{more}"
            ]
    places = {"nested": f.nested, "top": f.config}
    block = (
        next((places[p]["block_size"] for p in engine.block if "block_size" in places[p]), 16) if engine.block else None
    )
    s = f.serving()
    lines = [f"block {block if block is not None else 'not read'}; {fill(engine.draft, s)}"]
    causal = next((places[p][key] for p, key in engine.causal if places[p].get(key) is not None), None)

    def layer(kind: str) -> str:
        slides = kind == SLIDING
        inside = bool(causal) if causal is not None else slides and engine.causal_absent == "sliding"
        gated = slides and not f.windowed
        if gated and engine.ungated == "refused":
            return "refused (sliding without use_sliding_window)"
        if gated and engine.ungated == "unknown":
            return "not known (sliding without use_sliding_window)"
        windowed = slides and f.window is not None and not (gated and engine.ungated == "full")
        return f"{f'window {f.window}' if windowed else 'full attention'}, {'causal' if inside else 'bidirectional'} in the block"

    start = 0
    for text, group in groupby(layer(kind) for kind in f.kinds):
        n = len(list(group))
        lines.append(f"layer{'s' if n > 1 else ''} {f'{start}-{start + n - 1}' if n > 1 else start}: {text}")
        start += n
    rotary = _rotary(f)
    share = f" over {rotary:g} of the head" if engine.partial_rope and rotary != 1.0 else ""
    inner, top = f.rope.get("rope_theta"), f.config.get("rope_theta")
    theta = next((t for t in ((top, inner) if engine.theta == "top" else (inner, top)) if t is not None), None)
    lines.append(
        f"RoPE theta {'missing' if theta is None else f'{theta:g}'}{share}; mask id {f.value('mask_token_id')}; target layers {f.value('target_layer_ids')}"
    )
    own = sorted(n for n in f.headers if re.search(r"embed_tokens|lm_head", n))
    head = f"from this file ({', '.join(own)})" if own and engine.own_head else "the target's"
    scale = f.value("input_embedding_scale") if engine.scale else "asked from the target"
    softcap, factor = f.value("final_logit_softcapping"), f.value("output_multiplier")
    lines.append(
        f"embedding and head: {head}; embedding scale {1.0 if scale is None else scale}, logits x {1.0 if factor is None else factor}, soft-cap {softcap or 'none'}"
    )
    dtypes = sorted({DTYPES.get(h.dtype, h.dtype) for h in f.headers.values()})
    lines.append(f"weights: {', '.join(dtypes) or 'not read'}; in fewer bits: {engine.quantised}")
    return lines


# ------------------------------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class Rule:
    """`found` returns something falsy (no finding), True, or details that replace {} in `message`.

    severity: refuse (the engine does not load it), misread (it loads and computes something else), note (good to know).
    """

    name: str
    engines: str
    severity: str
    found: Callable[[Facts], Any]
    message: str
    source: str


def _architecture(f: Facts) -> Any:
    need = ["DFlash2DraftModel" if f.two else "DFlashDraftModel"]
    have = f.config.get("architectures")
    mend = " (an export of NeMo AutoModel; --fix mends it)" if str(have).startswith(f"['{NEMO_CLASS}") else ""
    return have != need and f"{have}, must be {need}{mend}"


def _block_twice(f: Facts) -> Any:
    top, nested = f.config.get("block_size"), f.value("block_size")
    return None not in (top, nested) and top != nested and f"{nested} in dflash_config, {top} at the top"


def _narrow_window(f: Facts) -> Any:
    return f.sliding and f.window is not None and f.window < f.block and f"{f.window} < block_size = {f.block}"


def _unused_window(f: Facts) -> bool:
    return bool(f.kinds) and not f.sliding and bool(f.config.get("use_sliding_window") or f.window is not None)


def _causal_twice(f: Facts) -> list[str]:
    top, said = f.config.get("is_causal"), {k: f.value(k) for k in ("is_causal", "causal")}
    return [f"dflash_config.{k} = {v}" for k, v in said.items() if None not in (v, top) and v != top]


def _key_twice(f: Facts) -> list[str]:
    keys = (*V2_KEYS, *SCALARS, "mask_token_id", "target_layer_ids")
    twice = [k for k in keys if None not in (f.config.get(k), f.value(k)) and f.config[k] != f.value(k)]
    return [f"{k} {f.value(k)} in dflash_config, {f.config[k]} at the top" for k in twice]


def _out_of_range(f: Facts) -> list[str]:
    """Numbers that are nothing to compute with, though every engine reads them."""
    positive = {k: f.config.get(k) for k in (*SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps")}
    positive |= {"rope_theta": f.rope.get("rope_theta", f.config.get("rope_theta"))} | {k: f.value(k) for k in SCALARS}
    wrong = [f"{k} = {v}" for k, v in positive.items() if v is not None and not 0 < v < math.inf]
    odd = (f.config.get("head_dim") or 0) % 2
    return wrong + ([f"head_dim = {f.config['head_dim']}, which is odd"] if odd else [])


def _rope_scaling(f: Facts) -> Any:
    old, new = f.config.get("rope_scaling"), f.config.get("rope_parameters")
    return bool(old and new) and any(new.get(k) != v for k, v in old.items()) and str(old)


def _tokens_outside(f: Facts) -> Any:
    most, size = max(f.tokens.values(), default=-1), f.config.get("vocab_size", math.inf)
    return most >= size and f"{most}, vocab_size is {size}"


def _theta_twice(f: Facts) -> Any:
    top, inner = f.config.get("rope_theta"), f.rope.get("rope_theta")
    return (
        None not in (top, inner)
        and top != inner
        and f"{inner} in rope_parameters, {top} at the top (which ollama takes)"
    )


def _rope_type(f: Facts) -> Any:
    kind = f.rope.get("rope_type", f.rope.get("type", "default"))
    return kind != "default" and str(kind)


def _rotary(f: Facts) -> float:
    return f.rope.get("partial_rotary_factor") or f.config.get("partial_rotary_factor") or 1.0


def _scale(f: Facts) -> float:
    return f.value("input_embedding_scale") or 1.0


def _odd_top_k(f: Facts) -> Any:
    k = f.value("selector_top_k") or 1
    return k & (k - 1) != 0 and str(k)


def _selector_room(f: Facts) -> Any:
    k = f.value("selector_top_k") or 0
    return f.two and f.config.get("hidden_size", math.inf) < k * (k + 1) and str(k * (k + 1))


def _mask_outside(f: Facts) -> Any:
    mask = f.value("mask_token_id")
    return mask is not None and not 0 <= mask < f.config.get("vocab_size", math.inf) and str(mask)


def _mask_string(f: Facts) -> Any:
    token = f.tokens.get("<|MASK|>")
    return token is not None and token != f.value("mask_token_id") and str(token)


def _ids(f: Facts) -> list[int]:
    return f.value("target_layer_ids") or []


def _ids_outside(f: Facts) -> list[int]:
    layers = _target_layers(f)
    return [i for i in _ids(f) if i < 0 or (layers is not None and i >= layers)]


def _target_layers(f: Facts) -> int | None:
    return f.target.num_layers if f.target else f.config.get("num_target_layers")


def _mask_clash(f: Facts) -> str:
    """Names of the special tokens that share the mask's id."""
    named = {k: f.config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    named |= {f"the tokenizer's {k}": f.tokens.get(v) for k, v in f.special.items()}
    if f.target:
        named |= {
            "the target's bos": f.target.bos_token_id,
            "the target's eos": f.target.eos_token_ids,
            "the target's pad": f.target.pad_token_id,
        }
    mask = f.value("mask_token_id")
    return ", ".join(
        k for k, v in named.items() if mask is not None and (mask in v if isinstance(v, list) else mask == v)
    )


def _record_differs(f: Facts) -> list[str]:
    stated = (f.record or {}).get("spec")
    if not stated or not f.spec:
        return []
    mine = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(f.spec).items()}
    if not f.two:  # a DFlash v1 config does not carry the settings of the parts it lacks
        mine = {k: v for k, v in mine.items() if k not in V2_KEYS}
    return [f"{k}: trained {stated[k]}, config {mine[k]}" for k in mine if k in stated and stated[k] != mine[k]]


def _other_tensors(f: Facts) -> Any:
    stated = (f.record or {}).get("weights")
    return None not in (stated, f.weights) and stated != f.weights and f"{f.weights}, recorded {stated}"


def _another_name(f: Facts) -> Any:
    stated = (f.record or {}).get("target") or {}
    if not f.target or not stated.get("name"):
        return False
    mine = (public_name(f.target.path), f.target.revision)
    theirs = (stated["name"], stated.get("revision"))
    same = mine[0] == theirs[0] and (None in (mine[1], theirs[1]) or mine[1] == theirs[1])
    return not same and "{}, not {}".format(
        *(" at ".join(filter(None, map(str, filter(None, p)))) for p in (theirs, mine))
    )


def _against_target(f: Facts) -> list[str]:
    if not f.target:
        return []
    pairs = {
        "hidden_size": f.target.hidden_size,
        "vocab_size": f.target.vocab_size,
        "num_target_layers": f.target.num_layers,
    }
    found = [f"{k} {f.config[k]}, target {v}" for k, v in pairs.items() if k in f.config and f.config[k] != v]
    stated = (f.record or {}).get("target") or {}
    kept = {"model_type": f.target.model_type, "tie_word_embeddings": f.target.tie_word_embeddings}
    return found + [
        f"trained with {k} {stated[k]}, target {v}" for k, v in kept.items() if stated.get(k) not in (None, v)
    ]


def _dtype_differs(f: Facts) -> Any:
    stated = sorted({str(f.config[k]).removeprefix("torch.") for k in ("dtype", "torch_dtype") if f.config.get(k)})
    found = sorted({DTYPES.get(h.dtype, h.dtype) for h in f.headers.values()})
    said = " and ".join(stated) or "none"
    return bool(found) and found != stated and f"{said} in config.json, {', '.join(found)} in the file"


def _dotted_codebooks(f: Facts) -> list[str]:
    return [n for n in f.headers if n in {c + ".weight" for c in CODEBOOKS}]


# Keys that change what a drafter computes, and that only some fork or one engine reads.
FOREIGN = (
    "attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias", "attention_value_scale", "use_swa",
    "swa_window_size", "rope_interleaved", "markov_rank", "shift_label", "use_confidence_head", "aux_hidden_norms",
)  # fmt: skip
# What this table knows of dflash_config; a key beyond it is read by no engine here.
KNOWN = {
    *V2_KEYS, *SCALARS, *FOREIGN, "block_size", "mask_token_id", "target_layer_ids", "is_causal", "causal", "tap_shift", "num_target_layers",
}  # fmt: skip


def _foreign(f: Facts) -> list[str]:
    stated = {k: place[k] for k in FOREIGN for place in (f.config, f.nested) if place.get(k) not in (None, False)}
    return [f"{k} = {v}" for k, v in stated.items()]


def _reduced(f: Facts) -> list[str]:
    whole = (None, f.config.get("vocab_size"))
    keys = [k for k in ("draft_vocab_size", "reduced_vocab_size") if {f.config.get(k), f.value(k)} - set(whole)]
    return keys + [n for n in f.headers if n in ("d2t", "t2d", "draft_id_to_target_id")]


def _quantised(f: Facts) -> list[str]:
    stated = [k for k in ("quantization_config", "compression_config") if f.config.get(k)]
    return stated + sorted(f.files & {"hf_quant_config.json", "quantize_config.json"})


def _stray_weights(f: Facts) -> list[str]:
    return sorted(n for n in f.files if n.endswith((".bin", ".pt", ".pth")) or (n == INDEX and WEIGHTS in f.files))


def _bad_shapes(f: Facts) -> list[str]:
    wrong = {n: (f.headers[n].shape, s) for n, s in f.expected.items() if n in f.headers and f.headers[n].shape != s}
    return [f"{n} {have}, expected {want}" for n, (have, want) in wrong.items()]


def _missing(f: Facts, pattern: str) -> list[str]:
    return [n for n in f.missing() if re.search(pattern, n)]


def _zero(f: Facts, *, legal: bool) -> list[str]:
    """A fresh selector and a fresh dynamic convolution may be zero; anything else that is zero blocks the signal."""
    return [
        n
        for n, odd in f.odd.items()
        if odd == "zero" and (n.startswith("candidate_selector.") or "kernel_projection" in n) == legal
    ]


ALL, HF = "all engines", "reference, vLLM, SGLang"
REFUSE, MISREAD, NOTE = "refuse", "misread", "note"
REF = "dflash 0.1.0, model.py"
_SPECIAL_EXTRA = r"embed_tokens|lm_head|inv_freq"

RULES: tuple[Rule, ...] = (
    # What the folder is
    Rule("weights", ALL, REFUSE, lambda f: f.weights_error, "{}",
         "model.safetensors or a sharded set with its index"),
    Rule("architecture", "vLLM, SGLang, MLX, llama.cpp, exllamav3, ollama, Splash", REFUSE, _architecture,
         "architectures = {}",
         "vLLM 0.33.0 and SGLang 0.5.23 model registries; llama.cpp conversion/qwen.py; ollama x/models/dflash"),
    Rule("tensors not compared", ALL, MISREAD, lambda f: f.spec_error,
         "tensors could not be compared with config.json: {}", REF),
    Rule("model_type", HF, REFUSE,
         lambda f: f.config.get("model_type") != "qwen3" and str(f.config.get("model_type")),
         "model_type = {}, must be qwen3", "the config class is Qwen3Config"),
    Rule("dflash_config", ALL, REFUSE, lambda f: not f.nested, "dflash_config is missing", REF),
    Rule("v2 keys", ALL, REFUSE,
         lambda f: f.two and [k for k in V2_KEYS if k not in f.nested and k not in f.config],
         "dflash_config lacks {}: convolution and selector come together, or the drafter is a DFlash v1",
         "vLLM KeyError, SGLang ValueError, MLX ZeroDivisionError, llama.cpp init failure"),
    Rule("v2 keys nested", "vLLM, SGLang, MLX, llama.cpp, ollama", REFUSE,
         lambda f: [k for k in V2_KEYS if k in f.config and k not in f.nested],
         "{} at the top level; they belong into dflash_config",
         "vLLM KeyError, SGLang ValueError, MLX ZeroDivisionError, llama.cpp init failure"),
    Rule("v2 keys empty", ALL, REFUSE,
         lambda f: f.two and [k for k in V2_KEYS if (f.value(k) if k in f.nested else 1) < 1],
         "{} must be at least 1 in a DFlash 2 drafter", REF),
    Rule("sizes", ALL, MISREAD,
         lambda f: [k for k in (*SIZES, "rms_norm_eps", "max_position_embeddings") if k not in f.config],
         "{} missing: Qwen3Config fills in its own defaults", "transformers Qwen3Config"),
    Rule("head_dim", "MLX, ollama", REFUSE, lambda f: "head_dim" not in f.config, "head_dim is missing",
         "dflash 0.1.0, model_mlx.py; ollama x/models/dflash"),
    Rule("heads", ALL, REFUSE,
         lambda f: (f.config.get("num_attention_heads") or 1) % (f.config.get("num_key_value_heads") or 1) != 0,
         "num_attention_heads is no multiple of num_key_value_heads", REF),
    Rule("num_target_layers", "reference, MLX", REFUSE, lambda f: "num_target_layers" not in f.config,
         "num_target_layers is missing", "dflash 0.1.0, model.py AttributeError, model_mlx.py KeyError"),
    Rule("target pairing", ALL, REFUSE, _against_target, "does not fit the target: {}",
         "the target's embedding and lm_head are used; exllamav3 1.6.5 and ollama raise"),
    Rule("target name", ALL, NOTE, _another_name, "trained on {}; engines compute with whatever target they are given, and accept less",
         RECORD),
    Rule("values", ALL, MISREAD, _out_of_range, "{}: must be a finite number above 0, head_dim an even one", REF),
    Rule("key twice", "reference, exllamav3 against all others", MISREAD, _key_twice,
         "{}; top-level copies are accepted by these two alone", "dflash 0.1.0, model.py; exllamav3 1.6.5, architecture/dflash2.py"),
    Rule("attention_bias", "MLX, llama.cpp, exllamav3", REFUSE, lambda f: f.config.get("attention_bias"),
         "attention_bias is true; these engines have no bias tensors",
         "dflash 0.1.0, model_mlx.py; llama.cpp src/models/dflash.cpp"),
    Rule("hidden_act", "exllamav3, SGLang", REFUSE,
         lambda f: f.config.get("hidden_act") != "silu" and str(f.config.get("hidden_act")),
         "hidden_act = {}, must be silu", "exllamav3 1.6.5, architecture/dflash.py"),
    # Block, mask, target layers
    Rule("block_size", ALL, MISREAD, lambda f: "block_size" not in f.nested and "block_size" not in f.config,
         "block_size is missing: 16 is assumed, exllamav3 and ollama stop", "llama.cpp default 16; exllamav3 1.6.5; ollama x/models/dflash"),
    Rule("block_size twice", "exllamav3 against all others", MISREAD, _block_twice,
         "block_size is {}; exllamav3 takes the top level, the others dflash_config",
         "exllamav3 1.6.5, architecture/dflash2.py"),
    Rule("block_size range", ALL, REFUSE, lambda f: f.block < 2 and str(f.block),
         "block_size = {}: an anchor and at least one drafted token make 2", REF),
    Rule("mask_token_id", ALL, REFUSE, lambda f: f.value("mask_token_id") is None,
         "dflash_config.mask_token_id is missing", REF),
    Rule("mask range", ALL, REFUSE, _mask_outside, "mask_token_id = {} is outside the vocabulary",
         "SGLang 0.5.23, srt/speculative"),
    Rule("mask special", ALL, MISREAD, _mask_clash,
         "mask_token_id is also {}; choose a reserved id that no text contains",
         "the mask's embedding must mean nothing else"),
    Rule("mask string", "SGLang", REFUSE, _mask_string,
         'the tokenizer has "<|MASK|>" with id {}, which is not mask_token_id',
         "SGLang 0.5.23, srt/speculative"),
    Rule("target_layer_ids", "all but reference and SGLang", REFUSE, lambda f: not _ids(f),
         "dflash_config.target_layer_ids is missing", "only the reference and SGLang have a default spacing"),
    Rule("ids order", "TensorRT-LLM", MISREAD, lambda f: _ids(f) != sorted(_ids(f)) and str(_ids(f)),
         "target_layer_ids = {} is not ascending; TensorRT-LLM sorts it, and fc's columns no longer match (ollama refuses it)",
         "TensorRT-LLM modeling_dflash.py; ollama x/models/dflash"),
    Rule("ids duplicate", ALL, MISREAD, lambda f: len(set(_ids(f))) != len(_ids(f)) and str(_ids(f)),
         "target_layer_ids = {} has a duplicate", REF),
    Rule("ids range", ALL, REFUSE, _ids_outside, "target_layer_ids has {}, which the target does not have",
         "ids are 0-based decoder layers"),
    Rule("ids last layer", "reference, SGLang, llama.cpp", REFUSE,
         lambda f: (_target_layers(f) or 0) - 1 in _ids(f),
         "target_layer_ids has the target's last layer: the reference takes it after the final norm, "
         "others before, SGLang never captures it, llama.cpp asserts", "SGLang 0.5.23, models/dflash.py"),
    # Attention
    Rule("is_causal missing", "llama.cpp against all others", MISREAD,
         lambda f: f.sliding and f.config.get("is_causal") is None,
         "is_causal is not written at the top level: sliding layers run causal in reference, MLX, vLLM, "
         "SGLang and exllamav3, bidirectional in llama.cpp; write what was trained",
         "dflash 0.1.0, model.py; llama.cpp common/speculative.cpp"),
    Rule("is_causal missing, full", ALL, NOTE, lambda f: not f.sliding and f.config.get("is_causal") is None,
         "is_causal is not written; full-attention layers run bidirectional everywhere", REF),
    Rule("is_causal type", ALL, MISREAD,
         lambda f: not isinstance(f.config.get("is_causal"), bool | None) and repr(f.config["is_causal"]),
         "is_causal = {} is not true or false", REF),
    Rule("is_causal twice", "exllamav3, vLLM, llama.cpp, ollama", MISREAD, _causal_twice,
         "{} contradicts the top-level is_causal; ollama takes dflash_config.causal",
         "exllamav3 1.6.5, architecture/dflash.py; ollama x/models/dflash"),
    Rule("layer_types missing", ALL, MISREAD,
         lambda f: not f.config.get("layer_types") and bool(f.config.get("use_sliding_window")),
         "layer_types is missing with use_sliding_window true: every layer runs full, llama.cpp aborts",
         "transformers Qwen3Config; llama.cpp GGML_ASSERT(hparams.is_swa_any())"),
    Rule("layer_types missing, full", ALL, NOTE,
         lambda f: not f.config.get("layer_types") and not f.config.get("use_sliding_window"),
         "layer_types is missing; every layer runs full attention", "transformers Qwen3Config"),
    Rule("layer_types length", ALL, REFUSE,
         lambda f: len(f.kinds) != f.config.get("num_hidden_layers", len(f.kinds)) and str(len(f.kinds)),
         "layer_types has {} entries, not num_hidden_layers", "transformers Qwen3Config"),
    Rule("layer_types values", ALL, REFUSE, lambda f: sorted(set(f.kinds) - {SLIDING, FULL}),
         f"layer_types has {{}}; entries are {SLIDING} or {FULL}", "transformers Qwen3Config"),
    Rule("window off", HF, REFUSE, lambda f: f.sliding and not f.windowed,
         "sliding layers, but use_sliding_window is not true or sliding_window is null",
         "dflash 0.1.0 TypeError; vLLM 0.33.0 and SGLang 0.5.23 ValueError"),
    Rule("window off, llama.cpp", "llama.cpp", MISREAD, lambda f: f.sliding and not f.windowed,
         "sliding layers without use_sliding_window run full", "llama.cpp src/models/dflash.cpp"),
    Rule("window unused", "llama.cpp", REFUSE, _unused_window,
         "no sliding layer, but a window: use_sliding_window must be false and sliding_window null",
         "llama.cpp GGML_ASSERT(hparams.is_swa_any())"),
    Rule("window below block", "MLX, llama.cpp against all others", MISREAD, _narrow_window,
         "sliding_window = {}: the engines' masks inside the block differ there",
         "reference and vLLM window both sides, llama.cpp the past, MLX none"),
    # RoPE
    Rule("rope theta", ALL, MISREAD, lambda f: "rope_theta" not in f.rope and "rope_theta" not in f.config,
         "no rope_theta, neither in rope_parameters nor at the top: a default is assumed",
         "transformers Qwen3Config"),
    Rule("rope twice", ALL, MISREAD, _theta_twice, "rope_theta is {}", "the two must agree"),
    Rule("rope partial", "vLLM, SGLang, llama.cpp", MISREAD, lambda f: _rotary(f) != 1.0,
         "partial_rotary_factor: these engines honour it, reference and MLX do not; leave the target's "
         "rope extras out", "vLLM 0.33.0, models/qwen3_dflash.py"),
    Rule("rope sections", "vLLM, SGLang, llama.cpp", MISREAD,
         lambda f: bool(f.rope.get("mrope_section") or f.config.get("mrope_section")),
         "mrope_section is the target's; a drafter's positions are plain",
         "vLLM 0.33.0, models/qwen3_dflash.py"),
    Rule("rope_scaling", "reference, vLLM, SGLang against llama.cpp", MISREAD, _rope_scaling,
         "rope_scaling = {} beside rope_parameters: transformers takes it instead of them, llama.cpp's converter leaves it out",
         "transformers 5.18.0, Qwen3Config; llama.cpp conversion/base.py"),
    Rule("rope type", ALL, MISREAD, _rope_type, "rope_type = {}, must be default",
         "published drafters have the default; no other was tested"),
    # Convolution and selector
    Rule("conv groups", ALL, REFUSE,
         lambda f: f.config.get("hidden_size", 0) % (f.value("conv_group_size") or 1) != 0,
         "conv_group_size does not divide hidden_size", REF),
    Rule("conv kernel", "exllamav3", REFUSE, lambda f: (f.value("conv_kernel_size") or 0) > f.block,
         "conv_kernel_size exceeds block_size", "exllamav3 1.6.5, architecture/dflash2.py"),
    Rule("top_k power", "SGLang", REFUSE, _odd_top_k, "selector_top_k = {} is no power of two",
         "SGLang 0.5.23, kernels/ops/speculative/dflash.py (tl.arange)"),
    Rule("top_k hidden", "llama.cpp", REFUSE, _selector_room,
         "hidden_size is below selector_top_k x (selector_top_k + 1) = {}", "llama.cpp src/models/dflash.cpp"),
    Rule("top_k vocabulary", ALL, REFUSE,
         lambda f: (f.value("selector_top_k") or 0) > f.config.get("vocab_size", math.inf),
         "selector_top_k exceeds the vocabulary", REF),
    Rule("top_k speed", "exllamav3", NOTE, lambda f: f.two and f.value("selector_top_k") not in (8, 16, 32),
         "its fast path needs selector_top_k 8, 16 or 32", "exllamav3 1.6.5, modules/arch_specific"),
    Rule("scalars nested", "all but reference", MISREAD,
         lambda f: [k for k in SCALARS if f.config.get(k) is not None and k not in f.nested],
         "{} at the top level; only dflash_config is read", REF),
    Rule("embedding scale", "SGLang", MISREAD,
         lambda f: f.target is not None and _scale(f) != f.target.input_embedding_scale,
         "input_embedding_scale is ignored; the target's own scale is used, and it differs",
         "SGLang 0.5.23, get_dflash_noise_embedding_scale"),
    Rule("embedding scale, unknown", "SGLang", NOTE, lambda f: f.target is None and _scale(f) != 1.0,
         "input_embedding_scale is ignored; the target's own scale is used",
         "SGLang 0.5.23, get_dflash_noise_embedding_scale"),
    Rule("tap_shift", "exllamav3", MISREAD, lambda f: "tap_shift" in f.nested or "tap_shift" in f.config,
         "tap_shift moves the captured layers in this engine only",
         "exllamav3 1.6.5, architecture/dflash.py"),
    # Tensors
    Rule("config dtype", HF, MISREAD, _dtype_differs, "dtype: {}", "config and file must say the same"),
    Rule("codebook name", "SGLang", MISREAD, _dotted_codebooks,
         "{}: the codebooks stay zero without a message; drop .weight", "SGLang 0.5.23, models/dflash.py"),
    Rule("codebook name, strict", "MLX, vLLM, ollama, Splash", REFUSE, _dotted_codebooks,
         "{}: codebooks are bare parameters; drop .weight",
         "vLLM 0.33.0, models/qwen3_dflash2.py ValueError"),
    Rule("codebook missing", HF, MISREAD, lambda f: _missing(f, "codebook"),
         "{} missing: loaded uninitialised (SGLang: zero) without an error; MLX, llama.cpp and ollama refuse",
         "vLLM 0.33.0, SGLang 0.5.23, dflash 0.1.0 loaders"),
    Rule("conv missing", HF, MISREAD, lambda f: _missing(f, "base_kernel"),
         "{} missing: loaded uninitialised (SGLang: identity) without an error; MLX, llama.cpp and ollama refuse",
         "vLLM 0.33.0, SGLang 0.5.23, dflash 0.1.0 loaders"),
    Rule("tensors missing", ALL, MISREAD, lambda f: _missing(f, "^(?!.*(codebook|base_kernel))"),
         "{} missing: lenient loaders leave it uninitialised, strict ones refuse",
         "vLLM 0.33.0, SGLang 0.5.23, dflash 0.1.0 loaders"),
    Rule("model prefix", "MLX, vLLM", REFUSE, lambda f: [n for n in f.prefixed() if n.startswith("model.")],
         "{}: drafters have bare names; strip model.", "MLX KeyError, vLLM 0.33.0 ValueError"),
    Rule("wrapper prefix", ALL, REFUSE, lambda f: [n for n in f.prefixed() if not n.startswith("model.")],
         "{}: strip the wrapper's prefix", REF),
    Rule("own head", "vLLM, llama.cpp", MISREAD,
         lambda f: [n for n in f.headers if re.search("embed_tokens|lm_head", n)],
         "{}: used instead of the target's", "vLLM 0.33.0, models/qwen3_dflash.py"),
    Rule("strict extras", "MLX", REFUSE, lambda f: [n for n in f.headers if re.search(_SPECIAL_EXTRA, n)],
         "{} must not be in the file", "dflash 0.1.0, model_mlx.py (strict loading)"),
    Rule("unexpected", "MLX, llama.cpp", REFUSE,
         lambda f: [n for n in f.extra() if not re.search(_SPECIAL_EXTRA, n)],
         "{} unexpected for this config", "dflash 0.1.0, model_mlx.py (strict loading)"),
    Rule("shapes", ALL, REFUSE, _bad_shapes, "{}", REF),
    Rule("not finite", ALL, MISREAD,
         lambda f: [f"{n} ({o})" for n, o in f.odd.items() if o in ("NaN", "infinite")],
         "values that are not finite: {}", "every proposal that touches them is lost"),
    Rule("all zero", ALL, MISREAD, lambda f: _zero(f, legal=False), "all zero: {}",
         "a trained tensor is not zero"),
    Rule("fresh parts", ALL, NOTE,
         lambda f: _zero(f, legal=True) + [n for n, odd in f.odd.items() if odd == "identity"],
         "still as initialised, without effect: {}", "legal at the start of training"),
    # Beside the weights
    Rule("training record", ALL, MISREAD, _record_differs, "config.json differs from the training record: {}",
         RECORD),
    Rule("training record, weights", ALL, MISREAD, _other_tensors,
         "the tensors are not those that were exported (hash {}): whatever the card says was measured on others", RECORD),
    Rule("other weights", "vLLM, SGLang, MLX", MISREAD, lambda f: f.other,
         "{}: loaded too, or instead of model.safetensors; take it out",
         "vLLM 0.33.0 and SGLang 0.5.23, filter_duplicate_safetensors_files; dflash 0.1.0, model_mlx.py"),
    Rule("tokenizer", "llama.cpp, exllamav3", MISREAD, _tokens_outside,
         "the tokenizer here has the id {}: it is another target's", "llama.cpp conversion without --target-model-dir"),
    Rule("stray weights", ALL, NOTE, _stray_weights, "{}: not part of a drafter folder",
         "one folder: config and safetensors"),
    Rule("tokenizer files", "llama.cpp", NOTE, lambda f: bool(f.files) and not f.files & set(TOKENIZER_FILES),
         "no tokenizer files; conversion needs --target-model-dir", "llama.cpp conversion/qwen.py"),
    Rule("auto_map", HF, NOTE, lambda f: "auto_map" in f.config,
         "auto_map is not needed and names remote code", "published DFlash 2 drafters have none"),
    Rule("quantised", "vLLM, TensorRT-LLM, Splash", MISREAD, _quantised,
         "{}: q, k and v are sliced raw, without their scales (it stops, or drafts nonsense); Splash needs BF16. "
         "MLX, ollama and Splash quantise the BF16 file themselves, llama.cpp has GGUF",
         "vLLM issues 51581 and 53116 (open); TensorRT-LLM modeling_dflash.py at 7c7504c; Splash runtime/model/DraftCheckpoint.cpp"),
    # What only some engine or fork computes
    Rule("foreign parts", ALL, MISREAD, _foreign,
         "{}: the engines here do not compute it (TensorRT-LLM alone reads use_swa, ollama alone rope_interleaved)",
         "TensorRT-LLM modeling_dflash.py; ollama x/models/dflash"),
    Rule("mask embedding", ALL, MISREAD, lambda f: [n for n in f.files if n.startswith("mask_embedding")],
         "{}: an embedding of the mask beside the weights; the engines here take row mask_token_id of the target's",
         "vLLM pull request 46104"),
    Rule("reduced vocabulary", ALL, MISREAD, _reduced,
         "{}: DFlash 2 drafts over the target's whole vocabulary; a map is not read and ids are taken as they are",
         "the selector's codebooks have one row per token of the target"),
    Rule("unknown keys", ALL, NOTE, lambda f: sorted(set(f.nested) - KNOWN), "dflash_config has {}, which no engine here reads",
         "sources and documents named in engines.py"),
    # Engine limits that no folder can mend
    Rule("greedy draft", "llama.cpp, exllamav3", NOTE, lambda f: f.two, "drafts greedily at any temperature",
         "llama.cpp common/speculative.cpp"),
    Rule("window, TensorRT-LLM", "TensorRT-LLM", NOTE, lambda f: f.serving().windowed,
         "its v1 module made windowed layers causal whatever is_causal says; pull request 17935 changed the mask, and the release that "
         "has DFlash 2 was not read: measure the acceptance", "TensorRT-LLM modeling_dflash.py at 7c7504c; pull request 17935"),
    Rule("engine not read", "TensorRT-LLM", NOTE, lambda f: f.two,
         "its DFlash 2 code was not available; what is said about it comes from documents and from its v1 module",
         "TensorRT-LLM 1.4.0rc1 documents"),
)  # fmt: skip


def _malformed(c: dict[str, Any]) -> list[str]:
    """Values of a type that no engine reads; the rules above rely on there being none."""

    nested = c.get("dflash_config", {})
    if not isinstance(nested, dict):
        return [f"dflash_config is a {type(nested).__name__}"]
    ropes = [k for k in ("rope_parameters", "rope_scaling") if c.get(k) is not None]
    bad = [k for k in ropes if not isinstance(c[k], dict)]
    integers, rope = (*V2_KEYS, "block_size", "mask_token_id"), ("rope_theta", "partial_rotary_factor")
    kinds: list[tuple[str, dict[str, Any], tuple[str, ...], Any]] = [
        ("", c, (*SIZES, *integers, "head_dim", "num_target_layers", "max_position_embeddings"), int),
        ("", c, ("sliding_window",), int | None),
        ("", c, ("use_sliding_window",), bool | None),
        ("", c, ("layer_types",), list[str] | None),
        ("", c, ("target_layer_ids",), list[int] | None),
        ("", c, ("rms_norm_eps",), float),
        ("", c, (*SCALARS, *rope), float | None),
        ("dflash_config.", nested, integers, int),
        ("dflash_config.", nested, ("target_layer_ids",), list[int]),
        ("dflash_config.", nested, SCALARS, float | None),
        *((f"{k}.", c[k], rope, float | None) for k in ropes if k not in bad),
    ]
    return bad + [
        f"{where}{k}" for where, place, keys, kind in kinds for k in keys if k in place and not fits(place[k], kind)
    ]


# ----------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Finding:
    """One rule that applies, with its details filled in."""

    rule: str
    engines: str
    severity: str
    message: str
    source: str


@dataclass(kw_only=True)
class Report:
    """What was found. `faults` are the refusals and misreadings; notes are not faults."""

    findings: list[Finding]
    views: dict[str, list[str]]

    settings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def faults(self) -> list[Finding]:
        return [f for f in self.findings if f.severity != NOTE]

    def text(self) -> str:
        """The report for a terminal."""
        lines = []
        for name, view in self.views.items():
            lines += [name, *(f"  {line}" for line in view), ""]
        for title, severity in [("Refused", REFUSE), ("Silently misread", MISREAD), ("Notes", NOTE)]:
            found = [f for f in self.findings if f.severity == severity]
            if found:
                lines += [title, *(f"  {f.rule} - {f.engines}: {f.message}  [{f.source}]" for f in found), ""]
        if self.settings:
            lines.append("Settings for this drafter")
            lines += [f"  {name}: {text}" for name, texts in self.settings.items() for text in texts] + [""]
        faults = len(self.faults)
        lines.append(f"{faults} fault{'' if faults == 1 else 's'}." if faults else "No faults.")
        return "\n".join(lines)


def check_facts(facts: Facts, launch: str | None = None) -> Report:
    """Apply every rule to what was read, and the table of flags to a launch line."""
    findings = []
    for rule in RULES:
        found = rule.found(facts)
        if not found:
            continue
        detail = "" if found is True else found
        if not isinstance(detail, str):
            items = [str(d) for d in detail] if isinstance(detail, (list, tuple)) else [str(detail)]
            detail = ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
        findings.append(
            Finding(rule.name, rule.engines, rule.severity, rule.message.replace("{}", detail), rule.source)
        )
    if launch is not None:
        findings += [
            Finding(f"launch: {flag.name}", flag.engine, MISREAD if flag.fatal else NOTE, message, flag.source)
            for flag, message in contradictions(launch, facts.serving())
        ]
        if not any(re.search(flag.pattern, launch, re.MULTILINE) for flag in FLAGS):
            findings.append(
                Finding(
                    "launch: nothing known",
                    ALL,
                    NOTE,
                    "no flag of it is in the table, so nothing was compared",
                    "engines.py",
                )
            )
    views = {f"{e.name} {e.version} ({e.how}), from {e.floor}": engine_view(e, facts) for e in ENGINES}
    advice = {
        e.name: [f"{f'on {s.gpu}: ' if s.gpu else ''}{s.text}  [{s.source}]" for s in settings(e, facts.serving())]
        for e in ENGINES
    }
    return Report(findings=findings, views=views, settings=advice)


def check(folder: str | Path, target: TargetInfo | None = None, launch: str | None = None) -> Report:
    """Read a drafter folder and say what each engine makes of it. Raises ValueError if it has no readable config.json.

    launch: a launch line, or the text of an engine's configuration, to hold against the drafter.
    """
    folder = Path(folder)
    malformed = _malformed(read_config(folder))
    if malformed:
        return Report(findings=[Finding("types", ALL, REFUSE, f"wrong type: {', '.join(malformed)}", REF)], views={})
    return check_facts(read_facts(folder, target), launch)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 without faults, 1 with faults, 2 if the folder or the target cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_train.check", description="What each engine makes of a drafter folder."
    )
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--target", help="hub id or folder of the target, or embedded; adds the checks that need it")
    parser.add_argument("--revision", help="hub revision of the target")
    parser.add_argument(
        "--launch",
        metavar="LINE_OR_FILE",
        help="a launch line, or a file with one, a TensorRT-LLM YAML or a Modelfile: flags that contradict the drafter are faults",
    )
    repair.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        repair.run(args)
        target = None
        if args.target:
            from dflash_train.target.info import read_target_info

            target = read_target_info(resolve(args.target, "target"), args.revision)
        launch = args.launch
        if launch is not None and "\n" not in launch and len(launch) < 4096 and Path(launch).is_file():
            launch = Path(launch).read_text(encoding="utf-8")
        elif launch is not None and not re.search(r"\s|=", launch.strip()) and not launch.startswith("-"):
            raise ValueError(f"--launch {launch}: no such file, and no launch line")
        report = check(args.folder, target, launch)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.text())
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
