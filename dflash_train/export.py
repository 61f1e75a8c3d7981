"""The folder that engines load: written, and read back strictly.

A loader that accepts a folder proves little (SGLang and vLLM load a drafter with missing tensors and say nothing), so both
directions here compare names and shapes with `tensor_shapes` and stop at the first difference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dflash_train
from dflash_train.build import SOURCE_HELP, Outline, hash_weights, open_drafter
from dflash_train.config.load import parse, parser, run_command
from dflash_train.data.certificate import CERTIFICATE, read_certificate
from dflash_train.drafter.spec import SLIDING, DrafterSpec, tensor_shapes, to_hf_config
from dflash_train.folder import RECORD, WEIGHTS, public_name, read_headers, read_json, tensor_faults
from dflash_train.released.nemo import nemo_style
from dflash_train.types import TargetInfo

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


@dataclass(kw_only=True)
class CardFacts:
    """What the model card states besides the spec.

    decoded: the report of real decoding (`evaluate.decode_report`), or None where these weights were not decoded. client: what
    `client.GapReport.as_dict` says of an export of these weights, likewise.
    """

    name: str
    base_model: str
    license: str
    decoded: dict[str, Any] | None = None
    client: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------- writing


def write_export(
    output: Path,
    *,
    state: dict[str, torch.Tensor],
    spec: DrafterSpec,
    target: TargetInfo,
    dtype: torch.dtype,
    tokenizer_dir: str | Path | None,
    card: CardFacts,
) -> Path:
    """Write a drafter folder and return its path. All or nothing: it is built beside `output` and renamed into place.

    state: tensors of any float dtype and device, named as in `tensor_shapes(spec)`; wrapper prefixes are stripped.
    tokenizer_dir: folder or hub id whose tokenizer files go along (None: none).
    Raises ValueError for a tensor that is missing, unexpected, mis-shaped or not finite, for a spec that does not fit
    the target, and for an `output` that holds something else than an earlier export.
    """
    output = Path(os.path.realpath(output))
    check_output(output)
    _check_pair(spec, target)
    tensors = _export_tensors(state, spec, dtype)
    eos = target.eos_token_ids[0] if target.eos_token_ids else None
    config = to_hf_config(
        spec, dtype=str(dtype).removeprefix("torch."), bos=target.bos_token_id, eos=eos, pad=target.pad_token_id
    )
    config["transformers_version"] = version("transformers")
    target_name = public_name(target.path)
    record = {
        "format": 1,
        "dflash_train": dflash_train.__version__,
        "spec": asdict(spec),
        "dtype": config["dtype"],
        "target": {
            "name": target_name,
            "revision": target.revision,
            "model_type": target.model_type,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": target.tie_word_embeddings,
        },
        "weights": hash_weights(tensors),
        "tau": card.decoded and card.decoded["tau"],
        "walk_tau": _walk_tau(card.decoded),
        "provenance": card.provenance,
    }

    output.parent.mkdir(parents=True, exist_ok=True)
    building = output.parent / f".{output.name}.writing-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        save_file(tensors, building / WEIGHTS, metadata={"format": "pt"})
        _write_json(building / "config.json", config)
        copied = _write_tokenizer(building, tokenizer_dir, target.revision)
        (building / "README.md").write_text(model_card(spec, card, has_tokenizer=bool(copied)), encoding="utf-8")
        # Recorded, so that replacing this export later removes only what is ours.
        record["files"] = sorted([*_files(building), RECORD])
        _write_json(building / RECORD, record)
        # safetensors writes files that only their owner may read; a server often runs as another user
        (building / WEIGHTS).chmod((building / "config.json").stat().st_mode)
        written = read_headers(building)
        assert {n: h.shape for n, h in written.items()} == tensor_shapes(spec), "the written file differs from the spec"
        _replace(building, output)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return output


def check_output(output: Path) -> None:
    """Raise ValueError if writing an export to `output` would destroy anything but an earlier export."""
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"export.output = {output}: is a file; name a folder")
    found = set(_files(output)) if output.is_dir() else set()
    if not found:
        return
    if RECORD not in found:
        raise ValueError(
            f"export.output = {output}: not empty and not an earlier export (it has no {RECORD}); name another folder"
        )
    ours = set(read_json(output / RECORD).get("files", found))
    if found - ours:
        names = ", ".join(sorted(found - ours)[:3])
        raise ValueError(
            f"export.output = {output}: the earlier export there has files that were added to it ({names}); move them or name another folder"
        )


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def _replace(building: Path, output: Path) -> None:
    """Rename into place. A folder cannot be renamed over a full one, so an earlier export steps aside until the new one is there."""
    if not output.exists():
        building.rename(output)
        return
    aside = building.with_name(building.name.replace(".writing-", ".replaced-"))
    output.rename(aside)
    try:
        building.rename(output)
    except OSError:
        aside.rename(output)
        raise
    shutil.rmtree(aside)


def _check_pair(spec: DrafterSpec, target: TargetInfo) -> None:
    for name, mine, theirs in [
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("num_target_layers", spec.num_target_layers, target.num_layers),
    ]:
        if mine != theirs:
            raise ValueError(
                f"drafter {name} = {mine}: the target {target.path} has {theirs}; a drafter fits only the target it was trained on"
            )


def _export_tensors(state: dict[str, torch.Tensor], spec: DrafterSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Bare names, one dtype, contiguous, on the host, in a fixed order."""
    bare: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        short = re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))  # torch.compile wraps single layers too
        if short in bare:
            raise ValueError(f"tensor {short}: given twice, once as {name}")
        bare[short] = tensor
    faults = tensor_faults({n: tuple(t.shape) for n, t in bare.items()}, spec)
    if faults:
        raise ValueError("the drafter's tensors do not fit its spec:\n  " + "\n  ".join(faults))
    tensors = {}
    for name in tensor_shapes(spec):
        # copy: two names must not share memory in a safetensors file, and the caller may train on
        tensors[name] = bare[name].detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(
                f"tensor {name}: has NaN or infinite values in {dtype}; the training diverged or the dtype is too narrow"
            )
    return tensors


def _write_tokenizer(folder: Path, source: str | Path | None, revision: str | None) -> list[str]:
    """Copy the target's tokenizer files into `folder`; returns their names. Remote code is never copied or run."""
    if source is None:
        return []
    local = Path(source)
    if local.is_dir():
        for name in TOKENIZER_FILES:
            if (local / name).is_file():
                shutil.copyfile(local / name, folder / name)
        if (local / "additional_chat_templates").is_dir():
            shutil.copytree(local / "additional_chat_templates", folder / "additional_chat_templates")
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source), revision=revision).save_pretrained(folder)
    return sorted(n for n in TOKENIZER_FILES if (folder / n).is_file())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- model card


def _yaml(value: str) -> str:
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in (
        "yes",
        "no",
        "true",
        "false",
        "null",
        "on",
        "off",
        "y",
        "n",
    )
    return value if plain else json.dumps(value)


def _walk_tau(decoded: dict[str, Any] | None) -> float | None:
    """Nothing walks at a temperature."""
    return decoded["walk_tau"]["value"] if decoded and "walk_tau" in decoded else None


def _measured(card: CardFacts) -> Iterable[str]:
    """The section on acceptance, line by line."""
    decoded = card.decoded
    if decoded is None:
        yield "Not measured yet."
    else:
        how = "greedy" if decoded["temperature"] == 0 else f"temperature {decoded['temperature']:g}"
        yield f"tau: tokens per target pass (the target's own token included), {how}, on {decoded['prompts']} held-out prompts."
        yield "Pooled over passes; the interval resamples prompts.\n"
        yield "| domain | tau | target passes | tokens | prompts | 95 % interval |\n| --- | ---: | ---: | ---: | ---: | ---: |"
        rows = decoded["tau"] | ({"pooled": decoded["tau_all"]} if len(decoded["tau"]) > 1 else {})
        yield from (_tau_row(domain, cell) for domain, cell in rows.items())
        yield ""
        yield from _facts(decoded)
    if card.client is not None:
        yield _client_line(card.client)


def _tau_row(domain: str, cell: dict[str, Any]) -> str:
    value = "-" if cell["value"] is None else f"{cell['value']:.2f}"
    interval = "-" if cell["interval"] is None else "{:.2f} to {:.2f}".format(*cell["interval"])
    return f"| {domain} | {value} | {cell['rounds']} | {cell['tokens']} | {cell['prompts']} | {interval} |"


def _facts(decoded: dict[str, Any]) -> Iterable[str]:
    """Losslessness, speed, cost and memory as a list."""
    if decoded["lossless"] is not None:
        yield (
            f"- {'Lossless' if decoded['lossless'] else 'NOT LOSSLESS'}: {decoded['identical']} of {decoded['prompts']} outputs token-identical "
            f"to plain greedy decoding, {decoded['near_ties']} parted at near ties of the target, {decoded['different']} different."
        )
    walk = _walk_tau(decoded)
    if walk is not None:
        yield f"- Teacher-forced walk over the same text: {walk:.2f}."
    if decoded["speedup"] is not None:
        together = decoded["decoded_together"]
        alone = "one prompt at a time" if together == 1 else f"{together} prompts together"
        yield f"- Speed: {decoded['speedup']:.2f} times plain decoding, {decoded['tokens_per_second']:.0f} tokens/s, {alone}."
    if decoded["cost"]:
        cost = decoded["cost"]
        yield f"- Cost: {cost['draft_ms']:.1f} of {cost['cycle_ms']:.1f} ms per pass go into drafting ({cost['draft_share']:.0%})."
    loops = decoded["repetition"]
    if loops["looping"]:
        without = loops["tau_without_looping"]
        yield f"- {loops['looping']} outputs mostly repeat themselves; tau without them {without['value'] or 0:.2f} ({without['tokens']}/{without['rounds']})."
    memory = decoded["memory"]
    yield (
        f"- Memory: {memory['drafter_mib']:.1f} MiB of weights in 16 bits, and {memory['context_bytes_per_token']} bytes of cache per token "
        "of context."
    )


def _client_line(client: dict[str, Any]) -> str:
    """What became of the train-to-serve check."""
    tau, expected = client["tau"], client["expected"]
    if not tau["rounds"]:
        return "- Train-to-serve check: nothing was decoded."
    counts = f"tau {tau['value']:.2f} ({tau['tokens']}/{tau['rounds']}), {expected['value']:.2f} expected from training"
    own = "" if client["independent"] else " (this project's own decoder: not an independent check)"
    verdict = "FAILED" if client["gap"] else "passed"
    return f"- Train-to-serve check {verdict}: {client['decoder']}{own} decoded {client['prompts']} held-out prompts from this folder, {counts}."


def model_card(spec: DrafterSpec, card: CardFacts, *, has_tokenizer: bool = True) -> str:
    """README.md: front matter, what this is, measured acceptance and the launch line of every engine for this block size."""
    k, base, name = spec.block_size, public_name(card.base_model), card.name
    two = bool(spec.conv_kernel_size and spec.selector_rank)
    kind, cls = ("DFlash 2", "DFlash2DraftModel") if two else ("DFlash", "DFlashDraftModel")
    windows = ", ".join(
        sorted({f"window {spec.sliding_window}" if t == SLIDING else "full attention" for t in spec.layer_types})
    )
    backend = (
        "\nKeep the draft attention backend at VANILLA or FA4: TRTLLM has no non-causal windows.\n"
        if spec.sliding_window and not spec.is_causal
        else ""
    )
    no_tokenizer = "" if has_tokenizer else "\nThis folder has no tokenizer files; every engine takes the target's.\n"
    small = min(k, 5)
    provenance = "".join(
        f"- {key}: {value}\n" for key, value in card.provenance.items() if isinstance(value, (str, int, float))
    )
    return f"""---
base_model: {_yaml(base)}
license: {_yaml(card.license)}
library_name: dflash
pipeline_tag: text-generation
tags:
- dflash
- speculative-decoding
---

# {name}

A {kind} drafter for speculative decoding of `{base}`. It drafts {k - 1} tokens at a time from hidden states of the target,
which verifies them in one pass; the output stays the target's own. It works with that target only.

| | |
| --- | --- |
| block size K | {k}: 1 anchor and {k - 1} drafted tokens |
| draft layers | {spec.num_hidden_layers}, {windows}, {"causal" if spec.is_causal else "bidirectional"} inside the block |
| captured target layers | {", ".join(map(str, spec.target_layer_ids))} of {spec.num_target_layers} (0-based, outputs) |
| mask token id | {spec.mask_token_id} |
| vocabulary | {spec.vocab_size}; token embedding and output head are shared from the target and not in this file |

## Measured acceptance

{chr(10).join(_measured(card))}

## Serving

Draft at most K - 1 = {k - 1} tokens: more was never trained. `python -m dflash_train.check FOLDER` prints what each engine
makes of this folder.
{no_tokenizer}
SGLang (0.5.19 or later; counts the anchor, so K)

```bash
python -m sglang.launch_server --model-path {base} \\
  --speculative-algorithm DFLASH --speculative-draft-model-path {name} \\
  --speculative-num-draft-tokens {k}
```

vLLM (0.28.0 or later, V2 model runner; counts drafted tokens, so K - 1, and does not read the block size itself)

```bash
vllm serve {base} \\
  --speculative-config '{{"method": "dflash", "model": "{name}", "num_speculative_tokens": {k - 1}}}'
```

TensorRT-LLM (1.3.0rc28 or later)

```python
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import DFlashDecodingConfig

llm = LLM("{base}", speculative_config=DFlashDecodingConfig(max_draft_len={k - 1}, speculative_model="{name}"))
```

```yaml
speculative_config:
  decoding_type: DFlash
  max_draft_len: {k - 1}
  speculative_model: {name}
```
{backend}
llama.cpp (built after 2026-08-27; convert with the target beside it, because the drafter takes its vocabulary)

```bash
python convert_hf_to_gguf.py DRAFTER_FOLDER --target-model-dir TARGET_FOLDER --outfile drafter.gguf
llama-server -m target.gguf -md drafter.gguf --spec-type draft-dflash --spec-draft-n-max {k - 1}
```

ollama (experimental: a build of pull request 17865, MLX engine). The draft depth must be set; its default 0 switches
speculation off without a message.

```
FROM TARGET_FOLDER
DRAFT DRAFTER_FOLDER
PARAMETER draft_num_predict {k - 1}
```

oMLX 0.6.2-zlab-dflash2: enable DFlash for the target, choose this drafter, block size {small}, verify mode dflash.
With quantised target or draft weights keep the block at 5 or less; larger verify widths are slower there.

dflash client (0.1.0; transformers 5.15 or later, or MLX)

```bash
dflash generate mlx --model {base} --draft {name} --block-size {small} "PROMPT"
```

```python
from dflash.model import {cls}

drafter = {cls}.from_pretrained("{name}", dtype="auto")
output_ids = drafter.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[], temperature=0.0)
```

Auto classes do not apply: `AutoModelForCausalLM` would load a plain Qwen3 and drop the draft tensors.

## Training

Trained with dflash-train {dflash_train.__version__}; the full record is in `{RECORD}`.
{provenance}"""


# ------------------------------------------------------------------------------------------------------------ the command


def export_run(
    o: Outline, state: dict[str, torch.Tensor], output: Path, *, step: int | None, chosen_by: str | None = None
) -> Path:
    """Export a drafter of the run that `o` (a `build.Outline`) outlines, after `step` training steps. See `card_facts`."""
    return write_export(
        output,
        state=state,
        spec=o.spec,
        target=o.info,
        dtype=getattr(torch, o.recipe.export.precision.value),
        tokenizer_dir=o.target_path,
        card=card_facts(o, hash_weights(state), step, chosen_by),
    )


def card_facts(o: Outline, weights: str, step: int | None, chosen_by: str | None) -> CardFacts:
    """What is known of a drafter of this run; evaluation.json and client.json of <output_dir> count if they measured these weights.
    chosen_by: why it is not the run's last one."""
    recipe, run = o.recipe, Path(o.recipe.output_dir)
    evaluation = _measurement(run / "evaluation.json", weights)
    return CardFacts(
        name=run.name,
        base_model=public_name(o.info.path),
        license=recipe.export.license,
        decoded=evaluation["decoded"] if evaluation and "decoded" in evaluation else None,
        client=_measurement(run / "client.json", weights),
        provenance={
            "step": step,
            **({"chosen_by": chosen_by} if chosen_by else {}),
            "objective": {"loss_decay_gamma": o.gamma, "selector_loss_weight": recipe.objective.selector_loss_weight},
            "lr": recipe.optimizer.lr,
            "num_anchors": recipe.train.num_anchors,
            "row_length": recipe.data.max_length,
            "global_batch_size": recipe.train.global_batch_size,
            **_data_facts(run),
            **{k: v for k, v in recipe.provenance.items() if k != "command"},  # a command line may name private paths
        },
    )


def rewrite_card(o: Outline, folder: Path, weights: str, *, step: int | None, chosen_by: str | None = None) -> None:
    """State on an export's card what was measured since it was written."""
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    card = model_card(o.spec, card_facts(o, weights, step, chosen_by), has_tokenizer=has_tokenizer)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _measurement(path: Path, weights: str) -> dict[str, Any] | None:
    """A file of measurements, if it is there and measured weights with this hash."""
    found = read_json(path) if path.exists() else {"weights": None}
    return found if found["weights"] == weights else None


def _data_facts(run: Path) -> dict[str, Any]:
    """Digest and counts of the run's data certificate; nothing for a run that has none."""
    if not (run / CERTIFICATE).exists():
        return {}
    certificate = read_certificate(run / CERTIFICATE)
    counts = {f"data_{name}": getattr(certificate, name) for name in ("documents", "tokens", "supervised")}
    return {"data_certificate": certificate.digest, **counts}


def main(argv: list[str]) -> int:
    commands = parser(
        "python -m dflash_train.export",
        "Write a drafter as a folder that every engine loads unedited.",
        source=SOURCE_HELP,
    )
    commands.add_argument(
        "--output", metavar="DIR", help="folder to write; default: export.output, else <output_dir>/export"
    )
    commands.add_argument(
        "--format",
        choices=("engines", "nemo"),
        default="engines",
        help="nemo: as NeMo AutoModel consolidates, for its own tools; engines load the default (docs/nemo.md)",
    )
    args = parse(commands, argv)
    o, state, _, step = open_drafter(args.source, args.config, args.overrides)
    output = Path(args.output or o.recipe.export.output or Path(o.recipe.output_dir) / "export")
    written = export_run(o, state, output, step=step)
    print(f"exported to {nemo_style(written) if args.format == 'nemo' else written}")
    return 0


if __name__ == "__main__":
    run_command(main)
