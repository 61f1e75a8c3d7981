"""Train a drafter: torchrun -m dflash_train.train -c qwen3_dflash2.yaml [key=value ...]

A step is a fixed number of packed rows. For each micro-batch the frozen target is read for features, the drafter fills every
block of masked slots in one pass, and the objective scores them. All denominators are summed over micro-batches and ranks
before the first backward, so neither the loss nor the gradient depends on how the step was cut.
"""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_train import __version__, ranks
from dflash_train.build import build_step, build_stream, data_identity, describe, heldout_examples, outline, say
from dflash_train.checkpoint import TrainState, checkpoints, identity_of, load_checkpoint, save_checkpoint
from dflash_train.config.load import parse_command, require, run_command, to_yaml
from dflash_train.config.schema import Recipe
from dflash_train.engine.torch import TorchEngine
from dflash_train.evaluate import move, teacher_forced
from dflash_train.export import check_output, export_run
from dflash_train.metrics import MetricWindow
from dflash_train.optim import build_optimizer, lr_at
from dflash_train.target.base import check_features
from dflash_train.track import Tracker


def train(recipe: Recipe) -> Path:
    """Run the recipe's training and return the folder of its export. Every rank calls it."""
    require(recipe, "output_dir", "target.path", "data.train")
    device = ranks.start(recipe.engine.timeout_minutes)
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    folder = Path(recipe.output_dir)
    _check_folder(folder, recipe)
    exported = Path(recipe.export.output or folder / "export")
    check_output(exported)

    o = outline(recipe)
    stream = build_stream(o)
    heldout = heldout_examples(o) if recipe.data.heldout else []
    total = recipe.train.max_steps or math.ceil(recipe.train.num_epochs * stream.steps_per_epoch)
    say(describe(o))
    say(
        f"rows: {stream.rows_per_epoch} of {recipe.data.max_length} tokens per epoch, {_padding(stream):.1%} padding; {stream.steps_per_epoch} steps per epoch, {total} steps"
    )

    step_module = build_step(o, device)
    optimizer = build_optimizer(step_module.drafter, recipe.optimizer)
    engine = TorchEngine(
        step_module, optimizer, recipe.engine, dtype=step_module.dtype, max_grad_norm=recipe.optimizer.max_grad_norm
    )
    identity = identity_of(o.spec, **data_identity(o, stream), total_steps=total)
    state = TrainState(step=0, identity=identity, best={})
    saved = checkpoints(folder / "checkpoints")
    if recipe.train.resume and saved:
        state = load_checkpoint(saved[-1], step_module.drafter, optimizer, identity)
        say(f"resumed from {saved[-1]} at step {state.step}")
    if ranks.is_rank0():
        folder.mkdir(parents=True, exist_ok=True)
        recipe.provenance = provenance()
        (folder / "config.yaml").write_text(to_yaml(recipe))
    ranks.barrier()
    tracker = Tracker(recipe, resumed_at=state.step) if ranks.is_rank0() else None

    window, counts = MetricWindow(), Counts()
    step_module.train()
    bar = tqdm(
        range(state.step, total),
        initial=state.step,
        total=total,
        desc="training",
        unit="step",
        file=sys.stderr,
        disable=not (recipe.track.progress and ranks.is_rank0()),
    )
    for step in bar:
        batches = list(stream.micro_batches(step, ranks.rank(), ranks.world_size()))
        weight = ranks.sum_over_ranks(torch.tensor(sum(b.weight for b in batches), dtype=torch.float32, device=device))
        weight = weight.clamp_min(1e-6)
        for i, batch in enumerate(batches):
            counts.add(batch)
            batch = move(batch, device)
            features = step_module.target.read(batch)
            if step == state.step and i == 0:
                check_features(features, batch, o.spec.target_layer_ids, o.spec.hidden_size)
            with engine.accumulate(last=i == len(batches) - 1):
                report = engine.forward(batch, features, weight)
                engine.backward(report.loss)
            window.add(report.sums)
        lr = lr_at(step, total, recipe.optimizer)
        grad_norm = engine.update(lr)

        done = step + 1
        if done % recipe.train.log_every_steps == 0 or done == total:
            values = log_values(window, counts, recipe, device) | {
                "train/lr": lr,
                "train/grad_norm": float(grad_norm),
                "train/epoch": done / stream.steps_per_epoch,
            }
            if not math.isfinite(values["train/loss"]) or not math.isfinite(values["train/grad_norm"]):
                raise ValueError(
                    f"step {done}: loss {values['train/loss']}, gradient norm {values['train/grad_norm']}: not finite; lower optimizer.lr, or continue from the last checkpoint with train.resume=true"
                )
            if tracker:
                tracker.log(done, values)
                bar.set_postfix_str(
                    f"loss {values['train/loss']:.3f} accept {values['train/accept_len']:.2f} base {values['train/base_accept_len']:.2f}"
                )
        if heldout and (done == total or (recipe.train.eval_every_steps and done % recipe.train.eval_every_steps == 0)):
            log_heldout(done, teacher_forced(step_module, heldout), tracker)
        if done == total or (recipe.train.checkpoint_every_steps and done % recipe.train.checkpoint_every_steps == 0):
            if ranks.is_rank0():
                save_checkpoint(
                    folder / "checkpoints",
                    step_module.drafter,
                    optimizer,
                    TrainState(step=done, identity=identity, best={}),
                    recipe.train.keep_checkpoints,
                )
            ranks.barrier()
    if ranks.is_rank0():
        tracker.finish()
        export_run(o, step_module.drafter.state_dict(), exported, step=total)
        say(f"exported to {exported}")
    ranks.barrier()
    return exported


class Counts:
    """What went through the loop since the last log line, known on the host."""

    def __init__(self) -> None:
        self.values = [0, 0, 0, 0, 0, 0]
        self.since = time.perf_counter()

    def add(self, batch: Any) -> None:
        one = (batch.tokens, batch.drafted, batch.covered, batch.coverable, int(batch.weight == 0), 1)
        self.values = [a + b for a, b in zip(self.values, one, strict=True)]


def log_values(window: MetricWindow, counts: Counts, recipe: Recipe, device: torch.device) -> dict[str, float]:
    """The window's metrics pooled over ranks and micro-batches, and the speed. A collective; starts a new window."""
    means = window.report()
    loss = means.get("base_loss", math.nan) + recipe.objective.selector_loss_weight * means.get("selector_loss", 0.0)
    tokens, blocks, covered, coverable, empty, micro_batches = ranks.sum_over_ranks(
        torch.tensor(counts.values, dtype=torch.float64, device=device)
    ).tolist()
    seconds = time.perf_counter() - counts.since
    counts.__init__()
    values = {"train/loss": loss, **{f"train/{k}": v for k, v in means.items()}}
    values |= {
        "perf/tokens_per_second": tokens / seconds,
        "perf/blocks_per_second": blocks / seconds,
        "perf/memory_gib": _memory_gib(device),
    }
    values |= {
        "data/coverage": covered / max(coverable, 1),
        "data/empty_micro_batches": empty,
        "data/micro_batches": micro_batches,
    }
    return values


def log_heldout(step: int, tables: dict[str, Any], tracker: Tracker | None) -> None:
    values = {
        f"heldout/{name}" + ("" if domain == "all" else f"/{domain}"): t["value"]
        for name, table in tables.items()
        for domain, t in table.items()
    }
    if tracker:
        tracker.log(step, values)
        tqdm.write(
            f"step {step}: held-out walk tau {values['heldout/walk_tau']:.3f}, base {values['heldout/base_walk_tau']:.3f}",
            file=sys.stderr,
        )


def _check_folder(folder: Path, recipe: Recipe) -> None:
    if checkpoints(folder / "checkpoints") and not recipe.train.resume:
        raise ValueError(
            f"output_dir = {folder}: has checkpoints of an earlier run; continue it with train.resume=true, or choose another folder"
        )


def _padding(stream: Any) -> float:
    return 1 - stream.tokens_per_epoch / (stream.rows_per_epoch * stream.config.row_length)


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
