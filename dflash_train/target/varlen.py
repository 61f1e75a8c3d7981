"""Targets whose sequences lie side by side without padding.

The transformers attention "varlen" is torch's sdpa until a forward is given `cu_seq_lens_q` and its companions (named as transformers names
them); then every query sees its own sequence only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dflash_train.kernels.varlen import varlen
from dflash_train.target.info import text_config


@torch.library.custom_op("dflash_train::documents_attention", mutates_args=())
def documents_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within each document. q (T, Hq, D), k and v (T, Hkv, D), starts int32 (documents + 1,), longest int64 (2,) on the
    host: an upper bound of their lengths, and whether all are so long.

    One operation, so that a compiled layer has static shapes whatever the documents are: `longest` is a tensor and no numbers, and
    which kernel runs is decided when it runs.
    """
    (most, alike), count = longest.tolist(), len(starts) - 1
    if q.is_cuda and alike and window is None:
        # Rows of one document each. cuDNN takes half the time of flash attention 2 here, but plans anew for every set of documents otherwise.
        batched = (x.view(count, most, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = torch.ops.aten._cudnn_attention_forward(
            *batched, None, None, None, most, most, False, 0.0, True, False, scale=scale
        )[0]
        return out.transpose(1, 2).reshape(q.shape).contiguous()
    return varlen(q, k, v, starts, starts, most, most, scale=scale, window=window).contiguous()


@documents_attention.register_fake
def _(q, k, v, starts, longest, scale, window):
    return q.new_empty(q.shape)


# A mask of four dimensions is handed through by transformers as it is: nothing is built, nothing looked at.
NO_MASK_SHAPE = (1, 1, 1, 1)


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor = 0,
    max_length_k: int | torch.Tensor = 0,
    seqused_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, Hq, Tq, D); key and value (1, Hkv, Tk, D), or (Tk, Hkv, D) where they are a cache; returns ((1, Tq, Hq, D), None).

    cu_seq_lens_q int32 (sequences + 1,): where each sequence's queries begin, and the end. cu_seq_lens_k: the same for its keys; with seqused_k
    int32 (sequences,) only so many keys from there are used, and the beginnings may be in any order. The last query of a sequence stands at
    its last key. max_length_*: upper bounds; as a tensor on the host, queries and keys are the same documents, and it is what `documents_attention` wants. Raises ValueError for what the kernel leaves out (soft-caps, sinks).
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    left_out = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if left_out:
        raise ValueError(f"varlen attention has no {', '.join(left_out)}; use sdpa or eager")
    q = query[0].transpose(0, 1)
    k, v = (x if x.dim() == 3 else x[0].transpose(0, 1) for x in (key, value))
    if isinstance(max_length_q, torch.Tensor):
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return documents_attention(q, k, v, cu_seq_lens_q, max_length_q, scale, sliding_window)[None], None
    out = varlen(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        used=seqused_k,
        scale=scaling,
        window=sliding_window,
    )
    return out[None], None


AttentionInterface.register("varlen", varlen_attention)
AttentionMaskInterface.register("varlen", sdpa_mask)


# Relative differences that rounding may make: always, and at most; between them, so many times what it makes by another kernel of torch.
TOLERANCE, MOST, TIMES = 0.05, 0.2, 4


def reference(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What a target's `run` gives (rows, width) by torch's sdpa, and the `difference` that other kernels may make. In 16 bits it grows with the
    layers: two of torch's own show how much."""
    wanted = run()
    with sdpa_kernel(SDPBackend.MATH):
        rounding = difference(run(), wanted)
    return wanted, max(TOLERANCE, min(TIMES * rounding, MOST))


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest ||a - b|| / ||b|| of rows."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@torch.no_grad()
def enable_varlen(model: nn.Module) -> str | None:
    """Switch a model's attention to "varlen" if sequences laid side by side then give what each gives alone; else leave "sdpa" and return why."""
    config = text_config(model.config)
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"this target has {', '.join(sorted(kinds))} layers"
    device = next(model.parameters()).device
    if device.type == "cuda" and model.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs 16 bits, target.precision is {model.dtype}"
    window = getattr(config, "sliding_window", None) or 0
    lengths = (5, window + 17 if 0 < window <= 8192 else 41, 18)
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(config.vocab_size, (length,), generator=random).to(device) for length in lengths]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else model.model

    def alone() -> torch.Tensor:
        return torch.cat([backbone(input_ids=ids[None], use_cache=False)[0][0].float() for ids in sequences])

    wanted, allowed = reference(alone)
    model.set_attn_implementation("varlen")
    try:
        packed = backbone(
            input_ids=torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
            attention_mask=torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=device),
            use_cache=False,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
        )[0][0].float()
        off = difference(packed, wanted)
        why_not = None if off < allowed else f"it gives hidden states that differ by {off:.1e}, more than {allowed:.1e}"
    except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        why_not = f"this target does not run with it ({type(error).__name__}: {str(error).splitlines()[0]})"
    if why_not is not None:
        model.set_attn_implementation("sdpa")
    return why_not
