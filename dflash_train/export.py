"""The folder that engines load: written, and read back strictly.

A loader that accepts a folder proves little (SGLang and vLLM load a drafter with missing tensors and say nothing), so both
directions here compare names and shapes with `tensor_shapes` and stop at the first difference.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dflash_train
from dflash_train import disk
from dflash_train.build import SOURCE_HELP, Outline, open_drafter
from dflash_train.card import CardFacts, gguf_card, model_card, serving, target_record, walk_tau
from dflash_train.check import check
from dflash_train.config.hub import check_place
from dflash_train.config.load import CheckFailed, parse, parser, run_command
from dflash_train.config.values import fits
from dflash_train.data.certificate import CERTIFICATE, read_certificate
from dflash_train.data.prepare import located_sources
from dflash_train.drafter.spec import DrafterSpec, check_target_layer_ids, from_hf_config, tensor_shapes, to_hf_config
from dflash_train.engines import ENGINES, SPLASH
from dflash_train.folder import (
    DTYPES,
    RECORD,
    TOKENIZER_FILES,
    WEIGHTS,
    hash_weights,
    public_name,
    read_config,
    read_headers,
    read_json,
    read_record,
    tensor_faults,
)
from dflash_train.licences import UNKNOWN, Decision, Source, card_licence, data_licences, decide, front_matter
from dflash_train.push import Plan, push
from dflash_train.released.nemo import nemo_style
from dflash_train.types import TargetInfo

# ---------------------------------------------------------------------------------------------------------------- writing


def write_export(
    output: Path,
    *,
    state: dict[str, torch.Tensor],
    spec: DrafterSpec,
    target: TargetInfo,
    dtype: torch.dtype,
    tokenizer_dir: str | Path | None,
    card: CardFacts,
) -> Path:
    """Write a drafter folder and return its path. All or nothing: it is built beside `output` and renamed into place.

    state: tensors of any float dtype and device, named as in `tensor_shapes(spec)`; wrapper prefixes are stripped.
    tokenizer_dir: folder or hub id whose tokenizer files go along (None: none).
    Raises ValueError for a tensor that is missing, unexpected, mis-shaped or not finite, for a spec that does not fit
    the target, and for an `output` that holds something else than an earlier export.
    """
    output = Path(os.path.realpath(output))
    _put_back(output)
    check_output(output)
    _check_pair(spec, target)
    tensors = _export_tensors(state, spec, dtype)
    eos = target.eos_token_ids[0] if target.eos_token_ids else None
    config = to_hf_config(
        spec, dtype=str(dtype).removeprefix("torch."), bos=target.bos_token_id, eos=eos, pad=target.pad_token_id
    )
    config["transformers_version"] = version("transformers")
    card = replace(card, target=target_record(target))
    record = {
        "format": 1,
        "dflash_train": dflash_train.__version__,
        "spec": asdict(spec),
        "dtype": config["dtype"],
        "target": card.target,
        "weights": hash_weights(tensors),
        "tau": card.decoded and card.decoded["tau"],
        "walk_tau": walk_tau(card.decoded),
        "card": _recorded(card),
        "provenance": card.provenance,
    }

    output.parent.mkdir(parents=True, exist_ok=True)
    for left in ("writing", "replaced"):
        disk.sweep(output.parent, f".{output.name}.{left}-")
    building = output.parent / f".{output.name}.writing-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        save_file(tensors, building / WEIGHTS, metadata={"format": "pt"})
        _write_json(building / "config.json", config)
        copied = _write_tokenizer(building, tokenizer_dir, target.revision)
        (building / "README.md").write_text(model_card(spec, card, has_tokenizer=bool(copied)), encoding="utf-8")
        # Recorded, so that replacing this export later removes only what is ours.
        record["files"] = sorted([*_files(building), RECORD])
        _write_json(building / RECORD, record)
        # safetensors writes files that only their owner may read; a server often runs as another user
        (building / WEIGHTS).chmod((building / "config.json").stat().st_mode)
        written = read_headers(building)
        assert {n: h.shape for n, h in written.items()} == tensor_shapes(spec), "the written file differs from the spec"
        assert {DTYPES[h.dtype] for h in written.values()} == {config["dtype"]}, (
            "the written file differs from its config"
        )
        _replace(building, output)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return output


def _recorded(card: CardFacts) -> dict[str, Any]:
    """The card's facts, so that it can be written again under another name; what the record has elsewhere is left out."""
    return {k: v for k, v in asdict(card).items() if k not in ("provenance", "target")}


def check_output(output: Path) -> None:
    """Raise ValueError if writing an export to `output` would destroy anything but an earlier export."""
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"export.output = {output}: is a file; name a folder")
    found = set(_files(output)) if output.is_dir() else set()
    if not found:
        return
    if RECORD not in found:
        raise ValueError(
            f"export.output = {output}: not empty and not an earlier export (it has no {RECORD}); name another folder"
        )
    files = read_json(output / RECORD).get("files", sorted(found))
    if not fits(files, list[str]):
        raise ValueError(f"export.output = {output}: {RECORD} there does not list its files; name another folder")
    ours = set(files)
    if found - ours:
        names = ", ".join(sorted(found - ours)[:3])
        raise ValueError(
            f"export.output = {output}: the earlier export there has files that were added to it ({names}); move them or name another folder"
        )


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def _replace(building: Path, output: Path) -> None:
    """Rename into place. A folder cannot be renamed over a full one, so an earlier export steps aside until the new one is there."""
    if not output.exists():
        building.rename(output)
        return
    aside = building.with_name(building.name.replace(".writing-", ".replaced-"))
    output.rename(aside)
    try:
        building.rename(output)
    except OSError:
        aside.rename(output)
        raise
    shutil.rmtree(aside)


def _put_back(output: Path) -> None:
    """An export that stepped aside for one that never came, because its process was killed in between, returns to its place."""
    prefix = f".{output.name}.replaced-"
    for aside in sorted(output.parent.glob(f"{glob.escape(prefix)}*")) if not output.exists() else ():
        number = aside.name.removeprefix(prefix)
        if number.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
            aside.rename(output)
            return


def _check_pair(spec: DrafterSpec, target: TargetInfo) -> None:
    for name, mine, theirs in [
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("num_target_layers", spec.num_target_layers, target.num_layers),
    ]:
        if mine != theirs:
            raise ValueError(
                f"drafter {name} = {mine}: the target {target.path} has {theirs}; a drafter fits only the target it was trained on"
            )
    check_target_layer_ids(list(spec.target_layer_ids), target.num_layers)


def _export_tensors(state: dict[str, torch.Tensor], spec: DrafterSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Bare names, one dtype, contiguous, on the host, in a fixed order."""
    bare: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        short = re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))  # torch.compile wraps single layers too
        if short in bare:
            raise ValueError(f"tensor {short}: given twice, once as {name}")
        bare[short] = tensor
    faults = tensor_faults({n: tuple(t.shape) for n, t in bare.items()}, spec)
    if faults:
        raise ValueError("the drafter's tensors do not fit its spec:\n  " + "\n  ".join(faults))
    tensors = {}
    for name in tensor_shapes(spec):
        # copy: two names must not share memory in a safetensors file, and the caller may train on
        tensors[name] = bare[name].detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(
                f"tensor {name}: has NaN or infinite values in {dtype}; the training diverged or the dtype is too narrow"
            )
    return tensors


def _write_tokenizer(folder: Path, source: str | Path | None, revision: str | None) -> list[str]:
    """Copy the target's tokenizer files into `folder`; returns their names. Remote code is never copied or run."""
    if source is None:
        return []
    local = Path(source)
    if local.is_dir():
        for name in TOKENIZER_FILES:
            if (local / name).is_file():
                shutil.copyfile(local / name, folder / name)
        if (local / "additional_chat_templates").is_dir():
            shutil.copytree(local / "additional_chat_templates", folder / "additional_chat_templates")
    else:
        from transformers import AutoTokenizer

        try:
            check_place("target", str(source))
            AutoTokenizer.from_pretrained(str(source), revision=revision).save_pretrained(folder)
        except (OSError, ValueError) as error:  # the target's folder or the network is gone since training began
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"export: without tokenizer files, which engines take from the target ({reason})", flush=True)
            return []
    return sorted(n for n in TOKENIZER_FILES if (folder / n).is_file())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ the command


def export_run(
    o: Outline, state: dict[str, torch.Tensor], output: Path, *, step: int | None, chosen_by: str | None = None
) -> Path:
    """Export a drafter of the run that `o` (a `build.Outline`) outlines, after `step` training steps. See `card_facts`."""
    return write_export(
        output,
        state=state,
        spec=o.spec,
        target=o.info,
        dtype=getattr(torch, o.recipe.export.precision.value),
        tokenizer_dir=o.target_path,
        card=card_facts(o, hash_weights(state), step, chosen_by),
    )


def card_facts(o: Outline, weights: str, step: int | None, chosen_by: str | None) -> CardFacts:
    """What is known of a drafter of this run; evaluation.json and client.json of <output_dir> count if they measured these weights.
    chosen_by: why it is not the run's last one."""
    recipe, run = o.recipe, Path(o.recipe.output_dir)
    licence = decide_licence(o)
    evaluation, client = (_measurement(run / f"{name}.json", weights) for name in ("evaluation", "client"))
    return CardFacts(
        name=run.name,
        base_model=public_name(o.info.path),
        license=licence.licence,
        licence_notes=licence.notes,
        decoded=evaluation["decoded"] if evaluation and "decoded" in evaluation else None,
        # Where it was decoded, and how fast, is this machine's.
        client=client and {k: v for k, v in client.items() if k not in ("folder", "seconds")},
        provenance={
            "step": step,
            **({"chosen_by": chosen_by} if chosen_by else {}),
            "objective": {"loss_decay_gamma": o.gamma, "selector_loss_weight": recipe.objective.selector_loss_weight},
            "lr": recipe.optimizer.lr,
            "num_anchors": recipe.train.num_anchors,
            "row_length": recipe.data.max_length,
            "global_batch_size": recipe.train.global_batch_size,
            **_data_facts(run),
            **_public(recipe.provenance),
        },
    )


def _public(start: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run's start, and of those that continued it, without command lines: they may name private paths."""
    known = {k: v for k, v in start.items() if k not in ("command", "resumed")}
    return known | ({"resumed": [_public(later) for later in start["resumed"]]} if "resumed" in start else {})


LICENCES_FILE = "licences.json"  # in a run's folder


def find_licences(o: Outline) -> list[Source]:
    """What target, initial drafter and data are licensed under, while they are at hand. Raises ValueError for licences that would forbid the export."""
    found = [Source("target", public_name(o.info.path), card_licence(o.target_path))]
    found += [o.start.released.licence] if o.start else []
    found += data_licences(source.path for source in located_sources(o.recipe.data.train, "train"))
    decide(found, o.recipe.export.license, owned=o.recipe.export.owned)
    return found


def record_licences(o: Outline, found: list[Source]) -> None:
    """Write them to <output_dir>/licences.json."""
    _write_json(Path(o.recipe.output_dir) / LICENCES_FILE, {"sources": [asdict(source) for source in found]})


def decide_licence(o: Outline) -> Decision:
    """The licence of this run's drafters. Raises ValueError as `licences.decide` does."""
    run, export = Path(o.recipe.output_dir), o.recipe.export
    if (run / LICENCES_FILE).exists():
        try:
            sources = [Source(**source) for source in read_json(run / LICENCES_FILE)["sources"]]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{run / LICENCES_FILE}: not as training writes it ({error!r}); delete it, and state export.license"
            ) from None
    else:  # an export without its run
        sources = [Source("target", public_name(o.info.path), card_licence(o.target_path))]
    return decide(sources, export.license, owned=export.owned)


def rewrite_card(o: Outline, folder: Path, weights: str, *, step: int | None, chosen_by: str | None = None) -> None:
    """State on an export's card what was measured since it was written."""
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    facts = replace(card_facts(o, weights, step, chosen_by), target=target_record(o.info))
    card = model_card(o.spec, facts, has_tokenizer=has_tokenizer)
    (folder / "README.md").write_text(card, encoding="utf-8")
    record = read_record(folder)
    if record:
        _write_json(folder / RECORD, record | {"card": _recorded(facts)})


def _measurement(path: Path, weights: str) -> dict[str, Any] | None:
    """A file of measurements, if it is there and measured weights with this hash."""
    found = read_json(path) if path.exists() else {}
    return found if found.get("weights") == weights else None


def _data_facts(run: Path) -> dict[str, Any]:
    """Digest and counts of the run's data certificate; nothing for a run that has none."""
    if not (run / CERTIFICATE).exists():
        return {}
    certificate = read_certificate(run / CERTIFICATE)
    counts = {f"data_{name}": getattr(certificate, name) for name in ("documents", "tokens", "supervised")}
    return {"data_certificate": certificate.digest, **counts}


def summary(folder: Path, o: Outline) -> str:
    """What to do with an export: what `check` finds, by the rules of which versions, and how it becomes a GGUF."""
    s = serving(o.spec, target=public_name(o.info.path), draft=str(folder), family=o.info.model_type)
    versions = ", ".join(f"{e.name} {e.version}" for e in ENGINES if e is not SPLASH)
    script = ["python", "scripts/convert_gguf.py", str(folder), "--target", o.recipe.target.path]
    convert = shlex.join([*script, "--output", f"{folder.name}.gguf"])
    report = check(folder, o.info)
    found = [f"  {f.rule} - {f.engines}: {f.message}" for f in report.faults]
    lines = ["check: no faults" if not found else "check: " + "\n".join(["faults", *found])]
    lines += [f"rules of: {versions}", f"GGUF: {convert}"]
    return "\n".join([*lines, f"launch lines of every engine, for K = {s.block}: {folder / 'README.md'}"])


def push_export(
    folder: Path,
    repo: str,
    *,
    public: bool,
    tag: str | None,
    gguf: Path | None,
    force: bool,
    dry_run: bool,
    say: Any = print,
) -> None:
    """Put an export on the Hub, and with `gguf` its GGUF files into <repo>-GGUF.

    Raises ValueError for a folder that is not an export, CheckFailed where `check` finds a fault, no licence is known, or a GGUF file in fewer bits
    has no measured tau; `force` turns those into notes.
    """
    record = read_record(folder)
    if "files" not in record:
        raise ValueError(f"--push {repo}: {folder} is not an export (it has no {RECORD}); export the drafter first")
    inside = folder.resolve()
    outside = [name for name in record["files"] if not (folder / name).resolve().is_relative_to(inside)]
    if outside:  # a record is only a file: it must not be able to send others of this machine
        raise ValueError(
            f"--push {repo}: {folder / RECORD} names files outside the export ({', '.join(outside[:3])}); export the drafter again"
        )
    problems = [f"{f.rule}: {f.message}" for f in check(folder).faults]
    licence = str(front_matter(folder / "README.md").get("license") or UNKNOWN)
    if licence == UNKNOWN:
        problems.append("its licence is not known; state it with export.license=... and export it again")
    with tempfile.TemporaryDirectory() as place:
        card = Path(place) / "README.md"
        card.write_text(_card_for(folder, record, repo), encoding="utf-8")
        files = {name: folder / name for name in record["files"]} | {"README.md": card}
        plans = [Plan(repo=repo, files=files, private=not public, tag=tag)]
        if gguf is not None:
            files, measured = gguf_files(gguf), gguf_measured(gguf)
            blind = [n for n in files if n not in measured and not re.search(r"(bf16|f16|f32)\.gguf$", n.lower())]
            if blind:
                problems.append(
                    f"{', '.join(blind)}: in fewer bits than it was trained, and {MEASURED} beside it has no tau of it"
                )
            card = Path(place) / "GGUF.md"
            sizes = {name: path.stat().st_size for name, path in files.items()}
            card.write_text(gguf_card(record, repo, licence, sizes, measured), encoding="utf-8")
            files = files | {"README.md": card}
            plans.append(
                Plan(repo=f"{repo}-GGUF", files=files, private=not public, tag=tag, message="Upload GGUF files")
            )
        for problem in problems:
            say(f"{'note' if force else 'fault'}: {problem}")
        for plan in plans:
            if dry_run:
                say(f"dry run, nothing is sent: {plan.text()}")
            elif force or not problems:
                say(f"pushed to {push(plan, say=say)}")
    if problems and not force:
        raise CheckFailed(
            f"{folder} is not fit to be pushed: {problems[0]}; mend that, or push it all the same with --force"
        )


def _card_for(folder: Path, record: dict[str, Any], repo: str) -> str:
    """The card of an export under the name of its repository, which launch lines then carry."""
    if "card" not in record:
        return (folder / "README.md").read_text(encoding="utf-8")
    try:
        facts = CardFacts(**(record["card"] | {"name": repo}), provenance=record["provenance"], target=record["target"])
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / RECORD}: its card is not one of this version ({error}); export the drafter again"
        ) from None
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return model_card(from_hf_config(read_config(folder)), facts, has_tokenizer=has_tokenizer)


MEASURED = "measured.json"  # beside GGUF files: name -> {"tau", "tokens", "rounds", "reference"}


def gguf_files(path: Path) -> dict[str, Path]:
    """The GGUF files that a path names: itself, or those in a folder. Raises ValueError if there are none."""
    found = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    broken = [p for p in found if p.open("rb").read(4) != b"GGUF"]
    if not found or broken:
        raise ValueError(
            f"--gguf {path}: {f'{broken[0]} is not a GGUF file' if broken else 'holds no .gguf file'}; convert the export first"
        )
    return {p.name: p for p in found}


def gguf_measured(path: Path) -> dict[str, Any]:
    """What was measured of GGUF files: name -> tau, tokens and rounds in llama.cpp, and the tau of the unquantised file there ("reference")."""
    place = (path.parent if path.is_file() else path) / MEASURED
    return read_json(place) if place.is_file() else {}


def main(argv: list[str]) -> int:
    commands = parser(
        "python -m dflash_train.export",
        "Write a drafter as a folder that every engine loads unedited, and put it on the Hub.",
        source=SOURCE_HELP,
    )
    commands.add_argument(
        "--output", metavar="DIR", help="folder to write; default: export.output, else <output_dir>/export"
    )
    commands.add_argument(
        "--push", metavar="USER/NAME", help="put it on the Hub; an export given as the source is pushed as it is"
    )
    commands.add_argument("--public", action="store_true", help="a new repository is public; otherwise private")
    commands.add_argument("--tag", help="tag the commit, such as step-2000, so that this revision can be pinned")
    commands.add_argument(
        "--gguf", type=Path, metavar="PATH", help="GGUF file, or folder of them, for the repository USER/NAME-GGUF"
    )
    commands.add_argument("--dry-run", action="store_true", help="list what --push would send, and send nothing")
    commands.add_argument(
        "--force",
        action="store_true",
        help="push in spite of what `check` finds, an unknown licence or an unmeasured GGUF",
    )
    commands.add_argument(
        "--format",
        choices=("engines", "nemo"),
        default="engines",
        help="nemo: as NeMo AutoModel consolidates, for its own tools; engines load the default (docs/nemo.md)",
    )
    args = parse(commands, argv)
    if args.push and args.format == "nemo":
        raise ValueError(
            f"--push {args.push}: pushes what engines load, which --format nemo is not; leave one of them out"
        )
    if not args.push and (args.public or args.tag or args.gguf or args.dry_run or args.force):
        raise ValueError("--public, --tag, --gguf, --dry-run and --force belong to --push USER/NAME")
    as_it_is = (
        args.push and (Path(args.source) / RECORD).is_file() and not (args.output or args.overrides or args.config)
    )
    if as_it_is:
        output = Path(args.source)
    else:
        o, state, _, step = open_drafter(args.source, args.config, args.overrides)
        output = Path(args.output or o.recipe.export.output or Path(o.recipe.output_dir) / "export")
        written = export_run(o, state, output, step=step)
        print(f"exported to {nemo_style(written) if args.format == 'nemo' else written}")
        if args.format == "engines":
            print(summary(output, o))
    if args.push:
        push_export(
            output, args.push, public=args.public, tag=args.tag, gguf=args.gguf, force=args.force, dry_run=args.dry_run
        )
    return 0


if __name__ == "__main__":
    run_command(main)
