"""Write docs/configuration.md from the schema, the metrics in docs/dashboards.md and the engines in docs/serving.md:
python scripts/write_docs.py [--check]."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from dflash_train.card import launch_sections
from dflash_train.check import MISREAD, NOTE, REFUSE, RULES
from dflash_train.config.load import default_text, knobs, type_name
from dflash_train.engines import ENGINES, FLAGS, Serving, fill
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


def between(page: str, mark: str, lines: list[str]) -> str:
    """A page with what stands between `<!-- mark -->` and `<!-- end of mark -->` replaced."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


def dashboards() -> str:
    """docs/dashboards.md with its table of metrics made anew."""
    texts = {**{f"train/{name}": text for name, text in TABLE.items()}, **LOGGED}
    lines = ["| metric | what it is |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in texts.items())]
    return between((DOCS / "dashboards.md").read_text(), "metrics", lines)


def serving() -> str:
    """docs/serving.md with its launch lines and rules made anew, for the drafter of Qwen3.8-27B's shape."""
    s = Serving(block=8, sliding=True, bidirectional=True, two=True, target="TARGET", draft="USER/DRAFTER")
    head = "| engine | supported from | rules of | how they were found | drafts | in fewer bits |"
    engines = [head, "|---|---|---|---|---|---|"]
    engines += [
        f"| {e.name} | {e.floor} | {e.version} | {e.how} | {fill(e.draft, s)} | {e.quantised} |" for e in ENGINES
    ]
    hybrid = replace(s, family="qwen3_5")
    launch = [
        f"#{line}" if line.startswith("### ") else line for text in launch_sections(hybrid) for line in text.split("\n")
    ]
    rules = ["| rule | engines | what happens | message | source |", "|---|---|---|---|---|"]
    what = {REFUSE: "refused", MISREAD: "silently misread", NOTE: "note"}
    rules += [
        f"| {r.name} | {r.engines} | {what[r.severity]} | {r.message.replace('|', chr(92) + '|').replace('{}', '…')} | {r.source} |"
        for r in RULES
    ]
    flags = ["| flag | engine | | message | source |", "|---|---|---|---|---|"]
    flags += [
        f"| {f.name} | {f.engine} | {'fault' if f.fatal else 'note'} | {fill(f.message, s).replace('{}', '…')} | {f.source} |"
        for f in FLAGS
    ]
    page = between((DOCS / "serving.md").read_text(), "engines", engines)
    return between(between(between(page, "launch", launch), "rules", rules), "flags", flags)


def main() -> int:
    code = 0
    for name, text in (
        ("configuration.md", configuration()),
        ("dashboards.md", dashboards()),
        ("serving.md", serving()),
    ):
        path = DOCS / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            print(f"docs/{name} is out of date: python scripts/write_docs.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
