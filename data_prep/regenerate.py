"""Replace the answers of a prompt set by the target's own: python data_prep/regenerate.py -c recipe.yaml
[key=value ...]

Exit code 0: all rows written; 3: some conversations failed (see <output>.failed.jsonl); the same command
tries them again.
"""

from __future__ import annotations

import json

from dflash_train.config.load import parse_command, require, run_command
from dflash_train.regenerate import regenerate


def main(argv: list[str]) -> int:
    recipe = parse_command(argv, prog="data_prep/regenerate.py", description=__doc__ or "")
    require(recipe, "target.path", "regenerate.prompts", "regenerate.output")
    manifest = regenerate(recipe)
    print(json.dumps(manifest, indent=2))
    return 3 if manifest["failed"] else 0


if __name__ == "__main__":
    run_command(main)
