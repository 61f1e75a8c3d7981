"""What comes before a run's first step: everything that a user can get wrong is found here, before the target's weights are read."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_train import __version__, disk, ranks
from dflash_train.build import (
    Outline,
    build_step,
    build_stream,
    certify_rows,
    describe,
    heldout_examples,
    heldout_prompts,
    outline,
    run_identity,
    run_settings,
    say,
    tell_shared_prompts,
)
from dflash_train.checkpoint import (
    BEST,
    TrainState,
    Writer,
    check_room,
    check_same_run,
    checkpoints,
    hold,
    load_saved,
    newest,
    resume_best,
    tidy,
)
from dflash_train.client import require_client
from dflash_train.clock import Clock
from dflash_train.config.load import load_recipe, require, to_yaml
from dflash_train.config.schema import Recipe
from dflash_train.config.values import nearest
from dflash_train.data.certificate import CERTIFICATE, read_certificate, write_certificate
from dflash_train.data.stream import RowStream
from dflash_train.drafter.spec import num_parameters
from dflash_train.engine.base import Engine
from dflash_train.engine.build import build_engine
from dflash_train.export import check_output, find_licences, record_licences
from dflash_train.faults import forget_skips
from dflash_train.feed import Feed
from dflash_train.heldout import names
from dflash_train.method import DraftStep
from dflash_train.metrics import MetricWindow
from dflash_train.track import Tracker
from dflash_train.types import PackedBatch, Prompt, TokenizedExample


@dataclass(kw_only=True)
class Run:
    """A training run under way. tracker, writer: rank 0's."""

    recipe: Recipe
    folder: Path
    outline: Outline
    stream: RowStream
    heldout: list[TokenizedExample]
    prompts: list[Prompt]
    module: DraftStep
    engine: Engine
    device: torch.device
    total_steps: int
    state: TrainState
    tracker: Tracker | None
    writer: Writer | None
    window: MetricWindow
    counts: Counts
    clock: Clock
    feed: Feed

    @property
    def out_of_patience(self) -> bool:
        best, patience = self.state.best, self.recipe.train.patience
        return patience is not None and best is not None and best.since >= patience


class Counts:
    """What went through the loop since the last log line, known on the host."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.micro_batches = 0
        self.restart()

    @property
    def micro_batches_now(self) -> int:
        """Since the last log line."""
        return self.values[-1]

    def restart(self) -> None:
        self.values, self.skipped = [0, 0, 0, 0, 0, 0, 0], 0
        self.since = time.perf_counter()

    def add(self, batch: PackedBatch, flops: int) -> None:
        one = (batch.tokens, batch.drafted, batch.covered, batch.coverable, int(batch.weight == 0), 1, flops)
        self.values = [a + b for a, b in zip(self.values, one, strict=True)]
        self.micro_batches += 1


def start(recipe: Recipe, held: contextlib.ExitStack) -> Run:
    """Everything before the first step: what a user can get wrong is found before the target's weights are read. held: what the run keeps
    until its end, the folder of its checkpoints and the thread that writes them."""
    require(recipe, "output_dir", "target.path", "data.train")
    device = ranks.start(recipe.engine.timeout_minutes, group=recipe.engine.kind.shards)
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    folder = Path(recipe.output_dir)
    check_folder(folder)
    store = folder / "checkpoints"
    begun = store.exists()
    # torchrun --max-restarts begins a command again to have it continued, also one that was refused because another run's checkpoints lay there.
    launch = str(store.absolute())
    resume = recipe.train.resume or ranks.is_rank0() and ranks.goes_on(launch)
    saved = ranks.broadcast_object(find_checkpoint(store, resume, held) if ranks.is_rank0() else None)
    check_output(export_folder(recipe))
    if recipe.data.certificate:
        read_certificate(Path(recipe.data.certificate))  # before the data, which may take long

    o = outline(recipe)
    recipe = o.recipe  # with what it took from drafter.init_from
    stream = build_stream(o)
    # The files are hashed once, by rank 0; there is nothing in it that ranks could disagree about.
    certificate = certify_rows(o, stream) if ranks.is_rank0() else None
    licences = find_licences(o) if ranks.is_rank0() else []
    heldout = heldout_examples(o) if recipe.data.heldout else []
    prompts = heldout_prompts(o) if recipe.data.heldout else []
    check_heldout(recipe, heldout, prompts, o.spec.selector_top_k)
    tell_shared_prompts(stream.examples, prompts)
    total = recipe.train.max_steps or stream.steps_of(recipe.train.num_epochs)
    if not total:
        raise ValueError(
            f"train.num_epochs = {recipe.train.num_epochs}: the weights of data.train leave no row in it; raise them or it"
        )
    if certificate:
        say(certificate.line())
    say(describe(o))
    about = "" if stream.same_every_epoch else "about "
    say(f"steps: {about}{stream.steps_per_epoch} per epoch, {total} in all")
    if note := stream.sharing_note(ranks.world_size()):
        say(note)

    settings = run_settings(o, total, heldout, prompts, device)
    state = TrainState(step=0, identity=run_identity(o, stream), settings=settings)
    if saved:
        path, found = saved
        for line in check_same_run(path, found, state, recipe.train.may_change):
            say(f"train.may_change: {line}")
        state = replace(found, settings=settings)
    if ranks.is_rank0():
        keep, best = recipe.train.keep_checkpoints, bool(recipe.data.heldout)
        if warning := check_room(store, num_parameters(o.spec), keep, best=best):
            say(f"WARNING: {warning}")

    module = build_step(o, device)
    ranks.meet()  # what ended any rank so far ends all of them here, and not in a collective of the device, which would wait for it
    engine = build_engine(
        module,
        recipe.engine,
        recipe.optimizer,
        micro_batches=stream.micro_batches_per_rank(ranks.world_size()),
        most_in_a_row=recipe.train.max_skipped_steps,
    )
    if saved:
        engine.restore(load_saved(path))
        say(f"resumed from {path} at step {state.step}")
        engine.guard.resume(state.skipped_in_a_row)
    elif resume:
        say(f"train.resume: no checkpoint in {store}; starting at step 0")
    ranks.meet()  # nobody writes before all have read
    tracker = writer = None
    if ranks.is_rank0():
        if not begun:  # only now, so that a run that is refused leaves nothing
            held.enter_context(hold(store))
            if checkpoints(store):
                raise ValueError(f"output_dir = {folder}: another run trained there just now; choose another folder")
        ranks.begin(launch)
        writer = Writer(store, recipe.train.keep_checkpoints)
        writer.prune()
        held.callback(writer.close)
        if resume and (note := resume_best(store, state, recipe.train.best_metric)):
            say(note)
        record(o, stream, folder, resumed=saved is not None)
        forget_skips(folder, state.step)
        write_certificate(certificate, folder / CERTIFICATE)
        record_licences(o, licences)
        tracker = Tracker(recipe, resumed_at=state.step, again=state.pending)
    state.best = ranks.broadcast_object(state.best)
    module.train()
    clock = Clock(device)
    run = Run(
        recipe=recipe,
        folder=folder,
        outline=o,
        stream=stream,
        heldout=heldout,
        prompts=prompts,
        module=module,
        engine=engine,
        device=device,
        total_steps=total,
        state=state,
        tracker=tracker,
        writer=writer,
        window=MetricWindow(),
        counts=Counts(),
        clock=clock,
        feed=held.enter_context(
            Feed(stream, module.target, device, clock, end=total, read_ahead=recipe.engine.read_ahead)
        ),
    )
    reopen_window(run)
    return run


def find_checkpoint(store: Path, resume: bool, held: contextlib.ExitStack) -> tuple[Path, TrainState] | None:
    """The checkpoint to continue from, if there is one, in a folder that is this run's alone from here on. Rank 0 only."""
    if not store.exists():
        return None
    held.enter_context(hold(store))
    tidy(store)
    found = newest(store) if resume else None
    if not resume and (checkpoints(store) or (store / BEST).exists()):
        raise ValueError(
            f"output_dir = {store.parent}: has checkpoints of an earlier run; continue it with train.resume=true, or choose another folder"
        )
    return found


def check_folder(folder: Path) -> None:
    """Raise ValueError if the run's folder cannot be made or written."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir = {folder}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir = {folder}: {there} cannot be written; name another folder")


def check_heldout(recipe: Recipe, heldout: list[TokenizedExample], prompts: list[Prompt], candidates: int) -> None:
    """Raise ValueError where a knob needs held-out rows that are not there."""
    train = recipe.train
    require_client(recipe.evaluate, prompts=bool(prompts))
    if train.decode_every_steps is not None and not prompts:
        raise ValueError(
            f"train.decode_every_steps = {train.decode_every_steps}: data.heldout = {recipe.data.heldout} has no usable prompt to decode"
        )
    if (train.patience or train.export_best) and train.best_metric.startswith("heldout/") and not heldout:
        raise ValueError(
            f"train.best_metric = {train.best_metric}: data.heldout = {recipe.data.heldout} has prompts without answers; regenerate them "
            "with the target, or set train.best_metric=decoded/tau and train.decode_every_steps"
        )
    logged = names(heldout, prompts, candidates)
    if train.best_metric not in logged:
        kind = train.best_metric.partition("/")[0] + "/"
        raise ValueError(
            f"train.best_metric = {train.best_metric}: no such metric is logged{nearest(train.best_metric, logged)}; "
            f"there are {', '.join(name for name in logged if name.startswith(kind))}"
        )


def export_folder(recipe: Recipe) -> Path:
    return Path(recipe.export.output or Path(recipe.output_dir) / "export")


def reopen_window(run: Run) -> None:
    """Go on measuring where a stop came between two log lines; another number of ranks has the sums on rank 0."""
    windows, run.state.window = run.state.window, []
    if not windows:
        return
    if len(windows) == ranks.world_size():
        mine = windows[ranks.rank()]
    else:
        names = sorted(set().union(*(w["sums"] for w in windows)))
        share = windows if ranks.is_rank0() else []
        mine = {
            "sums": {n: [sum(w["sums"].get(n, (0.0, 0.0))[i] for w in share) for i in (0, 1)] for n in names},
            "counts": [sum(column) for column in zip(*(w["counts"] for w in share), strict=True)] or run.counts.values,
            "seconds": windows[0]["seconds"],
            "skipped": windows[0]["skipped"],
        }
    run.window.restore(mine["sums"], run.device)
    run.counts.values = mine["counts"]
    run.counts.skipped = mine["skipped"]
    run.counts.since = time.perf_counter() - mine["seconds"]


def record(o: Outline, stream: RowStream, folder: Path, *, resumed: bool) -> None:
    """Write what the run is: its recipe with how it began, what it began from, and notes for the report."""
    recipe = o.recipe
    recipe.provenance = provenance()
    if resumed:  # the first start stays on record
        first = recorded(folder / "config.yaml")
        recipe.provenance = first | {"resumed": [*first.get("resumed", []), recipe.provenance]}
    else:  # what an earlier run here measured or began from is not this one's
        for name in ("evaluation.json", "client.json", "init_from.json"):
            (folder / name).unlink(missing_ok=True)
    disk.replace(folder / "config.yaml", [to_yaml(recipe).encode()])
    if o.start:
        o.start.write(folder, o.start_hash)
    disk.replace(folder / "notes.json", [json.dumps(stream.examples.kept.origin).encode()])


def recorded(config: Path) -> dict[str, Any]:
    """The provenance that a run began with. That its record is gone or cannot be read is said, and does not keep the run from going on: the
    checkpoint has all that has to be the same."""
    try:
        return load_recipe(str(config)).provenance
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0] if config.exists() else "it is missing"
        say(f"WARNING: the record of how this run began is lost, {config} ({why}); it is written anew")
        return {}


def provenance() -> dict[str, Any]:
    """Versions, git state and command line, saved with the run."""
    import transformers

    def git(*args: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *args], capture_output=True, text=True, check=True, cwd=Path(__file__).parent, timeout=10
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "dflash_train": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "world_size": ranks.world_size(),
    }
