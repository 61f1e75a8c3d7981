"""The comparison with NeMo runs to its end and gives both sides the same CPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_train import assets

for name in ("nemo_automodel", "dflash"):
    if find_spec(name) is None:  # not imported: that takes seconds, and only the script needs them
        pytest.skip(f"{name} is not installed", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_nemo.py"
DOMAINS = {"code", "facts"}


def some(kind: str, count: int) -> list[str]:
    """The first `count` rows of each of two domains of an embedded file."""
    lines = Path(assets.resolve("embedded", kind)).read_text().splitlines()
    return [line for d in sorted(DOMAINS) for line in [x for x in lines if json.loads(x)["domain"] == d][:count]]


@pytest.mark.slow
def test_both_sides_train_equally_long_and_are_judged_alike(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(some("prompts", 30)) + "\n")
    (tmp_path / "heldout.jsonl").write_text("\n".join(some("heldout", 2)) + "\n")
    done = subprocess.run(
        [
            sys.executable, str(SCRIPT), "--seconds", "3", "--threads", "1", "--decoded-prompts", "1",
            # NeMo's usual step of 8 rows takes longer than the whole budget
            "--nemo-batch", "1", "--output", "out/figures.json", "output_dir=run", "regenerate.prompts=prompts.jsonl",
            "regenerate.output=rows.jsonl", "data.train=[rows.jsonl]", "data.heldout=[heldout.jsonl]",
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "figures.json").read_text())

    ours, nemo = result["ours"], result["nemo"]
    assert (result["seconds"], result["threads"], result["decoded_prompts"]) == (3.0, 1, 2)
    assert 60 <= result["train_rows"] < 90  # a conversation with two answers may give two
    assert nemo["cpu_seconds"] == pytest.approx(ours["cpu_seconds"], rel=0.2)
    assert ours["cpu_seconds"] == pytest.approx(3.0, rel=0.5)
    for run in (ours, nemo):
        assert run["steps"] > 0 and run["rows"] > 0 and run["blocks"] > 0
        assert run["epochs"] == pytest.approx(run["rows"] / result["train_rows"], abs=0.01)
        for figure in ("walk_tau", "base_walk_tau", "decoded_tau"):
            assert set(run[figure]) == DOMAINS | {"all"}, figure
            assert all(1.0 <= t["value"] <= 8.0 for t in run[figure].values()), figure
        assert run["walk_tau"]["all"]["tokens"] == ours["walk_tau"]["all"]["tokens"]  # the same answers
        assert run["different_answers"] == 0
    assert result["nemo_best"] is None and result["nemo_grid"] == []
    assert isinstance(result["ours_higher"], bool)
    for name in ("ours", "NeMo lr 0.0006 x1", "CPU seconds", "facts"):
        assert name in done.stdout
