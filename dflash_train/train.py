"""Train a drafter: torchrun -m dflash_train.train -c qwen3_dflash2.yaml [key=value ...]

A step is a fixed number of packed rows. For each micro-batch the frozen target is read for features, the drafter fills every
block of masked slots in one pass, and the objective scores them. All denominators are summed over micro-batches and ranks
before the first backward, so neither the loss nor the gradient depends on how the step was cut.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from dflash_train import __version__, disk, ranks, stop
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
    stop_ids,
    tell_shared_prompts,
)
from dflash_train.checkpoint import (
    BEST,
    Best,
    TrainState,
    Writer,
    check_room,
    check_same_run,
    checkpoints,
    hold,
    load_saved,
    load_weights,
    newest,
    resume_best,
    tidy,
)
from dflash_train.client import GapReport, gap_alarm, require_client
from dflash_train.clock import Clock
from dflash_train.config.load import CheckFailed, load_recipe, parse_command, require, run_command, to_yaml
from dflash_train.config.schema import ClientCheck, Recipe
from dflash_train.config.values import nearest
from dflash_train.dashboard.page import write_report
from dflash_train.data.certificate import CERTIFICATE, read_certificate, write_certificate
from dflash_train.data.stream import RowStream
from dflash_train.drafter.spec import tensor_shapes
from dflash_train.engine.base import Engine
from dflash_train.engine.build import build_engine
from dflash_train.export import check_output, export_run, find_licences, record_licences, rewrite_card
from dflash_train.faults import forget_skips, memory_explained, note_skips, one_voice, stopped_message
from dflash_train.feed import Feed
from dflash_train.flops import batch_flops, peak
from dflash_train.heldout import Values, decoded_values, first_of_each_domain, names, teacher_forced_values
from dflash_train.method import DraftStep
from dflash_train.metrics import MetricWindow
from dflash_train.optim import lr_at
from dflash_train.target.base import check_features
from dflash_train.track import Tracker
from dflash_train.types import PackedBatch, Prompt, Saved, TokenizedExample


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


def train(recipe: Recipe) -> Path:
    """Run the recipe's training and return the folder of its export. Every rank calls it.

    A request to stop (see `stop`) saves after the current step and raises SystemExit or KeyboardInterrupt; train.resume=true goes on.
    """
    with stop.listening(), contextlib.ExitStack() as held:
        run = start(recipe, held)
        with memory_explained(recipe), stop.deferred():
            if run.state.pending:
                close_step(run, run.state.step, run.state.pending)
            for step in progress(run):
                train_step(run, step)
                run.state.step = done = step + 1
                evaluations = evaluations_due(run, done)
                # Also before these, so that nothing unchecked is saved, and a resumed curve is the same.
                if evaluations or save_due(run, done) or due(done, recipe.train.log_every_steps, run):
                    log_step(run, done)
                close_step(run, done, evaluations)
                if run.out_of_patience:
                    break
            if run.writer:
                run.writer.finish()
        return finish(run)


def close_step(run: Run, done: int, evaluations: list[str]) -> None:
    """What comes behind a step: evaluations, checkpoints, and the end of the run where one was asked for. A collective."""
    stopping, better = ranks.any_rank(stop.requested()), False
    run.state.pending = evaluations
    if evaluations and not stopping:
        try:
            better = evaluate_heldout(run, done, evaluations)
            run.state.pending = []
        except stop.Interrupted:
            stopping = True
    if stopping and (stuck_at := note_skipped(run, done)) is not None:
        give_up(run, stuck_at)
    save = stopping or run.out_of_patience or save_due(run, done)
    if save or better:
        checkpoint(run, step=save, best=better)
    if stopping:
        if run.writer:
            run.writer.finish()
        say(f"stopped at step {done} of {run.total_steps}; the same command with train.resume=true goes on from there")
        stop.leave()


def train_step(run: Run, step: int) -> None:
    """One optimizer step over this rank's micro-batches."""
    batches = run.feed.batches(step)
    supervised = torch.full((), sum(b.weight for b in batches), dtype=torch.float32, device=run.device)
    total_weight = ranks.sum_over_ranks(supervised).clamp_min(1e-6)
    for i, (batch, features) in enumerate(run.feed.step(step)):
        run.counts.add(batch, batch_flops(batch, run.outline.spec, run.outline.info))
        if run.counts.micro_batches == 1:
            check_features(features, batch, run.outline.spec.target_layer_ids, run.outline.spec.hidden_size)
        with run.engine.accumulate(last=i == len(batches) - 1):
            with run.clock("draft"):
                report = run.engine.forward(batch, features, total_weight)
            with run.clock("backward"):
                run.engine.backward(report.loss)
        run.window.add(report.sums)
    with run.clock("optimizer"):
        run.window.end_step(run.engine.update(lr_at(step, run.total_steps, run.recipe.optimizer)))


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
    # torchrun --max-restarts begins a command again to have it continued.
    resume = recipe.train.resume or ranks.restarts() > 0
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
        parameters = sum(math.prod(shape) for shape in tensor_shapes(o.spec).values())
        keep, best = recipe.train.keep_checkpoints, bool(recipe.data.heldout)
        if warning := check_room(store, parameters, keep, best=best):
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
        writer = Writer(store, recipe.train.keep_checkpoints)
        writer.prune()
        held.callback(writer.close)
        if resume and (note := resume_best(store, state, recipe.train.best_metric)):
            say(note)
        forget_skips(folder, state.step)
        recipe.provenance = provenance()
        if not saved:  # what an earlier run here measured or began from is not this one's
            for name in ("evaluation.json", "client.json", "init_from.json"):
                (folder / name).unlink(missing_ok=True)
        if saved:  # the first start stays on record
            first = recorded(folder / "config.yaml")
            recipe.provenance = first | {"resumed": [*first.get("resumed", []), recipe.provenance]}
        disk.replace(folder / "config.yaml", [to_yaml(recipe).encode()])
        write_certificate(certificate, folder / CERTIFICATE)
        if o.start:
            o.start.write(folder, o.start_hash)
        record_licences(o, licences)
        disk.replace(folder / "notes.json", [json.dumps(stream.examples.kept.origin).encode()])  # for the report
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


def recorded(config: Path) -> dict[str, Any]:
    """The provenance that a run began with. That its record is gone or cannot be read is said, and does not keep the run from going on: the
    checkpoint has all that has to be the same."""
    try:
        return load_recipe(str(config)).provenance
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0] if config.exists() else "it is missing"
        say(f"WARNING: the record of how this run began is lost, {config} ({why}); it is written anew")
        return {}


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


def check_folder(folder: Path) -> None:
    """Raise ValueError if the run's folder cannot be made or written."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir = {folder}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir = {folder}: {there} cannot be written; name another folder")


def progress(run: Run) -> tqdm:
    """The remaining steps, behind a progress bar on rank 0."""
    first, shown = run.state.step, run.recipe.track.progress and ranks.is_rank0()
    bar = tqdm(
        range(first, first if run.out_of_patience else run.total_steps),
        initial=first,
        total=run.total_steps,
        desc="training",
        unit="step",
        file=sys.stderr,
        disable=not shown,
        mininterval=0.5,
    )
    run.counts.bar = bar
    return bar


def due(done: int, every: int | None, run: Run) -> bool:
    """After every so many steps, and after the last one."""
    return done == run.total_steps or (every is not None and done % every == 0)


def save_due(run: Run, done: int) -> bool:
    return due(done, run.recipe.train.checkpoint_every_steps, run)


def checkpoint(run: Run, *, step: bool, best: bool) -> None:
    """Save the step, the best drafter or both, in the background. A collective."""
    run.state.window = ranks.from_all_ranks(open_window(run)) if run.counts.micro_batches_now else []
    saved = run.engine.gather(moments=step)
    if run.writer:
        assert saved is not None and run.tracker is not None
        if run.writer.skipped:
            run.tracker.log(run.state.step, {"perf/checkpoints_skipped": run.writer.skipped})
        run.writer.save(saved, run.state, step=step, best=best)


def open_window(run: Run) -> dict[str, Any]:
    """What this rank has measured since the last log line."""
    seconds = time.perf_counter() - run.counts.since
    return {"sums": run.window.state(), "counts": run.counts.values, "seconds": seconds, "skipped": run.counts.skipped}


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


def finish(run: Run) -> Path:
    """Export the drafter, have it decoded by an independent client, and close the books. Raises CheckFailed on a train/serve gap."""
    exported, report = export_folder(run.recipe), None
    saved = run.engine.gather(moments=False)
    if run.tracker:
        weights, facts = chosen(run, saved)
        export_run(run.outline, weights, exported, **facts)
        say(f"exported to {exported}")
        report = check_client(run, exported, weights, facts)
        say(f"report: {write_report(run.folder)}")
        run.tracker.finish()  # after all this: it may wait for a network
    ranks.meet()  # a large target may decode for longer than a collective waits
    if report and report.gap:
        raise CheckFailed(report.alarm())
    return exported


def chosen(run: Run, saved: Saved) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What to export, the last drafter, which is `saved`, or with train.export_best that of checkpoints/best: weights, and for its card its step and
    what chose it."""
    best, last = run.state.best, run.state.step
    if run.out_of_patience:
        say(
            f"stopped at step {last}: {best.since} evaluations without a {best.metric} above {best.value:.4f} of step {best.step}"
        )
    if not run.recipe.train.export_best or best is None:
        if run.recipe.train.export_best:
            say(f"train.export_best: {run.recipe.train.best_metric} never had a value; the last drafter is exported")
        return saved.weights, {"step": last}
    say(f"exporting the best drafter: {best.metric} {best.value:.4f} at step {best.step} of {last}")
    by = f"{best.metric} {best.value:.4f}, the best of a run of {last} steps"
    return load_weights(run.folder / "checkpoints" / BEST), {"step": best.step, "chosen_by": by}


def check_client(run: Run, exported: Path, weights: dict[str, torch.Tensor], facts: dict[str, Any]) -> GapReport | None:
    """What `client.gap_alarm` finds in the export; written, logged, and stated on its card. Rank 0 only; the training is over by then."""
    config = run.recipe.evaluate
    if config.client is ClientCheck.off or not run.prompts:
        return None
    step = run.engine.release().together()  # all is saved; a client needs the memory
    dtype = getattr(torch, run.recipe.export.precision.value)
    step.drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    step.eval()
    report = gap_alarm(exported, step, run.prompts, config, stop_ids(run.outline, step.target))
    report.write(run.folder)
    rewrite_card(run.outline, exported, report.weights, **facts)
    run.tracker.log(run.state.step, report.metrics())
    say(report.line())
    return report


def export_folder(recipe: Recipe) -> Path:
    return Path(recipe.export.output or Path(recipe.output_dir) / "export")


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


def log_step(run: Run, done: int) -> None:
    """Metrics of the window, pooled over ranks and micro-batches, and its speed. A collective; starts a new window.

    Raises CheckFailed, with a checkpoint saved, after too many skipped steps in a row.
    """
    stuck_at = note_skipped(run, done)
    if stuck_at is not None:
        done = stuck_at  # nothing that came after it was taken
    means = run.window.report()
    loss = means.get("base_loss", math.nan)
    loss += run.recipe.objective.selector_loss_weight * means.get("selector_loss", 0.0)
    counted = torch.tensor(run.counts.values, dtype=torch.float64, device=run.device)
    tokens, blocks, covered, coverable, empty, micro_batches, flops = ranks.sum_over_ranks(counted).tolist()
    seconds, skipped = time.perf_counter() - run.counts.since, run.counts.skipped
    run.counts.restart()
    values = {"train/loss": loss, **{f"train/{k}": v for k, v in means.items()}}
    values |= {
        "train/lr": lr_at(done - 1, run.total_steps, run.recipe.optimizer),
        "train/grad_norm": float(run.engine.guard.norm),
        "train/skipped_steps": skipped,
        "train/epoch": run.stream.epoch_at(done),
        "perf/tokens_per_second": tokens / seconds,
        "perf/blocks_per_second": blocks / seconds,
        "perf/memory_gib": _memory_gib(run.device),
        **parts_of_a_step(run.clock.report()),
        "data/coverage": covered / max(coverable, 1),
        "data/skipped_microbatches": empty,
        "data/microbatches": micro_batches,
    }
    if run.module.target.dense:
        values["perf/tflops"] = flops / seconds / 1e12
        most = peak(torch.cuda.get_device_name(run.device)) if run.device.type == "cuda" else None
        if most is not None:
            values["perf/mfu"] = flops / seconds / (most * ranks.world_size())
    if run.tracker:
        # No value, rather than one that is none, where no step was taken.
        run.tracker.log(done, {name: value for name, value in values.items() if math.isfinite(value)})
        if "train/accept_len" in values:
            accept = f"accept {values['train/accept_len']:.2f} base {values['train/base_accept_len']:.2f}"
            run.counts.bar.set_postfix_str(f"loss {loss:.3f} {accept}")
    if stuck_at is not None:
        give_up(run, stuck_at)


def note_skipped(run: Run, done: int) -> int | None:
    """Note the steps that were skipped since this was last asked; the step at which there were too many in a row, if there were."""
    skips, stuck_at = run.engine.guard.report(done)
    run.state.skipped_in_a_row = run.engine.guard.in_a_row
    run.counts.skipped += len(skips)
    if run.tracker:
        note_skips(run.folder, skips, run.stream)
    return stuck_at


def give_up(run: Run, stuck_at: int) -> NoReturn:
    """Save what the last good step left and raise CheckFailed. A collective."""
    run.state.step, run.state.pending, run.state.skipped_in_a_row = stuck_at, [], 0
    run.counts.restart()
    checkpoint(run, step=True, best=False)
    if run.writer:
        run.writer.finish()
    raise CheckFailed(stopped_message(run.recipe.train.max_skipped_steps, stuck_at))


def parts_of_a_step(times: dict[str, list[float]]) -> dict[str, float]:
    """Mean milliseconds per step of each part of it, on this rank."""
    steps = max(1, len(times.get("optimizer", ())))
    return {f"perf/{name}_ms": sum(took) / steps for name, took in times.items()}


def evaluations_due(run: Run, done: int) -> list[str]:
    """Which of "heldout" (teacher-forced) and "decoded" are due after a step."""
    train = run.recipe.train
    due_now = ["heldout"] if run.heldout and due(done, train.eval_every_steps, run) else []
    decode = train.decode_every_steps is not None and due(done, train.decode_every_steps, run)
    return [*due_now, "decoded"] if decode else due_now


def evaluate_heldout(run: Run, done: int, evaluations: list[str]) -> bool:
    """Held-out acceptance, logged; whether it is the best so far. A collective; its time is no part of the speed that is logged.

    Raises stop.Interrupted where a request to stop cuts it short; nothing was logged then.
    """
    began = time.perf_counter()
    values: Values = {}
    with run.engine.whole() as step:
        if "heldout" in evaluations:
            values |= teacher_forced_values(step, run.heldout)
        if "decoded" in evaluations:
            prompts = first_of_each_domain(run.prompts, run.recipe.train.decode_prompts)
            values |= decoded_values(step, prompts, run.recipe.evaluate, stop_ids(run.outline, step.target))
    seconds = time.perf_counter() - began
    run.counts.since += seconds
    if run.tracker:
        known = {name: value for name, value in values.items() if value is not None}
        run.tracker.log(done, known | {"perf/eval_seconds": seconds})
        shown = [n for n in ("heldout/walk_tau", "heldout/base_walk_tau", "decoded/tau") if n in known]
        tqdm.write(f"step {done}: " + ", ".join(f"{n} {known[n]:.3f}" for n in shown), file=sys.stderr)
    return is_best(run, done, values)


def is_best(run: Run, done: int, values: Values) -> bool:
    """Whether train.best_metric is the highest so far; counts evaluations without one."""
    metric = run.recipe.train.best_metric
    kind = metric.partition("/")[0] + "/"
    if not any(name.startswith(kind) for name in values):
        return False  # the other kind of evaluation
    value, best = values[metric], run.state.best
    if value is None or (best is not None and done <= best.step):
        return False  # nothing was measured, or this evaluation is done again after a resume
    if best is not None and value <= best.value:
        best.since += 1
        return False
    run.state.best = Best(metric=metric, value=value, step=done)
    return True


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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


def main(argv: list[str]) -> int:
    try:
        with one_voice():
            train(parse_command(argv, prog="torchrun -m dflash_train.train", description=__doc__.split("\n\n")[0]))
    finally:
        ranks.stop()
    return 0


if __name__ == "__main__":
    run_command(main)
