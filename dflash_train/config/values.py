"""What hand-written entries have in common: their keys, the nearest known name, numbers."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

# Characters that command a terminal, or turn the direction of writing, and halves of characters, which nothing prints.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

MOST_IN_FLIGHT = 2**16  # a client has no more ports towards one server

# What transformers' apply_chat_template takes itself: among the arguments of a template these would replace the template, or what is
# asked of it.
RESERVED = frozenset((
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "processor_kwargs",
))  # fmt: skip


def printable(text: str) -> str:
    """Text that comes from data or a server, for a terminal: what would command it is shown as its number."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def nearest(word: str, words: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the closest of the words, or nothing."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keys(entry: Iterable[Any], known: Sequence[str], where: str) -> None:
    """Raise ValueError for a key that is not known, with the nearest that is."""
    for key in entry:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {str(key)!r}{nearest(str(key), known) or '; known: ' + ', '.join(known)}"
            )


def parse_json(text: str | bytes) -> Any:
    """`json.loads` that says of everything it cannot read that it is a ValueError, of what is nested without end too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def whole_numbers(words: Iterable[str]) -> list[int]:
    """Requests in flight, rising, of the words of an option: `1 8 32` or `1,8,32`. Raises ValueError."""
    text = " ".join(words)
    try:
        found = sorted({int(part) for part in text.replace(",", " ").split()})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > MOST_IN_FLIGHT:
        raise ValueError(f"{text}: must be whole numbers from 1 to {MOST_IN_FLIGHT:,}, as in 1 8 32 or 1,8,32")
    return found


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Raise ValueError for a number of the command line outside [least, most], as for one that is no number."""
    if not least <= value <= most:
        raise ValueError(f"{option} {value}: must be in [{least:,}, {most:,}]")


def require_packages(what: str, names: Iterable[str], remedy: str) -> None:
    """Raise ValueError, with the remedy, where an optional package is not installed here."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}, which is not installed here: {remedy}")


def server_root(url: str) -> str:
    """Address of an OpenAI-compatible server without the /v1 that clients are often given with it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from YAML or JSON is of a type as annotations write it. A whole number is a float, a truth is no number."""
    if kind is Any:
        return True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def finite(value: Any) -> float | None:
    """The number that a value of a recipe is, None for one that is none or not finite."""
    if isinstance(value, str):  # YAML 1.1 reads 1e-1 as a string
        try:
            value = float(value)
        except ValueError:
            return None
    try:
        return (
            value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
        )
    except OverflowError:  # a whole number of hundreds of digits
        return None


def without_login(url: str) -> str:
    """An address, or what should be one, without user and password: fit for a log."""
    return re.sub(r"^([\w+.-]*:/+)?.*@", r"\1", url, flags=re.DOTALL)


@functools.cache
def trusted(path: str, trust_remote_code: bool) -> bool:
    """The same truth, said aloud once where code of a target may run here: in its config, its tokenizer or its model."""
    if trust_remote_code:
        print(f"target.trust_remote_code: running Python code that comes with {path}", flush=True)
    return trust_remote_code


def is_address(url: Any) -> bool:
    """Whether a value is an http address: scheme, host, and a port that exists if one is given."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
