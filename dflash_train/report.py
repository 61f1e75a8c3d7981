"""A run as one HTML page: python -m dflash_train.report RUN [--output PAGE] [--watch [SECONDS]] [--open]

Curves of training and of held-out rows, accuracy by slot, what evaluation measured, decoded samples with their rounds, and warnings. The
page needs no network and no second file, and is made of what lies in the run's folder, also while the run is under way: --watch makes it
again whenever that changes, and the page loads itself again.
"""

from __future__ import annotations

import argparse
import sys
import time
import webbrowser
from pathlib import Path

from dflash_train.config.load import parse, run_command
from dflash_train.dashboard.page import PAGE, write_report
from dflash_train.dashboard.run import WATCHED, locate_run

Signature = list[tuple[int, int] | None]


def arguments(argv: list[str]) -> argparse.Namespace:
    commands = argparse.ArgumentParser(
        prog="python -m dflash_train.report", description=(__doc__ or "").split("\n\n")[1]
    )
    commands.add_argument("run", metavar="RUN", help="output_dir of a run, or a checkpoint or export in it")
    commands.add_argument("--output", metavar="PAGE", help=f"where the page goes (RUN/{PAGE})")
    commands.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=5.0,
        help="go on until Ctrl-C, looking every so often (5)",
    )
    commands.add_argument("--open", action="store_true", help="show it in a browser")
    return parse(commands, argv)


def main(argv: list[str]) -> int:
    args = arguments(argv)
    if args.watch is not None and args.watch < 1:
        raise ValueError(f"--watch {args.watch:g}: must be at least 1 second")
    folder = locate_run(args.run)
    seen = signature(folder)  # before it is read: what changes meanwhile is a change
    output = write_report(folder, Path(args.output) if args.output else None, refresh=args.watch)
    print(f"page: {output}", flush=True)
    if args.open:
        webbrowser.open(output.resolve().as_uri())
    if args.watch is not None:
        watch(folder, output, args.watch, seen)
    return 0


def watch(folder: Path, output: Path, seconds: float, seen: Signature) -> None:
    """Make the page again whenever a file that it is made of is not as in `seen`, and each minute, for the age that it states."""
    print(f"watching {folder}, every {seconds:g} s; Ctrl-C ends it", file=sys.stderr, flush=True)
    made = time.monotonic()
    while True:
        time.sleep(seconds)
        now = signature(folder)
        if now != seen or time.monotonic() - made > 60:
            seen, made = now, time.monotonic()
            write_report(folder, output, refresh=seconds)


def signature(folder: Path) -> Signature:
    """Time and size of each file that a page is made of; None for one that is not there."""
    found: Signature = []
    for path in (folder / name for name in WATCHED):
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
        except FileNotFoundError:
            found.append(None)
    return found


if __name__ == "__main__":
    run_command(main)
