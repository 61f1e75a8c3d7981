"""DrafterSpec: everything that defines a drafter, resolved; and its two-way mapping to the public config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_type_hints

from dflash_train.config.schema import DrafterConfig
from dflash_train.types import TargetInfo

SLIDING, FULL = "sliding_attention", "full_attention"
UNUSED = (
    16  # value of a field that a variant without convolution or selector does not use; config.json does not carry it
)


@dataclass(kw_only=True, frozen=True)
class DrafterSpec:
    """A drafter's identity. Two drafters with equal specs have the same tensors and compute the same function of them."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    sliding_window: int | None
    layer_types: tuple[str, ...]
    is_causal: bool
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float
    num_target_layers: int

    def window(self, layer: int) -> int | None:
        """W of a draft layer, or None where it attends to everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def differences(self, other: DrafterSpec) -> list[str]:
        """`name: mine, other's` for every field that differs."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{k}: {mine[k]} against {theirs[k]}" for k in mine if mine[k] != theirs[k]]


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Evenly from the 2nd to the 3rd-last decoder layer, one per draft layer, without duplicates (DFlash paper; NeMo, z-lab).

    A target too shallow for that many distinct layers gets fewer; one layer gives the middle.
    """
    if num_target_layers < 2:
        raise ValueError(f"the target has {num_target_layers} decoder layer: a drafter needs one before the last")
    last = max(num_target_layers - 3, 1 if num_target_layers > 2 else 0)
    first = min(1, last)
    if num_draft_layers == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    steps = num_draft_layers - 1
    return sorted({round(first + i * (last - first) / steps) for i in range(num_draft_layers)})


def check_target_layer_ids(ids: list[int], num_target_layers: int) -> None:
    """Raise ValueError unless ids are non-empty, ascending, distinct, in range and without the last layer."""
    name = f"drafter.target_layer_ids = {list(ids)}"
    if not ids:
        raise ValueError(f"{name}: must not be empty")
    if len(set(ids)) != len(ids):
        raise ValueError(f"{name}: has a duplicate layer")
    if min(ids) < 0:
        raise ValueError(f"{name}: has a negative layer; ids are 0-based decoder layers")
    if max(ids) >= num_target_layers:
        raise ValueError(
            f"{name}: layer {max(ids)} does not exist, num_layers = {num_target_layers}; ids go from 0 to {num_target_layers - 2}, since the last layer is not captured"
        )
    if list(ids) != sorted(ids):
        raise ValueError(f"{name}: must be ascending (TensorRT-LLM sorts them)")
    if max(ids) == num_target_layers - 1:
        raise ValueError(
            f"{name}: has the last layer ({num_target_layers - 1}), which engines capture differently; the highest is {num_target_layers - 2}"
        )


def resolve_spec(drafter: DrafterConfig, target: TargetInfo) -> DrafterSpec:
    """Fill every null of the recipe from the target. Raises ValueError for what the target rules out."""

    def pick(own: Any, targets: Any) -> Any:
        return targets if own is None else own

    ids = drafter.target_layer_ids
    if ids is None:
        ids = default_target_layer_ids(target.num_layers, drafter.num_hidden_layers)
    check_target_layer_ids(ids, target.num_layers)
    kinds = drafter.layer_types or [FULL if drafter.sliding_window is None else SLIDING] * drafter.num_hidden_layers
    window = drafter.sliding_window if SLIDING in kinds else None
    heads = pick(drafter.num_attention_heads, target.num_attention_heads)
    kv_heads = pick(drafter.num_key_value_heads, target.num_key_value_heads)
    if heads % kv_heads:
        raise ValueError(
            f"drafter.num_attention_heads = {heads}: must be a multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = pick(drafter.head_dim, target.head_dim)
    if head_dim % 2:
        raise ValueError(f"drafter.head_dim = {head_dim}: must be even (RoPE rotates pairs)")
    if drafter.conv_kernel_size and target.hidden_size % drafter.conv_group_size:
        raise ValueError(
            f"drafter.conv_group_size = {drafter.conv_group_size}: must divide the target's hidden size {target.hidden_size}"
        )
    if drafter.selector_rank and drafter.selector_top_k > target.vocab_size:
        raise ValueError(
            f"drafter.selector_top_k = {drafter.selector_top_k}: the vocabulary has only {target.vocab_size} tokens"
        )
    assert drafter.mask_token_id is not None, "checked against the tokenizer before"
    return DrafterSpec(
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        target_layer_ids=tuple(ids),
        num_hidden_layers=drafter.num_hidden_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=pick(drafter.intermediate_size, target.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(pick(drafter.rms_norm_eps, target.rms_norm_eps)),
        rope_theta=float(pick(drafter.rope_theta, target.rope_theta)),
        max_position_embeddings=target.max_position_embeddings,
        sliding_window=window,
        layer_types=tuple(kinds),
        is_causal=drafter.is_causal,
        conv_kernel_size=drafter.conv_kernel_size,
        conv_group_size=drafter.conv_group_size if drafter.conv_kernel_size else UNUSED,
        selector_rank=drafter.selector_rank,
        selector_top_k=drafter.selector_top_k if drafter.selector_rank else UNUSED,
        output_multiplier=float(pick(drafter.output_multiplier, target.output_multiplier)),
        final_logit_softcapping=pick(drafter.final_logit_softcapping, target.final_logit_softcapping),
        input_embedding_scale=float(pick(drafter.input_embedding_scale, target.input_embedding_scale)),
        num_target_layers=target.num_layers,
    )


def to_hf_config(spec: DrafterSpec, *, dtype: str, bos: int | None, eos: int | None, pad: int | None) -> dict[str, Any]:
    """The public config.json of a drafter: every key that an engine reads, explicit, and none that would be misread."""
    block: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
    }
    if spec.conv_kernel_size:
        block |= {"conv_kernel_size": spec.conv_kernel_size, "conv_group_size": spec.conv_group_size}
    if spec.selector_rank:
        block |= {"selector_rank": spec.selector_rank, "selector_top_k": spec.selector_top_k}
    if spec.output_multiplier != 1.0:
        block["output_multiplier"] = spec.output_multiplier
    if spec.final_logit_softcapping is not None:
        block["final_logit_softcapping"] = spec.final_logit_softcapping
    if spec.input_embedding_scale != 1.0:
        block["input_embedding_scale"] = spec.input_embedding_scale
    two = spec.conv_kernel_size > 0 and spec.selector_rank > 0
    return {
        "architectures": ["DFlash2DraftModel" if two else "DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": spec.block_size,
        "bos_token_id": bos,
        "dflash_config": dict(sorted(block.items())),
        "dtype": dtype,
        "eos_token_id": eos,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "is_causal": spec.is_causal,
        "layer_types": list(spec.layer_types),
        "max_position_embeddings": spec.max_position_embeddings,
        "max_window_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "num_target_layers": spec.num_target_layers,
        "pad_token_id": pad,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": spec.sliding_window is not None,
        "vocab_size": spec.vocab_size,
    }


def from_hf_config(config: dict[str, Any]) -> DrafterSpec:
    """The spec that a drafter's config.json states. Raises ValueError naming the missing key."""
    for key in ("dflash_config", "rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"config.json: {key} = {config[key]!r}: must be an object")
    nested = config.get("dflash_config") or {}

    def read(key: str, *places: dict[str, Any]) -> Any:
        for place in places:
            if key in place:
                return place[key]
        raise ValueError(f"config.json has no {key!r}")

    def optional(key: str, default: Any) -> Any:
        value = nested.get(key, default)
        return default if value is None else value

    sliding = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    layers = read("num_hidden_layers", config)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope and "rope_theta" not in config:
        raise ValueError("config.json has no rope_theta, neither in rope_parameters nor at the top")
    stated = dict(
        block_size=read("block_size", nested, config),
        mask_token_id=read("mask_token_id", nested),
        target_layer_ids=read("target_layer_ids", nested),
        num_hidden_layers=layers,
        hidden_size=read("hidden_size", config),
        vocab_size=read("vocab_size", config),
        intermediate_size=read("intermediate_size", config),
        num_attention_heads=read("num_attention_heads", config),
        num_key_value_heads=read("num_key_value_heads", config),
        head_dim=read("head_dim", config),
        rms_norm_eps=read("rms_norm_eps", config),
        rope_theta=read("rope_theta", rope, config),
        max_position_embeddings=read("max_position_embeddings", config),
        sliding_window=config["sliding_window"] if sliding else None,
        layer_types=read("layer_types", config),
        is_causal=bool(read("is_causal", config)),
        conv_kernel_size=optional("conv_kernel_size", 0),
        conv_group_size=optional("conv_group_size", UNUSED),
        selector_rank=optional("selector_rank", 0),
        selector_top_k=optional("selector_top_k", UNUSED),
        output_multiplier=optional("output_multiplier", 1.0),
        final_logit_softcapping=optional("final_logit_softcapping", None),
        input_embedding_scale=optional("input_embedding_scale", 1.0),
        num_target_layers=read("num_target_layers", config),
    )
    kinds = get_type_hints(DrafterSpec)
    return DrafterSpec(**{name: _as(kinds[name], value, name) for name, value in stated.items()})


def _as(kind: Any, value: Any, name: str) -> Any:
    """`value` of config.json as a field of that type. Raises ValueError naming the key."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (tuple[int, ...], tuple[str, ...]):
        if not isinstance(value, list | tuple):
            raise ValueError(f"config.json: {name} = {value!r}: must be a list")
        return tuple(_as(get_args(kind)[0], item, name) for item in value)
    if value is None and type(None) in get_args(kind):
        return None
    if float in (kind, *get_args(kind)) and number:
        return float(value)
    if int in (kind, *get_args(kind)) and number and not isinstance(value, float):
        return value
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError(f"config.json: {name} = {value!r}: must be {getattr(kind, '__name__', kind)}")


def num_parameters(spec: DrafterSpec, counts: Callable[[str], bool] = lambda name: True) -> int:
    """Of a drafter's tensors, those whose name `counts` takes."""
    return sum(math.prod(shape) for name, shape in tensor_shapes(spec).items() if counts(name))


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter, as engines expect them (contract of the published drafters)."""
    h, d, i = spec.hidden_size, spec.head_dim, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(spec.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for n in range(spec.num_hidden_layers):
        layer = f"layers.{n}."
        shapes |= {
            layer + "input_layernorm.weight": (h,),
            layer + "post_attention_layernorm.weight": (h,),
            layer + "self_attn.q_proj.weight": (spec.num_attention_heads * d, h),
            layer + "self_attn.k_proj.weight": (spec.num_key_value_heads * d, h),
            layer + "self_attn.v_proj.weight": (spec.num_key_value_heads * d, h),
            layer + "self_attn.o_proj.weight": (h, spec.num_attention_heads * d),
            layer + "self_attn.q_norm.weight": (d,),
            layer + "self_attn.k_norm.weight": (d,),
            layer + "mlp.gate_proj.weight": (i, h),
            layer + "mlp.up_proj.weight": (i, h),
            layer + "mlp.down_proj.weight": (h, i),
        }
        if spec.conv_kernel_size:
            groups = h // spec.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{conv}.base_kernel"] = (2, spec.conv_kernel_size, h)
                shapes[f"{layer}{conv}.kernel_projection.weight"] = (2 * spec.conv_kernel_size * groups, h)
    if spec.selector_rank:
        shapes |= {
            "candidate_selector.predecessor_codebook": (spec.vocab_size, spec.selector_rank),
            "candidate_selector.successor_codebook": (spec.vocab_size, spec.selector_rank),
            "candidate_selector.hidden_projection.weight": (spec.selector_rank, h),
        }
    return shapes
