"""The engines that serve drafters, as data: where each looks in a drafter's folder, its launch line, version floor and settings.

`check` and the model card share this table. A new engine release is a few lines here and in `check.RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

# Targets with linear-attention or state-space layers, by the beginning of their model_type.
HYBRID = (
    "qwen3_next", "qwen3_5", "qwen4_exp", "kimi_linear", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "bamba", "jamba",
    "zamba", "minimax",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What launch lines and settings depend on.

    block: K; sliding: it has sliding layers; bidirectional: these attend in both directions inside the block; family: model_type
    of the target, None if it is not known; target, draft, gguf: names that a launch line takes.
    """

    block: int
    sliding: bool
    bidirectional: bool
    two: bool
    family: str | None = None
    target: str = "TARGET"
    draft: str = "DRAFTER"
    gguf: str = "drafter.gguf"

    @property
    def hybrid(self) -> bool:
        return (self.family or "").startswith(HYBRID)

    @property
    def windowed(self) -> bool:
        """The mask that some attention backends draw wrongly: a window without causality."""
        return self.sliding and self.bidirectional


def _always(s: Serving) -> bool:
    return True


@dataclass(frozen=True)
class Setting:
    """Something to set, or to know, where `when` holds; gpu: the GPUs it is about, None for any."""

    text: str
    source: str
    when: Callable[[Serving], bool] = _always
    gpu: str | None = None


@dataclass(frozen=True)
class Launch:
    """One form of a launch line. $target, $draft, $gguf; $k is K, $k1 is K - 1, $small is at most 5; $backend is empty without a window."""

    language: str
    template: str
    backend: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine: where it looks, and how it is started.

    version, how: the rules are those of this version, found by running it ("run"), from its source ("source") or from documents alone.
    Places: "nested" is dflash_config, "top" the top level. block: places in order, empty if it is not read. causal: (place, key) in order;
    causal_absent: what it assumes without the key, "sliding" (causal on sliding layers) or "no". ungated: what sliding layers become
    where use_sliding_window is not true: "refused", "windowed", "full" or "unknown". theta: where the RoPE base is looked for first.
    partial_rope: honours partial_rotary_factor. scale: reads input_embedding_scale. own_head: uses embed_tokens and lm_head of the
    drafter's file if they are there. quantised: how it runs a drafter in fewer bits. draft: how many tokens it drafts.
    only: drafters that it loads, name -> the values that config.json must state; empty: any.
    """

    name: str
    version: str
    how: str
    floor: str
    block: tuple[str, ...] = ("nested", "top")
    causal: tuple[tuple[str, str], ...] = (("top", "is_causal"),)
    causal_absent: str = "sliding"
    ungated: str = "refused"
    theta: str = "nested"
    partial_rope: bool = False
    scale: bool = True
    own_head: bool = False
    quantised: str
    draft: str
    launch: tuple[Launch, ...]
    settings: tuple[Setting, ...] = ()
    only: tuple[tuple[str, dict[str, Any]], ...] = ()


# What Splash requires of config.json beside the tensors: install/families.py of its repository at fb70a21.
_SPLASH = {
    "architectures": ["DFlash2DraftModel"], "sliding_window": 2048, "is_causal": False, "attention_bias": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_parameters.rope_type": "default",
    "rope_parameters.rope_theta": 10000000, "dflash_config.block_size": 8, "dflash_config.conv_group_size": 16,
    "dflash_config.conv_kernel_size": 2, "dflash_config.selector_top_k": 16, "dflash_config.selector_rank": 256, "vocab_size": 248320,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SPLASH_DRAFTERS = (
    ("Qwen3.8-27B", _SPLASH | {
        "num_hidden_layers": 5, "hidden_size": 5120, "intermediate_size": 17408, "dflash_config.mask_token_id": 248070,
        "dflash_config.target_layer_ids": [5, 19, 33, 47, 61],
    }),
    ("Qwen3.6-35B-A3B", _SPLASH | {
        "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 6144, "dflash_config.mask_token_id": 248077,
        "dflash_config.target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
    }),
)  # fmt: skip

SGLANG = Engine(
    name="SGLang", version="0.5.23", how="source; model and loader run on a CPU", floor="SGLang 0.5.19", partial_rope=True, scale=False,
    quantised="--speculative-draft-model-quantization; its source has a path for quantised q, k and v, which was not run here",
    draft="--speculative-num-draft-tokens $k (counts the anchor)",
    launch=(Launch("bash", """python -m sglang.launch_server --model-path $target \\
  --speculative-algorithm DFLASH --speculative-draft-model-path $draft \\
  --speculative-num-draft-tokens $k$backend""", " \\\n  --speculative-draft-attention-backend fa4"),),
    settings=(
        Setting("--speculative-draft-attention-backend fa3: the published figures were measured with it", "card of the published Qwen3.8-27B drafter", lambda s: s.windowed, "Hopper (SM90)"),
        Setting("--speculative-draft-attention-backend fa4. Without it the draft takes the target's backend; trtllm_mha draws a wrong window for this drafter, without a message",
                "SGLang pull request 35209", lambda s: s.windowed, "Blackwell (SM100)"),
        Setting("SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 (overlap scheduler): a third more throughput at concurrency 32", "launch line of Qwen3.5-397B-A17B by LMSYS, Modal and Z Lab"),
        Setting("--mamba-scheduler-strategy extra_buffer; on 8 x B200 also --linear-attn-prefill-backend triton --linear-attn-decode-backend flashinfer",
                "launch line of Qwen3.5-397B-A17B by LMSYS, Modal and Z Lab", lambda s: s.hybrid),
        Setting("--speculative-draft-model-quantization unquant where the target is quantised: the draft would inherit it", "SGLang server arguments"),
        Setting("a target with a tied head and no vocabulary size in its config fails (Gemma 4)", "SGLang pull request 39362",
                lambda s: s.two and (s.family or "").startswith("gemma")),
        Setting("pin a revision with --speculative-draft-model-revision", "SGLang server arguments"),
    ),
)  # fmt: skip

VLLM = Engine(
    name="vLLM", version="0.33.0", how="source; 0.32.0 run on a CPU", floor="vLLM 0.28.0 with the V2 model runner", block=(),
    causal=(("top", "is_causal"), ("nested", "causal")), partial_rope=True, own_head=True,
    quantised="faulty: the draft's scales have no destination (issue 53116), q, k and v are sliced raw (51581); fixes 51684 and 53122 were open",
    draft="num_speculative_tokens $k1; the block is 1 + that, whatever the config says",
    launch=(Launch("bash", """VLLM_USE_V2_MODEL_RUNNER=1 vllm serve $target \\
  --speculative-config '{"method": "dflash", "model": "$draft", "num_speculative_tokens": $k1}'"""),),
    settings=(
        Setting("the V1 runner has no convolution and no selector; mixed sliding and full layers also need V2", "vLLM 0.33.0, v1/worker/gpu/spec_decode", lambda s: s.two),
        Setting('"attention_backend": "FLASH_ATTN" in the speculative config where the drafter gets FlashInfer', "vLLM pull request 48167", lambda s: s.bidirectional, "Blackwell (SM100)"),
        Setting("do not force the target's Triton backend on the drafter: it has no attention without causality", "vLLM issue 42068",
                lambda s: s.bidirectional and (s.family or "").startswith("gemma")),
        Setting('pin a revision with "revision" in the speculative config', "vLLM speculative config"),
    ),
)  # fmt: skip

TENSORRT = Engine(
    name="TensorRT-LLM", version="1.4.0rc1", how="documents, and the source of its DFlash v1 module (7c7504c)", floor="TensorRT-LLM 1.3.0rc28",
    ungated="unknown", partial_rope=True, quantised="not known; its v1 module slices q, k and v raw, as vLLM's does",
    draft="max_draft_len $k1; it warns where max_draft_len + 1 is not the block size",
    launch=(
        Launch("python", """from tensorrt_llm import LLM
from tensorrt_llm.llmapi import DFlashDecodingConfig

llm = LLM("$target", speculative_config=DFlashDecodingConfig(max_draft_len=$k1, speculative_model="$draft"))"""),
        Launch("yaml", """# trtllm-serve $target --config this.yaml
speculative_config:
  decoding_type: DFlash
  max_draft_len: $k1
  speculative_model: $draft"""),
    ),
    settings=(
        Setting('attention_backend="FA4", or the default, VANILLA', "TensorRT-LLM 1.4.0rc1, DFlashDecodingConfig", gpu="Hopper (SM90)"),
        Setting("never attention_backend=\"TRTLLM\", though guides show it for SM100: it has no windows without causality and refuses this drafter; VANILLA and FA4 remain",
                "TensorRT-LLM pull request 19159", lambda s: s.windowed),
        Setting('attention_backend="TRTLLM"', "TensorRT-LLM 1.4.0rc1, DFlashDecodingConfig", lambda s: not s.windowed, "Blackwell (SM100, SM103)"),
        Setting("1.2 and older stable releases have no DFlash; 1.3.0rc28 is the first with the selector", "TensorRT-LLM releases"),
    ),
)  # fmt: skip

LLAMA_CPP = Engine(
    name="llama.cpp", version="b11434", how="run on a CPU", floor="llama.cpp built after 2026-08-27 (pull request 27816)",
    causal=(("top", "is_causal"), ("nested", "causal")), causal_absent="no", ungated="full", partial_rope=True, own_head=True,
    quantised="GGUF types; the only files in fewer bits that an engine was seen to load",
    draft="--spec-draft-n-max $k1 (more is cut to that)",
    launch=(
        Launch("bash", """# in a checkout of dflash-train; or llama.cpp's convert_hf_to_gguf.py DRAFTER_FOLDER --target-model-dir TARGET_FOLDER --outfile drafter.gguf
python scripts/convert_gguf.py DRAFTER_FOLDER --target TARGET_FOLDER --output drafter.gguf --with-target target.gguf
llama-server -m target.gguf -md $gguf --spec-type draft-dflash --spec-draft-n-max $k1"""),
        Launch("bash", "llama-server -m target.gguf -hfd $draft-GGUF --spec-type draft-dflash --spec-draft-n-max $k1"),
    ),
    settings=(
        Setting("convert with the target's folder: the drafter takes its vocabulary; GGUF files from before 2026-08-27 must be converted again, or targets that see images break",
                "llama.cpp pull request 27342"),
        Setting("one request at a time: acceptance falls with many parallel slots, and speed does not grow", "llama.cpp issue 27117"),
        Setting("--spec-draft-n-max 4 gave 1.81 times plain decoding on an M5 Pro with a Q4_K_M target of 27B", "llama.cpp pull request 27342", gpu="Apple silicon"),
    ),
)  # fmt: skip

EXLLAMA = Engine(
    name="exllamav3", version="1.6.5", how="source", floor="exllamav3 1.6.5", block=("top", "nested"),
    causal=(("top", "is_causal"), ("nested", "is_causal")), ungated="unknown",
    quantised="its own format", draft="drafts $k1 tokens",
    launch=(Launch("bash", "python examples/chat.py -m TARGET_EXL3 -dm DRAFTER_FOLDER"),),
    settings=(Setting("drafts greedily at any temperature", "exllamav3 1.6.5", lambda s: s.two),),
)  # fmt: skip

OLLAMA = Engine(
    name="ollama", version="pull request 17865", how="source of the branch (90f13fb)", floor="a build of ollama pull request 17865 (open), MLX engine",
    causal=(("nested", "causal"), ("top", "is_causal")), ungated="windowed", theta="top",
    quantised="--draft-quantize when the model is created", draft="draft_num_predict $k1; 0, its default, is off",
    launch=(Launch("", """FROM TARGET_FOLDER
DRAFT DRAFTER_FOLDER
PARAMETER draft_num_predict $k1"""),
            Launch("bash", "ollama create NAME --experimental && ollama run NAME")),
    settings=(
        Setting("set the depth: the default of 0 switches speculation off without a message, though the log says that the drafter was loaded", "ollama pull request 17865"),
        Setting("about 80 % of outputs were said to agree with plain decoding: compare greedy outputs before you rely on it", "ollama pull request 17865"),
        Setting("depths 4 to 7 were fastest on an M3 Pro", "ollama pull request 17865", gpu="Apple silicon"),
    ),
)  # fmt: skip

OMLX = Engine(
    name="MLX / oMLX", version="0.6.3rc1", how="documents; its MLX model is that of dflash 0.1.0, run on a CPU", floor="oMLX 0.6.3rc1, or the build 0.6.2-zlab-dflash2",
    ungated="windowed", quantised="draft quantisation in the model's settings", draft="block size $small; at most 5 with quantised weights",
    launch=(Launch("", """Model manager, target model: DFlash on, draft model $draft,
block size (dflash_block_size) $small, verify mode dflash, draft quantization as you like"""),),
    settings=(
        Setting("at most 5 rows with a quantised target or drafter: MLX's quantised product gets slower beyond", "z-lab's dflash client; mlx-vlm issue 2144", gpu="Apple silicon"),
        Setting("0.6.2 itself has no DFlash 2; where DFlash cannot start, the server answers without it and only logs that", "oMLX issue 2896"),
    ),
)  # fmt: skip

CLIENT = Engine(
    name="reference dflash client", version="0.1.0", how="run on a CPU, torch and MLX", floor="dflash 0.1.0 with transformers 5.15 or later, or MLX",
    ungated="refused", quantised="--draft-bits with MLX", draft="drafts $k1 tokens; --block-size",
    launch=(
        Launch("bash", 'dflash generate mlx --model $target --draft $draft --block-size $small "PROMPT"'),
        Launch("python", """from dflash.model import $cls

drafter = $cls.from_pretrained("$draft", dtype="auto")
output_ids = drafter.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[], temperature=0.0)"""),
    ),
    settings=(
        Setting("at most 5 rows where target or drafter are quantised", "z-lab's dflash client", gpu="Apple silicon"),
        Setting("with MLX, once the window has wrapped, one-token updates leave keys out of order: the output stays right, acceptance falls",
                "dflash 0.1.0, model_mlx.py with mlx-lm RotatingKVCache", lambda s: s.sliding),
    ),
)  # fmt: skip

SPLASH = Engine(
    name="Splash", version="1.0 and later", how="source (incoai/splash at fb70a21 and 1f82545)", floor="a Splash release with --draft-model; packages alone before",
    ungated="windowed", scale=False, quantised="always 4 bits, made from the BF16 file when it starts",
    draft="the whole block; nothing to set", launch=(Launch("bash", "splash serve --model TARGET_MLX_4BIT --draft-model DRAFTER_FOLDER"),),
    settings=(Setting("the drafter must state every value that Splash's own drafter of that target has, and be BF16", "Splash, install/families.py"),),
    only=SPLASH_DRAFTERS,
)  # fmt: skip

ENGINES = (SGLANG, VLLM, TENSORRT, LLAMA_CPP, OLLAMA, OMLX, EXLLAMA, CLIENT, SPLASH)


def fill(text: str, s: Serving, backend: str = "") -> str:
    """A template with the drafter's numbers and names."""
    return Template(text).substitute(
        target=s.target,
        draft=s.draft,
        gguf=s.gguf,
        k=s.block,
        k1=s.block - 1,
        small=min(s.block, 5),
        backend=backend if s.windowed else "",
        cls="DFlash2DraftModel" if s.two else "DFlashDraftModel",
    )


def lines(engine: Engine, s: Serving) -> list[tuple[str, str]]:
    """(language, text) of every form of its launch line."""
    return [(launch.language, fill(launch.template, s, launch.backend)) for launch in engine.launch]


def settings(engine: Engine, s: Serving) -> list[Setting]:
    """What to set and to know for this drafter."""
    return [setting for setting in engine.settings if setting.when(s)]


def splash_difference(config: dict[str, Any]) -> tuple[str, list[str]]:
    """(the drafter of Splash's own that `config` is closest to, what it states otherwise); no difference: Splash loads it."""

    def stated(key: str) -> Any:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    found = [
        (name, [f"{k} = {stated(k)}, not {v}" for k, v in need.items() if stated(k) != v])
        for name, need in SPLASH_DRAFTERS
    ]
    return min(found, key=lambda pair: len(pair[1]))


# ------------------------------------------------------------------------------------------------------ somebody's launch line


@dataclass(frozen=True)
class Flag:
    """A flag of a launch line or configuration: `pattern` finds its value, `wrong` says whether it contradicts the drafter.

    fatal: the drafter drafts wrongly or not at all; otherwise it is only worth knowing. {}: the value; $k, $k1 as in a launch line.
    """

    name: str
    engine: str
    pattern: str
    wrong: Callable[[str, Serving], bool]
    message: str
    source: str
    fatal: bool = True


_COUNT = r"[\"']?\s*[=:\s]\s*[\"']?(\d+)"
FLAGS = (
    Flag("num-draft-tokens", "SGLang", r"--speculative-num-draft-tokens" + _COUNT, lambda v, s: int(v) > s.block,
         "--speculative-num-draft-tokens {}: the block has $k rows; more was never trained", "SGLang 0.5.23"),
    Flag("num-draft-tokens low", "SGLang", r"--speculative-num-draft-tokens" + _COUNT, lambda v, s: int(v) < s.block,
         "--speculative-num-draft-tokens {} counts the anchor, so one fewer is drafted; the whole block is $k", "SGLang 0.5.23", False),
    Flag("dflash-block-size", "SGLang", r"--speculative-dflash-block-size" + _COUNT, lambda v, s: int(v) > s.block,
         "--speculative-dflash-block-size {}: the block has $k rows; more was never trained", "SGLang 0.5.23"),
    Flag("speculative-algorithm", "SGLang", r"--speculative-algorithm[=\s]+[\"']?(\w+)", lambda v, s: v.upper() != "DFLASH",
         "--speculative-algorithm {}: this drafter needs DFLASH", "SGLang 0.5.23"),
    Flag("draft backend", "SGLang", r"--speculative-draft-attention-backend[=\s]+(trtllm_mha)", lambda v, s: s.windowed,
         "--speculative-draft-attention-backend {} draws a wrong window for sliding layers without causality; fa3 on Hopper, fa4 on Blackwell",
         "SGLang pull request 35209"),
    Flag("draft backend inherited", "SGLang", r"(?s)^(?!.*--speculative-draft-attention-backend).*--attention-backend[=\s]+(trtllm_mha)", lambda v, s: s.windowed,
         "--attention-backend {} is the draft's backend too, and draws a wrong window for it: add --speculative-draft-attention-backend fa4",
         "SGLang pull request 35209"),
    Flag("linear-attention flags", "SGLang", r"(--linear-attn-\w+-backend|--mamba-scheduler-strategy)", lambda v, s: s.family is not None and not s.hybrid,
         "{} is for targets with linear attention; this one has none", "launch line of Qwen3.5-397B-A17B by LMSYS, Modal and Z Lab", False),
    Flag("num_speculative_tokens", "vLLM", r"num_speculative_tokens" + _COUNT, lambda v, s: int(v) > s.block - 1,
         "num_speculative_tokens {}: the block is 1 + that, trained were $k; use $k1", "vLLM 0.33.0; pull request 41834"),
    Flag("num_speculative_tokens low", "vLLM", r"num_speculative_tokens" + _COUNT, lambda v, s: int(v) < s.block - 1,
         "num_speculative_tokens {}: fewer than the $k1 that the block drafts", "vLLM 0.33.0", False),
    Flag("method", "vLLM", r"vllm[\s\S]*?[\"']method[\"']\s*:\s*[\"']([\w-]+)", lambda v, s: v != "dflash",
         'method {}: this drafter needs "dflash"', "vLLM 0.33.0"),
    Flag("V2 runner not named", "vLLM", r"(?s)\A(?!.*VLLM_USE_V2_MODEL_RUNNER).*(num_speculative_tokens)", lambda v, s: s.two,
         "VLLM_USE_V2_MODEL_RUNNER=1 is not set beside {}: the V1 runner has no convolution and no selector", "vLLM 0.33.0, v1/worker/gpu/spec_decode", False),
    Flag("V1 runner", "vLLM", r"VLLM_USE_V2_MODEL_RUNNER[\"']?\s*[=:]\s*[\"']?(0|false)", lambda v, s: s.two, "VLLM_USE_V2_MODEL_RUNNER={}: the V1 runner has no convolution and no selector",
         "vLLM 0.33.0, v1/worker/gpu/spec_decode"),
    Flag("max_draft_len", "TensorRT-LLM", r"max_draft_len" + _COUNT, lambda v, s: int(v) != s.block - 1,
         "max_draft_len {}: the block drafts $k1; TensorRT-LLM warns where max_draft_len + 1 is not the block size", "TensorRT-LLM 1.4.0rc1 documents"),
    Flag("decoding_type", "TensorRT-LLM", r"decoding_type[\"']?\s*[=:]\s*[\"']?(\w+)", lambda v, s: v.lower() != "dflash",
         "decoding_type {}: this drafter needs DFlash", "TensorRT-LLM 1.4.0rc1 documents"),
    Flag("TRTLLM backend", "TensorRT-LLM", r"(?<!draft-)(?<!--)attention_backend[\"']?\s*[=:]\s*[\"']?(TRTLLM)", lambda v, s: s.windowed,
         "attention_backend {} refuses sliding layers without causality; VANILLA or FA4", "TensorRT-LLM pull request 19159"),
    Flag("spec-type", "llama.cpp", r"--spec-type[=\s]+([\w,-]+)", lambda v, s: "draft-dflash" not in v.split(","),
         "--spec-type {}: this drafter needs draft-dflash", "llama.cpp b11434, common/speculative.cpp"),
    Flag("spec-draft-n-max", "llama.cpp", r"--spec-draft-n-max" + _COUNT, lambda v, s: int(v) > s.block - 1,
         "--spec-draft-n-max {} is cut to $k1", "llama.cpp b11434, common/speculative.cpp", False),
    Flag("parallel slots", "llama.cpp", r"--spec-type\s+draft-dflash[\s\S]*?(?:-np|--parallel)[=\s]+([2-9]|\d\d+)", lambda v, s: True,
         "{} parallel slots: acceptance falls; DFlash in llama.cpp is for one request at a time", "llama.cpp issue 27117", False),
    Flag("draft_num_predict off", "ollama", r"draft_num_predict" + _COUNT, lambda v, s: int(v) == 0, "draft_num_predict {} switches speculation off",
         "ollama pull request 17865"),
    Flag("draft_num_predict", "ollama", r"draft_num_predict" + _COUNT, lambda v, s: int(v) > s.block - 1,
         "draft_num_predict {}: the block drafts $k1", "ollama pull request 17865"),
    Flag("no draft depth", "ollama", r"(?s)^(?!.*draft_num_predict).*^(DRAFT)\s", lambda v, s: True,
         "{} without PARAMETER draft_num_predict $k1: its default of 0 switches speculation off", "ollama pull request 17865"),
    Flag("block-size", "dflash client, oMLX", r"(?<!dflash-)(?:--block-size|dflash_block_size)" + _COUNT, lambda v, s: int(v) > s.block,
         "block size {}: trained were $k", "dflash 0.1.0"),
    Flag("block-size quantised", "dflash client, oMLX", r"(?s)^(?=.*--draft-bits).*--block-size" + _COUNT, lambda v, s: int(v) > 5,
         "block size {} with quantised weights: MLX gets slower beyond 5", "z-lab's dflash client", False),
)  # fmt: skip


def contradictions(line: str, s: Serving) -> list[tuple[Flag, str]]:
    """(flag, message) for everything in a launch line or configuration that contradicts the drafter."""
    found = []
    for flag in FLAGS:
        for match in re.finditer(flag.pattern, line, re.MULTILINE):
            if flag.wrong(match.group(1), s):
                found.append((flag, fill(flag.message, s).replace("{}", match.group(1))))
                break
    return found
