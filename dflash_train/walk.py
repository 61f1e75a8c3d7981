"""Teacher-forced acceptance: what a drafter would get right on given text, from one forward of the target over it.

Two figures, named apart because they look at different blocks: `accept_len` averages over all legal anchors; `walk_tau` follows the rounds that
decoding would take on the text: the first anchor is the first answer token, a round counts min(accepted + 1, tokens remaining), the next
anchor is one past the accepted prefix. Real decoding must agree with the walk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_train import ranks, stop
from dflash_train.acceptance import ALL, Tau, cutoffs, domain_rows, oracle_counts, oracle_table
from dflash_train.data.blocks import legal_anchors
from dflash_train.data.stream import assemble
from dflash_train.method import DraftStep, scatter_slots
from dflash_train.objective.loss import leading_hits
from dflash_train.types import PackedBatch, Prompt, TokenizedExample

TOKENS_AT_ONCE = 8192  # on CUDA: rows read together, padded to the longest


def move(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with all its tensors on `device`."""
    for record in (batch, batch.blocks):
        for name, value in vars(record).items():
            if isinstance(value, torch.Tensor):
                setattr(record, name, value.to(device, non_blocking=True))
    return batch


class AtAnchors(NamedTuple):
    """One document's legal anchors (A,) with the drafted tokens accepted behind each: by the selector's path and by the base top-1.
    ranks_AS: rank (from 0) of the right token among the slot's candidates, -1 where it is not one of them; supervised_AS: slots that count.
    """

    anchors: np.ndarray
    path: np.ndarray
    base: np.ndarray
    ranks_AS: np.ndarray
    supervised_AS: np.ndarray


@torch.no_grad()
def accepted_at_anchors(
    step: DraftStep, example: TokenizedExample, *, end: int | None = None, blocks_at_once: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(anchors, accepted by the selector's path, accepted by the base top-1) at every legal anchor of one document."""
    found = at_anchors(step, [example], ends=[end], blocks_at_once=blocks_at_once)[0]
    return found.anchors, found.path, found.base


@torch.no_grad()
def at_anchors(
    step: DraftStep,
    examples: list[TokenizedExample],
    *,
    ends: list[int | None] | None = None,
    blocks_at_once: int = 128,
) -> list[AtAnchors]:
    """Acceptance at every legal anchor of some documents, which are read side by side.

    ends: position at which a document's token budget runs out, if there is one; blocks are cut there, as decoding cuts them. By default a
    document with finish_reason length ends its budget with its text.
    """
    spec, device = step.drafter.spec, step.target.device
    S, T = spec.block_size, max(len(e.token_ids) for e in examples)
    decay_S = np.r_[0.0, np.ones(S - 1)]
    anchors = [legal_anchors(e.supervised) for e in examples]
    slots = []
    for e, own, end in zip(examples, anchors, ends or [None] * len(examples), strict=True):
        end = len(e.token_ids) if end is None and e.finish_reason == "length" else end
        slots.append(np.full(len(own), S) if end is None else np.minimum(end - own, S))
    context = move(
        assemble([[e] for e in examples], T, [own[:0] for own in anchors], num_blocks=1, decay_S=decay_S), device
    )
    features = step.target.read(context)
    parts: list[list[tuple[np.ndarray, ...]]] = [[] for _ in examples]
    for i in range(0, max(map(len, anchors)), blocks_at_once):
        some = slice(i, i + blocks_at_once)
        chosen, existing = [own[some] for own in anchors], [own[some] for own in slots]
        rows = [[e] for e in examples]
        batch = move(assemble(rows, T, chosen, num_blocks=blocks_at_once, decay_S=decay_S, slots=existing), device)
        with step.autocast():
            # Every set of documents has its own length: the dense kernel needs no compilation for each.
            scores = step.score(batch, features, exact=True)
        supervised = batch.blocks.supervised_BNS
        hits = [
            leading_hits(scatter_slots(scores[k], batch.blocks), supervised).cpu().numpy()
            for k in ("hit_M", "base_hit_M")
        ]
        rank = torch.full(supervised.shape, -1, dtype=torch.int16, device=device)
        rank.view(-1)[batch.blocks.scored_M] = scores["rank_M"].to(torch.int16)
        whole = (*hits, rank.cpu().numpy(), supervised.cpu().numpy())
        for row, own in enumerate(chosen):
            parts[row].append(tuple(x[row, : len(own)] for x in whole))
    empty = (np.empty(0, np.int64),) * 2 + (
        np.empty((0, S), np.int16),
        np.empty((0, S), bool),
    )  # a document without an anchor
    return [
        AtAnchors(own, *(np.concatenate(column) for column in zip(empty, *some, strict=True)))
        for own, some in zip(anchors, parts, strict=True)
    ]


def in_groups(examples: list[TokenizedExample], device: torch.device) -> list[list[int]]:
    """Indices of documents that are read together: similar lengths on CUDA, one by one on a CPU, where padding costs more than it saves."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].token_ids))
    groups: list[list[int]] = []
    for i in order:
        most = TOKENS_AT_ONCE // len(examples[i].token_ids) if device.type == "cuda" else 1
        if groups and len(groups[-1]) < most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def answered(prompt: Prompt, token_ids: list[int], finish_reason: str) -> TokenizedExample:
    """A prompt with a decoded answer as a document whose answer is supervised."""
    ids = np.array(prompt.token_ids + token_ids, np.int32)
    supervised = np.arange(len(ids)) >= len(prompt.token_ids)
    return TokenizedExample(
        id=prompt.id, domain=prompt.domain, token_ids=ids, supervised=supervised, finish_reason=finish_reason
    )


def walk_rounds(anchors: np.ndarray, accepted: np.ndarray) -> list[int]:
    """Tokens gained by each round of the walk along one supervised stretch of answer (one list for all stretches of the document)."""
    rounds: list[int] = []
    by_anchor = dict(zip(anchors.tolist(), accepted.tolist(), strict=True))
    for first in [a for a in by_anchor if a - 1 not in by_anchor]:
        last = first
        while last in by_anchor:
            last += 1  # the final token of the stretch: never an anchor
        at = first
        while at < last:
            gained = min(by_anchor[at] + 1, last - at)
            rounds.append(gained)
            at += gained
    return rounds


def teacher_forced(step: DraftStep, examples: list[TokenizedExample]) -> dict[str, Any]:
    """Held-out acceptance, per domain and pooled. Ranks share the documents; every rank calls it and gets the whole table.

    walk_tau, base_walk_tau, accept_len, base_accept_len (the selector's path and the base top-1): row of a domain -> Tau, ALL pooled. recall and
    oracle_accept_len: see `acceptance.oracle_table`.
    """
    was_training = step.training
    step.eval()
    names = ("walk_tau", "base_walk_tau", "accept_len", "base_accept_len")
    row_of = domain_rows(e.domain for e in examples)
    domains = [*row_of.values(), ALL]
    sums = np.zeros((len(names), len(domains), 2))
    candidates = max(1, step.drafter.spec.selector_top_k)
    counts = np.zeros((2, 1 + len(cutoffs(candidates))), np.int64)
    mine = examples[ranks.rank() :: ranks.world_size()]
    with stop.interruptible():
        for group in in_groups(mine, step.target.device):
            for i, found in zip(group, at_anchors(step, [mine[i] for i in group]), strict=True):
                columns = sorted({domains.index(row_of.get(mine[i].domain, ALL)), len(domains) - 1})
                for first, accepted in ((0, found.path), (1, found.base)):
                    rounds = walk_rounds(found.anchors, accepted)
                    sums[first, columns] += (sum(rounds), len(rounds))
                    sums[first + 2, columns] += (int(accepted.sum()) + len(accepted), len(accepted))
                counts += oracle_counts(found.ranks_AS, found.supervised_AS, candidates)
    step.train(was_training)
    device = step.target.device
    pooled = ranks.sum_over_ranks(torch.from_numpy(sums).to(device)).tolist()
    counts = ranks.sum_over_ranks(torch.from_numpy(counts).to(device)).cpu().numpy()
    tables: dict[str, Any] = {
        name: {d: Tau(tokens=int(t), rounds=int(r)).as_dict() for d, (t, r) in zip(domains, table, strict=True)}
        for name, table in zip(names, pooled, strict=True)
    }
    return tables | oracle_table(counts, candidates)
