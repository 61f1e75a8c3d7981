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


def slot_metric(kind: str, slot: int) -> str:
    """Name of a per-slot metric: accuracy of slot 1..K-1 over the blocks that reach it (marginal, not conditional)."""
    return f"{kind}/slot_{slot:02d}"


class MetricWindow:
    """Sums since the last report. Values stay on the device; nothing is read by the host before `report`."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """sums: name -> tensor (2,) of sum and count."""
        for name, value in sums.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def report(self) -> dict[str, float]:
        """Means over all ranks since the last report (a collective: call it on every rank); metrics without any count are left out."""
        names = sorted(self._sums)
        if not names:
            return {}
        table = sum_over_ranks(torch.stack([self._sums[n] for n in names])).tolist()
        self._sums = {}
        return {name: total / count for name, (total, count) in zip(names, table, strict=True) if count > 0}
