"""Divide rows into training and held-out by a hash of what they ask.

    python data_prep/split.py data/all.jsonl --heldout 0.02 --output-dir data/split

Writes train.jsonl, heldout.jsonl and split.json. The same prompt is always on the same side, in every file and every run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_train.config.load import run_command
from dflash_train.data.split import RECORD, SUFFIXES, split


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="data_prep/split.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "inputs", nargs="+", metavar="IN", help="JSONL (also .gz, .zst), Parquet, folders of them, or owner/name:split"
    )
    p.add_argument("--output-dir", type=Path, required=True, help="folder for the two files and split.json")
    p.add_argument("--heldout", type=float, default=0.02, help="share of the prompts to hold out [%(default)s]")
    p.add_argument(
        "--heldout-domain", action="append", default=[], metavar="DOMAIN=SHARE", help="another share for one domain"
    )
    p.add_argument(
        "--heldout-per-domain",
        type=int,
        metavar="N",
        help="at most N prompts of each domain's share, the lowest hashes",
    )
    p.add_argument("--thresholds-from", type=Path, metavar=RECORD, help="keep the thresholds of an earlier split")
    p.add_argument("--suffix", choices=SUFFIXES, default=".jsonl", help="of the two files [%(default)s]")
    p.add_argument("--max-dropped", type=float, default=0.0, help="share of unreadable rows to leave out [%(default)s]")
    return p


def shares(texts: list[str]) -> dict[str, float]:
    """`math=0.05` -> {"math": 0.05}."""
    found = {}
    for text in texts:
        domain, _, share = text.rpartition("=")
        try:
            found[domain] = float(share)
        except ValueError:
            raise ValueError(f"--heldout-domain {text}: not DOMAIN=SHARE; write it like math=0.05") from None
    return found


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    report = split(
        args.inputs,
        args.output_dir,
        heldout=args.heldout,
        by_domain=shares(args.heldout_domain),
        per_domain=args.heldout_per_domain,
        thresholds_from=args.thresholds_from,
        suffix=args.suffix,
        max_dropped=args.max_dropped,
    )
    print(report.table())
    return 0


if __name__ == "__main__":
    run_command(main)
