"""Real chat templates of some seventy models: ids are serving's, and what the target generates, exactly, is supervised."""

from __future__ import annotations

import os

import numpy as np
import pytest
import toys

from dflash_train.config.schema import ReasoningRows
from dflash_train.data.chat import tokenize
from dflash_train.data.read import Kept
from dflash_train.types import Conversation

support = toys.script("template_support", "scripts")
NAMES = sorted(support.templates())
CASES = [(name, kind) for name in NAMES for kind in support.CONVERSATIONS]


@pytest.fixture(autouse=True)
def there():
    if not NAMES:
        if os.environ.get("CI"):
            pytest.fail("no templates: make rivals")
        pytest.skip("no templates: python scripts/fetch_llama_cpp.py")


def spans(example, tokenizer) -> list[str]:
    """Text of each supervised run."""
    changes = np.flatnonzero(np.diff(example.supervised.astype(int))) + 1
    parts = zip(np.split(example.token_ids, changes), np.split(example.supervised, changes), strict=True)
    return [tokenizer.decode(ids.tolist()) for ids, supervised in parts if supervised[0]]


def render(name: str, row: Conversation, upto: int, generation: bool) -> str:
    return support.tokenizer(name).apply_chat_template(
        row.messages[:upto], tools=row.tools, tokenize=False, add_generation_prompt=generation, **row.chat_template_kwargs
    )  # fmt: skip


def test_the_templates_are_there():
    assert len(NAMES) > 60


@pytest.mark.parametrize("mode", list(ReasoningRows), ids=lambda mode: mode.name)
@pytest.mark.parametrize(("name", "kind"), CASES or [("none", "none")])
def test_prompts_are_servings_and_only_answers_are_supervised(name, kind, mode):
    found, row, tokenizer = support.outcome(name, kind, mode), support.conversation(kind), support.tokenizer(name)
    assert found.refused or found.examples
    asked = [m["content"] for m in row.messages if m["role"] != "assistant"]
    answers = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    for number, example in enumerate(found.examples):
        last = len(found.examples) == 1
        turn = answers[-1] if last else answers[number]
        prompt = tokenizer(render(name, row, turn, True), add_special_tokens=False)["input_ids"]
        ids, mask = example.token_ids.tolist(), example.supervised
        assert ids[: len(prompt)] == prompt, "not what serving sends"
        assert mask[len(prompt)], "the first token of the answer is the target's"
        (off,) = (
            np.flatnonzero(~mask[len(prompt) :])[:1] if not mask[len(prompt) :].all() else (len(ids) - len(prompt),)
        )
        said = tokenizer.decode(ids[len(prompt) : len(prompt) + int(off)])
        rest = tokenizer.decode(ids[len(prompt) + int(off) :])
        assert 0 < mask.sum() < len(mask) and not mask[len(prompt) + int(off) :].any()
        assert row.messages[turn]["content"] in said and not said[-1].isspace()
        assert row.messages[answers[-1]]["content"] not in rest
        cut = row.finish_reason == "length"
        stops = support.serving(name).stops
        if cut:
            assert said.endswith(row.messages[turn]["content"]) and not rest
        elif "answer_rendered_without_turn_end" not in found.notes:
            # The turn ends in a token that stops serving, and it is the only one.
            assert any(said.endswith(stop) for stop in stops), said
        for text in spans(example, tokenizer):
            assert not any(a in text for a in asked if a != "17:42") and "High tide." not in text
            assert row.tools is None or "17:42" not in text.replace("At 17:42.", "")


# What the model generates after the generation prompt, written down by hand from its template and its documentation.
T, R = "In Brittany.", "two plus two"
CHATML = {
    "one turn": [["In Brittany.<|im_end|>"]],
    "more turns": [["In Brittany.<|im_end|>", "On the Riviera.<|im_end|>"]],
    "cut": [["In Brit"]],
}
HEADER = {
    "one turn": [["In Brittany.<|eot_id|>"]],
    "more turns": [["In Brittany.<|eot_id|>", "On the Riviera.<|eot_id|>"]],
    "cut": [["In Brit"]],
}
HERMES_CALL = '<tool_call>\n{"name": "get_tide", "arguments": {"port": "Brest"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=get_tide>\n<parameter=port>\nBrest\n</parameter>\n</function>\n</tool_call>"
MISTRAL = {
    "one turn": [["In Brittany.</s>"]],
    "more turns": [["In Brittany.</s>", "On the Riviera.</s>"]],
    "cut": [["In Brit"]],
}
EXPECTED = {
    "Qwen-Qwen2.5-7B-Instruct": {**CHATML, "tools": [[f"{HERMES_CALL}<|im_end|>", "At 17:42.<|im_end|>"]]},
    "Qwen-Qwen3-0.6B": {
        "thinking off": [["In Brittany.<|im_end|>"]],
        "reasoning": [[f"<think>\n{R}\n</think>\n\nFour.<|im_end|>"]],
        "reasoning in each turn": [
            [f"<think>\n{R}\n</think>\n\nFour.<|im_end|>"], ["<think>\nfour plus one\n</think>\n\nFive.<|im_end|>"],
        ],
        "reasoning and tools": [
            [f"<think>\nask for it\n</think>\n\n{HERMES_CALL}<|im_end|>", "<think>\nthat is it\n</think>\n\nAt 17:42.<|im_end|>"],
        ],
        "cut": [["<think>\n\n</think>\n\nIn Brit"]],
    },
    "Qwen3.5-4B": {
        "thinking off": [["In Brittany.<|im_end|>"]],
        "reasoning": [[f"{R}\n</think>\n\nFour.<|im_end|>"]],
        "reasoning in each turn": [[f"{R}\n</think>\n\nFour.<|im_end|>"], ["four plus one\n</think>\n\nFive.<|im_end|>"]],
        "reasoning and tools": [[f"ask for it\n</think>\n\n{XML_CALL}<|im_end|>", "that is it\n</think>\n\nAt 17:42.<|im_end|>"]],
    },
    "Qwen3-Coder": {**CHATML, "tools": [[f"{XML_CALL}<|im_end|>", "At 17:42.<|im_end|>"]]},
    "Qwen-QwQ-32B": {"thinking off": [["In Brittany.<|im_end|>"]], "cut": [["In Brit"]]},
    "meta-llama-Llama-3.1-8B-Instruct": {
        **HEADER, "tools": [['{"name": "get_tide", "parameters": {"port": "Brest"}}<|eot_id|>', "At 17:42.<|eot_id|>"]],
    },
    "meta-llama-Llama-3.2-3B-Instruct": HEADER,
    "meta-llama-Llama-3.3-70B-Instruct": HEADER,
    "google-gemma-2-2b-it": {"one turn": [["In Brittany.<end_of_turn>"]], "more turns": [["In Brittany.<end_of_turn>", "On the Riviera.<end_of_turn>"]]},
    "google-gemma-4-31B-it": {
        "one turn": [["In Brittany.<turn|>"]],
        "more turns": [["In Brittany.<turn|>"], ["On the Riviera.<turn|>"]],
        "tools": [['<|tool_call>call:get_tide{port:<|"|>Brest<|"|>}<tool_call|><|tool_response>'], ["At 17:42.<turn|>"]],
    },
    "openai-gpt-oss-120b": {
        "more turns": [["<|channel|>final<|message|>In Brittany.<|return|>"], ["<|channel|>final<|message|>On the Riviera.<|return|>"]],
        "tools": [
            [' to=functions.get_tide<|channel|>commentary json<|message|>{"port": "Brest"}<|call|>', "<|channel|>final<|message|>At 17:42.<|return|>"],
        ],
        "cut": [["<|channel|>final<|message|>In Brit"]],
    },
    "GLM-4.6": {
        "more turns": [["\n<think></think>\nIn Brittany.<|user|>", "\n<think></think>\nOn the Riviera.<|user|>"]],
        "reasoning": [[f"\n<think>{R}</think>\nFour.<|user|>"]],
        "thinking off": [["\nIn Brittany.<|user|>"]],
        "reasoning and tools": [[
            "\n<think>ask for it</think>\n<tool_call>get_tide\n<arg_key>port</arg_key>\n<arg_value>Brest</arg_value>\n</tool_call><|observation|>",
            "\n<think>that is it</think>\nAt 17:42.<|user|>",
        ]],
    },
    "GLM-4.7-Flash": {
        "reasoning in each turn": [[f"{R}</think>Four.<|user|>"], ["four plus one</think>Five.<|user|>"]],
        "thinking off": [["In Brittany.<|user|>"]],
    },
    "mistralai-Mistral-Nemo-Instruct-2407": {**MISTRAL, "system": [["In Brittany.</s>"]]},
    "Mistral-Small-3.2-24B-Instruct-2506": {
        **MISTRAL, "tools": [['[TOOL_CALLS]get_tide[CALL_ID]call00001[ARGS]{"port": "Brest"}</s>', "At 17:42.</s>"]],
    },
    "unsloth-mistral-Devstral-Small-2507": MISTRAL,
    "mistralai-Ministral-3-14B-Reasoning-2512": MISTRAL,
    "deepseek-ai-DeepSeek-V3.1": {
        "more turns": [["In Brittany.<｜end▁of▁sentence｜>", "On the Riviera.<｜end▁of▁sentence｜>"]],
        "tools": [[
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_tide<｜tool▁sep｜>{"port": "Brest"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "At 17:42.<｜end▁of▁sentence｜>",
        ]],
    },
    "deepseek-ai-DeepSeek-V3.2": {
        "thinking off": [["In Brittany.<｜end▁of▁sentence｜>"]], "reasoning": [[f"{R}</think>Four.<｜end▁of▁sentence｜>"]],
    },
    "HuggingFaceTB-SmolLM3-3B": CHATML,
    "microsoft-Phi-3.5-mini-instruct": {"more turns": [["In Brittany.<|end|>"], ["On the Riviera.<|end|>"]]},
    "ibm-granite-granite-4.0": {"more turns": [["In Brittany.<|end_of_text|>", "On the Riviera.<|end_of_text|>"]]},
    "MiniMax-M2": {
        "reasoning": [[f"{R}\n</think>\n\nFour.[e~["]],
        "reasoning in each turn": [[f"{R}\n</think>\n\nFour.[e~["], ["four plus one\n</think>\n\nFive.[e~["]],
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "reasoning": [[f"{R}\n</think>\nFour.<|im_end|>"]], "thinking off": [["In Brittany.<|im_end|>"]],
    },
    "Apriel-1.6-15b-Thinker-fixed": {"reasoning": [[f"{R}\n[BEGIN FINAL RESPONSE]\nFour.\n<|end|>"]]},
    "tencent-Hy3": {
        "thinking off": [["In Brittany.<｜hy_eos:opensource｜>"]], "reasoning": [[f"{R}</think:opensource>Four.<｜hy_eos:opensource｜>"]],
    },
    "Kimi-K2-Instruct": CHATML,
    "Kimi-K3": {"reasoning": [[
        f"{R}<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    ]]},
    "Cohere2MoE": {"reasoning": [[f"{R}<|END_THINKING|><|START_TEXT|>Four.<|END_TEXT|><|END_OF_TURN_TOKEN|>"]]},
    "Apertus-8B-Instruct": {"more turns": [["In Brittany.<|assistant_end|>", "On the Riviera.<|assistant_end|>"]]},
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in EXPECTED for kind in EXPECTED[name]])
def test_the_supervised_text_is_what_the_model_generates(name, kind):
    found = support.outcome(name, kind)
    assert found.refused == ""
    assert [spans(example, support.tokenizer(name)) for example in found.examples] == EXPECTED[name][kind]


def run(name: str, *messages, kept: Kept | None = None, **fields) -> list[list[str]]:
    row = Conversation(id="r", source="f:1", messages=list(messages), **fields)
    examples = tokenize(row, support.serving(name), chat_template_kwargs={}, max_length=99999, kept=kept)
    return [spans(example, support.tokenizer(name)) for example in examples]


@pytest.mark.parametrize(
    "raw", ["<think>\nhm\n</think>\n\nFour.", "hm\n</think>\n\nFour."], ids=["opened", "not opened"]
)
@pytest.mark.parametrize("name", ["deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama-cpp-deepseek-r1", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"])  # fmt: skip
def test_raw_reasoning_that_the_template_strips_is_kept_as_the_model_wrote_it(name, raw):
    end = support.tokenizer(name).eos_token
    thinking = {"chat_template_kwargs": support.THINKING[True]}
    question = support.user("2+2?")
    assert run(name, question, support.says(raw), **thinking) == [[f"hm\n</think>\n\nFour.{end}"]]
    first, second = run(name, question, support.says(raw), question, support.says(raw), **thinking)
    assert first == second == [f"hm\n</think>\n\nFour.{end}"]


def test_an_answer_cut_off_while_it_reasons_ends_there():
    row = [support.user("2+2?"), support.says("", "two plus")]
    for name, said in {
        "Qwen-Qwen3-0.6B": "<think>\ntwo plus",
        "Qwen3.5-4B": "two plus",
        "GLM-4.6": "\n<think>two plus",
    }.items():
        fields = {"finish_reason": "length", "chat_template_kwargs": support.THINKING[True]}
        assert run(name, *row, **fields) == [[said]], name


def test_gpt_oss_reads_reasoning_from_its_own_field():
    row = [support.user("2+2?"), {"role": "assistant", "content": "Four.", "thinking": "hm"}]
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    assert run("openai-gpt-oss-120b", *row) == [[said]]


def test_generation_tags_are_a_second_opinion():
    row, kept = [support.user("hi"), support.says("Hello.")], Kept(kept=1)
    run("LFM2.5-8B-A1B", *row, kept=kept)
    assert kept.notes == {"generation_tag_agrees": 1}
    kept = Kept(kept=1)
    assert run("poolside-Laguna-XS.2", *row, kept=kept) == [["\nHello.\n</assistant>"]]
    assert kept.notes == {"generation_tag_disagrees": 1}


def test_the_support_table_is_up_to_date():
    assert support.DOC.read_text(encoding="utf-8") == support.document(), "python scripts/template_support.py"
