"""What decides a row's answers: the recipe's generator, the setting that the row draws, its seed and its shard. All stable over machines."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dflash_train.config.mixture import Setting, settings
from dflash_train.config.schema import Backend, Recipe
from dflash_train.data.chat import template_hash


def stable_hash(*parts: Any) -> int:
    """64 bits that depend on nothing but the arguments (JSON values)."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big")


def row_seed(seed: int, row_id: str, turn: int) -> int:
    """63 bits; a row's sample does not depend on the batch it is in."""
    return stable_hash(seed, row_id, turn) >> 1


def in_shard(row_id: str, shard: tuple[int, int]) -> bool:
    """Whether the row belongs to part i of n."""
    return stable_hash("shard", row_id) % shard[1] == shard[0]


def draw(among: list[Setting], seed: int, row_id: str) -> Setting:
    """The row's setting: each one in proportion to its weight."""
    point = stable_hash("mixture", seed, row_id) / 2**64 * sum(setting.weight for setting in among)
    for setting in among:
        if point < setting.weight:
            return setting
        point -= setting.weight
    return among[-1]


def describe(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """Everything in the recipe that decides what the answers are. `recipe_hash` stands for all of it; rows of two hashes are never mixed."""
    config = recipe.regenerate
    described: dict[str, Any] = {
        "model": recipe.target.path,
        "revision": recipe.target.revision,
        "backend": config.backend.value,
        "template_hash": template_hash(tokenizer, config.chat_template_kwargs),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        "extra_body": dict(config.extra_body),
        "max_new_tokens": config.max_new_tokens,
        "max_length": config.max_length,
    }
    if config.backend is Backend.transformers:
        described["precision"] = recipe.target.precision.value
    if config.backend is Backend.openai:
        described["api"] = config.api.value
    if config.mixture:
        described["mixture"] = [setting.as_dict() for setting in settings(config)]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return {**described, "recipe_hash": digest[:16]}


def row_generator(
    description: dict[str, Any], setting: Setting, kwargs: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The description with what was really used for one row: the setting that it drew and all of its template arguments."""
    used = {
        **description,
        "template_hash": template_hash(tokenizer, kwargs),
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "top_k": setting.top_k,
        "chat_template_kwargs": kwargs,
        "extra_body": setting.extra_body,
    }
    return used if setting.name is None else {**used, "mixture": setting.name}
