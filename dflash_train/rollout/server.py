"""What a running server is and what it says: its engine and version, greedy answers, log-probabilities, and whether it drafts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import httpx

from dflash_train.benchmark import counters
from dflash_train.benchmark.run import KEY_ENV
from dflash_train.config.values import is_address, server_root, without_login
from dflash_train.rollout.pair import OURS

TOP = 10  # of each token, what a server is asked for; the engines allow 20 or more, llama.cpp any number
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "tensorrt_llm": "TensorRT-LLM", OURS: OURS}


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer. parts: content, reasoning and tool calls as they came, in one text; drafted, accepted: of this request, where the server says it."""

    parts: str
    finish_reason: str
    tokens: int
    drafted: int | None = None
    accepted: int | None = None
    logprobs: list[dict[str, Any]] | None = None


@dataclass(kw_only=True)
class Server:
    """An OpenAI-compatible server. flags: what it says of its own speculation."""

    url: str
    model: str
    engine: str
    version: str | None
    flags: dict[str, Any] = field(default_factory=dict)
    client: httpx.Client

    @property
    def shown(self) -> str:
        return without_login(self.url)

    @property
    def root(self) -> str:
        return server_root(self.url)

    @classmethod
    def open(cls, url: str, model: str | None = None, timeout: float = 600.0) -> Server:
        """Ask it what it is. Raises ValueError where it does not answer or serves several models and none is named."""
        if not is_address(url):
            raise ValueError(f"{without_login(url)}: is no address; give one such as http://localhost:8000")
        url = f"{server_root(url)}/v1"
        key = os.environ.get(KEY_ENV, "").strip()
        client = httpx.Client(timeout=timeout, headers={"Authorization": f"Bearer {key}"} if key else {})
        listed = _get(client, f"{url}/models")
        models = listed.get("data")
        if not isinstance(models, list) or not models or not all(isinstance(m, dict) for m in models):
            client.close()
            raise ValueError(
                f"{without_login(url)}: lists no models; give the address of a running server, as in http://localhost:8000"
            )
        names = [str(m.get("id")) for m in models]
        if model is None and len(names) > 1:
            raise ValueError(f"{without_login(url)} serves {', '.join(names[:5])}: say which with --model")
        if model is not None and model not in names:
            raise ValueError(f"{without_login(url)} serves {', '.join(names[:5])}, not {model}")
        card = models[0] if model is None else models[names.index(model)]
        owner = str(card.get("owned_by") or "")
        server = cls(
            url=url, model=model or names[0], engine=NAMES.get(owner, owner or "unknown"), version=None, client=client
        )
        version, server.flags = server._identity()
        server.version = version if isinstance(version, str) else None
        return server

    def _identity(self) -> tuple[str | None, dict[str, Any]]:
        if self.engine == "SGLang":
            info = _get(self.client, f"{self.root}/server_info") or _get(self.client, f"{self.root}/get_server_info")
            return info.get("version"), {
                k: v for k, v in info.items() if k.startswith("speculative_") and v is not None
            }
        if self.engine == "llama.cpp":
            props = _get(self.client, f"{self.root}/props")
            found = props.get("default_generation_settings")
            settings = (found.get("params") if isinstance(found, dict) else None) or {}
            return props.get("build_info"), {k: v for k, v in settings.items() if k.startswith("speculative")}
        found = _get(self.client, f"{self.root}/version")  # vLLM, TensorRT-LLM, our server
        return found.get("version"), {k: v for k, v in found.items() if k != "version"}

    def greedy(self, messages: list[dict[str, Any]], max_tokens: int, *, logprobs: bool = False) -> Said:
        """One greedy answer. Raises ValueError where the server does not give one."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "stream": False,
        }
        if self.engine == "llama.cpp":
            body["cache_prompt"] = False  # a cached prompt is computed in other batches, which rounds otherwise
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP}
        try:
            answer = self.client.post(f"{self.url}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise ValueError(
                f"{self.shown}: no answer ({type(error).__name__}: {error}); is the server still up?"
            ) from None
        if answer.status_code in (400, 422, 501) and logprobs:  # it knows no log-probabilities
            return self.greedy(messages, max_tokens)
        if answer.status_code != 200:
            raise ValueError(f"{self.shown}: answered {answer.status_code}: {answer.text[:300]}")
        try:
            return _said(answer.json())
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.shown}: its answer is no chat completion ({error!r}): {answer.text[:200]}"
            ) from None

    def drafts(self) -> tuple[float, float] | None:
        """(drafted, accepted) since it started, from its metrics; None where it does not count them."""
        for place in counters.PLACES:
            try:
                answer = self.client.get(self.root + place, timeout=10)
            except httpx.HTTPError:
                return None
            if answer.status_code == 200:
                found = counters.parse(answer.text).values
                spec = {match[2]: value for name, value in found.items() if (match := counters.SPEC.match(name))}
                if "accepted_tokens" in spec and "draft_tokens" in spec:
                    return spec["draft_tokens"], spec["accepted_tokens"]
        return None

    def close(self) -> None:
        self.client.close()


def _get(client: httpx.Client, url: str) -> dict[str, Any]:
    """The JSON object at an address, empty where there is none. Raises ValueError where nobody listens, or a key is missing."""
    try:
        answer = client.get(url, timeout=15)
    except httpx.ConnectError as error:
        raise ValueError(
            f"{without_login(url)}: nobody answers ({error}); start the server, or mend the address"
        ) from None
    except httpx.HTTPError:
        return {}
    if answer.status_code in (401, 403):
        raise ValueError(f"{without_login(url)} wants a key (HTTP {answer.status_code}); set {KEY_ENV}")
    try:
        found = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _said(data: dict[str, Any]) -> Said:
    choice = data["choices"][0]
    message = choice["message"]
    parts = {k: message.get(k) for k in ("reasoning_content", "reasoning", "content") if message.get(k)}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if calls:
        parts["tool_calls"] = json.dumps(calls, ensure_ascii=False)
    timings = data.get("timings") if isinstance(data.get("timings"), dict) else {}  # llama.cpp
    usage = data.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = (counters.count_in(details, f"{what}_prediction_tokens") for what in ("accepted", "rejected"))
    drafted = None if accepted is None or rejected is None else accepted + rejected
    if drafted is None:
        accepted, drafted = (counters.count_in(timings, name) for name in ("draft_n_accepted", "draft_n"))
    listed = (choice.get("logprobs") or {}).get("content")
    return Said(
        parts="".join(parts.values()),
        finish_reason=str(choice.get("finish_reason")),
        tokens=int(usage.get("completion_tokens") or 0),
        drafted=None if accepted is None else drafted,
        accepted=accepted,
        logprobs=listed if isinstance(listed, list) and listed else None,
    )
