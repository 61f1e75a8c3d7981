"""The entries of `data.train`: a path or name, or {path, weight, domain}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_train.config.values import check_keys, finite

MOST_PASSES = 1000


@dataclass(kw_only=True, frozen=True)
class Source:
    """Rows of one file, folder or data set.

    weight: passes over its documents per epoch; domain: tag for all its rows, None where each row has its own.
    """

    path: str
    weight: float = 1.0
    domain: str | None = None


def read_sources(entries: list[Any], name: str = "data.train") -> list[Source]:
    """The entries of a recipe as Sources. Raises ValueError naming the entry, the rule and the remedy."""
    return [_source(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]


def _source(entry: Any, where: str) -> Source:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise ValueError(f"{where} = {entry}: an entry is a path or {{path, weight, domain}}")
    check_keys(entry, list(Source.__dataclass_fields__), where)
    path, weight, domain = entry.get("path"), entry.get("weight", 1.0), entry.get("domain")
    if not isinstance(path, str) or not path.strip():
        raise ValueError(f"{where}.path = {path!r}: must name a file, a folder or a Hub data set")
    if domain is not None and (not isinstance(domain, str) or not domain):
        raise ValueError(f"{where}.domain = {domain!r}: must be a word, or left out to keep the rows' own")
    return Source(path=path, weight=_weight(weight, where), domain=domain)


def _weight(value: Any, where: str) -> float:
    rule = f"{where}.weight = {value!r}: passes over the rows per epoch, a number above 0 and at most {MOST_PASSES}"
    weight = finite(value)
    if weight is None:
        raise ValueError(rule)
    if not 0 < weight <= MOST_PASSES:
        raise ValueError(rule + "; leave the entry out to use none of them")
    return float(weight)
