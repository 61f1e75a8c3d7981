"""A target on a device of its own."""

from __future__ import annotations

import pytest
import torch
import toys

from dflash_train import ranks
from dflash_train.config.load import load_recipe
from dflash_train.method import DraftStep
from dflash_train.target.elsewhere import Elsewhere, place_of_its_own
from dflash_train.target.varlen import enable_varlen

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_it_reads_embeds_and_scores_as_the_target_itself(tied):
    target = toys.HFTarget(toys.toy_model(tied=tied), toys.toy_info(), (1, 3))
    away = Elsewhere(target, CPU)
    batch = toys.batch_of([[toys.document(20, slice(4, None), name="a", seed=1)]], [[6, 9]], block_size=8, length=24)
    before = batch.token_ids_BT
    assert torch.equal(away.read(batch).features_BTF, target.read(batch).features_BTF)
    assert batch.token_ids_BT is before, "the drafter's batch was moved"
    ids = torch.arange(9)
    assert torch.equal(away.embed(ids), target.embed(ids)) and torch.equal(away.head_VH, target.head_VH)
    assert (away.info, away.dense, away.model) == (target.info, target.dense, target.model)
    step = toys.toy_step(target)
    apart = DraftStep(step.drafter, away, step.objective, dtype=torch.float32)
    weight = toys.weight_of(batch)
    losses = [s(batch, s.target.read(batch), weight).loss for s in (step, apart)]
    assert float(losses[0]) == float(losses[1]) > 0
    assert apart.together().target is target and step.together().target is target


def test_what_was_compiled_where_it_was_is_left_there(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    model = toys.toy_model()
    assert enable_varlen(model) is None
    away = Elsewhere(toys.HFTarget(model, toys.toy_info(), (1, 3)), CPU)
    batch = toys.batch_of([[toys.document(20)]], [[]], block_size=4, length=20)
    features = away.read(batch).features_BTF
    away.there.compile(20, record=False)
    away.there._recorder = lambda batch: pytest.fail("read through a graph of the other GPU")
    assert torch.equal(away.come().read(batch).features_BTF, features)


def test_where_it_can_be():
    assert place_of_its_own(None, CPU, 4) == CPU == place_of_its_own("cpu", CPU, 1)
    for name, world_size, said in (
        ("cuda:97", 1, r"target.device = cuda:97: this process sees \d+ GPUs"),
        ("cpu", 2, "target.device = cpu: 2 processes would share it"),
        ("gpu one", 1, "target.device = gpu one: .*; write cuda:1, or leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            place_of_its_own(name, CPU, world_size)


def test_decoding_while_training_is_refused():
    with pytest.raises(ValueError, match="target.device = cuda:1: decoding while training wants"):
        load_recipe("demo", ["target.device=cuda:1", "train.decode_every_steps=10"])


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ranks.device() == ranks.device("cuda") == torch.device("cuda", 1)
    assert ranks.device("cuda:0") == torch.device("cuda", 0) and ranks.device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranks.device() == CPU
