"""The server's parts in this process: what a client may ask, text as it comes, counts, and the thread that decodes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import toys
from stubs import free_port

pytest.importorskip("starlette", reason="the extra serve")
pytest.importorskip("prometheus_client", reason="the extra serve")

from starlette.testclient import TestClient  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from dflash_train import __version__, serve  # noqa: E402
from dflash_train.assets import resolve  # noqa: E402
from dflash_train.config.load import CheckFailed  # noqa: E402
from dflash_train.data.chat import load_tokenizer, prompt_ids  # noqa: E402
from dflash_train.generation.base import Decoded, Request  # noqa: E402
from dflash_train.generation.single import plain_decode  # noqa: E402
from dflash_train.generation.slots import Slots, why_no_slots  # noqa: E402
from dflash_train.generation.speculative import SpeculativeSlots  # noqa: E402
from dflash_train.generation.verify import Sampling  # noqa: E402
from dflash_train.server import app  # noqa: E402
from dflash_train.server.app import Service, build_app  # noqa: E402
from dflash_train.server.metrics import Metrics, drafted_tokens  # noqa: E402
from dflash_train.server.protocol import ApiError, parse  # noqa: E402
from dflash_train.server.scheduler import Scheduler  # noqa: E402
from dflash_train.server.text import TextStream  # noqa: E402
from dflash_train.target.hf import HFTarget  # noqa: E402

HELLO = [{"role": "user", "content": "w20 w21"}]
LIVE = {"period": 1, "smallest": 1, "streaming": True}


# --- what a client may ask ------------------------------------------------------------------------------------------


def asked(*, chat: bool = True, **fields):
    return parse(json.dumps(({"messages": HELLO} if chat else {"prompt": "w20"}) | fields).encode(), chat=chat)


def test_a_request_with_everything_that_there_is():
    ask = asked(
        model="m", max_completion_tokens=9, temperature=0.5, top_p=0.9, top_k=-1, seed=3, stop="x", ignore_eos=True, stream=True,
        stream_options={"include_usage": True}, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", n=1,
        presence_penalty=0.0, logprobs=None, min_p=0.0, repetition_penalty=1.0, user="me",
    )  # fmt: skip
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.top_k, ask.seed) == (9, 0.5, 0.9, 0, 3)
    assert ask.stop == ["x"] and ask.ignore_eos and ask.stream and ask.include_usage
    assert ask.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert asked(chat=False).max_tokens == 16 and asked().max_tokens is None
    assert asked(chat=False, prompt=[[1, 2]]).prompt == [1, 2]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert asked(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    "fields, param, said",
    [
        ({"n": 2}, "n", "n = 2: this server can only do 1"),
        ({"n": True}, "n", "n = true"),
        ({"temperature": -1}, "temperature", "temperature = -1: must be a number of at least 0"),
        ({"temperature": "hot"}, "temperature", 'temperature = "hot"'),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"top_k": 1.5}, "top_k", "must be a whole number"),
        ({"top_k": 2**31}, "top_k", "below 2**31"),
        ({"seed": 2**63}, "seed", "64 bits"),
        ({"\ud83d": 1}, None, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, None, "half of a surrogate pair"),
        ({"seed": True}, "seed", "seed = true"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "they are one thing"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["ab"] * 3000}, "stop", "of together at most 4096 characters"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream = true"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "include_usage alone"),
        ({"tools": [{"type": "function"}]}, "tools", "can only do"),
        ({"response_format": {"type": "json_object"}}, "response_format", "can only do"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "leave logit_bias out"),
        ({"temprature": 1}, None, "temprature: this server has no such field"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"content": "x"}]}, "messages", "an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text parts"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "no tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize is set by the server"),
    ],
)
def test_what_a_chat_may_not_ask(fields: dict, param: str | None, said: str):
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    error = caught.value.body()["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert said in error["message"] and (param is None or error["param"] == param)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, -2], [1, "a"], 7])
def test_what_a_completion_may_not_ask(prompt):
    with pytest.raises(ApiError, match="prompt = .*must be one text, or one list of token ids"):
        asked(chat=False, prompt=prompt)
    with pytest.raises(ApiError, match="messages: this server has no such field"):
        asked(chat=False, messages=HELLO)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b"[" * 100_000])
def test_bodies_that_are_no_objects(body: bytes):
    with pytest.raises(ApiError, match="the body is"):
        parse(body, chat=True)


@pytest.mark.parametrize("name", ["stop", "stream_options", "model"])
def test_a_field_that_could_just_be_read_is_refused_however_deep_it_is(name: str):
    """What is nested so deeply that it can be read, but not be quoted from a few calls further down, is no fault of the server."""
    for depth in range(900, 1000):
        body = b'{"messages": [{"role": "user", "content": "x"}], "%s": %s}' % (
            name.encode(),
            b"[" * depth + b"]" * depth,
        )
        with pytest.raises(ApiError):
            parse(body, chat=True)


# --- text as it comes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    return load_tokenizer(resolve("embedded", "target"))


def streamed(tokenizer, ids: list[int], stop: list[str]) -> tuple[list[str], TextStream]:
    stream, parts = TextStream(tokenizer, stop), []
    for token in ids:
        parts.append(stream.add(token))
        if stream.stopped:
            break
    return [*parts, stream.finish()], stream


@pytest.mark.parametrize("text", ["Hello, who are you?", "naïve 数字 🙂🙃 done", "  two  spaces\n\nlines "])
def test_parts_of_a_text_are_the_text(text: str, words):
    ids = words(text, add_special_tokens=False)["input_ids"]
    parts, _ = streamed(words, ids, [])
    assert "".join(parts) == words.decode(ids) == text and "�" not in text
    cut = words("🙂", add_special_tokens=False)["input_ids"]
    if len(cut) > 1:  # an answer that ends within a character
        assert "".join(streamed(words, ids + cut[:1], [])[0]) == words.decode(ids + cut[:1])


def test_a_stop_text_ends_the_text_before_it_and_no_part_of_it_is_given(words):
    ids = words("one two three four", add_special_tokens=False)["input_ids"]
    parts, stream = streamed(words, ids, ["three", "zzz"])
    assert "".join(parts) == "one two " and stream.stopped and len(stream.token_ids) < len(ids)
    parts, stream = streamed(words, ids, ["o three", "two th", "three f"])
    assert "".join(parts) == "one " and stream.stopped
    # What could have become a stop text is given once it cannot any more, or at the end.
    parts, stream = streamed(words, ids, ["four five", "two tx"])
    assert "".join(parts) == "one two three four" and not stream.stopped
    assert parts[-1].endswith("four")


# --- counts ---------------------------------------------------------------------------------------------------------


def test_counts_of_rounds_are_vllms():
    metrics = Metrics("m", 3)
    decoded = Decoded(list(range(8)), "length", rounds=(4, 1, 2), accepted=(3, 0, 1))
    assert drafted_tokens(decoded, 3, 8) == 3 + 3 + 2  # two tokens were left of the budget before the last round
    metrics.add_rounds(decoded, 8)
    metrics.first.observe(0.2)
    text = metrics.text().decode()
    at = 'engine="0",model_name="m"'
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{at}}} 3.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{at}}} 8.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{at}}} 4.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{at},position="0"}} 2.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{at},position="1"}} 1.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{at},position="2"}} 1.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="m"} 1.0',
        f"vllm:inter_token_latency_seconds_count{{{at}}} 0.0",
        f"vllm:generation_tokens_total{{{at}}} 0.0",
        f"vllm:num_requests_waiting{{{at}}} 0.0",
    ):
        assert line in text.splitlines(), line
    assert "spec_decode" not in Metrics("m", 0).text().decode()


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """The toy target in slots' attention, and a drafter that sometimes hits."""
    target = copy.deepcopy(toys.toy_model())
    assert why_no_slots(target) is None
    rows = toys.greedy_rows(toys.toy_model(), toys.prompts(4), 28)
    step = toys.toy_step(HFTarget(target, toys.toy_info(), (1, 3)))
    examples = [toys.example_of(row, row["id"]) for row in rows]
    toys.train_steps(step, toys.stream_of(examples, num_anchors=27, micro_batch_size=4), 40, lr=3e-3, eps=1e-8)
    return step.eval()


def slots_of(pair, *, drafter: bool, slots: int = 4, length: int = 64, stop: tuple[int, ...] = (2,)) -> Slots:
    shape = {"slots": slots, "length": length, "max_new": length - 1, **LIVE}
    return SpeculativeSlots(pair, set(stop), **shape) if drafter else Slots(pair.target.model, set(stop), **shape)


@pytest.mark.parametrize("drafter", [True, False])
def test_news_of_slots_are_their_answers_and_a_cancelled_one_ends(pair, drafter: bool):
    slots = slots_of(pair, drafter=drafter)
    prompts = toys.prompts(7)
    for key, prompt in enumerate(prompts):
        slots.submit(key, Request(messages=[], prompt_ids=prompt, max_new_tokens=20 + key, seed=0))
    news, answers, cancelled = {key: [] for key in range(7)}, {}, {}
    while slots.in_flight:
        answers.update(slots.advance())
        for key, tokens in slots.take_news():
            news[key] += tokens
            if key == 2 and not cancelled:
                cancelled[2], cancelled[6] = slots.cancel(2), slots.cancel(6)
    assert cancelled == {2: False, 6: True} and sorted(answers) == [0, 1, 2, 3, 4, 5]
    assert all(news[key] == answer.token_ids for key, answer in answers.items()) and not news[6]
    assert 0 < len(answers[2].token_ids) < 22
    for key in (0, 1, 3, 4, 5):
        assert answers[key].token_ids == plain_decode(pair.target, prompts[key], 20 + key, {2}).token_ids


def test_greedy_and_sampled_requests_side_by_side_do_not_change_each_other(pair):
    prompts = toys.prompts(6)
    hot = {"temperature": 0.7, "top_p": 0.9}
    requests = [
        Request(messages=[], prompt_ids=p, max_new_tokens=24, seed=i, **(hot if i % 2 else {}))
        for i, p in enumerate(prompts)
    ]

    def run(which: list[Request]) -> list[list[int]]:
        slots, answers = slots_of(pair, drafter=True), {}
        for key, request in enumerate(which):
            slots.submit(key, request)
        while slots.in_flight:
            answers.update(slots.advance())
        return [answers[key].token_ids for key in range(len(which))]

    together = run(requests)
    assert together == [run([request])[0] for request in requests]
    assert together[0] == plain_decode(pair.target, prompts[0], 24, {2}).token_ids
    assert together[1] != plain_decode(pair.target, prompts[1], 24, {2}).token_ids


@pytest.mark.parametrize("drafter", [True, False])
def test_prompts_padded_to_a_few_sizes_read_as_they_are(pair, drafter: bool):
    """What a server does on CUDA, where each size is a graph. A hundred tokens of padding are more than the slot behind the others holds."""
    prompts = [prompt * (1 + i % 3) for i, prompt in enumerate(toys.prompts(9))]
    slots = slots_of(pair, drafter=drafter, slots=9)
    longest = max(map(len, prompts))
    slots.prompt_sizes = (longest, longest + 100)
    sizes, read = [], slots._read
    slots._read = lambda *prompts: sizes.append(prompts[-1]) or read(*prompts)
    answers, waves = {}, [[0], [1, 2, 3], list(range(9))]  # nine together are more rows than a padded one has
    for wave, keys in enumerate(waves):
        for key in keys:
            slots.submit(key, Request(messages=[], prompt_ids=prompts[key], max_new_tokens=16, seed=0))
        answers = {}
        while slots.in_flight:
            answers.update(slots.advance())
        for key in keys:
            assert answers[key].token_ids == plain_decode(pair.target, prompts[key], 16, {2}).token_ids, (wave, key)
    assert sizes == [longest, longest + 100, longest]


@pytest.mark.parametrize("drafter", [True, False])
def test_ignored_stop_tokens_do_not_end_an_answer(pair, drafter: bool):
    prompt = toys.prompts(1)[0]
    stop = plain_decode(pair.target, prompt, 30, set()).token_ids[7]
    found = []
    for ignore in (False, True):
        slots = slots_of(pair, drafter=drafter, stop=(stop,))
        slots.submit(0, Request(messages=[], prompt_ids=prompt, max_new_tokens=30, seed=0, ignore_eos=ignore))
        while not (answer := dict(slots.advance())):
            pass
        found.append(answer[0])
    assert found[0].token_ids[-1] == stop and found[0].finish_reason == "stop" and len(found[0].token_ids) <= 8
    assert len(found[1].token_ids) == 30 and found[1].finish_reason == "length"


class Open:
    """A service over the toy pair, with its scheduler running."""

    def __init__(self, slots: Slots, *, draft_length: int = 7, max_waiting: int = 4, key: str | None = None):
        self.failed: queue.Queue[bool] = queue.Queue()
        metrics = Metrics("toy", draft_length)
        self.scheduler = Scheduler(slots, metrics, max_waiting=max_waiting, on_failure=lambda: self.failed.put(True))
        self.service = Service(
            scheduler=self.scheduler, tokenizer=toys.toy_tokenizer(), name="toy", vocab_size=toys.VOCAB,
            max_length=slots.length_limit, sampling=Sampling(), seed=0, key=key,
        )  # fmt: skip
        self.client = TestClient(build_app(self.service), raise_server_exceptions=False)

    def __enter__(self) -> Open:
        self.scheduler.start()
        return self

    def __exit__(self, *args) -> None:
        self.scheduler.stop()

    def chat(self, **fields):
        return self.client.post("/v1/chat/completions", json={"messages": HELLO} | fields)


def events(response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_streamed_and_whole_answers_are_what_the_target_says(pair):
    ids = prompt_ids(HELLO, toys.toy_tokenizer(), tools=None, kwargs={})
    expected = plain_decode(pair.target, ids, 24, {2}).token_ids
    text = toys.toy_tokenizer().decode(expected, skip_special_tokens=True)
    for drafter in (True, False):
        with Open(slots_of(pair, drafter=drafter), draft_length=7 * drafter) as open_:
            body = open_.chat(max_tokens=24, return_token_ids=True, return_meta_info=True).json()
            choice, usage, meta = body["choices"][0], body["usage"], body["meta_info"]
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["token_ids"] == expected and body["prompt_token_ids"] == ids
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(expected))
            assert ("spec_verify_ct" in meta) == drafter
            chunks = events(open_.chat(max_tokens=24, stream=True, stream_options={"include_usage": True}))
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == text
            assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
                choice["finish_reason"]
            ]
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
            plain = {"prompt": ids, "max_tokens": 24}
            assert open_.client.post("/v1/completions", json=plain).json()["choices"][0]["text"] == text
            chunks = events(open_.client.post("/v1/completions", json=plain | {"stream": True}))
            assert "".join(c["choices"][0]["text"] for c in chunks) == text
            if drafter:
                counted = open_.client.get("/metrics").text
                assert f'num_drafts_total{{engine="0",model_name="toy"}} {4.0 * meta["spec_verify_ct"]}' in counted


def test_usage_and_meta_info_tell_what_the_drafter_gained(pair):
    with Open(slots_of(pair, drafter=True)) as open_:
        learnt = {"prompt": toys.prompts(4)[0], "max_tokens": 28, "return_meta_info": True}
        body = open_.client.post("/v1/completions", json=learnt).json()
        details, meta = body["usage"]["completion_tokens_details"], body["meta_info"]
        rounds, accepted = meta["spec_verify_ct"], details["accepted_prediction_tokens"]
        assert accepted > rounds and meta["spec_accept_length"] == (meta["completion_tokens"] - 1) / rounds
        gained = meta["completion_tokens"] - 1
        assert (
            rounds + accepted - 1 <= gained <= rounds + accepted
        )  # the last round may gain no token of the target's own
        counted = open_.client.get("/metrics").text
        at = 'engine="0",model_name="toy"'
        assert f"num_accepted_tokens_total{{{at}}} {float(accepted)}" in counted
        assert f"num_draft_tokens_total{{{at}}} {accepted + float(details['rejected_prediction_tokens'])}" in counted


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 20, 24), (60.0, 2, 2)])
def test_tokens_that_come_fast_are_told_together(pair, monkeypatch, seconds: float, least: int, most: int):
    """The first at once, the last with the end, whatever was held."""
    monkeypatch.setattr("dflash_train.server.scheduler.TELL_SECONDS", seconds)
    with Open(slots_of(pair, drafter=False, stop=()), draft_length=0) as open_:
        ask = {"max_tokens": 24, "stream": True, "return_token_ids": True}
        told = [c["choices"][0]["token_ids"] for c in events(open_.chat(**ask))]
        whole = open_.chat(max_tokens=24, return_token_ids=True).json()["choices"][0]["token_ids"]
        told = [ids for ids in told if ids]
        assert sum(told, []) == whole and least <= len(told) <= most and len(told[0]) < 3
        assert 'generation_tokens_total{engine="0",model_name="toy"} 48.0' in open_.client.get("/metrics").text


def test_a_stop_text_ends_an_answer_and_frees_its_slot(pair):
    with Open(slots_of(pair, drafter=True, slots=1)) as open_:
        whole = open_.chat(max_tokens=24).json()["choices"][0]["message"]["content"].split(" ")
        word = whole[5]
        first = whole.index(word)
        body = open_.chat(max_tokens=24, stop=[word], return_token_ids=True).json()
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"].strip() == " ".join(whole[:first])
        assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) < 24
        assert open_.chat(max_tokens=2).status_code == 200  # the one slot is free again
        assert (
            'request_success_total{engine="0",finished_reason="stop",model_name="toy"} 1.0'
            in open_.client.get("/metrics").text
        )


def test_errors_of_a_running_server(pair):
    with Open(slots_of(pair, drafter=True), key="secret-key") as open_:
        assert open_.chat().status_code == 401
        assert open_.client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert open_.client.get("/health").status_code == open_.client.get("/metrics").status_code == 200
        assert open_.client.get("/version").json() == {"version": __version__}
        open_.client.headers["Authorization"] = "Bearer secret-key"
        assert open_.client.get("/v1/models").json()["data"][0]["id"] == "toy"
        for status, code, said, fields in (
            (404, "model_not_found", "model = other: this server has toy alone", {"model": "other"}),
            (400, "context_length_exceeded", "which leaves", {"max_tokens": 64}),
            (400, "context_length_exceeded", "at most 63 here (--max-length 64)", {"messages": HELLO * 20}),
            (400, "unsupported_value", "n = 3", {"n": 3}),
        ):
            response = open_.chat(**fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code) and said in error["message"]
        for path in ("/v1/chat/completion", "/v1/embeddings"):
            assert "this server has /v1/chat/completions" in open_.client.post(path).json()["error"]["message"]
        assert open_.client.get("/v1/completions").status_code == 405
        beyond = open_.client.post("/v1/completions", json={"prompt": [toys.VOCAB]})
        assert "160 is no token" in beyond.json()["error"]["message"]
        for unknown in (
            open_.chat(messages=[{"role": "user", "content": "zebra"}]),
            open_.client.post("/v1/completions", json={"prompt": "zebra"}),
        ):
            assert unknown.status_code == 400 and "has no token for a word" in unknown.json()["error"]["message"]
            assert "template" not in unknown.json()["error"]["message"]
        open_.service.tokenizer.chat_template = "{{ raise_exception('system first') }}"
        refused = open_.chat()
        assert refused.status_code == 400 and "system first" in refused.json()["error"]["message"]


def test_a_full_queue_is_429_and_says_when_to_come_back(pair, monkeypatch):
    with Open(slots_of(pair, drafter=True, slots=1), max_waiting=0) as open_:
        hold = queue.Queue()
        advance = open_.scheduler.slots.advance
        monkeypatch.setattr(open_.scheduler.slots, "advance", lambda: hold.get() and advance())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(open_.chat, max_tokens=4)
            while not open_.scheduler._jobs:
                pass
            refused = open_.chat(max_tokens=4)
            monkeypatch.setattr(open_.scheduler.slots, "advance", advance)
            hold.put(True)
            assert running.result().status_code == 200
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "--max-waiting" in refused.json()["error"]["message"]


def test_a_failure_of_decoding_fails_all_requests_and_nothing_hangs(pair, monkeypatch, capfd):
    with Open(slots_of(pair, drafter=True, slots=1)) as open_:
        monkeypatch.setattr(open_.scheduler.slots, "advance", lambda: 1 / 0)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda stream: open_.chat(max_tokens=4, stream=stream), [False, False, False]))
        assert [response.status_code for response in found] == [500, 500, 500]
        error = found[0].json()["error"]
        assert "ZeroDivisionError" in error["message"] and error["type"] == "server_error"
        assert open_.failed.get(timeout=5)
        assert open_.client.get("/health").status_code == 503 and open_.chat().status_code == 500
    assert "ZeroDivisionError" in capfd.readouterr().err


# --- the command ----------------------------------------------------------------------------------------------------


def run(*argv: str) -> None:
    serve.main(list(argv))


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = toys.call(serve.main, "--target", str(tmp_path), "--no-drafter", "--port", port)
        assert code == 2 and f"--port {port}: another program listens there; stop it, or choose another --port" in err
    with pytest.raises(ValueError, match="--port 99999"):
        run("--target", str(tmp_path), "--no-drafter", "--port", "99999")


def test_what_the_command_refuses(target_dir, monkeypatch):
    with pytest.raises(ValueError, match="no target: name it with --target"):
        run("--no-drafter")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="--api-key-env NO_SUCH_KEY: .* empty or not set"):
        run("--target", str(target_dir), "--no-drafter", "--api-key-env", "NO_SUCH_KEY")
    with pytest.raises(ValueError, match="--seed 99999999999999: must be in"):
        run("--target", str(target_dir), "--no-drafter", "--seed", "99999999999999")
    with pytest.raises(ValueError, match="--slots 0: must be at least 1"):
        run("--target", str(target_dir), "--no-drafter", "--slots", "0")
    toy = ["--target", str(target_dir), "--no-drafter", "--port", "0"]
    with pytest.raises(ValueError, match=r"--draft-length 3: there is no drafter"):
        run(*toy, "--draft-length", "3")
    with pytest.raises(ValueError, match=r"--max-length 513: must be in \[2, 512\]"):
        run(*toy, "--max-length", "513")
    with pytest.raises(ValueError, match=r"--draft-length 8: must be in \[1, 7\]"):
        serve._block_size(8, 8)
    assert (serve._block_size(None, 8), serve._block_size(1, 8), serve._block_size(None, None)) == (8, 2, 1)
    with pytest.raises(SystemExit):
        run("--target", str(target_dir))  # neither --drafter nor --no-drafter


def test_a_failure_of_decoding_ends_the_command(target_dir, monkeypatch, capfd):
    pytest.importorskip("uvicorn", reason="the extra serve")
    port = free_port()
    monkeypatch.setattr(Slots, "advance", lambda self: 1 / 0)

    def ask() -> int:
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:  # until it listens
            return client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "w20 w21"}).status_code

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(ask)
        with pytest.raises(
            CheckFailed, match="decoding failed, and every request .*: ZeroDivisionError: division by zero"
        ):
            run("--target", str(target_dir), "--no-drafter", "--port", str(port))
        assert answered.result() == 500
    assert "serving " in capfd.readouterr().out


def test_what_a_request_leaves_out_is_the_targets(capsys):
    sampled = lambda **listed: serve.sampling_of(SimpleNamespace(generation_config=GenerationConfig(**listed)))  # noqa: E731
    assert sampled() == Sampling(1.0, 1.0, 0) and not capsys.readouterr().out
    assert sampled(do_sample=True, temperature=0.6, top_k=20, min_p=0.05) == Sampling(0.6, 1.0, 20)
    assert "{'min_p': 0.05}, which this server does not do" in capsys.readouterr().out


def test_an_open_address_without_a_key_is_said(pair):
    loaded = SimpleNamespace(draft_length=0, max_length=64, slots=SimpleNamespace(device="cpu"), memory="1 MiB")
    bound = SimpleNamespace(getsockname=lambda: ("0.0.0.0", 80))
    args = SimpleNamespace(drafter=None, slots=2, api_key_env=None)
    assert "WARNING: 0.0.0.0 is open to the network" in serve._announcement(args, "m", bound, loaded)
    args.api_key_env = "KEY"
    assert "WARNING" not in serve._announcement(args, "m", bound, loaded)


# --- clients that mean ill, or know no better -----------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [True, False])
def test_whatever_a_client_may_ask_is_decoded(pair, drafter: bool):
    """A value that decoding cannot hold would end the server for everybody."""
    greedy = {"max_tokens": 8, "temperature": 0}
    with Open(slots_of(pair, drafter=drafter), draft_length=7 if drafter else 0) as open_:
        best = open_.chat(**greedy).json()["choices"][0]["message"]["content"]
        for field, value in [("top_k", 2**31 - 1), ("seed", 2**63 - 1), ("seed", 1 - 2**63), ("temperature", 999999), ("top_p", 1e-300),
                             ("top_p", 1e-45), ("stop", ["x"] * 300)]:  # fmt: skip
            assert open_.chat(**{"max_tokens": 8, "temperature": 2, field: value}).status_code == 200, field
        for temperature in (1e-5, 1e-9, 1e-40, 1e-45, 1e-300):  # below float32 there is nothing but the best token
            assert (
                open_.chat(**greedy | {"temperature": temperature}).json()["choices"][0]["message"]["content"] == best
            )
        assert open_.chat(**greedy).json()["choices"][0]["message"]["content"] == best and open_.scheduler.error is None


def test_a_token_that_only_the_tokenizer_has_is_refused(pair):
    with Open(slots_of(pair, drafter=False), draft_length=0) as open_:
        open_.service.vocab_size = 10  # of the target
        error = open_.chat().json()["error"]
        assert "is no token; the vocabulary has 10" in error["message"] and error["param"] == "messages"


def talk(open_: Open, *requests):
    """Responses of requests that are under way together."""

    async def all_of_them():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(open_.service)), base_url="http://x"
        ) as client:
            return await asyncio.gather(*(request(client) for request in requests))

    return asyncio.run(all_of_them())


def test_a_long_prompt_is_read_while_others_are_answered(pair, monkeypatch):
    others = threading.Event()
    tokenizer = toys.toy_tokenizer()

    def slow(*args, **more):
        assert others.wait(10), "nobody else is answered meanwhile"
        return tokenizer(*args, **more)

    async def healthy(client):
        await asyncio.sleep(0.05)
        assert (await client.get("/health")).status_code == 200
        others.set()

    with Open(slots_of(pair, drafter=False), draft_length=0) as open_:
        monkeypatch.setattr(app, "LONG_BODY", 8)
        open_.service._prompt_ids = lambda ask, chat: slow(ask.prompt)["input_ids"]
        ask = lambda client: client.post("/v1/completions", json={"prompt": "w20 w21", "max_tokens": 2})  # noqa: E731
        assert talk(open_, ask, healthy)[0].status_code == 200


def test_bodies_that_are_too_long_or_do_not_come(pair, monkeypatch):
    async def drip():
        yield b"{"
        await asyncio.sleep(5)

    with Open(slots_of(pair, drafter=False), draft_length=0) as open_:
        monkeypatch.setattr(app, "BODY_BYTES", 100)
        long = open_.client.post("/v1/completions", json={"prompt": "w20 " * 2000})  # 64 tokens of 64 bytes, and 100
        assert long.status_code == 413 and "longer than 4196 bytes" in long.json()["error"]["message"]
        monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
        assert talk(open_, lambda client: client.post("/v1/completions", content=drip()))[0].status_code == 408


def test_two_servers_that_take_one_port_at_once(target_dir, monkeypatch):
    pytest.importorskip("uvicorn", reason="the extra serve")
    port, load, rivals = free_port(), serve.load, []

    def meanwhile(args):
        rivals.append(serve.listen("127.0.0.1", port))
        rivals[0].listen()
        return load(args)

    monkeypatch.setattr(serve, "load", meanwhile)
    with pytest.raises(ValueError, match=f"--port {port}: another program listens there"):
        run("--target", str(target_dir), "--no-drafter", "--port", str(port))
    rivals[0].close()


def test_a_client_that_never_sends_the_rest_does_not_keep_the_server(target_dir, monkeypatch, capfd):
    pytest.importorskip("uvicorn", reason="the extra serve")
    port = free_port()
    monkeypatch.setattr(serve, "DRAIN_SECONDS", 0.2)

    def stuck() -> None:
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:
            client.get(f"http://127.0.0.1:{port}/health")  # it listens
        held.connect(("127.0.0.1", port))
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    with socket.socket() as held, ThreadPoolExecutor(1) as pool:
        told = pool.submit(stuck)
        assert serve.main(["--target", str(target_dir), "--no-drafter", "--port", str(port)]) == 0
        told.result()
