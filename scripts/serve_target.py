"""Serve a recipe's target for regeneration: python scripts/serve_target.py -c recipe.yaml --engine vllm [--tensor-parallel N] [--port P]
[--dry-run] [key=value ...]

Prints the launch line on stdout and what to know about it on stderr, then becomes that server. With --dry-run it only prints.
"""

from __future__ import annotations

import os
import sys

from dflash_train.config.load import load_recipe, parse, parser, require, run_command
from dflash_train.generation.serve import ENGINES, launch

INSTALL = {
    "vllm": "pip install vllm",
    "sglang": "pip install sglang",
    "llama.cpp": "build llama.cpp, or install its release",
    "trtllm": "pip install tensorrt_llm",
    "transformers": "pip install 'transformers[serving]'",
}


def main(argv: list[str]) -> int:
    command = parser("scripts/serve_target.py", __doc__ or "")
    command.add_argument("--engine", required=True, choices=ENGINES)
    command.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share one model")
    command.add_argument("--port", type=int, default=8000)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other machines too")
    command.add_argument("--gguf", metavar="FILE", help="the target as a GGUF file, for llama.cpp")
    command.add_argument("--dry-run", action="store_true", help="print the line and do no more")
    args = parse(command, argv)
    recipe = load_recipe(args.config, args.overrides)
    require(recipe, "target.path")
    line = launch(
        recipe, args.engine, port=args.port, host=args.host, tensor_parallel=args.tensor_parallel, gguf=args.gguf
    )
    for note in line.notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        f"then: python data_prep/regenerate.py -c {args.config} regenerate.backend=openai "
        f"'regenerate.base_urls=[http://{args.host}:{args.port}/v1]'",
        file=sys.stderr,
        flush=True,
    )
    print(line, flush=True)
    if args.dry_run:
        return 0
    if args.engine == "llama.cpp" and args.gguf is None:
        raise ValueError(
            "--engine llama.cpp needs the target as a GGUF file: --gguf FILE (the note above says how to make one)"
        )
    try:
        os.execvp(line.words[0], line.words)
    except FileNotFoundError:
        raise ValueError(f"{line.words[0]}: no such command here; {INSTALL[args.engine]}, or copy the line") from None


if __name__ == "__main__":
    run_command(main)
