"""Launch lines of servers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_train.config.schema import Precision, Recipe
from dflash_train.generation import serve
from dflash_train.generation.serve import ENGINES, FAMILIES, launch

ROOT = Path(__file__).resolve().parents[2]
# What the engines' registries held in the versions that SOURCES names (nobody needs the engines to run these tests).
REASONING = {
    "vllm": """deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 openai_gptoss granite kimi_k2 kimi_k3 minimax_m2
            minimax_m2_append_think mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5""",
    "sglang": """deepseek-r1 deepseek-v3 deepseek-v4 glm45 gpt-oss kimi kimi_k2 kimi_k3 qwen3 qwen3-thinking minimax mistral nemotron_3
            gemma4 step3 step3p5""",
    "trtllm": """deepseek-r1 qwen3 qwen3_5 minimax_m2 minimax_m2_append_think deepseek_v4 minimax_m3 nemotron-v3 nano-v3 gemma4 kimi_k2
            kimi_k25 kimi_k3""",
}
TOOLS = {
    "vllm": """deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45 glm45 glm47 granite granite4 hermes kimi_k2 kimi_k3 llama3_json
            llama4_json llama4_pythonic minimax_m2 mistral olmo3 openai phi4_mini_json pythonic qwen3_coder qwen3_json qwen3_xml seed_oss
            functiongemma gemma4""",
    "sglang": """deepseekv3 deepseekv31 deepseekv32 deepseekv4 glm glm45 glm47 gpt-oss kimi_k2 kimi_k3 llama3 mistral pythonic qwen qwen25
            qwen3_coder minimax-m2 hermes gemma4""",
    "trtllm": "qwen3 qwen3_coder kimi_k2 deepseek_v3 deepseek_v31 deepseek_v32 gemma4 glm4 glm47 minimax_m2",
}

QWEN3 = "{% if tools %}<tool_call>{% endif %}<think>{{ enable_thinking }}"
XML = "{% if tools %}<tool_call><function=f>{% endif %}"
TARGETS = {
    # path: (model_type, chat template, family)
    "Qwen/Qwen3-8B": ("qwen3", QWEN3, "qwen3"),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3_moe", "{% if tools %}<tool_call>{% endif %}", "qwen3"),
    "Qwen/Qwen3-30B-A3B-Thinking-2507": ("qwen3_moe", "{% if tools %}<tool_call>{% endif %}<think>", "qwen3-thinking"),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3_moe", XML, "qwen3-coder"),
    "Qwen/Qwen3.5-27B": ("qwen3_5", XML + "<think>", "qwen3.5"),
    "Qwen/Qwen3.6-35B-A3B": ("qwen3_5_moe", XML + "<think>", "qwen3.5"),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", "{% if tools %}<tool_call>{% endif %}", "qwen2.5"),
    "deepseek-ai/DeepSeek-R1-0528": ("deepseek_v3", "<｜Assistant｜><think>", "deepseek-r1"),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": ("qwen2", "<｜Assistant｜><think>", "deepseek-r1-distill"),
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek_v3", "<｜Assistant｜>", "deepseek-v3"),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v3", "{% if not thinking %}<think>", "deepseek-v3.1"),
    "moonshotai/Kimi-K2-Instruct": ("kimi_k2", "tools", "kimi-k2"),
    "openai/gpt-oss-20b": ("gpt_oss", "<|channel|>tools", "gpt-oss"),
    "zai-org/GLM-4.6": ("glm4_moe", "<tool_call><think>", "glm-4.5"),
    "zai-org/GLM-4.7": ("glm4_moe", "<tool_call><think>", "glm-4.7"),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", "<|start_header_id|>tools", "llama-3"),
    "meta-llama/Llama-4-Scout": ("llama4", "<|header_start|>tools", "llama-4"),
    "NousResearch/Hermes-3-Llama-3.1-8B": ("llama", "<tool_call>tools", "hermes-3"),
    "mistralai/Mistral-Small-3.2": ("mistral3", "[TOOL_CALLS]", "mistral"),
    "google/gemma-3-4b-it": ("gemma3", "<start_of_turn>", "gemma-3"),
    "google/gemma-4-26B-A4B-it": ("gemma4", "<|tool_call>", "gemma-4"),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", "<tool_call><think>", "smollm3"),
    "MiniMaxAI/MiniMax-M2": ("minimax_m2", "tools<think>", "minimax-m2"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": ("nemotron_h", XML + "<think>", "nemotron-3"),
}


@pytest.fixture
def line_of(monkeypatch):
    """launch() for a target that is only described."""

    def line(path: str, engine: str, model_type: str, template: str, recipe: Recipe | None = None, **how):
        config = SimpleNamespace(model_type=model_type)
        config.get_text_config = lambda: SimpleNamespace(model_type=f"{model_type}_text")
        monkeypatch.setattr(serve, "read_config", lambda *args: config)
        monkeypatch.setattr(serve, "load_tokenizer", lambda *args: SimpleNamespace(chat_template=template))
        recipe = recipe or Recipe()
        recipe.target.path = path
        return launch(recipe, engine, **how)

    return line


@pytest.mark.parametrize("path", TARGETS)
def test_families(path):
    model_type, template, family = TARGETS[path]
    assert serve.family_of(model_type, path, template).id == family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.id)
def test_every_name_is_one_that_the_engine_knows(family):
    for engine in REASONING:
        reasoning, tools = getattr(family, engine)
        assert reasoning is None or reasoning in REASONING[engine].split(), engine
        assert tools is None or tools in TOOLS[engine].split(), engine


def test_families_have_names_of_their_own():
    assert len({f.id for f in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_documented_lines(line_of, engine):
    recipe = Recipe()
    recipe.regenerate.max_length = 3072
    line = line_of("Qwen/Qwen3-8B", engine, "qwen3", QWEN3, recipe)
    assert f"| `{line}` |" in (ROOT / "docs/regeneration.md").read_text()


@pytest.mark.parametrize(("path", "engine", "ending"), [
    ("Qwen/Qwen3-8B", "vllm", "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes"),
    ("Qwen/Qwen3-8B", "sglang", "--reasoning-parser qwen3 --tool-call-parser qwen25"),
    ("Qwen/Qwen3-8B", "trtllm", "--reasoning_parser qwen3 --tool_parser qwen3"),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", "vllm", "--tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser hermes"),
    ("Qwen/Qwen3-30B-A3B-Thinking-2507", "sglang", "--reasoning-parser qwen3-thinking --tool-call-parser qwen25"),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "vllm", "--tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser qwen3_xml"),
    ("Qwen/Qwen3.5-27B", "trtllm", "--reasoning_parser qwen3_5 --tool_parser qwen3_coder"),
    ("openai/gpt-oss-20b", "vllm", "--reasoning-parser openai_gptoss --enable-auto-tool-choice --tool-call-parser openai"),
    ("openai/gpt-oss-20b", "trtllm", "--tp_size 1"),
    ("deepseek-ai/DeepSeek-R1-0528", "vllm", "--reasoning-parser deepseek_r1 --enable-auto-tool-choice --tool-call-parser deepseek_v3"),
    ("deepseek-ai/DeepSeek-V3-0324", "sglang", "--tp-size 1 --tool-call-parser deepseekv3"),
    ("zai-org/GLM-4.6", "sglang", "--reasoning-parser glm45 --tool-call-parser glm45"),
    ("meta-llama/Llama-3.1-8B-Instruct", "vllm", "--tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser llama3_json"),
    ("MiniMaxAI/MiniMax-M2", "sglang", "--reasoning-parser minimax --tool-call-parser minimax-m2"),
    ("google/gemma-3-4b-it", "vllm", "--tensor-parallel-size 1"),
])  # fmt: skip
def test_parsers(line_of, path, engine, ending):
    model_type, template, _ = TARGETS[path]
    line = line_of(path, engine, model_type, template)
    assert str(line).endswith(ending)
    if "parser" in ending:
        assert any(serve.SOURCES[engine] in note for note in line.notes)


@pytest.mark.parametrize(("engine", "expected"), [
    ("vllm", "vllm serve org/m --host 0.0.0.0 --port 9000 --max-model-len 1234 --dtype float16 --seed 7 --tensor-parallel-size 4 "
             "--revision abc --trust-remote-code --chat-template 'my template.jinja'"),
    ("sglang", "python -m sglang.launch_server --model-path org/m --host 0.0.0.0 --port 9000 --context-length 1234 --dtype float16 "
               "--random-seed 7 --tp-size 4 --revision abc --trust-remote-code --chat-template 'my template.jinja'"),
    ("trtllm", "trtllm-serve org/m --host 0.0.0.0 --port 9000 --max_seq_len 1234 --tp_size 4 --revision abc --trust_remote_code "
               "--chat_template 'my template.jinja'"),
])  # fmt: skip
def test_what_the_recipe_says(line_of, engine, expected):
    line = line_of("org/m", engine, "new_thing", "", full_recipe(), port=9000, host="0.0.0.0", tensor_parallel=4)
    assert str(line) == expected
    assert any("no parsers needed" in note for note in line.notes)


def full_recipe() -> Recipe:
    recipe = Recipe()
    recipe.target.revision, recipe.target.precision, recipe.target.trust_remote_code = "abc", Precision.float16, True
    recipe.regenerate.max_length, recipe.regenerate.seed, recipe.regenerate.concurrency = 1234, 7, 8
    recipe.data.chat_template = "my template.jinja"
    return recipe


def test_llama_cpp(line_of):
    line = line_of("org/m", "llama.cpp", "qwen3", QWEN3, full_recipe(), gguf="m.gguf")
    assert str(line) == (
        "llama-server --model m.gguf --alias org/m --host 127.0.0.1 --port 8000 --parallel 8 --ctx-size 9872 --seed 7 --jinja "
        "--reasoning-format auto --chat-template-file 'my template.jinja'"
    )
    line = line_of("org/m", "llama.cpp", "qwen3", QWEN3, full_recipe())
    assert any(
        "scripts/convert_gguf.py --target org/m --outtype f16 --with-target TARGET.gguf" in note for note in line.notes
    )


def test_transformers(line_of):
    recipe = full_recipe()
    with pytest.raises(ValueError, match="data.chat_template = my template.jinja"):
        line_of("org/m", "transformers", "qwen3", QWEN3, recipe)
    recipe.data.chat_template = None
    line = line_of("org/m", "transformers", "qwen3", QWEN3, recipe)
    assert str(line) == (
        "transformers serve org/m --continuous-batching --host 127.0.0.1 --port 8000 --dtype float16 --default-seed 7 --trust-remote-code"
    )


@pytest.mark.parametrize("engine", ["llama.cpp", "transformers"])
def test_engines_without_tensor_parallelism(line_of, engine):
    with pytest.raises(ValueError, match="--tensor-parallel 2"):
        line_of("org/m", engine, "qwen3", QWEN3, tensor_parallel=2)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_an_unknown_family(line_of, engine):
    line = line_of("org/m", engine, "new_thing", "tools")
    assert "parser" not in str(line)
    note = " ".join(line.notes)
    assert "model_type new_thing" in note and "Look up" in note and "regenerate.api=completions" in note


def test_a_family_that_an_engine_has_no_parsers_for(line_of):
    line = line_of("org/m", "trtllm", "llama", "<|start_header_id|>tools")
    assert any("trtllm has no parsers for it" in note for note in line.notes)


# --- the command ---


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "scripts/serve_target.py"), "-c", "demo.yaml", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_a_dry_run_prints_the_line():
    done = command("--engine", "vllm", "--dry-run", "--port", "8123", "regenerate.max_length=300")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm serve ") and "--port 8123 --max-model-len 300 --dtype float32" in done.stdout
    assert "regenerate.base_urls=[http://127.0.0.1:8123/v1]" in done.stderr


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("serve_target", ROOT / "scripts/serve_target.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_becomes_the_server(script, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(script.os, "execvp", lambda name, words: ran.append((name, words)))
    script.main(["-c", "demo.yaml", "--engine", "sglang"])
    (name, words), said = ran[0], capsys.readouterr().out
    assert (
        name == "python"
        and words[1:3] == ["-m", "sglang.launch_server"]
        and said.startswith("python -m sglang.launch_server")
    )


def test_an_engine_that_is_not_there(script, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="vllm: no such command here; pip install vllm"):
        script.main(["-c", "demo.yaml", "--engine", "vllm"])


def test_llama_cpp_needs_a_file(script):
    with pytest.raises(ValueError, match="--gguf FILE"):
        script.main(["-c", "demo.yaml", "--engine", "llama.cpp"])


def test_all_engines_have_a_line():
    assert set(ENGINES) == set(serve._LINES)
