"""How a recipe becomes the objects of a run."""

from __future__ import annotations

import pytest
import torch
import toys

from dflash_train import build, ranks
from dflash_train.config.load import load_recipe


@pytest.mark.parametrize(("rows", "micro", "world"), [(4, 4, 1), (4, 4, 2), (4, 2, 2), (8, 1, 2), (5, 4, 2), (1, 2, 4)])
def test_the_target_is_compiled_for_reads_that_come(rows, micro, world, monkeypatch):
    """Also where ranks share a step's rows, so that each has fewer than a micro-batch holds."""
    batch = {"global_batch_size": rows, "micro_batch_size": micro}
    recipe = load_recipe("demo", ["data.max_length=32", *(f"train.{name}={value}" for name, value in batch.items())])
    outline = build.Outline(
        recipe=recipe, target_path="toy", info=toys.toy_info(), tokenizer=None, spec=toys.toy_spec(), gamma=4.0
    )
    target, compiled_for = toys.toy_target(), []
    monkeypatch.setattr(build, "attention_and_compile", lambda engine, device: (False, True))
    monkeypatch.setattr(ranks, "world_size", lambda: world)
    monkeypatch.setattr(target, "compile", lambda tokens, record: compiled_for.append(tokens))
    build.step_over(outline, target, torch.device("cpu"))
    stream = toys.stream_of([toys.document(32, name=f"d{i}", seed=i) for i in range(9)], **batch)
    first = next(stream.micro_batches(0, 0, world))
    assert compiled_for == [first.token_ids_BT.numel()]
