"""Regeneration: on-policy histories, exact ids, a file that survives being killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import dflash_train.regenerate as module
from dflash_train import regenerate as regenerate_module
from dflash_train.config.mixture import settings
from dflash_train.config.schema import Api, Backend, Recipe, RegenerateConfig
from dflash_train.data.chat import tokenize
from dflash_train.data.read import read_conversations
from dflash_train.data.template import Template
from dflash_train.generation.base import Answer, Request
from dflash_train.generation.output import line_of
from dflash_train.generation.padded import decode, sample
from dflash_train.generation.provenance import draw, in_shard, row_seed
from dflash_train.regenerate import regenerate

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, eos_token_id=257,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_recipe(target: Path, folder: Path, prompts: list[dict[str, Any]], **options: Any) -> Recipe:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    recipe = Recipe(output_dir=str(folder / "run"))
    recipe.target.path, recipe.track.progress = str(target), False
    recipe.regenerate.prompts, recipe.regenerate.output = (str(folder / "prompts.jsonl"), str(folder / "out.jsonl"))
    recipe.regenerate.max_new_tokens = 8
    for key, value in options.items():
        setattr(recipe.regenerate, key, value)
    return recipe


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(recipe.regenerate.output).read_text().splitlines()]


def prompt(i: int) -> dict[str, Any]:
    return {"id": f"p{i}", "messages": [{"role": "user", "content": "ask " * (i + 1)}], "origin": i}


TOKENIZER = make_tokenizer()


def say(text: str, request: Request) -> Answer:
    """An answer with exact ids, as a backend that knows them gives it."""
    ids = TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return Answer(message={"role": "assistant", "content": text}, prompt_ids=request.prompt_ids, token_ids=ids)


def text_of(request: Request) -> str:
    return TOKENIZER.decode(request.prompt_ids)


class Stub:
    """A backend that answers by a function, a random part of what is in flight at a time, and checks how it is used."""

    def __init__(self, answer: Callable[[Request], Answer], capacity: int = 4, seed: int | None = None):
        self.answer, self.capacity, self.closed = answer, capacity, 0
        self.random = None if seed is None else random.Random(seed)
        self.in_flight: dict[int, Request] = {}
        self.asked: list[Request] = []

    def submit(self, key: int, request: Request) -> None:
        assert not self.closed and key not in self.in_flight and len(self.in_flight) < self.capacity
        assert request.max_new_tokens >= 1
        self.in_flight[key] = request
        self.asked.append(request)

    def collect(self) -> list[tuple[int, Answer]]:
        assert self.in_flight and not self.closed
        keys = list(self.in_flight)
        if self.random:
            keys = self.random.sample(keys, self.random.randint(1, len(keys)))
        return [(key, self.answer(self.in_flight.pop(key))) for key in keys]

    def stats(self) -> dict[str, Any]:
        assert not self.closed
        return {"requests": len(self.asked)}

    def close(self) -> None:
        self.closed += 1


def yes(request: Request) -> Answer:
    return say("yes", request)


def test_answers_are_the_targets_greedy_ones_whatever_the_batch(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(5)], batch_size=3)
    manifest = regenerate(recipe)
    model = Qwen3ForCausalLM.from_pretrained(target)
    for row in rows_of(recipe):
        ids = torch.tensor([row["prompt_ids"]])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert row["response_ids"] == plain[0, ids.shape[1] :].tolist()
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 257 else "length")
        assert row["origin"] == int(row["id"][1:]) and row["messages"][-1]["role"] == "assistant"
    assert (manifest["rows"], manifest["failed"], manifest["tokens"]) == (
        5,
        0,
        sum(len(r["response_ids"]) for r in rows_of(recipe)),
    )
    assert manifest["truncated_share"] == sum(r["finish_reason"] == "length" for r in rows_of(recipe)) / 5
    assert manifest["sha256"] == hashlib.sha256(Path(recipe.regenerate.output).read_bytes()).hexdigest()
    assert json.loads(Path(recipe.regenerate.output + ".manifest.json").read_text()) == manifest


def test_rows_that_stop_early_leave_the_batch_without_moving_the_others(target: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(target)
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "top_p": 0.95, "top_k": 50}
        requests = [
            Request(messages=[], prompt_ids=[3] * (i + 1), max_new_tokens=2 + 5 * i, seed=i, **options)
            for i in range(4)
        ]
        together = decode(model, requests, {257})
        assert together == [decode(model, [request], {257})[0] for request in requests]
        assert [len(decoded.token_ids) for decoded in together][:1] == [2]


def test_sampling_follows_the_filtered_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(1000, 1)
    uniform = torch.arange(1000) / 1000

    def shares(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> list[float]:
        options = [torch.tensor(temperature), torch.tensor(top_p), torch.tensor(top_k)]
        drawn = sample(logits, uniform, *(option.repeat(1000) for option in options))
        return (torch.bincount(drawn, minlength=4) / 1000).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.002)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert shares(top_p=0.75) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert shares(temperature=0.5)[0] == pytest.approx(0.25 / 0.365, abs=0.002)


def test_sampled_answers_do_not_depend_on_batching_and_do_on_the_seed(target: Path, tmp_path: Path) -> None:
    answers = {}
    for name, options in {"a": {"batch_size": 1}, "b": {"batch_size": 5}, "c": {"seed": 1}}.items():
        (tmp_path / name).mkdir()
        recipe = make_recipe(target, tmp_path / name, [prompt(i) for i in range(5)], temperature=1.0, **options)
        regenerate(recipe)
        answers[name] = {row["id"]: row["response_ids"] for row in rows_of(recipe)}
    assert answers["a"] == answers["b"] != answers["c"]


def test_a_killed_run_goes_on_without_losing_or_doubling_a_row(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(6)])
    output = Path(recipe.regenerate.output)

    def killed_after_three(request: Request) -> Answer:
        if len(killed.asked) > 3:
            raise KeyboardInterrupt
        return yes(request)

    killed = Stub(killed_after_three, capacity=1)
    with pytest.raises(KeyboardInterrupt):
        regenerate(recipe, killed)
    kept = output.read_bytes()
    assert kept.count(b"\n") == 3 and killed.closed == 1
    manifest = json.loads(Path(f"{output}.manifest.json").read_text())
    assert (manifest["complete"], manifest["rows"], manifest["new_rows"]) == (False, 3, 3)
    output.write_bytes(kept + b'{"id": "p0", "messages": [{"ro')

    def failing(request: Request) -> Answer:
        broken = text_of(request).count("ask") == 1
        return Answer(error="HTTP 500: out of order", status=500, tries=3) if broken else yes(request)

    for _ in range(2):
        manifest = regenerate(recipe, Stub(failing, capacity=1))
        assert output.read_bytes().startswith(kept)
        assert sorted(row["id"] for row in rows_of(recipe)) == ["p1", "p2", "p3", "p4", "p5"]
        failed = Path(f"{output}.failed.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in failed] == [
            {"id": "p0", "reason": "HTTP 500: out of order", "status": 500, "tries": 3}
        ]
        assert (manifest["rows"], manifest["failed"], manifest["complete"]) == (5, 1, True)
    regenerate(recipe, Stub(yes))
    assert len(rows_of(recipe)) == 6 and not Path(f"{output}.failed.jsonl").exists()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_ends_a_run_no_row_is_lost_doubled_or_half_written(target: Path, tmp_path: Path, seed: int) -> None:
    """Runs are ended at random calls of the backend, in random ways, with answers in random order, until one gets through."""
    chance = random.Random(seed)
    prompts = []
    for i in range(9):
        messages = prompt(i)["messages"]
        for n in range(chance.randint(0, 2)):
            messages += [{"role": "assistant", "content": "OLD"}, {"role": "user", "content": f"more {n}"}]
        prompts.append({"id": f"p{i}", "messages": messages})
    recipe = make_recipe(target, tmp_path, prompts)
    output = Path(recipe.regenerate.output)

    def answer(request: Request) -> Answer:
        return say(hashlib.sha256(text_of(request).encode()).hexdigest()[:6], request)

    def unreliable(request: Request) -> Answer:
        if chance.random() < 0.1:
            raise chance.choice([KeyboardInterrupt, RuntimeError("lost"), SystemExit(143)])
        if chance.random() < 0.1:
            return Answer(error="lost", tries=2)
        return answer(request)

    before = b""
    for _ in range(100):
        backend = Stub(unreliable, capacity=chance.randint(1, 6), seed=seed)
        with contextlib.suppress(KeyboardInterrupt, RuntimeError, SystemExit):
            regenerate(recipe, backend)
        written = output.read_bytes()
        manifest = json.loads(Path(f"{output}.manifest.json").read_text())
        assert written.startswith(before) and written[-1:] in (b"", b"\n") and backend.closed == 1
        assert manifest["rows"] == written.count(b"\n")
        assert manifest["sha256"] == hashlib.sha256(written).hexdigest()
        if manifest["rows"] == len(prompts):
            break
        before = written
        if written and chance.random() < 0.5:  # SIGKILL in the middle of a write
            output.write_bytes(written + written.splitlines(keepends=True)[-1][: chance.randint(1, 40)])
    ids = [row["id"] for row in rows_of(recipe)]
    assert sorted(ids) == sorted(p["id"] for p in prompts)
    at_once = make_recipe(target, tmp_path, prompts, output=str(tmp_path / "at_once.jsonl"))
    regenerate(at_once, Stub(answer))
    by_id = lambda row: row["id"]
    assert sorted(rows_of(recipe), key=by_id) == sorted(rows_of(at_once), key=by_id)


SLOW = """
import sys, time
sys.path[:0] = [{unit!r}, {tests!r}]
from pathlib import Path
import test_regenerate as t
def slow(request):
    time.sleep(0.03)
    return t.yes(request)
recipe = t.make_recipe(Path({target!r}), Path({folder!r}), [t.prompt(i) for i in range(40)])
t.regenerate(recipe, t.Stub(slow, capacity=1))
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_process_that_is_killed_is_continued(target: Path, tmp_path: Path, sent: int, code: int) -> None:
    here = Path(__file__).resolve().parent
    script = SLOW.format(unit=str(here), tests=str(here.parent), target=str(target), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, env=dict(os.environ))
    output = tmp_path / "out.jsonl"
    deadline = time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said.decode()
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["complete"] is False and manifest["generator"]["model"] == str(target)
    kept = output.read_bytes()
    assert 3 <= kept.count(b"\n") < 40
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(40)])
    assert regenerate(recipe, Stub(yes))["complete"] is True
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert Counter(row["id"] for row in rows_of(recipe)) == Counter(f"p{i}" for i in range(40))


def test_a_finished_run_is_not_repeated(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0)])
    first = regenerate(recipe)
    monkeypatch.setattr(module, "open_backend", lambda *_: pytest.fail("the target was loaded for nothing"))
    again = regenerate(recipe)
    assert (again["sha256"], again["new_rows"]) == (first["sha256"], 0)


def test_an_output_of_another_generator_is_refused_and_both_are_named(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0)])
    regenerate(recipe, Stub(yes))
    recipe.regenerate.temperature = 0.7
    for _ in range(2):
        with pytest.raises(ValueError, match=r'(?s)another generator.*"temperature": 0\.0.*"temperature": 0\.7'):
            regenerate(recipe, Stub(yes))
        Path(recipe.regenerate.output + ".manifest.json").unlink(missing_ok=True)  # the rows alone tell it too
    recipe.regenerate.temperature, recipe.regenerate.max_new_tokens = 0.0, 9
    with pytest.raises(ValueError, match=r"(?s)differs in max_new_tokens\).*: 8.*: 9"):
        regenerate(recipe, Stub(yes))
    recipe.regenerate.max_new_tokens, recipe.regenerate.mixture = 8, [{"temperature": 0.0}]
    with pytest.raises(ValueError, match=r"differs in mixture\)"):
        regenerate(recipe, Stub(yes))


def test_a_later_turn_sees_the_new_history(target: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [("system", "be brief"), ("user", "u1"), ("assistant", "OLD1"), ("user", "u2"), ("assistant", "OLD2")]
    prompts = [{"id": "m", "tools": tools, "messages": [{"role": role, "content": text} for role, text in messages]}]
    recipe = make_recipe(target, tmp_path, prompts, chat_template_kwargs={"enable_thinking": False})

    def hashing(request: Request) -> Answer:
        return say("N:" + hashlib.sha256(text_of(request).encode()).hexdigest()[:8], request)

    backend = Stub(hashing)
    regenerate(recipe, backend)
    (row,) = rows_of(recipe)
    seen = [text_of(request) for request in backend.asked]
    new = ["N:" + hashlib.sha256(text.encode()).hexdigest()[:8] for text in seen]
    assert [m["content"] for m in row["messages"]] == ["be brief", "u1", new[0], "u2", new[1]]
    assert len(seen) == 2 and new[0] in seen[1] and "OLD" not in seen[1]
    assert [m["content"] for m in backend.asked[1].messages] == ["be brief", "u1", new[0], "u2"]
    assert backend.asked[1].tools == tools and backend.asked[1].chat_template_kwargs == {"enable_thinking": False}
    assert row["tools"] == tools and row["chat_template_kwargs"] == {"enable_thinking": False}
    assert row["finish_reasons"] == ["stop", "stop"]
    assert row["generator"].items() >= {
        "model": str(target), "revision": None, "temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False},
        "backend": "transformers", "precision": "auto", "top_p": 1.0, "top_k": 0, "seed": 0, "extra_body": {},
    }.items()  # fmt: skip
    (conversation,), _ = read_conversations([recipe.regenerate.output])
    (example,) = tokenize(conversation, Template(TOKENIZER), chat_template_kwargs={}, max_length=999)
    conversation.metadata.clear()
    (rendered,) = tokenize(conversation, Template(TOKENIZER), chat_template_kwargs={}, max_length=999)
    assert example.token_ids.tolist() == rendered.token_ids.tolist()[:-1]
    assert example.supervised.tolist() == rendered.supervised.tolist()[:-1]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_ends_where_going_on_would_be_off_policy(target: Path, tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "42"}
    call = chat("", tool_calls=[{"function": {"name": "get_tide", "arguments": "{}"}}])
    prompts = [
        {"id": "cut", "messages": [user("cut"), chat("a"), user("u"), chat("b")]},
        {"id": "silent", "messages": [user("silent"), call, tool, chat("b")]},
        {"id": "calls", "messages": [user("calls"), call, tool, chat("b"), user("u")]},
        {"id": "full", "messages": [user("full"), chat("a"), user("u" * 200), chat("b")]},
        {"id": "long", "messages": [user("w" * 200)]},
        {"id": "greeted", "messages": [chat("hello"), user("greeted")]},
    ]
    recipe = make_recipe(target, tmp_path, prompts, max_length=200)

    def answer(request: Request) -> Answer:
        text = text_of(request)
        said = say("get_tide()" if "calls" in text else "no", request)
        if "cut" in text:
            said.token_ids, said.finish_reason = said.token_ids[:-1], "length"
        return said

    manifest = regenerate(recipe, Stub(answer))
    rows = {row["id"]: row for row in rows_of(recipe)}
    assert {name: len(row["messages"]) for name, row in rows.items()} == {
        "cut": 2, "silent": 2, "calls": 6, "full": 2, "greeted": 3,
    }  # fmt: skip
    assert rows["cut"]["finish_reason"] == "length" and rows["greeted"]["messages"][0] == chat("hello")
    assert manifest["notes"] == {"ended_at_cut_answer": 1, "ended_at_missing_tool_call": 1, "ended_at_max_length": 1}
    assert (manifest["failed"], manifest["truncated"], manifest["truncated_share"]) == (1, 1, 0.2)
    (failure,) = map(json.loads, Path(recipe.regenerate.output + ".failed.jsonl").open())
    assert failure["id"] == "long" and failure["reason"].startswith("prompt_too_long") and failure["tries"] == 0


# --- a server that tells content, reasoning and tool calls apart, and gives no ids ---

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("tide", "wind")]


def call_of(name: str, place: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps({"at": place})}}


def result(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def asks_tools(row_id: str) -> dict[str, Any]:
    calls = [call_of("tide", "Emden", "a"), call_of("wind", "Emden", "b"), call_of("tide", "Bremen", "c")]
    results = [result("wind 5", "b"), result("tide 1", "a"), result("tide 2", "c")]
    return {"id": row_id, "tools": TOOLS, "messages": [user(row_id), chat("", tool_calls=calls), *results, chat("OLD")]}


def test_recorded_results_follow_the_new_calls(target: Path, tmp_path: Path) -> None:
    new = {
        "same": [call_of("tide", "Bremen", "x"), call_of("tide", "Kiel", "y"), call_of("wind", "Kiel", "z")],
        "fewer": [call_of("tide", "Emden", "x"), call_of("wind", "Emden", "z")],
        "others": [call_of("tide", "a", "x"), call_of("wind", "a", "y"), call_of("wind", "a", "z")],
    }
    prompts = [asks_tools(name) for name in new]
    prompts.append(
        {"id": "unasked", "tools": TOOLS, "messages": [user("unasked"), chat("OLD"), user("u"), chat("OLD")]}
    )
    recipe = make_recipe(target, tmp_path, prompts, max_length=999)

    def answer(request: Request) -> Answer:
        name = request.messages[0]["content"]
        if len(request.messages) > 1:
            return Answer(message=chat("done", reasoning_content="it is low"), finish_reason="stop")
        calls = new.get(name, [call_of("tide", "a", "x")])
        return Answer(message=chat(None, tool_calls=calls), finish_reason="tool_calls")

    manifest = regenerate(recipe, Stub(answer))
    rows = {row["id"]: row for row in rows_of(recipe)}
    assert manifest["notes"] == {
        "ended_at_missing_tool_call": 2,
        "ended_at_unanswered_tool_call": 1,
        "tool_result_of_other_arguments": 1,  # nobody asked for Kiel when the results were recorded
    }
    _, called, *results, last = rows["same"]["messages"]
    assert [call["function"]["arguments"]["at"] for call in called["tool_calls"]] == ["Bremen", "Kiel", "Kiel"]
    assert results == [result("tide 2", "x"), result("tide 1", "y"), result("wind 5", "z")]
    assert last == chat("done", reasoning_content="it is low")
    assert rows["same"]["finish_reasons"] == ["tool_calls", "stop"]
    for name in ("fewer", "others", "unasked"):
        assert [m["role"] for m in rows[name]["messages"]] == ["user", "assistant"]
        assert rows[name]["finish_reason"] == "tool_calls" and "finish_reasons" not in rows[name]
    assert not any(key in row for row in rows.values() for key in ("prompt_ids", "response_ids", "turn_ids"))
    tokens = lambda text: len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    assert rows["same"]["response_tokens"] > tokens("it is lowdone")
    assert manifest["tokens"] == sum(row["response_tokens"] for row in rows.values())
    assert regenerate(recipe, Stub(answer))["tokens"] == manifest["tokens"]


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call><tool_call>{"name":"tide"}</tool_call>',
        "<tool_call>\n<function=wind>\n</function>\n</tool_call><function=tide>",
        "[wind(at='tide'), tide(at='x')]",
        '<think>I could ask tide() or {"name": "tide"}</think>functions.wind:0{} functions.tide:1{}',
    ],
)
def test_calls_in_plain_text_get_their_results_too(target: Path, tmp_path: Path, said: str) -> None:
    calls = [call_of("tide", "Emden", "a"), call_of("wind", "Emden", "b")]
    messages = [user("u"), chat("", tool_calls=calls), result("tide 1", "a"), result("wind 5", "b"), chat("OLD")]
    recipe = make_recipe(target, tmp_path, [{"id": "m", "tools": TOOLS, "messages": messages}], max_length=999)
    regenerate(recipe, Stub(lambda request: say(said if len(request.messages) == 1 else "done", request)))
    (row,) = rows_of(recipe)
    assert [m["content"] for m in row["messages"]] == ["u", said, "wind 5", "tide 1", "done"]


def test_a_chat_server_without_a_tool_parser_is_noticed(target: Path, tmp_path: Path) -> None:
    text = '<tool_call>{"name": "tide", "arguments": {}}</tool_call>'
    prompts = [asks_tools(f"p{i}") for i in range(12)]
    options = {"backend": Backend.openai, "max_length": 999}
    recipe = make_recipe(target, tmp_path, prompts, **options)
    flag = "--enable-auto-tool-choice --tool-call-parser"
    with pytest.raises(ValueError, match=f"as plain text in 8 answers and told none apart; .*{flag}"):
        regenerate(recipe, Stub(lambda request: Answer(message=chat(text)), capacity=1))
    assert rows_of(recipe) == []
    failures = [json.loads(line) for line in Path(recipe.regenerate.output + ".failed.jsonl").open()]
    assert len(failures) == 8 and all(flag in f["reason"] and "call of tide" in f["reason"] for f in failures)

    def mostly_parsed(request: Request) -> Answer:
        if request.messages[0]["content"] == "p0":
            return Answer(message=chat(text))
        return Answer(message=chat("", tool_calls=[call_of("tide", "a", "x")]))

    manifest = regenerate(recipe, Stub(mostly_parsed, capacity=1))
    assert (manifest["rows"], manifest["failed"]) == (11, 1)
    recipe = make_recipe(
        target, tmp_path, prompts, api=Api.completions, output=str(tmp_path / "completions.jsonl"), **options
    )
    assert regenerate(recipe, Stub(lambda request: say(text, request)))["failed"] == 0


def test_what_the_server_really_read_is_kept_and_counted(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0)])
    other = Answer(message=chat("yes"), prompt_ids=[1, 2], token_ids=[3, 257])
    manifest = regenerate(recipe, Stub(lambda _: other))
    (row,) = rows_of(recipe)
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 257])
    assert manifest["notes"] == {"prompt_rendered_otherwise_by_the_server": 1}


# --- mixtures, failures, totals ---


def test_each_row_draws_one_setting_of_the_mixture(target: Path, tmp_path: Path) -> None:
    mixture = [
        {"name": "thinking", "weight": 3, "temperature": 0.6, "top_k": 20, "chat_template_kwargs": {"thinking": True}},
        {"extra_body": {"effort": "low"}},
    ]
    prompts = [{**prompt(0), "id": f"p{i}", "domain": f"d{i % 2}"} for i in range(200)]
    prompts[7]["chat_template_kwargs"] = {"thinking": "mine"}
    kwargs = {"thinking": False, "date": "today"}
    options = {"mixture": mixture, "chat_template_kwargs": kwargs, "extra_body": {"n": 1}, "temperature": 1.0}
    recipe = make_recipe(target, tmp_path, prompts, **options)
    manifest = regenerate(recipe, backend := Stub(yes, capacity=7))
    rows = {row["id"]: row for row in rows_of(recipe)}
    drawn = Counter(row["generator"]["mixture"] for row in rows.values())
    assert drawn.total() == 200 and 130 < drawn["thinking"] < 170 and drawn["1"] == 200 - drawn["thinking"]
    by_seed = {request.seed: request for request in backend.asked}
    hashes = {}
    for row_id, row in rows.items():
        generator, thinking = row["generator"], row["generator"]["mixture"] == "thinking"
        wanted = {"thinking": "mine" if row_id == "p7" else thinking, "date": "today"}
        assert row["chat_template_kwargs"] == generator["chat_template_kwargs"] == wanted
        assert (generator["temperature"], generator["top_k"]) == ((0.6, 20) if thinking else (1.0, 0))
        assert generator["extra_body"] == ({"n": 1} if thinking else {"n": 1, "effort": "low"})
        hashes.setdefault(json.dumps(wanted), set()).add(generator["template_hash"])
        request = by_seed[row_seed(0, row_id, 0)]
        assert request.temperature == generator["temperature"] and request.chat_template_kwargs == wanted
        assert request.extra_body == generator["extra_body"] and request.top_k == generator["top_k"]
    assert len(hashes) == 3 and len(set.union(*hashes.values())) == 3
    assert {name: counts["rows"] for name, counts in manifest["by_mixture"].items()} == drawn
    assert {name: counts["rows"] for name, counts in manifest["by_domain"].items()} == {"d0": 100, "d1": 100}
    assert manifest["generator"]["mixture"][0]["name"] == "thinking"
    reversed_prompts = make_recipe(target, tmp_path, prompts[::-1], **options, output=str(tmp_path / "again.jsonl"))
    regenerate(reversed_prompts, Stub(yes))
    assert {row["id"]: row for row in rows_of(reversed_prompts)} == rows


def test_what_rows_draw_is_the_same_for_ever_and_everywhere() -> None:
    """Files are continued by other machines and later versions, so these numbers may not move."""
    assert row_seed(0, "p0", 0) == 6103182632352996156
    assert [next(i for i in range(4) if in_shard(f"p{n}", (i, 4))) for n in range(12)] == [
        3,
        3,
        1,
        1,
        3,
        0,
        2,
        3,
        3,
        3,
        2,
        1,
    ]
    config = RegenerateConfig(mixture=[{}, {"weight": 2}, {}])
    assert "".join(draw(settings(config), 0, f"p{n}").name for n in range(12)) == "201121111111"


def test_a_backend_that_never_answers_is_given_up(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0) | {"id": f"p{i}"} for i in range(30)])
    ports = iter(range(8000, 9000))

    def refuse(request: Request) -> Answer:
        return Answer(error=f"http://localhost:{next(ports)}/v1: connection refused", tries=6)

    backend = Stub(refuse, capacity=10)
    with pytest.raises(
        ValueError, match="the first 10 requests all failed: http://localhost:8000/v1: connection refused"
    ):
        regenerate(recipe, backend)
    assert backend.closed == 1 and len(backend.asked) == 10
    answers = iter([yes, *[refuse] * 40])
    manifest = regenerate(recipe, Stub(lambda request: next(answers)(request), capacity=10))
    assert (manifest["rows"], manifest["failed"]) == (1, 29)  # one that worked: the others may yet
    reasons = iter(["a", "b"] * 20)
    assert regenerate(recipe, Stub(lambda _: Answer(error=next(reasons))))["failed"] == 29


def test_the_manifest_has_the_backends_figures_and_the_row_stays_as_it_was(target: Path, tmp_path: Path) -> None:
    odd = {**prompt(0), "origin": "kept", "turn_ids": [{"prompt_ids": [1], "response_ids": [2]}]}
    odd["messages"] = [*odd["messages"], chat("OLD"), user("u"), chat("OLD")]
    recipe = make_recipe(target, tmp_path, [odd])
    manifest = regenerate(recipe, Stub(yes))
    assert manifest["backend"] == {"requests": 2} and manifest["complete"] is True
    (row,) = rows_of(recipe)
    assert row["origin"] == odd["origin"] and len(row["turn_ids"]) == 2
    assert manifest["by_domain"]["default"] == {"rows": 1, "tokens": 8, "truncated": 0, "truncated_share": 0.0}


def test_half_a_surrogate_pair_that_a_server_sends_can_be_written() -> None:
    row = {"content": "half a pair: \ud800"}
    assert json.loads(line_of(row)) == row


def test_the_bar_tells_rates_truncated_share_and_failures(target: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(3)])
    recipe.track.progress = True
    regenerate(recipe, Stub(yes))
    assert "3/3" in (said := capsys.readouterr().err) and "tokens/s, 0.0% truncated, 0 failed" in said


def test_a_prompt_that_was_changed_under_its_id_is_not_taken_for_answered(target: Path, tmp_path: Path) -> None:
    before = [prompt(0), prompt(1)]
    recipe = make_recipe(target, tmp_path, before)
    regenerate(recipe, Stub(yes))
    changed = json.loads(json.dumps(before))
    changed[1]["messages"][0]["content"] = "something else"
    recipe = make_recipe(target, tmp_path, [changed[1], changed[0]])
    with pytest.raises(ValueError, match=f"1 rows answer other prompts.*{prompt(1)['id']}.*other ids"):
        regenerate(recipe, Stub(yes))
    recipe = make_recipe(target, tmp_path, before[::-1])
    assert regenerate(recipe, Stub(yes))["new_rows"] == 0


def test_a_full_disk_says_what_stopped_the_run_and_the_next_one_goes_on(
    target: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(3)])
    write, written = regenerate_module.write_manifest, []

    def full(*_):
        written.append(1)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*_)

    def one_then_full(request):
        if text_of(request) != prompt(0)["messages"][0]["content"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return yes(request)

    monkeypatch.setattr(regenerate_module, "write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        regenerate(recipe, Stub(one_then_full))
    assert "the same command continues" in capsys.readouterr().err
    assert json.loads(Path(recipe.regenerate.output + ".manifest.json").read_text())["complete"] is False
    monkeypatch.setattr(regenerate_module, "write_manifest", write)
    regenerate(recipe, Stub(yes))
    assert len({row["id"] for row in rows_of(recipe)}) == 3
