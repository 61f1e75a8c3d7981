"""Make an environment for the Makefile, or find that there is one: prints the Python to use, the only line on stdout.

Nothing is downloaded where the requirements of pyproject.toml (and of the extras named as arguments) are already met, by this
interpreter or by .venv; so this also works without a network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

# Runs in the interpreter that is asked; packaging comes with pip's dependencies in no venv, so pip's own copy serves.
PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
missing = []
for text in json.loads(sys.argv[1]):
    need = Requirement(text)
    try:
        if not need.specifier.contains(version(need.name), prereleases=True):
            missing.append(f"{text} (has {version(need.name)})")
    except PackageNotFoundError:
        missing.append(text)
print(json.dumps(missing))
"""


def requirements(extras: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]


def missing(python: str, needed: list[str]) -> list[str]:
    """Requirements that this interpreter does not meet; all of them where it cannot be asked."""
    if not Path(python).exists():
        return needed
    asked = subprocess.run([python, "-c", PROBE, json.dumps(needed)], capture_output=True, text=True, cwd="/")
    return json.loads(asked.stdout) if asked.returncode == 0 else needed


def main() -> int:
    extras = sys.argv[1:]
    needed = requirements(extras)
    for python in (str(PYTHON), sys.executable):
        if not missing(python, needed):
            print(python)
            return 0
    print(f"installing into {VENV}: {', '.join(missing(str(PYTHON), needed))}", file=sys.stderr, flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    what = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    command = [str(PYTHON), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "-e", what]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        print("error: pip could not install the requirements above; see its message", file=sys.stderr)
        return done.returncode
    print(PYTHON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
