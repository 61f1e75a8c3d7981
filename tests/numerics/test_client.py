"""The train-to-serve alarm: silent for a good export, loud for each way in which a folder, or who reads it, can be wrong."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from dflash_train import client, evaluate
from dflash_train.acceptance import Tau
from dflash_train.card import CardFacts
from dflash_train.client import GapReport, Parted, client_decode, gap_alarm, is_near_tie, own_decode
from dflash_train.config.load import CheckFailed
from dflash_train.config.schema import ClientCheck, EvaluateConfig
from dflash_train.drafter.spec import UNUSED
from dflash_train.export import write_export
from dflash_train.folder import load_drafter_folder
from dflash_train.generation.single import speculative_decode
from dflash_train.types import Prompt

reference = pytest.importorskip("dflash.model")

BUDGET = 28
CONFIG = EvaluateConfig(client_prompts=4, max_new_tokens=BUDGET)


def prompts(overfitted) -> list[Prompt]:
    return [Prompt(id=r["id"], domain="d", token_ids=r["prompt_ids"]) for r in overfitted.rows]


def check(overfitted, folder: Path, config: EvaluateConfig = CONFIG) -> GapReport:
    return gap_alarm(folder, overfitted.step, prompts(overfitted), config, set())


def without_the_client(monkeypatch) -> None:
    monkeypatch.setattr(client, "installed", lambda: None)


# --- faults ---


def nested(name: str, value: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config["dflash_config"][name] != value
        config["dflash_config"][name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def top(name: str, value: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config[name] != value
        config[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def tensors(change):
    """Rewrite every tensor as change(name, all of them)."""

    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        new = {name: change(name, state).contiguous().clone() for name in state}
        save_file(new, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


FAULTS = {
    "mask id": (nested("mask_token_id", 12), "mask_token_id: 12 against"),
    "layer ids off by one": (nested("target_layer_ids", [0, 2]), "target_layer_ids: (0, 2) against (1, 3)"),
    "rope theta": (top("rope_parameters", {"rope_theta": 50.0, "rope_type": "default"}), "rope_theta: 50.0 against"),
    "sliding window": (top("sliding_window", 8), "sliding_window: 8 against 16"),
    "causal": (top("is_causal", True), "is_causal: True against False"),
    "taps in the wrong order": (
        tensors(lambda name, state: state[name].flip(1) if "base_kernel" in name else state[name]),
        "tensors differ: layers.0.attention_conv.base_kernel",
    ),
    "captured layers in the wrong order": (
        tensors(lambda name, state: state[name].roll(toys.HIDDEN, 1) if name == "fc.weight" else state[name]),
        "1 of 36 tensors differ: fc.weight",
    ),
}


@pytest.mark.parametrize("by", ["client", "own decoder"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_export_raises_the_alarm(monkeypatch, overfitted, tmp_path, fault, by):
    change, named = FAULTS[fault]
    folder = shutil.copytree(overfitted.export, tmp_path / "export")
    change(folder)
    if by == "own decoder":
        without_the_client(monkeypatch)
    report = check(overfitted, folder)
    # Decoding itself shows it, whatever the comparison of the files says.
    assert [p for p in report.parted if not p.near_tie] and report.tau.value < report.expected.value
    assert report.gap and report.independent == (by == "client")
    text = report.alarm()
    assert named in text
    for part in (f"tau {report.tau.value:.2f}", f"{report.expected.value:.2f}", "rounds differ", report.parted[0].id, "mask_token_id",
                 "precision", "target_layer_ids", "rope_theta", "sliding_window"):  # fmt: skip
        assert part in text, part
    assert "TRAIN/SERVE GAP" in report.line() and len(report.line().splitlines()) == 1


def test_a_fault_of_the_client_alone_raises_the_alarm(monkeypatch, overfitted):
    """It reads the layer before the right one; the folder is as it was trained."""
    extract = reference.extract_context_feature
    monkeypatch.setattr(reference, "extract_context_feature", lambda states, ids: extract(states, [i - 1 for i in ids]))
    report = check(overfitted, overfitted.export)
    assert report.gap and not report.differences and report.tau.value < report.expected.value


def test_a_folder_without_a_tensor_is_not_decoded(overfitted, tmp_path):
    folder = shutil.copytree(overfitted.export, tmp_path / "export")
    state = load_file(folder / "model.safetensors")
    del state["norm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    report = check(overfitted, folder)
    assert report.gap and report.differences == ["norm.weight: missing"] and report.tau.rounds == 0


def test_what_the_client_leaves_out_is_an_alarm(monkeypatch, overfitted):
    monkeypatch.setattr(reference, "DFlash2DraftModel", reference.DFlashDraftModel)  # knows neither taps nor codebooks
    with pytest.raises(CheckFailed, match=r"does not load it completely.*candidate_selector"):
        check(overfitted, overfitted.export)


# --- no fault ---


@pytest.mark.parametrize("by", ["client", "own decoder"])
def test_a_good_export_is_silent(monkeypatch, overfitted, by):
    if by == "own decoder":
        without_the_client(monkeypatch)
    report = check(overfitted, overfitted.export)
    assert not report.gap and report.parted == [] and report.differences == []
    assert report.tau == report.expected and report.tau.tokens == 4 * (BUDGET - 1) and report.tau.value > 2
    line = report.line()
    assert "no train/serve gap" in line and ("NOT an independent check" in line) == (by == "own decoder")
    assert (client.INSTALL in line) == (by == "own decoder")
    assert report.metrics() == {"client/parted_rounds": 0, "client/gap": 0.0, "client/tau": report.tau.value,
                                "client/expected_tau": report.tau.value}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_in_16_bits_is_what_training_has_when_it_is_rounded(overfitted, tmp_path, dtype):
    step = overfitted.step
    card = CardFacts(name="toy", base_model="toy", license="mit")
    folder = write_export(tmp_path / "out", state=step.drafter.state_dict(), spec=step.drafter.spec, target=toys.toy_info(),
                          dtype=dtype, tokenizer_dir=None, card=card)  # fmt: skip
    _, exported, _ = load_drafter_folder(folder)
    rounded = client.rebuilt(step, step.drafter.spec, exported)
    report = gap_alarm(folder, rounded, prompts(overfitted), CONFIG, set())
    assert not report.gap and report.parted == [] and report.differences == []


def test_rounds_and_answers_are_those_that_the_client_tells(monkeypatch, overfitted):
    model = reference.DFlash2DraftModel.from_pretrained(overfitted.export, dtype="auto").eval()
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    row = overfitted.rows[0]
    seldom = next(t for t in row["response_ids"] if row["response_ids"].index(t) > 5)
    asked = [r["prompt_ids"] for r in overfitted.rows]
    for budget, stop in ((1, set()), (9, set()), (200, {seldom})):
        found = client_decode(overfitted.export, toys.toy_model(), asked[:1], budget, stop)[0]
        ids = torch.tensor([row["prompt_ids"]])
        told = reference.dflash_generate(model, toys.toy_model(), ids, budget, sorted(stop), return_stats=True)
        assert found.token_ids == told.output_ids[0, 6:].tolist()
        assert found.rounds == told.acceptance_lengths
        assert found == own_decode(overfitted.export, overfitted.step, asked[:1], budget, stop)[0]


@pytest.mark.parametrize("selector", [0, 8])
def test_drafters_that_the_client_has_no_class_for(overfitted, tmp_path, selector):
    """Convolution or selector alone. DFlash v1, with neither, it knows."""
    for taps in (0, 2):
        unused = {"selector_top_k": 8 if selector else UNUSED, "conv_group_size": UNUSED}
        step = toys.toy_step(toys.toy_target(), selector_rank=selector, conv_kernel_size=taps, **unused)
        card = CardFacts(name="toy", base_model="toy", license="mit")
        folder = write_export(tmp_path / f"{taps}", state=step.drafter.state_dict(), spec=step.drafter.spec,
                              target=toys.toy_info(), dtype=torch.float32, tokenizer_dir=None, card=card)  # fmt: skip
        report = gap_alarm(folder, step, prompts(overfitted), CONFIG, set())
        assert not report.gap and report.independent == (bool(taps) == bool(selector))
        if not report.independent:
            assert "it knows drafters with convolution and selector" in report.line()
            with pytest.raises(ValueError, match="evaluate.client = required: the client cannot decode"):
                gap_alarm(folder, step, prompts(overfitted), EvaluateConfig(client=ClientCheck.required), set())


def test_required_and_not_there(monkeypatch, overfitted):
    without_the_client(monkeypatch)
    required = EvaluateConfig(client=ClientCheck.required)
    with pytest.raises(ValueError, match=r"evaluate.client = required: .*pip install --no-deps dflash==0.1.0"):
        check(overfitted, overfitted.export, required)


def test_prompts_are_shared_over_the_domains():
    rows = [Prompt(id=f"{d}{i}", domain=d, token_ids=[1]) for d, n in (("b", 1), ("a", 5), ("c", 2)) for i in range(n)]
    assert [p.id for p in client.shared_over_domains(rows, 6)] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert len(client.shared_over_domains(rows, 99)) == 8 and client.shared_over_domains([], 3) == []


# --- the rules ---


def report_of(lost: list[int], *, rounds: int = 200, in_fp32: bool = False, near_tie: bool = False) -> GapReport:
    """A check in which some of the rounds, of 4 expected tokens each, lost so many of them."""
    parted = [
        Parted(id="x", round=i, anchor=9, gained=4 - n, expected=4, near_tie=near_tie) for i, n in enumerate(lost)
    ]
    return GapReport(
        folder="f", decoder="d", independent=True, why_own=None, prompts=6, in_fp32=in_fp32, parted=parted, differences=[],
        tau=Tau(tokens=4 * rounds - sum(lost), rounds=rounds), expected=Tau(tokens=4 * rounds, rounds=rounds), weights="w",
        seconds=1.0,
    )  # fmt: skip


def test_in_fp32_one_round_that_is_no_near_tie_is_a_gap():
    assert report_of([1], in_fp32=True).gap
    assert not report_of([1, -2, 3], in_fp32=True, near_tie=True).gap


def test_in_16_bits_taus_may_differ_by_rounding():
    assert not report_of([]).gap
    assert not report_of([1, -2, 3, -1, 2, -3] * 5).gap  # many rounds parted, in either direction
    assert not report_of([2] * 12).gap  # 24 of 800 tokens are 3 %
    assert report_of([2] * 13).gap
    assert report_of([-2] * 13).gap  # better than training measured is a gap too
    assert not report_of([3], rounds=5).gap  # 15 %, but of a single round
    assert report_of([3] * 10, rounds=40).gap


def test_a_near_tie_is_where_two_scores_nearly_agree(monkeypatch, overfitted):
    row = overfitted.rows[0]
    ids = row["prompt_ids"] + row["response_ids"]
    assert not any(is_near_tie(overfitted.step, ids, 6, slot, 8) for slot in range(1, 8))
    monkeypatch.setattr(client, "NEAR_TIE", 10.0)
    assert is_near_tie(overfitted.step, ids, 6, 1, 8)


def test_a_tie_of_the_drafter_is_one():
    """Two tokens with the same row in the head and the same successor: whichever comes first in a sum wins."""
    target = toys.toy_target()
    step = toys.toy_step(target)
    prompt = toys.prompts(1)[0]
    rounds = speculative_decode(step, prompt, 8, set())
    ids = prompt + rounds.token_ids
    right, twin = ids[len(prompt) + 1], 140
    head = target.head_VH.clone()
    head[right] *= 40  # the best by far, and its twin
    head[twin] = head[right]
    target._head = head
    with torch.no_grad():
        codebook = step.drafter.candidate_selector.successor_codebook
        codebook[twin] = codebook[right]
    assert is_near_tie(step, ids, len(prompt), 1, 8)
    target._head = head.clone()
    target._head[twin] = 0
    assert not is_near_tie(step, ids, len(prompt), 1, 8)


# --- the command ---


def test_evaluate_checks_an_export_against_its_own_record(overfitted, tmp_path):
    heldout = toys.write_jsonl(tmp_path / "heldout.jsonl", overfitted.rows)
    folder = shutil.copytree(overfitted.export, tmp_path / "export")
    command = (folder, "-c", overfitted.recipe, f"data.heldout=[{heldout}]", f"evaluate.max_new_tokens={BUDGET}")
    done = toys.call(evaluate.main, *command, f"output_dir={tmp_path}/good")
    assert done.code == 0, done.err
    assert "no train/serve gap" in done.out
    written = json.loads((tmp_path / "good" / "client.json").read_text())
    assert written["gap"] is False and written["tau"] == written["expected"] and written["prompts"] == 4

    nested("mask_token_id", 12)(folder)
    done = toys.call(evaluate.main, *command, f"output_dir={tmp_path}/bad")
    assert done.code == 1 and "failed: train/serve gap: z-lab's dflash" in done.err, done.err
    assert "mask_token_id: 12 against" in done.err and "rounds differ" in done.err
    assert json.loads((tmp_path / "bad" / "client.json").read_text())["gap"] is True
    done = toys.call(evaluate.main, *command, f"output_dir={tmp_path}/off", "evaluate.client=off")
    assert done.code == 0 and "client:" not in done.out


def test_evaluate_sees_weights_that_were_changed_after_the_export(overfitted, tmp_path):
    """They are decoded as they are; the hash in the record is what tells."""
    heldout = toys.write_jsonl(tmp_path / "heldout.jsonl", overfitted.rows)
    folder = shutil.copytree(overfitted.export, tmp_path / "export")
    FAULTS["taps in the wrong order"][0](folder)
    done = toys.call(evaluate.main, folder, "-c", overfitted.recipe, f"data.heldout=[{heldout}]",
                     "evaluate.max_new_tokens=8", f"output_dir={tmp_path}/out")  # fmt: skip
    assert done.code == 1 and "its weights were changed after the export" in done.err
