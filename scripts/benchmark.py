"""Served speed of OpenAI-compatible servers: plain against speculative decoding, on the same prompts (docs/benchmark.md).

    python scripts/benchmark.py --arm plain=http://localhost:8000 --arm dflash=http://localhost:8001 --dataset gsm8k math500 --concurrency 1 8 32
    python scripts/benchmark.py --arm plain=http://localhost:8000 --output plain.json     # one server at a time ...
    python scripts/benchmark.py --arm dflash=http://localhost:8000 --output dflash.json
    python scripts/benchmark.py --compare plain.json dflash.json                          # ... and both in one table

Exit code: 0; 1 where more requests failed than --max-failed allows, or a server went away; 2 for a mistake in the call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from dflash_train.benchmark import figures, output, workloads
from dflash_train.benchmark.run import Arm, Settings, measure, parse_arm
from dflash_train.benchmark.stream import PRESETS, Sampling
from dflash_train.config.load import run_command
from dflash_train.config.values import whole_numbers

DEFAULT_URL = "http://127.0.0.1:30000"  # dflash 0.1.0's


def parser() -> argparse.ArgumentParser:
    default, sampling = Settings(), Sampling()
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=URL[,model=MODEL][,body={...}]",
        help="a server to measure; several",
    )
    add("--base-url", help=f"one server, as the arm 'server'; where no --arm is given, {DEFAULT_URL}")
    add("--baseline", metavar="NAME", help="the arm that speed-ups are taken against; the first")
    add("--model", help="of arms that name none; else the one that a server serves")
    add(
        "--dataset",
        nargs="+",
        default=[workloads.PACKAGED],
        metavar="NAME",
        help=f"{', '.join(workloads.names())}, or a .jsonl file; {workloads.PACKAGED}",
    )
    add(
        "--concurrency",
        nargs="+",
        default=[*map(str, default.concurrency)],
        metavar="N",
        help="requests in flight, such as 1 8 32 64; 1",
    )
    add("--num-prompts", type=int, default=default.num_prompts, help=f"of each cell; {default.num_prompts}")
    add(
        "--first-turn-only",
        action="store_true",
        help="leave out the later turns of conversations, as dflash benchmark does",
    )
    add(
        "--parts",
        type=int,
        default=default.parts,
        help=f"that a cell is cut into; the arms take turns part by part; {default.parts}",
    )
    add("--warmup", type=int, help="requests before a cell; as many as are in flight")
    add("--preset", choices=sorted(PRESETS), help="sampling of the published tables; single options below override it")
    add("--max-new-tokens", type=int, help=f"of an answer; {sampling.max_new_tokens}")
    add("--temperature", type=float, help=f"{sampling.temperature:g}, which is greedy")
    add("--top-p", type=float, help=f"{sampling.top_p:g}")
    add("--top-k", type=int, help=f"{sampling.top_k}: off")
    add("--reasoning", help="off, on, or a level that the target's template knows; the server's default")
    add(
        "--seed",
        type=int,
        default=default.seed,
        help=f"of the prompts' order, the samples and the intervals; {default.seed}",
    )
    add("--timeout-s", type=float, default=default.timeout_s, help=f"of one request; {default.timeout_s:g}")
    add(
        "--retries",
        type=int,
        default=default.retries,
        help=f"of a request that finds the server busy; {default.retries}",
    )
    add("--max-failed", type=float, default=0.0, metavar="SHARE", help="share of a cell's requests that may fail; 0")
    add("--tokenizer", metavar="PATH", help="counts the tokens of a server that gives no usage, from its text")
    add("--output", type=Path, metavar="FILE.json", help="everything that was measured, each request included")
    add("--markdown", type=Path, metavar="FILE.md", help="the table")
    add("--no-progress", action="store_true")
    add(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE.json",
        help="measure nothing: join reports of other arms on the same prompts",
    )
    return parser


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    base = PRESETS[arguments.preset] if arguments.preset else Sampling()
    given = {f.name: value for f in fields(Sampling) if (value := getattr(arguments, f.name)) is not None}
    return replace(base, **given)


def arms_of(arguments: argparse.Namespace) -> list[Arm]:
    arms = [parse_arm(text) for text in arguments.arm]
    if arguments.base_url or not arms:
        arms.append(Arm(name="server", url=arguments.base_url or DEFAULT_URL))
    return [replace(arm, model=arm.model or arguments.model) for arm in arms]


def counter(path: str | None) -> Callable[[str], int] | None:
    if path is None:
        return None
    from dflash_train.data.chat import load_tokenizer
    from dflash_train.data.template import encode

    tokenizer = load_tokenizer(path, None, False)
    return lambda text: len(encode(text, tokenizer)["input_ids"])


def _writable(option: str, path: Path | None) -> None:
    """Raise ValueError before hours are spent on what could not be kept."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: its folder cannot be made ({error})") from None
    exists = path.exists()
    if exists and not path.is_file() or not os.access(path if exists else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written there; name a file in a folder that is yours")


def report_of(arguments: argparse.Namespace) -> dict:
    for option, path in (("--output", arguments.output), ("--markdown", arguments.markdown)):
        _writable(option, path)
    if not 0 <= arguments.max_failed <= 1:
        raise ValueError(f"--max-failed {arguments.max_failed}: must be a share in [0, 1]")
    if arguments.compare:
        reports = [output.read(path) for path in arguments.compare]
        try:
            return figures.joined(reports, arguments.baseline)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"--compare: not as this benchmark writes a report ({error!r}); measure again") from None
    settings = Settings(
        sampling=sampling_of(arguments),
        concurrency=tuple(whole_numbers(arguments.concurrency)),
        num_prompts=arguments.num_prompts,
        parts=arguments.parts,
        warm_up=arguments.warmup,
        seed=arguments.seed,
        first_turn_only=arguments.first_turn_only,
        timeout_s=arguments.timeout_s,
        retries=arguments.retries,
    )
    arms = arms_of(arguments)
    return measure(
        arms,
        workloads.load(arguments.dataset),
        settings,
        baseline=arguments.baseline,
        count=counter(arguments.tokenizer),
        progress=not arguments.no_progress,
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        report = report_of(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(output.table(report), flush=True)  # first: a disk may be full by now
    if arguments.output:
        output.write(report, arguments.output)
    if arguments.markdown:
        arguments.markdown.write_text(output.markdown(report), encoding="utf-8")
    failed = figures.failures(report, arguments.max_failed)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if report["error"]:
        print(f"error: {report['error']}", file=sys.stderr)
        return 130 if report["error"] == "interrupted" else 1
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
