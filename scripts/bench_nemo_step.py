"""The same step by NVIDIA NeMo AutoModel: python scripts/bench_nemo_step.py --preset qwen3-4b [--compile] [--lengths FILE]

Needs nemo_automodel 0.7.0 with datasets, dill, multiprocess, torchao and torchdata beside torch and transformers. Its own Qwen3, its target
wrapper, its DFlash 2 drafter and trainer module, with random weights at the preset's dimensions, in the order of its recipe's loop: target,
drafter, backward, the figures that the recipe reads from the device after every micro-batch, clipping, AdamW over its 16-bit weights. Rows are
padded to --row-length, as its data sets do by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_step import PRESETS

from dflash_train.clock import Clock
from dflash_train.config.load import run_command
from dflash_train.config.values import require_packages

NEEDED = ("nemo_automodel", "datasets", "dill", "multiprocess", "torchao", "torchdata")
INSTALL = "pip install 'dflash-train[nemo]' torchao torchdata"

READ = (
    "accept_len_sum", "valid_blocks", "valid_tokens", "base_loss", "selector_loss", "base_correct_tokens", "base_accept_len_sum",
    "valid_blocks", "candidate_recall",
)  # fmt: skip


def make(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """(target wrapper, trainer module)"""
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
    from nemo_automodel.components.speculative.dflash.dflash2_core import DFlash2TrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import (
        build_qwen3_dflash_draft_config,
        build_target_layer_ids,
    )
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel
    from nemo_automodel.components.speculative.dflash.target import HFDFlashTargetModel
    from transformers import Qwen3Config

    hidden, layers, heads, kv_heads, head_dim, mlp, vocab, tied = PRESETS[args.preset]
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        intermediate_size=mlp, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, use_cache=False,
    )  # fmt: skip
    config.dtype, config._attn_implementation = dtype, "sdpa"
    torch.set_default_dtype(dtype)
    with device:
        target = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    target = target.to(device, dtype).eval().requires_grad_(False)
    for module in target.modules():
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor) and hasattr(module, "config"):
            module.inv_freq = type(module)(module.config).inv_freq.to(device)  # in fp32, as loading a model leaves it
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    ids = build_target_layer_ids(layers, args.draft_layers)
    mask_token_id = vocab - 1
    own = {
        "block_size": args.block_size, "mask_token_id": mask_token_id, "target_layer_ids": ids, "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    }  # fmt: skip
    draft_config = build_qwen3_dflash_draft_config(
        config, num_draft_layers=args.draft_layers, num_target_layers=layers, block_size=args.block_size, dflash_config=own,
        attention_backend=attention,
    )  # fmt: skip
    with device:
        draft = Qwen3DFlash2DraftModel(draft_config)
    draft = draft.to(device, dtype)
    if args.compile:
        draft.compile()
    trainer = DFlash2TrainerModule(
        draft_model=draft, target_lm_head=target.get_output_embeddings(), target_embed_tokens=target.get_input_embeddings(),
        mask_token_id=mask_token_id, block_size=args.block_size, attention_backend=attention, num_anchors=args.anchors,
        loss_decay_gamma=args.gamma, selector_loss_weight=1.0, sliding_window=None,
    )  # fmt: skip
    return HFDFlashTargetModel(target, target_layer_ids=ids), trainer.to(device).train()


def rows(args: argparse.Namespace, vocab: int, device: torch.device, at: int) -> dict[str, torch.Tensor]:
    """Rows of a step, padded: random tokens, of which the last three quarters are supervised, or as long as --lengths says."""
    B, T = args.rows, args.row_length
    if args.lengths:
        pairs = [json.loads(line) for line in Path(args.lengths).read_text().splitlines()]
        pairs = [(min(total, T), supervised) for total, supervised in pairs if supervised >= 2]
        pairs = [pairs[(at * B + b) % len(pairs)] for b in range(B)]
    else:
        pairs = [(T, T * 3 // 4)] * B
    generator = torch.Generator().manual_seed(at)
    total, supervised = (torch.tensor(x)[:, None] for x in zip(*pairs, strict=True))
    places = torch.arange(T)[None]
    made = {
        "input_ids": torch.randint(0, vocab - 300, (B, T), generator=generator),
        "attention_mask": (places < total).long(),
        "loss_mask": ((places < total) & (places >= total - supervised)).long(),
    }
    return {name: value.to(device) for name, value in made.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--row-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1, help="padded rows per step")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--lengths", help="JSONL of [tokens, supervised tokens], one document each")
    parser.add_argument("--compile", action="store_true", help="compile the drafter, as its recipe can")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--label", default="")
    parser.add_argument("--json", help="file to append the JSON line to")
    args = parser.parse_args(argv)
    require_packages("NeMo's step", NEEDED, INSTALL)
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    began = time.perf_counter()
    target, trainer = make(args, device, dtype)
    vocab = PRESETS[args.preset][6]
    learned = [p for p in trainer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)
    built = time.perf_counter()
    clock, blocks = Clock(device), []
    for step in range(args.warmup + args.steps):
        batch = rows(args, vocab, device, step)
        if step == args.warmup:
            clock.report()
            blocks.clear()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        with clock("step"):
            with clock("target"):
                read = target.generate_batch(**batch)
            with clock("draft"):
                found = trainer(input_ids=read.input_ids, hidden_states=read.hidden_states, loss_mask=read.loss_mask)
            with clock("backward"):
                found.loss.backward()
            with clock("optimizer"):
                values = [float(getattr(found, name)) for name in ("loss", "accuracy", "loss", *READ)]
                torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        blocks.append(values[3 + READ.index("valid_blocks")])
        if step == 0:
            if cuda:
                torch.cuda.synchronize()
            first = time.perf_counter()
        del read, found
    times = clock.report()
    step_ms = statistics.median(times["step"])
    size = lambda parameters: sum(p.numel() * p.element_size() for p in parameters)
    static = size({*target.model.parameters()}) + 4 * size(learned)
    most = torch.cuda.max_memory_allocated() if cuda else 0
    result = {
        "label": args.label or "NeMo AutoModel 0.7.0" + (", compiled" if args.compile else ""),
        "preset": args.preset,
        "row_length": args.row_length,
        "rows": args.rows,
        "blocks": round(statistics.mean(blocks), 1),
        "ms": round(step_ms, 2),
        **{name: round(statistics.median(taken), 2) for name, taken in sorted(times.items()) if name != "step"},
        "blocks_per_s": round(1000 * statistics.mean(blocks) / statistics.mean(times["step"]), 1),
        "static_gib": round(static / 2**30, 2),
        "peak_gib": round(most / 2**30, 2),
        "above_static_gib": round((most - static) / 2**30, 2),
        "build_s": round(built - began, 1),
        "first_step_s": round(first - built, 1),
    }
    print("JSON " + json.dumps(result), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
