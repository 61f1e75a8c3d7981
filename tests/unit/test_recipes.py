"""Shipped recipes load, and every command explains itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys
import yaml

from dflash_train import check, evaluate, export, serve, train
from dflash_train.config.load import find_recipe, knobs, load_recipe, to_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CHOICES = sorted((ROOT / "configs").glob("*/*.yaml"))


# What each is called with, besides its recipe.
COMMANDS = {
    "train": train.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "regenerate": toys.script("regenerate").main,
    "inspect_data": toys.script("inspect_data").main,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_load(path):
    recipe = load_recipe(str(path))
    assert recipe.target.path and recipe.output_dir
    assert recipe.data.train and recipe.drafter.mask_token_id is not None


@pytest.mark.parametrize("path", CHOICES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_shipped_choices_set_what_they_list(path, tmp_path):
    plain = tmp_path / "plain.yaml"
    plain.write_text("output_dir: out\n")
    recipe = load_recipe(str(plain), [f"{path.parent.name}={path.stem}"])
    listed = yaml.safe_load(path.read_text())
    section = yaml.safe_load(to_yaml(recipe))[path.parent.name]
    assert listed
    for key, value in listed.items():
        assert section[key] == (float(value) if isinstance(section[key], float) else value), key


def test_every_recipe_begins_with_what_it_is_for():
    for path in RECIPES:
        assert path.read_text().startswith("# "), path


def test_every_knob_has_a_help_text():
    for name, field, _ in knobs():
        text = field.metadata.get("help", "")
        assert len(text) > 5 and text.endswith("."), name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_knob(name):
    code, out, _ = toys.call(COMMANDS[name], "--help")
    assert code == 0
    missing = [knob for knob, _, _ in knobs() if f"  {knob}  [" not in out]
    assert not missing
    assert "key=value" in out and "-c" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_without_arguments_a_command_explains_itself(name):
    code, out, err = toys.call(COMMANDS[name])
    assert (code, out) == (2, "")
    assert "usage:" in err and "optimizer.lr" in err


def test_a_server_lists_its_flags_and_names_the_knobs_that_matter():
    code, out, _ = toys.call(serve.main, "--help")
    assert code == 0 and "--drafter" in out and "target.*" in out


def test_check_takes_a_folder_and_no_recipe():
    code, out, _ = toys.call(check.main, "--help")
    assert code == 0 and "folder" in out and "--target" in out
    code, out, err = toys.call(check.main)
    assert (code, out) == (2, "") and "usage:" in err and "folder" in err


def test_a_recipe_is_found_by_name_by_path_and_by_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = load_recipe("demo")
    assert load_recipe("demo.yaml") == load_recipe(str(ROOT / "recipes" / "demo.yaml")) == by_name
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(by_name))
    assert load_recipe("run") == load_recipe(str(run)) == load_recipe("run/config.yaml") == by_name
    assert find_recipe("run") == run / "config.yaml"


def test_a_name_that_is_no_recipe_gets_the_nearest_one():
    code, _, err = toys.call(train.main, "-c", "qwen3_dflash")
    assert code == 2 and err.startswith("error: -c qwen3_dflash") and "did you mean 'qwen3_dflash2.yaml'" in err


@pytest.mark.parametrize(
    ("name", "missing"), [("train", "output_dir"), ("inspect_data", "target.path"), ("regenerate", "target.path")]
)
def test_a_command_names_the_first_knob_that_it_lacks(name, missing, tmp_path):
    (tmp_path / "empty.yaml").write_text("train: {seed: 1}\n")
    code, _, err = toys.call(COMMANDS[name], "-c", str(tmp_path / "empty.yaml"))
    assert code == 2 and err.startswith(f"error: {missing} has no value; set it in the recipe or as {missing}=...")
