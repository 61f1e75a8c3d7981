"""Figures of acceptance: small cases by hand, slow versions, and properties."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.acceptance import (
    PromptResult,
    Tau,
    bootstrap_interval,
    by,
    compare,
    cutoffs,
    losslessness,
    measure,
    oracle_and_recall,
    oracle_counts,
    oracle_table,
    per_slot,
    pooled,
    repeated_tokens,
    repetition,
    sign_test,
    summary_lines,
    table,
)

K = 4


def result(id: str, rounds: list[int], **changes) -> PromptResult:
    """A prompt of 10 tokens in domain "d" with an answer of distinct tokens that stops."""
    values = {
        "domain": "d", "prompt_tokens": 10, "token_ids": list(range(sum(rounds) + 1)), "finish_reason": "stop",
        "limits": [K] * len(rounds),
    }  # fmt: skip
    return PromptResult(id=id, rounds=rounds, **{**values, **changes})


def simulate(random: np.random.Generator, id: str, tokens: int, budget: int, *, recorded: bool = True) -> PromptResult:
    """An answer of `tokens` tokens by a drafter that is right with probability 0.7; `tokens` = `budget` is cut."""
    rounds, limits, accepted, answer = [], [], [], 1
    while answer < tokens:
        limit, remaining = min(K, budget - answer), tokens - answer
        slots = min(K, budget - answer + 1)
        right = random.random(slots - 1) < 0.7
        hits = int(np.logical_and.accumulate(right).sum())
        gained = min(hits + 1, remaining)
        rounds.append(gained)
        limits.append(limit)
        accepted.append(min(hits, gained))
        answer += gained
    return result(
        id,
        rounds,
        limits=limits,
        accepted=accepted if recorded else None,
        domain=str(random.choice(["a", "b", "all"])),
        prompt_tokens=int(random.integers(1, 3000)),
        finish_reason="length" if tokens == budget else "stop",
    )


def simulated(seed: int, count: int, **changes) -> list[PromptResult]:
    random = np.random.default_rng(seed)
    return [simulate(random, f"p{i}", int(random.integers(1, 30)), 29, **changes) for i in range(count)]


# --- pooled ---


def test_tau_is_a_ratio_of_sums():
    results = [result("x", [4, 4]), result("y", [1] * 10), result("z", [])]
    assert pooled(results) == Tau(tokens=18, rounds=12)
    assert pooled(results).value == 1.5  # the mean of the prompts' own would be 2.5
    assert pooled(results).as_dict() == {"value": 1.5, "rounds": 12, "tokens": 18}


def test_tau_without_rounds_and_with_an_interval():
    assert math.isnan(Tau().value)
    assert pooled([]).as_dict() == {"value": None, "rounds": 0, "tokens": 0}
    assert Tau(tokens=3, rounds=2, interval=(1.25, 1.75001)).as_dict()["interval"] == [1.25, 1.75]


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_pooled_is_the_mean_of_domains_weighted_by_rounds(seed, count):
    results = simulated(seed, count)
    parts = [pooled(some) for some in by(results, "domain").values()]
    rounds = sum(part.rounds for part in parts)
    assert pooled(results).rounds == rounds
    if rounds:
        mean = sum(part.value * part.rounds for part in parts if part.rounds) / rounds
        assert pooled(results).value == pytest.approx(mean)


# --- the interval ---


def test_prompts_are_resampled_not_rounds():
    alike = [result(f"p{i}", [1, 4]) for i in range(20)]
    assert bootstrap_interval(alike, seed=0) == (2.5, 2.5)  # rounds differ, prompts do not


def test_two_prompts_have_three_resamples():
    results = [result("x", [1] * 10), result("y", [4] * 10)]
    assert bootstrap_interval(results, seed=0) == (1.0, 4.0)
    assert bootstrap_interval(results, seed=0, level=0.3) == (2.5, 2.5)  # half of the resamples have one of each


def test_no_interval_below_two_prompts_with_rounds():
    assert bootstrap_interval([], 0) is None
    assert bootstrap_interval([result("x", [2, 3]), result("y", [])], 0) is None


def test_the_interval_is_a_function_of_the_set_of_results_and_the_seed():
    results = simulated(0, 30)
    interval = bootstrap_interval(results, 1)
    assert interval == bootstrap_interval(results[::-1], 1)
    assert interval != bootstrap_interval(results, 2)
    low, high = interval
    assert low < pooled(results).value < high


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"level": 95}, {"level": 0.0}])
def test_an_interval_cannot_be_had_of_nothing(wrong):
    with pytest.raises(ValueError, match="level inside"):
        bootstrap_interval(simulated(0, 3), 0, **wrong)


def test_the_interval_covers_the_truth():
    """Prompts differ in length and in how well they are drafted; true tau is 1 + 7 * 0.4."""
    random = np.random.default_rng(0)
    covered, below, repetitions = 0, 0, 200
    for seed in range(repetitions):
        counts = 1 + random.poisson(15, size=40)
        chances = random.uniform(0.2, 0.6, size=40)
        results = [
            result(f"p{i}", (1 + random.binomial(7, chance, size=n)).tolist())
            for i, (n, chance) in enumerate(zip(counts, chances, strict=True))
        ]
        low, high = bootstrap_interval(results, seed, draws=500)
        covered += low <= 3.8 <= high
        below += high < 3.8
    assert 0.90 <= covered / repetitions <= 0.99
    assert 0 < below < repetitions - covered  # misses on both sides


def test_many_prompts_cost_little_memory_and_time():
    random = np.random.default_rng(0)
    results = [result(str(i), [int(n)]) for i, n in enumerate(random.integers(1, 5, size=5000))]
    begun = time.perf_counter()
    low, high = bootstrap_interval(results, 0)
    assert time.perf_counter() - begun < 10
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1.25 / 5000), rel=0.1)


# --- split ---


def test_groups_by_domain_and_tag():
    x = result("x", [1], domain="z", tags={"thinking": "on"})
    y = result("y", [2], domain="a", tags={"thinking": "off", "effort": "low"})
    assert by([x, y], "domain") == {"a": [y], "z": [x]}
    assert by([x, y], "thinking") == {"off": [y], "on": [x]}
    assert by([x, y], "effort") == {"low": [y]}
    assert by([], "effort") == {}
    with pytest.raises(ValueError, match=r"'efort'.*effort, thinking"):
        by([x, y], "efort")


def test_table():
    results = [
        result("x", [3, 1], domain="all", tags={"thinking": "on"}),
        result("y", [2, 2, 2], domain="all", tags={"thinking": "off"}),
        result("z", [4], tags={"thinking": "on"}),
        result("none", []),
    ]
    found = table(results, seed=0)
    assert found["prompts"] == 4
    assert list(found["tau"]) == ["all", "d"]
    assert found["tau"]["all"] == {"value": 2.0, "rounds": 5, "tokens": 10, "prompts": 2, "interval": [2.0, 2.0]}
    assert found["tau"]["d"] == {"value": 4.0, "rounds": 1, "tokens": 4, "prompts": 2, "interval": None}
    assert found["tau_all"]["value"] == round(14 / 6, 4)
    assert found["tau_all"]["prompts"] == 4
    assert found["tau_by_tag"]["thinking"]["on"]["rounds"] == 3
    assert json.loads(json.dumps(found)) == found


def test_a_tag_may_be_called_domain():
    found = table([result("x", [3], tags={"domain": "other"})], 0)
    assert (list(found["tau"]), list(found["tau_by_tag"]["domain"])) == (["d"], ["other"])


def test_a_round_belongs_to_the_context_before_its_anchor():
    results = [
        result("x", [3, 3, 1], prompt_tokens=508),  # rounds begin at 508, 511, 514
        result("y", [2, 1], prompt_tokens=4095),  # 4095, 4097
        result("z", [4], prompt_tokens=1023),
    ]
    cells = table(results, 0)["tau_by_context"]
    assert {name: (cell["tokens"], cell["rounds"], cell["prompts"]) for name, cell in cells.items()} == {
        "0-512": (6, 2, 1), "512-1k": (5, 2, 2), "2k-4k": (2, 1, 1), "4k-8k": (1, 1, 1),
    }  # fmt: skip
    assert list(cells) == ["0-512", "512-1k", "2k-4k", "4k-8k"]


@given(st.integers(0, 10**6))
def test_every_round_is_in_one_context_bucket(seed):
    found = table(simulated(seed, 5), 0)
    for key in ("tokens", "rounds"):
        assert sum(cell[key] for cell in found["tau_by_context"].values()) == found["tau_all"][key]


# --- per slot ---


def shares(rows: list[dict]) -> list[tuple]:
    return [(row["accepted"], row["reached"], row["offered"]) for row in rows]


def test_per_slot_by_hand():
    """Answer tokens after each anchor: 8, 4, 3, 1. The last round's token is a draft."""
    rows = per_slot([result("x", [4, 1, 2, 1], accepted=[3, 0, 1, 1])], K)
    # Slot 1: offered by all, refused by the second. Slot 2: not offered by the last. Slot 3: likewise.
    assert shares(rows) == [(3, 4, 4), (1, 2, 3), (1, 1, 3)]
    assert [row["slot"] for row in rows] == [1, 2, 3]
    assert [row["marginal"] for row in rows] == [0.75, 0.3333, 0.3333]
    assert [row["conditional"] for row in rows] == [0.75, 0.5, 1.0]


def test_the_last_token_may_be_the_targets_own():
    rows = per_slot([result("x", [4, 1, 2, 1], accepted=[3, 0, 1, 0])], K)
    assert shares(rows) == [(2, 4, 4), (1, 2, 3), (1, 1, 3)]


def test_without_a_record_the_slot_of_the_last_token_is_not_offered():
    """After each anchor 8, 4, 3, 1 tokens, of which the last is left out: 3, 3, 2, 0 slots."""
    rows = per_slot([result("x", [4, 1, 2, 1])], K)
    assert shares(rows) == [(2, 3, 3), (1, 2, 3), (1, 1, 2)]


def test_a_whole_block_at_the_end_is_known_without_a_record():
    assert shares(per_slot([result("x", [4])], K)) == [(1, 1, 1)] * 3


def test_a_cut_by_the_budget_offers_what_the_budget_holds():
    """Budget 6: after the first token 5, 4, 2 tokens fit; the last round drafts 2 and gains both as drafts."""
    cut = result("x", [1, 2, 2], limits=[4, 4, 2], accepted=[0, 1, 2], finish_reason="length")
    assert shares(per_slot([cut], K)) == [(2, 3, 3), (1, 2, 3), (0, 0, 2)]


def test_slots_that_nobody_offered_have_no_share():
    rows = per_slot([result("x", [1], accepted=[1])], K)
    assert (rows[0]["marginal"], rows[1]["marginal"], rows[1]["conditional"]) == (1.0, None, None)
    assert shares(per_slot([], 3)) == [(0, 0, 0)] * 2


def test_a_wrong_block_size_is_an_error():
    with pytest.raises(ValueError, match="block_size = 3: a round of prompt 'x' gained 4"):
        per_slot([result("x", [4])], 3)
    with pytest.raises(ValueError, match="block_size = 1"):
        per_slot([], 1)


def test_impossible_records_are_noticed():
    with pytest.raises(AssertionError):
        per_slot([result("x", [2, 1], accepted=[2, 0])], K)  # a round that the answer goes on after has a bonus token
    with pytest.raises(AssertionError):
        per_slot([result("x", [4], accepted=[4])], K)  # no more drafts than slots


@pytest.mark.parametrize("recorded", [True, False])
def test_each_slot_is_right_as_often_as_the_drafter(recorded):
    """0.7 whatever the slot, ends of answers and budgets included: neither is counted where it would pull a share."""
    rows = per_slot(simulated(0, 4000, recorded=recorded), K)
    for row in rows:
        assert row["conditional"] == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / row["reached"]))
        assert row["marginal"] == pytest.approx(0.7 ** row["slot"], abs=0.03)


@given(st.lists(st.lists(st.integers(1, K), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_marginal_does_not_increase_and_adds_up_to_tau_where_all_slots_are_offered(prompts):
    # A whole block at the end: every round has K or more answer tokens before it.
    results = [result(str(i), [*rounds, K]) for i, rounds in enumerate(prompts)]
    rows = per_slot(results, K)
    assert len({row["offered"] for row in rows}) == 1
    marginals = [row["accepted"] / row["offered"] for row in rows]
    assert all(a >= b for a, b in zip(marginals, marginals[1:], strict=False))
    assert 1 + sum(marginals) == pytest.approx(pooled(results).value)


@given(st.integers(0, 10**6), st.booleans())
def test_per_slot_counts_are_consistent(seed, recorded):
    rows = per_slot(simulated(seed, 6, recorded=recorded), K)
    for row, before in zip(rows, [None, *rows], strict=False):
        assert row["accepted"] <= row["reached"] <= row["offered"]
        if before:
            assert row["reached"] <= before["accepted"] and row["offered"] <= before["offered"]


# --- repetition and losslessness ---


def slowly_repeated(ids: list[int], n: int) -> int:
    starts = range(len(ids) - n + 1)
    twice = [i for i in starts if any(j != i and ids[j : j + n] == ids[i : i + n] for j in starts)]
    return len({i + k for i in twice for k in range(n)})


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
@settings(max_examples=50)
def test_repeated_tokens_equal_the_slow_count(ids, n):
    assert repeated_tokens(ids, n) == slowly_repeated(ids, n)


def test_repeated_tokens_by_hand():
    once = list(range(8))
    assert repeated_tokens(once + [99] + once) == 16  # both occurrences
    assert repeated_tokens(once[:7] + [99] + once[:7]) == 0
    assert repeated_tokens([5] * 30) == 30
    assert repeated_tokens([5] * 8) == 0


def test_a_looping_answer_is_named_and_tau_is_given_without_it():
    looping = result("loops", [4, 4, 4], token_ids=[7] * 13)
    half = result("half", [1] * 31, token_ids=[*range(8), *range(8), *range(100, 116)])  # exactly half repeats: no loop
    found = repetition([looping, half])
    assert found["share"] == round((13 + 16) / 45, 4)
    assert (found["looping"], found["looping_ids"]) == (1, ["loops"])
    assert found["tau"] == {"value": round(43 / 34, 4), "rounds": 34, "tokens": 43}
    assert found["tau_without_looping"] == {"value": 1.0, "rounds": 31, "tokens": 31}


def test_an_answer_that_only_repeats_is_all_repetition():
    found = repetition([result("x", [4, 4, 4], token_ids=[7] * 13)])
    assert found["share"] == 1.0
    assert found["tau"]["value"] == 4.0
    assert found["tau_without_looping"]["value"] is None
    assert repetition([])["share"] is None


def test_losslessness_counts_verdicts():
    verdicts = ["identical", "near_tie", "different", None, "different", "identical"]
    found = losslessness([result(str(i), [1], verdict=verdict) for i, verdict in enumerate(verdicts)])
    assert found == {
        "lossless": False, "checked": 5, "identical": 2, "near_ties": 1, "different": 2, "different_ids": ["2", "4"],
        "unchecked": 1,
    }  # fmt: skip
    assert losslessness([result("x", [1], verdict="near_tie")])["lossless"] is True
    assert losslessness([result("x", [1])])["lossless"] is None
    with pytest.raises(ValueError, match="verdict = 'same': must be one of identical, near_tie, different"):
        losslessness([result("x", [1], verdict="same")])


# --- two drafters ---


def test_compare_by_hand():
    a = [result("x", [1, 1, 1, 1]), result("y", [2, 2], domain="e"), result("z", [3]), result("none", [])]
    b = [result("none", []), result("x", [4]), result("y", [1, 2, 1], domain="e"), result("z", [3])]
    found = compare(a, b, seed=0)
    assert (found["pairs"], found["left_out"]) == (3, 1)
    assert (found["text"], found["agreeing"]) == ("same", 4)
    assert found["tau_a"] == {"value": round(11 / 7, 4), "rounds": 7, "tokens": 11}
    assert found["tau_b"] == {"value": 2.2, "rounds": 5, "tokens": 11}
    assert found["difference"] == round(2.2 - 11 / 7, 4)
    assert (found["better"], found["worse"], found["equal"]) == (0.3333, 0.3333, 0.3333)
    assert found["p_value"] == 1.0
    assert found["interval"][0] < 0 < found["interval"][1]
    only_y = found["by_domain"]["e"]
    assert (only_y["pairs"], only_y["worse"], only_y["interval"]) == (1, 1.0, None)
    assert only_y["difference"] == round(4 / 3 - 2, 4)
    assert json.loads(json.dumps(found)) == found


def test_compare_says_whether_the_texts_are_the_same():
    a, b = [result("x", [2, 2]), result("y", [2])], [result("x", [2, 4]), result("y", [2])]
    found = compare(a, b, 0)
    assert (found["text"], found["agreeing"]) == ("own", 1)
    assert (found["tau_a"]["value"], found["tau_b"]["value"]) == (2.0, round(8 / 3, 4))
    assert (found["better"], found["equal"]) == (0.5, 0.5)  # rounds per token, whatever the length


def test_nothing_to_measure():
    found = compare([result("x", [])], [result("x", [2])], 0)
    assert (found["pairs"], found["left_out"], found["text"]) == (0, 1, "own")
    measured = ("difference", "interval", "better", "worse", "equal", "p_value")
    assert [found[key] for key in measured] == [None] * len(measured)


@given(st.integers(0, 10**6), st.integers(1, 8))
@settings(max_examples=25)
def test_a_drafter_against_itself(seed, count):
    results = simulated(seed, count)
    found = compare(results, results[::-1], seed)
    for cell in (found, *found["by_domain"].values()):
        if cell["pairs"]:
            assert (cell["difference"], cell["equal"], cell["p_value"]) == (0.0, 1.0, 1.0)
        assert cell["interval"] == (None if cell["pairs"] < 2 else [0.0, 0.0])


def test_pairing_sees_what_two_intervals_hide():
    """Prompts differ, b is a little better on each: intervals of tau overlap, that of the difference is above 0."""
    random = np.random.default_rng(0)
    a, b = [], []
    for i in range(40):
        tokens = 120
        rounds = int(random.integers(30, 100))
        a.append(result(str(i), [1] * (rounds - 1) + [tokens - rounds + 1]))
        b.append(result(str(i), [1] * (rounds - 3) + [tokens - rounds + 3]))
    assert bootstrap_interval(a, 0)[1] > bootstrap_interval(b, 0)[0]
    found = compare(a, b, 0)
    assert found["interval"][0] > 0
    assert (found["better"], found["p_value"]) == (1.0, 2 / 2**40)


def test_unpaired_results_are_named():
    x, y, z = (result(id, [1]) for id in "xyz")
    with pytest.raises(ValueError, match=r"results b lack 'y'.*max_prompts"):
        compare([x, y], [x], 0)
    with pytest.raises(ValueError, match="results a lack 'y', 'z'"):
        compare([x], [x, y, z], 0)
    with pytest.raises(ValueError, match="and 2 more"):
        compare([result(str(i), [1]) for i in range(7)], [], 0)
    with pytest.raises(ValueError, match="results b have 'x' more than once"):
        compare([x], [x, x], 0)
    with pytest.raises(ValueError, match="10 tokens of domain 'd' in a, 12 of 'd' in b"):
        compare([x], [result("x", [1], prompt_tokens=12)], 0)
    with pytest.raises(ValueError, match="no results"):
        compare([], [], 0)


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (8, 2, 0.109375), (3, 3, 1.0)]
)
def test_sign_test(better, worse, p):
    assert sign_test(better, worse) == p


def test_sign_test_of_many():
    assert sign_test(5100, 4900) == pytest.approx(
        math.erfc(199 / 100 / math.sqrt(2)), rel=0.01
    )  # normal, with continuity


# --- what a selector could reach ---


def test_oracle_and_recall_by_hand():
    """Three blocks of 4 slots, slot 0 the anchor; 4 candidates."""
    rank = np.array([[[9, 0, 1, -1], [9, 2, 0, 0], [9, -1, -1, -1]]])
    supervised = np.array([[[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]], bool)
    found = oracle_and_recall(rank, supervised, 4)
    assert found == {
        "recall": {"1": 0.4, "2": 0.6, "4": 0.8},
        # Leading slots: 1 and 0; 2 and 0; 2 and 2. The third block has nothing to be measured by.
        "oracle_accept_len": {"1": 1.5, "2": 2.0, "4": 3.0},
        "slots": 5,
        "blocks": 2,
    }


def test_recall_goes_no_further_than_the_candidates():
    assert cutoffs(16) == [1, 2, 4, 8, 16]
    assert cutoffs(10) == [1, 2, 4, 8, 10]
    assert cutoffs(1) == [1]
    with pytest.raises(AssertionError):
        oracle_counts(np.full((1, 1, 2), 8), np.array([[[False, True]]]), 8)


@given(st.integers(0, 10**6), st.integers(0, 4))
def test_oracle_counts_add_up_and_grow_with_k(seed, cut):
    random = np.random.default_rng(seed)
    rank = random.integers(-1, 16, size=(2, 4, 5))
    supervised = np.logical_and.accumulate(random.random((2, 4, 5)) < 0.8, -1)
    supervised[..., 0] = False
    whole = oracle_counts(rank, supervised, 16)
    parts = (oracle_counts(rank[:, part], supervised[:, part], 16) for part in (slice(cut), slice(cut, None)))
    assert (whole == sum(parts)).all()
    found = oracle_table(whole, 16)
    for shares in (found["recall"], found["oracle_accept_len"]):
        if found["slots"]:
            assert list(shares.values()) == sorted(shares.values())


# --- the report ---


def test_summary():
    results = simulated(0, 40)
    for i, one in enumerate(results):
        one.tags = {"thinking": "on" if i < 3 else "off"}
        one.verdict = "different" if i == 7 else "identical"
    results[0].domain = "a domain whose name is much longer than any table wants it to be"
    report = measure(results, K, seed=0)
    assert json.loads(json.dumps(report)) == report
    text = summary_lines(report)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    header = next(line for line in lines if line.startswith("domain"))
    everything = next(line for line in lines if line.startswith("all ") and line.endswith(" 40"))
    assert len(header) == len(everything)
    assert f"{pooled(results).value:.2f}" in everything
    assert next(line for line in lines if line.startswith("on ")).endswith("3*")
    said = (
        "NOT LOSSLESS: 39 of 40",
        "different: 'p7'",
        "accepted (marginal)",
        "if reached (conditional)",
        "context tokens",
    )
    assert [words for words in said if words not in text] == []


def test_summary_of_a_large_block_and_of_nothing():
    for text in (summary_lines(measure([], 16, 0)), summary_lines(measure([result("x", [20], limits=[24])], 24, 0))):
        assert max(map(len, text.splitlines())) <= 100
        assert "no output was compared" in text
