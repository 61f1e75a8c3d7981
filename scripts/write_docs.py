"""Write docs/configuration.md from the schema: python scripts/write_docs.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_train.config.load import default_text, knobs, type_name
from dflash_train.metrics import TABLE

DOCS = Path(__file__).resolve().parent.parent / "docs"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Made from `dflash_train/config/schema.py` by `python scripts/write_docs.py`. A recipe sets these in YAML; `key=value` on",
        "the command line changes one, `group=name` picks a file of `configs/group/`. Knobs marked * define which drafter this",
        "is: they are saved with every checkpoint and compared on resume.",
    ]
    section = None
    for name, field, kind in knobs():
        head = name.rsplit(".", 1)[0] if "." in name else "top level"
        if head != section:
            section = head
            lines += ["", f"## {head}", "", "| knob | type | default | meaning |", "|---|---|---|---|"]
        star = "*" if field.metadata["identity"] else ""
        cells = [f"`{name}`{star}", type_name(kind), default_text(field), field.metadata["help"]]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    lines += ["", "## Metrics", "", "In `metrics.jsonl`, under `train/`, pooled over ranks and micro-batches.", ""]
    lines += ["| metric | formula |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in TABLE.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    path = DOCS / "configuration.md"
    if "--check" in sys.argv[1:]:
        if path.read_text() != configuration():
            print("docs/configuration.md is out of date: python scripts/write_docs.py", file=sys.stderr)
            return 1
        return 0
    path.write_text(configuration())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
