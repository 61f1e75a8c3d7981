"""The Triton side of `kernels.swiglu`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_row(gate_up, out, scale, width, largest, BLOCK: tl.constexpr):
    """One row by each program: gate_up (M, 2 width) -> out (M, width) in 8 bits, scale (M,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=there, other=0.0).to(tl.float32)
    # Rounded where a layer in 16 bits rounds.
    kept = gate_up.dtype.element_ty
    y = ((gate / (1.0 + tl.exp(-gate))).to(kept).to(tl.float32) * up).to(kept).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(y)), 1e-12)
    tl.store(out + row * width + at, (y * (largest / most)).to(out.dtype.element_ty), mask=there)
    tl.store(scale + row, most / largest)
