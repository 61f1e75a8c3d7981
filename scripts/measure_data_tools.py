"""Measure the data tools: python scripts/measure_data_tools.py speed|loops|near [--rows N].

speed: seconds and peak memory of clean and split on N rows of about 1 kB. loops: how well the two loop measures tell whole
texts of this machine (Python's own sources, package descriptions) from the same texts with a looping end. near: how many
constructed near duplicates are found, and how many unlike texts are taken for some.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflash_train.data.clean import compression, repetition
from dflash_train.data.near_duplicates import SHINGLE, NearDuplicates
from dflash_train.data.rows import ngrams, normalise, words_of

ROOT = Path(__file__).resolve().parent.parent


def vocabulary(rng: random.Random, size: int = 20_000) -> tuple[list[str], list[float]]:
    """Invented words with the cumulative frequencies of a natural text (Zipf)."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(size)]
    return words, list(itertools.accumulate(1 / (rank + 10) for rank in range(size)))


def rows(count: int, seed: int = 0) -> Iterator[dict]:
    """Rows of about 1 kB, 5 % exact and 5 % near duplicates, 2 % loops."""
    rng = random.Random(seed)
    words, weights = vocabulary(rng)
    recent: list[list[str]] = []
    for number in range(count):
        kind = rng.random()
        prompt = rng.choices(words, cum_weights=weights, k=rng.randint(20, 60))
        if recent and kind < 0.05:
            prompt = rng.choice(recent)
        elif recent and kind < 0.10:
            prompt = [*rng.choice(recent), "please"]
        answer = rng.choices(words, cum_weights=weights, k=110)
        if 0.10 < kind < 0.12:
            answer = answer[:20] * 6
        recent = [*recent[-999:], prompt]
        messages = [{"role": "user", "content": " ".join(prompt)}, {"role": "assistant", "content": " ".join(answer)}]
        yield {"id": f"r{number}", "domain": f"d{number % 5}", "messages": messages}


def write(path: Path, rows: Iterator[dict]) -> None:
    with path.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def speed(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, heldout = Path(folder, "rows.jsonl"), Path(folder, "heldout.jsonl")
        write(data, rows(count))
        write(heldout, rows(2000, seed=1))
        print(f"{count} rows, {data.stat().st_size / 1e6:.0f} MB")
        for command in (
            ["clean.py", data, "--output", Path(folder, "clean.jsonl"), "--against", heldout],
            ["clean.py", data, "--output", Path(folder, "clean.jsonl.zst"), "--against", heldout],
            ["split.py", data, "--output-dir", Path(folder, "split")],
        ):
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, ROOT / "data_prep" / command[0], *command[1:]], stdout=subprocess.DEVNULL
            )
            _, status, used = os.wait4(process.pid, 0)
            assert status == 0, command
            names = " ".join(str(part).replace(folder + "/", "") for part in command)
            cpu = used.ru_utime + used.ru_stime
            print(
                f"{time.perf_counter() - start:6.1f} s ({cpu:.1f} s of CPU)  peak {used.ru_maxrss / 1024:4.0f} MB  {names}"
            )


def real_texts(length: int, count: int) -> dict[str, list[str]]:
    """Pieces of `length` characters of code and of prose that come with this Python."""
    library = Path(random.__file__).parent
    code = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))]
    prose = [d.metadata.get_payload() or "" for d in importlib.metadata.distributions()]
    return {
        name: [text[i : i + length] for text in texts for i in range(0, len(text) - length, length)][:count]
        for name, texts in (("code", code), ("prose", sorted(prose)))
    }


def loops() -> None:
    rng = random.Random(0)
    print(
        "| text | length | looping end | above repetition 0.5 | above compression 10 | either | median repetition, compression |"
    )
    print("|---|---|---|---|---|---|---|")
    for length in (1000, 4000):
        for name, texts in real_texts(length, 1000).items():
            for share in (0.0, 0.3, 0.5, 0.6, 0.75, 0.9):
                found = []
                for text in texts:
                    keep = int(length * (1 - share))
                    period = min(rng.randint(20, 200), keep)
                    tail = (text[keep - period : keep] * length)[: length - keep] if share else ""
                    found.append((repetition(text[:keep] + tail), compression(text[:keep] + tail)))
                a, b = np.array(found).T
                cells = [f"{(a > 0.5).mean():.1%}", f"{(b > 10).mean():.1%}", f"{((a > 0.5) | (b > 10)).mean():.1%}"]
                medians = f"{np.median(a):.2f}, {np.median(b):.1f}"
                print(f"| {len(texts)} x {name} | {length} | {share:.0%} | {' | '.join(cells)} | {medians} |")


def near() -> None:
    rng = random.Random(0)
    words, weights = vocabulary(rng)
    print("| words | words replaced | true Jaccard (mean) | found at 0.8 |")
    print("|---|---|---|---|")
    for length in (20, 60, 200):
        for changes in (0, 1, 2, 3, 5, 10):
            if changes > length / 10:
                continue
            index, jaccard = NearDuplicates(0.8), []
            for _ in range(500):
                text = rng.choices(words, cum_weights=weights, k=length)
                other = list(text)
                for at in rng.sample(range(length), changes):
                    other[at] = rng.choice(words)
                pair = [ngrams(words_of(normalise(" ".join(t))), SHINGLE) for t in (text, other)]
                for shingles in pair:
                    index.add(shingles)
                a, b = (set(shingles.tolist()) for shingles in pair)
                jaccard.append(len(a & b) / len(a | b))
            print(f"| {length} | {changes} | {np.mean(jaccard):.2f} | {len(index.duplicates()) / 500:.1%} |")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["speed", "loops", "near"])
    p.add_argument("--rows", type=int, default=100_000)
    args = p.parse_args()
    {"speed": lambda: speed(args.rows), "loops": loops, "near": near}[args.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
