"""Worker: the MLX client of z-lab's `dflash`. Reads a job, writes what it proposed (see engine_roundtrip.py)."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    import dflash.model_mlx as client
    import mlx.core as mx
    from mlx_lm import load

    job = json.loads(Path(job_file).read_text())
    mx.set_default_device(mx.cpu)
    client.snapshot_download = lambda path, **_: path  # it takes hub ids only, our drafters are folders
    target, tokenizer = load(job["target"])
    target.set_dtype(mx.float32)
    proposed: list[list[int]] = []
    select = client.CandidateSelector.select

    def recorded(self, *args):
        found = select(self, *args)
        proposed.append(found[0][0].tolist())
        return found

    client.CandidateSelector.select = recorded
    drafters = {}
    for name, folder in job["drafters"].items():
        drafter = client.load_draft(folder)  # strict: raises for a tensor that is missing or unexpected
        drafter.set_dtype(mx.float32)
        answers, drafts = [], []
        for prompt in job["prompts"]:
            proposed.clear()
            said: list[int] = []
            for part in client.stream_generate(
                target, drafter, tokenizer, mx.array(prompt["ids"]), max_tokens=prompt["max_new_tokens"]
            ):
                said += part.tokens
            answers.append(said)
            drafts.append(list(proposed))
        drafters[name] = {"loaded": True, "load_report": {}, "answers": answers, "drafts": drafts}
    versions = f"dflash {version('dflash')}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    Path(result_file).write_text(json.dumps({"engine": versions, "drafters": drafters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
