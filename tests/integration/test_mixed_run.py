"""A run over a mixture of sources with long documents: it trains, and continues where it was killed."""

from __future__ import annotations

import json

import pytest
import toys
from safetensors.torch import load_file

import dflash_train.train as training
from dflash_train.build import build_stream, outline
from dflash_train.config.load import load_recipe

EPOCHS = 3


@pytest.fixture
def recipe(tmp_path, target_dir):
    def rows(name: str, count: int, length: int) -> list[dict]:
        ids = toys.prompts(count, length=length, seed=len(name))
        return [{"id": f"{name}{i}", "prompt_ids": x[:3], "response_ids": x[3:]} for i, x in enumerate(ids)]

    folder = tmp_path / "folder"
    folder.mkdir()
    toys.write_jsonl(folder / "a.jsonl", rows("a", 4, 20))
    toys.write_jsonl(folder / "b.jsonl", rows("bb", 4, 12))
    toys.write_jsonl(tmp_path / "half.jsonl", rows("half", 9, 15))
    toys.write_jsonl(tmp_path / "long.jsonl", rows("longer", 1, 70))

    def recipe(name: str, *overrides: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data:
  train: [{folder}, {{path: {tmp_path}/half.jsonl, weight: 0.5, domain: half}}, {{path: {tmp_path}/long.jsonl, weight: 2}}]
  max_length: 24
  long_documents: window
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3}}
train: {{num_epochs: {EPOCHS}, global_batch_size: 2, num_anchors: 6, log_every_steps: 1, checkpoint_every_steps: 5}}
track: {{wandb: disabled, progress: false}}
""")
        return load_recipe(str(path), [f"output_dir={tmp_path}/{name}", *overrides])

    return recipe


def curve(recipe) -> list[dict]:
    lines = [json.loads(line) for line in open(f"{recipe.output_dir}/metrics.jsonl")]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def test_a_killed_run_over_a_mixture_is_continued_bit_for_bit(recipe, monkeypatch, capsys):
    training.train(recipe("whole"))
    out = capsys.readouterr().out
    assert "note          1  made_into_windows" in out and "kept 18 of 18 rows" in out
    lines = curve(recipe("whole"))
    assert lines[-1]["train/epoch"] == EPOCHS
    assert [line["train/epoch"] for line in lines] == sorted({line["train/epoch"] for line in lines})

    lr_at = training.lr_at

    def interrupted(at: int, *args):
        if at == 8:
            raise KeyboardInterrupt
        return lr_at(at, *args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "lr_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe("parts"))
    training.train(recipe("parts", "train.resume=true"))
    assert curve(recipe("parts")) == lines
    a, b = (load_file(f"{recipe(name).output_dir}/export/model.safetensors") for name in ("whole", "parts"))
    assert all(a[k].equal(b[k]) for k in a)


def test_other_weights_are_another_run(recipe, tmp_path):
    training.train(recipe("run", "train.max_steps=5"))
    other = f"data.train=[{tmp_path}/folder,{tmp_path}/half.jsonl,{{path: {tmp_path}/long.jsonl, weight: 2}}]"
    with pytest.raises(ValueError, match=r"weights: checkpoint has \[1.0, 0.5, 2.0\], recipe has \[1.0, 1.0, 2.0\]"):
        training.train(recipe("run", "train.max_steps=5", "train.resume=true", other))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_a_mixture_as_one_process_sees_it(recipe, ranks):
    stream = build_stream(outline(recipe("run")))

    def seen(step: int, rank: int, world: int):
        return [
            (row, b.blocks.anchors_BN[i].tolist())
            for b in stream.micro_batches(step, rank, world)
            for i, row in enumerate(b.sample_ids)
            if row
        ]

    for step in range(stream.steps_of(EPOCHS)):
        assert [x for rank in range(ranks) for x in seen(step, rank, ranks)] == seen(step, 0, 1) != []
