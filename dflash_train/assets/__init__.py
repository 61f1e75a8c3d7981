"""Files that come with the package, and what models are called."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from dflash_train.config.values import printable

ASSETS = Path(__file__).parent
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
    place = ASSETS / EMBEDDED[kind]
    if not place.exists():
        raise ValueError(f"the package has no embedded {kind} ({place} is missing); reinstall it or give a path")
    return str(place)


def public_name(path: str) -> str:
    """A hub id as it is; of a local folder only its name, because cards and records are published."""
    local = Path(path)
    return Path(os.path.realpath(path)).name if local.is_dir() or local.is_absolute() or path.startswith(".") else path


# The browser itself refuses whatever would come from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(title: str, body: str, *, styles: tuple[str, ...], script: str, attributes: str = "") -> str:
    """A self-contained page around `body` (escaped already); styles and script: files of this folder. Marks that turn the direction of
    writing are shown as their numbers: a page must not read otherwise than its text is."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<title>{printable(escape(title))}</title>
<style>
{"".join(_text(name) for name in styles)}</style>
</head>
<body{attributes}>
{printable(body)}
<script>
{_text(script)}</script>
</body>
</html>
"""


def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
