"""What the target says in a conversation: found in the template's text by rendering prefixes, put together where the template writes
the history otherwise than serving begins an answer, and carried to tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.read import Kept
from dflash_train.data.template import (
    MARK,
    REASONING_FIELDS,
    Message,
    NotUsable,
    Template,
    encode,
    reasoning_of,
    template_hash,
    unused_characters,
)
from dflash_train.types import Conversation


@dataclass
class Document:
    """An example before it is cut: ids, mask and whether the text was cut off."""

    id: str
    token_ids: np.ndarray
    supervised: np.ndarray
    finish_reason: str


class SpansNotFound(ValueError):
    """What the target says in a conversation cannot be told from the rest; names template and row."""


@dataclass
class _Answer:
    """One answer where serving would put it: `text` begins with the generation prompt, which ends at `start`; `text_end` and `end` are
    where the answer ends without and with what closes it.
    """

    text: str
    start: int
    text_end: int
    end: int


class Chat:
    """One conversation with its template: renders prefixes, finds spans, tokenises."""

    def __init__(self, conversation: Conversation, template: Template, kwargs: dict[str, Any], kept: Kept) -> None:
        self.conversation, self.template, self.kwargs, self.kept = conversation, template, kwargs, kept
        self.turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        # What follows the last answer is not part of anything the target says.
        self.messages = conversation.messages[: self.turns[-1] + 1] if self.turns else []

    def documents(self, reasoning_rows: ReasoningRows) -> list[Document]:
        if self.turns and self.turns[0] == 0:
            # Nobody asked for it, and serving cannot: there is no prompt without a message.
            self.kept.notes["opening_turn_not_supervised"] += 1
            self.turns = self.turns[1:]
        if not self.turns:
            return []
        prompts = {i: self._render(self.messages[:i], generation=True) for i in self.turns}
        texts = {i: self._render(self.messages[: i + 1]) for i in self.turns}
        self.cut = self.turns[-1] if self.conversation.finish_reason == "length" else None
        for i in [i for i in self.turns if not self._says_its_calls(i, prompts[i], texts[i])]:
            # What is left of such an answer is a turn end, which the target did not say there.
            self.kept.notes["tool_call_not_rendered"] += 1
            self.turns.remove(i)
        if not self.turns:
            return []
        try:
            answers = {i: self._answer(i, prompts[i], texts[i]) for i in self.turns}
        except SpansNotFound:
            answers = self._from_generation_tags(prompts, texts)
            if answers is None:
                raise
        return self._documents(answers, reasoning_rows)

    def _documents(self, answers: dict[int, _Answer], reasoning_rows: ReasoningRows) -> list[Document]:
        """One document that holds all answers if each begins with the one before, or if asked for; else one for each."""
        last = answers[self.turns[-1]]
        whole = all(last.text.startswith(answer.text) for answer in answers.values())
        self._compare_with_generation_tags(answers)
        for i, answer in answers.items():
            if self._lacks_reasoning(i, answer.text[answer.start : answer.end]):
                self.kept.notes["reasoning_not_rendered"] += 1
        if whole:
            spans = [(answers[i].start, answers[i].end) for i in self.turns]
            return [self._document(self.conversation.id, last, spans, self.turns[-1])]
        if reasoning_rows is ReasoningRows.whole:
            spans = [self._span_in_full(i, answers) for i in self.turns]
            for i, (start, end) in zip(self.turns, spans, strict=True):
                own = answers[i].text[answers[i].start : answers[i].end]
                if self._lacks_reasoning(i, last.text[start:end]) and not self._lacks_reasoning(i, own):
                    self.kept.notes["earlier_reasoning_not_rendered"] += 1
            return [self._document(self.conversation.id, last, spans, self.turns[-1])]
        documents = []
        for number, i in enumerate(self.turns):
            name = f"{self.conversation.id}/{number}" if len(self.turns) > 1 else self.conversation.id
            documents.append(self._document(name, answers[i], [(answers[i].start, answers[i].end)], i))
        return documents

    def _render(self, messages: list[Message], generation: bool = False) -> str:
        return self.template.render(messages, self.conversation.tools, self.kwargs, generation)

    def _says_its_calls(self, turn: int, prompt: str, text: str) -> bool:
        """Whether the template renders the tool calls of an answer; some have no place for them."""
        return all(text.count(name) > prompt.count(name) for name in self._call_names(turn))

    def _call_names(self, turn: int) -> list[str]:
        calls = self.messages[turn].get("tool_calls") or []
        return [str(call.get("function", call).get("name")) for call in calls]

    def _lacks_reasoning(self, turn: int, said: str) -> bool:
        """Whether the answer has reasoning that `said` does not hold."""
        reasoning = reasoning_of(self.messages[turn])
        content = self.messages[turn]["content"]
        if not reasoning and "</think>" in content:
            reasoning = content.split("</think>")[0].split("<think>")[-1]
        return bool(reasoning.strip()) and reasoning.strip() not in said

    def _error(self, turn: int, why: str) -> SpansNotFound:
        tokenizer = self.template.tokenizer
        name = f"{tokenizer.name_or_path or 'tokenizer'} ({template_hash(tokenizer, self.kwargs)})"
        return SpansNotFound(
            f"chat template {name}, row {self.conversation.id} ({self.conversation.source}), "
            f"message {turn}: {why}. "
            "Use the template and arguments that the answers were generated with "
            "(data.chat_template, data.chat_template_kwargs; enable_thinking: false where they were generated "
            "without reasoning), or regenerate the answers: such rows carry the exact ids"
        )

    def _answer(self, turn: int, prompt: str, text: str) -> _Answer:
        """The answer of message `turn` after its generation prompt. prompt, text: renders of messages[:turn] and messages[:turn + 1]."""
        rendered = (
            text.startswith(prompt)
            and not self._repeats_prompt(turn, prompt, text)
            and not self._drops_reasoning(turn, prompt, text)
        )
        said = text[len(prompt) :] if rendered else self._reconstructed(turn, prompt, text)
        if not said.strip():
            raise self._error(turn, "the template renders nothing for this answer")
        self._check_reasoning(turn, prompt, said)
        said = self.template.without_prompt(said, prompt)
        text_end, end = self._terminator(turn, prompt, said)
        if turn == self.cut:
            text_end = self._cut_in_reasoning(turn, said, text_end)
        elif end == text_end:
            closing = self._turn_end(turn, prompt + said[:text_end])
            if closing is None:
                self.kept.notes["answer_rendered_without_turn_end"] += 1
            else:
                said = said[:text_end] + closing
                end = len(said)
        start = len(prompt)
        return _Answer(prompt + said, start, start + text_end, start + end)

    def _repeats_prompt(self, turn: int, prompt: str, text: str) -> bool:
        """The content begins with the mark (`<think>`) that the generation prompt ends with, and the template writes both."""
        content = self.messages[turn]["content"]
        mark = re.match(MARK, content)
        return mark is not None and prompt.rstrip().endswith(mark[0]) and text[len(prompt) :].startswith(content)

    def _drops_reasoning(self, turn: int, prompt: str, text: str) -> bool:
        """The content holds the reasoning that the generation prompt opened, raw, and the template leaves it out."""
        if not self._lacks_reasoning(turn, text[len(prompt) :]) or reasoning_of(self.messages[turn]):
            return False
        closer = self.template.closer_of(prompt, self.conversation.tools, self.kwargs)
        return closer is not None and closer in self.messages[turn]["content"]

    def _reconstructed(self, turn: int, prompt: str, text: str) -> str:
        """What the target said after `prompt`, where the template writes an answer in the history otherwise than serving begins it.

        Raises SpansNotFound unless the template leaves one possibility.
        """
        message, tools = self.messages[turn], self.conversation.tools
        base = self._render(self.messages[:turn])
        if not (prompt.startswith(base) and text.startswith(base)):
            said = self._after_same_header(turn, prompt, text)
            if said is None:
                why = "the generation prompt is not how the template renders this answer's beginning"
                raise self._error(turn, why)
            return said
        opening, body = prompt[len(base) :], text[len(base) :]
        closed = self.template.closes_reasoning(opening, tools, self.kwargs)
        reasoning, content = reasoning_of(message), message["content"]
        if reasoning and not closed:
            begin = self._begins(turn, base, reasoning=True)
            if begin is not None and opening.startswith(begin) and body.startswith(begin + reasoning.strip()):
                return body[len(begin) :]
            raise self._error(
                turn, f"the template does not render its reasoning after the generation prompt {opening!r}"
            )
        begin = self._begins(turn, base, reasoning=False)
        if reasoning or begin is None:
            why = f"the generation prompt {opening!r} is not how the template renders this answer's beginning"
            raise self._error(turn, why)
        after = self._after_content(turn, self.messages[: turn + 1]) or ""
        mark = re.search(rf"{MARK}\s*$", opening)
        if mark is not None and content.startswith(mark[0].rstrip()) and not message.get("tool_calls"):
            # The raw text, with what the prompt has already said.
            return content[len(mark[0]) if content.startswith(mark[0]) else len(mark[0].rstrip()) :] + after
        closer = self.template.closer_of(opening, tools, self.kwargs)
        if closer and closer in content and not message.get("tool_calls"):
            return content + after
        if closed and mark is not None and mark[0].rstrip() in content:
            raise self._error(turn, f"it holds reasoning, which the generation prompt {opening!r} has closed")
        same = opening.startswith(begin) or (mark is not None and begin.rstrip().endswith(mark[0].rstrip()))
        if closed and same and body.startswith(begin):
            return body[len(begin) :]
        raise self._error(
            turn,
            f"the generation prompt ends in {opening!r}, which this answer, as the template renders it, does not follow",
        )

    def _after_same_header(self, turn: int, prompt: str, text: str) -> str | None:
        """The answer, from its content on, of a template that writes the history otherwise once it is answered (Mistral moves the system
        message), if its header, from the last special token on, is also the generation prompt's.
        """
        shown, at = self._with_stand_in(turn, self.messages[: turn + 1], keep_reasoning=True)
        if at < 0 or shown[:at] != text[:at]:
            return None
        header = shown[max((shown.rfind(s, 0, at) for s in self.template.specials), default=-1) : at]
        return text[at:] if header and prompt.endswith(header) else None

    def _begins(self, turn: int, base: str, reasoning: bool) -> str | None:
        """What the template writes between `base`, the messages before, and the reasoning (else the content) of message `turn`."""
        first, second = unused_characters(self.messages, 2)
        message = {k: v for k, v in self.messages[turn].items() if k not in (*REASONING_FIELDS, "tool_calls")}
        if reasoning:
            message |= {k: first for k in REASONING_FIELDS if self.messages[turn].get(k)}
        text = self._render([*self.messages[:turn], {**message, "content": second}])
        at = text.find(first if reasoning else second)
        return text[len(base) : at] if at >= 0 and text.startswith(base) else None

    def _check_reasoning(self, turn: int, prompt: str, said: str) -> None:
        """Raise SpansNotFound for an answer without the reasoning that stands in the row, or never closing what the prompt opened."""
        tools, kwargs = self.conversation.tools, self.kwargs
        closer = self.template.closer_of(prompt, tools, kwargs)
        if closer is not None and closer not in said and turn != self.cut:
            raise self._error(
                turn,
                f"the generation prompt opens reasoning that the answer, as rendered, does not close with {closer}",
            )
        if not self._lacks_reasoning(turn, said):
            return
        opener = re.match(rf"\s*({MARK})", said)
        if closer is not None or (opener and self.template.closer_of(opener[1], tools, kwargs)):
            raise self._error(turn, "the template renders its reasoning as empty")

    def _cut_in_reasoning(self, turn: int, said: str, text_end: int) -> int:
        """Where an answer ends that was cut off while it reasoned: what the template closes reasoning with was not said."""
        message, reasoning = self.messages[turn], reasoning_of(self.messages[turn]).strip()
        if message["content"].strip() or message.get("tool_calls") or not reasoning or reasoning not in said:
            return text_end
        return said.rfind(reasoning) + len(reasoning)

    def _turn_end(self, turn: int, text: str) -> str | None:
        """The stop token with which the template closes this answer once another message follows, with the white space before it; None
        if there is none. GLM's `<|user|>` begins the next message, and is what the target generates to hand over.
        """
        message = self.messages[turn]
        role = "tool" if message.get("tool_calls") else "user"
        first, second = unused_characters(self.messages, 2)
        stand_in = message if message.get("tool_calls") else {**message, "content": first}
        try:
            shown = self._render([*self.messages[:turn], stand_in, {"role": role, "content": second}])
        except NotUsable:
            return None
        # After tool calls: what follows the last of them in `text`, found again.
        said = text[max((text.rfind(name) for name in self._call_names(turn)), default=0) :]
        at = shown.find(first) + 1 if first in shown else shown.rfind(said) + len(said) if said in shown else 0
        length = self.template.stop_at(shown[at:]) if at else None
        return shown[at : at + length] if length else None

    def _terminator(self, turn: int, prompt: str, answer: str) -> tuple[int, int]:
        """(begin, end) of what closes a rendered answer; the white space after it is the template's, not the
        target's.
        """
        message = self.messages[turn]
        content = (message["content"] or "").strip()
        if content and not message.get("tool_calls"):
            begin = len(self.template.without_specials(answer))
            if not answer[:begin].endswith(content):
                # A terminator in plain text, or an answer that itself ends like one: let the template show
                # what follows the content.
                suffix = self._after_content(turn, self.messages[: turn + 1])
                begin = len(answer) - len(suffix) if suffix is not None and answer.endswith(suffix) else -1
            if begin >= 0:
                closing = self.template.closing(answer, begin)
                return begin, closing if closing is not None else max(begin, len(answer.rstrip()))
        # Tool calls may contain special tokens: what closes the turn is the first stop token after them, or the last special token.
        after = max((answer.rfind(name) for name in self._call_names(turn)), default=0)
        stops = [(at, len(stop)) for stop in self.template.stops if (at := answer.find(stop, after)) >= 0]
        found = [(at, len(special)) for special in self.template.specials if (at := answer.rfind(special)) >= after]
        begin, length = min(stops) if stops else max(found, default=(-1, 0))
        if begin < 0 or (not stops and self._turn_end(turn, prompt + answer.rstrip()) is not None):
            return len(answer.rstrip()), len(answer.rstrip())
        if self._repeats_instructions(prompt, answer[after:begin]):
            raise self._error(turn, "the template adds instructions of its own to the tool call")
        text_end = len(answer[:begin].rstrip()) if self.conversation.finish_reason == "length" else begin
        return text_end, begin + length

    def _repeats_instructions(self, prompt: str, tail: str) -> bool:
        """Whether a message of the prompt, with its header of two special tokens, stands in `tail` again."""
        at = self.template.next_special(tail, 0)
        while at is not None:
            end = at + len(self.template.special_at(tail, at))
            header = self.template.special_at(tail, end)
            if header and tail[at : end + len(header) + 20] in prompt and tail[end + len(header) :].strip():
                return True
            at = self.template.next_special(tail, end)
        return False

    def _after_content(self, turn: int, messages: list[Message], generation: bool = False) -> str | None:
        """What the template renders after the content of message `turn`, shown by a stand-in for that
        content.
        """
        text, at = self._with_stand_in(turn, messages, keep_reasoning=True, generation=generation)
        return text[at + 1 :] if at >= 0 else None

    def _with_stand_in(
        self, turn: int, messages: list[Message], keep_reasoning: bool, generation: bool = False
    ) -> tuple[str, int]:
        """The render in which one unused character replaces the content of `turn`, and where it is (-1: not
        once).
        """
        (stand_in,) = unused_characters(messages, 1)
        dropped = () if keep_reasoning else REASONING_FIELDS
        message = {key: value for key, value in messages[turn].items() if key not in dropped}
        text = self._render([*messages[:turn], {**message, "content": stand_in}, *messages[turn + 1 :]], generation)
        return text, text.find(stand_in) if text.count(stand_in) == 1 else -1

    def _span_in_full(self, turn: int, answers: dict[int, _Answer]) -> tuple[int, int]:
        """(start, end) of an answer inside the last answer's text, whose history is the last generation prompt."""
        own, last = answers[turn], answers[self.turns[-1]]
        if own is last:
            return own.start, own.end
        messages, history = self.messages[: self.turns[-1]], last.text[: last.start]
        prompt = own.text[: own.start]
        start = len(prompt)
        if not history.startswith(prompt):
            shown, start = self._with_stand_in(turn, messages, keep_reasoning=False, generation=True)
            if start < 0 or not history.startswith(shown[:start]):
                raise self._error(turn, "the answer's beginning is not found in the rendered conversation")
        suffix = self._after_content(turn, messages, generation=True)
        if suffix is None or not history.endswith(suffix):
            raise self._error(turn, "the answer's end is not found in the rendered conversation")
        text_end = max(start, len(history) - len(suffix))
        # The turn must close before the next message's own text begins.
        shown, bound = history, len(history)
        if turn + 1 < len(messages):
            shown, bound = self._with_stand_in(turn + 1, messages, keep_reasoning=True, generation=True)
        if bound < 0 or not history.startswith(shown[:bound]):
            raise self._error(turn, "the next message is not found in the rendered conversation")
        closing = own.text[own.text_end : own.end].strip()
        rest = history[text_end:bound].lstrip()
        end: int | None
        if closing and rest.startswith(closing):
            end = bound - len(rest) + len(closing)
        elif self.messages[turn].get("tool_calls") and closing in rest:
            end = bound - len(rest) + rest.index(closing) + len(closing)
        else:
            # The template closes earlier turns otherwise than the last one, or not at all.
            end = text_end if not closing else self.template.closing(history, text_end)
        if end is None or end > bound:
            raise self._error(turn, "the answer's terminator is not found in the rendered conversation")
        return start, end

    def _compare_with_generation_tags(self, answers: dict[int, _Answer]) -> None:
        """Count whether the template's own marks of the last answer say the same, up to white space and the turn end."""
        last = answers[self.turns[-1]]
        if not self.template.tagged:
            return
        text, spans = self.template.generation_spans(
            self.messages[: self.turns[-1] + 1], self.conversation.tools, self.kwargs
        )
        tagged = text[slice(*spans[-1])].strip() if spans else ""
        same = tagged in (last.text[last.start : end].strip() for end in (last.text_end, last.end))
        self.kept.notes["generation_tag_agrees" if same else "generation_tag_disagrees"] += 1

    def _from_generation_tags(self, prompts: dict[int, str], texts: dict[int, str]) -> dict[int, _Answer] | None:
        """The answers as the template's own marks give them, where they lie after the generation prompts that serving sends; None if
        it has no marks or they do not.
        """
        if not self.template.tagged:
            return None
        answers = {}
        for i in self.turns:
            text, spans = self.template.generation_spans(self.messages[: i + 1], self.conversation.tools, self.kwargs)
            inside = text == texts[i] and text.startswith(prompts[i]) and spans and spans[-1][0] >= len(prompts[i])
            if not inside or not text[slice(*spans[-1])].strip():
                return None
            self._check_reasoning(i, prompts[i], text[len(prompts[i]) :])
            start, end = spans[-1]
            text_end = start + len(text[start:end].rstrip())
            answers[i] = _Answer(
                text, len(prompts[i]), text_end, text_end + (self.template.stop_at(text[text_end:]) or 0)
            )
        self.kept.notes["spans_from_generation_tag"] += 1
        return answers

    def _document(self, name: str, answer: _Answer, spans: list[tuple[int, int]], turn: int) -> Document:
        """Tokens of an answer with what stands before it, up to where it was cut off (no turn end is supervised then)."""
        cut = turn == self.cut
        text = answer.text[: answer.text_end] if cut else answer.text
        encoded = encode(text, self.template.tokenizer, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        ids = np.array(encoded["input_ids"])
        return Document(name, ids, mask_of(text, offsets, spans), "length" if cut else "stop")


def mask_of(text: str, offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
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
