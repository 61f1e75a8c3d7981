"""Worker: SGLang's own model class and weight loader. Reads a job, writes what it proposes at the job's anchors (see engine_roundtrip.py).

SGLang's server needs a GPU. Its drafter does not: the config's reader, the loader and all layers are SGLang's, on its PyTorch paths; what
stands in is the attention over its paged cache (a masked softmax here, with the window and the causality that SGLang's layer holds), and
packages that only its server or its GPU kernels use. So its attention kernel is not tested.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

# Not installed, and not called here: kernels, servers, media.
ABSENT = {
    "IPython", "av", "blobfile", "cuda", "cutlass", "datasets", "decord", "deep_ep", "deep_gemm", "easydict", "flash_attn", "flashinfer",
    "gguf", "humming", "interegular", "kernels", "modelscope", "nvshmem", "orjson", "outlines", "py_spy", "pynvml", "quack",
    "sgl_deep_gemm", "sgl_kernel", "smg_grpc_servicer", "soundfile", "tilelang", "timm", "torch_memory_saver", "torchaudio",
    "torchcodec", "torchvision", "traitlets", "zstandard",
}  # fmt: skip


class StandIn(types.ModuleType):
    """A module whose every name is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: finds the absent packages."""

    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = StandIn(spec.name)
        module.__path__, module.__version__ = [], "99.0"
        return module

    def exec_module(self, module):
        pass


def load_sglang() -> Any:
    """SGLang's module of DFlash drafters, for one process without a GPU."""
    import transformers
    import triton_on_cpu  # noqa: F401
    import tvm_ffi  # noqa: F401

    # These two before the stand-ins, so that they see what is really installed.
    for name in ("AutoConfig", "AutoProcessor", "AutoImageProcessor", "AutoModelForCausalLM", "Qwen3ForCausalLM"):
        getattr(transformers, name)
    sys.meta_path.append(Finder())
    import sglang.srt.models.dflash as module

    parallel = module.get_parallel()
    for kind in (
        "tp",
        "attn_tp",
        "moe_tp",
        "dp",
        "attn_dp",
        "pp",
        "attn_cp",
        "dcp",
        "ep",
        "moe_ep",
        "shared_experts_tp",
    ):
        parallel._overrides |= {f"{kind}_size": 1, f"{kind}_rank": 0}
    return module


def on_torch(model: torch.nn.Module) -> None:
    """Take every layer's PyTorch path instead of its GPU kernel."""
    for layer in model.modules():
        if hasattr(layer, "forward_native"):
            layer.forward = layer.forward_native
        if hasattr(layer, "quant_method") and hasattr(layer, "weight"):
            layer.forward = lambda x, own=layer: (F.linear(x, own.weight), None)


class Attention(torch.nn.Module):
    """Stands in for SGLang's RadixAttention: context keys and values of one layer, and the block's own."""

    def __init__(self, layer: Any, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.layer, self.keys, self.values = layer, keys, values

    def forward(self, q, k, v, batch=None):
        layer = self.layer
        heads = lambda x, n: x.reshape(-1, n, layer.head_dim).transpose(0, 1)[None]  # noqa: E731
        context = len(self.keys)
        distance = context + torch.arange(len(q))[:, None] - torch.arange(context + len(q))[None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if layer.attn_type.value != "encoder_only":
            visible &= distance >= 0
        if layer.sliding_window_size >= 0:  # SGLang's own value: how far back, the position itself not counted
            visible &= distance.abs() <= layer.sliding_window_size
        out = F.scaled_dot_product_attention(
            heads(q, layer.num_heads),
            heads(torch.cat([self.keys.flatten(1), k.flatten(1)]), layer.num_kv_heads),
            heads(torch.cat([self.values.flatten(1), v.flatten(1)]), layer.num_kv_heads),
            visible,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(len(q), -1)


def propose(
    model: Any,
    embedding: torch.Tensor,
    head: torch.Tensor,
    features: torch.Tensor,
    text: list[int],
    anchor: int,
    slots: int,
):
    """Drafted tokens of one block, walked by SGLang's selector. features: of every token of the text, (T, F)."""
    context = model.project_target_hidden(features[:anchor])
    places = torch.arange(anchor)
    model.set_block_size(slots)
    for layer in model.layers:
        attention = layer.self_attn
        keys, values = attention.kv_proj_only(context)
        attention.attn = Attention(attention, attention.apply_k_rope(places, attention.apply_k_norm(keys)), values)
    block = torch.full((slots,), model.draft_config.mask_token_id)
    block[0] = text[anchor]
    positions = torch.arange(anchor, anchor + slots)
    hidden = model(block, positions, None, input_embeds=F.embedding(block, embedding)).hidden_states[1:]
    selector = model.candidate_selector
    values, ids = (hidden @ head.T).topk(selector.top_k, -1)
    scores = selector.build_lattice(
        candidate_ids=ids[None],
        unary_logits=model._transform_unary_logits(values)[None],
        hidden_states=hidden[None],
        anchor_token_ids=torch.tensor([text[anchor]]),
    )
    tokens, _ = selector.sample_path(
        candidate_ids=ids[None],
        scores=scores,
        uniforms=torch.zeros(1, slots - 1),
        temperatures=torch.ones(1),
        greedy_mask=torch.ones(1, dtype=torch.bool),
    )
    return tokens[0].tolist()


def not_loaded(model: Any, weights: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of the folder that are not in the model as they are; SGLang says nothing of those that it does not find."""
    own = dict(model.named_parameters())
    for n in range(len(model.layers)):
        for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            at, whole = 0, own[f"layers.{n}.{fused}.weight"]
            for part in parts:
                name = f"layers.{n}.{fused.split('.')[0]}.{part}_proj.weight"
                own[name] = whole[at : at + len(weights[name])]
                at += len(weights[name])
    return [name for name, tensor in weights.items() if name not in own or not torch.equal(own[name], tensor)]


@torch.inference_mode()
def main(job_file: str, result_file: str) -> None:
    module = load_sglang()
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    job = json.loads(Path(job_file).read_text())
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    states = [target(torch.tensor([text]), output_hidden_states=True).hidden_states for text in job["texts"]]
    drafters = {}
    for name, folder in job["drafters"].items():
        config = AutoConfig.from_pretrained(folder)
        model = getattr(module, config.architectures[0])(config).eval()
        weights = {k: t for file in Path(folder).glob("*.safetensors") for k, t in load_file(file).items()}
        model.load_weights(weights.items())
        left = not_loaded(model, weights)
        on_torch(model)
        layers = model.draft_config.target_layer_ids
        drafts = []
        for text, hidden, anchors in zip(job["texts"], states, job["anchors"][name], strict=True):
            features = torch.cat([hidden[i + 1][0] for i in layers], -1)
            drafts.append([propose(model, embedding, head, features, text, *where) for where in anchors])
        drafters[name] = {"loaded": not left, "load_report": {"other_keys": left}, "drafts": drafts}
    Path(result_file).write_text(
        json.dumps({"engine": f"sglang {version('sglang')} (model and loader)", "drafters": drafters})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
