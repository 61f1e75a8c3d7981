"""The commands set how idle CPU threads wait, unless the user already chose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "chosen, expected", [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_threads_spin_briefly_unless_told_otherwise(chosen, expected):
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, dflash_train; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | chosen)
    assert done.stdout.strip() == expected, done.stderr


def test_it_is_set_before_torch_is_loaded():
    code = "import sys, dflash_train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
