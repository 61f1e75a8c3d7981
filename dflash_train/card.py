"""The model cards of an export and of its GGUF files: what it is, what was measured, and how every engine is started with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import dflash_train
from dflash_train.drafter.spec import SLIDING, DrafterSpec, to_hf_config
from dflash_train.engines import ENGINES, SPLASH, Engine, Serving, lines, settings, splash_difference
from dflash_train.folder import RECORD, public_name
from dflash_train.types import TargetInfo


@dataclass(kw_only=True)
class CardFacts:
    """What the model card states besides the spec.

    decoded: the report of real decoding (`evaluate.decode_report`), or None where these weights were not decoded. client: what
    `client.GapReport.as_dict` says of an export of these weights, likewise. licence_notes: why the licence is what it is. target: what
    `target_record` says of the target; `write_export` fills it in. Raises ValueError for measurements that the card cannot state.
    """

    name: str
    base_model: str
    license: str
    decoded: dict[str, Any] | None = None
    client: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    licence_notes: list[str] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:  # they come from files
            list(_measured(self))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(
                f"what was measured of {self.name} (evaluation.json, client.json, or an export's record of them) is not as evaluation and the "
                f"train-to-serve check write it ({error!r}); measure again, or delete it"
            ) from None


def target_record(target: TargetInfo) -> dict[str, Any]:
    """What an export records of its target, so that a wrong pair can be told from a right one."""
    return {
        "name": public_name(target.path),
        "revision": target.revision,
        "model_type": target.model_type,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": target.tie_word_embeddings,
    }


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


def walk_tau(decoded: dict[str, Any] | None) -> float | None:
    """tau of the teacher-forced walk; nothing walks at a temperature."""
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
    walk = walk_tau(decoded)
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


_PLAIN = re.compile(r"[\w./:@+][\w./:@+-]*")


def serving(spec: DrafterSpec, *, target: str, draft: str, family: str | None) -> Serving:
    """What launch lines of this drafter depend on. A name that a shell, JSON or YAML would read otherwise stays a stand-in."""
    stand_in = Serving(block=spec.block_size, sliding=False, bidirectional=False, two=True)
    return Serving(
        block=spec.block_size,
        sliding=SLIDING in spec.layer_types,
        bidirectional=not spec.is_causal,
        two=bool(spec.conv_kernel_size and spec.selector_rank),
        family=family,
        target=target if _PLAIN.fullmatch(target) else stand_in.target,
        draft=draft if _PLAIN.fullmatch(draft) else stand_in.draft,
    )


def launch_sections(s: Serving, engines: Iterable[Engine] = ENGINES) -> Iterable[str]:
    """A section per engine: where it is supported from, its launch line, its settings for this drafter."""
    for engine in engines:
        yield f"### {engine.name}\n\nFrom {engine.floor}. Checked against {engine.version}: {engine.how}.\n"
        for language, text in lines(engine, s):
            yield f"```{language}\n{text}\n```\n"
        found = [f"- {f'On {x.gpu}: ' if x.gpu else ''}{x.text} ({x.source})" for x in settings(engine, s)]
        if found:
            yield "\n".join(found) + "\n"


def model_card(spec: DrafterSpec, card: CardFacts, *, has_tokenizer: bool = True) -> str:
    """README.md: front matter, what this is, measured acceptance and the launch line of every engine for this block size."""
    k, t = spec.block_size, card.target
    base, name = (" ".join(text.split()) for text in (public_name(card.base_model), card.name))
    s = serving(spec, target=base, draft=name, family=t.get("model_type"))
    windows = ", ".join(
        sorted({f"window {spec.sliding_window}" if t == SLIDING else "full attention" for t in spec.layer_types})
    )
    config = to_hf_config(spec, dtype="bfloat16", bos=None, eos=None, pad=None)
    engines = [e for e in ENGINES if e is not SPLASH or not splash_difference(config)[1]]
    no_tokenizer = "" if has_tokenizer else "\nThis folder has no tokenizer files; every engine takes the target's.\n"
    provenance = "".join(
        f"- {key}: {value}\n" for key, value in card.provenance.items() if isinstance(value, (str, int, float))
    )
    trained = card.provenance.get("row_length")
    rows = [
        ("block size K", f"{k}: 1 anchor and {k - 1} drafted tokens"),
        ("draft layers", f"{spec.num_hidden_layers}, {windows}, {'causal' if spec.is_causal else 'bidirectional'} inside the block"),
        ("captured target layers", f"{', '.join(map(str, spec.target_layer_ids))} of {spec.num_target_layers} (0-based, outputs)"),
        ("mask token id", str(spec.mask_token_id)),
        ("RoPE", f"theta {spec.rope_theta:g} over the whole head"),
        ("vocabulary", f"{spec.vocab_size}, the target's whole; token embedding and output head are shared from the target and not in this file"),
    ]  # fmt: skip
    if trained:
        rows.append(("trained on", f"rows of up to {trained} tokens; beyond that acceptance is not known"))
    if t:
        tied = "tied" if t["tie_word_embeddings"] else "untied"
        revision = f" at {t['revision']}" if t["revision"] else ""
        rows.append(
            ("target", f"`{base}`{revision}: {t['num_layers']} layers, hidden size {t['hidden_size']}, vocabulary {t['vocab_size']}, {tied} embeddings")
        )  # fmt: skip
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    licence = "".join(f"- {note}\n" for note in card.licence_notes)
    sections = "\n".join(launch_sections(s, engines))
    return f"""---
base_model: {_yaml(base)}
{_licence(card.license)}
library_name: dflash
pipeline_tag: text-generation
tags:
- dflash
- speculative-decoding
---

# {name}

A {"DFlash 2" if s.two else "DFlash"} drafter for speculative decoding of `{base}`. It drafts {k - 1} tokens at a time from hidden states of the target,
which verifies them in one pass; the output stays the target's own. It works with that target only.

| | |
| --- | --- |
{table}

## Measured acceptance

{chr(10).join(_measured(card))}

An engine that accepts far fewer tokens on such text reads something differently: `python -m dflash_train.check FOLDER` says what each engine
makes of this folder.

## Serving

Draft at most K - 1 = {k - 1} tokens: more was never trained. Some engines count the anchor too, others do not; the lines below do as each does.
Pin the revision of target and drafter.
{no_tokenizer}
{sections}
Auto classes do not apply: `AutoModelForCausalLM` would load a plain Qwen3 and drop the draft tensors.

## Licence

{licence or f"- {card.license}{chr(10)}"}
## Training

Trained with dflash-train {dflash_train.__version__}; the full record is in `{RECORD}`.
{provenance}"""


def _licence(licence: str) -> str:
    # The Hub asks for a name beside `other`.
    return f"license: {_yaml(licence)}" + ("\nlicense_name: see-the-card" if licence == "other" else "")


def gguf_card(
    record: dict[str, Any], drafter: str, licence: str, files: dict[str, int], measured: dict[str, Any]
) -> str:
    """README.md of a repository of GGUF files of an export.

    record: the export's dflash_train.json; drafter: its repository; files: name -> bytes; measured: name -> {"tau", "rounds", "tokens", "reference"},
    the tau of a file and of the unquantised drafter in the same engine, where they were measured.
    """
    target, k = record["target"]["name"], record["spec"]["block_size"]
    rows = []
    for name, size in sorted(files.items()):
        m = measured.get(name)
        tau = f"{m['tau']:.2f} ({m['tokens']}/{m['rounds']})" if m else "-"
        change = f"{m['tau'] / m['reference'] - 1:+.1%}" if m and m.get("reference") else "-"
        rows.append(f"| {name} | {size / 2**20:.1f} | {tau} | {change} |")
    first = min(files)
    return f"""---
base_model:
- {_yaml(drafter)}
- {_yaml(target)}
base_model_relation: quantized
{_licence(licence)}
library_name: gguf
tags:
- gguf
- dflash
- speculative-decoding
---

# {drafter}-GGUF

The drafter [{drafter}](https://huggingface.co/{drafter}) of `{target}` for llama.cpp built after 2026-08-27. Not a model of its own: it drafts for
that target.

| file | MiB | tau in llama.cpp (tokens/passes) | against the unquantised file |
| --- | ---: | ---: | ---: |
{chr(10).join(rows)}

```bash
llama-server -m TARGET.gguf -md {first} --spec-type draft-dflash --spec-draft-n-max {k - 1}
llama-server -m TARGET.gguf -hfd {drafter}-GGUF --spec-type draft-dflash --spec-draft-n-max {k - 1}
```

At most K - 1 = {k - 1} tokens. One request at a time; llama.cpp drafts greedily at any temperature. What it was trained on and the tau per domain are
on the card of [{drafter}](https://huggingface.co/{drafter}).
"""
