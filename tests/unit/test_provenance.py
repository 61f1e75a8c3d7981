"""Rows of another generator are named; rows that would be rendered unlike their prompts are refused."""

from __future__ import annotations

from collections import Counter

import pytest
import toys

from dflash_train.data.chat import template_hash
from dflash_train.data.provenance import (
    Expected,
    compare_provenance,
    count_origins,
    origin_of,
    read_origins,
    same_model,
    settings,
)
from dflash_train.types import Conversation

TOKENIZER = toys.toy_tokenizer()


def expected(**changes) -> Expected:
    fields = {
        "path": "org/toy",
        "target": "org/toy",
        "revision": None,
        "tokenizer": TOKENIZER,
        "chat_template_kwargs": {},
    }
    return Expected(**(fields | changes))


def generator(kwargs: dict | None = None, **changes) -> dict:
    kwargs = kwargs or {}
    fields = {
        "model": "org/toy",
        "revision": None,
        "template_hash": template_hash(TOKENIZER, kwargs),
        "chat_template_kwargs": kwargs,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    return fields | changes


def row(origin: dict | str | None = None, *, exact: bool = False, **kwargs) -> Conversation:
    metadata = {} if origin is None else {"generator": origin}
    return Conversation(
        id="r", source="rows:1", chat_template_kwargs=kwargs, metadata=metadata, response_ids=[5] if exact else None
    )


def compare(*rows: Conversation, **changes) -> list[str]:
    return compare_provenance(count_origins(rows), expected(**changes), what="train")


def test_rows_of_this_target_and_template_need_no_word():
    assert compare(row(generator()), row(generator(), exact=True)) == []


def test_another_model_is_named_with_its_rows():
    (line,) = compare(row(generator(model="org/other")), row(generator(model="org/other")), row(generator()))
    assert line.startswith("WARNING") and "target.path = org/toy: 2 of 3 by org/other" in line
    (line, *_) = compare(row("someone"))  # a bare name, as other data sets have it
    assert "1 of 1 by someone" in line


def test_models_are_compared_by_public_name(tmp_path):
    local = tmp_path / "toy"
    local.mkdir()
    assert same_model(str(local), expected())
    assert same_model("org/toy", expected(path=str(local), target=str(local)))
    assert same_model("embedded", expected(path="embedded", target="/package/tiny_target"))
    assert same_model("/elsewhere/tiny_target", expected(path="embedded", target="/package/tiny_target"))
    assert not same_model("other/toy", expected())
    assert not same_model("toy-2", expected())


def test_a_revision_counts_only_where_both_are_known():
    assert compare(row(generator(revision="a1"))) == []
    assert compare(row(generator()), revision="b2") == []
    (line,) = compare(row(generator(revision="a1")), revision="b2")
    assert "target.revision = b2: 1 of 1 by a1" in line


def test_rows_without_a_generator_are_counted():
    (line,) = compare(row(), row({"name": "no model"}), row(generator()))[:1]
    assert "2 of 3 train rows record no generator" in line


def test_another_template_is_refused_where_rows_are_rendered_again():
    other = generator(template_hash="0123456789abcdef")
    with pytest.raises(ValueError) as error:
        compare(row(other), row(other), row(generator()))
    for part in (
        "generator.template_hash of 2 of 3 rows is 0123456789abcdef",
        f"this run has {template_hash(TOKENIZER, {})}",
        "2 rows have no token ids",
        "Set data.chat_template",
        "regenerate",
    ):
        assert part in str(error.value)
    (line,) = compare(row(other, exact=True))
    assert "the token ids of 1 of 1 rows were rendered by another chat template" in line


def test_the_hash_is_that_of_the_rows_own_arguments():
    """It covers template and arguments together, so this run's arguments must not enter."""
    off = {"enable_thinking": False}
    assert compare(row(generator(off), **off), chat_template_kwargs={"enable_thinking": True}) == []
    # Some generators hash what the row was rendered with, some what they were configured with.
    merged = generator(template_hash=template_hash(TOKENIZER, off))
    assert compare(row(merged, **off)) == []


def test_other_arguments_are_refused_where_rows_are_rendered_again():
    """Answers of a run without thinking must not be shown after a prompt that asks for it."""
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    with pytest.raises(ValueError, match=r'chat_template_kwargs of 1 of 1 rows is {"enable_thinking": false}.*true}'):
        compare(row(generator(off)), chat_template_kwargs=on)
    assert compare(row(generator(off), exact=True), chat_template_kwargs=on) == []
    assert compare(row(generator(off)), chat_template_kwargs=off) == []


def test_a_record_of_only_the_model_is_not_refused():
    assert compare(row({"model": "org/toy"}), chat_template_kwargs={"enable_thinking": True}) == []


def test_a_mixture_is_shown_as_a_table():
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    rows = [row(generator(on, temperature=0.6, top_p=0.95), exact=True, **on)] * 3 + [row(generator(off), **off)]
    (table,) = compare(*rows)
    assert table.splitlines()[0] == "train rows by settings:"
    assert table.splitlines()[1].split()[:4] == ["3", "75.0%", "thinking", "on"]
    assert "temperature 0.6, top_p 0.95" in table and "thinking off  greedy" in table


def test_settings_without_a_record_are_those_of_the_run():
    counts = count_origins([row(), row(enable_thinking=False)])
    found = settings(counts, {"enable_thinking": True})
    assert sorted((shown["thinking"], shown["sampling"], rows) for shown, rows in found) == [
        ("off", "not recorded", 1),
        ("on", "not recorded", 1),
    ]


def test_a_data_set_of_any_size_has_few_origins():
    """Nothing that differs from row to row is kept, and parts add up."""
    rows = [row(generator(written=i)) for i in range(50)]
    parts = count_origins(rows[:20]) + count_origins(rows[20:])
    assert parts == count_origins(rows) == Counter({origin_of(rows[0]): 50})
    ((origin, count),) = read_origins(parts)
    assert origin.generator == generator() and count == 50
