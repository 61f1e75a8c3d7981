"""Training state on disk: whole or not at all, verified when it is read, and refused where it belongs to another run.

checkpoints/
  step-00000500/   model.safetensors  optimizer.safetensors  state.json  complete.json
  best/            model.safetensors  state.json  complete.json
  .lock            held by the one run that writes here

complete.json holds size and checksum of the other files. A folder is written under the name `.step-00000500.partial`, flushed to the disk and
renamed; a folder that makes way is renamed to `.step-00000500.old`, one that is deleted to `.step-00000500.gone`. So a name without the dot is a whole checkpoint at
every moment, and `tidy` can tell what a killed writer was about. The checksum is XXH3 (128 bits): it finds flipped and missing bytes
several times as fast as SHA-256, and nobody forges one's own checkpoints.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_train import disk
from dflash_train.config.values import fits, parse_json
from dflash_train.drafter.spec import DrafterSpec
from dflash_train.types import Saved

FORMAT = 2
MODEL, OPTIMIZER, STATE, COMPLETE = "model.safetensors", "optimizer.safetensors", "state.json", "complete.json"
BEST = "best"
DAMAGED = "damaged-"  # such a folder is evidence; nothing reads it
_STEP = re.compile(r"step-\d+")
_SLACK = 2**20  # headers, state.json, blocks of the file system
_BYTES = 4  # of a number: everything is fp32


class Damaged(ValueError):
    """A checkpoint that does not hold what was written."""


class NotWritten(ValueError):
    """The disk did not take what has to be kept."""


@dataclass(kw_only=True)
class Best:
    """The highest value of a held-out metric so far. step: where it was measured; since: evaluations after it without a higher one."""

    metric: str
    value: float
    step: int
    since: int = 0


@dataclass(kw_only=True)
class TrainState:
    """Everything of a run but its tensors; each field as JSON gives it back.

    step: optimizer steps done. It is also the data cursor and the state of every random generator: rows, their order and anchors are functions
    of (documents, weights, seed, step), the learning rate one of (settings, step).
    identity: what may not change between save and resume (drafter spec, target, vocabulary, template, data, batch, seed).
    settings: what changes the run's numbers and may be changed knowingly (optimizer, objective, length, precision).
    best: None before the first held-out evaluation. pending: evaluations of this step that a request to stop cut short.
    window: per rank, what the metric window holds since the last log line; empty where one was just written.
    skipped_in_a_row: steps up to this one that no rank took, one after the other.
    """

    step: int
    identity: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None
    pending: list[str] = field(default_factory=list)
    window: list[dict[str, Any]] = field(default_factory=list)
    skipped_in_a_row: int = 0


def identity_of(spec: DrafterSpec, **more: Any) -> dict[str, Any]:
    """A JSON-ready record of everything that defines the run's numbers."""
    return json.loads(json.dumps({**asdict(spec), **more}))


def check_same_run(checkpoint: Path, state: TrainState, wanted: TrainState, may_change: list[str]) -> list[str]:
    """Compare a checkpoint with what the recipe asks for; returns a line for each setting that was changed knowingly (`may_change`).

    Raises ValueError naming every other field in which they differ, with both values.
    """
    unknown = sorted(set(may_change) - set(wanted.settings))
    if unknown:
        raise ValueError(
            f"train.may_change = {may_change}: {unknown[0]} is none of the settings that may change, {', '.join(wanted.settings)}"
        )
    wrong, changed = _differences(state.identity, wanted.identity), _differences(state.settings, wanted.settings)
    refused = {name: text for name, text in changed.items() if name not in may_change}
    if not wrong and not refused:
        return list(changed.values())
    remedy = "Change the recipe back, or train in another output_dir"
    if not wrong:
        remedy += f"; or set train.may_change=[{','.join([*may_change, *refused])}] to go on with the recipe's values"
    raise ValueError(
        f"{checkpoint} belongs to another run; {'; '.join([*wrong.values(), *refused.values()])}. {remedy}"
    )


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{name}: checkpoint has {saved.get(name)}, recipe has {wanted.get(name)}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    }


# --- one run to a folder ------------------------------------------------------------------------------------------


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder of checkpoints, which is made if need be. The system lets go of it when the process ends, however.

    Raises ValueError if another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another run is writing there; wait for it, stop it, or choose another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                raise
            _say(f"{folder}: this file system has no locks; take care that no second run writes there")
        yield


def tidy(folder: Path) -> None:
    """Finish or undo what a killed writer was about: a whole checkpoint that was only to be renamed gets its name. For the holder alone."""
    for left in [*sorted(folder.glob(".*.partial")), *sorted(folder.glob(".*.old"))]:  # the new one first
        final = folder / left.stem[1:]
        if not final.exists() and _is_whole(left):
            left.rename(final)
        else:
            shutil.rmtree(left)
    for gone in folder.glob(".*.gone"):
        shutil.rmtree(gone)


def _is_whole(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except Damaged:
        return False
    return True


# --- reading ------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of steps, oldest first; whether their files are what was written is another matter (`verify`)."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if _STEP.fullmatch(p.name))


def verify(checkpoint: Path, *names: str) -> None:
    """Compare files with what complete.json says of them, by default all: sizes first, which costs nothing, then checksums.

    Raises Damaged naming the file.
    """
    written = _mark(checkpoint)
    for name in names or tuple(written):
        if name not in written:
            raise Damaged(f"{checkpoint / name}: damaged ({COMPLETE} does not name it)")
        size = (checkpoint / name).stat().st_size if (checkpoint / name).exists() else None
        if size is None:
            raise Damaged(f"{checkpoint / name}: damaged (it is missing)")
        if size != written[name]["bytes"]:
            raise Damaged(f"{checkpoint / name}: damaged ({size} bytes, {written[name]['bytes']} were written)")
    for name in names or tuple(written):
        try:
            same = _checksum(checkpoint / name) == written[name]["xxh3_128"]
        except OSError as error:
            raise Damaged(f"{checkpoint / name}: damaged ({error.strerror})") from error
        if not same:
            raise Damaged(f"{checkpoint / name}: damaged (its checksum is not that of what was written)")


def _mark(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """complete.json: file name -> bytes and xxh3_128."""
    path = checkpoint / COMPLETE
    if not path.exists() and (checkpoint / "complete").exists():
        raise ValueError(
            f"{checkpoint}: written by an earlier version of dflash_train, which kept no checksums and pickled its optimizer; "
            "go on with that version, or train in another output_dir"
        )
    try:
        mark = json.loads(path.read_text())
        if mark["format"] != FORMAT:
            raise ValueError(f"{path}: format {mark['format']}, this version reads {FORMAT}; go on with that version")
        files = mark["files"]
        if not all(isinstance(f["bytes"], int) and isinstance(f["xxh3_128"], str) for f in files.values()):
            raise TypeError("its entries are not sizes and checksums")
    except FileNotFoundError:
        raise Damaged(f"{path}: damaged (it is missing)") from None
    except (
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        raise Damaged(f"{path}: damaged ({str(error).splitlines()[0]})") from error
    return files


def _checksum(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(2**20)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def read_state(checkpoint: Path) -> TrainState:
    """The verified state. Raises Damaged."""
    verify(checkpoint, STATE)
    return _readable(checkpoint / STATE, lambda path: _state_of(parse_json(path.read_text())))


def _state_of(saved: dict[str, Any]) -> TrainState:
    if new := sorted(set(saved) - {f.name for f in fields(TrainState)}):
        raise ValueError(f"it has {', '.join(new)}, which this version does not know")
    kinds = get_type_hints(TrainState)
    best = saved.pop("best", None)
    if wrong := [name for name, value in saved.items() if not fits(value, kinds[name])]:
        raise ValueError(f"its {wrong[0]} is of another type")
    return TrainState(**saved, best=None if best is None else Best(**best))


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The drafter's verified tensors, in fp32, on the host. Raises Damaged."""
    verify(checkpoint, MODEL)
    return _readable(checkpoint / MODEL, load_file)


def load_saved(checkpoint: Path) -> Saved:
    """Weights and moments of a checkpoint that `newest` has verified, so that not every rank does it again."""
    return Saved(weights=_readable(checkpoint / MODEL, load_file), moments=_readable(checkpoint / OPTIMIZER, load_file))


def _readable(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, SafetensorError) as error:
        raise Damaged(f"{path}: damaged ({str(error).splitlines()[0]})") from error


def newest(folder: Path) -> tuple[Path, TrainState] | None:
    """The newest checkpoint that is what was written, verified; None where there is no checkpoint at all.

    Damaged ones that are newer are named and set aside. Raises ValueError where every one is damaged: beginning again at step 0 is
    the user's decision.
    """
    damaged: list[tuple[Path, Damaged]] = []
    there = checkpoints(folder)
    for path in reversed(there):
        try:
            verify(path)
            state = read_state(path)
        except Damaged as error:
            damaged.append((path, error))
            continue
        for bad, error in damaged:
            _say(f"{error}; going back to {path.name}, {_set_aside(bad).name} is kept for a look")
        return path, state
    if damaged:
        raise ValueError(
            "; ".join(str(error) for _, error in damaged)
            + ": no checkpoint is left to continue from; bring one back from a copy, "
            f"or delete {folder} to begin again at step 0"
        )
    return None


def _set_aside(checkpoint: Path) -> Path:
    aside = checkpoint.with_name(DAMAGED + checkpoint.name)
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def resume_best(folder: Path, state: TrainState, metric: str) -> str | None:
    """Make `state.best` and folder/best agree; returns what has to be said about it.

    A run that was killed may have found a better drafter after its last checkpoint: that one is kept, and the evaluations up to its step
    are passed over when they are done again.
    """
    had, found, note = state.best, None, ""
    if (folder / BEST).exists():
        try:
            verify(folder / BEST)
            found = read_state(folder / BEST)
        except Damaged as error:
            note = f"{error}; {_set_aside(folder / BEST).name} is kept for a look; "
    same = found is not None and found.identity == state.identity and found.best is not None
    # Values of other held-out rows cannot be compared.
    if same and found.best.metric == metric and found.settings.get("heldout") == state.settings.get("heldout"):
        if had is None or had.step != found.best.step or had.metric != metric:
            state.best = found.best
        return None
    state.best = None
    if had is None and found is None and not note:
        return None
    return f"{note}the best {metric} is looked for from step {state.step} on"


# --- writing ------------------------------------------------------------------------------------------------------


def room_needed(parameters: int, *, best: bool) -> int:
    """Bytes that writing one checkpoint takes: weights and two moments, and with `best` the weights once more."""
    return (4 if best else 3) * _BYTES * parameters + _SLACK


def check_room(folder: Path, parameters: int, keep: int, *, best: bool) -> str | None:
    """Before training: a warning if the disk does not hold `keep` checkpoints and the one being written, with the best twice for the same
    reason. What an earlier run wrote here counts as room. Raises ValueError if it does not even hold one."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    mine = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
    free = shutil.disk_usage(there).free + mine
    one = room_needed(parameters, best=best)
    whole = (keep + 1) * room_needed(parameters, best=False) + (2 * _BYTES * parameters if best else 0)
    if free < one:
        raise ValueError(
            f"{folder}: a checkpoint takes {_gib(one)} and {there} has room for {_gib(free)}; make room, or choose another output_dir"
        )
    if free < whole:
        return (
            f"{folder}: {keep} checkpoints and the one being written take {_gib(whole)}, {there} has room for {_gib(free)}; "
            "make room, or lower train.keep_checkpoints"
        )
    return None


class Writer:
    """Writes checkpoints in a thread of its own, one at a time: `save` returns when the one before is done, and the next is begun.

    A disk that is full or fails costs the checkpoint, not the run: it is said, counted in `skipped`, and the next one is tried as if nothing
    had happened; a best that was not written is written with it. `finish` raises if the last one could not be. Everything else
    that goes wrong in the thread is raised by the next `save` or `finish`.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep, self.skipped = folder, keep, 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unwritten: str | None = None  # why the newest was not
        self._best: tuple[dict[str, torch.Tensor], TrainState] | None = None  # not on disk yet

    def save(self, saved: Saved, state: TrainState, *, step: bool, best: bool) -> None:
        """Begin to write step-N (with the moments), folder/best (without), or both. What is given may change afterwards, tensors excepted."""
        self._wait()
        state = copy.deepcopy(state)
        if best:
            self._best = saved.weights, state
        self._thread = threading.Thread(target=self._work, args=(saved if step else None, state), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is on disk. Raises NotWritten if the newest checkpoint or the best is not."""
        self._wait()
        if self._unwritten:
            raise NotWritten(self._unwritten)

    def prune(self) -> None:
        """Delete all but the newest `keep`; a run that was killed may have left one more."""
        for old in checkpoints(self.folder)[: -self.keep]:
            _delete(old)

    def close(self) -> None:
        """Let a write that is under way come to its end, whatever ends the run."""
        if self._thread:
            self._thread.join()

    def _wait(self) -> None:
        if self._thread:
            self._thread.join()
        error, self._error = self._error, None
        if error:
            raise error

    def _work(self, saved: Saved | None, state: TrainState) -> None:
        try:
            self._unwritten = None
            if self._best:  # before step-N, which says that it is there
                weights, of = self._best
                self._write(BEST, {MODEL: weights}, of)
                self._best = None
            if saved:
                self._write(f"step-{state.step:08d}", {MODEL: saved.weights, OPTIMIZER: saved.moments}, state)
                self.prune()
        except NotWritten as error:
            self.skipped += 1
            left = checkpoints(self.folder)
            last = f"the last good one is {left[-1].name}" if left else "THERE IS NO EARLIER ONE"
            self._unwritten = f"{error}; {last}. Make room, then continue with train.resume=true"
            _say(f"WARNING: CHECKPOINT SKIPPED ({self.skipped} so far): {error}; {last}. Training goes on; make room")
        except BaseException as error:
            self._error = error

    def _room_for(self, need: int) -> int:
        """Free bytes; where they are too few, older checkpoints go first, down to one that is verified."""
        while (free := shutil.disk_usage(self.folder).free) < need:
            older = checkpoints(self.folder)[:-1]
            if not older or not _is_whole(checkpoints(self.folder)[-1]):
                break
            _say(f"no room for {_gib(need)}: {older[0].name} is deleted before its time")
            _delete(older[0])
        return free

    def _write(self, name: str, tensors: dict[str, dict[str, torch.Tensor]], state: TrainState) -> None:
        """Write folder/name aside, flush it, put it in its place. Raises NotWritten for the disk's sake, ValueError for weights that are none."""
        bad = [n for n, t in tensors[MODEL].items() if not torch.isfinite(t).all()]
        if bad:
            raise ValueError(
                f"step {state.step}: {bad[0]} is not finite, so nothing is saved; lower optimizer.lr, or continue from the last checkpoint with "
                "train.resume=true"
            )
        final, partial = self.folder / name, self.folder / f".{name}.partial"
        need = sum(t.nbytes for group in tensors.values() for t in group.values()) + _SLACK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = self._room_for(need)
            if free < need:
                raise NotWritten(f"{final} takes {_gib(need)} and the disk has room for {_gib(free)}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for file, group in tensors.items():
                save_file(group, partial / file, metadata={"format": "pt"})
            (partial / STATE).write_text(json.dumps(asdict(state), indent=1))
            _seal(partial)
            _put(partial, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not disk.failed(error):
                raise
            raise NotWritten(f"{final} was not written ({str(error).splitlines()[0]})") from error


def _seal(folder: Path) -> None:
    """Have the files reach the disk, then write their sizes and checksums beside them, then that."""
    files = {}
    for path in sorted(folder.iterdir()):
        disk.flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
    (folder / COMPLETE).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    disk.flush(folder / COMPLETE)
    disk.flush(folder)


def _put(partial: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # a folder cannot be renamed over a full one; `tidy` knows what to do between the two
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    disk.flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    """Not file by file under its own name: a kill in the middle would leave something that looks damaged."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(checkpoint.rename(gone), ignore_errors=True)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _say(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)
