"""Write docs/configuration.md from the schema, and the metrics in docs/dashboards.md: python scripts/write_docs.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_train.config.load import default_text, knobs, type_name
from dflash_train.metrics import LOGGED, TABLE

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
    lines += ["", "## Metrics", "", "[dashboards.md](dashboards.md) says what is logged."]
    return "\n".join(lines) + "\n"


def dashboards() -> str:
    """docs/dashboards.md with its table of metrics made anew."""
    begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->"
    before, _, rest = (DOCS / "dashboards.md").read_text().partition(begin)
    texts = {**{f"train/{name}": text for name, text in TABLE.items()}, **LOGGED}
    lines = ["| metric | what it is |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in texts.items())]
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


def main() -> int:
    code = 0
    for name, text in (("configuration.md", configuration()), ("dashboards.md", dashboards())):
        path = DOCS / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            print(f"docs/{name} is out of date: python scripts/write_docs.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
