"""The train-to-serve alarm: decode held-out prompts from an exported folder with z-lab's independent `dflash` client, and hold every
round against what the trained drafter is expected to gain there. The only file importing `dflash`.

Both see the same text and the same anchors, so one differing round says something: nothing but a near tie of the drafter may part them in
fp32; in 16 bits rounding parts some in either direction, a fault only downwards.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_train import disk
from dflash_train.acceptance import Tau
from dflash_train.build import OpenedRun
from dflash_train.config.load import CheckFailed
from dflash_train.config.schema import ClientCheck, EvaluateConfig
from dflash_train.drafter.decode import DraftSession
from dflash_train.drafter.model import Drafter
from dflash_train.drafter.spec import DrafterSpec, from_hf_config
from dflash_train.folder import (
    hash_weights,
    load_drafter_folder,
    normalised,
    read_config,
    read_headers,
    read_record,
    tensor_faults,
)
from dflash_train.generation.single import speculative_decode
from dflash_train.kernels.head import transform_logits
from dflash_train.method import DraftStep
from dflash_train.target.cache import make_cache
from dflash_train.target.hf import HFTarget
from dflash_train.types import Prompt
from dflash_train.walk import answered, at_anchors

INSTALL = "pip install --no-deps dflash==0.1.0"  # its pins clash with ours; what it needs to decode is here already
# Of the larger of 1 and the best score. Another order of summation moved scores by up to 9e-7 of it, in 243 blocks of the demo's drafter;
# deeper ones round more often.
NEAR_TIE = 1e-4
GAP_16_BIT = 0.03
SIGNIFICANT = 3.0  # standard errors, so that a single unlucky round of a short text is no alarm
SYMPTOMS = """what to look at:
  almost every round short, from the first of each prompt: mask_token_id, target_layer_ids (0-based, outputs, off by one?), the convolution's
    taps, a codebook under another name, tensors that the client did not load
  rounds short only behind some length of text: rope_theta, sliding_window, layer_types, positions
  the first drafted token right, the next wrong: is_causal, the selector (predecessor and successor codebook exchanged), block_size
  all rounds a little short: precision (a drafter in 16 bits that was trained in fp32, rounded rotary frequencies), output_multiplier,
    final_logit_softcapping, input_embedding_scale
  nothing of these: the client's version, and whether it ran the same target (revision, precision) as the training"""


class Answer(NamedTuple):
    """What a prompt was answered, its stop token included, and the tokens gained per round."""

    token_ids: list[int]
    rounds: list[int]


@dataclass(kw_only=True)
class Parted:
    """A round that gained something else than the trained drafter gains there. anchor: index in prompt and answer."""

    id: str
    round: int
    anchor: int
    gained: int
    expected: int
    near_tie: bool


@dataclass(kw_only=True)
class GapReport:
    """What became of a check. decoder: who decoded; independent: false where that was our own code; why_own: why then; tau: what it gained;
    expected: what the trained drafter gains in the same rounds; differences: what the folder says or holds otherwise than training;
    weights: hash of the trained ones."""

    folder: str
    decoder: str
    independent: bool
    why_own: str | None
    prompts: int
    in_fp32: bool
    tau: Tau
    expected: Tau
    parted: list[Parted]
    differences: list[str]
    weights: str
    seconds: float

    @property
    def gap(self) -> bool:
        return bool(self.differences) or (self._rounds_differ if self.in_fp32 else self._taus_differ)

    @property
    def _rounds_differ(self) -> bool:
        return any(not p.near_tie for p in self.parted)

    @property
    def _taus_differ(self) -> bool:
        lost = [p.expected - p.gained for p in self.parted]
        total = abs(sum(lost))
        return total > max(GAP_16_BIT * self.expected.tokens, SIGNIFICANT * math.sqrt(sum(x * x for x in lost)))

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tau": self.tau.as_dict(),
            "expected": self.expected.as_dict(),
            "near_ties": sum(p.near_tie for p in self.parted),
            "gap": self.gap,
        }

    def write(self, output_dir: Path) -> None:
        """<output_dir>/client.json."""
        output_dir.mkdir(parents=True, exist_ok=True)
        disk.replace(output_dir / "client.json", [json.dumps(self.as_dict(), indent=1).encode()])

    def metrics(self) -> dict[str, float]:
        """What is logged with the run."""
        values = {"client/parted_rounds": len(self.parted), "client/gap": float(self.gap)}
        if self.tau.rounds:
            values |= {"client/tau": self.tau.value, "client/expected_tau": self.expected.value}
        return values

    def line(self) -> str:
        """The result in one line."""
        own = "" if self.independent else f"; NOT an independent check, our own loader and loop decoded: {self.why_own}"
        if not self.tau.rounds:
            return f"client: no prompt was answered with more than one token, so nothing is known of {self.folder}{own}"
        ties = sum(p.near_tie for p in self.parted)
        apart = f"{len(self.parted)} rounds parted" + (f", {ties} of them at near ties" if self.in_fp32 else "")
        verdict = "TRAIN/SERVE GAP" if self.gap else "no train/serve gap"
        return (
            f"client: {self.decoder} decoded {self.prompts} prompts from {self.folder}: tau {_counted(self.tau)}, expected "
            f"{_counted(self.expected)} at the same anchors, {apart}: {verdict} ({self.seconds:.1f} s){own}"
        )

    def alarm(self) -> str:
        """What a person needs to find the fault."""
        rule = "in fp32 only near ties may part" if self.in_fp32 else f"in 16 bits {GAP_16_BIT:.0%} may part"
        wrong = [p for p in self.parted if not p.near_tie]
        lines = [
            f"train/serve gap: {self.decoder} gains tau {_counted(self.tau)} from {self.folder}, the trained drafter {_counted(self.expected)} "
            f"at the same anchors; {rule}"
        ]
        if wrong:
            ids = list(dict.fromkeys(p.id for p in wrong))
            first = wrong[0]
            lines.append(
                f"{len(wrong)} of {self.tau.rounds} rounds differ, of the prompts {', '.join(ids[:6])}{', ...' if len(ids) > 6 else ''}; "
                f"first: {first.id}, round {first.round}, anchor at token {first.anchor}: gained {first.gained}, expected {first.expected}"
            )
        lines += [f"the folder is not what was trained: {text}" for text in self.differences]
        return "\n".join([*lines, SYMPTOMS])


def _counted(tau: Tau) -> str:
    return f"{tau.value:.2f} ({tau.tokens}/{tau.rounds})" if tau.rounds else "- (0/0)"


# --- the client ---------------------------------------------------------------------------------------------------


def installed() -> str | None:
    """Version of z-lab's client, None where it is not installed (another package may bear the name)."""
    try:
        there = importlib.util.find_spec("dflash") and importlib.util.find_spec("dflash.model")
        return version("dflash") if there else None
    except (ImportError, PackageNotFoundError):
        return None


def require_client(config: EvaluateConfig, *, prompts: bool) -> None:
    """Raise ValueError where evaluate.client = required and there is no client, or nothing that it could decode."""
    if config.client is not ClientCheck.required:
        return
    if installed() is None:
        raise ValueError(
            f"evaluate.client = required: z-lab's dflash is not installed; {INSTALL}, or set evaluate.client=auto"
        )
    if not prompts:
        raise ValueError(
            "evaluate.client = required: there are no held-out prompts to decode; name a file in data.heldout, or set evaluate.client=auto"
        )


def client_decode(
    folder: Path, target_model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int, stop_ids: set[int]
) -> list[Answer]:
    """Greedy answers of the target, drafted by z-lab's client from an exported folder, in the target's precision.

    Raises CheckFailed if the client leaves out a tensor of the folder or misses one.
    """
    import dflash.model

    config = normalised(read_config(folder))
    spec = from_hf_config(config)
    if bool(spec.selector_rank) != bool(spec.conv_kernel_size):
        raise NotImplementedError("it knows drafters with convolution and selector, and those with neither")
    kind = dflash.model.DFlash2DraftModel if spec.selector_rank else dflash.model.DFlashDraftModel
    client, loaded = kind.from_pretrained(folder, dtype=target_model.dtype, output_loading_info=True)
    left = {name: loaded[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if loaded[name]}
    if left:
        raise CheckFailed(f"{folder}: z-lab's dflash {installed()} does not load it completely: {left}")
    device = next(target_model.parameters()).device
    client = client.to(device).eval()
    answers, starts = [], []
    # The client tells rounds only where it also times them, on CUDA; where each forward of the target begins says the same.
    handle = target_model.register_forward_pre_hook(
        lambda module, args, named: starts.append(int(named["position_ids"][0, 0])), with_kwargs=True
    )
    try:
        for prompt in prompts:
            starts.clear()
            ids = torch.tensor([prompt], device=device)
            whole = client.spec_generate(target_model, ids, max_new_tokens, sorted(stop_ids))[0].tolist()
            bounds = [*starts[1:], len(whole) - 1]  # the first forward reads the prompt
            answers.append(Answer(whole[len(prompt) :], [b - a for a, b in zip(bounds, bounds[1:], strict=False)]))
    finally:
        handle.remove()
    return answers


def own_decode(
    folder: Path, like: DraftStep, prompts: list[list[int]], max_new_tokens: int, stop_ids: set[int]
) -> list[Answer]:
    """The same by our own loader and loop, with the target of `like`."""
    spec, tensors, _ = load_drafter_folder(folder)
    step = rebuilt(like, spec, tensors)
    decoded = [speculative_decode(step, prompt, max_new_tokens, stop_ids) for prompt in prompts]
    return [Answer(one.token_ids, one.rounds) for one in decoded]


def rebuilt(like: DraftStep, spec: DrafterSpec, tensors: dict[str, torch.Tensor]) -> DraftStep:
    """A drafter with these weights, in fp32, on the target of `like`; layers are captured anew where they are others."""
    drafter = Drafter(spec)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    target = like.target
    assert isinstance(target, HFTarget)
    if tuple(target.layer_ids) != spec.target_layer_ids:
        target = HFTarget(target.model, target.info, spec.target_layer_ids)
    return DraftStep(drafter.to(target.device), target, like.objective, dtype=like.dtype).eval()


# --- the check ----------------------------------------------------------------------------------------------------


def shared_over_domains(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first prompts of each domain in turn, `count` altogether; a function of the file alone."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    longest = max(map(len, domains.values()), default=0)
    turns = [own[i] for i in range(longest) for _, own in sorted(domains.items()) if i < len(own)]
    return turns[:count]


def gap_alarm(
    folder: Path,
    trained: DraftStep,
    prompts: list[Prompt],
    config: EvaluateConfig,
    stop_ids: set[int],
    recorded_weights: str | None = None,
) -> GapReport:
    """Decode evaluate.client_prompts of the prompts from the folder, and compare round by round with `trained`: the drafter as training has
    it, with the weights rounded as they were exported. recorded_weights: hash that the folder's weights must have, where `trained` has
    nothing but those.

    Where the client is not installed, or cannot run this drafter or target, evaluate.client = auto decodes with our own code and says so.
    """
    require_client(config, prompts=bool(prompts))
    began = time.perf_counter()
    some = shared_over_domains(prompts, config.client_prompts)
    state = trained.drafter.state_dict()
    differences, loads = folder_differences(folder, trained.drafter.spec, state, recorded_weights)
    answers, decoder, why_own = _decode(folder, trained, some, config, stop_ids) if loads else ([], "no decoder", None)
    parted, tau, expected = [], Tau(), Tau()
    in_fp32 = trained.dtype is torch.float32 and trained.target.head_VH.dtype is torch.float32
    for prompt, answer in zip(some[: len(answers)], answers, strict=True):
        walked = _expected_rounds(trained, prompt, answer, config.max_new_tokens, stop_ids)
        parted += _parted(trained, prompt, answer, walked, config.max_new_tokens, in_fp32)
        tau = replace(tau, tokens=tau.tokens + sum(answer.rounds), rounds=tau.rounds + len(answer.rounds))
        expected = replace(expected, tokens=expected.tokens + sum(walked), rounds=expected.rounds + len(walked))
    return GapReport(
        folder=str(folder),
        decoder=decoder,
        independent=why_own is None,
        why_own=why_own,
        prompts=len(some),
        in_fp32=in_fp32,
        tau=tau,
        expected=expected,
        parted=parted,
        differences=differences,
        weights=hash_weights(state),
        seconds=round(time.perf_counter() - began, 2),
    )


def _decode(
    folder: Path, trained: DraftStep, prompts: list[Prompt], config: EvaluateConfig, stop_ids: set[int]
) -> tuple[list[Answer], str, str | None]:
    """(answers, who decoded, why it was our own code or None)."""
    asked = [prompt.token_ids for prompt in prompts]
    arguments = (asked, config.max_new_tokens, stop_ids)
    why_own = f"z-lab's dflash is not installed ({INSTALL})"
    if installed() is not None:
        try:
            return client_decode(folder, trained.target.model, *arguments), f"z-lab's dflash {installed()}", None
        except CheckFailed:
            raise
        except Exception as error:
            # Another's code, at the end of a training: it knows fewer targets than transformers has, and no drafter with only one of
            # convolution and selector; and what it imports may not be there.
            if config.client is ClientCheck.required:
                raise ValueError(
                    f"evaluate.client = required: the client cannot decode {folder} ({_first_line(error)}); set evaluate.client=auto "
                    "to check with our own decoder"
                ) from error
            why_own = f"z-lab's dflash {installed()} cannot ({_first_line(error)})"
    return own_decode(folder, trained, *arguments), "our own decoder", why_own


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def folder_differences(
    folder: Path, spec: DrafterSpec, state: dict[str, torch.Tensor], recorded_weights: str | None = None
) -> tuple[list[str], bool]:
    """(what a folder says or holds otherwise than training, whether it can be loaded at all)."""
    config = normalised(read_config(folder))
    differences = [f"{text} as trained" for text in from_hf_config(config).differences(spec)]
    faults = tensor_faults({name: h.shape for name, h in read_headers(folder).items()}, from_hf_config(config))
    if faults:
        return differences + faults, False
    _, tensors, _ = load_drafter_folder(folder)
    if recorded_weights is not None:
        if hash_weights(tensors) != recorded_weights:
            differences.append("its weights were changed after the export")
        return differences, True
    other = [n for n, t in state.items() if n in tensors and not _same(t, tensors[n])]
    if other:
        differences.append(f"{len(other)} of {len(state)} tensors differ: {', '.join(other[:4])}")
    return differences, True


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.detach().cpu().to(other.dtype), other)


def _expected_rounds(
    step: DraftStep, prompt: Prompt, answer: Answer, max_new_tokens: int, stop_ids: set[int]
) -> list[int]:
    """Tokens that the teacher-forced walk gains from the anchor of each of the answer's rounds."""
    example = answered(prompt, answer.token_ids, "stop" if answer.token_ids[-1] in stop_ids else "length")
    found = at_anchors(step, [example], ends=[len(prompt.token_ids) + max_new_tokens])[0]
    accepted = dict(zip(found.anchors.tolist(), found.path.tolist(), strict=True))
    at, last, gained = len(prompt.token_ids), len(example.token_ids) - 1, []
    for own in answer.rounds:
        gained.append(min(accepted[at] + 1, last - at))
        at += own
    return gained


def _parted(
    step: DraftStep, prompt: Prompt, answer: Answer, expected: list[int], max_new_tokens: int, in_fp32: bool
) -> list[Parted]:
    ids, at, found = prompt.token_ids + answer.token_ids, len(prompt.token_ids), []
    for i, (gained, own) in enumerate(zip(answer.rounds, expected, strict=True)):
        if gained != own:
            slots = min(step.drafter.spec.block_size, len(prompt.token_ids) + max_new_tokens - at)
            # Both drafted alike up to the first slot that one of them had wrong.
            tie = in_fp32 and is_near_tie(step, ids, at, min(gained, own), slots)
            found.append(Parted(id=prompt.id, round=i, anchor=at, gained=gained, expected=own, near_tie=tie))
        at += gained
    return found


@torch.inference_mode()
def is_near_tie(step: DraftStep, ids: list[int], anchor: int, slot: int, slots: int) -> bool:
    """Whether the drafter is undecided at a slot of the block at `anchor`, after the right tokens: the right token and the best other one
    score the same to within NEAR_TIE, or the right one is that close to being among the candidates."""
    spec, target, selector = step.drafter.spec, step.target, step.drafter.candidate_selector
    context = torch.tensor([ids[:anchor]], device=target.device)
    _, features = target.step(context, make_cache(target.model.config), logits_to_keep=1)
    session = DraftSession(step.drafter)
    session.extend(features.features_BTF)
    block = torch.full((1, slots), spec.mask_token_id, device=target.device)
    block[0, 0] = ids[anchor]
    hidden_1H = session.hidden(step.embed(block))[:, slot]
    logits_V = transform_logits(
        (hidden_1H @ target.head_VH.T).float(), spec.output_multiplier, spec.final_logit_softcapping
    )[0]
    right, before = ids[anchor + slot], torch.tensor([ids[anchor + slot - 1]], device=target.device)
    best = logits_V.topk(spec.selector_top_k if selector else 2)
    others_C = best.indices[best.indices != right]
    candidates_1C = torch.cat([others_C, others_C.new_tensor([right])])[None]
    scores_1C = logits_V[candidates_1C]
    if selector:
        scores_1C = selector(hidden_1H, scores_1C, candidates_1C, before)
    between = float((scores_1C[0, -1] - scores_1C[0, :-1].max()).abs())
    outside = max(0.0, float(best.values[-1] - logits_V[right])) if selector else 0.0
    return max(between, outside) <= NEAR_TIE * max(1.0, float(scores_1C.abs().max()))


# --- of an opened export ------------------------------------------------------------------------------------------


def check_source(run: OpenedRun) -> GapReport | None:
    """The check of an export that `evaluate` was given, against the spec and the hash in its own record; written to
    <output_dir>/client.json. None where there is nothing to check: a run or checkpoint, evaluate.client = off, no held-out prompts."""
    config = run.recipe.evaluate
    prompts = run.heldout_prompts() if run.recipe.data.heldout else []
    require_client(config, prompts=bool(prompts))
    if config.client is ClientCheck.off or not prompts or not (run.source / "config.json").is_file():
        return None
    record = read_record(run.source)
    spec, state = run.step.drafter.spec, run.step.drafter.state_dict()
    if "spec" in record:
        trained = _spec_of(record["spec"])
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if not tensor_faults(shapes, trained):  # else config.json is what its tensors say, and the difference is named
            spec = trained
    step = run.step if spec == run.step.drafter.spec else rebuilt(run.step, spec, state)
    report = gap_alarm(run.source, step, prompts, config, run.stop_ids, recorded_weights=record.get("weights"))
    report.write(Path(run.recipe.output_dir))
    return report


def _spec_of(recorded: dict[str, Any]) -> DrafterSpec:
    try:
        lists = {name: tuple(recorded[name]) for name in ("target_layer_ids", "layer_types")}
        return DrafterSpec(**(recorded | lists))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"dflash_train.json: its spec is not one of a drafter ({error}); export the drafter again"
        ) from None
