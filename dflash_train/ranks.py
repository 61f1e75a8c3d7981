"""The only torch.distributed calls outside engine/: who am I, sum, barrier, broadcast."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def start(timeout_minutes: float) -> torch.device:
    """Join the process group that torchrun describes (none for a single process) and return this rank's device."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=timeout_minutes), device_id=device if cuda else None
        )
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank0() -> bool:
    return rank() == 0


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """In-place sum over all ranks; the tensor itself when there is one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
