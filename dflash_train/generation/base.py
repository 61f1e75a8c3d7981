"""What regeneration asks of whatever runs the target: answers to single requests, many in flight, in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(kw_only=True)
class Request:
    """One answer to generate.

    `messages` with `tools` and `chat_template_kwargs` are what a server renders itself; `prompt_ids` is our rendering of the same, with the
    generation prompt. At most `max_new_tokens` are generated. temperature 0 is greedy; top_k 0 is all. `seed` decides the sample.
    ignore_eos: stop tokens do not end it (where it is decoded in this process).
    """

    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Answer:
    """What the target said, or why it could not be asked.

    message: the assistant message, with `content` and, where a server tells them apart, `reasoning_content` and `tool_calls`.
    prompt_ids and token_ids (with the stop token): what the target really read and wrote, where the backend knows. completion_tokens: how many
    it wrote, for a backend that knows no more than that. finish_reason: "stop", "tool_calls" or "length". error is set, and the rest empty, for
    a request that failed after `tries` attempts; status: the HTTP status of the last one, if there was one.
    """

    message: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    completion_tokens: int | None = None
    finish_reason: str = "stop"
    error: str | None = None
    status: int | None = None
    tries: int = 1


class Decoded(NamedTuple):
    """token_ids of an answer, its stop token included; finish_reason "stop" or "length"; rounds: tokens gained by each verification, where
    it was decoded speculatively, and how many of them were accepted drafts."""

    token_ids: list[int]
    finish_reason: str
    rounds: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class Backend(Protocol):
    """Runs requests. The caller keeps at most `capacity` in flight, names each by an integer key and closes the backend at the end."""

    capacity: int

    def submit(self, key: int, request: Request) -> None:
        """Accept a request; returns at once."""

    def collect(self) -> list[tuple[int, Answer]]:
        """Wait until at least one request is answered and return all that are. Called only with requests in flight."""

    def stats(self) -> dict[str, Any]:
        """Figures for the manifest, such as the GPU's idle share; may be empty."""

    def close(self) -> None:
        """Drop what is in flight and free what is held; also called after a failure and after Ctrl-C."""
