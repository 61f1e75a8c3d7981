"""The licence of a drafter follows from those of its target, of the drafter it began from and of its data; the strictest wins.

Licences are spelt as on Hub cards (`apache-2.0`). This is a rule of thumb written down as a table, not legal advice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dflash_train.config.hub import hub_name, unreachable
from dflash_train.data.files import locate
from dflash_train.data.rows import read_lines


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a licence forbids or asks for. own: terms of its own, which must be read; known: false where there is no licence to read."""

    no_derivatives: bool = False
    non_commercial: bool = False
    share_alike: bool = False
    own: bool = False
    known: bool = True


_FREE, _SHARE, _NC = Terms(), Terms(share_alike=True), Terms(non_commercial=True)
_ND, _OWN = Terms(no_derivatives=True), Terms(own=True)
_SAYS_ND = re.compile(r"(^|[-_. (])nd([-_. )]|$)|no[-_ ]?deriv", re.IGNORECASE)  # whatever else a name says
LICENCES: dict[str, Terms] = {
    **dict.fromkeys((
        "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "zlib", "unlicense", "wtfpl", "cc0-1.0", "pddl", "cc-by-2.0",
        "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "odc-by", "odc-by-1.0", "pddl-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "ms-pl", "ncsa", "postgresql",
        "artistic-2.0", "bsl-1.0", "ecl-2.0", "afl-3.0",
    ), _FREE),
    **dict.fromkeys((
        "cc-by-sa-3.0", "cc-by-sa-4.0", "odbl", "gpl", "gpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0", "mpl-2.0", "epl-2.0",
        "eupl-1.1", "eupl-1.2", "cdla-sharing-1.0", "osl-3.0",
    ), _SHARE),
    **dict.fromkeys(("cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc"), _NC),
    **dict.fromkeys(("cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"), Terms(non_commercial=True, share_alike=True)),
    **dict.fromkeys(("cc-by-nd-4.0", "cc-by-nd-3.0"), _ND),
    **dict.fromkeys(("cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0"), Terms(no_derivatives=True, non_commercial=True)),
    **dict.fromkeys((
        "other", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "openrail", "openrail++", "bigscience-openrail-m",
        "creativeml-openrail-m", "bigcode-openrail-m", "bigscience-bloom-rail-1.0", "deepfloyd-if-license", "fair-noncommercial-research-license",
        "apple-amlr", "apple-ascl", "intel-research", "open-mdw", "h-research", "c-uda", "nvidia-open-model-license",
    ), _OWN),
}  # fmt: skip
UNKNOWN = "unknown"
# What a drafter may carry where its sources ask for this and name different licences: (non-commercial, share-alike) -> licence.
COMMON = {(True, False): "cc-by-nc-4.0", (True, True): "cc-by-nc-sa-4.0"}


@dataclass(frozen=True)
class Source:
    """Something that a drafter was made from. role: "target", "init_from" or "data"; licence as its card states it, None if none was found."""

    role: str
    name: str
    licence: str | None

    def __post_init__(self) -> None:
        if not (isinstance(self.role, str) and isinstance(self.name, str) and isinstance(self.licence, str | None)):
            raise TypeError(f"{self.role!r}, {self.name!r}, {self.licence!r}: must be strings")

    @property
    def key(self) -> str:
        """The licence as the table spells it, without the name that a card gives to `other`."""
        return (self.licence or UNKNOWN).partition(" (")[0].strip().lower()

    @property
    def terms(self) -> Terms:
        terms = LICENCES.get(self.key, Terms(own=True, known=False))
        return replace(terms, no_derivatives=True) if _SAYS_ND.search(self.licence or "") else terms

    def __str__(self) -> str:
        what = {"target": "the target", "init_from": "the drafter it began from", "data": "data"}[self.role]
        return f"{what} {self.name}: {self.licence or 'no licence found'}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """licence: for the front matter of a card; notes: why, line by line, and what must be known beside it."""

    licence: str
    notes: list[str]


def decide(sources: list[Source], stated: str | None, *, owned: bool = False) -> Decision:
    """The licence of a drafter that was made from `sources`.

    stated: what the user says it is (`export.license`), or None to derive it. owned: the user holds the rights in target, initial drafter and
    data, so that none of them restricts anything. Raises ValueError for a drafter that began from one whose licence allows no derivatives,
    and for a stated licence that is freer than a source's.
    """
    if owned:
        licence = stated or UNKNOWN
        return Decision(
            licence=licence, notes=["The author states that they hold the rights in all that it was made from."]
        )
    for source in sources:
        if source.role == "init_from" and source.terms.no_derivatives:
            raise ValueError(
                f"export: the drafter began from {source.name}, whose licence is {source.licence}: it allows no derivatives, so this one may not be "
                "passed on; train it from nothing or from another, or set export.owned=true if you hold the rights in it"
            )
    derived, notes = _derive(sources)
    if stated is None:
        return Decision(licence=derived, notes=notes)
    said = Source("target", "export.license", stated).terms
    lax = [s for s in sources if s.terms.known and _freer(said, s.terms) and s.key != stated.strip().lower()]
    if lax:
        raise ValueError(
            f"export.license = {stated}: is freer than what the drafter was made from ({'; '.join(map(str, lax))}); leave it out to take {derived}, "
            "or set export.owned=true if you hold the rights"
        )
    return Decision(licence=stated, notes=[*notes, f"The author states the licence as {stated}."])


def _freer(one: Terms, other: Terms) -> bool:
    """Whether `one` lacks a restriction of `other`. Terms of their own say nothing that could be compared, except that there are some."""
    return any(
        getattr(other, what) and not getattr(one, what) and not one.own
        for what in ("no_derivatives", "non_commercial", "share_alike", "own")
    )


def _derive(sources: list[Source]) -> tuple[str, list[str]]:
    notes = [f"{s}." for s in sources]
    notes = [note[0].upper() + note[1:] for note in notes]
    lost = [s for s in sources if not s.terms.known]
    if lost:
        notes.append(
            f"Nothing is known about the terms of {', '.join(s.name for s in lost)}: read them before you use or pass on this drafter."
        )
        return UNKNOWN, notes
    if any(s.terms.no_derivatives for s in sources):
        named = ", ".join(s.name for s in sources if s.terms.no_derivatives)
        notes.append(
            f"{named} may be passed on unchanged only; whether a drafter is a derivative of it is not settled."
        )
        return "other", notes
    strict = [s for s in sources if s.terms != Terms()]
    if not strict:
        target = next((s for s in sources if s.role == "target"), None)
        return (target.key if target else UNKNOWN), notes
    names = {s.key for s in strict}
    if len(names) == 1:
        return names.pop(), notes
    if any(s.terms.own for s in strict):
        notes.append(f"Several terms apply together: {', '.join(sorted(names))}.")
        return "other", notes
    asked = (any(s.terms.non_commercial for s in strict), any(s.terms.share_alike for s in strict))
    if asked in COMMON:
        return COMMON[asked], notes
    notes.append(f"Two licences that each ask for themselves: {', '.join(sorted(names))}.")
    return "other", notes


# ------------------------------------------------------------------------------------------------------------ what is recorded


def card_licence(path: str, *, data: bool = False) -> str | None:
    """The licence on the card of a model or (data) a data set: README.md of a local folder, else the Hub's; None where neither says one."""
    if Path(path).is_dir():
        return _named(front_matter(Path(path) / "README.md"))
    if not hub_name(path) or unreachable(path, data=data):
        return None
    from huggingface_hub import DatasetCard, ModelCard
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = front_matter_of((DatasetCard if data else ModelCard).load(path).content)
    except (HfHubHTTPError, EntryNotFoundError, LocalEntryNotFoundError, OSError, ValueError):
        return None  # said as "no licence found"
    return _named(found)


def _named(card: dict[str, Any]) -> str | None:
    """Cards may list several; a drafter made from them is bound by all. The name that a card gives to `other` stands in brackets."""
    licence = card.get("license")
    if not licence:
        return None
    text = " and ".join(map(str, licence)) if isinstance(licence, list) else str(licence)
    return f"{text} ({card['license_name']})" if card.get("license_name") else text


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML at the head of a card; empty where there is none."""
    return front_matter_of(path.read_text(encoding="utf-8")) if path.is_file() else {}


def front_matter_of(text: str) -> dict[str, Any]:
    """The YAML at the head of a card's text; empty where there is none or where it is broken."""
    matter = re.match(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", text, re.DOTALL)
    if not matter:
        return {}
    try:
        found = yaml.safe_load(matter[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


_LICENCE = re.compile(rb'(?<!\\)"license"\s*:\s*"([^"]*)"')
_SOURCE = re.compile(rb'(?<!\\)"source"\s*:\s*"([^"]*)"')


def data_licences(paths: Iterable[str]) -> list[Source]:
    """Licences that rows name (`source` and `license`, as data_prep/prompts.py writes them and the other steps keep them), and those of Hub data sets."""
    found: dict[tuple[str, str], None] = {}
    hub: list[Source] = []
    for path in paths:
        located = locate(path)
        if located.kind == "hub":
            hub.append(Source("data", located.name, card_licence(located.name, data=True)))
            continue
        seen = set()
        for _, line in read_lines([path]):
            licence = _LICENCE.search(line) if isinstance(line, bytes) else None
            source = licence and _SOURCE.search(line)
            key = licence and (licence.group(1), source and source.group(1))
            if key and key not in seen:  # only a new pair is worth the parsing
                seen.add(key)
                row = json.loads(line)
                if isinstance(row.get("license"), str):
                    found[str(row.get("source") or Path(path).name), row["license"]] = None
    return hub + [Source("data", name, licence) for name, licence in sorted(found)]
