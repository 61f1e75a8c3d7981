"""The page of an inspection: everything from the data is text, nothing comes from elsewhere, and it fits a phone."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
import toys

from dflash_train.assets import resolve
from dflash_train.data.inspection import chosen, look, pieces
from dflash_train.data.inspection_page import inspection_page

VOID = {"meta", "input", "br", "hr", "img", "link"}
EVIL = "<script>alert('x')</script><img src=http://evil.example/a.png> & \"q\" </style>"
ROWS = [
    {"id": f"{EVIL}", "domain": "<b>odd</b>", "generator": {"model": "<i>other</i>"},
     "chat_template_kwargs": {"<u>": True}, "messages": [
        {"role": "user", "content": f"Say {EVIL}"}, {"role": "assistant", "content": f"{EVIL}\n\n\té 日本 👩‍👩‍👧 done"}]},
    *({"id": f"r{i}", "domain": "plain", "messages": [
        {"role": "user", "content": f"How much is {i} and {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}. " * (1 + i % 7)}]} for i in range(30)),
    {"id": "gone", "messages": []},
]  # fmt: skip


class Seen(HTMLParser):
    """Elements with attributes, the text outside of scripts and styles, and what is not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.faults = "", []
        self.feed(html)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def named(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and set(kind.split()) <= set((a.get("class") or "").split())]


def arguments(folder: Path, rows=ROWS) -> list[str]:
    return ["--tokenizer", "embedded", "--data", str(toys.write_jsonl(folder / "rows.jsonl", rows)),
            "data.max_length=256", "drafter.block_size=8", "drafter.mask_token_id=4080"]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page's file, made by the command."""
    folder = tmp_path_factory.mktemp("page")
    path = folder / "made" / "page.html"
    done = toys.call(toys.script("inspect_data").main, *arguments(folder), "--html", path, "--samples", "2")
    assert done.code == 0, done.err
    assert f"page: {path}" in done.out
    return path


@pytest.fixture(scope="module")
def seen(made):
    return Seen(made.read_text(encoding="utf-8"))


def test_it_is_balanced_and_what_the_data_say_is_text(seen):
    assert not seen.faults
    assert len(seen.named("script")) == 1 and len(seen.named("style")) == 1 and not seen.named("img")
    assert not [tag for tag, _ in seen.elements if tag in ("u", "iframe", "object", "link")]
    assert seen.text.count(EVIL) >= 2, "as the row's id and in its text"
    assert "<b>odd</b>" in seen.text and "<i>other</i>" in seen.text and '{"<u>": true}' in seen.text
    assert "no_messages" in seen.text and "rows.jsonl:32" in seen.text


def test_nothing_comes_from_elsewhere(made, seen):
    for tag, attributes in seen.elements:
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    (policy,) = [a["content"] for a in seen.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    style = made.read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style


def test_tokens_are_drawn_as_training_sees_them(made, seen):
    recipe = toys.script("inspect_data").recipe_of(toys.script("inspect_data").arguments(arguments(made.parents[1])))
    found = look(recipe)
    shown = chosen(found, 2)
    assert [e.domain for e in shown] == ["<b>odd</b>", "plain"], "one of each domain first"
    drawn = [a for a in seen.named("span", "t") if "data-p" in a]
    for kind, expected in (("s", True), ("u", False)):
        marked = sum(bool(e.supervised[p.begin]) is expected for e in shown for p in split(e, found.tokenizer))
        assert len([a for a in drawn if kind in a["class"].split()]) == marked
    first = shown[0].token_ids.tolist()
    assert any(a["title"].startswith(f"position 3 · id {first[3]} ") for a in drawn)
    blocks = seen.named("p", "block")
    assert len(blocks) == 2 * 6 and all(a["data-k"] == "8" for a in blocks)
    assert all(shown[0].supervised[int(a["data-a"])] for a in blocks[:6])
    assert len(seen.named("span", "slot h")) == 2 * 6 + 1, "an anchor in each block, and the legend"
    assert len(seen.named("span", "slot")) == 2 * 6 * 8 + 3
    assert inspection_page(found, shown) == made.read_text(encoding="utf-8")


def split(example, tokenizer):
    breaks = {i for i in range(1, len(example.supervised)) if example.supervised[i] != example.supervised[i - 1]}
    return list(pieces(example.token_ids.tolist(), breaks, tokenizer))


@pytest.mark.parametrize("path", ["embedded", "toy"])
def test_the_pieces_make_up_the_text(path):
    from transformers import AutoTokenizer

    tokenizer = toys.toy_tokenizer() if path == "toy" else AutoTokenizer.from_pretrained(resolve("embedded", "target"))
    text = "w20 w21 <eos> w30" if path == "toy" else "naïve 日本 👩‍👩‍👧 x\n\n  y<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = list(pieces(ids, {1}, tokenizer))
    assert "".join(piece.text for piece in found) == tokenizer.decode(ids)
    assert [i for piece in found for i in range(piece.begin, piece.end)] == list(range(len(ids)))
    assert max(piece.end - piece.begin for piece in found) == (1 if path == "toy" else 4), "a character of four tokens"


def test_data_without_a_usable_row_still_has_a_page(tmp_path):
    path = tmp_path / "page.html"
    done = toys.call(toys.script("inspect_data").main, *arguments(tmp_path, ROWS[-1:]), "--html", path)
    assert done.code == 2 and "0 usable rows of 1" in done.err
    page = Seen(path.read_text())
    assert not page.faults and "0 usable rows of 1" in page.text and not page.named("svg")


def test_rows_are_chosen_by_id(tmp_path):
    done = toys.call(toys.script("inspect_data").main, *arguments(tmp_path), "--ids", "r3,r5")
    assert done.code == 0 and [line for line in done.out.splitlines() if line.startswith("--- ")] == [
        "--- r3 (stop)",
        "--- r5 (stop)",
    ]
    done = toys.call(toys.script("inspect_data").main, *arguments(tmp_path), "--ids", "r3x")
    assert done.code == 2 and "--ids r3x: no example has this id; did you mean 'r3'?" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(made, width, dark, tmp_path):
    with browser.page() as page:
        page.open(made, width=width, dark=dark)
        assert page.overflow() == []
        boxes = page.evaluate(
            "[...document.querySelectorAll('svg, #legend')].map((e) => e.getBoundingClientRect().width)"
        )
        assert len(boxes) == 3 and all(200 < box <= width for box in boxes)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(background.replace("rgb(", "[").replace(")", "]"))) < 384) is dark
        # Pointing at a block marks what it drafts and says what it is; a toggle takes the blocks away.
        page.evaluate("document.querySelector('.block').dispatchEvent(new Event('pointerover', {bubbles: true}))")
        assert page.evaluate("document.querySelectorAll('.t.on').length") in range(1, 9)
        page.evaluate("document.querySelector('.sample .t').click()")
        assert page.evaluate("document.getElementById('info').textContent").startswith("position 0 · id ")
        page.evaluate("document.getElementById('drawn').click()")
        assert page.evaluate("getComputedStyle(document.querySelector('.blocks')).display") == "none"
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
        assert page.complaints == []
