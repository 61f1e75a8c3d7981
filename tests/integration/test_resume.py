"""A run that was killed and continued is the run that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file

import dflash_train.train as training
from dflash_train.build import build_stream, outline
from dflash_train.config.load import load_recipe

TOTAL = 10


@pytest.fixture
def recipe(tmp_path, target_dir):
    """Recipe of ten steps; `rows` documents, two of them to a step. The first checkpoint is at step 5."""

    def recipe(name: str, *overrides: str, rows: int = 6):
        data = tmp_path / f"rows{rows}.jsonl"
        ids = [p + p[::-1] + p for p in toys.prompts(rows)]
        toys.write_jsonl(data, [{"id": f"r{i}", "prompt_ids": x[:3], "response_ids": x[3:]} for i, x in enumerate(ids)])
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 24, pack: false}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3, warmup_ratio: 0.2}}
train: {{max_steps: {TOTAL}, global_batch_size: 2, num_anchors: 3, log_every_steps: 1, checkpoint_every_steps: 5}}
track: {{wandb: disabled, progress: false}}
""")
        return load_recipe(str(path), [f"output_dir={tmp_path}/{name}", *overrides])

    return recipe


def kill_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C after `step` finished steps."""
    lr_at = training.lr_at

    def interrupted(at: int, *args):
        if at == step:
            raise KeyboardInterrupt
        return lr_at(at, *args)

    monkeypatch.setattr(training, "lr_at", interrupted)


def killed(recipe, step: int = 7) -> Path:
    """The folder of a run that ended in the middle of something."""
    with pytest.MonkeyPatch.context() as patch:
        kill_in_step(patch, step)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe)
    return Path(recipe.output_dir)


def curve(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def state(folder: Path) -> tuple[dict, dict]:
    newest = folder / "checkpoints" / f"step-{TOTAL:08d}"
    return load_file(newest / "model.safetensors"), load_file(newest / "optimizer.safetensors")


@pytest.mark.parametrize("rows", [6, 10], ids=["mid-epoch", "epoch boundary"])
def test_killed_and_continued_is_bit_for_bit_the_whole_run(recipe, rows):
    training.train(recipe("whole", rows=rows))
    folder = killed(recipe("parts", rows=rows))
    assert len(curve(folder)) == 7 and not (folder / "export").exists()
    training.train(recipe("parts", "train.resume=true", rows=rows))

    whole = folder.parent / "whole"
    assert [line["step"] for line in curve(folder)] == list(range(1, TOTAL + 1))  # neither gaps nor repeats
    assert curve(folder) == curve(whole)
    (weights, moments), (weights_, moments_) = state(whole), state(folder)
    assert weights.keys() == weights_.keys() and moments.keys() == moments_.keys()
    assert all(weights[k].equal(weights_[k]) for k in weights)
    assert all(moments[k].equal(moments_[k]) for k in moments)
    first, second = (load_file(p / "export" / "model.safetensors") for p in (whole, folder))
    assert all(first[k].equal(second[k]) for k in first)


def test_the_rows_and_anchors_of_a_step_do_not_depend_on_where_a_run_began(recipe):
    def read(stream, steps):
        return [
            (b.sample_ids, b.blocks.anchors_BN.tolist(), b.blocks.valid_BN.tolist())
            for step in steps
            for b in stream.micro_batches(step, 0, 1)
        ]

    o = outline(recipe("run"))
    whole = read(build_stream(o), range(TOTAL))
    assert read(build_stream(o), range(7, TOTAL)) == whole[2 * 7 :]
    assert len({str(batch) for batch in whole}) > 6 * 2  # the anchors of the 6 rows change from epoch to epoch


def test_a_log_window_that_the_checkpoint_cuts_is_still_a_mean_over_all_its_steps(recipe):
    """Or the curve of a continued run has a dent that the whole run does not have."""
    training.train(recipe("whole", "train.log_every_steps=4"))
    folder = killed(recipe("parts", "train.log_every_steps=4"))
    training.train(recipe("parts", "train.log_every_steps=4", "train.resume=true"))
    assert {4, 8, 10} <= {line["step"] for line in curve(folder)}
    assert curve(folder) == curve(folder.parent / "whole")


def test_a_killed_run_without_a_checkpoint_starts_again(recipe, capsys):
    training.train(recipe("whole"))
    folder = killed(recipe("parts"), step=3)
    training.train(recipe("parts", "train.resume=true"))
    assert "no checkpoint in" in capsys.readouterr().out
    assert curve(folder) == curve(folder.parent / "whole")


def test_a_finished_run_is_only_exported_again(recipe):
    training.train(recipe("run"))
    folder = Path(recipe("run").output_dir)
    before, lines = state(folder)[0], curve(folder)
    training.train(recipe("run", "train.resume=true"))
    assert curve(folder) == lines and all(v.equal(before[k]) for k, v in state(folder)[0].items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.block_size=8", "block_size: checkpoint has 4, recipe has 8"),
        ("drafter.mask_token_id=156", "mask_token_id: checkpoint has 155, recipe has 156"),
        ("train.seed=1", "seed: checkpoint has 0, recipe has 1"),
        ("train.max_steps=12", "total_steps: checkpoint has 10, recipe has 12"),
        ("data.limit=5", "rows: checkpoint has 6, recipe has 5"),
        ("data.pack=true", "pack: checkpoint has False, recipe has True"),
    ],
)
def test_a_recipe_of_another_run_is_refused_and_both_values_are_named(recipe, override, message):
    folder = killed(recipe("run"))
    saved = (folder / "config.yaml").read_text()
    with pytest.raises(ValueError, match="belongs to another run") as error:
        training.train(recipe("run", "train.resume=true", override))
    assert message in str(error.value) and "Change the recipe back" in str(error.value)
    assert len(curve(folder)) == 7 and (folder / "config.yaml").read_text() == saved


@pytest.mark.parametrize(
    "override", ["train.micro_batch_size=2", "train.keep_checkpoints=1", "train.log_every_steps=5"]
)
def test_what_moves_no_number_may_change(recipe, override):
    killed(recipe("run"))
    training.train(recipe("run", "train.resume=true", override))


def test_a_checkpoint_that_was_never_finished_is_passed_over(recipe):
    folder = killed(recipe("run"))
    torn = folder / "checkpoints" / "step-00000007"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    training.train(recipe("run", "train.resume=true"))
    assert [line["step"] for line in curve(folder)] == list(range(1, TOTAL + 1))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(recipe, name):
    """Not passed over in silence: the user decides whether to go on from the one before it."""
    folder = killed(recipe("run"))
    path = folder / "checkpoints" / "step-00000005" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"step-00000005.*{name}"):
        training.train(recipe("run", "train.resume=true"))
