"""Cleaning removes what it says and nothing else, and leaves the rest byte for byte."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toys
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.data import rows as rows_module
from dflash_train.data.clean import CleanSettings, HeldOut, clean, compression, is_refusal, repetition
from dflash_train.data.read import read_conversations
from dflash_train.data.rows import atomic_file, ngrams, normalise, read_lines, words_of

MAIN = toys.script("clean").main
ROOT = Path(__file__).resolve().parents[2]


def row(name: str, prompt: str, answer: str | None = "It is so.", **more) -> dict:
    messages = [{"role": "user", "content": prompt}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"id": name, "messages": messages, **more}


def sentence(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3000)}" for _ in range(count))


def run(tmp_path: Path, rows: list, *, against: list = (), settings: CleanSettings | None = None, **options):
    source = toys.write_jsonl(tmp_path / "in.jsonl", rows)
    held = [toys.write_jsonl(tmp_path / "held.jsonl", against)] if against else []
    options = {"max_dropped": 1.0, **options}
    report = clean([source], tmp_path / "out.jsonl", settings or CleanSettings(), against=held, **options)
    kept = [json.loads(line)["id"] for _, line in read_lines([tmp_path / "out.jsonl"])]
    return report, kept


def test_rows_that_stay_are_the_same_bytes_in_the_same_order(tmp_path):
    lines = [
        b'{"id":1,  "messages":[{"role":"user","content":"one question"}],"odd":[1.50]}',
        b'{"messages": [{"content": "caf\\u00e9 or caf\xc3\xa9?", "role": "user"}], "id": "b"}',
        b'{"id": "c", "prompt": "plain prompt", "response": "plain answer"}',
        b'{"id": "d", "conversations": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "hello"}]}',
        b'{"id": "e", "prompt_ids": [1, 2, 3], "response_ids": [4, 5]}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([lines[0], b"", *lines[1:]]))  # a blank line, and no end of line after the last
    report = clean([source], tmp_path / "out.jsonl", CleanSettings())
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(line + b"\n" for line in lines)
    assert (report.rows, report.kept, report.dropped) == (5, 5, {})


def test_each_reason_names_its_row(tmp_path):
    loop = "I think that this is it, and then " * 40
    rows = [
        row("good", "What is a drafter?"),
        row("empty", "Say nothing.", ""),
        row("dup", "  WHAT is a\ndrafter? "),
        row("loop", "Go on and on.", loop),
        row("wordless", "Draw a line.", "-" * 4000),
        row("held", "Which way is north?"),
        {"id": "none", "messages": []},
        {"id": "robot", "messages": [{"role": "robot", "content": "x"}]},
    ]
    report, kept = run(tmp_path, rows, against=[row("h", "which way  is NORTH?", None)])
    assert kept == ["good"]
    assert report.dropped == {
        "empty_answer": 1, "duplicate": 1, "repetitive": 2, "contaminated": 1, "no_messages": 1, "bad_role": 1,
    }  # fmt: skip
    place = f"{tmp_path / 'in.jsonl'}:3"
    assert report.examples["duplicate"] == [{"id": "dup", "place": place, "why": "of row 1 of the input"}]
    assert place in report.table() and "kept 1 of 8" in report.table()
    written = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert written["dropped"] == dict(report.dropped) and written["examples"] == report.examples
    assert written["contaminated"] == [
        {"id": "held", "place": f"{tmp_path / 'in.jsonl'}:6", "against": f"{tmp_path / 'held.jsonl'}:1", "found": "the same prompt"}
    ]  # fmt: skip


def test_what_reading_refuses_cleaning_removes_under_the_same_name(tmp_path):
    lines = [json.dumps(row("a", "one")), "[1]", "{", json.dumps({"messages": [{"role": "user", "content": [1]}]})]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    report = clean([source], tmp_path / "out.jsonl", CleanSettings(), max_dropped=1.0)
    assert report.dropped == {"not_an_object": 1, "invalid_json": 1, "non_text_content": 1}
    conversations, kept = read_conversations([tmp_path / "out.jsonl"])
    assert len(conversations) == 1 and not kept.dropped


def test_other_tools_or_another_system_prompt_make_another_prompt(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    question = [{"role": "user", "content": "What is the weather in Brest?"}, {"role": "assistant", "content": "Fine."}]
    rows = [
        {"id": "a", "messages": question},
        {"id": "b", "messages": question, "tools": [tool]},
        {"id": "c", "messages": [{"role": "system", "content": "Be brief."}, *question]},
        {"id": "d", "messages": question, "tools": [tool]},
    ]
    _, kept = run(tmp_path, rows, settings=CleanSettings(near_threshold=None))
    assert kept == ["a", "b", "c"]


def test_a_duplicate_of_a_row_that_goes_stays(tmp_path):
    report, kept = run(tmp_path, [row("a", "one question", ""), row("b", "one question")])
    assert kept == ["b"] and report.dropped == {"empty_answer": 1}


def test_near_duplicates_name_the_row_they_are_like(tmp_path):
    rng = random.Random(0)
    text = sentence(rng, 100)
    rows = [row("first", text), row("other", sentence(rng, 100)), row("near", text + " please")]
    report, kept = run(tmp_path, rows)
    assert kept == ["first", "other"]
    assert report.examples["near_duplicate"] == [
        {"id": "near", "place": f"{tmp_path / 'in.jsonl'}:3", "why": f"like {tmp_path / 'in.jsonl'}:1 first"}
    ]
    assert run(tmp_path, rows, settings=CleanSettings(near_threshold=None))[1] == ["first", "other", "near"]


def test_prompts_of_one_template_with_other_numbers_are_not_near(tmp_path):
    rows = [row(f"{a}", f"Clara has {a} baskets with {a + 3} oranges each. She gives {a % 7} to Ben. How many are left?") for a in range(40)]  # fmt: skip
    assert len(run(tmp_path, rows)[1]) == 40


def test_prompts_without_answers_pass_unless_an_answer_is_needed(tmp_path):
    two = [{"role": "user", "content": "one"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "two"}]
    rows = [row("a", "a question", None), {"id": "b", "messages": two}, row("c", "another")]
    assert run(tmp_path, rows)[1] == ["a", "b", "c"]
    report, kept = run(tmp_path, rows, settings=CleanSettings(need_answer=True))
    assert kept == ["c"] and report.dropped == {"no_answer": 2}


def test_a_tool_call_or_reasoning_is_an_answer(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = [row("a", "call it", ""), row("b", "think of it", "")]
    rows[0]["messages"][1]["tool_calls"] = [call]
    rows[1]["messages"][1]["reasoning_content"] = "hm"
    assert run(tmp_path, rows)[1] == ["a", "b"]


def test_lengths_are_characters_or_tokens(tmp_path):
    rows = [
        row("a", "x" * 10, "y" * 5),
        row("b", "z " * 30, "y" * 50),
        row("c", "u" * 10, "v" * 70),
        row("d", "u v w", None),
    ]
    limits = CleanSettings(min_prompt=6, max_answer=60)
    assert run(tmp_path, rows, settings=limits)[1] == ["a", "b"]
    report, kept = run(tmp_path, rows, settings=CleanSettings(max_prompt=10), measure=lambda text: len(text.split()))
    assert kept == ["a", "c", "d"]
    assert report.examples["long_prompt"][0]["why"] == "length 30 > 10"


def test_truncated_and_refused_answers_are_counted_and_go_on_request(tmp_path):
    rows = [
        row("a", "one", finish_reason="length"),
        row("b", "two", "I'm sorry, but I can't help with that."),
        row("c", "three", finish_reason="stop"),
    ]
    report, kept = run(tmp_path, rows)
    assert kept == ["a", "b", "c"] and report.notes == {"truncated answers kept": 1, "refusals kept": 1}
    report, kept = run(tmp_path, rows, settings=CleanSettings(drop_truncated=True, drop_refused=True))
    assert kept == ["c"] and report.dropped == {"truncated": 1, "refused": 1} and not report.notes


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I'm sorry, but I can't assist with that request.", True),
        ("I cannot provide instructions for this.", True),
        ("Sorry, I am unable to help with this.", True),
        ("As an AI language model, I can't create such content.", True),
        ("I’m sorry, I won’t write that.", True),
        ("I can help with that: first, open the lid.", False),
        ("Sorry to hear that you are ill. Drink tea.", False),
        ("I can't believe how good this is, said Tom. He could not help laughing.", False),
        ("The parser cannot help here, because the grammar is ambiguous.", False),
        ("Unfortunately, the train leaves at nine.", False),
    ],
)
def test_refusals_are_told_from_answers(answer, refused):
    assert is_refusal(answer) == refused


def test_loops_are_told_from_text():
    rng = random.Random(0)
    text = sentence(rng, 300)
    assert repetition(text) < 0.1 and compression(text) < 5
    assert repetition(text[:400] + " again and again it said so" * 60) > 0.5
    assert repetition("yes " * 20) == 0 and compression("ab" * 50) == 1  # too short to say
    assert compression("-" * 1000) > 10 and repetition("-" * 1000) == 0
    table = "\n".join(f"| row {i} | {i * i} | {i % 7} |" for i in range(100))
    assert repetition(table) < 0.5 and compression(table) < 10


# ---------------------------------------------------------------- contamination


def test_thirteen_words_in_a_row_are_enough_and_twelve_are_not(tmp_path):
    rng = random.Random(0)
    held = sentence(rng, 40).split()
    rows = [
        row("thirteen", f"{sentence(rng, 20)} {' '.join(held[10:23])} {sentence(rng, 20)}"),
        row("twelve", f"{sentence(rng, 20)} {' '.join(held[10:22])} {sentence(rng, 20)}"),
        row("punctuation", f"Tell me: {', '.join(held[5:18]).upper()}!"),
    ]
    report, kept = run(tmp_path, rows, against=[row("h", " ".join(held), None)])
    assert kept == ["twelve"]
    assert report.contaminated[0]["found"] == " ".join(held[10:23])
    rows.append(row("far", "Something else."))
    assert run(tmp_path, rows, against=[row("h", " ".join(held), None)], settings=CleanSettings(overlap=12))[1] == [
        "far"
    ]


def test_every_turn_is_compared_and_short_prompts_by_equality(tmp_path):
    rng = random.Random(0)
    second = sentence(rng, 30)
    held = [{"id": "h", "messages": [
        {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": ""}, {"role": "user", "content": second}]}]  # fmt: skip
    rows = [row("second", second), row("first", "hello!"), row("part", "Hello! How are you?")]
    report, kept = run(tmp_path, rows, against=held)
    assert kept == ["part"] and [c["id"] for c in report.contaminated] == ["second", "first"]


def test_words_that_many_held_out_prompts_share_are_a_template(tmp_path):
    frame = "Your whole answer must be in English and in small letters and no capital letter is allowed anywhere"
    rng = random.Random(0)
    held = [row(f"h{i}", f"{sentence(rng, 20)} {frame}", None) for i in range(11)]
    rows = [row("frame", f"Write about cats. {frame}"), row("content", held[3]["messages"][0]["content"])]
    report, kept = run(tmp_path, rows, against=held)
    assert kept == ["frame"] and report.contaminated[0]["against"].endswith("held.jsonl:4")
    assert run(tmp_path, [*rows, row("far", "Write about dogs.")], against=held[:10])[1] == ["far"]


def test_characters_are_the_words_of_chinese(tmp_path):
    held = "请用一句话说明为什么天空在白天是蓝色的而在傍晚是红色的"
    rows = [row("same", f"老师问：{held}？"), row("other", "请写一首关于春天的短诗")]
    report, kept = run(tmp_path, rows, against=[row("h", held, None)])
    assert kept == ["other"] and report.dropped == {"contaminated": 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=0, max_size=40),
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40),
)
def test_overlap_is_that_of_two_loops(one, other):
    size = 5
    heldout = HeldOut(size)
    heldout.add([" ".join(other)], "h:1")
    runs = {tuple(other[i : i + size]) for i in range(len(other) - size + 1)}
    expected = any(tuple(one[i : i + size]) in runs for i in range(len(one) - size + 1)) or one == other
    text = " ".join(one) or "x"
    assert (heldout.find([text], [words_of(text)]) is not None) == expected


def test_a_held_out_row_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"held-out row .*held.jsonl:1 cannot be compared \(no_messages\)"):
        run(tmp_path, [row("a", "x")], against=[{"id": "h"}])


# ---------------------------------------------------------------- files


def test_the_same_input_gives_the_same_bytes_in_every_process(tmp_path):
    rng = random.Random(0)
    base = [row(f"r{i}", sentence(rng, 60), sentence(rng, 30)) for i in range(200)]
    rows = base + [row(f"n{i}", base[i]["messages"][0]["content"] + " now") for i in range(100)]
    source = toys.write_jsonl(tmp_path / "in.jsonl", rows)
    for name, seed in (("a", "1"), ("b", "2")):
        for suffix in ("", ".gz", ".zst"):
            command = [
                sys.executable,
                ROOT / "data_prep" / "clean.py",
                source,
                "--output",
                tmp_path / f"{name}.jsonl{suffix}",
            ]
            if suffix:
                assert toys.call(MAIN, *command[2:]).code == 0
            else:
                environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
                subprocess.run(command, check=True, capture_output=True, env=environment)
    for suffix in ("", ".gz", ".zst"):
        a, b = (tmp_path / f"{name}.jsonl{suffix}" for name in "ab")
        assert a.read_bytes() == b.read_bytes(), suffix
    plain = (tmp_path / "a.jsonl").read_bytes()
    assert 200 <= plain.count(b"\n") < 300
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == plain
    with zstandard.open(tmp_path / "a.jsonl.zst", "rb") as stream:
        assert stream.read() == plain
    again = tmp_path / "again.jsonl"  # cleaning a clean file removes nothing
    assert clean([tmp_path / "a.jsonl.zst"], again, CleanSettings()).dropped == {} and again.read_bytes() == plain


def test_too_many_dropped_rows_write_nothing(tmp_path):
    source = toys.write_jsonl(tmp_path / "in.jsonl", [row(str(i), "the same question") for i in range(10)])
    done = toys.call(MAIN, source, "--output", tmp_path / "out.jsonl", "--max-dropped", "0.5")
    assert done.code == 2 and "share dropped 0.900 > max_dropped 0.5" in done.err and "duplicate" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]
    done = toys.call(MAIN, source, "--output", tmp_path / "out.jsonl", "--min-prompt", 1000)
    assert done.code == 2 and "no row of 10 is left" in done.err
    done = toys.call(MAIN, source, "--output", tmp_path / "out.jsonl", "--max-dropped", "0.95")
    assert done.code == 0 and "kept 1 of 10 rows" in done.out


def test_the_command_takes_tokens_and_filters(tmp_path, target_dir):
    rows = [row("a", "w20 w21"), row("b", "w20 w21 w22 w23 w24 w25")]
    source = toys.write_jsonl(tmp_path / "in.jsonl", rows)
    done = toys.call(MAIN, source, "--output", tmp_path / "out.jsonl", "--tokenizer", target_dir, "--max-prompt", 4)
    assert done.code == 0, done.err
    assert "length 6 > 4" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "in.jsonl"], "is also an input"),
        (["--output", "out.json"], "must end in .jsonl"),
        (["--output", "out.jsonl", "--near", "0.2"], "near-duplicate threshold 0.2"),
        (["--output", "out.jsonl", "--min-prompt", "9", "--max-prompt", "3"], "min_prompt 9 > max_prompt 3"),
        (["--output", "out.jsonl", "--max-repetition", "1.5"], "max_repetition 1.5"),
        (["--output", "out.jsonl", "--max-compression", "1"], "max_compression 1.0 must be above 1"),
        (["--output", "out.jsonl", "--max-compression", "nan"], "max_compression nan must be above 1"),
        (["--output", "out.jsonl", "--min-prompt", "-5"], "min_prompt -5: must be in"),
        (["--output", "out.jsonl", "--max-answer", "0"], "max_answer 0: must be in"),
        (["--output", "out.jsonl", "--max-dropped", "7"], "max_dropped 7.0: must be in [0, 1]"),
        (["--output", "out.jsonl", "--overlap", "2"], "overlap 2: must be 5 to 100 words"),
        (["--output", "out.jsonl", "--overlap", "1000000000"], "overlap 1000000000: must be 5 to 100 words"),
        (["--output", "out.jsonl", "--against", "gone.jsonl"], "gone.jsonl does not exist"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    toys.write_jsonl(tmp_path / "in.jsonl", [row("a", "x")])
    done = toys.call(MAIN, "in.jsonl", *arguments)
    assert done.code == 2 and message in done.err, done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_an_input_that_changes_meanwhile_is_an_error(tmp_path, monkeypatch):
    source = toys.write_jsonl(tmp_path / "in.jsonl", [row("a", "x"), row("b", "y")])
    real = rows_module.rows
    passes = []

    def growing(path):
        passes.append(path)
        if len(passes) == 2:
            with source.open("a") as stream:
                stream.write(json.dumps(row("c", "z")) + "\n")
        yield from real(path)

    monkeypatch.setattr(rows_module, "rows", growing)
    with pytest.raises(ValueError, match="changed while being read"):
        clean([source], tmp_path / "out.jsonl", CleanSettings())
    assert not (tmp_path / "out.jsonl").exists()


def test_killing_leaves_the_old_output(tmp_path):
    """A writer that is killed half-way, seen from outside; the next run is not disturbed by what it left."""
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    code = f"""
import sys, time
from pathlib import Path
from dflash_train.data.rows import atomic_file
with atomic_file(Path({str(output)!r})) as stream:
    stream.write(b"new\\n" * 100000); stream.flush()
    print("half", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == b"half\n"
    with pytest.raises(ValueError, match="is being written by another process"), atomic_file(output):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert output.read_text() == "old\n" and (tmp_path / "out.jsonl.part").exists()
    with atomic_file(output) as stream:
        stream.write(b"whole\n")
    assert output.read_text() == "whole\n" and not (tmp_path / "out.jsonl.part").exists()


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_an_error_while_writing_leaves_nothing(tmp_path, name):
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / name) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- text


@given(
    st.lists(st.text("abcXYZ,.1", min_size=1, max_size=5), max_size=8), st.sampled_from(["\n", "\t ", "\u00a0", "  "])
)
def test_case_and_spaces_do_not_make_another_prompt(words, space):
    assert normalise(space + space.join(words).upper() + space) == normalise(" ".join(words).lower())


def test_two_spellings_of_one_character_are_one():
    assert normalise("cafe\u0301 \uff11") == normalise("CAFÉ 1")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=30), st.integers(1, 8))
def test_ngrams_are_equal_exactly_where_the_words_are(words, size):
    hashes = ngrams(words, size).tolist()
    size = min(size, len(words)) or 1
    runs = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    assert len(hashes) == len(runs)
    assert [[a == b for b in hashes] for a in hashes] == [[a == b for b in runs] for a in runs]


def test_an_empty_held_out_file_is_refused(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a b", "response": "c"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl holds no row"):
        clean([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", CleanSettings(), against=[tmp_path / "empty.jsonl"])


def test_a_file_that_another_process_just_finished_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output, flock = tmp_path / "out.jsonl", rows_module.fcntl.flock

    def finished_meanwhile(stream, how):  # the other one puts its file in place between our opening and our locking
        stream.write(b"whole\n")
        stream.flush()
        (tmp_path / "out.jsonl.part").replace(output)
        flock(stream, how)

    monkeypatch.setattr(rows_module.fcntl, "flock", finished_meanwhile)
    with pytest.raises(ValueError, match="just now"), atomic_file(output) as stream:
        stream.write(b"second\n")
    assert output.read_text() == "whole\n"
