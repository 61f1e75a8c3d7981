"""The vllm backend against a stand-in for vLLM's engine, whose names and fields are those of vLLM 0.33 (vllm/engine/arg_utils.py,
sampling_params.py, outputs.py, v1/engine/llm_engine.py): anything that it does not know is a TypeError, as there."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace

import pytest
import toys

from dflash_train.config.schema import Precision, Recipe
from dflash_train.generation.base import Request
from dflash_train.generation.vllm import VllmBackend

ENGINE_ARGS = {"model", "revision", "dtype", "seed", "max_model_len", "trust_remote_code", "tensor_parallel_size", "max_num_seqs",
               "gpu_memory_utilization"}  # fmt: skip
SAMPLING = {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "detokenize", "skip_special_tokens",
            "output_kind"}  # fmt: skip


def record(known: set[str]):
    """A class that keeps the keyword arguments it is made with and knows no others."""

    class Record(SimpleNamespace):
        def __init__(self, **fields):
            unknown = set(fields) - known
            if unknown:
                raise TypeError(f"__init__() got an unexpected keyword argument {unknown.pop()!r}")
            super().__init__(**fields)

    return Record


class FakeEngine:
    """Every step gives each running request (at most max_num_seqs) the next token of its prompt plus one; 2 ends an answer."""

    def __init__(self, args, context):
        self.args, self.context, self.steps = args, context, 0
        self.waiting: list[tuple[str, list[int], SimpleNamespace]] = []
        self.aborted: list[str] = []
        self.down = False
        seats = getattr(args, "max_num_seqs", 4)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=seats))
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "down", True))
        self.written: dict[str, list[int]] = {}

    def add_request(self, request_id, prompt, params):
        assert isinstance(request_id, str)
        ids = prompt["prompt_token_ids"]
        if len(ids) >= self.args.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than the maximum model length")
        self.waiting.append((request_id, ids, params))
        self.written[request_id] = []

    def step(self):
        self.steps += 1
        done = []
        for item in self.waiting[: self.vllm_config.scheduler_config.max_num_seqs]:
            name, ids, params = item
            said = self.written[name]
            said.append(ids[len(said)] + 1 if len(said) < len(ids) else 2)
            reason = "stop" if said[-1] == 2 else "length" if len(said) == params.max_tokens else None
            if ids[0] == 99:
                reason = "abort"
            if reason is not None:
                self.waiting.remove(item)
                outputs = [SimpleNamespace(token_ids=tuple(said), finish_reason=reason)]
                done.append(SimpleNamespace(request_id=name, finished=True, outputs=outputs))
        return done

    def abort_request(self, request_ids):
        self.aborted += request_ids


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, in place of the library."""
    module, sampling, usage = ModuleType("vllm"), ModuleType("vllm.sampling_params"), ModuleType("vllm.usage.usage_lib")
    module.__version__ = "0.33.0"
    module.EngineArgs = record(ENGINE_ARGS)
    module.SamplingParams = record(SAMPLING)
    module.TokensPrompt = dict
    sampling.RequestOutputKind = enum.Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
    usage.UsageContext = enum.Enum("UsageContext", ["ENGINE_CONTEXT", "LLM_CLASS"])
    module.LLMEngine = SimpleNamespace(from_engine_args=lambda args, usage_context: FakeEngine(args, usage_context))
    for name in ("vllm", "vllm.usage"):
        monkeypatch.setitem(sys.modules, name, module if name == "vllm" else ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    return module


def open_backend(**vllm_args) -> VllmBackend:
    recipe = Recipe()
    recipe.target.revision, recipe.target.precision = "abc", Precision.float32
    recipe.regenerate.max_length, recipe.regenerate.seed, recipe.regenerate.vllm_args = 50, 3, vllm_args
    return VllmBackend(recipe, "/models/target", toys.toy_tokenizer())


def ask(prompt_ids: list[int], **changes) -> Request:
    return Request(**({"messages": [], "prompt_ids": prompt_ids, "max_new_tokens": 8, "seed": 5} | changes))


def test_the_engine_gets_the_recipes_target(vllm):
    backend = open_backend(tensor_parallel_size=2, max_num_seqs=3)
    assert vars(backend.engine.args) == {
        "model": "/models/target", "revision": "abc", "dtype": "float32", "max_model_len": 50, "trust_remote_code": False, "seed": 3,
        "tensor_parallel_size": 2, "max_num_seqs": 3,
    }  # fmt: skip
    assert backend.engine.context.name == "LLM_CLASS" and backend.capacity == 6


def test_answers_as_they_finish(vllm):
    backend = open_backend(max_num_seqs=2)
    prompts = [[20, 21, 22], [30], [40, 41]]
    for key, prompt in enumerate(prompts):
        backend.submit(key, ask(prompt))
    order, found = [], {}
    while len(found) < 3:
        for key, answer in backend.collect():
            order.append(key)
            found[key] = answer
    assert order == [1, 0, 2], "the short one first, then who took its place"
    assert found[0].token_ids == [21, 22, 23, 2] and found[0].prompt_ids == prompts[0]
    assert found[0].finish_reason == "stop" and found[0].message == {"role": "assistant", "content": "w21 w22 w23"}
    assert backend.stats() == {"engine": "vllm 0.33.0", "requests": 3, "prompt_tokens": 6, "completion_tokens": 9}


def test_a_cut_answer(vllm):
    backend = open_backend()
    backend.submit(7, ask([20, 21, 22], max_new_tokens=2))
    assert [(k, a.token_ids, a.finish_reason) for k, a in backend.collect()] == [(7, [21, 22], "length")]


def test_sampling_parameters(vllm):
    backend = open_backend()
    greedy = vars(backend.sampling(ask([20])))
    assert greedy.pop("output_kind").name == "FINAL_ONLY"
    assert greedy == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "max_tokens": 8, "stop_token_ids": [2], "detokenize": False,
        "skip_special_tokens": False,
    }  # fmt: skip
    drawn = backend.sampling(ask([20], temperature=0.7, top_p=0.8, top_k=20, seed=11))
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.7, 0.8, 20, 11)


def test_a_request_that_the_engine_refuses_fails_alone(vllm):
    backend = open_backend()
    backend.submit(0, ask(list(range(12, 72))))
    backend.submit(1, ask([20]))
    found = dict(backend.collect()) | dict(backend.collect())
    assert "longer than the maximum model length" in found[0].error and found[1].error is None


def test_an_aborted_request_is_an_error(vllm):
    backend = open_backend()
    backend.submit(0, ask([99]))
    assert dict(backend.collect())[0].error == "vllm: finish_reason abort"


def test_close_aborts_what_is_in_flight(vllm):
    backend = open_backend()
    backend.submit(4, ask([20]))
    backend.close()
    assert backend.engine.aborted == ["4"] and backend.engine.down


def test_arguments_that_are_the_recipes(vllm):
    with pytest.raises(ValueError, match="has model, revision: these follow from target.path"):
        open_backend(model="x", revision="y")


def test_arguments_that_vllm_does_not_know(vllm):
    with pytest.raises(ValueError, match="vllm_args.*tensor_paralel_size.*vllm.LLM"):
        open_backend(tensor_paralel_size=2)


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"pip install 'vllm>=0\.33'.*backend=openai"):
        open_backend()
