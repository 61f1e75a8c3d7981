"""The target, run here by transformers."""

from __future__ import annotations

from typing import Any

import torch

from dflash_train.config.schema import Recipe
from dflash_train.generation.base import Answer, Request
from dflash_train.generation.padded import decode
from dflash_train.target.hf import load_model


class Embedded:
    """Answers requests in padded batches: those that wait are sorted by length and decoded together."""

    def __init__(self, recipe: Recipe, target: str, tokenizer: Any):
        self.tokenizer = tokenizer
        self.capacity = recipe.regenerate.batch_size or 64
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(recipe.target, target, device)
        if device.type == "cpu" and recipe.target.attn_implementation == "sdpa":
            self.model.set_attn_implementation("grouped")
        stop = self.model.generation_config.eos_token_id
        self.stop_ids = set(stop if isinstance(stop, list) else [stop]) | {tokenizer.eos_token_id}
        self.stop_ids.discard(None)
        self.waiting: list[tuple[int, Request]] = []

    def submit(self, key: int, request: Request) -> None:
        self.waiting.append((key, request))

    def collect(self) -> list[tuple[int, Answer]]:
        batch, self.waiting = self.waiting, []
        batch.sort(key=lambda item: len(item[1].prompt_ids))
        return list(zip([key for key, _ in batch], self._answer([request for _, request in batch]), strict=True))

    def _answer(self, requests: list[Request]) -> list[Answer]:
        try:
            decoded = decode(self.model, requests, self.stop_ids)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(requests) == 1:
                return [Answer(error="out_of_memory")]
            half = len(requests) // 2
        else:
            return [self.answer(request, ids, reason) for request, (ids, reason) in zip(requests, decoded, strict=True)]
        # Outside the handler, whose traceback would keep the tensors of the failed attempt alive.
        return self._answer(requests[:half]) + self._answer(requests[half:])

    def answer(self, request: Request, token_ids: list[int], finish_reason: str) -> Answer:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(
            message={"role": "assistant", "content": text},
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            finish_reason=finish_reason,
        )

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.waiting.clear()
