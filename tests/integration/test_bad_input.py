"""What a user can get wrong ends with exit code 2 and one error naming it and the remedy; nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file

import dflash_train.train as training
from dflash_train import build, check, evaluate
from dflash_train.config.load import load_recipe
from dflash_train.engine.torch import TorchEngine
from dflash_train.target.hf import HFTarget
from dflash_train.types import TargetFeatures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(tmp_path, target_dir):
    """Path of a recipe that trains for two steps as it is; its data is rows.jsonl beside it."""
    ids = [p + p[::-1] for p in toys.prompts(6)]
    rows = [{"id": f"r{i}", "prompt_ids": row[:4], "response_ids": row[4:]} for i, row in enumerate(ids)]
    toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
output_dir: {tmp_path}/run
target: {{path: {target_dir}}}
data: {{train: [{tmp_path}/rows.jsonl], max_length: 32}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
train: {{max_steps: 2, global_batch_size: 2, num_anchors: 4, log_every_steps: 1}}
track: {{wandb: disabled, progress: false}}
""")
    return path


def refused(recipe: Path, *overrides: object, main=training.main, lines: int = 1) -> str:
    """The error's text. Everything else about the failure is checked here; lines=0 allows a table below the error."""
    code, _, err = toys.call(main, "-c", recipe, *overrides)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1, err
    assert "Traceback" not in err
    text = err[err.index("error: ") :]
    assert not lines or len(text.splitlines()) == lines, text
    assert not (recipe.parent / "run").exists()
    return text


# --- data ---


def test_the_recipe_that_the_others_spoil_is_good(recipe):
    code, _, err = toys.call(training.main, "-c", recipe)
    assert code == 0, err


@pytest.mark.parametrize("main", [training.main, toys.script("inspect_data").main], ids=["train", "inspect"])
def test_missing_data_file(recipe, main):
    text = refused(recipe, "data.train=[nowhere/rows.jsonl]", main=main)
    assert "nowhere/rows.jsonl does not exist; correct the path" in text


def test_missing_prompts(recipe):
    knobs = ["regenerate.prompts=nowhere.jsonl", f"regenerate.output={recipe.parent}/out.jsonl"]
    assert "nowhere.jsonl does not exist" in refused(recipe, *knobs, main=toys.script("regenerate").main)
    assert not (recipe.parent / "out.jsonl").exists()


@pytest.mark.parametrize("main", [training.main, toys.script("inspect_data").main], ids=["train", "inspect"])
def test_broken_lines_are_named(recipe, main):
    path = recipe.parent / "rows.jsonl"
    good = path.read_text().splitlines()[0]
    path.write_text(f'{good}\n{{"messages": [\n\n{{"messages": []}}\n')
    text = refused(recipe, main=main, lines=0)
    assert "share dropped 0.667 > max_dropped 0.1" in text and "raise data.max_dropped" in text
    assert re.search(rf"dropped +1  invalid_json +{path}:2", text)
    assert re.search(rf"dropped +1  \w+ +{path}:4", text)
    code, out, err = toys.call(main, "-c", recipe, "data.max_dropped=0.7")
    assert code == 0 and "kept 1 of 3 rows" in out, err


def test_no_usable_row(recipe):
    path = recipe.parent / "rows.jsonl"
    image = [
        {"role": "user", "content": [{"type": "image", "image": "p.png"}]},
        {"role": "assistant", "content": "w20"},
    ]
    toys.write_jsonl(path, [{"messages": image}, {"messages": []}, {"prompt_ids": [20, 21], "response_ids": []}])
    for most in (0.1, 1.0):
        text = refused(recipe, f"data.max_dropped={most}", lines=0)
        assert text.startswith("error: 0 usable rows of 3\n")
        assert f"non_text_content     {path}:1" in text and f"{path}:3" in text


def test_data_other_than_certified(recipe):
    path, rows = recipe.parent / "certificate.json", recipe.parent / "rows.jsonl"
    assert "data.certificate = nowhere.json: no such file" in refused(recipe, "data.certificate=nowhere.json")
    assert toys.call(toys.script("inspect_data").main, "-c", recipe, "--certificate", path).code == 0
    text = refused(recipe, f"data.certificate={path}", "data.max_length=16", lines=0)
    assert 'settings: certified {"max_length": 32}, now {"max_length": 16}' in text
    toys.write_jsonl(rows, [json.loads(line) for line in rows.read_text().splitlines()][:-1])
    text = refused(recipe, f"data.certificate={path}", lines=0)
    assert "files: certified" in text and "fingerprint: certified" in text and "inspect_data.py --certificate" in text


def test_rows_rendered_by_another_template(recipe):
    chat = [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w30 w31 w32"}]
    row = {"messages": chat, "generator": {"model": "toy", "template_hash": "0123456789abcdef"}}
    toys.write_jsonl(recipe.parent / "rows.jsonl", [row])
    text = refused(recipe)
    assert "generator.template_hash of 1 of 1 rows is 0123456789abcdef, but this run has " in text
    assert "Set data.chat_template" in text


# --- mask token ---


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (0, r"this is the pad token \(<pad>\)"),
        (1, r"this is the bos token \(<bos>\)"),
        (2, r"this is the eos token \(<eos>\)"),
        (160, r"must be in \[0, 160\), the rows of the target's embedding"),
        (-1, r"must be in \[0, 160\), the rows of the target's embedding"),
        ("null", "it is required"),
    ],
)
def test_a_mask_token_that_cannot_serve(recipe, mask, rule, monkeypatch):
    monkeypatch.setattr(HFTarget, "load", lambda *_: pytest.fail("the target was loaded"))
    text = refused(recipe, f"drafter.mask_token_id={mask}")
    assert re.search(rf"drafter.mask_token_id = {mask}: {rule}.*; unused here: 7 or 8$", text.strip())


def test_a_mask_token_that_occurs_in_the_data(recipe):
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").open()]
    rows[2]["response_ids"][3] = rows[4]["prompt_ids"][0] = rows[4]["response_ids"][1] = 12
    toys.write_jsonl(recipe.parent / "rows.jsonl", rows)
    count = sum((r["prompt_ids"] + r["response_ids"]).count(12) for r in rows)
    text = refused(recipe, "drafter.mask_token_id=12")
    assert re.search(rf"mask_token_id = 12 \(w12\) occurs {count} times in \d of 6 training rows \(first: r\d\)", text)
    assert "choose a token that never occurs" in text


def test_a_mask_token_without_a_word_is_accepted_with_a_note(recipe):
    code, out, _ = toys.call(training.main, "-c", recipe)
    assert code == 0 and "drafter.mask_token_id = 155: an embedding row without a token" in out


# --- target and recipe ---


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("drafter.target_layer_ids=[1,7]", "drafter.target_layer_ids = [1, 7]"),
        ("drafter.target_layer_ids=[1,4]", "drafter.target_layer_ids = [1, 4]"),
        ("drafter.target_layer_ids=[3,1]", "must be ascending"),
        ("drafter.target_layer_ids=[-1]", "has a negative layer"),
        ("drafter.sliding_window=3", "drafter.sliding_window = 3: must be null or at least block_size = 4"),
        ("drafter.num_layers=2", "unknown key 'drafter.num_layers' in section 'drafter'; did you mean"),
        ("optimizer.learning_rate=1", "unknown key 'optimizer.learning_rate' in section 'optimizer'"),
        ("optimizer.lr=six", "optimizer.lr: Value 'six'"),
        ("engine.attention=flex", "engine.attention = flex: its backward needs CUDA"),
        ("drafter.conv_group_size=7", "conv_group_size"),
        ("data.chat_template=nowhere.jinja", "data.chat_template nowhere.jinja does not exist"),
    ],
)
def test_a_value_that_does_not_fit(recipe, knob, message):
    text = refused(recipe, knob)
    assert message in text


def test_a_value_of_the_wrong_type_in_the_file(recipe):
    recipe.write_text(recipe.read_text() + "optimizer: {lr: six}\n")
    text = refused(recipe)
    assert str(recipe) in text and "optimizer.lr" in text and "expected float" in text


def test_a_target_without_a_chat_template(recipe, tmp_path):
    folder = toys.save_toy(tmp_path / "untemplated")
    (folder / "chat_template.jinja").unlink()
    for main in (training.main, toys.script("inspect_data").main):
        text = refused(recipe, f"target.path={folder}", main=main)
        assert f"target {folder} has no chat template; set data.chat_template" in text


@pytest.mark.parametrize("path", ["/nowhere/target", "nowhere/at/all", "{tmp}/empty"])
def test_a_target_that_is_not_there(recipe, tmp_path, path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    path = path.format(tmp=tmp_path)
    text = refused(recipe, f"target.path={path}")
    assert f"target.path = {path}" in text and "give a local folder or a Hub id" in text


@pytest.mark.parametrize("name", ["inspect_data", "regenerate"])
def test_a_target_that_is_not_there_for_the_data_commands(recipe, tmp_path, name):
    more = [f"regenerate.prompts={tmp_path}/rows.jsonl", f"regenerate.output={tmp_path}/out.jsonl"]
    text = refused(recipe, "target.path=/nowhere/target", *more, main=toys.script(name).main)
    assert "/nowhere/target" in text


def test_a_target_without_weights_or_tokenizer(recipe, tmp_path):
    bare = toys.save_toy(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert f"target.path = {bare}: cannot be loaded" in refused(recipe, f"target.path={bare}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert str(bare) in refused(recipe, f"target.path={bare}")


def test_embedded_is_no_training_set(recipe):
    assert "data.train" in refused(recipe, "data.train=[embedded]")


# --- captures ---


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: torch.cat([x[..., :64], 0 * x[..., 64:]], -1), "layer 3: all zero"),
        (lambda x: torch.cat([x[:, :1, :64].expand_as(x[..., :64]), x[..., 64:]], -1), "layer 1: the same for all"),
        (lambda x: x * torch.where(torch.arange(128) == 70, torch.nan, 1.0), "layer 3: not finite"),
        (lambda x: x[..., :64], "expected 2 layers, got 1 (missing 3)"),
        (lambda x: x[:, :-1], "hidden rows 31 ≠ tokens 32"),
    ],
    ids=["zeros", "constant", "NaN", "missing layer", "missing row"],
)
def test_a_dead_capture_stops_before_the_first_step(recipe, monkeypatch, spoil, message):
    class Spoilt(HFTarget):
        def read(self, batch):
            return TargetFeatures(spoil(super().read(batch).features_BTF))

    monkeypatch.setattr(build, "HFTarget", Spoilt)
    code, _, err = toys.call(training.main, "-c", recipe)
    assert code == 2 and f"error: target capture: {message}" in err, err
    assert not list((recipe.parent / "run" / "checkpoints").glob("step-*"))
    assert not (recipe.parent / "run" / "metrics.jsonl").read_text()


def test_a_layer_that_is_never_reached(recipe, monkeypatch):
    monkeypatch.setattr(HFTarget, "_keep", lambda self, layer: lambda *_: None)
    code, _, err = toys.call(training.main, "-c", recipe)
    assert code == 2 and "error: target capture: expected 2 layers, got 0 (missing 1, 3)" in err, err


# --- the run ---


def test_an_output_folder_with_checkpoints(recipe):
    assert toys.call(training.main, "-c", recipe)[0] == 0
    before = (recipe.parent / "run" / "metrics.jsonl").read_text()
    code, _, err = toys.call(training.main, "-c", recipe)
    assert code == 2 and "output_dir" in err and "continue it with train.resume=true, or choose another folder" in err
    assert (recipe.parent / "run" / "metrics.jsonl").read_text() == before


def poison(monkeypatch, bad: Callable[[int], bool]) -> None:
    """Make the loss of the forwards with these numbers, from 1, not finite."""
    forward, calls = TorchEngine.forward, []

    def poisoned(self, batch, features, weight):
        report = forward(self, batch, features, weight)
        calls.append(batch)
        return report._replace(loss=report.loss * torch.nan) if bad(len(calls)) else report

    monkeypatch.setattr(TorchEngine, "forward", poisoned)


def test_a_loss_that_is_never_finite_again_stops_with_a_checkpoint_of_what_was_good(recipe, monkeypatch):
    """It falls between two log lines; the steps after it are neither taken nor counted as done."""
    poison(monkeypatch, lambda call: call >= 4)
    folder, more = recipe.parent / "run", ("train.max_steps=12", "train.log_every_steps=9", "train.max_skipped_steps=3")
    done = toys.call(training.main, "-c", recipe, "train.global_batch_size=1", "train.checkpoint_every_steps=4", *more)
    assert done.code == 1 and "failed: step 6: the 3 steps up to it (train.max_skipped_steps) were skipped" in done.err
    saved = sorted((folder / "checkpoints").glob("step-*"))
    assert [path.name for path in saved] == ["step-00000004", "step-00000006"]
    assert all(t.isfinite().all() for t in load_file(saved[-1] / "model.safetensors").values())
    noted = [json.loads(line) for line in (folder / "skipped.jsonl").open()]
    assert [(n["step"], n["cause"], n["ranks"]) for n in noted] == [(s, "loss", [0]) for s in (4, 5, 6)]
    assert all(len(n["rows"]) == 1 and n["rows"][0] for n in noted)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [(line["step"], line["train/skipped_steps"]) for line in logged] == [(4, 1), (6, 2)]
    assert "train/loss" in logged[0] and "train/loss" not in logged[1]  # a mean over the steps that were taken

    monkeypatch.undo()  # the rows are mended: it goes on behind them
    monkeypatch.setenv("DFLASH_TRACEBACK", "1")
    training.train(load_recipe(str(recipe), ["train.global_batch_size=1", "train.resume=true", *more]))
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps[:2] == [4, 6] and steps[-1] == 12 and len((folder / "skipped.jsonl").read_text().splitlines()) == 3


def test_a_stop_between_skipped_steps_loses_none_of_them(recipe, monkeypatch):
    """Stopped behind the second of three in a row, between two log lines: all are noted, counted in one line, and end the continued run."""
    forward, calls = TorchEngine.forward, []

    def stopped(self, batch, features, weight):
        calls.append(batch)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        report = forward(self, batch, features, weight)
        return report._replace(loss=report.loss * torch.nan) if len(calls) >= 3 else report

    monkeypatch.setattr(TorchEngine, "forward", stopped)
    folder = recipe.parent / "run"
    more = ("train.max_steps=12", "train.log_every_steps=5", "train.global_batch_size=1", "train.max_skipped_steps=3")
    done = toys.call(training.main, "-c", recipe, *more)
    assert done.code == 143 and "stopped at step 4 of 12" in done.out
    saved = json.loads((folder / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert saved["skipped_in_a_row"] == 2 and not (folder / "metrics.jsonl").read_text()

    done = toys.call(training.main, "-c", recipe, "train.resume=true", *more)
    assert done.code == 1 and "failed: step 5: the 3 steps up to it (train.max_skipped_steps) were skipped" in done.err
    (line,) = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert (line["step"], line["train/skipped_steps"]) == (5, 3)
    assert [json.loads(line)["step"] for line in (folder / "skipped.jsonl").open()] == [3, 4, 5]
    saved = json.loads((folder / "checkpoints" / "step-00000005" / "state.json").read_text())
    assert saved["skipped_in_a_row"] == 0 and not saved["window"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])  # fmt: skip
def test_too_little_memory_names_the_knobs_with_their_values(recipe, monkeypatch, error):
    def full(self, batch, features, weight):
        raise error

    monkeypatch.setattr(TorchEngine, "forward", full)
    done = toys.call(training.main, "-c", recipe, "train.num_anchors=7", "train.micro_batch_size=2")
    assert done.code == 2 and "rank 0 ran out of memory while it trained" in done.err
    assert (
        "train.micro_batch_size (now 2; the numbers stay the same), train.num_anchors (now 7), data.max_length"
        in done.err
    )
    assert "Traceback" not in done.err


def test_answers_of_one_token_leave_nothing_to_predict(recipe):
    """Their only legal place is the anchor's, so they never make up a step without any weight."""
    rows = [{"id": f"r{i}", "prompt_ids": [20, 21], "response_ids": [30 + i]} for i in range(3)]
    text = refused(recipe, f"data.train=[{toys.write_jsonl(recipe.parent / 'short.jsonl', rows)}]", lines=0)
    assert "0 usable rows of 3" in text and re.search(r"dropped +3  nothing_to_predict", text)


def test_commands_on_folders_that_are_none(tmp_path):
    for main in (evaluate.main, check.main):
        code, _, err = toys.call(main, tmp_path / "nowhere")
        assert code == 2 and err.startswith("error: ") and str(tmp_path / "nowhere") in err


def test_two_processes_end_on_bad_input_with_one_message(recipe):
    toys.write_jsonl(recipe.parent / "rows.jsonl", [{"messages": []}])
    process = toys.torchrun("-m", "dflash_train.train", "-c", str(recipe), stderr=subprocess.PIPE)
    said = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert said.count("error: 0 usable rows of 1") == 1  # by rank 0 for both
    assert "Traceback" not in said.split("torch/distributed")[0]
    assert not (recipe.parent / "run").exists()
