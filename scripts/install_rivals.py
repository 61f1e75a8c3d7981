"""Install, for tests only, the programs that the project is held against. Their own pins clash with each other
(transformers 5.18.0 against 5.15.0), so they come without dependencies; all run on the versions in constraints.txt."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

RIVALS = {"nemo-automodel": "0.7.0", "dflash": "0.1.0"}
SERVER = {
    "xllamacpp": "2026.10.11549",
    "gguf": "0.19.0",
}  # the extra `serving`: llama.cpp's server, and what writes its files
ENGINE = dict.fromkeys(("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "psutil", "pydantic"))
ENGINE = {
    "deepspeed": "0.19.8",
    **ENGINE,
}  # the extra `deepspeed`; built from its source archive, nothing of it is compiled
NEEDS = {"torchao": "0.18.0", "torchdata": "0.11.0", "pillow": None}  # what NeMo's modules import besides ours


def has(name: str, wanted: str | None) -> bool:
    try:
        return wanted in (None, version(name))
    except PackageNotFoundError:
        return False


def main() -> int:
    wanted = [f"{n}=={v}" if v else n for n, v in {**RIVALS, **SERVER, **ENGINE, **NEEDS}.items() if not has(n, v)]
    if not wanted:
        return 0
    print("installing for the tests:", ", ".join(wanted), file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *wanted]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
