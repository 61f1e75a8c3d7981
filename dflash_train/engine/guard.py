"""Which optimizer steps are taken: decided on the device, by all ranks alike, in the one collective that the gradient norm needs anyway."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_train import ranks


@dataclass(kw_only=True)
class Skip:
    """A step that no rank took. step: its number, from 1; losses: (rank, micro-batch) of those that were not finite; none: it was the gradient."""

    step: int
    losses: list[tuple[int, int]]


class Guard:
    """Judges every step. Nothing is read by the host before `report`, and no step is forgotten in between.

    micro_batches: per rank and step, the same everywhere. After `most_in_a_row` skipped steps no step is taken any more, so that the weights
    stay those of the last good one until the host finds out.
    """

    def __init__(self, micro_batches: int, *, max_grad_norm: float, most_in_a_row: int, device: torch.device):
        self.micro_batches, self.max_grad_norm, self.most_in_a_row = micro_batches, max_grad_norm, most_in_a_row
        self.norm = torch.full((), torch.nan, dtype=torch.float64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._judged: list[torch.Tensor] = []
        self._known_in_a_row = 0  # the same count, on the host, up to the last report

    @property
    def in_a_row(self) -> int:
        """Skipped steps up to the last one that was reported, one after the other."""
        return self._known_in_a_row

    def resume(self, in_a_row: int) -> None:
        """Count on from there; the next step is tried in any case."""
        self._known_in_a_row = min(in_a_row, self.most_in_a_row - 1)
        self._in_a_row.fill_(self._known_in_a_row)

    @torch.no_grad()
    def judge(self, square_norm: torch.Tensor, losses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether the step is taken, what its gradients are to be divided by), both on the device. A collective of fixed size.

        square_norm: this rank's share of the squared norm of the global gradient, so that the shares add up to it; losses: of its micro-batches.
        """
        assert len(losses) == self.micro_batches
        device = self.norm.device
        seen = torch.zeros(1 + ranks.world_size() * self.micro_batches, dtype=torch.float64, device=device)
        mine = 1 + ranks.rank() * self.micro_batches
        seen[0] = square_norm
        seen[mine : mine + self.micro_batches] = ~torch.stack(losses).isfinite()
        seen = ranks.sum_over_ranks(seen)
        finite = seen[0].isfinite() & ~seen[1:].any()
        taken = finite & (self._in_a_row < self.most_in_a_row)
        stuck = self._in_a_row >= self.most_in_a_row
        self._in_a_row = torch.where(finite & ~stuck, 0, self._in_a_row + 1)
        norm = seen[0].sqrt()
        self.norm = torch.where(taken, norm, self.norm)
        self._judged.append(seen)
        # As torch.nn.utils.clip_grad_norm_ does it.
        limit = self.max_grad_norm or torch.inf
        return taken, ((norm + 1e-6) / limit).clamp_min(1.0).float()

    def report(self, done: int) -> tuple[list[Skip], int | None]:
        """(steps skipped since the last report, the step after which training had to stop or None), given how many steps are done by now."""
        if not self._judged:
            return [], None
        table = torch.stack(self._judged).cpu()
        self._judged = []
        skips = []
        for step, row in enumerate(table, start=done - len(table) + 1):
            if row[0].isfinite() and not row[1:].any():
                self._known_in_a_row = 0
                continue
            skips.append(Skip(step=step, losses=[divmod(int(i), self.micro_batches) for i in row[1:].nonzero()[:, 0]]))
            self._known_in_a_row += 1
            if self._known_in_a_row >= self.most_in_a_row:
                return skips, step
        return skips, None
