"""Cached decoding is the training forward; speculative decoding is plain decoding in the walk's rounds."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import toys

from dflash_train.acceptance import repeated_tokens
from dflash_train.config.schema import EvaluateConfig
from dflash_train.drafter.decode import DraftSession
from dflash_train.drafter.model import initialise
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.evaluate import decode_report, passed, report_text
from dflash_train.generation.single import GREEDY, _propose, plain_decode, speculative_decode
from dflash_train.objective.loss import transform_logits
from dflash_train.target.hf import HFTarget
from dflash_train.types import Prompt
from dflash_train.walk import accepted_at_anchors, teacher_forced, walk_rounds

VARIANTS = {
    "full": {},
    "sliding": {"sliding_window": 9},
    "mixed": {"sliding_window": 9, "layer_types": (SLIDING, FULL)},
    "v1": toys.V1,
    "v1_sliding": {**toys.V1, "sliding_window": 12},
    "causal": {"is_causal": True},
    "three_taps": {"conv_kernel_size": 3},
    "transformed": {"final_logit_softcapping": 6.0, "output_multiplier": 0.3, "input_embedding_scale": 3.0},
}


@pytest.mark.parametrize("slots", [8, 5, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_proposals_are_those_of_the_training_forward(variant, slots):
    step = toys.toy_step(**VARIANTS[variant])
    example = toys.document(40, slice(6, None))
    anchors = np.array([6, 9, 17, 30])
    batch = toys.batch_of([[example]], [anchors], block_size=8, slots=[np.full(4, slots)])
    features = toys.random_features(batch)
    hidden = toys.slot_hidden(step, batch, features)[0, :, :slots]
    session, spec, head = DraftSession(step.drafter), step.drafter.spec, step.target.head_VH
    for n, anchor in enumerate(anchors):
        session.extend(features.features_BTF[:, session.length : anchor])
        token = int(example.token_ids[anchor])
        ids = torch.tensor([[token] + [toys.MASK] * (slots - 1)])
        torch.testing.assert_close(session.hidden(step.embed(ids))[0], hidden[n], rtol=1e-4, atol=1e-4)
        logits = transform_logits(hidden[n, 1:] @ head.T, spec.output_multiplier, spec.final_logit_softcapping)
        expected = logits.argmax(-1)
        if step.drafter.candidate_selector is not None:
            unary, candidates = logits.topk(spec.selector_top_k)
            expected = step.drafter.candidate_selector.walk(
                hidden[n, None, 1:], unary[None], candidates[None], torch.tensor([token])
            )[0][0]
        draft = _propose(step, session, token, slots, GREEDY, torch.zeros(1, slots))
        assert draft.token_ids_NS[0].tolist() == expected.tolist()


@torch.no_grad()
def test_the_walk_is_a_greedy_path_through_the_pair_scores():
    step = toys.toy_step()
    selector = step.drafter.candidate_selector
    g = torch.Generator().manual_seed(0)
    hidden, unary = torch.randn(1, 5, toys.HIDDEN, generator=g), torch.randn(1, 5, 8, generator=g)
    candidates = torch.stack([torch.randperm(toys.VOCAB, generator=g)[:8] for _ in range(5)])[None]
    previous, path = 17, []
    for t in range(5):
        gate = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[0, t])
        scores = [float(unary[0, t, c] + gate @ selector.successor_codebook[candidates[0, t, c]]) for c in range(8)]
        previous = int(candidates[0, t, int(np.argmax(scores))])
        path.append(previous)
    assert selector.walk(hidden, unary, candidates, torch.tensor([17]))[0][0].tolist() == path
    assert path != candidates[0].gather(1, unary[0].argmax(-1, keepdim=True))[:, 0].tolist()


# --- speculative decoding -----------------------------------------------------------------------------------


def walk_of(step, prompt: list[int], answer: list[int], reason: str) -> list[int]:
    example = toys.example_of({"prompt_ids": prompt, "response_ids": answer, "finish_reason": reason})
    anchors, path, _ = accepted_at_anchors(step, example, blocks_at_once=7)
    return walk_rounds(anchors, path)


@pytest.mark.parametrize("variant", ["full", "mixed", "v1"])
def test_a_random_drafter_changes_no_token(variant):
    step = toys.toy_step(toys.toy_target(), **VARIANTS[variant])
    for prompt in toys.prompts(3):
        plain = plain_decode(step.target, prompt, 20, set())
        fast = speculative_decode(step, prompt, 20, set())
        assert plain.token_ids == toys.greedy(toys.toy_model(), prompt, 20)
        assert fast.token_ids == plain.token_ids
        assert (len(plain.token_ids), plain.finish_reason, fast.finish_reason) == (20, "length", "length")
        assert sum(fast.rounds) == 19  # the prefill gives the first token
        assert fast.rounds == walk_of(step, prompt, fast.token_ids, "length")


def test_a_target_with_sliding_layers_decodes_past_its_window():
    step = toys.toy_step(toys.toy_target(window=8))
    prompt = toys.prompts(1, length=12)[0]
    plain = plain_decode(step.target, prompt, 20, set())
    assert plain.token_ids == toys.greedy(toys.toy_model(window=8), prompt, 20)
    assert speculative_decode(step, prompt, 20, set()).token_ids == plain.token_ids


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 20, 28])
def test_an_overfitted_drafter_decodes_in_the_rounds_of_the_walk_up_to_any_budget(overfitted, budget):
    accepted = 0
    for row in overfitted.rows:
        fast = speculative_decode(overfitted.step, row["prompt_ids"], budget, set())
        assert fast.token_ids == row["response_ids"][:budget]
        assert fast.rounds == walk_of(overfitted.step, row["prompt_ids"], fast.token_ids, "length")
        accepted += sum(fast.rounds) - len(fast.rounds)
    assert budget < 7 or accepted > 0.5 * 4 * (budget - 1) * 7 / 8


def stops(rows):
    """(prompt, answer up to a token that did not occur before, that token) of each row, cut in mid-answer."""
    for row in rows:
        answer = row["response_ids"]
        fresh = [i for i in range(5, len(answer)) if answer[i] not in answer[:i]]
        if fresh:
            at = fresh[len(fresh) // 2]
            yield row["prompt_ids"], answer[: at + 1], answer[at]


def test_a_stop_token_ends_the_answer_in_the_rounds_of_the_walk(overfitted):
    found = list(stops(overfitted.rows))
    assert len(found) >= 2
    for prompt, answer, stop in found:
        fast = speculative_decode(overfitted.step, prompt, 200, {stop})
        assert (fast.token_ids, fast.finish_reason) == (answer, "stop")
        assert plain_decode(overfitted.step.target, prompt, 200, {stop}).token_ids == answer
        assert fast.rounds == walk_of(overfitted.step, prompt, answer, "stop")


def test_a_stop_token_as_first_answer_token_takes_no_round(overfitted):
    row = overfitted.rows[0]
    first = row["response_ids"][0]
    fast = speculative_decode(overfitted.step, row["prompt_ids"], 10, {first})
    assert (fast.token_ids, fast.rounds, fast.finish_reason) == ([first], [], "stop")
    report = decode_report(
        overfitted.step,
        [Prompt(id="x", domain="d", token_ids=row["prompt_ids"])],
        EvaluateConfig(max_new_tokens=10),
        {first},
    )
    assert (report["identical"], report["tau_all"]["rounds"], report["walk_agrees"]) == (1, 0, 1.0)


@pytest.fixture(scope="module")
def half_trained():
    """(step, rows): a drafter that knows some of the text; its proposals depend on the block's length."""
    rows = toys.greedy_rows(toys.toy_model(), toys.prompts(4), 28)
    step = toys.toy_step(toys.toy_target(), mask_token_id=150)
    initialise(step.drafter, 0)
    examples = [toys.example_of(row, row["id"]) for row in rows]
    toys.train_steps(step, toys.stream_of(examples, num_anchors=27, micro_batch_size=4), 30, lr=3e-3, eps=1e-8)
    return step, rows


@pytest.mark.parametrize("spare", [0, 1, 20])
def test_the_report_finds_walk_and_decoding_in_agreement_where_a_stop_token_comes_close_to_the_budget(
    half_trained, spare
):
    step, rows = half_trained
    for row in rows:
        answer = row["response_ids"]
        for at in [i for i in range(5, 16) if answer[i] not in answer[:i]]:
            config = EvaluateConfig(max_new_tokens=at + 1 + spare)
            report = decode_report(
                step, [Prompt(id="x", domain="d", token_ids=row["prompt_ids"])], config, {answer[at]}
            )
            assert report["lossless"]
            assert report["walk_agrees"] == 1.0 and report["walk_tau"].items() <= report["tau_all"].items()


def test_the_report_counts_rounds_and_tokens(overfitted):
    asked = [Prompt(id=str(i), domain="ab"[i % 2], token_ids=r["prompt_ids"]) for i, r in enumerate(overfitted.rows)]
    report = decode_report(overfitted.step, asked, EvaluateConfig(max_new_tokens=28), set())
    assert (report["prompts"], report["identical"], report["different"], report["walk_agrees"]) == (4, 4, 0, 1.0)
    assert report["tau_all"]["tokens"] == 4 * 27
    assert report["tau_all"]["rounds"] == sum(t["rounds"] for t in report["tau"].values())
    assert report["tau_all"]["value"] == pytest.approx(4 * 27 / report["tau_all"]["rounds"], abs=1e-4)
    assert report["tau_all"]["value"] > 4
    assert report["walk_tau"].items() <= report["tau_all"].items()


def test_decoding_that_parts_from_the_walk_is_a_train_serve_gap(overfitted, monkeypatch):
    asked = [Prompt(id=f"r{i}", domain="a", token_ids=r["prompt_ids"]) for i, r in enumerate(overfitted.rows[:2])]

    def report():
        return decode_report(overfitted.step, asked, EvaluateConfig(max_new_tokens=20), set())

    good = report()
    assert not good["train_serve_gap"] and passed(good) and "gap" not in report_text(good)
    extend = DraftSession.extend
    monkeypatch.setattr(DraftSession, "extend", lambda self, features: extend(self, torch.ones_like(features)))
    bad = report()
    assert bad["lossless"] and bad["train_serve_gap"] and not passed(bad)
    assert bad["parted_ids"] == ["r0", "r1"] and "train/serve gap: decoding took" in report_text(bad)
    # In 16 bits rounding parts single prompts; what counts is the pooled tau.
    monkeypatch.setattr(overfitted.step, "dtype", torch.bfloat16)
    bad = report()
    assert bad["train_serve_gap"] and "in 16 bits the two taus may differ by 3%" in report_text(bad)
    monkeypatch.setattr(DraftSession, "extend", extend)
    assert not report()["train_serve_gap"]


def test_shorter_blocks_than_trained_change_no_token(overfitted):
    row = overfitted.rows[0]
    for block_size in (2, 4):
        fast = speculative_decode(overfitted.step, row["prompt_ids"], 28, set(), block_size=block_size)
        assert fast.token_ids == row["response_ids"]
        assert max(fast.rounds) <= block_size


def test_teacher_forced_tables_pool_rounds_over_domains(overfitted):
    examples = [replace(toys.example_of(row), domain="ab"[i % 2]) for i, row in enumerate(overfitted.rows)]
    tables = teacher_forced(overfitted.step, examples)
    walks = [walk_of(overfitted.step, r["prompt_ids"], r["response_ids"], "length") for r in overfitted.rows]
    assert tables["walk_tau"]["all"]["rounds"] == sum(map(len, walks))
    assert tables["recall"]["1"] > 0.99  # it knows its rows by heart
    assert tables["walk_tau"]["all"]["tokens"] == sum(map(sum, walks)) == 4 * 27
    assert tables["accept_len"]["all"]["rounds"] == 4 * 27  # one block per legal anchor
    assert tables["walk_tau"]["a"]["tokens"] + tables["walk_tau"]["b"]["tokens"] == 4 * 27


def test_walk_rounds_count_the_bonus_token_and_end_with_the_text():
    anchors = np.arange(10, 19)  # an answer at 10..19
    accepted = np.array([2, 9, 9, 0, 7, 9, 9, 9, 9])
    assert walk_rounds(anchors, accepted) == [3, 1, 5]  # 10 -> 13 -> 14 -> 19, where 7 + 1 would pass the end
    two = np.concatenate([np.arange(3, 5), np.arange(10, 12)])
    assert walk_rounds(two, np.array([7, 7, 0, 0])) == [2, 1, 1]
    assert walk_rounds(anchors[:0], accepted[:0]) == []


def test_a_target_that_repeats_a_token_for_ever_shows_as_repetition_beside_its_tau():
    """All its embeddings lean the way in which the head sees one token, so a drafter learns to copy it at once."""
    model = copy.deepcopy(toys.toy_model())
    lean = torch.nn.functional.normalize(torch.randn(toys.HIDDEN, generator=torch.Generator().manual_seed(1)), dim=0)
    model.model.norm.weight.fill_(1.0)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight += 5 * lean
    model.lm_head.weight[33] = 20 * lean
    rows = toys.greedy_rows(model, toys.prompts(4), 20)
    assert all(row["response_ids"] == [33] * 20 for row in rows)
    step = toys.toy_step(HFTarget(model, toys.toy_info(), (1, 3)), block_size=4)
    initialise(step.drafter, 0)
    toys.train_steps(step, toys.stream_of([toys.example_of(r, r["id"]) for r in rows], block_size=4), 20, lr=1e-2)
    asked = [Prompt(id=str(i), domain="a", token_ids=p) for i, p in enumerate(toys.prompts(3, seed=5))]
    report = decode_report(step, asked, EvaluateConfig(max_new_tokens=22), set())
    assert passed(report) and report["tau_all"]["value"] > 3
    assert (report["repetition"]["share"], report["repetition"]["looping"]) == (1.0, 3)
    text = report_text(report)
    assert "repetition: 100.0% of the answer tokens" in text and "3 of 3 outputs loop; tau without them -" in text


def test_an_answer_that_repeats_for_ever_is_all_repetition():
    assert repeated_tokens([7] * 24) == 24
    assert repeated_tokens([1, 2, 3] * 8) == 24
    assert repeated_tokens([*range(100), *range(8), 200]) == 16  # both occurrences
    assert repeated_tokens(list(range(24))) == repeated_tokens([7] * 8) == repeated_tokens([]) == 0
