"""The whole job on this machine: regenerate, inspect, train, export, check, decode. `make demo` runs it.

Writes <output_dir>/summary.json. Extra arguments are key=value overrides of recipes/demo.yaml.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

STARTED = float(os.environ.get("DEMO_STARTED", time.time()))  # the Makefile sets it before it installs anything
AFTER_INSTALL = time.time()

from dflash_train import assets
from dflash_train.build import open_source
from dflash_train.check import check
from dflash_train.config.load import load_recipe, run_command
from dflash_train.data.inspection import inspect
from dflash_train.evaluate import evaluate, passed, report_text
from dflash_train.regenerate import regenerate
from dflash_train.train import train


def heading(text: str) -> None:
    print(f"\n== {text}  [{time.time() - AFTER_INSTALL:.0f} s]", flush=True)


def main(argv: list[str]) -> int:
    recipe = load_recipe("demo", argv)
    folder = Path(recipe.output_dir)
    shutil.rmtree(folder, ignore_errors=True)  # a demo starts from nothing

    heading("regenerate: the target answers the shipped prompts")
    manifest = regenerate(recipe)
    print(
        f"{manifest['rows']} rows, {manifest['tokens']} tokens, {manifest['truncated_share']:.1%} truncated, {manifest['tokens_per_second']:.0f} tokens/s"
    )

    heading("inspect: what is supervised (between the marks)")
    inspect(recipe, samples=1, color=sys.stdout.isatty())

    heading("train")
    exported = train(recipe)

    heading("check: what every engine will make of the export")
    report = check(exported, None)
    print(report.text())
    if report.faults:
        return 1

    heading("decode: held-out prompts, from the exported folder, against plain greedy decoding")
    run = open_source(str(exported), str(folder / "config.yaml"), [])
    decoded = evaluate(run)["decoded"]
    print(report_text(decoded))

    now = time.time()
    summary = {
        "seconds_total": round(now - STARTED, 1),
        "seconds_after_install": round(now - AFTER_INSTALL, 1),
        "lossless": decoded["lossless"],
        "near_ties": decoded["near_ties"],
        "tau": decoded["tau"],
        "walk_tau": decoded["walk_tau"]["value"],
        "walk_agrees": decoded["walk_agrees"],
        "speedup": decoded["speedup"],
        "export_dir": str(exported.resolve()),
        "target_dir": assets.resolve(recipe.target.path, "target"),
    }
    path = folder / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    heading(f"done; figures in {path}, the run as a page in {folder / 'report.html'}")
    print(
        f"to chat with it: source .venv/bin/activate && pip install -e '.[serve]' -c constraints.txt && python -m dflash_train.serve --target {recipe.target.path} --drafter {exported}"
    )
    return 0 if passed(decoded) else 1


if __name__ == "__main__":
    run_command(main)
