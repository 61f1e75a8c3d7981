"""Held-out figures while a run trains, under the names that are logged. Collectives: every rank calls them and gets all values.

A value is None where nothing was there to measure (a domain whose answers have one token); its name is known all the same.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_train import ranks, stop
from dflash_train.acceptance import ALL, cutoffs, domain_rows
from dflash_train.config.schema import EvaluateConfig
from dflash_train.evaluate import decode_prompts
from dflash_train.method import DraftStep
from dflash_train.types import Prompt, TokenizedExample
from dflash_train.walk import teacher_forced

Values = dict[str, float | None]
PER_DOMAIN = ("walk_tau", "base_walk_tau", "accept_len", "base_accept_len")


def teacher_forced_values(step: DraftStep, examples: list[TokenizedExample]) -> Values:
    """heldout/walk_tau, base_walk_tau, accept_len, base_accept_len (each also per domain), recall@k, oracle@k, and selector_lift: tokens
    per round that the selector's path gains over the base's on the walk."""
    tables = teacher_forced(step, examples)
    values: Values = {}
    for name in PER_DOMAIN:
        values |= {_name(f"heldout/{name}", domain): tau["value"] for domain, tau in tables[name].items()}
    for name, table in (("recall", "recall"), ("oracle", "oracle_accept_len")):
        values |= {f"heldout/{name}@{k}": value for k, value in tables[table].items()}
    path, base = values["heldout/walk_tau"], values["heldout/base_walk_tau"]
    return values | {"heldout/selector_lift": None if path is None or base is None else path - base}


def decoded_values(step: DraftStep, prompts: list[Prompt], config: EvaluateConfig, stop_ids: set[int]) -> Values:
    """decoded/tau, also per domain, of real speculative decoding. Ranks share the prompts."""
    was_training = step.training
    row_of = domain_rows(p.domain for p in prompts)
    domains = [*row_of.values(), ALL]
    sums = np.zeros((len(domains), 2))
    mine = prompts[ranks.rank() :: ranks.world_size()]
    with stop.interruptible():
        if mine:
            for result in decode_prompts(step, mine, config, stop_ids, plain=False).results:
                own = row_of.get(result.domain, ALL)
                sums[sorted({domains.index(own), len(domains) - 1})] += (sum(result.rounds), len(result.rounds))
    step.train(was_training)
    if step.target.device.type == "cuda":
        torch.cuda.empty_cache()  # the caches of decoding are as large as the memory allowed
    ranks.meet()  # answers differ in length
    pooled = ranks.sum_over_ranks(torch.from_numpy(sums).to(step.target.device)).tolist()
    return {_name("decoded/tau", d): t / r if r else None for d, (t, r) in zip(domains, pooled, strict=True)}


def _name(metric: str, domain: str) -> str:
    return metric if domain == ALL else f"{metric}/{domain}"


def names(examples: list[TokenizedExample], prompts: list[Prompt], candidates: int) -> list[str]:
    """Every name under which the two functions above give a value, known before anything is measured."""
    given = [*domain_rows(e.domain for e in examples).values(), ALL]
    found = [_name(f"heldout/{table}", domain) for table in PER_DOMAIN for domain in given]
    found += [f"heldout/{table}@{k}" for table in ("recall", "oracle") for k in cutoffs(max(1, candidates))]
    found.append("heldout/selector_lift")
    return found + [_name("decoded/tau", d) for d in [*domain_rows(p.domain for p in prompts).values(), ALL]]


def first_of_each_domain(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of every domain, in the order of the file."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if taken[prompt.domain] <= count:
            chosen.append(prompt)
    return chosen
