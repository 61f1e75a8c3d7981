"""A tokenizer's chat template: its text of a conversation, its special tokens, and what its reasoning marks mean.

What a mark means is never looked up in a list: the template itself is asked, with stand-ins for reasoning and content.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MARK = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])"
TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError)


class NotUsable(Exception):
    """The template refuses this conversation; counted, not raised to the user."""


def render(
    messages: list[Message], tokenizer: Any, *, tools: list[Any] | None, kwargs: dict[str, Any], generation: bool
) -> str:
    """The template's text of `messages`, with the generation prompt if asked for."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generation, **kwargs
    )


class NotEncodable(ValueError):
    """A text with a word for which the tokenizer has no token, not even one for unknown words."""


def encode(text: str, tokenizer: Any, *, add_special_tokens: bool = False, **options: Any) -> Any:
    """The tokenizer's encoding of a text in which a template has written every special token. Raises NotEncodable."""
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options)
    except Exception as error:
        if type(error) is not Exception:  # the library has no narrower one for what its models refuse
            raise
        raise NotEncodable(
            f"the tokenizer {tokenizer.name_or_path} has no token for a word in it, and none for unknown words ({error}); leave such rows out, "
            "or give its model an unk_token in tokenizer.json"
        ) from None


def template_hash(tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> str:
    """16 hex digits that change with the template's text or its arguments."""
    text = json.dumps([tokenizer.chat_template, chat_template_kwargs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hex digits over vocabulary, merges, normalisation and special tokens; not over how a caller last padded or cut."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"padding": None, "truncation": None}
    text = json.dumps([content, type(tokenizer).__name__, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reasoning_of(message: Message) -> str:
    """The reasoning that a message carries in a field of its own, "" if none."""
    found = (message[field] for field in REASONING_FIELDS if isinstance(message.get(field), str))
    return next((text for text in found if text.strip()), "")


def unused_characters(messages: list[Message], count: int) -> list[str]:
    """Private-use characters that do not occur in `messages`."""
    used = json.dumps(messages, ensure_ascii=False)
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
    return [next(free) for _ in range(count)]


class Template:
    """What the rows of a data set share: the tokenizer, its special tokens, the texts of the tokens that stop serving, and whether the
    template marks answers itself (`{% generation %}`).
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        specials = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self.stops = {str(tokenizer.convert_ids_to_tokens(i)) for i in stop_ids} & {
            *map(str, added.values()),
            *specials,
        }
        if tokenizer.eos_token is not None:
            self.stops.add(tokenizer.eos_token)
        self.specials = sorted(specials, key=len, reverse=True)
        self._endings = tuple(self.specials)
        self._any_special = re.compile("|".join(map(re.escape, self.specials)) or "(?!)")
        self.tagged = TAG.search(str(tokenizer.chat_template)) is not None
        self._closers: dict[str, bool] = {}

    def render(
        self, messages: list[Message], tools: list[Any] | None, kwargs: dict[str, Any], generation: bool = False
    ) -> str:
        """The template's text. Raises NotUsable where the template refuses."""
        try:
            return render(messages, self.tokenizer, tools=tools, kwargs=kwargs, generation=generation)
        except TEMPLATE_ERRORS as error:
            raise NotUsable(str(error)) from error

    def generation_spans(
        self, messages: list[Message], tools: list[Any] | None, kwargs: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text and the spans that the template's `{% generation %}` tags mark in it."""
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **{**self.tokenizer.special_tokens_map, **kwargs},
            )
        except TEMPLATE_ERRORS as error:
            raise NotUsable(str(error)) from error
        return texts[0], [tuple(span) for span in spans[0]]

    def without_specials(self, text: str) -> str:
        """`text` without the special tokens and white space at its end."""
        text = text.rstrip()
        while text.endswith(self._endings):
            special = next(special for special in self.specials if text.endswith(special))
            text = text[: -len(special)].rstrip()
        return text

    def special_at(self, text: str, at: int) -> str:
        """The longest special token that stands at `at`, "" if none."""
        found = self._any_special.match(text, at)
        return found[0] if found else ""

    def next_special(self, text: str, begin: int) -> int | None:
        """Where the first special token at or after `begin` stands."""
        found = self._any_special.search(text, begin)
        return found.start() if found else None

    def closing(self, text: str, begin: int) -> int | None:
        """End of what closes an answer at or after `begin`: the first special token there, or the stop token that follows it, with the
        template's own words between them or none (`<|END_TEXT|><|END_OF_TURN_TOKEN|>`), but not after white space alone.
        """
        at = self.next_special(text, begin)
        if at is None:
            return None
        first = None
        while at is not None:
            special = self.special_at(text, at)
            end = at + len(special)
            first = end if first is None else first
            if special in self.stops:
                return end
            at = self.next_special(text, end)
            if at is not None and at > end and text[end:at].isspace():
                break
        return first

    def without_prompt(self, said: str, prompt: str) -> str:
        """`said` without the generation prompt after it: some templates write one whether asked for or not."""
        length = next((n for n, (a, b) in enumerate(zip(reversed(said), reversed(prompt))) if a != b), len(said))
        at = self.next_special(said, len(said) - length)
        return said if at is None or self.special_at(said, at) in self.stops else said[:at]

    def stop_at(self, text: str) -> int | None:
        """Length of the white space and the stop token that `text` begins with; None if it begins otherwise."""
        rest = text.lstrip()
        special = self.special_at(rest, 0)
        return len(text) - len(rest) + len(special) if special in self.stops else None

    def closes_reasoning(self, text: str, tools: list[Any] | None, kwargs: dict[str, Any]) -> bool:
        """Whether the mark that `text` ends with (before white space) closes reasoning in this template."""
        mark = re.search(rf"{MARK}$", text.rstrip())
        return mark is not None and self._is_closer(mark[0], tools, kwargs)

    def closer_of(self, text: str, tools: list[Any] | None, kwargs: dict[str, Any]) -> str | None:
        """The mark that closes the reasoning which `text` opens with its last mark; None if it opens none."""
        mark = re.search(rf"{MARK}$", text.rstrip())
        if mark is None:
            return None
        opener = mark[0]
        for closer in (opener[0] + "/" + opener[1:], opener.replace("START", "END").replace("start", "end")):
            if closer != opener and self._is_closer(closer, tools, kwargs):
                return closer
        return None

    def _is_closer(self, mark: str, tools: list[Any] | None, kwargs: dict[str, Any]) -> bool:
        """The template renders the mark between reasoning and content, or drops the part of a content that stands before it."""
        key = json.dumps([mark, kwargs], sort_keys=True, default=str)
        if key not in self._closers:
            self._closers[key] = any(
                self._shows_closer(mark, said, kwargs, tools) for said in _probes(mark, *"\ue000\ue001")
            )
        return self._closers[key]

    def _shows_closer(self, mark: str, said: Message, kwargs: dict[str, Any], tools: list[Any] | None) -> bool:
        """Whether the template's text of the probe `said` shows that `mark` closes reasoning."""
        question = {"role": "user", "content": "?"}
        thinking = {**kwargs, "enable_thinking": True, "thinking": True}
        before = [question, {"role": "assistant", "content": "."}, question]
        conversations = ([question, said], [question, said, question], [*before, said])
        for messages, arguments in itertools.product(conversations, (kwargs, thinking)):
            try:
                text = self.render(messages, tools, arguments)
            except NotUsable:
                continue
            reasoning, end = text.find("\ue000"), text.rfind("\ue001")
            if end < 0:
                continue
            if reasoning < 0 and mark in said["content"]:
                return True
            if 0 <= reasoning < end and mark not in said["content"] and mark in text[reasoning:end]:
                return True
        return False


def _probes(mark: str, reasoning: str, content: str) -> list[Message]:
    """Answers in which `reasoning` is to be told from `content`: before the mark, in a field, and beside a tool call (some templates
    render reasoning only there).
    """
    fields = dict.fromkeys(REASONING_FIELDS, reasoning)
    call = {"id": "call00000", "type": "function", "function": {"name": content, "arguments": {}}}
    return [
        {"role": "assistant", "content": content, **fields},
        {"role": "assistant", "content": "", "tool_calls": [call], **fields},
        {"role": "assistant", "content": f"{reasoning}{mark}{content}"},
    ]
