"""Small random models, tokenizers, rows and drafters that the tests share."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stubs import free_port
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_train import ranks
from dflash_train.config.load import run_command
from dflash_train.config.schema import EngineConfig, EngineKind, ObjectiveConfig, OptimizerConfig, ReducePrecision
from dflash_train.data.stream import RowStream, StreamConfig, assemble
from dflash_train.drafter.model import Drafter
from dflash_train.drafter.spec import FULL, SLIDING, DrafterSpec
from dflash_train.engine.base import Engine
from dflash_train.engine.build import build_engine
from dflash_train.method import DraftStep
from dflash_train.metrics import MetricWindow
from dflash_train.objective.loss import decay
from dflash_train.target.hf import HFTarget
from dflash_train.target.info import rope_theta
from dflash_train.types import PackedBatch, TargetFeatures, TargetInfo, TokenizedExample
from dflash_train.walk import move

VOCAB, HIDDEN, LAYERS, MASK = 160, 64, 5, 155
SPECIALS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|spare0|>", "<|spare1|>"]
TEMPLATE = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor -%}
{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""


# --- the target ---------------------------------------------------------------------------------------------


def toy_config(*, tied: bool = False, window: int | None = None, **more) -> Qwen3Config:
    kinds = (
        {"layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING], "sliding_window": window, "use_sliding_window": True}
        if window
        else {}
    )
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **kinds,
        **more,
    )


@cache
def toy_model(
    *, tied: bool = False, window: int | None = None, attention: str = "sdpa", seed: int = 0
) -> Qwen3ForCausalLM:
    """A random, frozen Qwen3 in fp32. Its weights are ten times the usual size, so its text varies."""
    torch.manual_seed(seed)
    config = toy_config(tied=tied, window=window)
    config._attn_implementation = attention
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def toy_info(**changes) -> TargetInfo:
    config = toy_config()
    fields = {
        "path": "toy",
        "revision": None,
        "model_type": "qwen3",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope_theta(config, "toy"),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "pad_token_id": 0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
    }
    return TargetInfo(**(fields | changes))


def toy_target(layer_ids: tuple[int, ...] = (1, 3), **model) -> HFTarget:
    return HFTarget(toy_model(**model), toy_info(tie_word_embeddings=model.get("tied", False)), layer_ids)


def save_toy(folder: Path, **model) -> Path:
    """The target as a folder with its tokenizer."""
    toy_model(**model).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """150 entries, one word each; rows 150-159 of the target's embedding have no token."""
    words = [*SPECIALS, "user", "assistant", "system", *(f"w{i}" for i in range(12, 150))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(w, special=True, lstrip=False, rstrip=False) for w in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


class PositionModel(nn.Module):
    """A fake causal LM whose layer L puts 100 * L + position into every channel of its output."""

    class Layer(nn.Module):
        def __init__(self, index: int):
            super().__init__()
            self.index = index

        def forward(self, x, position_ids):
            return (100 * self.index + position_ids)[..., None].expand_as(x).to(x.dtype)

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(PositionModel.Layer(i) for i in range(LAYERS))
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, input_ids, position_ids, attention_mask=None, use_cache=False):
            x = self.embed_tokens(input_ids)
            for layer in self.layers:
                x = layer(x, position_ids)
            return self.norm(x)

    def __init__(self):
        super().__init__()
        self.model = PositionModel.Backbone()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.config = SimpleNamespace(layer_types=None, _attn_implementation="sdpa")
        self.config.get_text_config = lambda: self.config

    def get_decoder(self):
        return self.model

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.head


class FixedTarget:
    """A target without a model: random embedding and head; a token's features depend on the token alone."""

    def __init__(self, info: TargetInfo | None = None, seed: int = 0):
        self.info = info or toy_info()
        g = torch.Generator().manual_seed(seed)
        self._embedding = torch.randn(self.info.vocab_size, self.info.hidden_size, generator=g) * 0.5
        self._head = torch.randn(self.info.vocab_size, self.info.hidden_size, generator=g) * 0.3
        self._features = torch.randn(self.info.vocab_size, 2 * self.info.hidden_size, generator=g)
        self.device = torch.device("cpu")

    def read(self, batch: PackedBatch) -> TargetFeatures:
        return TargetFeatures(self._features[batch.token_ids_BT])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding[token_ids]

    @property
    def head_VH(self) -> torch.Tensor:
        return self._head


# --- rows ---------------------------------------------------------------------------------------------------


def document(
    length: int, supervised=None, *, name: str = "d", seed: int = 0, finish_reason: str = "stop"
) -> TokenizedExample:
    """Random words; `supervised` is a slice or list of positions (default: all)."""
    ids = np.random.default_rng([seed, length]).integers(12, 150, length).astype(np.int32)
    mask = np.zeros(length, bool)
    mask[slice(None) if supervised is None else supervised] = True
    return TokenizedExample(id=name, domain="default", token_ids=ids, supervised=mask, finish_reason=finish_reason)


@torch.no_grad()
def greedy(model, prompt: list[int], count: int, stop: tuple[int, ...] = ()) -> list[int]:
    """The model's greedy continuation, recomputed without a cache at every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


def example_of(row: dict, name: str = "x") -> TokenizedExample:
    """A row of ids as a document."""
    ids = np.array(row["prompt_ids"] + row["response_ids"], np.int32)
    supervised = np.arange(len(ids)) >= len(row["prompt_ids"])
    return TokenizedExample(
        id=name, domain="default", token_ids=ids, supervised=supervised, finish_reason=row["finish_reason"]
    )


def prompts(count: int, *, length: int = 6, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(12, 150, (count, length)).tolist()


def greedy_rows(model, asked: list[list[int]], count: int, stop: tuple[int, ...] = ()) -> list[dict]:
    rows = []
    for i, prompt in enumerate(asked):
        answer = greedy(model, prompt, count, stop)
        reason = "stop" if answer[-1] in stop else "length"
        rows.append({"id": f"r{i}", "prompt_ids": prompt, "response_ids": answer, "finish_reason": reason})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def batch_of(
    rows: list[list[TokenizedExample]],
    anchors: list[list[int]],
    *,
    block_size: int,
    gamma: float = 4.0,
    length: int | None = None,
    **more,
) -> PackedBatch:
    """A packed batch with blocks at the given indices of each row."""
    length = length or max(sum(len(e.token_ids) for e in row) for row in rows)
    num_blocks = max(1, *(len(a) for a in anchors))
    arrays = [np.array(a, np.int64) for a in anchors]
    return assemble(rows, length, arrays, num_blocks=num_blocks, decay_S=np.array(decay(block_size, gamma)), **more)


def random_features(batch: PackedBatch, layers: int = 2, seed: int = 0) -> TargetFeatures:
    B, T = batch.token_ids_BT.shape
    return TargetFeatures(torch.randn(B, T, layers * HIDDEN, generator=torch.Generator().manual_seed(seed)))


# --- the drafter --------------------------------------------------------------------------------------------


def toy_spec(**changes) -> DrafterSpec:
    fields = {
        "block_size": 8,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 3),
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "layer_types": None,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 12,
        "selector_top_k": 8,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
        "num_target_layers": LAYERS,
    }
    fields |= changes
    if fields["layer_types"] is None:
        fields["layer_types"] = (SLIDING if fields["sliding_window"] else FULL,) * fields["num_hidden_layers"]
    return DrafterSpec(**fields)


# Changes to a spec that make it a DFlash v1 drafter.
V1 = {"conv_kernel_size": 0, "selector_rank": 0}


@torch.no_grad()
def randomise(drafter: Drafter, seed: int = 0, scale: float = 0.2) -> Drafter:
    """Every tensor random, so that nothing is the identity."""
    g = torch.Generator().manual_seed(seed)
    for name, p in drafter.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        p.copy_(
            1 + 0.3 * noise
            if name.endswith("norm.weight")
            else noise * (0.5 if "kernel" in name or "codebook" in name else scale)
        )
    return drafter


def toy_step(target=None, *, seed: int = 0, objective: ObjectiveConfig | None = None, **spec) -> DraftStep:
    """A step in fp32 with a randomised drafter."""
    drafter = randomise(Drafter(toy_spec(**spec)), seed)
    return DraftStep(drafter, target or FixedTarget(), objective or ObjectiveConfig(), dtype=torch.float32)


def weight_of(*batches: PackedBatch) -> torch.Tensor:
    return torch.tensor(sum(b.weight for b in batches)).clamp_min(1e-6)


def gradients(step: DraftStep) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in step.drafter.named_parameters()}


def slot_hidden(step: DraftStep, batch: PackedBatch, features: TargetFeatures) -> torch.Tensor:
    """The drafter's hidden states (B, N, S, H), taken from the scoring of the batch."""
    kept = []
    handle = step.drafter.register_forward_hook(lambda module, args, output: kept.append(output))
    step.score(batch, features)
    handle.remove()
    B, N, S = batch.blocks.labels_BNS.shape
    return kept[0].view(B, N, S, -1)


def toy_engine(
    step: DraftStep,
    micro_batches: int,
    *,
    kind: EngineKind = EngineKind.auto,
    offload: bool = False,
    eps: float = 1e-2,
    most_in_a_row: int = 10,
    reduce_precision: ReducePrecision = ReducePrecision.float32,
) -> Engine:
    """AdamW's epsilon is large by default: a small one turns rounding errors of vanishing gradients into steps."""
    config = OptimizerConfig(eps=eps, max_grad_norm=0.5)
    engine = EngineConfig(kind=kind, offload=offload, reduce_precision=reduce_precision)
    return build_engine(step, engine, config, micro_batches=micro_batches, most_in_a_row=most_in_a_row)


def train_step(
    engine: Engine,
    stream: RowStream,
    n: int,
    window: MetricWindow | None = None,
    *,
    lr: float = 1e-3,
    change: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, loss: loss,
) -> torch.Tensor:
    """Step `n` as the training loop does it; returns whether it was taken. change: what becomes of the loss of this rank's i-th micro-batch."""
    step, window = engine.step, window or MetricWindow()
    batches = list(stream.micro_batches(n, ranks.rank(), ranks.world_size()))
    device = step.target.device
    weight = ranks.sum_over_ranks(weight_of(*batches).to(device))
    for i, batch in enumerate(batches):
        batch = move(batch, device)
        with engine.accumulate(last=i == len(batches) - 1):
            report = engine.forward(batch, step.target.read(batch), weight)
            engine.backward(change(i, report.loss))
        window.add(report.sums)
    taken = engine.update(lr)
    window.end_step(taken)
    return taken


def train_steps(
    step: DraftStep, stream: RowStream, count: int, *, lr: float = 1e-3, **engine
) -> tuple[Engine, list[dict[str, float]]]:
    """The engine after `count` optimizer steps, and of each the means and the gradient norm as they are logged."""
    made = toy_engine(step, stream.micro_batches_per_rank(ranks.world_size()), **engine)
    logged, window = [], MetricWindow()
    for n in range(count):
        train_step(made, stream, n, window, lr=lr)
        logged.append({"grad_norm": float(made.guard.norm), **window.report()})
    return made, logged


def stream_of(
    examples: list[TokenizedExample],
    *,
    global_batch_size: int = 4,
    micro_batch_size: int = 1,
    block_size: int = 8,
    **more,
) -> RowStream:
    fields = {"row_length": max(len(e.token_ids) for e in examples), "num_anchors": 6, "seed": 0, "pack": False} | more
    return RowStream(
        examples,
        StreamConfig(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            decay_S=np.array(decay(block_size, 4.0)),
            **fields,
        ),
    )


def mean(report, name: str) -> float:
    total, count = report.sums[name].tolist()
    return total / count


# --- processes ----------------------------------------------------------------------------------------------


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, seconds: float = 120) -> list[Any]:
    """What `function(*args)` returns on each rank of a group. It must be importable. Without CUDA, which does not survive a fork, ranks are forked
    from a process that has torch imported already."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["toys"])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        made = [
            context.Process(target=_one_rank, args=(rank, world_size, port, seconds, folder, function, args))
            for rank in range(world_size)
        ]
        for process in made:
            process.start()
        deadline = time.monotonic() + seconds
        for process in made:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(made) if process.is_alive()]
        for process in made:
            process.kill()
        assert not hung, f"ranks {hung} of {world_size} hang"
        assert [process.exitcode for process in made] == [0] * world_size
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def _one_rank(
    rank: int, world_size: int, port: int, seconds: float, folder: str, function: Callable[..., Any], args: tuple
) -> None:
    faulthandler.dump_traceback_later(0.95 * seconds, exit=True)  # where a rank hangs
    torch.set_num_threads(1)
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    ranks.start(timeout_minutes=seconds / 60, group=True)
    torch.save(function(*args), f"{folder}/{rank}.pt")
    ranks.meet()
    ranks.stop()
    faulthandler.cancel_dump_traceback_later()


def torchrun(*command: str, stderr: int) -> subprocess.Popen:
    """A command on two ranks of this machine, with its output as text."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(launch, env=os.environ | threads, stdout=subprocess.PIPE, stderr=stderr, text=True)


# --- commands -----------------------------------------------------------------------------------------------


def script(name: str, folder: str = "data_prep"):
    """The module of a thin command in data_prep/ or scripts/."""
    path = Path(__file__).resolve().parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def tokenising_processes() -> list[int]:
    """Ids of the processes of `data.workers` that this one started, in whichever of its threads."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"data.workers" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


class Called(NamedTuple):
    """Exit code, stdout and stderr of a command, as a shell sees them."""

    code: int
    out: str
    err: str


def call(main, *argv: object) -> Called:
    """Run a command's main in this process."""
    out, err, old = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["command", *map(str, argv)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            run_command(main)
    finally:
        sys.argv = old
    return Called(stopped.value.code, out.getvalue(), err.getvalue())
