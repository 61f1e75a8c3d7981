"""Train a drafter: torchrun -m dflash_train.train -c qwen3_dflash2.yaml [key=value ...]

A step is a fixed number of packed rows. For each micro-batch the frozen target is read for features, the drafter fills every
block of masked slots in one pass, and the objective scores them. All denominators are summed over micro-batches and ranks
before the first backward, so neither the loss nor the gradient depends on how the step was cut.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_train import __version__, ranks
from dflash_train.build import (
    Outline,
    build_step,
    build_stream,
    certify_rows,
    data_identity,
    describe,
    heldout_examples,
    heldout_prompts,
    outline,
    say,
    stop_ids,
)
from dflash_train.checkpoint import (
    BEST,
    Best,
    TrainState,
    checkpoints,
    identity_of,
    load_checkpoint,
    load_weights,
    resume_best,
    save_best,
    save_checkpoint,
)
from dflash_train.client import GapReport, gap_alarm, require_client
from dflash_train.clock import Clock
from dflash_train.config.load import CheckFailed, load_recipe, parse_command, require, run_command, to_yaml
from dflash_train.config.schema import ClientCheck, Recipe
from dflash_train.config.values import nearest
from dflash_train.dashboard.page import write_report
from dflash_train.data.certificate import CERTIFICATE, read_certificate, write_certificate
from dflash_train.data.stream import RowStream
from dflash_train.engine.torch import TorchEngine
from dflash_train.export import check_output, export_run, rewrite_card
from dflash_train.feed import Feed
from dflash_train.flops import batch_flops, peak
from dflash_train.heldout import Values, decoded_values, first_of_each_domain, names, teacher_forced_values
from dflash_train.method import DraftStep
from dflash_train.metrics import MetricWindow
from dflash_train.optim import build_optimizer, lr_at
from dflash_train.target.base import check_features
from dflash_train.track import Tracker
from dflash_train.types import PackedBatch, Prompt, TokenizedExample


@dataclass(kw_only=True)
class Run:
    """A training run under way."""

    recipe: Recipe
    folder: Path
    outline: Outline
    stream: RowStream
    heldout: list[TokenizedExample]
    prompts: list[Prompt]
    module: DraftStep
    engine: TorchEngine
    device: torch.device
    total_steps: int
    state: TrainState
    tracker: Tracker | None
    window: MetricWindow
    counts: Counts
    clock: Clock
    feed: Feed

    @property
    def out_of_patience(self) -> bool:
        best, patience = self.state.best, self.recipe.train.patience
        return patience is not None and best is not None and best.since >= patience


def train(recipe: Recipe) -> Path:
    """Run the recipe's training and return the folder of its export. Every rank calls it."""
    run = start(recipe)
    for step in progress(run):
        grad_norm = train_step(run, step)
        run.state.step = done = step + 1
        save = due(done, recipe.train.checkpoint_every_steps, run)
        evaluations = evaluations_due(run, done)
        # Also before these, so that nothing unchecked is saved, and a resumed curve is the same.
        if save or evaluations or due(done, recipe.train.log_every_steps, run):
            log_step(run, done, grad_norm)
        if evaluations:
            evaluate_heldout(run, done, evaluations)
        if save or run.out_of_patience:
            checkpoint(run)
        if run.out_of_patience:
            break
    return finish(run)


def train_step(run: Run, step: int) -> torch.Tensor:
    """One optimizer step over this rank's micro-batches; returns the gradient norm, on the device."""
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
        return run.engine.update(lr_at(step, run.total_steps, run.recipe.optimizer))


def start(recipe: Recipe) -> Run:
    """Everything before the first step: what a user can get wrong is found before the target's weights are read."""
    require(recipe, "output_dir", "target.path", "data.train")
    device = ranks.start(recipe.engine.timeout_minutes)
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    folder = Path(recipe.output_dir)
    check_folder(folder)
    saved = checkpoints(folder / "checkpoints")
    if (saved or (folder / "checkpoints" / BEST).exists()) and not recipe.train.resume:
        raise ValueError(
            f"output_dir = {folder}: has checkpoints of an earlier run; continue it with train.resume=true, or choose another folder"
        )
    check_output(export_folder(recipe))
    if recipe.data.certificate:
        read_certificate(Path(recipe.data.certificate))  # before the data, which may take long

    o = outline(recipe)
    stream = build_stream(o)
    # The files are hashed once, by rank 0; there is nothing in it that ranks could disagree about.
    certificate = certify_rows(o, stream) if ranks.is_rank0() else None
    heldout = heldout_examples(o) if recipe.data.heldout else []
    prompts = heldout_prompts(o) if recipe.data.heldout else []
    check_heldout(recipe, heldout, prompts, o.spec.selector_top_k)
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

    module = build_step(o, device)
    optimizer = build_optimizer(module.drafter, recipe.optimizer)
    engine = TorchEngine(module, optimizer, recipe.engine, max_grad_norm=recipe.optimizer.max_grad_norm)
    identity = identity_of(o.spec, **data_identity(o, stream), total_steps=total)
    state = TrainState(step=0, identity=identity)
    if saved:
        state = load_checkpoint(saved[-1], module.drafter, optimizer, identity)
        say(f"resumed from {saved[-1]} at step {state.step}")
    elif recipe.train.resume:
        say(f"train.resume: no checkpoint in {folder / 'checkpoints'}; starting at step 0")
    if recipe.train.resume:
        note = resume_best(folder / "checkpoints", state, recipe.train.best_metric)
        if note:
            say(note)
    ranks.barrier()  # nobody writes before all have read
    tracker = None
    if ranks.is_rank0():
        folder.mkdir(parents=True, exist_ok=True)
        recipe.provenance = provenance()
        if not saved:  # what an earlier run here measured must not end up on this one's model card
            for name in ("evaluation.json", "client.json"):
                (folder / name).unlink(missing_ok=True)
        if saved:  # the first start stays on record
            first = load_recipe(str(folder / "config.yaml")).provenance
            recipe.provenance = first | {"resumed": [*first.get("resumed", []), recipe.provenance]}
        (folder / "config.yaml").write_text(to_yaml(recipe))
        write_certificate(certificate, folder / CERTIFICATE)
        (folder / "notes.json").write_text(json.dumps(stream.examples.kept.origin))  # for the report
        tracker = Tracker(recipe, resumed_at=state.step)
    ranks.barrier()
    module.train()
    clock = Clock(device)
    return Run(
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
        window=MetricWindow(),
        counts=Counts(),
        clock=clock,
        feed=Feed(stream, module.target, device, clock, end=total, read_ahead=recipe.engine.read_ahead),
    )


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


def checkpoint(run: Run) -> None:
    if ranks.is_rank0():
        folder, keep = run.folder / "checkpoints", run.recipe.train.keep_checkpoints
        save_checkpoint(folder, run.module.drafter, run.engine.optimizer, run.state, keep)
    ranks.barrier()


def finish(run: Run) -> Path:
    """Export the drafter, have it decoded by an independent client, and close the books. Raises CheckFailed on a train/serve gap."""
    exported, report = export_folder(run.recipe), None
    if run.tracker:
        weights, facts = chosen(run)
        export_run(run.outline, weights, exported, **facts)
        say(f"exported to {exported}")
        report = check_client(run, exported, weights, facts)
        say(f"report: {write_report(run.folder)}")
        run.tracker.finish()  # after all this: it may wait for a network
    ranks.meet()  # a large target may decode for longer than a collective waits
    if report and report.gap:
        raise CheckFailed(report.alarm())
    return exported


def chosen(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What to export, the last drafter or with train.export_best that of checkpoints/best: weights, and for its card its step and
    what chose it."""
    best, last = run.state.best, run.state.step
    if run.out_of_patience:
        say(
            f"stopped at step {last}: {best.since} evaluations without a {best.metric} above {best.value:.4f} of step {best.step}"
        )
    if not run.recipe.train.export_best or best is None:
        if run.recipe.train.export_best:
            say(f"train.export_best: {run.recipe.train.best_metric} never had a value; the last drafter is exported")
        return run.module.drafter.state_dict(), {"step": last}
    say(f"exporting the best drafter: {best.metric} {best.value:.4f} at step {best.step} of {last}")
    by = f"{best.metric} {best.value:.4f}, the best of a run of {last} steps"
    return load_weights(run.folder / "checkpoints" / BEST), {"step": best.step, "chosen_by": by}


def check_client(run: Run, exported: Path, weights: dict[str, torch.Tensor], facts: dict[str, Any]) -> GapReport | None:
    """What `client.gap_alarm` finds in the export; written, logged, and stated on its card. Rank 0 only; the training is over by then."""
    config = run.recipe.evaluate
    if config.client is ClientCheck.off or not run.prompts:
        return None
    run.engine.optimizer.zero_grad(set_to_none=True)
    run.engine.optimizer.state.clear()  # it is saved; a client needs the memory
    dtype = getattr(torch, run.recipe.export.precision.value)
    run.module.drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    run.module.eval()
    report = gap_alarm(exported, run.module, run.prompts, config, stop_ids(run.outline, run.module.target))
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

    def restart(self) -> None:
        self.values = [0, 0, 0, 0, 0, 0, 0]
        self.since = time.perf_counter()

    def add(self, batch: PackedBatch, flops: int) -> None:
        one = (batch.tokens, batch.drafted, batch.covered, batch.coverable, int(batch.weight == 0), 1, flops)
        self.values = [a + b for a, b in zip(self.values, one, strict=True)]
        self.micro_batches += 1


def log_step(run: Run, done: int, grad_norm: torch.Tensor) -> None:
    """Metrics of the window, pooled over ranks and micro-batches, and its speed. A collective; starts a new window."""
    means = run.window.report()
    loss = means.get("base_loss", math.nan)
    loss += run.recipe.objective.selector_loss_weight * means.get("selector_loss", 0.0)
    counted = torch.tensor(run.counts.values, dtype=torch.float64, device=run.device)
    tokens, blocks, covered, coverable, empty, micro_batches, flops = ranks.sum_over_ranks(counted).tolist()
    seconds = time.perf_counter() - run.counts.since
    run.counts.restart()
    values = {"train/loss": loss, **{f"train/{k}": v for k, v in means.items()}}
    values |= {
        "train/lr": lr_at(done - 1, run.total_steps, run.recipe.optimizer),
        "train/grad_norm": float(grad_norm),
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
    if micro_batches > empty and not math.isfinite(loss + values["train/grad_norm"]):
        raise ValueError(
            f"step {done}: loss {loss}, gradient norm {values['train/grad_norm']}: not finite; "
            "lower optimizer.lr, or continue from the last checkpoint with train.resume=true"
        )
    if run.tracker:
        run.tracker.log(done, values)
        if "train/accept_len" in values:
            accept = f"accept {values['train/accept_len']:.2f} base {values['train/base_accept_len']:.2f}"
            run.counts.bar.set_postfix_str(f"loss {loss:.3f} {accept}")


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


def evaluate_heldout(run: Run, done: int, evaluations: list[str]) -> None:
    """Held-out acceptance: logged, compared with the best so far. A collective; its time is no part of the speed that is logged."""
    began = time.perf_counter()
    values: Values = {}
    if "heldout" in evaluations:
        values |= teacher_forced_values(run.module, run.heldout)
    if "decoded" in evaluations:
        prompts = first_of_each_domain(run.prompts, run.recipe.train.decode_prompts)
        values |= decoded_values(run.module, prompts, run.recipe.evaluate, stop_ids(run.outline, run.module.target))
    seconds = time.perf_counter() - began
    run.counts.since += seconds
    if run.tracker:
        known = {name: value for name, value in values.items() if value is not None}
        run.tracker.log(done, known | {"perf/eval_seconds": seconds})
        shown = [n for n in ("heldout/walk_tau", "heldout/base_walk_tau", "decoded/tau") if n in known]
        tqdm.write(f"step {done}: " + ", ".join(f"{n} {known[n]:.3f}" for n in shown), file=sys.stderr)
    keep_best(run, done, values)


def keep_best(run: Run, done: int, values: Values) -> None:
    """Save the drafter as checkpoints/best where train.best_metric is the highest so far; count evaluations without one."""
    metric = run.recipe.train.best_metric
    kind = metric.partition("/")[0] + "/"
    if not any(name.startswith(kind) for name in values):
        return  # the other kind of evaluation
    value, best = values[metric], run.state.best
    if value is None or (best is not None and done <= best.step):
        return  # nothing was measured, or this evaluation is done again after a resume
    if best is not None and value <= best.value:
        best.since += 1
        return
    run.state.best = Best(metric=metric, value=value, step=done)
    if ranks.is_rank0():
        save_best(run.folder / "checkpoints", run.module.drafter, run.state)


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
    recipe = parse_command(argv, prog="torchrun -m dflash_train.train", description=__doc__.split("\n\n")[0])
    try:
        train(recipe)
    finally:
        ranks.stop()
    return 0


if __name__ == "__main__":
    run_command(main)
