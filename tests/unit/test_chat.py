"""Template -> ids and mask: ids are serving's, and exactly what the target would generate is supervised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.chat import load_tokenizer, mask_strategy, read_stop_ids, template_hash, tokenize
from dflash_train.data.prepare import tokenize_chunk
from dflash_train.data.read import Kept
from dflash_train.data.template import Template
from dflash_train.types import Conversation, TokenizedExample

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

# As Qwen3's own template behaves: answers before the last question lose their reasoning, the last answer always has a think
# block, enable_thinking=false puts an empty one into the generation prompt.
THINKING = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
  {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
  {{- '<|im_start|>assistant\n' }}
  {%- if loop.index0 > last.user and (loop.last or reasoning) %}
    {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
  {%- endif %}
  {{- m.content }}
  {%- for call in m.tool_calls or [] %}
    {%- if not loop.first or m.content %}{{ '\n' }}{% endif %}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
    {{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
  {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

OPENS_THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def byte_level(template: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["hello there high tide is at two plus two four <think> assistant user\n\n"] * 4
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("<tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def word_level(template: str) -> PreTrainedTokenizerFast:
    words = [
        "<pad>",
        "<bos>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        "[",
        "]",
        "assistant",
        "user",
        "hi",
        "hello",
        "there",
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def row(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return Conversation(id="r", source="f.jsonl:1", messages=list(messages), **fields)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def run(
    conversation: Conversation,
    tokenizer: Any,
    kept: Kept | None = None,
    stop_ids: list[int] | None = None,
    **options: Any,
) -> list[TokenizedExample]:
    options = {"chat_template_kwargs": {}, "max_length": 4096, **options}
    return tokenize(conversation, Template(tokenizer, stop_ids or ()), kept=kept, **options)


def spans(example: TokenizedExample, tokenizer: Any) -> list[str]:
    """Text of each supervised run."""
    changes = np.flatnonzero(np.diff(example.supervised.astype(int))) + 1
    parts = zip(np.split(example.token_ids, changes), np.split(example.supervised, changes), strict=True)
    return [tokenizer.decode(ids.tolist()) for ids, supervised in parts if supervised[0]]


def served(conversation: Conversation, tokenizer: Any, messages: list[Any] | None = None, **kwargs: Any) -> list[int]:
    messages = conversation.messages if messages is None else messages
    ids = tokenizer.apply_chat_template(messages, tools=conversation.tools, tokenize=True, **kwargs)
    return ids["input_ids"] if not isinstance(ids, list) else ids


def test_turn_end_is_supervised_and_the_newline_after_it_is_not() -> None:
    tokenizer = byte_level(CHATML)
    conversation = row(user("ping"), says("pong"))
    (example,) = run(conversation, tokenizer)
    assert spans(example, tokenizer) == ["pong<|im_end|>"]
    assert tokenizer.decode(example.token_ids[-1:].tolist()) == "\n" and not example.supervised[-1]
    assert example.token_ids.tolist() == served(conversation, tokenizer)
    assert example.token_ids.dtype == np.int32 and example.supervised.dtype == bool


def test_all_answers_of_a_prefix_preserving_template_are_in_one_example() -> None:
    tokenizer = byte_level(CHATML)
    conversation = row({"role": "system", "content": "s"}, user("a"), user("b"), says("im"), user("im"), says("end"))
    (example,) = run(conversation, tokenizer)
    assert spans(example, tokenizer) == ["im<|im_end|>", "end<|im_end|>"]
    assert example.id == "r" and example.token_ids.tolist() == served(conversation, tokenizer)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_template_without_generation_tag_byte_level(trim_offsets: bool) -> None:
    tokenizer = byte_level(PLAIN, trim_offsets)
    (example,) = run(row(user("hi"), says("hello there")), tokenizer)
    assert [text.strip() for text in spans(example, tokenizer)] == ["hello there <|im_end|>"]
    assert not example.supervised[-1] or tokenizer.decode(example.token_ids[-1:].tolist()) == "<|im_end|>"


def test_template_without_generation_tag_word_level() -> None:
    tokenizer = word_level(PLAIN)
    (example,) = run(row(user("hi"), says("hello there")), tokenizer)
    assert example.token_ids[example.supervised].tolist() == [10, 11, 4]
    assert 0 < example.supervised.sum() < len(example.supervised)


def test_terminator_in_plain_text_is_found_and_its_trailing_space_left_out() -> None:
    tokenizer = byte_level(
        "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (example,) = run(row(user("hi"), says("the END")), tokenizer)
    assert [text.strip() for text in spans(example, tokenizer)] == ["the END END"]
    assert not example.supervised[-1]
    (cut,) = run(row(user("hi"), says("the END"), finish_reason="length"), tokenizer)
    assert tokenizer.decode(cut.token_ids.tolist()).endswith("assistant: the END")


def test_text_after_the_first_stop_token_is_not_supervised() -> None:
    tokenizer = byte_level(
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% else %}<|im_end|>{% endif %}"
    )
    (example,) = run(row(user("hi"), says("ho")), tokenizer)
    assert spans(example, tokenizer) == ["ho<|end|>"]


def test_answers_that_the_template_renders_otherwise_are_an_error_with_template_and_row() -> None:
    tokenizer = byte_level(THINKING)
    conversation = row(user("2+2?"), says("Four.", reasoning_content="hm"))
    with pytest.raises(ValueError, match=r"chat template .*row r \(f\.jsonl:1\).*data\.chat_template"):
        run(conversation, tokenizer, chat_template_kwargs={"enable_thinking": False})
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="renders nothing for this answer"):
        run(conversation, tokenizer)


def test_an_odd_row_among_good_ones_is_counted() -> None:
    odd = row(user("2+2?"), says("Four.", reasoning_content="hm"))
    options = {"chat_template_kwargs": {"enable_thinking": False}, "max_length": 512}
    done = tokenize_chunk([(0, odd), (1, row(user("hi"), says("ho")))], Template(byte_level(THINKING)), options)
    assert len(done.examples) == 1 and done.sources == [1]
    assert done.kept.dropped == {"spans_not_found": 1} and "f.jsonl:1" in done.kept.table()
    assert re.match(r"chat template .*row r \(f\.jsonl:1\)", done.error)


REASONING = row(
    user("2+2?"),
    says("Four.", reasoning_content="two plus two"),
    user("Plus one?"),
    says("Five.", reasoning_content="four plus one"),
    chat_template_kwargs={"enable_thinking": True},
)


def test_stripped_reasoning_per_turn_gives_what_serving_would_see() -> None:
    tokenizer = byte_level(THINKING)
    first, second = run(REASONING, tokenizer)
    assert spans(first, tokenizer) == ["<think>\ntwo plus two\n</think>\n\nFour.<|im_end|>"]
    assert spans(second, tokenizer) == ["<think>\nfour plus one\n</think>\n\nFive.<|im_end|>"]
    assert "two plus two" not in tokenizer.decode(second.token_ids.tolist())
    assert (first.id, second.id) == ("r/0", "r/1")
    assert first.token_ids.tolist() == served(REASONING, tokenizer, REASONING.messages[:2])
    assert second.token_ids.tolist() == served(REASONING, tokenizer)


def test_stripped_reasoning_whole_supervises_what_is_rendered_and_counts_the_rest() -> None:
    tokenizer = byte_level(THINKING)
    kept = Kept(kept=1)
    (example,) = run(REASONING, tokenizer, kept, reasoning_rows=ReasoningRows.whole)
    assert spans(example, tokenizer) == [
        "Four.<|im_end|>", "<think>\nfour plus one\n</think>\n\nFive.<|im_end|>",
    ]  # fmt: skip
    assert kept.notes == {"earlier_reasoning_not_rendered": 1}
    assert example.token_ids.tolist() == served(REASONING, tokenizer)


def test_whole_mode_is_not_misled_by_repeated_text() -> None:
    tokenizer = byte_level(THINKING)
    conversation = row(user("Four."), says("Four."), user("Four. Four."), says("x Four."), user("Four."), says("Four."))
    options = {"reasoning_rows": ReasoningRows.whole, "chat_template_kwargs": {"enable_thinking": False}}
    (example,) = run(conversation, tokenizer, **options)
    assert spans(example, tokenizer) == ["Four.<|im_end|>", "x Four.<|im_end|>", "Four.<|im_end|>"]
    (index, *_) = np.flatnonzero(example.supervised)
    before = tokenizer.decode(example.token_ids[:index].tolist())
    assert before == "<|im_start|>user\nFour.<|im_end|>\n<|im_start|>assistant\n"


def test_whole_mode_finds_an_earlier_turn_end_that_differs_from_the_last() -> None:
    tokenizer = byte_level(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|end|>' if m.role == 'assistant' and loop.last else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    conversation = row(user("a"), says("Four."), user("Four."), says("Five."))
    (example,) = run(conversation, tokenizer, reasoning_rows=ReasoningRows.whole)
    assert spans(example, tokenizer) == ["Four.<|im_end|>", "Five.<|end|>"]
    assert [spans(e, tokenizer) for e in run(conversation, tokenizer)] == [["Four.<|end|>"], ["Five.<|end|>"]]


@pytest.mark.parametrize("mode", list(ReasoningRows))
def test_a_call_that_the_template_does_not_render_is_not_taken_for_an_empty_answer(mode: ReasoningRows) -> None:
    tokenizer, kept = byte_level(CHATML), Kept(kept=1)
    call = {"function": {"name": "get_tide", "arguments": {}}}
    tool = {"role": "tool", "content": "17:42"}
    conversation = row(user("tide?"), says("", tool_calls=[call]), tool, says("At 17:42."))
    (example,) = run(conversation, tokenizer, kept, reasoning_rows=mode)
    assert spans(example, tokenizer) == ["At 17:42.<|im_end|>"]
    assert kept.notes == {"tool_call_not_rendered": 1}


def test_a_template_without_turn_end_is_counted() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    tokenizer = byte_level(template + "{% if add_generation_prompt %}assistant:{% endif %}")
    kept = Kept(kept=1)
    (example,) = run(row(user("hi"), says("hello two")), tokenizer, kept)
    assert spans(example, tokenizer) == ["hello two"]
    assert kept.notes == {"answer_rendered_without_turn_end": 1}


def test_what_the_generation_prompt_supplies_is_not_supervised() -> None:
    tokenizer = byte_level(THINKING)
    (off,) = run(row(user("a"), says("hello")), tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert spans(off, tokenizer) == ["hello<|im_end|>"]
    (on,) = run(row(user("a"), says("hello")), tokenizer)
    assert spans(on, tokenizer) == ["<think>\n\n</think>\n\nhello<|im_end|>"]
    tokenizer = byte_level(OPENS_THINKING)
    (opened,) = run(row(user("a"), says("hello", reasoning_content="two")), tokenizer)
    assert spans(opened, tokenizer) == ["two\n</think>\n\nhello<|im_end|>"]


@pytest.mark.parametrize("mode", list(ReasoningRows))
def test_tool_calls_are_supervised_and_tool_results_are_not(mode: ReasoningRows) -> None:
    tokenizer = byte_level(THINKING)
    call = {"id": "t1", "type": "function", "function": {"name": "get_tide", "arguments": {"port": "Brest"}}}
    conversation = row(
        user("When is high tide in Brest?"),
        says("", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "t1", "content": "17:42"},
        says("High tide is at 17:42."),
        tools=[{"type": "function", "function": {"name": "get_tide", "parameters": {"type": "object"}}}],
    )
    examples = run(conversation, tokenizer, reasoning_rows=mode, chat_template_kwargs={"enable_thinking": True})
    texts = [text for example in examples for text in spans(example, tokenizer)]
    block = '<tool_call>\n{"name": "get_tide", "arguments": {"port": "Brest"}}\n</tool_call><|im_end|>'
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in texts] == [
        block,
        "High tide is at 17:42.<|im_end|>",
    ]
    rendered = tokenizer.decode(examples[-1].token_ids.tolist())
    assert "None" not in rendered and "# Tools" in rendered


def test_a_cut_answer_ends_where_it_was_cut() -> None:
    tokenizer = byte_level(CHATML)
    conversation = row(user("a"), says("one"), user("b"), says("two plus"), finish_reason="length")
    kept = Kept(kept=1)
    (example,) = run(conversation, tokenizer, kept)
    assert spans(example, tokenizer) == ["one<|im_end|>", "two plus"]
    assert example.supervised[-1] and example.finish_reason == "length"
    assert run(conversation, tokenizer, kept, drop_truncated=True) == []
    assert kept.dropped == {"truncated": 1} and kept.kept == 0


def test_max_length_keeps_the_mask_on_what_is_left() -> None:
    tokenizer = byte_level(CHATML)
    conversation = row(user("hi"), says("two plus two plus two plus two"))
    (whole,) = run(conversation, tokenizer)
    start = int(np.flatnonzero(whole.supervised)[0])
    kept = Kept(kept=2)
    (cut,) = run(conversation, tokenizer, kept, max_length=start + 2)
    assert cut.token_ids.tolist() == whole.token_ids[: start + 2].tolist()
    assert cut.supervised.sum() == 2 and cut.finish_reason == "length"
    assert run(conversation, tokenizer, kept, max_length=start + 1) == []
    assert (kept.notes["cut_at_max_length"], kept.dropped) == (2, {"nothing_to_predict": 1})


def test_supervision_at_the_very_end_and_short_answers_are_used() -> None:
    ids = row(prompt_ids=list(range(60)), response_ids=[7, 8, 9, 10])
    (example,) = run(ids, byte_level(CHATML))
    assert np.flatnonzero(example.supervised).tolist() == [60, 61, 62, 63]
    (short,) = run(row(user("hi"), says("a")), tokenizer := byte_level(CHATML))
    assert spans(short, tokenizer) == ["a<|im_end|>"] and short.supervised.sum() == 2
    kept = Kept(kept=1)
    assert run(row(prompt_ids=[1, 2], response_ids=[3]), tokenizer, kept) == []
    assert kept.dropped == {"nothing_to_predict": 1}


def test_recorded_turns_are_used_as_they_are() -> None:
    turns = [
        {"prompt_ids": [1, 2], "response_ids": [3, 4], "finish_reason": "stop"},
        {"prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6, 7], "finish_reason": "length"},
    ]
    (example,) = run(row(metadata={"turn_ids": turns}), byte_level(CHATML))
    assert example.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(example.supervised).tolist() == [2, 3, 5, 6]
    assert (example.id, example.finish_reason) == ("r", "length")
    turns[1]["prompt_ids"] = [1, 2, 4, 5]
    first, second = run(row(metadata={"turn_ids": turns}), byte_level(CHATML))
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 3, 4], [1, 2, 4, 5, 6, 7])


def test_rows_that_the_template_refuses_are_counted() -> None:
    tokenizer = byte_level(
        CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    kept = Kept(kept=1)
    assert run(row({"role": "system", "content": "s"}, user("hi"), says("ho")), tokenizer, kept) == []
    assert (kept.kept, kept.dropped, kept.examples) == (0, {"template_error": 1}, {"template_error": ["f.jsonl:1"]})
    assert len(run(row(user("hi"), says("ho")), tokenizer)) == 1


def test_an_answer_nobody_asked_for_is_context_and_counted() -> None:
    conversation = row(says("Welcome."), user("hi"), says("hello"))
    kept = Kept(kept=1)
    tokenizer = byte_level(CHATML)
    assert spans(run(conversation, tokenizer, kept)[0], tokenizer) == ["hello<|im_end|>"]
    assert kept.notes == {"opening_turn_not_supervised": 1}


def test_template_hash_follows_text_and_arguments() -> None:
    tokenizer = byte_level(CHATML)
    hashes = {template_hash(tokenizer, {}), template_hash(tokenizer, {"enable_thinking": False})}
    tokenizer.chat_template += " "
    assert len(hashes | {template_hash(tokenizer, {})}) == 3


def test_a_target_without_template_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template; set data.chat_template"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "own.jinja").write_text(CHATML)
    assert load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "own.jinja")).chat_template == CHATML
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "none.jinja"))


TAGGED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
)


def test_a_generation_tag_is_a_second_opinion_and_prefix_rendering_wins() -> None:
    conversation = row(user("a"), says("one"), user("b"), says("two"))
    kept = Kept(kept=1)
    tokenizer = byte_level(TAGGED)
    (example,) = run(conversation, tokenizer, kept)
    assert spans(example, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert kept.notes == {"generation_tag_agrees": 1}
    assert mask_strategy(tokenizer, kept).endswith("(generation tag agrees)")
    tokenizer.chat_template = TAGGED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    kept = Kept(kept=1)
    (example,) = run(conversation, tokenizer, kept)
    assert spans(example, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert kept.notes == {"generation_tag_disagrees": 1}
    assert "disagrees in 1 of 1 rows" in mask_strategy(tokenizer, kept)
    assert "no generation tag" in mask_strategy(byte_level(CHATML), Kept())


def test_a_generation_tag_is_used_where_prefix_rendering_finds_no_end() -> None:
    # The template adds its instructions to every tool call, before anything that could end it.
    rule = "<|im_start|><|end|>use tools wisely and well, always.<|im_start|>assistant\n"
    call = {"function": {"name": "get_tide", "arguments": {}}}
    template = (
        f"{rule}{{% for m in messages %}}{{{{ m.role }}}}: {{% if m.role == 'assistant' %}}{{% generation %}}"
        f"{{{{ m.tool_calls[0].function.name }}}}{{% endgeneration %}}{rule}<|im_end|>"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer, kept = byte_level(template), Kept(kept=1)
    (example,) = run(row(user("tide?"), says("", tool_calls=[call])), tokenizer, kept)
    assert spans(example, tokenizer) == ["get_tide"]
    assert kept.notes["spans_from_generation_tag"] == 1
    tokenizer.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match="adds instructions of its own"):
        run(row(user("tide?"), says("", tool_calls=[call])), tokenizer)


def test_a_turn_end_that_only_the_history_shows_is_a_stop_token_of_serving() -> None:
    template = "{% for m in messages %}<|{{ 'end' if m.role == 'user' else 'im_start' }}|>{{ m.content }}{% endfor %}"
    tokenizer = byte_level(template + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    conversation = row(user("a"), says("one"), user("b"), says("two"))
    (example,) = run(conversation, tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids("<|end|>")])
    assert spans(example, tokenizer) == ["one<|end|>", "two<|end|>"]
    assert tokenizer.decode(example.token_ids.tolist()) == "<|end|>a<|im_start|>one<|end|>b<|im_start|>two<|end|>"
    kept = Kept(kept=1)
    (example,) = run(conversation, tokenizer, kept)
    assert spans(example, tokenizer) == ["one", "two"]
    assert kept.notes == {"answer_rendered_without_turn_end": 2}


def test_stop_tokens_are_the_generation_configs_and_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML)
    own = tokenizer.eos_token_id
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 7}')
    assert read_stop_ids(str(tmp_path), None, tokenizer) == sorted([7, own])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_stop_ids(str(tmp_path), None, tokenizer) == sorted([3, 5, own])
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_stop_ids(str(tmp_path), None, tokenizer) == sorted([7, own])
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"eos_token_id": 9}}')
    assert read_stop_ids(str(tmp_path), None, tokenizer) == sorted([9, own])


def test_reasoning_that_the_template_leaves_out_is_counted() -> None:
    kept = Kept(kept=1)
    tokenizer = byte_level(CHATML)
    (example,) = run(row(user("2+2?"), says("Four.", reasoning_content="hm")), tokenizer, kept)
    assert spans(example, tokenizer) == ["Four.<|im_end|>"]
    assert kept.notes == {"reasoning_not_rendered": 1}


def test_a_row_without_a_prompt_is_counted() -> None:
    kept = Kept(kept=1)
    assert run(row(prompt_ids=[], response_ids=[1, 2, 3]), byte_level(CHATML), kept) == []
    assert kept.dropped == {"no_prompt": 1}
