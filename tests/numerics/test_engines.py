"""Every engine trains what one process trains, skips what no rank may take, and continues from the state of any other."""

from __future__ import annotations

import importlib.util
import math
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys

from dflash_train import ranks
from dflash_train.config.schema import EngineKind, ReducePrecision
from dflash_train.engine.guard import Skip
from dflash_train.metrics import MetricWindow
from dflash_train.types import LossReport, Saved

STEPS, HALF = 4, 2
TORCH = [("ddp", False), ("fsdp2", False)]
DEEPSPEED = [(f"deepspeed_zero{stage}", offload) for stage in (1, 2) for offload in (False, True)]
no_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
every_engine = pytest.mark.parametrize(
    "engine",
    [*TORCH, *(pytest.param(engine, marks=no_deepspeed) for engine in DEEPSPEED)],
    ids=lambda engine: engine[0] + ("-offload" if engine[1] else ""),
)
# name -> rows per step, rows per micro-batch, changes to the drafter. Two ranks: uneven shares, a rank without a row, other numbers of micro-batches.
CUTS = {"2 x 2": (4, 1, {}), "2 x 1": (4, 2, {}), "3 rows": (3, 1, {}), "1 row": (1, 1, {}), "v1": (4, 1, toys.V1)}


def stream(rows: int = 4, micro: int = 1):
    """Rows of very different weight: one has a single supervised slot, one has no legal anchor; an epoch's last step has one row only."""
    spans = [slice(4, None), slice(20, 22), slice(2, 9), slice(11, 12), slice(10, 30)]
    made = [toys.document(30, spans[i % 5], name=f"d{i}", seed=i) for i in range(5)]
    return toys.stream_of(made, global_batch_size=rows, micro_batch_size=micro)


def trained(
    engine: tuple[str, bool],
    rows: int,
    micro: int,
    spec: dict,
    *,
    saved: Saved | None = None,
    travels: ReducePrecision = ReducePrecision.float32,
):
    """What was logged of each step, the state after half of them and after all; with `saved` only the second half is done, from there."""
    step, data, logged, window = toys.toy_step(**spec), stream(rows, micro), [], MetricWindow()
    kind, offload = engine
    micro_batches = data.micro_batches_per_rank(ranks.world_size())
    made = toys.toy_engine(step, micro_batches, kind=EngineKind(kind), offload=offload, reduce_precision=travels)
    half = saved
    if saved is not None:
        made.restore(saved)
    for n in range(0 if saved is None else HALF, STEPS):
        toys.train_step(made, data, n, window)
        logged.append({"grad_norm": float(made.guard.norm), **window.report()})
        if n == HALF - 1:
            half = made.gather()
    return SimpleNamespace(logged=logged, half=half, end=made.gather(), engine=made)


def poisoned(engine: tuple[str, bool], most_in_a_row: int, travels: ReducePrecision = ReducePrecision.float32):
    """Five steps. Not finite: the loss of one of rank 1's micro-batches in the second, the gradient of rank 0's in the third alone."""
    kind, offload = engine
    step, data, window, taken = toys.toy_step(), stream(), MetricWindow(), []
    data.micro_batches_per_rank(ranks.world_size())
    more = {"offload": offload, "most_in_a_row": most_in_a_row, "reduce_precision": travels}
    made = toys.toy_engine(step, 2, kind=EngineKind(kind), **more)
    for n in range(5):

        def change(i: int, loss: torch.Tensor, n: int = n) -> torch.Tensor:
            if (n, ranks.rank(), i) == (1, 1, 1):
                return loss * torch.nan
            return loss + (loss * 0).sqrt() if (n, ranks.rank(), i) == (2, 0, 0) else loss

        taken.append(toys.train_step(made, data, n, window, change=change))
    return [bool(t) for t in taken], made.guard.report(5), window.report(), made.gather()


def evaluated(made: Any) -> float | None:
    """A figure that rank 0 works out alone."""
    batch = next(stream().micro_batches(0, 0, 1))
    with made.whole() as step:
        if ranks.is_rank0():
            return float(step.score(batch, step.target.read(batch))["base_nll_M"].detach().sum())
    return None


def share_held(made: Any) -> float:
    """Elements of weights and moments in this rank's memory between steps, of all there are."""
    kept = [p.to_local() for _, p in made.parameters()]
    kept += [state[kind] for state in made.optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")]
    return sum(t.untyped_storage().size() // 4 for t in kept) / (3 * sum(p.numel() for _, p in made.parameters()))


def suite(engines: list[tuple[str, bool]], half: Saved) -> dict:
    """Everything below, on one rank of two: an engine -> its results."""
    found = {}
    for engine in engines:
        cuts = {name: trained(engine, *cut) for name, cut in CUTS.items()}
        figure = evaluated(cuts["2 x 2"].engine)
        held = share_held(cuts["2 x 2"].engine) if engine == ("fsdp2", False) else None
        for cut in cuts.values():
            del cut.engine
        rounded = trained(engine, 4, 1, {}, travels=ReducePrecision.bfloat16)
        del rounded.engine
        found[engine] = SimpleNamespace(
            cuts=cuts,
            figure=figure,
            held=held,
            continued=trained(engine, 4, 1, {}, saved=half).end,
            rounded=rounded,
            skipped=poisoned(engine, 10),
            skipped_in_bf16=poisoned(engine, 10, ReducePrecision.bfloat16),
            stopped=poisoned(engine, 2),
        )
    return found


@cache
def one_process(rows: int, spec: tuple) -> Any:
    return trained(("single", False), rows, 4, dict(spec))


@cache
def all_engines(engines: tuple) -> list[dict]:
    return toys.run_ranks(suite, 2, list(engines), one_process(4, ()).half)


def results(engine: tuple[str, bool]) -> tuple[Any, Any]:
    """Those of both ranks."""
    first, second = all_engines(tuple(TORCH if engine in TORCH else DEEPSPEED))
    return first[engine], second[engine]


def assert_same(a: Saved, b: Saved) -> None:
    for kind in ("weights", "moments"):
        one, other = getattr(a, kind), getattr(b, kind)
        assert one.keys() == other.keys() and one
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6, msg=f"{kind} {name}")


@every_engine
@pytest.mark.parametrize("cut", CUTS)
def test_two_ranks_are_one_process(engine, cut):
    rows, _, spec = CUTS[cut]
    whole = one_process(rows, tuple(spec.items()))
    for result in results(engine):
        for a, b in zip(result.cuts[cut].logged, whole.logged, strict=True):
            assert a == pytest.approx(b, rel=2e-5, abs=1e-6)
    first, second = results(engine)
    assert_same(first.cuts[cut].half, whole.half)  # taken before the other half of the steps: a copy
    assert_same(first.cuts[cut].end, whole.end)
    assert second.cuts[cut].end is None
    assert all(not torch.equal(w, whole.half.weights[n]) for n, w in first.cuts[cut].end.weights.items())


@every_engine
def test_gradients_may_travel_in_bf16(engine):
    """Each is rounded by 2^-8 of itself at most, once on its way out and once in the sum: seen in AdamW's mean, which is a sum of gradients. The
    norm that clips them is that of what arrived."""
    first, second = results(engine)
    exact, rounded = (end.moments for end in (first.cuts["2 x 2"].end, first.rounded.end))
    names = [name for name in exact if name.startswith("exp_avg.")]
    apart = {name: float((rounded[name] - exact[name]).norm() / exact[name].norm().clamp_min(1e-12)) for name in names}
    assert 1e-4 < max(apart.values()) < 2**-6
    norms = [
        [step["grad_norm"] for step in found.logged] for found in (first.rounded, second.rounded, first.cuts["2 x 2"])
    ]
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=2**-6) and norms[0] != norms[2]


def alone(kind: str) -> list[Saved]:
    return [trained((kind, False), 4, 2, {}, travels=travels).end for travels in ReducePrecision]


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("deepspeed_zero2", marks=no_deepspeed)])
def test_where_nothing_travels_nothing_is_rounded(kind):
    (exact, rounded) = toys.run_ranks(alone, 1, kind)[0]
    for name, tensor in exact.moments.items():
        assert torch.equal(tensor, rounded.moments[name])


def compiled_layers(kind: str) -> tuple[Saved, int]:
    """The state after all steps with layers compiled, and the number of graphs: over dense masks and by a backend that a CPU has at once."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    step, data = toys.toy_step(), stream()
    step.fuse = True
    made = toys.toy_engine(step, data.micro_batches_per_rank(ranks.world_size()), kind=EngineKind(kind))
    for n in range(STEPS):
        toys.train_step(made, data, n)
    return made.gather(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_compiled_layers_train_what_plain_ones_do_and_share_their_graphs(kind):
    saved, graphs = toys.run_ranks(compiled_layers, 2, kind, seconds=300)[0]
    assert_same(saved, one_process(4, ()).end)
    assert graphs == 4  # the context, the first layer, all others, the last norm


@every_engine
def test_a_run_is_continued_from_the_state_of_another_engine(engine):
    assert_same(results(engine)[0].continued, one_process(4, ()).end)


@every_engine
def test_one_rank_alone_can_evaluate(engine):
    assert [r.figure for r in results(engine)] == [pytest.approx(evaluated(one_process(4, ()).engine)), None]


def good_steps(*numbers: int) -> tuple[Saved, dict]:
    """One process that does these steps only."""
    engine, window = toys.toy_engine(toys.toy_step(), 4), MetricWindow()
    for n in numbers:
        toys.train_step(engine, stream(), n, window)
    return engine.gather(), window.report()


@every_engine
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(engine):
    state, means = good_steps(0, 3, 4)
    for result in results(engine):
        taken, (skips, stopped), logged, _ = result.skipped
        assert taken == [True, False, False, True, True] and stopped is None
        assert skips == [Skip(step=2, losses=[(1, 1)]), Skip(step=3, losses=[])]
        assert logged == pytest.approx(means, rel=2e-5, abs=1e-6)
    saved = results(engine)[0].skipped[3]
    assert_same(saved, state)
    assert {float(v) for n, v in saved.moments.items() if n.startswith("step.")} == {3.0}


@every_engine
def test_what_is_not_finite_is_skipped_where_gradients_travel_in_bf16_too(engine):
    for result in results(engine):
        taken, (skips, _), logged, _ = result.skipped_in_bf16
        assert taken == [True, False, False, True, True]
        assert skips == [Skip(step=2, losses=[(1, 1)]), Skip(step=3, losses=[])]
        assert all(math.isfinite(value) for value in logged.values())
    saved = results(engine)[0].skipped_in_bf16[3]
    assert all(tensor.isfinite().all() for tensor in [*saved.weights.values(), *saved.moments.values()])
    assert {float(v) for n, v in saved.moments.items() if n.startswith("step.")} == {3.0}


@every_engine
def test_after_too_many_in_a_row_nothing_is_taken_any_more(engine):
    state, _ = good_steps(0)
    for result in results(engine):
        taken, (skips, stopped), _, _ = result.stopped
        assert taken == [True, False, False, False, False] and stopped == 3
        assert [skip.step for skip in skips] == [2, 3]
    assert_same(results(engine)[0].stopped[3], state)


class Tokens(torch.nn.Module):
    """A step whose supervised tokens c have the losses (theta - c)^2, theta being 0 at first."""

    def __init__(self):
        super().__init__()
        self.drafter = torch.nn.Module()
        self.drafter.theta = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, tokens, features, total_weight):
        losses = (self.drafter.theta - torch.tensor(tokens)) ** 2
        pair = torch.stack([losses.detach().sum(), torch.tensor(float(len(tokens)))])
        return LossReport(losses.sum() / total_weight, {"loss": pair})


def mean_of_tokens(shares: list[list[list[float]]]) -> tuple[float, float]:
    """(logged loss, theta after a step), given the tokens of each micro-batch of each rank."""
    engine, window = toys.toy_engine(Tokens(), len(shares[0])), MetricWindow()
    mine = shares[ranks.rank()]
    for i, tokens in enumerate(mine):
        with engine.accumulate(last=i == len(mine) - 1):
            report = engine.forward(tokens, None, torch.tensor(4.0))
            engine.backward(report.loss)
        window.add(report.sums)
    window.end_step(engine.update(1e-2))
    return window.report()["loss"], float(engine.step.drafter.theta.detach())


def means_of_tokens(cases):
    return [mean_of_tokens(case) for case in cases]


def test_the_loss_is_a_mean_over_tokens_not_over_ranks_or_micro_batches():
    """One token of loss 4 and three of loss 1 have the mean 1.75, not 2.5."""
    four, one = 2.0, [1.0, -1.0, 1.0]
    cuts = [
        [[[four]], [one]],
        [[[four, one[0]]], [one[1:]]],
        [[[four], [one[0]]], [one[1:], []]],
        [[[], [four]], [one, []]],
    ]
    (loss, theta) = mean_of_tokens([[[four, *one]]])
    assert loss == 1.75 and theta != 0
    for found in toys.run_ranks(means_of_tokens, 2, cuts):
        for case in found:
            assert case == pytest.approx((loss, theta), abs=1e-6)


def test_fsdp2_keeps_half_of_everything_on_each_of_two_ranks():
    for result in results(("fsdp2", False)):
        assert 0.45 < result.held < 0.55
