"""metrics.jsonl is whole after any ending; W&B and TensorBoard are touched only when asked for, and never end a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_train import track
from dflash_train.config.load import to_yaml
from dflash_train.config.schema import Recipe, WandbMode
from dflash_train.track import Tracker, flat_numbers, scrubbed, send


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return recipe


@pytest.fixture
def no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises


class FakeWandb:
    """Stands for the library, logged out; `calls` has what was asked of it, `server` the steps of a run that its server knows."""

    def __init__(self, folder: Path):
        self.calls: list[tuple] = []
        self.folder = folder
        self.server: int | None = None
        self.fails: str | None = None
        self.plot = SimpleNamespace(bar=lambda *a, **k: "bar", line_series=lambda **k: ("lines", k["keys"]))

    def login(self, **_):
        return False

    def Settings(self, **values):
        return values

    def Table(self, **values):
        return values

    def init(self, **arguments):
        self._call("init", arguments)
        resumed = self.server is not None
        return SimpleNamespace(
            dir=str(self.folder),
            resumed=resumed,
            starting_step=self.server + 1 if resumed else 0,
            summary={},
            define_metric=lambda name, **how: self._call("define", name, how),
            log=lambda values, step: self._call("log", step, values),
            save=lambda path, **_: self._call("save", Path(path).name),
            finish=lambda exit_code: self._call("finish", exit_code),
        )

    def _call(self, name: str, *rest):
        if self.fails == name:
            raise ConnectionError(f"{name}: no network")
        self.calls.append((name, *rest))

    def of(self, name: str) -> list:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    fake = FakeWandb(tmp_path / "wandb_files")
    fake.folder.mkdir()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
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


def test_an_evaluation_that_is_done_again_is_logged_once(recipe, no_wandb):
    first = Tracker(recipe, resumed_at=0)
    for step, values in [(4, {"train/loss": 1.0}), (4, {"heldout/walk_tau": 2.0}), (4, {"decoded/tau": 2.0})]:
        first.log(step, values)
    kept = Tracker(recipe, resumed_at=4, again=["heldout"])
    rows = [json.loads(line) for line in kept.path.read_text().splitlines()]
    assert rows == [{"step": 4, "train/loss": 1.0}, {"step": 4, "decoded/tau": 2.0}]


@pytest.mark.parametrize(("resumed_at", "kept"), [(4, [1, 2, 3, 4]), (2, [1, 2]), (9, [1, 2, 3, 4, 5]), (0, [])])
def test_a_continued_run_drops_the_lines_of_steps_to_come(recipe, no_wandb, resumed_at, kept):
    first = Tracker(recipe, resumed_at=0)
    for step in range(1, 6):
        first.log(step, {"train/loss": 1 / step})
    assert steps(Tracker(recipe, resumed_at=resumed_at)) == kept


@pytest.mark.parametrize("half", ['{"step": 2, "train/lo', '{"step": 2, "note": {"a": 1}', "\xff\xfe", "7"])
def test_a_half_written_last_line_is_dropped(recipe, no_wandb, half):
    first = Tracker(recipe, resumed_at=0)
    first.log(1, {"train/loss": 1.0})
    with first.path.open("ab") as file:
        file.write(half.encode("latin-1"))
    again = Tracker(recipe, resumed_at=2)
    again.log(3, {"train/loss": 0.5})
    assert steps(again) == [1, 3]


# --- W&B ---


@pytest.mark.parametrize("mode", [WandbMode.disabled, WandbMode.auto])
def test_wandb_is_not_imported_unless_asked_for(recipe, no_wandb, mode, capsys):
    recipe.track.wandb = mode
    if mode is WandbMode.disabled:
        recipe.track.wandb_project = "mine"
    Tracker(recipe, resumed_at=0).log(1, {"a": 1})
    assert not capsys.readouterr().err


def test_auto_without_a_login_says_so_and_goes_on(recipe, wandb, capsys):
    recipe.track.wandb_project = "mine"
    Tracker(recipe, resumed_at=0).log(1, {"a": 1})
    assert "not logged in" in capsys.readouterr().out
    assert not wandb.calls


@pytest.mark.parametrize(("variable", "value", "mode"), [
    ("WANDB_API_KEY", "x" * 40, "online"), ("WANDB_MODE", "offline", "offline"), ("WANDB_MODE", "disabled", None)
])  # fmt: skip
def test_auto_follows_the_environment(recipe, wandb, monkeypatch, variable, value, mode):
    monkeypatch.setenv(variable, value)
    recipe.track.wandb_project, recipe.track.wandb_group = "mine", "sweep"
    Tracker(recipe, resumed_at=0)
    asked = [(a["mode"], a["project"], a["name"], a["group"]) for (a,) in wandb.of("init")]
    assert asked == ([] if mode is None else [(mode, "mine", "run", "sweep")])


def test_wandb_gets_what_the_file_gets_and_a_continued_run_keeps_its_id(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    for begin in (0, 1):
        tracker = Tracker(recipe, resumed_at=begin)
        tracker.log(begin + 1, {"train/loss": 1.5})
        tracker.finish()
    assert wandb.of("log") == [(1, {track.STEP: 1, "train/loss": 1.5}), (2, {track.STEP: 2, "train/loss": 1.5})]
    assert wandb.of("finish") == [(0,), (0,)]
    (first,), (second,) = wandb.of("init")
    assert first["id"] == second["id"] and first["mode"] == "offline" and first["resume"] == "allow"
    assert first["dir"] == recipe.output_dir
    assert first["config"]["optimizer"]["lr"] == recipe.optimizer.lr
    json.dumps(first["config"])  # plain values: no enums, no missing ones


def test_curves_are_grouped_and_acceptance_comes_first(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(5, {"train/accept_len": 2.0, "train/base_accept_len": 1.5, "train/accuracy/slot_01": 0.5})
    tracker.log(5, {"heldout/walk_tau": 1.75, "heldout/walk_tau/code": 1.25})
    defined = wandb.of("define")
    assert defined[0] == ("train/base_accept_len", {"step_metric": track.STEP, "summary": "max"})
    assert {name for name, _ in defined} >= {"train/*", "heldout/*", "perf/*", "data/*", "acceptance/*"}
    (_, trained), (_, heldout) = wandb.of("log")
    assert trained["acceptance/base_accept_len"] == trained["train/base_accept_len"] == 1.5
    assert sorted({name.split("/")[0] for name in trained} - {track.STEP})[0] == "acceptance"
    assert heldout["acceptance/walk_tau"] == 1.75
    assert heldout["charts/accuracy_by_slot"] == "bar" and heldout["charts/walk_tau_by_domain"] == ("lines", ["code"])


def test_files_of_the_folder_and_figures_of_the_evaluation_go_along(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    folder = Path(recipe.output_dir)
    (folder / "certificate.json").write_text('{"digest": "0123456789abcdef"}')
    tracker = Tracker(recipe, resumed_at=0)
    (folder / "evaluation.json").write_text('{"decoded": {"tau_all": {"value": 3.5}, "parted_ids": []}}')
    tracker.finish()
    assert [name for (name,) in wandb.of("save")] == ["certificate.json", "evaluation.json"]
    assert (wandb.folder / "evaluation.json").exists() and not (wandb.folder / "evaluation.json").is_symlink()
    assert wandb.of("init")[0][0]["config"]["certificate"]["digest"] == "0123456789abcdef"
    assert flat_numbers({"a": {"b": 1, "c": True, "d": [1], "e": "x"}}, "n") == {"n/a/b": 1, "n/a/c": True}


def test_no_step_goes_to_wandb_twice_offline(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    first = Tracker(recipe, resumed_at=0)
    for step in (1, 2, 3, 4):
        first.log(step, {"train/loss": 1.0})
    first.finish(failed=True)
    assert wandb.of("finish") == [(1,)]
    again = Tracker(recipe, resumed_at=2)  # the checkpoint is older than the last line
    for step in (3, 4, 5):
        again.log(step, {"train/loss": 1.0})
    again.finish()
    assert [step for step, _ in wandb.of("log")] == [1, 2, 3, 4, 5]
    assert steps(again) == [1, 2, 3, 4, 5]


def test_a_run_begun_anew_in_the_same_folder_is_another_wandb_run(recipe, wandb):
    recipe.track.wandb = WandbMode.offline
    for _ in range(2):
        tracker = Tracker(recipe, resumed_at=0)
        tracker.log(1, {"train/loss": 1.0})
        tracker.finish(failed=True)
    assert len({a["id"] for (a,) in wandb.of("init")}) == 2 and len(wandb.of("log")) == 2


def test_what_the_server_lacks_is_sent_from_the_record(recipe, wandb):
    recipe.track.wandb = WandbMode.online
    wandb.fails = "log"
    first = Tracker(recipe, resumed_at=0)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    wandb.fails, wandb.server = None, 1
    again = Tracker(recipe, resumed_at=3)
    again.log(4, {"train/loss": 4.0})
    assert [(step, values["train/loss"]) for step, values in wandb.of("log")] == [(2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.parametrize("fails", ["import", "init", "define", "log", "save", "finish"])
def test_a_sink_that_fails_is_named_once_and_the_file_goes_on(recipe, wandb, monkeypatch, capsys, fails):
    recipe.track.wandb = WandbMode.online
    (Path(recipe.output_dir) / "certificate.json").write_text("{}")
    wandb.fails = fails
    if fails == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = Tracker(recipe, resumed_at=0)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert steps(tracker) == [1, 2, 3]
    assert capsys.readouterr().err.count("track: W&B failed") == 1


def test_a_library_that_ends_the_process_does_not(recipe, wandb, monkeypatch, capsys):
    recipe.track.wandb = WandbMode.online
    monkeypatch.setattr(wandb, "init", lambda **_: sys.exit("You must log in"))
    Tracker(recipe, resumed_at=0).log(1, {"a": 1})
    assert "track: W&B failed" in capsys.readouterr().err


def test_a_later_evaluation_is_sent_to_the_same_run(recipe, wandb):
    recipe.track.wandb = WandbMode.online
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    wandb.server = 1
    (Path(recipe.output_dir) / "evaluation.json").write_text("{}")
    assert send(recipe)
    assert len({a["id"] for (a,) in wandb.of("init")}) == 1 and len(wandb.of("log")) == 1
    assert wandb.of("save") == [("evaluation.json",)]
    wandb.fails = "init"
    assert not send(recipe)


def test_the_command_sends_a_run_that_was_trained_without_wandb(recipe, wandb):
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(1, {"train/loss": 1.0})
    (Path(recipe.output_dir) / "config.yaml").write_text(to_yaml(recipe))
    assert track.main([recipe.output_dir, "track.wandb_project=other"]) == 0
    assert wandb.of("init")[0][0]["project"] == "other" and [step for step, _ in wandb.of("log")] == [1]
    with pytest.raises(ValueError, match="nowhere: no run"):
        track.main(["nowhere"])


# --- secrets ---


def test_nothing_secret_goes_into_the_config(recipe, wandb, monkeypatch):
    monkeypatch.setenv("MY_SERVER_KEY", "correct horse battery")
    recipe.track.wandb = WandbMode.offline
    recipe.regenerate.extra_body = {"api_key": "k1-hush", "note": "uses correct horse battery", "max_tokens": 7}
    recipe.regenerate.base_urls = ["http://me:s3cret@host:8000/v1"]
    recipe.regenerate.vllm_args = {"hf_token": "abc-hush", "headers": {"Authorization": "Bearer zzz-hush"}}
    recipe.provenance = {"command": ["train.py", "+x.api_key=k2-hush", "hf_abcdefghijklmnopqrst"]}
    recipe.drafter.mask_token_id = 99
    Tracker(recipe, resumed_at=0)
    config = wandb.of("init")[0][0]["config"]
    text = json.dumps(config)
    assert "hush" not in text and "s3cret" not in text and "horse" not in text and "hf_abc" not in text
    assert config["drafter"]["mask_token_id"] == 99 and config["regenerate"]["extra_body"]["max_tokens"] == 7
    assert config["regenerate"]["api_key_env"] == "OPENAI_API_KEY"
    assert config["regenerate"]["base_urls"] == ["http://***@host:8000/v1"]
    assert config["provenance"]["command"][:2] == ["train.py", "+x.api_key=***"]


@pytest.mark.parametrize("text", [
    "drafter.mask_token_id=4080", "regenerate.max_new_tokens=64", "0123456789abcdef0123456789abcdef01234567",
    "outputs/my_run", "Qwen/Qwen3-8B", "http://localhost:8000/v1", "special tokens", "keys",
])  # fmt: skip
def test_what_is_no_secret_stays(text):
    assert scrubbed({"command": [text]}) == {"command": [text]}


# --- TensorBoard ---


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(e.step, round(e.value, 4)) for e in found.Scalars(name)] for name in sorted(found.Tags()["scalars"])
    }


def test_tensorboard_has_the_same_names_and_a_continued_run_no_step_twice(recipe, no_wandb):
    pytest.importorskip("tensorboard")
    recipe.track.tensorboard = True
    first = Tracker(recipe, resumed_at=0)
    for step in (1, 2, 3, 4):
        first.log(step, {"train/loss": 1.0, "heldout/walk_tau": 2.0})
    again = Tracker(recipe, resumed_at=2)
    for step in (3, 4, 5):
        again.log(step, {"train/loss": 0.5})
    again.finish()
    shown = scalars(Path(recipe.output_dir) / "tensorboard")
    assert shown["train/loss"] == [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.5)]
    assert shown["heldout/walk_tau"] == [(1, 2.0), (2, 2.0)]


def test_tensorboard_switched_on_later_gets_the_record(recipe, no_wandb):
    pytest.importorskip("tensorboard")
    Tracker(recipe, resumed_at=0).log(1, {"train/loss": 1.0})
    recipe.track.tensorboard = True
    Tracker(recipe, resumed_at=1).log(2, {"train/loss": 0.5})
    assert scalars(Path(recipe.output_dir) / "tensorboard") == {"train/loss": [(1, 1.0), (2, 0.5)]}


def test_tensorboard_that_is_not_there_is_a_warning(recipe, no_wandb, monkeypatch, capsys):
    recipe.track.tensorboard = True
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tracker = Tracker(recipe, resumed_at=0)
    tracker.log(1, {"a": 1.0})
    assert steps(tracker) == [1] and capsys.readouterr().err.count("TensorBoard failed") == 1


# --- the real library, offline ---


def records(path: Path) -> list:
    """The records of a .wandb file: a header of 7 bytes, then a LevelDB log in blocks of 32 KiB, each record a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that has no room for a header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
def test_an_offline_run_holds_the_curves_once_and_the_files(recipe, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe.track.wandb = WandbMode.offline
    recipe.regenerate.extra_body = {"api_key": "hush-hush"}
    folder = Path(recipe.output_dir)
    (folder / "certificate.json").write_text('{"digest": "0123456789abcdef"}')
    for begin, done in ((0, (1, 2, 3)), (2, (3, 4))):
        tracker = Tracker(recipe, resumed_at=begin)
        for step in done:
            tracker.log(step, {"train/base_accept_len": 1.0 + step, "train/accuracy/slot_01": 0.5})
        tracker.log(done[-1], {"heldout/walk_tau": 2.0, "heldout/walk_tau/code": 2.0})
        tracker.finish()
    parts = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(parts) == 2 and len({part.name for part in parts}) == 1, "one run in two parts"
    rows, text = [], b""
    for part in parts:
        text += part.read_bytes()
        for record in records(part):
            if record.WhichOneof("record_type") == "history":
                names = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                rows.append((json.loads(names["_step"]), names))
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    assert [json.loads(names["train/base_accept_len"]) for _, names in rows] == [2.0, 3.0, 4.0, 5.0]
    assert "heldout/walk_tau/code" in rows[2][1], "held-out figures are of the same step"
    assert b"0123456789abcdef" in text and b"hush-hush" not in text
    assert all((part.parent / "files" / "certificate.json").is_file() for part in parts)
