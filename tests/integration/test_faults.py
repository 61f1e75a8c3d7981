"""What goes wrong around the loop: training goes on or stops clearly, never in silence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import toys

import dflash_train.train as training
from dflash_train import client, start
from dflash_train.config.load import load_recipe
from dflash_train.config.schema import Recipe
from dflash_train.data.workers import spread
from dflash_train.track import Tracker


@pytest.fixture
def recipe(tmp_path):
    """Path of a recipe of three steps with a target, data, held-out rows and a cache of its own, all below one folder."""
    toys.save_toy(tmp_path / "target")
    ids = [p + p[::-1] for p in toys.prompts(8)]
    rows = [{"id": f"r{i}", "prompt_ids": row[:4], "response_ids": row[4:]} for i, row in enumerate(ids)]
    toys.write_jsonl(tmp_path / "rows.jsonl", rows[:6])
    toys.write_jsonl(tmp_path / "heldout.jsonl", rows[6:])
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
output_dir: {tmp_path}/run
target: {{path: {tmp_path}/target}}
data: {{train: [{tmp_path}/rows.jsonl], heldout: [{tmp_path}/heldout.jsonl], max_length: 32, cache_dir: {tmp_path}/cache}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
train: {{max_steps: 3, global_batch_size: 2, num_anchors: 4, log_every_steps: 1, eval_every_steps: 1}}
evaluate: {{max_new_tokens: 4}}
track: {{wandb: disabled, progress: false}}
""")
    return path


def at_step(monkeypatch, step: int, act) -> None:
    """Have `act()` happen when training comes to a step."""
    done = training.train_step

    def disturbed(run, at):
        if at == step:
            act()
        return done(run, at)

    monkeypatch.setattr(training, "train_step", disturbed)


def metrics(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


# --- files ---


def test_everything_that_was_read_may_vanish(recipe, tmp_path, monkeypatch):
    """Data, held-out rows, the mapped cache and the target's folder: what training needs of them is held by the process."""

    def vanish():
        for name in ("rows.jsonl", "heldout.jsonl"):
            (tmp_path / name).unlink()
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "target")

    at_step(monkeypatch, 1, vanish)
    code, out, err = toys.call(training.main, "-c", recipe, "evaluate.client=off")
    assert code == 0, err
    assert set(metrics(tmp_path / "run")) == {1, 2, 3}
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert "export: without tokenizer files, which engines take from the target" in out


def test_data_that_vanish_after_they_were_tokenised_are_named(recipe, tmp_path, monkeypatch):
    built = start.build_stream

    def then_gone(o):
        stream = built(o)
        (tmp_path / "rows.jsonl").unlink()
        return stream

    monkeypatch.setattr(start, "build_stream", then_gone)
    monkeypatch.setattr("dflash_train.data.files._file_hash", lambda path, *_: path.open("rb"))
    code, _, err = toys.call(training.main, "-c", recipe)
    assert code == 2 and "rows.jsonl" in err and "Traceback" not in err and not (tmp_path / "run").exists()


def test_a_cache_that_is_cut_off_under_a_run_ends_it_with_a_word(recipe, tmp_path):
    """Nothing here cuts a file off in its place; where something else does, the kernel ends the process."""
    script = f"""
import sys
from pathlib import Path
import dflash_train.train as training
from dflash_train.config.load import run_command
done = training.train_step
def disturbed(run, at):
    if at == 1:
        for path in Path({str(tmp_path / "cache")!r}).rglob("*.bin"):
            open(path, "wb").close()
    return done(run, at)
training.train_step = disturbed
run_command(training.main)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "-c", str(recipe)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGBUS and "Bus error" in done.stderr and "corpus.py" in done.stderr, done.stderr


def test_held_out_prompts_that_are_trained_on_are_counted(recipe, tmp_path):
    code, out, err = toys.call(training.main, "-c", recipe, "evaluate.client=off")
    assert code == 0 and "held-out prompts are in data.train" not in out, err
    shutil.rmtree(tmp_path / "run")
    with (tmp_path / "heldout.jsonl").open("a") as file:
        file.write((tmp_path / "rows.jsonl").read_text().splitlines()[2] + "\n")
    code, out, err = toys.call(training.main, "-c", recipe, "evaluate.client=off")
    assert code == 0 and "WARNING: 1 of 3 held-out prompts are in data.train too (first: r2)" in out, err


# --- processes ---


def test_a_tokenising_process_that_is_killed_ends_the_others_and_says_so():
    """SIGKILL from outside, as the kernel sends it where memory runs out, in the middle of the work."""
    began = time.monotonic()
    found = spread(time.sleep, [0.05] * 200, 2)
    next(found)
    workers = toys.tokenising_processes()
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(
        ValueError, match=r"data.workers = 2: a tokenising process ended with code -9; fewer workers need less memory"
    ):
        list(found)
    assert time.monotonic() - began < 60 and not toys.tokenising_processes()


# --- the record and its followers ---


@pytest.fixture
def full_disk(monkeypatch):
    """Switch with which metrics.jsonl takes only half of what it is given."""
    state = {"full": False}
    opened = Path.open

    def limited(self, mode="r", *args, **more):
        file = opened(self, mode, *args, **more)
        if not (state["full"] and self.name == "metrics.jsonl" and "a" in mode):
            return file

        class Half:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def write(self, data):
                file.write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")

        return Half()

    monkeypatch.setattr(Path, "open", limited)
    return state


def test_metrics_on_a_full_disk_are_kept_until_there_is_room(tmp_path, full_disk, capsys):
    tracker = Tracker(Recipe(output_dir=str(tmp_path)), resumed_at=0)
    for step in range(1, 7):
        full_disk["full"] = step in (2, 3, 4)
        tracker.log(step, {"train/loss": 1.0})
        assert metrics(tmp_path) == ([1] if step in (2, 3, 4) else list(range(1, step + 1)))
    tracker.finish()
    err = capsys.readouterr().err
    assert err.count("cannot be written (No space left on device)") == 1 and "lost" not in err


def test_metrics_that_are_never_written_are_counted(tmp_path, full_disk, capsys):
    tracker = Tracker(Recipe(output_dir=str(tmp_path)), resumed_at=0)
    full_disk["full"] = True
    for step in (1, 2):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert "2 lines of" in capsys.readouterr().err and metrics(tmp_path) == []


def test_a_tensorboard_folder_that_cannot_be_made_costs_a_warning(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file")
    code, _, err = toys.call(training.main, "-c", recipe, "track.tensorboard=true", "evaluate.client=off")
    assert code == 0 and err.count("track: TensorBoard failed") == 1 and set(metrics(tmp_path / "run")) == {1, 2, 3}


# --- the end ---


@pytest.mark.parametrize(
    "error", [ImportError("cannot import name 'x' from 'transformers'"), OSError("no file"), ValueError("bad")]
)
def test_a_client_that_cannot_be_imported_costs_the_check_not_the_export(recipe, tmp_path, monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(client, "installed", lambda: "0.1.0")
    monkeypatch.setattr(client, "client_decode", broken)
    code, out, err = toys.call(training.main, "-c", recipe)
    assert code == 0, err
    assert f"z-lab's dflash 0.1.0 cannot ({type(error).__name__}: {error})" in out and "NOT an independent check" in out
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file() and (
        tmp_path / "run" / "report.html"
    ).is_file()


def test_prompts_are_what_stands_before_the_first_supervised_token(recipe):
    from dflash_train.build import build_stream, outline

    corpus = build_stream(outline(load_recipe(str(recipe)))).examples
    slow = [e.token_ids[: int(np.flatnonzero(e.supervised)[0])].tobytes() for e in corpus]
    assert list(corpus.prompts()) == slow and len(slow) == 6
