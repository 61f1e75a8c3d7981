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

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.read import Kept
from dflash_train.data.windows import windows
from dflash_train.types import Conversation, TokenizedExample

Message = dict[str, Any]


@dataclass
class _Document:
    """An example before it is cut: ids, mask and whether the text was cut off."""

    id: str
    token_ids: np.ndarray
    supervised: np.ndarray
    finish_reason: str


class SpansNotFound(ValueError):
    """What the target says in a conversation cannot be told from the rest; names template and row."""


class _NotUsable(Exception):
    """The template refuses this conversation; counted, not raised to the user."""


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> Any:
    """The target's fast tokenizer, with the Jinja file `chat_template` in place of its own template if given.

    Raises ValueError when there is no chat template, when the file does not exist, or when the tokenizer
    gives no offsets.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
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


def template_hash(tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> str:
    """16 hex digits that change with the template's text or its arguments."""
    text = json.dumps([tokenizer.chat_template, chat_template_kwargs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def render(
    messages: list[Message], tokenizer: Any, *, tools: list[Any] | None, kwargs: dict[str, Any], generation: bool
) -> str:
    """The template's text of `messages`, with the generation prompt if asked for."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generation, **kwargs
    )


def prompt_ids(
    messages: list[Message], tokenizer: Any, *, tools: list[Any] | None, kwargs: dict[str, Any]
) -> list[int]:
    """What serving gives the target: ids of the rendered `messages` with the generation prompt."""
    text = render(messages, tokenizer, tools=tools, kwargs=kwargs, generation=True)
    # The template has written every special token already; adding them again would double the BOS.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def tokenize_all(
    conversations: Iterable[Conversation], tokenizer: Any, *, kept: Kept, **options: Any
) -> list[TokenizedExample]:
    """`tokenize` (which has the options) over a data set; rows that give no example are moved to `kept.dropped`.

    An odd row among good ones, in which the spans cannot be found, is one of them. Where no row at all gives an example because of
    it, the template is at fault: raises the first row's SpansNotFound.
    """
    examples: list[TokenizedExample] = []
    first: SpansNotFound | None = None
    for conversation in conversations:
        found, error = tokenize_or_reject(conversation, tokenizer, kept=kept, **options)
        examples += found
        first = first or error
    if first is not None and not examples:
        raise first
    return examples


def tokenize_or_reject(
    conversation: Conversation, tokenizer: Any, *, kept: Kept, **options: Any
) -> tuple[list[TokenizedExample], SpansNotFound | None]:
    """`tokenize`, with a row whose spans cannot be found rejected and its error returned."""
    try:
        return tokenize(conversation, tokenizer, kept=kept, **options), None
    except SpansNotFound as error:
        kept.reject("spans_not_found", conversation.source)
        return [], error


def tokenize(
    conversation: Conversation,
    tokenizer: Any,
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
    given. `kept` counts: a row without an example is rejected (`truncated`, `template_error`,
    `nothing_to_predict`); `cut_at_max_length`, `earlier_reasoning_not_rendered` and the like are notes.

    Raises SpansNotFound, naming template and row, where they cannot be found.
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
            documents = _Chat(conversation, tokenizer, kwargs, kept).documents(reasoning_rows)
    except _NotUsable:
        kept.reject("template_error", conversation.source)
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


def _parts(document: _Document, max_length: int, window_overlap: int | None, kept: Kept) -> list[_Document]:
    """The document, or what becomes of one that is longer than max_length."""
    ids, supervised = document.token_ids, document.supervised
    if len(ids) <= max_length:
        return [document]
    if window_overlap is None:
        kept.notes["cut_at_max_length"] += 1
        return [_Document(document.id, ids[:max_length], supervised[:max_length], "length")]
    kept.notes["made_into_windows"] += 1
    parts = []
    for number, (begin, own, end) in enumerate(windows(len(ids), max_length, window_overlap)):
        mask = supervised[begin:end].copy()
        mask[: own - begin] = False
        reason = document.finish_reason if end == len(ids) else "length"
        parts.append(_Document(f"{document.id}@{number}", ids[begin:end], mask, reason))
    return parts


def _from_ids(conversation: Conversation) -> _Document:
    assert conversation.prompt_ids is not None and conversation.response_ids is not None
    ids = np.array(conversation.prompt_ids + conversation.response_ids)
    supervised = np.arange(len(ids)) >= len(conversation.prompt_ids)
    return _Document(conversation.id, ids, supervised, conversation.finish_reason or "stop")


def _from_turns(conversation: Conversation) -> list[_Document]:
    """Turns that each continue the one before become one document; another history starts the next."""
    documents: list[_Document] = []
    for number, turn in enumerate(conversation.metadata["turn_ids"]):
        prompt, response = np.array(turn["prompt_ids"], int), np.array(turn["response_ids"], int)
        supervised = np.arange(len(prompt) + len(response)) >= len(prompt)
        finish_reason = turn.get("finish_reason") or "stop"
        if documents and np.array_equal(documents[-1].token_ids, prompt[: len(documents[-1].token_ids)]):
            last = documents.pop()
            supervised[: len(last.supervised)] = last.supervised
            documents.append(_Document(last.id, np.concatenate([prompt, response]), supervised, finish_reason))
        else:
            name = f"{conversation.id}/{number}"
            documents.append(_Document(name, np.concatenate([prompt, response]), supervised, finish_reason))
    if len(documents) == 1:
        documents[0].id = conversation.id
    return documents


class _Chat:
    """One conversation with its template: renders prefixes, finds spans, tokenises."""

    def __init__(self, conversation: Conversation, tokenizer: Any, kwargs: dict[str, Any], kept: Kept) -> None:
        self.conversation, self.tokenizer, self.kwargs, self.kept = conversation, tokenizer, kwargs, kept
        self.turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        # What follows the last answer is not part of anything the target says.
        self.messages = conversation.messages[: self.turns[-1] + 1] if self.turns else []
        added = tokenizer.added_tokens_decoder.values()
        specials = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self.specials = sorted(specials, key=len, reverse=True)

    def documents(self, reasoning_rows: ReasoningRows) -> list[_Document]:
        if not self.turns:
            return []
        conversation = self.conversation
        if self.turns[0] == 0:
            # Nobody asked for it, and serving cannot: there is no prompt without a message.
            self.kept.notes["opening_turn_not_supervised"] += 1
            self.turns = self.turns[1:]
            if not self.turns:
                return []
        full = self._render(self.messages)
        prompts = {i: self._render(self.messages[:i], generation=True) for i in self.turns}
        texts = {i: full if i == self.turns[-1] else self._render(self.messages[: i + 1]) for i in self.turns}
        cut = conversation.finish_reason == "length"
        for i in [i for i in self.turns if not self._says_its_calls(i, prompts[i], texts[i])]:
            # What is left of such an answer is a turn end, which the target did not say there.
            self.kept.notes["tool_call_not_rendered"] += 1
            self.turns.remove(i)
            cut = cut and i != len(self.messages) - 1
        if not self.turns:
            return []
        if all(full.startswith(prompts[i]) and full.startswith(texts[i]) for i in self.turns):
            spans = [self._span(i, prompts[i], texts[i]) for i in self.turns]
            return [self._document(conversation.id, full, [s[:2] for s in spans], spans[-1][2] if cut else None)]
        if reasoning_rows is ReasoningRows.whole:
            spans = [self._span_in_full(i, full, prompts[i], texts[i]) for i in self.turns]
            self._count_reasoning(full, spans)
            return [self._document(conversation.id, full, [s[:2] for s in spans], spans[-1][2] if cut else None)]
        documents = []
        for number, i in enumerate(self.turns):
            start, end, text_end = self._span(i, prompts[i], texts[i])
            name = f"{conversation.id}/{number}" if len(self.turns) > 1 else conversation.id
            is_cut = cut and i == self.turns[-1]
            documents.append(self._document(name, texts[i], [(start, end)], text_end if is_cut else None))
        return documents

    def _render(self, messages: list[Message], generation: bool = False) -> str:
        tools = self.conversation.tools
        try:
            return render(messages, self.tokenizer, tools=tools, kwargs=self.kwargs, generation=generation)
        except (jinja2.TemplateError, TypeError) as error:
            raise _NotUsable(str(error)) from error

    def _says_its_calls(self, turn: int, prompt: str, text: str) -> bool:
        """Whether the template renders the tool calls of an answer; some have no place for them."""
        calls = self.messages[turn].get("tool_calls") or []
        names = [str(call.get("function", call).get("name")) for call in calls]
        return all(text.count(name) > prompt.count(name) for name in names)

    def _error(self, turn: int, why: str) -> SpansNotFound:
        name = f"{self.tokenizer.name_or_path or 'tokenizer'} ({template_hash(self.tokenizer, self.kwargs)})"
        return SpansNotFound(
            f"chat template {name}, row {self.conversation.id} ({self.conversation.source}), "
            f"message {turn}: {why}. "
            "Use the template and arguments that the answers were generated with "
            "(data.chat_template, data.chat_template_kwargs), or regenerate the answers"
        )

    def _span(self, turn: int, prompt: str, text: str) -> tuple[int, int, int]:
        """(start, end with terminator, end without) of the answer that ends `text`, the render of
        messages[:turn + 1].
        """
        if not text.startswith(prompt):
            raise self._error(turn, "the generation prompt is not how the template renders this answer's beginning")
        answer = text[len(prompt) :]
        if not answer.strip():
            raise self._error(turn, "the template renders nothing for this answer")
        text_end, end = self._terminator(turn, answer)
        return len(prompt), len(prompt) + end, len(prompt) + text_end

    def _terminator(self, turn: int, answer: str) -> tuple[int, int]:
        """(begin, end) of what closes a rendered answer; the white space after it is the template's, not the
        target's.
        """
        message = self.messages[turn]
        content = (message["content"] or "").strip()
        if content and not message.get("tool_calls"):
            begin = len(self._without_specials(answer))
            if not answer[:begin].endswith(content):
                # A terminator in plain text, or an answer that itself ends like one: let the template show
                # what follows the content.
                suffix = self._after_content(turn, self.messages[: turn + 1])
                begin = len(answer) - len(suffix) if suffix is not None and answer.endswith(suffix) else -1
            if begin >= 0:
                closing = self._first_special(answer, begin)
                end = closing if closing is not None else max(begin, len(answer.rstrip()))
                if end == begin:
                    self.kept.notes["answer_rendered_without_turn_end"] += 1
                return begin, end
        # Tool calls may contain special tokens, so only the last one closes the turn.
        found = [(answer.rfind(special), len(special)) for special in self.specials]
        begin, length = max(found, default=(-1, 0))
        if begin < 0:
            return len(answer.rstrip()), len(answer.rstrip())
        text_end = len(answer[:begin].rstrip()) if self.conversation.finish_reason == "length" else begin
        return text_end, begin + length

    def _without_specials(self, text: str) -> str:
        """`text` without the special tokens and white space at its end."""
        text = text.rstrip()
        while special := next((s for s in self.specials if text.endswith(s)), None):
            text = text[: -len(special)].rstrip()
        return text

    def _first_special(self, text: str, begin: int) -> int | None:
        """End of the first special token at or after `begin`."""
        found = [(at, -len(special)) for special in self.specials if (at := text.find(special, begin)) >= 0]
        return min(found)[0] - min(found)[1] if found else None

    def _after_content(self, turn: int, messages: list[Message]) -> str | None:
        """What the template renders after the content of message `turn`, shown by a stand-in for that
        content.
        """
        text, at = self._with_stand_in(turn, messages, keep_reasoning=True)
        return text[at + 1 :] if at >= 0 else None

    def _with_stand_in(self, turn: int, messages: list[Message], keep_reasoning: bool) -> tuple[str, int]:
        """The render in which one unused character replaces the content of `turn`, and where it is (-1: not
        once).
        """
        used = json.dumps(messages, ensure_ascii=False)
        stand_in = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
        dropped = () if keep_reasoning else ("reasoning_content", "reasoning", "thinking")
        message = {key: value for key, value in messages[turn].items() if key not in dropped}
        text = self._render([*messages[:turn], {**message, "content": stand_in}, *messages[turn + 1 :]])
        return text, text.find(stand_in) if text.count(stand_in) == 1 else -1

    def _span_in_full(self, turn: int, full: str, prompt: str, text: str) -> tuple[int, int, int]:
        """As `_span`, for a turn inside the render of the whole conversation."""
        if full == text:
            return self._span(turn, prompt, text)
        start = len(prompt)
        if not full.startswith(prompt):
            shown, start = self._with_stand_in(turn, self.messages, keep_reasoning=False)
            if start < 0 or not full.startswith(shown[:start]):
                raise self._error(turn, "the answer's beginning is not found in the rendered conversation")
        suffix = self._after_content(turn, self.messages)
        if suffix is None or not full.endswith(suffix):
            raise self._error(turn, "the answer's end is not found in the rendered conversation")
        text_end = max(start, len(full) - len(suffix))
        # The turn must close before the next message's own text begins.
        shown, bound = self._with_stand_in(turn + 1, self.messages, keep_reasoning=True)
        if bound < 0 or not full.startswith(shown[:bound]):
            raise self._error(turn, "the next message is not found in the rendered conversation")
        own = self._span(turn, prompt, text) if text.startswith(prompt) else None
        closing = text[own[2] : own[1]].strip() if own else ""
        rest = full[text_end:bound].lstrip()
        end: int | None
        if closing and rest.startswith(closing):
            end = bound - len(rest) + len(closing)
        elif self.messages[turn].get("tool_calls") and closing in rest:
            end = bound - len(rest) + rest.index(closing) + len(closing)
        else:
            # The template closes earlier turns otherwise than the last one, or not at all.
            end = text_end if own and not closing else self._first_special(full, text_end)
        if end is None or end > bound:
            raise self._error(turn, "the answer's terminator is not found in the rendered conversation")
        return start, end, text_end

    def _count_reasoning(self, full: str, spans: list[tuple[int, int, int]]) -> None:
        for i, (start, end, _) in zip(self.turns, spans, strict=True):
            message = self.messages[i]
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            if not reasoning and "</think>" in message["content"]:
                reasoning = message["content"].split("</think>")[0].split("<think>")[-1]
            if reasoning.strip() and reasoning.strip() not in full[start:end]:
                self.kept.notes["earlier_reasoning_not_rendered"] += 1

    def _document(self, name: str, text: str, spans: list[tuple[int, int]], cut: int | None) -> _Document:
        """Tokens of `text`, up to character `cut` if the answer was cut off there (no turn end is supervised
        then).
        """
        if cut is not None:
            text = text[:cut]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        finish_reason = "stop" if cut is None else "length"
        return _Document(name, np.array(encoded["input_ids"]), _mask(text, offsets, spans), finish_reason)


def _mask(text: str, offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """bool (T,): tokens that begin inside a span. offsets: int (T, 2), begin and end of each token in `text`.

    A token that begins before the span counts only if it brings nothing but white space from there
    (`Ġhello`): byte-level tokenizers report such tokens with or without that space. Tokens without width
    stand where the one before them ended.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    previous = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    begins = np.where(ends > begins, begins, previous)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (begins >= start) & (begins < end)
        for i in np.flatnonzero((begins < start) & (ends > start)):
            mask[i] = text[begins[i] : start].isspace() and bool(text[start : ends[i]].strip())
    return mask
