"""The benchmark of servers, against one that knows what it did (tests/served.py)."""

from __future__ import annotations

import errno
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import toys
from served import Pretender, pretending

from dflash_train.benchmark import counters, figures, output, workloads
from dflash_train.benchmark.counters import Acceptance
from dflash_train.benchmark.run import Arm, Settings, measure, parse_arm
from dflash_train.benchmark.stream import PRESETS, Events, Record, Sampling, _Reader, reasoning_kwargs

SETTINGS = Settings(num_prompts=8, warm_up=1, timeout_s=20)
GAINS = [3, 2, 4]  # of Pretender's passes: 2 + 1 + 3 drafts accepted in 3 rounds, 10 tokens with the first


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The pretender counts before it answers: no need to wait for it."""
    monkeypatch.setattr(counters, "SETTLE_SECONDS", 0.005)


def prompts(count: int, turns: int = 1) -> dict[str, list[workloads.Prompt]]:
    made = [
        workloads.Prompt(id=f"p{i}", messages=[{"role": "user", "content": f"say {i}"}], then=["and?"] * (turns - 1))
        for i in range(count)
    ]
    return {"toy": made}


def run(*servers: Pretender, settings: Settings = SETTINGS, work=None, names=("plain", "draft", "third"), **options):
    arms = [Arm(name=name, url=server.url) for name, server in zip(names, servers)]
    return measure(arms, work or prompts(8), settings, progress=False, **options)


def only(report):
    (cell,) = report["cells"]
    (arm,) = cell["arms"].values()
    return arm


# --- the stream ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_events_survive_every_cut(newline):
    said = ['{"a": "wört"}', "two\nlines", "[DONE]"]
    text = f": comment{newline}{newline}retry: 5{newline}data: {said[0]}{newline}{newline}"
    text += f"event: message{newline}data: two{newline}data:lines{newline}{newline}{newline}data: [DONE]"
    raw = text.encode()
    for trial in range(60):
        draw = random.Random(trial)
        cuts = sorted(draw.choices(range(len(raw) + 1), k=draw.randrange(len(raw)))) if trial else list(range(len(raw)))
        events, found = Events(), []
        for a, b in zip([0, *cuts], [*cuts, len(raw)]):
            found += events.feed(raw[a:b])
        assert found + list(events.end()) == said, (trial, cuts)


def test_an_event_is_there_as_soon_as_its_blank_line():
    events = Events()
    assert list(events.feed(b"data: x\r\n\r\n")) == ["x"] and list(events.feed(b"data: y\n")) == []
    assert list(events.feed(b"\n")) == ["y"]


@pytest.mark.parametrize("quirk", [{}, {"newline": "\r\n"}, {"cut_bytes": 7, "comments": True}], ids=str)
def test_tokens_are_those_of_usage_and_times_those_of_the_stream(quirk):
    """Ten tokens come in four pieces: counting pieces would say four. A busy machine makes everything later, also the first text that is seen:
    what was waited for holds for every request, the pauses behind the first text for the one that was disturbed least."""
    started = time.monotonic()
    with pretending(Pretender(first=0.05, pause=0.03, **quirk)) as server:
        arm = only(run(server, work=prompts(3), settings=replace(SETTINGS, num_prompts=3)))
    elapsed = time.monotonic() - started
    assert (arm["requests"], arm["failed"], arm["output_tokens"], arm["tokens_from"]) == (3, 0, 30, ["usage"])
    spans = [r["last"] - r["ttft"] for r in arm["records"]]
    for record, span in zip(arm["records"], spans, strict=True):
        assert record["prompt_tokens"] == 7 and record["finish_reason"] == "stop"
        assert 0.05 <= record["ttft"] < record["last"] <= record["latency"] and 0.14 <= record["last"]
        assert len(record["gaps"]) == 3 or quirk  # several network pieces of one event are one
        assert sum(record["gaps"]) == pytest.approx(span)
    assert max(spans) >= 0.07 and sum(r["latency"] for r in arm["records"]) < elapsed
    assert arm["itl_s"]["mean"] == pytest.approx(sum(spans) / (3 * 9))
    assert min(spans) / 9 <= arm["itl_s"]["p50"] <= max(spans) / 9
    assert arm["tok_s"] == pytest.approx(30 / arm["wall_s"])
    assert arm["busy_tok_s"] == pytest.approx(30 / sum(r["latency"] for r in arm["records"]))
    assert arm["ttft_s"]["p99"] <= max(r["ttft"] for r in arm["records"])


def test_pieces_of_the_network_that_split_an_event_are_one_piece_of_text():
    with pretending(Pretender(cut_bytes=5, pause=0.01)) as server:
        arm = only(run(server, work=prompts(1), settings=replace(SETTINGS, num_prompts=1)))
    assert len(arm["records"][0]["gaps"]) == 3


def test_without_usage_it_fails_and_says_so_or_counts_with_a_tokenizer():
    with pretending(Pretender(usage=False)) as server:
        arm = only(report := run(server))
        counted = only(again := run(server, count=lambda text: len(text.split())))
    assert arm["failed"] == 8 and "--tokenizer" in next(iter(arm["errors"])) and arm["tok_s"] == 0
    assert figures.failures(report, 0.5) and not figures.failures(again, 0.0)
    assert counted["output_tokens"] == 80 and counted["tokens_from"] == ["tokenizer"]
    assert "counted from the text" in output.table(again)


def test_a_busy_server_is_asked_again_and_the_time_counts():
    with pretending(Pretender(busy=3)) as server:
        report = run(server, settings=replace(SETTINGS, warm_up=0))
    arm = only(report)
    assert (arm["failed"], arm["retries"], arm["output_tokens"]) == (0, 3, 80)
    assert arm["records"][0]["tries"] == 4 and arm["records"][0]["latency"] >= 0.03
    assert "3 requests were sent again" in output.table(report)


def test_a_connection_that_was_closed_while_idle_is_no_failure():
    """llama.cpp's server closes connections after five idle seconds, which another arm's turn may take."""
    with pretending(Pretender(hang_up=2)) as server:
        arm = only(run(server, settings=replace(SETTINGS, warm_up=0)))
        assert (arm["failed"], arm["retries"], arm["output_tokens"]) == (0, 2, 80)
    with pretending(Pretender(hang_up=10**6)) as server:
        arm = only(run(server, work=prompts(1), settings=replace(SETTINGS, num_prompts=1, warm_up=0, retries=1)))
    assert arm["failed"] == 1 and "connection lost" in next(iter(arm["errors"]))


def test_a_server_that_stays_busy_is_a_failure():
    with pretending(Pretender(busy=10**6)) as server:
        arm = only(run(server, work=prompts(1), settings=replace(SETTINGS, num_prompts=1, warm_up=0, retries=1)))
    assert arm["errors"] == {"HTTP 429: busy": 1} and arm["records"][0]["tries"] == 2


def test_failures_are_counted_and_are_in_no_figure():
    with pretending(Pretender(fail=4, engine="")) as server:
        report = run(server, settings=replace(SETTINGS, num_prompts=12, warm_up=0), work=prompts(12))
    arm = only(report)
    assert (arm["requests"], arm["failed"], arm["output_tokens"]) == (12, 3, 90)
    assert list(arm["errors"].values()) == [3] and "out of luck" in output.table(report)
    assert figures.failures(report, 0.2) and not figures.failures(report, 0.25)


def test_a_stream_that_breaks_is_a_failure_and_not_a_short_answer():
    with pretending(Pretender(broken=True, engine="")) as server:
        arm = only(run(server))
    assert (
        arm["failed"] == 8 and arm["output_tokens"] == 0 and all("connection lost" in error for error in arm["errors"])
    )


def test_a_request_that_takes_too_long_is_given_up():
    with pretending(Pretender(first=5.0, engine="")) as server:
        arm = only(run(server, work=prompts(1), settings=replace(SETTINGS, num_prompts=1, warm_up=0, timeout_s=0.2)))
    assert arm["errors"] == {"timeout: not done in 0.2 seconds": 1}


def test_a_server_that_dies_ends_the_run_and_keeps_what_was_measured(tmp_path, capsys):
    script = toys.script("benchmark", "scripts")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(40)))
    with pretending(Pretender(engine="", die_after=10)) as server:
        code = script.main(["--arm", f"frail={server.url}", "--dataset", str(file), "--num-prompts", "40", "--warmup", "0", "--concurrency", "1",
                            "--output", str(tmp_path / "out.json"), "--no-progress"])  # fmt: skip
    printed = capsys.readouterr()
    report = output.read(tmp_path / "out.json")
    assert code == 1 and "frail" in printed.err and "is gone" in printed.err and "ENDED EARLY" in printed.out
    assert 10 <= only(report)["requests"] - only(report)["failed"] < 40


# --- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5])
def test_as_many_are_in_flight_as_asked_for(n):
    with pretending(Pretender(pause=0.005)) as server:
        report = run(server, work=prompts(30), settings=replace(SETTINGS, concurrency=(n,), num_prompts=30, parts=1))
    arm = only(report)
    assert server.most == n
    # Whoever is done begins the next at once: at any time but the end n are under way.
    spans = sorted((r["started"], r["started"] + r["latency"]) for r in arm["records"])
    for begin, _ in spans[n:]:
        assert sum(a <= begin + 1e-4 and b > begin - 0.02 for a, b in spans) >= n
    assert sum(r["latency"] for r in arm["records"]) > 0.8 * (n * arm["wall_s"]) - 0.1


def test_arms_get_the_same_bodies_in_turns_and_warm_up_is_short_and_apart():
    with pretending(Pretender()) as a, pretending(Pretender()) as b:
        settings = replace(
            SETTINGS,
            num_prompts=16,
            parts=4,
            warm_up=2,
            sampling=Sampling(max_new_tokens=100, temperature=1.0, top_p=0.9, top_k=5),
        )
        report = run(a, b, work=prompts(16), settings=settings)
    assert [p["messages"] for p in a.posts] == [p["messages"] for p in b.posts] and a.posts == b.posts
    assert [p["max_tokens"] for p in a.posts] == [64, 64] + [100] * 16
    assert (a.posts[2]["top_k"], a.posts[2]["top_p"], a.posts[2]["temperature"]) == (5, 0.9, 1.0)
    assert len({p["seed"] for p in a.posts[2:]}) == 16
    (cell,) = report["cells"]
    assert cell["parts"] == 4 and {r["part"] for r in cell["arms"]["plain"]["records"]} == {0, 1, 2, 3}
    assert all(arm["requests"] == 16 for arm in cell["arms"].values())


def test_later_turns_follow_with_the_answer_between():
    with pretending(Pretender()) as server:
        report = run(server, work=prompts(4, turns=2), settings=replace(SETTINGS, num_prompts=4, warm_up=1))
        first = [p for p in server.posts[1:] if len(p["messages"]) == 1]
        second = [p for p in server.posts if len(p["messages"]) == 3]
        assert len(first) == len(second) == 4 == only(report)["requests"] / 2
        assert (
            second[0]["messages"][1]["content"].startswith("wört0.0 ") and second[0]["messages"][2]["content"] == "and?"
        )
        assert len(server.posts[0]["messages"]) == 1  # the warm-up
        short = run(server, work=prompts(4, turns=2), settings=replace(SETTINGS, num_prompts=4, first_turn_only=True))
    assert only(short)["requests"] == 4


# --- acceptance ---------------------------------------------------------------------------------------------------

EXACT = [3, 2, 1, 0, 0]  # rounds whose draft was accepted at position 0, 1, 2, ...; of one answer


@pytest.mark.parametrize(
    "server,derived,positions",
    [
        (Pretender(engine="vllm"), False, True),
        (Pretender(engine="vllm", per_request=True, metrics=False), False, True),
        (Pretender(engine="sglang"), True, False),
        (Pretender(engine="sglang", per_request=True, metrics=False), False, False),
        (Pretender(engine="llamacpp"), False, True),
        (Pretender(engine="llamacpp", metrics=False), True, False),
    ],
    ids=lambda v: f"{v.engine}-{v.per_request}-{v.metrics}" if isinstance(v, Pretender) else "",
)
def test_acceptance_of_every_engine_is_what_the_server_did(server, derived, positions):
    server.pieces = [1, *GAINS]
    with pretending(server):
        run(server)  # what was counted before must not count again
        report = run(server)
    found = only(report)["acceptance"]
    assert (found["rounds"], found["accepted"], found["derived"]) == (24, 48, derived) and found["accept_len"] == 3.0
    assert found["per_position"] == ([8 * n for n in EXACT] if positions else None)
    if positions:
        assert found["per_position_rate"] == [1.0, 2 / 3, 1 / 3, 0.0, 0.0] and found["accept_rate"] == 48 / 120
    assert ("3.000d" if derived else "3.000 ") in output.table(report)


def test_an_engine_that_tells_nothing_is_said_to_tell_nothing():
    with pretending(Pretender(engine="")) as server:
        report = run(server)
    assert only(report)["acceptance"] is None and only(report)["accept_len_gauge"] is None
    assert "plain: acceptance is not reported" in output.table(report)


def test_the_average_of_sglang_is_shown_as_what_it_is():
    """Without metrics and details only the server's own average is left: marked, and never in place of a count."""
    with pretending(Pretender(engine="sglang", metrics=False)) as server:
        report = run(server)
    assert only(report)["acceptance"] is None and only(report)["accept_len_gauge"] == {
        "value": 2.5,
        "source": "avg_spec_accept_length at /server_info",
    }
    assert "~2.50" in output.table(report)


def test_requests_of_others_are_noticed():
    with pretending(Pretender()) as server:
        answer, server.generated_twice = server.answer, True

        async def twice(body, writer):
            await answer(body, writer)
            server.generated += 10

        server.answer = twice
        report = run(server)
    assert "was it serving others?" in output.table(report)


# Cut from what vLLM 0.32.0 and prometheus_client print.
VLLM = (
    """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\", c=\\"d"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7596e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 7.0e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 1.0
"""
    + "".join(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} 2.0\n' for i in range(1, 10))
    + """\
vllm:generation_tokens_total{engine="0",model_name="m"} 200.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
process_cpu_seconds_total NaN
nonsense
"""
)


@pytest.mark.parametrize("total", ["_total", ""])
def test_counters_of_vllm_are_summed_over_engines_with_and_without_total(total):
    counts = counters.parse(VLLM.replace("_total", total), "/metrics")
    zero = counters.parse("")
    found = counters.between(zero, counts, tokens=50, answers=2)
    assert found == Acceptance(
        rounds=15, accepted=30, drafted=70, per_position=[13, *[2] * 9, 1], source="counters at /metrics"
    )
    assert found.accept_len == 3.0 and counters.generated(zero, counts) == 200
    assert counters.between(counts, counts, tokens=0, answers=0) is None
    with pytest.raises(ValueError, match="started anew"):
        counters.between(counts, replace(zero, values={k: 0.0 for k in counts.values}), tokens=1, answers=1)


def test_counters_of_tensorrt_llm_leave_the_rounds_to_be_derived():
    text = 'trtllm_spec_decode_num_draft_tokens_total{model_name="m",engine_type="pytorch"} 120\n'
    text += 'trtllm_spec_decode_num_accepted_tokens_total{model_name="m",engine_type="pytorch"} 48\ntrtllm_spec_decode_acceptance_length{a="b"} 3.2\n'
    found = counters.between(counters.parse(""), counters.parse(text, "/prometheus/metrics"), tokens=80, answers=8)
    assert (found.rounds, found.accepted, found.derived, found.accept_len) == (24, 48, True, 3.0)


def test_plain_servers_have_counters_but_no_acceptance():
    counts = counters.parse("vllm:generation_tokens_total 5\n")
    assert not counters.speculative(counts) and counters.between(counts, counts, tokens=5, answers=1) is None


def test_of_a_response():
    """Field by field as the engines' sources have them."""
    usage = {"completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 15}}
    own = counters.of_response([{"meta_info": {"spec_verify_ct": 3, "spec_accept_length": 3.0}}], usage, 10)
    assert own == (Acceptance(rounds=3, accepted=6, drafted=21, source="spec_verify_ct of the responses"), 3.0)
    bare = counters.of_response([{"meta_info": {"spec_verify_ct": 3}}], {}, 10)
    assert bare[0].accepted == 6 and bare[0].derived
    assert counters.of_response([], usage, 10)[0] == Acceptance(
        rounds=3, accepted=6, drafted=21, source="usage of the responses", derived=True
    )
    assert (
        counters.of_response([{"meta_info": {"id": "x"}}, {"timings": {"predicted_n": 5}}, {"metrics": None}], {}, 5)
        is None
    )


def test_pooling_is_a_ratio_of_sums():
    a = Acceptance(rounds=1, accepted=7, drafted=7, per_position=[1] * 7, source="s")
    b = Acceptance(rounds=9, accepted=0, drafted=None, per_position=[0], source="s")
    both = counters.pooled([a, b])
    assert both.accept_len == 1.7 and both.drafted is None and both.per_position == [1] * 7
    assert counters.pooled([]) is None


# --- figures ------------------------------------------------------------------------------------------------------


def records(times, *, tokens=10, part=lambda i: i % 4, errors=()):
    return [Record(prompt=f"p{i}", turn=0, part=part(i), started=0.0, latency=t, ttft=t / 2, last=t, tokens=tokens, answer="a",
                   error="x" if i in errors else None) for i, t in enumerate(times)]  # fmt: skip


def test_speed_up_is_paired_and_its_interval_is_that_of_resampled_prompts():
    draw = np.random.default_rng(0)
    slow = draw.uniform(1, 20, 40)
    fast = slow / draw.uniform(1.8, 2.2, 40)
    found = figures.speed_up(records(slow), records(fast), seed=1)
    assert (
        found["value"] == pytest.approx(slow.sum() / fast.sum())
        and found["pairs"] == 40
        and found["same_answers"] == 40
    )
    low, high = found["interval"]
    assert 1.9 < low < found["value"] < high < 2.1 and found["verdict"] == "faster"  # unpaired it would be far wider
    # The slow way: prompts drawn one by one.
    values = []
    for _ in range(2000):
        i = draw.integers(40, size=40)
        values.append(slow[i].sum() / fast[i].sum())
    assert (low, high) == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=0.01)
    assert figures.speed_up(records(fast), records(slow), seed=1)["verdict"] == "slower"
    assert figures.speed_up(records(slow), records(slow), seed=1)["verdict"] == "no difference shown"


def test_a_prompt_that_failed_in_one_arm_is_in_neither():
    found = figures.speed_up(records([2.0] * 8, errors={0}), records([1.0] * 7 + [100.0], errors={7}), seed=1)
    assert found["pairs"] == 6 and found["value"] == 2.0
    assert figures.speed_up(records([1.0] * 3), records([1.0] * 3), seed=1)["verdict"] == "too few prompts"
    assert (
        figures.speed_up(records([1.0], errors={0}), records([1.0]), seed=1)["verdict"]
        == "no prompt was answered by both"
    )
    assert figures.speed_up(records([1.0], tokens=0), records([1.0]), seed=1)["verdict"] == "nothing was written"


def test_parts_that_disagree_are_no_proof():
    """Half of the time the machine was twice as fast for one arm: resampling prompts alone would call it faster."""
    slow = records([2.0] * 40, part=lambda i: i // 20)
    shaky = records([0.5] * 20 + [2.1] * 20, part=lambda i: i // 20)
    found = figures.speed_up(slow, shaky, seed=1)
    assert (
        found["interval"][0] > 1
        and found["verdict"] == "parts disagree"
        and found["by_part"] == pytest.approx([4.0, 2.0 / 2.1])
    )


def test_a_prompt_asked_twice_is_one():
    twice = records([2.0] * 5) * 2
    assert figures.speed_up(twice, records([1.0] * 5), seed=1)["pairs"] == 5


def test_percentiles():
    assert figures.spread([4.0, 1.0, 3.0, 2.0]) == {
        "mean": 2.5,
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97),
    }
    assert figures.spread([]) is None


# --- prompts ------------------------------------------------------------------------------------------------------


def test_packaged_prompts_need_no_network():
    found = workloads.load(["packaged"])
    assert list(found) == ["math", "code", "chat", "extraction"] and all(len(some) == 16 for some in found.values())
    assert {p.turns for p in found["chat"]} == {1, 2} and len({p.id for some in found.values() for p in some}) == 64
    assert len({workloads.digest([p]) for some in found.values() for p in some}) == 64
    assert workloads.load(["code"]) == {"code": found["code"]}
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        workloads.load(["gsmk8"])


ROWS = {"gsm8k": {"question": "Q {x}?"}, "math500": {"problem": "P"}, "humaneval": {"prompt": "def f():\n"},
        "mbpp": {"prompt": "Write"}, "mt-bench": {"prompt": ["one", "two"]}}  # fmt: skip


@pytest.mark.parametrize("name", list(workloads.HUB))
def test_hub_prompts_are_those_of_the_reference_client(name, monkeypatch):
    """Where it is installed: the same data set, split, wording, choice and order as dflash 0.1.0."""
    reference = pytest.importorskip("dflash.benchmark", reason="make rivals installs it")
    rows = [
        {
            key: [f"{t} {i}" for t in value] if isinstance(value, list) else f"{value} {i}"
            for key, value in ROWS[name].items()
        }
        for i in range(9)
    ]
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: asked.append((args, options)) or rows)
    ours = workloads.load([name])[name]
    theirs = reference.load_and_process_dataset(name)
    assert [[p.messages[0]["content"], *p.then] for p in ours] == [t["turns"] for t in theirs]
    (mine, mine_options), (other, other_options) = asked
    assert [a for a in mine if a] == list(other) and mine_options.pop("revision") == workloads.HUB[name].revision
    assert mine_options == other_options
    for count in (4, 9, 20):
        chosen = [p.messages[0]["content"] for p in workloads.select(ours, count, 42)]
        assert chosen == [t["turns"][0] for t in reference._select_dataset(theirs, count, repeat=True)]


def test_a_hub_that_cannot_be_reached_names_the_way_out(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ValueError, match="openai/gsm8k at 740312a cannot be read.*no route.*packaged"):
        workloads.load(["gsm8k"])


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["a", "b"], "id": 7}\n\n{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, '
                    '{"role": "assistant", "content": "left out"}]}\n')  # fmt: skip
    one, two = workloads.load([str(file)])["mine"]
    assert (one.id, one.then) == ("7", ["b"]) and [m["role"] for m in two.messages] == ["system", "user"]
    for bad in ("[1]", '{"turns": []}', '{"turns": "a"}', '{"messages": []}', "{"):
        file.write_text('{"turns": ["a"]}\n' + bad + "\n")
        with pytest.raises(ValueError, match="line 2: not a prompt"):
            workloads.load([str(file)])
    file.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        workloads.load([str(file)])


# --- the command --------------------------------------------------------------------------------------------------


def test_the_published_preset_and_what_overrides_it():
    script = toys.script("benchmark", "scripts")
    of = lambda *words: script.sampling_of(script.parser().parse_args(list(words)))
    assert (
        of("--preset", "published")
        == Sampling(max_new_tokens=4096, temperature=1.0, top_p=0.95, top_k=20, reasoning="xhigh")
        == PRESETS["published"]
    )
    assert of("--preset", "published", "--top-k", "64", "--temperature", "0").top_k == 64
    assert of("--preset", "published", "--temperature", "0").temperature == 0.0 and of() == Sampling()
    assert reasoning_kwargs("xhigh") == {
        "enable_thinking": True,
        "reasoning_effort": "xhigh",
        "reasoning_strength": "xhigh",
    }
    assert reasoning_kwargs("off") == {"enable_thinking": False} and reasoning_kwargs(None) == {}
    with pretending(Pretender()) as server:
        run(server, settings=replace(SETTINGS, sampling=of("--preset", "published")))
        sent = server.posts[-1]
    assert sent["chat_template_kwargs"] == reasoning_kwargs("xhigh") and (
        sent["max_tokens"],
        sent["top_k"],
        sent["top_p"],
        sent["temperature"],
    ) == (4096, 20, 0.95, 1.0)


def test_options_and_defaults_of_the_reference_client():
    reference = pytest.importorskip("dflash.cli", reason="make rivals installs it")
    theirs = vars(reference._parser().parse_args(["benchmark", "openai", "--model", "m", "--dataset", "gsm8k"]))
    script = toys.script("benchmark", "scripts")
    ours = vars(script.parser().parse_args([]))
    local = {"command", "backend", "draft", "draft_bits", "block_size", "max_samples"}  # of runs without a server
    assert set(theirs) - local <= set(ours)
    sampling = script.sampling_of(script.parser().parse_args([]))
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "reasoning"):
        assert getattr(sampling, name) == theirs[name], name
    assert ours["timeout_s"] == theirs["timeout_s"] and script.DEFAULT_URL == theirs["base_url"]


def test_the_reference_client_measures_the_same(tmp_path, capsys, monkeypatch):
    """dflash 0.1.0's benchmark and ours, one after the other on one server with the same prompts: accept length to the last digit that it
    prints, throughput within a quarter (its requests are not streamed) in one of three goes: a second and a half each, in which a machine may stall."""
    reference = pytest.importorskip("dflash.cli", reason="make rivals installs it")
    rows = [{"question": f"how many is {i}"} for i in range(60)]
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: rows)
    asked = ("--dataset", "gsm8k", "--model", "target", "--num-prompts", "24", "--concurrency", "4")
    with pretending(
        Pretender(engine="sglang", per_request=True, pieces=[1, 4, 4, 2], pause=0.05, first=0.05)
    ) as server:
        apart = [
            compared_with_the_reference(
                reference, server, [*asked, "--base-url", server.url], tmp_path / "0.json", capsys
            )
        ]
        while apart[-1] > 0.25 and len(apart) < 3:
            out = tmp_path / f"{len(apart)}.json"
            apart.append(
                compared_with_the_reference(reference, server, [*asked, "--base-url", server.url], out, capsys)
            )
    assert apart[-1] <= 0.25, apart


def compared_with_the_reference(reference, server, common: list[str], out, capsys) -> float:
    """By how much the two throughputs differ, relative to the reference's; all else must be equal."""
    server.posts.clear()
    reference.main(["benchmark", "openai", *common])
    theirs = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line)
    asked = [post["messages"] for post in server.posts]
    server.posts.clear()
    code = toys.script("benchmark", "scripts").main([*common, "--parts", "1", "--no-progress", "--output", str(out)])
    assert code == 0 and sorted(map(str, asked)) == sorted(str(post["messages"]) for post in server.posts)
    arm = only(output.read(out))
    assert f"{arm['engine_accept_len_mean']:.3f}" == theirs["Accept length"].strip() == "3.667"
    assert arm["acceptance"]["rounds"] == int(theirs["Spec verify ct"]) == 72
    assert arm["acceptance"]["accept_len"] == 1 + 7 / 3
    assert arm["output_tokens"] == int(theirs["Output tokens"].strip()) == 264
    throughput = float(theirs["Throughput"].split()[0].replace(",", ""))
    return abs(arm["tok_s"] - throughput) / throughput


def test_single_arms_are_joined(tmp_path, capsys):
    script = toys.script("benchmark", "scripts")
    common = ["--dataset", "math", "--num-prompts", "12", "--warmup", "1", "--no-progress"]
    with pretending(Pretender(pieces=[1] * 10, pause=0.004)) as a, pretending(Pretender(pause=0.004)) as b:
        for name, server in (("plain", a), ("ours", b)):
            assert (
                script.main(["--arm", f"{name}={server.url}/v1", *common, "--output", str(tmp_path / f"{name}.json")])
                == 0
            )
        assert (
            script.main(["--arm", f"ours={b.url}", *common, "--seed", "1", "--output", str(tmp_path / "seed.json")])
            == 0
        )
    capsys.readouterr()
    files = [str(tmp_path / f"{name}.json") for name in ("plain", "ours")]
    assert (
        script.main(
            ["--compare", *files, "--markdown", str(tmp_path / "table.md"), "--output", str(tmp_path / "both.json")]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "baseline" in printed and "faster" in printed and "several files" in printed
    both = output.read(tmp_path / "both.json")
    assert both["cells"][0]["speed_up"]["ours"]["value"] > 1.5 and set(both["arms"]) == {"plain", "ours"}
    assert (tmp_path / "table.md").read_text().startswith("| workload |")
    assert script.main(["--compare", files[0], files[0]]) == 2 and "is in two files" in capsys.readouterr().err
    assert (
        script.main(["--compare", files[0], str(tmp_path / "seed.json")]) == 2
        and "differ in seed" in capsys.readouterr().err
    )
    assert script.main(["--compare", files[0], "--baseline", "x"]) == 2 and "no such arm" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert script.main(["--compare", str(tmp_path / "bad.json")]) == 2 and "not a report" in capsys.readouterr().err


def test_the_report_is_json_and_holds_everything(tmp_path):
    with pretending(Pretender()) as a, pretending(Pretender(engine="sglang")) as b:
        report = run(a, b, settings=replace(SETTINGS, concurrency=(1, 2)))
    output.write(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(report))
    assert report["arms"]["plain"] | {"url": 0} == {"url": 0, "model": "target", "engine": "vllm", "engine_version": "0.32.0",
                                                    "counters": "/metrics", "speculates": True}  # fmt: skip
    assert report["arms"]["draft"]["engine_version"] == "0.5.23" and report["settings"]["seed"] == 42
    first, second = report["cells"]
    assert first["prompts_sha256"] == second["prompts_sha256"] and len(first["arms"]["plain"]["records"]) == 8


@pytest.mark.parametrize(
    "words,said",
    [
        (["--arm", "x=ftp://h"], "is no address"),
        (["--arm", "http://h:1"], "no name or no address"),
        (["--arm", "a=http://h:1,modle=m"], "unknown option 'modle'"),
        (["--arm", "a=http://h:1,body=[1]"], "must be a JSON object"),
        (["--arm", "a=http://h:1", "--arm", "a=http://h:2"], "a name of its own"),
        (["--baseline", "b"], "no such arm"),
        (["--concurrency", "0"], "whole numbers from 1 to"),
        (["--concurrency", "1,8x"], "as in 1 8 32 or 1,8,32"),
        (["--concurrency", "64", "--num-prompts", "8"], "64 requests in flight"),
        (["--top-p", "0"], "top_p above 0"),
        (["--seed", "-1"], "--seed -1: must be in"),
        (["--num-prompts", "1000000000000"], "--num-prompts 1000000000000: must be in"),
        (["--num-prompts", "-3"], "--num-prompts -3: must be in"),
        (["--warmup", "1000000000000"], "--warmup 1000000000000: must be in"),
        (["--retries", "-1"], "--retries -1: must be in"),
        (["--parts", "0"], "--parts 0: must be in"),
        (["--timeout-s", "1e300"], "--timeout-s 1e+300: must be above 0 and at most"),
        (["--max-new-tokens", "9" * 30], "--max-new-tokens 999"),
        (["--top-k", "-2"], "--top-k -2: must be in"),
        (["--dataset", "nope"], "no such workload"),
        (["--temperature", "nan"], "temperature is at least 0"),
        (["--timeout-s", "nan"], "--timeout-s nan: must be above 0"),
        (["--max-failed", "nan"], "must be a share"),
        (["--markdown", "/proc/none/r.md"], "--markdown /proc/none/r.md: its folder cannot be made"),
        (["--output", "/proc"], "--output /proc: cannot be written there"),
        (["--output", "/dev/full"], "--output /dev/full: cannot be written there"),
        (["--compare", __file__.replace("unit/test_benchmark.py", "served.py")], "cannot be read"),
        (["--arm", "a=http://user:secret@127.0.0.1:9"], "does not answer"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_mistakes_are_named(words, said, capsys):
    assert toys.script("benchmark", "scripts").main([*words, "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert said in error and "secret" not in error


def test_arms():
    arm = parse_arm('dflash=http://h:1/v1/,model=a/b,body={"x": [1, 2], "y": "a,b"}')
    assert (arm.name, arm.root, arm.model, arm.extra_body) == ("dflash", "http://h:1", "a/b", {"x": [1, 2], "y": "a,b"})
    with pretending(Pretender()) as server:
        with pytest.raises(ValueError, match="does not serve other; it serves target"):
            measure([Arm(name="a", url=server.url, model="other")], prompts(8), SETTINGS, progress=False)
        measure(
            [Arm(name="a", url=server.url, extra_body={"min_p": 0.1, "top_p": 0.5})],
            prompts(8),
            SETTINGS,
            progress=False,
        )
    assert (server.posts[-1]["min_p"], server.posts[-1]["top_p"]) == (0.1, 0.5)


# --- servers that answer nonsense ---------------------------------------------------------------------------------


def read(*chunks) -> Record:
    reader, record = _Reader(), Record(prompt="p", turn=0, part=0, started=0.0)
    for chunk in chunks:
        reader.take(chunk if isinstance(chunk, str) else json.dumps(chunk))
    reader.take("[DONE]")
    reader.finish(record, None)
    return record


def piece(text: str, **more):
    return {"choices": [{"delta": {"content": text}}], **more}


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": "abc"}, {"choices": [1]}, {"choices": 5}, {"choices": [{"delta": [1]}]}, {"choices": {"a": 1}}, [], "<html>",
        {"metrics": {"speculative_decoding": {"num_spec_steps": "x"}}}, {"metrics": {"speculative_decoding": {"a": 1}}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_accepted_draft_tokens": 1, "num_draft_tokens": None}}},
        {"meta_info": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, "x"]}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": -1, "num_accepted_draft_tokens": -4, "num_draft_tokens": 0}}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_accepted_draft_tokens": 50, "num_draft_tokens": 7}}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_accepted_draft_tokens": 10**400, "num_draft_tokens": 10**400}}},
        {"meta_info": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 10**400]}},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_in_a_stream_is_a_failure_of_that_request(chunk):
    assert read(piece("a"), chunk, {"usage": {"completion_tokens": 3}}).error


@pytest.mark.parametrize("tokens", [-5, True, "7", 1.5, None, [1], 10**300, 10**400])
def test_usage_that_is_no_count_is_none(tokens):
    record = read(piece("a"), {"usage": {"completion_tokens": tokens, "prompt_tokens": tokens}})
    assert "wrong usage in the stream" in record.error and record.tokens == 0 and record.prompt_tokens is None


def test_halves_of_a_character_are_put_together_and_one_alone_harms_nothing(tmp_path):
    usage = {"usage": {"completion_tokens": 3}}
    apart, whole = read(piece("\ud83d"), piece("\ude00"), usage), read(piece("\U0001f600"), usage)
    assert apart.error is None and apart.answer == whole.answer != read(piece("\ud83d"), usage).answer
    report = {"error": "it said \ud83d", "cells": []}
    output.write(report, tmp_path / "r.json")
    assert output.read(tmp_path / "r.json") == report


def test_an_answer_whose_drafts_leave_no_round_has_no_accept_length():
    """As of llama.cpp, which gives accepted drafts alone, when the last block was cut by the budget."""
    with pretending(Pretender()) as plain, pretending(Pretender()) as draft:
        report = run(plain, draft)
    report["cells"][0]["arms"]["draft"]["acceptance"] = counters._from_tokens(8, 7, 7, "timings").as_dict()
    assert " -  " in output.table(report).splitlines()[2]


def test_another_model_that_answers_is_noted():
    with pretending(Pretender()) as plain, pretending(Pretender(answers_as="impostor")) as draft:
        arms = run(plain, draft)["cells"][0]["arms"]
    assert arms["plain"]["notes"] == [] and arms["draft"]["notes"] == [
        "its answers are of impostor, target was asked for"
    ]


def test_counters_that_are_no_numbers_go_back_or_have_gaps():
    zero = counters.parse("")
    odd = counters.parse(
        "vllm:generation_tokens_total NaN\nsglang:spec_accept_length +Inf\nvllm:spec_decode_num_drafts 3\n"
    )
    assert odd.values == {"vllm:spec_decode_num_drafts": 3.0} and counters.generated(zero, odd) is None
    with pytest.raises(ValueError, match="started anew"):
        counters.generated(
            counters.parse("vllm:generation_tokens_total 9\n"), counters.parse("vllm:generation_tokens_total 5\n")
        )
    endless = counters.parse('vllm:spec_decode_num_drafts{e="0"} 1e308\nvllm:spec_decode_num_drafts{e="1"} 1e308\n')
    strange = counters.parse('vllm:spec_decode_num_accepted_tokens_per_pos{position="²"} 1\n')
    assert not endless.values and not strange.per_position
    text = "vllm:spec_decode_num_drafts 4\nvllm:spec_decode_num_accepted_tokens 3\n"
    at = lambda i, n: f'vllm:spec_decode_num_accepted_tokens_per_pos{{position="{i}"}} {n}\n'
    gap = counters.between(zero, counters.parse(text + at(0, 2) + at(2, 1)), tokens=9, answers=1)
    assert gap.per_position is None and gap.accepted == 3
    with pytest.raises(ValueError, match="started anew"):
        counters.between(counters.parse(at(0, 5)), counters.parse(text + at(0, 2)), tokens=9, answers=1)


def test_two_files_of_one_name_are_not_one_workload(tmp_path):
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "mine.jsonl")
        files[-1].write_text(json.dumps({"turns": [folder]}))
    with pytest.raises(ValueError, match="called mine already"):
        workloads.load([str(file) for file in files])
    assert len(workloads.load(["packaged", "packaged"])) == len(workloads.own_classes())


def test_the_table_is_shown_though_the_report_cannot_be_kept(tmp_path, capsys, monkeypatch):
    """Hours of measuring are not lost to a disk that became full meanwhile."""

    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(output, "write", full)
    with pretending(Pretender()) as server, pytest.raises(OSError, match="no room"):
        toys.script("benchmark", "scripts").main(
            ["--arm", f"a={server.url}", "--dataset", "code", "--num-prompts", "2", "--no-progress", "--output", str(tmp_path / "r.json")]
        )  # fmt: skip
    assert "2/2" in capsys.readouterr().out


def test_a_damaged_report_is_named(tmp_path, capsys):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"format": figures.FORMAT, "settings": {}, "arms": {}, "cells": [{}], "baseline": "a"}))
    assert toys.script("benchmark", "scripts").main(["--compare", str(file), str(file)]) == 2
    file.write_text(json.dumps({"format": figures.FORMAT}))
    assert toys.script("benchmark", "scripts").main(["--compare", str(file)]) == 2
    assert "not as this benchmark writes a report" in capsys.readouterr().err


@pytest.mark.parametrize("count", [6, 8, 16])
def test_equal_arms_are_rarely_called_faster(count):
    """One in twenty; plain percentiles of so few prompts said it of one in six to ten."""
    draw, trials = np.random.default_rng(count), 500
    wrong = 0
    for trial in range(trials):
        slow = draw.uniform(1, 5, count)
        one, other = (records(slow * np.exp(draw.normal(0, 0.05, count)), part=lambda i: 0) for _ in range(2))
        wrong += figures.speed_up(one, other, seed=trial)["verdict"] in ("faster", "slower")
    assert wrong / trials < 0.07  # 5 %, and what 500 trials leave open
    clear = figures.speed_up(records(draw.uniform(1.8, 2.2, count)), records(draw.uniform(0.9, 1.1, count)), seed=0)
    assert clear["verdict"] == "faster"
