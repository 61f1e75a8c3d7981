"""A NeMo AutoModel DFlash 2 recipe (a YAML with `recipe_args`) -> a recipe of ours.

Every field that NeMo AutoModel 0.7.0 reads is named here: it is mapped to a knob, said to change nothing, or refused by name with what
provides it. An absent field takes NeMo's default, an unknown one is an error with the nearest name (NeMo ignores it in silence).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dflash_train.config.schema import EngineKind, Precision
from dflash_train.config.values import check_keys, finite, fits, nearest

REQUIRED = object()
UNIFORM = 1e9  # a gamma so large that all slots weigh the same in fp32: NeMo's null
KEEP_ALL = 1_000_000
CLASS = "TrainDFlash2Recipe"

# Section -> field -> NeMo's default.
FIELDS: dict[str, dict[str, Any]] = {
    "dist_env": {"backend": "nccl", "timeout_minutes": 30},
    "distributed": {
        "strategy": "fsdp2", "tp_size": 1, "pp_size": 1, "cp_size": 1, "ep_size": 1, "dp_size": None, "dp_replicate_size": None,
        "activation_checkpointing": False, "sequence_parallel": False, "tp_plan": None, "mp_policy": None, "offload_policy": None,
        "autocast_dtype": None, "activation_checkpointing_scope": None, "defer_fsdp_grad_sync": True, "reshard_after_forward": None,
        "enable_async_tensor_parallel": False, "enable_compile": False, "moe": None, "pipeline": None,
    },
    "fp8": {
        "enabled": False, "recipe_name": None, "enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": False,
        "force_recompute_fp8_weight_in_bwd": False, "filter_fqns": [], "emulate": False,
    },
    "compile": {
        "enabled": False, "mode": "default", "fullgraph": False, "dynamic": False, "backend": None, "options": None,
        "dynamo_cache_size_limit": 256,
    },
    "optimizer": {"lr": REQUIRED, "betas": [0.9, 0.95], "weight_decay": 0.0, "warmup_ratio": 0.05, "min_lr_ratio": 0.1},
    "checkpoint": {
        "enabled": True, "checkpoint_dir": None, "model_save_format": "safetensors", "save_consolidated": True, "restore_from": None,
        "is_async": False, "wait_for_staging": False, "cpu_offload": False, "max_recent_checkpoints": None,
        "single_rank_consolidation": False, "staging_dir": None, "v4_compatible": False, "allow_legacy_pickle_restore": False,
        "consolidation_timeout_minutes": 30, "best_metric_key": "default", "model_cache_dir": None, "model_repo_id": None, "is_peft": False,
        "model_state_dict_keys": None, "dequantize_base_checkpoint": None, "original_model_root_dir": None,
        "skip_task_head_prefixes_for_base_model": None, "legacy_paramwrapper_layout": False, "diffusers_compatible": False,
    },
    "wandb": {"enable": True, "project": None, "name": None, "group": None, "mode": None, "entity": None, "dir": None, "tags": None, "notes": None},
    "recipe_args": {
        "target_model_name_or_path": REQUIRED, "trust_remote_code": False, "target_attn_implementation": None, "target_force_hf": False,
        "train_data_path": REQUIRED, "train_split": None, "val_data_path": None, "val_split": None, "seq_length": REQUIRED,
        "packed_sequence_size": 0, "micro_batch_size": REQUIRED, "grad_accumulation_steps": 1, "num_workers": 0, "num_epochs": REQUIRED,
        "shuffle_seed": 42, "mask_reasoning_content": False, "mask_generation_prompt": False, "draft_num_hidden_layers": 5,
        "target_layer_ids": None, "block_size": 16, "mask_token_id": REQUIRED, "num_anchors": 512, "loss_decay_gamma": 7.0,
        "attention_backend": "flex_attention", "draft_sliding_window": None, "draft_num_attention_heads": None,
        "draft_num_key_value_heads": None, "draft_head_dim": None, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16, "selector_loss_weight": 1.0, "loss_type": "dflash", "prefix_weight_base": None, "dpace_alpha": None,
        "output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1.0, "max_grad_norm": 1.0,
        "log_every_steps": 10, "ckpt_every_steps": None, "save_checkpoint_every_epoch": False, "output_dir": REQUIRED,
        "draft_weights_path": None,
    },
}  # fmt: skip
TOP = ("recipe", *FIELDS, "peft")

# Field -> the knob that takes its value as it stands.
SAME = {
    "dist_env.timeout_minutes": "engine.timeout_minutes",
    "optimizer.lr": "optimizer.lr", "optimizer.weight_decay": "optimizer.weight_decay", "optimizer.warmup_ratio": "optimizer.warmup_ratio",
    "optimizer.min_lr_ratio": "optimizer.min_lr_ratio",
    "recipe_args.target_model_name_or_path": "target.path", "recipe_args.trust_remote_code": "target.trust_remote_code",
    "recipe_args.micro_batch_size": "train.micro_batch_size", "recipe_args.num_epochs": "train.num_epochs",
    "recipe_args.shuffle_seed": "train.seed", "recipe_args.draft_num_hidden_layers": "drafter.num_hidden_layers",
    "recipe_args.target_layer_ids": "drafter.target_layer_ids", "recipe_args.block_size": "drafter.block_size",
    "recipe_args.mask_token_id": "drafter.mask_token_id", "recipe_args.num_anchors": "train.num_anchors",
    "recipe_args.draft_sliding_window": "drafter.sliding_window", "recipe_args.draft_num_attention_heads": "drafter.num_attention_heads",
    "recipe_args.draft_num_key_value_heads": "drafter.num_key_value_heads", "recipe_args.draft_head_dim": "drafter.head_dim",
    "recipe_args.conv_kernel_size": "drafter.conv_kernel_size", "recipe_args.conv_group_size": "drafter.conv_group_size",
    "recipe_args.selector_rank": "drafter.selector_rank", "recipe_args.selector_top_k": "drafter.selector_top_k",
    "recipe_args.selector_loss_weight": "objective.selector_loss_weight", "recipe_args.output_multiplier": "drafter.output_multiplier",
    "recipe_args.final_logit_softcapping": "drafter.final_logit_softcapping",
    "recipe_args.input_embedding_scale": "drafter.input_embedding_scale", "recipe_args.log_every_steps": "train.log_every_steps",
    "recipe_args.ckpt_every_steps": "train.checkpoint_every_steps", "recipe_args.output_dir": "output_dir",
}  # fmt: skip

# Field -> why any value of it changes nothing here.
WITHOUT_EFFECT = {
    "dist_env.backend": "the device decides: nccl on CUDA, gloo on a CPU",
    "distributed.dp_size": "torchrun's number of processes is",
    "distributed.dp_replicate_size": "torchrun's number of processes is",
    "distributed.defer_fsdp_grad_sync": "gradients meet once per step anyway",
    "distributed.reshard_after_forward": "of sharded targets",
    "distributed.mp_policy": "precision is target.precision and engine.precision, and engine.reduce_precision of gradients between ranks",
    "distributed.autocast_dtype": "precision is target.precision and engine.precision",
    "distributed.activation_checkpointing_scope": "there is no activation checkpointing",
    "compile.dynamo_cache_size_limit": "shapes are static",
    "checkpoint.save_consolidated": "the export at the end is one file, checkpoints are too",
    "checkpoint.is_async": "a checkpoint is written before the next step",
    "checkpoint.wait_for_staging": "a checkpoint is written before the next step",
    "checkpoint.cpu_offload": "checkpoints go through host memory anyway",
    "checkpoint.single_rank_consolidation": "rank 0 writes",
    "checkpoint.staging_dir": "a checkpoint is staged beside its place",
    "checkpoint.consolidation_timeout_minutes": "nothing is consolidated; see dist_env.timeout_minutes",
    "checkpoint.v4_compatible": "config.json is the engines' contract",
    "checkpoint.allow_legacy_pickle_restore": "nothing is unpickled",
    "checkpoint.model_cache_dir": "HF_HOME is the place of downloads",
    "checkpoint.model_repo_id": "NeMo's own bookkeeping",
    "checkpoint.model_state_dict_keys": "NeMo's own bookkeeping",
    "checkpoint.original_model_root_dir": "NeMo's own bookkeeping",
    "checkpoint.skip_task_head_prefixes_for_base_model": "a drafter has no head",
    "checkpoint.legacy_paramwrapper_layout": "there are no adapters",
    "recipe_args.num_workers": "rows are tokenised before the first step, by data.workers processes",
    "recipe_args.target_force_hf": "the target is transformers' own class anyway",
    "recipe_args.prefix_weight_base": "NeMo's DFlash 2 ignores it too",
    "recipe_args.dpace_alpha": "only of loss_type dpace",
}  # fmt: skip

# Field -> what provides it, or that nothing does. Any value but NeMo's default is refused with this.
REFUSED = {
    "distributed.pp_size": "a pipelined target has no layer outputs to capture; NeMo refuses it too",
    "distributed.cp_size": "the target is not divided along the sequence; longer documents: data.long_documents=window",
    "distributed.ep_size": "experts are not divided over processes; each holds the whole target",
    "distributed.activation_checkpointing": "a smaller train.micro_batch_size or train.num_anchors saves memory instead",
    "distributed.sequence_parallel": "the target is not sharded",
    "distributed.tp_plan": "the target is not sharded",
    "distributed.offload_policy": "the target stays on its device",
    "distributed.enable_async_tensor_parallel": "the target is not sharded",
    "distributed.enable_compile": "compile.enabled compiles the draft layers",
    "distributed.moe": "experts run as transformers runs them",
    "distributed.pipeline": "a pipelined target has no layer outputs to capture",
    "compile.mode": "torch.compile's default is used",
    "compile.fullgraph": "torch.compile's default is used",
    "compile.dynamic": "shapes are static",
    "compile.backend": "torch.compile's default is used",
    "compile.options": "torch.compile's defaults are used",
    "checkpoint.model_save_format": "weights are safetensors",
    "checkpoint.best_metric_key": "train.best_metric names the metric, of ours",
    "checkpoint.is_peft": "the whole drafter is trained",
    "checkpoint.dequantize_base_checkpoint": "transformers decides it by the target's config",
    "checkpoint.diffusers_compatible": "a drafter is no pipeline of diffusers",
    "recipe_args.mask_reasoning_content": "reasoning is drafted like the rest of an answer when it is served, and is supervised; leave it out",
    "recipe_args.save_checkpoint_every_epoch": "checkpoints count steps: set recipe_args.ckpt_every_steps (the final one is always kept)",
    "recipe_args.draft_weights_path": "drafter.init_from starts from a released drafter (NeMo refuses this field too)",
    "wandb.dir": "the run's own folder is used",
    "wandb.tags": "track.wandb_group and track.wandb_name tell runs apart",
    "wandb.notes": "track.wandb_group and track.wandb_name tell runs apart",
}

DIFFERENCES = (
    "NeMo supervises the assistant header of a template without generation marks unless mask_generation_prompt is true; here only what the "
    "target generates ever is, and no knob changes that: engines draft nothing else",
    "a block is supervised up to its first unsupervised slot; NeMo goes on after the hole. Blocks near the end of an answer count with what they have",
    "micro-batches, ranks and accumulation do not change the loss: sums over the whole step, divided once. NeMo averages micro-batch means, so its "
    "grad_accumulation_steps is part of the objective. An epoch's short last step counts the rows it has, in both",
    "the selector's term is divided by all supervised weight; objective.selector_denominator=covered is NeMo's, exact only with one micro-batch a step",
    "weights and moments are fp32 under bfloat16 compute; NeMo's are bfloat16. Norms, taps and codebooks have no weight decay",
    "shuffle_seed also seeds the drafter's initialisation, which NeMo leaves unseeded",
    "a slot's weight is exp(-k / gamma), k from 0 at the first drafted slot, in both",
    "held-out rows are evaluated at the end; train.eval_every_steps evaluates more often. Real decoding follows where val_data_path is set",
    "what NeMo AutoModel 0.7.0 ignores is obeyed: draft_num_attention_heads, draft_num_key_value_heads, draft_head_dim, and draft_sliding_window in the "
    "export, which is one that engines load",
)


@dataclass(kw_only=True)
class NemoRecipe:
    """recipe: sections and knobs of ours, as YAML would give them. given: the knobs (dotted) that the file itself sets, not NeMo's defaults.
    notes: what became of each field, and what NeMo does otherwise. fields: knob (dotted) -> the field that it was taken from."""

    recipe: dict[str, Any]
    given: frozenset[str]
    notes: list[str]
    fields: dict[str, str]

    def in_its_words(self, text: str) -> str:
        """An error about knobs, with the fields of the file that they come from."""
        named = [
            f"{knob} is {field}"
            for knob, field in self.fields.items()
            if re.search(rf"(^|[\s:]){re.escape(knob)}\b", text)
        ]
        return f"{text} (of this file: {', '.join(named)})" if named else text


def is_nemo(listed: Any) -> bool:
    """Whether a YAML document is a NeMo AutoModel recipe."""
    return isinstance(listed, dict) and "recipe_args" in listed


def is_nemo_override(key: str) -> bool:
    """Whether a dotted key belongs to NeMo's recipe. `optimizer` is a section of both; NeMo's fields in it mean the same."""
    section, _, rest = key.partition(".")
    return section in TOP and (section != "optimizer" or rest in FIELDS["optimizer"])


def change(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The recipe with `section.field` keys set."""
    raw = copy.deepcopy(raw)
    for key, value in overrides.items():
        node, parts = raw, key.split(".")
        for part in parts[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[parts[-1]] = value
    return raw


def read_nemo(raw: Any, where: str, *, processes: int | None = None) -> NemoRecipe:
    """Translate a NeMo recipe. Raises ValueError naming the field, its value and what provides it.

    processes: how many share a step; null: torchrun's WORLD_SIZE, else 1.
    """
    if not is_nemo(raw):
        raise ValueError(f"{where}: no recipe of NeMo AutoModel: it has no recipe_args")
    fields, given = _fields(raw, where)
    translation = _Translation(fields, given, where, processes or int(os.environ.get("WORLD_SIZE", 1)))
    return translation.run()


def _fields(raw: dict[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """(dotted field -> value or default, the fields that are given)."""
    check_keys(raw, TOP, where)
    kind = raw.get("recipe", CLASS)
    if str(kind).rpartition(".")[2] != CLASS:
        raise ValueError(
            f"{where}: recipe = {kind}: only {CLASS} is understood{nearest(str(kind), [CLASS])}; DFlash v1 is drafter.conv_kernel_size=0 "
            "drafter.selector_rank=0 in a recipe of ours"
        )
    if raw.get("peft") is not None:
        raise ValueError(f"{where}: peft: the whole drafter is trained; leave it out (NeMo refuses it too)")
    values: dict[str, Any] = {}
    given: set[str] = set()
    for section, defaults in FIELDS.items():
        node = raw.get(section)
        if node is not None and not isinstance(node, dict):
            raise ValueError(f"{where}: {section} = {node!r}: must be a section of fields")
        check_keys(node or {}, list(defaults), f"{where}: section {section!r}")
        for name, default in defaults.items():
            key = f"{section}.{name}"
            if name in (node or {}):
                given.add(key)
            value = (node or {}).get(name, default)
            if value is REQUIRED or (default is REQUIRED and value is None):
                raise ValueError(f"{where}: {key} has no value, and NeMo has no default for it")
            values[key] = value
    if raw.get("wandb") is None:
        values["wandb.enable"] = False
    return values, given


class _Translation:
    """One recipe on its way. Every field ends in exactly one of the three fates."""

    def __init__(self, fields: dict[str, Any], given: set[str], where: str, processes: int):
        self.fields, self.given, self.where, self.processes = fields, given, where, processes
        self.recipe: dict[str, Any] = {}
        self.rows: list[tuple[str, str]] = []
        self.done: set[str] = set()
        self.stated: dict[str, str] = {}  # knob -> the field that sets it

    def run(self) -> NemoRecipe:
        for key, knob in SAME.items():
            self.take(key, {knob: self.fields[key]})
        for translate in (
            self.data,
            self.steps,
            self.objective,
            self.numbers,
            self.sharding,
            self.saving,
            self.tracking,
        ):
            translate()
        for key, why in WITHOUT_EFFECT.items():
            self.note(key, f"changes nothing: {why}")
        for key, why in REFUSED.items():
            self.only_default(key, why)
        missed = set(self.fields) - self.done
        assert not missed, f"fields without a fate: {sorted(missed)}"
        width = max(len(left) for left, _ in self.rows)
        notes = [f"{self.where}: a recipe of NeMo AutoModel, taken as"]
        notes += [f"  {left:<{width}}  {right}" for left, right in self.rows]
        notes += ["what differs from NeMo AutoModel:", *(f"  {text}" for text in DIFFERENCES)]
        return NemoRecipe(recipe=self.recipe, given=frozenset(self.stated), notes=notes, fields=self.stated)

    # --- the three fates

    def take(self, key: str, knobs: dict[str, Any], why: str = "") -> None:
        """Mapped to knobs."""
        self.done.add(key)
        self.stated |= dict.fromkeys(knobs, key) if key in self.given else {}
        for knob, value in knobs.items():
            node, parts = self.recipe, knob.split(".")
            for part in parts[:-1]:
                node = node.setdefault(part, {})
            node[parts[-1]] = value
        self._say(
            key, ", ".join(f"{knob} = {_text(value)}" for knob, value in knobs.items()) + (f": {why}" if why else "")
        )

    def note(self, key: str, text: str) -> None:
        """Without effect, which is said where it is given."""
        self.done.add(key)
        if key in self.given:
            self._say(key, text)

    def refuse(self, key: str, why: str) -> None:
        raise ValueError(f"{self.where}: {key} = {_text(self.fields[key])}: {why}")

    def only_default(self, key: str, why: str) -> None:
        """Refused unless it says what NeMo assumes anyway, or nothing."""
        self.done.add(key)
        section, name = key.split(".")
        if self.fields[key] not in (None, FIELDS[section][name]):
            self.refuse(key, why)

    def _say(self, key: str, text: str) -> None:
        default = "" if key in self.given else " (default)"
        self.rows.append((f"{key} = {_text(self.fields[key])}{default}", text))

    # --- fields that need more than a name

    def whole(self, key: str, least: int) -> int:
        value = self.fields[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(key, f"must be a whole number of at least {least}")
        return value

    def data(self) -> None:
        for key, split, knob in (
            ("recipe_args.train_data_path", "recipe_args.train_split", "data.train"),
            ("recipe_args.val_data_path", "recipe_args.val_split", "data.heldout"),
        ):
            paths, part = self.fields[key], self.fields[split]
            if not fits(paths, str | list[str] | None):
                self.refuse(key, "must be a path, or a list of paths")
            entries = [] if paths is None else [str(p) for p in paths] if isinstance(paths, list) else [str(paths)]
            if part is not None and re.search(r"[\[\]]", str(part)):
                self.refuse(
                    split,
                    "NeMo shuffles before it slices, which nothing here repeats; write the rows that you mean into a file",
                )
            hub = [
                e
                for e in entries
                if re.fullmatch(r"[\w.-]+/[\w.-]+", e) and not PurePath(e).suffix and not os.path.exists(e)
            ]
            named = [f"{e}:{part}" if part is not None and e in hub else e for e in entries]
            self.take(key, {knob: named})
            self.note(
                split,
                f"of {', '.join(hub)}"
                if hub
                else "changes nothing: only a data set of the Hub has splits, in NeMo too",
            )
        packed = self.whole("recipe_args.packed_sequence_size", 0)
        length = self.whole("recipe_args.seq_length", 2)
        self.take(
            "recipe_args.seq_length",
            {"data.max_length": packed or length},
            "packed_sequence_size replaces it" if packed else "",
        )
        self.take(
            "recipe_args.packed_sequence_size",
            {"data.pack": bool(packed)},
            ""
            if packed
            else "one conversation per row, as NeMo; data.pack=true fills rows and trains on more per second",
        )
        always = "only what the target generates is supervised, whatever this says"
        self.note(
            "recipe_args.mask_generation_prompt",
            "what is always done here" if self.fields["recipe_args.mask_generation_prompt"] else always,
        )

    def steps(self) -> None:
        key = "recipe_args.grad_accumulation_steps"
        micro, accumulated = self.whole("recipe_args.micro_batch_size", 1), self.whole(key, 1)
        replicas = max(1, self.processes // self.whole("distributed.tp_size", 1))
        self.take(
            key,
            {"train.global_batch_size": micro * accumulated * replicas},
            f"{micro} rows x {accumulated} x {replicas} data-parallel process{'es' if replicas > 1 else ''}",
        )
        if self.fields["recipe_args.shuffle_seed"] is None:
            self.refuse("recipe_args.shuffle_seed", "order and anchors need a seed")

    def objective(self) -> None:
        gamma = self.fields["recipe_args.loss_decay_gamma"]
        uniform = "uniform weights" if gamma is None else ""
        self.take(
            "recipe_args.loss_decay_gamma", {"objective.loss_decay_gamma": UNIFORM if gamma is None else gamma}, uniform
        )
        kind = self.fields["recipe_args.loss_type"]
        if kind not in (None, "dflash"):
            self.refuse(
                "recipe_args.loss_type",
                "only dflash is trained, the position-decayed cross-entropy (0.7.0's DFlash 2 refuses others too)",
            )
        self.note("recipe_args.loss_type", "the position-decayed cross-entropy")

    def numbers(self) -> None:
        betas = self.fields["optimizer.betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2 or any(finite(b) is None for b in betas):
            self.refuse("optimizer.betas", "must be two numbers")
        self.take("optimizer.betas", {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]})
        clip = self.fields["recipe_args.max_grad_norm"]
        self.take("recipe_args.max_grad_norm", {"optimizer.max_grad_norm": 0.0 if clip is None else clip})
        backend, key = self.fields["recipe_args.attention_backend"], "recipe_args.attention_backend"
        kinds = {"flex_attention": "auto", "sdpa": "dense", "eager": "dense"}
        if not isinstance(backend, str) or backend not in kinds:
            self.refuse(key, f"must be one of {', '.join(kinds)}{nearest(str(backend), list(kinds))}")
        self.take(
            key,
            {"engine.attention": kinds[backend]},
            "block-sparse on CUDA, dense elsewhere" if kinds[backend] == "auto" else "",
        )
        key, kernel = "recipe_args.target_attn_implementation", self.fields["recipe_args.target_attn_implementation"]
        if kernel is None:
            self.note(key, "target.attn_implementation = sdpa")
        else:
            self.take(key, {"target.attn_implementation": kernel})
        low = " (target.precision=fp8 computes the frozen target in 8 bits)" if "fp8" in Precision.__members__ else ""
        for name in FIELDS["fp8"]:
            if name == "enabled" and self.fields["fp8.enabled"]:
                self.refuse(
                    "fp8.enabled", f"the drafter trains in bfloat16 over fp32 masters{low}; leave the section out"
                )
            self.note(f"fp8.{name}", "changes nothing: fp8.enabled is not true")
        dense = self.recipe["engine"]["attention"] == "dense"
        if "compile.enabled" not in self.given:
            self.note("compile.enabled", "")  # ours compiles by default
        elif self.fields["compile.enabled"] is True and dense:
            self.note("compile.enabled", "changes nothing: layers are compiled with block-sparse attention only")
        else:
            self.take("compile.enabled", {"engine.compile": self.fields["compile.enabled"]})
        if not self.fields["compile.enabled"]:
            for name in FIELDS["compile"]:
                if name != "enabled":
                    self.note(f"compile.{name}", "changes nothing: compile.enabled is not true")
                    self.fields[f"compile.{name}"] = FIELDS["compile"][name]

    def sharding(self) -> None:
        drafter = (
            "engine.kind=fsdp2 shards the drafter" if "fsdp2" in EngineKind.__members__ else "it is replicated here too"
        )
        self.note("distributed.strategy", f"shards the target, the drafter is replicated in NeMo; {drafter}")
        if self.fields["distributed.strategy"] not in ("fsdp2", "megatron_fsdp", "ddp"):
            self.refuse("distributed.strategy", "must be fsdp2, megatron_fsdp or ddp")
        self.note(
            "distributed.tp_size",
            "the target is not divided: every process holds it whole (2 bytes a parameter in bfloat16) and has rows of its own, so a step has as many "
            "rows as in NeMo only because train.global_batch_size counts NeMo's replicas"
            if self.whole("distributed.tp_size", 1) > 1
            else "the target is not divided",
        )

    def saving(self) -> None:
        output = PurePath(str(self.fields["recipe_args.output_dir"]))
        folder = self.fields["checkpoint.checkpoint_dir"]
        if folder is not None and PurePath(str(folder)) != output / "checkpoints":
            self.refuse(
                "checkpoint.checkpoint_dir",
                f"checkpoints go to {output / 'checkpoints'}, below recipe_args.output_dir; leave it out",
            )
        self.note("checkpoint.checkpoint_dir", "where checkpoints go")
        self.note(
            "checkpoint.enabled",
            "what is always done"
            if self.fields["checkpoint.enabled"]
            else "changes nothing: the last state and the export are always kept",
        )
        key = "checkpoint.restore_from"
        if self.fields[key] not in (None, "LATEST"):
            self.refuse(
                key,
                "a run continues from its newest checkpoint (LATEST); NeMo's own checkpoints cannot be continued, drafter.init_from starts from one's weights",
            )
        self.take(key, {"train.resume": self.fields[key] == "LATEST"})
        key = "checkpoint.max_recent_checkpoints"
        keep = KEEP_ALL if self.fields[key] is None else self.whole(key, 1)
        self.take(key, {"train.keep_checkpoints": keep}, "all are kept" if self.fields[key] is None else "")

    def tracking(self) -> None:
        if not fits(self.fields["wandb.enable"], bool | None):
            self.refuse("wandb.enable", "must be true or false")
        on = bool(self.fields["wandb.enable"])
        self.take(
            "wandb.enable",
            {} if on else {"track.wandb": "disabled"},
            "" if on else "no wandb section" if "wandb.enable" not in self.given else "",
        )
        entity = self.fields["wandb.entity"]
        if on and entity is not None and os.environ.get("WANDB_ENTITY") != entity:
            self.refuse(
                "wandb.entity",
                f"set the environment variable WANDB_ENTITY={entity}; a recipe names project, name and group",
            )
        self.note("wandb.entity", "as the environment says")
        mode = self.fields["wandb.mode"]
        known = ("online", "offline", "disabled")
        if mode not in (None, *known):
            self.refuse("wandb.mode", f"must be one of {', '.join(known)}")
        if on and mode is None:
            mode = "online"
        knobs: dict[str, Callable[[], Any]] = {
            "wandb.project": lambda: {"track.wandb_project": self.fields["wandb.project"]},
            "wandb.group": lambda: {"track.wandb_group": self.fields["wandb.group"]},
            "wandb.name": lambda: {"track.wandb_name": self.fields["wandb.name"] or self._default_name()},
            "wandb.mode": lambda: {"track.wandb": mode},
        }
        for key, made in knobs.items():
            if on:
                self.take(key, made())
            else:
                self.note(key, "changes nothing: W&B is off")
        if not on:
            for name in ("dir", "tags", "notes"):
                self.fields[f"wandb.{name}"] = None

    def _default_name(self) -> str:
        return (
            "traindflash2recipe_" + str(self.fields["recipe_args.target_model_name_or_path"]).rstrip("/").split("/")[-1]
        )


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
