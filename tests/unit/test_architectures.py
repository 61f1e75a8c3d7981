"""Targets of other architectures, tiny and random: read as transformers itself computes them, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_train.config.schema import DrafterConfig, ObjectiveConfig, TargetConfig
from dflash_train.data.stream import assemble
from dflash_train.drafter.model import Drafter, initialise
from dflash_train.drafter.spec import resolve_spec
from dflash_train.generation.base import Request
from dflash_train.generation.padded import decode
from dflash_train.generation.single import plain_decode, speculative_decode
from dflash_train.method import DraftStep
from dflash_train.objective.loss import transform_logits
from dflash_train.target.hf import HFTarget, load_model
from dflash_train.target.info import read_target_info
from dflash_train.types import TokenizedExample

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 96, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
READ = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "mixtral": {"sliding_window": 6, "num_local_experts": 4},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 6, "head_dim": 8, **MOE},
    "phi3": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "deepseek_v3": MLA,
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def save(folder, kind: str, **more) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **more})).float().save_pretrained(folder)
    return str(folder)


def open_step(folder: str) -> DraftStep:
    info = read_target_info(folder)
    spec = resolve_spec(
        DrafterConfig(
            mask_token_id=5, num_hidden_layers=2, block_size=4, conv_group_size=8, selector_rank=8, selector_top_k=4
        ),
        info,
    )
    target = HFTarget(load_model(TargetConfig(path=folder), folder, torch.device("cpu")), info, spec.target_layer_ids)
    target.check_head(lambda x: transform_logits(x, spec.output_multiplier, spec.final_logit_softcapping))
    drafter = Drafter(spec)
    initialise(drafter, 0)
    return DraftStep(drafter, target, ObjectiveConfig(), dtype=torch.float32).eval()


def documents() -> list[TokenizedExample]:
    random = np.random.default_rng(0)
    return [
        TokenizedExample(
            id=str(n), domain="d", token_ids=random.integers(6, 96, n).astype(np.int32), supervised=np.ones(n, bool)
        )
        for n in (13, 17, 11)
    ]


@pytest.mark.parametrize("kind", READ)
def test_packed_and_single_features_and_decoding_equal_the_plain_model(kind, tmp_path):
    folder = save(tmp_path, kind, **READ[kind])
    step = open_step(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    rows, decay_S = documents(), np.array([0.0, 1, 1, 1])
    with torch.no_grad():
        states = [plain(torch.tensor(r.token_ids)[None].long(), output_hidden_states=True).hidden_states for r in rows]
    wanted = [torch.cat([s[i + 1][0] for i in step.target.layer_ids], -1) for s in states]
    packed = assemble([rows], 41, [np.array([0])], num_blocks=1, decay_S=decay_S)
    single = assemble([[r] for r in rows], 20, [np.array([0])] * 3, num_blocks=1, decay_S=decay_S)
    torch.testing.assert_close(step.target.read(packed).features_BTF[0], torch.cat(wanted), rtol=1e-4, atol=1e-3)
    for got, want in zip(step.target.read(single).features_BTF, wanted, strict=True):
        torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-3)

    prompts = [r.token_ids.tolist() for r in rows]
    answers = [plain_decode(step.target, p, 24, {2}).token_ids for p in prompts]
    assert speculative_decode(step, prompts[0], 24, {2}).token_ids == answers[0]
    model = load_model(TargetConfig(path=folder), folder, torch.device("cpu"))
    model.set_attn_implementation("grouped")
    requests = [Request(messages=[], prompt_ids=p, max_new_tokens=24, seed=0) for p in prompts]
    assert [decoded.token_ids for decoded in decode(model, requests, {2})] == answers


def test_attention_that_would_drop_a_soft_cap_is_refused(tmp_path):
    folder = save(tmp_path, "gemma2", head_dim=8, sliding_window=6, attn_logit_softcapping=1.0)
    with pytest.raises(ValueError, match="attn_logit_softcapping = 1.*attn_implementation=eager"):
        load_model(TargetConfig(path=folder), folder, torch.device("cpu"))
    load_model(TargetConfig(path=folder, attn_implementation="eager"), folder, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_another_layout_is_refused_by_name(kind, tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        open_step(save(tmp_path, kind))


def test_linear_attention_is_generated_and_set_back_after_a_refused_block(tmp_path):
    folder = save(tmp_path, "qwen3_next", **MOE, **LINEAR)
    step = open_step(folder)
    plain = plain_decode(step.target, [7, 8, 9], 12, set())
    assert speculative_decode(step, [7, 8, 9], 12, set()).token_ids == plain.token_ids
    requests = [Request(messages=[], prompt_ids=[7, 8, 9 + n], max_new_tokens=n, seed=0) for n in (2, 4, 9)]
    assert [len(decoded.token_ids) for decoded in decode(step.target.model, requests, set())] == [2, 4, 9]
