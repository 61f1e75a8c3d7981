"""The short form of scripts/fuzz.py, whose long form is docs/measurements/fuzz.md; and that it can tell a fault from a clear error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import toys

fuzzing = toys.script("fuzz", "scripts")


@pytest.mark.parametrize(("kind", "cases"), [("rows", 120), ("configs", 50), ("folders", 50)])
def test_nothing_malformed_ends_in_a_traceback_or_hangs(kind, cases):
    found = fuzzing.fuzz(kind, cases, seed_=7)
    assert not found.faults, "\n\n".join(map(fuzzing.summary, found.faults.values()))
    assert found.cases >= cases and found.outcomes["error"] > cases // 5 and found.outcomes["accepted"] > 0


def raises(error: BaseException):
    def act():
        raise error

    return act


@pytest.mark.parametrize("act", [
    lambda: int("x"), lambda: {}["a"], lambda: b"\xff".decode(), raises(ValueError("of nobody")), raises(OSError(28, "no file named")), lambda: time.sleep(60), lambda: sum(1 for _ in iter(int, 1)), raises(MemoryError()),
    raises(RecursionError()), lambda: 1 // 0,
], ids=range(10))  # fmt: skip
def test_a_fault_is_told(act):
    assert fuzzing.judge(act, 0.2)[0] == "fault"


def test_what_is_no_fault_is_told_too(tmp_path):
    def missing():
        return fuzzing.read_certificate(tmp_path / "none.json")

    assert fuzzing.judge(missing, 5)[0] == "error"
    assert fuzzing.judge(lambda: (tmp_path / "none").open(), 5)[0] == "error"
    assert fuzzing.judge(lambda: None, 5) == ("accepted", "") and fuzzing.judge(lambda: "skipped", 5)[0] == "skipped"


def test_a_file_outside_of_the_output_is_a_fault(monkeypatch):
    def escapes(given: Path, out: Path):
        (out.parent / "escaped").write_text("x")

    from hypothesis import strategies as st

    monkeypatch.setitem(fuzzing.CASES, "rows", lambda: st.just(("escapes", escapes)))
    found = fuzzing.fuzz("rows", 1, seed_=0)
    assert "escaped: escaped" in next(iter(found.faults.values()))
