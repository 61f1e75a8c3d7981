"""metrics.jsonl is whole after any ending; W&B is touched only when asked for."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from dflash_train.config.schema import Recipe, WandbMode
from dflash_train.track import Tracker


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return recipe


@pytest.fixture
def no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises


@pytest.fixture
def wandb(monkeypatch):
    """Stands for the library, logged out; `calls` has what was asked of it."""
    calls: list[tuple] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )

    def init(**arguments):
        calls.append(("init", arguments))
        return run

    ids = iter(f"id{i}" for i in range(9))
    fake = SimpleNamespace(
        calls=calls,
        init=init,
        login=lambda **_: False,
        api=SimpleNamespace(api_key=None),
        util=SimpleNamespace(generate_id=lambda: next(ids)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return fake


def steps(tracker: Tracker) -> list[int]:
    return [json.loads(line)["step"] for line in tracker.path.read_text().splitlines()]


def test_one_object_per_line(recipe, no_wandb):
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(1, {"train/loss": 2.5})
    tracker.log(2, {"train/loss": 2.25, "train/lr": 1e-3})
    tracker.finish()
    lines = [json.loads(line) for line in tracker.path.read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": 2.25, "train/lr": 1e-3}]


def test_every_line_is_on_disk_at_once(recipe, no_wandb):
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(1, {"a": 1})
    assert steps(tracker) == [1]


@pytest.mark.parametrize(("resumed_at", "kept"), [(4, [1, 2, 3, 4]), (2, [1, 2]), (9, [1, 2, 3, 4, 5]), (0, [])])
def test_a_continued_run_drops_the_lines_of_steps_to_come(recipe, no_wandb, resumed_at, kept):
    first = Tracker(recipe, resumed_at=0)
    for step in range(1, 6):
        first.log(step, {"train/loss": 1 / step})
    assert steps(Tracker(recipe, resumed_at=resumed_at)) == kept


def test_a_half_written_last_line_is_dropped(recipe, no_wandb):
    first = Tracker(recipe, resumed_at=0)
    first.log(1, {"train/loss": 1.0})
    with first.path.open("a") as file:
        file.write('{"step": 2, "train/lo')
    again = Tracker(recipe, resumed_at=2)
    again.log(3, {"train/loss": 0.5})
    assert steps(again) == [1, 3]


@pytest.mark.parametrize("mode", [WandbMode.disabled, WandbMode.auto])
def test_wandb_is_not_imported_unless_asked_for(recipe, no_wandb, mode):
    recipe.track.wandb = mode
    if mode is WandbMode.disabled:
        recipe.track.wandb_project = "mine"
    Tracker(recipe, resumed_at=0).log(1, {"a": 1})


def test_auto_without_a_login_says_so_and_goes_on(recipe, wandb, capsys):
    recipe.track.wandb_project = "mine"
    Tracker(recipe, resumed_at=0).log(1, {"a": 1})
    assert "not logged in" in capsys.readouterr().out
    assert not wandb.calls


def test_auto_with_a_key_is_online(recipe, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    recipe.track.wandb_project = "mine"
    Tracker(recipe, resumed_at=0)
    ((_, arguments),) = wandb.calls
    assert (arguments["mode"], arguments["project"], arguments["name"]) == ("online", "mine", "run")


def test_wandb_gets_what_the_file_gets_and_a_continued_run_keeps_its_id(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    for begin in (0, 1):
        tracker = Tracker(recipe, resumed_at=begin)
        tracker.log(begin + 1, {"train/loss": 1.5})
        tracker.finish()
    assert [call[0] for call in wandb.calls] == ["init", "log", "finish"] * 2
    assert wandb.calls[1] == ("log", 1, {"train/loss": 1.5})
    first, second = wandb.calls[0][1], wandb.calls[3][1]
    assert first["id"] == second["id"] and first["mode"] == "offline" and first["resume"] == "allow"
    assert first["dir"] == recipe.output_dir
    assert first["config"]["optimizer"]["lr"] == recipe.optimizer.lr
    json.dumps(first["config"])  # plain values: no enums, no missing ones
