"""Train a drafter: torchrun -m dflash_train.train -c qwen3_dflash2.yaml [key=value ...]

A step is a fixed number of packed rows. For each micro-batch the frozen target is read for features, the drafter fills every
block of masked slots in one pass, and the objective scores them. All denominators are summed over micro-batches and ranks
before the first backward, so neither the loss nor the gradient depends on how the step was cut.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from dflash_train import ranks, stop
from dflash_train.build import say, stop_ids
from dflash_train.checkpoint import BEST, Best, load_weights
from dflash_train.client import GapReport, gap_alarm
from dflash_train.config.load import CheckFailed, parse_command, run_command
from dflash_train.config.schema import ClientCheck, Recipe
from dflash_train.dashboard.page import write_report
from dflash_train.export import export_run, rewrite_card
from dflash_train.faults import memory_explained, note_skips, one_voice, stopped_message
from dflash_train.flops import batch_flops, peak
from dflash_train.heldout import Values, decoded_values, first_of_each_domain, teacher_forced_values
from dflash_train.optim import lr_at
from dflash_train.start import Run, export_folder, start
from dflash_train.target.base import check_features
from dflash_train.types import Saved


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


def main(argv: list[str]) -> int:
    try:
        with one_voice():
            train(parse_command(argv, prog="torchrun -m dflash_train.train", description=__doc__.split("\n\n")[0]))
    finally:
        ranks.stop()
    return 0


if __name__ == "__main__":
    with ranks.leaving():
        run_command(main)
