"""What hand-written entries have in common: their keys, the nearest known name, numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any


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


def finite(value: Any) -> float | None:
    """The number that a value of a recipe is, None for one that is none or not finite."""
    if isinstance(value, str):  # YAML 1.1 reads 1e-1 as a string
        try:
            value = float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
