"""What a recipe's data looks like to the trainer: rows kept and dropped, what is supervised, how long, which
masks clash.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

import numpy as np

from dflash_train.assets import resolve
from dflash_train.config.schema import Recipe
from dflash_train.data.chat import (
    check_supervised,
    load_tokenizer,
    mask_strategy,
    read_stop_ids,
    template_hash,
    tokenize_all,
)
from dflash_train.data.read import read_conversations
from dflash_train.types import TokenizedExample

GREEN, GREY, RESET = "\033[32m", "\033[90m", "\033[0m"


def inspect(recipe: Recipe, *, samples: int = 3, color: bool = False, out: TextIO | None = None) -> dict[str, Any]:
    """Read and tokenise `data.train` as training would, write a report to `out` (default stdout) and return
    its counts.

    Keys: rows, kept, dropped and notes (by reason), examples, tokens, supervised, ratio,
    mask_token_occurrences, domains, generators. Without colour, supervised text stands between `⟦` and `⟧`.
    Raises ValueError when too many rows are dropped or when no token, or every token, is supervised.
    """
    out = out or sys.stdout
    data = recipe.data
    path = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(path, recipe.target.revision, recipe.target.trust_remote_code, data.chat_template)
    conversations, kept = read_conversations([resolve(path, "train") for path in data.train], limit=data.limit)
    examples = tokenize_all(
        conversations,
        tokenizer,
        chat_template_kwargs=data.chat_template_kwargs,
        reasoning_rows=data.reasoning_rows,
        max_length=data.max_length,
        drop_truncated=data.drop_truncated,
        kept=kept,
        stop_ids=read_stop_ids(path, recipe.target.revision, tokenizer),
    )
    print(kept.table(), file=out)
    kept.check(data.max_dropped)
    lengths = np.array([len(example.token_ids) for example in examples])
    tokens, supervised = int(lengths.sum()), int(sum(example.supervised.sum() for example in examples))
    mask_id = recipe.drafter.mask_token_id
    clashes = int(sum((example.token_ids == mask_id).sum() for example in examples)) if type(mask_id) is int else None
    domains: dict[str, int] = {}
    for example in examples:
        domains[example.domain] = domains.get(example.domain, 0) + 1
    generators: dict[str, int] = {}
    for conversation in conversations:
        origin = conversation.metadata.get("generator")
        name = str(origin["model"]) if isinstance(origin, dict) and "model" in origin else "not recorded"
        generators[name] = generators.get(name, 0) + 1
    report = {
        "rows": kept.total,
        "kept": kept.kept,
        "dropped": dict(kept.dropped),
        "notes": dict(kept.notes),
        "examples": len(examples),
        "tokens": tokens,
        "supervised": supervised,
        "ratio": supervised / tokens,
        "mask_token_occurrences": clashes,
        "domains": domains,
        "generators": generators,
    }
    template = template_hash(tokenizer, dict(data.chat_template_kwargs))
    print(
        f"template {template}, arguments {dict(data.chat_template_kwargs)}; masks: {mask_strategy(tokenizer, kept)}",
        file=out,
    )
    print(f"{len(examples)} examples, {tokens} tokens, supervised {supervised} ({report['ratio']:.1%})", file=out)
    print(f"domains {domains}; answers by {generators}", file=out)
    if clashes is not None:
        print(f"drafter.mask_token_id {mask_id} occurs {clashes} times in the data", file=out)
    print(histogram(lengths, data.max_length), file=out)
    for example in examples[:samples]:
        print(f"\n--- {example.id} ({example.finish_reason})\n{show(example, tokenizer, color)}", file=out)
    check_supervised(examples, "train")
    return report


def histogram(lengths: np.ndarray, max_length: int, bins: int = 8, width: int = 40) -> str:
    """Text histogram of lengths in tokens, from 0 to max_length."""
    counts, edges = np.histogram(lengths, bins=bins, range=(0, max_length))
    rows = [
        f"{int(low):>7}..{int(high):<7} {count:>7} {'#' * int(np.ceil(width * count / max(1, counts.max())))}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    return "\n".join(["length in tokens", *rows])


def show(example: TokenizedExample, tokenizer: Any, color: bool) -> str:
    """The example's text with what is supervised in green (or between brackets); whole runs are decoded,
    never half a character.
    """
    begin, end, other = (GREEN, RESET, GREY) if color else ("⟦", "⟧", "")
    changes = np.flatnonzero(np.diff(example.supervised.astype(np.int8))) + 1
    parts = []
    for ids, supervised in zip(
        np.split(example.token_ids, changes), np.split(example.supervised, changes), strict=True
    ):
        text = tokenizer.decode(ids.tolist())
        parts.append(f"{begin}{text}{end}" if supervised[0] else f"{other}{text}{RESET if color else ''}")
    return "".join(parts)
