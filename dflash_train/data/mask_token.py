"""The mask token: a real row of the target's embedding that never occurs in text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_train.data.corpus import occurrences
from dflash_train.types import TargetInfo, TokenizedExample

_SPARE_NAMES = ("mask", "reserved", "spare", "unused", "extra")


def unused_ids(tokenizer: Any, target: TargetInfo, count: int = 2) -> list[int]:
    """Token ids that could serve: special tokens named as spare, then embedding rows without a token, then other special tokens
    that the chat template does not write."""
    taken = {
        target.bos_token_id,
        target.pad_token_id,
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        *target.eos_token_ids,
    }
    added = {
        i: t.content for i, t in tokenizer.added_tokens_decoder.items() if i not in taken and i < target.vocab_size
    }
    template = str(tokenizer.chat_template or "")
    spare = [i for i, text in sorted(added.items()) if any(word in text.lower() for word in _SPARE_NAMES)]
    empty = [i for i in range(len(tokenizer), target.vocab_size)]
    rest = [i for i, text in sorted(added.items()) if text not in template and i not in spare]
    return (spare + empty + rest)[:count]


def check_mask_token(mask_token_id: int | None, tokenizer: Any, target: TargetInfo) -> str | None:
    """Raise ValueError for an id that cannot serve, naming two that can. Returns a note where there is something to say."""
    options = (
        " or ".join(str(i) for i in unused_ids(tokenizer, target))
        or "none found: add a reserved token to the tokenizer"
    )
    name = f"drafter.mask_token_id = {'null' if mask_token_id is None else mask_token_id}"
    if mask_token_id is None:
        raise ValueError(
            f"{name}: it is required, a reserved token id that never occurs in text; unused here: {options}"
        )
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(
            f"{name}: must be in [0, {target.vocab_size}), the rows of the target's embedding; unused here: {options}"
        )
    roles = {
        "pad": {target.pad_token_id, tokenizer.pad_token_id},
        "eos": {tokenizer.eos_token_id, *target.eos_token_ids},
        "bos": {target.bos_token_id, tokenizer.bos_token_id},
    }
    for role, ids in roles.items():
        if mask_token_id in ids:
            raise ValueError(
                f"{name}: this is the {role} token ({token_name(tokenizer, mask_token_id)}), which conflates the mask with content; unused here: {options}"
            )
    sglang = tokenizer.get_vocab().get("<|MASK|>")
    if sglang is not None and sglang != mask_token_id:
        raise ValueError(
            f"{name}: the tokenizer's <|MASK|> is {sglang}, and SGLang refuses a drafter with another id; use {sglang}"
        )
    if mask_token_id >= len(tokenizer):
        return f"{name}: an embedding row without a token; engines accept it"
    return None


def token_name(tokenizer: Any, token_id: int) -> str:
    """The token as the tokenizer writes it, for messages."""
    return tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else "no token"


def check_mask_absent(mask_token_id: int, examples: Sequence[TokenizedExample], token: str) -> None:
    """Raise ValueError when the mask token occurs in the training rows."""
    total, hit, first = occurrences(examples, mask_token_id)
    if total:
        raise ValueError(
            f"drafter.mask_token_id = {mask_token_id} ({token}) occurs {total} times in {hit} of {len(examples)} training rows (first: {first}); "
            "choose a token that never occurs in text"
        )
