"""A drafter's pass that is recorded once and replayed trains what the plain one trains. Here what is replayed is run again; tests/gpu records it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import toys

from dflash_train.build import drafter_recorded
from dflash_train.config.schema import EngineConfig, EngineKind
from dflash_train.drafter.recorded import ALIGNED, Recorded, RecordedDraft, recorded_weights


def again(body: Callable[[], None]) -> Callable[[], None]:
    body()
    return body


def refused(body: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted\nmore of it")


def stream(rows: int, micro: int):
    made = [toys.document(30, slice(4 + i, 26 - i), name=f"d{i}", seed=i) for i in range(7)]
    return toys.stream_of(made, global_batch_size=rows, micro_batch_size=micro)


def trained(rows: int, micro: int, record: Callable | None, spec: dict):
    step, passes = toys.toy_step(**spec), []
    if record is not None:
        step.recorded = RecordedDraft(step.drafter, step.hidden, record)
    step.drafter.register_forward_hook(lambda *_: passes.append(1))
    engine, logged = toys.train_steps(step, stream(rows, micro), 4)
    return logged, engine.gather(), len(passes)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("rows", "micro", "plain_passes"), [(4, 1, 0), (4, 2, 0), (6, 2, {1: 0, 2: 4})], ids=["4 by 1", "4 by 2", "6 by 2"]
)
@pytest.mark.parametrize("spec", [{}, toys.V1, {"sliding_window": 9}], ids=["v2", "v1", "window"])
def test_what_is_replayed_trains_what_is_run(processes, rows, micro, plain_passes, spec):
    """Six rows on two ranks are a micro-batch of two and one of one, which is run as before."""
    args = rows, micro
    if processes == 1:
        (plain, saved, _), (replayed, also, passes) = trained(*args, None, spec), trained(*args, again, spec)
    else:
        (plain, saved, _), *_ = toys.run_ranks(trained, processes, *args, None, spec)
        (replayed, also, passes), *_ = toys.run_ranks(trained, processes, *args, again, spec)
    assert replayed == plain
    assert passes == (plain_passes if isinstance(plain_passes, int) else plain_passes[processes])
    for name, weight in saved.weights.items():
        assert torch.equal(weight, also.weights[name]), name
    assert plain[0]["base_loss"] != plain[-1]["base_loss"]


def test_what_cannot_be_recorded_is_run_and_said_once(capsys):
    plain, saved, _ = trained(4, 1, None, {})
    run, also, passes = trained(4, 1, refused, {})
    assert run == plain and passes == 16
    assert all(torch.equal(weight, also.weights[name]) for name, weight in saved.weights.items())
    assert capsys.readouterr().out == "note: the drafter is run without CUDA graphs: operation not permitted\n"


def test_gradients_are_in_memory_of_their_own_and_a_stale_one_is_refused():
    weight, other = (torch.nn.Parameter(torch.full((n,), 2.0)) for n in (3, ALIGNED + 1))
    leaves = [torch.nn.Parameter(p.detach()) for p in (weight, other)]
    recorded = Recorded(lambda x: x * leaves[0].sum() * leaves[1].sum(), leaves, again)
    for x in (torch.ones(2), torch.full((2,), 3.0)):
        recorded([x], [weight, other]).sum().backward()
    assert weight.grad.tolist() == [8.0 * 2 * (ALIGNED + 1)] * 3 and other.grad.tolist() == [8.0 * 6] * (ALIGNED + 1)
    assert all(leaf.grad is None for leaf in leaves)
    first = recorded([torch.ones(2)], [weight, other])
    recorded([torch.ones(2)], [weight, other])
    with pytest.raises(RuntimeError, match="another forward"):
        first.sum().backward()
    assert recorded([torch.ones(5)], [weight, other]) is None


def test_a_small_drafter_that_is_whole_is_recorded():
    small, large = toys.toy_spec(), toys.toy_spec(intermediate_size=1 << 20)
    codebooks = toys.toy_spec(selector_rank=1 << 20)
    assert drafter_recorded(EngineConfig(), small) and drafter_recorded(EngineConfig(kind=EngineKind.ddp), codebooks)
    assert not drafter_recorded(EngineConfig(), large)
    assert not drafter_recorded(EngineConfig(cuda_graphs=False), small)
    assert not drafter_recorded(EngineConfig(kind=EngineKind.fsdp2), small)


def test_only_what_hidden_states_depend_on_is_counted():
    step = toys.toy_step()
    codebooks = sum(p.numel() for p in step.drafter.candidate_selector.parameters())
    assert recorded_weights(step.drafter.spec) == sum(p.numel() for p in step.drafter.parameters()) - codebooks
