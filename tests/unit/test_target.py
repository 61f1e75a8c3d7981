"""What is captured from the target, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import toys

from dflash_train.config.schema import TargetConfig
from dflash_train.objective.loss import transform_logits
from dflash_train.target.base import check_features
from dflash_train.target.hf import HFTarget
from dflash_train.target.info import read_target_info
from dflash_train.target.varlen import enable_varlen
from dflash_train.types import TargetFeatures


def loaded(folder, layer_ids=(1, 3)):
    return HFTarget.load(TargetConfig(path=str(folder)), str(folder), layer_ids, torch.device("cpu"))


def test_features_are_outputs_of_0_based_layers_at_their_own_positions():
    target = HFTarget(toys.PositionModel(), toys.toy_info(), (1, 3))
    rows = [toys.document(5), toys.document(9)]
    together = target.read(toys.batch_of([[r] for r in rows], [[], []], block_size=4)).features_BTF
    assert together[0, 4, [0, toys.HIDDEN]].tolist() == [104, 304]
    assert together[1, 8, [0, toys.HIDDEN]].tolist() == [108, 308]
    for b, row in enumerate(rows):
        alone = target.read(toys.batch_of([[row]], [[]], block_size=4)).features_BTF
        assert torch.equal(together[b, : len(row.token_ids)], alone[0])


def test_features_equal_the_models_hidden_states_before_the_final_norm():
    target = toys.toy_target((0, 2, 3))
    batch = toys.batch_of([[toys.document(11)]], [[]], block_size=4)
    states = toys.toy_model()(input_ids=batch.token_ids_BT, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in (0, 2, 3)], -1)
    torch.testing.assert_close(target.read(batch).features_BTF, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_documents_side_by_side_are_read_as_with_a_dense_mask(window):
    model = copy.deepcopy(toys.toy_model(window=window))
    info = toys.toy_info()
    batch = toys.batch_of(
        [[toys.document(11), toys.document(5)], [toys.document(16)], []], [[], [], []], block_size=4, length=18
    )
    dense = HFTarget(model, info, (1, 3)).read(batch).features_BTF
    assert enable_varlen(model) is None
    packed = HFTarget(model, info, (1, 3)).read(batch).features_BTF
    assert batch.starts_D.tolist() == [0, 11, 16, 18, 34, 36, 54] and batch.longest == 18
    real = batch.document_ids_BT >= 0
    torch.testing.assert_close(packed[real], dense[real], rtol=1e-3, atol=1e-4)


def test_decoding_captures_the_same_features_as_reading():
    from transformers import DynamicCache

    target = toys.toy_target()
    batch = toys.batch_of([[toys.document(11)]], [[]], block_size=4)
    cache = DynamicCache(config=target.model.config)
    parts = [target.step(ids, cache)[1].features_BTF for ids in batch.token_ids_BT.split([6, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), target.read(batch).features_BTF, rtol=1e-4, atol=1e-4)


def test_a_tied_head_is_the_embedding(tied_dir):
    target = loaded(tied_dir)
    target.check_head(lambda x: x)
    hidden = torch.randn(3, toys.HIDDEN)
    torch.testing.assert_close(hidden @ target.head_VH.T, hidden @ target.model.model.embed_tokens.weight.T)
    assert target.info.tie_word_embeddings


def test_an_untied_head_is_its_own(target_dir):
    target = loaded(target_dir)
    target.check_head(lambda x: x)
    assert not torch.equal(target.head_VH, target.embed(torch.arange(toys.VOCAB)))
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize(
    "transform", [lambda x: transform_logits(x, 1.0, 5.0), lambda x: transform_logits(x, 0.5, None)]
)
def test_a_transform_that_the_model_does_not_apply_is_refused(transform):
    with pytest.raises(
        ValueError, match=r"differs from the model's own logits.*output_multiplier and drafter.final_logit_softcapping"
    ):
        toys.toy_target().check_head(transform)


def test_a_random_head_is_refused():
    target = toys.toy_target()
    target._head = torch.randn_like(target.head_VH)
    with pytest.raises(ValueError, match="differs from the model's own logits"):
        target.check_head(lambda x: x)


def test_dead_captures_are_refused_by_name():
    batch = toys.batch_of([[toys.document(9)]], [[]], block_size=4)
    x = toys.random_features(batch).features_BTF
    check = lambda features: check_features(TargetFeatures(features), batch, (1, 3), toys.HIDDEN)
    check(x)
    zero, same, infinite = x.clone(), x.clone(), x.clone()
    zero[..., toys.HIDDEN :] = 0
    same[..., : toys.HIDDEN] = x[:, :1, : toys.HIDDEN]
    infinite[0, 2, 3] = float("nan")
    for features, text in [
        (zero, "layer 3: all zero"),
        (x[..., : toys.HIDDEN], r"expected 2 layers, got 1 \(missing 3\)"),
        (x[:, :8], "hidden rows 8 ≠ tokens 9"),
        (same, "layer 1: the same for all 9 tokens"),
        (infinite, "layer 1: not finite"),
        (x[..., :-1], "width 127 of 128"),
    ]:
        with pytest.raises(ValueError, match=text):
            check(features)


def test_padding_is_not_checked():
    batch = toys.batch_of([[toys.document(9)]], [[]], block_size=4, length=14)
    x = toys.random_features(batch).features_BTF
    x[:, 9:] = float("nan")
    check_features(TargetFeatures(x), batch, (1, 3), toys.HIDDEN)


def test_the_targets_facts_come_from_its_config(target_dir, tmp_path):
    info = read_target_info(str(target_dir))
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.head_dim, info.rope_theta) == (
        5,
        64,
        160,
        16,
        10000.0,
    )
    assert (info.eos_token_ids, info.bos_token_id, info.pad_token_id) == ([2], 1, 0)
    with pytest.raises(ValueError, match=r"no usable config.json"):
        read_target_info(str(tmp_path))


def test_files_and_model_name_the_same_tokens_that_end_an_answer(tmp_path):
    """`data.chat.read_stop_ids` reads files where regeneration and masks have no model; `hf.stop_ids` asks the model that decodes."""
    import json

    import torch

    from dflash_train.config.schema import TargetConfig
    from dflash_train.data.chat import load_tokenizer, read_stop_ids
    from dflash_train.target import hf
    from dflash_train.target.info import read_target_info

    folder = toys.save_toy(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    for in_config, in_generation in [
        (2, None),
        (4, None),
        ([2, 4], None),
        (2, {"eos_token_id": 4}),
        (2, {"eos_token_id": [4, 7]}),
        (4, {"pad_token_id": 0}),
        (None, {"eos_token_id": None}),
        ("left out", None),
        ("left out", {"eos_token_id": 4}),
    ]:
        kept = {k: v for k, v in config.items() if k != "eos_token_id"}
        (folder / "config.json").write_text(
            json.dumps(kept if in_config == "left out" else kept | {"eos_token_id": in_config})
        )
        generation.unlink(missing_ok=True)
        if in_generation is not None:
            generation.write_text(json.dumps(in_generation))
        tokenizer = load_tokenizer(str(folder))
        model = hf.load_model(TargetConfig(path=str(folder)), str(folder), torch.device("cpu"))
        by_model = hf.stop_ids(model, tokenizer, read_target_info(str(folder)).eos_token_ids)
        assert set(read_stop_ids(str(folder), None, tokenizer)) == set(by_model), (in_config, in_generation)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("in_generation", [None, {}, {"eos_token_id": [7]}])
@pytest.mark.parametrize("outside", ["left out", None, 4])
@pytest.mark.parametrize("inside", ["left out", None, 5, [5, 6]])
def test_they_do_where_the_language_model_is_a_part(kind, in_generation, outside, inside, tmp_path):
    """What the model of such a config takes differs from kind to kind."""
    import json
    from types import SimpleNamespace

    from transformers import AutoConfig, GenerationConfig

    from dflash_train.data.chat import read_stop_ids
    from dflash_train.target import hf

    content = AutoConfig.for_model(kind).to_dict()
    for part, eos in ((content, outside), (content["text_config"], inside)):
        part.pop("eos_token_id", None)
        part |= {} if eos == "left out" else {"eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(content))
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), toys.toy_tokenizer()
    has = GenerationConfig.from_model_config(config) if in_generation is None else GenerationConfig.from_pretrained(tmp_path)  # fmt: skip
    own = config.get_text_config().eos_token_id
    by_model = hf.stop_ids(
        SimpleNamespace(generation_config=has), tokenizer, [] if own is None else [own] if isinstance(own, int) else own
    )
    assert set(read_stop_ids(str(tmp_path), None, tokenizer)) == by_model
