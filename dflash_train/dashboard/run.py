"""What lies in a run's folder, whatever state the run is in: just begun, under way, killed in the middle of a line, resumed, evaluated.

Nothing here needs the target, its tokenizer or a drafter. decoded.jsonl holds one decoded prompt per line:
{id, domain, tags: {name: value}, prompt_tokens: int, pieces: [text of each answer token], rounds: [tokens gained by each verification],
verdict: "identical" | "near_tie" | "different" | null}, and where known accepted: [drafts among them], prompt: text. The first piece comes with the prompt, from the
target's prefill; the others are the rounds', in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash_train.config.values import parse_json
from dflash_train.track import METRICS, read_rows

CONFIG, CERTIFICATE, EVALUATION, DECODED, NOTES = (
    "config.yaml", "certificate.json", "evaluation.json", "decoded.jsonl", "notes.json",
)  # fmt: skip
WATCHED = (METRICS, CONFIG, CERTIFICATE, EVALUATION, DECODED, NOTES)

# What reading a value of another kind than was written raises.
UNEXPECTED = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError, OverflowError)

Points = list[tuple[int, float]]


@dataclass(kw_only=True)
class RunView:
    """A run as far as its files tell.

    curves: finite values of each metric over ascending steps; non_finite: steps at which a metric was not finite; notes: what was said of
    the data's origin; unreadable: files or lines that could not be read, in words; written: when the last metric was, in seconds since 1970.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Points] = field(default_factory=dict)
    non_finite: dict[str, list[int]] = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    decoded: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    parameters: int | None = None
    written: float | None = None

    def setting(self, name: str) -> Any:
        """A knob of the recipe by its dotted name; None where the recipe of the run has none."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def not_as_written(self, file: str, error: Exception) -> None:
        """Remember that a file holds something else than was written there."""
        text = f"{file}: holds something else than this version writes ({type(error).__name__}: {str(error)[:80]})"
        if not any(known.startswith(f"{file}: holds something else") for known in self.unreadable):
            self.unreadable.append(text)

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max((points[-1][0] for points in self.curves.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        if self.setting("train.max_steps") is not None:
            return self.setting("train.max_steps")
        epochs, points = self.setting("train.num_epochs"), self.curves.get("train/epoch")
        return math.ceil(epochs * round(points[-1][0] / points[-1][1])) if epochs and points else None

    @property
    def finished(self) -> bool:
        return self.total_steps is not None and self.step >= self.total_steps

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.curves[name][-1][1] if name in self.curves else None

    @property
    def measured(self) -> dict[str, Any] | None:
        """What decoding measured, if the run was evaluated."""
        found = (self.evaluation or {}).get("decoded")
        return found if isinstance(found, dict) else None


def locate_run(source: str) -> Path:
    """The run's folder: `source`, or where the checkpoint or export named by it lies."""
    path = Path(source)
    if not path.is_dir():
        raise ValueError(f"{source}: no such folder; name the output_dir of a run")
    real = path.resolve()
    for folder, shown in ((real, path), (real.parent, real.parent), (real.parent.parent, real.parent.parent)):
        if (folder / CONFIG).is_file() or (folder / METRICS).is_file():
            return shown
    raise ValueError(
        f"{source}: no run (neither {CONFIG} nor {METRICS} there, or beside it); name the output_dir of a run. An export that lies "
        "elsewhere has no metrics"
    )


def read_run(folder: Path) -> RunView:
    """Everything that the folder has. A file that cannot be read is named in `unreadable`, never an error: it may be half written."""
    view = RunView(folder=folder)
    rows, broken = read_rows(folder / METRICS)
    if broken:
        view.unreadable.append(f"{METRICS}: {broken} line{'s' if broken > 1 else ''} that hold no metrics")
    view.curves, view.non_finite = curves_of(rows)
    if (folder / METRICS).exists():
        view.written = (folder / METRICS).stat().st_mtime
    view.config = _mapping(view, CONFIG, yaml.safe_load) or {}
    view.certificate = _mapping(view, CERTIFICATE, parse_json)
    view.evaluation = _mapping(view, EVALUATION, parse_json)
    notes = _read(view, NOTES, parse_json)
    view.notes = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    view.decoded = _samples(view)
    view.parameters = _parameters(folder)
    return view


def curves_of(rows: list[dict[str, Any]]) -> tuple[dict[str, Points], dict[str, list[int]]]:
    """(curves, steps of values that are not finite) of the rows of a record. Where a metric goes back to an earlier step (a resumed run),
    the later rows win: what it had from there on is dropped."""
    curves: dict[str, Points] = {}
    non_finite: dict[str, list[int]] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            points, bad = curves.setdefault(name, []), non_finite.setdefault(name, [])
            while points and points[-1][0] >= step:
                points.pop()
            while bad and bad[-1] >= step:
                bad.pop()
            if math.isfinite(value):
                points.append((step, float(value)))
            else:
                bad.append(step)
    return {n: p for n, p in curves.items() if p}, {n: s for n, s in non_finite.items() if s}


def _read(view: RunView, name: str, parse: Any) -> Any:
    path = view.folder / name
    if not path.exists():
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        view.unreadable.append(f"{name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
        return None


def _mapping(view: RunView, name: str, parse: Any) -> dict[str, Any] | None:
    value = _read(view, name, parse)
    if value is not None and not isinstance(value, dict):
        view.unreadable.append(f"{name}: holds a {type(value).__name__}, not a mapping")
        return None
    return value


def _samples(view: RunView) -> list[dict[str, Any]]:
    """The usable rows of decoded.jsonl; the others are counted."""
    path = view.folder / DECODED
    rows, bad = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if _is_sample(row):
            rows.append(row)
        else:
            bad += 1
    if bad:
        view.unreadable.append(f"{DECODED}: {bad} row{'s' if bad > 1 else ''} without id, pieces and rounds that fit")
    return rows


def _is_sample(row: Any) -> bool:
    if not isinstance(row, dict) or not {"id", "pieces", "rounds"} <= set(row):
        return False
    pieces, rounds = row["pieces"], row["rounds"]
    return (
        isinstance(pieces, list)
        and isinstance(rounds, list)
        and all(isinstance(p, str) for p in pieces)
        and all(isinstance(r, int) and r > 0 for r in rounds)
        and sum(rounds) <= max(0, len(pieces) - 1)
        and isinstance(row.get("accepted") or rounds, list)
        and len(row.get("accepted") or rounds) == len(rounds)
    )


def _parameters(folder: Path) -> int | None:
    """The drafter's size, from the header of its newest weights; None before there are any."""
    files = [*sorted(folder.glob("checkpoints/step-*/model.safetensors")), folder / "export" / "model.safetensors"]
    for path in reversed(files):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length if length <= path.stat().st_size else 0))
            return sum(math.prod(v["shape"]) for k, v in header.items() if k != "__metadata__")
        except (OSError, *UNEXPECTED):
            continue  # being replaced at this moment, or not there
    return None
