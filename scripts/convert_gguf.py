"""Convert a drafter (and its target) to GGUF for llama.cpp, with llama.cpp's own converter, and check that everything arrived.

    python scripts/convert_gguf.py my-drafter --target /models/my-finetune --output drafter.gguf [--with-target target.gguf]

The converter is fetched once (`fetch_llama_cpp.py` says from where); it knows DFlash 2 and takes the tokenizer of the target. The check
reads the written file back: every tensor with its values, every setting of config.json that decoding depends on, the target's
vocabulary. A converter of another version, or one that misreads the folder, writes a file that llama.cpp may load all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch_llama_cpp import CONVERTER, fetch

from dflash_train.assets import resolve
from dflash_train.check import ALL, check
from dflash_train.config.hub import check_place
from dflash_train.config.load import CheckFailed, parse, run_command
from dflash_train.drafter.spec import SLIDING, DrafterSpec
from dflash_train.folder import load_drafter_folder
from dflash_train.target.info import read_target_info

OUTTYPES = ("f32", "bf16", "f16", "q8_0")
# llama.cpp knows pre-tokenizers by a hash of what they make of one text, and a vocabulary of one's own has another hash. What splits text
# by the same rule is the same pre-tokenizer: that of Qwen2 and Qwen3.
PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2"
}
# Runs llama.cpp's converter: a pre-tokenizer that it does not know gets the name in the first argument.
RUN = """
import json, runpy, sys
name, sys.argv = sys.argv[1], sys.argv[2:]
from conversion.base import TextModel
by_hash = TextModel.get_vocab_base_pre
def get_vocab_base_pre(self, tokenizer):
    try:
        return by_hash(self, tokenizer)
    except NotImplementedError:
        if not name:
            raise
        return name
TextModel.get_vocab_base_pre = get_vocab_base_pre
converter = sys.argv[0]
for arguments in json.loads(sys.argv[1]):
    sys.argv = [converter, *arguments]
    runpy.run_path(converter, run_name="__main__")
"""
# llama.cpp's name of each of our tensors; a layer's begin with blk.N. there.
OUTSIDE = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- converting


def convert(
    outputs: dict[Path, Path], *, outtype: str, tokenizer_from: Path | None = None, pre_tokenizer: str | None = None
) -> None:
    """Run llama.cpp's converter on model folders, in one process; tokenizer_from: the target, where they are drafters.

    Raises ValueError with what the converter said last.
    """
    source = fetch()
    jobs = []
    for folder, output in outputs.items():
        job = [str(folder.resolve()), "--outtype", outtype, "--outfile", str(output.resolve())]
        if tokenizer_from is not None:
            job += ["--target-model-dir", str(tokenizer_from.resolve())]
        jobs.append(job)
    name = pre_tokenizer or same_pre_tokenizer(tokenizer_from or next(iter(outputs))) or ""
    command = [sys.executable, "-c", RUN, name, str(source / CONVERTER), json.dumps(jobs)]
    paths = [str(source), str(source / "gguf-py"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True)
    if done.returncode == 0:
        return
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    remedy = "see its message"
    if "sentencepiece" in last[0]:
        remedy = "install what it needs: pip install 'dflash-train[gguf]'"
    elif "pre-tokenizer was not recognized" in done.stderr:
        remedy = "if the target's tokenizer splits text as a known one does, name that with --pre-tokenizer"
    raise ValueError(f"{', '.join(map(str, outputs))}: llama.cpp's converter failed ({last[0]}); {remedy}")


def same_pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name of the pre-tokenizer in a tokenizer.json, if it is one whose rule we know."""
    if not (folder / "tokenizer.json").is_file():
        return None
    stated = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    parts = stated.get("pretokenizers", [stated])
    rules = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    return PRE_TOKENIZERS.get(rules[0]) if len(rules) == 1 else None


# --------------------------------------------------------------------------------------------------------------- checking


@dataclass(kw_only=True)
class GGUF:
    """A GGUF file: its fields, and tensor name -> (type, array in fp32 as torch has it)."""

    fields: dict[str, Any]
    types: dict[str, str]
    tensors: dict[str, np.ndarray]


def library() -> Any:
    """llama.cpp's own module for these files, of the converter's version."""
    folder = str(fetch() / "gguf-py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import gguf

    return gguf


def read_gguf(path: Path, *, values: bool = True) -> GGUF:
    """A file as it is written. Without `values` the arrays are empty ones of the right shape. Raises ValueError."""
    gguf = library()
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{path}: not a readable GGUF file ({error})") from None
    tensors = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        tensors[t.name] = (
            gguf.dequantize(t.data, t.tensor_type).reshape(shape) if values else np.broadcast_to(np.float32(0), shape)
        )
    return GGUF(
        fields={name: field.contents() for name, field in reader.fields.items()},
        types={t.name: t.tensor_type.name for t in reader.tensors},
        tensors=tensors,
    )


def requantise(source: Path, output: Path, kind: str) -> None:
    """Copy a GGUF file in fp32 with its matrices in another type of blocks of 32, which the converter does not write: q4_0, q5_0, ..."""
    gguf = library()
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for t in reader.tensors:
        matrix = t.data.ndim == 2 and t.data.shape[1] % 32 == 0
        writer.add_tensor(
            t.name, gguf.quantize(t.data, wanted) if matrix else t.data, raw_dtype=wanted if matrix else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def faults(file: GGUF, spec: DrafterSpec, tensors: dict[str, torch.Tensor], target: Path) -> list[str]:
    """What did not arrive of a drafter; empty if the file is whole."""
    return tensor_faults(file, tensors) + field_faults(file, spec) + tokenizer_faults(file, target)


def tensor_faults(file: GGUF, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Tensors that are missing, unexpected, of another shape or of other values than their type's rounding explains."""
    expected = {gguf_name(name): tensor for name, tensor in tensors.items()}
    found = [f"tensor {name} is missing" for name in expected if name not in file.tensors]
    found += [f"tensor {name} belongs to no drafter" for name in file.tensors if name not in expected]
    for name in expected.keys() & file.tensors.keys():
        wanted, got = expected[name].float().numpy(), file.tensors[name]
        if got.shape != wanted.shape:
            found.append(f"tensor {name} has the shape {got.shape}, not {wanted.shape}")
        elif not (np.abs(got - wanted) <= rounding(wanted, file.types[name])).all():
            found.append(
                f"tensor {name} ({file.types[name]}) has other values, off by up to {np.abs(got - wanted).max():.3g}"
            )
    return sorted(found)


def gguf_name(ours: str) -> str:
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    _, layer, rest = ours.split(".", 2)
    return f"blk.{layer}.{LAYER[rest]}"


def rounding(values: np.ndarray, kind: str) -> np.ndarray:
    """Largest error that storing `values` as a GGUF type explains. Raises ValueError for a type that is not checked."""
    if kind == "F32":
        return np.zeros_like(values)
    if kind in ("BF16", "F16"):
        return np.abs(values) * 2.0 ** {"BF16": -8, "F16": -11}[kind] + 2.0**-24
    if (
        kind == "Q8_0"
    ):  # 32 values share a scale in fp16: half a step, and what the scale's own rounding does to 127 steps
        largest = np.abs(values.reshape(-1, 32)).max(-1, keepdims=True)
        bound = largest * (0.5 / 127 + 2.0**-10) + 127 * 2.0**-25
        return np.broadcast_to(bound, (values.size // 32, 32)).reshape(values.shape)
    raise ValueError(f"tensor type {kind}: not one that is checked here ({', '.join(OUTTYPES)})")


def expected_fields(spec: DrafterSpec) -> dict[str, Any]:
    """What the file must say of a drafter; None: nothing, or it means something else."""
    sliding = spec.sliding_window is not None
    return {
        "block_count": spec.num_hidden_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_attention_heads,
        "attention.head_count_kv": spec.num_key_value_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "attention.causal": spec.is_causal,
        "attention.sliding_window": spec.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in spec.layer_types] if sliding else None,
        "attention.value_scale": None,
        "rope.freq_base": spec.rope_theta,
        "rope.dimension_count": None,
        "rope.scaling.type": None,
        "block_size": spec.block_size,
        "target_layers": [i + 1 for i in spec.target_layer_ids],  # llama.cpp counts a layer's input
        "conv_kernel_size": spec.conv_kernel_size or None,
        "conv_group_size": spec.conv_group_size if spec.conv_kernel_size else None,
        "selector_rank": spec.selector_rank or None,
        "selector_top_k": spec.selector_top_k if spec.selector_rank else None,
        "logit_scale": None if spec.output_multiplier == 1.0 else spec.output_multiplier,
        "final_logit_softcapping": spec.final_logit_softcapping,
        "embedding_scale": None if spec.input_embedding_scale == 1.0 else spec.input_embedding_scale,
    }


def field_faults(file: GGUF, spec: DrafterSpec) -> list[str]:
    expected = {"general.architecture": "dflash"} | {f"dflash.{k}": v for k, v in expected_fields(spec).items()}
    expected["tokenizer.ggml.mask_token_id"] = spec.mask_token_id
    found = []
    for name, wanted in expected.items():
        got = file.fields.get(name)
        same = (
            bool(np.isclose(got, wanted, rtol=1e-6)) if isinstance(wanted, float) and got is not None else got == wanted
        )
        if not same:
            found.append(f"{name} = {got!r}, the drafter has {wanted!r}")
    return found


def tokenizer_faults(file: GGUF, target: Path) -> list[str]:
    """Whether the vocabulary in the file is the target's, token by token where both spell tokens alike (byte-level BPE)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if not tokens:
        return ["it has no tokenizer"]
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    size = (config.get("text_config") or config)["vocab_size"]
    found = [] if len(tokens) == size else [f"its tokenizer has {len(tokens)} tokens, the target's vocabulary {size}"]
    kind = file.fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        spelled = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(tokens)))))
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        wrong = [i for i, (ours, theirs) in enumerate(zip(spelled, tokens)) if added.get(i, ours) != theirs]
        if wrong:
            i = wrong[0]
            found.append(
                f"{len(wrong)} of its tokens are not the target's, the first is {i}: {tokens[i]!r}, not {spelled[i]!r}"
            )
        if not file.fields.get("tokenizer.ggml.merges"):
            found.append("its tokenizer has no merges")
    eos = file.fields.get("tokenizer.ggml.eos_token_id")
    if eos is None or eos >= len(tokens):
        found.append(f"its end-of-text token is {eos}, which is not in its tokenizer")
    return found


def target_faults(file: GGUF, target: Path) -> list[str]:
    info = read_target_info(str(target))
    shape = getattr(file.tensors.get("token_embd.weight"), "shape", None)
    wanted = (info.vocab_size, info.hidden_size)
    found = [] if shape == wanted else [f"its token embedding has the shape {shape}, not {wanted}"]
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(layers) < info.num_layers:
        found.append(f"it has tensors of {len(layers)} layers, the target has {info.num_layers}")
    return found + tokenizer_faults(file, target)


# ------------------------------------------------------------------------------------------------------------ the command


def local_target(path: str, *, weights: bool) -> Path:
    """Folder of a target; of a Hub id only what is needed is downloaded."""
    path = resolve(path, "target")
    if Path(path).is_dir():
        return Path(path)
    check_place("--target", path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=None if weights else ["*.json", "*.model", "*.jinja", "*.txt"]))


def convert_drafters(
    outputs: dict[Path, Path], target: Path, *, outtype: str, pre_tokenizer: str | None = None
) -> list[GGUF]:
    """Write the GGUF files of drafter folders, if what is read back is whole. Raises ValueError or CheckFailed; then nothing is written."""
    loaded = {}
    for folder in outputs:
        found = check(folder, read_target_info(str(target))).faults
        found = [f.message for f in found if f.engines == ALL or "llama.cpp" in f.engines]
        if found:
            raise ValueError(f"{folder}: llama.cpp could not use it:\n  " + "\n  ".join(found))
        loaded[folder] = load_drafter_folder(folder)
    files = []
    with Building(list(outputs.values())) as building:
        places = dict(zip(outputs, building))
        convert(places, outtype=outtype, tokenizer_from=target, pre_tokenizer=pre_tokenizer)
        for folder, place in places.items():
            files.append(read_gguf(place))
            wrong = faults(files[-1], *loaded[folder][:2], target)
            if wrong:
                raise CheckFailed(f"{folder}: the converted file is not the drafter:\n  " + "\n  ".join(wrong))
    return files


def convert_target(target: Path, output: Path, *, outtype: str, pre_tokenizer: str | None = None) -> GGUF:
    """The same for the target; of its tensors only the layers and the embedding's shape are checked."""
    with Building([output]) as (place,):
        convert({target: place}, outtype=outtype, pre_tokenizer=pre_tokenizer)
        file = read_gguf(place, values=False)
        wrong = target_faults(file, target)
        if wrong:
            raise CheckFailed(f"{target}: the converted file is not the target:\n  " + "\n  ".join(wrong))
    return file


class Building:
    """Files beside `outputs` that become them if nothing is raised, and are removed otherwise."""

    def __init__(self, outputs: list[Path]):
        self.outputs = outputs
        self.places = [output.with_name(f".{output.name}.writing-{os.getpid()}") for output in outputs]

    def __enter__(self) -> list[Path]:
        for output in self.outputs:
            output.parent.mkdir(parents=True, exist_ok=True)
        return self.places

    def __exit__(self, kind: Any, *_: Any) -> None:
        for place, output in zip(self.places, self.outputs):
            if kind is None:
                place.replace(output)
            place.unlink(missing_ok=True)


def summary(path: Path, file: GGUF) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(file.types.values()).most_common())
    tokens = len(file.fields["tokenizer.ggml.tokens"])
    return f"{path}: {len(file.tensors)} tensors ({kinds}), {tokens} tokens, {path.stat().st_size / 2**20:.1f} MiB"


def main(argv: list[str]) -> int:
    commands = argparse.ArgumentParser(prog="python scripts/convert_gguf.py", description=__doc__.split("\n\n")[0])
    commands.add_argument(
        "drafter", nargs="?", help="folder of an exported drafter; may be left out with --with-target"
    )
    commands.add_argument("--target", required=True, help="folder or Hub id of its target, or embedded")
    commands.add_argument("--output", type=Path, help="file to write the drafter to")
    commands.add_argument("--outtype", default="bf16", choices=OUTTYPES, help="type of the matrices (default: bf16)")
    commands.add_argument("--with-target", type=Path, metavar="FILE", help="convert the target too, to this file")
    commands.add_argument("--pre-tokenizer", metavar="NAME", help="llama.cpp's name of the target's pre-tokenizer, where its converter does not recognise it")  # fmt: skip
    args = parse(commands, argv)
    if (args.drafter is None) != (args.output is None) or (args.drafter is None and args.with_target is None):
        raise ValueError("name a drafter with --output FILE, or only the target with --with-target FILE")
    target = local_target(args.target, weights=args.with_target is not None)
    options = {"outtype": args.outtype, "pre_tokenizer": args.pre_tokenizer}
    if args.drafter is not None:
        (file,) = convert_drafters({Path(args.drafter): args.output}, target, **options)
        print(summary(args.output, file))
    if args.with_target is not None:
        print(summary(args.with_target, convert_target(target, args.with_target, **options)))
    return 0


if __name__ == "__main__":
    run_command(main)
