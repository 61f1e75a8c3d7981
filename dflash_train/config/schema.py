"""Every knob: its type, its default and what it means. No torch, no I/O; the one place where a default exists.

A recipe is one `Recipe`. `load.py` merges YAML and command line into it once; afterwards it is never changed. The text
given to `knob` is what `--help` and `docs/configuration.md` print. `identity=True` marks what defines *which* drafter this
is: those fields are saved with every checkpoint and compared on resume.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def knob(default: Any, text: str, *, identity: bool = False) -> Any:
    """A documented dataclass field. `default` may be a list or dict (copied per instance)."""
    meta = {"help": " ".join(text.split()), "identity": identity}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


class Precision(enum.Enum):
    """Number format of weights and matrix products."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8 = "fp8"


class Attention(enum.Enum):
    """How the drafter's block attention is computed; all give the same numbers."""

    auto = "auto"
    dense = "dense"
    flex = "flex"


class Denominator(enum.Enum):
    """What the selector term is divided by."""

    supervised = "supervised"
    covered = "covered"


class EngineKind(enum.Enum):
    """How ranks share the work."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp2 = "fsdp2"
    deepspeed_zero1 = "deepspeed_zero1"
    deepspeed_zero2 = "deepspeed_zero2"

    @property
    def is_deepspeed(self) -> bool:
        return self in (EngineKind.deepspeed_zero1, EngineKind.deepspeed_zero2)

    @property
    def shards(self) -> bool:
        """Whether it needs a process group even where there is one process."""
        return self is EngineKind.fsdp2 or self.is_deepspeed


class ReducePrecision(enum.Enum):
    """Number format in which gradients travel between ranks."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Backend(enum.Enum):
    """What runs the target while it regenerates."""

    transformers = "transformers"
    openai = "openai"
    vllm = "vllm"


class Api(enum.Enum):
    """What a server is given: messages, which it renders itself, or the token ids of the rendered prompt."""

    chat = "chat"
    completions = "completions"


class LongDocuments(enum.Enum):
    """What becomes of a conversation that is longer than a packed row."""

    cut = "cut"
    window = "window"


class ClientCheck(enum.Enum):
    """Whether an independent client decodes from the export."""

    auto = "auto"
    required = "required"
    off = "off"


class ReasoningRows(enum.Enum):
    """What becomes of a multi-turn conversation whose template is not prefix-preserving."""

    per_turn = "per_turn"
    whole = "whole"


class WandbMode(enum.Enum):
    """Weights & Biases: `auto` is on when a project is set and the user is logged in."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen model that will be served."""

    path: str = knob(
        MISSING, "Hub id or local folder of the frozen target; `embedded` is the tiny chat model in the package."
    )
    revision: str | None = knob(None, "Hub revision (branch, tag or commit) to pin.")
    precision: Precision = knob(
        Precision.auto,
        """Weights and compute of the target: auto is bfloat16 on CUDA and float32 on CPU. Capture in the precision you serve. fp8: linear layers of the
        decoder in 8 bits, one scale per row of weights and of activations, the rest in bfloat16, while training and evaluating; regeneration and servers take bfloat16.""",
    )
    device: str | None = knob(
        None,
        "A GPU of its own for the target while one process trains, such as cuda:1: it reads the next micro-batch there. Null: the drafter's.",
    )
    attn_implementation: str = knob("sdpa", "Attention kernel of the target, as transformers names it.")
    trust_remote_code: bool = knob(False, "Run Python code that comes with the target. Off unless you read that code.")


@dataclass(kw_only=True)
class RegenerateConfig:
    """Replacing every answer by what the frozen target says."""

    prompts: str = knob(
        MISSING,
        "JSONL (plain, .gz or .zst), Parquet, a folder of them or a Hub data set of conversations; their assistant turns are replaced. `embedded` is the demo's prompt set.",
    )
    output: str = knob(MISSING, "JSONL file to append to; a restart continues it.")
    limit: int | None = knob(None, "Only the first N prompts.")
    max_new_tokens: int = knob(
        2048, "Generated tokens per turn at most; a turn that reaches it is marked finish_reason: length."
    )
    max_length: int = knob(
        4096, "Prompt plus answer at most, in tokens; a conversation whose prompt leaves no room is counted as failed."
    )
    temperature: float = knob(0.0, "Sampling temperature; 0 is greedy.")
    top_p: float = knob(1.0, "Nucleus sampling mass.")
    top_k: int = knob(0, "Sample among the k most likely tokens; 0 is all.")
    mixture: list[Any] = knob(
        [],
        """Settings of which each row draws one, by the hash of its id: a list of {name, weight, temperature, top_p, top_k,
        chat_template_kwargs, extra_body}; what one leaves out is the recipe's. For thinking on and off, reasoning efforts, several temperatures.""",
    )
    backend: Backend = knob(
        Backend.transformers,
        "transformers: the target, here; openai: OpenAI-compatible servers (vLLM, SGLang, llama.cpp, TensorRT-LLM); vllm: its offline engine, here.",
    )
    batch_size: int | None = knob(
        None,
        "transformers backend: conversations generated together. Null: 64 on a CPU; on CUDA as many as the memory holds, at most 2048.",
    )
    base_urls: list[str] = knob(
        [],
        "openai backend: servers of the same target, such as http://localhost:8000/v1; requests go to the least busy.",
    )
    api: Api = knob(
        Api.chat,
        """openai backend. chat: the server renders the messages (start it with the reasoning and tool parsers of the target);
        completions: it gets the token ids of our own rendering and answers in plain text.""",
    )
    model: str | None = knob(None, "openai backend: name under which the target is served; null: the only one that is.")
    api_key_env: str = knob(
        "OPENAI_API_KEY",
        "openai backend: environment variable with the key, if the server wants one. The key is never stored.",
    )
    concurrency: int = knob(64, "openai backend: requests in flight per server.")
    timeout_seconds: float = knob(600.0, "openai backend: a request that takes longer is tried again.")
    max_retries: int = knob(5, "openai backend: further tries of a request that failed, with growing pauses.")
    extra_body: dict[str, Any] = knob(
        {}, "openai backend: further fields of each request, such as reasoning_effort; recorded with each row."
    )
    vllm_args: dict[str, Any] = knob({}, "vllm backend: arguments of vllm.LLM, such as tensor_parallel_size.")
    shard: str | None = knob(
        None,
        "i/n: only the i-th of n parts (from 0), written to <output> with .i-of-n before its ending; --merge joins and proves them complete.",
    )
    seed: int = knob(0, "Seed of sampling; each row draws from (seed, row id, turn).")
    chat_template_kwargs: dict[str, Any] = knob(
        {},
        "Passed to the chat template, such as enable_thinking; recorded with each row, where they win over data.chat_template_kwargs.",
    )


@dataclass(kw_only=True)
class DataConfig:
    """What is trained on, and how it becomes rows of tokens."""

    train: list[Any] = knob(
        [],
        """JSONL (plain, .gz, .zst) or Parquet files, folders of them or of datasets.save_to_disk, or Hub data sets as owner/name:split, with
        `messages`, or with `prompt_ids` and `response_ids` (docs/data.md has the rest). Also {path, weight, domain}: passes over its rows per epoch (0.5: half of them, others each epoch; 2: twice), and a tag
        for its rows.""",
    )
    heldout: list[str] = knob(
        [], "Held-out files of the same form, never trained on; answers may be missing. `embedded` is the demo's set."
    )
    max_length: int = knob(3072, "Tokens per packed row; longer conversations are cut there and counted.")
    long_documents: LongDocuments = knob(
        LongDocuments.cut,
        """Conversations longer than max_length: cut there, or made into windows of that length that overlap by window_overlap, so that every
        supervised token is supervised once. Held-out rows are always cut.""",
    )
    window_overlap: int | None = knob(
        None, "Tokens that a window repeats from the one before it, as context only; null: a quarter of max_length."
    )
    workers: int | None = knob(
        None,
        "Processes that tokenise; 1: this one alone. Null: this one alone below 8,000 rows, else one per CPU core, at most 16.",
    )
    cache_dir: str | None = knob(
        "~/.cache/dflash_train",
        "Folder of tokenised data, keyed by content, template, arguments, tokenizer, length and code; made once per machine, made again when damaged, safe to delete. Null: none is kept.",
    )
    pack: bool = knob(True, "Several whole conversations per row, without attention across them.")
    chat_template: str | None = knob(None, "Path of a Jinja chat template that replaces the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "Passed to the chat template; a row's own chat_template_kwargs win."
    )
    reasoning_rows: ReasoningRows = knob(
        ReasoningRows.per_turn,
        "Template that strips earlier reasoning: per_turn gives one row per assistant turn, as serving would build it; whole keeps one row and supervises what is rendered.",
    )
    drop_truncated: bool = knob(
        False,
        "Leave out rows with finish_reason: length. Kept rows end where they were cut, without a supervised turn end.",
    )
    max_dropped: float = knob(
        0.1, "Stop when more than this share of the rows (or of the prompts to regenerate) cannot be used."
    )
    limit: int | None = knob(None, "Only the first N rows of `train`.")
    certificate: str | None = knob(
        None,
        "File that data_prep/inspect_data.py wrote: training refuses data, template or tokenizer that differ from it. Null: any.",
    )


@dataclass(kw_only=True)
class DrafterConfig:
    """What the drafter is. Everything here goes into its config.json, but for where its first weights come from."""

    init_from: str | None = knob(
        None,
        """Folder or Hub id of a released DFlash or DFlash 2 drafter to start from (docs/warm_start.md). What is not set below is then the
        released drafter's; what is set and contradicts it is refused. Null: fresh weights.""",
        identity=True,
    )
    init_revision: str | None = knob(None, "Hub revision of init_from (branch, tag or commit) to pin.", identity=True)
    block_size: int = knob(16, "K: one anchor and K-1 drafted slots.", identity=True)
    mask_token_id: int | None = knob(
        None,
        "Required. A reserved, unused token id that fills the drafted slots, in training as in serving. Never pad, eos or bos.",
        identity=True,
    )
    target_layer_ids: list[int] | None = knob(
        None,
        "0-based decoder layers whose outputs are captured, ascending, never the last. Null: spread evenly from the 2nd to the 3rd-last, one per draft layer.",
        identity=True,
    )
    num_hidden_layers: int = knob(5, "Draft layers.", identity=True)
    num_attention_heads: int | None = knob(None, "Query heads; null: the target's.", identity=True)
    num_key_value_heads: int | None = knob(None, "Key/value heads; null: the target's.", identity=True)
    head_dim: int | None = knob(None, "Width of a head; null: the target's.", identity=True)
    intermediate_size: int | None = knob(None, "Width of the MLP; null: the target's.", identity=True)
    sliding_window: int | None = knob(
        None,
        "W: a query at position q sees context k with q-k < W. Null: full attention. At least block_size.",
        identity=True,
    )
    layer_types: list[str] | None = knob(
        None,
        "sliding_attention or full_attention per layer; null: all of one kind, sliding if sliding_window is set.",
        identity=True,
    )
    is_causal: bool = knob(False, "Causal attention inside the block. False for DFlash and DFlash 2.", identity=True)
    conv_kernel_size: int = knob(2, "Taps of the in-block convolution; 0 leaves it out (DFlash v1).", identity=True)
    conv_group_size: int = knob(16, "Channels that share one dynamic tap; divides the hidden size.", identity=True)
    selector_rank: int = knob(
        256, "Rank of the selector's codebooks; 0 leaves the selector out (DFlash v1).", identity=True
    )
    selector_top_k: int = knob(16, "Candidates per slot; a power of two.", identity=True)
    rope_theta: float | None = knob(None, "RoPE base; null: the target's.", identity=True)
    rms_norm_eps: float | None = knob(None, "Epsilon of the RMS norms; null: the target's.", identity=True)
    output_multiplier: float | None = knob(
        None, "Factor on the logits before the soft-cap; null: the target's, 1 for most.", identity=True
    )
    final_logit_softcapping: float | None = knob(
        None, "Soft-cap of the logits; null: the target's, none for most.", identity=True
    )
    input_embedding_scale: float | None = knob(
        None, "Factor on the token embeddings; null: the target's, 1 for most.", identity=True
    )


@dataclass(kw_only=True)
class ObjectiveConfig:
    """loss = base + selector_loss_weight x selector, each divided by its own global denominator."""

    loss_decay_gamma: float | None = knob(
        None, "gamma of w_k = exp(-(k-1)/gamma). Null: 4, 5, 7 for block sizes 8, 10, 16 and interpolated between."
    )
    selector_loss_weight: float = knob(1.0, "Weight of the selector's cross-entropy.")
    selector_denominator: Denominator = knob(
        Denominator.supervised,
        "supervised: all supervised decay weight, exact under any split of a step. covered: only slots whose token is among the candidates (NeMo's), known after the forward, so exact in one micro-batch only.",
    )
    chunk_rows: int = knob(
        1024,
        "Slots whose logits exist at the same time, at most (a large vocabulary takes fewer); the result does not depend on it.",
    )


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW over fp32 master weights, linear warm-up, cosine decay."""

    lr: float = knob(6e-4, "Peak learning rate.")
    beta1: float = knob(0.9, "AdamW's first-moment decay.")
    beta2: float = knob(0.95, "AdamW's second-moment decay.")
    eps: float = knob(1e-8, "AdamW's epsilon.")
    weight_decay: float = knob(0.0, "Decoupled weight decay on matrices; norms, taps and codebooks have none.")
    warmup_ratio: float = knob(0.04, "Share of all steps with a linearly rising rate.")
    min_lr_ratio: float = knob(0.1, "Floor of the cosine, as a share of lr.")
    max_grad_norm: float = knob(1.0, "Gradient-norm clip; 0 switches clipping off.")


@dataclass(kw_only=True)
class EngineConfig:
    """Processes and numbers."""

    kind: EngineKind = knob(
        EngineKind.auto,
        """auto: ddp under torchrun with more than one process, else single. fsdp2 shards weights, gradients and moments; deepspeed_zero1 moments,
        deepspeed_zero2 gradients too. All give the same numbers, and a run may be continued by another one (docs/engines.md).""",
    )
    offload: bool = knob(False, "DeepSpeed only: keep fp32 masters and moments in host memory, and run AdamW there.")
    precision: Precision = knob(
        Precision.auto, "Compute of the drafter over its fp32 weights: auto is bfloat16 on CUDA and float32 on CPU."
    )
    reduce_precision: ReducePrecision = knob(
        ReducePrecision.float32,
        "How gradients travel between ranks; bfloat16 is half the bytes, rounded: for GPUs without NVLink, and slow networks (docs/engines.md).",
    )
    attention: Attention = knob(
        Attention.auto,
        "auto: on CUDA our own kernels for Hopper where they can (16 bits, heads of 64 or 128, blocks of up to 64), else flex; dense elsewhere.",
    )
    compile: bool | None = knob(
        None,
        "torch.compile the draft layers, one by one under every engine, and the target's for rows as training has them; null: unless attention is dense, so on CUDA.",
    )
    cuda_graphs: bool = knob(
        True,
        """With compiled layers on CUDA: the target's pass over rows as training has them is recorded as CUDA graphs, and so is that of a
        drafter of less than 100 M parameters without its codebooks where each rank holds it whole (single, ddp). What waits for the device cannot be recorded: it is run without, and a note says why.""",
    )
    read_ahead: bool = knob(
        True,
        "On CUDA the target reads the next micro-batch on a stream of its own while the drafter learns from this one.",
    )
    timeout_minutes: float = knob(30.0, "A collective that waits longer ends the job.")
    threads: int | None = knob(None, "CPU threads per process; null: torch's choice.")


@dataclass(kw_only=True)
class TrainConfig:
    """The loop."""

    num_epochs: float = knob(6.0, "Passes over the training rows.")
    max_steps: int | None = knob(None, "Optimizer steps; overrides num_epochs.")
    global_batch_size: int = knob(8, "Packed rows per optimizer step, over all ranks and micro-batches.")
    micro_batch_size: int = knob(1, "Packed rows per forward on one rank.")
    num_anchors: int = knob(512, "Blocks per packed row, shared over its conversations by their legal anchors.")
    seed: int = knob(0, "Seed of initialisation, row order and anchors.")
    log_every_steps: int = knob(10, "Steps per logged metric window.")
    eval_every_steps: int | None = knob(None, "Steps between held-out evaluations; null: only at the end.")
    decode_every_steps: int | None = knob(
        None,
        "Steps between real decodings of held-out prompts while training; null: none. They cost more than evaluations.",
    )
    decode_prompts: int = knob(8, "Held-out prompts per domain that those decode.")
    best_metric: str = knob(
        "heldout/walk_tau",
        "Held-out metric whose highest value marks the checkpoint that is kept as best; any name logged under heldout/ or decoded/.",
    )
    patience: int | None = knob(None, "Stop after so many evaluations without a better best_metric; null: never.")
    export_best: bool = knob(False, "Export the best checkpoint rather than the last.")
    checkpoint_every_steps: int | None = knob(500, "Steps between checkpoints; null: only at the end.")
    keep_checkpoints: int = knob(2, "Newest checkpoints kept.")
    max_skipped_steps: int = knob(
        10,
        "Stop with a checkpoint after so many steps in a row whose loss or gradient was not finite on some rank; each is skipped by all ranks.",
    )
    resume: bool = knob(False, "Continue from the newest good checkpoint in output_dir; there may be none yet.")
    may_change: list[str] = knob(
        [],
        """Settings in which the recipe may differ from the checkpoint it continues from, such as optimizer.lr or total_steps; a resume that
        finds any other difference names it and stops.""",
    )


@dataclass(kw_only=True)
class EvaluateConfig:
    """Held-out acceptance."""

    decode: bool = knob(True, "Real speculative decoding with the frozen target, besides the teacher-forced metrics.")
    max_prompts: int | None = knob(None, "Held-out prompts per domain; null: all.")
    max_new_tokens: int = knob(256, "Decoded tokens per prompt at most.")
    temperature: float = knob(
        0.0,
        "Sampling temperature of the target while it is decoded; 0 is greedy. Above 0 losslessness is a matter of distributions.",
    )
    top_p: float = knob(1.0, "Nucleus of the target's sampling.")
    top_k: int = knob(0, "The target samples among its k most likely tokens; 0 is all.")
    seed: int = knob(0, "Seed of sampling and of the bootstrap.")
    batch_size: int | None = knob(
        None,
        "Prompts decoded together on CUDA; null: as many as the memory holds, at most 256. On a CPU one after the other.",
    )
    block_sizes: list[int] = knob(
        [], "Shorter blocks to decode with besides the trained one (served at 4 or 8 where trained at 16)."
    )
    client: ClientCheck = knob(
        ClientCheck.auto,
        """Whether z-lab's `dflash` client decodes some prompts from the exported folder, to be compared with the walk: auto where it is
        installed, required, or off.""",
    )
    client_prompts: int = knob(6, "Prompts that the client decodes, shared over the domains.")
    near_tie: float | None = knob(
        None,
        """A first differing token whose two best target logits lie closer than this counts as a tie, not as a loss.
        Null: 1e-4 for a float32 target; for bfloat16 and float16 two units in the last place of the larger logit.""",
    )


@dataclass(kw_only=True)
class ExportConfig:
    """The folder that engines load."""

    output: str | None = knob(None, "Folder of the export; null: <output_dir>/export.")
    precision: Precision = knob(Precision.bfloat16, "Weights of the export; float32 keeps the masters.")
    license: str | None = knob(
        None,
        """Licence on the model card, as the Hub spells it; null: what follows from target, initial drafter and data (docs/serving.md). One that is freer
        than theirs is refused.""",
    )
    owned: bool = knob(
        False,
        """You hold the rights in target, initial drafter and data, or their owners let you, so that none of their licences restricts the export or forbids
        the start.""",
    )


@dataclass(kw_only=True)
class TrackConfig:
    """Where metrics go. metrics.jsonl is always written."""

    wandb: WandbMode = knob(WandbMode.auto, "auto: on when wandb_project is set and you are logged in.")
    wandb_project: str | None = knob(None, "W&B project.")
    wandb_name: str | None = knob(None, "W&B run name; null: the output folder's name.")
    wandb_group: str | None = knob(None, "W&B group, to show several runs together.")
    tensorboard: bool = knob(False, "Also write TensorBoard event files to <output_dir>/tensorboard.")
    progress: bool = knob(True, "Progress bar on rank 0.")


@dataclass(kw_only=True)
class Recipe:
    """One run: everything from prompts to an exported drafter."""

    output_dir: str = knob(MISSING, "Folder of the run: config, metrics, checkpoints, export.")
    target: TargetConfig = field(default_factory=TargetConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    provenance: dict[str, Any] = knob(
        {}, "Written with the run (versions, git state, command line); ignored when read back."
    )

    def __post_init__(self) -> None:
        """What `load.py` knows beside the knobs: those that were set (dotted names), and what there is to say about them."""
        self.given: frozenset[str] = frozenset()
        self.notes: list[str] = []
