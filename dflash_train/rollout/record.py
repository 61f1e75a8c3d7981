"""The record of a rollout: one JSON file, written whole after every step, read again when the command is run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_train import __version__, disk
from dflash_train.folder import read_json
from dflash_train.rollout.pair import Outcome

FORMAT = 1
FILE = "rollout.json"


class Record:
    """`steps`: name -> {inputs, date, ok, summary, facts, notes}, in the order in which they were done."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {"format": FORMAT, "steps": {}}
        if self.path.is_file():
            found = read_json(self.path)
            if not isinstance(found, dict) or found.get("format") != FORMAT or not _steps(found.get("steps")):
                raise ValueError(
                    f"{self.path}: not a record of this version's rollout; name another --output, or delete it"
                )
            self.data = found
        self.data["dflash_train"] = __version__

    def step(
        self, name: str, inputs: dict[str, Any], run: Callable[[], Outcome], *, again: bool = False
    ) -> tuple[Outcome, bool]:
        """(outcome, whether it was known): done where it never was or its inputs are others. A step that failed is done again."""
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
        known = self.data["steps"].get(name)
        if known and known.get("inputs") == key and known.get("ok") and not again:
            return Outcome(ok=known["ok"], summary=known["summary"], facts=known["facts"], notes=known["notes"]), True
        if (
            self.data.get("verdict") is not None
        ):  # what was decided before does not hold while something is done anew, nor if that fails
            self.data |= {"verdict": None, "reasons": [f"{name}: begun and not ended"]}
            self.write()
        outcome = run()
        self.data["steps"].pop(name, None)  # the newest last
        self.data["steps"][name] = {"inputs": key, "date": now(), **asdict(outcome)}
        self.write()
        return outcome, False

    def close(self, **facts: Any) -> None:
        """The parts above the steps: what was decided, and about what."""
        self.data |= {"date": now(), **facts}
        self.write()

    def write(self) -> None:
        disk.replace(self.path, [json.dumps(self.data, indent=1, ensure_ascii=False).encode(), b"\n"])


def _steps(found: Any) -> bool:
    kinds = {"inputs": str, "ok": bool, "summary": str, "facts": dict, "notes": list}
    steps = found.values() if isinstance(found, dict) else [None]
    return all(isinstance(s, dict) and all(isinstance(s.get(k), kind) for k, kind in kinds.items()) for s in steps)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
