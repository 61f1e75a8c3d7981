"""Collect prompts for a real target from a mixture of Hub data sets; the target answers them afterwards.

    python data_prep/prompts.py general --output data/prompts.jsonl.zst --rows 100000

The mixture is a name (--list shows them) or a YAML file. Benchmarks that papers report are kept out. A run that was stopped
goes on where it was. Beside the output is <output>.manifest.json with counts, licences, revisions and a hash.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_train.config.load import run_command
from dflash_train.data.prompts import (
    BENCHMARKS,
    Patience,
    build,
    describe,
    enough,
    load_benchmarks,
    load_mixture,
    shipped,
    without,
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="data_prep/prompts.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("mixture", nargs="?", help=f"{', '.join(shipped())}, or a YAML file")
    p.add_argument(
        "--list", action="store_true", help="show the mixture's sources (of all mixtures without a name) and stop"
    )
    p.add_argument("--output", type=Path, help="JSONL to write; .gz and .zst compress")
    p.add_argument("--rows", type=int, help="rows in all [the mixture's]")
    p.add_argument("--seed", type=int, default=0, help="of the shuffling [%(default)s]")
    p.add_argument("--buffer", type=int, default=10_000, help="rows in the shuffle buffer [%(default)s]")
    p.add_argument(
        "--allow-license", action="append", default=[], metavar="SPDX", help="take sources under this licence too"
    )
    p.add_argument("--without", action="append", default=[], metavar="NAME", help="leave a source out")
    p.add_argument("--against", nargs="+", default=[], metavar="FILE", help="held-out files whose prompts are left out")
    p.add_argument("--overlap", type=int, default=13, help="words in a row that make a repeat [%(default)s]")
    p.add_argument("--benchmarks", type=Path, default=BENCHMARKS, help="YAML of benchmarks to keep out")
    p.add_argument(
        "--skip-benchmark", action="append", default=[], metavar="NAME", help="do not compare with this benchmark"
    )
    p.add_argument("--retries", type=int, default=5, help="attempts after a network error [%(default)s]")
    p.add_argument(
        "--retry-wait", type=float, default=2.0, help="seconds before the first, doubled each time [%(default)s]"
    )
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.list:
        for name in [args.mixture] if args.mixture else shipped():
            print(f"\n{name}\n\n{describe(load_mixture(name))}")
        return 0
    if args.mixture is None or args.output is None:
        raise ValueError("a mixture and --output are needed; --list shows the mixtures, --help everything")
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    manifest = build(
        without(load_mixture(args.mixture), args.without),
        args.output,
        rows=args.rows,
        seed=args.seed,
        buffer=args.buffer,
        allowed=args.allow_license,
        against=args.against,
        benchmarks=load_benchmarks(args.benchmarks),
        skip=args.skip_benchmark,
        overlap=args.overlap,
        patience=Patience(args.retries, args.retry_wait, say),
        say=say,
    )
    for what in ("domains", "licenses", "dropped"):
        print(f"{what}: " + ", ".join(f"{name} {count}" for name, count in manifest[what].items()))
    skipped = manifest["skipped_benchmarks"]
    print(
        f"compared with {len(manifest['benchmarks'])} benchmarks"
        + (f"; NOT with {', '.join(skipped)}" if skipped else "")
    )
    print(f"{manifest['rows']} prompts in {args.output}\nhow many are enough, as far as published:\n{enough()}")
    return 0


if __name__ == "__main__":
    run_command(main)
