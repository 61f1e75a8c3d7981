"""Every metric: its name, formula and unit in one table. A metric is a sum and a count, added up over slots, blocks, micro-batches
and ranks, and divided once."""

from __future__ import annotations

import torch

from dflash_train.ranks import sum_over_ranks

TABLE = {
    "base_loss": "decay-weighted cross-entropy of the drafter's own logits / supervised decay weight (nats)",
    "selector_loss": "decay-weighted cross-entropy over the candidates / the selector's denominator (nats)",
    "accuracy": "correct slots of the selector's choice after the true predecessor / supervised slots",
    "base_accuracy": "correct slots of the drafter's own top-1 / supervised slots",
    "accept_len": "(leading correct slots of the selector's path + 1 bonus token) / blocks, at uniformly drawn anchors",
    "base_accept_len": "the same for the drafter's own top-1",
    "candidate_recall": "slots whose token is among the candidates / supervised slots",
}

# What is logged besides, by its full name.
LOGGED = {
    "train/loss": "base_loss + objective.selector_loss_weight x selector_loss (nats)",
    "train/lr": "learning rate of the window's last step",
    "train/grad_norm": "gradient norm of the last step that was taken, before clipping",
    "train/skipped_steps": "steps of the window that no rank took, since a loss or the gradient was not finite",
    "train/epoch": "passes over the training rows so far",
    "heldout/walk_tau": "tokens / rounds along the rounds that decoding would take on the held-out text, bonus token included",
    "heldout/base_walk_tau": "the same for the drafter's own top-1",
    "heldout/accept_len": "(leading correct slots of the selector's path + 1 bonus token) / blocks, at every held-out anchor",
    "heldout/base_accept_len": "the same for the drafter's own top-1",
    "heldout/selector_lift": "walk_tau - base_walk_tau: tokens per round that the selector adds",
    "heldout/recall@k": "supervised slots whose token is among the k best of the drafter's own logits / supervised slots",
    "heldout/oracle@k": "accept_len of a perfect choice among those k",
    "decoded/tau": "tokens after the first answer token / target passes, of real decoding, bonus token included",
    "client/tau": "the same, decoded from the export by z-lab's client at the end of the run",
    "client/expected_tau": "what the trained drafter gains from the same anchors",
    "client/parted_rounds": "rounds that gained something else than that",
    "client/gap": "1 if that is a train/serve gap",
    "perf/eval_seconds": "time that evaluations took, which is no part of the speeds (s)",
    "perf/tokens_per_second": "training tokens, without padding, per second of the window, over all ranks",
    "perf/blocks_per_second": "blocks drafted per second of the window, over all ranks",
    "perf/target_ms": "the target's forward, per step, on rank 0; with engine.read_ahead it runs beside the other parts (ms)",
    "perf/draft_ms": "the drafter's forward and its losses, per step, on rank 0 (ms)",
    "perf/backward_ms": "the backward pass, per step, on rank 0 (ms)",
    "perf/optimizer_ms": "clipping and AdamW, per step, on rank 0 (ms)",
    "perf/tflops": "matrix products and attention that the data needs, without padding, per second of the window, over all ranks (10^12/s)",
    "perf/mfu": "the same as a share of what the GPUs' data sheets promise in 16 bits",
    "perf/memory_gib": "most memory that rank 0 had allocated so far: of the GPU, or of the process on a CPU (GiB)",
    "perf/checkpoints_skipped": "checkpoints so far that a full or failing disk did not take",
    "data/coverage": "supervised tokens that a block predicted / those that some block could have",
    "data/microbatches": "micro-batches of the window, over all ranks",
    "data/skipped_microbatches": "those of them without a supervised token",
}


def meaning(name: str) -> str | None:
    """What a logged metric is; None for one that nobody has described. Domains and slots share the text of their metric."""
    if name in LOGGED:
        return LOGGED[name]
    group, _, rest = name.partition("/")
    if group == "train":
        return TABLE.get(rest.split("/slot_")[0])
    if group not in ("heldout", "decoded"):
        return None
    figure, at, _ = rest.split("/")[0].partition("@")
    return LOGGED.get(f"{group}/{figure}{at}" + ("k" if at else ""))


def slot_metric(kind: str, slot: int) -> str:
    """Name of a per-slot metric: accuracy of slot 1..K-1 over the blocks that reach it (marginal, not conditional)."""
    return f"{kind}/slot_{slot:02d}"


class MetricWindow:
    """Sums since the last report. Values stay on the device; nothing is read by the host before `report`."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._step: dict[str, torch.Tensor] = {}

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Those of a micro-batch. sums: name -> tensor (2,) of sum and count."""
        for name, value in sums.items():
            value = value.detach().double()
            self._step[name] = self._step[name] + value if name in self._step else value

    def end_step(self, taken: torch.Tensor) -> None:
        """Count what was added since the last step, unless it was skipped. taken: a boolean on the device."""
        for name, value in self._step.items():
            value = torch.where(taken, value, 0.0)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._step = {}

    def state(self) -> dict[str, list[float]]:
        """This rank's sums so far, for a checkpoint between two reports."""
        return {name: value.tolist() for name, value in self._sums.items()}

    def restore(self, sums: dict[str, list[float]], device: torch.device) -> None:
        """Go on from `state`."""
        self._sums = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in sums.items()}

    def report(self) -> dict[str, float]:
        """Means over all ranks since the last report (a collective: call it on every rank); metrics without any count are left out."""
        names = sorted(self._sums)
        if not names:
            return {}
        table = sum_over_ranks(torch.stack([self._sums[n] for n in names])).tolist()
        self._sums = {}
        return {name: total / count for name, (total, count) in zip(names, table, strict=True) if count > 0}
