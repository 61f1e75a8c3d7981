"""Replace the answers of a prompt set by the target's own: python data_prep/regenerate.py -c recipe.yaml
[--shard i/n | --merge] [key=value ...]

A second call continues the first; what is finished is never lost. On several machines, run --shard 0/n to --shard n-1/n
and join the files with --merge.

Exit code 0: all rows written; 2: a mistake in recipe, data or server, named in one message; 3: some conversations failed (see
<output>.failed.jsonl), the same command tries them again; 130: Ctrl-C; 143: SIGTERM; 138: SIGUSR1.
"""

from __future__ import annotations

import json

from dflash_train.config.load import load_recipe, parse, parser, require, run_command
from dflash_train.generation.merge import merge
from dflash_train.regenerate import regenerate


def main(argv: list[str]) -> int:
    commands = parser("data_prep/regenerate.py", __doc__ or "")
    parts = commands.add_mutually_exclusive_group()
    parts.add_argument(
        "--shard", metavar="i/n", help="only the i-th of n parts (from 0), to <output> with .i-of-n before its ending"
    )
    parts.add_argument(
        "--merge",
        action="store_true",
        help="join the n shards beside <output> once they hold every prompt exactly once; the target is not loaded",
    )
    args = parse(commands, argv)
    chosen = [] if args.shard is None else [f"regenerate.shard={args.shard}"]
    recipe = load_recipe(args.config, [*args.overrides, *chosen])
    require(recipe, "target.path", "regenerate.prompts", "regenerate.output")
    manifest = merge(recipe) if args.merge else regenerate(recipe)
    print(json.dumps(manifest, indent=2, ensure_ascii=False))
    return 3 if manifest["failed"] else 0


if __name__ == "__main__":
    run_command(main)
