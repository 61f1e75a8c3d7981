"""An Inspection as one HTML page that needs nothing else: no network, no second file, everything from the data escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from dflash_train.assets import html_page, public_name
from dflash_train.config.sources import Source
from dflash_train.data.blocks import anchor_order, build_blocks, legal_anchors
from dflash_train.data.inspection import Inspection, Piece, pieces, position_shares, shares_of_sources
from dflash_train.data.provenance import (
    Origin,
    expected_of,
    read_origins,
    same_model,
    same_template,
    sampling,
    thinking,
)
from dflash_train.types import DraftBlocks, TokenizedExample

DRAWN_BLOCKS, DRAWN_TOKENS, LISTED = 6, 4096, 40
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
THINKING_WORDS = {"on": "on", "off": "off", "-": "left to the template"}


def inspection_page(found: Inspection, shown: Sequence[TokenizedExample]) -> str:
    """The page, with the examples of `shown` drawn token by token."""
    names = [_source_name(source) for source in found.corpus.sources]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    title = f"What training sees of {', '.join(names[:3])}{more}"
    parts = [
        f'<h1 class="wrap">{escape(title)}</h1>',
        f'<p class="muted wrap">Tokenizer and template of {escape(public_name(found.recipe.target.path))}</p>',
        *(f'<div class="alert" role="alert"><pre>{escape(text)}</pre></div>' for text in found.problems),
        *(f'<div class="note"><pre>{escape(text)}</pre></div>' for text in found.notes if text.startswith("WARNING")),
        _tiles(found),
        _sources(found),
        _rows(found),
        _samples(found, shown),
        _shapes(found),
        _provenance(found),
        _made_of(found),
    ]
    body = "".join(part for part in parts if part)
    info = '<output id="info">Point at a token or a block.</output>'
    return html_page(
        title, f"<main>\n{body}</main>\n{info}", styles=("page.css", "inspection.css"), script="inspection.js"
    )


def _source_name(source: Source) -> str:
    return Path(source.path).name if Path(source.path).exists() else source.path


# --- figures ---


def _tiles(found: Inspection) -> str:
    counts, unset = found.counts(), "not set"
    clashes = counts["mask_token_occurrences"]
    tiles = [
        ("rows kept", f"{counts['kept']:,} of {counts['rows']:,}", counts["kept"] <= 0),
        ("documents", f"{counts['examples']:,}", False),
        ("tokens", f"{counts['tokens']:,}", False),
        ("supervised", f"{counts['ratio']:.1%}", counts["supervised"] in (0, counts["tokens"])),
        ("mask token in the data", unset if clashes is None else f"{clashes:,} times", bool(clashes)),
    ]
    if counts["packing"]:
        rows = counts["packing"]
        tiles += [("packed rows", f"{rows['rows']:,}", False), ("padding", f"{rows['padding']:.1%}", False)]
        tiles += [("blocks per epoch", f"{rows['blocks']:,}", False), ("legal anchors", f"{rows['anchors']:,}", False)]
    cells = (
        f'<div class="tile"><b class="{"bad" if bad else "good"}">{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value, bad in tiles
    )
    return f'<section class="tiles">{"".join(cells)}</section>\n'


def _sources(found: Inspection) -> str:
    """What each entry of data.train brings."""
    if not found.stream:
        return ""
    rows = [
        (
            escape(_source_name(source)),
            escape(source.domain or "the rows' own"),
            f"{share.rows:,}",
            f"{share.documents:,}",
            f"{share.tokens:,}",
            f"{share.supervised / max(share.tokens, 1):.1%}",
            f"{source.weight:g}",
            f"{share.share:.1%}",
        )
        for source, share in zip(found.corpus.sources, shares_of_sources(found.corpus), strict=True)
    ]
    head = ("source", "domain", "rows", "documents", "tokens", "supervised", "passes per epoch", "share of its tokens")
    return f"<section><h2>Sources</h2>\n{_table(head, rows, numbers=set(range(2, 8)), long=0)}</section>\n"


def _rows(found: Inspection) -> str:
    """Dropped rows with their first places, and notes on kept ones."""
    kept = found.kept
    dropped = [
        (escape(reason), f"{count:,}", escape(", ".join(kept.examples.get(reason, []))))
        for reason, count in kept.dropped.most_common()
    ]
    notes = [(escape(note), f"{count:,}") for note, count in kept.notes.most_common()]
    text = "<h2>Rows that were dropped</h2>\n"
    text += (
        _table(("reason", "rows", "the first of them"), dropped, numbers={1}, long=2) if dropped else "<p>None.</p>\n"
    )
    if notes:
        text += "<h2>What was done to others</h2>\n" + _table(("note", "count"), notes, numbers={1})
    return f"<section>{text}</section>\n"


def _shapes(found: Inspection) -> str:
    """Lengths, supervised share over positions and by domain."""
    if not found.stream:
        return ""
    lengths = found.stream.lengths
    counts, edges = np.histogram(lengths, bins=min(30, int(lengths.max())), range=(0, int(lengths.max())))
    spots, shares = position_shares(found.corpus, bins=40)
    first = _chart(
        "Documents by length in tokens",
        counts,
        edges,
        top=f"{int(counts.max()):,}",
        tip=lambda low, high, value: f"{low:.0f} to {high:.0f} tokens: {int(value)} documents",
    )
    second = _chart(
        "Supervised share by position in the document",
        shares,
        spots,
        highest=1.0,
        top="100%",
        tip=lambda low, high, value: f"positions {low:.0f} to {high - 1:.0f}: {value:.1%} supervised",
    )
    domains = [
        (
            escape(name),
            f"{share.documents:,}",
            f"{share.tokens:,}",
            f'<meter min="0" max="1" value="{share.ratio:.4f}"></meter> {share.ratio:.1%}',
        )
        for name, share in sorted(found.domains().items(), key=lambda item: -item[1].tokens)
    ]
    table = _table(("domain", "documents", "tokens", "supervised"), domains, numbers={1, 2, 3})
    return (
        f'<section><h2>Lengths and supervision</h2>\n<div class="columns">{first}{second}</div>\n'
        f"<h2>Domains</h2>\n{table}</section>\n"
    )


def _chart(
    title: str,
    values: np.ndarray,
    edges: np.ndarray,
    *,
    top: str,
    tip: Callable[[float, float, float], str],
    highest: float | None = None,
) -> str:
    """Bars over [edges[i], edges[i + 1]) as an inline SVG with its own axes; `top` labels the highest value."""
    width, height, left, right, above, below = 420, 180, 44, 12, 12, 22
    inner, floor, most = width - left - right, height - below, highest or float(max(values.max(), 1))
    begin, span = float(edges[0]), float(edges[-1] - edges[0])

    def x(edge: float) -> float:
        return left + inner * (edge - begin) / span

    bars = []
    for low, high, value in zip(edges[:-1], edges[1:], values, strict=True):
        tall = (floor - above) * float(value) / most
        wide = max(0.5, x(high) - x(low) - 1)
        bars.append(
            f'<rect class="bar" x="{x(low):.1f}" y="{floor - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}">'
            f"<title>{escape(tip(float(low), float(high), float(value)))}</title></rect>"
        )
    ticks = [(0.0, "start"), (0.5, "middle"), (1.0, "end")]
    labels = [
        f'<text x="{left + inner * at:.0f}" y="{height - 6}" text-anchor="{side}">{begin + span * at:,.0f}</text>'
        for at, side in ticks
    ]
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(title)}</title>"
        f'<line class="axis" x1="{left}" y1="{above}" x2="{width - right}" y2="{above}"/>'
        f'<line class="axis" x1="{left}" y1="{floor}" x2="{width - right}" y2="{floor}"/>'
        f'<text x="{left - 6}" y="{above + 4}" text-anchor="end">{escape(top)}</text>'
        f'<text x="{left - 6}" y="{floor + 4}" text-anchor="end">0</text>'
        f"{''.join(bars)}{''.join(labels)}</svg></figure>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: set[int], long: int = -1) -> str:
    """Cells are HTML already. numbers: columns that are set to the right; long: one whose text may be broken anywhere."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ["n" if i in numbers else "w" if i == long else "" for i in range(len(cells))]
        made = (f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", cells) for cells in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>\n'


# --- where the rows come from ---


def _provenance(found: Inspection) -> str:
    recipe = found.recipe
    expected = expected_of(recipe, recipe.target.path, found.tokenizer)

    def row(origin: Origin, rows: int) -> tuple[str, ...]:
        generator = origin.generator
        asked = origin.asked_with if generator else {**expected.chat_template_kwargs, **origin.row_kwargs}
        if generator is None:
            model = template = "not recorded"
        else:
            revision = f" @ {generator['revision']}" if generator.get("revision") else ""
            other = "" if same_model(generator["model"], expected) else " (not this target)"
            model = public_name(generator["model"]) + revision + other
            template = (
                "not recorded"
                if "template_hash" not in generator
                else "this"
                if same_template(origin, expected)
                else "another"
            )
        cells = (model, template, THINKING_WORDS[thinking(asked)], json.dumps(asked), sampling(generator))
        return (f"{rows:,}", *map(escape, cells), "recorded ids" if origin.exact else "rendered again")

    head = ("rows", "written by", "template", "thinking", "arguments", "sampling", "tokens")
    origins = list(read_origins(found.corpus.origins))
    more = f"<p>and {len(origins) - LISTED} more</p>\n" if len(origins) > LISTED else ""
    table = _table(head, (row(*pair) for pair in origins[:LISTED]), numbers={0})
    return f"<section><h2>Who wrote the answers</h2>\n{table}{more}</section>\n"


def _made_of(found: Inspection) -> str:
    certificate = found.certificate
    if certificate is None:
        return ""
    files = "".join(
        f"<li>{escape(record['name'])} <code>{escape(record['sha256'] or 'a Hub data set')}</code></li>"
        for record in certificate.files[:LISTED]
    )
    items = [
        ("certificate", f"<code>{certificate.digest}</code>"),
        ("template", f"<code>{certificate.template}</code>, with its arguments <code>{found.template}</code>"),
        ("arguments", f"<code>{escape(json.dumps(certificate.chat_template_kwargs))}</code>"),
        ("tokenizer", f"<code>{certificate.tokenizer}</code>"),
        ("masks", escape(certificate.strategy)),
        ("settings", f"<code>{escape(json.dumps(certificate.settings))}</code>"),
        ("documents", f"<code>{certificate.fingerprint}</code>"),
        ("versions", escape(", ".join(f"{name} {text}" for name, text in certificate.versions.items()))),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in items)
    return f"<section><h2>What it is made of</h2>\n<dl>{listed}</dl>\n<ul>{files}</ul></section>\n"


# --- examples, token by token ---


def _samples(found: Inspection, shown: Sequence[TokenizedExample]) -> str:
    if not shown:
        return ""
    toggles = "".join(
        f'<input class="toggles" type="checkbox" id="{name}"{" checked" if on else ""}><label for="{name}">{label}</label>'
        for name, label, on in (
            ("anchors", "legal anchors", True),
            ("drawn", "sampled blocks", True),
            ("edges", "token edges", False),
        )
    )
    legend = (
        '<ul class="legend" id="legend"><li><span class="t s">supervised</span> the target says it</li>'
        '<li><span class="t u">grey</span> it is given</li>'
        '<li><span class="t s a">legal anchor</span> a block may begin here</li>'
        '<li><span class="slot h">anchor</span> of a sampled block</li>'
        '<li><span class="slot s">slot</span> drafted and trained</li><li><span class="slot x">slot</span> drafted, without loss</li></ul>'
    )
    drawn = "".join(_sample(found, example, first=i == 0) for i, example in enumerate(shown))
    return f'<section><h2>Examples</h2>\n{legend}\n{toggles}\n<div class="samples">{drawn}</div></section>\n'


def _sample(found: Inspection, example: TokenizedExample, first: bool) -> str:
    ids, legal = example.token_ids.tolist(), legal_anchors(example.supervised)
    breaks = set((np.flatnonzero(np.diff(example.supervised.astype(np.int8))) + 1).tolist())
    cut = ids[:DRAWN_TOKENS]
    spans = list(pieces(cut, breaks, found.tokenizer))
    blocks = _blocks(found, example, [a for a in legal if a < len(cut)])
    anchors = set(blocks.anchors_BN[0].tolist()) if blocks else set()
    may_begin = set(legal.tolist())
    text = "".join(_token(piece, ids, example.supervised, may_begin, anchors) for piece in spans)
    more = f'<p class="muted">{len(ids) - len(cut):,} more tokens are not drawn.</p>' if len(ids) > len(cut) else ""
    said = int(example.supervised.sum())
    facts = f"{example.domain} · {example.finish_reason} · {len(ids):,} tokens · {said:,} supervised · {len(legal):,} legal anchors"
    return (
        f'<details class="sample"{" open" if first else ""}><summary><b>{escape(example.id)}</b> '
        f'<span class="muted">{escape(facts)}</span></summary>\n'
        f'<div class="text">{text}</div>{more}\n{_drawn(blocks, spans, len(ids)) if blocks else ""}</details>\n'
    )


def _blocks(found: Inspection, example: TokenizedExample, legal: list[int]) -> DraftBlocks | None:
    """The first blocks that the first epoch takes of this document, as training builds them."""
    config = found.stream.config if found.stream else None
    if config is None or not legal:
        return None
    within = set(legal)
    order = [a for a in anchor_order(example.supervised, config.seed, 0, example.id).tolist() if a in within]
    anchors = np.sort(np.array(order[:DRAWN_BLOCKS]))
    one = example.token_ids[None].astype(np.int64)
    return build_blocks(
        one, np.zeros_like(one), example.supervised[None], [anchors], num_blocks=len(anchors), decay_S=config.decay_S
    )


def _token(piece: Piece, ids: list[int], supervised: np.ndarray, legal: set[int], anchors: set[int]) -> str:
    at = range(piece.begin, piece.end)
    kinds = [
        ("s" if supervised[piece.begin] else "u", True),
        ("a", any(i in legal for i in at)),
        ("h", any(i in anchors for i in at)),
    ]
    words = ["supervised" if supervised[piece.begin] else "given", *(["legal anchor"] if kinds[1][1] else [])]
    place = str(piece.begin) if len(at) == 1 else f"{piece.begin}-{piece.end - 1}"
    title = f"position {place} · id {', '.join(str(ids[i]) for i in at)} · {' · '.join(words)} · {json.dumps(piece.text, ensure_ascii=False)}"
    text = escape(piece.text).replace("\n", '<i class="nl"></i>\n') or "∅"
    names = " ".join(name for name, on in kinds if on)
    return f'<span class="t {names}" data-p="{piece.begin}" title="{escape(title)}">{text}</span>'


def _drawn(blocks: DraftBlocks, spans: list[Piece], length: int) -> str:
    """One line for each block: its anchor and what its slots are to predict."""
    texts = {i: _part(piece, i) for piece in spans for i in range(piece.begin, piece.end)}
    lines = []
    for block, anchor in enumerate(blocks.anchors_BN[0].tolist()):
        labels, trained = blocks.labels_BNS[0, block].tolist(), blocks.supervised_BNS[0, block].tolist()
        slots = [_slot(0, anchor, labels[0], texts, "h", "anchor: the last verified token")]
        for k in range(1, len(labels)):
            inside = anchor + k < length
            past = "past the answer" if inside else "past the end of the document"
            why = "drafted and trained" if trained[k] else f"drafted, without loss: {past}"
            slots.append(_slot(k, anchor + k, labels[k] if inside else None, texts, "s" if trained[k] else "x", why))
        lines.append(
            f'<p class="block" tabindex="0" data-a="{anchor}" data-k="{len(labels)}"><b>at {anchor}</b>{"".join(slots)}</p>'
        )
    return f'<div class="blocks"><p class="muted">The first blocks that epoch 0 draws here:</p>{"".join(lines)}</div>'


def _part(piece: Piece, position: int) -> str:
    """What a slot shows of its token: white space made visible, and which part of a character it is."""
    text = piece.text.translate(VISIBLE)
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text) or "∅"
    whole = piece.end - piece.begin
    return text if whole == 1 else f"{text} {position - piece.begin + 1}/{whole}"


def _slot(slot: int, position: int, token: int | None, texts: dict[int, str], kind: str, why: str) -> str:
    named = f"slot {slot} · position {position} · {'no token' if token is None else f'id {token}'} · {why}"
    text = "" if token is None else texts.get(position, "")
    return f'<span class="slot {kind}" title="{escape(named)}"><small>{slot}</small>{escape(text)}</span>'
