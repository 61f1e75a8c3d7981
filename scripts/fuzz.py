"""Feed malformed rows, recipes and folders to the real commands: python scripts/fuzz.py [--cases 10000] [--seed 0]

A case begins as a file that is right, is spoiled in one to three places, and goes through an entry point of the package in this process.
It may be accepted, end in a clear error (a ValueError that our code raised, or an OSError that names its file), or be skipped and counted
(rows only). Everything else is a fault: another exception, a ValueError out of somebody else's code, more work than --deadline, a file
written outside the output folder. Faults are listed and the exit code is 1; --keep FOLDER keeps what caused them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dis
import faulthandler
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "data_prep"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import clean as clean_command
import inspect_data as inspect_command
import numpy as np
import split as split_command
import torch
import yaml
import zstandard
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_train import build, check, evaluate, export, report, train
from dflash_train.config.load import CheckFailed, load_recipe, to_yaml
from dflash_train.data import files
from dflash_train.data.certificate import read_certificate
from dflash_train.data.prompts import load_benchmarks, load_mixture
from dflash_train.data.read import read_conversations
from dflash_train.generation.base import Answer
from dflash_train.generation.merge import merge
from dflash_train.generation.output import line_of
from dflash_train.regenerate import regenerate

PACKAGE = (str(ROOT / "dflash_train"), str(ROOT / "data_prep"))
KINDS = ("rows", "configs", "folders")
PATIENCE = 10  # seconds on the clock for one of work: the machine may have other things to do
SHARES = {"rows": 0.7, "configs": 0.18, "folders": 0.12}


# --- what becomes of a case ---


class Hang(BaseException):
    """The deadline of a case."""


@dataclass
class Tally:
    """Counts by outcome and by entry point; the faults, in words."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0

    def add(self, entry: str, outcome: str, text: str, seconds: float) -> None:
        self.cases += 1
        self.outcomes[outcome] += 1
        self.entries[entry] += 1
        self.slowest = max(self.slowest, seconds)
        if outcome == "fault":
            self.faults.setdefault(text.strip().splitlines()[-1][:160] + "|" + _where(text), text)


def _where(text: str) -> str:
    places = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return next((p for p in reversed(places) if "dflash_train/" in p), "")


def summary(text: str) -> str:
    """A traceback's last words, with where in our code it went and where it ended."""
    lines = text.strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    ours = [frame for frame in frames if frame.split('"')[1].startswith(PACKAGE)][-4:]
    words = [line for line in lines if line and not line[0].isspace() and not line.startswith("Traceback")][-3:]
    return "\n".join([*words, *(f"  {frame}" for frame in [*ours, *frames[-1:]])])


def judge(act: Callable[[], str | None], deadline: float) -> tuple[str, str]:
    """("accepted" | "skipped" | "error" | "fault", text) of a case."""

    def ring(*_: Any) -> None:
        raise Hang

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, deadline), signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE * deadline)}
    before = {sent: signal.signal(sent, ring) for sent in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    faulthandler.dump_traceback_later(
        2 * PATIENCE * deadline, exit=True
    )  # where no Python code runs that could be told
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return act() or "accepted", ""
    except Hang:
        return (
            "fault",
            f"{traceback.format_exc()}\nhang: more than {deadline:g} s of work, or {PATIENCE * deadline:g} s",
        )
    except CheckFailed as error:
        return "error", str(error)
    except OSError as error:
        # What run_command says in one line; other OSErrors are a traceback.
        return ("error", str(error)) if error.filename is not None else ("fault", traceback.format_exc())
    except ValueError as error:
        return ("error", str(error)) if _ours(error) else ("fault", traceback.format_exc())
    except SystemExit as error:
        return ("error" if error.code else "accepted"), f"exit code {error.code}"
    except BaseException:
        return "fault", traceback.format_exc()
    finally:
        for sent, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(sent, before[sent])
        faulthandler.cancel_dump_traceback_later()


def _ours(error: ValueError) -> bool:
    """Whether our code raised it by a statement of its own: what int() or json says in passing names no file and no remedy."""
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code
    return code.co_filename.startswith(PACKAGE) and dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS"


# --- spoiling ---

SURROGATE, RTL = "\ud800", "\u202e\u2067\u200f"
HOSTILE = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "\n", "null", "0", "-1", "1e999", "NaN", "{}", "[]", "[[", '{"a":', "\x00", "\ufeff", SURROGATE, RTL, "\U0001f469\u200d\U0001f680" * 3,
    "x" * 5000, "../../escaped", "/etc/passwd", "..", ".", "a/b", "a\\b", "~", "~nobody/x", "${oc.env:HOME}", "${output_dir}", "${drafter}", "${",
    "{{ 7 * 7 }}", "{% for x in y %}", "<script>alert(1)</script>", "</script>", "<|im_start|>", "<|im_end|>", "<think>", "%s%n", "'; --",
    [], [[]], [None], [1, "a", None], {}, {"a": None}, {"": ""}, {"role": "user"}, [{"role": "assistant"}], {"type": "text", "text": 3},
)  # fmt: skip
NAMES = (
    "id", "domain", "messages", "conversations", "role", "from", "value", "content", "parts", "tools", "functions", "tool_calls", "function_call", "arguments",
    "prompt", "response", "completion", "prompt_ids", "response_ids", "turn_ids", "generator", "finish_reason", "chat_template_kwargs", "system", "text",
    "images", "thinking", "reasoning_content", "name", "input", "instruction", "output", "weight", "path", "__class__", "", "a.b", "${x}", "step", "best",
    "chat_template", "tokenize", "return_dict", "add_generation_prompt", "enable_thinking", "reasoning_effort", "truncation",
)  # fmt: skip
# Copies, for a value may be spoiled again after it was put in.
JSON = st.recursive(
    st.sampled_from(HOSTILE).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in a nested one, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def deep(levels: int, leaf: Any = 1, *, mapping: bool = False) -> Any:
    for _ in range(levels):
        leaf = {"a": leaf} if mapping else [leaf]
    return leaf


@st.composite
def spoiled(draw: Any, value: Any) -> Any:
    """The nested value with up to three places changed, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found:
            return draw(JSON)
        *above, key = draw(st.sampled_from(found))
        parent = value
        for step in above:
            parent = parent[step]
        what = draw(st.sampled_from(("replace", "replace", "remove", "add", "double", "nest", "swap", "retype")))
        if what == "remove":
            del parent[key]
        elif what == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(NAMES))] = draw(JSON)
        elif what == "double" and isinstance(parent, list):
            parent.insert(0, copy.deepcopy(parent[key]))
        elif what == "nest":
            parent[key] = deep(draw(st.sampled_from((1, 3, 60, 400))), parent[key], mapping=draw(st.booleans()))
        elif what == "swap":
            *_, other = draw(st.sampled_from(found))
            with contextlib.suppress(LookupError, TypeError):
                parent[key], parent[other] = parent[other], parent[key]
        elif what == "retype":
            kinds = (
                lambda old: str(old),
                lambda old: [old],
                lambda old: {"value": old},
                lambda old: json.dumps(old, default=str),
                lambda old: float(old),
            )
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                parent[key] = draw(st.sampled_from(kinds))(parent[key])
        else:
            parent[key] = draw(JSON)
    return value


def _encoded(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return json.dumps(str(value)[:1000]).encode()


@st.composite
def scratched(draw: Any, data: bytes) -> bytes:
    """Bytes with some of them cut off, flipped, removed, repeated or put in."""
    what = draw(st.sampled_from(("cut", "flip", "insert", "remove", "repeat", "bom", "empty", "noise", "utf16")))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if what == "cut":
        return data[:at]
    if what == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if what == "insert":
        more = draw(st.sampled_from((
            b"\x00", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\n\n", b"{", b"[", b'"', b",", b"}" * 5, b"NaN", b"1e9999", b"9" * 6000,
            b"[" * 100_000, b'{"a":' * 50_000, b"x" * 300_000, b"\\ud800", b'"id": 1, "id": 2,', RTL.encode(), b"\x1b[2J", b"&a [*a]", b"!!python/object:os.system {}",
        )))  # fmt: skip
        return data[:at] + more + data[at:]
    if what == "remove":
        return data[:at] + data[at + draw(st.integers(1, 64)) :]
    if what == "repeat":
        return data + data[at:]
    if what == "bom":
        return b"\xef\xbb\xbf" + data
    if what == "empty":
        return b""
    if what == "utf16":
        return data.decode("utf-8", "replace").encode("utf-16")
    return draw(st.binary(max_size=200)) if what == "noise" else data


# --- rows ---

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
ROWS: tuple[Any, ...] = (
    {"id": "a", "domain": "math", "messages": HELLO, "finish_reason": "stop"},
    {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, *HELLO, *HELLO], "chat_template_kwargs": {"enable_thinking": True}},
    {"id": "c", "messages": [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, HELLO[1]], "tools": [TOOL]},
    {"id": "d", "messages": [HELLO[0], {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]},
    {"id": "e", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "system": "Be kind."},
    {"id": "f", "conversation": json.dumps(HELLO)},
    HELLO,
    {"prompt": "Say hi", "response": "hi"},
    {"prompt": "Say hi"},
    {"question": "1 + 1?", "answer": "2"},
    {"id": "k", "messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}", "documents": [{"text": "x"}], "effort": "high"}},
    {"instruction": "Add", "input": "1 and 2", "output": "3"},
    {"prompt": [HELLO[0]], "completion": [HELLO[1]]},
    {"id": "g", "prompt_ids": [3, 40, 41, 42], "response_ids": [50, 51, 52, 53], "finish_reason": "length"},
    {"id": "h", "messages": [*HELLO, *HELLO], "turn_ids": [{"prompt_ids": [3, 4, 5], "response_ids": [6, 7]}, {"prompt_ids": [3, 4, 5, 6, 7, 8], "response_ids": [9, 10]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "Yo"}]}]},
    {"messages": [HELLO[0], {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]}, HELLO[1]]},
    {"messages": [HELLO[0], {"role": "model", "parts": [{"text": "4"}]}]},
    {"messages": [HELLO[0], {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}, {"role": "function", "name": "add", "content": "4"}, HELLO[1]], "functions": [TOOL["function"]]},
    {"id": "i", "messages": HELLO, "generator": {"model": "embedded", "template_hash": "0" * 16, "temperature": 0.0, "chat_template_kwargs": {}}},
)  # fmt: skip


@st.composite
def row_files(draw: Any) -> tuple[str, bytes]:
    """(name, bytes) of a data file of one to four rows, spoiled in its rows, its text or its container."""
    rows = [draw(st.sampled_from(ROWS)) for _ in range(draw(st.integers(1, 4)))]
    level = draw(st.sampled_from(("row", "row", "row", "text", "file")))
    if level == "row":
        rows[0] = draw(spoiled(rows[0]))
    lines = [_encoded(row) for row in rows]
    if level == "text":
        lines[0] = draw(scratched(lines[0]))
    kind = draw(
        st.sampled_from(
            (".jsonl", ".jsonl", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet", ".csv", ".ndjson")
        )
    )
    data = b"[" + b",\n".join(lines) + b"]" if kind == ".json" else b"\n".join(lines) + b"\n"
    if kind.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    elif kind.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    elif kind == ".parquet":
        data = _parquet(rows) or data
    return f"rows{kind}", draw(scratched(data)) if level == "file" else data


def _parquet(rows: list[Any]) -> bytes | None:
    import pyarrow
    import pyarrow.parquet

    try:
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)]), sink)
        return sink.getvalue()
    except Exception:  # not every row fits a table; then its text goes under that name
        return None


class Echo:
    """A backend that answers every request with the same words."""

    capacity = 8

    def __init__(self) -> None:
        self.keys: list[tuple[int, list[int]]] = []

    def submit(self, key: int, request: Any) -> None:
        self.keys.append((key, request.prompt_ids))

    def collect(self) -> list[tuple[int, Answer]]:
        keys, self.keys = self.keys, []
        return [(k, Answer(message={"content": "It is 4."}, prompt_ids=ids, token_ids=[50, 51, 2])) for k, ids in keys]

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


SMALL = (
    "target.path=embedded", "target.precision=float32", "drafter.block_size=4", "drafter.mask_token_id=4080", "drafter.num_hidden_layers=1",
    "drafter.target_layer_ids=[1,3]", "drafter.selector_rank=4", "drafter.selector_top_k=4", "drafter.intermediate_size=32", "data.max_length=128",
    "data.cache_dir=null", "train.num_anchors=4", "train.global_batch_size=1", "track.wandb=disabled", "track.progress=false", "evaluate.client=off",
    "evaluate.max_new_tokens=4", "engine.threads=1",
)  # fmt: skip


@cache
def outlined() -> build.Outline:
    return build.outline(load_recipe(None, list(SMALL)))


def _outline(**data: Any) -> build.Outline:
    o = copy.copy(outlined())
    o.recipe = copy.deepcopy(o.recipe)
    for name, value in data.items():
        setattr(o.recipe.data, name, value)
    return o


def _read(path: Path, out: Path) -> str | None:
    _, kept = read_conversations([path], need_answer=bool(len(path.name) % 2))
    return "skipped" if kept.dropped else None


def _train_rows(path: Path, out: Path) -> str | None:
    o = _outline(train=[str(path)], max_dropped=1.0)
    stream = build.build_stream(o)
    list(stream.micro_batches(0, 0, 1))
    build.certify_rows(o, stream)
    return "skipped" if stream.examples.kept.dropped else None


def _windows(path: Path, out: Path) -> str | None:
    from dflash_train.config.schema import LongDocuments

    o = _outline(
        train=[{"path": str(path), "weight": 1.5, "domain": "d"}],
        max_dropped=1.0,
        long_documents=LongDocuments.window,
        max_length=8,
    )
    return "skipped" if build.build_stream(o).examples.kept.dropped else None


def _heldout(path: Path, out: Path) -> str | None:
    o = _outline(heldout=[str(path)], max_dropped=1.0)
    build.heldout_examples(o)
    build.heldout_prompts(o)
    return None


def _clean(path: Path, out: Path) -> str | None:
    extra = ["--against", str(path)] if len(path.name) % 3 == 0 else ["--keep-loops", "--need-answer"]
    clean_command.main([str(path), "--output", str(out / "clean.jsonl"), "--max-dropped", "1", *extra])
    left = sum(1 for _ in (out / "clean.jsonl").open("rb"))
    return "skipped" if left < 1 else None


def _split(path: Path, out: Path) -> str | None:
    split_command.main([str(path), "--output-dir", str(out / "split"), "--heldout", "0.5", "--max-dropped", "1"])
    return None


def _inspect(path: Path, out: Path) -> str | None:
    page, certificate = out / "page.html", out / "certificate.json"
    argv = [
        "--tokenizer",
        "embedded",
        "--data",
        str(path),
        "--html",
        str(page),
        "--certificate",
        str(certificate),
        "data.cache_dir=null",
        "data.max_dropped=1",
    ]
    inspect_command.main(argv)
    assert b"<script>alert(1)" not in page.read_bytes()
    read_certificate(certificate)
    return None


def _regenerate(path: Path, out: Path) -> str | None:
    recipe = load_recipe(
        None, [*SMALL, f"regenerate.prompts={path}", f"regenerate.output={out}/answers.jsonl", "data.max_dropped=1"]
    )
    for _ in range(2):  # the second reads what the first wrote
        manifest = regenerate(recipe, Echo())
    read_conversations([out / "answers.jsonl"])
    return "skipped" if manifest["dropped_prompts"] or manifest["failed"] else None


@cache
def _answers() -> tuple[bytes, bytes]:
    """(prompts, output) of a small regeneration that went well."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_bytes(
            b"".join(line_of({"id": f"p{i}", "messages": [{"role": "user", "content": f"{i} + 1?"}]}) for i in range(4))
        )
        regenerate(
            load_recipe(None, [*SMALL, f"regenerate.prompts={prompts}", f"regenerate.output={folder}/answers.jsonl"]),
            Echo(),
        )
        return prompts.read_bytes(), (Path(folder) / "answers.jsonl").read_bytes()


@st.composite
def answers(draw: Any) -> tuple[str, bytes]:
    """A spoiled output of regeneration, to be continued or merged."""
    lines = _answers()[1].splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    if draw(st.booleans()):
        lines[at] = _encoded(draw(spoiled(json.loads(lines[at]))))
        return "answers.jsonl", b"\n".join(lines) + b"\n"
    return "answers.jsonl", draw(scratched(b"\n".join(lines) + b"\n"))


def _continue(path: Path, out: Path) -> str | None:
    prompts, copied = out / "prompts.jsonl", out / "answers.jsonl"
    prompts.write_bytes(_answers()[0])
    shutil.copyfile(path, copied)
    regenerate(load_recipe(None, [*SMALL, f"regenerate.prompts={prompts}", f"regenerate.output={copied}"]), Echo())
    return None


def _merge(path: Path, out: Path) -> str | None:
    prompts = out / "prompts.jsonl"
    prompts.write_bytes(_answers()[0])
    shutil.copyfile(path, out / "answers.0-of-1.jsonl")
    merge(load_recipe(None, [*SMALL, f"regenerate.prompts={prompts}", f"regenerate.output={out}/answers.jsonl"]))
    return None


ROW_ENTRIES = (_read, _read, _train_rows, _train_rows, _windows, _heldout, _clean, _split, _inspect, _regenerate)
ANSWER_ENTRIES = (_continue, _merge)


@st.composite
def row_cases(draw: Any) -> tuple[str, Callable[[Path, Path], str | None]]:
    own = draw(st.integers(0, 9)) == 0
    entry = draw(st.sampled_from(ANSWER_ENTRIES if own else ROW_ENTRIES))
    name, data = draw(answers() if own else row_files())
    folder = draw(st.sampled_from((None, None, None, None, "folder", "loop")))

    def act(given: Path, out: Path) -> str | None:
        path = given / name
        if folder and not own:
            (given / "folder").mkdir()
            path = given / "folder"
            (path / name).write_bytes(data)
            if folder == "loop":
                (path / "loop").symlink_to(path)
                (path / "self.jsonl").symlink_to(path / "self.jsonl")
        else:
            path.write_bytes(data)
        return entry(path, out)

    return entry.__name__.strip("_"), act


# --- recipes ---


@cache
def recipes() -> tuple[dict[str, Any], ...]:
    """Every recipe of recipes/ as it stands, and as a run writes it."""
    found = [yaml.safe_load(p.read_text()) for p in sorted((ROOT / "recipes").glob("*.yaml"))]
    return (*found, *(yaml.safe_load(to_yaml(load_recipe(p.name))) for p in sorted((ROOT / "recipes").glob("*.yaml"))))


@cache
def mixtures() -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load(p.read_text()) for p in sorted((ROOT / "dflash_train/assets/mixtures").glob("*.yaml")))


YAML_TEXTS = (
    "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\ndata: {train: [*d, *d, *d, *d]}\n",
    "data: &x {train: [*x]}\n", "target: !!python/object/apply:os.system ['touch escaped']\n", "target: !!python/name:os.system\n", "? [a, b]\n: c\n", "1: 2\n", "null: 3\n",
    "output_dir: ${oc.env:HOME}\n", "output_dir: ${output_dir}\n", "train: ${train}\n", "output_dir: ${oc.decode:x}\n", "output_dir: ${oc.create:{a:1}}\n",
    "target: {path: ${oc.env:NO_SUCH_VARIABLE,none}}\n", "defaults: [recipe, _self_]\n", "defaults: [{target: ../../etc/passwd}]\n", "defaults: [/etc/passwd]\n", "defaults: [null]\n",
    "hydra: {run: {dir: escaped}}\n", "output_dir: \"\\0\"\n", "- a\n", "a\n", "", "---\n---\n", "train: {max_steps: 0x10, seed: 1_000, num_anchors: 0o17}\n", "%YAML 9.9\n---\na: b\n",
    "train: {max_steps: 2001-01-01}\n", "train: {max_steps: !!binary aGk=}\n", "data: !!set {a, b}\n", "train: {<<: {seed: 1}, <<: {seed: 2}}\n", "train:\n\tseed: 1\n",
)  # fmt: skip
KNOBS = (
    "train.seed",
    "output_dir",
    "data.train",
    "drafter.block_size",
    "optimizer.lr",
    "target",
    "train",
    "provenance",
    "regenerate.mixture",
    "data.chat_template_kwargs",
)
OVERRIDES = st.builds(
    lambda sign, key, value: f"{sign}{key}={value}",
    st.sampled_from(("", "", "", "+", "++", "~", "-")),
    st.sampled_from(KNOBS) | st.text(max_size=6),
    st.sampled_from(HOSTILE).map(lambda v: str(v)[:300]) | st.text(max_size=8),
)


def _load(path: Path, overrides: list[str]) -> str | None:
    recipe = load_recipe(str(path), overrides)
    written = to_yaml(recipe)
    again = path.with_name("config.yaml")
    again.write_text(written, encoding="utf-8", errors="surrogatepass")
    assert load_recipe(str(again)) == recipe, "the recipe that a run writes is another one when it is read again"
    if recipe.target.path == "embedded":
        build.outline(recipe)
    return None


def _train_main(path: Path, overrides: list[str]) -> str | None:
    """Up to the data, which is not there."""
    train.main(
        [
            "-c",
            str(path),
            *overrides,
            "target.path=embedded",
            "data.train=[nowhere.jsonl]",
            "data.certificate=null",
            "train.resume=false",
            f"output_dir={path.parent}/out",
        ]
    )
    return None


def _inspect_main(path: Path, overrides: list[str]) -> str | None:
    inspect_command.main(
        [
            "-c",
            str(path),
            *overrides,
            "target.path=embedded",
            "data.train=[nowhere.jsonl]",
            f"output_dir={path.parent}/out",
        ]
    )
    return None


def _mixture(path: Path, overrides: list[str]) -> str | None:
    (load_benchmarks if len(overrides) % 2 else lambda p: load_mixture(str(p)))(path)
    return None


@st.composite
def config_cases(draw: Any) -> tuple[str, Callable[[Path, Path], str | None]]:
    entry = draw(st.sampled_from((_load, _load, _load, _train_main, _inspect_main, _mixture)))
    base = draw(st.sampled_from(mixtures() if entry is _mixture else recipes()))
    kind = draw(st.sampled_from(("values", "values", "values", "text", "yaml", "overrides")))
    overrides = draw(st.lists(OVERRIDES, max_size=2)) if kind in ("overrides", "yaml") else []
    value = draw(spoiled(base)) if kind == "values" else base
    try:
        data = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        data = _encoded(value)
    if kind == "text":
        data = draw(scratched(data))
    elif kind == "yaml":
        data = draw(st.sampled_from(YAML_TEXTS)).encode() + (data if draw(st.booleans()) else b"")

    def act(given: Path, out: Path) -> str | None:
        path = given / "recipe.yaml"
        path.write_bytes(data)
        return entry(path, overrides)

    return entry.__name__.strip("_"), act


# --- checkpoints and exports ---


@cache
def good_run() -> Path:
    """A run of three steps with two checkpoints, a best one, an export, an evaluation and a certificate."""
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows = [
        {
            "id": f"r{i}",
            "messages": [
                {"role": "user", "content": f"What is {i} + 1?"},
                {"role": "assistant", "content": f"It is {i + 1}."},
            ],
        }
        for i in range(6)
    ]
    (folder / "rows.jsonl").write_bytes(b"".join(map(line_of, rows)))
    recipe = {
        "output_dir": str(folder / "run"), "data": {"train": [str(folder / "rows.jsonl")], "heldout": [str(folder / "rows.jsonl")]},
        "train": {"max_steps": 3, "log_every_steps": 1, "checkpoint_every_steps": 1, "eval_every_steps": 1}, "evaluate": {"max_prompts": 2},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.train(load_recipe(str(folder / "recipe.yaml"), list(SMALL)))
        evaluate.main([str(folder / "run")])
    return folder / "run"


@st.composite
def tensors(draw: Any, data: bytes) -> bytes:
    """A spoiled safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    what = draw(st.sampled_from(("length", "header", "text", "flip", "cut", "tensor", "tensor", "tensor")))
    if what == "length":
        return (
            draw(st.sampled_from((0, 1, 2**31, 2**63, 2**64 - 1, size - 1, size + 1, len(data) * 2))).to_bytes(
                8, "little"
            )
            + data[8:]
        )
    if what in ("header", "text"):
        text = _encoded(draw(spoiled(header))) if what == "header" else draw(scratched(data[8 : 8 + size]))
        return len(text).to_bytes(8, "little") + text + body
    if what == "flip":
        at = draw(st.integers(0, size + 7))
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if what == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        found = load_file(path)
        name = draw(st.sampled_from(sorted(found)))
        how = draw(st.sampled_from(("missing", "extra", "nan", "shape", "dtype", "rename", "empty", "bool")))
        if how == "missing":
            del found[name]
        elif how == "extra":
            found[draw(st.sampled_from(("lm_head.weight", "x", "", "../x", "_orig_mod.fc.weight", RTL)))] = torch.ones(
                2
            )
        elif how == "nan" and found[name].is_floating_point():
            found[name].view(-1)[0] = float("nan")
        elif how == "shape":
            found[name] = found[name].reshape(-1)[:-1].clone()
        elif how == "dtype":
            found[name] = found[name].to(
                draw(st.sampled_from((torch.int64, torch.float16, torch.float64, torch.uint8)))
            )
        elif how == "rename":
            found[f"module.{name}"] = found.pop(name)
        elif how == "empty":
            found = {}
        else:
            found[name] = found[name] > 0
        save_file(found, path)
        return path.read_bytes()


TEXTS = (".json", ".jsonl", ".yaml")


@st.composite
def spoiled_file(draw: Any, path: Path) -> bytes | None:
    """New bytes of a file of a run; None: it is gone."""
    data = path.read_bytes()
    if draw(st.integers(0, 9)) == 0:
        return None
    if path.suffix == ".safetensors" and draw(st.integers(0, 4)):
        return draw(tensors(data))
    if path.suffix in TEXTS and path.name != "tokenizer.json" and draw(st.integers(0, 3)):
        if path.suffix == ".yaml":
            try:
                return yaml.safe_dump(draw(spoiled(yaml.safe_load(data))), allow_unicode=True).encode(
                    "utf-8", "surrogatepass"
                )
            except (yaml.YAMLError, RecursionError):
                return b"{"
        if path.suffix == ".json":
            return _encoded(draw(spoiled(json.loads(data))))
        lines = data.splitlines() or [b"{}"]
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = _encoded(draw(spoiled(json.loads(lines[at]))))
        return b"\n".join(lines) + b"\n"
    return draw(scratched(data))


def _open_run(run: Path, out: Path) -> str | None:
    build.open_drafter(str(run), None, [])
    return None


def _open_checkpoint(run: Path, out: Path) -> str | None:
    build.open_drafter(str(sorted((run / "checkpoints").iterdir())[-1]), None, [])
    return None


def _open_best(run: Path, out: Path) -> str | None:
    build.open_drafter(str(run / "checkpoints" / "best"), None, [])
    return None


def _open_export(run: Path, out: Path) -> str | None:
    build.open_drafter(str(run / "export"), None, [])
    return None


def _check(run: Path, out: Path) -> str | None:
    check.main([str(run / "export"), "--target", "embedded"])
    return None


def _export(run: Path, out: Path) -> str | None:
    export.main([str(run), "--output", str(out / "export")])
    return None


def _over_export(run: Path, out: Path) -> str | None:
    export.main([str(run)])
    return None


def _report(run: Path, out: Path) -> str | None:
    report.main([str(run), "--output", str(out / "report.html")])
    assert b"<script>alert(1)" not in (out / "report.html").read_bytes()
    return None


def _resume(run: Path, out: Path) -> str | None:
    train.main(["-c", str(run / "config.yaml"), "train.resume=true", f"output_dir={run}", "target.path=embedded"])
    return None


def _evaluate(run: Path, out: Path) -> str | None:
    evaluate.main([str(run), "evaluate.max_prompts=1", "evaluate.max_new_tokens=2"])
    return None


def _certificate(run: Path, out: Path) -> str | None:
    read_certificate(run / "certificate.json")
    return None


CHECKPOINT, EXPORT = "checkpoints/step-", "export/"
FOLDER_ENTRIES: dict[Callable[[Path, Path], str | None], tuple[str, ...]] = {
    _open_run: (CHECKPOINT, "config.yaml"), _open_checkpoint: (CHECKPOINT, "config.yaml"), _open_best: ("checkpoints/best", "config.yaml"),
    _open_export: (EXPORT, "config.yaml"), _check: (EXPORT,), _export: (CHECKPOINT, "config.yaml", "certificate.json", "evaluation.json", "licences.json"),
    _over_export: (EXPORT, "certificate.json"), _report: ("",), _resume: (CHECKPOINT, "config.yaml", "metrics.jsonl", "checkpoints/best"),
    _evaluate: (CHECKPOINT, "config.yaml", "evaluation.json", "certificate.json"), _certificate: ("certificate.json",),
}  # fmt: skip
# How often each is drawn: those that run the target take a second.
OFTEN = [e for e in FOLDER_ENTRIES for _ in range(1 if e in (_resume, _evaluate) else 3)]


@st.composite
def folder_cases(draw: Any) -> tuple[str, Callable[[Path, Path], str | None]]:
    good = good_run()
    entry = draw(st.sampled_from(OFTEN))
    named = sorted(p.relative_to(good) for p in good.rglob("*") if p.is_file())
    newest = max(p.parts[1] for p in named if str(p).startswith(CHECKPOINT))
    wanted = [
        p
        for p in named
        if str(p).startswith(FOLDER_ENTRIES[entry]) and (p.parts[0] != "checkpoints" or p.parts[1] in (newest, "best"))
    ]
    victim = draw(st.sampled_from(wanted))
    data = draw(spoiled_file(good / victim))
    odd = draw(st.sampled_from((None,) * 12 + ("folder", "loop", "dangling")))

    def act(given: Path, out: Path) -> str | None:
        run = given / "run"
        shutil.copytree(good, run)
        path = run / victim
        path.unlink()
        if odd == "folder":
            path.mkdir()
        elif odd == "loop":
            path.symlink_to(path)
        elif odd == "dangling":
            path.symlink_to("/nowhere/at/all")
        elif data is not None:
            path.write_bytes(data)
        config = run / "config.yaml"
        if victim.name != "config.yaml":  # else a run would go on in the good one's folder
            config.write_text(config.read_text().replace(str(good), str(run)))
        elif entry in (_evaluate, _over_export):
            return None
        return entry(run, out)

    return entry.__name__.strip("_"), act


# --- the runs ---

CASES = {"rows": row_cases, "configs": config_cases, "folders": folder_cases}


def fuzz(kind: str, cases: int, *, seed_: int, deadline: float = 30.0, keep: Path | None = None) -> Tally:
    """Run so many cases of a kind; the same seed gives the same ones."""
    tally = Tally()
    home = Path(tempfile.mkdtemp(prefix="fuzz-"))
    before = Path.cwd()

    @seed(seed_)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        print_blob=False,
    )
    @given(CASES[kind]())
    def one(case: tuple[str, Callable[[Path, Path], str | None]]) -> None:
        entry, act = case
        given_, out = home / "case" / "in", home / "case" / "out"
        for folder in (given_, out):
            folder.mkdir(parents=True)
        os.chdir(out)
        started = time.monotonic()
        outcome, text = judge(lambda: act(given_, out), deadline)
        strangers = {p.name for p in home.iterdir()} - {"case"} | {p.name for p in (home / "case").iterdir()} - {
            "in",
            "out",
        }
        if strangers:
            outcome, text = "fault", f"{text}\nescaped: {', '.join(sorted(strangers))}"
        new = outcome == "fault" and len(tally.faults)
        tally.add(entry, outcome, text, time.monotonic() - started)
        if keep is not None and outcome == "fault" and len(tally.faults) > new:
            target = keep / f"{kind}-{seed_}-{len(tally.faults)}"
            shutil.copytree(home / "case", target, symlinks=True, dirs_exist_ok=True)
            (target / "what.txt").write_text(f"{entry}\n{text}", errors="replace")
        os.chdir(before)
        shutil.rmtree(home / "case")
        for name in strangers:
            shutil.rmtree(home / name, ignore_errors=True)

    try:
        with mock.patch.object(files, "LONGEST_LINE", 2**18):  # so that a case can have a longer one
            one()
    finally:
        os.chdir(before)
        shutil.rmtree(home, ignore_errors=True)
    return tally


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="scripts/fuzz.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--cases", type=int, default=10_000, help="in all [%(default)s]")
    p.add_argument("--seed", type=int, default=0, help="of the first batch; printed with every batch [%(default)s]")
    p.add_argument("--kind", choices=KINDS, action="append", help="only this kind")
    p.add_argument("--batch", type=int, default=200, help="cases per seed [%(default)s]")
    p.add_argument("--deadline", type=float, default=30.0, help="seconds of work per case [%(default)s]")
    p.add_argument("--keep", type=Path, help="folder for what caused faults")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    kinds = args.kind or list(KINDS)
    whole = sum(SHARES[kind] for kind in kinds)
    totals: dict[str, Tally] = {}
    for kind in kinds:
        total = totals[kind] = Tally()
        wanted, number = round(args.cases * SHARES[kind] / whole), args.seed
        while total.cases < wanted:
            started = time.monotonic()
            found = fuzz(
                kind, min(args.batch, wanted - total.cases), seed_=number, deadline=args.deadline, keep=args.keep
            )
            total.cases += found.cases
            total.outcomes += found.outcomes
            total.entries += found.entries
            total.faults |= {k: v for k, v in found.faults.items() if k not in total.faults}
            total.slowest = max(total.slowest, found.slowest)
            print(
                f"{kind} seed {number}: {found.cases} cases, {dict(found.outcomes)}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            number += 1
    print(f"\n{'':<10}{'cases':>8}{'errors':>8}{'skipped':>9}{'accepted':>10}{'faults':>8}{'slowest':>9}")
    for kind, t in totals.items():
        o = t.outcomes
        print(
            f"{kind:<10}{t.cases:>8}{o['error']:>8}{o['skipped']:>9}{o['accepted']:>10}{o['fault']:>8}{t.slowest:>7.1f} s"
        )
        print(f"  through {', '.join(f'{name} {n}' for name, n in t.entries.most_common())}")
    faults = [text for t in totals.values() for text in t.faults.values()]
    for text in faults:
        print(f"\nfault: {summary(text)}".encode("utf-8", "replace").decode())
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
