"""Training state on disk: whole or not at all, and refused where it belongs to another drafter or data order."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_train.drafter.spec import DrafterSpec
from dflash_train.types import Saved

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


def save_checkpoint(folder: Path, saved: Saved, state: TrainState, keep: int) -> Path:
    """Write folder/step-N beside its place, flush it, rename it; then drop all but the newest `keep`. Rank 0 only."""
    final = _write(folder / f"step-{state.step:08d}", saved, state, moments=True)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def save_best(folder: Path, saved: Saved, state: TrainState) -> Path:
    """Write folder/best: the weights and the state, enough to evaluate and export; training is never continued from it. Rank 0 only."""
    return _write(folder / BEST, saved, state, moments=False)


def _write(final: Path, saved: Saved, state: TrainState, *, moments: bool) -> Path:
    folder, partial = final.parent, final.parent / f".{final.name}.partial"
    for abandoned in folder.glob(".*.partial"):  # by a process that was killed
        shutil.rmtree(abandoned)
    partial.mkdir(parents=True)
    save_file(saved.weights, partial / "model.safetensors", metadata={"format": "pt"})
    if moments:
        save_file(saved.moments, partial / "optimizer.safetensors")
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
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, SafetensorError) as error:
        raise ValueError(
            f"{path}: damaged ({str(error).splitlines()[0]}); delete that checkpoint's folder to go on from the one before it"
        ) from error


def load_checkpoint(checkpoint: Path, identity: dict[str, Any]) -> tuple[TrainState, Saved]:
    """What was saved. Raises ValueError naming every field in which checkpoint and recipe differ."""
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
    moments = _readable(checkpoint / "optimizer.safetensors", load_file)
    return state, Saved(weights=load_weights(checkpoint), moments=moments)
