"""Continuous batching in slots against decoding one request at a time, on a CPU without graphs."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.padded import decode
from dflash_train.generation.slots import SlotCache, Slots, cache_bytes_per_token, difference_from_plain, why_no_slots
from dflash_train.target import varlen
from dflash_train.target.varlen import TOLERANCE, enable_varlen

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
}


def make_model(name: str) -> PreTrainedModel:
    config_class, model_class, more = MODELS[name]
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **more)).eval()


def make_requests(count: int) -> list[Request]:
    source = random.Random(0)
    return [
        Request(
            messages=[],
            prompt_ids=[source.randrange(97) for _ in range(source.randrange(1, 20))],
            max_new_tokens=source.randrange(1, 30),
            seed=i,
            temperature=source.choice([0.0, 0.8]),
            top_p=source.choice([1.0, 0.9]),
            top_k=source.choice([0, 20]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_slots_give_what_each_request_gives_alone(name: str) -> None:
    model, requests, stop = make_model(name), make_requests(25), {5, 6, 7}
    alone = [decode(model, [request], stop)[0] for request in requests]
    assert {decoded.finish_reason for decoded in alone} == {"stop", "length"}
    assert enable_varlen(model) is None
    slots = Slots(model, stop, slots=6, length=64, max_new=32)
    answers: dict[int, Decoded] = {}
    coming = list(enumerate(requests))
    while coming or slots.in_flight:
        while coming and slots.in_flight < 10:  # some arrive while others run
            slots.submit(*coming.pop(0))
        answers.update(slots.advance())
    assert [answers[key] for key in range(25)] == alone


@pytest.mark.parametrize("name", MODELS)
def test_the_check_before_slots_are_used_passes_and_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    assert enable_varlen(model) is None
    assert model.config._attn_implementation == "varlen"
    assert difference_from_plain(model, 97) == (pytest.approx(0, abs=1e-5), TOLERANCE)
    assert cache_bytes_per_token(model) == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, fp32
    monkeypatch.setattr(SlotCache, "update", lambda self, key, value, layer: forget(self, key, value, layer))
    assert difference_from_plain(model, 97)[0] > 0.05
    monkeypatch.setattr(varlen, "varlen", lambda q, *rest, **more: torch.zeros_like(q))
    model.set_attn_implementation("sdpa")
    assert "differ by" in str(enable_varlen(model))
    assert model.config._attn_implementation == "sdpa"


def test_rounding_of_many_layers_is_told_from_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 two right kernels differ by more than a bound that would be tight enough in float32; a wrong one by more than rounding."""
    model = make_model("qwen3").bfloat16()
    monkeypatch.setattr(varlen, "TOLERANCE", 0.0)
    assert why_no_slots(model) is None
    off, allowed = difference_from_plain(model, 97)
    assert 0 < off < allowed < 0.2
    monkeypatch.setattr(varlen, "varlen", lambda q, *rest, **more: torch.zeros_like(q))
    model.set_attn_implementation("sdpa")
    assert "differ by" in str(enable_varlen(model))


def forget(cache: SlotCache, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that loses what it is given."""
    empty = key.new_zeros(cache.size, key.shape[1], key.shape[3])
    return (key, value) if cache.prefill else (empty, empty)


def test_a_target_with_other_kinds_of_layer_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 4}, num_experts=0, linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    assert enable_varlen(model) == "this target has linear_attention layers"
    assert model.config._attn_implementation == "sdpa"
