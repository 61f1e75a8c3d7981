"""What the trainer asks of a frozen target, wherever it runs, and the checks that its answers must pass."""

from __future__ import annotations

from typing import Protocol

import torch

from dflash_train.types import PackedBatch, TargetFeatures, TargetInfo


class Target(Protocol):
    """A frozen model: features of packed rows, its token embedding and its head.

    It may be a local module, a sharded one, a server or a cache: nothing here assumes that it shares a device with the drafter.
    """

    info: TargetInfo

    def read(self, batch: PackedBatch) -> TargetFeatures:
        """Outputs of the captured decoder layers for every token of the batch."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the token embedding (not scaled), (..., H)."""
        ...

    @property
    def head_VH(self) -> torch.Tensor:
        """The head's weight (the embedding's, where tied)."""
        ...


def check_features(features: TargetFeatures, batch: PackedBatch, layer_ids: tuple[int, ...], hidden_size: int) -> None:
    """Refuse dead or misaligned captures before the first step.

    Raises ValueError that names the layer: wrong width, wrong number of rows, not finite, all zero, the same for all tokens.
    """
    x = features.features_BTF
    T = batch.token_ids_BT.shape[1]
    found, rest = divmod(x.shape[-1], hidden_size)
    if found != len(layer_ids) or rest:
        missing = f" (missing {', '.join(map(str, layer_ids[found:]))})" if found < len(layer_ids) else ""
        raise ValueError(
            f"target capture: expected {len(layer_ids)} layers, got {found}{missing}; width {x.shape[-1]} of {len(layer_ids) * hidden_size}"
        )
    if x.shape[1] != T:
        raise ValueError(f"target capture: hidden rows {x.shape[1]} ≠ tokens {T}")
    real = (batch.document_ids_BT >= 0).to(x.device)
    rows = x[real].float()
    if len(rows) < 2:
        return
    for layer, part in zip(layer_ids, rows.split(hidden_size, -1), strict=True):
        if not torch.isfinite(part).all():
            raise ValueError(f"target capture: layer {layer}: not finite")
        if not part.any():
            raise ValueError(f"target capture: layer {layer}: all zero")
        if (part == part[:1]).all():
            raise ValueError(f"target capture: layer {layer}: the same for all {len(part)} tokens")
