"""The target, run here by vLLM's engine without a server. The only file that imports vllm."""

from __future__ import annotations

import os
from typing import Any

import torch

from dflash_train.config.schema import Recipe
from dflash_train.config.values import trusted
from dflash_train.generation.base import Answer, Request
from dflash_train.target.hf import resolve_dtype

OURS = {
    "trust_remote_code",
    "model",
    "revision",
    "tokenizer",
    "tokenizer_revision",
    "skip_tokenizer_init",
}  # what the recipe says elsewhere


class VllmBackend:
    """Requests go into vLLM's scheduler as token ids and come back in the order in which they finish.

    Written against vLLM 0.33. Raises ValueError where vllm is not installed, or where vllm_args say what is the recipe's to say or what
    vLLM does not know.
    """

    def __init__(self, recipe: Recipe, target: str, tokenizer: Any):
        config, self.tokenizer = recipe.regenerate, tokenizer
        if wrong := sorted(OURS & set(config.vllm_args)):
            raise ValueError(
                f"regenerate.vllm_args has {', '.join(wrong)}: these follow from target.path, target.revision and target.trust_remote_code"
            )
        # The workers must not inherit a CUDA that this process has looked at.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        try:
            import vllm
            from vllm.sampling_params import RequestOutputKind
            from vllm.usage.usage_lib import UsageContext
        except ImportError as error:
            raise ValueError(
                f"regenerate.backend = vllm: vllm cannot be imported here ({error}). Install it in this environment with pip install "
                "'vllm>=0.33', or run it elsewhere as a server (scripts/serve_target.py) and set regenerate.backend=openai"
            ) from None
        self.vllm, self.final_only = vllm, RequestOutputKind.FINAL_ONLY
        # By its kind alone: a GPU that this process has begun to use is one that vLLM cannot fork to.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        arguments = {
            "dtype": str(resolve_dtype(recipe.target.precision, device)).removeprefix("torch."),
            "max_model_len": config.max_length,
            "trust_remote_code": trusted(target, recipe.target.trust_remote_code),
            "seed": config.seed,
        } | config.vllm_args
        try:
            engine_args = vllm.EngineArgs(model=target, revision=recipe.target.revision, **arguments)
        except TypeError as error:
            raise ValueError(
                f"regenerate.vllm_args = {config.vllm_args}: {error}; see the arguments of vllm.LLM"
            ) from None
        self.engine = vllm.LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        # As many again wait in the scheduler, so that a finished request's place is taken at once.
        self.capacity = 2 * self.engine.vllm_config.scheduler_config.max_num_seqs
        self.in_flight: dict[str, Request] = {}
        self.refused: list[tuple[int, Answer]] = []
        self.prompt_tokens = self.completion_tokens = self.requests = 0

    def submit(self, key: int, request: Request) -> None:
        prompt = self.vllm.TokensPrompt(prompt_token_ids=request.prompt_ids)
        self.requests += 1
        try:
            self.engine.add_request(str(key), prompt, self.sampling(request))
        except ValueError as error:  # too long, say; of this request alone
            self.refused.append((key, Answer(error=f"vllm: {error}")))
        else:
            self.in_flight[str(key)] = request

    def sampling(self, request: Request) -> Any:
        """vLLM's parameters: nothing but what the request says, whatever the model's generation_config.json suggests."""
        stop = self.tokenizer.eos_token_id
        return self.vllm.SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,  # 0 is all there too
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_new_tokens,
            stop_token_ids=None if stop is None else [stop],  # besides the model's own
            detokenize=False,
            skip_special_tokens=False,
            output_kind=self.final_only,
        )

    def collect(self) -> list[tuple[int, Answer]]:
        answers, self.refused = self.refused, []
        while not answers:
            answers = [self.answer(output) for output in self.engine.step() if output.finished]
        return answers

    def answer(self, output: Any) -> tuple[int, Answer]:
        request = self.in_flight.pop(output.request_id)
        said = output.outputs[0]
        token_ids = list(said.token_ids)
        self.prompt_tokens += len(request.prompt_ids)
        self.completion_tokens += len(token_ids)
        if said.finish_reason not in ("stop", "length"):
            return int(output.request_id), Answer(error=f"vllm: finish_reason {said.finish_reason}")
        return int(output.request_id), Answer(
            message={"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)},
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            completion_tokens=len(token_ids),
            finish_reason=said.finish_reason,
        )

    def stats(self) -> dict[str, Any]:
        return {
            "engine": f"vllm {self.vllm.__version__}",
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def close(self) -> None:
        if self.in_flight:
            self.engine.abort_request(list(self.in_flight))
            self.in_flight.clear()
        self.engine.engine_core.shutdown()
