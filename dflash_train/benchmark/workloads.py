"""The prompts: five public benchmarks in the wording of z-lab's client, prompts of our own that need no network, and files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.assets import ASSETS
from dflash_train.config.values import nearest, parse_json

OWN = ASSETS / "benchmark.jsonl"
PACKAGED = "packaged"  # all classes of OWN
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(kw_only=True)
class Prompt:
    """A conversation to hold with a server. messages: what the first request sends; then: the user's later turns, each sent once the one
    before it is answered, with the answers in between."""

    id: str
    messages: list[dict[str, Any]]
    then: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return 1 + len(self.then)


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """A data set on the Hub. turns: row -> the user's turns, worded as dflash 0.1.0 words them. revision: the commit that is read; that client
    reads whatever is newest."""

    hub: str
    config: str | None = None
    split: str
    revision: str
    turns: Callable[[dict[str, Any]], list[str]]


HUB = {
    "gsm8k": HubSet(
        hub="openai/gsm8k",
        config="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        turns=lambda row: [row["question"] + BOXED],
    ),
    "math500": HubSet(
        hub="HuggingFaceH4/MATH-500",
        split="test",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        turns=lambda row: [row["problem"] + BOXED],
    ),
    "humaneval": HubSet(
        hub="openai/openai_humaneval",
        split="test",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        turns=lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "mbpp": HubSet(
        hub="google-research-datasets/mbpp",
        config="sanitized",
        split="test",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        turns=lambda row: [row["prompt"]],
    ),
    "mt-bench": HubSet(
        hub="HuggingFaceH4/mt_bench_prompts",
        split="train",
        revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
        turns=lambda row: list(row["prompt"]),
    ),
}


def own_classes() -> dict[str, list[Prompt]]:
    """{traffic class: prompts} of the packaged file."""
    classes: dict[str, list[Prompt]] = {}
    for line in OWN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompts = classes.setdefault(row["class"], [])
        prompts.append(_prompt(f"{row['class']}-{len(prompts):02}", row["turns"]))
    return classes


def names() -> list[str]:
    """What `load` knows, PACKAGED first."""
    return [PACKAGED, *own_classes(), *HUB]


def check(wanted: Sequence[str]) -> None:
    """Raises ValueError for a name that `load` does not know. Nothing is read."""
    for name in wanted:
        if name not in names() and not name.endswith(".jsonl"):
            raise ValueError(
                f"--dataset {name}: no such workload{nearest(name, names())}; known: {', '.join(names())}, or a .jsonl file"
            )


def load(wanted: Sequence[str]) -> dict[str, list[Prompt]]:
    """{workload: its prompts, in the order of its source}. PACKAGED stands for all classes of the package; a path ending in .jsonl is a file
    (`read_file`) and named after it. Raises ValueError for an unknown name, or where the Hub cannot be read."""
    check(wanted)
    own, found = own_classes(), {}
    for name in wanted:
        if name == PACKAGED:
            more = own
        elif name in own:
            more = {name: own[name]}
        elif name in HUB:
            more = {name: _from_hub(name, HUB[name])}
        else:
            more = {Path(name).stem: read_file(Path(name))}
        if twice := [one for one in more if found.get(one, more[one]) is not more[one]]:
            raise ValueError(
                f"--dataset {name}: there is a workload called {twice[0]} already; a file is called after its name"
            )
        found |= more
    return found


def read_file(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: `turns` (the user's, a list of strings), or `messages` ending with the user's; `id` is optional. Raises
    ValueError with the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            id = str(row.get("id", f"{path.stem}-{number}"))
            if "turns" in row:
                prompts.append(_prompt(id, row["turns"]))
            else:
                messages = row["messages"]
                last = max(i for i, message in enumerate(messages) if message["role"] == "user")
                prompts.append(Prompt(id=id, messages=messages[: last + 1]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError(
                f"{path}, line {number}: not a prompt; give "
                '{"turns": ["..."]} or {"messages": [{"role": "user", "content": "..."}]} on each line'
            ) from None
    if not prompts:
        raise ValueError(f"--dataset {path}: no prompts in it")
    return prompts


def select(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts in an order drawn from seed, from the start again where there are fewer: those that dflash 0.1.0 takes with seed 42."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return [prompts[order[i % len(order)]] for i in range(count)]


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what is sent of the prompts, in their order."""
    text = json.dumps([[p.messages, p.then] for p in prompts], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _prompt(id: str, turns: list[str]) -> Prompt:
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError("turns: a list of strings")
    return Prompt(id=id, messages=[{"role": "user", "content": turns[0]}], then=turns[1:])


def _from_hub(name: str, place: HubSet) -> list[Prompt]:
    import datasets

    try:
        rows = datasets.load_dataset(place.hub, place.config, split=place.split, revision=place.revision)
    except Exception as error:  # of many kinds: no network, no such revision, a cache that cannot be written
        raise ValueError(
            f"--dataset {name}: {place.hub} at {place.revision[:7]} cannot be read ({type(error).__name__}: {error}). Where there is no "
            f"network use --dataset {PACKAGED}, or a .jsonl file of your own prompts"
        ) from None
    return [_prompt(f"{name}-{i}", place.turns(row)) for i, row in enumerate(rows)]
