"""Write docs/templates.md: what becomes of conversations under real chat templates: python scripts/template_support.py [--check].

The templates are those that scripts/fetch_llama_cpp.py fetches. Their tokenizers are not to be had offline, so each gets one that has the
template's special strings as tokens and is otherwise one token a byte: masks are then exact to the character.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.answers import SpansNotFound
from dflash_train.data.chat import tokenize
from dflash_train.data.read import Kept
from dflash_train.data.template import Template
from dflash_train.types import Conversation, TokenizedExample

ROOT = Path(__file__).resolve().parent.parent
FOLDER, DOC = ROOT / ".rivals/llama.cpp/models/templates", ROOT / "docs" / "templates.md"
MARK = re.compile(
    r"<\|[^|<>{}\s]+\|>|<｜[^<>{}]+｜>|〈\|[^|]+\|〉|<\|[a-z_]+>|<[a-z_]+\|>|<\|/[a-z_]+>|</?s>|</?think(?::\w+)?>|<SPECIAL_\d+>"
    r"|<(?:start|end)_of_turn>|<(?:end|beginning)_of_sentence>|<seed:(?:bos|eos)>|</?tool_calls?>|<sep>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
    r"|\[e~\[|\]~!?b\]?\[?"
)
# The token that the model's own tokenizer calls eos, where the template does not name it or names several.
EOS = {
    "Apertus": "<|assistant_end|>", "Apriel": "<|end|>", "unsloth-Apriel": "<|end|>", "ByteDance": "<seed:eos>", "Cohere": "<|END_OF_TURN_TOKEN|>",
    "GLM": "<|endoftext|>", "GigaChat": "<|message_sep|>", "Kimi-K3": "<|end_of_msg|>", "MiniMax-M1": "<end_of_sentence>",
    "MiniMax": "[e~[", "NVIDIA-Nemotron-Nano": "<SPECIAL_12>", "Reka": "<sep>", "google-gemma-2": "<end_of_turn>", "google-gemma-4": "<turn|>",
    "Spark": "<｜end▁of▁sentence｜>", "deepseek": "<｜end▁of▁sentence｜>", "llama-cpp-deepseek": "<｜end▁of▁sentence｜>", "ibm": "<|end_of_text|>",
    "inclusionai": "<|role_end|>", "llm-jp": "<|return|>", "openai": "<|return|>", "muse": "<|eot|>", "upstage": "<|end|>", "Phi": "<|end|>",
    "microsoft": "<|end|>", "tencent": "<｜hy_eos:opensource｜>", "poolside": "〈|EOS|〉", "meetkai": "<|eot_id|>", "meta": "<|eot_id|>",
    "fireworks": "<|eot_id|>",
}  # fmt: skip
# Further tokens of the model's generation_config.json that end an answer.
STOPS = {
    "GLM": ["<|user|>", "<|observation|>"], "openai": ["<|call|>"], "llm-jp": ["<|call|>"], "google-gemma-4": ["<|tool_response>"],
    "poolside": ["</assistant>"], "upstage": ["<|calls|>"], "meta": ["<|eom_id|>"], "meetkai": ["<|eom_id|>"],
}  # fmt: skip
# Templates differ in the argument's name.
THINKING = {
    True: {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    False: {"enable_thinking": False, "thinking": False},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_tide", "arguments": {"port": "Brest"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "High tide.",
        "parameters": {"type": "object", "properties": {"port": {"type": "string", "description": "A port."}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, reasoning: str = "", **fields: Any) -> dict[str, Any]:
    kept = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **kept, **fields}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("Where is Brest?"), says("In Brittany.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user("Where is Brest?"), says("In Brittany.")]},
    "more turns": {"messages": [user("Where is Brest?"), says("In Brittany."), user("And Nice?"), says("On the Riviera.")]},
    "reasoning": {"messages": [user("2+2?"), says("Four.", "two plus two")], "thinking": True},
    "reasoning in each turn": {
        "messages": [user("2+2?"), says("Four.", "two plus two"), user("+1?"), says("Five.", "four plus one")],
        "thinking": True,
    },
    "thinking on, none said": {"messages": [user("Where is Brest?"), says("In Brittany.")], "thinking": True},
    "thinking off": {"messages": [user("Where is Brest?"), says("In Brittany.")], "thinking": False},
    "tools": {
        "messages": [
            user("When is high tide in Brest?"),
            says("", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call00001", "name": "get_tide", "content": "17:42"},
            says("At 17:42."),
        ],
        "tools": [TOOL],
    },
    "reasoning and tools": {
        "messages": [
            user("When is high tide in Brest?"),
            says("", "ask for it", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call00001", "name": "get_tide", "content": "17:42"},
            says("At 17:42.", "that is it"),
        ],
        "tools": [TOOL],
        "thinking": True,
    },
    "cut": {"messages": [user("Where is Brest?"), says("In Brit")], "finish_reason": "length"},
}  # fmt: skip


@dataclass
class Outcome:
    """What became of one conversation: `examples`, or `refused`, the reason for none; `notes` that were counted."""

    examples: list[TokenizedExample]
    refused: str
    notes: list[str]


def _of(name: str, table: dict[str, Any]) -> Any:
    return next((value for key, value in table.items() if name.startswith(key)), None)


@cache
def templates(folder: Path = FOLDER) -> dict[str, str]:
    """Name -> text of each template that is there."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer for the template: its special strings, and one token a byte."""
    text = templates()[name]
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    eos = _of(name, EOS) or next((s for s in ("<|im_end|>", "<|eot_id|>") if s in text), "</s>")
    marks = {*MARK.findall(text), eos, *(_of(name, STOPS) or [])}
    for mark in sorted(marks):
        # Models have these as tokens, but not as special ones.
        special = not re.fullmatch(r"</?(think|tool_call).*>", mark)
        (core.add_special_tokens if special else core.add_tokens)([AddedToken(mark, special=special, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, name_or_path=name, eos_token=eos, bos_token="<s>")
    fast.chat_template = text
    return fast


def conversation(kind: str) -> Conversation:
    """The conversation of that kind, as the reader gives it."""
    fields = CONVERSATIONS[kind]
    kwargs = THINKING[fields["thinking"]] if "thinking" in fields else {}
    return Conversation(
        id=kind.replace(" ", "_"),
        source=f"{kind}:1",
        messages=fields["messages"],
        tools=fields.get("tools"),
        chat_template_kwargs=kwargs,
        finish_reason=fields.get("finish_reason"),
    )


def serving(name: str) -> Template:
    """The template with the tokens that end an answer of this model."""
    ids = tokenizer(name)
    return Template(ids, [ids.eos_token_id, *ids.convert_tokens_to_ids(_of(name, STOPS) or [])])


def outcome(name: str, kind: str, reasoning_rows: ReasoningRows = ReasoningRows.per_turn) -> Outcome:
    """What becomes of one kind of conversation under one template."""
    kept = Kept(kept=1)
    try:
        examples = tokenize(
            conversation(kind), serving(name), chat_template_kwargs={}, reasoning_rows=reasoning_rows, max_length=1 << 20, kept=kept,
        )  # fmt: skip
    except SpansNotFound as error:
        return Outcome([], str(error).split(": ", 1)[1].split(". Use the template")[0], sorted(kept.notes))
    return Outcome(examples, ", ".join(kept.dropped), sorted(kept.notes))


WORDS = {
    "answer_rendered_without_turn_end": "no turn end",
    "reasoning_not_rendered": "without its reasoning",
    "tool_call_not_rendered": "call not rendered",
}


def cell(name: str, kind: str) -> str:
    """One cell of the table."""
    found = outcome(name, kind)
    if found.refused:
        return "refused" if found.refused != "template_error" else "template error"
    many = len([m for m in CONVERSATIONS[kind]["messages"] if m["role"] == "assistant"]) > 1
    whole = "whole" if len(found.examples) == 1 else "per turn"
    return ", ".join([whole if many else "yes", *(WORDS[note] for note in found.notes if note in WORDS)])


def document() -> str:
    """The text of docs/templates.md."""
    kinds = list(CONVERSATIONS)
    lines = [
        "# Chat templates",
        "",
        "What becomes of a row under real chat templates; `python scripts/fetch_llama_cpp.py` fetches them, `python scripts/template_support.py`",
        "writes this page from what the code does with them (`--check` compares; a test does).",
        "",
        "*yes*: the answer is supervised after the generation prompt that serving sends. *whole*: one row holds all answers; *per turn*: a row for",
        "each. *no turn end*: the template shows no token with which the target ends its turn. *without its reasoning*: the row's `reasoning_content`",
        "is not rendered, and counted. *refused*: what the target said cannot be told with certainty; regenerated rows carry exact ids and need",
        "no template. *template error*: the template itself raises.",
        "",
        "| template | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    lines += ["| " + " | ".join([name, *(cell(name, kind) for kind in kinds)]) + " |" for name in templates()]
    lines += ["", "## Why refused", ""]
    reasons: dict[str, list[str]] = {}
    for name in templates():
        for kind in kinds:
            why = outcome(name, kind).refused
            if why and why != "template_error":
                reasons.setdefault(f"{name}: {why.split(': ', 1)[-1]}", []).append(kind)
    lines += [f"- {why} ({', '.join(kinds)})" for why, kinds in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    if not templates():
        print("no templates: python scripts/fetch_llama_cpp.py", file=sys.stderr)
        return 2
    if "--check" not in sys.argv[1:]:
        DOC.write_text(document(), encoding="utf-8")
    elif DOC.read_text(encoding="utf-8") != document():
        print("docs/templates.md is out of date: python scripts/template_support.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
