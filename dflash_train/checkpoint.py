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

from dflash_train.config.values import fits
from dflash_train.drafter.spec import DrafterSpec

_DONE = "complete"
BEST = "best"


@dataclass(kw_only=True)
class Best:
    """The highest value of a held-out metric so far. step: where it was measured; since: evaluations after it without a higher one."""

    metric: str
    value: float
    step: int
    since: int = 0


@dataclass(kw_only=True)
class TrainState:
    """step: optimizer steps done; it is also the data cursor, since rows and anchors are functions of (seed, step).

    identity: what must not change between save and resume (drafter spec, target, template, data, batch, seed, total steps).
    best: None before the first held-out evaluation.
    """

    step: int
    identity: dict[str, Any]
    best: Best | None = None


def identity_of(spec: DrafterSpec, **more: Any) -> dict[str, Any]:
    """A JSON-ready record of everything that defines the run's numbers."""
    return json.loads(json.dumps({**asdict(spec), **more}))


def save_checkpoint(
    folder: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, keep: int
) -> Path:
    """Write folder/step-N beside its place, flush it, rename it; then drop all but the newest `keep`. Rank 0 only."""
    final = _write(folder / f"step-{state.step:08d}", drafter, optimizer, state)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def save_best(folder: Path, drafter: torch.nn.Module, state: TrainState) -> Path:
    """Write folder/best: the weights and the state, enough to evaluate and export; training is never continued from it. Rank 0 only."""
    return _write(folder / BEST, drafter, None, state)


def _write(final: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: TrainState) -> Path:
    folder, partial = final.parent, final.parent / f".{final.name}.partial"
    for abandoned in folder.glob(".*.partial"):  # by a process that was killed
        shutil.rmtree(abandoned)
    partial.mkdir(parents=True)
    save_file(
        {k: v.detach().float().cpu().contiguous() for k, v in drafter.state_dict().items()},
        partial / "model.safetensors",
        metadata={"format": "pt"},
    )
    if optimizer is not None:
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
    (partial / _DONE).touch()
    for path in [*partial.iterdir(), partial]:
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(folder)
    return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / _DONE).exists())


def read_state(checkpoint: Path) -> TrainState:
    return _readable(checkpoint / "state.json", lambda path: _state_of(json.loads(path.read_text())))


def _state_of(saved: dict[str, Any]) -> TrainState:
    best = saved.pop("best", None)  # checkpoints of earlier versions have none
    if not fits(saved.get("step"), int) or not fits(saved.get("identity"), dict[str, Any]):
        raise ValueError("step is no whole number, or identity no object")
    return TrainState(**saved, best=None if best is None else Best(**best))


def resume_best(folder: Path, state: TrainState, metric: str) -> str | None:
    """Make `state.best` and folder/best agree; returns what has to be said about it.

    A run that was killed may have found a better drafter after its last checkpoint: that one is kept, and the evaluations up to its step
    are passed over when they are done again.
    """
    had = state.best
    found = read_state(folder / BEST) if (folder / BEST).exists() else None
    known = found is not None and found.identity == state.identity and found.best is not None
    if known and found.best.metric == metric:
        if had is None or had.step != found.best.step or had.metric != metric:
            state.best = found.best
        return None
    state.best = None
    return None if had is None and found is None else f"the best {metric} is looked for from step {state.step} on"


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
