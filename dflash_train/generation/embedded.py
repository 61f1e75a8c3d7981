"""The target, run here by transformers: continuous batching on CUDA where the target allows it, padded batches elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dflash_train import ranks
from dflash_train.config.schema import Recipe
from dflash_train.generation.base import Answer, Decoded, Request
from dflash_train.generation.padded import decode
from dflash_train.generation.slots import Slots, slots_that_fit, why_no_slots
from dflash_train.target.hf import load_model, stop_ids
from dflash_train.target.info import read_target_info

MOST_SLOTS = 2048


class Embedded:
    """Answers requests with the target in this process, on CUDA if there is one."""

    def __init__(self, recipe: Recipe, target: str, tokenizer: Any):
        config = recipe.regenerate
        self.tokenizer = tokenizer
        self.device = ranks.device()
        self.model = load_model(recipe.target, target, self.device)
        info = read_target_info(target, recipe.target.revision, recipe.target.trust_remote_code)
        self.stop_ids = stop_ids(self.model, tokenizer, info.eos_token_ids)
        self.asked: dict[int, Request] = {}
        self.waiting: list[tuple[int, Request]] = []
        own_kernels = recipe.target.attn_implementation == "sdpa"  # otherwise the user has chosen
        self.slots: Slots | None = None
        if self.device.type == "cuda":
            count, why_not = (
                _slots_that_fit(self.model, config.max_length, config.batch_size)
                if own_kernels
                else (0, f"target.attn_implementation = {recipe.target.attn_implementation}")
            )
            if why_not is None:
                new = min(config.max_new_tokens, config.max_length)
                self.slots = Slots(self.model, self.stop_ids, slots=count, length=config.max_length, max_new=new)
            else:
                print(f"regeneration in padded batches, several times slower than slots: {why_not}", file=sys.stderr)
        elif own_kernels:
            self.model.set_attn_implementation("grouped")
        # With slots, enough is at hand to fill all that become free at once.
        self.capacity = 2 * self.slots.slots if self.slots else config.batch_size or 64

    def submit(self, key: int, request: Request) -> None:
        self.asked[key] = request
        if self.slots:
            self.slots.submit(key, request)
        else:
            self.waiting.append((key, request))

    def collect(self) -> list[tuple[int, Answer]]:
        finished: list[tuple[int, Decoded | None]] = []
        if self.slots:
            while not finished:
                finished += self.slots.advance()
        else:
            self.waiting.sort(key=lambda item: len(item[1].prompt_ids))
            keys, requests = zip(*self.waiting, strict=True)
            self.waiting = []
            finished = list(zip(keys, self._decode(list(requests)), strict=True))
        return [(key, self._answer(self.asked.pop(key), decoded)) for key, decoded in finished]

    def _decode(self, requests: list[Request]) -> list[Decoded | None]:
        try:
            return list(decode(self.model, requests, self.stop_ids))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(requests) == 1:
                return [None]
            half = len(requests) // 2
        # Outside the handler, whose traceback would keep the tensors of the failed attempt alive.
        return self._decode(requests[:half]) + self._decode(requests[half:])

    def _answer(self, request: Request, decoded: Decoded | None) -> Answer:
        if decoded is None:
            return Answer(error="out_of_memory")
        text = self.tokenizer.decode(decoded.token_ids, skip_special_tokens=True)
        return Answer(
            message={"role": "assistant", "content": text},
            prompt_ids=request.prompt_ids,
            token_ids=decoded.token_ids,
            finish_reason=decoded.finish_reason,
        )

    def stats(self) -> dict[str, Any]:
        if not self.slots:
            return {}
        idle = self.slots.idle_share()
        return {
            "slots": self.slots.slots,
            "gpu_idle_share": None if idle is None else round(idle, 4),
            "capture_seconds": round(self.slots.capture_seconds, 2),
        }

    def close(self) -> None:
        self.waiting.clear()
        self.asked.clear()
        self.slots = None


def _slots_that_fit(model: Any, length: int, most: int | None) -> tuple[int, str | None]:
    """(number of slots, None), or (0, why this target cannot be decoded in them)."""
    why_not = why_no_slots(model)
    if why_not is not None:
        return 0, why_not
    fit = slots_that_fit(model, length)
    if fit < 1:
        return 0, f"the memory does not hold one slot of regenerate.max_length = {length} tokens"
    return min(fit, most or MOST_SLOTS), None
