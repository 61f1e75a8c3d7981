"""The entries of `data.train`: a path or name, or {path, weight, domain}."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

MOST_PASSES = 1000


@dataclass(kw_only=True, frozen=True)
class Source:
    """Rows of one file, folder or data set.

    weight: passes over its documents per epoch; domain: tag for all its rows, None where each row has its own.
    """

    path: str
    weight: float = 1.0
    domain: str | None = None


def nearest(word: str, words: list[str]) -> str:
    """`; did you mean 'x'?` for the closest of the words, or nothing."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_sources(entries: list[Any], name: str = "data.train") -> list[Source]:
    """The entries of a recipe as Sources. Raises ValueError naming the entry, the rule and the remedy."""
    return [_source(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]


def _source(entry: Any, where: str) -> Source:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise ValueError(f"{where} = {entry}: an entry is a path or {{path, weight, domain}}")
    known = list(Source.__dataclass_fields__)
    for key in entry:
        if key not in known:
            near = nearest(str(key), known) or f"; known: {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {str(key)!r}{near}")
    path, weight, domain = entry.get("path"), entry.get("weight", 1.0), entry.get("domain")
    if not isinstance(path, str) or not path.strip():
        raise ValueError(f"{where}.path = {path!r}: must name a file, a folder or a Hub data set")
    if domain is not None and (not isinstance(domain, str) or not domain):
        raise ValueError(f"{where}.domain = {domain!r}: must be a word, or left out to keep the rows' own")
    return Source(path=path, weight=_weight(weight, where), domain=domain)


def _weight(value: Any, where: str) -> float:
    rule = f"{where}.weight = {value!r}: passes over the rows per epoch, a number above 0 and at most {MOST_PASSES}"
    if isinstance(value, str):  # YAML 1.1 reads 5e-1 as a string
        try:
            value = float(value)
        except ValueError:
            raise ValueError(rule) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(rule)
    if not 0 < value <= MOST_PASSES:
        raise ValueError(rule + "; leave the entry out to use none of them")
    return float(value)
