"""Batched speculative decoding is decoding one prompt at a time; at a temperature the target's distribution stays what it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import toys
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from dflash_train import evaluate
from dflash_train.config.schema import EvaluateConfig
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.generation.base import Request
from dflash_train.generation.single import plain_decode, speculative_decode
from dflash_train.generation.speculative import SpeculativeSlots
from dflash_train.generation.verify import Draft, Sampling, verify
from dflash_train.kernels.sample import filter_reference, kept_weights
from dflash_train.target.hf import HFTarget
from dflash_train.target.varlen import enable_varlen
from dflash_train.types import Prompt

VARIANTS = {
    "full": {},
    "sliding": {"sliding_window": 9},
    "mixed": {"sliding_window": 9, "layer_types": (SLIDING, FULL)},
    "v1": toys.V1,
    "causal": {"is_causal": True},
    "transformed": {"final_logit_softcapping": 6.0, "output_multiplier": 0.3, "input_embedding_scale": 3.0},
}


def varlen_target(**model) -> HFTarget:
    target = copy.deepcopy(toys.toy_model(**model))
    assert enable_varlen(target) is None
    return HFTarget(target, toys.toy_info(), (1, 3))


def decode_all(slots: SpeculativeSlots, requests: list[Request]) -> list:
    for key, request in enumerate(requests):
        slots.submit(key, request)
    done = {}
    while slots.in_flight:
        done.update(slots.advance())
    return [done[key] for key in range(len(requests))]


@pytest.mark.parametrize("block_size", [8, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_slots_take_the_rounds_that_each_prompt_takes_alone(variant: str, block_size: int, half_trained):
    step = toys.toy_step(varlen_target(), **VARIANTS[variant])
    if variant == "full":
        step.drafter.load_state_dict(half_trained)
    prompts = [toys.prompts(1, length=3 + i, seed=i)[0] for i in range(7)]
    budgets = [1, 2, 9, 20, 28, 17, 28]
    stop = {plain_decode(step.target, prompts[i], 28, set()).token_ids[at] for i, at in ((3, 11), (4, 20), (6, 3))}
    requests = [Request(messages=[], prompt_ids=p, max_new_tokens=n, seed=0) for p, n in zip(prompts, budgets)]
    slots = SpeculativeSlots(step, stop, slots=3, length=40, max_new=28, block_size=block_size)
    found = decode_all(slots, requests)
    for prompt, budget, got in zip(prompts, budgets, found):
        alone = speculative_decode(step, prompt, budget, stop, block_size=block_size)
        assert (got.token_ids, list(got.rounds), list(got.accepted), got.finish_reason) == (
            alone.token_ids,
            alone.rounds,
            alone.accepted,
            alone.finish_reason,
        )
        assert got.token_ids == plain_decode(step.target, prompt, budget, stop).token_ids
    assert {got.finish_reason for got in found} == {"stop", "length"}


@pytest.fixture(scope="module")
def half_trained():
    rows = toys.greedy_rows(toys.toy_model(), toys.prompts(4), 28)
    step = toys.toy_step(toys.toy_target())
    examples = [toys.example_of(row, row["id"]) for row in rows]
    toys.train_steps(step, toys.stream_of(examples, num_anchors=27, micro_batch_size=4), 30, lr=3e-3, eps=1e-8)
    return step.drafter.state_dict()


def test_prompts_decoded_together_give_what_they_give_one_by_one(half_trained, monkeypatch):
    step = toys.toy_step(varlen_target())
    step.drafter.load_state_dict(half_trained)
    prompts = [Prompt(id=f"p{i}", domain="d", token_ids=toys.prompts(1, length=3 + i, seed=i)[0]) for i in range(5)]
    config = EvaluateConfig(max_new_tokens=20)
    monkeypatch.setattr(evaluate, "slots_that_fit", lambda model, length, draft: 2)
    together = evaluate._together(step, prompts, config, {7}, 8, True, None)
    assert together.together == 2
    assert together.results == evaluate._one_by_one(step, prompts, config, {7}, 8, True, None).results
    monkeypatch.setattr(evaluate, "slots_that_fit", lambda model, length, draft: 0)
    with pytest.raises(ValueError, match="evaluate.max_new_tokens = 20: the memory .* one sequence of 27 tokens"):
        evaluate._together(step, prompts, config, {7}, 8, True, None)


# --- at a temperature -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, 1.0, 0), Sampling(0.7, 0.9, 0), Sampling(1.3, 1.0, 5), Sampling(0.8, 0.8, 6)]
)
def test_the_token_after_an_anchor_has_the_targets_filtered_distribution(sampling: Sampling):
    """One drafted slot, many rounds: whatever q proposes, what is kept is distributed as p."""
    generator = torch.Generator().manual_seed(0)
    V, C, rounds = 12, 4, 200_000
    logits = torch.randn(1, 2, V, generator=generator) * 1.5
    q = torch.tensor([0.55, 0.25, 0.15, 0.05])
    candidates = logits[0, 0].sort().indices[[-2, -1, 5, 0]]  # some likely, some that p may filter out
    uniform = torch.rand(rounds, 3, generator=generator)
    drawn = torch.multinomial(q, rounds, replacement=True, generator=generator)
    draft = Draft(candidates[drawn][:, None], candidates.expand(rounds, 1, C), q.expand(rounds, 1, C))
    tokens, accepted = verify(logits.expand(rounds, 2, V), draft, torch.full((rounds,), 2), sampling, uniform)
    first = torch.bincount(tokens[:, 0], minlength=V).double() / rounds
    settings = [torch.tensor([value]) for value in sampling]
    least, top, total = filter_reference(logits[0, :1], *settings)
    p = (kept_weights(logits[0, :1], least, top, settings[0]) / total)[0].double()
    assert (first[p == 0] == 0).all()
    worst = ((first - p).abs() / (p * (1 - p) / rounds).sqrt().clamp_min(1e-9)).max()
    assert worst < 4.5, (first, p)  # standard errors
    # As often accepted as the two distributions overlap.
    overlap = torch.minimum(p[candidates], q.double()).sum()
    assert float(accepted.double().mean()) == pytest.approx(float(overlap), abs=0.006)
    second = tokens[accepted == 1][:, 1]
    share = torch.bincount(second, minlength=V).double() / len(second)
    least, top, total = filter_reference(logits[0, 1:], *settings)
    p = (kept_weights(logits[0, 1:], least, top, settings[0]) / total)[0].double()
    assert ((share - p).abs() / (p * (1 - p) / len(second)).sqrt().clamp_min(1e-9)).max() < 4.5


def test_a_slot_that_does_not_exist_is_never_kept():
    logits = torch.full((4, 3, 5), -9.0)
    logits[:, :, 2] = 9.0
    draft = Draft(torch.full((4, 2), 2), torch.full((4, 2, 1), 2), torch.ones(4, 2, 1))
    for sampling in (Sampling(), Sampling(0.5)):
        _, accepted = verify(logits, draft, torch.tensor([1, 2, 3, 3]), sampling, torch.full((4, 5), 0.5))
        assert accepted.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("batched", [False, True])
def test_sampled_answers_have_the_distribution_of_plain_sampling(batched: bool, half_trained):
    """Second and third answer tokens over many seeds, against the exact joint distribution of the target."""
    step = toys.toy_step(varlen_target() if batched else toys.toy_target())
    step.drafter.load_state_dict(half_trained)
    sampling = Sampling(0.25, 0.9, 0)
    prompt, count = toys.prompts(1)[0], 1500
    if batched:
        requests = [
            Request(
                messages=[], prompt_ids=prompt, max_new_tokens=3, seed=i, temperature=sampling.temperature, top_p=0.9
            )
            for i in range(count)
        ]
        slots = SpeculativeSlots(step, set(), slots=100, length=16, max_new=3)
        answers = [tuple(d.token_ids) for d in decode_all(slots, requests)]
    else:
        answers = [
            tuple(speculative_decode(step, prompt, 3, set(), sampling=sampling, seed=i).token_ids) for i in range(count)
        ]
    exact = exact_distribution(step.target, prompt, sampling, 3)
    assert set(answers) <= set(exact)
    observed = np.array([answers.count(a) for a in exact])
    expected = np.array(list(exact.values())) * count
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi2 = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(expected) - 1
    assert freedom >= 3
    assert chi2 < freedom + 4.5 * np.sqrt(2 * freedom), (chi2, freedom)


def exact_distribution(target: HFTarget, prompt: list[int], sampling: Sampling, length: int) -> dict[tuple, float]:
    """Probability of every answer of `length` tokens that the target can give."""
    found = {(): 1.0}
    settings = [torch.tensor([value]) for value in sampling]
    for _ in range(length):
        longer = {}
        for answer, probability in found.items():
            logits = target.model(input_ids=torch.tensor([prompt + list(answer)])).logits[0, -1:]
            least, top, total = filter_reference(logits, *settings)
            p = (kept_weights(logits, least, top, settings[0]) / total)[0]
            for token in p.nonzero()[:, 0].tolist():
                longer[(*answer, token)] = probability * float(p[token])
        found = longer
    return found


# --- a target whose cache cannot be cropped ----------------------------------------------------------------------


def test_a_hybrid_target_is_set_back_to_before_a_refused_block():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=toys.VOCAB, hidden_size=toys.HIDDEN, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=0, linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, initializer_range=0.2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval().requires_grad_(False)
    step = toys.toy_step(HFTarget(model, toys.toy_info(), (1, 3)))
    for prompt in toys.prompts(3):
        plain = plain_decode(step.target, prompt, 24, set())
        fast = speculative_decode(step, prompt, 24, set())
        assert fast.token_ids == plain.token_ids == toys.greedy(model, prompt, 24)
        assert sum(fast.rounds) == 23 and len(set(fast.token_ids)) > 5
    assert max(fast.rounds) < 8  # some were refused
