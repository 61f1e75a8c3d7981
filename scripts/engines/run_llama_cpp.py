"""Worker: llama.cpp's server inside the xllamacpp wheel. Reads a job, writes what was accepted per round (see engine_roundtrip.py).

llama.cpp tells how many tokens each round drafted and how many of them it accepted, not which.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def server(target: str, drafter: str | None, block_size: int) -> Any:
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = target
    params.n_parallel, params.n_ctx, params.n_batch, params.n_ubatch = 1, 1024, 512, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.verbosity = 0
    if drafter is not None:
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft = params.speculative.draft
        draft.mparams.path = drafter
        draft.n_max, draft.n_min, draft.p_min = block_size - 1, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return llama.Server(params)


def decode(running: Any, prompt: dict[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """(answer, (drafted, accepted) of every round that drafted)."""
    answer: list[int] = []
    rounds: list[tuple[int, int]] = []
    before = (0, 0)

    def part(chunk: dict[str, Any]) -> bool:
        nonlocal before
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        answer.extend(chunk["__verbose"]["tokens"])
        now = (chunk["timings"].get("draft_n", 0), chunk["timings"].get("draft_n_accepted", 0))
        if now[0] > before[0]:
            rounds.append((now[0] - before[0], now[1] - before[1]))
            before = now
        return False

    running.handle_completions(
        {
            "prompt": prompt["ids"], "n_predict": prompt["max_new_tokens"], "temperature": 0.0, "cache_prompt": False,
            "return_tokens": True, "stream": True, "timings_per_token": True, "verbose": True,
        },
        part,
    )  # fmt: skip
    return answer, rounds


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    drafters = {}
    for name, files in job["gguf"].items():
        running = server(files["target"], files["drafter"], job["block_size"])
        decoded = [decode(running, prompt) for prompt in job["prompts"]]
        answers, rounds = [one[0] for one in decoded], [one[1] for one in decoded]
        del running
        drafters[name] = {"loaded": True, "load_report": {}, "answers": answers, "rounds": rounds}
    result = {"engine": f"llama.cpp of xllamacpp {version('xllamacpp')}", "drafters": drafters}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
