"""The embedded target as a GGUF file for llama.cpp: a Qwen3 with tied embeddings and a byte-level BPE of Qwen2's pre-tokenizer.

llama.cpp's own converter knows pre-tokenizers by a hash of what they make of one text, which no small vocabulary of one's own has.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

# llama.cpp's name of each of our tensors; {} is the layer.
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(folder: Path, file: Path) -> None:
    """`folder`'s weights in fp32, tokenizer and chat template, as one file."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["tie_word_embeddings"]
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, folder, config)
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(_name(name), tensor.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(ours: str) -> str:
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    _, _, layer, rest = ours.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    by_id = {i: token for token, i in tokenizer["model"]["vocab"].items()} | added
    kinds = [gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id[i] for i in range(config["vocab_size"])])
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
