"""Files that come with the package."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = {"target": "tiny_target", "prompts": "demo/prompts.jsonl", "heldout": "demo/heldout.jsonl"}


def resolve(path: str, kind: str) -> str:
    """`path` itself, or for "embedded" where the package keeps its `kind`: target, prompts or heldout.

    Raises ValueError when the package lacks that file.
    """
    if path != "embedded":
        return path
    if kind not in EMBEDDED:
        raise ValueError(
            f"data.{kind}: the package has no embedded {kind} file; give a path (regenerate.output wrote one)"
        )
    place = Path(__file__).parent / EMBEDDED[kind]
    if not place.exists():
        raise ValueError(f"the package has no embedded {kind} ({place} is missing); reinstall it or give a path")
    return str(place)
