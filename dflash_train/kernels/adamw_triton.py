"""The Triton side of `kernels.adamw`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw(
    parameter, gradient, mean, square, rate, root, divisor, decay, skipped, n, beta1, beta2, eps, BLOCK: tl.constexpr
):
    """n elements of fp32 tensors, BLOCK by each program; rate, root, divisor, decay and skipped point to one number each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    if tl.load(skipped) == 0.0:
        g = tl.load(gradient + at, mask=there, other=0.0) / tl.load(divisor)
        m = beta1 * tl.load(mean + at, mask=there, other=0.0) + (1.0 - beta1) * g
        s = beta2 * tl.load(square + at, mask=there, other=0.0) + (1.0 - beta2) * g * g
        p = tl.load(parameter + at, mask=there, other=0.0) * tl.load(decay)
        p -= tl.load(rate) * m / (tl.sqrt(s) / tl.load(root) + eps)
        tl.store(parameter + at, p, mask=there)
        tl.store(mean + at, m, mask=there)
        tl.store(square + at, s, mask=there)
