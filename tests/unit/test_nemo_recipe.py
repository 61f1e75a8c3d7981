"""Recipes of NeMo AutoModel: every field is mapped, said to change nothing, or refused by name."""

from __future__ import annotations

import copy

import pytest
import yaml

from dflash_train.config import nemo
from dflash_train.config.load import knobs, load_recipe, parse_command, to_yaml
from dflash_train.config.nemo import FIELDS, REFUSED, REQUIRED, SAME, WITHOUT_EFFECT, read_nemo
from dflash_train.config.schema import Attention, WandbMode

LEAST = {
    "recipe_args": {
        "target_model_name_or_path": "Qwen/Qwen3-8B", "train_data_path": "rows.jsonl", "seq_length": 3072, "micro_batch_size": 2,
        "num_epochs": 6, "mask_token_id": 151669, "output_dir": "out",
    },
    "optimizer": {"lr": 6e-4},
}  # fmt: skip
OPTIMIZER = {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.0, "warmup_ratio": 0.04, "min_lr_ratio": 0.1}
SHIPPED = {
    "qwen3_dflash2": {
        "recipe": "TrainDFlash2Recipe",
        "dist_env": {"backend": "nccl", "timeout_minutes": 30},
        "recipe_args": {
            "target_model_name_or_path": "Qwen/Qwen3-8B", "train_data_path": "/data/regen.jsonl", "val_data_path": None,
            "output_dir": "./outputs/dflash2_qwen3_8b", "seq_length": 3072, "micro_batch_size": 2, "grad_accumulation_steps": 1, "num_workers": 4,
            "num_epochs": 6, "draft_num_hidden_layers": 5, "block_size": 16, "num_anchors": 256, "loss_decay_gamma": 7.0, "mask_token_id": 151669,
            "attention_backend": "flex_attention", "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "selector_loss_weight": 1.0, "trust_remote_code": False, "shuffle_seed": 42, "log_every_steps": 10, "max_grad_norm": 1.0,
        },
        "optimizer": OPTIMIZER,
        "checkpoint": {"enabled": True, "checkpoint_dir": "./outputs/dflash2_qwen3_8b/checkpoints", "model_save_format": "safetensors",
                       "save_consolidated": True},
    },
    "qwen3_8_27b_dflash2": {
        "recipe": "TrainDFlash2Recipe",
        "dist_env": {"backend": "nccl", "timeout_minutes": 30},
        "distributed": {"strategy": "fsdp2", "tp_size": 2},
        "recipe_args": {
            "target_model_name_or_path": "Qwen/Qwen3.8-27B", "train_data_path": "/data/regen.jsonl", "val_data_path": None,
            "output_dir": "./outputs/dflash2_qwen3_8_27b", "seq_length": 3072, "micro_batch_size": 1, "grad_accumulation_steps": 8, "num_workers": 4,
            "num_epochs": 1, "draft_num_hidden_layers": 5, "block_size": 8, "num_anchors": 64, "loss_decay_gamma": 4.0, "mask_token_id": 248070,
            "target_layer_ids": [5, 19, 33, 47, 61], "attention_backend": "flex_attention", "draft_sliding_window": 2048,
            "draft_num_attention_heads": 32, "draft_num_key_value_heads": 8, "draft_head_dim": 128, "conv_kernel_size": 2, "conv_group_size": 16,
            "selector_rank": 256, "selector_top_k": 16, "selector_loss_weight": 1.0, "trust_remote_code": False, "shuffle_seed": 42,
            "log_every_steps": 10, "max_grad_norm": 1.0,
        },
        "optimizer": OPTIMIZER,
        "checkpoint": {"enabled": True, "checkpoint_dir": "./outputs/dflash2_qwen3_8_27b/checkpoints", "model_save_format": "safetensors",
                       "save_consolidated": True},
    },
}  # fmt: skip


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(recipe of NeMo, overrides...) as `-c` does."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def load(raw: dict, *overrides: str):
        path = tmp_path / "nemo.yaml"
        path.write_text(yaml.safe_dump(raw))
        return load_recipe(str(path), list(overrides))

    return load


def with_field(key: str, value) -> dict:
    return nemo.change(copy.deepcopy(LEAST), {key: value})


# --- the recipes that NeMo ships ---------------------------------------------------------------------------------------


def test_the_shipped_recipe_of_qwen3_8b(load):
    r = load(SHIPPED["qwen3_dflash2"])
    assert (r.target.path, r.data.train, r.data.heldout, r.data.max_length, r.data.pack) == (
        "Qwen/Qwen3-8B",
        ["/data/regen.jsonl"],
        [],
        3072,
        False,
    )
    assert (
        r.train.micro_batch_size,
        r.train.global_batch_size,
        r.train.num_epochs,
        r.train.num_anchors,
        r.train.seed,
    ) == (2, 2, 6.0, 256, 42)
    d = r.drafter
    assert (d.block_size, d.mask_token_id, d.num_hidden_layers, d.target_layer_ids, d.sliding_window) == (
        16,
        151669,
        5,
        None,
        None,
    )
    assert (d.conv_kernel_size, d.conv_group_size, d.selector_rank, d.selector_top_k) == (2, 16, 256, 16)
    o = r.optimizer
    assert (o.lr, o.beta1, o.beta2, o.weight_decay, o.warmup_ratio, o.min_lr_ratio, o.max_grad_norm) == (
        6e-4,
        0.9,
        0.95,
        0.0,
        0.04,
        0.1,
        1.0,
    )
    assert (r.objective.loss_decay_gamma, r.objective.selector_loss_weight) == (7.0, 1.0)
    assert (r.engine.attention, r.track.wandb, r.train.checkpoint_every_steps) == (
        Attention.auto,
        WandbMode.disabled,
        None,
    )


def test_the_shipped_recipe_of_qwen3_8_27b_has_its_attention_fields_obeyed_and_its_sharding_explained(load):
    r = load(SHIPPED["qwen3_8_27b_dflash2"])
    d = r.drafter
    assert (d.sliding_window, d.num_attention_heads, d.num_key_value_heads, d.head_dim) == (2048, 32, 8, 128)
    assert (d.target_layer_ids, d.block_size, r.train.global_batch_size) == ([5, 19, 33, 47, 61], 8, 8)
    said = "\n".join(r.notes)
    assert "distributed.tp_size = 2" in said and "every process holds it whole" in said
    assert "what NeMo AutoModel 0.7.0 ignores is obeyed" in said and "assistant header" in said


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_run_saves_of_it_is_a_recipe_of_ours(load, tmp_path, name):
    r = load(SHIPPED[name])
    (tmp_path / "saved.yaml").write_text(to_yaml(r))
    assert load_recipe(str(tmp_path / "saved.yaml")) == r


# --- defaults and the three fates --------------------------------------------------------------------------------------


def test_absent_fields_take_nemos_defaults_not_ours(load):
    r = load(LEAST)
    assert (r.optimizer.warmup_ratio, r.train.num_anchors, r.train.seed, r.objective.loss_decay_gamma) == (
        0.05,
        512,
        42,
        7.0,
    )
    assert (r.train.checkpoint_every_steps, r.train.keep_checkpoints, r.data.pack) == (None, nemo.KEEP_ALL, False)
    assert "drafter.block_size" not in r.given and "drafter.mask_token_id" in r.given


def test_every_field_of_nemo_has_a_fate_and_every_knob_exists(load):
    known = {name for name, _, _ in knobs()}
    assert set(SAME.values()) <= known
    fields = {f"{section}.{name}" for section, names in FIELDS.items() for name in names}
    assert {*SAME, *WITHOUT_EFFECT, *REFUSED} <= fields
    assert not set(WITHOUT_EFFECT) & set(REFUSED)
    load(LEAST)  # asserts that none is left over


# A value that no default is, for what is refused.
STRANGE = {
    "checkpoint.model_save_format": "torch_save", "compile.mode": "max-autotune", "compile.backend": "eager", "distributed.pp_size": 2,
    "distributed.cp_size": 2, "distributed.ep_size": 8, "checkpoint.best_metric_key": "val_loss",
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_what_nothing_provides_is_refused_by_name_with_what_does(key):
    raw = with_field(
        key, STRANGE.get(key, True if key.partition(".")[2] not in ("tags", "moe", "pipeline") else {"a": 1})
    )
    if key.startswith("compile."):
        raw["compile"]["enabled"] = True
    with pytest.raises(ValueError) as error:
        read_nemo(raw, "x")
    assert key in str(error.value) and REFUSED[key] in str(error.value)


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_what_changes_nothing_is_said_and_not_refused(key):
    notes = read_nemo(with_field(key, 3 if key == "distributed.dp_size" else True), "x").notes
    assert any(key in note and WITHOUT_EFFECT[key] in note for note in notes)


CHANGES = {
    "recipe_args.packed_sequence_size": (4096, {"data.max_length": 4096, "data.pack": True}),
    "recipe_args.loss_decay_gamma": (None, {"objective.loss_decay_gamma": nemo.UNIFORM}),
    "recipe_args.max_grad_norm": (None, {"optimizer.max_grad_norm": 0.0}),
    "recipe_args.attention_backend": ("sdpa", {"engine.attention": Attention.dense}),
    "recipe_args.target_attn_implementation": ("eager", {"target.attn_implementation": "eager"}),
    "recipe_args.grad_accumulation_steps": (4, {"train.global_batch_size": 8}),
    "recipe_args.train_data_path": (["a.jsonl", "b/c.parquet"], {"data.train": ["a.jsonl", "b/c.parquet"]}),
    "recipe_args.val_data_path": ("v.jsonl", {"data.heldout": ["v.jsonl"]}),
    "recipe_args.ckpt_every_steps": (2000, {"train.checkpoint_every_steps": 2000}),
    "checkpoint.restore_from": ("LATEST", {"train.resume": True}),
    "checkpoint.max_recent_checkpoints": (3, {"train.keep_checkpoints": 3}),
    "compile.enabled": (True, {"engine.compile": True}),
    "dist_env.timeout_minutes": (5, {"engine.timeout_minutes": 5.0}),
    "optimizer.betas": ([0.8, 0.99], {"optimizer.beta1": 0.8, "optimizer.beta2": 0.99}),
    "wandb.project": ("p", {"track.wandb_project": "p", "track.wandb": WandbMode.online, "track.wandb_name": "traindflash2recipe_Qwen3-8B"}),
    "recipe_args.draft_head_dim": (64, {"drafter.head_dim": 64}),
    "recipe_args.final_logit_softcapping": (20.0, {"drafter.final_logit_softcapping": 20.0}),
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES)
def test_mapped_fields(load, key):
    value, expected = CHANGES[key]
    r = load(with_field(key, value))
    for name, wanted in expected.items():
        got = r
        for part in name.split("."):
            got = getattr(got, part)
        assert got == wanted, name


def test_layers_are_compiled_as_ours_are_unless_the_recipe_says_otherwise(load):
    assert load(with_field("wandb.enable", False)).engine.compile is None
    assert load(with_field("compile.enabled", False)).engine.compile is False
    raw = nemo.change(with_field("compile.enabled", True), {"recipe_args.attention_backend": "sdpa"})
    assert load(raw).engine.compile is None  # dense attention is not compiled
    assert any("compile.enabled" in note and "block-sparse" in note for note in read_nemo(raw, "x").notes)


def test_uniform_weights_are_uniform():
    from dflash_train.objective.loss import decay

    assert decay(16, nemo.UNIFORM)[1:] == pytest.approx([1.0] * 15, abs=1e-7)


def test_a_hub_data_set_with_a_split_and_one_without(load):
    raw = with_field("recipe_args.train_data_path", "acme/chats")
    assert load(raw).data.train == ["acme/chats"]
    assert load(nemo.change(raw, {"recipe_args.train_split": "sft"})).data.train == ["acme/chats:sft"]
    with pytest.raises(ValueError, match=r"recipe_args.train_split = train\[1024:\]: NeMo shuffles before it slices"):
        load(nemo.change(raw, {"recipe_args.train_split": "train[1024:]"}))
    local = load(nemo.change(with_field("recipe_args.train_split", "sft"), {}))
    assert local.data.train == ["rows.jsonl"] and any("only a data set of the Hub has splits" in n for n in local.notes)


@pytest.mark.parametrize(("processes", "tp", "rows"), [(1, 1, 6), (8, 1, 48), (8, 2, 24), (2, 4, 6)])
def test_a_step_has_as_many_rows_as_nemos(processes, tp, rows):
    raw = nemo.change(LEAST, {"recipe_args.grad_accumulation_steps": 3, "distributed.tp_size": tp})
    assert read_nemo(raw, "x", processes=processes).recipe["train"]["global_batch_size"] == rows


# --- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key 'num_ancors'; did you mean 'num_anchors'": {"recipe_args.num_ancors": 4},
    "unknown key 'block_sise'; did you mean 'block_size'": {"recipe_args.block_sise": 3},
    "section 'optimizer': unknown key 'learning_rate'": {"optimizer.learning_rate": 1},
    "unknown key 'optimiser'; did you mean 'optimizer'": {"optimiser": {}},
    "recipe_args.mask_token_id has no value, and NeMo has no default": {"recipe_args.mask_token_id": None},
    "recipe = TrainEagle3Recipe: only TrainDFlash2Recipe": {"recipe": "TrainEagle3Recipe"},
    "recipe = TrainDFlashRecipe.*did you mean 'TrainDFlash2Recipe'": {"recipe": "TrainDFlashRecipe"},
    "peft: the whole drafter is trained": {"peft": {"dim": 8}},
    "fp8.enabled = true: the drafter trains in bfloat16": {"fp8.enabled": True},
    "loss_type = dpace: only dflash": {"recipe_args.loss_type": "dpace"},
    "attention_backend = flex_atention: must be one of .*did you mean 'flex_attention'": {"recipe_args.attention_backend": "flex_atention"},
    "checkpoint_dir = elsewhere: checkpoints go to out/checkpoints": {"checkpoint.checkpoint_dir": "elsewhere"},
    "restore_from = epoch_1: a run continues from its newest": {"checkpoint.restore_from": "epoch_1"},
    "recipe_args.train_data_path = .*must be a path": {"recipe_args.train_data_path": {"path": "a"}},
    "recipe_args.val_data_path = true: must be a path": {"recipe_args.val_data_path": True},
    "wandb.enable = false-ish: must be true or false": {"wandb.enable": "false-ish"},
    "WANDB_ENTITY=team": {"wandb.project": "p", "wandb.entity": "team"},
    "distributed.strategy = zero3: must be fsdp2": {"distributed.strategy": "zero3"},
    "betas = .*must be two numbers": {"optimizer.betas": [0.9]},
    "micro_batch_size = 0: must be a whole number of at least 1": {"recipe_args.micro_batch_size": 0},
    "optimizer = 5: must be a section": {"optimizer": 5},
    "drafter.block_size.*expected int.*of this file: drafter.block_size is recipe_args.block_size": {"recipe_args.block_size": "eight"},
    "drafter.block_size = 1: .*drafter.block_size is recipe_args.block_size": {"recipe_args.block_size": 1},
    "drafter.selector_top_k = 12: must be a power of two.*selector_top_k is recipe_args.selector_top_k": {"recipe_args.selector_top_k": 12},
}  # fmt: skip


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(load, monkeypatch, message):
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    with pytest.raises(ValueError, match=message) as error:
        load(nemo.change(LEAST, MISTAKES[message]))
    assert "nemo.yaml" in str(error.value)


def test_required_fields_are_those_without_a_default():
    required = [f"{s}.{n}" for s, names in FIELDS.items() for n, default in names.items() if default is REQUIRED]
    assert len(required) == 8
    for key in required:
        raw = copy.deepcopy(LEAST)
        section, name = key.split(".")
        del raw[section][name]
        with pytest.raises(ValueError, match=f"{key} has no value"):
            read_nemo(raw, "x")


# --- the command line --------------------------------------------------------------------------------------------------


def test_overrides_in_nemos_words_and_in_ours(load):
    r = load(
        LEAST,
        "recipe_args.seq_length=128",
        "optimizer.lr=1e-3",
        "optimizer.eps=1e-6",
        "train.max_steps=3",
        "track=wandb_offline",
    )
    assert (r.data.max_length, r.optimizer.lr, r.optimizer.eps, r.train.max_steps, r.track.wandb) == (
        128,
        1e-3,
        1e-6,
        3,
        WandbMode.offline,
    )
    with pytest.raises(ValueError, match="drafter.block_size = 1: a block") as error:
        load(LEAST, "drafter.block_size=1")
    assert "recipe_args" not in str(error.value)
    with pytest.raises(ValueError, match="did you mean 'seq_length'"):
        load(LEAST, "recipe_args.seq_lenght=128")
    with pytest.raises(ValueError, match="did you mean 'max_steps'"):
        load(LEAST, "train.max_step=3")


def test_dashes_as_nemos_command_takes_them(tmp_path):
    path = tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(LEAST))
    call = ["-c", str(path), "--recipe_args.seq_length", "64", "--recipe_args.mask_token_id=155", "train.max_steps=2"]
    r = parse_command(call, prog="train", description="d")
    assert (r.data.max_length, r.drafter.mask_token_id, r.train.max_steps) == (64, 155, 2)
    with pytest.raises(ValueError, match=r"--recipe_args.seq_length has no value"):
        parse_command(["-c", str(path), "--recipe_args.seq_length"], prog="train", description="d")


def test_a_recipe_of_ours_is_not_taken_for_nemos():
    assert not nemo.is_nemo({"drafter": {}}) and not nemo.is_nemo([]) and nemo.is_nemo({"recipe_args": None})
