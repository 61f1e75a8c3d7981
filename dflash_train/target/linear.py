"""Faster matrix products of a frozen model: linear layers that read the same input joined into one, and weights in 8 bits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from dflash_train.kernels.swiglu import quantise, quantised_swiglu

SHARE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Float8Linear(nn.Module):
    """x @ weight.T with one scale per row of the weight, chosen once, and one per row of x, chosen each time; a bias is added in x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        eight, scale = quantise(weight)
        self.register_buffer("weight", eight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(*quantise(x.flatten(0, -2)), x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def product(self, eight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of rows (M, K) that are quantised already, without the bias."""
        return scaled_product(eight, scale, self.weight, self.scale, dtype)


@torch.library.custom_op("dflash_train::scaled_product", mutates_args=())
def scaled_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T. x (M, K) and weight (N, K) in 8 bits, x_scale (M, 1), weight_scale (N, 1): on CUDA by
    Hopper's 8-bit units, elsewhere in fp32. One operation, since torch 2.11 cannot compile `scaled_mm` itself."""
    if not x.is_cuda:
        return scaled_product_reference(x, x_scale, weight, weight_scale, dtype)
    rows = F.ScalingType.RowWise
    return F.scaled_mm(x, weight.T, x_scale, rows, weight_scale.T, rows, output_dtype=dtype, use_fast_accum=True)


@scaled_product.register_fake
def _(x, x_scale, weight, weight_scale, dtype):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def scaled_product_reference(x, x_scale, weight, weight_scale, dtype: torch.dtype) -> torch.Tensor:
    """The same in fp32, anywhere."""
    return ((x.float() @ weight.float().T) * x_scale * weight_scale.T).to(dtype)


class Joined(nn.Module):
    """Linear layers that read the same input, as one: `parts` stand where they stood, and the first of them that is called computes all."""

    def __init__(self, layers: list[nn.Linear], eight_bits: bool):
        super().__init__()
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self.linear = linear_of(weight, bias, eight_bits)
        self.widths = [layer.out_features for layer in layers]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def parts(self) -> list[nn.Module]:
        return [Part(self, i) for i in range(len(self.widths))]

    def take(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """One part's output; nothing is kept once every part has been taken."""
        if self._input is not x:
            self._input, self._outputs = x, list(self.linear(x).split(self.widths, -1))
        out, self._outputs[part] = self._outputs[part], None
        if all(other is None for other in self._outputs):
            self._input, self._outputs = None, []
        assert out is not None, "a layer that reads its input twice cannot be joined"
        return out


class Part(nn.Module):
    """One of the layers that were joined. The first of them owns the weights."""

    def __init__(self, joined: Joined, index: int):
        super().__init__()
        self.index, self.out_features = index, joined.widths[index]
        if index == 0:
            self.joined = joined
        else:
            object.__setattr__(self, "joined", joined)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined.take(x, self.index)


class Float8GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of 8-bit layers without biases; what goes into `down` is never written in 16 bits."""

    def __init__(self, gate_up: Float8Linear, down: Float8Linear):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x.flatten(0, -2))
        return self.down.product(*quantised_swiglu(gate_up), x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def of(module: nn.Module) -> Float8GatedMLP | None:
        """The same as a module whose layers are joined and in 8 bits, if that is what it computes."""
        names = ("gate_proj", "up_proj", "down_proj")
        parts = [getattr(module, name, None) for name in names]
        if {name for name, _ in module.named_children()} - {"act_fn"} != set(names) or not isinstance(parts[0], Part):
            return None
        gate_up, down = parts[0].joined.linear, parts[2]
        if not isinstance(down, Float8Linear) or gate_up.bias is not None or down.bias is not None:
            return None
        x = torch.linspace(-1, 1, 16 * down.weight.shape[0], device=down.weight.device).sin().view(16, -1)
        x = x.to(torch.bfloat16)
        own, made = module(x).float(), Float8GatedMLP(gate_up, down)
        return made if float((made(x).float() - own).norm()) <= 0.02 * float(own.norm()) else None


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, eight_bits: bool) -> nn.Module:
    if eight_bits:
        return Float8Linear(weight, bias)
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


@torch.no_grad()
def join_linears(layers: nn.ModuleList, *, eight_bits: bool) -> None:
    """Replace the frozen linear layers of decoder layers in place: those that share an input by one, and with eight_bits all of them by 8-bit ones."""
    for module in [m for layer in layers for m in layer.modules()]:
        for names in SHARE_INPUT:
            found = [getattr(module, name, None) for name in names]
            if (
                all(type(linear) is nn.Linear for linear in found)
                and len({linear.bias is None for linear in found}) == 1
            ):
                for name, part in zip(names, Joined(found, eight_bits).parts(), strict=True):
                    setattr(module, name, part)
        if eight_bits:
            for name, linear in list(module.named_children()):
                if type(linear) is nn.Linear and not isinstance(module, Joined):
                    setattr(module, name, Float8Linear(linear.weight, linear.bias))
    for module in [m for layer in layers for m in layer.modules()] if eight_bits else []:
        for name, child in list(module.named_children()):
            mlp = Float8GatedMLP.of(child)
            if mlp is not None:
                setattr(module, name, mlp)
