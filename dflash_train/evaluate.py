"""The truth about a drafter on held-out prompts: teacher-forced acceptance, and real speculative decoding against plain decoding.

`python -m dflash_train.evaluate RUN_OR_EXPORT [-c RECIPE] [key=value ...]`; exit code 1 where decoding is not lossless, or where it takes
other rounds in fp32 than the teacher-forced walk (a train/serve gap).

Two taus, named apart because they look at different blocks: `accept_len` averages over uniformly drawn anchors; `walk_tau` follows
the rounds that decoding would take on the target's own text: the first anchor is the first answer token, a round counts
min(accepted + 1, tokens remaining), the next anchor is one past the accepted prefix. Decoding must agree with the walk.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dflash_train import ranks
from dflash_train.build import SOURCE_HELP, OpenedRun, open_source
from dflash_train.config.load import parse, parser, run_command
from dflash_train.config.schema import EvaluateConfig
from dflash_train.data.blocks import legal_anchors
from dflash_train.data.stream import assemble
from dflash_train.drafter.decode import DraftSession
from dflash_train.method import DraftStep, scatter_slots
from dflash_train.objective.loss import leading_hits, transform_logits
from dflash_train.target.cache import can_roll_back, crop, make_cache
from dflash_train.target.hf import HFTarget
from dflash_train.types import PackedBatch, Prompt, TokenizedExample

GAP = 0.05  # share of prompts whose rounds may part from the walk's in fp32: the cached and the batched forward round differently,
# and a drafter undecided between two candidates may then take either


@dataclass(kw_only=True)
class Tau:
    """Pooled acceptance: tokens after the first answer token / rounds. The bonus token is included."""

    tokens: int = 0
    rounds: int = 0

    @property
    def value(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")

    def as_dict(self) -> dict[str, Any]:
        return {"value": round(self.value, 4) if self.rounds else None, "rounds": self.rounds, "tokens": self.tokens}


def move(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with all its tensors on `device`."""
    for record in (batch, batch.blocks):
        for name, value in vars(record).items():
            if isinstance(value, torch.Tensor):
                setattr(record, name, value.to(device, non_blocking=True))
    return batch


# --- teacher-forced ---------------------------------------------------------------------------------------------


@torch.no_grad()
def accepted_at_anchors(
    step: DraftStep, example: TokenizedExample, *, end: int | None = None, blocks_at_once: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(anchors, accepted by the selector's path, accepted by the base top-1) at every legal anchor of one document.

    end: position at which the token budget runs out, if there is one; blocks are cut there, as decoding cuts them. By default a document with
    finish_reason length ends its budget with its text.
    """
    spec = step.drafter.spec
    anchors = legal_anchors(example.supervised)
    T = len(example.token_ids)
    decay_S = np.r_[0.0, np.ones(spec.block_size - 1)]
    if end is None and example.finish_reason == "length":
        end = T
    slots = np.full(len(anchors), spec.block_size) if end is None else np.minimum(end - anchors, spec.block_size)
    device = step.target.device
    context = move(assemble([[example]], T, [anchors[:0]], num_blocks=1, decay_S=decay_S), device)
    features = step.target.read(context)
    path, base = [np.empty(0, np.int64)], [np.empty(0, np.int64)]  # a document may have no anchor at all
    for i in range(0, len(anchors), blocks_at_once):
        some = slice(i, i + blocks_at_once)
        batch = assemble(
            [[example]], T, [anchors[some]], num_blocks=blocks_at_once, decay_S=decay_S, slots=[slots[some]]
        )
        batch = move(batch, device)
        with step.autocast():
            # Every document has its own length: the dense kernel needs no compilation for each.
            scores = step.score(batch, features, flex=False)
        for kept, hits in ((path, scores["hit_M"]), (base, scores["base_hit_M"])):
            correct = scatter_slots(hits, batch.blocks)
            kept.append(leading_hits(correct, batch.blocks.supervised_BNS)[0, : len(anchors[some])].cpu().numpy())
    return anchors, np.concatenate(path), np.concatenate(base)


def walk_rounds(anchors: np.ndarray, accepted: np.ndarray) -> list[int]:
    """Tokens gained by each round of the walk along one supervised stretch of answer (one list for all stretches of the document)."""
    rounds: list[int] = []
    by_anchor = dict(zip(anchors.tolist(), accepted.tolist(), strict=True))
    for first in [a for a in by_anchor if a - 1 not in by_anchor]:
        last = first
        while last in by_anchor:
            last += 1  # the final token of the stretch: never an anchor
        at = first
        while at < last:
            gained = min(by_anchor[at] + 1, last - at)
            rounds.append(gained)
            at += gained
    return rounds


def teacher_forced(step: DraftStep, examples: list[TokenizedExample]) -> dict[str, Any]:
    """Held-out walk and uniform-anchor acceptance, per domain and pooled, of the selector's path and of the base top-1.

    Ranks share the documents; every rank calls it and gets the whole table.
    """
    was_training = step.training
    step.eval()
    names = ("walk_tau", "base_walk_tau", "accept_len", "base_accept_len")
    domains = [*sorted({e.domain for e in examples}), "all"]
    sums = np.zeros((len(names), len(domains), 2))
    for example in examples[ranks.rank() :: ranks.world_size()]:
        anchors, path, base = accepted_at_anchors(step, example)
        columns = [domains.index(example.domain), len(domains) - 1]
        for first, accepted in ((0, path), (1, base)):
            rounds = walk_rounds(anchors, accepted)
            sums[first, columns] += (sum(rounds), len(rounds))
            sums[first + 2, columns] += (int(accepted.sum()) + len(accepted), len(accepted))
    step.train(was_training)
    pooled = ranks.sum_over_ranks(torch.from_numpy(sums).to(step.target.device)).tolist()
    return {
        name: {d: Tau(tokens=int(t), rounds=int(r)).as_dict() for d, (t, r) in zip(domains, table, strict=True)}
        for name, table in zip(names, pooled, strict=True)
    }


# --- real decoding ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Decoded:
    """token_ids: the answer, its stop token included; rounds: tokens gained per verification; seconds: wall clock without prefill."""

    token_ids: list[int]
    rounds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    finish_reason: str = "length"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def plain_decode(target: HFTarget, prompt_ids: list[int], max_new_tokens: int, stop_ids: set[int]) -> Decoded:
    """Greedy decoding, one token per forward."""
    cache = make_cache(target.model.config)
    logits, _ = target.step(torch.tensor([prompt_ids], device=target.device), cache, logits_to_keep=1)
    begun = _now(target.device)
    answer = [int(logits[0, -1].argmax())]
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        logits, _ = target.step(torch.tensor([answer[-1:]], device=target.device), cache)
        answer.append(int(logits[0, -1].argmax()))
    return Decoded(
        token_ids=answer,
        seconds=_now(target.device) - begun,
        finish_reason="stop" if answer[-1] in stop_ids else "length",
    )


@torch.inference_mode()
def speculative_decode(
    step: DraftStep, prompt_ids: list[int], max_new_tokens: int, stop_ids: set[int], block_size: int | None = None
) -> Decoded:
    """Greedy speculative decoding: draft a block, verify it in one target forward, keep the agreeing prefix and the bonus token.

    Lossless: every kept token is the target's own argmax. A block never reaches past the token budget. block_size below the
    trained one drafts shorter blocks.
    """
    target: HFTarget = step.target
    spec, device = step.drafter.spec, target.device
    K = block_size or spec.block_size
    if not 2 <= K <= spec.block_size:
        raise ValueError(f"block_size = {K}: must be in [2, {spec.block_size}], the trained block")
    cache, session = make_cache(target.model.config), DraftSession(step.drafter)
    if not can_roll_back(cache):
        raise ValueError(
            f"target.path = {target.info.path}: has linear-attention layers, whose state cannot be rolled back after a rejected "
            "draft; set evaluate.decode=false for the teacher-forced metrics alone, and decode with an engine"
        )
    logits, features = target.step(torch.tensor([prompt_ids], device=device), cache, logits_to_keep=1)
    begun = _now(device)
    answer, rounds = [int(logits[0, -1].argmax())], []
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        S = min(K, max_new_tokens - len(answer) + 1)
        with step.autocast():
            session.extend(features.features_BTF.to(step.dtype))
        draft = _propose(step, session, answer[-1], S)
        logits, features = target.step(torch.cat([draft.new_tensor([answer[-1]]), draft])[None], cache)
        truth = logits[0].argmax(-1)
        accepted = int((draft == truth[:-1]).long().cumprod(0).sum())
        gained = truth[: min(accepted + 1, max_new_tokens - len(answer))].tolist()
        for i, token in enumerate(gained):
            if token in stop_ids:
                gained = gained[: i + 1]
                break
        answer += gained
        rounds.append(len(gained))
        kept = session.length + len(gained)  # the anchor and all but the newest token are now context
        crop(cache, kept)
        features = features._replace(features_BTF=features.features_BTF[:, : len(gained)])
    return Decoded(
        token_ids=answer,
        rounds=rounds,
        seconds=_now(device) - begun,
        finish_reason="stop" if answer[-1] in stop_ids else "length",
    )


def _propose(step: DraftStep, session: DraftSession, anchor: int, slots: int) -> torch.Tensor:
    """slots - 1 drafted token ids."""
    spec, device = step.drafter.spec, step.target.device
    ids = torch.full((1, slots), spec.mask_token_id, device=device)
    ids[0, 0] = anchor
    with step.autocast():
        hidden_SH = session.hidden(step.embed(ids))[0, 1:]
        raw = hidden_SH @ step.target.head_VH.to(hidden_SH.dtype).T
        selector = step.drafter.candidate_selector
        if selector is None:
            return raw.argmax(-1)
        unary, candidates = raw.float().topk(selector.top_k, -1)
        unary = transform_logits(unary, spec.output_multiplier, spec.final_logit_softcapping)
        return selector.walk(hidden_SH[None], unary[None], candidates[None], ids[0, :1])[0]


@torch.inference_mode()
def is_near_tie(
    target: HFTarget, prompt_ids: list[int], plain: list[int], other: list[int], bound: float | None
) -> bool:
    """Whether two greedy answers part where the target itself is undecided: its two best logits (recomputed without a cache) lie
    closer than `bound`; None is 1e-4 in fp32, and two units in the last place of the larger logit in 16-bit formats."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    if at >= min(len(plain), len(other)):
        return False  # one is the beginning of the other: nothing was undecided
    ids = torch.tensor([prompt_ids + plain[:at]], device=target.device)
    logits = target.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    best = logits.float().topk(2).values
    if bound is None:
        bound = 1e-4 if logits.dtype is torch.float32 else 2 * torch.finfo(logits.dtype).eps * float(best[0].abs())
    chosen = logits.float()[[plain[at], other[at]]].min()  # both must be among the best, not only the best two close
    return float(best[0] - chosen) <= bound


def decode_report(
    step: DraftStep, prompts: list[Prompt], config: EvaluateConfig, stop_ids: set[int], progress: Any = None
) -> dict[str, Any]:
    """Decode every prompt plainly and speculatively; compare tokens, count rounds, and check them against the walk.

    Keys: tau {domain: {value, rounds, tokens}}, lossless, identical, near_ties, different, speedup, walk_tau, walk_agrees (share of prompts whose
    rounds equal the walk's), parted_ids (the other prompts), train_serve_gap (more than GAP of them parted although target and drafter compute in fp32,
    where rounding decides only ties), repetition (share of answer tokens inside a repeated 8-gram), seconds.
    """
    if not prompts:
        raise ValueError("no held-out prompts to decode; see data.heldout and evaluate.max_prompts")
    step.eval()
    target: HFTarget = step.target
    tau: dict[str | None, Tau] = defaultdict(Tau)
    walk: dict[str | None, Tau] = defaultdict(Tau)
    seconds = {"plain": 0.0, "speculative": 0.0}
    counts = {"identical": 0, "near_ties": 0, "different": 0, "walk_agrees": 0}
    repeated = total = 0
    differing: list[str] = []
    parted: list[str] = []
    for prompt in progress(prompts) if progress else prompts:
        plain = plain_decode(target, prompt.token_ids, config.max_new_tokens, stop_ids)
        fast = speculative_decode(step, prompt.token_ids, config.max_new_tokens, stop_ids)
        seconds["plain"] += plain.seconds
        seconds["speculative"] += fast.seconds
        if fast.token_ids == plain.token_ids:
            counts["identical"] += 1
        elif is_near_tie(target, prompt.token_ids, plain.token_ids, fast.token_ids, config.near_tie):
            counts["near_ties"] += 1
        else:
            counts["different"] += 1
            differing.append(prompt.id)
        example = _as_example(prompt, fast)
        anchors, path, _ = accepted_at_anchors(step, example, end=len(prompt.token_ids) + config.max_new_tokens)
        rounds = walk_rounds(anchors, path)
        counts["walk_agrees"] += rounds == fast.rounds
        if rounds != fast.rounds:
            parted.append(prompt.id)
        for table, gained in ((tau, fast.rounds), (walk, rounds)):
            for domain in (prompt.domain, None):
                table[domain].tokens += sum(gained)
                table[domain].rounds += len(gained)
        repeated += repeated_tokens(plain.token_ids)
        total += len(plain.token_ids)
    n = len(prompts)
    in_fp32 = step.dtype is torch.float32 and target.head_VH.dtype is torch.float32
    pooled, pooled_walk = tau.pop(None, Tau()), walk.pop(None, Tau())  # a domain may be called "all"
    return {
        "prompts": n,
        "tau": {d: t.as_dict() for d, t in sorted(tau.items())},
        "tau_all": pooled.as_dict(),
        "walk_tau": pooled_walk.as_dict(),
        "walk_tau_by_domain": {d: t.as_dict() for d, t in sorted(walk.items())},
        "walk_agrees": counts["walk_agrees"] / n,
        "parted_ids": parted,
        "train_serve_gap": in_fp32 and len(parted) > GAP * n,
        "lossless": counts["different"] == 0,
        "identical": counts["identical"],
        "near_ties": counts["near_ties"],
        "different": counts["different"],
        "different_ids": differing,
        "speedup": round(seconds["plain"] / seconds["speculative"], 3) if seconds["speculative"] else None,
        "plain_seconds": round(seconds["plain"], 3),
        "speculative_seconds": round(seconds["speculative"], 3),
        "repetition": round(repeated / total, 4),
    }


def _as_example(prompt: Prompt, decoded: Decoded) -> TokenizedExample:
    ids = np.array(prompt.token_ids + decoded.token_ids, np.int32)
    supervised = np.arange(len(ids)) >= len(prompt.token_ids)
    return TokenizedExample(
        id=prompt.id, domain=prompt.domain, token_ids=ids, supervised=supervised, finish_reason=decoded.finish_reason
    )


def repeated_tokens(ids: list[int], n: int = 8) -> int:
    """Tokens covered by an n-gram that occurs more than once in the answer, its first occurrence included."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    times = Counter(grams)
    inside = np.zeros(len(ids), bool)
    for i, gram in enumerate(grams):
        if times[gram] > 1:
            inside[i : i + n] = True
    return int(inside.sum())


def _two(value: float | None) -> str:
    """Two decimals, or a dash where there was no round to measure."""
    return "-" if value is None else f"{value:.2f}"


def report_text(report: dict[str, Any]) -> str:
    """The decoding report as a table for a person."""
    lines = [f"{'domain':<16}{'tau':>7}{'rounds':>9}{'tokens':>9}"]
    for domain, t in [*report["tau"].items(), ("all", report["tau_all"])]:
        lines.append(f"{domain:<16}{_two(t['value']):>7}{t['rounds']:>9}{t['tokens']:>9}")
    verdict = "lossless" if report["lossless"] else "NOT LOSSLESS"
    lines += [
        f"{verdict}: {report['identical']} of {report['prompts']} outputs token-identical to plain greedy decoding, {report['near_ties']} near ties, {report['different']} different",
        f"walk tau {_two(report['walk_tau']['value'])}; decoding took the walk's rounds on {report['walk_agrees']:.0%} of the prompts",
        f"speed: {report['speedup']:.2f}x plain decoding ({report['plain_seconds']:.1f} s against {report['speculative_seconds']:.1f} s); repetition {report['repetition']:.1%}",
    ]
    if report["train_serve_gap"]:
        named = ", ".join(report["parted_ids"][:3])
        lines.append(
            f"train/serve gap: decoding took {report['tau_all']['rounds']} rounds, the teacher-forced walk {report['walk_tau']['rounds']}; "
            f"in fp32 both must take the same, and {len(report['parted_ids'])} of {report['prompts']} prompts differ (first: {named})"
        )
    return "\n".join(lines)


def passed(decoded: dict[str, Any]) -> bool:
    """Whether a decoding report is good: lossless, and decoding does what training measures."""
    return decoded["lossless"] and not decoded["train_serve_gap"]


def evaluate(run: OpenedRun) -> dict[str, Any]:
    """Everything that the recipe's evaluation asks for, of an opened run (`build.OpenedRun`); also written to
    <output_dir>/evaluation.json. Keys: source, trained_steps, teacher_forced (where the held-out rows have answers), decoded."""
    config, recipe = run.recipe.evaluate, run.recipe
    result: dict[str, Any] = {"source": run.source.name, "trained_steps": run.trained_steps}
    examples = run.heldout_examples()
    if examples:
        result["teacher_forced"] = teacher_forced(run.step, examples)
    if config.decode:
        bar = None
        if recipe.track.progress:
            bar = lambda items: tqdm(items, desc="decoding", unit="prompt", file=sys.stderr)
        result["decoded"] = decode_report(run.step, run.heldout_prompts(), config, run.stop_ids, bar)
    path = Path(recipe.output_dir) / "evaluation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    return result


def main(argv: list[str]) -> int:
    args = parse(parser("python -m dflash_train.evaluate", __doc__.split("\n\n")[0], source=SOURCE_HELP), argv)
    run = open_source(args.source, args.config, args.overrides)
    result = evaluate(run)
    for name, table in result.get("teacher_forced", {}).items():
        print(
            f"{name}: " + ", ".join(f"{d} {_two(t['value'])} ({t['tokens']}/{t['rounds']})" for d, t in table.items())
        )
    if "decoded" in result:
        print(report_text(result["decoded"]))
    print(f"written to {Path(run.recipe.output_dir) / 'evaluation.json'}")
    return 0 if "decoded" not in result or passed(result["decoded"]) else 1


if __name__ == "__main__":
    run_command(main)
