# SPDX-License-Identifier: Apache-2.0
"""Train the embedded target: a small Qwen3 chat model on the text of ``tiny_target_text.py``.

    python scripts/train_tiny_target.py --out tiny-target                 # about 6 minutes on one H200
    python scripts/train_tiny_target.py --out /tmp/t --preset tiny        # rehearsal on a CPU, under a minute

The folder holds a bf16 model, its tokenizer, a model card and ``training.json`` with the measured figures.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shlex
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tiny_target_text import DOMAINS, collect, conversation, for_heldout, for_training, is_correct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, START, END] + [f"<|reserved_{i}|>" for i in range(16)]
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MAX_LENGTH = 768
SHARD = 2000  # conversations per work item of the generator processes
HELDOUT_SEED = 30_000_000  # far from the seeds of the training text and of the shipped prompt sets

PRESETS = {
    "full": dict(
        conversations=2_400_000,
        bpe_sample=60_000,
        batch_tokens=65_536,
        seconds=240.0,
        eval_per_domain=200,
        hidden_size=288,
        layers=6,
        intermediate_size=640,
        heads=4,
        kv_heads=2,
        lr=3e-3,
    ),
    "tiny": dict(
        conversations=4_000,
        bpe_sample=2_000,
        batch_tokens=4_096,
        seconds=15.0,
        eval_per_domain=2,
        hidden_size=64,
        layers=2,
        intermediate_size=128,
        heads=2,
        kv_heads=1,
        lr=4e-3,
    ),
}

# -------------------------------------------------------------------------------------- text and tokens


def render(messages) -> list[tuple[str, bool]]:
    """The text that the chat template gives, as pieces with a flag: does the loss count this piece?"""
    pieces = []
    for m in messages:
        if m["role"] == "assistant":
            pieces += [(f"{START}assistant\n", False), (m["content"] + END, True), ("\n", False)]
        else:
            pieces.append((f"{START}{m['role']}\n{m['content']}{END}\n", False))
    return pieces[:-1] if pieces[-1] == ("\n", False) else pieces


def training_conversation(i: int, seed: int) -> dict | None:
    """The ``i``-th training conversation, or None where its text belongs to a held-out or demo bucket."""
    conv = conversation(seed + i // len(DOMAINS), DOMAINS[i % len(DOMAINS)])
    return conv if for_training(conv) else None


def build_tokenizer(n_sample: int, seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the pre-tokenizer of Qwen2, trained on the first ``n_sample`` conversations.

    The special tokens other than end and padding are named in tokenizer.json alone, where every version of
    the library finds them: the setting for further special tokens differs between versions.
    """
    tok = Tokenizer(models.BPE(byte_fallback=False, fuse_unk=False))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    convs = (training_conversation(i, seed) for i in range(n_sample))
    tok.train_from_iterator((m["content"] for c in convs if c for m in c["messages"]), trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=END, pad_token=PAD, model_max_length=2048, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


_TOKENIZER = None  # set in each generator process


def _start_worker(tokenizer_json: str) -> None:
    global _TOKENIZER
    _TOKENIZER = Tokenizer.from_str(tokenizer_json)


def encode_conversations(tokenizer: Tokenizer, convs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, loss flags and length of each conversation, one behind the other.

    Every piece is encoded by itself.  The pieces meet at special tokens or at a newline before one, where the
    pre-tokenizer splits anyway; ``main`` asserts on a sample that this gives the chat template's own tokens.
    """
    pieces, owners = [], []
    for i, conv in enumerate(convs):
        for piece in render(conv["messages"]):
            pieces.append(piece)
            owners.append(i)
    encoded = tokenizer.encode_batch_fast([p[0] for p in pieces], add_special_tokens=False)
    ids, flags, lengths = [], [], np.zeros(len(convs), np.int32)
    for (_, counts), owner, enc in zip(pieces, owners, encoded):
        ids.extend(enc.ids)
        flags.extend([counts] * len(enc.ids))
        lengths[owner] += len(enc.ids)
    return np.array(ids, np.int16), np.array(flags, bool), lengths


def _shard(job):
    first, count, seed = job
    convs = [c for c in (training_conversation(i, seed) for i in range(first, first + count)) if c]
    return encode_conversations(_TOKENIZER, convs)


def build_dataset(tokenizer, n: int, seed: int, workers: int):
    """Generate and encode ``n`` conversations in ``workers`` processes."""
    jobs = [(first, min(SHARD, n - first), seed) for first in range(0, n, SHARD)]
    text = tokenizer.backend_tokenizer.to_str()
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (text,)) as pool:
        parts = list(pool.imap(_shard, jobs))
    return tuple(np.concatenate([p[k] for p in parts]) for k in range(3))


class Batches:
    """Batches of one conversation per row, right-padded, of nearly equal length.

    Every conversation starts at position 0 and sees only itself, as in later use, and plain causal attention
    needs no mask: the padding comes after everything that counts.
    """

    def __init__(self, ids, flags, lengths, batch_tokens, device, seed):
        self.ids = torch.from_numpy(ids).to(device)
        self.flags = torch.from_numpy(flags).to(device)
        self.lengths = lengths
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
        self.batch_tokens, self.device = batch_tokens, device
        self.rng = np.random.default_rng(seed)

    def epoch(self):
        """Index arrays of the batches of one pass, in random order."""
        order = self.rng.permutation(np.flatnonzero(self.lengths <= MAX_LENGTH))
        batches = []
        for chunk in np.array_split(order, max(1, len(order) // 100_000)):
            chunk = chunk[np.argsort(self.lengths[chunk], kind="stable")]
            end = len(chunk)
            while end > 0:  # from the longest down, so that the row length is known at once
                rows = max(1, self.batch_tokens // self._padded(self.lengths[chunk[end - 1]]))
                batches.append(chunk[max(0, end - rows) : end])
                end -= rows
        self.rng.shuffle(batches)
        return batches

    @staticmethod
    def _padded(length):
        return -(-int(length) // 16) * 16

    def build(self, index):
        """Inputs [rows, length], flat positions whose next token counts, and those next tokens."""
        width = self._padded(self.lengths[index].max())
        lengths = torch.from_numpy(self.lengths[index].astype(np.int64)).to(self.device)[:, None]
        offsets = torch.from_numpy(self.offsets[index]).to(self.device)[:, None]
        column = torch.arange(width, device=self.device)[None]
        inside = column < lengths
        where = torch.where(inside, offsets + column, 0)
        ids = torch.where(inside, self.ids[where].long(), 0)
        counts = inside & self.flags[where]
        counts = F.pad(counts[:, 1:], (0, 1))  # the position before a counted token predicts it
        positions = counts.reshape(-1).nonzero()[:, 0]
        return ids, positions, ids.reshape(-1)[(positions + 1).clamp(max=ids.numel() - 1)]

    def forever(self):
        """Batches of pass after pass."""
        while True:
            for index in self.epoch():
                yield self.build(index)


# -------------------------------------------------------------------------------------------------- training


def build_model(p, tokenizer) -> Qwen3ForCausalLM:
    """A freshly initialised model of the preset's size."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=p["hidden_size"],
        num_hidden_layers=p["layers"],
        intermediate_size=p["intermediate_size"],
        num_attention_heads=p["heads"],
        num_key_value_heads=p["kv_heads"],
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def loss_of(model, batch, device):
    """Mean cross entropy over the counted tokens; logits are made for these only."""
    ids, positions, targets = batch
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[positions])
    return F.cross_entropy(logits.float(), targets)


def train(model, batches, args, p, device):
    """AdamW with warm-up and cosine decay; returns the figures of the run."""
    decay = [w for w in model.parameters() if w.dim() > 1]
    plain = [w for w in model.parameters() if w.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
    if args.compile:
        model.model.compile(dynamic=True)
    stream = batches.forever()

    def step(lr):
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = next(stream)
        loss = loss_of(model, batch, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), batch[0].numel(), batch[1].numel()

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    warm, timed = (20, 60) if device.type == "cuda" else (1, 4)
    # The timed steps are the first steps of the warm-up, so that they are not lost.
    warmup = max(200 if device.type == "cuda" else 10, warm + timed)
    total = args.steps
    seen = counted = done = 0
    recent, log = [], []
    mark = start
    while total is None or done < total:
        if done == warm:
            mark = now()
        if total is None and done == warm + timed:
            per_step = (now() - mark) / timed
            total = max(done + 1, done + int((args.seconds - (now() - start)) / per_step))
            print(f"{per_step * 1000:.1f} ms per step, {total} steps planned", flush=True)
        if done < warmup:
            lr = p["lr"] * (done + 1) / warmup
        else:
            progress = (done - warmup) / max(1, total - warmup)
            lr = p["lr"] * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        loss, n_seen, n_counted = step(lr)
        done, seen, counted = done + 1, seen + n_seen, counted + n_counted
        recent.append(loss)
        every = max(1, (total or 10**6) // 50)
        if total is not None and (done % every == 0 or done == total):
            value = torch.stack(recent).mean().item()
            recent = []
            log.append([done, round(value, 4)])
            passed = now() - start
            print(
                f"step {done}/{total} loss {value:.4f} lr {lr:.2e} {seen / passed / 1e3:.1f} k tokens/s {passed:.0f} s",
                flush=True,
            )
        # The plan may be too bold on a machine that slows down: never run over by more than a quarter.
        if args.steps is None and done % 50 == 0 and now() - start > 1.25 * args.seconds:
            print("stopped over time", flush=True)
            break
    return {
        "steps": done,
        "tokens_seen": seen,
        "loss_tokens": counted,
        "train_seconds": round(now() - start, 1),
        "loss_log": log,
    }


# ---------------------------------------------------------------------------------------- saving, measuring


def save(model, tokenizer, out: Path) -> None:
    """Write the Hugging Face folder in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    stops = [tokenizer.convert_tokens_to_ids(END), tokenizer.convert_tokens_to_ids(PAD)]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = 10000.0  # for readers that know only the older, top-level form
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # One plain class name, known to all versions of the library.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def repeats(tokens: list[int]) -> bool:
    """Whether the answer contains the same 8 tokens three times, or four equal 4-token pieces in a row."""
    grams = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    if any(grams.count(g) >= 3 for g in set(grams)):
        return True
    return any(tokens[i : i + 4] * 4 == tokens[i : i + 16] for i in range(len(tokens) - 15))


@torch.inference_mode()
def evaluate(out: Path, n_per_domain: int, device, batch_tokens: int) -> tuple[dict, list]:
    """Load the saved folder and measure greedy answers and the reference loss on held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).to(device).eval()
    convs = collect(n_per_domain, for_heldout, first_seed=HELDOUT_SEED)
    data = encode_conversations(tokenizer.backend_tokenizer, convs)
    held = Batches(*data, batch_tokens, device, 0)
    total = count = 0.0
    for index in held.epoch():
        batch = held.build(index)
        total += loss_of(model, batch, device).item() * batch[1].numel()
        count += batch[1].numel()
    texts = [
        tokenizer.apply_chat_template(c["messages"][:-1], tokenize=False, add_generation_prompt=True) for c in convs
    ]
    answers = []
    tokenizer.padding_side = "left"
    for i in range(0, len(texts), 512):
        enc = tokenizer(texts[i : i + 512], return_tensors="pt", padding=True, add_special_tokens=False)
        enc = enc.to(device)
        made = model.generate(
            input_ids=enc["input_ids"], attention_mask=enc["attention_mask"], max_new_tokens=256, do_sample=False
        )
        answers += made[:, enc["input_ids"].shape[1] :].tolist()
    stops = {tokenizer.convert_tokens_to_ids(END), tokenizer.convert_tokens_to_ids(PAD)}
    correct, lengths, ended, looped, samples = {d: [] for d in DOMAINS}, [], [], [], []
    for conv, tokens in zip(convs, answers):
        cut = next((k for k, t in enumerate(tokens) if t in stops), None)
        body = tokens if cut is None else tokens[:cut]
        text = tokenizer.decode(body)
        ended.append(cut is not None)
        lengths.append(len(body))
        looped.append(repeats(body))
        correct[conv["domain"]].append(is_correct(text, conv["check"]))
        samples.append(
            {
                "domain": conv["domain"],
                "prompt": conv["messages"][-2]["content"],
                "answer": text,
                "reference": conv["messages"][-1]["content"],
                "correct": correct[conv["domain"]][-1],
            }
        )
    exact = sum(s["answer"] == s["reference"] for s in samples)
    figures = {
        "heldout_prompts": len(convs),
        "heldout_loss": round(total / count, 4),
        "correct": {d: round(sum(v) / len(v), 4) for d, v in correct.items()},
        "correct_all": round(sum(map(sum, correct.values())) / len(convs), 4),
        "word_for_word": round(exact / len(convs), 4),
        "ended": round(sum(ended) / len(convs), 4),
        "repetition_share": round(sum(looped) / len(convs), 4),
        "answer_tokens_mean": round(sum(lengths) / len(lengths), 1),
        "answer_tokens_max": max(lengths),
        "answer_tokens_p10_p50_p90": [int(x) for x in np.percentile(lengths, (10, 50, 90))],
    }
    return figures, samples


def model_card(f: dict) -> str:
    """The README of the model folder."""
    rows = "\n".join(f"| {d} | {100 * v:.1f} % |" for d, v in f["correct"].items())
    c = f["config"]
    return f"""---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Embedded target

A small chat model for the demo, the tests and the tutorial of `dflash-train`. It is a real, trained target
for a drafter, small enough to ship with the package. It answers short English questions of the five families
below and nothing else; it is not meant for any other use.

| | |
|---|---|
| Architecture | Qwen3 ({c["layers"]} layers, width {c["hidden_size"]}, MLP {c["intermediate_size"]}, \
{c["heads"]} heads, {c["kv_heads"]} key-value heads of 64, tied embeddings) |
| Parameters | {f["parameters"]:,} (bf16) |
| Vocabulary | {VOCAB_SIZE:,}, byte-level BPE with the pre-tokenizer of Qwen2, ChatML template |
| Licence | Apache-2.0 |

## Training

The text comes entirely from `scripts/tiny_target_text.py`: templates and small hand-written tables, drawn
from seeds. No downloaded text and no benchmark data were used. The domains are arithmetic, word problems,
string and list tasks, facts, and short Python functions, with some dialogues of two or three turns and some
system prompts.

{f["conversations"]:,} conversations were used, and {f["tokens_seen"]:,} tokens (padding included) were seen
in {f["steps"]:,} steps, {f["loss_tokens"]:,} of them answer tokens, on which alone the loss was taken. The
training took {f["train_seconds"]:.0f} seconds on {f["device"]}, with PyTorch {f["torch"]} and Transformers
{f["transformers"]}.

    {f["command"]}

Prompts whose user text has sha256 modulo 50 below 5 were left out of the training; the demo prompts of the
package and the prompts used for the figures below are taken from those.

## Measured

Greedy answers to {f["heldout_prompts"]} held-out prompts, checked by the generator's rules (code is run):

| domain | correct |
|---|---|
{rows}
| all | {100 * f["correct_all"]:.1f} % |

Loss of the reference answers: {f["heldout_loss"]:.4f} nats per token. Answers that end by themselves: \
{100 * f["ended"]:.1f} %. Answers with a looped phrase: {100 * f["repetition_share"]:.1f} %. \
Mean length of an answer: {f["answer_tokens_mean"]} tokens.
"""


def main(argv=None) -> None:
    """Generate, train, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="full")
    parser.add_argument("--seconds", type=float, help="time for the training itself")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --seconds")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--conversations", type=int, help="number of generated conversations")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="generator processes")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure-only", action="store_true", help="measure the model in --out again")
    args = parser.parse_args(argv)
    p = dict(PRESETS[args.preset])
    for name in ("seconds", "batch_tokens", "conversations", "lr"):
        if getattr(args, name) is not None:
            p[name] = getattr(args, name)
    args.seconds = p["seconds"]
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.measure_only:
        measure(args.out, p["eval_per_domain"], device, p["batch_tokens"])
        return
    torch.set_float32_matmul_precision("high")
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    tokenizer = build_tokenizer(p["bpe_sample"], args.seed)
    print(f"tokenizer: {len(tokenizer)} entries, {time.perf_counter() - begin:.1f} s", flush=True)
    # The rehearsal's sample is too small for all the merges.
    assert len(tokenizer) == VOCAB_SIZE or args.preset == "tiny", len(tokenizer)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for i in range(50):
        conv = conversation(i, DOMAINS[i % len(DOMAINS)])
        text = tokenizer.apply_chat_template(conv["messages"], tokenize=False)
        want = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = encode_conversations(tokenizer.backend_tokenizer, [conv])[0].tolist()
        assert ids + newline == want, "template and encoder differ"

    data = build_dataset(tokenizer, p["conversations"], args.seed, args.workers)
    prepared = time.perf_counter() - begin
    print(f"data: {len(data[2])} conversations, {len(data[0])} tokens, {prepared:.1f} s", flush=True)

    model = build_model(p, tokenizer).to(device)
    parameters = sum(w.numel() for w in model.parameters())
    print(f"model: {parameters} parameters", flush=True)
    assert parameters <= 6_000_000, parameters
    batches = Batches(*data, p["batch_tokens"], device, args.seed)
    figures = train(model, batches, args, p, device)
    save(model, tokenizer, args.out)
    # The command names the output folder only, not the place where it happened to be.
    words = sys.argv[1:] if argv is None else list(argv)
    words = [Path(w).name if w == str(args.out) else w for w in words]
    figures |= {
        "parameters": parameters,
        "conversations": len(data[2]),
        "data_tokens": len(data[0]),
        "config": p,
        "prepare_seconds": round(prepared, 1),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "a CPU",
        "command": "python scripts/train_tiny_target.py " + shlex.join(words),
    }
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    measure(args.out, p["eval_per_domain"], device, p["batch_tokens"])


def measure(out: Path, per_domain: int, device: torch.device, batch_tokens: int) -> None:
    """Answer held-out prompts with the saved model; add the figures to training.json and write the card."""
    figures = json.loads((out / "training.json").read_text())
    measured, samples = evaluate(out, per_domain, device, batch_tokens)
    figures |= measured
    (out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "README.md").write_text(model_card(figures), encoding="utf-8")
    for s in [s for s in samples if not s["correct"]][:10]:
        print(f"\n[{s['domain']}] wrong\n  prompt: {s['prompt']}\n  answer: {s['answer']}")
    print(json.dumps(measured, indent=1), flush=True)


if __name__ == "__main__":
    main()
