"""Exports of NeMo AutoModel 0.7.0 mended by `check --fix`, and ours written as NeMo consolidates."""

from __future__ import annotations

import json

import pytest
import toys
import yaml
from released_drafters import write
from test_nemo_recipe import LEAST
from test_released import nemo as nemo_config
from test_released import random_tensors

from dflash_train.check import check, main
from dflash_train.config.nemo import change
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.folder import load_drafter_folder
from dflash_train.released.nemo import BACKUP, repair

# llama.cpp needs a hidden size of top_k (top_k + 1) at least
SMALL = {"selector_top_k": 4}
MINE = {
    "recipe_args.mask_token_id": toys.MASK, "recipe_args.block_size": 8, "recipe_args.target_layer_ids": [1, 3],
    "recipe_args.draft_num_hidden_layers": 2, "recipe_args.selector_rank": 12, "recipe_args.selector_top_k": 4,
}  # fmt: skip


@pytest.fixture
def export(tmp_path):
    return write(tmp_path / "export", nemo_config(block=SMALL), random_tensors())


@pytest.fixture
def nemo_yaml(tmp_path):
    def make(**fields):
        path = tmp_path / "nemo.yaml"
        path.write_text(yaml.safe_dump(change(LEAST, MINE | {f"recipe_args.{k}": v for k, v in fields.items()})))
        return path

    return make


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_before_it_is_refused_by_engines_and_after_it_has_no_fault(export, nemo_yaml, capsys):
    before = (export / "config.json").read_bytes()
    assert {"architecture", "partial rotary"} & {f.rule for f in check(export).faults}
    assert main([str(export)]) == 1 and "(an export of NeMo AutoModel; --fix mends it)" in capsys.readouterr().out
    assert main([str(export), "--fix", "--recipe", str(nemo_yaml(draft_sliding_window=16))]) == 0
    out = capsys.readouterr().out
    for text in ("Repaired", '["Qwen3DFlashDraftModel"] -> ["DFlash2DraftModel"]', "partial_rotary_factor", "draft_sliding_window = 16, from nemo.yaml",
                 "is_causal", BACKUP, "No faults."):  # fmt: skip
        assert text in out, text
    spec, _, config = load_drafter_folder(export)
    assert (spec.sliding_window, spec.layer_types, spec.is_causal) == (16, (SLIDING, SLIDING), False)
    assert "partial_rotary_factor" not in json.dumps(config) and "linear_conv_kernel_dim" not in config
    assert (export / BACKUP).read_bytes() == before


def test_the_windows_three_ways_and_none(export, nemo_yaml):
    with pytest.raises(ValueError, match=r"the window it was trained with is not in the export; give the recipe"):
        repair(export)
    assert not (export / BACKUP).exists() and config_of(export)["architectures"] == ["Qwen3DFlashDraftModel"]
    repair(export, recipe=nemo_yaml())  # absent: full attention
    assert (config_of(export)["layer_types"], config_of(export)["use_sliding_window"]) == ([FULL, FULL], False)


def test_a_window_may_be_named_instead(export):
    assert main([str(export), "--fix", "--window", "12"]) == 0
    assert config_of(export)["sliding_window"] == 12


def test_none_names_no_window(export):
    assert main([str(export), "--fix", "--window", "none"]) == 0
    assert config_of(export)["sliding_window"] is None


@pytest.mark.parametrize(("fields", "message"), [
    ({"block_size": 16}, "not the recipe of this export: block_size 16 in the recipe, 8 in the export"),
    ({"draft_num_hidden_layers": 5}, "5 draft layers in the recipe, 2 in the export"),
    ({"target_layer_ids": [0, 2]}, r"target_layer_ids \[0, 2\]"),
])  # fmt: skip
def test_the_recipe_of_another_run_is_refused(export, nemo_yaml, fields, message):
    with pytest.raises(ValueError, match=message):
        repair(export, recipe=nemo_yaml(**fields))
    assert not (export / BACKUP).exists()


def test_head_fields_that_nemo_ignored_are_named(export, nemo_yaml):
    lines = repair(export, recipe=nemo_yaml(draft_head_dim=128))
    assert any("draft_head_dim = 128 of the recipe never took effect: the tensors have 16" in line for line in lines)


@pytest.mark.parametrize(("options", "message"), [
    (["--window", "12"], "--window belongs to --fix"),
    (["--fix", "--window", "twelve"], "must be a number of tokens, or none"),
    (["--fix", "--window", "4"], "below block_size = 8"),
])  # fmt: skip
def test_wrong_options(export, capsys, options, message):
    assert main([str(export), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (export / BACKUP).exists()


def test_a_window_against_the_recipe_is_refused(export, nemo_yaml, capsys):
    assert main([str(export), "--fix", "--window", "12", "--recipe", str(nemo_yaml(draft_sliding_window=16))]) == 2
    assert "draft_sliding_window = 16; leave one of them out" in capsys.readouterr().err


def test_other_folders_are_left_alone(tmp_path, capsys):
    config = nemo_config() | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    folder = write(tmp_path / "x", config, random_tensors())
    assert main([str(folder), "--fix", "--window", "none"]) == 2
    assert "--fix mends exports of NeMo AutoModel" in capsys.readouterr().err


def test_mending_twice_keeps_nemos_own_file(export):
    before = (export / "config.json").read_bytes()
    repair(export, window=16)
    with pytest.raises(ValueError, match="this one says DFlash2DraftModel"):
        repair(export, window=16)
    assert (export / BACKUP).read_bytes() == before


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    tensors = random_tensors()
    del tensors["norm.weight"]
    with pytest.raises(ValueError, match="norm.weight: missing"):
        repair(write(tmp_path / "x", nemo_config(), tensors), window=16)


def test_a_v1_export_and_one_of_jetspec(tmp_path):
    folder = write(tmp_path / "v1", nemo_config(two=False), random_tensors(two=False))
    repair(folder, window=None)
    assert (config_of(folder)["architectures"], config_of(folder)["is_causal"]) == (["DFlashDraftModel"], False)
    jetspec = nemo_config(two=False)
    jetspec["dflash_config"]["causal"] = True
    folder = write(tmp_path / "jetspec", jetspec, random_tensors(two=False))
    repair(folder, window=None)
    assert config_of(folder)["is_causal"] is True
