"""Checkpoints: whole or not at all, verified, refused where they belong to another run; a disk that fails costs one, not the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import toys

import dflash_train.checkpoint as checkpointing
from dflash_train.checkpoint import (
    Best,
    Damaged,
    NotWritten,
    TrainState,
    Writer,
    check_room,
    check_same_run,
    checkpoints,
    hold,
    identity_of,
    load_saved,
    load_weights,
    newest,
    read_state,
    resume_best,
    tidy,
    verify,
)
from dflash_train.engine.base import Engine
from dflash_train.types import Saved

IDENTITY = identity_of(toys.toy_spec(), seed=0, rows=7)
SETTINGS = {"optimizer.lr": 1e-3, "total_steps": 10}


def engine(seed: int = 0, steps: int = 2) -> Engine:
    """A drafter and its optimizer after a few steps on random gradients."""
    made = toys.toy_engine(toys.toy_step(seed=seed), 1)
    update(made, seed, steps)
    return made


def update(made: Engine, seed: int = 0, steps: int = 1) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in made.step.drafter.parameters():
            p.grad = torch.zeros_like(p)
        made.backward(sum((p * torch.randn(p.shape, generator=g)).sum() for p in made.step.drafter.parameters()))
        made.update(1e-2)


def state(step: int, **more) -> TrainState:
    return TrainState(step=step, identity=IDENTITY, settings=SETTINGS, **more)


def tensors(value: float = 1.0) -> Saved:
    return Saved(
        weights={"w": torch.full((64, 64), value)},
        moments={"exp_avg.w": torch.zeros(64, 64), "exp_avg_sq.w": torch.ones(64, 64), "step.w": torch.tensor(3.0)},
    )


def save(folder: Path, *steps: int, keep: int = 9, saved: Saved | None = None) -> Path:
    writer = Writer(folder, keep)
    for step in steps:
        writer.save(saved or tensors(step), state(step), step=True, best=False)
    writer.finish()
    return folder / f"step-{steps[-1]:08d}"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- what comes back ---


def test_weights_optimizer_and_state_come_back(tmp_path):
    one, other = engine(), engine(seed=5)
    best = Best(metric="heldout/walk_tau", value=1.25, step=9, since=2)
    writer = Writer(tmp_path, 1)
    more = {"best": best, "pending": ["decoded"], "window": [{"sums": {"a": [0.1, 3.0]}}], "skipped_in_a_row": 2}
    writer.save(one.gather(), state(12, **more), step=True, best=False)
    update(one, seed=3)  # what is being written does not move any more
    writer.finish()
    found = newest(tmp_path)
    assert found == (tmp_path / "step-00000012", state(12, **more))
    other.restore(load_saved(found[0]))
    update(other, seed=3)
    for name, p in one.step.drafter.state_dict().items():
        assert torch.equal(p, other.step.drafter.state_dict()[name]), name
    a, b = one.gather(), other.gather()
    assert a.moments.keys() == b.moments.keys() and {n.split(".")[0] for n in a.moments} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert all(torch.equal(a.moments[n], b.moments[n]) for n in a.moments)


def test_an_engine_before_its_first_step_has_no_moments():
    one, other = engine(steps=0), engine(seed=4)
    assert one.gather().moments == {} == one.gather(moments=False).moments
    other.restore(one.gather())
    update(one), update(other)
    assert all(torch.equal(t, other.gather().moments[n]) for n, t in one.gather().moments.items())


def test_nothing_is_pickled(tmp_path):
    assert names(save(tmp_path, 1)) == ["complete.json", "model.safetensors", "optimizer.safetensors", "state.json"]


# --- another run ---


def test_another_identity_is_refused_with_every_field_that_differs(tmp_path):
    wanted = TrainState(
        step=0, identity={**IDENTITY, "block_size": 16, "seed": 3}, settings=SETTINGS | {"total_steps": 12}
    )
    with pytest.raises(ValueError) as error:
        check_same_run(tmp_path, state(1), wanted, [])
    text = str(error.value)
    for part in ("block_size: checkpoint has 8, recipe has 16", "seed: checkpoint has 0, recipe has 3", "total_steps: checkpoint has 10, recipe has 12"):  # fmt: skip
        assert part in text
    assert "rows" not in text and "may_change" not in text  # the drafter's identity may not


def test_a_missing_or_new_field_is_a_difference_too(tmp_path):
    less = {k: v for k, v in IDENTITY.items() if k != "rows"}
    for identity, text in ((less, "rows: checkpoint has 7, recipe has None"), ({**IDENTITY, "tokens": 5}, "tokens: checkpoint has None, recipe has 5")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            check_same_run(tmp_path, state(1), TrainState(step=0, identity=identity, settings=SETTINGS), [])


def test_a_setting_changes_only_where_the_recipe_says_so(tmp_path):
    wanted = TrainState(step=0, identity=IDENTITY, settings={"optimizer.lr": 5e-4, "total_steps": 10})
    with pytest.raises(ValueError, match=r"or set train.may_change=\[optimizer.lr\] to go on with the recipe's values"):
        check_same_run(tmp_path, state(1), wanted, [])
    said = check_same_run(tmp_path, state(1), wanted, ["optimizer.lr", "total_steps"])
    assert said == ["optimizer.lr: checkpoint has 0.001, recipe has 0.0005"]
    with pytest.raises(
        ValueError, match=r"train.may_change = \['block_size'\]: block_size is none of the settings that may"
    ):
        check_same_run(tmp_path, state(1), wanted, ["block_size"])


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    old = tmp_path / "step-00000005"
    old.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "state.json", "complete"):
        (old / name).touch()
    for read in (lambda: newest(tmp_path), lambda: read_state(old), lambda: load_weights(old)):
        with pytest.raises(ValueError, match="step-00000005: written by an earlier version.*pickled its optimizer"):
            read()


def test_a_state_of_a_later_version_is_not_understood_by_half(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(json.dumps({"step": 1, "identity": {}, "wisdom": 1}))
    checkpointing._seal(path)  # as that version would
    with pytest.raises(ValueError, match="wisdom, which this version does not know"):
        read_state(path)


# --- damage ---


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "complete.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_file_is_found_and_the_one_before_is_taken(tmp_path, capsys, name, how):
    save(tmp_path, 3, 7)
    path = tmp_path / "step-00000007" / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        bit = bytearray(data)
        bit[len(data) // 2] ^= 16
        path.write_bytes({"cut": data[:-1], "flipped": bytes(bit), "empty": b""}[how])
    if how == "flipped" and name == "complete.json" and b'"format": 2' not in path.read_bytes():
        pytest.skip("the bit fell on the format")
    path, found = newest(tmp_path)
    assert (path.name, found.step) == ("step-00000003", 3)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "going back to step-00000003" in said and "step-00000007/" in said
    assert names(tmp_path) == ["damaged-step-00000007", "step-00000003"]
    assert newest(tmp_path)[1].step == 3 and capsys.readouterr().err == ""  # said once
    save(tmp_path, 7, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003", "step-00000007"] and newest(tmp_path)[
        1
    ].step == 7


@pytest.mark.parametrize("name", ["optimizer.safetensors", "complete.json"])
def test_where_every_one_is_damaged_nothing_begins_at_step_0(tmp_path, name):
    save(tmp_path, 3, 7)
    for path in checkpoints(tmp_path):
        (path / name).unlink()
    with pytest.raises(
        ValueError, match=rf"(?s)00000007/{name}.*00000003/{name}.*no checkpoint is left.*or delete .* to begin again"
    ):
        newest(tmp_path)
    assert len(checkpoints(tmp_path)) == 2
    assert newest(tmp_path / "nothing") is None


def test_evaluation_and_export_of_a_damaged_checkpoint_name_the_file(tmp_path):
    path = save(tmp_path, 3)
    (path / "optimizer.safetensors").write_bytes(b"no")
    assert torch.equal(load_weights(path)["w"], tensors(3).weights["w"])  # what they do not read is not theirs to judge
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(Damaged, match="model.safetensors: damaged .its checksum"):
        load_weights(path)


def test_a_damaged_best_is_set_aside(tmp_path):
    writer = Writer(tmp_path, 1)
    mine = state(4, best=Best(metric="m", value=1.0, step=4))
    writer.save(tensors(), mine, step=False, best=True)
    writer.finish()
    assert resume_best(tmp_path, mine, "m") is None and mine.best.step == 4
    (tmp_path / "best" / "model.safetensors").write_bytes(b"no")
    assert "damaged-best is kept for a look; the best m is looked for from step 4 on" in resume_best(
        tmp_path, mine, "m"
    )
    assert mine.best is None and names(tmp_path) == ["damaged-best"]


def test_a_best_on_other_heldout_rows_does_not_count(tmp_path):
    writer = Writer(tmp_path, 1)
    mine = state(4, best=Best(metric="m", value=1.0, step=4))
    writer.save(tensors(), mine, step=False, best=True)
    writer.finish()
    mine.settings = SETTINGS | {"heldout": "other"}
    assert resume_best(tmp_path, mine, "m") == "the best m is looked for from step 4 on" and mine.best is None


# --- killed at any moment ---

WRITES = """
import os, signal, shutil, sys
from pathlib import Path
import dflash_train.checkpoint as c
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from dflash_train.types import Saved
done, fatal, behind = 0, int(sys.argv[2]), sys.argv[3] == "behind"
def counting(owner, name):
    function = getattr(owner, name)
    def counted(*args, **kwargs):
        global done
        done += 1
        if done == fatal and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if done == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, counted)
for owner, name in ((c, "save_file"), (os, "fsync"), (Path, "rename"), (Path, "write_text"), (shutil, "rmtree"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
    counting(owner, name)
"""


def crash_points(tmp_path: Path, act: str) -> list[Path]:
    """A copy of the folder for each file operation of `act`, killed before and behind it. One interpreter, forked."""
    code = (
        WRITES.format(tests=str(Path(__file__).parents[1]))
        + f"""
def state(step, **more):
    return c.TrainState(step=step, identity={IDENTITY!r}, settings={SETTINGS!r}, **more)
def tensors(v):
    return Saved(weights={{"w": torch.full((64, 64), float(v))}}, moments={{"exp_avg.w": torch.zeros(64, 64)}})
root = Path(sys.argv[1])
number = 0
while True:
    number += 1
    ended = 0
    for behind in (False, True):
        place = root / f"{{number}}-{{behind}}"
        shutil.copytree(root / "before", place)
        pid = os.fork()
        if pid == 0:
            done, fatal = 0, number
            {act}
            os._exit(0)
        ended += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    if ended == 2:
        break
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "0", "x"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [p for p in tmp_path.iterdir() if p.name != "before"]


@pytest.mark.slow
def test_a_kill_between_any_two_file_operations_loses_nothing_that_was_there(tmp_path):
    """Of a save over an existing step, with deleting the oldest: afterwards there are the newest `keep`, all of them whole."""
    save(tmp_path / "before", 1, 2, 3)
    writer = """w = c.Writer(place, 2); w._work(tensors(30), state(3)); assert not w._error and not w._unwritten"""
    places = crash_points(tmp_path, writer)
    assert len(places) > 30
    written = set()
    for place in places:
        tidy(place)
        path, found = newest(place)
        assert path.name == "step-00000003" and not list(place.glob(".*"))
        value = float(load_saved(path).weights["w"][0, 0])
        assert value in (3.0, 30.0)
        written.add(value)
        for other in checkpoints(place):
            verify(other)
        save(place, 4, keep=2)
        assert names(place) == ["step-00000003", "step-00000004"]
    assert written == {3.0, 30.0}


@pytest.mark.slow
def test_a_kill_while_the_best_is_replaced_leaves_a_best(tmp_path):
    writer = Writer(tmp_path / "before", 2)
    writer.save(tensors(1), state(1), step=False, best=True)
    writer.finish()
    act = """w = c.Writer(place, 2); w._best = (tensors(2).weights, state(2)); w._work(None, state(2)); assert not w._error"""
    written = set()
    for place in crash_points(tmp_path, act):
        tidy(place)
        verify(place / "best")
        step = read_state(place / "best").step
        assert float(load_weights(place / "best")["w"][0, 0]) == step and names(place) == ["best"]
        written.add(step)
    assert written == {1, 2}


def test_only_the_newest_are_kept_in_order(tmp_path):
    save(tmp_path, 5, 100, 20, 3000, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000100", "step-00003000"]


def test_a_second_run_in_the_folder_is_refused_until_the_first_ends(tmp_path):
    code = f"""
import time
from pathlib import Path
from dflash_train.checkpoint import hold
with hold(Path({str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run is writing there; wait for it"), hold(tmp_path):
            pass
        other.kill()
        other.wait()
        with hold(tmp_path):
            pass


# --- beside the training ---


def test_training_goes_on_while_a_slow_disk_writes_and_a_second_save_waits(tmp_path, monkeypatch):
    may_end, begun, order = threading.Event(), threading.Event(), []
    write = checkpointing.save_file

    def slow(group, path, **more):
        if not begun.is_set():
            begun.set()
            assert may_end.wait(30)
        order.append(f"written {path.parent.name}")
        write(group, path, **more)

    monkeypatch.setattr(checkpointing, "save_file", slow)
    writer = Writer(tmp_path, 9)
    writer.save(tensors(1), state(1), step=True, best=False)
    assert begun.wait(30)
    order.append("training")  # we are here, and the disk is at work
    assert not checkpoints(tmp_path)
    second = threading.Thread(
        target=lambda: (writer.save(tensors(2), state(2), step=True, best=False), order.append("second begun"))
    )
    second.start()
    second.join(0.2)
    assert second.is_alive() and order == ["training"]
    may_end.set()
    second.join(30)
    writer.finish()
    assert order.index("second begun") > order.index("written .step-00000001.partial")
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def test_an_error_of_the_thread_comes_up_in_training(tmp_path):
    writer = Writer(tmp_path, 9)
    poisoned = tensors(float("nan"))
    writer.save(poisoned, state(1), step=True, best=False)
    with pytest.raises(ValueError, match="step 1: w is not finite, so nothing is saved; lower optimizer.lr"):
        writer.finish()
    assert not list(tmp_path.iterdir())
    (tmp_path / ".step-00000002.partial").write_text("")  # no folder can be made there
    writer.save(tensors(), state(2), step=True, best=False)
    with pytest.raises(OSError):
        writer.save(tensors(), state(3), step=True, best=False)


# --- the disk ---


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path, leave: int) -> None:
    free = shutil.disk_usage(place).free
    with (place / "other").open("ab") as file:
        file.write(bytes(max(0, free - leave)))


def test_a_disk_that_is_full_before_or_while_writing_costs_one_checkpoint(tiny_disk, monkeypatch, capsys):
    monkeypatch.setattr(checkpointing, "_SLACK", 4096)
    folder = tiny_disk / "checkpoints"
    writer = Writer(folder, 9)
    for step in (1, 2, 3):  # of 50 KiB each
        writer.save(tensors(step), state(step), step=True, best=False)
    writer.finish()
    fill(tiny_disk, leave=16_000)
    writer.save(tensors(4), state(4), step=True, best=False)  # beforehand: older ones give way
    writer.finish()
    assert [p.name for p in checkpoints(folder)] == ["step-00000002", "step-00000003", "step-00000004"]
    assert "step-00000001 is deleted before its time" in capsys.readouterr().err
    fill(tiny_disk, leave=0)
    with monkeypatch.context() as patch:  # somebody else is faster
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))
        writer.save(tensors(5), state(5), step=True, best=True)
        with pytest.raises(
            NotWritten, match=r"best was not written .*No space left on device.*; the last good one is step-"
        ):
            writer.finish()
    assert "WARNING: CHECKPOINT SKIPPED (1 so far)" in capsys.readouterr().err
    assert not list(folder.glob(".*")) and [p.name for p in checkpoints(folder)][-1] == "step-00000004"
    (tiny_disk / "other").unlink()
    writer.save(tensors(6), state(6), step=True, best=False)  # room again: the best is made up for
    writer.finish()
    assert read_state(folder / "best").step == 5 and newest(folder)[1].step == 6 and writer.skipped == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_of_the_disk_while_flushing_costs_one_checkpoint(tmp_path, monkeypatch, code):
    save(tmp_path, 1)
    writer = Writer(tmp_path, 1)
    with monkeypatch.context() as patch:

        def fails(handle):
            raise OSError(code, os.strerror(code))

        patch.setattr(os, "fsync", fails)
        writer.save(tensors(), state(2), step=True, best=False)
        with pytest.raises(
            NotWritten, match=f"{os.strerror(code)}.*the last good one is step-00000001. Make room, then continue"
        ):
            writer.finish()
    assert names(tmp_path) == ["step-00000001"]
    writer.save(tensors(), state(3), step=True, best=False)
    writer.finish()
    assert names(tmp_path) == ["step-00000003"]


def test_no_room_for_a_checkpoint_is_known_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10 * 2**30))
    billion = 10**9
    with pytest.raises(ValueError, match="a checkpoint takes 14.90 GiB and .* has room for 10.00 GiB; make room"):
        check_room(tmp_path / "run" / "checkpoints", billion, 2, best=True)
    assert "2 checkpoints and the one being written take 20.12 GiB" in check_room(
        tmp_path, billion * 6 // 10, 2, best=False
    )
    assert check_room(tmp_path, 10**8, 2, best=True) is None


def test_what_lies_there_already_counts_as_room(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, checkpointing._SLACK))
    assert "has room for" in check_room(tmp_path, 64 * 64, 2, best=False)
    shutil.rmtree(tmp_path / "step-00000001")
    with ExitStack() as held, pytest.raises(ValueError, match="a checkpoint takes"):
        held.enter_context(hold(tmp_path))
        check_room(tmp_path, 64 * 64, 2, best=False)
