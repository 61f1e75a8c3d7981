"""Measure loading for training: python scripts/bench_data.py [--documents 100000] [--workers 2] [--row-length 3072]

Conversations with log-normal lengths (median 100 tokens of prompt, 150 of answer, cut at 512 and 1,536) are written with sentences of the
embedded prompts, tokenised with the embedded target's tokenizer in this process and in several, kept, opened again and packed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train import assets
from dflash_train.config.schema import DataConfig
from dflash_train.config.sources import Source
from dflash_train.data.chat import load_tokenizer, serving_template
from dflash_train.data.corpus import Corpus, CorpusWriter
from dflash_train.data.prepare import prepare
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.target.info import read_target_info


def write_conversations(path: Path, count: int, tokenizer: Any, seed: int = 0) -> None:
    """JSONL of conversations with one or two turns."""
    rows = [json.loads(line) for line in Path(assets.resolve("embedded", "prompts")).open(encoding="utf-8")]
    text = " ".join(m["content"] for row in rows for m in row["messages"])
    per_token = len(text) / len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    random = np.random.default_rng(seed)

    def words(tokens: int) -> str:
        at = int(random.integers(0, len(text) // 2))
        return text[at : at + max(8, int(tokens * per_token))].strip() or "?"

    asked = np.minimum(random.lognormal(np.log(100), 0.7, count), 512).astype(int)
    answered = np.minimum(random.lognormal(np.log(150), 0.9, count), 1536).astype(int)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            turns = 1 + int(random.random() < 0.25)
            messages = [
                message
                for _ in range(turns)
                for message in (
                    {"role": "user", "content": words(asked[i] // turns)},
                    {"role": "assistant", "content": words(answered[i] // turns)},
                )
            ]
            file.write(json.dumps({"id": f"c{i}", "messages": messages}) + "\n")


def write_again(corpus: Corpus, folder: Path) -> None:
    folder.mkdir()
    writer = CorpusWriter(folder)
    for at in range(0, len(corpus), 1000):
        writer.add(corpus[at : at + 1000], corpus.source_of[at : at + 1000].tolist())
    writer.finish_with(corpus.kept, **{name: corpus.header[name] for name in ("paths", "rows", "origins", "error")})


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """(result, seconds)"""
    started = time.perf_counter()
    return function(), time.perf_counter() - started


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended: says more than seconds on a busy machine."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def peak_mib(who: int = resource.RUSAGE_SELF) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


def main() -> int:
    commands = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands.add_argument("--documents", type=int, default=100_000)
    commands.add_argument("--alone", type=int, default=10_000, help="rows to tokenise in this process")
    commands.add_argument("--workers", type=int, default=2)
    commands.add_argument("--row-length", type=int, default=3072)
    args = commands.parse_args()
    path = assets.resolve("embedded", "target")
    tokenizer, info = load_tokenizer(path), read_target_info(path)
    template = serving_template(tokenizer, path, None)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_conversations(rows, args.documents, tokenizer)
        sources = [Source(path=str(rows))]

        def made(workers: int, limit: int | None = None) -> Corpus:
            data = DataConfig(max_length=args.row_length, cache_dir=f"{folder}/cache", workers=workers)
            return prepare(sources, template, data, what="train", vocab_size=info.vocab_size, limit=limit)

        before, cpu = peak_mib(), [cpu_seconds()]
        _, alone = timed(lambda: made(1, args.alone))
        cpu.append(cpu_seconds())
        corpus, together = timed(lambda: made(args.workers))
        cpu.append(cpu_seconds())
        size = sum(p.stat().st_size for p in Path(folder, "cache").glob("*/*.bin")) / 2**20
        _, again = timed(lambda: made(args.workers))
        _, written = timed(lambda: write_again(corpus, Path(folder) / "again"))
        _, opened = timed(lambda: Corpus(Path(folder) / "again", sources))
        config = StreamConfig(
            row_length=args.row_length,
            num_anchors=512,
            decay_S=np.zeros(16),
            global_batch_size=8,
            micro_batch_size=1,
            seed=0,
        )
        stream, seconds = timed(lambda: RowStream(corpus, config))
        _, batches = timed(lambda: [list(stream.micro_batches(step, 0, 1)) for step in range(8)])
        padding = 1 - stream.tokens_per_epoch / (stream.rows_per_epoch * args.row_length)
        report = {
            "documents": len(corpus),
            "tokens": int(corpus.lengths.sum()),
            "mean_length": round(float(corpus.lengths.mean()), 1),
            "file_mib": round(rows.stat().st_size / 2**20, 1),
            "rows_per_second_in_process": round(args.alone / alone),
            "cpu_ms_per_row_in_process": round(1000 * (cpu[1] - cpu[0]) / args.alone, 3),
            f"rows_per_second_{args.workers}_workers": round(args.documents / together),
            f"cpu_ms_per_row_{args.workers}_workers": round(1000 * (cpu[2] - cpu[1]) / args.documents, 3),
            "cache_mib": round(size, 1),
            "cache_write_seconds": round(written, 2),
            "cache_open_seconds": round(opened, 2),
            "found_again_seconds": round(again, 2),
            "packing_seconds": round(stream.packing_seconds, 2),
            "stream_seconds": round(seconds, 2),
            "rows": stream.rows_per_epoch,
            "padding_share": round(padding, 5),
            "batch_ms_per_row": round(1000 * batches / (8 * config.global_batch_size), 2),
            "peak_mib_before": round(before),
            "peak_mib": round(peak_mib()),
            "peak_mib_of_a_worker": round(peak_mib(resource.RUSAGE_CHILDREN)),
        }
    json.dump(report, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
