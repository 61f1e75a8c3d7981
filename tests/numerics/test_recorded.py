"""A drafter's pass that is recorded once and replayed trains what the plain one trains. Here operations are replayed; tests/gpu records them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import toys
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_train import build
from dflash_train.build import drafter_recorded
from dflash_train.config.load import load_recipe
from dflash_train.config.schema import EngineConfig, EngineKind
from dflash_train.drafter.recorded import ALIGNED, Recorded, RecordedDraft, recorded_weights
from dflash_train.kernels.graphs import Body


class Emulated:
    """In place of `kernels.graphs.Graphs`: the operations that a body gave are run again on the same memory, and no Python of it is."""

    def rehearse(self, body: Body) -> str | None:
        body()
        return None

    def record(self, body: Body) -> Body:
        with Operations() as log:
            body()
        kept = list(log.kept)

        def replay() -> None:
            with torch.no_grad():
                for operation, args, kwargs, out in kept:
                    known = {id(x) for x in tree_leaves((args, kwargs))}
                    for old, new in zip(tree_leaves(out), tree_leaves(operation(*args, **kwargs)), strict=True):
                        if isinstance(old, torch.Tensor) and id(old) not in known:
                            old.data.copy_(new)

        return replay


class Operations(TorchDispatchMode):
    """Keeps what is run, but for views, which show what was written anyway."""

    def __init__(self):
        super().__init__()
        self.kept: list[tuple] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)
        if not view:
            self.kept.append((operation, args, kwargs or {}, out))
        return out


class Refused(Emulated):
    def rehearse(self, body: Body) -> str | None:
        return "called a synchronizing operation"


def stream(rows: int, micro: int):
    """Packed documents of other lengths in every row, and more room for blocks than they fill."""
    spans = [(9 + 4 * (i % 3), slice(2 + i % 3, 8 + 2 * (i % 3))) for i in range(28)]
    made = [toys.document(n, span, name=f"d{i}", seed=i) for i, (n, span) in enumerate(spans)]
    return toys.stream_of(
        made, row_length=40, num_anchors=26, global_batch_size=rows, micro_batch_size=micro, pack=True
    )


def trained(rows: int, micro: int, graphs: type | None, spec: dict, dtype: torch.dtype = torch.float32):
    step, passes = toys.toy_step(**spec), []
    step.dtype = dtype
    if graphs is not None:
        step.recorded = RecordedDraft(step.drafter, step.hidden, graphs())
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
        (plain, saved, _), (replayed, also, passes) = trained(*args, None, spec), trained(*args, Emulated, spec)
    else:
        (plain, saved, _), *_ = toys.run_ranks(trained, processes, *args, None, spec)
        (replayed, also, passes), *_ = toys.run_ranks(trained, processes, *args, Emulated, spec)
    assert replayed == plain
    assert passes == (plain_passes if isinstance(plain_passes, int) else plain_passes[processes])
    for name, weight in saved.weights.items():
        assert torch.equal(weight, also.weights[name]), name
    assert plain[0]["base_loss"] != plain[-1]["base_loss"]


def test_what_cannot_be_recorded_is_run_and_said_once(capsys):
    plain, saved, _ = trained(4, 1, None, {})
    run, also, passes = trained(4, 1, Refused, {})
    assert run == plain and passes == 16
    assert all(torch.equal(weight, also.weights[name]) for name, weight in saved.weights.items())
    assert capsys.readouterr().out == "note: the drafter is run without CUDA graphs: called a synchronizing operation\n"


def test_gradients_are_in_memory_of_their_own_and_a_stale_one_is_refused():
    weight, other = (torch.nn.Parameter(torch.full((n,), 2.0)) for n in (3, ALIGNED + 1))
    leaves = [torch.nn.Parameter(p.detach()) for p in (weight, other)]
    recorded = Recorded(lambda x: x * leaves[0].sum() * leaves[1].sum(), leaves, Emulated())
    for x in (torch.ones(2), torch.full((2,), 3.0)):
        recorded([x], [weight, other]).sum().backward()
    assert weight.grad.tolist() == [8.0 * 2 * (ALIGNED + 1)] * 3 and other.grad.tolist() == [8.0 * 6] * (ALIGNED + 1)
    assert all(leaf.grad is None for leaf in leaves)
    first = recorded([torch.ones(2)], [weight, other])
    recorded([torch.ones(2)], [weight, other])
    with pytest.raises(RuntimeError, match="another forward"):
        first.sum().backward()
    assert recorded([torch.ones(5)], [weight, other]) is None


def test_weights_in_16_bits_are_those_of_the_step():
    """Autocast keeps copies of them, those of a rehearsal too."""
    plain, saved, _ = trained(4, 2, None, {}, torch.bfloat16)
    replayed, also, passes = trained(4, 2, Emulated, {}, torch.bfloat16)
    assert replayed == plain and passes == 0
    assert all(torch.equal(weight, also.weights[name]) for name, weight in saved.weights.items())


def test_what_is_recorded_goes_when_training_is_over():
    step = toys.toy_step()
    step.recorded = RecordedDraft(step.drafter, step.hidden, Emulated())
    toys.train_steps(step, stream(4, 2), 1)
    kept = weakref.ref(step.recorded._recorded)
    gc.collect()
    gc.disable()
    try:
        step.together()
        assert kept() is None and step.recorded is None
    finally:
        gc.enable()


@pytest.mark.parametrize("read", [lambda batch: batch.token_ids_BT, lambda batch: batch.blocks.weights_BNS])
def test_what_is_not_copied_for_every_batch_cannot_be_read(read):
    """It would be the first batch's for ever."""
    step = toys.toy_step()
    recorded = RecordedDraft(step.drafter, lambda drafter, batch, features: read(batch).float(), Emulated())
    batch = next(stream(4, 2).micro_batches(0, 0, 1))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'float'"):
        recorded(batch, step.target.read(batch))


def test_evaluation_and_what_needs_no_gradient_are_not_recorded():
    step = toys.toy_step()
    step.recorded = lambda batch, features: pytest.fail("recorded")
    batch = next(stream(4, 2).micro_batches(0, 0, 1))
    features = step.target.read(batch)
    step.score(batch, features, exact=True)
    with torch.no_grad():
        step.score(batch, features)


@pytest.mark.parametrize(
    ("fuse", "words", "told"), [(True, [], True), (False, [], False), (True, ["engine.cuda_graphs=false"], False)]
)
def test_a_recipe_has_it_where_layers_are_compiled(fuse, words, told, monkeypatch):
    recipe = load_recipe("demo", ["data.max_length=32", *words])
    outline = build.Outline(
        recipe=recipe, target_path="toy", info=toys.toy_info(), tokenizer=None, spec=toys.toy_spec(), gamma=4.0
    )
    monkeypatch.setattr(build, "attention_and_compile", lambda engine, device: (False, fuse))
    step = build.step_over(outline, toys.toy_target(), torch.device("cpu"))
    assert (step.recorded is not None) == told


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
