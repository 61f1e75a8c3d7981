"""The script that times a training step runs what training runs, on a CPU too."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_times_steps_of_one_document_and_of_given_lengths(capsys, tmp_path):
    path = Path(__file__).parents[2] / "scripts" / "bench_step.py"
    spec = importlib.util.spec_from_file_location("bench_step", path)
    script = sys.modules["bench_step"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("[40, 30]\n[55, 20]\n" * 20)
    shape = ["--row-length", "128", "--anchors", "6", "--warmup", "1", "--steps", "1"]
    script.main([*shape, "--then", *shape, "--lengths", str(lengths), "target.precision=fp8"])
    one, packed = (json.loads(line[5:]) for line in capsys.readouterr().out.splitlines() if line.startswith("JSON "))
    assert one["blocks"] == packed["blocks"] == 6
    for result in (one, packed):
        parts = sum(result[name] for name in ("target", "draft", "backward", "optimizer"))
        assert result["build_s"] >= 0
        assert 0.5 * result["ms"] < parts <= 1.05 * result["ms"]
        assert result["recompilations_after_warmup"] == 0 and 7 < result["base_loss"] < 10  # ln 4096 = 8.3
    assert packed["target_m"] < one["target_m"]
