"""Conversation -> token ids and the mask of what the target itself would generate.

The ids are those of the serving template, always. The mask comes from prefix rendering: what the template
renders for `messages[:i]` with a generation prompt is what the target is given, and what `messages[:i + 1]`
adds to it is what the target says. Spans are found in the rendered text and carried to tokens by character
offsets; nothing is searched for among tokens, since a marker may tokenise differently in another place.

A token is supervised if it begins inside such a span, which ends with the turn's terminator (`<|im_end|>`),
without the white space that the template puts after it. What the generation prompt supplies (an empty think
block, say) is never supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from dflash_train.config.hub import check_place
from dflash_train.config.schema import ReasoningRows
from dflash_train.config.values import parse_json, trusted
from dflash_train.data.answers import Chat, Document
from dflash_train.data.corpus import lengths_of, supervised_of
from dflash_train.data.read import Kept
from dflash_train.data.template import Message, NotUsable, Template, encode, render
from dflash_train.data.template import template_hash as template_hash  # callers have it from here
from dflash_train.data.windows import windows
from dflash_train.types import Conversation, TokenizedExample


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> Any:
    """The target's fast tokenizer, with the Jinja file `chat_template` in place of its own template if given.

    Raises ValueError when there is no chat template, when the file does not exist, or when the tokenizer
    gives no offsets.
    """
    check_place("target.path", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trusted(path, trust_remote_code)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target.path = {path}: no usable tokenizer ({str(error).splitlines()[0]}); "
            "give a local folder or a Hub id, with target.revision if needed"
        ) from error
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise ValueError(f"data.chat_template {chat_template} does not exist; give the path of a Jinja file")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(
            f"target {path} has no chat template; set data.chat_template to the Jinja file you serve it with"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {path} gives no character offsets; a target with a tokenizer.json is needed"
        )
    return tokenizer


def read_stop_ids(path: str, revision: str | None, tokenizer: Any, trust_remote_code: bool = False) -> list[int]:
    """Tokens at which serving ends an answer: those of the target's generation_config.json (else its config's) and the tokenizer's. The same as
    `target.hf.stop_ids` of the loaded model."""
    listed: Any = None
    file = cached_file(path, "generation_config.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        listed = parse_json(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    if listed is None:
        try:
            config = AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=trusted(path, trust_remote_code)
            )
        except (
            OSError,
            ValueError,
            KeyError,
        ):  # a tokenizer alone, whose data is looked into: what trains or decodes has read it before
            config = None
        if config is not None and file is None:  # what the model makes of it
            listed = GenerationConfig.from_model_config(config).eos_token_id
        if config is not None and listed is None:
            listed = config.get_text_config().eos_token_id
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return sorted({*([] if listed is None else [listed] if isinstance(listed, int) else listed), *own})


def serving_template(tokenizer: Any, path: str, revision: str | None, trust_remote_code: bool = False) -> Template:
    """The tokenizer's chat template with the tokens at which serving ends the target's answers."""
    return Template(tokenizer, read_stop_ids(path, revision, tokenizer, trust_remote_code))


def prompt_ids(
    messages: list[Message], tokenizer: Any, *, tools: list[Any] | None, kwargs: dict[str, Any]
) -> list[int]:
    """What serving gives the target: ids of the rendered `messages` with the generation prompt. Raises NotEncodable."""
    text = render(messages, tokenizer, tools=tools, kwargs=kwargs, generation=True)
    # The template has written every special token already; adding them again would double the BOS.
    return encode(text, tokenizer)["input_ids"]


def tokenize(
    conversation: Conversation,
    template: Template,
    *,
    chat_template_kwargs: dict[str, Any],
    reasoning_rows: ReasoningRows = ReasoningRows.per_turn,
    max_length: int,
    drop_truncated: bool = False,
    window_overlap: int | None = None,
    kept: Kept | None = None,
) -> list[TokenizedExample]:
    """The training examples of one conversation, none if it cannot be used.

    One example holds all assistant turns where the template is prefix-preserving. Elsewhere (a template that
    strips earlier reasoning) `per_turn` gives one example per assistant turn, `id/turn`, rendered as serving
    would; `whole` gives one example that supervises what is rendered. `prompt_ids` with `response_ids`, and
    the per-turn ids that regeneration stores in `turn_ids`, are used as they are. Longer examples are cut at
    `max_length`, or made into windows `id@0`, `id@1`, ... that overlap by `window_overlap` tokens if that is
    given. `kept` counts: a row without an example is rejected (`truncated`, `template_error`, `no_prompt`,
    `nothing_to_predict`); `cut_at_max_length`, `earlier_reasoning_not_rendered` and the like are notes.

    Raises SpansNotFound, naming template and row, where they cannot be found, and NotEncodable.
    """
    kept = Kept(kept=1) if kept is None else kept
    if drop_truncated and conversation.finish_reason == "length":
        kept.reject("truncated", conversation.source)
        return []
    try:
        if conversation.prompt_ids is not None and conversation.response_ids is not None:
            documents = [_from_ids(conversation)]
        elif "turn_ids" in conversation.metadata:
            documents = _from_turns(conversation)
        else:
            kwargs = {**chat_template_kwargs, **conversation.chat_template_kwargs}
            documents = Chat(conversation, template, kwargs, kept).documents(reasoning_rows)
    except NotUsable:
        kept.reject("template_error", conversation.source)
        return []
    if any(document.supervised.all() for document in documents):
        kept.reject("no_prompt", conversation.source)
        return []
    examples = []
    for document in documents:
        for part in _parts(document, max_length, window_overlap, kept):
            if not np.any(part.supervised[:-1] & part.supervised[1:]):
                whole = part.id == document.id
                kept.notes["example_with_nothing_to_predict" if whole else "window_with_nothing_to_predict"] += 1
                continue
            examples.append(
                TokenizedExample(
                    id=part.id,
                    domain=conversation.domain,
                    token_ids=part.token_ids.astype(np.int32),
                    supervised=part.supervised,
                    finish_reason=part.finish_reason,
                )
            )
    if not examples:
        kept.reject("nothing_to_predict", conversation.source)
    return examples


def mask_strategy(tokenizer: Any, kept: Kept) -> str:
    """How the masks of a data set were made, in words; `kept` is what `tokenize` counted in."""
    agree, differ = kept.notes["generation_tag_agrees"], kept.notes["generation_tag_disagrees"]
    fallback = kept.notes["spans_from_generation_tag"]
    said = "prefix rendering, recorded ids as they are"
    if not Template(tokenizer).tagged:
        return f"{said} (the template has no generation tag)"
    if differ:
        said += f" (the generation tag disagrees in {differ} of {agree + differ} rows)"
    elif agree:
        said += " (generation tag agrees)"
    return said + (f"; generation tag in {fallback} rows where it found nothing" if fallback else "")


def check_supervised(examples: Sequence[TokenizedExample], what: str) -> None:
    """Raise ValueError when no token, or every token, of a data set is supervised: such a run would learn nothing, or to draft prompts."""
    tokens, supervised = int(lengths_of(examples).sum()), int(supervised_of(examples).sum())
    if tokens and supervised in (0, tokens):
        raise ValueError(
            f"{what}: supervised ratio is {supervised / tokens:.0f}: {supervised} of {tokens} tokens in {len(examples)} examples; "
            "prompts and answers are not told apart; check the rows' roles or prompt_ids, and data.chat_template"
        )


def _parts(document: Document, max_length: int, window_overlap: int | None, kept: Kept) -> list[Document]:
    """The document, or what becomes of one that is longer than max_length."""
    ids, supervised = document.token_ids, document.supervised
    if len(ids) <= max_length:
        return [document]
    if window_overlap is None:
        kept.notes["cut_at_max_length"] += 1
        return [Document(document.id, ids[:max_length], supervised[:max_length], "length")]
    kept.notes["made_into_windows"] += 1
    parts = []
    for number, (begin, own, end) in enumerate(windows(len(ids), max_length, window_overlap)):
        mask = supervised[begin:end].copy()
        mask[: own - begin] = False
        reason = document.finish_reason if end == len(ids) else "length"
        parts.append(Document(f"{document.id}@{number}", ids[begin:end], mask, reason))
    return parts


def _from_ids(conversation: Conversation) -> Document:
    assert conversation.prompt_ids is not None and conversation.response_ids is not None
    ids = np.array(conversation.prompt_ids + conversation.response_ids)
    supervised = np.arange(len(ids)) >= len(conversation.prompt_ids)
    return Document(conversation.id, ids, supervised, conversation.finish_reason or "stop")


def _from_turns(conversation: Conversation) -> list[Document]:
    """Turns that each continue the one before become one document; another history starts the next."""
    documents: list[Document] = []
    for number, turn in enumerate(conversation.metadata["turn_ids"]):
        prompt, response = np.array(turn["prompt_ids"], int), np.array(turn["response_ids"], int)
        supervised = np.arange(len(prompt) + len(response)) >= len(prompt)
        finish_reason = turn.get("finish_reason") or "stop"
        if documents and np.array_equal(documents[-1].token_ids, prompt[: len(documents[-1].token_ids)]):
            last = documents.pop()
            supervised[: len(last.supervised)] = last.supervised
            documents.append(Document(last.id, np.concatenate([prompt, response]), supervised, finish_reason))
        else:
            name = f"{conversation.id}/{number}"
            documents.append(Document(name, np.concatenate([prompt, response]), supervised, finish_reason))
    if len(documents) == 1:
        documents[0].id = conversation.id
    return documents
