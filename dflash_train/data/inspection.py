"""What a data set looks like to the trainer: rows kept and dropped, what is supervised, how long, who wrote it, how it packs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

import numpy as np

from dflash_train.assets import public_name, resolve
from dflash_train.config.schema import Recipe
from dflash_train.config.values import nearest, printable
from dflash_train.data.blocks import legal_anchors
from dflash_train.data.certificate import Certificate, certify
from dflash_train.data.chat import load_tokenizer, mask_strategy, serving_template, template_hash
from dflash_train.data.corpus import Corpus, weights_of
from dflash_train.data.mask_token import check_mask_absent, check_mask_token, token_name, unused_ids
from dflash_train.data.prepare import examine, located_sources, prepare
from dflash_train.data.provenance import expected_of, read_origins, settings_table
from dflash_train.data.read import Kept
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.types import TargetInfo, TokenizedExample

GREEN, GREY, RESET = "\033[32m", "\033[90m", "\033[0m"


@dataclass
class Share:
    """Documents of a domain, their tokens and how many of these are supervised."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0

    @property
    def ratio(self) -> float:
        return self.supervised / max(1, self.tokens)


class Packing(NamedTuple):
    """The first epoch: rows; share of padding; legal anchors; blocks that num_anchors a row leaves of them."""

    rows: int
    padding: float
    anchors: int
    blocks: int


@dataclass(kw_only=True)
class Inspection:
    """`data.train` as training would see it. problems: what training would refuse; notes: what it would say.

    stream and certificate are None where no row is usable.
    """

    recipe: Recipe
    tokenizer: Any
    corpus: Corpus
    stream: RowStream | None = None
    certificate: Certificate | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kept(self) -> Kept:
        return self.corpus.kept

    @property
    def template(self) -> str:
        return template_hash(self.tokenizer, dict(self.recipe.data.chat_template_kwargs))

    def domains(self) -> dict[str, Share]:
        names, which = self.corpus.domains()
        columns = (None, self.corpus.lengths, self.corpus.supervised_counts)
        counts = [np.bincount(which, column, len(names)).astype(int).tolist() for column in columns]
        return {name: Share(*numbers) for name, *numbers in zip(names, *counts, strict=True) if numbers[0]}

    def generators(self) -> dict[str, int]:
        """Rows by the public name of the model that wrote them."""
        names: Counter[str] = Counter()
        for origin, rows in read_origins(self.corpus.origins):
            names[public_name(origin.generator["model"]) if origin.generator else "not recorded"] += rows
        return dict(names)

    def counts(self) -> dict[str, Any]:
        """The figures of the report; None for what an unset mask token or an empty data set has not."""
        shares = self.domains()
        tokens, supervised = (sum(getattr(s, name) for s in shares.values()) for name in ("tokens", "supervised"))
        return {
            "rows": self.kept.total,
            "kept": self.kept.kept,
            "dropped": dict(self.kept.dropped),
            "notes": dict(self.kept.notes),
            "examples": len(self.corpus),
            "tokens": tokens,
            "supervised": supervised,
            "ratio": supervised / max(1, tokens),
            "mask_token_occurrences": self.certificate.mask_token_occurrences if self.certificate else None,
            "domains": {domain: share.documents for domain, share in shares.items()},
            "generators": self.generators(),
            "packing": packing(self.stream)._asdict() if self.stream else None,
            "certificate": self.certificate.digest if self.certificate else None,
        }

    def check(self) -> None:
        """Raise ValueError for everything that training would refuse."""
        if self.problems:
            raise ValueError("\n\n".join(self.problems))


def look(recipe: Recipe, info: TargetInfo | None = None) -> Inspection:
    """Read and tokenise `data.train` as training would. What training would refuse is kept in `problems`, so that it can be shown;
    raises ValueError only where nothing can be: no usable tokenizer or file, or token ids outside the vocabulary of the target (`info`).
    """
    data = recipe.data
    target = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(target, recipe.target.revision, recipe.target.trust_remote_code, data.chat_template)
    template = serving_template(tokenizer, target, recipe.target.revision, recipe.target.trust_remote_code)
    sources = located_sources(data.train, "train")
    vocab_size = None if info is None else info.vocab_size
    corpus = prepare(sources, template, data, what="train", vocab_size=vocab_size, limit=data.limit)
    found = Inspection(recipe=recipe, tokenizer=tokenizer, corpus=corpus)
    found.notes, found.problems = examine(corpus, data, expected_of(recipe, target, tokenizer), "train")
    if corpus:
        found.stream = _stream(recipe, corpus)
        found.certificate = certify(data, tokenizer, corpus, recipe.drafter.mask_token_id)
    _examine_mask_token(found, info)
    return found


def _examine_mask_token(found: Inspection, info: TargetInfo | None) -> None:
    """One that training would refuse is a problem; one that is not chosen yet, which inspection does not need, a note with two that can be."""
    mask_token_id, tokenizer = found.recipe.drafter.mask_token_id, found.tokenizer
    if mask_token_id is None:
        if info is not None and (unused := unused_ids(tokenizer, info)):
            found.notes.append(f"drafter.mask_token_id is not set; unused here: {' or '.join(map(str, unused))}")
        return
    try:
        if info is not None:
            check_mask_token(mask_token_id, tokenizer, info)
        check_mask_absent(mask_token_id, found.corpus, token_name(tokenizer, mask_token_id))
    except ValueError as error:
        found.problems.append(str(error))


def _stream(recipe: Recipe, examples: Corpus) -> RowStream:
    train, block_size = recipe.train, recipe.drafter.block_size
    config = StreamConfig(
        row_length=recipe.data.max_length,
        num_anchors=train.num_anchors,
        decay_S=(np.arange(block_size) > 0).astype(float),  # which slots are trained is shown, not their weight
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        seed=train.seed,
        pack=recipe.data.pack,
    )
    return RowStream(examples, config)


def inspect(
    recipe: Recipe, *, samples: int = 3, ids: list[str] | None = None, color: bool = False, out: TextIO | None = None
) -> dict[str, Any]:
    """Print the report on `data.train` to `out` (default stdout) and return its counts (`Inspection.counts`).

    Raises ValueError for what training would refuse, after the report.
    """
    found = look(recipe)
    write_report(found, chosen(found, samples, ids), color=color, out=out or sys.stdout)
    found.check()
    return found.counts()


def write_report(found: Inspection, shown: list[TokenizedExample], *, color: bool, out: TextIO) -> None:
    """The report as text. Without colour, supervised text stands between `⟦` and `⟧`."""
    data, stream, certificate = found.recipe.data, found.stream, found.certificate
    print(printable(found.kept.table()), file=out)
    print(
        f"template {found.template}, arguments {dict(data.chat_template_kwargs)}; masks: {mask_strategy(found.tokenizer, found.kept)}",
        file=out,
    )
    if stream and certificate:
        print(
            f"{certificate.documents} examples, {certificate.tokens} tokens, supervised {certificate.supervised} ({certificate.ratio:.1%})",
            file=out,
        )
        for domain, share in found.domains().items():
            print(
                f"  {printable(domain):<20} {share.documents:>7} examples {share.tokens:>9} tokens {share.ratio:>6.1%}",
                file=out,
            )
        print(printable(sources_table(found.corpus)), file=out)
        rows = packing(stream)
        print(
            f"packed: {rows.rows} rows of {data.max_length} tokens, {rows.padding:.1%} padding; "
            f"{rows.blocks} blocks per epoch at {rows.anchors} legal anchors",
            file=out,
        )
    print(f"answers by {found.generators()}", file=out)
    print(printable(settings_table(found.corpus.origins, data.chat_template_kwargs)), file=out)
    for note in found.notes:
        if note.startswith(("WARNING", "drafter.mask_token_id")):
            print(printable(note), file=out)
    if stream and certificate:
        if certificate.mask_token_occurrences is not None:
            print(
                f"drafter.mask_token_id {certificate.mask_token_id} occurs {certificate.mask_token_occurrences} times in the data",
                file=out,
            )
        print(histogram(stream.lengths, data.max_length), file=out)
        print(certificate.line(), file=out)
    for example in shown:
        print(
            f"\n--- {printable(example.id)} ({printable(example.finish_reason)})\n{show(example, found.tokenizer, color)}",
            file=out,
        )


def chosen(found: Inspection, samples: int, ids: list[str] | None = None) -> list[TokenizedExample]:
    """The examples of the named rows, or `samples` of them: the first of each domain, then the second, and so on.

    Raises ValueError for an id that no example has, and for a negative number.
    """
    if samples < 0:
        raise ValueError(f"--samples {samples}: must be 0 or more")
    if ids:
        return [example for name in ids for example in _named(found.corpus, name)]
    which = found.corpus.domains()[1].tolist()
    seen: Counter[int] = Counter()
    ranked = []
    for number, domain in enumerate(which):
        ranked.append((seen[domain], number))
        seen[domain] += 1
    return [found.corpus[number] for number in sorted(number for _, number in sorted(ranked)[:samples])]


def _named(corpus: Corpus, name: str) -> list[TokenizedExample]:
    """One example, or several where the row gave one for each turn (`name/0`) or window (`name@0`)."""
    known = [corpus.name(i) for i in range(len(corpus))]
    found = [corpus[i] for i, own in enumerate(known) if own == name or own.startswith((f"{name}/", f"{name}@"))]
    if not found:
        hint = nearest(name, known) or (f"; there are {', '.join(known[:3])} ..." if known else "")
        raise ValueError(f"--ids {name}: no example has this id{hint} A dropped row has none: see the table of reasons")
    return found


class SourceShare(NamedTuple):
    """What an entry of data.train brings; share: of an epoch's tokens."""

    name: str
    rows: int
    documents: int
    tokens: int
    supervised: int
    weight: float
    share: float


def shares_of_sources(corpus: Corpus) -> list[SourceShare]:
    """One for each source, in order."""
    count = len(corpus.sources)
    documents, tokens, supervised, epoch = (
        np.bincount(corpus.source_of, column, count)
        for column in (None, corpus.lengths, corpus.supervised_counts, corpus.lengths * weights_of(corpus))
    )
    return [
        SourceShare(
            name=source.path + (f" ({source.domain})" if source.domain else ""),
            rows=corpus.header["rows"][i],
            documents=int(documents[i]),
            tokens=int(tokens[i]),
            supervised=int(supervised[i]),
            weight=source.weight,
            share=float(epoch[i] / epoch.sum()),
        )
        for i, source in enumerate(corpus.sources)
    ]


def sources_table(corpus: Corpus) -> str:
    """What each source brings and its share of an epoch's tokens."""
    lines = ["sources:      rows  documents      tokens  supervised  weight  share of an epoch"]
    lines += [
        f"        {s.rows:>10} {s.documents:>10} {s.tokens:>11} {s.supervised / max(s.tokens, 1):>11.1%} {s.weight:>7g} {s.share:>6.1%}  {s.name}"
        for s in shares_of_sources(corpus)
    ]
    return "\n".join(lines)


def packing(stream: RowStream) -> Packing:
    """How the first epoch packs."""
    anchors = np.array([len(legal_anchors(example.supervised)) for example in stream.examples])
    rows = [row for step in range(stream.steps_per_epoch) for row in stream.rows_of_step(step)[1]]
    return Packing(
        rows=stream.rows_per_epoch,
        padding=stream.padding,
        anchors=int(anchors @ stream.passes(0)),
        # A document that is in an epoch several times has several numbers.
        blocks=sum(min(stream.config.num_anchors, int(anchors[np.array(row) % len(anchors)].sum())) for row in rows),
    )


def position_shares(examples: Sequence[TokenizedExample], bins: int) -> tuple[np.ndarray, np.ndarray]:
    """(edges (n + 1,), supervised share of the tokens between them (n,)), by position in the document; n is at most `bins`."""
    longest = max(len(example.token_ids) for example in examples)
    present, supervised = np.zeros(longest), np.zeros(longest)
    for example in examples:
        present[: len(example.token_ids)] += 1
        supervised[: len(example.token_ids)] += example.supervised
    edges = np.unique(np.linspace(0, longest, min(bins, longest) + 1).astype(int))
    return edges, np.add.reduceat(supervised, edges[:-1]) / np.add.reduceat(present, edges[:-1])


def histogram(lengths: np.ndarray, max_length: int, bins: int = 8, width: int = 40) -> str:
    """Text histogram of lengths in tokens, from 0 to max_length."""
    counts, edges = np.histogram(lengths, bins=bins, range=(0, max_length))
    rows = [
        f"{int(low):>7}..{int(high):<7} {count:>7} {'#' * int(np.ceil(width * count / max(1, counts.max())))}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    return "\n".join(["length in tokens", *rows])


def show(example: TokenizedExample, tokenizer: Any, color: bool) -> str:
    """The example's text with what is supervised in green (or between brackets); whole runs are decoded,
    never half a character.
    """
    begin, end, other = (GREEN, RESET, GREY) if color else ("⟦", "⟧", "")
    changes = np.flatnonzero(np.diff(example.supervised.astype(np.int8))) + 1
    parts = []
    for ids, supervised in zip(
        np.split(example.token_ids, changes), np.split(example.supervised, changes), strict=True
    ):
        text = printable(tokenizer.decode(ids.tolist()))
        parts.append(f"{begin}{text}{end}" if supervised[0] else f"{other}{text}{RESET if color else ''}")
    return "".join(parts)


class Piece(NamedTuple):
    """Tokens [begin, end) and the text that they add."""

    begin: int
    end: int
    text: str


def pieces(token_ids: list[int], breaks: set[int], tokenizer: Any, most: int = 8) -> Iterator[Piece]:
    """Every token with its text; tokens that only together make a character are one piece, which never crosses a position in `breaks`.

    A token's text depends on what stands before it (leading spaces), so each is decoded with its predecessors and without.
    """
    begin = 0
    while begin < len(token_ids):
        before = token_ids[max(0, begin - 4) : begin]
        known = tokenizer.decode(before)
        for end in range(begin + 1, min(begin + most, len(token_ids)) + 1):
            text = tokenizer.decode(before + token_ids[begin:end])
            if not text.endswith("\ufffd") or end in breaks:
                break
        text = text[len(known) :] if text.startswith(known) else tokenizer.decode(token_ids[begin:end])
        yield Piece(begin, end, text)
        begin = end
