"""The server on a CUDA machine, and z-lab's command line, which decodes on CUDA alone."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted
import pytest
import torch
import toys
from own_server import serving, stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    """A random drafter of the toy target, exported."""
    return planted.exported(tmp_path_factory.mktemp("drafter") / "export")


@pytest.mark.parametrize("speculation", [True, False])
def test_the_server_counts_what_it_told_its_clients(drafter, target_dir, tmp_path, speculation: bool):
    pytest.importorskip("uvicorn", reason="the extra serve")
    arm = ["--drafter", str(drafter)] if speculation else ["--no-drafter"]
    with serving(tmp_path, "--target", str(target_dir), *arm, "--served-model-name", "toy") as server:
        assert "cuda" in server.log
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: stream(server.url, prompt), toys.prompts(24)))
        counts = server.metrics()
        assert all(text for text, _ in answers)
        assert counts["generation_tokens_total"] == sum(usage["completion_tokens"] for _, usage in answers)
        assert counts["request_success_total/abort"] == 0
        assert ("spec_decode_num_drafts_total" in counts) == speculation


def test_z_labs_command_line_decodes_with_an_export(drafter, target_dir):
    pytest.importorskip("dflash.cli", reason="make rivals installs z-lab's client")
    command = [
        "generate",
        "transformers",
        "--model",
        str(target_dir),
        "--draft",
        str(drafter),
        "--max-new-tokens",
        "24",
        "w30 w31",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "from dflash.cli import main; main()", *command],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1 <= len(done.stdout.split()) <= 24 and all(
        word.startswith("w") or word in ("user", "assistant", "system") for word in done.stdout.split()
    )
