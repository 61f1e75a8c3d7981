"""Which kernel computes the draft's attention, and what a log says of it."""

from __future__ import annotations

import sys

import pytest
import torch
import toys
from gluon_on_cpu import interpreted

from dflash_train.build import mask_maker
from dflash_train.config.schema import Attention, EngineConfig
from dflash_train.drafter.layers import compiled
from dflash_train.drafter.mask import dense_mask, flex_mask, span_mask
from dflash_train.kernels import attention as kernels

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def chosen(device=GPU, dtype=torch.bfloat16, engine=None, **spec):
    return mask_maker(EngineConfig(**(engine or {})), device, dtype, toys.toy_spec(**{"head_dim": 128, **spec}))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(kernels, "is_hopper", lambda device: device.type == "cuda")
    with interpreted():
        yield


def test_a_hopper_gets_its_own_kernels_and_no_word(hopper, capsys):
    assert chosen() is compiled(span_mask) and chosen(engine={"compile": False}) is span_mask
    assert chosen(dtype=torch.float16, head_dim=64, block_size=64) is compiled(span_mask)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("given", "mask", "said"),
    [
        ({"dtype": torch.float32}, flex_mask, "flex attention and not our own: its kernels compute in 16 bits, not in float32"),
        ({"head_dim": 80}, flex_mask, "flex attention and not our own: its kernels know heads of 64 and 128 numbers, not of 80"),
        ({"block_size": 65}, flex_mask, "blocks of up to 64 slots, not of 65"),
        ({"engine": {"attention": Attention.flex}}, flex_mask, "flex attention and not our own: engine.attention = flex"),
        ({"engine": {"attention": Attention.dense}}, dense_mask, "dense attention and not our own: engine.attention = dense"),
    ],
)  # fmt: skip
def test_what_they_cannot_do_is_said(hopper, capsys, given, mask, said):
    assert chosen(**given) is mask
    assert said in capsys.readouterr().out


def test_another_gpu_and_an_old_triton_are_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert chosen() is flex_mask and "for Hopper (compute capability 9.0)" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delitem(sys.modules, "dflash_train.kernels.attention_gluon", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert chosen() is flex_mask and "it needs Gluon, which comes with Triton 3.6" in capsys.readouterr().out


def test_a_cpu_gets_dense_attention_and_no_word(capsys):
    assert chosen(CPU) is dense_mask and capsys.readouterr().out == ""
