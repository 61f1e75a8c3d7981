"""How to start a server of a recipe's target: one command line for each engine, with the parsers that the target's family needs.

A server takes apart what the target says: a reasoning parser puts the thoughts into `reasoning_content`, a tool parser the calls into
`tool_calls`. Without them both stay in the text, and a conversation that is rendered again differs from what the target said.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.assets import resolve
from dflash_train.config.schema import Precision, Recipe
from dflash_train.data.chat import load_tokenizer
from dflash_train.target.info import read_config, text_config

ENGINES = ("vllm", "sglang", "llama.cpp", "trtllm", "transformers")
# Where the names below are defined, and in which version they were read there.
SOURCES = {
    "vllm": "vLLM 0.33.0: vllm/tool_parsers/__init__.py, vllm/reasoning/__init__.py, docs/features/{tool_calling,reasoning_outputs}.md",
    "sglang": "SGLang 0.5.23: srt/function_call/function_call_parser.py, srt/parser/reasoning_parser.py; both also take `auto`",
    "trtllm": "TensorRT-LLM 1.4 (main, 2026): serve/tool_parser/tool_parser_factory.py, llmapi/reasoning_parser.py",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Targets that speak alike. A target belongs to the first family of FAMILIES whose conditions it meets.

    model_type: regular expression of config.json's model_type, whole; name: one that occurs in the target's path; says, never: what the
    chat template must and must not contain. Parsers are (reasoning, tool call), None where the engine has or needs none. The
    reasoning parser is left out where the template has no `thinks`: it would take an answer that never thinks for a thought.
    """

    id: str
    model_type: str = ".*"
    name: str = ""
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    thinks: str = "<think>"
    vllm: tuple[str | None, str | None] = (None, None)
    sglang: tuple[str | None, str | None] = (None, None)
    trtllm: tuple[str | None, str | None] = (None, None)
    note: str = ""


XML = "<function="  # calls as <tool_call><function=NAME><parameter=...>
R1 = "<｜Assistant｜>"
FAMILIES = (
    Family(id="gpt-oss", model_type="gpt_oss", thinks="", vllm=("openai_gptoss", "openai"), sglang=("gpt-oss", "gpt-oss"),
           note="the effort is chosen by extra_body: {reasoning_effort: low | medium | high}"),
    Family(id="nemotron-3", model_type="nemotron_h.*", says=(XML,), vllm=("nemotron_v3", "qwen3_coder"),
           sglang=("nemotron_3", "qwen3_coder"), trtllm=("nano-v3", "qwen3_coder")),
    Family(id="qwen3.5", model_type="qwen3_5.*", vllm=("qwen3", "qwen3_coder"), sglang=("qwen3", "qwen3_coder"),
           trtllm=("qwen3_5", "qwen3_coder")),
    Family(id="qwen3-coder", model_type="qwen3.*", says=(XML,), vllm=("qwen3", "qwen3_xml"), sglang=("qwen3", "qwen3_coder"),
           trtllm=("qwen3", "qwen3_coder")),
    Family(id="qwen3-thinking", model_type="qwen3.*", says=("<think>",), never=("enable_thinking",), vllm=("qwen3", "hermes"),
           sglang=("qwen3-thinking", "qwen25"), trtllm=("deepseek-r1", "qwen3")),
    Family(id="qwen3", model_type="qwen3.*", says=("<tool_call>",), vllm=("qwen3", "hermes"), sglang=("qwen3", "qwen25"),
           trtllm=("qwen3", "qwen3")),
    Family(id="deepseek-v4", model_type="deepseek_v4", thinks="", vllm=("deepseek_v4", "deepseek_v4"),
           sglang=("deepseek-v4", "deepseekv4"), trtllm=("deepseek_v4", None)),
    Family(id="deepseek-v3.2", model_type="deepseek_v32", thinks="", vllm=("deepseek_v3", "deepseek_v32"),
           sglang=("deepseek-v3", "deepseekv32"), trtllm=("deepseek-r1", "deepseek_v32"),
           note="thinking is off unless chat_template_kwargs has thinking: true"),
    Family(id="kimi-k2", model_type="kimi_k2.*|deepseek_v3", name="kimi", vllm=("kimi_k2", "kimi_k2"), sglang=("kimi_k2", "kimi_k2"),
           trtllm=("kimi_k2", "kimi_k2")),
    Family(id="deepseek-r1", model_type="deepseek_v3", name="r1", vllm=("deepseek_r1", "deepseek_v3"),
           sglang=("deepseek-r1", "deepseekv3"), trtllm=("deepseek-r1", "deepseek_v3"),
           note="tools need the template of vLLM's examples/tool_chat_template_deepseekr1.jinja (as data.chat_template)"),
    Family(id="deepseek-v3.1", model_type="deepseek_v3", says=("thinking",), vllm=("deepseek_v3", "deepseek_v31"),
           sglang=("deepseek-v3", "deepseekv31"), trtllm=(None, "deepseek_v31"),
           note="thinking is off unless chat_template_kwargs has thinking: true; it calls tools without thinking"),
    Family(id="deepseek-v3", model_type="deepseek_v3", vllm=(None, "deepseek_v3"), sglang=(None, "deepseekv3"),
           trtllm=(None, "deepseek_v3"),
           note="tools need the template of vLLM's examples/tool_chat_template_deepseekv3.jinja (as data.chat_template)"),
    Family(id="deepseek-r1-distill", model_type="qwen2|llama|qwen3", says=(R1,), thinks="", vllm=("deepseek_r1", None),
           sglang=("deepseek-r1", None), trtllm=("deepseek-r1", None)),
    Family(id="glm-4.7", model_type="glm4_moe|glm4_moe_lite|glm_moe_dsa", name=r"4[._-]?7|glm-?5", vllm=("glm45", "glm47"),
           sglang=("glm45", "glm47"), trtllm=(None, "glm47")),
    Family(id="glm-4.5", model_type="glm4_moe", vllm=("glm45", "glm45"), sglang=("glm45", "glm45"), trtllm=(None, "glm4"),
           note="4.6 too; a fine-tune of 4.7 needs the tool parser glm47"),
    Family(id="minimax-m2", model_type="minimax_m2|minimax", name="m2", vllm=("minimax_m2", "minimax_m2"),
           sglang=("minimax", "minimax-m2"), trtllm=("minimax_m2", "minimax_m2")),
    Family(id="llama-4", model_type="llama4.*", vllm=(None, "llama4_pythonic"), sglang=(None, "pythonic"),
           note="tools need the template of vLLM's examples/tool_chat_template_llama4_pythonic.jinja (as data.chat_template)"),
    Family(id="hermes-3", model_type="llama", says=("<tool_call>",), vllm=("deepseek_r1", "hermes"), sglang=("deepseek-r1", "hermes")),
    Family(id="llama-3", model_type="llama", says=("<|start_header_id|>",), vllm=(None, "llama3_json"), sglang=(None, "llama3")),
    Family(id="mistral", model_type="mistral.*|ministral.*|mixtral", thinks="[THINK]", vllm=("mistral", "mistral"),
           sglang=("mistral", "mistral")),
    Family(id="gemma-4", model_type="gemma4.*", thinks="", vllm=("gemma4", "gemma4"), sglang=("gemma4", "gemma4"),
           trtllm=("gemma4", "gemma4"), note="thinking is off unless chat_template_kwargs has enable_thinking: true"),
    Family(id="gemma-3", model_type="gemma[23]?(_text)?", note="has no tool calls of its own"),
    Family(id="smollm3", model_type="smollm3", vllm=("qwen3", "hermes"), sglang=("qwen3", "hermes"),
           note="the tool parser is its model card's; the reasoning parser is that of the same tags, tried by nobody here"),
    Family(id="granite-4", model_type="granitemoehybrid|granite", says=("<tool_call>",), vllm=(None, "granite4"), sglang=(None, "hermes")),
    Family(id="olmo-3", model_type="olmo3", vllm=("olmo3", "olmo3"), sglang=("deepseek-r1", "pythonic")),
    Family(id="seed-oss", model_type="seed_oss", thinks="<seed:think>", vllm=("seed_oss", "seed_oss")),
    Family(id="ernie-4.5", model_type="ernie4_5.*", vllm=("ernie45", "ernie45")),
    Family(id="qwen2.5", model_type="qwen2.*", says=("<tool_call>",), vllm=("deepseek_r1", "hermes"), sglang=("deepseek-r1", "qwen25"),
           trtllm=("deepseek-r1", "qwen3")),
)  # fmt: skip


def family_of(model_type: str, path: str, template: str) -> Family | None:
    """The family of a target, by its config's model_type, its path or Hub id, and its chat template."""
    for family in FAMILIES:
        if (
            re.fullmatch(family.model_type, model_type)
            and re.search(family.name, path.lower())
            and all(text in template for text in family.says)
            and not any(text in template for text in family.never)
        ):
            return family
    return None


@dataclass
class Launch:
    """A command line, and what its reader should know."""

    words: list[str]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return shlex.join(self.words)


def launch(
    recipe: Recipe,
    engine: str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    tensor_parallel: int = 1,
    gguf: str | None = None,
) -> Launch:
    """The line that serves the recipe's target. gguf: the target's file, for llama.cpp. Raises ValueError for what the engine cannot do."""
    if tensor_parallel < 1:
        raise ValueError(f"--tensor-parallel {tensor_parallel}: must be at least 1")
    target = recipe.target
    path = resolve(target.path, "target")
    config = read_config(path, target.revision, target.trust_remote_code)
    tokenizer = load_tokenizer(path, target.revision, target.trust_remote_code, recipe.data.chat_template)
    template = str(tokenizer.chat_template)
    kinds = dict.fromkeys([config.model_type, text_config(config).model_type])
    family = next((f for f in (family_of(kind, path, template) for kind in kinds) if f is not None), None)
    line = _LINES[engine](recipe, path, port, host, tensor_parallel, gguf)
    parsers = _parsers(family, engine, template) if engine in SOURCES else (None, None)
    _add_parsers(line, engine, parsers)
    if engine in SOURCES:
        line.notes += _parser_notes(family, engine, parsers, list(kinds)[0], template)
    return line


def _vllm(recipe: Recipe, path: str, port: int, host: str, tensor_parallel: int, gguf: str | None) -> Launch:
    words = ["vllm", "serve", path, "--host", host, "--port", str(port)]
    words += ["--max-model-len", str(recipe.regenerate.max_length), "--dtype", _dtype(recipe)]
    words += ["--seed", str(recipe.regenerate.seed), "--tensor-parallel-size", str(tensor_parallel)]
    words += _optional(recipe, revision="--revision", remote_code="--trust-remote-code", template="--chat-template")
    return Launch(words)


def _sglang(recipe: Recipe, path: str, port: int, host: str, tensor_parallel: int, gguf: str | None) -> Launch:
    words = ["python", "-m", "sglang.launch_server", "--model-path", path, "--host", host, "--port", str(port)]
    words += ["--context-length", str(recipe.regenerate.max_length), "--dtype", _dtype(recipe)]
    words += ["--random-seed", str(recipe.regenerate.seed), "--tp-size", str(tensor_parallel)]
    words += _optional(recipe, revision="--revision", remote_code="--trust-remote-code", template="--chat-template")
    return Launch(words)


def _llama_cpp(recipe: Recipe, path: str, port: int, host: str, tensor_parallel: int, gguf: str | None) -> Launch:
    if tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel {tensor_parallel}: llama.cpp spreads a model over the GPUs that it sees by itself; leave it out"
        )
    slots = recipe.regenerate.concurrency
    words = ["llama-server", "--model", gguf or "TARGET.gguf", "--alias", path, "--host", host, "--port", str(port)]
    words += ["--parallel", str(slots), "--ctx-size", str(slots * recipe.regenerate.max_length)]
    words += ["--seed", str(recipe.regenerate.seed), "--jinja", "--reasoning-format", "auto"]
    words += _optional(recipe, template="--chat-template-file")
    line = Launch(
        words, ["its parsers follow from the template; there is one context of max_length per request in flight"]
    )
    if gguf is None:
        kind = {Precision.float32: "f32", Precision.float16: "f16"}.get(recipe.target.precision, "bf16")
        script = [
            "python",
            "scripts/convert_gguf.py",
            "--target",
            path,
            "--outtype",
            kind,
            "--with-target",
            "TARGET.gguf",
        ]
        line.notes.append(f"llama.cpp serves a GGUF file; name it with --gguf. {shlex.join(script)} makes one")
    return line


def _trtllm(recipe: Recipe, path: str, port: int, host: str, tensor_parallel: int, gguf: str | None) -> Launch:
    words = ["trtllm-serve", path, "--host", host, "--port", str(port)]
    words += ["--max_seq_len", str(recipe.regenerate.max_length), "--tp_size", str(tensor_parallel)]
    words += _optional(recipe, revision="--revision", remote_code="--trust_remote_code", template="--chat_template")
    notes = ["it gives no token ids: rows are rendered and tokenised again"]
    if _dtype(recipe) != "bfloat16":
        notes.append(
            f"target.precision = {recipe.target.precision.value}: put dtype into a YAML file and add --config FILE"
        )
    return Launch(words, notes)


def _transformers(recipe: Recipe, path: str, port: int, host: str, tensor_parallel: int, gguf: str | None) -> Launch:
    if tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel {tensor_parallel}: transformers serve has no such flag; take vllm or sglang"
        )
    if recipe.data.chat_template is not None:
        raise ValueError(
            f"data.chat_template = {recipe.data.chat_template}: transformers serve takes the template of the target's folder only; save it "
            "there as chat_template.jinja, or take another engine"
        )
    words = ["transformers", "serve", path, "--continuous-batching", "--host", host, "--port", str(port)]
    words += ["--dtype", _dtype(recipe), "--default-seed", str(recipe.regenerate.seed)]
    words += _optional(recipe, remote_code="--trust-remote-code")
    notes = ["for greedy answers: it does not sample unless generation_config.json says so, and knows no top_k"]
    if Path(path).is_dir():
        notes.append(
            "it lists what is in the Hub cache only, so regeneration will not find a local folder there: name the target by Hub id"
        )
    return Launch(words, notes)


_LINES = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp, "trtllm": _trtllm, "transformers": _transformers}


def _dtype(recipe: Recipe) -> str:
    """target.precision as engines spell it; a server runs on a GPU, where auto is bfloat16."""
    precision = recipe.target.precision
    return "bfloat16" if precision in (Precision.auto, Precision.fp8) else precision.value


def _optional(recipe: Recipe, *, revision: str = "", remote_code: str = "", template: str = "") -> list[str]:
    words: list[str] = []
    if revision and recipe.target.revision is not None:
        words += [revision, recipe.target.revision]
    if remote_code and recipe.target.trust_remote_code:
        words.append(remote_code)
    if template and recipe.data.chat_template is not None:
        words += [template, recipe.data.chat_template]
    return words


def _parsers(family: Family | None, engine: str, template: str) -> tuple[str | None, str | None]:
    if family is None:
        return None, None
    reasoning, tools = getattr(family, engine)
    return (reasoning if family.thinks in template else None), tools


def _add_parsers(line: Launch, engine: str, parsers: tuple[str | None, str | None]) -> None:
    reasoning, tools = parsers
    flags = (
        ("--reasoning_parser", "--tool_parser") if engine == "trtllm" else ("--reasoning-parser", "--tool-call-parser")
    )
    if reasoning is not None:
        line.words += [flags[0], reasoning]
    if tools is not None:
        line.words += ["--enable-auto-tool-choice"] if engine == "vllm" else []
        line.words += [flags[1], tools]


def _parser_notes(
    family: Family | None, engine: str, parsers: tuple[Any, Any], model_type: str, template: str
) -> list[str]:
    if family is None and "<think>" not in template and "tools" not in template:
        return ["no parsers needed: the chat template knows neither thoughts nor tools"]
    if family is None:
        return [
            f"no parsers are known for model_type {model_type}. Without them thoughts and tool calls stay in the text. Look up the reasoning "
            f"and the tool call parser of this target ({SOURCES[engine]}) and add the flags, or set regenerate.api=completions"
        ]
    notes = [f"family {family.id}; names from {SOURCES[engine]}"]
    if family.note:
        notes.append(family.note)
    if parsers == (None, None) and ("<think>" in template or "tools" in template):
        notes.append(f"{engine} has no parsers for it; set regenerate.api=completions if it thinks or calls tools")
    return notes
