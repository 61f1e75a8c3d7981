"""Linear layers of the frozen target: joined, and in 8 bits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toys
from torch import nn

from dflash_train.config.schema import Precision, TargetConfig
from dflash_train.kernels.swiglu import LARGEST, quantise
from dflash_train.target.hf import HFTarget
from dflash_train.target.linear import Float8GatedMLP, Float8Linear, Joined, join_linears
from dflash_train.target.recorded import Documents, compiled_layers, documents_of, watch
from dflash_train.target.varlen import documents_attention, enable_varlen


def model():
    return copy.deepcopy(toys.toy_model())


def batch():
    rows = [[toys.document(11), toys.document(5, seed=1)], [toys.document(16, seed=2)]]
    return toys.batch_of(rows, [[], []], block_size=4, length=18)


def test_joined_layers_compute_what_they_computed_apart():
    plain, joined = model(), model()
    join_linears(joined.model.layers, eight_bits=False)
    ids = torch.arange(12, 40)[None]
    torch.testing.assert_close(joined(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert sum(isinstance(m, Joined) for m in joined.modules()) == 2 * toys.LAYERS
    assert sum(p.numel() for p in joined.parameters()) == sum(p.numel() for p in plain.parameters())
    kept = [m for m in joined.modules() if isinstance(m, Joined)]
    assert all(m._input is None and not m._outputs for m in kept), "outputs are held after their last use"


def test_joined_layers_decode_over_a_cache():
    joined = model()
    join_linears(joined.model.layers, eight_bits=False)
    prompt = [12, 40, 33]
    assert toys.greedy(joined, prompt, 6) == toys.greedy(toys.toy_model(), prompt, 6)


def test_layers_with_a_bias_are_joined_with_it_and_a_mixture_is_left_alone():
    class Attention(nn.Module):
        def __init__(self, biases):
            super().__init__()
            for name, bias in zip(("q_proj", "k_proj", "v_proj"), biases, strict=True):
                setattr(self, name, nn.Linear(8, 6, bias=bias))

        def forward(self, x):
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    x = torch.randn(5, 8)
    for biases, expected in (((True, True, True), 1), ((True, False, True), 0)):
        layers = nn.ModuleList([Attention(biases)])
        before = layers[0](x)
        join_linears(layers, eight_bits=False)
        torch.testing.assert_close(layers[0](x), before)
        assert sum(isinstance(m, Joined) for m in layers.modules()) == expected


def test_eight_bits_keep_three_of_mantissa_per_row():
    x = torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None]
    eight, scale = quantise(x)
    assert eight.dtype == torch.float8_e4m3fn and eight.float().isfinite().all()
    assert (eight.float().abs().amax(-1) == LARGEST).all()
    back = eight.float() * scale
    assert ((back - x).abs() <= x.abs() / 16 + scale * 2.0**-10).all()
    assert quantise(torch.zeros(1, 8))[0].float().eq(0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_an_eight_bit_layer_is_the_product_of_what_was_kept(bias):
    plain = nn.Linear(64, 48, bias=bias)
    layer = Float8Linear(plain.weight.data, plain.bias.data if bias else None)
    x = torch.randn(2, 5, 64)
    xq, xs = quantise(x.flatten(0, 1))
    exact = (xq.float() * xs) @ (layer.weight.float() * layer.scale).T + (plain.bias.data if bias else 0)
    torch.testing.assert_close(layer(x).flatten(0, 1), exact, rtol=1e-5, atol=1e-5)
    assert float((layer(x) - plain(x)).norm() / plain(x).norm()) < 0.08


def test_the_targets_precision_fp8_keeps_embedding_and_head():
    config = TargetConfig(path="toy", precision=Precision.fp8)
    target = HFTarget.over(model(), config, toys.toy_info(), (1, 3))
    exact = toys.toy_target().read(batch()).features_BTF
    near = target.read(batch()).features_BTF
    assert 1e-3 < float((near - exact).norm() / exact.norm()) < 0.3  # the toy's weights are ten times the usual
    assert target.head_VH.dtype == target.embed(torch.arange(3)).dtype == torch.float32
    assert not any(type(m) is nn.Linear for layer in target.backbone.layers for m in layer.modules())
    target.check_head(lambda x: x)


def test_an_eight_bit_mlp_is_made_of_one_that_computes_the_same_and_of_no_other():
    m = model()
    before = copy.deepcopy(m.model.layers[0].mlp)
    join_linears(m.model.layers, eight_bits=True)
    mlp = m.model.layers[0].mlp
    assert all(type(layer.mlp) is Float8GatedMLP for layer in m.model.layers)
    x = torch.randn(2, 5, toys.HIDDEN)
    assert mlp(x).shape == x.shape
    assert float((mlp(x) - before(x)).norm() / before(x).norm()) < 0.1
    other = model()
    for layer in other.model.layers:
        layer.mlp.act_fn = nn.GELU()
    join_linears(other.model.layers, eight_bits=True)
    assert not any(type(layer.mlp) is Float8GatedMLP for layer in other.model.layers)


def test_one_operation_attends_within_documents():
    q, k, v = torch.randn(18, 4, 16), torch.randn(18, 2, 16), torch.randn(18, 2, 16)
    starts = torch.tensor([0, 11, 16, 18], dtype=torch.int32)
    out = documents_attention(q, k, v, starts, torch.tensor([11, 0]), 0.25, None)
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        alone = nn.functional.scaled_dot_product_attention(*own, is_causal=True, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(out[a:b], alone[0].transpose(0, 1))


def test_a_graphs_documents_hold_those_of_the_batch_and_empty_ones():
    one_each = toys.batch_of([[toys.document(18)], [toys.document(18, seed=2)]], [[], []], block_size=4, length=18)
    assert documents_of(one_each) == Documents(2, 18, True)
    assert documents_of(batch()) == Documents(8, 18, False)
    m = model()
    assert enable_varlen(m) is None
    target, b = HFTarget(m, toys.toy_info(), (1, 3)), batch()
    starts = torch.full((9,), 36, dtype=torch.int32)
    starts[: len(b.starts_D)] = b.starts_D
    ids, positions = b.token_ids_BT.view(1, 36), b.position_ids_BT.view(1, 36)
    out = torch.empty(1, 36, 2 * toys.HIDDEN)
    target._features(ids, positions, starts, documents_of(b), out)
    real = (b.document_ids_BT >= 0).flatten()
    torch.testing.assert_close(out[0, real], target.read(b).features_BTF.view(36, -1)[real])


def test_layers_are_compiled_together_where_nothing_comes_between_them():
    m = model()
    target = HFTarget(m, toys.toy_info(), (1, 4))
    with watch(target.reader.layers) as follows:
        target.read(batch())
    assert follows == [False, True, True, True, True]
    groups = lambda *a: [len(layer._group) for layer in compiled_layers(target.reader.layers, *a)]  # noqa: E731
    assert groups(follows, (1, 4), 8) == [2, 2, 3, 3, 3]
    assert groups(follows, (1, 4), 2) == [2, 2, 2, 2, 1]
    assert groups([False, True, True, False, True], (1, 4), 8) == [2, 2, 1, 2, 2]


class Graphs:
    """A recorder of so many reads, and of none after these."""

    why_not = "no reason"

    def __init__(self, found: list[torch.Tensor]):
        self.found = found

    def __call__(self, batch) -> torch.Tensor | None:
        return self.found.pop(0) if self.found else None


def test_the_first_read_is_recorded_too_and_where_no_graph_can_be_that_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    m = model()
    assert enable_varlen(m) is None
    target = HFTarget(m, toys.toy_info(), (1, 3))
    plain = target.read(batch()).features_BTF
    target.compile(36, record=False)
    target._recorder = Graphs([torch.ones(1, 36, 2 * toys.HIDDEN), torch.zeros(1, 36, 2 * toys.HIDDEN)])
    assert [float(target.read(batch()).features_BTF.mean()) for _ in range(2)] == [1.0, 0.0]
    for _ in range(2):
        assert torch.equal(target.read(batch()).features_BTF, plain)
    assert capsys.readouterr().out == "note: the target is read without CUDA graphs: no reason\n"


@pytest.mark.slow
def test_compiled_layers_read_the_same_and_compile_once():
    """In a process of its own: what other tests have compiled there, and how, changes how many graphs there are."""
    here = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-c", "import test_linear; test_linear.read_compiled()"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(here)}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def read_compiled() -> None:
    plain = toys.toy_target().read(batch()).features_BTF
    m = model()
    assert enable_varlen(m) is None
    join_linears(m.model.layers, eight_bits=False)
    target = HFTarget(m, toys.toy_info(), (1, 3))
    target.compile(36, record=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    first = target.read(batch()).features_BTF
    b = batch()
    real = b.document_ids_BT >= 0
    later = target.read(b).features_BTF
    assert torch.equal(later, first), (
        "a run that begins elsewhere, as another rank's or a resumed one, has other numbers"
    )
    torch.testing.assert_close(later[real], plain[real], rtol=1e-3, atol=1e-4)
    other = toys.batch_of([[toys.document(3)] * 6, [toys.document(18)]], [[], []], block_size=4, length=18)
    target.read(other)  # as many tokens, other documents
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    target.read(toys.batch_of([[toys.document(7)]], [[]], block_size=4))  # another length is read without compiling
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
