"""Prompt sets from mixtures, with local folders in the place of the Hub: the same code reads both."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import toys
import yaml

from dflash_train.data import prompts
from dflash_train.data.prompts import (
    PERMISSIVE,
    Benchmark,
    Mixture,
    Patience,
    Source,
    build,
    check_card,
    check_licenses,
    describe,
    enough,
    is_network,
    load_benchmarks,
    load_mixture,
    shares,
    shipped,
    texts,
    to_row,
    without,
)
from dflash_train.data.read import BadRow, read_conversations
from dflash_train.data.rows import read_lines

MAIN = toys.script("prompts").main
ROOT = Path(__file__).resolve().parents[2]
HELD = "A held out question that is long enough to be found again by thirteen of its words in a row"


def source(**changes) -> Source:
    base = {
        "name": "s",
        "path": "x",
        "license": "MIT",
        "domain": "d",
        "weight": 1,
        "what": "w",
        "fields": {"prompt": "p"},
    }
    return Source(**{**base, **changes})


def parquet(folder: Path, rows: list[dict]) -> str:
    folder.mkdir(parents=True)
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        datasets.Dataset.from_list(part).to_parquet(str(folder / f"train-0000{number}-of-00002.parquet"))
    return str(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A mixture file, a benchmark file, and the folders that they name."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # 5 s after every stream of Parquet files
    chat = [
        {"conversations": [{"from": "human", "value": f"Chat {i}?"}, {"from": "gpt", "value": "Yes."}, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], "score": i}
        for i in range(60)
    ]  # fmt: skip
    math = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(50)]
    math += [{"problem": f"Please tell me. {HELD}?", "answer": "no"}, {"problem": "Chat 3?", "answer": "again"}]
    math += [{"problem": "", "answer": "empty"}, {"problem": "x" * 40_000, "answer": "long"}]
    tools = [
        {"system": f"You have the tool f{i}.", "conversations": [{"from": "user", "value": "Call it."}, {"from": "assistant", "value": "f()"}, {"from": "tool", "value": "42"}, {"from": "assistant", "value": "It is 42."}, {"from": "user", "value": "Thanks."}], "tools": json.dumps([{"name": f"f{i}", "parameters": {}}])}
        for i in range(20)
    ]  # fmt: skip
    mixture = {
        "rows": 100,
        "sources": [
            {"name": "chat", "path": parquet(tmp_path / "hub/chat", chat), "license": "MIT", "domain": "chat", "weight": 5,
             "fields": {"conversations": "conversations"}, "what": "chat"},
            {"name": "math", "path": str(tmp_path / "hub/math"), "license": "Apache-2.0", "domain": "math", "weight": 4,
             "fields": {"prompt": "problem"}, "what": "sums"},
            {"name": "tools", "path": parquet(tmp_path / "hub/tools", tools), "license": "CC-BY-4.0", "domain": "tools", "weight": 1,
             "fields": {"conversations": "conversations", "system": "system", "tools": "tools"}, "what": "tools"},
        ],
    }  # fmt: skip
    (tmp_path / "hub/math").mkdir()
    toys.write_jsonl(tmp_path / "hub/math/train.jsonl", math)
    (tmp_path / "hub/bench").mkdir()
    toys.write_jsonl(tmp_path / "hub/bench/data.jsonl", [{"q": HELD}, {"q": "Chat 7?"}])
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    bench = {
        "name": "bench",
        "path": str(tmp_path / "hub/bench"),
        "format": "json",
        "files": ["data.jsonl"],
        "text": ["q"],
    }
    (tmp_path / "benchmarks.yaml").write_text(yaml.safe_dump({"benchmarks": [bench]}))
    return tmp_path


def command(hub: Path, output: str, *more) -> toys.Called:
    arguments = ["--output", hub / output, "--benchmarks", hub / "benchmarks.yaml", "--retry-wait", "0.01"]
    return toys.call(MAIN, hub / "mixture.yaml", *arguments, *more)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for _, line in read_lines([path])]


def test_a_mixture_becomes_prompts_that_are_accounted_for(hub):
    done = command(hub, "out.jsonl")
    assert done.code == 0, done.err
    rows = lines(hub / "out.jsonl")
    count = {d: sum(r["domain"] == d for r in rows) for d in ("chat", "math", "tools")}
    assert count == {"chat": 50, "math": 40, "tools": 10}
    assert len({r["id"] for r in rows}) == 100
    chat, math, tools = (next(r for r in rows if r["domain"] == d) for d in count)
    assert set(chat) == {"id", "domain", "messages", "source", "license"}
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "user"]
    assert chat["messages"][1]["content"] == "" and chat["messages"][2]["content"] == "Why?"
    assert (math["license"], math["source"]) == ("Apache-2.0", str(hub / "hub/math")) and len(math["messages"]) == 1
    assert [m["role"] for m in tools["messages"]] == ["system", "user"]
    assert tools["tools"][0]["type"] == "function" and tools["tools"][0]["function"]["parameters"] == {}
    text = "\n".join(m["content"] for r in rows for m in r["messages"])
    assert HELD not in text and "Chat 7?" not in text and "42" not in {m["content"] for m in tools["messages"]}

    manifest = json.loads((hub / "out.jsonl.manifest.json").read_text())
    assert manifest["rows"] == 100 and manifest["domains"] == count
    assert manifest["licenses"] == {"MIT": 50, "Apache-2.0": 40, "CC-BY-4.0": 10}
    assert manifest["benchmarks"]["bench"]["prompts"] == 2 and manifest["skipped_benchmarks"] == []
    assert manifest["sha256"] == hashlib.sha256((hub / "out.jsonl").read_bytes()).hexdigest()
    assert manifest["sources"][2]["cut"] == 10 and manifest["sources"][0]["revision"].startswith("sha256:")
    assert "100 prompts in" in done.out and "arXiv 2602.06036" in done.out and "compared with 1 benchmarks" in done.out
    assert not (hub / "out.jsonl.parts").exists()


def test_what_is_written_can_be_regenerated(hub):
    assert command(hub, "out.jsonl.zst").code == 0
    conversations, kept = read_conversations([hub / "out.jsonl.zst"], need_answer=False)
    assert kept.kept == 100 and not kept.dropped
    assert conversations[0].metadata == {"source": str(hub / "hub/chat"), "license": "MIT"}


def test_a_source_that_runs_out_is_reported_with_what_was_dropped(hub):
    done = command(hub, "out.jsonl", "--rows", "1000", "--seed", "1")
    assert done.code == 0, done.err
    manifest = json.loads((hub / "out.jsonl.manifest.json").read_text())
    chat, math, tools = manifest["sources"]
    assert (chat["kept"], math["kept"], tools["kept"]) == (59, 51, 20)
    assert chat["dropped"] == {"contaminated": 1}
    assert math["dropped"] == {"no_prompt": 1, "long_prompt": 1, "contaminated": 1}
    assert math["contaminated"][0].split(": ")[1].startswith("bench:1")
    assert "chat: 59 rows of 60 read (1 contaminated); 441 fewer than asked for" in done.err


def test_prompts_are_taken_once_over_all_sources(hub):
    toys.write_jsonl(hub / "hub/math/train.jsonl", [{"problem": f"What is {i % 5}?", "answer": ""} for i in range(50)])
    assert command(hub, "out.jsonl").code == 0
    manifest = json.loads((hub / "out.jsonl.manifest.json").read_text())
    assert manifest["sources"][1]["kept"] == 5 and manifest["dropped"]["duplicate"] == 45


def test_the_same_command_gives_the_same_bytes_and_another_seed_other_rows(hub):
    for name, *more in (("a",), ("b",), ("c", "--seed", "1")):
        assert command(hub, f"{name}.jsonl", "--rows", "40", *more).code == 0
    a, b, c = (sorted(r["id"] for r in lines(hub / f"{name}.jsonl")) for name in "abc")
    assert (hub / "a.jsonl").read_bytes() == (hub / "b.jsonl").read_bytes()
    assert a != c and len(a) == len(c) == 40


def test_a_stopped_run_goes_on_with_the_next_source(hub, monkeypatch):
    assert command(hub, "whole.jsonl").code == 0
    real, opened = prompts.open_rows, []

    def stops(place, *arguments, **options):
        opened.append(place.name)
        if place.name == "tools" and opened.count("tools") == 1:
            raise KeyboardInterrupt
        return real(place, *arguments, **options)

    monkeypatch.setattr(prompts, "open_rows", stops)
    assert command(hub, "out.jsonl").code == 130
    assert not (hub / "out.jsonl").exists()
    assert sorted(p.name for p in (hub / "out.jsonl.parts").iterdir()) == [
        "chat.json", "chat.jsonl", "math.json", "math.jsonl",
    ]  # fmt: skip
    assert command(hub, "out.jsonl").code == 0
    assert opened == ["bench", "chat", "math", "tools", "bench", "tools"]
    assert (hub / "out.jsonl").read_bytes() == (hub / "whole.jsonl").read_bytes()
    whole, again = (json.loads((hub / f"{n}.jsonl.manifest.json").read_text()) for n in ("whole", "out"))
    assert whole == again


def test_finished_parts_of_other_settings_or_other_data_are_not_used(hub, monkeypatch):
    real = prompts._take

    def stops(builder, source, *arguments):
        if source.name == "tools":
            raise KeyboardInterrupt
        return real(builder, source, *arguments)

    monkeypatch.setattr(prompts, "_take", stops)
    assert command(hub, "out.jsonl").code == 130
    monkeypatch.setattr(prompts, "_take", real)
    toys.write_jsonl(hub / "hub/math/train.jsonl", [{"problem": f"New {i}?", "answer": ""} for i in range(60)])
    assert command(hub, "out.jsonl").code == 0
    assert sum("New" in r["messages"][0]["content"] for r in lines(hub / "out.jsonl")) == 40


def test_killing_leaves_no_output(hub):
    code = f"""
import os, signal, sys
from pathlib import Path
from dflash_train.data import prompts
real = prompts._take
def dies(builder, source, *arguments):
    if source.name == "math":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(builder, source, *arguments)
prompts._take = dies
prompts.build(prompts.load_mixture({str(hub / "mixture.yaml")!r}), Path({str(hub / "out.jsonl")!r}),
              benchmarks=prompts.load_benchmarks(Path({str(hub / "benchmarks.yaml")!r})))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not (hub / "out.jsonl").exists() and not (hub / "out.jsonl.manifest.json").exists()
    assert command(hub, "out.jsonl").code == 0 and len(lines(hub / "out.jsonl")) == 100


# ---------------------------------------------------------------- what stops a run


def test_a_benchmark_that_cannot_be_loaded_is_named_and_can_be_skipped(hub):
    content = yaml.safe_load((hub / "benchmarks.yaml").read_text())
    content["benchmarks"].append({"name": "gone", "path": str(hub / "hub/gone"), "text": ["q"]})
    content["benchmarks"].append({"name": "wrong", "path": str(hub / "hub/math"), "text": ["question"]})
    (hub / "benchmarks.yaml").write_text(yaml.safe_dump(content))
    done = command(hub, "out.jsonl")
    assert done.code == 2 and "gone (" in done.err and "wrong (" in done.err and "bench (" not in done.err
    assert "no column 'question'; the columns are problem, answer" in done.err
    assert "--skip-benchmark" in done.err and not (hub / "out.jsonl").exists()
    done = command(hub, "out.jsonl", "--skip-benchmark", "gone", "--skip-benchmark", "wrong")
    assert done.code == 0 and "NOT with gone, wrong" in done.out
    assert json.loads((hub / "out.jsonl.manifest.json").read_text())["skipped_benchmarks"] == ["gone", "wrong"]
    done = command(hub, "out.jsonl", "--skip-benchmark", "bonch")
    assert done.code == 2 and "--skip-benchmark bonch: not one of bench, gone, wrong" in done.err


def test_a_source_that_cannot_be_loaded_is_named_and_can_be_left_out(hub):
    content = yaml.safe_load((hub / "mixture.yaml").read_text())
    content["sources"][1]["fields"] = {"prompt": "question"}
    (hub / "mixture.yaml").write_text(yaml.safe_dump(content))
    done = command(hub, "out.jsonl")
    assert (
        done.code == 2
        and "source math" in done.err
        and "no column 'question'" in done.err
        and "--without math" in done.err
    )
    done = command(hub, "out.jsonl", "--without", "math")
    assert done.code == 0
    assert {r["domain"] for r in lines(hub / "out.jsonl")} == {"chat", "tools"}


def test_held_out_files_are_kept_out_too(hub):
    held = toys.write_jsonl(hub / "held.jsonl", [{"id": "h", "messages": [{"role": "user", "content": "chat 9?"}]}])
    assert command(hub, "out.jsonl", "--rows", "1000", "--against", held).code == 0
    manifest = json.loads((hub / "out.jsonl.manifest.json").read_text())
    assert manifest["sources"][0]["kept"] == 58 and manifest["against"] == [str(held)]


def test_without_the_hub_the_message_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = "import sys; sys.argv[1:] = ['general', '--output', 'o.jsonl', '--retries', '1', '--retry-wait', '0.01']; import runpy; "
    code += f"runpy.run_path({str(ROOT / 'data_prep/prompts.py')!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert all(f"  {b.name} ({b.hub})" in done.stderr for b in load_benchmarks()) and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_licences_that_restrict_are_refused_by_name():
    mixture = Mixture(name="m", rows=10, sources=[source(license="CC-BY-NC-4.0"), source(name="t", license="CC-BY-SA-4.0"), source(name="u")])  # fmt: skip
    with pytest.raises(
        ValueError, match=r"(?s)s: CC-BY-NC-4.0; --without s, or --allow-license CC-BY-NC-4.0.*t: CC-BY-SA"
    ) as error:
        check_licenses(mixture)
    assert "u:" not in str(error.value)
    check_licenses(mixture, ["CC-BY-NC-4.0", "CC-BY-SA-4.0"])
    check_licenses(without(mixture, ["s", "t"]))
    with pytest.raises(ValueError, match="no source is left"):
        without(mixture, ["s", "t", "u"])


def test_a_card_with_another_licence_is_an_error():
    check_card(source(license="ODC-By-1.0"), ["license:odc-by", "language:en"])
    check_card(source(license="MIT"), ["language:en"])
    with pytest.raises(ValueError, match="says licence cc-by-nc-4.0, the mixture MIT"):
        check_card(source(license="MIT"), ["license:cc-by-nc-4.0"])


# ---------------------------------------------------------------- rows


def test_conversations_end_with_a_user_and_before_a_tool_result():
    turn = lambda role, text: {"role": role, "content": text}  # noqa: E731
    chat = source(fields={"messages": "m"})
    row, cut = to_row(chat, {"m": [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]})  # fmt: skip
    assert (
        row["messages"] == [turn("system", "s"), turn("user", "a"), turn("assistant", ""), turn("user", "c")]
        and not cut
    )
    row, cut = to_row(chat, {"m": [turn("user", "a"), turn("assistant", None), turn("tool", "x"), turn("assistant", "y"), turn("user", "z")]})  # fmt: skip
    assert row["messages"] == [turn("user", "a")] and cut
    row, _ = to_row(chat, {"m": [turn("assistant", "Hello, I am here."), turn("user", "a")]})
    assert row["messages"] == [turn("user", "a")]
    row, _ = to_row(
        source(fields={"messages": "m", "drop_system": True}), {"m": [turn("system", "s"), turn("user", "a")]}
    )
    assert row["messages"] == [turn("user", "a")]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_messages"),
        (None, "no_messages"),
        (["text"], "bad_role"),
        ([{"role": "robot", "content": "x"}], "bad_role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "non_text_content"),
        ([{"role": "user", "content": " "}], "empty_user_turn"),
        ([{"role": "assistant", "content": "x"}], "no_prompt"),
        ([{"role": "user", "content": "y" * 40_000}], "long_prompt"),
    ],
)
def test_rows_without_a_usable_prompt_have_a_reason(messages, reason):
    with pytest.raises(BadRow, match=f"^{reason}$"):
        to_row(source(fields={"messages": "m"}), {"m": messages})


def test_a_prompt_may_be_a_sentence_around_columns():
    row, _ = to_row(source(fields={"prompt": "Sum up:\n\n{text} ({n})"}), {"text": "A {long} one.", "n": "3"})
    assert row["messages"][0]["content"] == "Sum up:\n\nA {long} one. (3)"
    with pytest.raises(BadRow, match="no_prompt"):
        to_row(source(fields={"prompt": "Sum up: {text}"}), {"text": None})


def test_benchmark_columns_hold_texts_turns_or_messages():
    assert texts("a") == ["a"]
    assert texts(["a", {"content": "b"}, [{"role": "user", "value": "c"}]]) == ["a", "b", "c"]
    assert texts(None) == []


def test_shares_sum_to_the_rows_and_follow_the_weights():
    mixture = Mixture(
        name="m", rows=10, sources=[source(name=n, weight=w) for n, w in (("a", 1), ("b", 1), ("c", 1.5))]
    )
    for rows in (1, 2, 7, 100, 1001):
        counts = shares(mixture, rows)
        assert sum(counts.values()) == rows
        assert all(abs(counts[s.name] - rows * s.weight / 3.5) < 1 for s in mixture.sources)


# ---------------------------------------------------------------- the network


def test_after_a_network_error_the_stream_goes_on_where_it_was():
    starts = []

    def flaky():
        starts.append(1)
        for i in range(10):
            if i == 3 * len(starts) and len(starts) < 4:
                raise ConnectionError("gone")
            yield {"i": i}

    said = []
    rows = list(Patience(retries=1, wait=0.0, say=said.append).rows("x", flaky))
    assert [r["i"] for r in rows] == list(range(10)) and len(starts) == 4 and "attempt 2" in said[0]


def test_patience_ends():
    calls = []

    def down():
        calls.append(1)
        raise TimeoutError("slow")

    with pytest.raises(TimeoutError):
        Patience(retries=2, wait=0.0).call("x", down)
    assert len(calls) == 3
    with pytest.raises(KeyError):
        Patience(retries=2, wait=0.0).call("x", lambda: {}["a"])


def test_which_errors_may_pass():
    from huggingface_hub.utils import httpx

    def status(code: int) -> Exception:
        request = httpx.Request("GET", "http://x")
        return httpx.HTTPStatusError("x", request=request, response=httpx.Response(code, request=request))

    assert all(
        is_network(e) for e in (ConnectionError(), TimeoutError(), httpx.ConnectError("x"), status(503), status(429))
    )
    from huggingface_hub.errors import HfHubHTTPError

    assert is_network(HfHubHTTPError("busy", response=status(503).response)) and not is_network(
        HfHubHTTPError("no", response=status(403).response)
    )
    assert not any(is_network(e) for e in (FileNotFoundError(), ValueError(), status(401), status(404)))


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize("name", shipped())
def test_shipped_mixtures_are_permissive_and_documented(name):
    mixture = load_mixture(name)
    check_licenses(mixture)
    docs = (ROOT / "docs" / "prompts.md").read_text()
    assert describe(mixture) in docs, f"python data_prep/prompts.py {name} --list, and put it into docs/prompts.md"
    for s in mixture.sources:
        assert s.hub and s.license in PERMISSIVE and s.checked and s.what, s.name
        assert s.revision is None or len(s.revision) == 40
    assert enough() in docs


def test_shipped_mixtures_cover_what_targets_are_used_for():
    assert shipped() == ["general", "reasoning"]
    assert {s.domain for s in load_mixture("general").sources} == {
        "chat",
        "code",
        "math",
        "tools",
        "multilingual",
        "long",
    }
    assert {"reasoning", "math", "code", "chat"} <= {s.domain for s in load_mixture("reasoning").sources}
    names = " ".join(b.name for b in load_benchmarks())
    for wanted in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "livecodebench", "aime", "gpqa", "ifeval", "alpaca_eval", "arena-hard"):  # fmt: skip
        assert wanted in names


def test_files_of_a_hub_data_set_are_opened_at_their_revision(monkeypatch):
    asked = []

    def remember(*arguments, **options):
        asked.append((arguments, options))
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", remember)
    whole = Benchmark(name="a", hub="o/n", config="c", split="test", text=["q"])
    one = Benchmark(name="b", hub="o/n", split="train", format="json", files=["d/q.jsonl"], text=["q"])
    for place in (whole, one):
        with pytest.raises(ConnectionError):
            next(prompts.open_rows(place, "f00", ["q"]))
    streaming = {"streaming": True}
    assert asked[0] == (("o/n",), {"split": "test", "revision": "f00", "name": "c", **streaming})
    assert asked[1] == (
        ("json",),
        {"split": "train", "data_files": {"train": ["hf://datasets/o/n@f00/d/q.jsonl"]}, **streaming},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"licence": "MIT"}, "source 1 .*unknown key 'licence'; did you mean 'license'"),
        ({"fields": {"promt": "x"}}, "unknown field 'promt'"),
        ({"fields": {"prompt": "x", "messages": "y"}}, "exactly one of messages, conversations and prompt"),
        ({"hub": "a/b"}, "either hub .* or path"),
        ({"weight": 0}, "weight 0 must be above 0"),
        ({"weight": "much"}, "wrong type"),
        ({"files": ["x.json"]}, "files needs format"),
        ({"name": "a b"}, "name 'a b'"),
        ({"name": "math"}, "'math' is used twice"),
    ],
)
def test_mistakes_in_a_mixture_are_named(hub, change, message):
    content = yaml.safe_load((hub / "mixture.yaml").read_text())
    content["sources"][0] |= change
    (hub / "mixture.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        load_mixture(str(hub / "mixture.yaml"))


def test_other_mistakes_are_named(hub, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'general'"):
        load_mixture("generel")
    (tmp_path / "bad.yaml").write_text("rows: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_mixture(str(tmp_path / "bad.yaml"))
    (tmp_path / "bad.yaml").write_text("rows: 3")
    with pytest.raises(ValueError, match="exactly the keys rows, sources"):
        load_mixture(str(tmp_path / "bad.yaml"))
    for option, value, said in (("--rows", "0", "rows 0: "), ("--seed", "-1", "seed -1: "), ("--buffer", "0", "buffer 0: "), ("--retries", "-1", "retries -1: "),
                                ("--retry-wait", "nan", "retry wait in seconds nan: "), ("--overlap", "3", "overlap 3: ")):  # fmt: skip
        done = command(hub, "out.jsonl", option, value)
        assert done.code == 2 and f"error: {said}must be" in done.err, done.err
    assert "must end in .jsonl" in command(hub, "out.txt").err
    assert "--without maths: not one of chat, math, tools" in command(hub, "out.jsonl", "--without", "maths").err
    done = toys.call(MAIN)
    assert done.code == 2 and "--list shows the mixtures" in done.err
    done = toys.call(MAIN, "--list")
    assert done.code == 0 and "open-perfectblend" in done.out and "OpenThoughts3" in done.out


def test_a_mixture_of_which_nothing_is_left_is_an_error(hub):
    held = toys.write_jsonl(hub / "held.jsonl", [{"id": str(i), "prompt": f"Chat {i}?"} for i in range(60)])
    done = command(hub, "out.jsonl", "--without", "math", "--without", "tools", "--against", held)
    assert done.code == 2 and "no row is left" in done.err and "60 contaminated" in done.err
    assert not (hub / "out.jsonl").exists()


def test_build_needs_no_more_than_a_mixture_and_an_output(hub):
    manifest = build(
        load_mixture(str(hub / "mixture.yaml")), hub / "o.jsonl", benchmarks=[], rows=10, say=lambda text: None
    )
    assert manifest["rows"] == 10 and manifest["benchmarks"] == {}
