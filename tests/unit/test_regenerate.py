"""Regeneration: on-policy histories, exact ids, a file that survives being killed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import dflash_train.regenerate as module
from dflash_train.config.schema import Recipe
from dflash_train.data.chat import tokenize
from dflash_train.data.read import read_conversations
from dflash_train.regenerate import Answer, Request, decode, regenerate, sample

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


def say(text: str, tokenizer: Any) -> Answer:
    return Answer(token_ids=tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"])


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
    requests = [Request(prompt_ids=[3] * (i + 1), max_new_tokens=2 + 5 * i, seed=i) for i in range(4)]
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "top_p": 0.95, "top_k": 50}
        together = decode(model, requests, {257}, **options)
        assert together == [decode(model, [request], {257}, **options)[0] for request in requests]
        assert [len(answer.token_ids) for answer in together][:1] == [2]


def test_sampling_follows_the_filtered_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(1000, 1)
    uniform = torch.arange(1000) / 1000

    def shares(**options: Any) -> list[float]:
        drawn = sample(logits, uniform, **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **options})
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
    recipe = make_recipe(target, tmp_path, [prompt(i) for i in range(6)], batch_size=1)
    output = Path(recipe.regenerate.output)
    tokenizer, calls = make_tokenizer(), 0

    def killed_after_three(requests: list[Request]) -> list[Answer]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        return [say("yes", tokenizer) for _ in requests]

    with pytest.raises(KeyboardInterrupt):
        regenerate(recipe, killed_after_three)
    kept = output.read_bytes()
    assert kept.count(b"\n") == 3
    output.write_bytes(kept + b'{"id": "p0", "messages": [{"ro')
    broken = {"p0": "HTTP 500 after 3 tries"}

    def failing(requests: list[Request]) -> list[Answer]:
        text = tokenizer.decode(requests[0].prompt_ids)
        return [Answer(error=broken["p0"]) if text.count("ask") == 1 else say("yes", tokenizer)]

    for _ in range(2):
        manifest = regenerate(recipe, failing)
        assert output.read_bytes().startswith(kept)
        assert sorted(row["id"] for row in rows_of(recipe)) == ["p1", "p2", "p3", "p4", "p5"]
        failed = Path(f"{output}.failed.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in failed] == [{"id": "p0", "reason": broken["p0"]}]
        assert (manifest["rows"], manifest["failed"]) == (5, 1)
    regenerate(recipe, lambda requests: [say("yes", tokenizer) for _ in requests])
    assert len(rows_of(recipe)) == 6 and not Path(f"{output}.failed.jsonl").exists()


def test_a_finished_run_is_not_repeated(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0)])
    first = regenerate(recipe)
    monkeypatch.setattr(module, "embedded_generate", lambda *_: pytest.fail("the target was loaded for nothing"))
    again = regenerate(recipe)
    assert (again["sha256"], again["new_rows"]) == (first["sha256"], 0)


def test_an_output_of_another_generator_is_refused_and_both_are_named(target: Path, tmp_path: Path) -> None:
    recipe = make_recipe(target, tmp_path, [prompt(0)])
    regenerate(recipe)
    recipe.regenerate.temperature = 0.7
    with pytest.raises(ValueError, match=r'(?s)another generator.*"temperature": 0\.0.*"temperature": 0\.7'):
        regenerate(recipe)


def test_a_later_turn_sees_the_new_history(target: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [("system", "be brief"), ("user", "u1"), ("assistant", "OLD1"), ("user", "u2"), ("assistant", "OLD2")]
    prompts = [{"id": "m", "tools": tools, "messages": [{"role": role, "content": text} for role, text in messages]}]
    recipe = make_recipe(target, tmp_path, prompts, chat_template_kwargs={"enable_thinking": False})
    tokenizer, seen = make_tokenizer(), []

    def hashing(requests: list[Request]) -> list[Answer]:
        seen.extend(tokenizer.decode(request.prompt_ids) for request in requests)
        return [say("N:" + hashlib.sha256(text.encode()).hexdigest()[:8], tokenizer) for text in seen[-len(requests) :]]

    regenerate(recipe, hashing)
    (row,) = rows_of(recipe)
    new = ["N:" + hashlib.sha256(text.encode()).hexdigest()[:8] for text in seen]
    assert [m["content"] for m in row["messages"]] == ["be brief", "u1", new[0], "u2", new[1]]
    assert len(seen) == 2 and new[0] in seen[1] and "OLD" not in seen[1]
    assert row["tools"] == tools and row["chat_template_kwargs"] == {"enable_thinking": False}
    assert row["generator"].items() >= {
        "model": str(target), "revision": None, "temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False},
    }.items()  # fmt: skip
    (conversation,), _ = read_conversations([recipe.regenerate.output])
    (example,) = tokenize(conversation, tokenizer, chat_template_kwargs={}, max_length=999)
    conversation.metadata.clear()
    (rendered,) = tokenize(conversation, tokenizer, chat_template_kwargs={}, max_length=999)
    assert example.token_ids.tolist() == rendered.token_ids.tolist()[:-1]
    assert example.supervised.tolist() == rendered.supervised.tolist()[:-1]


def test_a_conversation_ends_where_going_on_would_be_off_policy(target: Path, tmp_path: Path) -> None:
    def chat(row_id: str, **fields: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": row_id, **fields}

    user, tool = {"role": "user", "content": "u"}, {"role": "tool", "content": "42"}
    call = chat("", tool_calls=[{"function": {"name": "get_tide", "arguments": "{}"}}])
    prompts = [
        {"id": "cut", "messages": [{"role": "user", "content": "cut"}, chat("a"), user, chat("b")]},
        {"id": "silent", "messages": [{"role": "user", "content": "silent"}, call, tool, chat("b")]},
        {"id": "calls", "messages": [{"role": "user", "content": "calls"}, call, tool, chat("b"), user]},
        {"id": "long", "messages": [{"role": "user", "content": "w" * 200}]},
    ]
    recipe = make_recipe(target, tmp_path, prompts, max_length=200)
    tokenizer = make_tokenizer()

    def generate(requests: list[Request]) -> list[Answer]:
        answers = []
        for text in (tokenizer.decode(request.prompt_ids) for request in requests):
            answer = say("get_tide()" if "calls" in text else "no", tokenizer)
            answers.append(Answer(token_ids=answer.token_ids[:-1], finish_reason="length") if "cut" in text else answer)
        return answers

    manifest = regenerate(recipe, generate)
    rows = {row["id"]: row for row in rows_of(recipe)}
    assert [len(rows[row_id]["messages"]) for row_id in ("cut", "silent", "calls")] == [2, 2, 6]
    assert rows["cut"]["finish_reason"] == "length"
    assert manifest["notes"] == {"ended_at_cut_answer": 1, "ended_at_missing_tool_call": 1}
    assert manifest["failed"] == 1
    assert "prompt_too_long" in Path(recipe.regenerate.output + ".failed.jsonl").read_text()
