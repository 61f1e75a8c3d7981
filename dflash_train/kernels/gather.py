"""Products with rows picked from a large table, which are never copied out of it; each with its plain twin.

Gradients with respect to the table are dense, as AdamW wants them, and summed in a fixed order: a run is the same twice.
"""

from __future__ import annotations

import torch


def gather_dot(x_MH: torch.Tensor, table_VH: torch.Tensor, index_MC: torch.Tensor) -> torch.Tensor:
    """x[m] . table[index[m, c]] in fp32 (M, C), differentiable in x and table."""
    return _GatherDot.apply(x_MH, table_VH, index_MC)


def gather_dot_reference(x_MH: torch.Tensor, table_VH: torch.Tensor, index_MC: torch.Tensor) -> torch.Tensor:
    """`gather_dot` by autograd."""
    return (table_VH[index_MC].float() * x_MH.float()[:, None]).sum(-1)


def take_rows(table_VH: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """table[index] (M, H), differentiable in the table. Indices that occur often cost no more in backward than others."""
    return _TakeRows.apply(table_VH, index_M)


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH, table_VH, index_MC):
        from dflash_train.kernels.gather_triton import dot_rows  # triton comes with torch on CUDA only

        x_MH, table_VH, index_MC = x_MH.contiguous(), table_VH.contiguous(), index_MC.contiguous()
        M, C = index_MC.shape
        out_MC = torch.empty(M, C, dtype=torch.float32, device=x_MH.device)
        H = x_MH.shape[1]
        dot_rows[(M,)](x_MH, table_VH, index_MC, out_MC, C, H, COLUMNS=_power(C), WIDTH=min(256, _power(H)))
        ctx.save_for_backward(x_MH, table_VH, index_MC)
        return out_MC

    @staticmethod
    def backward(ctx, d_MC):
        from dflash_train.kernels.gather_triton import sum_rows

        x_MH, table_VH, index_MC = ctx.saved_tensors
        M, C = index_MC.shape
        H = x_MH.shape[1]
        d_MC = d_MC.float().contiguous()
        d_x = d_table = None
        if ctx.needs_input_grad[0]:
            d_x, width = torch.empty_like(x_MH), min(1024, _power(H))
            sum_rows[(M, -(-H // width))](table_VH, index_MC, d_MC, d_x, H, C=C, WIDTH=width)
        if ctx.needs_input_grad[1]:
            d_table = _add_rows(table_VH, index_MC, d_MC, x_MH)
        return d_x, d_table, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table_VH, index_M):
        ctx.save_for_backward(table_VH, index_M)
        return table_VH.index_select(0, index_M)

    @staticmethod
    def backward(ctx, d_MH):
        table_VH, index_M = ctx.saved_tensors
        ones = torch.ones(len(index_M), 1, device=d_MH.device)
        return _add_rows(table_VH, index_M[:, None], ones, d_MH.contiguous()), None


def _add_rows(table_VH: torch.Tensor, index_MC: torch.Tensor, weight_MC: torch.Tensor, x_MH: torch.Tensor):
    """A tensor like the table with sum over index[m, c] = v of weight[m, c] x[m] in row v, zero elsewhere."""
    from dflash_train.kernels.gather_triton import add_rows

    out_VH = torch.zeros_like(table_VH)
    ordered, order = index_MC.flatten().sort(stable=True)
    H, width = x_MH.shape[1], min(256, _power(x_MH.shape[1]))
    add_rows[(len(order), -(-H // width))](
        ordered, order, weight_MC, x_MH, out_VH, len(order), index_MC.shape[1], H, ROWS=32, WIDTH=width, num_warps=8
    )
    return out_VH


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
