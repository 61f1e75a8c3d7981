"""Held-out figures while training: what is logged, which checkpoint is kept as the best, when a run stops, what is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file

import dflash_train.train as training
from dflash_train import evaluate, export, folder, heldout
from dflash_train.build import open_source
from dflash_train.checkpoint import Best, read_state
from dflash_train.config.load import CheckFailed, load_recipe
from dflash_train.config.schema import EvaluateConfig, Recipe
from dflash_train.types import Prompt
from dflash_train.walk import answered

TOTAL = 8


@pytest.fixture
def recipe(tmp_path, target_dir):
    """Recipe of eight steps with an evaluation after each and a checkpoint after the fourth."""

    def recipe(name: str, *overrides: str) -> Recipe:
        ids = [p + p[::-1] + p for p in toys.prompts(6)]
        rows = [
            {"id": f"r{i}", "domain": "ab"[i % 2], "prompt_ids": x[:3], "response_ids": x[3:]}
            for i, x in enumerate(ids)
        ]
        data = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], heldout: [{data}], max_length: 24, pack: false}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8,
          selector_top_k: 4}}
optimizer: {{lr: 3e-3, warmup_ratio: 0.2}}
train: {{max_steps: {TOTAL}, global_batch_size: 2, num_anchors: 3, log_every_steps: 4, eval_every_steps: 1,
        checkpoint_every_steps: 4}}
evaluate: {{max_new_tokens: 6, client_prompts: 2}}
export: {{precision: float32}}
track: {{wandb: disabled, progress: false}}
""")
        return load_recipe(str(path), [f"output_dir={tmp_path}/{name}", *overrides])

    return recipe


@pytest.fixture
def worth(monkeypatch):
    """Lets a test say what heldout/walk_tau is at each step, from the first on."""
    computed = training.teacher_forced_values

    def worth(*values: float | None) -> None:
        script = iter(values)
        monkeypatch.setattr(
            training, "teacher_forced_values", lambda *a: computed(*a) | {"heldout/walk_tau": next(script)}
        )

    return worth


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def steady(run: Path) -> list[dict]:
    """The curve without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics(run)]


def best_of(run: Path) -> Best:
    return read_state(run / "checkpoints" / "best").best


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[k].equal(other[k]) for k in one)


def killed(recipe: Recipe, step: int) -> Path:
    """The folder of a run that ended after so many steps."""
    lr_at = training.lr_at

    def interrupted(at: int, *args):
        if at == step:
            raise KeyboardInterrupt
        return lr_at(at, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "lr_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe)
    return Path(recipe.output_dir)


# --- what is logged ---


def test_held_out_figures_and_real_decoding_are_logged(recipe):
    run = Path(recipe("run").output_dir)
    training.train(recipe("run", "train.decode_every_steps=3", "train.decode_prompts=2", "train.eval_every_steps=4"))
    lines = metrics(run)
    names = {f"heldout/{n}" for n in ("walk_tau", "walk_tau/a", "base_walk_tau", "accept_len", "base_accept_len/b",
             "recall@1", "recall@4", "oracle@2", "selector_lift")}  # fmt: skip
    heldout = [line for line in lines if names <= line.keys()]
    assert [line["step"] for line in heldout] == [4, 8]
    lift = heldout[0]["heldout/walk_tau"] - heldout[0]["heldout/base_walk_tau"]
    assert heldout[0]["heldout/selector_lift"] == pytest.approx(lift)
    decoded = [line for line in lines if "decoded/tau" in line]
    assert [line["step"] for line in decoded] == [3, 6, 8]
    assert all({"decoded/tau/a", "decoded/tau/b"} <= line.keys() and line["perf/eval_seconds"] > 0 for line in decoded)


def test_decoding_takes_the_first_prompts_of_each_domain(recipe, monkeypatch):
    asked = []
    decode = training.decoded_values

    def seen(module, prompts, *rest):
        asked.append([p.id for p in prompts])
        return decode(module, prompts, *rest)

    monkeypatch.setattr(training, "decoded_values", seen)
    training.train(recipe("run", "train.decode_every_steps=4", "train.decode_prompts=2"))
    assert asked == [["r0", "r1", "r2", "r3"]] * 2


def test_decoding_while_training_moves_no_number(recipe):
    training.train(recipe("with", "train.decode_every_steps=2"))
    training.train(recipe("without"))
    here = Path(recipe("with").output_dir).parent
    assert same(*(weights(here / name / "export") for name in ("with", "without")))


def test_evaluations_do_not_count_as_training_time(recipe, monkeypatch):
    """The clock stands still but for an evaluation, which takes 100 s of it, and a step of 1 s."""
    now = [0.0]
    values, step = training.teacher_forced_values, training.train_step

    def slow(*args):
        now[0] += 100
        return values(*args)

    def one_second(*args):
        now[0] += 1
        return step(*args)

    monkeypatch.setattr(training, "teacher_forced_values", slow)
    monkeypatch.setattr(training, "train_step", one_second)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    training.train(recipe("run", "train.eval_every_steps=3", "evaluate.client=off"))
    lines = metrics(Path(recipe("run").output_dir))
    assert [line["perf/eval_seconds"] for line in lines if "heldout/walk_tau" in line] == [100.0] * 3
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [3, 4, 6, 8]
    rates = [line["perf/tokens_per_second"] for line in trained]
    assert rates == pytest.approx([2 * 18] * 4)  # two rows of 18 tokens a second


# --- the best ---


def test_the_best_is_kept_and_the_newest_too(recipe, worth, tmp_path):
    worth(1.0, 1.5, 3.0, 2.0, 2.5, 3.0, 2.9, 1.0)
    training.train(recipe("run", "train.keep_checkpoints=1"))
    run = Path(recipe("run").output_dir)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [".lock", "best", f"step-{TOTAL:08d}"]
    assert best_of(run) == Best(
        metric="heldout/walk_tau", value=3.0, step=3, since=0
    )  # an equal value is no better one
    last = read_state(run / "checkpoints" / f"step-{TOTAL:08d}")
    assert last.best == Best(metric="heldout/walk_tau", value=3.0, step=3, since=5)
    assert not same(weights(run / "checkpoints" / "best"), weights(run / "export"))
    # It is a source like any other.
    opened = open_source(str(run / "checkpoints" / "best"), None, [f"output_dir={tmp_path}/out"])
    assert opened.trained_steps == 3
    assert toys.call(export.main, run / "checkpoints" / "best", "--output", tmp_path / "drafter").code == 0
    assert same(weights(tmp_path / "drafter"), weights(run / "checkpoints" / "best"))
    done = toys.call(evaluate.main, run / "checkpoints" / "best", f"output_dir={tmp_path}/out")
    assert done.code == 0, done.err


def test_a_higher_decoded_tau_can_choose(recipe, monkeypatch):
    script = iter([1.0, 2.0, 1.5, 1.2])
    monkeypatch.setattr(training, "decoded_values", lambda *a: {"decoded/tau": next(script)})
    training.train(recipe("run", "train.best_metric=decoded/tau", "train.decode_every_steps=2"))
    assert best_of(Path(recipe("run").output_dir)) == Best(metric="decoded/tau", value=2.0, step=4)


def test_patience_ends_a_run_cleanly(recipe, worth, capsys):
    worth(1.0, 2.0, 1.9, 2.0, 1.0)
    exported = training.train(recipe("run", "train.patience=3"))
    run = Path(recipe("run").output_dir)
    said = capsys.readouterr().out
    assert "stopped at step 5: 3 evaluations without a heldout/walk_tau above 2.0000 of step 2" in said
    assert metrics(run)[-1]["step"] == 5 and "client/tau" in metrics(run)[-1]
    assert same(weights(exported), weights(run / "checkpoints" / "step-00000005"))
    # Continued, it has nothing to do; with more patience it goes on.
    training.train(recipe("run", "train.patience=3", "train.resume=true"))
    assert metrics(run)[-1]["step"] == 5
    worth(2.5, 2.4, 2.3)
    training.train(recipe("run", "train.patience=4", "train.resume=true"))
    assert metrics(run)[-1]["step"] == TOTAL and best_of(run).step == 6


def test_the_best_is_exported_and_the_card_says_so(recipe, worth, capsys):
    worth(1.0, 2.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    exported = training.train(recipe("run", "train.export_best=true"))
    run = Path(recipe("run").output_dir)
    assert same(weights(exported), weights(run / "checkpoints" / "best"))
    assert f"exporting the best drafter: heldout/walk_tau 3.0000 at step 3 of {TOTAL}" in capsys.readouterr().out
    assert folder.read_record(exported)["provenance"]["step"] == 3
    card = (exported / "README.md").read_text()
    assert "- step: 3\n" in card and "- chosen_by: heldout/walk_tau 3.0000, the best of a run of 8 steps\n" in card
    assert json.loads((run / "client.json").read_text())["gap"] is False  # it was the best that was checked


def test_where_nothing_was_measured_the_last_is_exported(recipe, worth, capsys):
    worth(*[None] * TOTAL)
    exported = training.train(recipe("run", "train.export_best=true"))
    assert "never had a value; the last drafter is exported" in capsys.readouterr().out
    assert folder.read_record(exported)["provenance"]["step"] == TOTAL


# --- resume ---


@pytest.mark.parametrize("step", [5, 7])
def test_a_continued_run_knows_the_best_bit_for_bit(recipe, worth, step):
    """Killed behind a checkpoint at step 4: before, and after, a better drafter was found at step 6."""
    curve = [1.0, 2.0, 1.0, 1.5, 1.0, 3.0, 1.0, 2.0]
    worth(*curve)
    training.train(recipe("whole", "train.export_best=true"))
    worth(*curve)
    run = killed(recipe("parts", "train.export_best=true"), step)
    assert best_of(run).step == (2 if step == 5 else 6)
    worth(*curve[4:])
    training.train(recipe("parts", "train.export_best=true", "train.resume=true"))
    whole = run.parent / "whole"
    for name in ("best", f"step-{TOTAL:08d}"):
        one, other = (read_state(place / "checkpoints" / name) for place in (whole, run))
        assert one == other and one.best.step == 6
        assert same(weights(whole / "checkpoints" / name), weights(run / "checkpoints" / name))
    assert steady(whole) == steady(run)
    assert same(weights(whole / "export"), weights(run / "export"))


def test_a_finished_run_that_is_resumed_has_one_line_of_its_end_and_an_export_without_private_paths(recipe):
    training.train(recipe("run"))
    run = Path(recipe("run").output_dir)
    whole = steady(run)
    assert "client/tau" in whole[-1]
    training.train(recipe("run", "train.resume=true"))
    assert steady(run) == whole
    # What may go to the Hub names no place of this machine and no command line, of a later start either.
    record = json.loads((run / "export" / "dflash_train.json").read_text())
    assert record["card"]["client"]["prompts"] == 2 and len(record["provenance"]["resumed"]) == 1
    for file in ("dflash_train.json", "README.md", "config.json"):
        text = (run / "export" / file).read_text()
        assert str(run.parent) not in text and '"command"' not in text, file


def test_a_best_that_is_gone_or_of_another_metric_is_looked_for_anew(recipe, worth, capsys):
    import shutil

    worth(9.0, *[1.0] * 6)
    run = killed(recipe("run"), 6)
    shutil.rmtree(run / "checkpoints" / "best")
    worth(1.0, 2.0, 1.0, 1.0)
    training.train(recipe("run", "train.resume=true"))
    assert "the best heldout/walk_tau is looked for from step 4 on" in capsys.readouterr().out
    assert best_of(run).step == 6

    worth(*[1.0] * 2 * TOTAL)
    run = killed(recipe("other"), 6)
    training.train(recipe("other", "train.resume=true", "train.best_metric=heldout/accept_len"))
    assert best_of(run).metric == "heldout/accept_len"


def test_a_folder_with_a_best_alone_is_an_earlier_run(recipe):
    run = killed(recipe("run"), 2)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [".lock", "best"]
    with pytest.raises(ValueError, match="has checkpoints of an earlier run"):
        training.train(recipe("run"))
    training.train(recipe("run", "train.resume=true"))
    training.train(recipe("whole"))
    assert steady(run) == steady(run.parent / "whole")


# --- wrong use ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.best_metric=train/loss"], "train.best_metric = train/loss: name a metric logged under heldout/ or"),
        (["train.best_metric=decoded/tau"], "train.best_metric = decoded/tau: needs real decoding while training"),
        (["data.heldout=[]", "train.patience=2"], "train.patience = 2: needs held-out rows"),
        (["data.heldout=[]", "train.export_best=true"], "train.export_best = True: needs held-out rows"),
        (["data.heldout=[]", "train.decode_every_steps=5"], "train.decode_every_steps = 5: needs held-out rows"),
        (["train.patience=2", "train.eval_every_steps=null"], "train.patience = 2: counts evaluations while training"),
        (["train.patience=0"], "train.patience = 0: must be null or at least 1"),
        (["train.decode_prompts=0"], "train.decode_prompts = 0: must be at least 1"),
        (["evaluate.client_prompts=0"], "evaluate.client_prompts = 0: must be at least 1"),
    ],
)
def test_what_the_recipe_alone_shows_to_be_wrong(recipe, overrides, message):
    with pytest.raises(ValueError) as error:
        recipe("run", *overrides)
    assert message in str(error.value)


def test_an_unknown_metric_is_named_with_those_that_exist(recipe, tmp_path):
    with pytest.raises(
        ValueError, match=r"best_metric = heldout/walk_taw: no such metric is logged; did you mean 'heldout/walk_tau"
    ):
        training.train(recipe("run", "train.best_metric=heldout/walk_taw", "train.eval_every_steps=null"))
    assert not (tmp_path / "run").exists()  # found before the first step


def test_the_names_known_beforehand_are_those_that_are_logged(overfitted):
    examples = [answered(p, [5, 6, 7, 8], "stop") for p in prompts_of("a", "all", "b/c")]
    for some in (examples, examples[1:2]):
        prompts = [Prompt(id=e.id, domain=e.domain, token_ids=[5, 6]) for e in some]
        values = heldout.teacher_forced_values(overfitted.step, some)
        values |= heldout.decoded_values(overfitted.step, prompts, EvaluateConfig(max_new_tokens=4), {2})
        assert set(heldout.names(some, prompts, overfitted.step.drafter.spec.selector_top_k)) == set(values)


def prompts_of(*domains: str) -> list[Prompt]:
    return [Prompt(id=d, domain=d, token_ids=[5, 6, 7]) for d in domains]


def test_prompts_without_answers_choose_nothing(recipe, tmp_path):
    asked = toys.write_jsonl(
        tmp_path / "asked.jsonl", [{"id": "q", "messages": [{"role": "user", "content": "w20 w30"}]}]
    )
    with pytest.raises(ValueError, match="has prompts without answers; regenerate them"):
        training.train(recipe("run", f"data.heldout=[{asked}]", "train.export_best=true"))
    assert not (tmp_path / "run").exists()
    training.train(recipe("run", f"data.heldout=[{asked}]"))
    assert "client/tau" in metrics(tmp_path / "run")[-1]


def test_a_client_that_is_required_is_asked_for_before_training(recipe, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("dflash_train.client.installed", lambda: "0.1.0")
        with pytest.raises(ValueError, match="evaluate.client = required: there are no held-out prompts"):
            training.train(recipe("run", "evaluate.client=required", "data.heldout=[]"))
    monkeypatch.setattr("dflash_train.client.installed", lambda: None)
    with pytest.raises(ValueError, match="evaluate.client = required: z-lab's dflash is not installed; pip install"):
        training.train(recipe("run", "evaluate.client=required"))
    assert not (tmp_path / "run").exists()


# --- the alarm at the end of a run ---


def test_a_train_serve_gap_fails_the_run_behind_its_export(recipe, monkeypatch, tmp_path):
    pytest.importorskip("dflash.model")
    written = export.to_hf_config
    wrong = lambda spec, **more: (
        written(spec, **more) | {"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}
    )  # noqa: E731
    monkeypatch.setattr(export, "to_hf_config", wrong)
    with pytest.raises(
        CheckFailed, match=r"(?s)train/serve gap: z-lab's dflash.*rope_theta: 3.0 against 10000.0 as trained"
    ):
        training.train(recipe("run"))
    run = tmp_path / "run"
    assert json.loads((run / "client.json").read_text())["gap"] is True
    assert metrics(run)[-1]["client/gap"] == 1.0
    assert (run / "export" / "model.safetensors").exists() and "check FAILED" in (
        run / "export" / "README.md"
    ).read_text()
    recipe_file = run / "config.yaml"
    done = toys.call(training.main, "-c", recipe_file, f"output_dir={tmp_path}/again")
    assert done.code == 1 and "failed: train/serve gap" in done.err
    done = toys.call(training.main, "-c", recipe_file, f"output_dir={tmp_path}/off", "evaluate.client=off")
    assert done.code == 0 and not (tmp_path / "off" / "client.json").exists()
