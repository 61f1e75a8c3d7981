"""Batched decoding that works for any causal LM of transformers: the plain reference, and what a CPU uses."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dflash_train.generation.base import Decoded, Request
from dflash_train.kernels.sample import sample
from dflash_train.target.cache import make_cache


@torch.inference_mode()
def decode(model: Any, requests: list[Request], stop_ids: set[int]) -> list[Decoded]:
    """Continuation of each request, greedy where its temperature is 0.

    Prompts are padded on the left. Each row draws from its own generator, so its sample does not depend on
    the others; rows that are finished leave the batch once they are a quarter of it.
    """
    device = model.device
    width = max(len(request.prompt_ids) for request in requests)
    input_BT = torch.zeros(len(requests), width, dtype=torch.long)
    mask_BT = torch.zeros(len(requests), width, dtype=torch.long)
    for i, request in enumerate(requests):
        input_BT[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask_BT[i, width - len(request.prompt_ids) :] = 1
    input_BT, mask_BT = input_BT.to(device), mask_BT.to(device)
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    uniform_BT = None
    temperature_B, top_p_B, top_k_B = sampling_tensors(requests, device)
    if any(request.temperature > 0 for request in requests):
        longest = max(request.max_new_tokens for request in requests)
        draws = [
            torch.rand(request.max_new_tokens, generator=torch.Generator().manual_seed(request.seed))
            for request in requests
        ]
        uniform_BT = torch.stack([torch.nn.functional.pad(d, (0, longest - len(d))) for d in draws]).to(device)
    # Only the last position's logits are wanted; the others would be the largest tensor by far.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    answers: list[list[int]] = [[] for _ in requests]
    rows = list(range(len(requests)))
    live = [True] * len(requests)
    cache = make_cache(model.config)
    can_leave = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)  # linear attention cannot
    while True:
        out = model(
            input_ids=input_BT,
            attention_mask=mask_BT,
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            **last_only,
        )
        logits_BV = out.logits[:, -1]
        if uniform_BT is None:
            next_B = logits_BV.argmax(-1)
        else:
            step = max(len(answers[row]) for row in rows)
            next_B = sample(logits_BV, uniform_BT[rows, step], temperature_B[rows], top_p_B[rows], top_k_B[rows])
        for row, token in zip(rows, next_B.tolist(), strict=True):
            if live[row]:
                answers[row].append(token)
                live[row] = (
                    not ends(requests[row], token, stop_ids) and len(answers[row]) < requests[row].max_new_tokens
                )
        left = [i for i, row in enumerate(rows) if live[row]]
        if not left:
            break
        position_BT = position_BT[:, -1:] + 1
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
        input_BT = next_B[:, None]
        if can_leave and 4 * len(left) <= 3 * len(rows):
            index = torch.tensor(left, device=device)
            cache.batch_select_indices(index)
            input_BT, mask_BT, position_BT = input_BT[index], mask_BT[index], position_BT[index]
            rows = [rows[i] for i in left]
    reasons = ["stop" if ends(r, ids[-1], stop_ids) else "length" for r, ids in zip(requests, answers, strict=True)]
    return [Decoded(ids, reason) for ids, reason in zip(answers, reasons, strict=True)]


def ends(request: Request, token: int, stop_ids: set[int]) -> bool:
    """Whether an answer stops at this token."""
    return token in stop_ids and not request.ignore_eos


def sampling_tensors(requests: list[Request], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature_B, top_p_B (float32) and top_k_B (int64, 0 for all) of a batch."""
    rows = [(request.temperature, request.top_p, request.top_k) for request in requests]
    temperature, top_p, top_k = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.long, device=device),
    )
