"""Hold a drafter's export against the engines that run on a CPU: do they load it, and do they draft what we draft?

    python scripts/engine_roundtrip.py my-drafter --target embedded --engines reference,llama.cpp,mlx --prompts 100 --variants all

Verification hides a broken drafter: the text comes out right and only slower. So every token that an engine drafts is compared with our
own forward at the same anchor; where an engine tells only how many of them it accepted (llama.cpp), those counts are. Variants are the
same weights under another config.json (window W - 1 and W + 1, full and mixed layers, causal, softcap, ...): whether an engine does
what the config says, whatever that is. vLLM and SGLang need an environment of their own (`install_rivals.py vllm FOLDER`).

Writes <output>/engines.json and engines.md, with --gguf-types also the files and their measured.json. Exit code 1 if an engine does not do what it must (`required`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import convert_gguf

from dflash_train.assets import resolve
from dflash_train.client import NEAR_TIE
from dflash_train.config.load import parse, run_command
from dflash_train.config.schema import ObjectiveConfig, Precision, TargetConfig
from dflash_train.data.chat import load_tokenizer, prompt_ids
from dflash_train.data.read import read_conversations
from dflash_train.drafter.decode import DraftSession
from dflash_train.drafter.model import Drafter
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.export import MEASURED, gguf_measured
from dflash_train.folder import load_drafter_folder, read_config
from dflash_train.generation.single import plain_decode
from dflash_train.generation.speculative import propose
from dflash_train.generation.verify import Sampling
from dflash_train.method import DraftStep
from dflash_train.objective.loss import transform_logits
from dflash_train.target.cache import make_cache
from dflash_train.target.hf import HFTarget, stop_ids

WORKERS = Path(__file__).resolve().parent / "engines"
BASE = "as exported"


# ---------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How to run a worker, and how it drafts.

    cut: blocks never reach past the token budget; otherwise all have block_size slots. reserve: drafted tokens that it leaves
    out of the budget's last round. apart: variable naming the Python of its own environment. least: share of the proposals that must be
    ours, the others being near ties; None where it tells only counts. ring: its cache of a sliding layer is a ring that loses its order at the
    first one-token update after it is full; what it drafts from there on is counted apart. cannot: variants that it does not support.
    """

    worker: str
    cut: bool
    reserve: int = 0
    apart: str | None = None
    least: float | None = 1.0
    ring: bool = False
    cannot: dict[str, str] = field(default_factory=dict)


ENGINES = {
    "reference": Engine(worker="run_reference.py", cut=True),
    "llama.cpp": Engine(worker="run_llama_cpp.py", cut=False, reserve=1, least=None),
    "mlx": Engine(worker="run_mlx.py", cut=True, ring=True),
    "vllm": Engine(worker="run_vllm.py", cut=False, apart="DFLASH_VLLM_PYTHON", least=0.98),
    "sglang": Engine(
        worker="run_sglang.py",
        cut=True,
        apart="DFLASH_VLLM_PYTHON",
        cannot={"embedding scale": "it takes the scale from the target's class, never from the drafter's config"},
    ),
}


def variants(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> config.json. Everything else than the named thing is as in `config`."""
    layers, window = config["num_hidden_layers"], config["sliding_window"] or 24

    def changed(
        kinds: list[str] | None = None, width: int | None = None, causal: bool | None = None, **block: Any
    ) -> dict[str, Any]:
        made = dict(config, dflash_config=config["dflash_config"] | block)
        if kinds is not None:
            sliding = SLIDING in kinds
            made |= {"layer_types": kinds, "use_sliding_window": sliding, "sliding_window": width if sliding else None}
        if causal is not None:
            made["is_causal"] = causal
        return made

    return {
        BASE: dict(config),
        "window": changed([SLIDING] * layers, window),
        "window - 1": changed([SLIDING] * layers, window - 1),
        "window + 1": changed([SLIDING] * layers, window + 1),
        "full": changed([FULL] * layers),
        "mixed": changed([SLIDING] + [FULL] * (layers - 1), window),
        "causal": changed(causal=True),
        "softcap": changed(final_logit_softcapping=8.0),
        "multiplier": changed(output_multiplier=0.5),
        "embedding scale": changed(input_embedding_scale=1.5),
    }


# ------------------------------------------------------------------------------------------------------------------- ours


class Round(NamedTuple):
    """One block: position of its anchor, its slots, drafted tokens and how many of them the target says too."""

    anchor: int
    slots: int
    drafted: list[int]
    accepted: int


class Ours:
    """Our own forward: the target in fp32 and drafters on it, at any anchors of given texts."""

    def __init__(self, target: Path, layer_ids: tuple[int, ...]):
        config = TargetConfig(path=str(target), precision=Precision.float32)
        self.target = HFTarget.load(config, str(target), layer_ids, torch.device("cpu"))
        self.steps: dict[str, DraftStep] = {}
        self.features: dict[tuple[int, ...], torch.Tensor] = {}
        self.walked: dict[tuple[Any, ...], list[Round]] = {}

    def add(self, name: str, folder: Path) -> None:
        spec, tensors, _ = load_drafter_folder(folder)
        if spec.target_layer_ids != tuple(self.target.layer_ids):
            raise ValueError(
                f"{folder}: captures the layers {spec.target_layer_ids}, the others {self.target.layer_ids}"
            )
        drafter = Drafter(spec)
        drafter.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
        self.steps[name] = DraftStep(drafter, self.target, ObjectiveConfig(), dtype=torch.float32).eval()

    def answer(self, prompt: list[int], most: int, stop: set[int]) -> list[int]:
        """The target's greedy answer without its stop token."""
        said = plain_decode(self.target, prompt, most, stop).token_ids
        return said[:-1] if said[-1] in stop else said

    @torch.inference_mode()
    def read(self, ids: list[int]) -> torch.Tensor:
        key = tuple(ids)
        if key not in self.features:
            _, features = self.target.step(torch.tensor([ids]), make_cache(self.target.model.config), logits_to_keep=1)
            self.features[key] = features.features_BTF
        return self.features[key]

    @torch.inference_mode()
    def hidden(self, name: str, ids: list[int], anchor: int, slots: int, session: DraftSession) -> torch.Tensor:
        """Hidden states (1, slots - 1, H) of a block; `session` holds what is before the anchor, or less of it."""
        step = self.steps[name]
        session.extend(self.read(ids)[:, session.length : anchor])
        block = torch.full((1, slots), step.drafter.spec.mask_token_id)
        block[0, 0] = ids[anchor]
        return session.hidden(step.embed(block))[:, 1:]

    @torch.inference_mode()
    def proposals(self, name: str, ids: list[int], where: list[tuple[int, int]]) -> list[list[int]]:
        """What the drafter proposes at ascending (anchor, slots) of a text."""
        step, session, found = self.steps[name], DraftSession(self.steps[name].drafter), []
        for anchor, slots in where:
            hidden = self.hidden(name, ids, anchor, slots, session)
            found.append(propose(step, hidden, torch.tensor([ids[anchor]]), Sampling(), None).token_ids_NS[0].tolist())
        return found

    @torch.inference_mode()
    def gap(self, name: str, ids: list[int], mine: Round, theirs: list[int]) -> float:
        """By how much our drafter prefers its own token to theirs at the first slot where they part, relative to the scores there."""
        step, spec = self.steps[name], self.steps[name].drafter.spec
        slot = next(i for i, (a, b) in enumerate(zip(mine.drafted, theirs)) if a != b)
        hidden = self.hidden(name, ids, mine.anchor, mine.slots, DraftSession(step.drafter))[:, slot]
        logits = transform_logits(
            (hidden @ self.target.head_VH.T).float(), spec.output_multiplier, spec.final_logit_softcapping
        )
        pair = torch.tensor([[mine.drafted[slot], theirs[slot]]])
        scores = logits[0, pair]
        outside = torch.zeros(())
        if step.drafter.candidate_selector is not None:
            before = torch.tensor([[ids[mine.anchor], *mine.drafted][slot]])
            scores = step.drafter.candidate_selector(hidden, scores, pair, before)
            outside = (logits[0].topk(spec.selector_top_k).values[-1] - logits[0, theirs[slot]]).clamp_min(0)
        return float(torch.maximum(scores[0, 0] - scores[0, 1], outside) / scores.abs().max().clamp_min(1))

    def rounds(self, name: str, ids: list[int], prompt: int, engine: Engine) -> list[Round]:
        """The rounds that decoding takes to the end of the text, by the engine's way of filling the token budget."""
        key = (name, tuple(ids), prompt, engine.cut, engine.reserve)
        if key not in self.walked:
            self.walked[key] = list(self._rounds(name, ids, prompt, engine))
        return self.walked[key]

    @torch.inference_mode()
    def _rounds(self, name: str, ids: list[int], at: int, engine: Engine) -> Iterator[Round]:
        step, session = self.steps[name], DraftSession(self.steps[name].drafter)
        size = step.drafter.spec.block_size
        while at < len(ids) - 1:
            remaining = len(ids) - 1 - at
            slots = min(size, remaining + 1) if engine.cut else size
            hidden = self.hidden(name, ids, at, slots, session)
            drafted = propose(step, hidden, torch.tensor([ids[at]]), Sampling(), None).token_ids_NS[0].tolist()
            drafted = drafted[: remaining - engine.reserve] if engine.reserve else drafted
            accepted = agreeing(drafted, ids[at + 1 :])
            if drafted:
                yield Round(at, slots, drafted, accepted)
            at += accepted + 1


def agreeing(drafted: list[int], said: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(drafted, said)) if a != b), min(len(drafted), len(said)))


# ---------------------------------------------------------------------------------------------------------------- the work


@dataclass(kw_only=True)
class Work:
    """Drafter folders by name, the target's folder, and texts: prompts with the budget that ends where the answer does."""

    target: Path
    drafters: dict[str, Path]
    prompts: list[dict[str, Any]]
    texts: list[list[int]]
    folder: Path

    @cached_property
    def block_size(self) -> int:
        return load_drafter_folder(next(iter(self.drafters.values())))[0].block_size


def prepare(
    drafter: Path, target: Path, prompts: Path, folder: Path, *, count: int, most: int, which: list[str] | None
) -> tuple[Work, Ours]:
    """Folders of the variants, our own drafters, prompts and the target's greedy answers to them."""
    spec, _, _ = load_drafter_folder(drafter)
    ours, drafters = Ours(target, spec.target_layer_ids), {}
    for name, config in variants(read_config(drafter)).items():
        if name != BASE and which is not None and name not in which:
            continue
        place = folder / name.replace(" ", "")
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config, indent=1))
        for file in drafter.glob("*.safetensors*"):
            (place / file.name).symlink_to(file.resolve())
        drafters[name] = place
        ours.add(name, place)
    tokenizer = load_tokenizer(str(target))
    stop = stop_ids(ours.target.model, tokenizer, ours.target.info.eos_token_ids)
    conversations, _ = read_conversations([str(prompts)], need_answer=False)
    asked, texts = [], []
    for c in conversations:
        if len(asked) == count:
            break
        last = next(i for i, m in enumerate(c.messages) if m["role"] == "user") + 1
        ids = list(prompt_ids(c.messages[:last], tokenizer, tools=None, kwargs={}))
        answer = ours.answer(ids, most, stop)
        if len(answer) >= 4:  # a budget that ends before the stop token, so that every engine ends alike
            asked.append({"ids": ids, "max_new_tokens": len(answer)})
            texts.append(ids + answer)
    if len(asked) < count:
        raise ValueError(
            f"{prompts}: only {len(asked)} of {count} prompts have an answer of 4 tokens; ask for fewer with --prompts"
        )
    return Work(target=target, drafters=drafters, prompts=asked, texts=texts, folder=folder), ours


def run_worker(name: str, work: Work, ours: Ours, gguf: dict[str, dict[str, str]] | None = None) -> dict[str, Any]:
    """What an engine did with every drafter that it supports. Raises ValueError if its worker fails."""
    engine = ENGINES[name]
    python = os.environ.get(engine.apart, "") if engine.apart else sys.executable
    if not python:
        raise ValueError(
            f"{name}: set {engine.apart} to the Python that `python scripts/install_rivals.py vllm FOLDER` makes"
        )
    drafters = {n: str(f.resolve()) for n, f in work.drafters.items() if n not in engine.cannot}
    job = {
        "target": str(work.target.resolve()),
        "drafters": drafters,
        "prompts": work.prompts,
        "block_size": work.block_size,
    }
    if name == "llama.cpp":
        job["gguf"] = gguf or ggufs(work)
    if name == "sglang":  # its server needs a GPU: it drafts at our anchors
        job["texts"] = work.texts
        job["anchors"] = {
            n: [
                [(r.anchor, r.slots) for r in ours.rounds(n, text, len(p["ids"]), engine)]
                for p, text in zip(work.prompts, work.texts)
            ]
            for n in drafters
        }
    job_file, result_file = work.folder / f"{name}.job.json", work.folder / f"{name}.result.json"
    job_file.write_text(json.dumps(job))
    began = time.perf_counter()
    environment = os.environ if engine.apart is None else {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, str(WORKERS / engine.worker), str(job_file), str(result_file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode or not result_file.exists():
        raise ValueError(f"{name}: its worker ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return json.loads(result_file.read_text()) | {"seconds": round(time.perf_counter() - began, 1)}


def ggufs(work: Work) -> dict[str, dict[str, str]]:
    """Every drafter, and the target, in fp32."""
    target = work.folder / "target.gguf"
    convert_gguf.convert_target(work.target, target, outtype="f32")
    outputs = {folder: work.folder / f"{folder.name}.gguf" for folder in work.drafters.values()}
    convert_gguf.convert_drafters(outputs, work.target, outtype="f32")
    return {n: {"target": str(target), "drafter": str(outputs[f])} for n, f in work.drafters.items()}


def stored_as(work: Work, ours: Ours, kinds: list[str], output: Path, name: str) -> list[dict[str, Any]]:
    """llama.cpp with the drafter in other types (the target stays in fp32): what rounding the drafter costs in accepted tokens.

    The files stay in `output` as <name>-<TYPE>.gguf, what was measured of them beside them, as `export --push --gguf` wants it.
    """
    output.mkdir(parents=True, exist_ok=True)
    folder = work.drafters[BASE]
    target, whole = work.folder / "target.gguf", work.folder / "whole.gguf"
    if not target.exists():
        convert_gguf.convert_target(work.target, target, outtype="f32")
    files = {}
    for kind in sorted(kinds, key=lambda kind: kind != "f32"):
        file = output / f"{name}-{kind.upper()}.gguf"
        if kind in convert_gguf.OUTTYPES:
            convert_gguf.convert_drafters({folder: file}, work.target, outtype=kind)
            whole = file if kind == "f32" else whole
        else:
            if not whole.exists():
                convert_gguf.convert_drafters({folder: whole}, work.target, outtype="f32")
            convert_gguf.requantise(whole, file, kind)
        files[kind] = {"target": str(target), "drafter": str(file)}
    did = run_worker("llama.cpp", work, ours, files)
    rows = []
    for kind, result in did["drafters"].items():
        tokens, rounds = sum(p["max_new_tokens"] - 1 for p in work.prompts), 0
        for answer, found in zip(result["answers"], result["rounds"], strict=True):
            rounds += (
                len(answer) - 1 - sum(accepted for _, accepted in found)
            )  # every pass gives one token of the target's own
        rows.append(
            {
                "type": kind,
                "mebibytes": round(Path(files[kind]["drafter"]).stat().st_size / 2**20, 2),
                "drafted": sum(drafted for found in result["rounds"] for drafted, _ in found),
                "accepted": sum(accepted for found in result["rounds"] for _, accepted in found),
                "tokens": tokens,
                "passes": rounds,
                "tau": round(tokens / rounds, 3),
                "texts_identical": sum(
                    a == t[len(p["ids"]) :] for a, p, t in zip(result["answers"], work.prompts, work.texts)
                ),
            }
        )
    whole_tau = next((row["tau"] for kind in ("f32", "bf16", "f16") for row in rows if row["type"] == kind), None)
    measured = {
        Path(files[row["type"]]["drafter"]).name: {
            "tau": row["tau"],
            "tokens": row["tokens"],
            "rounds": row["passes"],
            "reference": whole_tau,
        }
        for row in rows
    }
    known = gguf_measured(output)  # of types that were measured before
    (output / MEASURED).write_text(json.dumps(known | measured, indent=1) + "\n")
    return rows


# ------------------------------------------------------------------------------------------------------------- comparison


def their_rounds(
    answer: list[int], drafts: list[list[int]], prompt: int, ids: list[int], engine: Engine, size: int
) -> list[Round]:
    """An engine's drafts with the anchors that they belong to; a draft behind the end of the budget belongs to none."""
    at, found = prompt, []
    for drafted in drafts:
        if at >= len(ids) - 1:
            break
        accepted = agreeing(drafted, ids[at + 1 :])
        found.append(Round(at, len(drafted) + 1 if engine.cut else size, drafted, accepted))
        at += accepted + 1
    return found


def compare(name: str, variant: str, did: dict[str, Any], work: Work, ours: Ours) -> dict[str, Any]:
    """Counts of one engine with one drafter. telling: proposals (prompts, where an engine tells only counts) in which this config and that of
    the export differ, so that an engine which ignored the difference would be found out."""
    engine, texts = ENGINES[name], list(zip(work.prompts, work.texts))
    row: dict[str, Any] = {"engine": name, "variant": variant, "loaded": did["loaded"], "prompts": len(texts)}
    answers = did.get("answers")
    if answers is not None:
        row["text_identical"] = sum(a == text[len(p["ids"]) :] for a, (p, text) in zip(answers, texts))
    mine = [ours.rounds(variant, text, len(p["ids"]), engine) for p, text in texts]
    row["our_accepted"] = sum(r.accepted for rounds in mine for r in rounds)
    row["our_rounds"] = sum(map(len, mine))
    if "rounds" in did:  # counts alone
        theirs = [[tuple(r) for r in rounds] for rounds in did["rounds"]]
        row["accepted"] = sum(accepted for rounds in theirs for _, accepted in rounds)
        row["rounds"] = sum(map(len, theirs))
        counts = [[(len(r.drafted), r.accepted) for r in rounds] for rounds in mine]
        row["rounds_identical"] = sum(m == t for m, t in zip(counts, theirs))
        base = [ours.rounds(BASE, text, len(p["ids"]), engine) for p, text in texts]
        row["telling"] = sum(m != [(len(r.drafted), r.accepted) for r in b] for m, b in zip(counts, base))
        return row
    counted = {"proposals": 0, "identical": 0, "near_ties": 0, "telling": 0}
    in_ring = {"proposals": 0, "identical": 0}
    spec = ours.steps[variant].drafter.spec
    parted: list[dict[str, Any]] = []
    theirs = []
    for i, ((prompt, text), drafts) in enumerate(zip(texts, did["drafts"])):
        if name == "sglang":
            found = [
                Round(m.anchor, m.slots, d, agreeing(d, text[m.anchor + 1 :]))
                for m, d in zip(mine[i], drafts, strict=True)
            ]
        else:
            found = their_rounds(answers[i], drafts, len(prompt["ids"]), text, engine, work.block_size)
        theirs.append(found)
        where = [(r.anchor, r.slots) for r in found]
        expected = ours.proposals(variant, text, where)
        base = expected if variant == BASE else ours.proposals(BASE, text, where)
        broken = first_broken(found, spec.sliding_window) if engine.ring else len(found)
        for j, (r, own, other) in enumerate(zip(found, expected, base)):
            own = own[: len(r.drafted)]
            if j >= broken:
                in_ring["proposals"] += 1
                in_ring["identical"] += own == r.drafted
                continue
            counted["proposals"] += 1
            counted["identical"] += own == r.drafted
            counted["telling"] += own != other[: len(r.drafted)]
            if own != r.drafted:
                gap = ours.gap(variant, text, Round(r.anchor, r.slots, own, 0), r.drafted)
                counted["near_ties"] += gap <= NEAR_TIE
                parted.append({"prompt": i, "anchor": r.anchor, "gap": round(gap, 6)})
    row |= counted | ({"in_broken_ring": in_ring} if in_ring["proposals"] else {})
    row["accepted"] = sum(r.accepted for rounds in theirs for r in rounds)
    row["rounds"] = sum(map(len, theirs))
    row["rounds_identical"] = sum([r.accepted for r in m] == [r.accepted for r in t] for m, t in zip(mine, theirs))
    row["parted"] = parted[:20]
    return row


def first_broken(rounds: list[Round], window: int | None) -> int:
    """Index of the first round whose context grew by one token after the ring of window - 1 places was full."""
    for j in range(1, len(rounds)):
        if window is not None and rounds[j - 1].accepted == 0 and rounds[j - 1].anchor >= window - 1:
            return j
    return len(rounds)


def wrong(row: dict[str, Any]) -> str | None:
    """Why a row is not what the engine must show, or None."""
    engine = ENGINES[row["engine"]]
    name = f"{row['engine']}, {row['variant']}"
    if not row["loaded"]:
        return f"{name}: it did not load every tensor"
    if row.get("text_identical", row["prompts"]) != row["prompts"]:
        return f"{name}: {row['prompts'] - row['text_identical']} answers are not the target's greedy ones"
    if engine.least is None:
        differ = row["prompts"] - row["rounds_identical"]
        return f"{name}: other rounds than ours on {differ} prompts" if differ else None
    rest = row["proposals"] - row["identical"]
    if row["identical"] < engine.least * row["proposals"] or (engine.least < 1 and rest > row["near_ties"]):
        return f"{name}: {row['identical']} of {row['proposals']} proposals are ours, {row['near_ties']} of the others near ties"
    return None


# ------------------------------------------------------------------------------------------------------------ the command


def markdown(report: dict[str, Any]) -> str:
    """The rows as a table."""
    lines = [
        "| engine | config | loads | proposals | identical | near ties | accepted: theirs / ours | prompts with our rounds | texts identical |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        ring = row.get("in_broken_ring")
        also = f" (+ {ring['identical']} of {ring['proposals']} in the broken ring)" if ring else ""
        drafted = (
            [str(row["proposals"]), f"{row['identical']}{also}", str(row["near_ties"])]
            if "proposals" in row
            else ["-"] * 3
        )
        same = f"{row['text_identical']} of {row['prompts']}" if "text_identical" in row else "-"
        cells = [row["engine"], row["variant"], "yes" if row["loaded"] else "NO", *drafted,
                 f"{row['accepted']} / {row['our_accepted']}", f"{row['rounds_identical']} of {row['prompts']}", same]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    if report.get("stored_as"):
        lines += [
            "",
            "| drafter as | MiB | drafted | accepted | tau | texts identical |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        columns = ("type", "mebibytes", "drafted", "accepted", "tau", "texts_identical")
        lines += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in report["stored_as"]]
    return "\n".join(lines) + "\n"


def roundtrip(work: Work, ours: Ours, engines: list[str]) -> dict[str, Any]:
    """Rows of all engines with all drafters, and what is wrong with them."""
    report: dict[str, Any] = {"engines": {}, "rows": [], "wrong": []}
    for name in engines:
        result = run_worker(name, work, ours)
        report["engines"][name] = {"version": result["engine"], "seconds": result["seconds"]}
        report["rows"] += [compare(name, variant, did, work, ours) for variant, did in result["drafters"].items()]
    report["wrong"] = [text for row in report["rows"] if (text := wrong(row)) is not None]
    return report


def main(argv: list[str]) -> int:
    commands = argparse.ArgumentParser(prog="python scripts/engine_roundtrip.py", description=__doc__.split("\n\n")[0])
    commands.add_argument(
        "drafter", help="folder of an exported drafter; export.precision=float32 makes the comparison exact"
    )
    commands.add_argument("--target", default="embedded", help="folder or Hub id of its target, or embedded")
    commands.add_argument("--engines", default="reference,llama.cpp,mlx", help=f"of {', '.join(ENGINES)}")
    commands.add_argument("--prompts", type=int, default=100, help="how many (default: 100)")
    commands.add_argument("--prompts-from", default="embedded", help="JSONL of prompts, or embedded: the demo's, of which the drafter has seen the answers")  # fmt: skip
    commands.add_argument("--max-new-tokens", type=int, default=128)
    commands.add_argument("--variants", default="", help="comma-separated, or all; besides the config as exported")
    commands.add_argument(
        "--gguf-types",
        default="",
        help="also the drafter in these types in llama.cpp: f32, bf16, f16, q8_0, q4_0; kept in OUTPUT/gguf, as --push wants them",
    )
    commands.add_argument("--output", type=Path, default=Path("outputs/engines"), help="folder to write")
    args = parse(commands, argv)
    engines = [name for name in args.engines.split(",") if name]
    unknown = set(engines) - ENGINES.keys()
    if unknown:
        raise ValueError(f"--engines: {', '.join(sorted(unknown))} is none of {', '.join(ENGINES)}")
    torch.set_num_threads(1)
    target = convert_gguf.local_target(args.target, weights=True)
    prompts = Path(resolve(args.prompts_from, "heldout"))
    which = None if args.variants == "all" else [v.strip() for v in args.variants.split(",") if v.strip()]
    with tempfile.TemporaryDirectory() as folder:
        work, ours = prepare(
            Path(args.drafter), target, prompts, Path(folder), count=args.prompts, most=args.max_new_tokens, which=which
        )
        report = roundtrip(work, ours, engines)
        if args.gguf_types:
            name = Path(args.drafter).resolve().name
            report["stored_as"] = stored_as(work, ours, args.gguf_types.split(","), args.output / "gguf", name)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "engines.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.output / "engines.md").write_text(markdown(report))
    print(markdown(report), end="")
    for name, engine in report["engines"].items():
        print(f"{name}: {engine['version']}, {engine['seconds']} s")
    for text in report["wrong"]:
        print(f"wrong: {text}", file=sys.stderr)
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    run_command(main)
