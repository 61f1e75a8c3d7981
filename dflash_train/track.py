"""Where numbers go: metrics.jsonl always, Weights & Biases and TensorBoard when asked. Rank 0 only; the only file importing wandb.

metrics.jsonl is the record. The others are sinks that follow it: one that fails is named once and left behind, and is brought up to date
from the record when the run is continued, or by `python -m dflash_train.track RUN`, which sends to W&B what it does not have.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash_train import disk
from dflash_train.config.load import load_recipe, parse, parser, run_command
from dflash_train.config.schema import Recipe, WandbMode
from dflash_train.config.secrets import scrubbed, without_keys
from dflash_train.config.values import parse_json

METRICS = "metrics.jsonl"
# What is attached to a W&B run as far as it is there.
FILES = ("certificate.json", "evaluation.json", "report.html")
WANDB_ID, WANDB_SENT = "wandb_id", "wandb_sent"
STEP = "optimizer_step"
# W&B sorts its sections by name: these copies make a first one, before data/, heldout/, perf/ and train/.
HEADLINES = {
    "train/base_accept_len": "acceptance/base_accept_len",
    "train/accept_len": "acceptance/accept_len",
    "heldout/walk_tau": "acceptance/walk_tau",
}
SLOT = re.compile(r"train/accuracy/slot_(\d+)")
DOMAIN = re.compile(r"heldout/walk_tau/(.+)")


class Sink(Protocol):
    """A place besides the file. Whatever a method raises ends the sink, never the run.

    sent: the last step that it already has; later rows of the record are given to it when it is opened.
    """

    name: str
    sent: int

    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Tracker:
    """Appends one JSON object per line to <output_dir>/metrics.jsonl, and gives the same to the sinks.

    A line that the disk does not take costs one warning; it is kept and written with the next that goes through.
    """

    def __init__(self, recipe: Recipe, *, resumed_at: int | None, again: Sequence[str] = ()):
        self.path = Path(recipe.output_dir) / METRICS
        self._sinks: list[Sink] = []
        self._unwritten: list[str] = []
        self._warned = False
        rows = self._drop_after(resumed_at or 0, again)
        if not resumed_at:  # begun anew in the folder of a run that never got to a checkpoint: it is another run
            for note in (WANDB_ID, WANDB_SENT):
                (self.path.parent / note).unlink(missing_ok=True)
        for name, opening in _openings(recipe, resumed_at or 0):
            if (sink := _guarded(name, opening)) is not None:
                self._sinks.append(sink)
        for row in rows:
            self._give(row.pop("step"), row)
        # A run that ends by an exception ends its sinks too, so that none of their last steps are lost.
        atexit.register(self.finish, failed=True)

    def _drop_after(self, step: int, again: Sequence[str]) -> list[dict[str, Any]]:
        """A resumed run continues its curve: lines of what will be done again are removed, those of later steps, of evaluations (by their
        names) of this one, and of the run's end. Returns the others."""

        def stays(row: dict[str, Any]) -> bool:
            redone = row["step"] == step and any(name.partition("/")[0] in again for name in row)
            return row["step"] <= step and not redone and not _of_the_end(row)

        rows = [row for row in read_rows(self.path)[0] if stays(row)] if step else []
        disk.replace(self.path, (f"{json.dumps(row)}\n".encode() for row in rows))
        return rows

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._unwritten.append(json.dumps({"step": step, **values}) + "\n")
        self._write()
        self._give(step, values)

    def _write(self) -> None:
        text = "".join(self._unwritten).encode()
        try:
            disk.append(self.path, text)
        except OSError as error:
            if not self._warned:
                _warn(
                    f"{self.path} cannot be written ({error.strerror}): its lines are kept and written when it can; training goes on"
                )
            self._warned = True
            return
        self._unwritten, self._warned = [], False

    def _give(self, step: int, values: dict[str, Any]) -> None:
        for sink in list(self._sinks):
            if step > sink.sent and _guarded(sink.name, lambda sink=sink: sink.log(step, values) or True) is None:
                self._sinks.remove(sink)

    def finish(self, *, failed: bool = False) -> None:
        """Close the sinks; they attach what lies in the run's folder now. failed: the run did not come to its end."""
        atexit.unregister(self.finish)
        if self._unwritten:
            self._write()
        if self._unwritten:
            _warn(f"{len(self._unwritten)} lines of {self.path} are lost: it could not be written to the end")
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            _guarded(sink.name, lambda sink=sink: sink.close(failed=failed))


def _of_the_end(row: dict[str, Any]) -> bool:
    return any(name.startswith("client/") for name in row)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(rows, lines that are none) of a metrics.jsonl; a process that was killed leaves half a line. No file is no rows."""
    rows, broken = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            broken += 1
    return rows, broken


def _openings(recipe: Recipe, resumed_at: int) -> Iterator[tuple[str, Callable[[], Sink | None]]]:
    """Name and opening of every sink that the recipe asks for."""
    yield WandbSink.name, lambda: open_wandb(recipe)
    if recipe.track.tensorboard:
        yield TensorBoardSink.name, lambda: TensorBoardSink(recipe, resumed_at)


def _guarded(name: str, act: Callable[[], Any]) -> Any:
    """What `act` returns; None after a warning if it failed. SystemExit: libraries end the process where they cannot log in."""
    try:
        return act()
    except (Exception, SystemExit) as error:
        _warn(f"{name} failed and is left out from here on, {METRICS} goes on ({type(error).__name__}: {error})")
        return None


def _warn(text: str) -> None:
    print(f"track: {without_keys(text)}", file=sys.stderr, flush=True)


# --- TensorBoard --------------------------------------------------------------------------------------------------


class TensorBoardSink:
    """Scalars of the same names in <output_dir>/tensorboard."""

    name = "TensorBoard"

    def __init__(self, recipe: Recipe, resumed_at: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(recipe.output_dir) / "tensorboard"
        there = folder.is_dir() and any(folder.iterdir())
        self.sent = resumed_at if there else 0
        # Earlier files stay; what they have of the steps to come is purged.
        self._writer = SummaryWriter(str(folder), purge_step=self.sent + 1 if there else None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


# --- Weights & Biases ---------------------------------------------------------------------------------------------


def open_wandb(recipe: Recipe) -> WandbSink | None:
    """The run's W&B sink; None where the recipe wants none, or wants one only if somebody is logged in."""
    mode = recipe.track.wandb
    if mode is WandbMode.auto and recipe.track.wandb_project is not None and os.environ.get("WANDB_MODE"):
        mode = _mode_of_environment(os.environ["WANDB_MODE"])
    if mode is WandbMode.disabled or (mode is WandbMode.auto and recipe.track.wandb_project is None):
        return None
    if mode is WandbMode.auto:
        import wandb

        if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False)):
            print(
                f"track: wandb_project is set but you are not logged in (wandb login); metrics go to {METRICS} only",
                flush=True,
            )
            return None
        mode = WandbMode.online
    return WandbSink(recipe, mode)


def _mode_of_environment(text: str) -> WandbMode:
    known = [m.value for m in WandbMode if m is not WandbMode.auto]
    if text not in known:
        raise ValueError(f"WANDB_MODE = {text}: must be one of {', '.join(known)}; or set track.wandb")
    return WandbMode(text)


class WandbSink:
    """A W&B run that lives as long as the output folder: its id is kept there, so a continued run continues it.

    Steps are never repeated: what a resumed run does again has been sent and is skipped (the record and W&B then differ by rounding, and
    on a CPU not at all); what W&B lacks is sent from the record.
    """

    name = "W&B"

    def __init__(self, recipe: Recipe, mode: WandbMode):
        import wandb

        self._wandb, self._folder = wandb, Path(recipe.output_dir)
        self._note, self._last = self._folder / WANDB_SENT, 0
        self._slots: dict[int, float] = {}
        self._domains: dict[str, dict[int, float]] = {}
        self._run = wandb.init(
            project=recipe.track.wandb_project or "dflash-train",
            name=recipe.track.wandb_name or self._folder.name,
            group=recipe.track.wandb_group,
            id=_run_id(self._folder),
            resume="allow",
            mode=mode.value,
            dir=str(self._folder),
            config=_config(recipe),
            settings=wandb.Settings(
                init_timeout=60,
                # Training is over by then: what could not be sent lies in the folder, for `wandb sync`.
                finish_timeout=300,
                finish_timeout_raises=True,
                # The command line and the changes in a checkout may hold what must not leave the machine; the provenance has the rest.
                disable_git=True,
                x_disable_meta=scrubbed(sys.argv) != sys.argv,
            ),
        )
        if mode is WandbMode.offline:
            self.sent = int(self._note.read_text()) if self._note.exists() else 0
        else:
            self.sent = self._run.starting_step - 1 if self._run.resumed else 0
        for row in read_rows(self._folder / METRICS)[0]:
            if row["step"] <= self.sent:
                self._remember(row["step"], row)
        self._define("train/base_accept_len", summary="max")
        for name in [*list(HEADLINES)[1:], *HEADLINES.values()]:
            self._define(name, summary="max")
        for prefix in ("acceptance", "train", "heldout", "perf", "data"):
            self._define(f"{prefix}/*")

    def _define(self, name: str, **how: Any) -> None:
        self._run.define_metric(name, step_metric=STEP, **how)

    def log(self, step: int, values: dict[str, Any]) -> None:
        if step > self._last:  # W&B keeps a step open until the next one begins
            self._note.write_text(str(self._last))
            self._last = step
        copies = {copy: values[name] for name, copy in HEADLINES.items() if name in values}
        charts = self._charts() if self._remember(step, values) else {}
        self._run.log({STEP: step, **copies, **values, **charts}, step=step)

    def _remember(self, step: int, values: dict[str, Any]) -> bool:
        """Keep what the charts are made of; whether these values bring them another held-out point."""
        self._slots |= {int(m[1]): value for name, value in values.items() if (m := SLOT.fullmatch(name))}
        domains = {m[1]: value for name, value in values.items() if (m := DOMAIN.fullmatch(name))}
        for domain, value in domains.items():
            self._domains.setdefault(domain, {})[step] = value
        return bool(domains)

    def _charts(self) -> dict[str, Any]:
        """Accuracy by slot as it is now, and the held-out walk of all domains over the steps."""
        plot, charts = self._wandb.plot, {}
        if self._slots:
            table = self._wandb.Table(
                columns=["slot", "accuracy"], data=[[f"{k:02d}", v] for k, v in sorted(self._slots.items())]
            )
            charts["charts/accuracy_by_slot"] = plot.bar(table, "slot", "accuracy", title="accuracy by slot")
        if self._domains:
            charts["charts/walk_tau_by_domain"] = plot.line_series(
                xs=[list(points) for points in self._domains.values()],
                ys=[list(points.values()) for points in self._domains.values()],
                keys=list(self._domains),
                title="held-out walk tau by domain",
                xname="step",
            )
        return charts

    def close(self, *, failed: bool) -> None:
        for path in (self._folder / name for name in FILES):
            if (
                path.exists()
            ):  # a copy: W&B itself would make a link, which breaks when an offline run is moved to be synced
                copy = shutil.copy(path, self._run.dir)
                self._run.save(copy, base_path=self._run.dir, policy="now")
        evaluation = self._folder / "evaluation.json"
        if evaluation.exists():
            self._run.summary.update(flat_numbers(json.loads(evaluation.read_text()), "evaluation"))
        self._run.finish(exit_code=1 if failed else 0)
        if self._last:
            self._note.write_text(str(self._last))


def _run_id(folder: Path) -> str:
    mark = folder / WANDB_ID
    if not mark.exists():
        mark.write_text(uuid.uuid4().hex[:8])
    return mark.read_text()


def _config(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe and the certificate of its data, without secrets."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.structured(recipe), enum_to_str=True)
    certificate = Path(recipe.output_dir) / "certificate.json"
    if certificate.exists():
        config["certificate"] = json.loads(certificate.read_text(encoding="utf-8"))
    return scrubbed(config)


def flat_numbers(value: Any, name: str) -> dict[str, float]:
    """Numbers and truths of nested mappings under names with slashes; lists and texts are left out."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat_numbers(inner, f"{name}/{key}").items()}
    return {name: value} if isinstance(value, int | float) else {}


# --- sending later ------------------------------------------------------------------------------------------------


def send(recipe: Recipe) -> bool:
    """Give W&B what lies in the run's folder and it does not have: rows of the record, files, the figures of an evaluation. Nothing where
    the recipe wants no W&B. False after a failure, which is a warning."""

    def act() -> bool:
        sink = open_wandb(recipe)
        if sink is not None:
            for row in read_rows(Path(recipe.output_dir) / METRICS)[0]:
                if (step := row.pop("step")) > sink.sent:
                    sink.log(step, row)
            sink.close(failed=False)
        return True

    return _guarded(WandbSink.name, act) is True


def main(argv: list[str]) -> int:
    args = parse(parser("python -m dflash_train.track", __doc__.split("\n\n")[1], source="folder of a run"), argv)
    folder = Path(args.source)
    if not (folder / METRICS).is_file() or not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder}: no run (it has no {METRICS} with config.yaml); name the output_dir of one")
    recipe = load_recipe(args.config or str(folder), args.overrides)
    recipe.output_dir = str(folder)
    if recipe.track.wandb in (WandbMode.auto, WandbMode.disabled):
        recipe.track.wandb = WandbMode.online
    return 0 if send(recipe) else 1


if __name__ == "__main__":
    run_command(main)
