"""Kill training and regeneration at random moments, continue each, and hold what comes out against runs that nobody disturbed.

`python scripts/chaos.py [--kills 200] [--seed 0] [--folder DIR]`

Imports are paid once: this process forks a warm child for each run. A child is hit by SIGKILL, SIGTERM or SIGUSR1 at a moment drawn over its
whole length, or kills itself at a drawn file operation (between the writing, flushing, renaming and deleting of checkpoints, or with half of a
file written). It is continued, perhaps hit again, until it ends. Then all of these must be equal, bit for bit: weights, moments and state of
every checkpoint that both runs keep, the best one, the curve, the export; of regeneration the rows; and the names of all files, so nothing is left
behind. A stop writes a checkpoint of its own, which may push out an older one: as many are kept, all of them whole, the last ones equal. Exit code 0: no difference; 1: differences, each named, with the folder kept. The seed draws the same hits again; those by the clock fall
where the machine's speed puts them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (what the embedded target is)

import dflash_train.checkpoint as checkpointing
import dflash_train.export as exporting
import dflash_train.generation.embedded  # noqa: F401
import dflash_train.train as training
from dflash_train import ranks
from dflash_train.config.load import load_recipe, run_command
from dflash_train.regenerate import regenerate

GRACE = 30.0  # seconds between the SIGTERM and the SIGKILL of torchrun and of most schedulers
HANGS = 180.0  # seconds after which a child that was left alone is taken for stuck
STOPPED = {signal.SIGTERM: 143, signal.SIGUSR1: 138}
PHASES = ("starting", "stepping", "evaluating", "finishing")

TRAIN = """
target: {path: embedded, precision: float32}
data: {train: [%(rows)s], heldout: [%(heldout)s], max_length: 96, workers: 1}
drafter: {block_size: 4, mask_token_id: %(mask)s, num_hidden_layers: 1, intermediate_size: 64, selector_rank: 8, selector_top_k: 4}
optimizer: {lr: 1e-2}
train: {max_steps: 14, global_batch_size: 2, micro_batch_size: 2, num_anchors: 8, log_every_steps: 5, eval_every_steps: 4, checkpoint_every_steps: 3,
        export_best: true}
evaluate: {max_new_tokens: 8, max_prompts: 1, client_prompts: 1}
export: {precision: float32}
track: {wandb: disabled, progress: false}
"""
REGENERATE = """
target: {path: embedded, precision: float32}
regenerate: {prompts: embedded, limit: 24, max_new_tokens: 12, max_length: 96, batch_size: 4, temperature: %(temperature)s}
track: {wandb: disabled, progress: false}
"""


@dataclasses.dataclass(kw_only=True)
class Job:
    """A kind of run. begin: run it in this process, in a folder, from where an earlier one there ended; result: what must be equal."""

    name: str
    begin: Callable[[Path], None]
    result: Callable[[Path], dict[str, Any]]
    processes: int = 1
    share: float = 1.0  # of the kills
    expected: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    operations: int = 0
    kills: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    lives: int = 0
    slowest_stop: float = 0.0
    faults: list[str] = dataclasses.field(default_factory=list)


# --- what is compared ---------------------------------------------------------------------------------------------


IF_BOTH = "where both keep it: "


def damage(checkpoint: Path) -> str | None:
    try:
        checkpointing.verify(checkpoint)
    except checkpointing.Damaged as error:
        return str(error)
    return None


def trained(folder: Path) -> dict[str, Any]:
    """Every file of a finished run that its numbers decide, and the names of all."""
    run = folder / "run"
    kept = checkpointing.checkpoints(run / "checkpoints")
    mine = {p for step in kept[:-1] for p in (step, *step.rglob("*"))}  # a stop decides which these are
    found: dict[str, Any] = {"names": sorted(str(p.relative_to(run)) for p in {*run.rglob("*")} - mine)}
    for path in [*run.glob("checkpoints/*/*"), *run.glob("export/*")]:
        found[IF_BOTH * (path in mine) + str(path.relative_to(run))] = path.read_bytes()
    found["checkpoints"] = [len(kept), *(broken for step in kept if (broken := damage(step)))]
    record = json.loads(found["export/dflash_train.json"])
    for name in ("resumed", "git_commit", "git_dirty"):  # somebody may work on the checkout meanwhile
        record["provenance"].pop(name, None)
    found["export/dflash_train.json"] = record
    card = found["export/README.md"].splitlines()
    found["export/README.md"] = [line for line in card if not line.startswith(b"- git_")]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["curve"] = [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]
    return found


def regenerated(folder: Path) -> dict[str, Any]:
    """Rows by id, the manifest without what the clock and the order of rows decide, and the names of all files."""
    rows = (folder / "rows.jsonl").read_bytes().splitlines()
    manifest = json.loads((folder / "rows.jsonl.manifest.json").read_text())
    for name in ("sha256", "new_rows", "notes", "seconds", "tokens_per_second"):  # notes are the last run's
        manifest.pop(name)
    return {
        "names": sorted(p.name for p in folder.iterdir()),
        "manifest": manifest,
        "rows": len(rows),
        **{f"row {json.loads(row)['id']}": row for row in rows},
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = {name for name in {*expected, *found} if not name.startswith(IF_BOTH)} | ({*expected} & {*found})
    differ = [name for name in sorted(names) if expected.get(name) != found.get(name)]
    lines = []
    for name in differ:
        one, other = expected.get(name), found.get(name)
        if name == "names":
            lines.append(f"names: missing {sorted({*one} - {*other})}, left behind {sorted({*other} - {*one})}")
        elif isinstance(one, list) and isinstance(other, list):
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            lines.append(
                f"{name}: {len(one)} and {len(other)} entries, first difference at {at}: {one[at : at + 1]} {other[at : at + 1]}"
            )
        else:
            lines.append(name)
    return lines


# --- children -----------------------------------------------------------------------------------------------------

_running: list[int] = []
_codes: dict[int, int] = {}  # of those that ended
_shared = mmap.mmap(-1, 16)  # what a child leaves behind: its phase, and how many file operations it did


def note_phases() -> None:
    """Have this process say what it is about."""

    def noting(module: Any, name: str, phase: int) -> None:
        function = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            before, _shared[0] = _shared[0], phase
            result = function(*args, **kwargs)
            _shared[0] = before if phase == 2 else phase
            return result

        setattr(module, name, noted)

    noting(training, "progress", 1)
    noting(training, "evaluate_heldout", 2)
    noting(training, "finish", 3)


def count_operations(fatal: int | None, half: float) -> None:
    """Count the file operations of this process, and end it by SIGKILL at number `fatal`: before it, behind it, or with a file cut to a
    share of its length, as `half` (in [0, 1)) says."""
    done = 0

    def counting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            _shared[8:12] = done.to_bytes(4, "little")
            if done != fatal:
                return function(*args, **kwargs)
            if half > 0.3:
                function(*args, **kwargs)
            if half > 0.6 and name == "save_file":
                path = Path(args[1])
                os.truncate(path, int(path.stat().st_size * (half - 0.6) / 0.4))
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, counted)

    for module in (checkpointing, exporting):
        counting(module, "save_file")
    for owner, name in (
        (os, "fsync"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "write_text"),
        (shutil, "rmtree"),
        (os, "unlink"),
        (os, "mkdir"),
    ):
        counting(owner, name)


def fork(job: Job, folder: Path, fatal: int | None = None, half: float = 0.0) -> list[int]:
    """Begin a job, or go on with it, in children of this process; their ids."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    _shared[:16] = bytes(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(job.processes):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 99
        try:
            log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            if job.processes > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
            torch.set_num_threads(1)
            if rank == 0:
                note_phases()
                count_operations(fatal, half)
            job.begin(folder)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 99
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)
    _running[:] = children
    return children


def wait(children: list[int], seconds: float) -> list[int] | None:
    """Exit codes (negative: of a signal) once all have ended; None if they have not by then."""
    end = time.monotonic() + seconds
    while True:
        for pid in children:
            if pid in _running:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _running.remove(pid)
                    _codes[pid] = os.waitstatus_to_exitcode(status)
        if not set(children) & set(_running):
            return [_codes[pid] for pid in children]
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def kill(children: list[int], sent: signal.Signals) -> None:
    for pid in children:
        if pid in _running:
            os.kill(pid, sent)


def end_all(children: list[int]) -> list[int]:
    kill(children, signal.SIGKILL)
    codes = wait(children, 60.0)
    assert codes is not None
    return codes


# --- lives --------------------------------------------------------------------------------------------------------


def phase_of(job: Job, folder: Path) -> str:
    """What a child that was just killed was about, as far as it shows."""
    run, phase = folder / "run", PHASES[_shared[0]]
    if job.begin is not train:
        return "answering"
    if phase == "finishing":
        return "exporting" if list(run.glob(".export.*")) else phase
    if phase != "starting" and list(run.glob("checkpoints/.*.partial")):
        return "writing a checkpoint"
    if phase != "starting" and [*run.glob("checkpoints/.*.old"), *run.glob("checkpoints/.*.gone")]:
        return "replacing or deleting one"
    return phase


def hit(job: Job, folder: Path, chance: random.Random) -> bool:
    """Begin or continue the job and strike once; whether it ended by that (and not on its own before)."""
    way = chance.choices(("clock", "operation", "stop"), (0.4, 0.3, 0.3))[0]
    moment, half = chance.random(), chance.random()
    if way == "operation":
        children = fork(job, folder, fatal=1 + int(moment * job.operations), half=half)
        end = time.monotonic() + HANGS
        while (first := os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() > end:
                job.faults.append(f"{folder.name}: stuck")
                break
            time.sleep(0.002)
        struck = first is not None and first.si_status == signal.SIGKILL and first.si_code != os.CLD_EXITED
        codes = end_all(children) if struck else wait(children, HANGS) or end_all(children)
        if struck:
            job.kills["SIGKILL", phase_of(job, folder)] += 1
            return True
        return finished(job, folder, codes)
    sent = signal.SIGKILL if way == "clock" else chance.choice(list(STOPPED))
    children = fork(job, folder)
    codes = wait(children, moment * job.seconds)
    if codes is not None:
        return finished(job, folder, codes)
    phase = PHASES[_shared[0]] if job.begin is train else "answering"
    kill(children, sent)
    began = time.monotonic()
    codes = wait(children, GRACE)
    if codes is None:
        job.faults.append(f"{folder.name}: {sent.name} while {phase}: not ended after {GRACE:.0f} s")
        end_all(children)
        return True
    if set(codes) == {0}:
        return finished(job, folder, codes)
    if sent is signal.SIGKILL:
        phase = phase_of(job, folder)
    else:
        job.slowest_stop = max(job.slowest_stop, time.monotonic() - began)
        # -sent: it came before the child listened; another rank may then find its peer gone.
        if not any(code in (STOPPED[sent], -sent) for code in codes):
            job.faults.append(f"{folder.name}: {sent.name} while {phase}: exit codes {codes}")
    job.kills[sent.name, phase] += 1
    return True


def finished(job: Job, folder: Path, codes: list[int]) -> bool:
    if set(codes) != {0}:
        job.faults.append(f"{folder.name}: ended with {codes} on its own; see its log")
    return False


def live(job: Job, folder: Path, chance: random.Random, most: int) -> int:
    """One run from its beginning to its end, with at most so many hits; how many there were. Compares the outcome."""
    folder.mkdir()
    hits, faults = 0, len(job.faults)
    while hits < most and chance.random() < 0.9 and hit(job, folder, chance):
        hits += 1
    children = fork(job, folder)
    codes = wait(children, HANGS)
    if codes is None or set(codes) != {0}:
        job.faults.append(f"{folder.name}: the last run ended with {codes or end_all(children)}; see its log")
    else:
        job.faults += [f"{folder.name}: {line}" for line in differences(job.expected, job.result(folder))]
    job.lives += 1
    if len(job.faults) == faults:
        shutil.rmtree(folder)
    return hits


def undisturbed(job: Job, folder: Path) -> None:
    folder.mkdir()
    began = time.monotonic()
    children = fork(job, folder)
    codes = wait(children, HANGS)
    if codes is None or set(codes) != {0}:
        raise ValueError(f"{job.name}: the undisturbed run ended with {codes or end_all(children)}; see {folder}/log.0")
    job.seconds, job.operations = time.monotonic() - began, int.from_bytes(_shared[8:12], "little")
    job.expected = job.result(folder)


# --- the jobs -----------------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    try:
        training.train(
            load_recipe(str(folder.parent / "train.yaml"), [f"output_dir={folder}/run", "train.resume=true"])
        )
    finally:
        ranks.stop()


def answer(recipe: str) -> Callable[[Path], None]:
    return lambda folder: (
        regenerate(load_recipe(str(folder.parent / recipe), [f"regenerate.output={folder}/rows.jsonl"])) and None
    )


def table(jobs: list[Job]) -> str:
    lines = [
        "| killed while | signal | " + " | ".join(job.name for job in jobs) + " |",
        "|---|---|" + "---:|" * len(jobs),
    ]
    for sent, phase in sorted({key for job in jobs for key in job.kills}, key=lambda key: key[::-1]):
        lines.append(f"| {phase} | {sent} | " + " | ".join(str(job.kills[sent, phase]) for job in jobs) + " |")
    lines.append("| all | | " + " | ".join(str(job.kills.total()) for job in jobs) + " |")
    lines.append("| runs compared | | " + " | ".join(str(job.lives) for job in jobs) + " |")
    lines.append("| slowest stop (s) | | " + " | ".join(f"{job.slowest_stop:.1f}" for job in jobs) + " |")
    lines.append("| differences | | " + " | ".join(str(len(job.faults)) for job in jobs) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    commands = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands.add_argument("--kills", type=int, default=200, help="in all (default 200)")
    commands.add_argument("--seed", type=int, default=0)
    commands.add_argument(
        "--folder", type=Path, help="where the runs lie; default: a temporary one, kept if something differs"
    )
    args = commands.parse_args(argv)
    began, chance = time.monotonic(), random.Random(args.seed)
    place = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    os.environ["HOME"] = str(place)  # tokenised data goes below it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored in the background
    load_recipe("demo")  # once for all children
    with contextlib.suppress(ImportError):
        importlib.import_module("dflash.model")  # lazily imported at a run's end
    jobs = [
        Job(name="regeneration, greedy", begin=answer("greedy.yaml"), result=regenerated, share=0.15),
        Job(name="regeneration, sampled", begin=answer("sampled.yaml"), result=regenerated, share=0.15),
        Job(name="training", begin=train, result=trained, share=0.6),
        Job(name="training, 2 ranks", begin=train, result=trained, processes=2, share=0.1),
    ]
    (place / "greedy.yaml").write_text(REGENERATE % {"temperature": 0.0})
    (place / "sampled.yaml").write_text(REGENERATE % {"temperature": 0.8})
    rows = place / "greedy" / "rows.jsonl"
    heldout = place / "heldout.jsonl"
    (place / "train.yaml").write_text(TRAIN % {"rows": rows, "heldout": heldout, "mask": 3})
    print(f"seed {args.seed}, folder {place}")
    for job, name in zip(jobs, ("greedy", "sampled", "training", "ranks"), strict=True):
        undisturbed(job, place / name)
        if name == "greedy":
            heldout.write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))
        print(f"{job.name}: undisturbed in {job.seconds:.1f} s, {job.operations} file operations", flush=True)
    goals = [round(args.kills * job.share) for job in jobs]
    goals[2] += args.kills - sum(goals)
    lives = 0
    try:
        while any(job.kills.total() < goal for job, goal in zip(jobs, goals, strict=True)):
            # The one that is furthest behind, so that a test cut short has done some of each.
            job, goal = min(zip(jobs, goals, strict=True), key=lambda pair: pair[0].kills.total() / max(pair[1], 1))
            live(job, place / f"life-{lives}", chance, goal - job.kills.total())
            lives += 1
    except KeyboardInterrupt:
        end_all([*_running])
        print("\ncut short by Ctrl-C; so far:")
    faults = [f"{job.name}: {fault}" for job in jobs for fault in job.faults]
    print(
        f"\n{table(jobs)}\n\n{sum(job.kills.total() for job in jobs)} kills in {time.monotonic() - began:.0f} s, seed {args.seed}"
    )
    print("\n".join(faults) if faults else "every run equals the undisturbed one, bit for bit")
    if faults:
        print(f"the runs that differ are kept in {place}")
    elif args.folder is None:
        shutil.rmtree(place)
    return 1 if faults else 0


if __name__ == "__main__":
    run_command(main)
