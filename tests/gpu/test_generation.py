"""Fast generation on a CUDA machine against its slow twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import toys
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_train.config.schema import ObjectiveConfig
from dflash_train.data.stream import assemble
from dflash_train.drafter.decode import DraftSession, DraftSlots
from dflash_train.drafter.model import Drafter
from dflash_train.generation.base import Request
from dflash_train.generation.slots import PROMPT_SIZES, Slots, difference_from_plain
from dflash_train.generation.speculative import SpeculativeSlots
from dflash_train.kernels.sample import filter_kernel, filter_reference, kept_weights, sample_kernel, sample_reference
from dflash_train.method import DraftStep
from dflash_train.target.hf import HFTarget
from dflash_train.target.varlen import enable_varlen
from dflash_train.types import TokenizedExample
from dflash_train.walk import move

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def make_model(name: str, **more: object) -> torch.nn.Module:
    config_class, model_class = CLASSES[name]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=1000, hidden_size=192, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, **more,
    )  # fmt: skip
    return model_class(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 49152, 151936])
def test_the_sampling_kernel_draws_what_sorting_draws(dtype: torch.dtype, vocab: int):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = 256
    logits = (torch.randn(rows, vocab, device="cuda", generator=generator) * 3).to(dtype)
    choose = lambda *values: torch.tensor(values, device="cuda")[
        torch.randint(len(values), (rows,), device="cuda", generator=generator)
    ]  # noqa: E731
    settings = choose(0.0, 0.5, 0.7, 1.0), choose(1.0, 0.95, 0.8, 0.1), choose(0, 1, 20, 64)
    uniform = torch.rand(rows, device="cuda", generator=generator)
    expected, got = sample_reference(logits, uniform, *settings), sample_kernel(logits, uniform, *settings)
    assert (expected == got).float().mean() >= 0.99  # a draw within rounding of a boundary may go to the neighbour
    ours, theirs = filter_kernel(logits, *settings), filter_reference(logits, *settings)
    weights = [kept_weights(logits, least, top, settings[0]) for least, top, _ in (ours, theirs)]
    assert ((weights[0] > 0) == (weights[1] > 0)).all(1).float().mean() >= 0.99
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-3)


def test_the_sampling_kernel_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0], device="cuda").repeat(200_000, 1)
    uniform = torch.rand(len(logits), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ones = torch.ones(len(logits), device="cuda")
    drawn = sample_kernel(logits, uniform, 0.7 * ones, 0.9 * ones, 0 * ones.long())
    share = torch.bincount(drawn, minlength=5).double() / len(logits)
    weights = (logits[0].double() / 0.7).softmax(-1)
    weights[2:] = 0  # the first two reach 0.9
    torch.testing.assert_close(share, weights / weights.sum(), atol=0.005, rtol=0)


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 16})])
def test_slots_say_what_the_plain_forward_says(name: str, more: dict):
    model = make_model(name, **more)
    assert enable_varlen(model) is None
    assert difference_from_plain(model, 1000)[0] < 0.02
    source = random.Random(0)
    requests = [
        Request(messages=[], prompt_ids=[source.randrange(1000) for _ in range(source.randrange(1, 60))], max_new_tokens=source.randrange(1, 50), seed=i)
        for i in range(300)
    ]  # fmt: skip
    slots = Slots(model, {7, 8}, slots=96, length=128, max_new=50)
    for key, request in enumerate(requests):
        slots.submit(key, request)
    answers = {}
    while slots.in_flight:
        answers.update(slots.advance())
    assert len(answers) == len(requests)
    assert set(slots.graphs) == {(48, True), (96, True)}
    for key, (ids, reason, *_) in answers.items():
        prompt = requests[key].prompt_ids
        assert (ids[-1] in (7, 8)) == (reason == "stop") and len(ids) <= requests[key].max_new_tokens
        assert reason == "stop" or len(ids) == requests[key].max_new_tokens
        logits = model(input_ids=torch.tensor([prompt + ids], device="cuda"), use_cache=False).logits[0].float()
        at = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1, device="cuda")
        chosen = logits[at, torch.tensor(ids, device="cuda")]
        assert (logits[at].max(-1).values - chosen).max() < 0.05, key  # the best, or tied with it in 16 bits


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("mistral", {"sliding_window": 16})])
def test_packed_rows_read_by_flash_attention_equal_each_document_alone(name: str, more: dict):
    model = make_model(name, **more)
    assert enable_varlen(model) is None
    generator = np.random.default_rng(0)
    examples = [
        TokenizedExample(
            id=f"d{i}",
            domain="x",
            token_ids=generator.integers(9, 999, n).astype(np.int32),
            supervised=np.ones(n, bool),
        )
        for i, n in enumerate([50, 30, 40, 90, 20])
    ]
    none = np.empty(0, np.int64)
    rows = [examples[:3], examples[3:], []]
    batch = move(assemble(rows, 128, [none] * 3, num_blocks=1, decay_S=np.array([0.0, 1.0])), torch.device("cuda"))
    from dflash_train.target.hf import text_backbone

    out = text_backbone(model)(
        input_ids=batch.token_ids_BT.view(1, -1),
        position_ids=batch.position_ids_BT.view(1, -1),
        attention_mask=torch.empty((1, 1, 1, 1), dtype=torch.bool, device="cuda"),
        use_cache=False,
        cu_seq_lens_q=batch.starts_D,
        cu_seq_lens_k=batch.starts_D,
        max_length_q=batch.longest,
        max_length_k=batch.longest,
    )[0].view(3, 128, -1)
    for b, row in enumerate(rows):
        begin = 0
        for example in row:
            alone = text_backbone(model)(
                input_ids=torch.tensor(example.token_ids, device="cuda").long()[None], use_cache=False
            )[0][0].float()
            packed = out[b, begin : begin + len(alone)].float()
            assert (packed - alone).norm() / alone.norm() < 0.02
            begin += len(alone)


# --- speculative decoding -----------------------------------------------------------------------------------------


def make_step(window: int | None) -> DraftStep:
    model = make_model("qwen3")
    assert enable_varlen(model) is None
    info = toys.toy_info(hidden_size=192, vocab_size=1000, num_layers=3)
    spec = toys.toy_spec(
        hidden_size=192, vocab_size=1000, num_attention_heads=6, num_key_value_heads=2, head_dim=64, target_layer_ids=(0, 1),
        num_target_layers=3, sliding_window=window, mask_token_id=999,
    )  # fmt: skip
    drafter = toys.randomise(Drafter(spec), scale=0.05).cuda()
    return DraftStep(drafter, HFTarget(model, info, (0, 1)), ObjectiveConfig(), dtype=torch.bfloat16)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("window", [None, 24])
def test_batched_speculative_decoding_keeps_what_the_target_says(window: int | None, temperature: float):
    step, source = make_step(window), random.Random(0)
    prompts = [[source.randrange(1000) for _ in range(source.randrange(1, 60))] for _ in range(100)]
    requests = [
        Request(messages=[], prompt_ids=p, max_new_tokens=source.randrange(1, 50), seed=i, temperature=temperature)
        for i, p in enumerate(prompts)
    ]
    slots = SpeculativeSlots(step, {7, 8}, slots=64, length=128, max_new=50)
    slots.warm_up(sampled=temperature > 0)
    for key, request in enumerate(requests):
        slots.submit(key, request)
    answers = {}
    while slots.in_flight:
        answers.update(slots.advance())
    for key, (ids, reason, rounds, _) in answers.items():
        assert sum(rounds) == len(ids) - 1 and (ids[-1] in (7, 8)) == (reason == "stop")
        assert reason == "stop" or len(ids) == requests[key].max_new_tokens
        if temperature == 0:
            prompt = prompts[key]
            logits = step.target.model(input_ids=torch.tensor([prompt + ids], device="cuda"), use_cache=False).logits[0]
            at = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1, device="cuda")
            chosen = logits[at, torch.tensor(ids, device="cuda")].float()
            assert (logits[at].float().max(-1).values - chosen).max() < 0.05, key
    cost = slots.cost(sampled=temperature > 0)
    assert 0 < cost["draft_ms"] < cost["cycle_ms"]


@pytest.mark.parametrize("window", [None, 24])
def test_the_drafter_over_slots_proposes_what_it_proposes_alone(window: int | None):
    step = make_step(window)
    lengths, S = [40, 3, 64], 8
    features = [torch.randn(1, n, 2 * 192, device="cuda", dtype=torch.bfloat16) for n in lengths]
    drafts = DraftSlots(step.drafter, 4, 128, torch.bfloat16, torch.device("cuda"))
    begins = torch.tensor([256, 0, 128], device="cuda")
    ids = torch.randint(1000, (3, S), device="cuda")
    with torch.no_grad(), step.autocast():
        for begin, x in zip(begins, features, strict=True):
            at = torch.arange(x.shape[1], device="cuda")
            drafts.extend(x, at[None], begin + at)
        slots_N = torch.tensor([8, 8, 5], device="cuda")
        together = drafts.hidden(
            step.embed(ids).view(1, 3 * S, -1), begins, torch.tensor(lengths, device="cuda"), slots_N
        )
        for i, x in enumerate(features):
            session = DraftSession(step.drafter)
            session.extend(x)
            n = int(slots_N[i])
            alone = session.hidden(step.embed(ids[i : i + 1, :n]))[0].float()
            ours = together.view(3, S, -1)[i, :n].float()
            assert (ours - alone).norm() / alone.norm() < 0.06


@pytest.mark.parametrize("drafter", [True, False])
def test_slots_of_a_server_stream_cancel_and_mix_greedy_with_sampled_requests(drafter: bool):
    step, source = make_step(None), random.Random(1)
    live = {"slots": 12, "length": 128, "max_new": 60, "period": 1, "smallest": 1, "streaming": True}
    slots = SpeculativeSlots(step, {7}, **live) if drafter else Slots(step.target.model, {7}, **live)
    for sampled in (False, True):
        slots.warm_up(sampled)
    sizes = {12, 6, 3, 1}
    assert set(slots.graphs) == {
        (size, sampled) for size in sizes for sampled in ({False, True} if drafter else {True})
    }
    assert set(slots.prompt_graphs) == set(PROMPT_SIZES)
    prompts = [[source.randrange(1000) for _ in range(source.randrange(1, 60))] for _ in range(30)]
    for i, prompt in enumerate(prompts):
        temperature = 0.8 if i % 3 == 0 else 0.0
        slots.submit(
            i,
            Request(
                messages=[],
                prompt_ids=prompt,
                max_new_tokens=60,
                seed=i,
                temperature=temperature,
                ignore_eos=i % 2 == 0,
            ),
        )
    news, answers = {key: [] for key in range(30)}, {}
    while slots.in_flight:
        answers.update(slots.advance())
        for key, tokens in slots.take_news():
            if key == 1 and not news[1]:
                assert not slots.cancel(1) and slots.cancel(29)
            news[key] += tokens
    assert sorted(answers) == list(range(29)) and not news[29]
    assert len(answers[1].token_ids) < 60
    for key, answer in answers.items():
        ids = answer.token_ids
        assert news[key] == ids
        if key % 2 == 0:
            assert len(ids) == 60 and answer.finish_reason == "length"
        if key % 3:  # greedy, whatever ran beside it
            text = torch.tensor([prompts[key] + ids], device="cuda")
            logits = step.target.model(input_ids=text, use_cache=False).logits[0]
            at = torch.arange(len(prompts[key]) - 1, len(prompts[key]) + len(ids) - 1, device="cuda")
            chosen = logits[at, torch.tensor(ids, device="cuda")].float()
            assert (logits[at].float().max(-1).values - chosen).max() < 0.05, key
