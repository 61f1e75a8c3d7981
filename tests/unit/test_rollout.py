"""The rollout checklist: each step alone, against servers that a script answers, and the record."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import toys
import yaml
from stubs import StubServer, chat

from dflash_train.check import Finding
from dflash_train.config.secrets import scrubbed
from dflash_train.rollout import traffic, watch
from dflash_train.rollout.greedy import PROMPTS, fork, greedy_step, local_rescore, read_prompts
from dflash_train.rollout.pair import (
    Candidate,
    Outcome,
    concerns,
    engine_faults,
    fingerprint,
    licence_step,
    pair_step,
    pin,
    pins_step,
    read_candidate,
    same_model,
)
from dflash_train.rollout.record import Record
from dflash_train.rollout.server import Server

COMMIT, OTHER = "a" * 40, "b" * 40


# --- the pair ---------------------------------------------------------------------------------------------------


@pytest.fixture
def drafter(overfitted, tmp_path):
    return shutil.copytree(overfitted.export, tmp_path / "drafter")


def edit(folder, name, change):
    path = folder / name
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_a_drafter_for_exactly_this_target_passes(drafter, target_dir):
    one = read_candidate(str(drafter), None)
    assert one.kind == "DFlash 2" and same_model(one.base, str(target_dir))
    found = pair_step([one], str(target_dir), None, "dflash-train")
    assert found.ok and found.facts["rung"] == "DFlash 2" and found.facts["drafter"] == str(drafter)


def test_one_of_another_target_does_not_though_its_shapes_fit(drafter, target_dir):
    edit(drafter, "dflash_train.json", lambda r: r["target"].update(name="acme/other"))
    found = pair_step([read_candidate(str(drafter), None)], str(target_dir), None, None)
    assert found.ok is False and found.facts["rung"] == "train" and "is for acme/other" in " ".join(found.notes)
    assert any(note.startswith("or train one: torchrun") for note in found.notes)


def test_a_drafter_that_contradicts_its_target_does_not(drafter, target_dir):
    edit(drafter, "config.json", lambda c: c.update(hidden_size=128))
    found = pair_step([read_candidate(str(drafter), None)], str(target_dir), None, "vLLM")
    assert found.ok is False and "does not fit the target" in " ".join(found.notes)


def test_a_fault_in_another_engine_is_a_note(drafter, target_dir):
    edit(drafter, "config.json", lambda c: c.update(hidden_act="gelu"))  # exllamav3 and SGLang alone refuse it
    one = Candidate(
        source=str(drafter), folder=drafter, revision=None, kind="DFlash 2", base=target_dir.name, base_revision=None
    )
    assert pair_step([one], str(target_dir), None, "SGLang").ok is False
    elsewhere = pair_step([one], str(target_dir), None, "llama.cpp")
    assert any("hidden_act" in note for note in elsewhere.notes)


def test_the_ladder_goes_down(drafter, target_dir, tmp_path):
    eagle = tmp_path / "eagle"
    eagle.mkdir()
    (eagle / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}')
    (eagle / "README.md").write_text(f"---\nbase_model: {target_dir.name}\n---\n")
    both = [read_candidate(str(eagle), None), read_candidate(str(drafter), None)]
    assert pair_step(both, str(target_dir), None, "dflash-train").facts["rung"] == "DFlash 2"  # whatever their order
    assert pair_step(both[:1], str(target_dir), None, None).facts["rung"] == "EAGLE-3"
    mtp = shutil.copytree(target_dir, tmp_path / "mtp")
    edit(mtp, "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    found = pair_step([], str(mtp), None, None)
    assert found.ok is False and found.facts["rung"] == "native MTP" and "native MTP" in found.summary


def test_another_revision_of_the_target_is_another_target(drafter, target_dir, monkeypatch):
    one = read_candidate(str(drafter), None)
    one = Candidate(**(vars(one) | {"base_revision": OTHER}))
    assert pair_step([one], str(target_dir), COMMIT, "dflash-train").ok is False
    assert pair_step([one], str(target_dir), OTHER, "dflash-train").ok


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("Qwen/Qwen3-8B", "qwen/qwen3-8b", True), ("/models/Qwen3-8B", "Qwen/Qwen3-8B", True), ("Qwen/Qwen3-8B", "mlx/Qwen3-8B", False),
     ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", False)],
)  # fmt: skip
def test_names_of_one_checkpoint(one, other, same):
    assert same_model(one, other) is same


@pytest.mark.parametrize(
    ("engines", "engine", "about"),
    [("all engines", "vLLM", True), ("vLLM, SGLang", "SGLang", True), ("vLLM, SGLang", "llama.cpp", False), ("all but reference and SGLang", "SGLang", False),
     ("all but reference and SGLang", "vLLM", True), ("llama.cpp against all others", "vLLM", True), ("MLX, ollama", "MLX / oMLX", True),
     ("all engines", "dflash-train", True), ("vLLM", "dflash-train", False), ("vLLM", None, True), ("vLLM", "some proxy", True)],
)  # fmt: skip
def test_which_findings_concern_an_engine(engines, engine, about):
    assert concerns(Finding("rule", engines, "refuse", "text", "source"), engine) is about


# --- licence and pins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("licence", "commercial", "ok", "says"),
    [("apache-2.0", True, True, ""), ("cc-by-nc-nd-4.0", True, False, "forbids commercial use"), ("cc-by-nc-nd-4.0", False, True, "no derivatives"),
     ("cc-by-nd-4.0", True, True, "no derivatives"), (None, True, False, "no licence found"), ("made-up", True, False, "not in the table"), ("gemma", True, True, "read them")],
)  # fmt: skip
def test_the_licence_of_the_drafter(tmp_path, licence, commercial, ok, says):
    (tmp_path / "README.md").write_text(f"---\nlicense: {licence}\n---\n" if licence else "# no front matter\n")
    found = licence_step(
        "acme/drafter", tmp_path, str(tmp_path), commercial=commercial, stated=None, stated_target="mit"
    )
    assert found.ok is ok and says in found.summary + " ".join(found.notes)


def test_a_licence_that_somebody_read_counts(tmp_path):
    assert not licence_step(
        "acme/drafter", tmp_path, str(tmp_path), commercial=True, stated="mit", stated_target=None
    ).ok
    assert licence_step("acme/drafter", tmp_path, str(tmp_path), commercial=True, stated="mit", stated_target="mit").ok


def test_what_is_pinned(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    pinned, wrong = pin(str(tmp_path), None, "--x")
    assert wrong is None and len(pinned["sha256"]["model.safetensors"]) == 64
    assert "follows main" in pin("acme/m", None, "--x")[1] and "can be moved" in pin("acme/m", "main", "--x")[1]
    assert "can be moved" in pin("acme/m", "v1.0", "--x")[1] and pin("acme/m", COMMIT, "--x")[1] is None


@pytest.mark.parametrize(
    ("name", "version", "faults"),
    [("vLLM", "0.30.0", 0), ("vLLM", "0.27.1", 1), ("vLLM", "0.30.1.dev12+g1a2b3c", 1), ("SGLang", "0.5.20", 0), ("SGLang", "0.5.9", 1),
     ("TensorRT-LLM", "1.3.0rc28", 0), ("llama.cpp", "b11434-1a2b3c", 0), ("llama.cpp", "b0-unknown", 1), ("vLLM", None, 1)],
)  # fmt: skip
def test_which_builds_are_releases(name, version, faults):
    assert len(engine_faults(name, version)) == faults


def test_unpinned_is_refused_unless_allowed_and_then_said():
    args = (("acme/target", "main"), ("acme/drafter", COMMIT), [("vLLM", "0.30.0")] * 2)
    refused = pins_step(*args, allow=False)
    assert refused.ok is False and "acme/target at main" in refused.summary
    allowed = pins_step(*args, allow=True)
    assert allowed.ok and "NOT PINNED" in allowed.summary and allowed.facts["unpinned"]
    two = pins_step(("a/b", COMMIT), ("a/c", COMMIT), [("vLLM", "0.30.0"), ("vLLM", "0.31.0")], allow=False)
    assert two.ok is False and "the servers differ" in two.summary


# --- the greedy test --------------------------------------------------------------------------------------------

PROMPT = {"id": "p", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def token(text, logprob, *others):
    listed = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in ((text, logprob), *others)]
    return {**listed[0], "top_logprobs": listed}


A = [
    token("The", -0.1),
    token(" cat", -0.70, (" dog", -0.72), (" d", -4.0)),
    token(" sat", -0.1),
    token("<|im_end|>", -0.1),
]


def test_where_two_answers_part():
    found = fork(A, b"The cat sat", b"The dog ran")
    assert (found.at, found.own, found.other) == (3, " cat", " dog") and found.gap == pytest.approx(0.02)
    far = fork(A, b"The cat sat", b"The ox ran")
    assert far.at == 3 and far.gap is None  # not among those listed
    assert fork(A, b"Another text", b"The dog") is None  # these are not its tokens
    assert fork([{**t, "top_logprobs": []} for t in A], b"The cat sat", b"The dog ran") is None  # nothing is told


def test_an_answer_that_ends_where_the_other_goes_on():
    longer = [*A[:2], token(" sat", -0.5, ("<|im_end|>", -0.6))]
    assert fork(longer, b"The cat sat", b"The cat").gap == pytest.approx(0.1)
    shorter = [*A[:2], token("<|im_end|>", -0.5, (" sat", -0.6))]
    assert fork(shorter, b"The cat", b"The cat sat").gap == pytest.approx(0.1)


def test_bytes_of_half_a_character():
    half = [{"token": "\ufffd", "logprob": -0.1, "bytes": [0xC3], "top_logprobs": [{"token": "x", "logprob": -9, "bytes": [120]}]},
            {"token": "\ufffd", "logprob": -0.2, "bytes": [0xBC], "top_logprobs": [{"token": "\ufffd", "logprob": -0.25, "bytes": [0xA4]}]}]  # fmt: skip
    assert fork(half, "ü".encode(), "ä".encode()).gap == pytest.approx(0.05)


def served(text, tokens=None, *, usage=(5, 2), knows=True):
    """A server that answers `text`; log-probabilities where they are asked for and it has some."""

    def script(body, number):
        if body.get("logprobs") and not knows:
            return 400, "no logprobs here"
        reply = chat(
            text, top={"choice": {"logprobs": {"content": tokens}}} if body.get("logprobs") and tokens else None
        )
        if usage is not None:
            reply[1]["usage"]["completion_tokens_details"] = {
                "accepted_prediction_tokens": usage[1],
                "rejected_prediction_tokens": usage[0] - usage[1],
            }
        return reply

    return StubServer(script)


def greedy(plain, fast, **more):
    with plain, fast:
        one, other = Server.open(plain.url), Server.open(fast.url)
        try:
            return greedy_step(one, other, [PROMPT], **({"precision": "bfloat16"} | more))
        finally:
            one.close()
            other.close()


def swapped(gap):
    return [A[0], token(" dog", -0.70, (" cat", -0.70 - gap)), token(" ran", -0.1)]


def test_identical_answers_pass():
    found = greedy(served("The cat", usage=None), served("The cat"))
    assert found.ok and found.facts["identical"] == 1 and found.facts["drafted"] == 5 and found.facts["accepted"] == 2


def test_a_near_tie_passes_and_a_difference_does_not():
    near = greedy(served("The cat sat", A, usage=None), served("The dog ran", swapped(0.1)))
    assert near.ok and near.facts["near_tie"] == 1 and near.facts["parted"][0]["forked"]["at"] == 3
    # The speculative server is sure of the other token: then its cache or its features are wrong.
    assert not greedy(served("The cat sat", A, usage=None), served("The dog ran", swapped(3.0))).ok
    wide = [A[0], token(" cat", -0.1, (" dog", -2.5)), A[2]]
    found = greedy(served("The cat sat", wide, usage=None), served("The dog ran", swapped(0.1)))
    assert found.ok is False and found.facts["different"] == 1 and "gap 2.4000" in found.notes[0]
    # In fp32 the bound is tiny.
    assert not greedy(served("The cat sat", A, usage=None), served("The dog ran", swapped(0.1)), precision="float32").ok
    assert greedy(
        served("The cat sat", A, usage=None), served("The dog ran", swapped(0.1)), bound=0.5, precision="float32"
    ).ok


@pytest.mark.parametrize("entry", [5, {"token": "The", "bytes": [999]}, token("The", -0.1, (" cat", "x"))])
def test_log_probabilities_that_are_none_are_named(entry):
    odd = [entry, {"token": " dog", "top_logprobs": [{"token": " cat"}]}]
    with pytest.raises(ValueError, match="its log-probabilities cannot be read"):
        greedy(served("The dog", odd, usage=None), served("The cat", knows=False))


@pytest.mark.parametrize("value", ["7", -1, 1.5, True, [1]])
def test_counts_of_drafts_that_are_none_are_not_counted(value):
    """Texts of them were joined, and added to a number later."""
    for details in ({"usage": {"completion_tokens_details": {"accepted_prediction_tokens": value, "rejected_prediction_tokens": value}}},
                    {"timings": {"draft_n": value, "draft_n_accepted": value}}):  # fmt: skip
        reply = {"choices": [{"message": {"content": "x"}}], **details}
        with StubServer(lambda body, number, reply=reply: (200, reply)) as odd:
            server = Server.open(odd.url)
            assert server.greedy(PROMPT["messages"], 8).drafted is None
            server.close()


def test_one_server_that_tells_is_enough():
    found = greedy(served("The cat sat", A, usage=None), served("The dog ran", knows=False))
    assert found.ok and found.facts["near_tie"] == 1


def test_without_log_probabilities_a_difference_is_undecided_or_rescored():
    servers = lambda: (served("The cat sat", usage=None, knows=False), served("The dog ran", knows=False))
    found = greedy(*servers())
    assert found.ok is False and found.facts["undecided"] == 1 and "--rescore" in " ".join(found.notes)
    assert greedy(*servers(), precision="float32").facts["different"] == 1
    assert greedy(*servers(), rescore=lambda messages, one, other: (one, other) == ("The cat sat", "The dog ran")).ok
    assert not greedy(*servers(), rescore=lambda messages, one, other: False).ok


def test_the_target_here_says_what_is_no_near_tie(target_dir):
    judge = local_rescore(str(target_dir), "float32")
    asked = [{"role": "user", "content": "w20 w30"}]
    assert judge(asked, "w40 w50", "w41 w50") is False
    assert local_rescore("no such folder", "float32")  # it is read when it is needed


def test_another_finish_reason_is_a_difference():
    cut = StubServer(lambda body, number: chat("The cat", finish="length"))
    assert not greedy(served("The cat", usage=None), cut).ok


def test_a_speculative_server_that_drafts_nothing_is_found_out():
    found = greedy(served("The cat", usage=None), served("The cat", usage=(0, 0)))
    assert found.ok is False and "DRAFTED NOTHING" in found.summary
    assert any(
        "look for DFlash in its log" in note for note in greedy(served("x", usage=None), served("x", usage=None)).notes
    )
    with pytest.raises(ValueError, match="must be a server without speculation"):
        greedy(served("The cat"), served("The cat"))


def test_what_a_server_must_say():
    with StubServer(models=(200, {"data": [{"id": "a"}, {"id": "b"}]})) as two:
        with pytest.raises(ValueError, match="say which with --model"):
            Server.open(two.url)
        Server.open(two.url, "b").close()
        Server.open(two.url.removesuffix("/v1"), "b").close()
        with pytest.raises(ValueError, match="not c"):
            Server.open(two.url, "c")
    with pytest.raises(ValueError, match="nobody answers"):
        Server.open(two.url)
    with pytest.raises(ValueError, match="is no address"):
        Server.open("localhost:8000")
    with StubServer(models=(401, {"error": "no key"})) as locked, pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        Server.open(locked.url)
    with StubServer(lambda body, number: (500, "broken")) as bad:
        server = Server.open(bad.url)
        with pytest.raises(ValueError, match="answered 500"):
            server.greedy(PROMPT["messages"], 8)
        server.close()


def test_the_packaged_prompts_and_broken_ones(tmp_path):
    rows = read_prompts()
    assert len(rows) == 24 == len({row["id"] for row in rows}) and all(
        row["messages"][-1]["role"] == "user" for row in rows
    )
    assert PROMPTS.is_file()
    for text in ("", '{"messages": []}\n', '{"text": "x"}\n', "no json\n"):
        file = tmp_path / "prompts.jsonl"
        file.write_text(text)
        with pytest.raises(ValueError, match="prompts"):
            read_prompts(file)


# --- traffic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "interval", "said"),
    [(1.5, (1.2, 1.8), "on"), (1.5, (1.05, 1.9), "unsure"), (1.09, (1.0, 1.2), "off"), (0.6, (0.5, 0.7), "off"), (1.5, None, "unsure"), (None, None, "off"),
     (1.1, (1.1, 1.1), "on")],
)  # fmt: skip
def test_the_verdict_considers_the_interval(value, interval, said):
    assert traffic.verdict(value, interval, 1.1) == said


def cell(workload, n, value, interval, tau=4.0, failed=0, verdict="faster"):
    arm = {"requests": 20, "failed": failed, "errors": {"timeout": failed} if failed else {}, "tok_s": 100.0}
    counted = {"accept_len": tau, "rounds": 100, "per_position_rate": [0.9]}
    return {"workload": workload, "concurrency": n, "speed_up": {"speculative": {"value": value, "interval": interval, "pairs": 20, "verdict": verdict}},
            "arms": {"plain": {**arm, "acceptance": None}, "speculative": {**arm, "acceptance": counted}}}  # fmt: skip


def test_speculation_is_on_for_the_classes_that_gain():
    report = {
        "error": None,
        "cells": [
            cell("chat", 1, 2.0, (1.8, 2.2)),
            cell("chat", 32, 1.0, (0.9, 1.05)),
            cell("code", 1, 1.3, (1.0, 1.6)),
        ],
    }
    found = traffic.traffic_step(report, "vLLM", 1.1)
    assert found.ok and found.summary == "on for chat at 1; off for 2 of 3"
    assert [row["verdict"] for row in found.facts["rows"]] == ["on", "off", "unsure"]
    text = traffic.table(found.facts["rows"])
    assert "LEAVE OFF" in text and "[1.80-2.20]" in text
    unsure = traffic.traffic_step({"error": None, "cells": report["cells"][1:]}, "vLLM", 1.1)
    assert unsure.ok is False and unsure.summary.endswith("of code at 1")
    off = traffic.traffic_step({"error": None, "cells": report["cells"][1:2]}, "vLLM", 1.1)
    assert off.ok is False and off.summary.endswith("leave speculation off")


def test_few_prompts_failures_and_an_early_end_are_no_go():
    few = traffic.traffic_step(
        {"error": None, "cells": [cell("chat", 1, 2.0, (1.8, 2.2), verdict="too few prompts")]}, "vLLM", 1.1
    )
    assert few.ok is False and few.facts["rows"][0]["verdict"] == "unsure"
    assert (
        traffic.traffic_step({"error": None, "cells": [cell("chat", 1, 2.0, (1.8, 2.2), failed=1)]}, "vLLM", 1.1).ok
        is False
    )
    assert (
        "ended early"
        in traffic.traffic_step({"error": "gone", "cells": [cell("chat", 1, 2.0, (1.8, 2.2))]}, "vLLM", 1.1).summary
    )
    llama = traffic.traffic_step({"error": None, "cells": [cell("chat", 4, 2.0, (1.8, 2.2))]}, "llama.cpp", 1.1)
    assert "does not scale" in llama.notes[0]


# --- alerts -----------------------------------------------------------------------------------------------------

LIMITS = watch.Thresholds(measured=4.0, drop=3.4, worthless=2.2)
SERIES = re.compile(
    r"(?:sum|avg) by \(model_name(?:, position)?\) \((rate|increase|avg_over_time)\(([\w:]+)(\{[^}]*\})?\[10m\]\)\)"
)


def evaluate(expr, values):
    """Whether an alert's expression has a result, its selectors replaced by numbers; every metric must be one that the engines have."""
    python = SERIES.sub(lambda m: str(float(values.get(m[2], 0.0)) * (600 if m[1] == "increase" else 1)), expr)
    python = python.replace("on (model_name) ", "").replace(" unless ", " and not ")
    assert not set(re.findall(r"[a-z_]+", python)) - {"and", "not"}, python
    try:
        return bool(eval(python, {"__builtins__": {}}))  # noqa: S307
    except ZeroDivisionError:
        return False  # NaN in PromQL: no comparison holds


def of(tau, tokens=100.0):
    """Rates of all engines at this accepted length."""
    rounds, found = tokens / tau, dict.fromkeys(watch.GENERATED.values(), tokens)
    for engine in watch.COUNTING:
        found |= {watch.counter(engine, "drafts"): rounds, watch.counter(engine, "accepted_tokens"): tokens - rounds}
    return found | {watch.LENGTH: tau}


def alerts(labels=None):
    """The file as Prometheus reads it, its schema checked."""
    found = yaml.safe_load(watch.rules_yaml("qwen", LIMITS, labels))
    assert set(found) == {"groups"}
    for group in found["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
            assert re.fullmatch(r"[a-zA-Z_]\w*", rule["alert"]) and re.fullmatch(r"\d+[smh]", rule["for"])
            assert rule["labels"]["severity"] in ("warning", "critical") and set(rule["annotations"]) == {
                "summary",
                "description",
            }
            assert rule["expr"].count("(") == rule["expr"].count(")") and all(
                isinstance(v, str) for v in rule["annotations"].values()
            )
            assert {m[1] for m in SERIES.findall(rule["expr"])} <= set(watch.METRICS)
    return {rule["alert"]: rule["expr"] for group in found["groups"] for rule in group["rules"]}


@pytest.mark.parametrize("engine", watch.ENGINES.values())
@pytest.mark.parametrize("labels", [None, {"job": 'a"b', "pod": "x"}])
def test_alerts_fire_when_they_should(engine, labels):
    found = alerts(labels)
    dropped, worthless, off = (
        found[f"{name}{engine}"] for name in ("DraftAcceptanceDropped", "SpeculationNotWorthwhile", "SpeculationOff")
    )
    for tau, fires in ((4.0, (False, False)), (3.3, (True, False)), (1.5, (True, True))):
        assert (evaluate(dropped, of(tau)), evaluate(worthless, of(tau))) == fires, tau
        assert not evaluate(off, of(tau))
    silent = dict.fromkeys(of(4.0), 0.0) | dict.fromkeys(watch.GENERATED.values(), 100.0)
    assert evaluate(off, silent)
    assert not any(evaluate(expr, {}) for expr in (dropped, worthless, off))  # nobody asks: nobody is called
    assert not evaluate(dropped, of(1.5, tokens=0.4))  # too few rounds to say
    if labels:
        assert '{job="a\\"b", pod="x"}' in dropped


def test_thresholds_follow_from_what_was_measured():
    found = watch.thresholds(4.0, 3.9, 1.76)
    assert found.drop == 3.4 and found.worthless == 2.5  # 4 x 1.1 / 1.76: there it gains 1.1 times
    assert watch.thresholds(4.0, 2.5, None) == watch.Thresholds(measured=4.0, drop=2.5, worthless=None)
    assert watch.thresholds(1.1, None, 1.05).drop == 1.0
    with pytest.raises(ValueError, match="tau = 0.5"):
        watch.thresholds(0.5, None, None)
    rows = [
        {"verdict": v, "tau": t, "rounds": r, "speed_up": s}
        for v, t, r, s in (("on", 4.0, 300, 2.0), ("on", 2.0, 100, 1.2), ("off", 1.0, 1000, 0.9))
    ]
    assert traffic.measured_tau(rows) == (3.5, 2.0, 1.2)
    assert traffic.measured_tau([rows[2] | {"tau": None}]) == (None, None, None)


def test_the_dashboard_is_one_that_grafana_reads():
    found = json.loads(json.dumps(watch.dashboard("qwen", LIMITS, {"job": "qwen"})))
    assert {"title", "schemaVersion", "panels", "templating", "time"} <= set(found)
    places = set()
    for i, panel in enumerate(found["panels"]):
        assert panel["id"] == i + 1 and panel["type"] == "timeseries" and panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        for target in panel["targets"]:
            assert '{job="qwen"}' in target["expr"] and target["expr"].count("(") == target["expr"].count(")")
            assert set(re.findall(r"(?:vllm|sglang|llamacpp):\w+", target["expr"])) <= set(watch.METRICS)
    assert len(places) == len(found["panels"]) == 4
    steps = found["panels"][0]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [s["value"] for s in steps] == [None, 2.2, 3.4]


# --- the record -------------------------------------------------------------------------------------------------


def test_what_is_known_is_not_done_again(tmp_path):
    done = []

    def run(ok=True):
        done.append(ok)
        return Outcome(ok=ok, summary=f"run {len(done)}", facts={"n": len(done)})

    assert Record(tmp_path).step("pins", {"a": 1}, run) == (Outcome(ok=True, summary="run 1", facts={"n": 1}), False)
    assert Record(tmp_path).step("pins", {"a": 1}, run)[0].summary == "run 1" and len(done) == 1  # of the file
    assert Record(tmp_path).step("pins", {"a": 2}, run)[0].summary == "run 2"  # other inputs
    assert Record(tmp_path).step("pins", {"a": 2}, run, again=True)[0].summary == "run 3"
    assert Record(tmp_path).step("greedy", {}, lambda: run(False))[0].ok is False
    assert Record(tmp_path).step("greedy", {}, run)[0].summary == "run 5"  # what failed is tried again
    record = Record(tmp_path)
    record.close(verdict="go")
    kept = json.loads(record.path.read_text())
    assert kept["verdict"] == "go" and list(kept["steps"]) == ["pins", "greedy"] and kept["date"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rollout.json"]  # nothing half written is left


def test_a_foreign_record_is_not_written_over(tmp_path):
    (tmp_path / "rollout.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="not a record"):
        Record(tmp_path)


def test_a_folder_that_changed_has_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before and fingerprint("acme/m") == {"id": "acme/m"}
    (tmp_path / "config.json").write_text("{ }")
    assert fingerprint(str(tmp_path)) != before


# --- the command ------------------------------------------------------------------------------------------------


def command(*argv):
    from dflash_train.rollout.command import main

    return toys.call(main, *argv)


def between(plain, fast, drafter, target, output, *more):
    """The command over two servers."""
    servers = ("--plain", plain.url, "--speculative", fast.url)
    return command(drafter, "--target", target, *servers, "--output", output, *more)


def test_nothing_is_asked_of_the_servers_after_a_refusal(drafter, target_dir, tmp_path):
    edit(drafter, "dflash_train.json", lambda r: r["target"].update(name="acme/other"))
    with served("x", usage=None) as plain, served("x") as fast:
        done = between(plain, fast, drafter, target_dir, tmp_path / "out")
        assert not plain.posts and not fast.posts
    assert done.code == 1 and done.out.splitlines()[-1].startswith("no-go: drafter: ")
    assert json.loads((tmp_path / "out/rollout.json").read_text())["verdict"] == "no-go"


def test_a_launch_line_that_contradicts_the_drafter_is_no_go(drafter, target_dir, tmp_path):
    line = 'VLLM_USE_V2_MODEL_RUNNER=1 vllm serve T --speculative-config \'{"method": "dflash", "num_speculative_tokens": 15}\''
    with served("x", usage=None) as plain, served("x") as fast:
        done = between(plain, fast, drafter, target_dir, tmp_path, "--launch", line)
    assert done.code == 1 and "num_speculative_tokens 15" in done.out.splitlines()[-1]


def test_a_greedy_difference_stops_before_the_benchmark(drafter, target_dir, tmp_path):
    with served("The cat", usage=None, knows=False) as plain, served("The dog", knows=False) as fast:
        done = between(plain, fast, drafter, target_dir, tmp_path, "--engine-version", "0.30.0",
                       "--licence", "mit", "--target-licence", "mit")  # fmt: skip
    assert done.code == 1 and "greedy: 0 of 24" in done.out.splitlines()[-1], done
    assert "benchmark" not in json.loads((tmp_path / "rollout.json").read_text())["steps"]


# --- what goes wrong on the way ---------------------------------------------------------------------------------


def test_a_damaged_record_is_named_and_not_written_over(tmp_path):
    file = tmp_path / "rollout.json"
    for text in (
        '{"format": 1, "steps": {"pins": 5}}',
        '{"format": 1, "steps": {"pins": {"ok": true}}}',
        '{"format": 1',
        "[]",
        "\x00",
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match="rollout.json"):
            Record(tmp_path)
        assert file.read_text() == text


def test_a_verdict_does_not_outlive_what_it_stood_on(tmp_path):
    Record(tmp_path).close(verdict="go", reasons=[])

    def fails():
        raise ValueError("the server is down")

    with pytest.raises(ValueError, match="down"):
        Record(tmp_path).step("greedy", {"other": 1}, fails)
    kept = json.loads((tmp_path / "rollout.json").read_text())
    assert kept["verdict"] is None and kept["reasons"] == ["greedy: begun and not ended"]


def test_servers_that_answer_nonsense_are_named():
    for models in ({"data": [1]}, {"data": 5}, [], "text", {"data": []}):
        with StubServer(models=(200, models)) as odd, pytest.raises(ValueError, match="lists no models"):
            Server.open(odd.url)
    for url in ("localhost:8000", "http://[::1", "http://h:99999999/v1"):
        with pytest.raises(ValueError, match="is no address"):
            Server.open(url)
    for answer in (
        [],
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": "x"}, "logprobs": [1]}]},
        "<html>",
    ):
        with StubServer(lambda body, number, answer=answer: (200, answer)) as odd:
            server = Server.open(odd.url)
            with pytest.raises(ValueError, match="no chat completion"):
                server.greedy(PROMPT["messages"], 8)
            server.close()


def counted(plain, fast):
    with served("The cat", usage=None) as one, served("The cat", usage=None) as other:
        servers = Server.open(one.url), Server.open(other.url)
        for server, counts in zip(servers, (plain, fast), strict=True):
            server.drafts = iter(counts).__next__
        try:
            return greedy_step(*servers, [PROMPT], precision="bfloat16")
        finally:
            for server in servers:
                server.close()


def test_counters_say_who_drafts():
    assert counted([None, None], [(10, 5), (30, 20)]).facts["drafted"] == 20
    assert counted([(7, 7), (7, 7)], [(10, 5), (30, 20)]).ok
    with pytest.raises(ValueError, match="drafts .* by its counters.* without speculation"):
        counted([(7, 7), (9, 7)], [(10, 5), (30, 20)])
    with pytest.raises(ValueError, match="started anew"):
        counted([None, None], [(30, 20), (10, 5)])


def test_answers_without_text_prove_nothing():
    with pytest.raises(ValueError, match="nothing to compare"):
        greedy(served("", usage=None), served(""))


def test_a_byte_that_differs_is_no_go():
    text = "The cat sat on the mat."
    for at in (0, 10, len(text) - 1):
        planted = text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]
        assert greedy(served(text, usage=None, knows=False), served(planted, knows=False)).ok is False


@pytest.mark.parametrize("name", ["{{ $value }}", "a: b\n- c", '"quoted" #', "{{{", "größe/模型", "x}}"])
def test_odd_names_of_models_are_text_in_alerts(name):
    found = yaml.safe_load(watch.rules_yaml(name, LIMITS))
    assert found["groups"][0]["name"] == f"speculation-{name}"
    for rule in found["groups"][0]["rules"]:
        summary = rule["annotations"]["summary"]
        # What Prometheus carries out is the quoted pair of braces alone; carried out, it is the name.
        assert set(re.findall(r"\{\{.*?\}\}", summary)) <= {'{{"{{"}}'} and name in summary.replace('{{"{{"}}', "{{")


def test_labels_are_those_that_prometheus_reads():
    assert watch.read_labels(["job=a=b", "_x1=ü\n"]) == {"job": "a=b", "_x1": "ü\n"}
    assert '{job="a\\nb"}' in watch.rules("m", LIMITS, {"job": "a\nb"})["groups"][0]["rules"][0]["expr"]
    for bad in ("größe=1", "1a=b", "a", "a=", "a-b=c", '}"=x'):
        with pytest.raises(ValueError, match="must be NAME=VALUE"):
            watch.read_labels([bad])
    with pytest.raises(ValueError, match="one value"):
        watch.read_labels(["a=1", "a=2"])


def test_labels_are_read_before_anything_is_measured(drafter, target_dir, tmp_path):
    done = command(drafter, "--target", target_dir, "--plain", "http://127.0.0.1:9/v1", "--speculative", "http://127.0.0.1:9/v1",
                   "--output", tmp_path, "--label", "no label")  # fmt: skip
    assert done.code == 2 and "--label no label" in done.err


@pytest.mark.parametrize(
    "words",
    [("--least", "nan"), ("--near-tie", "-1"), ("--near-tie", "inf"), ("--least", "inf"), ("--num-prompts", "-4"), ("--max-new-tokens", "0"), ("--temperature", "nan"), ("--traffic", "nope"),
     ("--traffic", "/none.jsonl")],
)  # fmt: skip
def test_mistakes_in_later_steps_are_said_before_the_first(words, drafter, target_dir, tmp_path):
    with served("x", usage=None) as plain, served("x") as fast:
        done = between(plain, fast, drafter, target_dir, tmp_path / "out", *words)
        assert not plain.posts and not fast.posts
    assert done.code == 2 and words[1] in done.err and not done.out


def test_keys_of_a_launch_line_are_not_recorded():
    line = "vllm serve T --api-key hunter2secret --hf-token=abc --max-num-batched-tokens 8192 --admin-api-key 'x y'"
    kept = scrubbed(line)
    assert "hunter2" not in kept and "abc" not in kept and "--max-num-batched-tokens 8192" in kept


def test_a_step_is_done_again_where_its_files_or_prompts_changed(drafter, target_dir, tmp_path, monkeypatch):
    from dflash_train.rollout import command as module

    rows = [{"workload": "mine", "concurrency": 1, "speed_up": 2.0, "interval": [1.9, 2.1], "pairs": 9, "tau": 3.0, "rounds": 90,
             "per_position": None, "tok_s": {"plain": 1.0, "speculative": 2.0}, "verdict": "on"}]  # fmt: skip
    fine = lambda *args, **more: Outcome(ok=True, summary="fine", facts={"rows": rows})
    for name in ("licence_step", "pins_step", "greedy_step"):
        monkeypatch.setattr(module, name, fine)
    out, mine, measured = tmp_path / "out", tmp_path / "mine.jsonl", []

    def benchmark(*args):
        measured.append(args)
        (out / module.BENCHMARK).write_text("{}")
        return fine()

    monkeypatch.setattr(module, "_benchmark", benchmark)

    def roll() -> tuple[int, int]:
        """(benchmarks so far, alerts that are there)"""
        done = command(drafter, "--target", target_dir, "--plain", plain.url, "--speculative", fast.url, "--output", out, "--concurrency", "1",
                       "--traffic", mine, "--label", "job=x")  # fmt: skip
        assert done.code == 0, done
        return len(measured), (out / module.RULES).is_file() + (out / module.DASHBOARD).is_file()

    with served("x", usage=None) as plain, served("x") as fast:
        mine.write_text(json.dumps({"turns": ["one"]}))
        assert roll() == (1, 2) and roll() == (1, 2)
        (out / module.RULES).unlink()
        assert roll() == (1, 2)
        (out / module.BENCHMARK).unlink()
        assert roll() == (2, 2)
        mine.write_text(json.dumps({"turns": ["another"]}))
        assert roll() == (3, 2)
