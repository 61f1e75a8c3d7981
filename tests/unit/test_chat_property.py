"""Masks of random conversations against an oracle that writes each template's text piece by piece, knowing who says what."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.chat import tokenize
from dflash_train.data.template import Template
from dflash_train.types import Conversation

Piece = tuple[str, bool]
Messages = list[dict[str, Any]]

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# No header of its own for answers, an eos after them; the system message goes into the first question.
BRACKETS = """{{ '<bos>' }}{% set first = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}
{%- set first.text = m.content ~ '\\n' %}{% elif m.role == 'user' %}[INST]{{ first.text }}{{ m.content }}[/INST]{% set first.text = '' %}
{%- else %}{{ m.content }}{{ '<eos>' }}{% endif %}{% endfor %}"""

# Ends a turn by beginning the next.
ROLES = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

# The generation prompt opens reasoning, which answers before the last question lose.
OPENED = """{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > last.user %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# The generation prompt closes reasoning, of which the history shows nothing.
CLOSED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>{% endif %}"""


def chatml(messages: Messages) -> list[list[Piece]]:
    pieces: list[Piece] = []
    for m in messages:
        said = m["role"] == "assistant"
        pieces += [(f"<|im_start|>{m['role']}\n", False), (m["content"] + "<|im_end|>", said), ("\n", False)]
    return [pieces]


def brackets(messages: Messages) -> list[list[Piece]]:
    pieces: list[Piece] = [("<bos>", False)]
    system = ""
    for m in messages:
        if m["role"] == "system":
            system = m["content"] + "\n"
        elif m["role"] == "user":
            pieces.append((f"[INST]{system}{m['content']}[/INST]", False))
            system = ""
        else:
            pieces.append((m["content"] + "<eos>", True))
    return [pieces]


def roles(messages: Messages) -> list[list[Piece]]:
    pieces: list[Piece] = []
    for before, m in zip([None, *messages], messages, strict=False):
        # The answer before this message ended with the token that begins it.
        pieces += [(f"<|{m['role']}|>", before is not None and before["role"] == "assistant")]
        pieces += [(m["content"], m["role"] == "assistant")]
    return [[*pieces, ("<|user|>", True)]]


def one_row_an_answer(opening: str, answer: Callable[[dict[str, Any]], str]) -> Callable[[Messages], list[list[Piece]]]:
    def rows(messages: Messages) -> list[list[Piece]]:
        found = []
        for i, m in enumerate(messages):
            if m["role"] == "assistant":
                history = "".join(f"<|im_start|>{b['role']}\n{b['content']}<|im_end|>\n" for b in messages[:i])
                found.append(
                    [
                        (history + "<|im_start|>assistant\n" + opening, False),
                        (answer(m) + "<|im_end|>", True),
                        ("\n", False),
                    ]
                )
        return found

    return rows


ORACLES = {
    CHATML: chatml,
    BRACKETS: brackets,
    ROLES: roles,
    OPENED: one_row_an_answer("<think>\n", lambda m: f"{m['reasoning_content']}\n</think>\n\n{m['content']}"),
    CLOSED: one_row_an_answer("<think>\n\n</think>", lambda m: m["content"]),
}


@cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token a byte, besides the marks."""
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"])
    core.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    eos = {CHATML: "<|im_end|>", BRACKETS: "<eos>", ROLES: "<|user|>"}.get(template, "<|im_end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    fast.chat_template = template
    return fast


# Words that a search for markers would stumble over.
WORDS = st.sampled_from(
    ["a", "b.", "é", "assistant", "user\n", "[INST]", "END", "im_end", "🙂", "\n\n", " ", "x = {y}", "think"]
)
TEXT = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(lambda text: text.strip() == text != "")


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    messages: Messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT), "reasoning_content": draw(TEXT)})
    return messages


def tokens(pieces: list[Piece], encode: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Ids and mask of the pieces, each tokenised by itself."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, supervised in pieces:
        new = encode(text, add_special_tokens=False)["input_ids"]
        ids, mask = ids + new, mask + [supervised] * len(new)
    return ids, mask


@settings(max_examples=150, deadline=None)
@given(messages=conversations(), template=st.sampled_from(list(ORACLES)), cut=st.booleans())
def test_random_conversations(messages: Messages, template: str, cut: bool) -> None:
    if template is not OPENED:
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    row = Conversation(id="r", source="f:1", messages=messages, finish_reason="length" if cut else "stop")
    encode = tokenizer(template)
    examples = tokenize(
        row, Template(encode), chat_template_kwargs={}, reasoning_rows=ReasoningRows.per_turn, max_length=1 << 20
    )
    wanted = ORACLES[template](messages)
    if cut:
        # Nothing after the last answer's own words.
        ends = tuple(messages[-1]["content"] + end for end in ("", "<|im_end|>", "<eos>"))
        at = max(i for i, (text, supervised) in enumerate(wanted[-1]) if supervised and text.endswith(ends))
        text = wanted[-1][at][0]
        wanted[-1] = [*wanted[-1][:at], (text.removesuffix("<|im_end|>").removesuffix("<eos>"), True)]
    rows = [tokens(pieces, encode) for pieces in wanted]
    # Fewer than two tokens in a row: there is nothing to predict.
    rows = [(ids, mask) for ids, mask in rows if any(map(operator.and_, mask, mask[1:]))]
    assert [e.token_ids.tolist() for e in examples] == [ids for ids, _ in rows]
    assert [e.supervised.tolist() for e in examples] == [mask for _, mask in rows]
