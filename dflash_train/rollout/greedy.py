"""The greedy test: the same prompts with and without speculation, byte for byte, and what to make of a difference.

Speculation changes no token in exact arithmetic. In 16 bits the two servers add up in other orders, and where the target's best two tokens lie
closer than rounding reaches, they may part without a fault of anyone's: a near tie, as in evaluation (docs/evaluation.md). Whether one is, the servers'
own log-probabilities at the first token that differs say, or the target itself, scored here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_train import ranks
from dflash_train.acceptance import VERDICTS
from dflash_train.assets import ASSETS
from dflash_train.config.schema import Precision, TargetConfig
from dflash_train.data.chat import load_tokenizer, prompt_ids
from dflash_train.data.rows import read_lines
from dflash_train.data.template import encode
from dflash_train.evaluate import is_near_tie
from dflash_train.rollout.pair import Outcome
from dflash_train.rollout.server import Said, Server
from dflash_train.target.hf import HFTarget

PROMPTS = ASSETS / "rollout" / "prompts.jsonl"
UNDECIDED = "undecided"
# Between logits, in nats. Differences of log-probabilities are differences of logits, but their size is not told: two units in the last place
# of a bfloat16 between 16 and 32, where the best logits of language models lie; float16 has three more bits.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03125}


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Where two answers part. at: bytes that they share; gap: how much less likely the target finds the other token than its own, in nats, as
    either server says it; None where neither says it."""

    at: int
    own: str
    other: str
    gap: float | None


@dataclass(kw_only=True)
class Compared:
    """One prompt. verdict: "identical", "near_tie", "different" or "undecided"; forked: None where identical."""

    id: str
    verdict: str
    tokens: int
    forked: Fork | None = None
    repeated: bool | None = None  # whether plain decoding gave its own answer again when it was asked again


def read_prompts(path: str | Path | None = None) -> list[dict[str, Any]]:
    """[{id, messages, max_tokens}], the package's own without a path. Raises ValueError naming the line."""
    found = []
    for number, line in read_lines([str(path or PROMPTS)]):
        try:
            row = json.loads(line)
            messages = row["messages"]
            if not (isinstance(messages, list) and messages and all(isinstance(m["content"], str) for m in messages)):
                raise TypeError("messages")
            found.append(
                {"id": str(row.get("id", number)), "messages": messages, "max_tokens": int(row.get("max_tokens", 256))}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{path}: line {number}: needs {{"messages": [{{"role", "content"}}]}} ({error!r})'
            ) from None
    if not found:
        raise ValueError(f"{path}: no prompts")
    return found


def fork(logprobs: Sequence[dict[str, Any]], own: bytes, other: bytes) -> Fork | None:
    """Where `other` leaves `own`, whose tokens and their alternatives `logprobs` lists; None where these are not the tokens of `own`, or nothing
    is told of that place.

    The gap is None where no listed alternative begins what the other says: it is then no close rival, or not among those listed.
    """
    at = 0
    for entry in logprobs:
        token = _bytes(entry)
        if own[at : at + len(token)] != token:
            return None
        if token and other[at : at + len(token)] == token:
            at += len(token)
            continue
        rest = other[at:]
        if not token and not rest:
            return None  # both end here
        listed = entry.get("top_logprobs") or []
        if not listed:
            return None  # llama.cpp, of drafted tokens
        rivals = [a for a in listed if _bytes(a) != token and _begins(a, rest)]
        if not rivals:
            return Fork(at=at, own=_shown(entry), other=rest[:12].decode(errors="replace"), gap=None)
        rival = max(rivals, key=lambda a: (len(_bytes(a)), a["logprob"]))
        return Fork(
            at=at, own=_shown(entry), other=_shown(rival), gap=float(entry["logprob"]) - float(rival["logprob"])
        )
    return None


def _bytes(entry: dict[str, Any]) -> bytes:
    raw = entry.get("bytes")
    text = bytes(raw) if isinstance(raw, list) else str(entry.get("token", "")).encode()
    return b"" if _ends(entry) else text


def _ends(entry: dict[str, Any]) -> bool:
    """Whether a token is one of those that stand for no text, such as <|im_end|>."""
    token = str(entry.get("token", ""))
    return (
        token.startswith("<|") and token.endswith("|>") or token in ("</s>", "<eos>", "<end_of_turn>", "<|return|>", "")
    )


def _begins(entry: dict[str, Any], rest: bytes) -> bool:
    token = _bytes(entry)
    return rest.startswith(token) if token else not rest


def _shown(entry: dict[str, Any]) -> str:
    return str(entry.get("token", ""))


Rescore = Callable[[list[dict[str, Any]], str, str], bool]


def judge(
    plain: Server,
    fast: Server,
    prompt: dict[str, Any],
    one: Said,
    other: Said,
    bound: float,
    exact: bool,
    rescore: Rescore | None,
) -> Compared:
    """The verdict on two answers. exact: in fp32 a difference is a fault unless it is a near tie by its tiny bound."""
    tokens = one.tokens
    if (one.parts, one.finish_reason) == (other.parts, other.finish_reason):
        return Compared(id=prompt["id"], verdict="identical", tokens=tokens)
    left, right = one.parts.encode(), other.parts.encode()
    gaps, forked, repeated = [], None, None
    for server, mine, theirs in ((plain, left, right), (fast, right, left)):
        again = server.greedy(prompt["messages"], prompt["max_tokens"], logprobs=True)
        said = again.parts.encode()
        if server is plain:
            repeated = said == mine
        if again.logprobs is None or said not in (mine, theirs):
            continue
        try:
            found = fork(again.logprobs, said, theirs if said == mine else mine)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{server.shown}: its log-probabilities cannot be read ({error!r})") from None
        if found is not None:
            gaps.append(found.gap)
            forked = forked or (
                found
                if said == mine and server is plain
                else Fork(at=found.at, own=found.other, other=found.own, gap=found.gap)
            )
    if gaps:  # both must find it close; what is not even among the best TOP is not
        verdict = "near_tie" if all(gap is not None and abs(gap) <= bound for gap in gaps) else "different"
    elif rescore is not None:
        verdict = "near_tie" if rescore(prompt["messages"], one.parts, other.parts) else "different"
    else:
        verdict = "different" if exact else UNDECIDED
    if forked is None:
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        forked = Fork(
            at=at,
            own=left[at : at + 12].decode(errors="replace"),
            other=right[at : at + 12].decode(errors="replace"),
            gap=None,
        )
    return Compared(id=prompt["id"], verdict=verdict, tokens=tokens, forked=forked, repeated=repeated)


def greedy_step(
    plain: Server,
    fast: Server,
    prompts: list[dict[str, Any]],
    *,
    precision: str,
    bound: float | None = None,
    rescore: Rescore | None = None,
) -> Outcome:
    """Every prompt on both servers. Passes if no answer is different or undecided, and the speculative server drafted."""
    bound = BOUNDS[precision] if bound is None else bound
    before, compared, drafted, accepted = [s.drafts() for s in (plain, fast)], [], 0, 0
    told, said = False, 0
    for prompt in prompts:
        one = plain.greedy(prompt["messages"], prompt["max_tokens"])
        other = fast.greedy(prompt["messages"], prompt["max_tokens"])
        if other.drafted is not None:
            told, drafted, accepted = True, drafted + other.drafted, accepted + (other.accepted or 0)
        if one.drafted:
            raise ValueError(
                f"{plain.shown} drafts ({one.drafted} tokens of one answer): --plain must be a server without speculation"
            )
        said += bool(one.parts or other.parts)
        compared.append(judge(plain, fast, prompt, one, other, bound, precision == "float32", rescore))
    for server, earlier in zip((plain, fast), before, strict=True):
        now = server.drafts()
        if earlier is None or now is None:
            continue
        moved = int(now[0] - earlier[0]), int(now[1] - earlier[1])
        if min(moved) < 0:
            raise ValueError(
                f"{server.shown}: its counters went back, so it was started anew meanwhile; run this again"
            )
        if server is fast:
            told, (drafted, accepted) = True, moved
        elif moved[0]:
            raise ValueError(
                f"{plain.shown} drafts ({moved[0]} tokens by its counters): --plain must be a server without speculation"
            )
    if not said:
        raise ValueError(
            f"{plain.shown} and {fast.shown} answer every prompt with no text: there is nothing to compare"
        )
    return _outcome(compared, told, drafted, accepted, bound, precision)


def _outcome(
    compared: list[Compared], told: bool, drafted: int, accepted: int, bound: float, precision: str
) -> Outcome:
    counts = Counter(c.verdict for c in compared)
    facts: dict[str, Any] = {verdict: counts[verdict] for verdict in (*VERDICTS, UNDECIDED)}
    facts |= {"prompts": len(compared), "bound": bound, "precision": precision, "drafted": drafted if told else None}
    facts |= {
        "accepted": accepted if told else None,
        "parted": [asdict(c) for c in compared if c.verdict != "identical"],
    }
    notes = [_line(c) for c in compared if c.verdict != "identical"]
    said = f"{counts['identical']} of {len(compared)} answers byte-identical, {counts['near_tie']} near ties, {counts['different']} different, {counts[UNDECIDED]} undecided"
    if told and not drafted:
        return Outcome(
            ok=False,
            summary=f"{said}; THE SPECULATIVE SERVER DRAFTED NOTHING: its drafter is off",
            facts=facts,
            notes=notes,
        )
    if not told:
        notes.append("the server does not say whether it drafted: look for DFlash in its log")
    if counts[UNDECIDED]:
        notes.append(
            "undecided: the servers give no log-probabilities; --rescore TARGET_FOLDER lets the target itself say whether it was a near tie"
        )
    drafts = f", {accepted} of {drafted} drafted tokens accepted" if told else ""
    return Outcome(ok=not (counts["different"] or counts[UNDECIDED]), summary=said + drafts, facts=facts, notes=notes)


def _line(c: Compared) -> str:
    assert c.forked is not None
    gap = "gap not known" if c.forked.gap is None else f"gap {c.forked.gap:.4f} nats"
    again = "" if c.repeated is not False else "; plain decoding does not repeat itself either"
    return f"{c.id}: {c.verdict} after {c.forked.at} bytes: {c.forked.own!r} against {c.forked.other!r}, {gap}{again}"


def local_rescore(folder: str, precision: str) -> Rescore:
    """A judge of near ties that runs the target here, as evaluation does; answers are tokenised again. It is loaded when it is first asked."""

    @cache
    def load() -> tuple[HFTarget, Any]:
        device = ranks.device()
        config = TargetConfig(path=folder, precision=Precision[precision])
        return HFTarget.load(config, folder, (0,), device), load_tokenizer(folder)

    def judge_one(messages: list[dict[str, Any]], plain: str, other: str) -> bool:
        target, tokenizer = load()
        ids = prompt_ids(messages, tokenizer, tools=None, kwargs={})
        own, theirs = (encode(text, tokenizer)["input_ids"] for text in (plain, other))
        return is_near_tie(target, ids, own, theirs, None)

    return judge_one
