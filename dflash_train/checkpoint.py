"""Training state on disk: whole or not at all, and refused where it belongs to another drafter or data order."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_train.drafter.spec import DrafterSpec

_DONE = "complete"


@dataclass(kw_only=True)
class TrainState:
    """step: optimizer steps done; it is also the data cursor, since rows and anchors are functions of (seed, step).

    identity: what must not change between save and resume (drafter spec, target, template, data, batch, seed, total steps).
    """

    step: int
    identity: dict[str, Any]


def identity_of(spec: DrafterSpec, **more: Any) -> dict[str, Any]:
    """A JSON-ready record of everything that defines the run's numbers."""
    return json.loads(json.dumps({**asdict(spec), **more}))


def save_checkpoint(
    folder: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, keep: int
) -> Path:
    """Write folder/step-N beside its place, flush it, rename it; then drop all but the newest `keep`. Rank 0 only."""
    final = folder / f"step-{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    for abandoned in folder.glob(".step-*.partial"):  # by a process that was killed
        shutil.rmtree(abandoned)
    partial.mkdir(parents=True)
    save_file(
        {k: v.detach().float().cpu().contiguous() for k, v in drafter.state_dict().items()},
        partial / "model.safetensors",
        metadata={"format": "pt"},
    )
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
    (partial / _DONE).touch()
    for path in [*partial.iterdir(), partial]:
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / _DONE).exists())


def read_state(checkpoint: Path) -> TrainState:
    return _readable(checkpoint / "state.json", lambda path: TrainState(**json.loads(path.read_text())))


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The drafter's tensors, in fp32, on the host."""
    return _readable(checkpoint / "model.safetensors", load_file)


def _readable(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"{path}: damaged ({str(error).splitlines()[0]}); delete that checkpoint's folder to go on from the one before it"
        ) from error


def load_checkpoint(
    checkpoint: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> TrainState:
    """Restore weights and optimizer. Raises ValueError naming every field in which checkpoint and recipe differ."""
    state = read_state(checkpoint)
    differ = [
        f"{k}: checkpoint has {state.identity.get(k)}, recipe has {identity.get(k)}"
        for k in sorted({*identity, *state.identity})
        if state.identity.get(k) != identity.get(k)
    ]
    if differ:
        raise ValueError(
            f"{checkpoint} belongs to another run; "
            + "; ".join(differ)
            + ". Change the recipe back, or train in another output_dir"
        )
    drafter.load_state_dict(load_weights(checkpoint))
    optimizer.load_state_dict(
        _readable(checkpoint / "optimizer.pt", lambda path: torch.load(path, map_location="cpu", weights_only=True))
    )
    return state
