"""Show what training would see: python data_prep/inspect_data.py -c recipe.yaml [--no-color] [key=value ...]

Rows kept and dropped, the supervised share, lengths, and the first examples with the supervised text in
green.
"""

from __future__ import annotations

import os
import sys

from dflash_train.config.load import parse_command, require, run_command
from dflash_train.data.inspection import inspect


def main(argv: list[str]) -> int:
    color = "--no-color" not in argv and "NO_COLOR" not in os.environ and sys.stdout.isatty()
    argv = [argument for argument in argv if argument != "--no-color"]
    recipe = parse_command(argv, prog="data_prep/inspect_data.py", description=__doc__ or "")
    require(recipe, "target.path", "data.train")
    inspect(recipe, color=color)
    return 0


if __name__ == "__main__":
    run_command(main)
