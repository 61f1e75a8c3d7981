"""Our drafter against NeMo AutoModel 0.7.0's, trained on the same rows for equally many CPU seconds.

`python scripts/compare_nemo.py [--seconds 100] [--threads 2] [--tune] [--output FILE.json] [key=value ...]`

Ours is `train` with recipes/demo.yaml, changed by the key=value arguments. NeMo's is its own DFlash2TrainerModule and target
wrapper in a plain loop at the settings of its recipe. Target, precision, drafter shape, block size, mask token, window, rows
and threads are the same. The clock counts the process's CPU time of training, the target's pass included; imports,
construction, the timing of a few first steps and evaluation are outside it. Both drafters are then judged alike: by the
teacher-forced walk over the target's own held-out answers, and by decoding with the reference client from exported folders.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import math
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

# A worker thread that spins while it waits would be billed as training. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU seconds mean nothing where a GPU does the work

import torch
from transformers.utils.logging import disable_progress_bar

from dflash_train import assets, train
from dflash_train.acceptance import Tau
from dflash_train.build import Outline, build_step, build_stream, heldout_examples, heldout_prompts, outline, stop_ids
from dflash_train.card import CardFacts
from dflash_train.client import INSTALL
from dflash_train.config.load import load_recipe, run_command
from dflash_train.config.schema import Recipe
from dflash_train.config.values import require_packages
from dflash_train.drafter.spec import DrafterSpec
from dflash_train.engine.torch import TorchEngine
from dflash_train.export import write_export
from dflash_train.folder import load_drafter_folder
from dflash_train.method import DraftStep
from dflash_train.regenerate import regenerate
from dflash_train.target.hf import load_model
from dflash_train.types import Prompt, TokenizedExample
from dflash_train.walk import teacher_forced

CPU = torch.device("cpu")
TIMED_STEPS = 8  # steps that tell how long one takes, before the schedule is laid out
# What --tune tries for NeMo: 8 and 16 rows per step are what its recipes take, 1 and 2 make more steps of a small budget.
GRID = [(lr, batch) for lr in (6e-4, 1.5e-3, 3e-3) for batch in (1, 2, 8, 16)]


@dataclass(kw_only=True)
class Run:
    """One trained drafter. rows: conversations that went through; blocks: drafted blocks; epochs: rows / training rows."""

    name: str
    folder: Path
    settings: dict[str, Any]
    steps: int
    cpu_seconds: float
    rows: int
    blocks: int
    epochs: float
    walk_tau: dict[str, dict[str, Any]] = field(default_factory=dict)
    base_walk_tau: dict[str, dict[str, Any]] = field(default_factory=dict)
    decoded_tau: dict[str, dict[str, Any]] = field(default_factory=dict)
    different_answers: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"folder": self.folder.name, "cpu_seconds": round(self.cpu_seconds, 3)}


# --- ours -------------------------------------------------------------------------------------------------------


class ClockedEngine(TorchEngine):
    """The engine that `train` uses, with a clock that starts when it is built, right before the loop."""

    latest: ClockedEngine

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        ClockedEngine.latest = self
        self.rows = self.blocks = 0
        self.updated_at: list[float] = []
        self.started = time.process_time()

    def forward(self, batch, features, total_weight):
        self.rows += sum(len(ids) for ids in batch.sample_ids)
        self.blocks += batch.drafted
        return super().forward(batch, features, total_weight)

    def update(self, lr: float) -> torch.Tensor:
        taken = super().update(lr)
        self.updated_at.append(time.process_time() - self.started)
        return taken


def train_clocked(recipe: Recipe, folder: Path, steps: int) -> tuple[Path, ClockedEngine]:
    """`train` for so many steps into a new folder: (export, its engine)."""
    recipe = copy.deepcopy(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    recipe.output_dir, recipe.export.output = str(folder), None
    recipe.train.max_steps, recipe.train.resume = steps, False
    recipe.data.heldout = []  # judged below, by the same yardstick as NeMo's
    with mock.patch("dflash_train.engine.torch.TorchEngine", ClockedEngine), contextlib.redirect_stdout(io.StringIO()):
        export = train.train(recipe)
    return export, ClockedEngine.latest


def train_ours(recipe: Recipe, folder: Path, seconds: float, num_examples: int) -> Run:
    _, timed = train_clocked(recipe, folder / "timing", TIMED_STEPS)
    shutil.rmtree(folder / "timing")
    first, *_, last = timed.updated_at  # the first step also pays for what is set up once
    steps = max(1, round(seconds * (TIMED_STEPS - 1) / (last - first)))
    export, engine = train_clocked(recipe, folder / "ours", steps)
    return Run(
        name="ours",
        folder=export,
        settings={
            "lr": recipe.optimizer.lr,
            "global_batch_size": recipe.train.global_batch_size,
            "micro_batch_size": recipe.train.micro_batch_size,
            "row_length": recipe.data.max_length,
            "num_anchors": recipe.train.num_anchors,
        },
        steps=steps,
        cpu_seconds=engine.updated_at[-1],
        rows=engine.rows,
        blocks=engine.blocks,
        epochs=round(engine.rows / num_examples, 2),
    )


# --- NeMo's -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class NemoSettings:
    """NeMo AutoModel's DFlash 2 recipes; batch: rows per step, 8 in its recipe for block size 8."""

    lr: float = 6e-4
    batch: int = 8
    num_anchors: int = 128
    beta1: float = 0.9
    beta2: float = 0.95
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 1.0
    selector_loss_weight: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        return "NeMo recipe" if self == NemoSettings() else f"NeMo lr {self.lr:g} x{self.batch}"

    def lr_at(self, step: float, total_steps: float) -> float:
        """Linear warm-up, then cosine; step need not be whole."""
        warmup = max(1, int(self.warmup_ratio * total_steps))
        if step < warmup:
            return self.lr * min(1.0, (step + 1) / warmup)
        through = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * through)))


def nemo_draft(spec: DrafterSpec) -> torch.nn.Module:
    """NeMo's draft model of the same shape, initialised by NeMo."""
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import build_qwen3_dflash_draft_config
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel
    from transformers import Qwen3Config

    shape = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_target_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
    )
    config = build_qwen3_dflash_draft_config(
        shape,
        num_draft_layers=spec.num_hidden_layers,
        num_target_layers=spec.num_target_layers,
        block_size=spec.block_size,
        dflash_config={
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            "conv_kernel_size": spec.conv_kernel_size,
            "conv_group_size": spec.conv_group_size,
            "selector_rank": spec.selector_rank,
            "selector_top_k": spec.selector_top_k,
            "output_multiplier": spec.output_multiplier,
            "final_logit_softcapping": spec.final_logit_softcapping,
            "input_embedding_scale": spec.input_embedding_scale,
        },
        attention_backend="sdpa",
    )
    return Qwen3DFlash2DraftModel(config).float()


def padded(examples: list[TokenizedExample]) -> dict[str, torch.Tensor]:
    """All rows at one length, as NeMo's data loader pads them, but no longer than these rows need."""
    length = math.ceil(max(len(e.token_ids) for e in examples) / 16) * 16
    out = {
        name: torch.zeros(len(examples), length, dtype=torch.long)
        for name in ("input_ids", "attention_mask", "loss_mask")
    }
    for i, e in enumerate(examples):
        n = len(e.token_ids)
        out["input_ids"][i, :n] = torch.from_numpy(e.token_ids).long()
        out["attention_mask"][i, :n] = 1
        out["loss_mask"][i, :n] = torch.from_numpy(e.supervised).long()
    return out


def row_order(n: int, batch: int, seed: int):
    """Row numbers of one step after another, shuffled in every epoch."""
    shuffle = random.Random(seed)
    while True:
        order = list(range(n))
        shuffle.shuffle(order)
        yield from (order[i : i + batch] for i in range(0, n, batch))


def train_nemo(
    o: Outline, examples: list[TokenizedExample], folder: Path, settings: NemoSettings, seconds: float
) -> Run:
    """Train for `seconds` of CPU time; the schedule follows the clock, so that it ends exactly with the budget."""
    from nemo_automodel.components.speculative.dflash.core import NoValidAnchorsError
    from nemo_automodel.components.speculative.dflash.dflash2_core import DFlash2TrainerModule
    from nemo_automodel.components.speculative.dflash.target import HFDFlashTargetModel

    spec, data = o.spec, padded(examples)
    target = load_model(o.recipe.target, o.target_path, CPU)
    wrapper = HFDFlashTargetModel(target, target_layer_ids=spec.target_layer_ids)
    torch.manual_seed(settings.seed)
    draft = nemo_draft(spec)
    trainer = DFlash2TrainerModule(
        draft_model=draft,
        target_lm_head=target.get_output_embeddings(),
        target_embed_tokens=target.get_input_embeddings(),
        mask_token_id=spec.mask_token_id,
        block_size=spec.block_size,
        attention_backend="sdpa",
        num_anchors=settings.num_anchors,
        loss_decay_gamma=o.gamma,
        selector_loss_weight=settings.selector_loss_weight,
        sliding_window=spec.sliding_window,
    ).train()
    parameters = [p for p in trainer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(settings.beta1, settings.beta2), weight_decay=0.0)

    def forward_backward(rows: list[int]) -> Any | None:
        batch = wrapper.generate_batch(**{k: v[rows] for k, v in data.items()})
        try:
            metrics = trainer(input_ids=batch.input_ids, hidden_states=batch.hidden_states, loss_mask=batch.loss_mask)
        except NoValidAnchorsError:  # all answers of the batch are too short; NeMo's recipe skips it too
            return None
        metrics.loss.backward()
        return metrics

    order = row_order(len(examples), settings.batch, seed=settings.seed + 1)
    for i in range(4):
        if i == 1:  # the first step also pays for what is set up once
            started = time.process_time()
        forward_backward(next(order))
        optimizer.zero_grad(set_to_none=True)
    per_step = (time.process_time() - started) / 3

    torch.manual_seed(settings.seed)
    order = row_order(len(examples), settings.batch, settings.seed)
    steps = rows = blocks = 0
    spent, started = 0.0, time.process_time()
    while not steps or spent + per_step / 2 < seconds:
        lr = settings.lr_at(spent / per_step, seconds / per_step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        chosen = next(order)
        metrics = forward_backward(chosen)
        if metrics is None:
            spent = time.process_time() - started
            continue
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps, rows, blocks = steps + 1, rows + len(chosen), blocks + int(metrics.valid_blocks)
        spent = time.process_time() - started
        per_step = spent / steps

    export = write_export(
        folder / settings.name.replace(" ", "-"),
        state=draft.state_dict(),
        spec=spec,
        target=o.info,
        dtype=getattr(torch, o.recipe.export.precision.value),
        tokenizer_dir=None,
        card=CardFacts(name=settings.name, base_model=o.info.path, license=o.recipe.export.license or "unknown"),
    )
    return Run(
        name=settings.name,
        folder=export,
        settings=asdict(settings) | {"row_length": data["input_ids"].shape[1]},
        steps=steps,
        cpu_seconds=spent,
        rows=rows,
        blocks=blocks,
        epochs=round(rows / len(examples), 2),
    )


# --- one yardstick for both -------------------------------------------------------------------------------------


def judge_walk(run: Run, step: DraftStep, examples: list[TokenizedExample]) -> None:
    _, state, _ = load_drafter_folder(run.folder)
    step.drafter.load_state_dict({name: t.float() for name, t in state.items()})
    tables = teacher_forced(step, examples)
    run.walk_tau, run.base_walk_tau = tables["walk_tau"], tables["base_walk_tau"]


def judge_decoding(
    run: Run, target: torch.nn.Module, prompts: list[Prompt], stop: set[int], max_new_tokens: int
) -> list[list[int]]:
    """The reference client's acceptance on the prompts; returns its answers."""
    from dflash import model as reference

    client = reference.DFlash2DraftModel.from_pretrained(run.folder, dtype="auto").float().eval()
    pooled: dict[str, Tau] = {}
    answers = []
    # The client's own clock waits for a CUDA device.
    with mock.patch.object(reference, "_cuda_time", time.perf_counter), torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids])
            out = reference.dflash_generate(client, target, ids, max_new_tokens, sorted(stop), return_stats=True)
            answers.append(out.output_ids[0, ids.shape[1] :].tolist())
            for domain in (prompt.domain, "all"):
                tau = pooled.setdefault(domain, Tau())
                tau.tokens += sum(out.acceptance_lengths)
                tau.rounds += len(out.acceptance_lengths)
    run.decoded_tau = {domain: tau.as_dict() for domain, tau in sorted(pooled.items())}
    return answers


def heldout_answers(recipe: Recipe, folder: Path) -> list[TokenizedExample]:
    """The target's greedy answers to the held-out prompts; generated here where the files have none."""
    found = heldout_examples(outline(recipe))
    if found:
        return found
    recipe = copy.deepcopy(recipe)
    answered = []
    for i, path in enumerate(recipe.data.heldout):
        recipe.regenerate.prompts, recipe.regenerate.limit = assets.resolve(path, "heldout"), None
        recipe.regenerate.output = str(folder / f"heldout-{i}.jsonl")
        recipe.regenerate.temperature, recipe.regenerate.mixture, recipe.regenerate.shard = 0.0, [], None
        Path(recipe.regenerate.output).unlink(missing_ok=True)  # it may be of other prompts
        regenerate(recipe)
        answered.append(recipe.regenerate.output)
    recipe.data.heldout = answered
    return heldout_examples(outline(recipe))


def table(runs: list[Run]) -> str:
    """Walk and decoded tau by domain, one pair of columns per run."""
    lines = [" " * 16 + "".join(f"{r.name:>20}" for r in runs)]
    lines.append(f"{'domain':<16}" + f"{'walk':>10}{'decoded':>10}" * len(runs))
    value = lambda t, domain: f"{t[domain]['value']:>10.2f}" if domain in t else f"{'-':>10}"
    for domain in [*(d for d in runs[0].walk_tau if d != "all"), "all"]:
        lines.append(f"{domain:<16}" + "".join(value(r.walk_tau, domain) + value(r.decoded_tau, domain) for r in runs))
    lines.append(f"{'without selector':<16}" + "".join(value(r.base_walk_tau, "all") + " " * 10 for r in runs))
    for label, text in (
        ("steps", lambda r: f"{r.steps}"),
        ("CPU seconds", lambda r: f"{r.cpu_seconds:.1f}"),
        ("blocks", lambda r: f"{r.blocks}"),
        ("conversations", lambda r: f"{r.rows}"),
        ("epochs", lambda r: f"{r.epochs:.2f}"),
    ):
        lines.append(f"{label:<16}" + "".join(f"{text(r):>20}" for r in runs))
    return "\n".join(lines)


def compare(
    recipe: Recipe, *, seconds: float, tune: bool, decoded_prompts: int, standard: NemoSettings
) -> dict[str, Any]:
    """Train, judge and print; the returned figures are those of the JSON file."""
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.regenerate.output in recipe.data.train:
        print("regenerate: the training rows (those that are there are kept)", flush=True)
        regenerate(recipe)
    o = outline(recipe)
    if not (o.spec.conv_kernel_size and o.spec.selector_rank):
        raise ValueError(
            f"drafter.conv_kernel_size = {o.spec.conv_kernel_size}, drafter.selector_rank = {o.spec.selector_rank}: "
            "NeMo's DFlash 2 always has both, so neither may be 0 here"
        )
    torch.set_num_threads(recipe.engine.threads)
    examples = build_stream(o).examples
    heldout = heldout_answers(recipe, folder)
    prompts: list[Prompt] = []
    for prompt in heldout_prompts(o):
        if sum(p.domain == prompt.domain for p in prompts) < decoded_prompts:
            prompts.append(prompt)
    judge = build_step(o, CPU)
    stop = stop_ids(o, judge.target)
    answers: list[list[int]] = []

    def finish(run: Run, decode: bool) -> Run:
        judge_walk(run, judge, heldout)
        if decode:
            given = judge_decoding(run, judge.target.model, prompts, stop, recipe.evaluate.max_new_tokens)
            answers[:] = answers or given
            run.different_answers = sum(a != b for a, b in zip(answers, given, strict=True))
        print(
            f"{run.name}: {run.steps} steps in {run.cpu_seconds:.1f} s, walk tau {run.walk_tau['all']['value']:.2f}"
            + (f", decoded {run.decoded_tau['all']['value']:.2f}" if run.decoded_tau else ""),
            flush=True,
        )
        gc.collect()
        return run

    ours = finish(train_ours(recipe, folder, seconds, len(examples)), decode=True)
    # NeMo gets what ours really took, which the timing of a few steps foresees only roughly.
    budget = ours.cpu_seconds
    nemo = finish(train_nemo(o, examples, folder, standard, budget), decode=True)
    runs, grid, best = [ours, nemo], [], None
    if tune:
        grid = [nemo]
        for lr, batch in GRID:
            if (lr, batch) != (standard.lr, standard.batch):
                settings = NemoSettings(lr=lr, batch=batch)
                grid.append(finish(train_nemo(o, examples, folder, settings, budget), decode=False))
        best = max(grid, key=lambda r: r.walk_tau["all"]["value"])
        if best is not nemo:
            finish(best, decode=True)
            runs.append(best)
    print("\n" + table(runs), flush=True)
    if tune:
        print("NeMo's best of the grid, chosen by its held-out walk: " + best.name)
    higher = all(
        getattr(ours, figure)["all"]["value"] > getattr(r, figure)["all"]["value"]
        for r in runs[1:]
        for figure in ("walk_tau", "decoded_tau")
    )
    print("ours is higher on both yardsticks" if higher else "ours is NOT higher on both yardsticks")
    return {
        "seconds": seconds,
        "threads": recipe.engine.threads,
        "train_rows": len(examples),
        "heldout_rows": len(heldout),
        "decoded_prompts": len(prompts),
        "versions": {name: version(name) for name in ("torch", "transformers", "nemo_automodel", "dflash")},
        "ours": ours.as_dict(),
        "nemo": nemo.as_dict(),
        "nemo_best": best.as_dict() if best else None,
        "nemo_grid": [r.as_dict() for r in grid],
        "ours_higher": higher,
    }


def main(argv: list[str]) -> int:
    commands = argparse.ArgumentParser(
        prog="compare_nemo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands.add_argument("--seconds", type=float, default=100.0, help="CPU seconds of training for each drafter")
    commands.add_argument("--threads", type=int, default=2, help="CPU threads")
    commands.add_argument("--tune", action="store_true", help="also try a grid of learning rates and batches for NeMo")
    standard = NemoSettings()
    commands.add_argument("--nemo-lr", type=float, default=standard.lr, help="NeMo's peak learning rate")
    commands.add_argument("--nemo-batch", type=int, default=standard.batch, help="NeMo's rows per step")
    commands.add_argument("--decoded-prompts", type=int, default=6, help="held-out prompts per domain to decode")
    commands.add_argument("--output", type=Path, help="JSON file; default: <output_dir>/compare_nemo.json")
    commands.add_argument("overrides", nargs="*", metavar="key=value", help="changes to recipes/demo.yaml")
    args = commands.parse_intermixed_args(argv)
    if min(args.seconds, args.threads, args.nemo_lr, args.nemo_batch, args.decoded_prompts) <= 0:
        raise ValueError("command line: every number must be positive")
    require_packages("the comparison", ["nemo_automodel"], "pip install 'dflash-train[nemo]'")
    require_packages("the comparison", ["dflash"], INSTALL)
    disable_progress_bar()
    recipe = load_recipe("demo", ["output_dir=outputs/compare_nemo", "track.progress=false", *args.overrides])
    recipe.engine.threads = args.threads
    result = compare(
        recipe,
        seconds=args.seconds,
        tune=args.tune,
        decoded_prompts=args.decoded_prompts,
        standard=NemoSettings(lr=args.nemo_lr, batch=args.nemo_batch),
    )
    path = args.output or Path(recipe.output_dir) / "compare_nemo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_command(main)
