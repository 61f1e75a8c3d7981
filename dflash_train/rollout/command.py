"""The checklist as one command: `python scripts/rollout.py DRAFTER ... --target TARGET --plain URL --speculative URL --output FOLDER`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from dflash_train import disk
from dflash_train.advise import LEAST
from dflash_train.assets import public_name, resolve
from dflash_train.benchmark import output, workloads
from dflash_train.benchmark.run import MOST_PROMPTS, Arm, Settings, measure
from dflash_train.benchmark.stream import Sampling
from dflash_train.check import check
from dflash_train.config.hub import check_place
from dflash_train.config.secrets import scrubbed
from dflash_train.config.values import check_range, whole_numbers, without_login
from dflash_train.rollout import traffic, watch
from dflash_train.rollout.greedy import BOUNDS, greedy_step, local_rescore, read_prompts
from dflash_train.rollout.pair import (
    Candidate,
    Outcome,
    fingerprint,
    licence_step,
    pair_step,
    pins_step,
    read_candidate,
)
from dflash_train.rollout.record import Record
from dflash_train.rollout.server import Server
from dflash_train.target.info import read_config as read_target_config

STEPS = ("drafter", "licence", "pins", "greedy", "benchmark", "watch")
RULES, DASHBOARD, BENCHMARK = "alerts.yaml", "dashboard.json", "benchmark.json"


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python scripts/rollout.py", description=__doc__.split("\n\n")[0])
    made.add_argument(
        "drafters",
        nargs="*",
        metavar="DRAFTER",
        help="folders or Hub ids of drafters that might serve; the best one for exactly this target is taken",
    )
    made.add_argument("--target", required=True, help="folder or Hub id of the target that is served, or embedded")
    made.add_argument(
        "--plain", metavar="URL", required=True, help="server without speculation, as in http://localhost:8000"
    )
    made.add_argument("--speculative", metavar="URL", required=True, help="the same server with it")
    made.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/rollout"),
        help="folder of the record; what is in it already is not done again (default: %(default)s)",
    )
    made.add_argument("--target-revision", metavar="COMMIT")
    made.add_argument("--drafter-revision", metavar="COMMIT")
    made.add_argument("--engine-version", metavar="VERSION", help="where the server does not say it")
    made.add_argument(
        "--allow-unpinned", action="store_true", help="go on with branches and untagged builds; the record says so"
    )
    made.add_argument("--non-commercial", action="store_true", help="the use is not commercial")
    made.add_argument("--licence", metavar="NAME", help="of the drafter, read by you where its card names none")
    made.add_argument("--target-licence", metavar="NAME", help="likewise of the target")
    made.add_argument(
        "--launch",
        metavar="LINE_OR_FILE",
        help="how the speculative server was started: held against the drafter, and kept",
    )
    made.add_argument("--model", metavar="NAME", help="where a server serves several")
    made.add_argument("--prompts", metavar="FILE", help="JSONL of prompts for the greedy test (default: the package's)")
    made.add_argument(
        "--precision", choices=sorted(BOUNDS), help="in which the target is served (default: what its config.json says)"
    )
    made.add_argument(
        "--near-tie",
        type=float,
        metavar="NATS",
        help=f"largest gap of a near tie (default: {', '.join(f'{k} {v:g}' for k, v in BOUNDS.items())})",
    )
    made.add_argument(
        "--rescore",
        metavar="FOLDER",
        help="the target, to say here whether a difference was a near tie where the servers give no log-probabilities",
    )
    made.add_argument(
        "--traffic",
        nargs="+",
        default=[workloads.PACKAGED],
        metavar="WORKLOAD",
        help="classes of traffic: names that the benchmark knows, or .jsonl files of your own (default: the package's)",
    )
    made.add_argument(
        "--concurrency",
        nargs="+",
        default=["1", "8", "32", "64"],
        metavar="N",
        help="requests in flight that you serve (default: 1 8 32 64)",
    )
    made.add_argument(
        "--num-prompts", type=int, default=128, help="of each class and concurrency (default: %(default)s)"
    )
    made.add_argument(
        "--max-new-tokens", type=int, default=512, help="of an answer in the benchmark (default: %(default)s)"
    )
    made.add_argument("--temperature", type=float, default=0.0, help="of the benchmark (default: %(default)s)")
    made.add_argument(
        "--least", type=float, default=LEAST, help="speed-up below which speculation is left off (default: %(default)s)"
    )
    made.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the series that the alerts watch, as in job=qwen; repeat it",
    )
    made.add_argument(
        "--again", action="append", default=[], choices=STEPS, help="do a step again though nothing changed; repeat it"
    )
    return made  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit status: 0 go, 1 no-go, 2 where something was asked wrongly or a server does not answer."""
    args = arguments().parse_args(argv)
    if not 0 < args.least < math.inf:
        raise ValueError(f"--least {args.least}: must be a speed-up above 0")
    if args.near_tie is not None and not 0 <= args.near_tie < math.inf:
        raise ValueError(f"--near-tie {args.near_tie}: must be a gap in nats, at least 0")
    check_range("--num-prompts", args.num_prompts, 1, MOST_PROMPTS)
    concurrency, labels = tuple(whole_numbers(args.concurrency)), watch.read_labels(args.label)
    target = resolve(args.target, "target")
    check_place("--target", target)
    if args.rescore is not None:
        check_place("--rescore", resolve(args.rescore, "target"))
    record = Record(args.output)
    plain, fast = Server.open(args.plain, args.model), None
    try:
        fast = Server.open(args.speculative, args.model)
        reasons = _steps(args, record, target, concurrency, labels, plain, fast)
    finally:
        plain.close()
        if fast is not None:
            fast.close()
    go = not reasons
    record.close(
        verdict="go" if go else "no-go",
        reasons=reasons,
        target=public_name(target),
        engine={
            "name": fast.engine,
            "version": args.engine_version or fast.version,
            "flags": fast.flags,
            "launch": scrubbed(_launch(args)),
        },
        command=scrubbed([without_login(word) if "://" in word else word for word in argv]),
    )
    print(f"record: {record.path}")
    print("go" if go else f"no-go: {'; '.join(reasons)}")
    return 0 if go else 1


def _steps(
    args: argparse.Namespace,
    record: Record,
    target: str,
    concurrency: tuple[int, ...],
    labels: dict[str, str],
    plain: Server,
    fast: Server,
) -> list[str]:
    """Do them in order; why it is no-go, empty if it is go. What costs a server's time is not begun after a refusal."""
    reasons: list[str] = []
    # Mistakes in the last steps are said before the first one.
    workloads.check(args.traffic)
    settings = Settings(
        sampling=Sampling(max_new_tokens=args.max_new_tokens, temperature=args.temperature),
        concurrency=concurrency,
        num_prompts=max(args.num_prompts, *concurrency),
    )
    traffic_key = {
        t: workloads.digest(workloads.read_file(Path(t))) if t.endswith(".jsonl") else None for t in args.traffic
    }

    def step(name: str, inputs: dict[str, Any], run: Any, *files: str) -> Outcome:
        missing = not all((args.output / file).is_file() for file in files)
        outcome, known = record.step(name, inputs, run, again=missing or name in args.again)
        print(f"{name:<10}{'ok' if outcome.ok else 'NO'}  {outcome.summary}{'  (known)' if known else ''}", flush=True)
        for note in outcome.notes:
            print(f"{'':<12}- {note}")
        if not outcome.ok:
            reasons.append(f"{name}: {outcome.summary}")
        return outcome

    versions = [(s.engine, args.engine_version or s.version) for s in (plain, fast)]
    served = {"engine": versions, "models": [plain.model, fast.model]}
    target_key = {"target": fingerprint(target), "revision": args.target_revision}
    candidates = [read_candidate(source, args.drafter_revision) for source in args.drafters]
    launch = _launch(args)
    drafter_key = {"drafters": [fingerprint(str(c.folder)) for c in candidates], "revision": args.drafter_revision}

    found = step("drafter", {**target_key, **drafter_key, "engine": fast.engine, "launch": launch},
                 lambda: _pair(candidates, target, args.target_revision, fast.engine, launch))  # fmt: skip
    chosen = next((c for c in candidates if c.source == found.facts.get("drafter")), None)
    if chosen is None:
        return reasons
    step("licence", {**target_key, **drafter_key, "said": [args.licence, args.target_licence, args.non_commercial]},
         lambda: licence_step(chosen.source, chosen.folder, target, commercial=not args.non_commercial, stated=args.licence, stated_target=args.target_licence))  # fmt: skip
    step("pins", {**target_key, **drafter_key, **served, "allow": args.allow_unpinned},
         lambda: pins_step((target, args.target_revision), (chosen.source, chosen.revision), versions, allow=args.allow_unpinned))  # fmt: skip
    if reasons:
        return reasons
    precision = args.precision or _precision(target, args.target_revision)
    prompts = read_prompts(args.prompts)
    running = {
        **served,
        **target_key,
        **drafter_key,
        "urls": [plain.url, fast.url],
        "launch": launch,
        "flags": fast.flags,
    }
    step("greedy", {**running, "prompts": prompts, "precision": precision, "bound": args.near_tie, "rescore": args.rescore},
         lambda: greedy_step(plain, fast, prompts, precision=precision, bound=args.near_tie,
                             rescore=None if args.rescore is None else local_rescore(resolve(args.rescore, "target"), precision)))  # fmt: skip
    if reasons:
        return reasons
    outcome = step("benchmark", {**running, "settings": settings.as_dict(), "traffic": traffic_key, "least": args.least},
                   lambda: _benchmark(args, settings, plain, fast), BENCHMARK)  # fmt: skip
    rows = outcome.facts["rows"]
    if rows:
        print(traffic.table(rows))
    if reasons:
        return reasons
    step(
        "watch",
        {"rows": rows, "labels": labels, "name": fast.model},
        lambda: _watch(args, rows, fast.model, labels),
        RULES,
        DASHBOARD,
    )
    return reasons


def _pair(candidates: list[Candidate], target: str, revision: str | None, engine: str, launch: str | None) -> Outcome:
    outcome = pair_step(candidates, target, revision, engine)
    chosen = next((c for c in candidates if c.source == outcome.facts.get("drafter")), None)
    if launch and chosen is not None and chosen.kind != "EAGLE-3":
        wrong = [f for f in check(chosen.folder, None, launch).findings if f.rule.startswith("launch: ")]
        outcome.notes += [f.message for f in wrong if f.severity == "note"]
        fatal = [f.message for f in wrong if f.severity != "note"]
        if fatal:
            return Outcome(
                ok=False,
                summary=f"--launch contradicts the drafter: {'; '.join(fatal)}",
                facts=outcome.facts,
                notes=outcome.notes,
            )
    return outcome


def _benchmark(args: argparse.Namespace, settings: Settings, plain: Server, fast: Server) -> Outcome:
    arms = [
        Arm(name=traffic.PLAIN, url=plain.url, model=plain.model),
        Arm(name=traffic.FAST, url=fast.url, model=fast.model),
    ]
    report = measure(arms, workloads.load(args.traffic), settings, baseline=traffic.PLAIN, progress=sys.stderr.isatty())
    output.write(report, args.output / BENCHMARK)
    return traffic.traffic_step(report, fast.engine, args.least)


def _watch(args: argparse.Namespace, rows: list[dict[str, Any]], model: str, labels: dict[str, str]) -> Outcome:
    tau, low, speedup = traffic.measured_tau(rows)
    if tau is None:
        return Outcome(
            ok=False,
            summary="no acceptance was measured, so there is no threshold: have the server count drafts (SGLang: --enable-metrics)",
        )
    limits = watch.thresholds(tau, low, speedup)
    name = public_name(model).split("/")[-1]
    disk.replace(args.output / RULES, [watch.rules_yaml(name, limits, labels).encode()])
    disk.replace(args.output / DASHBOARD, [json.dumps(watch.dashboard(name, limits, labels), indent=1).encode()])
    return Outcome(
        ok=True,
        summary=f"{RULES} and {DASHBOARD}: alert below {limits.drop} tokens per round ({limits.measured:.2f} measured)"
        + (f", critical below {limits.worthless}" if limits.worthless else ""),
        facts=vars(limits),
    )


def _launch(args: argparse.Namespace) -> str | None:
    text = args.launch
    if text is not None and "\n" not in text and len(text) < 4096 and Path(text).is_file():
        return Path(text).read_text(encoding="utf-8")
    return text


def _precision(target: str, revision: str | None) -> str:
    """What config.json says of the weights, which is how engines serve them unless told otherwise."""
    said = str(getattr(read_target_config(target, revision), "dtype", None) or "bfloat16").removeprefix("torch.")
    return said if said in BOUNDS else "bfloat16"
