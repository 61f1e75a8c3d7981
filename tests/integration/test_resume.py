"""A run that was killed and continued is the run that was not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file

import dflash_train.train as training
from dflash_train import start
from dflash_train.build import build_stream, outline
from dflash_train.checkpoint import checkpoints, read_state
from dflash_train.config.load import load_recipe

TOTAL = 10


@pytest.fixture
def recipe(tmp_path, target_dir):
    """Recipe of ten steps; `rows` documents, two of them to a step. The first checkpoint is at step 5."""

    def recipe(name: str, *overrides: str, rows: int = 6):
        data = tmp_path / f"rows{rows}.jsonl"
        ids = [p + p[::-1] + p for p in toys.prompts(rows)]
        toys.write_jsonl(data, [{"id": f"r{i}", "prompt_ids": x[:3], "response_ids": x[3:]} for i, x in enumerate(ids)])
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 24, pack: false}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3, warmup_ratio: 0.2}}
train: {{max_steps: {TOTAL}, global_batch_size: 2, num_anchors: 3, log_every_steps: 1, checkpoint_every_steps: 5}}
track: {{wandb: disabled, progress: false}}
""")
        return load_recipe(str(path), [f"output_dir={tmp_path}/{name}", *overrides])

    return recipe


def kill_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C after `step` finished steps."""
    lr_at = training.lr_at

    def interrupted(at: int, *args):
        if at == step:
            raise KeyboardInterrupt
        return lr_at(at, *args)

    monkeypatch.setattr(training, "lr_at", interrupted)


def killed(recipe, step: int = 7) -> Path:
    """The folder of a run that ended in the middle of something."""
    with pytest.MonkeyPatch.context() as patch:
        kill_in_step(patch, step)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe)
    return Path(recipe.output_dir)


def curve(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def state(folder: Path) -> tuple[dict, dict]:
    newest = folder / "checkpoints" / f"step-{TOTAL:08d}"
    return load_file(newest / "model.safetensors"), load_file(newest / "optimizer.safetensors")


@pytest.mark.parametrize("rows", [6, 10], ids=["mid-epoch", "epoch boundary"])
def test_killed_and_continued_is_bit_for_bit_the_whole_run(recipe, rows):
    training.train(recipe("whole", rows=rows))
    folder = killed(recipe("parts", rows=rows))
    assert len(curve(folder)) == 7 and not (folder / "export").exists()
    training.train(recipe("parts", "train.resume=true", rows=rows))

    whole = folder.parent / "whole"
    assert [line["step"] for line in curve(folder)] == list(range(1, TOTAL + 1))  # neither gaps nor repeats
    assert curve(folder) == curve(whole)
    (weights, moments), (weights_, moments_) = state(whole), state(folder)
    assert weights.keys() == weights_.keys() and moments.keys() == moments_.keys()
    assert all(weights[k].equal(weights_[k]) for k in weights)
    assert all(moments[k].equal(moments_[k]) for k in moments)
    first, second = (load_file(p / "export" / "model.safetensors") for p in (whole, folder))
    assert all(first[k].equal(second[k]) for k in first)


def test_the_rows_and_anchors_of_a_step_do_not_depend_on_where_a_run_began(recipe):
    def read(stream, steps):
        return [
            (b.sample_ids, b.blocks.anchors_BN.tolist(), b.blocks.valid_BN.tolist())
            for step in steps
            for b in stream.micro_batches(step, 0, 1)
        ]

    o = outline(recipe("run"))
    whole = read(build_stream(o), range(TOTAL))
    assert read(build_stream(o), range(7, TOTAL)) == whole[2 * 7 :]
    assert len({str(batch) for batch in whole}) > 6 * 2  # the anchors of the 6 rows change from epoch to epoch


def test_a_log_window_that_the_checkpoint_cuts_is_still_a_mean_over_all_its_steps(recipe):
    """Or the curve of a continued run has a dent that the whole run does not have."""
    training.train(recipe("whole", "train.log_every_steps=4"))
    folder = killed(recipe("parts", "train.log_every_steps=4"))
    training.train(recipe("parts", "train.log_every_steps=4", "train.resume=true"))
    assert {4, 8, 10} <= {line["step"] for line in curve(folder)}
    assert curve(folder) == curve(folder.parent / "whole")


def test_a_killed_run_without_a_checkpoint_starts_again(recipe, capsys):
    training.train(recipe("whole"))
    folder = killed(recipe("parts"), step=3)
    training.train(recipe("parts", "train.resume=true"))
    assert "no checkpoint in" in capsys.readouterr().out
    assert curve(folder) == curve(folder.parent / "whole")


def test_a_finished_run_is_only_exported_again(recipe):
    training.train(recipe("run"))
    folder = Path(recipe("run").output_dir)
    before, lines = state(folder)[0], curve(folder)
    training.train(recipe("run", "train.resume=true"))
    assert curve(folder) == lines and all(v.equal(before[k]) for k, v in state(folder)[0].items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.block_size=8", "block_size: checkpoint has 4, recipe has 8"),
        ("drafter.mask_token_id=156", "mask_token_id: checkpoint has 155, recipe has 156"),
        ("train.seed=1", "seed: checkpoint has 0, recipe has 1"),
        ("train.max_steps=12", "total_steps: checkpoint has 10, recipe has 12"),
        ("data.limit=5", "rows: checkpoint has 6, recipe has 5"),
        ("data.pack=true", "pack: checkpoint has False, recipe has True"),
        ("optimizer.lr=1e-3", "optimizer.lr: checkpoint has 0.003, recipe has 0.001"),
        ("objective.selector_loss_weight=2", "objective.selector_loss_weight: checkpoint has 1.0, recipe has 2.0"),
        ("engine.precision=bfloat16", "engine.precision: checkpoint has torch.float32, recipe has torch.bfloat16"),
        ("target.precision=fp8", "target.precision: checkpoint has torch.float32, recipe has fp8"),
    ],
)
def test_a_recipe_of_another_run_is_refused_and_both_values_are_named(recipe, override, message):
    folder = killed(recipe("run"))
    saved = (folder / "config.yaml").read_text()
    with pytest.raises(ValueError, match="belongs to another run") as error:
        training.train(recipe("run", "train.resume=true", override))
    assert message in str(error.value) and "Change the recipe back" in str(error.value)
    assert len(curve(folder)) == 7 and (folder / "config.yaml").read_text() == saved


@pytest.mark.parametrize(
    "override", ["train.micro_batch_size=2", "train.keep_checkpoints=1", "train.log_every_steps=5"]
)
def test_what_moves_no_number_may_change(recipe, override):
    killed(recipe("run"))
    training.train(recipe("run", "train.resume=true", override))


def test_a_checkpoint_that_is_not_whole_is_passed_over_and_said(recipe, capsys):
    folder = killed(recipe("run"))
    torn = folder / "checkpoints" / "step-00000007"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    training.train(recipe("run", "train.resume=true"))
    assert (
        "step-00000007/complete.json: damaged (it is missing); going back to step-00000005" in capsys.readouterr().err
    )
    assert [line["step"] for line in curve(folder)] == list(range(1, TOTAL + 1))


@pytest.mark.parametrize(("damage", "why"), [(Path.unlink, "it is missing"), (lambda p: p.write_bytes(b"a: \xff"), "not valid YAML")])  # fmt: skip
def test_a_run_whose_record_is_lost_goes_on(recipe, capsys, damage, why):
    """The checkpoint has all that must be the same; config.yaml is for people, and for `evaluate`."""
    folder = killed(recipe("run"))
    damage(folder / "config.yaml")
    training.train(recipe("run", "train.resume=true"))
    said = capsys.readouterr().out
    assert "WARNING: the record of how this run began is lost" in said and why in said
    assert len(load_recipe(str(folder / "config.yaml")).provenance["resumed"]) == 1


def test_another_target_in_the_same_place_is_refused(recipe, tmp_path, target_dir):
    moved = shutil.copytree(target_dir, tmp_path / "target")
    killed(recipe("run", f"target.path={moved}"))
    again = shutil.move(moved, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="target: checkpoint has .*target, recipe has .*elsewhere.*train.may_change="):
        training.train(recipe("run", "train.resume=true", f"target.path={again}"))
    path = Path(again) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    moved = shutil.move(again, tmp_path / "target")
    with pytest.raises(ValueError, match="target_weights: checkpoint has"):
        training.train(recipe("run", "train.resume=true", f"target.path={moved}"))


def test_a_setting_that_is_changed_knowingly_is_said_and_kept(recipe, capsys):
    folder = killed(recipe("run"))
    changes = ["optimizer.lr=1e-3", "train.max_steps=12"]
    training.train(recipe("run", "train.resume=true", "train.may_change=[optimizer.lr,total_steps]", *changes))
    said = capsys.readouterr().out
    assert "train.may_change: optimizer.lr: checkpoint has 0.003, recipe has 0.001" in said
    assert "train.may_change: total_steps: checkpoint has 10, recipe has 12" in said
    assert [line["step"] for line in curve(folder)] == list(range(1, 13))
    training.train(recipe("run", "train.resume=true", *changes))  # the checkpoints are this recipe's now
    with pytest.raises(ValueError, match="total_steps: checkpoint has 12, recipe has 10"):
        training.train(recipe("run", "train.resume=true"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "complete.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_continues_to_the_same_end(recipe, capsys, name):
    every = "train.checkpoint_every_steps=2"
    training.train(recipe("whole", every))
    folder = killed(recipe("parts", every))
    path = folder / "checkpoints" / "step-00000006" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    training.train(recipe("parts", every, "train.resume=true"))
    said = capsys.readouterr()
    assert f"step-00000006/{name}" in said.err and "going back to step-00000004" in said.err
    assert "step-00000004 at step 4" in said.out
    assert curve(folder) == curve(folder.parent / "whole")
    whole = folder.parent / "whole"
    assert all(same(a, b) for a, b in zip(state(whole), state(folder), strict=True))


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(one[k].equal(other[k]) for k in one)


def test_a_damaged_only_checkpoint_starts_nothing(recipe):
    folder = killed(recipe("run"))
    path = folder / "checkpoints" / "step-00000005" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"step-00000005/model.safetensors: damaged .*no checkpoint is left to continue"
    ):
        training.train(recipe("run", "train.resume=true"))
    assert len(curve(folder)) == 7


# --- signals ---


@pytest.fixture
def run_of_a_process(recipe, tmp_path):
    """Start the real command on the recipe; `until` waits for a file or a text in its output."""

    def begin(name: str, *overrides: str, patch: str = ""):
        recipe(name)  # writes recipe.yaml
        script = tmp_path / "script.py"
        script.write_text(f"""
import os, sys, time
import torch
torch.set_num_threads(1)
import dflash_train.train as training
from dflash_train.config.load import run_command
{patch}
run_command(training.main)
""")
        command = ["-c", str(tmp_path / "recipe.yaml"), f"output_dir={tmp_path}/{name}", *overrides]
        return subprocess.Popen(
            [sys.executable, str(script), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return begin


WAITS = """
def waits(name, at, owner=training):
    function, calls = getattr(owner, name), []
    def waiting(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            print("HERE", flush=True)
            time.sleep(1)
            for _ in range(3000):
                time.sleep(0.01)
        return function(*args, **kwargs)
    setattr(owner, name, waiting)
"""


def until(process: subprocess.Popen, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text} never came")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "sent", "code", "steps"),
    [
        ("waits('build_step', 1, start)", signal.SIGTERM, 143, None),
        ("waits('at_anchors', 8, walk)", signal.SIGTERM, 143, 6),
        ("slow_writer()", signal.SIGUSR1, 138, 5),
        ("waits('export_run', 1)", signal.SIGINT, 130, 10),
    ],
    ids=["before the first step", "during an evaluation", "while a checkpoint is written", "during the export"],
)
def test_a_run_that_is_stopped_anywhere_saves_and_continues_bit_for_bit(
    recipe, run_of_a_process, tmp_path, patch, sent, code, steps
):
    more = [
        f"data.heldout=[{tmp_path}/rows6.jsonl]",
        "train.eval_every_steps=3",
        "train.log_every_steps=4",
        "evaluate.client=off",
    ]
    patch = WAITS + SLOW_WRITER + patch
    process = run_of_a_process(
        "parts",
        *more,
        "train.checkpoint_every_steps=null" if steps == 6 else "train.checkpoint_every_steps=5",
        patch=patch,
    )
    until(process, "HERE")
    began = time.monotonic()
    process.send_signal(sent)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == code, said
    assert time.monotonic() - began < 25
    folder = tmp_path / "parts"
    if steps is None:
        assert not (folder / "checkpoints").exists() and "stopped at" not in said
    else:
        newest = read_state(checkpoints(folder / "checkpoints")[-1])
        assert newest.step >= steps and not list((folder / "checkpoints").glob(".*.partial"))
        assert newest.pending == (["heldout"] if newest.step in (6, 9) else [])
        assert (f"stopped at step {newest.step} of 10; the same command with train.resume=true goes on" in said) == (sent is not signal.SIGINT)  # fmt: skip
    # The whole run logs, evaluates and saves at the same steps.
    every = "train.checkpoint_every_steps=null" if steps == 6 else "train.checkpoint_every_steps=5"
    training.train(recipe("whole", *more, every))
    training.train(recipe("parts", *more, every, "train.resume=true"))
    assert curve(folder) == curve(tmp_path / "whole")
    assert all(same(a, b) for a, b in zip(state(tmp_path / "whole"), state(folder), strict=True))
    one, other = (read_state(tmp_path / name / "checkpoints" / "best") for name in ("whole", "parts"))
    assert one == other


SLOW_WRITER = """
import dflash_train.checkpoint as checkpointing
from dflash_train import start, walk
def slow_writer():
    write = checkpointing.save_file
    def slow(group, path, **more):
        if "step-00000005" in str(path) and "model" in str(path):
            print("HERE", flush=True)
            time.sleep(2)
        write(group, path, **more)
    checkpointing.save_file = slow
    step = training.train_step
    def one(run, number):
        time.sleep(0.5)  # so that the run is not over before the writer is
        return step(run, number)
    training.train_step = one
"""


@pytest.mark.slow
def test_a_second_signal_ends_at_once(run_of_a_process, tmp_path):
    process = run_of_a_process("run", patch=WAITS + "waits('train_step', 3)")
    until(process, "HERE")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a scheduler and torchrun, both: one request
    until(process, "SIGTERM: stopping after this step; again to end at once")
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.slow
def test_two_runs_in_one_folder(recipe, run_of_a_process):
    process = run_of_a_process("run", patch=WAITS + "waits('train_step', 3)")
    until(process, "HERE")
    for more in ([], ["train.resume=true"]):
        with pytest.raises(ValueError, match="another run is writing there"):
            training.train(recipe("run", *more))
    process.kill()
    process.communicate()
    training.train(recipe("run", "train.resume=true"))


# --- the disk ---


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run(recipe, monkeypatch, capsys):
    every = "train.checkpoint_every_steps=2"
    training.train(recipe("whole", every))
    usage, asked = shutil.disk_usage, []

    def full(path):
        asked.append(path)
        return (
            usage(path)._replace(free=10) if 3 <= len(asked) <= 4 else usage(path)
        )  # the first is the look before training

    monkeypatch.setattr(shutil, "disk_usage", full)
    training.train(recipe("parts", every))
    said = capsys.readouterr().err
    assert said.count("CHECKPOINT SKIPPED") == 2 and "the last good one is step-00000002. Training goes on" in said
    folder = Path(recipe("parts").output_dir)
    assert {line.get("perf/checkpoints_skipped") for line in map(json.loads, (folder / "metrics.jsonl").open())} == {
        None,
        1,
        2,
    }
    assert all(same(a, b) for a, b in zip(state(folder.parent / "whole"), state(folder), strict=True))


def test_a_disk_that_is_full_at_the_end_is_an_error_that_says_how_to_go_on(recipe, monkeypatch):
    usage, asked = shutil.disk_usage, []
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil,
            "disk_usage",
            lambda p: usage(p)._replace(free=10 if len(asked) > 1 else 10**9, used=asked.append(p)),
        )
        with pytest.raises(
            ValueError,
            match=r"step-00000010 takes .* has room for 0.00 GiB; the last good one is step-00000005. Make room, then",
        ):
            training.train(recipe("run"))
    training.train(recipe("run", "train.resume=true"))
    training.train(recipe("whole"))
    folder = Path(recipe("run").output_dir)
    assert all(same(a, b) for a, b in zip(state(folder.parent / "whole"), state(folder), strict=True))


def test_a_disk_that_holds_no_checkpoint_is_found_before_the_target_is_read(recipe, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage(p)._replace(free=10))
    monkeypatch.setattr(start, "build_step", lambda *a: pytest.fail("the target was read"))
    with pytest.raises(ValueError, match="a checkpoint takes .* make room, or choose another output_dir"):
        training.train(recipe("run"))
    assert not Path(recipe("run").output_dir).exists()
