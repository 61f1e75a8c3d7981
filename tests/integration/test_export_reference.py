"""An export loads completely in the reference implementation and speculates without changing the target's output."""

from __future__ import annotations

import pytest
import torch

from dflash_train.card import CardFacts
from dflash_train.check import check, main
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec, tensor_shapes
from dflash_train.export import write_export
from dflash_train.types import TargetInfo

reference = pytest.importorskip("dflash.model")
transformers = pytest.importorskip("transformers")

HIDDEN, VOCAB, LAYERS = 64, 160, 5


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


TARGET = TargetInfo(
    path="acme/tiny", revision=None, model_type="qwen3", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=1, eos_token_ids=[2], pad_token_id=0,
    output_multiplier=1.0, final_logit_softcapping=None, input_embedding_scale=1.0,
)  # fmt: skip


def drafter(*, window: int | None, two: bool) -> DrafterSpec:
    return DrafterSpec(
        block_size=8, mask_token_id=150, target_layer_ids=(0, 1, 3), num_hidden_layers=2, hidden_size=HIDDEN, vocab_size=VOCAB,
        intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=512, sliding_window=window, layer_types=(SLIDING if window else FULL, FULL), is_causal=False,
        conv_kernel_size=2 if two else 0, conv_group_size=16, selector_rank=8 if two else 0, selector_top_k=4,
        output_multiplier=1.0, final_logit_softcapping=None, input_embedding_scale=1.0, num_target_layers=LAYERS,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "two"), [(12, True), (None, True), (None, False)])
def test_reference_loads_and_speculates(tmp_path, target, dtype, window, two):
    spec = drafter(window=window, two=two)
    g = torch.Generator().manual_seed(1)
    state = {n: torch.randn(s, generator=g) * 0.15 + n.endswith("norm.weight") for n, s in tensor_shapes(spec).items()}
    card = CardFacts(name="acme/tiny-dflash2", base_model="acme/tiny", license="mit")
    folder = write_export(
        tmp_path / "out", state=state, spec=spec, target=TARGET, dtype=dtype, tokenizer_dir=None, card=card
    )
    assert check(folder, TARGET).faults == []

    cls = reference.DFlash2DraftModel if two else reference.DFlashDraftModel
    model, info = cls.from_pretrained(folder, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert (model.block_size, model.mask_token_id, tuple(model.target_layer_ids)) == (8, 150, (0, 1, 3))
    assert [layer.self_attn.sliding_window for layer in model.layers] == [window, None]
    assert not any(layer.self_attn.is_causal for layer in model.layers)
    own = model.state_dict()
    for name, tensor in state.items():
        key = name + ".weight" if name.endswith("_codebook") else name  # the reference's own name for a loaded codebook
        assert torch.equal(own[key], tensor.to(dtype)), name

    # The target stays fp32, so that greedy identity is exact; bf16 weights are what was exported, widened.
    prompt = torch.tensor([[5, 17, 99, 42, 7]])
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    spec_ids = model.float().spec_generate(target, prompt, max_new_tokens=40, stop_token_ids=[])
    assert torch.equal(spec_ids, plain)


def test_command_line_with_target(tmp_path, target, capsys):
    spec = drafter(window=12, two=True)
    target.save_pretrained(tmp_path / "target")
    state = {n: torch.ones(s) for n, s in tensor_shapes(spec).items()}
    card = CardFacts(name="tiny", base_model="acme/tiny", license="mit")
    folder = write_export(
        tmp_path / "out", state=state, spec=spec, target=TARGET, dtype=torch.float32, tokenizer_dir=None, card=card
    )
    assert main([str(folder), "--target", str(tmp_path / "target")]) == 0
    assert "No faults." in capsys.readouterr().out
