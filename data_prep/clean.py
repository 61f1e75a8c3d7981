"""Remove duplicate, near-duplicate, empty, looping and held-out rows; rows that stay are not changed.

    python data_prep/clean.py data/raw.jsonl --output data/train.jsonl --against heldout.jsonl

The report, with examples, is printed and written to <output>.report.json. Exit code 2, and nothing written: a mistake, or a
larger share dropped than --max-dropped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from dflash_train.config.load import run_command
from dflash_train.data.clean import CleanSettings, clean

DEFAULT = CleanSettings()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="data_prep/clean.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "inputs", nargs="+", metavar="IN", help="JSONL (also .gz, .zst), Parquet, folders of them, or owner/name:split"
    )
    p.add_argument("--output", type=Path, required=True, help="JSONL to write; .gz and .zst compress")
    p.add_argument(
        "--against", nargs="+", default=[], metavar="FILE", help="held-out files; rows that repeat their prompts go"
    )
    p.add_argument(
        "--overlap", type=int, default=DEFAULT.overlap, help="words in a row that make a repeat [%(default)s]"
    )
    p.add_argument(
        "--near", type=float, default=DEFAULT.near_threshold, help="Jaccard similarity of near duplicates [%(default)s]"
    )
    p.add_argument("--no-near", action="store_true", help="keep near duplicates")
    for side in ("prompt", "answer"):
        for bound in ("min", "max"):
            p.add_argument(
                f"--{bound}-{side}", type=int, help=f"{bound}imum length of the {side}, in characters or tokens"
            )
    p.add_argument("--tokenizer", help="hub id or folder; lengths are then tokens")
    p.add_argument(
        "--max-repetition",
        type=float,
        default=DEFAULT.max_repetition,
        help="share of repeated 8-word runs [%(default)s]",
    )
    p.add_argument(
        "--max-compression",
        type=float,
        default=DEFAULT.max_compression,
        help="times zlib may shrink an answer [%(default)s]",
    )
    p.add_argument("--keep-loops", action="store_true", help="keep looping answers")
    p.add_argument("--need-answer", action="store_true", help="drop rows that do not end with an answer")
    p.add_argument("--drop-truncated", action="store_true", help="drop rows with finish_reason length")
    p.add_argument("--drop-refused", action="store_true", help="drop answers that decline, in English")
    p.add_argument("--max-dropped", type=float, default=0.5, help="fail above this share [%(default)s]")
    return p


def token_counter(name: str) -> Callable[[str], int]:
    from dflash_train.data.chat import load_tokenizer
    from dflash_train.data.template import encode

    tokenizer = load_tokenizer(name, None, False, None)
    return lambda text: len(encode(text, tokenizer)["input_ids"])


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    settings = CleanSettings(
        near_threshold=None if args.no_near else args.near,
        min_prompt=args.min_prompt,
        max_prompt=args.max_prompt,
        min_answer=args.min_answer,
        max_answer=args.max_answer,
        max_repetition=None if args.keep_loops else args.max_repetition,
        max_compression=None if args.keep_loops else args.max_compression,
        need_answer=args.need_answer,
        drop_truncated=args.drop_truncated,
        drop_refused=args.drop_refused,
        overlap=args.overlap,
    )
    measure = token_counter(args.tokenizer) if args.tokenizer else len
    report = clean(
        args.inputs, args.output, settings, against=args.against, max_dropped=args.max_dropped, measure=measure
    )
    print(report.table())
    return 0


if __name__ == "__main__":
    run_command(main)
