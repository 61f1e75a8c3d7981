"""Recipes: merged once, typed, and refused with the name of what is wrong."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import typing

import pytest

from dflash_train.config.load import (
    default_text,
    help_text,
    knobs,
    load_recipe,
    parse_command,
    require,
    run_command,
    to_yaml,
    type_name,
)
from dflash_train.config.schema import Attention, Denominator, Precision, Recipe
from dflash_train.config.validate import validate


@pytest.fixture
def load(tmp_path):
    def load(text: str = "", *overrides: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(str(path), list(overrides))

    return load


def test_an_empty_recipe_is_all_defaults(load):
    recipe = load()
    assert recipe.drafter.block_size == 16
    assert recipe.optimizer.lr == 6e-4
    assert recipe.engine.attention is Attention.auto


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "drafter: {block_sise: 8}",
            "unknown key 'drafter.block_sise' in section 'drafter'; did you mean 'block_size'",
        ),
        ("blok_size: 8", "unknown key 'blok_size'"),
        ("lr: 1e-3", "did you mean 'optimizer.lr'"),
        ("trian: {seed: 1}", "did you mean 'train'"),
        ("drafter: 5", "drafter is a section, not a value"),
        ("- a\n- b", "a recipe is a mapping"),
        ("a: [", "not valid YAML"),
        ("defaults: [debug_cpu, {a: _self_}]", "its defaults cannot be read"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(load, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load(text)
    assert "recipe.yaml" in str(error.value)


@pytest.mark.parametrize("value", ["6e-4", "0.0006", "6.0e-4"])
def test_a_float_is_a_float_however_it_is_written(load, value):
    assert load(f"optimizer: {{lr: {value}}}").optimizer.lr == 6e-4
    assert load("", f"optimizer.lr={value}").optimizer.lr == 6e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.block_size=six", "drafter.block_size.*expected int"),
        ("optimizer.lr=fast", "optimizer.lr.*expected float"),
        ("drafter.block_size=8.5", "drafter.block_size"),
        ("engine.attention=flash", "engine.attention"),
        ("drafter.target_layer_ids=[1,two]", "drafter.target_layer_ids"),
        ("data.pack=perhaps", "data.pack"),
        ("drafter.blok_size=8", "did you mean 'block_size'"),
        ("block_size", "is not key=value"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(load, override, message):
    with pytest.raises(ValueError, match=message):
        load("", override)


def test_the_command_line_wins_over_the_file(load):
    recipe = load(
        "drafter: {block_size: 8, target_layer_ids: [1, 2]}\ntrain: {seed: 3}",
        "drafter.block_size=4",
        "drafter.target_layer_ids=[0,3]",
        "data.chat_template_kwargs={enable_thinking: false}",
        "engine.precision=bfloat16",
        "drafter.sliding_window=null",
    )
    assert (recipe.drafter.block_size, recipe.drafter.target_layer_ids, recipe.train.seed) == (4, [0, 3], 3)
    assert recipe.data.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.engine.precision is Precision.bfloat16
    assert type(recipe.drafter.target_layer_ids) is list


def test_a_saved_recipe_can_be_used_again_and_is_equal(load, tmp_path):
    recipe = load(
        "output_dir: out\ntarget: {path: t}\n"
        "data: {train: [a.jsonl, b.jsonl], chat_template_kwargs: {enable_thinking: true}}\n"
        "drafter: {block_size: 8, sliding_window: 64, layer_types: [sliding_attention, full_attention],\n"
        "          num_hidden_layers: 2}\n"
        "objective: {selector_denominator: covered}\noptimizer: {lr: 6e-4, eps: 1e-8}"
    )
    assert recipe.objective.selector_denominator is Denominator.covered
    recipe.provenance = {"git_commit": None, "command": ["train", "-c", "x"]}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(recipe))
    for name in (run, run / "config.yaml"):
        again = load_recipe(str(name))
        assert again == recipe
        assert to_yaml(again) == to_yaml(recipe)


def test_a_recipe_with_missing_values_is_saved_and_read(load, tmp_path):
    recipe = load("train: {seed: 5}")
    (tmp_path / "saved.yaml").write_text(to_yaml(recipe))
    assert load_recipe(str(tmp_path / "saved.yaml")) == recipe


CONTRADICTIONS = {
    "drafter.block_size = 1:.*at least 2": "drafter: {block_size: 1}",
    "drafter.sliding_window = 4:.*at least block_size = 8": "drafter: {block_size: 8, sliding_window: 4}",
    r"drafter.layer_types.*needs one entry per draft layer \(5\)": "drafter: {layer_types: [full_attention]}",
    "entries are sliding_attention or full_attention": "drafter: {layer_types: [full], num_hidden_layers: 1}",
    "contradict each other": "drafter: {layer_types: [sliding_attention], num_hidden_layers: 1}",
    "power of two": "drafter: {selector_top_k: 12}",
    "must not exceed block_size = 2": "drafter: {block_size: 2, conv_kernel_size: 3}",
    "has a duplicate layer": "drafter: {target_layer_ids: [1, 1]}",
    "engine.precision = fp8: fp8 is for the frozen target alone": "engine: {precision: fp8}",
    "export.precision = fp8: fp8 is for the frozen target alone": "export: {precision: fp8}",
    "must be ascending": "drafter: {target_layer_ids: [3, 1]}",
    "optimizer.lr = 0.0: must be positive": "optimizer: {lr: 0.0}",
    "train.micro_batch_size = 0: must be at least 1": "train: {micro_batch_size: 0}",
    r"warmup_ratio = 1.5: must be in \[0, 1\)": "optimizer: {warmup_ratio: 1.5}",
    "train.max_steps = 0: must be null or at least 1": "train: {max_steps: 0}",
    "objective.loss_decay_gamma = -1.0: must be null or positive": "objective: {loss_decay_gamma: -1}",
    r"data.max_dropped = 2.0: is a share": "data: {max_dropped: 2}",
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_refused_before_anything_is_loaded(load, message):
    with pytest.raises(ValueError, match=message):
        load(CONTRADICTIONS[message])


def test_what_a_command_needs_is_asked_for_by_name(load):
    recipe = load()
    for name in ("output_dir", "target.path", "data.train"):
        with pytest.raises(ValueError, match=f"{name} has no value.*{name}=... on the command line"):
            require(recipe, name)
    require(load("output_dir: x"), "output_dir")


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"-c nothing-like-it.yaml: no such file"):
        load_recipe("nothing-like-it.yaml")


def test_every_knob_has_a_text_a_type_and_a_default():
    names = [name for name, _, _ in knobs()]
    assert len(names) == len(set(names)) > 60
    text = help_text()
    for name, field, kind in knobs():
        assert field.metadata["help"].endswith("."), name
        assert f"{name}  [{type_name(kind)}; {default_text(field)}]" in text


def test_identity_knobs_are_those_of_the_drafter():
    marked = {name for name, field, _ in knobs() if field.metadata["identity"]}
    assert marked == {f"drafter.{f.name}" for f in dataclasses.fields(Recipe().drafter)}


def test_a_command_without_arguments_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_command([], prog="train", description="d")
    assert exit_.value.code == 2
    assert "drafter.block_size" in capsys.readouterr().err


def test_two_recipes_do_not_share_lists(load):
    a, b = load(), load()
    a.data.train.append("x")
    assert b.data.train == []


@pytest.mark.parametrize("text", [
    "data: {train: {path: x}}", "data: {train: x}", "data: {chat_template_kwargs: [1]}", "data: {heldout: [[]]}", "regenerate: {mixture: {a: 1}}",
    "regenerate: {extra_body: [1]}", "regenerate: {base_urls: x}", "data: {limit: '${nowhere}'}", "data: {max_length: [1]}", "data: {limit: {a: 1}}",
    f"regenerate: {{mixture: [{{weight: {10**400}}}]}}", f"data: {{train: [{{path: x, weight: {10**400}}}]}}",
])  # fmt: skip
def test_a_value_of_another_kind_names_its_knob(load, text):
    section, key = text.split(": {")[0], text.split("{")[1].split(":")[0]
    with pytest.raises(ValueError, match=rf"{section}\.{key}"):
        load(text)


@pytest.mark.parametrize(("raised", "code", "said"), [
    (OSError(28, "No space left on device"), 2, "error: No space left on device; make room"),
    (ValueError("a\x1b[2Jb\u202e"), 2, "error: a\\u001b[2Jb\\u202e"),
])  # fmt: skip
def test_what_a_command_says_of_an_error(raised, code, said, capsys):
    def main(argv):
        raise raised

    with pytest.raises(SystemExit) as left:
        run_command(main)
    assert left.value.code == code and said in capsys.readouterr().err


def test_a_pipe_that_closes_ends_a_command_quietly():
    script = "from dflash_train.config.load import run_command\nrun_command(lambda argv: [print('x' * 1000) for _ in range(100000)] and 0)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_every_number_has_a_range():
    """No knob takes any number: far below zero, infinity and NaN are refused by name."""
    recipe, elsewhere = Recipe(), {"drafter.mask_token_id"}  # against the target's vocabulary
    for group in dataclasses.fields(recipe):
        section = getattr(recipe, group.name)
        hints = typing.get_type_hints(type(section)) if dataclasses.is_dataclass(section) else {}
        for name, hint in hints.items():
            kinds = {hint, *typing.get_args(hint)}
            wrong = [-(10**6)] if int in kinds and typing.get_origin(hint) is not list else []
            wrong += [-1e6, math.nan, math.inf] if float in kinds else []
            for value in wrong if f"{group.name}.{name}" not in elsewhere else []:
                changed = dataclasses.replace(recipe, **{group.name: dataclasses.replace(section, **{name: value})})
                with pytest.raises(ValueError, match=name):
                    validate(changed, "x")


@pytest.mark.parametrize(
    "value",
    ["temperature=-1", "top_p=0", "top_p=2", "top_k=-1", "block_sizes=[4,0]", "block_sizes=[1]", "batch_size=0"],
)
def test_evaluation_knobs_have_ranges(load, value):
    with pytest.raises(ValueError, match=f"evaluate.{value.split('=')[0]}"):
        load("", f"evaluate.{value}")
