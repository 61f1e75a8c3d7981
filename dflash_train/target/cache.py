"""Key/value caches for decoding: appended in place and cropped for free; and grouped attention for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import sdpa_mask

ROOM = 64  # tokens that a cache grows by at least


class GrowingLayer(DynamicLayer):
    """DynamicLayer without its copy of the whole cache at every token: keys and values are views of a buffer with spare room."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        have = self.get_seq_length()
        need = have + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room: list[torch.Tensor] = []
        # A batch that was selected or repeated has left its buffer: then, and when the room is used up, make a new one.
        if not self._room or self._room[0].shape[-2] < need or self._room[0].shape[0] != key_states.shape[0]:
            size = max(need + ROOM, need * 5 // 4)
            old = (self.keys, self.values) if have else (None, None)
            self._room = []
            for states, kept in zip((key_states, value_states), old, strict=True):
                buffer = states.new_empty(*states.shape[:-2], size, states.shape[-1])
                if kept is not None:
                    buffer[..., :have, :] = kept
                self._room.append(buffer)
        for buffer, states in zip(self._room, (key_states, value_states), strict=True):
            buffer[..., have:need, :] = states
        self.keys, self.values = (buffer[..., :need, :] for buffer in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = []


def make_cache(config: Any) -> DynamicCache:
    """A cache for a model with this config that can be rolled back; other kinds of layer keep transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    for layer in cache.layers:
        # A sliding layer keeps what it would drop until it is cropped; a linear-attention state is gone anyway (see Snapshot).
        if not isinstance(layer, LinearAttentionLayer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return cache


def can_roll_back(cache: DynamicCache) -> bool:
    """Whether `crop` forgets tokens in every layer. The state of a linear-attention layer cannot be taken back: transformers
    crops its convolution only."""
    return not any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


def crop(cache: DynamicCache, length: int) -> None:
    """Forget everything after the first `length` tokens."""
    cache.crop(length - cache.get_seq_length())


class Snapshot:
    """A cache as it is now, to go back to where `crop` is not enough: linear-attention states are copied, the rest is cropped."""

    def __init__(self, cache: DynamicCache):
        self.length = cache.get_seq_length()
        self.states = [_states(layer) if isinstance(layer, LinearAttentionLayer) else None for layer in cache.layers]

    def restore(self, cache: DynamicCache) -> None:
        for layer, states in zip(cache.layers, self.states, strict=True):
            if states is not None:
                for name, kept in states.items():
                    setattr(layer, name, {key: _copy(value) for key, value in kept.items()})
            if isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, self.length - layer.get_seq_length())


def _states(layer: LinearAttentionLayer) -> dict[str, dict[int, Any]]:
    names = (
        "conv_states", "recurrent_states", "has_previous_state", "is_conv_states_initialized",
        "is_recurrent_states_initialized",
    )  # fmt: skip
    return {name: {key: _copy(value) for key, value in getattr(layer, name).items()} for name in names}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
):
    """Attention in which the query heads of a group share one read of their keys and values.

    On a CPU torch's own kernel copies keys and values once per query head, which dominates batched decoding. query (B, Hq, L, D), key and
    value (B, Hkv, T, D), the values possibly of another width; returns ((B, L, Hq, D), None) as transformers expects.
    """
    B, Hq, L, D = query.shape
    Hkv, T = key.shape[1], key.shape[2]
    scores = (query * (D**-0.5 if scaling is None else scaling)).reshape(B, Hkv, Hq // Hkv * L, D) @ key.transpose(
        -1, -2
    )
    scores = scores.view(B, Hkv, Hq // Hkv, L, T)
    if attention_mask is not None:
        mask = attention_mask[:, :, None, :, :T]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    elif L > 1:
        scores = scores.masked_fill(
            torch.ones(L, T, dtype=torch.bool, device=query.device).triu(T - L + 1), float("-inf")
        )
    weights = scores.float().softmax(-1).nan_to_num().to(value.dtype)  # a padded query sees nothing: zeros, not NaN
    out = weights.reshape(B, Hkv, Hq // Hkv * L, T) @ value
    return out.view(B, Hq, L, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)
