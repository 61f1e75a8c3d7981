"""One prompt at a time, as a single user is served: the reference for batched decoding, and what wall-clock comparisons are made with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from dflash_train.drafter.decode import DraftSession
from dflash_train.generation.speculative import propose
from dflash_train.generation.verify import Draft, Sampling, draws_per_round, verify
from dflash_train.kernels.sample import sample
from dflash_train.method import DraftStep
from dflash_train.target.cache import Snapshot, can_roll_back, crop, make_cache
from dflash_train.target.hf import HFTarget

GREEDY = Sampling()


@dataclass(kw_only=True)
class Timed:
    """token_ids: the answer, its stop token included; rounds: tokens gained per verification, accepted: drafts among them; seconds: wall clock without prefill, of
    which draft_seconds went into drafting."""

    token_ids: list[int]
    rounds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    finish_reason: str = "length"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _pick(logits_1V: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> int:
    """The token that the target says after its last logits."""
    if sampling.temperature == 0:
        return int(logits_1V.argmax(-1))  # no sorting: it would slow down what the drafter is compared with
    device = logits_1V.device
    settings = (torch.tensor([value], device=device) for value in sampling)
    return int(sample(logits_1V, uniform.view(1).to(device), *settings))


@torch.inference_mode()
def plain_decode(
    target: HFTarget,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: set[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Timed:
    """One token per forward."""
    draws = torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed))
    cache = make_cache(target.model.config)
    logits, _ = target.step(torch.tensor([prompt_ids], device=target.device), cache, logits_to_keep=1)
    begun = _now(target.device)
    answer = [_pick(logits[:, -1], sampling, draws[0])]
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        logits, _ = target.step(torch.tensor([answer[-1:]], device=target.device), cache)
        answer.append(_pick(logits[:, -1], sampling, draws[len(answer)]))
    return Timed(
        token_ids=answer,
        seconds=_now(target.device) - begun,
        finish_reason="stop" if answer[-1] in stop_ids else "length",
    )


@torch.inference_mode()
def speculative_decode(
    step: DraftStep,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: set[int],
    block_size: int | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Timed:
    """Draft a block, verify it in one target forward, keep the agreeing prefix and one token of the target's own.

    Lossless: greedily every kept token is the target's own argmax; at a temperature the answer has the target's distribution (see
    `verify`). A block never reaches past the token budget. block_size below the trained one drafts shorter blocks. A target whose cache
    cannot be cropped (linear attention) is set back to before the block and reads the kept tokens again.
    """
    target: HFTarget = step.target
    spec, device = step.drafter.spec, target.device
    K = spec.block_size if block_size is None else block_size
    if not 2 <= K <= spec.block_size:
        raise ValueError(f"block_size = {K}: must be in [2, {spec.block_size}], the trained block")
    generator = torch.Generator().manual_seed(seed)
    cache, session = make_cache(target.model.config), DraftSession(step.drafter)
    croppable = can_roll_back(cache)
    logits, features = target.step(torch.tensor([prompt_ids], device=device), cache, logits_to_keep=1)
    begun, drafting = _now(device), 0.0
    answer = [_pick(logits[:, -1], sampling, torch.rand(1, generator=generator))]
    rounds: list[int] = []
    drafted: list[int] = []
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        S = min(K, max_new_tokens - len(answer) + 1)
        uniform = torch.rand(1, draws_per_round(S), generator=generator).to(device)
        started = _now(device)
        with step.autocast():
            session.extend(features.features_BTF.to(step.dtype))
        draft = _propose(step, session, answer[-1], S, sampling, uniform)
        drafting += _now(device) - started
        snapshot = None if croppable else Snapshot(cache)
        block = torch.cat([draft.token_ids_NS.new_tensor([[answer[-1]]]), draft.token_ids_NS], 1)
        logits, features = target.step(block, cache)
        tokens, accepted = verify(logits, draft, torch.tensor([S], device=device), sampling, uniform)
        gained = tokens[0, : min(int(accepted) + 1, max_new_tokens - len(answer))].tolist()
        for i, token in enumerate(gained):
            if token in stop_ids:
                gained = gained[: i + 1]
                break
        answer += gained
        rounds.append(len(gained))
        drafted.append(min(int(accepted), len(gained)))
        # The anchor and all gained tokens but the newest are context now.
        if snapshot is None:
            crop(cache, session.length + len(gained))
        elif len(gained) < S:
            snapshot.restore(cache)
            target.step(block[:, : len(gained)], cache, logits_to_keep=1)
        features = features._replace(features_BTF=features.features_BTF[:, : len(gained)])
    return Timed(
        token_ids=answer,
        rounds=rounds,
        accepted=drafted,
        seconds=_now(device) - begun,
        draft_seconds=drafting,
        finish_reason="stop" if answer[-1] in stop_ids else "length",
    )


def _propose(
    step: DraftStep, session: DraftSession, anchor: int, slots: int, sampling: Sampling, uniform_1U: torch.Tensor
) -> Draft:
    """slots - 1 drafted tokens."""
    ids = torch.full((1, slots), step.drafter.spec.mask_token_id, device=step.target.device)
    ids[0, 0] = anchor
    with step.autocast():
        hidden = session.hidden(step.embed(ids))[:, 1:]
    return propose(step, hidden, ids[:, 0], sampling, uniform_1U[:, : slots - 1])
