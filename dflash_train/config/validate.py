"""Contradictions inside a recipe, found before any model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass

from dflash_train.config.mixture import settings
from dflash_train.config.schema import (
    Backend,
    DataConfig,
    DrafterConfig,
    EvaluateConfig,
    LongDocuments,
    Precision,
    Recipe,
    RegenerateConfig,
)
from dflash_train.config.sources import read_sources
from dflash_train.config.values import RESERVED, is_address, without_login

SLIDING, FULL = "sliding_attention", "full_attention"


def validate(recipe: Recipe, where: str) -> None:
    """Raise ValueError naming the knob, its value, the rule and the remedy."""

    def need(ok: bool, name: str, value: object, rule: str) -> None:
        if not ok:
            raise ValueError(f"{where}: {name} = {value}: {rule}")

    for group in fields(recipe):
        knobs = getattr(recipe, group.name)
        for name, value in vars(knobs).items() if is_dataclass(knobs) else ():
            if isinstance(value, float):
                need(math.isfinite(value), f"{group.name}.{name}", value, "must be a finite number")
    d, o, t, p = recipe.drafter, recipe.objective, recipe.train, recipe.optimizer
    for name, value in [
        ("train.global_batch_size", t.global_batch_size), ("train.micro_batch_size", t.micro_batch_size),
        ("train.num_anchors", t.num_anchors), ("train.log_every_steps", t.log_every_steps),
        ("train.keep_checkpoints", t.keep_checkpoints), ("train.max_skipped_steps", t.max_skipped_steps), ("data.max_length", recipe.data.max_length),
        ("objective.chunk_rows", o.chunk_rows),
        ("regenerate.max_new_tokens", recipe.regenerate.max_new_tokens),
        ("evaluate.max_new_tokens", recipe.evaluate.max_new_tokens), ("train.decode_prompts", t.decode_prompts),
        ("evaluate.client_prompts", recipe.evaluate.client_prompts),
    ]:  # fmt: skip
        need(value >= 1, name, value, "must be at least 1")
    for name, value in [
        ("train.max_steps", t.max_steps), ("train.eval_every_steps", t.eval_every_steps), ("data.limit", recipe.data.limit), ("data.workers", recipe.data.workers),
        ("train.decode_every_steps", t.decode_every_steps), ("train.patience", t.patience),
        ("train.checkpoint_every_steps", t.checkpoint_every_steps), ("evaluate.max_prompts", recipe.evaluate.max_prompts),
        ("evaluate.batch_size", recipe.evaluate.batch_size), ("regenerate.limit", recipe.regenerate.limit), ("regenerate.batch_size", recipe.regenerate.batch_size), ("engine.threads", recipe.engine.threads),
    ]:  # fmt: skip
        need(value is None or value >= 1, name, value, "must be null or at least 1")
    for name, value in [
        ("optimizer.lr", p.lr), ("train.num_epochs", t.num_epochs), ("optimizer.eps", p.eps),
        ("engine.timeout_minutes", recipe.engine.timeout_minutes),
    ]:  # fmt: skip
        need(value > 0, name, value, "must be positive")
    for name, value in [
        ("optimizer.beta1", p.beta1), ("optimizer.beta2", p.beta2), ("optimizer.warmup_ratio", p.warmup_ratio),
    ]:  # fmt: skip
        need(0 <= value < 1, name, value, "must be in [0, 1)")
    need(0 <= p.min_lr_ratio <= 1, "optimizer.min_lr_ratio", p.min_lr_ratio, "must be in [0, 1]")
    need(p.weight_decay >= 0, "optimizer.weight_decay", p.weight_decay, "must not be negative")
    need(
        p.max_grad_norm >= 0,
        "optimizer.max_grad_norm",
        p.max_grad_norm,
        "must not be negative; 0 switches clipping off",
    )
    rule = "only DeepSpeed offloads; set engine.kind=deepspeed_zero1 or deepspeed_zero2, or leave it out"
    need(recipe.engine.kind.is_deepspeed or not recipe.engine.offload, "engine.offload", recipe.engine.offload, rule)
    rule = "decoding while training wants target and drafter on one GPU; leave it out, or set train.decode_every_steps=null"
    need(recipe.target.device is None or t.decode_every_steps is None, "target.device", recipe.target.device, rule)
    _validate_data(recipe.data, where, need)

    need(
        recipe.data.max_length >= 2,
        "data.max_length",
        recipe.data.max_length,
        "must hold an anchor and a drafted token",
    )
    if d.init_from is None:  # else after what is not set has been derived
        validate_drafter(d, where)
    gamma = o.loss_decay_gamma
    need(gamma is None or gamma > 0, "objective.loss_decay_gamma", gamma, "must be null or positive")
    need(o.selector_loss_weight >= 0, "objective.selector_loss_weight", o.selector_loss_weight, "must not be negative")
    for name, value in [
        ("train.seed", t.seed), ("regenerate.seed", recipe.regenerate.seed), ("evaluate.seed", recipe.evaluate.seed),
    ]:  # fmt: skip
        need(value >= 0, name, value, "must not be negative")
    _validate_evaluation(recipe.evaluate, need)
    _validate_choice(recipe, need)
    _validate_regeneration(recipe.regenerate, where, need)
    rule = "fp8 is for the frozen target alone (target.precision): take auto, bfloat16, float16 or float32"
    for name, value in [("engine.precision", recipe.engine.precision), ("export.precision", recipe.export.precision)]:
        need(value is not Precision.fp8, name, value.value, rule)
    need(
        recipe.export.precision is not Precision.auto,
        "export.precision",
        "auto",
        "name the format: bfloat16 or float32",
    )


def validate_drafter(d: DrafterConfig, where: str) -> None:
    """The same for what the drafter is."""

    def need(ok: bool, name: str, value: object, rule: str) -> None:
        if not ok:
            raise ValueError(f"{where}: {name} = {value}: {rule}")

    need(d.num_hidden_layers >= 1, "drafter.num_hidden_layers", d.num_hidden_layers, "must be at least 1")
    need(
        d.block_size >= 2,
        "drafter.block_size",
        d.block_size,
        "a block is an anchor and at least one drafted slot: must be at least 2",
    )
    need(d.conv_kernel_size >= 0, "drafter.conv_kernel_size", d.conv_kernel_size, "must be 0 (no convolution) or more")
    need(
        d.conv_kernel_size <= d.block_size,
        "drafter.conv_kernel_size",
        d.conv_kernel_size,
        f"must not exceed block_size = {d.block_size}",
    )
    need(d.conv_group_size >= 1, "drafter.conv_group_size", d.conv_group_size, "must be at least 1")
    need(d.selector_rank >= 0, "drafter.selector_rank", d.selector_rank, "must be 0 (no selector) or more")
    k = d.selector_top_k
    need(k >= 1 and k & (k - 1) == 0, "drafter.selector_top_k", k, "must be a power of two (SGLang's kernel needs it)")
    w = d.sliding_window
    need(
        w is None or w >= d.block_size,
        "drafter.sliding_window",
        w,
        f"must be null or at least block_size = {d.block_size}: below it the engines' in-block masks differ",
    )
    if d.layer_types is not None:
        need(
            len(d.layer_types) == d.num_hidden_layers,
            "drafter.layer_types",
            d.layer_types,
            f"needs one entry per draft layer ({d.num_hidden_layers})",
        )
        need(
            set(d.layer_types) <= {SLIDING, FULL},
            "drafter.layer_types",
            d.layer_types,
            f"entries are {SLIDING} or {FULL}",
        )
        need(
            (SLIDING in d.layer_types) == (w is not None),
            "drafter.layer_types",
            d.layer_types,
            f"{SLIDING} layers and sliding_window = {w} contradict each other: set both or neither",
        )
    ids = d.target_layer_ids
    if ids is not None:
        need(len(ids) > 0, "drafter.target_layer_ids", ids, "must not be empty")
        need(len(set(ids)) == len(ids), "drafter.target_layer_ids", ids, "has a duplicate layer")
        need(min(ids) >= 0, "drafter.target_layer_ids", ids, "has a negative layer; ids are 0-based decoder layers")
        need(ids == sorted(ids), "drafter.target_layer_ids", ids, "must be ascending (TensorRT-LLM sorts them)")
    for name, value in [
        ("num_attention_heads", d.num_attention_heads), ("num_key_value_heads", d.num_key_value_heads),
        ("head_dim", d.head_dim), ("intermediate_size", d.intermediate_size), ("rope_theta", d.rope_theta),
        ("rms_norm_eps", d.rms_norm_eps),
        ("output_multiplier", d.output_multiplier), ("final_logit_softcapping", d.final_logit_softcapping),
        ("input_embedding_scale", d.input_embedding_scale),
    ]:  # fmt: skip
        need(value is None or value > 0, f"drafter.{name}", value, "must be null or positive")


def _validate_evaluation(e: EvaluateConfig, need: Callable[[bool, str, object, str], None]) -> None:
    need(e.temperature >= 0, "evaluate.temperature", e.temperature, "must not be negative; 0 is greedy")
    need(0 < e.top_p <= 1, "evaluate.top_p", e.top_p, "must be in (0, 1]")
    need(e.top_k >= 0, "evaluate.top_k", e.top_k, "must not be negative; 0 is all")
    rule = "must be null or not negative; 0 lets nothing pass as a tie"
    need(e.near_tie is None or e.near_tie >= 0, "evaluate.near_tie", e.near_tie, rule)
    rule = "a block is an anchor and at least one drafted slot: each must be at least 2"
    need(all(K >= 2 for K in e.block_sizes), "evaluate.block_sizes", e.block_sizes, rule)


def _validate_choice(recipe: Recipe, need: Callable[[bool, str, object, str], None]) -> None:
    """Which checkpoint is the best, and when to stop."""
    t, heldout = recipe.train, bool(recipe.data.heldout)
    decoded = t.best_metric.startswith("decoded/")
    rule = "name a metric logged under heldout/ or decoded/, such as heldout/walk_tau or decoded/tau"
    need(decoded or t.best_metric.startswith("heldout/"), "train.best_metric", t.best_metric, rule)
    rule = "needs real decoding while training: set train.decode_every_steps"
    need(not decoded or t.decode_every_steps is not None, "train.best_metric", t.best_metric, rule)
    rule = "needs held-out rows: name a file in data.heldout"
    need(heldout or t.decode_every_steps is None, "train.decode_every_steps", t.decode_every_steps, rule)
    need(heldout or t.patience is None, "train.patience", t.patience, rule)
    need(heldout or not t.export_best, "train.export_best", t.export_best, rule)
    rule = "counts evaluations while training: set train.eval_every_steps"
    need(decoded or t.patience is None or t.eval_every_steps is not None, "train.patience", t.patience, rule)


def shard_of(text: str) -> tuple[int, int]:
    """(i, n) of "i/n". Raises ValueError for anything else."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise ValueError(f"regenerate.shard = {text}: must be i/n with i from 0 to n - 1, such as 0/4")
    return int(i), int(n)


def _validate_regeneration(r: RegenerateConfig, where: str, need: Callable[[bool, str, object, str], None]) -> None:
    try:
        drawn = settings(r)
        if r.shard is not None:
            shard_of(r.shard)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for setting in drawn:
        _validate_template_arguments("regenerate.chat_template_kwargs", setting.chat_template_kwargs, need)
    need(r.max_length >= 2, "regenerate.max_length", r.max_length, "must hold a prompt and an answer: at least 2")
    need(r.concurrency >= 1, "regenerate.concurrency", r.concurrency, "must be at least 1")
    need(r.timeout_seconds > 0, "regenerate.timeout_seconds", r.timeout_seconds, "must be positive")
    need(r.max_retries >= 0, "regenerate.max_retries", r.max_retries, "must not be negative; 0 is a single try")
    need(
        not r.output.endswith((".gz", ".zst", ".parquet")),
        "regenerate.output",
        r.output,
        "rows are appended as plain JSONL; end it in .jsonl",
    )
    if r.backend is Backend.openai:
        need(bool(r.base_urls), "regenerate.base_urls", r.base_urls, "the openai backend needs a server's address")
    for url in r.base_urls:
        rule = "an address begins with http:// or https:// and has a host, such as http://localhost:8000/v1"
        need(is_address(url), "regenerate.base_urls", without_login(str(url)), rule)
    if r.backend is not Backend.openai:
        body = next((setting.extra_body for setting in drawn if setting.extra_body), None)
        rule = (
            f"only the openai backend sends it; leave it out, or set regenerate.backend=openai (now {r.backend.value})"
        )
        need(body is None, "regenerate.extra_body", body, rule)


def _validate_template_arguments(
    name: str, given: dict[str, object], need: Callable[[bool, str, object, str], None]
) -> None:
    rule = "is no argument of the template but of what renders it; leave it out (data.chat_template names a template)"
    reserved = next((key for key in given if key in RESERVED), None)
    need(reserved is None, f"{name}.{reserved}", given.get(reserved), rule)
    odd = next((key for key in given if not isinstance(key, str)), None)
    need(odd is None, name, given, "the names of a template's arguments are texts")


def _validate_data(data: DataConfig, where: str, need: Callable[[bool, str, object, str], None]) -> None:
    _validate_template_arguments("data.chat_template_kwargs", data.chat_template_kwargs, need)
    try:
        read_sources(data.train)
        read_sources(data.heldout, "data.heldout")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    need(0 <= data.max_dropped <= 1, "data.max_dropped", data.max_dropped, "is a share in [0, 1]")
    if data.window_overlap is None:
        return
    need(
        data.long_documents is LongDocuments.window,
        "data.window_overlap",
        data.window_overlap,
        f"has no effect with data.long_documents = {data.long_documents.value}; set data.long_documents=window, or leave it out",
    )
    need(
        0 <= data.window_overlap <= data.max_length - 2,
        "data.window_overlap",
        data.window_overlap,
        f"must be in [0, data.max_length - 2 = {data.max_length - 2}], so that each window has an anchor and a drafted token of its own",
    )
