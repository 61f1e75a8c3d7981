"""Who wrote the answers, from which prompts; compared with the run that is to learn from them.

A row's `generator` names the model, its revision, the chat template and the settings of sampling. A data set is summed up as a
count of rows by origin, small however many rows there are: `compare_provenance` needs no more than that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_train.assets import public_name
from dflash_train.config.schema import Recipe
from dflash_train.data.chat import template_hash
from dflash_train.types import Conversation

# What is kept of a `generator`; a field that differs in every row would make as many origins.
RECORDED = (
    "model", "revision", "template_hash", "chat_template_kwargs", "temperature", "top_p", "top_k", "extra_body",
)  # fmt: skip
THINKING = ("enable_thinking", "thinking")


class Origin(NamedTuple):
    """generator: what the row records of it, or None; row_kwargs: the row's own template arguments; exact: the row holds
    token ids, so nothing is rendered again."""

    generator: dict[str, Any] | None
    row_kwargs: dict[str, Any]
    exact: bool

    @property
    def asked_with(self) -> dict[str, Any]:
        """Template arguments with which the answer was generated, as far as the row knows."""
        return {**((self.generator or {}).get("chat_template_kwargs") or {}), **self.row_kwargs}


@dataclass(kw_only=True)
class Expected:
    """The run that rows are compared with. path: target.path; target: where it was found."""

    path: str
    target: str
    revision: str | None
    tokenizer: Any
    chat_template_kwargs: dict[str, Any]


def expected_of(recipe: Recipe, target: str, tokenizer: Any) -> Expected:
    """What the rows of a recipe are compared with. target: where target.path was found."""
    return Expected(
        path=recipe.target.path,
        target=target,
        revision=recipe.target.revision,
        tokenizer=tokenizer,
        chat_template_kwargs=dict(recipe.data.chat_template_kwargs),
    )


def origin_of(conversation: Conversation) -> str:
    """The row's Origin as canonical JSON, to be counted."""
    generator = conversation.metadata.get("generator")
    if isinstance(generator, str):
        generator = {"model": generator}
    if not isinstance(generator, dict) or not isinstance(generator.get("model"), str):
        generator = None
    recorded = None if generator is None else {key: generator[key] for key in RECORDED if key in generator}
    exact = conversation.response_ids is not None or "turn_ids" in conversation.metadata
    return json.dumps([recorded, conversation.chat_template_kwargs, exact], sort_keys=True, default=str)


def count_origins(conversations: Iterable[Conversation]) -> Counter[str]:
    """Origin (as `origin_of` writes it) -> rows. Counters of parts of a data set add up."""
    return Counter(origin_of(conversation) for conversation in conversations)


def read_origins(origins: Counter[str]) -> Iterator[tuple[Origin, int]]:
    """(origin, rows), the most frequent first."""
    for text, rows in origins.most_common():
        yield Origin(*json.loads(text)), rows


def compare_provenance(origins: Counter[str], expected: Expected, *, what: str) -> list[str]:
    """Lines to print about `what` rows that this run's target did not write, and the table of a mixture of settings.

    Raises ValueError where rows are to be rendered by another template, or with other arguments, than the prompts that they
    answer: training would show the drafter prompts that its target never had. Rows with token ids are used as they are.
    """
    found: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in DIFFERENCES}
    for origin, rows in read_origins(origins):
        for kind, *values in _differences(origin, expected):
            found[kind][tuple(values)] += rows
    total = sum(origins.values())
    _refuse(found["template"], "template_hash", total, what, "data.chat_template")
    _refuse(found["arguments"], "chat_template_kwargs", total, what, "data.chat_template_kwargs")
    lines = [f"WARNING: {text}" for text in _warnings(found, expected, total, what)]
    mixed = len(settings(origins, expected.chat_template_kwargs)) > 1
    table = settings_table(origins, expected.chat_template_kwargs)
    return [*lines, f"{what} rows by settings:\n{table}"] if mixed else lines


DIFFERENCES = ("silent", "model", "revision", "template", "exact_template", "arguments")


def _differences(origin: Origin, expected: Expected) -> Iterator[tuple[str, ...]]:
    """(kind, recorded value, this run's value) of each difference."""
    generator = origin.generator
    if generator is None:
        yield ("silent",)
        return
    if not same_model(generator["model"], expected):
        yield "model", public_name(generator["model"])
    elif generator.get("revision") and expected.revision and generator["revision"] != expected.revision:
        yield "revision", generator["revision"]
    if not same_template(origin, expected):
        yield "exact_template" if origin.exact else "template", generator["template_hash"], own_hash(origin, expected)
    elif not origin.exact and "chat_template_kwargs" in generator:
        rendered_with = {**expected.chat_template_kwargs, **origin.row_kwargs}
        if rendered_with != origin.asked_with:
            yield "arguments", json.dumps(origin.asked_with), json.dumps(rendered_with)


def _refuse(found: Counter[tuple[str, ...]], field: str, total: int, what: str, knob: str) -> None:
    if not found:
        return
    ((theirs, ours), rows), affected = found.most_common(1)[0], sum(found.values())
    raise ValueError(
        f"{what} rows: generator.{field} of {rows} of {total} rows is {theirs}, but this run has {ours}; {affected} rows have no token "
        f"ids and would be rendered unlike the prompts that were answered. Set {knob} to what the answers were generated with, or "
        "regenerate them with this run's"
    )


def _warnings(found: dict[str, Counter[tuple[str, ...]]], expected: Expected, total: int, what: str) -> Iterator[str]:
    def named(kind: str) -> str:
        return ", ".join(f"{rows} of {total} by {values[0]}" for values, rows in found[kind].most_common(3))

    if found["model"]:
        yield (
            f"{what} rows were not written by target.path = {expected.path}: {named('model')}; a drafter learns best from its "
            "own target's words (regenerate them)"
        )
    if found["revision"]:
        yield (
            f"{what} rows were written by another revision than target.revision = {expected.revision}: {named('revision')}; "
            "set it to theirs, or regenerate them"
        )
    if found["silent"]:
        yield (
            f"{sum(found['silent'].values())} of {total} {what} rows record no generator, so nobody can tell whether this target "
            "wrote them; regenerate them, or keep the field `generator` that regeneration writes"
        )
    if found["exact_template"]:
        yield (
            f"{what} rows: the token ids of {sum(found['exact_template'].values())} of {total} rows were rendered by another chat "
            "template than this run's; they are used as they are"
        )


def same_model(model: str, expected: Expected) -> bool:
    """By public name. A local folder has only its last part, so there the owner of a hub id is not compared."""
    name = public_name(model)
    for own in {public_name(expected.path), public_name(expected.target)}:
        if name == own or (("/" in name) != ("/" in own) and name.split("/")[-1] == own.split("/")[-1]):
            return True
    return False


def same_template(origin: Origin, expected: Expected) -> bool:
    """Whether this run's template, with the arguments that the row knows of, has the recorded hash (true if none is recorded).

    The hash covers template and arguments together, so they must be those of the row and not those of this run.
    """
    recorded = (origin.generator or {}).get("template_hash")
    return recorded is None or recorded in (
        own_hash(origin, expected),
        template_hash(expected.tokenizer, origin.asked_with),
    )


def own_hash(origin: Origin, expected: Expected) -> str:
    """The hash of this run's template with the generator's arguments."""
    return template_hash(expected.tokenizer, (origin.generator or {}).get("chat_template_kwargs") or {})


def thinking(kwargs: dict[str, Any]) -> str:
    """ "on", "off", or "-" where the template decides."""
    for name in THINKING:
        if isinstance(kwargs.get(name), bool):
            return "on" if kwargs[name] else "off"
    return "-"


def settings(origins: Counter[str], chat_template_kwargs: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """({thinking, sampling, arguments}, rows), the most frequent first. chat_template_kwargs: this run's."""
    counts: Counter[str] = Counter()
    for origin, rows in read_origins(origins):
        kwargs = origin.asked_with if origin.generator else {**chat_template_kwargs, **origin.row_kwargs}
        shown = {"thinking": thinking(kwargs), "sampling": sampling(origin.generator), "arguments": kwargs}
        counts[json.dumps(shown, sort_keys=True)] += rows
    return [(json.loads(text), rows) for text, rows in counts.most_common()]


def sampling(generator: dict[str, Any] | None) -> str:
    """Settings of sampling in words; those that change nothing are left out."""
    if generator is None or "temperature" not in generator:
        return "not recorded"
    extra = {"extra_body": generator["extra_body"]} if generator.get("extra_body") else {}
    if not generator["temperature"]:
        return ", ".join(["greedy", *(f"{key} {value}" for key, value in extra.items())])
    neutral = {"top_p": 1.0, "top_k": 0}
    cuts = {key: generator[key] for key in neutral if generator.get(key, neutral[key]) != neutral[key]}
    return ", ".join(
        f"{key} {value}" for key, value in {"temperature": generator["temperature"], **cuts, **extra}.items()
    )


def settings_table(origins: Counter[str], chat_template_kwargs: dict[str, Any], most: int = 12) -> str:
    """Rows and shares by settings, as text; a line for each of the `most` frequent."""
    total, found = max(1, sum(origins.values())), settings(origins, chat_template_kwargs)
    lines = [
        f"  {rows:>7} {rows / total:>6.1%}  thinking {shown['thinking']:<3}  {shown['sampling']}  {shown['arguments']}"
        for shown, rows in found[:most]
    ]
    return "\n".join([*lines, *([f"  and {len(found) - most} more"] if len(found) > most else [])])
