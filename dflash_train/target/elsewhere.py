"""A target on another device than the drafter, in the same process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from dflash_train.target.hf import HFTarget
from dflash_train.types import PackedBatch, TargetFeatures, TargetInfo

READ = ("token_ids_BT", "position_ids_BT", "document_ids_BT", "starts_D")


def place_of_its_own(name: str | None, drafter: torch.device, ranks: int) -> torch.device:
    """Where `target.device` puts the target. Raises ValueError for a place that is not there, or that several processes would share."""
    if name is None:
        return drafter
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"target.device = {name}: {str(error).splitlines()[0]}; write cuda:1, or leave it out"
        ) from None
    if ranks > 1:
        raise ValueError(
            f"target.device = {name}: {ranks} processes would share it; leave it out, or start one process that has the GPUs to itself"
        )
    there = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= there:
        raise ValueError(f"target.device = {name}: this process sees {there} GPUs; take one of them, or leave it out")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def current(place: torch.device) -> AbstractContextManager:
    """Kernels start on the GPU that is current, wherever their tensors are."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


class Elsewhere:
    """Reads where the target is and brings the features to where the drafter is; embedding and head are copied here once.

    Nothing waits on the host. Input and features cross on the stream of this side that is current at the call and one of the other side's own, each
    behind what it was given before: with `Feed`, which reads one micro-batch ahead on a stream of its own, that is the queue between the two, of
    length one, and neither is a GPU's default stream: a copy between two GPUs on such a one waits for all that both were given, and all waits for it.
    """

    def __init__(self, target: HFTarget, device: torch.device):
        self.there, self.device = target, device
        self.info: TargetInfo = target.info
        embedding = target.model.get_input_embeddings().weight
        self._head = target.head_VH.to(device)
        self._embedding = self._head if embedding is target.head_VH else embedding.to(device)
        self._stream: torch.cuda.Stream | None = None
        if target.device.type == "cuda":
            self._stream = torch.cuda.Stream(target.device)
            self._stream.wait_stream(torch.cuda.current_stream(target.device))  # which made the weights

    @property
    def model(self) -> nn.Module:
        return self.there.model

    @property
    def dense(self) -> bool:
        return self.there.dense

    @property
    def head_VH(self) -> torch.Tensor:
        return self._head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embedding)

    def read(self, batch: PackedBatch) -> TargetFeatures:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            features = self.there.read(_copy(batch, self.there.device)).features_BTF
            return TargetFeatures(features.to(self.device, non_blocking=True))

    def come(self) -> HFTarget:
        """The target itself, moved to the drafter's device, for decoding."""
        self.there.move(self.device)
        return self.there


def _copy(batch: PackedBatch, place: torch.device) -> PackedBatch:
    """The batch with what a target reads on another device; the rest, and the batch itself, stay where they are."""
    return replace(batch, **{name: getattr(batch, name).to(place, non_blocking=True) for name in READ})
