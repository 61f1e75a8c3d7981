"""The first three checks, which need no server: a drafter for exactly this target, a licence that allows the use, everything pinned."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.assets import public_name
from dflash_train.check import NOTE, Finding, check
from dflash_train.engines import ENGINES
from dflash_train.folder import read_config, read_record
from dflash_train.licences import UNKNOWN, Source, card_licence, front_matter
from dflash_train.released.read import read_released, weights_folder
from dflash_train.target.info import read_config as read_target_config
from dflash_train.target.info import read_target_info

OURS = "dflash-train"  # as an engine
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")  # of the Hub's cache
# What a target's config calls multi-token prediction layers of its own.
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")
TRAIN = "torchrun --nproc-per-node 8 -m dflash_train.train -c my.yaml target.path={target}"


@dataclass(kw_only=True)
class Outcome:
    """What a check found. ok: None where the check could not decide; facts: what goes into the record; notes: for a person."""

    ok: bool | None
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# --- is there a drafter -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A drafter that might serve. kind: "DFlash 2", "DFlash v1", "EAGLE-3"; base: the target that it names, None if it names none."""

    source: str
    folder: Path
    revision: str | None
    kind: str
    base: str | None
    base_revision: str | None


def read_candidate(source: str, revision: str | None) -> Candidate:
    """Raises ValueError for what is no drafter."""
    path = Path(source).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        names = read_config(path).get("architectures") or []
        if any(re.search(r"eagle_?3", str(name), re.IGNORECASE) for name in names):
            return Candidate(
                source=source, folder=path, revision=revision, kind="EAGLE-3", base=_base(path), base_revision=None
            )
    found = read_released(source, revision if not path.is_dir() else None)
    folder = weights_folder(found)
    two = found.config["dflash_config"].get("selector_rank") or found.config["dflash_config"].get("conv_kernel_size")
    target = read_record(folder).get("target") or {}
    return Candidate(
        source=source,
        folder=folder,
        revision=found.revision or revision or _snapshot(folder),
        kind="DFlash 2" if two else "DFlash v1",
        base=target.get("name") or _base(folder),
        base_revision=target.get("revision"),
    )


def _base(folder: Path) -> str | None:
    base = front_matter(folder / "README.md").get("base_model")
    return str(base[-1] if isinstance(base, list) and base else base) if base else None


def _snapshot(folder: Path) -> str | None:
    found = SNAPSHOT.search(str(folder))
    return found[1] if found else None


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one checkpoint: equal, or a local folder that is called like the Hub's repository."""
    one, other = public_name(one).lower(), public_name(other).lower()
    return one == other or ("/" in one) != ("/" in other) and one.split("/")[-1] == other.split("/")[-1]


def concerns(finding: Finding, engine: str | None) -> bool:
    """Whether a finding is about this engine; None: any of them."""
    text = finding.engines.lower().replace("reference dflash client", "reference")
    if engine is None or text.startswith("all engines"):
        return True
    if engine == OURS:  # it loads strictly what training wrote
        return False
    for one, label in [(e.name, "reference" if e.name.startswith("reference") else e.name.lower()) for e in ENGINES]:
        if one == engine:
            named = label in text or any(part in text for part in label.split(" / "))
            return not named if text.startswith("all but") else named or "all others" in text
    return True


def pair_step(candidates: list[Candidate], target: str, target_revision: str | None, engine: str | None) -> Outcome:
    """The best rung of the ladder: a DFlash 2 drafter for exactly this target, a DFlash v1 one, EAGLE-3, the target's own multi-token
    prediction, training."""
    info = read_target_info(target, target_revision)
    order = ("DFlash 2", "DFlash v1", "EAGLE-3")
    tried, notes = [], []
    for one in sorted(candidates, key=lambda c: order.index(c.kind)):
        wrong = _wrong(one, info, engine, target, notes)
        tried.append({"source": one.source, "kind": one.kind, "base": one.base, "wrong": wrong})
        if not wrong:
            return Outcome(
                ok=True,
                summary=f"{one.kind} drafter {one.source} is for {one.base}"
                + (" and its contract fits" if one.kind != "EAGLE-3" else ""),
                facts={"rung": one.kind, "drafter": one.source, "candidates": tried},
                notes=notes,
            )
        notes += [f"{one.source} ({one.kind}): {text}" for text in wrong]
    config = read_target_config(target, target_revision).to_dict()
    mtp = {k: v for c in (config, config.get("text_config") or {}) for k, v in c.items() if k in MTP_KEYS and v}
    rest = "no DFlash or EAGLE-3 drafter of those named is for exactly this target"
    if mtp:
        notes.append(
            f"the target has layers of its own for it ({', '.join(f'{k} = {v}' for k, v in mtp.items())}): the engine's native MTP"
        )
    notes.append(f"or train one: {TRAIN.format(target=target)}")
    return Outcome(
        ok=False,
        summary=rest + ("; use the target's native MTP, or train" if mtp else "; train one"),
        facts={"rung": "native MTP" if mtp else "train", "candidates": tried},
        notes=notes,
    )


def _wrong(one: Candidate, info: Any, engine: str | None, target: str, notes: list[str]) -> list[str]:
    if one.base is None:
        wrong = [
            "names no target (base_model of its card): a drafter is for one checkpoint only; state it on the card if you know it"
        ]
    elif not same_model(one.base, target):
        wrong = [f"is for {one.base}, not for {public_name(target)}"]
    elif None not in (one.base_revision, info.revision) and one.base_revision != info.revision:
        wrong = [f"was trained on revision {one.base_revision} of it, {info.revision} is to be served"]
    else:
        wrong = []
    if one.kind == "EAGLE-3":
        notes.append("an EAGLE-3 drafter's contract is not compared here; the engine does that when it loads it")
        return wrong
    report = check(one.folder, info)
    for finding in report.findings:
        if finding.severity == NOTE or finding.rule == "target name":
            continue
        if concerns(finding, engine):
            wrong.append(f"{finding.rule}: {finding.message}")
        else:
            notes.append(f"in other engines ({finding.engines}): {finding.message}")
    return wrong


# --- may it be used ---------------------------------------------------------------------------------------------


def licence_step(
    drafter: str, folder: Path, target: str, *, commercial: bool, stated: str | None, stated_target: str | None
) -> Outcome:
    """The licences on the cards of drafter and target, and whether they allow the use. stated: what somebody read where no card says it."""
    sources = [
        Source("init_from", public_name(drafter), stated or card_licence(str(folder))),
        Source("target", public_name(target), stated_target or card_licence(target)),
    ]
    facts = {
        "drafter": sources[0].licence,
        "target": sources[1].licence,
        "use": "commercial" if commercial else "non-commercial",
    }
    faults, notes = [], []
    for what, source, flag in zip(("drafter", "target"), sources, ("--licence", "--target-licence"), strict=True):
        terms = source.terms
        if not terms.known:
            named = "no licence found" if source.key == UNKNOWN else f"{source.licence}, which is not in the table"
            faults.append(f"{what} {source.name}: {named}; read its terms and state them with {flag} NAME")
            continue
        if terms.non_commercial and commercial:
            faults.append(
                f"{what} {source.name}: {source.licence} forbids commercial use; --non-commercial if yours is not"
            )
        if terms.no_derivatives:
            notes.append(
                f"{what} {source.name}: {source.licence} allows no derivatives: serve it unchanged; a quantised, converted or fine-tuned copy may not be passed on"
            )
        if terms.own:
            notes.append(f"{what} {source.name}: {source.licence} has terms of its own; read them")
    names = f"drafter {sources[0].licence or 'none found'}, target {sources[1].licence or 'none found'}"
    return Outcome(
        ok=not faults,
        summary=f"{names}: {'; '.join(faults) or 'allows ' + facts['use'] + ' use'}",
        facts=facts,
        notes=notes,
    )


# --- is it pinned -----------------------------------------------------------------------------------------------

UNTAGGED = re.compile(r"\.dev|\+g|^0\.0\.0|unknown|dirty|refs/pull|^$", re.IGNORECASE)
FLOORS = {"vLLM": (0, 28, 0), "SGLang": (0, 5, 19), "TensorRT-LLM": (1, 3, 0)}


def fingerprint(source: str) -> dict[str, Any]:
    """Names, sizes and times of a folder's files: whether a step has to be done again. A Hub id is its own."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return {"id": source}
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in _files(path)}


def _files(folder: Path) -> Iterable[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def hash_folder(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    found = {}
    for path in _files(folder):
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def pin(source: str, revision: str | None, flag: str) -> tuple[dict[str, Any], str | None]:
    """({name, revision, sha256}, what is wrong or None). A folder is pinned by its files, a Hub id by a commit, a branch or tag by nothing."""
    path = Path(source).expanduser()
    if path.is_dir():
        return {
            "name": public_name(source),
            "revision": revision or _snapshot(path.resolve()),
            "sha256": hash_folder(path),
        }, None
    pinned = {"name": source, "revision": revision, "sha256": None}
    if revision is None:
        return pinned, f"{source} has no revision: it follows main; give the commit with {flag}"
    if not COMMIT.fullmatch(revision):
        return (
            pinned,
            f"{source} at {revision}: a branch or tag can be moved; give the commit (40 hexadecimal digits) with {flag}",
        )
    return pinned, None


def engine_faults(name: str, version: str | None) -> list[str]:
    """What is wrong with an engine's version as a thing to pin."""
    if version is None:
        return [f"{name} does not say its version; state it with --engine-version"]
    faults = []
    if UNTAGGED.search(version):
        faults.append(f"{name} {version} is a build of a branch or pull request: move to a tagged release")
    floor, numbers = FLOORS.get(name), tuple(map(int, re.findall(r"\d+", version)[:3]))
    if floor and numbers and numbers < floor:
        faults.append(f"{name} {version} is older than {'.'.join(map(str, floor))}, the first with DFlash 2")
    return faults


def pins_step(
    target: tuple[str, str | None],
    drafter: tuple[str, str | None],
    engines: list[tuple[str, str | None]],
    *,
    allow: bool,
) -> Outcome:
    """engines: (name, version) of every server that takes part. allow: what is not pinned is a note."""
    pinned_target, wrong_target = pin(*target, "--target-revision")
    pinned_drafter, wrong_drafter = pin(*drafter, "--drafter-revision")
    faults = [text for text in (wrong_target, wrong_drafter) if text]
    for name, version in dict.fromkeys(engines):
        faults += engine_faults(name, version)
    if len(set(engines)) > 1:
        faults.append(
            f"the servers differ: {' and '.join(f'{n} {v}' for n, v in dict.fromkeys(engines))}; compare one build with itself"
        )
    engine = {"name": engines[0][0], "version": engines[0][1]} if engines else None
    facts = {"target": pinned_target, "drafter": pinned_drafter, "engine": engine, "unpinned": faults}
    if faults and not allow:
        return Outcome(
            ok=False,
            summary="; ".join(faults),
            facts=facts,
            notes=["--allow-unpinned goes on all the same, and the record says so"],
        )
    where = lambda p: p["revision"] or f"{len(p['sha256'])} files by hash"  # noqa: E731
    said = (
        f"target {where(pinned_target)}, drafter {where(pinned_drafter)}"
        if not faults
        else f"NOT PINNED, as allowed: {'; '.join(faults)}"
    )
    return Outcome(ok=True, summary=said + (f", {engine['name']} {engine['version']}" if engine else ""), facts=facts)
