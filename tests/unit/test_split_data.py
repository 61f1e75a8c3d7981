"""A row's side depends on what it asks and on nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.data import split as split_module
from dflash_train.data.rows import read_lines
from dflash_train.data.split import prompt_key, split

MAIN = toys.script("split").main


def row(name: str, prompt: str, domain: str | None = None, answer: str = "yes") -> dict:
    found = {"id": name, "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
    return found | ({"domain": domain} if domain else {})


def many(count: int, domains: tuple[str, ...] = ("a", "b")) -> list[dict]:
    return [row(f"r{i}", f"Question number {i}?", domains[i % len(domains)]) for i in range(count)]


def run(folder: Path, rows: list[dict], **options):
    folder.mkdir(exist_ok=True)
    source = toys.write_jsonl(folder / "in.jsonl", rows)
    report = split([source], folder / "out", **options)
    suffix = options.get("suffix", ".jsonl")
    sides = {
        side: [json.loads(line) for _, line in read_lines([folder / "out" / f"{side}{suffix}"])]
        for side in ("train", "heldout")
    }
    return report, sides


def ids(rows: list[dict]) -> list[str]:
    return [r["id"] for r in rows]


def test_all_rows_are_there_once_in_order_and_unchanged(tmp_path):
    rows = many(500)
    report, sides = run(tmp_path / "x", rows, heldout=0.1)
    by_id = {r["id"]: r for r in sides["train"] + sides["heldout"]}
    assert [by_id[r["id"]] for r in rows] == rows and len(by_id) == 500
    for side in sides.values():
        assert ids(side) == sorted(ids(side), key=lambda name: int(name[1:]))
    assert 30 < len(sides["heldout"]) < 75
    assert report.rows["heldout"].total() == len(sides["heldout"])
    assert report.prompts == {"train": len(sides["train"]), "heldout": len(sides["heldout"]), "both": 0}
    record = json.loads((tmp_path / "x" / "out" / "split.json").read_text())
    assert record["prompts"]["both"] == 0 and record["thresholds"] == {"a": pytest.approx(0.1), "b": pytest.approx(0.1)}


def test_adding_removing_and_reordering_rows_moves_none(tmp_path):
    rows = many(400)
    _, before = run(tmp_path / "a", rows, heldout=0.1)
    shuffled = [*many(900)[400:], *random.Random(0).sample(rows, 300)]
    _, after = run(tmp_path / "b", shuffled, heldout=0.1)
    old, new = set(ids(before["heldout"])), set(ids(after["heldout"]))
    assert {name for name in ids(shuffled) if name in old} == {name for name in new if int(name[1:]) < 400}
    _, larger = run(tmp_path / "c", rows, heldout=0.3)
    assert old < set(ids(larger["heldout"]))  # a larger share only adds


def test_rows_that_begin_with_the_same_prompt_are_on_one_side(tmp_path):
    rows = []
    for i in range(200):
        prompt = f"Question number {i}?"
        longer = row(f"m{i}", prompt.upper())
        longer["messages"] += [{"role": "user", "content": f"And {i * 7}?"}]
        system = {
            "id": f"s{i}",
            "messages": [{"role": "system", "content": f"Be {i}."}, {"role": "user", "content": prompt}],
        }
        rows += [row(f"a{i}", prompt), row(f"b{i}", f"  {prompt}\n", answer="no"), longer, system]
    _, sides = run(tmp_path / "x", rows, heldout=0.2)
    for side in sides.values():
        numbers = [name[1:] for name in ids(side)]
        assert all(numbers.count(n) == 4 for n in set(numbers))


def test_domains_have_their_own_shares(tmp_path):
    rows = many(2000, ("math", "code"))
    report, sides = run(tmp_path / "x", rows, heldout=0.02, by_domain={"math": 0.2})
    counts = {d: sum(r["domain"] == d for r in sides["heldout"]) for d in ("math", "code")}
    assert 150 < counts["math"] < 250 and 8 < counts["code"] < 35
    assert report.rows["heldout"] == counts
    table = report.table()
    assert "math" in table and "0 in both" in table


def test_a_prompt_in_two_domains_has_the_higher_threshold_everywhere(tmp_path):
    rows = [r for i in range(300) for r in (row(f"x{i}", f"Shared {i}?", "math"), row(f"y{i}", f"Shared {i}?", "code"))]
    _, sides = run(tmp_path / "x", rows, heldout=0.01, by_domain={"math": 0.3})
    held = ids(sides["heldout"])
    assert 60 < len(held) / 2 < 125
    assert {n[1:] for n in held if n[0] == "x"} == {n[1:] for n in held if n[0] == "y"}


def test_a_cap_takes_the_lowest_hashes_and_its_thresholds_can_be_kept(tmp_path):
    rows = many(2000)
    report, capped = run(tmp_path / "a", rows, heldout=0.1, per_domain=10)
    assert report.rows["heldout"] == {"a": 10, "b": 10}
    mine = sorted(rows[0::2], key=lambda r: prompt_key([r["messages"][0]["content"]]))[:10]
    assert {r["id"] for r in capped["heldout"] if r["domain"] == "a"} == {r["id"] for r in mine}

    more = many(4000)
    _, moved = run(tmp_path / "b", more, heldout=0.1, per_domain=10)
    assert set(ids(moved["train"])) & set(ids(capped["heldout"]))  # with new rows the cap moves old ones ...
    record = tmp_path / "a" / "out" / "split.json"
    report, kept = run(tmp_path / "c", more, heldout=0.1, per_domain=10, thresholds_from=record)
    assert set(ids(capped["heldout"])) <= set(ids(kept["heldout"]))  # ... unless the thresholds are kept
    assert not set(ids(capped["train"])) & set(ids(kept["heldout"]))


def test_fewer_prompts_than_the_cap(tmp_path):
    rows = many(300)
    report, _ = run(tmp_path / "x", rows, heldout=0.1, per_domain=1000)
    plain, _ = run(tmp_path / "y", rows, heldout=0.1)
    assert report.rows == plain.rows


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), min_size=5, max_size=60), st.floats(0.2, 0.8))
def test_no_prompt_is_ever_on_both_sides(tmp_path_factory, picked, share):
    folder = tmp_path_factory.mktemp("split")
    rows = [row(f"r{i}", f"Question {number}", domain) for i, (number, domain) in enumerate(picked)]
    try:
        _, sides = run(folder, rows, heldout=share, by_domain={picked[0][1]: 0.5})
    except ValueError as error:
        assert "one side is empty" in str(error)
        return
    prompts = {side: {r["messages"][0]["content"] for r in found} for side, found in sides.items()}
    assert not prompts["train"] & prompts["heldout"]
    assert len(sides["train"]) + len(sides["heldout"]) == len(rows)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_files_hold_the_same(tmp_path, suffix):
    rows = many(200)
    _, plain = run(tmp_path / "a", rows, heldout=0.1)
    _, packed = run(tmp_path / "b", rows, heldout=0.1, suffix=suffix)
    assert plain == packed


def test_unreadable_rows_are_an_error_unless_allowed(tmp_path):
    rows = [*many(200), {"id": "broken", "messages": []}]
    with pytest.raises(ValueError, match=r"(?s)share dropped 0.005 > max_dropped 0.0.*no_messages.*in.jsonl:201"):
        run(tmp_path / "x", rows)
    assert not (tmp_path / "x" / "out").exists()
    report, sides = run(tmp_path / "x", rows, heldout=0.1, max_dropped=0.1)
    assert report.read.dropped == {"no_messages": 1} and "no_messages" in report.table()
    assert len(sides["train"]) + len(sides["heldout"]) == 200


def test_an_interrupted_run_leaves_the_old_files(tmp_path, monkeypatch):
    _, before = run(tmp_path / "x", many(200), heldout=0.1)
    real, calls = split_module.parse_row, []

    def stops(place, line):
        calls.append(place)
        if len(calls) > 350:  # in the second pass, while writing
            raise KeyboardInterrupt
        return real(place, line)

    monkeypatch.setattr(split_module, "parse_row", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "x", many(300), heldout=0.2)
    out = tmp_path / "x" / "out"
    assert sorted(p.name for p in out.iterdir()) == ["heldout.jsonl", "split.json", "train.jsonl"]
    assert [json.loads(line) for _, line in read_lines([out / "train.jsonl"])] == before["train"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heldout", "0"], "held-out share heldout=0.0"),
        (["--heldout", "1.5"], "held-out share heldout=1.5"),
        (["--heldout-domain", "math"], "not DOMAIN=SHARE"),
        (["--heldout-domain", "maths=0.1"], "domain 'maths' has a held-out share but no row; domains here: a, b"),
        (["--max-dropped", "7"], "max_dropped 7.0: must be in [0, 1]"),
        (["--heldout-per-domain", "0"], "per domain 0 < 1"),
        (["--heldout", "0.00001"], "0 of 100 prompts would be held out"),
        (["--thresholds-from", "gone.json"], "thresholds gone.json"),
        (["--thresholds-from", "in.jsonl"], "not a split.json"),
    ],
)
def test_mistakes_are_named_and_write_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    toys.write_jsonl(tmp_path / "in.jsonl", many(100))
    done = toys.call(MAIN, "in.jsonl", "--output-dir", "out", *arguments)
    assert done.code == 2 and message in done.err, done.err
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_counts(tmp_path):
    source = toys.write_jsonl(tmp_path / "in.jsonl", many(1000))
    done = toys.call(MAIN, source, "--output-dir", tmp_path / "out", "--heldout", "0.1", "--heldout-domain", "a=0.5")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["domain", "train", "heldout", "share", "threshold"]
    assert lines[1].split()[0] == "a" and lines[1].split()[-1] == "0.500000" and "0 in both" in lines[4]
