"""Divide rows into training and held-out by what they ask, so that a row's side never depends on the other rows.

The side follows from a hash of the first user turn (normalised): duplicates, conversations that begin alike and several
answers to one prompt are on one side, and adding, removing or reordering rows moves none. A row is held out when its hash,
read as a number in 0..1, is below its domain's threshold. A prompt that occurs in several domains has the highest of
theirs.

`per_domain` holds out at most so many prompts of each domain, those with the lowest hashes. That cap does depend on the
rows: with more of them the threshold sinks and some held-out prompts would move to training. The thresholds are therefore
written to split.json, and `thresholds_from` takes them from there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_train.config.values import check_range, parse_json
from dflash_train.data.layouts import BadRow
from dflash_train.data.read import Kept
from dflash_train.data.rows import atomic_file, check_output, normalise, parse_row, read_lines, text_hash, write_json

RECORD = "split.json"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def prompt_key(turns: list[str]) -> int:
    """64 bits that decide a row's side: the first user turn's."""
    return text_hash(normalise(turns[0]))


@dataclass(kw_only=True)
class SplitReport:
    """Rows and distinct prompts of each side by domain, the thresholds used, and the rows that could not be read."""

    thresholds: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Counter[str]] = field(default_factory=lambda: {"train": Counter(), "heldout": Counter()})
    prompts: dict[str, int] = field(default_factory=dict)
    read: Kept = field(default_factory=Kept)

    def table(self) -> str:
        """Counts by domain as text."""
        train, heldout = self.rows["train"], self.rows["heldout"]
        lines = [f"{'domain':<20} {'train':>9} {'heldout':>9} {'share':>7}  threshold"]
        for domain in sorted(self.thresholds):
            share = heldout[domain] / (train[domain] + heldout[domain])
            lines.append(
                f"{domain:<20} {train[domain]:>9} {heldout[domain]:>9} {share:>7.2%}  {self.thresholds[domain]:.6f}"
            )
        total = train.total() + heldout.total()
        lines.append(f"{'all':<20} {train.total():>9} {heldout.total():>9} {heldout.total() / total:>7.2%}")
        lines.append(
            f"{self.prompts['train']} and {self.prompts['heldout']} distinct prompts, "
            f"{self.prompts['both']} in both: read back from the two files"
        )
        if self.read.dropped:
            lines.append(self.read.table())
        return "\n".join(lines)


def split(
    inputs: list[str | Path],
    output_dir: Path,
    *,
    heldout: float = 0.02,
    by_domain: dict[str, float] | None = None,
    per_domain: int | None = None,
    thresholds_from: Path | None = None,
    suffix: str = ".jsonl",
    max_dropped: float = 0.0,
) -> SplitReport:
    """Write train and heldout files and split.json to `output_dir`; rows are copied byte for byte, in order.

    `heldout` is the share of prompts held out, `by_domain` other shares for some domains. Raises ValueError for shares
    outside 0..1, a domain that does not occur, an empty side, and when more than `max_dropped` of the rows is unreadable.
    """
    by_domain = by_domain or {}
    for name, share in {"heldout": heldout, **by_domain}.items():
        if not 0 < share < 1:
            raise ValueError(
                f"held-out share {name}={share} is not between 0 and 1; 0.02 holds out two prompts of a hundred"
            )
    check_range("max_dropped", max_dropped, 0, 1)
    if per_domain is not None and per_domain < 1:
        raise ValueError(f"held-out prompts per domain {per_domain} < 1; leave the cap out or give 1 or more")
    if suffix not in SUFFIXES:
        raise ValueError(f"suffix {suffix!r} is not one of {', '.join(SUFFIXES)}")
    files = {side: output_dir / f"{side}{suffix}" for side in ("train", "heldout")}
    for file in files.values():
        check_output(file, inputs)

    report = SplitReport()
    keys, domains, names = _survey(inputs, report.read)
    report.read.check(max_dropped)
    unknown = sorted(set(by_domain) - set(names))
    if unknown:
        raise ValueError(
            f"domain {unknown[0]!r} has a held-out share but no row; domains here: {', '.join(sorted(names))}"
        )
    shares = np.array([by_domain.get(name, heldout) for name in names])
    limits = np.array([math.floor(share * 2.0**64) for share in shares], dtype=np.uint64)
    if per_domain is not None:
        caps = [_cap(keys[domains == number], per_domain) for number in range(len(names))]
        limits = np.minimum(limits, np.array(caps, dtype=np.uint64))
    if thresholds_from is not None:
        recorded = _recorded(thresholds_from)
        limits = np.array([recorded.get(name, int(limit)) for name, limit in zip(names, limits)], dtype=np.uint64)
    held = np.unique(keys[keys < limits[domains]])
    if not len(held) or len(held) == len(np.unique(keys)):
        raise ValueError(
            f"{len(held)} of {len(np.unique(keys))} prompts would be held out: one side is empty; "
            "change the share, or give more rows"
        )
    report.thresholds = {name: int(limit) / 2.0**64 for name, limit in zip(names, limits)}
    _write(inputs, files, held, report)
    _prove(files, report)
    write_json(output_dir / RECORD, _record(inputs, files, report, {n: int(x) for n, x in zip(names, limits)}))
    return report


def _survey(inputs: list[str | Path], read: Kept) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Key (uint64) and domain number of each readable row, and the domains' names; 10 bytes a row."""
    keys: list[np.ndarray] = []
    domains: list[np.ndarray] = []
    numbers: dict[str, int] = {}
    batch: list[tuple[int, int]] = []

    def put_away() -> None:
        keys.append(np.array([key for key, _ in batch], np.uint64))
        domains.append(np.array([domain for _, domain in batch], np.int32))
        batch.clear()

    for place, line in tqdm(read_lines(inputs), desc="reading", unit=" rows", disable=None):
        try:
            row = parse_row(place, line)
        except BadRow as reason:
            read.drop(str(reason), place)
            continue
        read.kept += 1
        batch.append((prompt_key(row.turns), numbers.setdefault(row.domain, len(numbers))))
        if len(batch) == 1 << 16:
            put_away()
    put_away()
    return np.concatenate(keys), np.concatenate(domains), list(numbers)


def _cap(keys: np.ndarray, count: int) -> int:
    """The limit below which exactly the `count` lowest distinct keys lie; all of them when there are no more."""
    distinct = np.unique(keys)
    return int(distinct[count]) if len(distinct) > count else np.iinfo(np.uint64).max


def _recorded(path: Path) -> dict[str, int]:
    try:
        limits = parse_json(path.read_text())["limits"]
        found = {str(name): int(limit) for name, limit in limits.items()}
        if not all(0 <= limit < 2**64 for limit in found.values()):
            raise ValueError("a limit is no number of 64 bits")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"thresholds {path}: not a {RECORD} of an earlier split ({error!r}); give its path") from None


def _write(inputs: list[str | Path], files: dict[str, Path], held: np.ndarray, report: SplitReport) -> None:
    held_keys = set(held.tolist())
    with atomic_file(files["train"]) as train, atomic_file(files["heldout"]) as heldout:
        streams = {"train": train, "heldout": heldout}
        count = 0
        for place, line in read_lines(inputs):
            try:
                row = parse_row(place, line)
            except BadRow:
                continue
            side = "heldout" if prompt_key(row.turns) in held_keys else "train"
            streams[side].write(line + b"\n")
            report.rows[side][row.domain] += 1
            count += 1
        if count != report.read.kept:
            raise ValueError(
                f"{', '.join(map(str, inputs))}: changed while being read; run again when they are at rest"
            )


def _prove(files: dict[str, Path], report: SplitReport) -> None:
    """Read both files back and compare their prompts; the count of common ones is 0 or the split is broken."""
    keys = {
        side: np.unique(np.array([prompt_key(parse_row(*row).turns) for row in read_lines([path])], np.uint64))
        for side, path in files.items()
    }
    both = np.intersect1d(keys["train"], keys["heldout"])
    report.prompts = {"train": len(keys["train"]), "heldout": len(keys["heldout"]), "both": len(both)}
    assert not len(both), f"{len(both)} prompts are in train and in heldout"


def _record(
    inputs: list[str | Path], files: dict[str, Path], report: SplitReport, limits: dict[str, int]
) -> dict[str, Any]:
    return {
        "inputs": [str(path) for path in inputs],
        "files": {side: path.name for side, path in files.items()},
        "key": "blake2b-64 of the first user turn: NFKC, lower case, single spaces",
        "limits": limits,
        "thresholds": report.thresholds,
        "rows": {side: dict(sorted(counts.items())) for side, counts in report.rows.items()},
        "prompts": report.prompts,
        "unreadable": dict(report.read.dropped),
    }
