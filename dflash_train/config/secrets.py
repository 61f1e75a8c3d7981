"""Keys, tokens and passwords: out of whatever is written, logged or sent. They belong in environment variables that a recipe only names."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
# Tokens of a vocabulary (`bos_token`) are none.
_SECRET = r"(?:(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token|api_?key|secret|password|passwd|authorization|credentials)"
_SECRET_KEY = re.compile(rf"(?:.*[_\-.])?{_SECRET}s?", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r".*(?:KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH).*", re.IGNORECASE)
_TEXTS = (
    (re.compile(rf"({_SECRET}['\"]?\s*[=:]\s*['\"]?(?:bearer\s+)?)[^\s,'\"}}]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(r"(--(?:[\w-]+-)?(?:api-key|token|secret|password)[=\s]\s*['\"]?)[^\s'\"]+", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(bearer\s+)[^\s,'\"}]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(://)[^/@\s]+@"), rf"\1{HIDDEN}@"),
)
# What keys of well-known services look like.
_KEYS = re.compile(r"\b(?:hf_|sk-|wandb_v1_|ghp_|github_pat_)[\w-]{16,}")


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of that name holds what must not be written down."""
    return _SECRET_VARIABLE.fullmatch(name) is not None


def scrubbed(value: Any) -> Any:
    """The same without secrets: texts under a key that names one, values of environment variables that hold one, users in URLs, and what
    looks like a key. Numbers stay: `max_new_tokens` is no secret."""
    return _scrubbed(value, _held())


def without_keys(text: str) -> str:
    """A message without what is known to be a secret: values of environment variables that hold one, users in URLs, keys of well-known
    services."""
    return _known_gone(re.sub(*_TEXTS[-1], text), _held())


def _held() -> list[str]:
    """Values of secret environment variables, the longest first. Short ones would hide words."""
    held = {value for name, value in os.environ.items() if is_secret_variable(name) and len(value) >= 8}
    return sorted((v for v in held if not v.startswith(("/", "~"))), key=len, reverse=True)


def _known_gone(text: str, held: list[str]) -> str:
    for secret in held:
        text = text.replace(secret, HIDDEN)
    return _KEYS.sub(HIDDEN, text)


def _scrubbed(value: Any, held: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            _scrubbed(key, held): HIDDEN
            if isinstance(inner, str) and inner and _SECRET_KEY.fullmatch(str(key))
            else _scrubbed(inner, held)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_scrubbed(inner, held) for inner in value]
    if not isinstance(value, str):
        return value
    value = _known_gone(value, held)
    for pattern, replacement in _TEXTS:
        value = pattern.sub(replacement, value)
    return value
