"""How many floating-point operations a step needs: counted from shapes, for the share of the machine's arithmetic that training uses.

Matrix products and attention over visible pairs, a multiplication and an addition being two operations. Norms, activations, convolutions,
gathers and the optimizer are left out, and so are padding, unused blocks and what an implementation computes and masks.
"""

from __future__ import annotations

from dflash_train.drafter.spec import DrafterSpec
from dflash_train.types import PackedBatch, TargetInfo

# Dense 16-bit TFLOP/s by the vendor's data sheets, by a part of the device's name.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
}


def peak(device_name: str) -> float | None:
    """Operations per second of a device in 16 bits, or None if it is not in the table."""
    return next((1e12 * value for part, value in PEAKS.items() if part in device_name), None)


def layer(hidden: int, query: int, kv: int, mlp: int) -> int:
    """Of one token through the matrices of one decoder layer."""
    return 2 * (hidden * (query + 2 * kv) + query * hidden + 3 * hidden * mlp)


def target_flops(info: TargetInfo, layers: int, tokens: int, pairs: int) -> int:
    """Of reading `tokens` through so many dense decoder layers; pairs: (query, key) that see each other."""
    query, kv = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
    return layers * (tokens * layer(info.hidden_size, query, kv, info.intermediate_size) + 4 * query * pairs)


def draft_flops(spec: DrafterSpec, tokens: int, slots: int, scored: int, pairs: int) -> dict[str, int]:
    """Of drafting `slots` over a context of `tokens` and scoring some of them, forward and backward. pairs: (slot, key) that see each other, per layer."""
    H, L = spec.hidden_size, spec.num_hidden_layers
    query, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    fc = 2 * tokens * len(spec.target_layer_ids) * H * H
    per_slot = layer(H, query, kv, spec.intermediate_size)
    if spec.conv_kernel_size:
        per_slot += 2 * (2 * H * 2 * spec.conv_kernel_size * (H // spec.conv_group_size))
    matrices = L * (slots * per_slot + tokens * 2 * H * 2 * kv) + 2 * scored * H * spec.selector_rank
    attention = L * 4 * query * pairs
    head = 2 * scored * H * spec.vocab_size
    # Every product has two gradients but fc's (nothing flows into the target) and the head's (it is frozen); attention computes its scores again.
    return {"draft": fc + matrices + attention, "head": 2 * head, "backward": fc + 2 * matrices + 5 * attention // 2}


def batch_flops(batch: PackedBatch, spec: DrafterSpec, info: TargetInfo) -> int:
    """Of one micro-batch: reading, drafting, scoring, backward."""
    S = spec.block_size
    read = target_flops(info, max(spec.target_layer_ids) + 1, batch.tokens, batch.pairs)
    slots, scored = batch.drafted * S, len(batch.blocks.scored_M)
    return read + sum(draft_flops(spec, batch.tokens, slots, scored, S * (batch.context + batch.drafted * S)).values())
