"""A frozen transformers model on this rank's device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dflash_train.config.schema import Precision, TargetConfig
from dflash_train.config.values import trusted
from dflash_train.target.info import read_config, read_target_info, text_config
from dflash_train.target.linear import join_linears
from dflash_train.target.recorded import Documents, Recorder, compiled_layers, watch
from dflash_train.target.varlen import NO_MASK_SHAPE, enable_varlen
from dflash_train.types import PackedBatch, TargetFeatures, TargetInfo

_DTYPES = {
    Precision.float32: torch.float32,
    Precision.bfloat16: torch.bfloat16,
    Precision.float16: torch.float16,
    Precision.fp8: torch.bfloat16,  # of everything but the weights of the decoder's linear layers
}


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on CUDA and float32 on CPU."""
    if precision is Precision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[precision]


def load_model(config: TargetConfig, path: str, device: torch.device) -> nn.Module:
    """The whole causal LM, frozen, in eval mode."""
    from transformers import AutoModelForCausalLM

    capped = getattr(
        text_config(read_config(path, config.revision, config.trust_remote_code)), "attn_logit_softcapping", None
    )
    if capped and config.attn_implementation == "sdpa":
        raise ValueError(
            f"target.attn_implementation = sdpa: leaves out this target's attn_logit_softcapping = {capped:g}, so every "
            "hidden state would be wrong; set target.attn_implementation=eager"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            revision=config.revision,
            dtype=resolve_dtype(config.precision, device),
            attn_implementation=config.attn_implementation,
            trust_remote_code=trusted(path, config.trust_remote_code),
            use_safetensors=True,  # a pickle may run anything
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"target.path = {path}: cannot be loaded: {str(error).splitlines()[0]}") from error
    if device.type == "cuda":
        # cuDNN plans its attention anew for every length: the suspected cause of slow 16-bit decoding (docs/measurements/gpu.md).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.to(device).eval().requires_grad_(False)


class HFTarget:
    """Reads features by hooks on the decoder layers: `target_layer_ids` are 0-based layers, their *output* is captured.

    The forward stops after the last captured layer and runs no head. The whole model stays at hand (`model`) for decoding.
    """

    TOGETHER = 8  # layers compiled as one, at most

    def __init__(self, model: nn.Module, info: TargetInfo, layer_ids: tuple[int, ...]):
        self.model, self.info, self.layer_ids = model, info, layer_ids
        self.device = next(model.parameters()).device
        self.backbone = text_backbone(model)
        self.reader = _shorten(self.backbone, self.backbone.layers[: max(layer_ids) + 1])
        self._tokens: int | None = None  # of reads that are compiled
        self._compiled: nn.Module | None = None
        self._recorder: Recorder | None = None
        self._kinds = set(getattr(text_config(model.config), "layer_types", None) or [])
        self._captured: dict[int, torch.Tensor] = {}
        self._capture(self.reader.layers)
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ValueError(f"target.path = {info.path}: its head has a bias, which no engine's drafter supports")
        self._embedding = model.get_input_embeddings().weight
        self._head = head.weight
        for name, w in (("embedding", self._embedding), ("head", self._head)):
            if tuple(w.shape) != (info.vocab_size, info.hidden_size):
                raise ValueError(
                    f"target.path = {info.path}: its {name} is {tuple(w.shape)}, config.json says {(info.vocab_size, info.hidden_size)}"
                )

    @classmethod
    def load(cls, config: TargetConfig, path: str, layer_ids: tuple[int, ...], device: torch.device) -> HFTarget:
        """Load the model of a recipe. Raises ValueError with the remedy."""
        info = read_target_info(path, config.revision, config.trust_remote_code)
        return cls.over(load_model(config, path, device), config, info, layer_ids)

    @classmethod
    def over(cls, model: nn.Module, config: TargetConfig, info: TargetInfo, layer_ids: tuple[int, ...]) -> HFTarget:
        """A loaded model, read as the recipe says."""
        device = next(model.parameters()).device
        if config.attn_implementation == "sdpa" and device.type == "cuda" and model.dtype != torch.float32:
            why_not = enable_varlen(model)
            if why_not is not None:
                print(f"note: packed rows are read with a dense mask instead of flash attention: {why_not}", flush=True)
        eight_bits = config.precision is Precision.fp8
        if eight_bits or device.type == "cuda":
            join_linears(text_backbone(model).layers, eight_bits=eight_bits)
        return cls(model, info, layer_ids)

    def compile(self, tokens: int, *, record: bool) -> None:
        """Compile the decoder layers for reads of exactly so many tokens, at the first of them; all others run as before, so that no shape compiles
        anew. record: and record these reads as CUDA graphs, where that can be."""
        self._tokens = tokens
        if record and self.side_by_side and self.device.type == "cuda":
            self._recorder = Recorder(self._features, tokens, self.device)

    def move(self, device: torch.device) -> None:
        """To another device. Nothing is compiled or recorded there: graphs read weights where they were."""
        self.model.to(device)
        self.device = device
        self._tokens = self._compiled = self._recorder = None

    def _capture(self, layers: nn.ModuleList) -> None:
        for i in self.layer_ids:
            layers[i].register_forward_hook(self._keep(i))

    def _keep(self, layer: int):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def side_by_side(self) -> bool:
        """Whether sequences are read without padding (`target.varlen`), which decoding in slots needs."""
        return text_config(self.model.config)._attn_implementation == "varlen"

    @property
    def dense(self) -> bool:
        """Whether every token goes through the same matrices, of the sizes that config.json names (`flops`)."""
        return not self._kinds - {"full_attention", "sliding_attention"} and not any(
            "expert" in name for name, _ in self.backbone.layers.named_modules()
        )

    @property
    def head_VH(self) -> torch.Tensor:
        return self._head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embedding)

    @torch.no_grad()
    def read(self, batch: PackedBatch) -> TargetFeatures:
        self._captured.clear()
        if self.side_by_side:
            return self._read_side_by_side(batch)
        self.reader(
            input_ids=batch.token_ids_BT,
            position_ids=batch.position_ids_BT,
            attention_mask=self._mask(batch.document_ids_BT),
            use_cache=False,
        )
        return TargetFeatures(self.collect())

    def _read_side_by_side(self, batch: PackedBatch) -> TargetFeatures:
        """All documents of all rows as one row, each attending to itself: no mask in memory, no work on hidden pairs."""
        B, T = batch.token_ids_BT.shape
        features = None
        if B * T == self._tokens:
            if self._compiled is None:
                self._compile_layers(*_as_one_row(batch))
            if self._recorder is not None:
                features = self._recorder(batch)
                if features is None:
                    print(f"note: the target is read without CUDA graphs: {self._recorder.why_not}", flush=True)
                    self._recorder = None
        if features is None:
            features = self._features(*_as_one_row(batch), None)
        return TargetFeatures(features.view(B, T, -1))

    def _compile_layers(self, ids, positions, starts, documents: Documents) -> None:
        """By a pass that shows what the backbone does with its layers. Its features are left: they are rounded otherwise than those of all later reads, so
        that a rank's first rows, or a resumed run's, would have other numbers than the same rows elsewhere."""
        with watch(self.reader.layers) as follows:
            self.reader(**self._arguments(ids, positions, starts, documents))
        self._captured.clear()
        layers = compiled_layers(self.reader.layers, follows, self.layer_ids, self.TOGETHER)
        self._capture(layers)
        self._compiled = _shorten(self.backbone, layers)

    def _arguments(self, ids, positions, starts, documents: Documents) -> dict[str, Any]:
        longest = torch.tensor([documents.longest, documents.alike])
        return {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=self.device),
            "use_cache": False,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _features(self, ids, positions, starts, documents: Documents, out: torch.Tensor | None) -> torch.Tensor:
        """`recorded.Read`."""
        self._captured.clear()
        reader = self.reader
        if ids.numel() == self._tokens:
            torch._dynamo.mark_dynamic(starts, 0)
            reader = self._compiled
        reader(**self._arguments(ids, positions, starts, documents))
        return self.collect(out)

    def clear(self) -> None:
        """Forget what earlier forwards left."""
        self._captured.clear()

    def collect(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Features (B, T, F) of the forward since `clear`, in `out` if it is given."""
        missing = [i for i in self.layer_ids if i not in self._captured]
        if missing:
            raise ValueError(
                f"target capture: expected {len(self.layer_ids)} layers, got {len(self._captured)} (missing {', '.join(map(str, missing))})"
            )
        features = torch.cat([self._captured[i] for i in self.layer_ids], -1, out=out)
        self._captured.clear()
        return features

    def _mask(self, document_ids_BT: torch.Tensor) -> Any:
        """Causal within each document. None where every row is one document (right padding is causal anyway)."""
        if int(document_ids_BT.max()) <= 0:
            return None
        if self._kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"target.path = {self.info.path}: its {', '.join(sorted(self._kinds))} layers cannot keep packed documents apart; set data.pack=false"
            )
        T = document_ids_BT.shape[1]
        at = torch.arange(T, device=document_ids_BT.device)
        distance = at[:, None] - at
        full = (document_ids_BT[:, :, None] == document_ids_BT[:, None, :]) & (distance >= 0)
        full = full[:, None]
        if (
            not self._kinds
        ):  # one kind of layer: it slides if the config has a window (Mistral, Mixtral, Phi-3, Qwen3-MoE)
            window = getattr(text_config(self.model.config), "sliding_window", None)
            return self._as_attention_wants(full if window is None else full & (distance < window))
        masks = {"full_attention": self._as_attention_wants(full)}
        if "sliding_attention" in self._kinds:
            window = text_config(self.model.config).sliding_window
            masks["sliding_attention"] = self._as_attention_wants(full & (distance < window))
        return masks

    def _as_attention_wants(self, visible: torch.Tensor) -> torch.Tensor:
        """Booleans for sdpa; eager attention adds its mask to the scores."""
        kernel = text_config(self.model.config)._attn_implementation
        if kernel == "sdpa":
            return visible
        if kernel == "eager":
            dtype = self._embedding.dtype
            return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
                ~visible, torch.finfo(dtype).min
            )
        raise ValueError(
            f"target.attn_implementation = {kernel}: packed rows need sdpa or eager; change it, or set data.pack=false"
        )

    @torch.no_grad()
    def check_head(self, transform: Callable[[torch.Tensor], torch.Tensor], tokens: int = 16) -> None:
        """The frozen head on the final norm's output, transformed as the drafter's logits are, must give the model's own logits.

        Catches an untied random head, a dropped soft-cap or multiplier. Raises ValueError with the remedy.
        """
        ids = torch.arange(3, 3 + tokens, device=self.device)[None] % self.info.vocab_size
        kept: list[torch.Tensor] = []
        handle = self.backbone.norm.register_forward_hook(lambda module, args, output: kept.append(output))
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        handle.remove()
        self._captured.clear()
        ours = transform((kept[0] @ self.head_VH.T).float())
        error = float((ours - logits).abs().max() / logits.abs().max().clamp_min(1e-6))
        if not error < (1e-4 if self.head_VH.dtype == torch.float32 else 0.03):
            raise ValueError(
                f"target.path = {self.info.path}: head(norm(h)) differs from the model's own logits by {error:.1e} of their range; "
                "set drafter.output_multiplier and drafter.final_logit_softcapping to what this model applies"
            )

    @torch.no_grad()
    def step(
        self, token_ids_BL: torch.Tensor, cache: Any, logits_to_keep: int = 0
    ) -> tuple[torch.Tensor, TargetFeatures]:
        """One decoding forward of the whole model over a cache: (logits (B, L or logits_to_keep, V), features of the L tokens)."""
        self._captured.clear()
        logits = self.model(
            input_ids=token_ids_BL, past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep
        ).logits
        return logits, TargetFeatures(self.collect())


def stop_ids(model: nn.Module, tokenizer: Any, otherwise: list[int]) -> set[int]:
    """Tokens that end an answer: generation_config's (`otherwise` where it names none) and the tokenizer's, as in engines."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return {*(listed or otherwise), *own}


def text_backbone(model: nn.Module) -> nn.Module:
    """The module with `layers` and `norm`, also inside a multimodal wrapper."""
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    for _ in range(3):
        if hasattr(backbone, "layers") and hasattr(backbone, "norm"):
            return backbone
        backbone = getattr(backbone, "language_model", None) or getattr(backbone, "model", None)
    raise ValueError(
        f"target {type(model).__name__}: no decoder with `layers` and a final `norm` found; this architecture is not supported"
    )


def _as_one_row(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Documents]:
    """Token ids and positions (1, B T), where the documents begin, and what they are."""
    tokens, count = batch.token_ids_BT.numel(), len(batch.starts_D) - 1
    ids, positions = (x.view(1, tokens) for x in (batch.token_ids_BT, batch.position_ids_BT))
    return ids, positions, batch.starts_D, Documents(count, batch.longest, count * batch.longest == tokens)


def _shorten(backbone: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """A view of the backbone with these layers and without the final norm; weights are shared."""
    reader = copy.copy(backbone)
    reader._modules = dict(backbone._modules)
    reader.layers = layers
    reader.norm = nn.Identity()
    return reader
