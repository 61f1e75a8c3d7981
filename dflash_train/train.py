"""Train a drafter: torchrun -m dflash_train.train -c qwen3_dflash2.yaml [key=value ...]

A step is a fixed number of packed rows. For each micro-batch the frozen target is read for features, the drafter fills every
block of masked slots in one pass, and the objective scores them. All denominators are summed over micro-batches and ranks
before the first backward, so neither the loss nor the gradient depends on how the step was cut.
"""

from __future__ import annotations

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
    outline,
    say,
)
from dflash_train.checkpoint import TrainState, checkpoints, identity_of, load_checkpoint, save_checkpoint
from dflash_train.config.load import load_recipe, parse_command, require, run_command, to_yaml
from dflash_train.config.schema import Recipe
from dflash_train.data.certificate import CERTIFICATE, read_certificate, write_certificate
from dflash_train.data.stream import RowStream
from dflash_train.engine.torch import TorchEngine
from dflash_train.evaluate import move, teacher_forced
from dflash_train.export import check_output, export_run
from dflash_train.method import DraftStep
from dflash_train.metrics import MetricWindow
from dflash_train.optim import build_optimizer, lr_at
from dflash_train.target.base import check_features
from dflash_train.track import Tracker
from dflash_train.types import PackedBatch, TokenizedExample


@dataclass(kw_only=True)
class Run:
    """A training run under way."""

    recipe: Recipe
    folder: Path
    outline: Outline
    stream: RowStream
    heldout: list[TokenizedExample]
    module: DraftStep
    engine: TorchEngine
    device: torch.device
    total_steps: int
    state: TrainState
    tracker: Tracker | None
    window: MetricWindow
    counts: Counts


def train(recipe: Recipe) -> Path:
    """Run the recipe's training and return the folder of its export. Every rank calls it."""
    run = start(recipe)
    for step in progress(run):
        grad_norm = train_step(run, step)
        run.state.step = done = step + 1
        save = due(done, recipe.train.checkpoint_every_steps, run)
        if save or due(
            done, recipe.train.log_every_steps, run
        ):  # so that nothing unchecked is saved, and a resumed curve is the same
            log_step(run, done, grad_norm)
        if run.heldout and due(done, recipe.train.eval_every_steps, run):
            log_heldout(run, done)
        if save:
            checkpoint(run)
    return finish(run)


def train_step(run: Run, step: int) -> torch.Tensor:
    """One optimizer step over this rank's micro-batches; returns the gradient norm, on the device."""
    batches = list(run.stream.micro_batches(step, ranks.rank(), ranks.world_size()))
    supervised = torch.tensor(sum(b.weight for b in batches), dtype=torch.float32, device=run.device)
    total_weight = ranks.sum_over_ranks(supervised).clamp_min(1e-6)
    for i, batch in enumerate(batches):
        run.counts.add(batch)
        batch = move(batch, run.device)
        features = run.module.target.read(batch)
        if run.counts.micro_batches == 1:
            check_features(features, batch, run.outline.spec.target_layer_ids, run.outline.spec.hidden_size)
        with run.engine.accumulate(last=i == len(batches) - 1):
            report = run.engine.forward(batch, features, total_weight)
            run.engine.backward(report.loss)
        run.window.add(report.sums)
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
    if saved and not recipe.train.resume:
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
    tracker = None
    if ranks.is_rank0():
        folder.mkdir(parents=True, exist_ok=True)
        recipe.provenance = provenance()
        if not saved:  # what an earlier run here measured must not end up on this one's model card
            (folder / "evaluation.json").unlink(missing_ok=True)
        if saved:  # the first start stays on record
            first = load_recipe(str(folder / "config.yaml")).provenance
            recipe.provenance = first | {"resumed": [*first.get("resumed", []), recipe.provenance]}
        (folder / "config.yaml").write_text(to_yaml(recipe))
        write_certificate(certificate, folder / CERTIFICATE)
        tracker = Tracker(recipe, resumed_at=state.step)
    ranks.barrier()
    module.train()
    return Run(
        recipe=recipe,
        folder=folder,
        outline=o,
        stream=stream,
        heldout=heldout,
        module=module,
        engine=engine,
        device=device,
        total_steps=total,
        state=state,
        tracker=tracker,
        window=MetricWindow(),
        counts=Counts(),
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
        range(first, run.total_steps),
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
    """Export the drafter and close the books."""
    exported = export_folder(run.recipe)
    if run.tracker:
        run.tracker.finish()
        export_run(run.outline, run.module.drafter.state_dict(), exported, step=run.state.step)
        say(f"exported to {exported}")
    ranks.barrier()
    return exported


def export_folder(recipe: Recipe) -> Path:
    return Path(recipe.export.output or Path(recipe.output_dir) / "export")


class Counts:
    """What went through the loop since the last log line, known on the host."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.micro_batches = 0
        self.restart()

    def restart(self) -> None:
        self.values = [0, 0, 0, 0, 0, 0]
        self.since = time.perf_counter()

    def add(self, batch: PackedBatch) -> None:
        one = (batch.tokens, batch.drafted, batch.covered, batch.coverable, int(batch.weight == 0), 1)
        self.values = [a + b for a, b in zip(self.values, one, strict=True)]
        self.micro_batches += 1


def log_step(run: Run, done: int, grad_norm: torch.Tensor) -> None:
    """Metrics of the window, pooled over ranks and micro-batches, and its speed. A collective; starts a new window."""
    means = run.window.report()
    loss = means.get("base_loss", math.nan)
    loss += run.recipe.objective.selector_loss_weight * means.get("selector_loss", 0.0)
    counted = torch.tensor(run.counts.values, dtype=torch.float64, device=run.device)
    tokens, blocks, covered, coverable, empty, micro_batches = ranks.sum_over_ranks(counted).tolist()
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
        "data/coverage": covered / max(coverable, 1),
        "data/skipped_microbatches": empty,
        "data/microbatches": micro_batches,
    }
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


def log_heldout(run: Run, done: int) -> None:
    """Teacher-forced acceptance on held-out rows. A collective."""
    tables = teacher_forced(run.module, run.heldout)
    if run.tracker:
        values = {
            f"heldout/{name}" + ("" if domain == "all" else f"/{domain}"): t["value"]
            for name, table in tables.items()
            for domain, t in table.items()
            if t["value"] is not None
        }
        run.tracker.log(done, values)
        if "heldout/walk_tau" in values:
            text = f"step {done}: held-out walk tau {values['heldout/walk_tau']:.3f}, base {values['heldout/base_walk_tau']:.3f}"
            tqdm.write(text, file=sys.stderr)


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
