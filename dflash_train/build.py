"""Recipe -> components. The only place where configuration and code meet; what a user can get wrong is checked before weights are read."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_train import assets, ranks
from dflash_train.checkpoint import checkpoints, identity_of, load_weights, read_state
from dflash_train.config.load import load_recipe, require
from dflash_train.config.schema import Attention, EngineConfig, Precision, Recipe
from dflash_train.data.certificate import Certificate, certify, check_certificate
from dflash_train.data.chat import load_tokenizer, mask_strategy, prompt_ids, serving_template, template_hash
from dflash_train.data.corpus import Corpus, fingerprint_of
from dflash_train.data.inspection import sources_table
from dflash_train.data.mask_token import check_mask_absent, check_mask_token, token_name
from dflash_train.data.prepare import check_token_ids, examine, located_sources, prepare
from dflash_train.data.provenance import expected_of
from dflash_train.data.read import Kept, iter_conversations, read_conversations
from dflash_train.data.stream import RowStream, StreamConfig, rows_per_rank
from dflash_train.data.template import TEMPLATE_ERRORS, NotEncodable, tokenizer_hash
from dflash_train.drafter.layers import compiled
from dflash_train.drafter.mask import dense_mask, flex_mask, span_mask
from dflash_train.drafter.model import Drafter, initialise
from dflash_train.drafter.recorded import RECORDED_WEIGHTS, recorded_weights
from dflash_train.drafter.spec import DrafterSpec, num_parameters, resolve_spec
from dflash_train.folder import hash_weights, load_drafter_folder, public_name, read_record, tensor_faults
from dflash_train.kernels.attention import why_not
from dflash_train.kernels.head import transform_logits
from dflash_train.method import DraftStep
from dflash_train.objective.loss import decay, default_gamma
from dflash_train.released.start import Start, derive
from dflash_train.target import hf
from dflash_train.target.elsewhere import Elsewhere, current, place_of_its_own
from dflash_train.target.hf import HFTarget, resolve_dtype
from dflash_train.target.info import read_target_info, weights_sample
from dflash_train.types import Prompt, TargetInfo, TokenizedExample


@dataclass(kw_only=True)
class Outline:
    """A run as far as it is known without any weights."""

    recipe: Recipe
    target_path: str
    info: TargetInfo
    tokenizer: Any
    spec: DrafterSpec
    gamma: float
    start: Start | None = None  # what the first weights come from; None: fresh ones

    @property
    def decay_S(self) -> np.ndarray:
        return np.array(decay(self.spec.block_size, self.gamma))

    @functools.cached_property
    def start_hash(self) -> str:
        """Of the released tensors that `start` begins with, which are read for it."""
        assert self.start is not None
        tensors, _ = self.start.released.tensors(self.start.spec)
        return hash_weights(tensors)


def say(text: str) -> None:
    """One line for the user, from rank 0."""
    if ranks.is_rank0():
        print(text, flush=True)


def outline(recipe: Recipe, *, fresh: bool = True) -> Outline:
    """Resolve the drafter against the target's config and tokenizer. Raises ValueError for contradictions.

    fresh: the drafter's first weights matter, and with them `drafter.init_from`; not for one that is trained already.
    """
    require(recipe, "target.path")
    recipe, start = derive(recipe) if fresh else (recipe, None)
    for note in [*recipe.notes, *(start.notes if start else [])]:
        say(note)
    path = assets.resolve(recipe.target.path, "target")
    info = read_target_info(path, recipe.target.revision, recipe.target.trust_remote_code)
    tokenizer = load_tokenizer(path, recipe.target.revision, recipe.target.trust_remote_code, recipe.data.chat_template)
    note = check_mask_token(recipe.drafter.mask_token_id, tokenizer, info)
    if note:
        say(note)
    spec = resolve_spec(recipe.drafter, info)
    if start:
        start.check(spec, info)
    k = spec.selector_top_k
    if spec.selector_rank and spec.hidden_size < k * (k + 1):
        say(
            f"note: llama.cpp needs hidden size >= top_k (top_k + 1) = {k * (k + 1)}, this target has {spec.hidden_size}; a smaller drafter.selector_top_k would load there"
        )
    gamma = recipe.objective.loss_decay_gamma or default_gamma(spec.block_size)
    return Outline(recipe=recipe, target_path=path, info=info, tokenizer=tokenizer, spec=spec, gamma=gamma, start=start)


def read_examples(o: Outline, entries: list[Any], *, what: str, limit: int | None = None) -> Corpus:
    """Documents of the recipe's sources; prints what was kept and dropped, refuses too large a loss."""
    data, target = o.recipe.data, o.recipe.target
    template = serving_template(o.tokenizer, o.target_path, target.revision, target.trust_remote_code)
    sources = located_sources(entries, what)
    corpus = prepare(sources, template, data, what=what, vocab_size=o.info.vocab_size, limit=limit)
    notes, problems = examine(corpus, data, expected_of(o.recipe, o.target_path, o.tokenizer), what)
    corpus.kept.origin = [*notes]
    for note in notes:
        say(note)
    say(f"{what}: {corpus.kept.table()}\n  masks: {mask_strategy(o.tokenizer, corpus.kept)}")
    if problems:
        raise ValueError(problems[0])
    return corpus


def heldout_prompts(o: Outline) -> list[Prompt]:
    """Held-out prompts as serving would build them, at most evaluate.max_prompts per domain."""
    conversations, kept = read_conversations(
        [assets.resolve(p, "heldout") for p in o.recipe.data.heldout], need_answer=False
    )
    for c in conversations:
        check_token_ids(c, o.info.vocab_size, o.target_path)
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    for c in conversations:
        most = o.recipe.evaluate.max_prompts
        if most is not None and taken.get(c.domain, 0) >= most:
            continue
        ids = c.prompt_ids
        if ids is None:
            messages = c.messages[:-1] if c.messages[-1]["role"] == "assistant" else c.messages
            kwargs = {**o.recipe.data.chat_template_kwargs, **c.chat_template_kwargs}
            try:
                ids = prompt_ids(messages, o.tokenizer, tools=c.tools, kwargs=kwargs)
            except TEMPLATE_ERRORS:
                kept.reject("template_error", c.source)
                continue
            except NotEncodable as error:
                if not kept.dropped["not_encodable"]:
                    say(f"held-out row {c.id} ({c.source}): {error}")
                kept.reject("not_encodable", c.source)
                continue
        if not ids:
            kept.reject("empty_prompt", c.source)
            continue
        room = o.info.max_position_embeddings - len(ids)
        if room < 1:
            kept.reject("beyond_context", c.source)  # the target was never trained to answer there
            continue
        if room < o.recipe.evaluate.max_new_tokens:
            kept.notes[f"prompts whose answers may pass the target's {o.info.max_position_embeddings} positions"] += 1
        taken[c.domain] = taken.get(c.domain, 0) + 1
        kwargs = {**o.recipe.data.chat_template_kwargs, **c.chat_template_kwargs}
        prompts.append(Prompt(id=c.id, domain=c.domain, token_ids=list(ids), tags=mode_tags(kwargs)))
    try:
        kept.check(o.recipe.data.max_dropped)
    except ValueError as error:
        raise ValueError(f"data.heldout = {o.recipe.data.heldout}: {error}") from None
    if kept.dropped or kept.notes:
        say(f"held-out prompts: {kept.table()}")
    return prompts


def tell_shared_prompts(examples: Corpus, prompts: list[Prompt]) -> None:
    """Say how many held-out prompts are trained on: documents that begin with the same token ids and go on with an answer."""
    asked = {np.array(p.token_ids, "<i4").tobytes(): p.id for p in reversed(prompts)}
    shared = {asked[prompt] for prompt in examples.prompts() if prompt in asked} if asked else set()
    if shared:
        first = next(p.id for p in prompts if p.id in shared)
        say(
            f"WARNING: {len(shared)} of {len(asked)} held-out prompts are in data.train too (first: {first}): held-out figures will be too good; "
            "data_prep/clean.py --against takes them out"
        )


def mode_tags(chat_template_kwargs: dict[str, Any]) -> dict[str, str]:
    """Thinking and effort, as far as the template's arguments say."""
    tags = {}
    if "enable_thinking" in chat_template_kwargs:
        tags["thinking"] = "on" if chat_template_kwargs["enable_thinking"] else "off"
    for name in ("reasoning_effort", "reasoning_strength"):
        if name in chat_template_kwargs:
            tags["effort"] = str(chat_template_kwargs[name])
    return tags


def build_stream(o: Outline) -> RowStream:
    """The training rows. Raises ValueError for unusable data and for a mask token that occurs in it."""
    require(o.recipe, "data.train")
    examples = read_examples(o, o.recipe.data.train, what="train", limit=o.recipe.data.limit)
    spec, train = o.spec, o.recipe.train
    check_mask_absent(spec.mask_token_id, examples, token_name(o.tokenizer, spec.mask_token_id))
    stream = RowStream(
        examples,
        StreamConfig(
            row_length=o.recipe.data.max_length,
            num_anchors=train.num_anchors,
            decay_S=o.decay_S,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            seed=train.seed,
            pack=o.recipe.data.pack,
        ),
    )
    say(f"{sources_table(examples)}\n{stream.packing_line()}")
    return stream


def certify_rows(o: Outline, stream: RowStream) -> Certificate:
    """The certificate of the training rows. Raises ValueError if they are not those of `data.certificate`."""
    data = o.recipe.data
    certificate = certify(data, o.tokenizer, stream.examples, o.spec.mask_token_id)
    if data.certificate is not None:
        check_certificate(data.certificate, certificate)
    return certificate


def build_step(o: Outline, device: torch.device) -> DraftStep:
    """Target, drafter with its first weights, and objective on a device; the target's head is checked against its own logits."""
    attention_and_compile(o.recipe.engine, device)  # before the target, which takes long
    place = place_of_its_own(o.recipe.target.device, device, ranks.world_size())
    target = HFTarget.load(o.recipe.target, o.target_path, o.spec.target_layer_ids, place)
    return step_over(o, target, device)


def step_over(o: Outline, target: HFTarget, device: torch.device) -> DraftStep:
    """`build_step` with a target that is there."""
    spec, engine = o.spec, o.recipe.engine
    with current(target.device):
        target.check_head(lambda x: transform_logits(x, spec.output_multiplier, spec.final_logit_softcapping))
    placed = target if target.device == device else Elsewhere(target, device)
    drafter = Drafter(spec)
    if o.start:
        shared = o.start.load(drafter, o.recipe.train.seed)
        if shared:
            o.start.check_shared(shared, placed.embed(torch.arange(spec.vocab_size, device=device)), placed.head_VH)
        say(f"starting from {o.start.released.name} ({o.start.released.format}, weights {o.start_hash})")
    else:
        initialise(drafter, o.recipe.train.seed)
    drafter.to(device)
    _, fuse = attention_and_compile(engine, device)
    if fuse:
        train = o.recipe.train  # of whose rows a rank may have fewer than a micro-batch holds
        rows = min(train.micro_batch_size, rows_per_rank(train.global_batch_size, ranks.world_size()))
        target.compile(rows * o.recipe.data.max_length, record=engine.cuda_graphs)
    dtype = resolve_dtype(engine.precision, device)
    mask = mask_maker(engine, device, dtype, spec)
    record = fuse and drafter_recorded(engine, spec)
    return DraftStep(drafter, placed, o.recipe.objective, dtype=dtype, mask=mask, fuse=fuse, record=record)


def drafter_recorded(engine: EngineConfig, spec: DrafterSpec) -> bool:
    """Whether training runs a drafter with compiled layers as CUDA graphs: not where an engine takes its weights apart, and not a large one, whose
    gradients ranks exchange while it computes the rest of them."""
    return engine.cuda_graphs and not engine.kind.shards and recorded_weights(spec) < RECORDED_WEIGHTS


def attention_and_compile(engine: EngineConfig, device: torch.device) -> tuple[bool, bool]:
    """(block-sparse attention, compiled layers) on a device. Raises ValueError for what cannot be had there."""
    sparse = engine.attention is Attention.flex or (engine.attention is Attention.auto and device.type == "cuda")
    if sparse and device.type != "cuda":
        raise ValueError("engine.attention = flex: its backward needs CUDA; use auto or dense")
    if engine.compile and not sparse:
        raise ValueError(
            "engine.compile = true: layers are compiled with block-sparse attention, which needs CUDA and engine.attention=auto; leave it null or false"
        )
    return sparse, sparse if engine.compile is None else engine.compile


def mask_maker(engine: EngineConfig, device: torch.device, dtype: torch.dtype, spec: DrafterSpec) -> Callable:
    """The function of `drafter.mask` whose masks choose the kernel of the drafter's attention; says so where it is not the fastest of a GPU."""
    sparse, fuse = attention_and_compile(engine, device)
    refused = f"engine.attention = {engine.attention.value}"
    if engine.attention is Attention.auto:
        refused = why_not(device, dtype, spec.head_dim, spec.block_size)
    if not refused:
        return compiled(span_mask) if fuse else span_mask
    if device.type == "cuda":
        say(f"note: the draft's attention is {'flex' if sparse else 'dense'} attention and not our own: {refused}")
    return flex_mask if sparse else dense_mask


def describe(o: Outline) -> str:
    """The drafter and its objective, for the start of a log."""
    s = o.spec
    chosen = "" if o.recipe.drafter.target_layer_ids else " (default)"
    gamma = "" if o.recipe.objective.loss_decay_gamma else f" (default for block size {s.block_size})"
    return (
        f"drafter: {num_parameters(s) / 1e6:.1f} M parameters, {s.num_hidden_layers} layers, block size {s.block_size}, mask token {s.mask_token_id}, "
        f"window {s.sliding_window or 'none'}\ntarget_layer_ids: {list(s.target_layer_ids)}{chosen} of {s.num_target_layers} layers, outputs captured\n"
        f"objective: gamma {o.gamma:g}{gamma}, selector weight {o.recipe.objective.selector_loss_weight:g}"
    )


def run_identity(o: Outline, stream: RowStream) -> dict[str, Any]:
    """What must stay the same for a checkpoint to be continued: the drafter, the target, the data and their order."""
    train = o.recipe.train
    weights = [source.weight for source in stream.examples.sources]
    mixed = {"weights": weights} if set(weights) != {1.0} else {}
    began = {"init_from": o.start_hash} if o.start else {}  # a resume is refused before the target is read
    return identity_of(
        o.spec,
        **mixed,
        **began,
        target_revision=o.info.revision,
        target_weights=weights_sample(o.target_path),
        tokenizer=tokenizer_hash(o.tokenizer),
        template_hash=template_hash(o.tokenizer, o.recipe.data.chat_template_kwargs),
        data=stream.fingerprint,
        rows=len(stream.examples),
        tokens=stream.tokens_per_epoch,
        row_length=o.recipe.data.max_length,
        pack=o.recipe.data.pack,
        global_batch_size=train.global_batch_size,
        num_anchors=train.num_anchors,
        seed=train.seed,
    )


def run_settings(
    o: Outline, total_steps: int, heldout: list[TokenizedExample], prompts: list[Prompt], device: torch.device
) -> dict[str, Any]:
    """What changes the numbers of the steps to come, and may be changed knowingly in the middle of a run. By the names of the knobs,
    where there is one."""
    recipe = o.recipe
    knobs = {f"optimizer.{name}": value for name, value in vars(recipe.optimizer).items()}
    objective = {name: value for name, value in vars(recipe.objective).items() if name != "chunk_rows"}
    knobs |= {f"objective.{name}": value for name, value in (objective | {"loss_decay_gamma": o.gamma}).items()}
    for part, given in (("target", recipe.target.precision), ("engine", recipe.engine.precision)):
        knobs[f"{part}.precision"] = "fp8" if given is Precision.fp8 else str(resolve_dtype(given, device))
    asked = hashlib.sha256(json.dumps([[p.id, p.domain, p.token_ids] for p in prompts]).encode()).hexdigest()[:16]
    known = {
        "target": o.info.path,
        "total_steps": total_steps,
        "heldout": fingerprint_of(heldout) if heldout else asked if prompts else None,
    }
    return json.loads(json.dumps(known | knobs, default=lambda value: value.value))  # a choice is saved by its name


# --- a finished or running run, opened again ----------------------------------------------------------------------


@dataclass(kw_only=True)
class OpenedRun:
    """A drafter with its target, ready to be evaluated or exported. source: the folder its weights came from."""

    recipe: Recipe
    outline: Outline
    step: DraftStep
    source: Path
    trained_steps: int | None
    weights_hash: str

    @property
    def stop_ids(self) -> set[int]:
        return stop_ids(self.outline, self.step.target)

    def heldout_prompts(self) -> list[Prompt]:
        require(self.recipe, "data.heldout")
        return heldout_prompts(self.outline)

    def heldout_examples(self) -> list[TokenizedExample]:
        return heldout_examples(self.outline)


def heldout_examples(o: Outline) -> list[TokenizedExample]:
    """Held-out rows that carry an answer, at most evaluate.max_prompts per domain; none where the file has prompts only."""
    paths = [assets.resolve(p, "heldout") for p in o.recipe.data.heldout]
    found = (c for _, c in iter_conversations(paths, Kept(), need_answer=False))
    if not any(c.response_ids or (c.messages and c.messages[-1]["role"] == "assistant") for c in found):
        return []
    examples = read_examples(o, o.recipe.data.heldout, what="heldout")
    most = o.recipe.evaluate.max_prompts
    kept: list[TokenizedExample] = []
    taken: dict[str, int] = {}
    for e in examples:
        taken[e.domain] = taken.get(e.domain, 0) + 1
        if most is None or taken[e.domain] <= most:
            kept.append(e)
    return kept


def stop_ids(o: Outline, target: HFTarget) -> set[int]:
    """Tokens that end an answer: generation_config's (else the config's) and the tokenizer's, as in regeneration and in engines."""
    return hf.stop_ids(target.model, o.tokenizer, o.info.eos_token_ids)


def locate(source: str) -> tuple[Path, str | None]:
    """(folder with weights, recipe or None) for a run, one of its checkpoints, or an export."""
    path = Path(source)
    if not path.is_dir():
        raise ValueError(f"{source}: no such folder; give a run, one of its checkpoints or an export")
    if (path / "state.json").exists():
        return path, str(path.parent.parent / "config.yaml")
    if (path / "config.yaml").exists():
        found = checkpoints(path / "checkpoints")
        if not found:
            raise ValueError(f"{source}: a run without a finished checkpoint; train it first, or give an export")
        return found[-1], str(path / "config.yaml")
    if (path / "config.json").exists():
        beside = path.parent / "config.yaml"
        return path, str(beside) if beside.exists() else None
    raise ValueError(
        f"{source}: neither a run (config.yaml), nor a checkpoint (state.json), nor an export (config.json)"
    )


SOURCE_HELP = "run folder (its newest checkpoint), checkpoint, or export"


def open_drafter(
    source: str, config: str | None, overrides: list[str]
) -> tuple[Outline, dict[str, torch.Tensor], Path, int | None]:
    """(outline, fp32 tensors, folder, training step) of a run, checkpoint or export. The target's weights are not read.

    The settings are those of the run's own recipe, or of `config`, changed by the overrides.
    """
    folder, own = locate(source)
    if config is None and own is None and not any(text.startswith("target.path=") for text in overrides):
        raise ValueError(
            f"{source}: no recipe beside it; name one with -c (a run's folder will do), or its target where the command takes one"
        )
    recipe = load_recipe(config or own, overrides)
    if (folder / "state.json").exists():
        saved = read_state(folder)
        # the recipe that a run saved has every knob of its drafter; what it began from may be gone by now
        o, step, trained_on = outline(recipe, fresh=config is not None), saved.step, saved.settings.get("target")
        now = identity_of(o.spec)
        differ = [f"{k}: trained {v}, now {now[k]}" for k, v in saved.identity.items() if k in now and now[k] != v]
        if differ:
            raise ValueError(
                f"{source}: a drafter is evaluated and exported as it was trained, but the recipe says otherwise ({'; '.join(differ)}); "
                "take these settings back, or train another drafter with them"
            )
        state = load_weights(folder)
    else:
        spec, state, _ = load_drafter_folder(folder)
        changed = [text for text in overrides if text.lstrip("+~").startswith("drafter")]
        if changed:
            raise ValueError(f"{source}: an export is what its config.json says; leave out {', '.join(changed)}")
        record = read_record(folder)
        step, trained_on = record.get("provenance", {}).get("step"), record.get("target", {}).get("name")
        recipe.drafter.mask_token_id = spec.mask_token_id
        o = outline(recipe, fresh=False)
        o.spec = spec
        if (spec.hidden_size, spec.vocab_size, spec.num_target_layers) != (
            o.info.hidden_size,
            o.info.vocab_size,
            o.info.num_layers,
        ):
            raise ValueError(
                f"{source} was made for a target with hidden size {spec.hidden_size}, vocabulary {spec.vocab_size} and {spec.num_target_layers} layers; "
                f"{o.info.path} has {o.info.hidden_size}, {o.info.vocab_size} and {o.info.num_layers}"
            )
    faults = tensor_faults({name: tuple(t.shape) for name, t in state.items()}, o.spec)
    if faults:
        raise ValueError(f"{folder}: its weights do not fit the recipe's drafter: " + "; ".join(faults[:4]))
    if trained_on and public_name(trained_on) != public_name(o.info.path):
        say(f"note: {source} was trained on the target {public_name(trained_on)}, now it is {public_name(o.info.path)}")
    return o, {k: v.float() for k, v in state.items()}, folder, step


def open_source(
    source: str, config: str | None, overrides: list[str], *, device: torch.device | None = None
) -> OpenedRun:
    """A run, checkpoint or export with the target of its recipe (or of `config`), ready for evaluation, on this rank's device or another."""
    o, state, folder, step = open_drafter(source, config, overrides)
    trained, wanted = o.spec.block_size, o.recipe.evaluate.block_sizes
    if max(wanted, default=0) > trained:
        raise ValueError(f"evaluate.block_sizes = {wanted}: each must be in [2, {trained}], the trained block")
    o.start, o.recipe.target.device = None, None  # decoding wants target and drafter on one device
    module = build_step(o, device or ranks.start(o.recipe.engine.timeout_minutes))
    module.drafter.load_state_dict(state)
    module.eval()
    return OpenedRun(
        recipe=o.recipe, outline=o, step=module, source=folder, trained_steps=step, weights_hash=hash_weights(state)
    )
