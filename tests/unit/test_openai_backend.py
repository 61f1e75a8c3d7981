"""The openai backend against scripted servers."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from stubs import StubServer, chat, free_port, until

from dflash_train.config.load import load_recipe
from dflash_train.config.schema import Api, Recipe
from dflash_train.generation import openai
from dflash_train.generation.base import Request
from dflash_train.generation.openai import OpenAIBackend


class Words:
    """A tokenizer whose token 10 + i is the word `t{i}`."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"t{i - 10}" for i in ids if i >= 10 or not skip_special_tokens)

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [int(word[1:]) + 10 for word in text.split()]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(openai, "FIRST_PAUSE", 0.02)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def open_backend(*urls: str, **knobs) -> OpenAIBackend:
    recipe = Recipe()
    recipe.regenerate.base_urls = list(urls)
    for name, value in knobs.items():
        setattr(recipe.regenerate, name, value)
    return OpenAIBackend(recipe, Words())


def ask(**changes) -> Request:
    fields = {"messages": [{"role": "user", "content": "hi"}], "prompt_ids": [10, 11], "max_new_tokens": 8, "seed": 5}
    return Request(**(fields | changes))


def answers(backend: OpenAIBackend, requests: list[Request]) -> list:
    """Answers in the order of the requests; the backend is left open."""
    for key, request in enumerate(requests):
        backend.submit(key, request)
    found = {}
    while len(found) < len(requests):
        found |= dict(backend.collect())
    return [found[key] for key in range(len(requests))]


def one(server: StubServer, request: Request | None = None, **knobs):
    """(answer, stats) of one request to one server."""
    backend = open_backend(server.url, **knobs)
    try:
        return answers(backend, [request or ask()])[0], backend.stats()
    finally:
        backend.close()


# --- what is sent ---


def test_chat_request():
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    request = ask(
        messages=messages, tools=[{"type": "function", "function": {"name": "f"}}], temperature=0.7, top_p=0.9, top_k=20,
        chat_template_kwargs={"enable_thinking": False}, extra_body={"reasoning_effort": "low"}, seed=2**40 + 7,
    )  # fmt: skip
    with StubServer() as server:
        one(server, request)
    path, _, body = server.posts[0]
    assert path == "/v1/chat/completions"
    sent_call = body["messages"][1]["tool_calls"][0]
    assert sent_call == {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert messages[1]["tool_calls"] == [call], "the caller's messages are not changed"
    wanted = {
        "model": "target", "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 7, "stream": False,
        "tools": request.tools, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "return_token_ids": True,
        "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert {k: v for k, v in body.items() if k != "messages"} == wanted


@pytest.mark.parametrize(("engine", "all_tokens", "extra"), [
    ("vllm", -1, {"return_token_ids"}), ("sglang", -1, {"return_token_ids"}), ("llamacpp", 0, {"return_tokens", "verbose"}), ("tensorrt_llm", 0, set()),
])  # fmt: skip
def test_each_engine_is_asked_in_its_own_words(engine, all_tokens, extra):
    with StubServer(models=(200, {"data": [{"id": "m", "owned_by": engine}]})) as server:
        _, stats = one(server)
    body = server.posts[0][2]
    assert body["top_k"] == all_tokens
    assert {"return_token_ids", "return_tokens", "verbose"} & set(body) == extra
    assert stats["servers"][server.url]["engine"] == engine


def test_completions_send_our_rendering():
    def script(body, number):
        assert "messages" not in body
        return 200, {
            "choices": [{"text": "ignored", "finish_reason": "stop", "token_ids": [15, 2]}],
            "usage": {"prompt_tokens": 2},
        }

    with StubServer(script) as server:
        answer, stats = one(server, api=Api.completions)
    path, _, body = server.posts[0]
    assert (path, body["prompt"]) == ("/v1/completions", [10, 11])
    assert (answer.message, answer.prompt_ids, answer.token_ids) == (
        {"role": "assistant", "content": "t5"},
        [10, 11],
        [15, 2],
    )
    assert stats["prompt_mismatches"] == 0


def test_completions_of_a_server_that_adds_a_token():
    reply = 200, {"choices": [{"text": " yes", "finish_reason": "length"}], "usage": {"prompt_tokens": 3}}
    with StubServer(lambda body, number: reply) as server:
        answer, stats = one(server, api=Api.completions)
    assert (answer.message["content"], answer.finish_reason, answer.prompt_ids, answer.token_ids) == (
        " yes",
        "length",
        None,
        None,
    )
    assert stats["prompt_mismatches"] == 1


# --- what comes back ---


def test_null_content_and_tool_calls():
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with StubServer(lambda body, number: chat(None, finish="tool_calls", tool_calls=calls)) as server:
        answer, _ = one(server, ask(tools=[{}]))
    assert answer.message == {"role": "assistant", "content": "", "tool_calls": calls}
    assert answer.finish_reason == "tool_calls" and answer.error is None and answer.tries == 1


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning(name):
    with StubServer(lambda body, number: chat("4", **{name: "2+2"})) as server:
        answer, _ = one(server)
    assert answer.message == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}


@pytest.mark.parametrize("top", [
    {"prompt_token_ids": [10, 11], "choice": {"token_ids": [12, 2]}},
    {"choice": {"prompt_token_ids": [10, 11], "response_token_ids": [12, 2], "matched_stop": 2}},
    {"choice": {"prompt_token_ids": [10, 11], "response_token_ids": [12], "matched_stop": 2}},
    {"__verbose": {"tokens": [12, 2], "prompt": "t0 t1", "tokens_evaluated": 2}},
], ids=["vllm", "sglang", "sglang trimmed", "llama.cpp"])  # fmt: skip
def test_token_ids(top):
    with StubServer(lambda body, number: chat(top=top)) as server:
        answer, stats = one(server)
    assert (answer.prompt_ids, answer.token_ids, stats["prompt_mismatches"]) == ([10, 11], [12, 2], 0)


def test_another_rendering_is_counted_noted_once_and_kept(capsys):
    with StubServer(
        lambda body, number: chat(top={"prompt_token_ids": [99, 10, 11], "choice": {"token_ids": [2]}})
    ) as server:
        backend = open_backend(server.url)
        found = answers(backend, [ask() for _ in range(5)])
        stats = backend.stats()
        backend.close()
    assert [a.prompt_ids for a in found] == [[99, 10, 11]] * 5 and stats["prompt_mismatches"] == 5
    assert capsys.readouterr().err.count("renders prompts otherwise") == 1


def test_another_rendering_shows_in_the_count_of_tokens():
    with StubServer(lambda body, number: chat(usage=7)) as server:
        answer, stats = one(server)
    assert answer.prompt_ids is None and stats["prompt_mismatches"] == 1 and stats["prompt_tokens"] == 7


def test_text_that_no_parser_took_out(capsys):
    with StubServer(lambda body, number: chat('think</think><tool_call>{"name": "f"}</tool_call>')) as server:
        _, stats = one(server, ask(tools=[{}]))
    assert (stats["unparsed_tool_calls"], stats["unparsed_reasoning"]) == (1, 1)
    said = capsys.readouterr().err
    assert "--tool-call-parser" in said and "--reasoning-parser" in said


@pytest.mark.parametrize(("reply", "said"), [
    ((200, "<html>"), "not JSON: <html>"), ((200, {"choices": []}), "not a completion"), (chat(finish="abort"), "finish_reason abort"),
])  # fmt: skip
def test_an_answer_that_is_none_is_tried_again_then_failed(reply, said):
    with StubServer(lambda body, number: reply) as server:
        answer, stats = one(server, max_retries=1)
    assert said in answer.error and answer.tries == 2 and stats["retries"] == {"bad_answer": 1} and stats["failed"] == 1


# --- failures ---


def test_a_500_once_and_a_500_always():
    def script(body, number):
        name = body["messages"][0]["content"]
        seen[name] += 1
        return (500, "boom") if name == "p5" or (name == "p4" and seen[name] == 1) else chat(name)

    seen: Counter[str] = Counter()
    with StubServer(script) as server:
        backend = open_backend(server.url, max_retries=3)
        found = answers(backend, [ask(messages=[{"role": "user", "content": f"p{i}"}]) for i in range(6)])
        stats = backend.stats()
        backend.close()
    assert [a.message.get("content") for a in found] == ["p0", "p1", "p2", "p3", "p4", None]
    assert [a.tries for a in found] == [1, 1, 1, 1, 2, 4]
    assert "HTTP 500: boom" in found[5].error and server.url in found[5].error and found[5].status == 500
    assert (
        stats["retries"] == {"500": 4}
        and stats["requests"] == 6
        and stats["failed"] == 1
        and stats["mean_latency_seconds"] > 0
    )


@pytest.mark.parametrize("status", [400, 404, 413])
def test_a_4xx_is_not_tried_again(status):
    with StubServer(lambda body, number: (status, {"error": {"message": "prompt too long"}})) as server:
        answer, _ = one(server)
    assert (
        f"HTTP {status}" in answer.error
        and "prompt too long" in answer.error
        and answer.tries == 1
        and len(server.posts) == 1
    )


def test_429_waits_as_long_as_the_server_says():
    with StubServer(lambda body, number: (429, "busy", {"Retry-After": "0.4"}) if number == 1 else chat()) as server:
        started = time.monotonic()
        answer, stats = one(server)
    assert time.monotonic() - started >= 0.4
    assert answer.tries == 2 and stats["retries"] == {"429": 1}


def test_429_with_another_server_does_not_wait():
    with StubServer(lambda body, number: (429, "busy", {"Retry-After": "30"})) as busy, StubServer(delay=0.05) as other:
        backend = open_backend(busy.url, other.url, concurrency=4)
        started = time.monotonic()
        found = answers(backend, [ask() for _ in range(8)])
        backend.close()
    assert time.monotonic() - started < 5 and all(a.error is None for a in found) and 1 <= len(busy.posts) <= 4


def test_timeout():
    with StubServer(delay=5) as server:
        answer, stats = one(server, timeout_seconds=0.1, max_retries=1)
    assert "no answer in 0.1 seconds" in answer.error and answer.tries == 2 and stats["retries"] == {"timeout": 1}


def test_a_server_that_dies_is_left_alone_and_found_again():
    with StubServer() as stays, StubServer() as dies:
        backend = open_backend(dies.url, stays.url)
        dies.die()
        found = answers(backend, [ask() for _ in range(20)])
        stats = backend.stats()
        assert all(a.error is None for a in found) and len(stays.posts) == 20
        assert 1 <= stats["retries"]["connection"] <= 20
        found = answers(backend, [ask() for _ in range(20)])  # now one at most is tried there
        assert backend.stats()["retries"]["connection"] <= stats["retries"]["connection"] + 4
        backend.close()


def test_no_server_left():
    with StubServer() as server:
        backend = open_backend(server.url, max_retries=2)
        server.die()
        answer = answers(backend, [ask()])[0]
        backend.close()
    assert "connection failed" in answer.error and answer.tries == 3


def test_an_unknown_field_is_left_out_from_then_on(capsys):
    def script(body, number):
        unknown = [name for name in ("return_token_ids", "min_p", "top_k") if name in body]
        return (422, {"detail": f"Unexpected fields in the request: {set(unknown)}"}) if unknown else chat()

    with StubServer(script) as server:
        backend = open_backend(server.url, concurrency=1)
        found = answers(backend, [ask(), ask()])
        asked = len(server.posts)
        kept = answers(backend, [ask(temperature=1.0, top_k=20)])[0]
        stats = backend.stats()
        backend.close()
    assert [a.error for a in found] == [None, None] and asked == 3
    assert stats["dropped_fields"] == ["min_p", "return_token_ids", "top_k"]
    assert "HTTP 422" in kept.error and "top_k" in kept.error, "what changes the answer is never left out"
    assert capsys.readouterr().err.count("does not know") == 1


# --- several servers, many requests ---


def test_requests_go_to_the_least_busy_server():
    with StubServer(delay=0.3) as slow, StubServer(delay=0.02) as fast:
        backend = open_backend(slow.url, fast.url, concurrency=4)
        assert backend.capacity == 8
        answers(backend, [ask() for _ in range(60)])
        stats = backend.stats()["servers"]
        backend.close()
    assert stats[slow.url]["answered"] + stats[fast.url]["answered"] == 60
    assert stats[fast.url]["answered"] > 2 * stats[slow.url]["answered"]
    assert slow.most <= 4 and fast.most <= 4


def test_equal_servers_share_equally():
    with StubServer(delay=0.05) as a, StubServer(delay=0.05) as b:
        backend = open_backend(a.url, b.url, concurrency=8)
        answers(backend, [ask() for _ in range(16)])
        backend.close()
    assert len(a.posts) == len(b.posts) == 8


def test_512_at_once():
    with StubServer(delay=1.0) as server:
        backend = open_backend(server.url, concurrency=512)
        started = time.monotonic()
        found = answers(backend, [ask(messages=[{"role": "user", "content": str(i)}]) for i in range(512)])
        seconds = time.monotonic() - started
        backend.close()
    assert all(a.error is None and a.tries == 1 for a in found)
    assert server.most > 256 and seconds < 20


@pytest.mark.parametrize("requests", [1, 300])
def test_close_does_not_wait_for_answers(requests):
    with StubServer(delay=60) as server:
        backend = open_backend(server.url, concurrency=300)
        for key in range(requests):
            backend.submit(key, ask())
        until(lambda: len(server.posts) == requests)
        started = time.monotonic()
        backend.close()
        assert time.monotonic() - started < 1
        backend.close()  # twice does no harm
        assert not backend.thread.is_alive()


def test_a_mistake_of_ours_is_raised_in_collect(monkeypatch):
    monkeypatch.setattr(openai, "chat_body", lambda *args: 1 / 0)
    with StubServer() as server:
        backend = open_backend(server.url)
        with pytest.raises(ZeroDivisionError):
            answers(backend, [ask()])
        backend.close()


# --- the start ---


def refused(*urls, **knobs) -> str:
    with pytest.raises(ValueError) as error:
        open_backend(*urls, **knobs)
    return str(error.value)


def test_no_url():
    assert "serve_target.py" in refused()


@pytest.mark.parametrize("url", [
    "localhost:8000/v1", "ftp://x/v1", "http:///v1", "http://me:secret@x:99999/v1", "http://me:secret@[::1/v1",
    "htps://me:secret@x/v1", "me:secret@x/v1",
])  # fmt: skip
def test_no_proper_url(url, tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps({"regenerate": {"base_urls": [url]}}))
    with pytest.raises(ValueError, match="regenerate.base_urls.*http://localhost:8000/v1") as error:
        load_recipe(str(tmp_path / "r.yaml"))
    assert "secret" not in str(error.value).partition("base_urls")[2]


@pytest.mark.parametrize("url", [{"a": 1}, []])
def test_a_url_that_is_no_text(url, tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps({"regenerate": {"base_urls": [url]}}))
    with pytest.raises(ValueError, match="regenerate.base_urls.*expected list of str"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_nobody_answers():
    said = refused(f"http://127.0.0.1:{free_port()}/v1")
    assert "does not answer" in said and "serve_target.py" in said


def test_another_page_answers():
    with StubServer() as server:
        assert "HTTP 404" in refused(server.url.removesuffix("/v1"))


def test_still_loading():
    with StubServer(models=(503, {"error": "Loading model"})) as server:
        said = refused(server.url)
    assert "HTTP 503" in said and "Loading model" in said and "ready" in said


def models(*names: str, **more) -> tuple:
    return 200, {"data": [{"id": name, "owned_by": "vllm", **more} for name in names]}


def test_servers_of_different_models():
    with StubServer(models=models("a")) as first, StubServer(models=models("b")) as second:
        said = refused(first.url, second.url)
    assert f"{first.url}: a; {second.url}: b" in said


def test_a_model_that_is_not_served():
    with StubServer(models=models("a", "b")) as server:
        assert "a, b" in refused(server.url, model="c")
        assert "regenerate.model" in refused(server.url)
        backend = open_backend(server.url, model="b")
        answers(backend, [ask()])
        backend.close()
    assert server.posts[0][2]["model"] == "b"


def test_a_server_with_too_short_a_context():
    with StubServer(models=models("a", max_model_len=1000)) as server:
        said = refused(server.url, max_length=2000)
    assert "holds 1000 tokens" in said and "--max-model-len 2000" in said


# --- the key ---


def test_the_key_is_sent_and_never_shown(monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    with StubServer(lambda body, number: (400, "bad key sk-secret-123")) as server:
        backend = open_backend(server.url, api_key_env="MY_KEY")
        answer = answers(backend, [ask()])[0]
        shown = json.dumps([backend.stats(), answer.error, *capsys.readouterr()])
        backend.close()
    assert server.posts[0][1]["Authorization"] == "Bearer sk-secret-123"
    assert "secret" not in shown and "bad key ***" in answer.error


def test_a_missing_key(monkeypatch):
    with StubServer(models=(401, "no")) as server:
        assert "OPENAI_API_KEY is not set" in refused(server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
        said = refused(server.url)
    assert "OPENAI_API_KEY" in said and "sk-wrong" not in said


def test_a_password_in_the_url_is_not_shown():
    said = refused(f"http://me:secret@127.0.0.1:{free_port()}/v1")
    assert "does not answer" in said and "secret" not in said

    with pytest.raises(ValueError, match="names a server twice") as error:
        open_backend(*["http://me:secret@127.0.0.1:1/v1"] * 2)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["secret\nmore", "secret\x01", "secreté"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    said = refused("http://127.0.0.1:1/v1")
    assert "OPENAI_API_KEY" in said and "secret" not in said


# --- answers of another shape ---


@pytest.mark.parametrize("reply", [
    chat([{"type": "text", "text": "a"}]), chat(3), chat({"a": 1}), chat(finish=["stop"]), chat(finish={}), chat(reasoning_content={"a": 1}),
    chat(tool_calls="x"), chat(tool_calls=[None]), chat(tool_calls=[{}]), chat(tool_calls=[{"function": {"name": None}}]),
    chat(top={"choice": {"token_ids": "abc"}}), chat(top={"choice": {"token_ids": ["1"]}}), chat(top={"choice": {"token_ids": [-1]}}),
    chat(top={"prompt_token_ids": {"a": 1}}), (200, "[" * 100_000), (200, {"choices": {"0": 1}}), (200, {"choices": [None]}),
    (200, '{"choices": [{"message": {"content": "a\\ud800"}, "finish_reason": "stop"}]}'),
])  # fmt: skip
def test_an_answer_of_another_shape_fails_alone(reply):
    with StubServer(lambda body, number: reply if body["messages"][0]["content"] == "bad" else chat()) as server:
        backend = open_backend(server.url, max_retries=0)
        bad, good = answers(backend, [ask(messages=[{"role": "user", "content": "bad"}]), ask()])
        backend.close()
    assert bad.error and bad.status == 200 and good.error is None


@pytest.mark.parametrize("more", [
    {"usage": [1]}, {"usage": "x"}, {"usage": {"prompt_tokens": "3", "completion_tokens": -1}}, {"__verbose": None}, {"__verbose": {"prompt": 3}},
])  # fmt: skip
def test_counts_of_another_shape_are_counts_not_given(more):
    with StubServer(lambda body, number: chat("hello", top=more)) as server:
        answer, stats = one(server)
    assert (
        answer.message["content"] == "hello" and answer.completion_tokens in (None, 3) and stats["prompt_tokens"] == 0
    )


@pytest.mark.parametrize("card", [{"max_model_len": "x"}, {"meta": [1]}, {"owned_by": ["x"]}, {"owned_by": 7}])
def test_a_model_card_of_another_shape_says_nothing(card):
    with StubServer(models=(200, {"data": [{"id": "target", **card}]})) as server:
        assert one(server)[0].error is None
