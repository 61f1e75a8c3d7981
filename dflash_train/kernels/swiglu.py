"""The gated MLP's silu(gate) * up as 8-bit numbers with a scale per row: a plain reference, and a kernel that reads its input once."""

from __future__ import annotations

import torch

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / scale in 8 bits, scale (..., 1) in fp32), the scale of a row being its largest magnitude / 448."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return (wide * (LARGEST / most)).to(EIGHT_BITS), most / LARGEST


@torch.library.custom_op("dflash_train::quantised_swiglu", mutates_args=())
def quantised_swiglu(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """quantise(silu(gate) * up) of gate | up (M, 2 I), contiguous; the product is rounded to the input's format in between, as a layer in that
    format does."""
    if not gate_up.is_cuda:
        return quantised_swiglu_reference(gate_up)
    from dflash_train.kernels.swiglu_triton import swiglu_row  # triton comes with torch on CUDA only

    M, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(M, width, dtype=EIGHT_BITS, device=gate_up.device)
    scale = torch.empty(M, 1, dtype=torch.float32, device=gate_up.device)
    block = 1 << (width - 1).bit_length()
    swiglu_row[(M,)](gate_up, out, scale, width, LARGEST, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out, scale


@quantised_swiglu.register_fake
def _(gate_up):
    M, width = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty(M, width, dtype=EIGHT_BITS), gate_up.new_empty(M, 1, dtype=torch.float32)


def quantised_swiglu_reference(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised_swiglu`, one operation after the other."""
    gate, up = gate_up.chunk(2, -1)
    return quantise(torch.nn.functional.silu(gate) * up)
