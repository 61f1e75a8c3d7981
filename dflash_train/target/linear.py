"""Faster matrix products of a frozen model: linear layers that read the same input joined into one, and weights in 8 bits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SHARE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / scale in 8 bits, scale (..., 1) in fp32), the scale of a row being its largest magnitude / 448."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return (wide * (LARGEST / most)).to(EIGHT_BITS), most / LARGEST


class Float8Linear(nn.Module):
    """x @ weight.T with one scale per row of the weight, chosen once, and one per row of x, chosen each time; a bias is added in x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        eight, scale = quantise(weight)
        self.register_buffer("weight", eight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eight, scale = quantise(x.flatten(0, -2))
        y = scaled_product(eight, scale, self.weight, self.scale, x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


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
