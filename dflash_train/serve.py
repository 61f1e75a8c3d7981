"""Try a drafter: a small OpenAI-compatible server that decodes with it, for a machine without an engine. Not for production.

`python -m dflash_train.serve --target PATH --drafter EXPORT`, or `--no-drafter` for plain decoding of the same target. Greedy answers are the
same with and without.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from dflash_train import assets, ranks
from dflash_train.build import open_source
from dflash_train.config.load import CheckFailed, load_recipe, parse, parser, require, run_command
from dflash_train.config.schema import Precision, Recipe
from dflash_train.config.values import require_packages
from dflash_train.data.chat import load_tokenizer
from dflash_train.generation.slots import Slots, cache_bytes_per_token, slots_that_fit, why_no_slots
from dflash_train.generation.speculative import SpeculativeSlots
from dflash_train.generation.verify import Sampling
from dflash_train.target.hf import HFTarget, stop_ids
from dflash_train.types import TargetInfo

MAX_LENGTH = 4096
SWITCH_SECONDS = 0.0005
DRAIN_SECONDS = 10.0  # after a signal, for clients to read what is decoded
MOST_SEED = 2**40  # times 1,000,003 it is still one of 64 bits
NOT_SAMPLED = ("min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids")
NEEDED = ("starlette", "uvicorn", "prometheus_client")


@dataclass(kw_only=True)
class Loaded:
    """What is served. draft_length: tokens drafted per verification, 0 for plain decoding; memory: what is held, and how long graphs took
    to capture, in words."""

    recipe: Recipe
    tokenizer: Any
    target: HFTarget
    slots: Slots
    draft_length: int
    max_length: int
    memory: str

    @property
    def info(self) -> TargetInfo:
        return self.target.info


def load(args: Namespace) -> Loaded:
    """Target, drafter and slots. Raises ValueError."""
    overrides = list(args.overrides)
    if args.target is not None:
        overrides.append(f"target.path={_quoted(args.target)}")
    if args.precision is not None:
        overrides += [f"target.precision={args.precision}", f"engine.precision={args.precision}"]
    device = ranks.device(args.device)
    step = None
    if args.drafter is not None:
        run = open_source(args.drafter, args.config, overrides, device=device)
        recipe, tokenizer, step = run.recipe, run.outline.tokenizer, run.step
        target, ends = step.target, run.stop_ids
    else:
        recipe = load_recipe(args.config, overrides)
        require(recipe, "target.path")
        config, path = recipe.target, assets.resolve(recipe.target.path, "target")
        tokenizer = load_tokenizer(path, config.revision, config.trust_remote_code, recipe.data.chat_template)
        target = HFTarget.load(config, path, (0,), device)
        ends = stop_ids(target.model, tokenizer, target.info.eos_token_ids)
    max_length = _max_length(args.max_length, target.info)
    block_size = _block_size(args.draft_length, None if step is None else step.drafter.spec.block_size)
    why_not = why_no_slots(target.model)
    if why_not is not None:
        raise ValueError(
            f"target {target.info.path} cannot be served here: {why_not}; take --precision bfloat16 on a GPU, serve it with an engine (docs/serving.md), or measure the drafter with "
            "python -m dflash_train.evaluate, which decodes one prompt after the other"
        )
    spec = None if step is None else step.drafter.spec
    if device.type == "cuda":
        fit = slots_that_fit(target.model, max_length + block_size, draft=spec)
        if fit < args.slots:
            raise ValueError(
                f"--slots {args.slots}: the memory beside target and drafter holds {max(fit, 0)} of {max_length} tokens; lower it, or --max-length"
            )
    shape = {"slots": args.slots, "length": max_length, "max_new": max_length - 1}
    live = {"period": 1, "smallest": 1, "streaming": True}  # tokens as they come, and no more slots than are taken
    if step is None:
        slots = Slots(target.model, ends, **shape, **live)
    else:
        slots = SpeculativeSlots(step, ends, **shape, block_size=block_size, **live)
    per_token = cache_bytes_per_token(target.model)
    if step is not None:
        per_token += sum(part.element_size() * part[0].numel() for pair in slots.drafts.cache for part in pair)
    for sampled in (False, True):
        slots.warm_up(sampled)
    return Loaded(
        recipe=recipe,
        tokenizer=tokenizer,
        target=target,
        slots=slots,
        draft_length=block_size - 1 if step is not None else 0,
        max_length=max_length,
        memory=_memory(target.model, None if step is None else slots.step_module.drafter, per_token, slots),
    )


def _quoted(text: str) -> str:
    """As Hydra's command line takes any text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _max_length(asked: int | None, info: TargetInfo) -> int:
    most = info.max_position_embeddings
    if asked is None:
        return min(MAX_LENGTH, most)
    if not 2 <= asked <= most:
        raise ValueError(f"--max-length {asked}: must be in [2, {most}], the positions of {info.path}")
    return asked


def _block_size(draft_length: int | None, trained: int | None) -> int:
    """Rows of a verification; 1 without a drafter."""
    if trained is None:
        if draft_length is not None:
            raise ValueError(f"--draft-length {draft_length}: there is no drafter; leave it out, or give --drafter")
        return 1
    if draft_length is None:
        return trained
    if not 1 <= draft_length < trained:
        raise ValueError(
            f"--draft-length {draft_length}: must be in [1, {trained - 1}]; the drafter was trained with a block of {trained}, anchor included"
        )
    return draft_length + 1


def _memory(model: torch.nn.Module, drafter: torch.nn.Module | None, per_token: int, slots: Slots) -> str:
    size = lambda module: sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20  # noqa: E731
    parts = [f"target {size(model):.0f} MiB"]
    if drafter is not None:
        parts.append(f"drafter {size(drafter):.0f} MiB")
    if slots.use_graphs:
        parts.append(f"graphs captured in {slots.capture_seconds:.1f} s")
    return ", ".join([*parts, f"caches {per_token * slots.stride * (slots.slots + 1) / 2**20:.0f} MiB"])


def sampling_of(model: torch.nn.Module) -> Sampling:
    """How a request that says nothing is sampled: as generation_config.json says, else as the API does; engines do the same."""
    listed = model.generation_config.to_diff_dict()
    left_out = {name: listed[name] for name in NOT_SAMPLED if listed.get(name)}
    if left_out:
        print(f"note: the target's generation_config.json has {left_out}, which this server does not do", flush=True)
    return Sampling(listed.get("temperature", 1.0), listed.get("top_p", 1.0), listed.get("top_k", 0))


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which does not listen yet. Raises ValueError where it is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: must be in [0, 65535]; 0 is any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise _no_address(host, port, error) from None
    return bound


def _no_address(host: str, port: int, error: OSError) -> ValueError:
    taken = error.errno == errno.EADDRINUSE
    why = "another program listens there; stop it, or choose another --port (0: any free one)" if taken else error
    return ValueError(f"--host {host} --port {port}: {why}")


def api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env {variable}: this environment variable is empty or not set; put the key in it")
    return key


def serve(args: Namespace) -> int:
    """Load, listen, and answer until a signal comes; then finish what was begun."""
    require_packages("the server", NEEDED, "pip install 'dflash-train[serve]'")
    key, bound = api_key(args.api_key_env), listen(args.host, args.port)
    # Between two steps the decoding thread has to get hold of the interpreter from the thread that answers clients, while the GPU waits.
    sys.setswitchinterval(SWITCH_SECONDS)

    import uvicorn

    from dflash_train.server.app import Service, build_app
    from dflash_train.server.metrics import Metrics
    from dflash_train.server.scheduler import Scheduler

    loaded = load(args)
    name = args.served_model_name or args.target or loaded.recipe.target.path
    scheduler = Scheduler(
        loaded.slots, Metrics(name, loaded.draft_length), max_waiting=args.max_waiting, on_failure=lambda: server.end()
    )
    service = Service(
        scheduler=scheduler,
        tokenizer=loaded.tokenizer,
        name=name,
        vocab_size=loaded.info.vocab_size,
        max_length=loaded.max_length,
        sampling=sampling_of(loaded.target.model),
        seed=args.seed,
        key=key,
    )

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            super().handle_exit(sig, frame)
            self.end()

        def end(self) -> None:
            self.should_exit = True
            threading.Thread(target=self._let_go, daemon=True).start()

        def _let_go(self) -> None:
            """Of clients that neither send nor read, once all answers are decoded: uvicorn would wait for them for ever."""
            while not scheduler.idle:
                time.sleep(0.1)
            time.sleep(DRAIN_SECONDS)
            self.force_exit = True

    server = Server(uvicorn.Config(build_app(service), log_level="warning", lifespan="off"))
    scheduler.start()
    # uvicorn drains on these and raises them again when it has: the default would end the process as if it had been killed.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            bound.listen(2048)
        except OSError as error:  # another one was bound, and did not listen yet, when this one was bound
            raise _no_address(args.host, args.port, error) from None
        print(_announcement(args, name, bound, loaded), flush=True)
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if scheduler.error is not None:
        raise CheckFailed(
            f"decoding failed, and every request that was under way with it: {type(scheduler.error).__name__}: {scheduler.error}"
        ) from scheduler.error
    scheduler.stop()
    return 0


def _announcement(args: Namespace, name: str, bound: socket.socket, loaded: Loaded) -> str:
    host, port = bound.getsockname()[:2]
    with_drafter = "no drafter, one token per step"
    if loaded.draft_length:
        trained = loaded.draft_length + 1
        with_drafter = f"speculation with {args.drafter}, block size {trained} ({loaded.draft_length} drafted)"
    lines = [
        f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: {with_drafter}, {args.slots} slots of {loaded.max_length} tokens, "
        f"{loaded.slots.device}, {loaded.memory}"
    ]
    if host not in ("127.0.0.1", "::1") and args.api_key_env is None:
        lines.append(
            f"WARNING: {host} is open to the network and asks for no key: everyone who reaches this port can use it (--api-key-env)"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    own = parser(
        "python -m dflash_train.serve",
        __doc__.split("\n\n")[0],
        needs_recipe=False,
        knobs="Knobs (key=value) that matter here: target.* and data.chat_template; docs/configuration.md has them.",
    )
    own.add_argument("--target", metavar="PATH", help="folder or Hub id; else target.path of the recipe")
    arm = own.add_mutually_exclusive_group(required=True)
    arm.add_argument("--drafter", metavar="EXPORT", help="an export; a run or one of its checkpoints will do too")
    arm.add_argument("--no-drafter", action="store_true", help="plain decoding, to compare with")
    own.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    own.add_argument("--port", type=int, default=8000, help="0: any free one (%(default)s)")
    own.add_argument("--slots", type=int, default=8, help="requests decoded together (%(default)s)")
    own.add_argument("--max-waiting", type=int, default=256, help="requests that may wait for a slot (%(default)s)")
    own.add_argument(
        "--max-length", type=int, help=f"tokens of prompt and answer ({MAX_LENGTH}, or the target's positions)"
    )
    own.add_argument("--draft-length", type=int, metavar="N", help="draft fewer tokens than the block has")
    precisions = [p.value for p in Precision if p is not Precision.fp8]
    own.add_argument("--precision", choices=precisions, help="of target and drafter (the recipe's)")
    own.add_argument("--device", choices=["cpu", "cuda"], help="(cuda where there is one)")
    own.add_argument("--served-model-name", metavar="NAME", help="what clients call it (the target as it was given)")
    own.add_argument("--seed", type=int, default=0, help="of requests that bring none (%(default)s)")
    own.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable with the key that clients must send"
    )
    args = parse(own, argv)
    if args.target is None and args.config is None and args.drafter is None:
        raise ValueError("no target: name it with --target PATH, or a recipe with -c")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; use cpu")
    if abs(args.seed) > MOST_SEED:
        raise ValueError(f"--seed {args.seed}: must be in [{-MOST_SEED}, {MOST_SEED}]")
    for name, value, least in (("slots", args.slots, 1), ("max-waiting", args.max_waiting, 0)):
        if value < least:
            raise ValueError(f"--{name} {value}: must be at least {least}")
    return serve(args)


if __name__ == "__main__":
    run_command(main)
