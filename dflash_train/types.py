"""The records that flow through the program; no behaviour.

Conversation -> TokenizedExample -> PackedBatch (with its DraftBlocks) -> TargetFeatures -> DraftOutput -> LossReport

Shapes: **B** rows, **T** context tokens, **N** blocks per row, **S** slots per block (= block_size = K; slot 0 is the anchor),
**H** hidden, **F** captured features (layers x hidden), **V** vocabulary, **C** candidates, **M** scored slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch


@dataclass(kw_only=True)
class Conversation:
    """One row of a data file.

    `source` is "file:line" for messages. A row that carries `prompt_ids` and `response_ids` has them here and is used as is.
    `metadata` keeps every field that is not named below.
    """

    id: str
    source: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    domain: str = "default"
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TokenizedExample:
    """One training or held-out document.

    token_ids: int32 (T,); supervised: bool (T,), true where the target itself would generate the token;
    finish_reason "length" means that the text was cut, so its last token is not a turn end.
    """

    id: str
    domain: str
    token_ids: np.ndarray
    supervised: np.ndarray
    finish_reason: str = "stop"


@dataclass(kw_only=True)
class Prompt:
    """A held-out prompt as token ids. tags: what else its results are split by, such as {"thinking": "on"}."""

    id: str
    domain: str
    token_ids: list[int]
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class DraftBlocks:
    """N blocks of S slots per packed row. All tensors live where the batch lives.

    anchors_BN: index of the anchor in its row; valid_BN: false for a block that only fills the fixed budget;
    slots_BN: slots that exist (S, or fewer where a decode budget ends); labels_BNS: the token at anchor + slot;
    weights_BNS: decay weight of a supervised slot, else 0 (slot 0 always 0); supervised_BNS: the same as booleans, not
    weighted; a block is supervised up to its first unsupervised slot. scored_M: flat indices into B*N*S of the supervised slots, in ascending
    order (known on the host, so that nothing on the device has to be counted).
    """

    anchors_BN: torch.Tensor
    valid_BN: torch.Tensor
    slots_BN: torch.Tensor
    labels_BNS: torch.Tensor
    weights_BNS: torch.Tensor
    supervised_BNS: torch.Tensor
    scored_M: torch.Tensor


@dataclass(kw_only=True)
class PackedBatch:
    """B packed rows of T tokens, with the blocks to draft in them.

    token_ids_BT; position_ids_BT restart at 0 in each document; document_ids_BT: 0, 1, ... within a row, -1 on padding;
    supervised_BT. starts_D: int32, where each document (and each row's padding) begins when the rows are laid side by side, and their end;
    with `longest`, the longest of them, on the host. sample_ids: ids of the documents of each row, in order. Known on the host, before anything is computed:
    weight, the sum of blocks.weights_BNS; tokens, without padding; drafted, the blocks that are valid; covered and coverable, the supervised
    tokens that some block predicts and those that some block could; pairs, the (token, token before it or itself) of the same document;
    context, the tokens before its anchor summed over the valid blocks (as if there were no window).
    """

    token_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    document_ids_BT: torch.Tensor
    supervised_BT: torch.Tensor
    starts_D: torch.Tensor
    longest: int
    blocks: DraftBlocks
    sample_ids: list[list[str]]
    weight: float
    tokens: int
    drafted: int
    covered: int
    coverable: int
    pairs: int
    context: int


@dataclass(kw_only=True)
class TargetInfo:
    """What the target's config.json alone says; no weights needed."""

    path: str
    revision: str | None
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float


class TargetFeatures(NamedTuple):
    """features_BTF: outputs of the captured decoder layers, side by side in the order of target_layer_ids, before any final norm."""

    features_BTF: torch.Tensor


class HeadOutput(NamedTuple):
    """Base scores of M slots: nll_M cross-entropy; top1_M; candidates_MC ids of the k best tokens, best first."""

    nll_M: torch.Tensor
    top1_M: torch.Tensor
    candidates_MC: torch.Tensor


@dataclass(kw_only=True)
class Saved:
    """A drafter and its AdamW state by parameter name, fp32, on the host: what every engine gives and takes, so that any of them continues
    from any other's.

    weights: name -> tensor. moments: "exp_avg.<name>", "exp_avg_sq.<name>" like the parameter and "step.<name>" (scalar); empty before the
    first step, or where only the weights were asked for.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


class LossReport(NamedTuple):
    """loss: scalar to call backward on (already divided by the global denominators); sums: metric name -> (sum, count) tensors."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
