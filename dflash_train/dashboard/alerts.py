"""What a person should know of a run before reading its curves."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from dflash_train.dashboard.run import CERTIFICATE, EVALUATION, METRICS, UNEXPECTED, Points, RunView

FALL = 0.02  # held-out tau this much below its best, while training goes on rising
SPIKE, BEFORE = 10.0, 20  # a gradient norm so many times the median of as many windows before it
DROPPED, REPEATED, EMPTY = 0.05, 0.30, 0.05
SKIPPED = "train/skipped_steps"  # optimizer steps left out because a gradient was not finite


class Alert(NamedTuple):
    """bad: something is wrong; otherwise something to look at."""

    bad: bool
    title: str
    text: str


def alerts(view: RunView) -> list[Alert]:
    """The run's warnings, the worst first."""
    found: list[Alert] = []
    for judge, file in ((_of_evaluation, EVALUATION), (_of_training, METRICS), (_of_data, CERTIFICATE)):
        try:
            found += judge(view)
        except UNEXPECTED as error:
            view.not_as_written(file, error)
    found += [Alert(False, "Not read", text) for text in view.unreadable]
    return sorted(found, key=lambda alert: not alert.bad)


def part(measured: dict[str, Any], *places: str) -> Any:
    """The first value that is there under one of the dotted places; None if none is (an evaluation need not measure everything)."""
    for place in places:
        value: Any = measured
        for name in place.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            return value
    return None


def _of_evaluation(view: RunView) -> Iterator[Alert]:
    measured = view.measured
    if measured is None:
        return
    if part(measured, "lossless", "losslessness.lossless") is False:
        different = part(measured, "different", "losslessness.different")
        ids = part(measured, "different_ids", "losslessness.different_ids") or []
        yield Alert(
            True,
            "Not lossless",
            f"{different} of the outputs differ from plain decoding beyond a near tie ({_some(ids)}). Speculative decoding must not change a word: "
            "compare the target's precision and attention kernel with what served, and look at these outputs.",
        )
    if part(measured, "train_serve_gap", "walk.train_serve_gap"):
        ids = part(measured, "parted_ids", "walk.parted_ids") or []
        yield Alert(
            True,
            "Train/serve gap",
            f"Decoding took other rounds than the teacher-forced walk on {len(ids)} prompts ({_some(ids)}): what is served is not what was "
            "trained. Check the export (python -m dflash_train.check), block size, mask token and captured layers.",
        )
    repetition = part(measured, "repetition", "repetition.share")
    if repetition is not None and repetition > REPEATED:
        yield Alert(
            False,
            "Repetition",
            f"{repetition:.0%} of the answers' tokens lie inside a repeated 8-gram. Any drafter predicts repetition: tau and speed here are "
            "better than on sound answers. Look at the samples, and at the target's template and sampling.",
        )


def _of_training(view: RunView) -> Iterator[Alert]:
    skipped = [(step, value) for step, value in view.curves.get(SKIPPED, []) if value]
    if skipped:
        yield Alert(
            True,
            "Steps skipped",
            f"{sum(v for _, v in skipped):.0f} optimizer steps had a gradient that was not finite and were skipped, the last by step "
            f"{skipped[-1][0]}. Lower optimizer.lr or optimizer.max_grad_norm if there are more.",
        )
    if view.non_finite:
        name, steps = next(iter(view.non_finite.items()))
        yield Alert(
            True,
            "Not finite",
            f"{', '.join(view.non_finite)}: not finite, {name} at step {steps[0]} first. Lower optimizer.lr, or continue from the last "
            "checkpoint with train.resume=true.",
        )
    fell = fallen(view.curves.get("heldout/walk_tau", []), view.curves.get("train/accept_len", []))
    if fell:
        (at, best), (_, now) = fell
        yield Alert(
            False,
            "Held-out acceptance falls while training rises",
            f"heldout/walk_tau was {best:.3f} at step {at} and is {now:.3f}: the drafter learns its rows by heart. Use more data or fewer "
            "epochs; the best checkpoint is an earlier one.",
        )
    peaks = spikes(view.curves.get("train/grad_norm", []))
    if peaks:
        step, value = peaks[-1]
        yield Alert(
            False,
            "Gradient norm spikes",
            f"{len(peaks)} window{'s' if len(peaks) > 1 else ''} with a norm above {SPIKE:.0f} times the usual, the last {value:.3g} at step "
            f"{step}. Clipping (optimizer.max_grad_norm) bounds what they do; if the loss jumps with them, lower optimizer.lr or look at the rows.",
        )
    empty, batches = view.last("data/skipped_microbatches"), view.last("data/microbatches")
    if empty and batches and empty / batches > EMPTY:
        yield Alert(
            False,
            "Empty micro-batches",
            f"{empty / batches:.0%} of the micro-batches of the last window had nothing to learn. The rows hold little supervised text: look at "
            "data_prep/inspect_data.py.",
        )


def _of_data(view: RunView) -> Iterator[Alert]:
    certificate = view.certificate
    if certificate is not None and certificate["rows"]:
        share = (certificate["rows"] - certificate["kept"]) / certificate["rows"]
        if share > DROPPED:
            reasons = sorted(certificate["dropped"].items(), key=lambda item: -item[1])
            yield Alert(
                False,
                "Rows dropped",
                f"{share:.1%} of the data's rows were not usable: {', '.join(f'{count} {reason}' for reason, count in reasons[:4])}. "
                "data_prep/inspect_data.py shows which.",
            )
    for note in view.notes:
        if note.startswith("WARNING"):
            yield Alert(False, "Who wrote the answers", note.removeprefix("WARNING:").strip())


def fallen(heldout: Points, trained: Points) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """(best, newest) held-out points where the newest two lie FALL below the best and training has risen since; else None."""
    if len(heldout) < 3:
        return None
    best = max(heldout, key=lambda point: point[1])
    since = [value for step, value in heldout if step > best[0]]
    if len(since) < 2 or max(since[-2:]) > best[1] * (1 - FALL):
        return None
    then = [value for step, value in trained if step <= best[0]]
    if not then or trained[-1][1] <= then[-1]:
        return None
    return best, heldout[-1]


def spikes(points: Points) -> Points:
    """Points above SPIKE times the median of the BEFORE points before them."""
    return [
        point
        for i, point in enumerate(points)
        if i >= BEFORE and point[1] > SPIKE * median(value for _, value in points[i - BEFORE : i])
    ]


def _some(ids: list[Any]) -> str:
    named = ", ".join(str(i) for i in ids[:3])
    return f"{named} and {len(ids) - 3} more" if len(ids) > 3 else named
