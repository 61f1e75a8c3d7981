"""`drafter.init_from`: every knob that the recipe leaves open comes from the released drafter, every contradiction is refused, and the
first step computes what the released drafter computes.

Three things may differ from it, each exact at step 0: a convolution and a selector where it has none (identity, silent), further layers
behind its own (their outputs begin at zero), and another block size (the weights do not depend on it).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_train.config.schema import DrafterConfig, Recipe
from dflash_train.config.validate import validate_drafter
from dflash_train.drafter.model import Drafter, initialise
from dflash_train.drafter.spec import SLIDING, DrafterSpec
from dflash_train.licences import decide
from dflash_train.released.read import SHARED, Released, read_released
from dflash_train.types import TargetInfo

RECORD = "init_from.json"
CONV, SELECTOR = ("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")
# Of the target alone, or no property of the function.
NOT_COMPARED = ("max_position_embeddings", "num_target_layers")


@dataclass(kw_only=True)
class Start:
    """A released drafter and what this run makes of it. spec: the released one's own."""

    released: Released
    spec: DrafterSpec
    notes: list[str]

    def check(self, spec: DrafterSpec, info: TargetInfo) -> None:
        """Raise ValueError unless `spec`, resolved against the target, keeps the released drafter's function at step 0."""
        name = self.released.name
        for field, mine, theirs in [
            ("hidden_size", self.spec.hidden_size, info.hidden_size),
            ("vocab_size", self.spec.vocab_size, info.vocab_size),
            ("num_target_layers", self.released.config.get("num_target_layers", info.num_layers), info.num_layers),
        ]:
            if mine != theirs:
                raise ValueError(
                    f"drafter.init_from = {name}: {field} {mine}, the target {info.path} has {theirs}; it was made for another target"
                )
        expected = asdict(self.spec) | {k: getattr(spec, k) for k in ("block_size", *NOT_COMPARED)}
        if not self.spec.conv_kernel_size:
            expected |= {k: getattr(spec, k) for k in CONV}
        if not self.spec.selector_rank:
            expected |= {k: getattr(spec, k) for k in SELECTOR}
        if spec.num_hidden_layers > self.spec.num_hidden_layers:
            expected |= {"num_hidden_layers": spec.num_hidden_layers, "layer_types": spec.layer_types}
            if SLIDING in spec.layer_types and self.spec.sliding_window is None:
                expected["sliding_window"] = spec.sliding_window
        differ = DrafterSpec(**expected).differences(spec)
        if differ:
            raise ValueError(
                f"drafter.init_from = {name}: with this recipe and target the drafter would differ from it ({'; '.join(differ)}), and a recipe "
                "cannot say otherwise; start from a drafter of this target"
            )

    def load(self, drafter: Drafter, seed: int) -> dict[str, torch.Tensor]:
        """Fill a drafter: released weights, and what is new so that it changes nothing. Returns the folder's copies of the target's tensors."""
        tensors, shared = self.released.tensors(self.spec)
        initialise(drafter, seed)
        own = dict(drafter.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            for n in range(self.spec.num_hidden_layers, drafter.spec.num_hidden_layers):
                # A new layer adds nothing to the residual until it has learned; both matrices have a gradient at zero.
                own[f"layers.{n}.self_attn.o_proj.weight"].zero_()
                own[f"layers.{n}.mlp.down_proj.weight"].zero_()
        return shared

    def check_shared(self, shared: dict[str, torch.Tensor], embedding_VH: torch.Tensor, head_VH: torch.Tensor) -> None:
        """Raise ValueError where the folder's own embedding or head is not the target's, which is what will be used."""
        theirs = {"embedding": embedding_VH, "head": head_VH}
        for name, tensor in shared.items():
            target = theirs[SHARED[name]]
            if tensor.shape != target.shape or not torch.equal(tensor, target.detach().to(tensor.device, tensor.dtype)):
                raise ValueError(
                    f"drafter.init_from = {self.released.name}: its {name} is not the target's {SHARED[name]}; our drafters have none of their own. "
                    "Start from a drafter of this very target"
                )

    def write(self, folder: Path, weights: str) -> None:
        """Record where the run began. weights: hash of the released tensors."""
        r = self.released
        record = {"name": r.name, "revision": r.revision, "license": r.license, "architecture": r.architecture}
        record |= {"format": r.format, "weights": weights}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def derive(recipe: Recipe) -> tuple[Recipe, Start | None]:
    """The recipe with every knob of `drafter` that it leaves open taken from `drafter.init_from`; unchanged without one.

    Raises ValueError for a licence that forbids derivatives, for knobs that contradict the released drafter and for what it leaves open.
    """
    own = recipe.drafter
    if own.init_from is None:
        if own.init_revision:
            raise ValueError(
                f"drafter.init_revision = {own.init_revision}: has no effect without drafter.init_from; set it, or leave this out"
            )
        return recipe, None
    released = read_released(own.init_from, own.init_revision)
    decide(
        [released.licence], recipe.export.license, owned=recipe.export.owned
    )  # before anything is read that takes long
    given = {name.partition(".")[2] for name in recipe.given if name.startswith("drafter.")}
    values, spec, notes = _lay_over(released, own, given)
    drafter = dataclasses.replace(own, **values)
    where = f"drafter.init_from = {released.name}"
    validate_drafter(drafter, where)
    derived = dataclasses.replace(recipe, drafter=drafter)
    derived.given, derived.notes = recipe.given, recipe.notes
    return derived, Start(released=released, spec=spec, notes=notes)


def _lay_over(released: Released, own: DrafterConfig, given: set[str]) -> tuple[dict[str, Any], DrafterSpec, list[str]]:
    """(knobs, the released spec, notes): what is given over what was released."""
    said = {k: getattr(own, k) for k in given if getattr(own, k) is not None}
    if "sliding_window" in given:
        said["sliding_window"] = own.sliding_window  # null is a value: full attention
    notes = [f"{released.name}: {note}" for note in released.notes]
    filled: dict[str, Any] = {"num_target_layers": released.config.get("num_target_layers", 0)}
    for knob, why in released.unstated.items():
        if knob in said:
            filled[knob] = said[knob]
        elif knob not in released.config:
            raise ValueError(f"drafter.init_from = {released.name}: set drafter.{knob}; {why}")
        elif knob == "sliding_window":
            raise ValueError(
                f"drafter.init_from = {released.name}: set drafter.sliding_window to the window it was trained with, or to null for none; {why}"
            )
    if filled.get("sliding_window") is not None and "sliding_window" in released.unstated:
        filled |= {
            "use_sliding_window": True,
            "layer_types": [SLIDING] * int(released.config.get("num_hidden_layers") or 0),
        }
    if "is_causal" in filled and released.config.get("is_causal") != filled["is_causal"]:
        notes.append(
            f"{released.name}: drafter.is_causal = {filled['is_causal']} is not what the reference computes from it; step 0 is close to it, not equal"
        )
    if not released.config.get("num_target_layers"):
        # only the target knows: a number that every id fits, replaced by `Start.check`
        filled["num_target_layers"] = max(released.config["dflash_config"].get("target_layer_ids") or [0]) + 2
    spec = released.spec(**filled)
    values: dict[str, Any] = {k: v for k, v in asdict(spec).items() if hasattr(own, k)}
    values |= {k: list(values[k]) for k in ("target_layer_ids", "layer_types")}
    free = set()
    if not spec.conv_kernel_size:
        free |= set(CONV)
    if not spec.selector_rank:
        free |= set(SELECTOR)
    for knob in free:
        values[knob] = getattr(own, knob)
    if values["conv_kernel_size"] and not spec.conv_kernel_size:
        notes.append(
            f"{released.name} has no convolution: a new one begins as the identity (drafter.conv_kernel_size=0 leaves it out)"
        )
    if values["selector_rank"] and not spec.selector_rank:
        notes.append(
            f"{released.name} has no selector: a new one begins silent (drafter.selector_rank=0 leaves it out)"
        )
    if said.get("num_hidden_layers", 0) > spec.num_hidden_layers:
        _more_layers(said, values, spec, released.name, notes)
        free |= {"num_hidden_layers", "layer_types", "sliding_window"}
    if said.get("block_size", spec.block_size) != spec.block_size:
        values["block_size"] = said["block_size"]
        free.add("block_size")
        more = f"; slots from {spec.block_size} on were never trained" if said["block_size"] > spec.block_size else ""
        notes.append(f"{released.name} was trained with blocks of {spec.block_size}, here {said['block_size']}{more}")
    wrong = [
        f"drafter.{k} = {said[k]}, the released drafter has {values[k]}"
        for k in sorted(said)
        if k in values and k not in free and said[k] != values[k]
    ]
    if wrong:
        raise ValueError(
            f"drafter.init_from = {released.name} is contradicted by the recipe: {'; '.join(wrong)}. Leave these knobs out, or start from another"
        )
    return values, spec, notes


def _more_layers(said: dict[str, Any], values: dict[str, Any], spec: DrafterSpec, name: str, notes: list[str]) -> None:
    """Layers behind the released ones: of the kinds given, else of the kind of its last."""
    total, have = said["num_hidden_layers"], list(spec.layer_types)
    kinds = said.get("layer_types") or have + [have[-1]] * (total - len(have))
    if list(kinds[: len(have)]) != have:
        raise ValueError(
            f"drafter.layer_types = {kinds}: the first {len(have)} layers are those of {name}, {have}; further ones come behind them"
        )
    window = values["sliding_window"]
    if window is None and SLIDING in kinds[len(have) :]:
        window = said.get("sliding_window")
    elif said.get("sliding_window", window) != window:
        raise ValueError(
            f"drafter.sliding_window = {said['sliding_window']}: {name} has {window}, and there is one window for all layers"
        )
    values |= {"num_hidden_layers": total, "layer_types": list(kinds), "sliding_window": window}
    notes.append(
        f"{name} has {len(have)} layers; {total - len(have)} more come behind them, whose outputs begin at zero"
    )
