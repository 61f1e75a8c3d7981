"""Figures of acceptance from what decoding recorded per prompt: pooled tau with its interval, per slot, by domain,
context length and mode, and two drafters compared on the same prompts. Pure; no model is involved.

tau = tokens after the first answer token / rounds, the verifier's bonus token included. It is always a ratio of sums,
never a mean of ratios. Prompts are what varies: intervals come from resampling prompts, since rounds of one prompt
resemble each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LEVEL = 0.95
DRAWS = 2000
FEW = 5  # prompts; below, a bootstrap interval is too narrow to be trusted
LOOPING = 0.5  # share of repeated tokens above which an answer loops
ALL, UNNAMED = "all", "no_domain"  # the pooled row; the rows of prompts without a domain, beside named ones
VERDICTS = ("identical", "near_tie", "different")


@dataclass(kw_only=True)
class PromptResult:
    """One decoded prompt.

    rounds: tokens gained by each verification, in order; limits: tokens that each round could have gained at most
    (fewer than block_size near the token budget); accepted: drafted tokens among the gained ones, per round, None
    where the decoder did not record them; plain_ids: what plain decoding answered, None where it was not run;
    verdict: "identical", "near_tie" or "different" against it, None likewise; walk_rounds: the rounds of the
    teacher-forced walk over the same text. tags: such as {"thinking": "on"}.

    What rounds alone tell: a round that the answer goes on after gained its accepted drafts and one token of the
    target's own, so accepted = gained - 1. Of the last round, which a stop token or the budget ended, they do not
    tell whether the last token was a draft (accepted = gained) or the target's own (gained - 1), unless the whole
    block was gained. Drafts behind the end of the answer count nowhere, even if the target agreed with them.
    """

    id: str
    domain: str
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    rounds: list[int]
    limits: list[int]
    accepted: list[int] | None = None
    plain_ids: list[int] | None = None
    verdict: str | None = None
    walk_rounds: list[int] | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Tau:
    """Pooled acceptance: tokens after the first answer token / rounds. The bonus token is included.

    interval: 95 % (low, high), where it was computed.
    """

    tokens: int = 0
    rounds: int = 0
    interval: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")

    def as_dict(self) -> dict[str, Any]:
        counts = {"value": round(self.value, 4) if self.rounds else None, "rounds": self.rounds, "tokens": self.tokens}
        return counts if self.interval is None else counts | {"interval": _rounded(self.interval)}


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(bound, 4) for bound in interval]


# --- pooled, and its interval -----------------------------------------------------------------------------------


def pooled(results: Sequence[PromptResult]) -> Tau:
    """tau over all rounds of all prompts."""
    tokens, rounds = (int(column) for column in _sums(results).sum(0))
    return Tau(tokens=tokens, rounds=rounds)


def bootstrap_interval(
    results: Sequence[PromptResult], seed: int, draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float] | None:
    """(low, high) of pooled tau: percentiles over `draws` resamples of the prompts that have rounds; None below two
    of them.

    A function of the results as a set, and of seed. Percentile intervals of few prompts are too narrow: 95 % ones held
    the truth in 94 % of simulated evaluations with 40 prompts, in 87 % with 5, in 74 % with 3.
    """
    return _tau_interval(_sums(results), seed, draws, level)


def _sums(results: Sequence[PromptResult]) -> np.ndarray:
    """(tokens, rounds) of each prompt, int64 (P, 2)."""
    return np.array([(sum(r.rounds), len(r.rounds)) for r in results], np.int64).reshape(-1, 2)


def _tau_interval(
    sums_P2: np.ndarray, seed: int, draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float] | None:
    return bootstrap(sums_P2[sums_P2[:, 1] > 0], lambda s: s[:, 0] / s[:, 1], seed, draws, level)


def bootstrap(
    sums_PK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int, draws: int, level: float
) -> tuple[float, float] | None:
    """Percentile interval of a statistic of column sums (draws, K) -> (draws,), rows resampled; None below two rows."""
    if draws < 1 or not 0 < level < 1:
        raise ValueError(
            f"draws = {draws}, level = {level}: draws must be at least 1 and level inside (0, 1), as in 0.95"
        )
    P = len(sums_PK)
    if P < 2:
        return None
    sums_PK = sums_PK[np.lexsort(sums_PK.T)]  # the order of prompts is of no meaning
    random = np.random.default_rng(seed)
    at_once = max(1, 2**20 // P)  # memory stays bounded for any number of prompts
    values = [
        statistic(sums_PK[random.integers(P, size=(min(at_once, draws - done), P))].sum(1))
        for done in range(0, draws, at_once)
    ]
    low, high = np.quantile(np.concatenate(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def domain_rows(domains: Iterable[str]) -> dict[str, str]:
    """{domain: the name of its row}, sorted. ALL names the pooled row everywhere, and is also the domain of prompts that have none (or are
    called so): beside others their row is UNNAMED, alone they have no row besides the pooled one."""
    names = sorted(set(domains))
    return {} if names == [ALL] else {name: UNNAMED if name == ALL else name for name in names}


# --- split by what is known of a prompt or a round --------------------------------------------------------------


def by(results: Sequence[PromptResult], key: str) -> dict[str, list[PromptResult]]:
    """Results of each domain (key "domain") or of each value of a tag, sorted; prompts without the tag are left out."""
    groups = _grouped(results, lambda r: r.domain if key == "domain" else r.tags.get(key))
    if results and not groups:
        known = ", ".join(sorted({tag for r in results for tag in r.tags})) or "none"
        raise ValueError(f"key = {key!r}: no result has this tag; use 'domain' or a tag of the prompts ({known})")
    return groups


def _grouped(
    results: Sequence[PromptResult], value: Callable[[PromptResult], str | None]
) -> dict[str, list[PromptResult]]:
    groups: dict[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        group = value(result)
        if group is not None:
            groups[group].append(result)
    return dict(sorted(groups.items()))


def table(results: Sequence[PromptResult], seed: int) -> dict[str, Any]:
    """tau of every cell, each {value, rounds, tokens, prompts, interval}; value is None without rounds, interval
    below two prompts.

    Keys: prompts; tau {domain: cell}; tau_all, apart because a domain may be called "all"; tau_by_tag {tag: {value:
    cell}}; tau_by_context {tokens before the round's anchor, as in "512-1k": cell}, whose prompts are those with a
    round there.
    """
    tags = sorted({tag for result in results for tag in result.tags})
    cells = lambda value: {name: _cell(_sums(some), seed) for name, some in _grouped(results, value).items()}
    return {
        "prompts": len(results),
        "tau": cells(lambda r: r.domain),
        "tau_all": _cell(_sums(results), seed),
        "tau_by_tag": {tag: cells(lambda r, tag=tag: r.tags.get(tag)) for tag in tags},
        "tau_by_context": {bucket: _cell(sums_P2, seed) for bucket, sums_P2 in _by_context(results).items()},
    }


def _cell(sums_P2: np.ndarray, seed: int) -> dict[str, Any]:
    tokens, rounds = (int(column) for column in sums_P2.sum(0))
    interval = _rounded(_tau_interval(sums_P2, seed))
    return {**Tau(tokens=tokens, rounds=rounds).as_dict(), "prompts": len(sums_P2), "interval": interval}


def _by_context(results: Sequence[PromptResult]) -> dict[str, np.ndarray]:
    """(tokens, rounds) per prompt, of the rounds with so many tokens before their anchor; only buckets that occur."""
    buckets: dict[int, list[Counter[str]]] = defaultdict(list)
    for result in results:
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        context = result.prompt_tokens
        for gained in result.rounds:
            counts[_bucket(context)].update(tokens=gained, rounds=1)
            context += gained
        for bucket, count in counts.items():
            buckets[bucket].append(count)
    return {
        _bucket_name(bucket): np.array([(c["tokens"], c["rounds"]) for c in counts], np.int64)
        for bucket, counts in sorted(buckets.items())
    }


def _bucket(tokens: int) -> int:
    """0 below 512, 1 below 1,024, 2 below 2,048, and so on."""
    return (tokens // 512).bit_length()


def _bucket_name(bucket: int) -> str:
    short = lambda tokens: f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
    return f"{short(256 << bucket) if bucket else 0}-{short(512 << bucket)}"


# --- per slot ---------------------------------------------------------------------------------------------------


def per_slot(results: Sequence[PromptResult], block_size: int) -> list[dict[str, Any]]:
    """Of each drafted slot 1 .. block_size - 1: {slot, marginal, conditional, accepted, reached, offered}.

    marginal: share of the rounds that offered the slot whose draft was accepted through it (accepted / offered);
    conditional: the same of the rounds that offered it and were accepted through the slot before (accepted /
    reached). None without such rounds. block_size is the one decoded with.

    A round offers a slot that lies inside the block, the token budget and the answer: this depends on where the round
    begins, not on what became of it, and is what the teacher-forced walk supervises. Without `PromptResult.accepted`
    nobody knows whether the answer's last token was drafted, so no round of that prompt offers the slot where it
    stands.
    """
    if block_size < 2:
        raise ValueError(f"block_size = {block_size}: a block has an anchor and at least one draft; give 2 or more")
    offered, accepted = _offered_and_accepted(results, block_size)
    rows = []
    for slot in range(1, block_size):
        offers, reaches = offered >= slot, (offered >= slot) & (accepted >= slot - 1)
        counts = {"accepted": (offers & (accepted >= slot)).sum(), "reached": reaches.sum(), "offered": offers.sum()}
        counts = {name: int(count) for name, count in counts.items()}
        rows.append(
            {
                "slot": slot,
                "marginal": _share(counts["accepted"], counts["offered"]),
                "conditional": _share(counts["accepted"], counts["reached"]),
                **counts,
            }
        )
    return rows


def _offered_and_accepted(results: Sequence[PromptResult], block_size: int) -> np.ndarray:
    """Slots that each round offered and drafts that it accepted, int64 (2, rounds)."""
    columns: list[tuple[int, int]] = []
    for result in results:
        remaining = sum(result.rounds)  # answer tokens after the anchor
        recorded = result.accepted is not None
        accepted = result.accepted if recorded else [gained - 1 for gained in result.rounds]
        for gained, limit, drafts in zip(result.rounds, result.limits, accepted, strict=True):
            if gained > block_size:
                raise ValueError(
                    f"block_size = {block_size}: a round of prompt {result.id!r} gained {gained} tokens, and none can "
                    "gain more than block_size; give the block size that the results were decoded with"
                )
            last = gained == remaining
            assert drafts == gained - 1 or (last and drafts == gained < block_size), (result.id, gained, drafts)
            columns.append((min(block_size - 1, limit, remaining if recorded else remaining - 1), drafts))
            remaining -= gained
    return np.array(columns, np.int64).reshape(-1, 2).T


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


# --- are the answers worth anything -----------------------------------------------------------------------------


def repeated_tokens(ids: list[int], n: int = 8) -> int:
    """Tokens covered by an n-gram that occurs more than once in the answer, its first occurrence included."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    times = Counter(grams)
    inside = np.zeros(len(ids), bool)
    for i, gram in enumerate(grams):
        if times[gram] > 1:
            inside[i : i + n] = True
    return int(inside.sum())


def repetition(results: Sequence[PromptResult]) -> dict[str, Any]:
    """How much of the answers is repetition, which any drafter predicts.

    Keys: share of answer tokens inside a repeated 8-gram (None without tokens); looping, the prompts with more than
    half of their tokens in one, and looping_ids; tau and tau_without_looping as {value, rounds, tokens}.
    """
    repeated = [repeated_tokens(result.token_ids) for result in results]
    loops = [count > LOOPING * len(result.token_ids) for count, result in zip(repeated, results, strict=True)]
    sound = [result for result, looping in zip(results, loops, strict=True) if not looping]
    return {
        "share": _share(sum(repeated), sum(len(result.token_ids) for result in results)),
        "looping": sum(loops),
        "looping_ids": [result.id for result, looping in zip(results, loops, strict=True) if looping],
        "tau": pooled(results).as_dict(),
        "tau_without_looping": pooled(sound).as_dict(),
    }


def losslessness(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Verdicts against plain decoding: {lossless, checked, identical, near_ties, different, different_ids,
    unchecked}.

    lossless: no checked answer is different; None where none was checked.
    """
    counts = Counter(result.verdict for result in results)
    unknown = sorted(str(verdict) for verdict in counts if verdict is not None and verdict not in VERDICTS)
    if unknown:
        raise ValueError(
            f"verdict = {unknown[0]!r}: must be one of {', '.join(VERDICTS)}, or None where nothing was compared"
        )
    checked = sum(counts[verdict] for verdict in VERDICTS)
    return {
        "lossless": counts["different"] == 0 if checked else None,
        "checked": checked,
        "identical": counts["identical"],
        "near_ties": counts["near_tie"],
        "different": counts["different"],
        "different_ids": [result.id for result in results if result.verdict == "different"],
        "unchecked": counts[None],
    }


# --- two drafters on the same prompts ---------------------------------------------------------------------------

Pair = tuple[PromptResult, PromptResult]


def compare(a: Sequence[PromptResult], b: Sequence[PromptResult], seed: int) -> dict[str, Any]:
    """b against a on the same prompts, paired by id; by_domain {domain: the same keys} besides:

    pairs, those with rounds on both sides, and left_out, the others; tau_a, tau_b {value, rounds, tokens};
    difference, b - a, with its 95 % interval by resampling pairs; better, worse, equal: shares of the pairs in which
    b took fewer, more or as many rounds per token; p_value: two-sided sign test of better against worse (ties left
    out). None where there is nothing to measure.

    text says what was measured: "same" where both gave the same answer to every prompt, else "own": each drafter on
    its own answers (sampling, near ties, other budgets), of which `agreeing` pairs have the same.
    """
    pairs = _paired(a, b)
    domains: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        domains[pair[0].domain].append(pair)
    by_domain = {domain: _compared(some, seed) for domain, some in sorted(domains.items())}
    return {**_compared(pairs, seed), "by_domain": by_domain}


def _paired(a: Sequence[PromptResult], b: Sequence[PromptResult]) -> list[Pair]:
    """Results of the same prompt, in the order of a."""
    for name, results in (("a", a), ("b", b)):
        twice = [id for id, times in Counter(result.id for result in results).items() if times > 1]
        if twice:
            raise ValueError(
                f"results {name} have {_some(twice)} more than once: ids must be unique; give each prompt its own"
            )
    in_a, in_b = {result.id for result in a}, {result.id for result in b}
    for name, missing in (("b", [r.id for r in a if r.id not in in_b]), ("a", [r.id for r in b if r.id not in in_a])):
        if missing:
            raise ValueError(
                f"results {name} lack {_some(missing)}: both drafters must have decoded the same prompts; evaluate "
                "both with the same data.heldout and evaluate.max_prompts"
            )
    if not a:
        raise ValueError("no results to compare: give two lists with the same prompts, at least one")
    of_b = {result.id: result for result in b}
    pairs = [(result, of_b[result.id]) for result in a]
    for one, other in pairs:
        if (one.domain, one.prompt_tokens) != (other.domain, other.prompt_tokens):
            raise ValueError(
                f"prompt {one.id!r} is {one.prompt_tokens} tokens of domain {one.domain!r} in a, {other.prompt_tokens} "
                f"of {other.domain!r} in b: one id must name one prompt; evaluate both with the same "
                "data.heldout and target"
            )
    return pairs


def _some(ids: list[str]) -> str:
    named = ", ".join(repr(id) for id in ids[:5])
    return f"{named} and {len(ids) - 5} more" if len(ids) > 5 else named


def _compared(pairs: list[Pair], seed: int) -> dict[str, Any]:
    measured = [(one, other) for one, other in pairs if one.rounds and other.rounds]
    of_a, of_b = [one for one, _ in measured], [other for _, other in measured]
    sums_a, sums_b = _sums(of_a), _sums(of_b)
    difference = lambda s: s[:, 2] / s[:, 3] - s[:, 0] / s[:, 1]
    # Rounds per token, b minus a, without a division: exact also where two fractions are equal.
    sign = np.sign(sums_b[:, 1] * sums_a[:, 0] - sums_a[:, 1] * sums_b[:, 0])
    better, worse, equal = (int((sign == s).sum()) for s in (-1, 1, 0))
    agreeing = sum(one.token_ids == other.token_ids for one, other in pairs)
    tau_a, tau_b = pooled(of_a), pooled(of_b)
    return {
        "pairs": len(measured),
        "left_out": len(pairs) - len(measured),
        "text": "same" if agreeing == len(pairs) else "own",
        "agreeing": agreeing,
        "tau_a": tau_a.as_dict(),
        "tau_b": tau_b.as_dict(),
        "difference": round(tau_b.value - tau_a.value, 4) if measured else None,
        "interval": _rounded(bootstrap(np.hstack([sums_a, sums_b]), difference, seed, DRAWS, LEVEL)),
        "better": _share(better, len(measured)),
        "worse": _share(worse, len(measured)),
        "equal": _share(equal, len(measured)),
        "p_value": sign_test(better, worse) if measured else None,
    }


def sign_test(better: int, worse: int) -> float:
    """Two-sided p-value of as uneven a split if better and worse were equally likely; exact. 1 where both are 0."""
    n, term, tail = better + worse, 1, 0
    for k in range(min(better, worse) + 1):
        tail += term  # n choose k
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


# --- what a selector could reach at best ------------------------------------------------------------------------


def cutoffs(candidates: int) -> list[int]:
    """1, 2, 4, 8, 16 as far as there are so many candidates, and their number itself."""
    return sorted({k for k in (1, 2, 4, 8, 16) if k <= candidates} | {candidates})


def oracle_counts(rank_BNS: np.ndarray, supervised_BNS: np.ndarray, candidates: int) -> np.ndarray:
    """int64 (2, 1 + len(cutoffs)): supervised slots, and those whose label is among the k best; blocks with a
    supervised slot, and their leading slots among the k best. May be added over calls and ranks.

    rank_BNS: 0-based rank of the label among the `candidates` best of the base, -1 where it is not among them; read
    where supervised only. Slot 0, the anchor, is never supervised.
    """
    assert rank_BNS.shape == supervised_BNS.shape and not supervised_BNS[..., 0].any()
    assert not supervised_BNS.any() or rank_BNS[supervised_BNS].max() < candidates
    slots, blocks = [int(supervised_BNS.sum())], [int(supervised_BNS.any(-1).sum())]
    for k in cutoffs(candidates):
        among_BNS = supervised_BNS & (rank_BNS >= 0) & (rank_BNS < k)
        slots.append(int(among_BNS.sum()))
        blocks.append(int(np.logical_and.accumulate(among_BNS[..., 1:], -1).sum()))
    return np.array([slots, blocks], np.int64)


def oracle_table(counts: np.ndarray, candidates: int) -> dict[str, Any]:
    """{recall: {k: share}, oracle_accept_len: {k: tokens}, slots, blocks} of (summed) counts; k as text, as JSON has
    it.

    recall@k: share of the supervised slots whose label is among the base's k best. oracle accept_len@k: what a
    perfect choice among them would gain per block: leading slots whose label is there, + 1 bonus token, pooled over
    blocks.
    """
    (slots, *covered), (blocks, *leading) = counts.tolist()
    names = [str(k) for k in cutoffs(candidates)]
    return {
        "recall": {k: _share(hits, slots) for k, hits in zip(names, covered, strict=True)},
        "oracle_accept_len": {k: _share(hits + blocks, blocks) for k, hits in zip(names, leading, strict=True)},
        "slots": slots,
        "blocks": blocks,
    }


def oracle_and_recall(rank_BNS: np.ndarray, supervised_BNS: np.ndarray, candidates: int) -> dict[str, Any]:
    """`oracle_table` of everything at once."""
    return oracle_table(oracle_counts(rank_BNS, supervised_BNS, candidates), candidates)


# --- the report -------------------------------------------------------------------------------------------------


def measure(results: Sequence[PromptResult], block_size: int, seed: int) -> dict[str, Any]:
    """Everything that `summary_lines` prints: the keys of `table`, those of `losslessness`, and slots and repetition."""
    return {
        **table(results, seed),
        "slots": per_slot(results, block_size),
        **losslessness(results),
        "repetition": repetition(results),
    }


NAME_WIDTH = 40
FEW_NOTE = f"* fewer than {FEW} prompts: the interval is too narrow"
SLOTS_A_LINE = 15


def summary_lines(report: dict[str, Any]) -> str:
    """What `measure` returns, as plain text of at most 100 columns for a person."""
    sections = [("context tokens", report["tau_by_context"]), *report["tau_by_tag"].items()]
    sections = [(title, cells) for title, cells in sections if cells]
    domains = [(row, report["tau"][name]) for name, row in domain_rows(report["tau"]).items()]
    tables = [dict(domains), *(cells for _, cells in sections)]
    width = min(max(len(name) for name in ["domain", *(name for cells in tables for name in cells)]), NAME_WIDTH) + 1
    lines = ["tau: tokens gained per target pass, bonus token included; intervals by resampling prompts"]
    lines += [f"{'domain':<{width}}{'tau':>7}{'95 % interval':>16}{'rounds':>10}{'tokens':>11}{'prompts':>9}"]
    lines += [_cell_line(name, cell, width) for name, cell in [*domains, (ALL, report["tau_all"])]]
    for title, cells in sections:
        lines += ["", _short(title), *(_cell_line(name, cell, width) for name, cell in cells.items())]
    if any(0 < cell["prompts"] < FEW for cells in [*tables, {ALL: report["tau_all"]}] for cell in cells.values()):
        lines.append(FEW_NOTE)
    lines += ["", *_slot_lines(report["slots"]), "", *_lossless_lines(report), *_repetition_lines(report)]
    return "\n".join(lines)


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _two(value: float | None) -> str:
    """Two decimals, or a dash where there was no round to measure."""
    return "-" if value is None else f"{value:.2f}"


def _cell_line(name: str, cell: dict[str, Any], width: int) -> str:
    interval = "-" if cell["interval"] is None else "[{:.2f}-{:.2f}]".format(*cell["interval"])
    counts = f"{cell['rounds']:>10}{cell['tokens']:>11}{cell['prompts']:>9}{_few(cell['prompts'])}"
    return f"{_short(name):<{width}}{_two(cell['value']):>7}{interval:>16}{counts}"


def _few(prompts: int) -> str:
    return "*" if 0 < prompts < FEW else ""


def _slot_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Two rows of shares under their slots; a block of more than 16 goes on below."""
    lines = []
    for first in range(0, len(rows), SLOTS_A_LINE):
        some = rows[first : first + SLOTS_A_LINE]
        lines.append(f"{'slot':<25}" + "".join(f"{row['slot']:>5}" for row in some))
        lines.append(f"{'accepted (marginal)':<25}" + "".join(f"{_two(row['marginal']):>5}" for row in some))
        lines.append(f"{'if reached (conditional)':<25}" + "".join(f"{_two(row['conditional']):>5}" for row in some))
    return lines


def _lossless_lines(found: dict[str, Any]) -> list[str]:
    if found["lossless"] is None:
        why = (
            f" (temperature {found['temperature']:g}: the distributions agree, not the texts)"
            if found.get("temperature")
            else ""
        )
        return [f"losslessness: no output was compared with plain decoding{why}"]
    verdict = "lossless" if found["lossless"] else "NOT LOSSLESS"
    lines = [
        f"{verdict}: {found['identical']} of {found['checked']} outputs token-identical to plain decoding, "
        f"{found['near_ties']} near ties, {found['different']} different"
    ]
    if found["unchecked"]:
        lines.append(f"  not compared: {found['unchecked']}")
    if found["different_ids"]:
        lines.append(f"  different: {_some(found['different_ids'])}")
    return lines


def _repetition_lines(report: dict[str, Any]) -> list[str]:
    found = report["repetition"]
    if found["share"] is None:
        return ["repetition: no answer tokens"]
    lines = [f"repetition: {found['share']:.1%} of the answer tokens in a repeated 8-gram"]
    if found["looping"]:
        without = _two(found["tau_without_looping"]["value"])
        lines.append(f"  {found['looping']} of {report['prompts']} outputs loop; tau without them {without}")
    return lines


def comparison_lines(found: dict[str, Any], a: str, b: str) -> str:
    """What `compare` returns, as text; a and b: the names of the drafters."""
    text = "the same answers" if found["text"] == "same" else f"each on its own answers ({found['agreeing']} agree)"
    lines = [f"b against a on the same prompts, {text}", f"a: {a}", f"b: {b}"]
    lines.append(
        f"{'domain':<16}{'tau a':>8}{'tau b':>8}{'b - a':>8}{'95 % interval':>18}{'better':>8}{'worse':>8}{'p':>8}"
    )
    domains = [(row, found["by_domain"][name]) for name, row in domain_rows(found["by_domain"]).items()]
    for name, cell in [*domains, (ALL, found)]:
        interval = "-" if cell["interval"] is None else "[{:+.2f}, {:+.2f}]".format(*cell["interval"])
        shares = "".join("       -" if cell[k] is None else f"{cell[k]:>8.0%}" for k in ("better", "worse"))
        difference = "-" if cell["difference"] is None else f"{cell['difference']:+.2f}"
        p_value = "-" if cell["p_value"] is None else f"{cell['p_value']:.3f}"
        taus = f"{_two(cell['tau_a']['value']):>8}{_two(cell['tau_b']['value']):>8}"
        lines.append(f"{_short(name):<16}{taus}{difference:>8}{interval:>18}{shares}{p_value:>8}{_few(cell['pairs'])}")
    if any(_few(cell["pairs"]) for _, cell in [*domains, (ALL, found)]):
        lines.append(FEW_NOTE)
    return "\n".join(lines)
