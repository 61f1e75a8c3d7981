"""The truth about a drafter on held-out prompts: teacher-forced acceptance, and real speculative decoding against plain decoding.

`python -m dflash_train.evaluate RUN_OR_EXPORT [--against OTHER] [-c RECIPE] [key=value ...]`; exit code 1 where decoding is not lossless, or
where it takes other rounds than the teacher-forced walk (a train/serve gap).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dflash_train import acceptance
from dflash_train.acceptance import PromptResult, Tau
from dflash_train.build import SOURCE_HELP, OpenedRun, open_source
from dflash_train.client import check_source, require_client
from dflash_train.config.load import CheckFailed, parse, parser, run_command
from dflash_train.config.schema import EvaluateConfig
from dflash_train.dashboard.page import write_report
from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.single import Timed, plain_decode, speculative_decode
from dflash_train.generation.slots import Slots, slots_that_fit
from dflash_train.generation.speculative import SpeculativeSlots
from dflash_train.generation.verify import Sampling
from dflash_train.method import DraftStep
from dflash_train.target.hf import HFTarget
from dflash_train.track import send
from dflash_train.types import Prompt
from dflash_train.walk import answered, at_anchors, in_groups, teacher_forced, walk_rounds

GAP = 0.05  # share of prompts whose rounds may part from the walk's in fp32: the cached and the batched forward round differently,
# and a drafter undecided between two candidates may then take either
GAP_16_BIT = (
    0.03  # relative difference of the pooled taus in 16 bits, where rounding parts many prompts in either direction
)
MOST_TOGETHER = 256

Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(kw_only=True)
class Decoding:
    """Prompts decoded plainly and speculatively. seconds without loading and capture: of one prompt after the other, or of all together
    where `together` > 1. cost: milliseconds per cycle and the drafter's share."""

    results: list[PromptResult]
    plain_seconds: float
    speculative_seconds: float
    together: int
    cost: dict[str, float]


# --- decoding ---------------------------------------------------------------------------------------------------


def decode_prompts(
    step: DraftStep,
    prompts: list[Prompt],
    config: EvaluateConfig,
    stop_ids: set[int],
    *,
    block_size: int | None = None,
    plain: bool = True,
    progress: Progress | None = None,
) -> Decoding:
    """Decode every prompt, together in slots where the target allows it (CUDA, 16 bits), else one after the other."""
    trained = step.drafter.spec.block_size
    block_size = trained if block_size is None else block_size
    if not 2 <= block_size <= trained:
        raise ValueError(f"block_size = {block_size}: must be in [2, {trained}], the trained block")
    step.eval()
    batched = step.target.side_by_side and step.dtype != torch.float32 and step.target.device.type == "cuda"
    decoding = (_together if batched else _one_by_one)(step, prompts, config, stop_ids, block_size, plain, progress)
    if config.temperature == 0:
        for prompt, result in zip(prompts, decoding.results, strict=True):
            result.verdict = (
                None if result.plain_ids is None else _verdict(step.target, prompt, result, config.near_tie)
            )
    return decoding


def _one_by_one(
    step: DraftStep,
    prompts: list[Prompt],
    config: EvaluateConfig,
    stop_ids: set[int],
    block_size: int | None,
    plain: bool,
    progress: Progress | None,
) -> Decoding:
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    results, seconds, drafting, cycles = [], [0.0, 0.0], 0.0, 0
    for i, prompt in enumerate(progress(prompts) if progress else prompts):
        seed = config.seed * 1_000_003 + i
        answer = None
        if plain:
            answer = plain_decode(step.target, prompt.token_ids, config.max_new_tokens, stop_ids, sampling, seed)
            seconds[0] += answer.seconds
        fast = speculative_decode(step, prompt.token_ids, config.max_new_tokens, stop_ids, block_size, sampling, seed)
        seconds[1] += fast.seconds
        drafting, cycles = drafting + fast.draft_seconds, cycles + len(fast.rounds)
        results.append(_result(step, prompt, fast, config, block_size, answer and answer.token_ids))
    cost = {"cycle_ms": 1e3 * seconds[1] / cycles, "draft_ms": 1e3 * drafting / cycles} if cycles else {}
    return Decoding(results=results, plain_seconds=seconds[0], speculative_seconds=seconds[1], together=1, cost=cost)


def _together(
    step: DraftStep,
    prompts: list[Prompt],
    config: EvaluateConfig,
    stop_ids: set[int],
    block_size: int | None,
    plain: bool,
    progress: Progress | None,
) -> Decoding:
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    requests = [
        Request(
            messages=[],
            prompt_ids=prompt.token_ids,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed * 1_000_003 + i,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        for i, prompt in enumerate(prompts)
    ]
    length = max(len(prompt.token_ids) for prompt in prompts) + config.max_new_tokens
    fit = slots_that_fit(step.target.model, length + step.drafter.spec.block_size, draft=step.drafter.spec)
    if fit < 1:
        raise ValueError(
            f"evaluate.max_new_tokens = {config.max_new_tokens}: the memory that is free beside target and drafter does not hold one sequence of "
            f"{length} tokens; lower it, or leave out the longest prompts"
        )
    size = min(fit, config.batch_size or MOST_TOGETHER, len(prompts))
    shape = {"slots": size, "length": length, "max_new": config.max_new_tokens}
    plain_answers, plain_seconds = None, 0.0
    if plain:
        slots = Slots(step.target.model, stop_ids, **shape)
        plain_answers, plain_seconds = _run(slots, requests, None)
        del slots
    fast_slots = SpeculativeSlots(step, stop_ids, **shape, block_size=block_size)
    fast, seconds = _run(fast_slots, requests, progress)
    cost = fast_slots.cost(sampled=config.temperature > 0)
    results = [
        _result(step, prompt, answer, config, block_size, plain_answers[i].token_ids if plain_answers else None)
        for i, (prompt, answer) in enumerate(zip(prompts, fast, strict=True))
    ]
    return Decoding(results=results, plain_seconds=plain_seconds, speculative_seconds=seconds, together=size, cost=cost)


def _run(slots: Slots, requests: list[Request], progress: Progress | None) -> tuple[list[Any], float]:
    """(answers in order, seconds without the capture of graphs)."""
    slots.warm_up(sampled=any(request.temperature > 0 for request in requests))
    started = time.perf_counter()
    for key, request in enumerate(requests):
        slots.submit(key, request)
    answers: dict[int, Any] = {}
    for done in progress(range(len(requests))) if progress else range(len(requests)):
        while len(answers) <= done:
            answers.update(slots.advance())
    return [answers[key] for key in range(len(requests))], time.perf_counter() - started


def _result(
    step: DraftStep,
    prompt: Prompt,
    decoded: Decoded | Timed,
    config: EvaluateConfig,
    block_size: int | None,
    plain_ids: list[int] | None,
) -> PromptResult:
    K = step.drafter.spec.block_size if block_size is None else block_size
    before = np.cumsum([1, *decoded.rounds])[:-1]
    return PromptResult(
        id=prompt.id,
        domain=prompt.domain,
        tags=prompt.tags,
        prompt_tokens=len(prompt.token_ids),
        token_ids=decoded.token_ids,
        finish_reason=decoded.finish_reason,
        rounds=list(decoded.rounds),
        accepted=list(decoded.accepted),
        limits=np.minimum(K, config.max_new_tokens - before).tolist(),
        plain_ids=plain_ids,
    )


def _verdict(target: HFTarget, prompt: Prompt, result: PromptResult, bound: float | None) -> str:
    assert result.plain_ids is not None
    if result.token_ids == result.plain_ids:
        return "identical"
    return (
        "near_tie" if is_near_tie(target, prompt.token_ids, result.plain_ids, result.token_ids, bound) else "different"
    )


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


def add_walks(step: DraftStep, prompts: list[Prompt], results: list[PromptResult], config: EvaluateConfig) -> None:
    """Set `walk_rounds` of each result: the rounds of the teacher-forced walk over the text that was decoded."""
    examples = [
        answered(prompt, result.token_ids, result.finish_reason)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    for group in in_groups(examples, step.target.device):
        ends = [len(prompts[i].token_ids) + config.max_new_tokens for i in group]
        for i, found in zip(group, at_anchors(step, [examples[i] for i in group], ends=ends), strict=True):
            results[i].walk_rounds = walk_rounds(found.anchors, found.path)


# --- the report -------------------------------------------------------------------------------------------------


def decode_report(
    step: DraftStep,
    prompts: list[Prompt],
    config: EvaluateConfig,
    stop_ids: set[int],
    progress: Progress | None = None,
    keep: list[PromptResult] | None = None,
) -> dict[str, Any]:
    """Decode every prompt plainly and speculatively; compare tokens, count rounds, and check them against the walk.

    Besides what `acceptance.measure` gives (lossless is None at a temperature, where it is a matter of distributions): walk_tau, walk_agrees (share of
    prompts whose rounds equal the walk's), parted_ids (the others), train_serve_gap (in fp32 more than GAP of them parted; in 16 bits the two taus
    differ by more than GAP_16_BIT), speedup, tokens_per_second, cost, memory, block_sizes (the sweep). `keep` receives the single results.
    """
    if not prompts:
        raise ValueError("no held-out prompts to decode; see data.heldout and evaluate.max_prompts")
    decoding = decode_prompts(step, prompts, config, stop_ids, progress=progress)
    results = decoding.results
    if keep is not None:
        keep += results
    report = acceptance.measure(results, step.drafter.spec.block_size, config.seed) | {
        "temperature": config.temperature
    }
    report |= _walk_report(step, prompts, results, config) if config.temperature == 0 else {"train_serve_gap": False}
    report |= _speed_report(step, decoding)
    if config.block_sizes:
        report["block_sizes"] = {str(K): _shorter(step, prompts, config, stop_ids, K) for K in config.block_sizes}
    return report


def _walk_report(
    step: DraftStep, prompts: list[Prompt], results: list[PromptResult], config: EvaluateConfig
) -> dict[str, Any]:
    add_walks(step, prompts, results, config)
    parted = [r.id for r in results if r.walk_rounds != r.rounds]
    walked = [r.walk_rounds or [] for r in results]
    decoded, walk = acceptance.pooled(results), Tau(tokens=sum(map(sum, walked)), rounds=sum(map(len, walked)))
    in_fp32 = step.dtype is torch.float32 and step.target.head_VH.dtype is torch.float32
    if in_fp32:
        gap = len(parted) > GAP * len(results)
    else:
        gap = bool(walk.rounds) and abs(decoded.value / walk.value - 1) > GAP_16_BIT
    return {
        "walk_tau": walk.as_dict(),
        "walk_agrees": 1 - len(parted) / len(results),
        "parted_ids": parted,
        "train_serve_gap": gap,
        "in_fp32": in_fp32,
    }


def _speed_report(step: DraftStep, decoding: Decoding) -> dict[str, Any]:
    fast, plain = decoding.speculative_seconds, decoding.plain_seconds
    tokens = sum(len(r.token_ids) for r in decoding.results)
    cost = {name: round(value, 3) for name, value in decoding.cost.items()}
    if cost:
        cost["draft_share"] = round(decoding.cost["draft_ms"] / decoding.cost["cycle_ms"], 4)
    spec = step.drafter.spec
    return {
        "speedup": round(plain / fast, 3) if fast and plain else None,
        "plain_seconds": round(plain, 3),
        "speculative_seconds": round(fast, 3),
        "tokens_per_second": round(tokens / fast, 1) if fast else None,
        "decoded_together": decoding.together,
        "cost": cost,
        "memory": {
            "drafter_mib": round(2 * sum(p.numel() for p in step.drafter.parameters()) / 2**20, 1),
            "context_bytes_per_token": 4 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim,
        },
    }


def _shorter(
    step: DraftStep, prompts: list[Prompt], config: EvaluateConfig, stop_ids: set[int], block_size: int
) -> dict[str, Any]:
    decoding = decode_prompts(step, prompts, config, stop_ids, block_size=block_size, plain=False)
    tau = acceptance.table(decoding.results, config.seed)["tau_all"]
    return tau | {"seconds": round(decoding.speculative_seconds, 3)}


def report_text(report: dict[str, Any]) -> str:
    """The decoding report as a table for a person."""
    lines = [acceptance.summary_lines(report)]
    if "walk_tau" in report:
        lines.append(
            f"walk tau {_two(report['walk_tau']['value'])}; decoding took the walk's rounds on {report['walk_agrees']:.0%} of the prompts"
        )
    if report["speedup"] is not None:
        alone = (
            "one prompt at a time"
            if report["decoded_together"] == 1
            else f"{report['decoded_together']} prompts together"
        )
        lines.append(
            f"speed: {report['speedup']:.2f}x plain decoding ({report['plain_seconds']:.1f} s against {report['speculative_seconds']:.1f} s, {alone}), "
            f"{report['tokens_per_second']:.0f} tokens/s"
        )
    if report["cost"]:
        cost, memory = report["cost"], report["memory"]
        lines.append(
            f"cost: {cost['draft_ms']:.1f} of {cost['cycle_ms']:.1f} ms per cycle are drafting ({cost['draft_share']:.1%}); "
            f"the drafter takes {memory['drafter_mib']:.0f} MiB in 16 bits and {memory['context_bytes_per_token']} bytes per token of context"
        )
    for K, t in report.get("block_sizes", {}).items():
        lines.append(f"block size {K}: tau {_two(t['value'])} ({t['tokens']}/{t['rounds']})")
    if report["train_serve_gap"]:
        lines.append(_gap_text(report))
    return "\n".join(lines)


def _gap_text(report: dict[str, Any]) -> str:
    took = f"train/serve gap: decoding took {report['tau_all']['rounds']} rounds, the teacher-forced walk {report['walk_tau']['rounds']}; "
    if report["in_fp32"]:
        named = ", ".join(report["parted_ids"][:3])
        return (
            took
            + f"in fp32 both must take the same, and {len(report['parted_ids'])} of {report['prompts']} prompts differ (first: {named})"
        )
    return took + f"in 16 bits the two taus may differ by {GAP_16_BIT:.0%}"


def _two(value: float | None) -> str:
    """Two decimals, or a dash where there was no round to measure."""
    return "-" if value is None else f"{value:.2f}"


def passed(decoded: dict[str, Any]) -> bool:
    """Whether a decoding report is good: lossless, and decoding does what training measures."""
    return decoded["lossless"] is not False and not decoded["train_serve_gap"]


# --- the command ------------------------------------------------------------------------------------------------


def evaluate(run: OpenedRun) -> dict[str, Any]:
    """Everything that the recipe's evaluation asks for, of an opened run (`build.OpenedRun`); also written to
    <output_dir>/evaluation.json, and the decoded prompts to decoded.jsonl. Keys: source, trained_steps, teacher_forced (where the held-out
    rows have answers), decoded."""
    config, recipe = run.recipe.evaluate, run.recipe
    result: dict[str, Any] = {
        "source": run.source.name,
        "trained_steps": run.trained_steps,
        "weights": run.weights_hash,
    }
    examples = run.heldout_examples()
    if examples:
        result["teacher_forced"] = teacher_forced(run.step, examples)
    results: list[PromptResult] = []
    if config.decode:
        result["decoded"] = decode_report(
            run.step, run.heldout_prompts(), config, run.stop_ids, bar(recipe.track.progress), results
        )
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1))
    if results:
        write_decoded(folder / "decoded.jsonl", results, run.outline.tokenizer)
    if (folder / "metrics.jsonl").exists():  # the run's own folder: its page and its W&B run show what was measured
        write_report(folder)
        send(recipe)
    return result


def bar(shown: bool) -> Progress | None:
    return (lambda items: tqdm(items, desc="decoding", unit="prompt", file=sys.stderr)) if shown else None


def write_decoded(path: Path, results: list[PromptResult], tokenizer: Any) -> None:
    """One row per decoded prompt, with the text of each token (`pieces`), so that a page can show rounds without the tokenizer."""
    with path.open("w", encoding="utf-8") as stream:
        for result in results:
            row = asdict(result)
            del row["plain_ids"]
            row["pieces"] = [tokenizer.decode([token]) for token in result.token_ids]
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def check_same_target(run: OpenedRun, other: OpenedRun) -> None:
    """Raise ValueError unless both drafters are for one target: another one reads other tokens, and answers something else."""
    mine, theirs = (f"{one.outline.info.path}@{one.outline.info.revision}" for one in (run, other))
    if mine != theirs:
        raise ValueError(
            f"--against: {run.source} is for the target {mine}, {other.source} for {theirs}; tau compares drafters of one target "
            "(target.path=... sets it for both)"
        )


def compare_sources(run: OpenedRun, other: OpenedRun) -> dict[str, Any]:
    """Both drafters decode the held-out prompts of the first; see `acceptance.compare`."""
    config, prompts = run.recipe.evaluate, run.heldout_prompts()
    show = bar(run.recipe.track.progress)
    decoded = [
        decode_prompts(one.step, prompts, config, run.stop_ids, plain=False, progress=show).results
        for one in (run, other)
    ]
    return acceptance.compare(*decoded, seed=config.seed)


def main(argv: list[str]) -> int:
    own = parser("python -m dflash_train.evaluate", __doc__.split("\n\n")[0], source=SOURCE_HELP)
    own.add_argument(
        "--against", metavar="OTHER", help="another run, checkpoint or export, decoded on the same prompts"
    )
    args = parse(own, argv)
    run = open_source(args.source, args.config, args.overrides)
    if args.against:
        other = open_source(args.against, args.config, args.overrides)
        check_same_target(run, other)
        print(acceptance.comparison_lines(compare_sources(run, other), args.source, args.against))
        return 0
    if run.recipe.data.heldout:
        require_client(run.recipe.evaluate, prompts=True)  # before an hour of decoding
    result = evaluate(run)
    for name, table in result.get("teacher_forced", {}).items():
        if name in ("recall", "oracle_accept_len"):
            print(f"{name}: " + ", ".join(f"@{k} {_two(value)}" for k, value in table.items()))
        elif isinstance(table, dict):
            print(
                f"{name}: "
                + ", ".join(f"{d} {_two(t['value'])} ({t['tokens']}/{t['rounds']})" for d, t in table.items())
            )
    if "decoded" in result:
        print(report_text(result["decoded"]))
    print(f"written to {Path(run.recipe.output_dir) / 'evaluation.json'}")
    if "decoded" not in result:
        return 0
    served = check_source(run)  # of an export only
    if served:
        print(served.line())
    if served and served.gap:
        raise CheckFailed(served.alarm())
    return 0 if passed(result["decoded"]) else 1


if __name__ == "__main__":
    run_command(main)
