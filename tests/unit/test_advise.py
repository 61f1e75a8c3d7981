"""The adviser: its four lines against closed forms and a simulation, what it reads, and what it says."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest

from dflash_train.advise import (
    Acceptance,
    Costs,
    _at,
    advise,
    against,
    break_even,
    compare_text,
    deeper,
    depth_table,
    geometric,
    main,
    measure,
    of_benchmark,
    of_evaluation,
    of_metrics,
    predict,
    read_acceptance,
    table,
)

VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 60.0
vllm:spec_decode_num_drafts_total{model_name="m",engine="1"} 40.0
vllm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m",engine="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="1",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="1"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="2"} 0.0
"""


def acceptance(p: float, drafted: int = 7) -> Acceptance:
    return Acceptance(slots=tuple(p**k for k in range(1, drafted + 1)), source="test")


def costs(plain=10.0, verify=12.0, draft=3.0, overhead=1.0, block=8) -> Costs:
    return Costs(device="none", how="by hand", block_size=block, layers=2, target_ms={1: {1: plain, block: verify}},
                 draft_ms={1: {2: draft, block: draft}}, overhead_ms={1: overhead})  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7, 0.95])
def test_tau_is_the_closed_form_of_a_geometric_acceptance(p):
    for d in range(8):
        assert acceptance(p).tau(d) == pytest.approx((1 - p ** (d + 1)) / (1 - p))


def test_one_round_by_hand():
    choice = predict(acceptance(0.5, 2), costs(block=3), 1, 2)
    assert choice.tau == 1.75 and choice.round_ms == 16.0
    assert choice.speedup == pytest.approx(1.75 * 10 / 16) and choice.tokens_per_second == pytest.approx(1750 / 16)
    plain = predict(acceptance(0.5, 2), costs(block=3), 1, 0)
    assert (plain.tau, plain.round_ms, plain.speedup, plain.basis) == (1.0, 10.0, 1.0, "m")


@pytest.mark.parametrize("d", [1, 3, 7])
def test_a_simulation_of_rounds_takes_the_predicted_time(d):
    """Draw rounds until 40,000 tokens are written; their time against plain decoding of as many tokens."""
    draw, slots = random.Random(d), [0.9, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25]
    choice = predict(Acceptance(slots=tuple(slots), source="test"), costs(), 1, d)
    tokens, milliseconds = 0, 0.0
    while tokens < 40_000:
        reach = draw.random()  # accepted through slot k in a share slots[k - 1] of the rounds
        tokens += 1 + sum(reach < a for a in slots[:d])
        milliseconds += choice.round_ms
    assert 10.0 * tokens / milliseconds == pytest.approx(choice.speedup, rel=0.02)


@pytest.mark.parametrize(
    "p, plain, verify, draft", [*itertools.product([0.2, 0.6, 0.9], [10.0], [10.0, 14.0, 40.0], [0.5, 5.0])]
)
def test_the_advice_is_the_best_of_all_choices(p, plain, verify, draft):
    a, c = acceptance(p), costs(plain, verify, draft)
    chosen, best = advise(a, c, 1)
    every = {}
    for d in range(1, 8):
        rows_ms = plain + (verify - plain) * d / 7
        every[d] = (1 + sum(p**k for k in range(1, d + 1))) * plain / (draft + rows_ms + 1.0)
    assert best.speedup == pytest.approx(max(every.values())) and every[best.drafted] == pytest.approx(best.speedup)
    assert chosen.drafted == (best.drafted if max(every.values()) >= 1.1 else 0)
    assert advise(a, c, 1, least=0.0)[0] == best and advise(a, c, 1, least=99.0)[0].drafted == 0


def test_a_block_that_costs_nothing_is_drafted_whole_and_one_that_gains_nothing_not_at_all():
    free = costs(plain=10, verify=10, draft=1e-9, overhead=0)
    chosen, _ = advise(acceptance(0.6), free, 1)
    assert chosen.drafted == 7 and chosen.speedup == pytest.approx(chosen.tau)
    assert advise(acceptance(0.0), costs(), 1)[0].drafted == 0


def test_times_between_and_beyond():
    points = {1: 10.0, 5: 30.0, 9: 30.0}
    assert [_at(points, x) for x in (1, 3, 5, 7, 9)] == [10, 20, 30, 30, 30]
    assert _at(points, 100) == 30.0 and _at({1: 1.0, 2: 3.0}, 4) == 7.0 and _at({2: 1.0, 4: 5.0}, 1) == 1.0
    assert _at({1: 5.0, 2: 4.0}, 8) == 4.0  # noise never makes a larger batch free
    wide = Costs.of_times(["1:10:12:3", "9:18:44:11"], 8, 2)
    assert predict(acceptance(0.5), wide, 5, 7).round_ms == pytest.approx(28 + 7)
    assert [predict(acceptance(0.5), wide, n, 7).basis for n in (1, 5, 9, 32)] == ["m", "i", "m", "x"]
    assert predict(acceptance(0.5), wide, 1, 3).basis == "is"
    for wrong in ("1:2:3", "a:1:2:3", "1:0:1:1", "0:1:1:1", "1:1:nan:1"):
        with pytest.raises(ValueError, match="--times"):
            Costs.of_times([wrong], 8, 2)


def test_measured_shorter_blocks_are_taken_before_the_slots():
    a = Acceptance(slots=(0.8, 0.6, 0.4), source="test", shorter={3: 2.9})
    assert a.tau(2) == 2.9 and a.tau(3) == pytest.approx(2.8)
    c = costs(block=4)
    assert predict(a, c, 1, 2).basis == "i" and predict(a, c, 1, 1).basis == "is" and predict(a, c, 1, 3).basis == "m"


def test_figures_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="marginal"):
        Acceptance(slots=(0.5, 0.7), source="test")
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        Acceptance(slots=(1.5,), source="test")
    with pytest.raises(
        ValueError, match="mean accepted length alone"
    ):  # a position is missing: no slot moves into its place
        of_metrics(VLLM.replace('position="1"', 'position="x"'), "m", None)
    for slots in ([0.9, None, 0.5], [None, 0.9]):
        rows = [{"slot": i, "marginal": a} for i, a in enumerate(slots, 1)]
        with pytest.raises(ValueError, match="not as evaluation writes it"):
            of_evaluation({"decoded": {"slots": rows}}, "e")
    for sizes, said in (
        ({"2": {"value": 50}}, "50 tokens per round with a block of 2"),
        ([1], "not as evaluation writes it"),
    ):
        with pytest.raises(ValueError, match=said):
            of_evaluation({"decoded": {"slots": [{"slot": 1, "marginal": 0.9}], "block_sizes": sizes}}, "e")
    with pytest.raises(ValueError, match="the times at 1 are given already"):
        Costs.of_times(["1:10:12:2", "1:9:9:9"], 8, 1)
    ends = [{"slot": 2, "marginal": None}, {"slot": 1, "marginal": 0.9}]
    assert of_evaluation({"decoded": {"slots": ends}}, "e").slots == (0.9,)
    for times, layers in (("8:1:inf:1", 1), ("8:nan:2:1", 1), ("8:1:2:1", 0), ("8:1:2:1", -2)):
        with pytest.raises(ValueError, match="--times: (needs milliseconds|-?[0-9] draft layers)"):
            Costs.of_times([times], 8, layers)
    whole = costs()
    for change in ({"target_ms": {1: {1: 5.0}}}, {"draft_ms": {1: {}}}, {"overhead_ms": {1: float("nan")}}):
        with pytest.raises(
            ValueError, match="needs milliseconds"
        ):  # a block that was not timed would cost as much as one token
            Costs(**(whole.as_dict() | change)).checked("c")
    with pytest.raises(ValueError, match="0 to 7"):
        acceptance(0.5).tau(8)
    with pytest.raises(ValueError, match="drafts 3 at most"):
        predict(acceptance(0.5), costs(block=4), 1, 5)


@pytest.mark.parametrize("tau", [1.0, 1.5, 3.3, 8.0])
def test_a_mean_alone_is_turned_into_slots_that_have_this_mean(tau):
    found = geometric(tau, 7, "test")
    assert found.tau(7) == pytest.approx(tau, abs=1e-6) and found.assumed
    ratios = [b / a for a, b in itertools.pairwise(found.slots) if a > 1e-9]
    assert ratios == pytest.approx([found.slots[0]] * len(ratios))
    assert "g" in predict(found, costs(), 1, 7).basis
    with pytest.raises(ValueError, match="mean accepted length"):
        geometric(8.5, 7, "test")


def test_metrics_of_vllm_and_sglang():
    found = of_metrics(VLLM, "m", None)
    assert found.slots == (0.8, 0.7, 0.0) and found.assumed is None
    mean = of_metrics('sglang:spec_accept_length{model_name="m"} 3.0\n', "m", 7)
    assert mean.tau(7) == pytest.approx(3.0, abs=1e-6) and mean.assumed
    with pytest.raises(ValueError, match="--block-size"):
        of_metrics("sglang:spec_accept_length 3.0\n", "m", None)
    for off in (
        "sglang:spec_accept_length 0.0\n",
        "vllm:generation_tokens_total 5\n",
        VLLM.replace("60.0", "0").replace("40.0", "0"),
    ):
        with pytest.raises(ValueError, match="count no draft"):
            of_metrics(off, "m", 7)


def test_what_is_read(tmp_path):
    file = tmp_path / "metrics.txt"
    file.write_text(VLLM)
    assert read_acceptance(str(file)).slots == (0.8, 0.7, 0.0)
    rows = [{"slot": 1, "marginal": 0.9}, {"slot": 2, "marginal": 0.5}]
    report = {
        "decoded": {
            "slots": rows,
            "block_sizes": {"2": {"value": 1.8}},
            "cost": {"cycle_ms": 9.0},
            "decoded_together": 1,
        }
    }
    file.write_text(json.dumps(report))
    found = read_acceptance(str(file))
    assert found.slots == (0.9, 0.5) and found.shorter == {2: 1.8} and found.cycle_ms == 9.0
    for broken in ('{"decoded": {"slots": [{"slot": 1}]}}', '{"other": 1}', '{"slots": ["a"]}', '{"cells": [{}]}'):
        file.write_text(broken)
        with pytest.raises(ValueError, match="metrics.txt"):
            read_acceptance(str(file))
    with pytest.raises(ValueError, match="no such file"):
        read_acceptance(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="evaluation.json: no such file"):
        read_acceptance(str(tmp_path))
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    assert read_acceptance(str(tmp_path)).slots == (0.9, 0.5)


def test_what_another_depth_must_reach_is_what_it_then_gains():
    c = Costs.of_times(["1:10:12:4"], 8, 2)
    for layers in (1, 2, 5):
        need = break_even(c, 1, 7, layers, 1.7)
        as_deep = predict(geometric(need, 7, "test"), deeper(c, layers), 1, 7)
        assert as_deep.speedup == pytest.approx(1.7, rel=1e-5)
    text = depth_table(acceptance(0.8), c, [1], {5: acceptance(0.9)})
    assert "<- this one" in text and "test, 5 layers: n = 1" in text


def test_the_pair_is_timed_here(overfitted):
    found = measure(overfitted.step, [1, 3], [2, 8], 20)
    assert set(found.target_ms) == set(found.draft_ms) == {1, 3}
    assert set(found.target_ms[3]) == {1, 2, 8} and set(found.draft_ms[1]) == {2, 8}
    assert found.layers == 2 and found.block_size == 8 and found.overhead(1) >= 0
    again = Costs(
        **json.loads(json.dumps(found.as_dict()))
        | {"target_ms": found.target_ms, "draft_ms": found.draft_ms, "overhead_ms": found.overhead_ms}
    )
    assert again == found
    text = table(acceptance(0.7), found, [1, 2, 3, 9], 1.1)
    assert "x: time extrapolated" in text  # which block is best, and so the other letters, are up to the machine
    assert [predict(acceptance(0.7), found, n, 7).basis for n in (1, 2, 3, 9)] == ["m", "i", "m", "x"]


def benchmark(per_position, measured, itl=(None, None)):
    found = {"rounds": 100, "accepted": sum(per_position), "per_position": per_position}
    plain, fast = (
        {"acceptance": a, "tok_s": 90.0, "itl_s": t and {"mean": t}} for a, t in zip((None, found), itl, strict=True)
    )
    cell = {
        "workload": "chat",
        "concurrency": 1,
        "speed_up": {"fast": {"value": measured}},
        "arms": {"plain": plain, "fast": fast},
    }
    return {"baseline": "plain", "cells": [cell]}


def test_predicted_against_measured():
    report = benchmark([80, 60, 40], 1.5)
    assert of_benchmark(report, "b").slots == (0.8, 0.6, 0.4)
    (row,) = against(report, costs(block=4), "b")
    assert row.predicted.speedup == pytest.approx(2.8 * 10 / 16) and row.error == pytest.approx(1.75 / 1.5 - 1)
    assert "median 17%, largest 17%" in compare_text([row])
    (row,) = against(benchmark([80, 60, 40], 1.5, itl=(0.02, 0.01)), costs(block=4), "b")
    assert (row.measured, row.whole) == (2.0, 1.5)  # decoding alone, where the benchmark timed it
    with pytest.raises(ValueError, match="no speed-up"):
        against(benchmark([80], None), costs(block=4), "b")
    with pytest.raises(ValueError, match="by position"):
        against({"cells": []}, costs(), "b")


def test_the_command(tmp_path, capsys):
    file = tmp_path / "slots.json"
    file.write_text('{"slots": [0.9, 0.8, 0.7]}')
    kept, out = tmp_path / "costs.json", tmp_path / "advice.json"
    times = ["--times", "1:10:11:1", "--times", "32:12:60:9", "--concurrency", "1,32"]
    assert main([str(file), *times, "--write-costs", str(kept), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "draft 3" in text and "no speculation" in text
    assert [row["advised"] for row in json.loads(out.read_text())] == [3, 0]
    assert main([str(file), "--costs", str(kept), "--concurrency", "1,32"]) == 0
    assert capsys.readouterr().out.splitlines()[3:6] == text.splitlines()[3:6]
    with pytest.raises(ValueError, match="LAYERS=EVALUATION"):
        main([str(file), *times, "--other", "deep"])
    with pytest.raises(ValueError, match="whole numbers"):
        main([str(file), *times[:4], "--concurrency", "0"])
    for more, said in ((["--block-size", "0"], "must be in"), (["--block-size", "2"], "figures of another drafter"),
                       (["--least", "nan"], "must be a speed-up above 0"), (["--least", "inf"], "must be a speed-up above 0"),
                       (["--block-size", "1025"], r"--block-size 1025: must be in \[2, 1,024\]"), (["--layers", "9" * 400], "--layers 9+: must be in"),
                       (["--concurrency", "1", "9" * 400], "whole numbers from 1 to 65,536"), (["--other", f"9999={file}"], "with 1 to 1024 layers")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            main([str(file), *times, *more])
    mean = tmp_path / "metrics.txt"  # where the slots have to be found from a mean
    mean.write_text('sglang:spec_accept_length{model_name="m"} 3.1\n')
    began = time.monotonic()
    with pytest.raises(ValueError, match="--block-size 1000000: must be in"):
        main([str(mean), *times, "--block-size", "1000000"])
    assert time.monotonic() - began < 5
    assert main([str(mean), *times[:2], "--block-size", "1024"]) == 0
    with pytest.raises(ValueError, match="2000 drafted slots; a block has 1024"):
        Acceptance(slots=(0.5,) * 2000, source="test")
    whole = json.loads(kept.read_text())
    for change, said in (({"layers": "1"}, "not as --write-costs"), ({"block_size": 4.5}, "not as --write-costs"),
                         ({"block_size": 3}, "figures of another drafter"), ({"layers": 9**400}, "has 1 to 1024 layers")):  # fmt: skip
        kept.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=said):
            main([str(file), "--costs", str(kept)])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="slots.json: is no text"):
        main([str(file), *times])
