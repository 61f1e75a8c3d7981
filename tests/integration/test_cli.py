"""From prompts to an exported drafter, with the real commands on a random target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import toys
from safetensors.torch import load_file

from dflash_train import check, evaluate, export, train
from dflash_train.config.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


def succeed(main, *argv: object) -> str:
    code, out, err = toys.call(main, *argv)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, target_dir):
    """Every command once: what each printed, and the folders."""
    folder = tmp_path_factory.mktemp("pipeline")
    asked = [
        {"id": f"q{i}", "domain": "even" if i % 2 == 0 else "odd", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(" ".join(f"w{t}" for t in p) for p in toys.prompts(14))
    ]
    toys.write_jsonl(folder / "prompts.jsonl", asked[:10])
    toys.write_jsonl(folder / "heldout_prompts.jsonl", asked[10:])
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"""
output_dir: {folder}/run
target: {{path: {target_dir}}}
regenerate: {{prompts: {folder}/prompts.jsonl, output: {folder}/train.jsonl, max_new_tokens: 20, max_length: 60}}
data: {{train: [{folder}/train.jsonl], heldout: [{folder}/heldout.jsonl], max_length: 96}}
drafter: {{block_size: 8, target_layer_ids: [1, 3], num_hidden_layers: 2, sliding_window: 32, selector_rank: 12,
          selector_top_k: 4}}
optimizer: {{lr: 6e-4}}
train: {{max_steps: {STEPS}, global_batch_size: 2, num_anchors: 16, log_every_steps: 1, eval_every_steps: 2,
        checkpoint_every_steps: 2}}
evaluate: {{max_new_tokens: 12}}
track: {{wandb: disabled, progress: false}}
""")
    said = {
        "regenerate": succeed(toys.script("regenerate").main, "-c", recipe),
        "heldout": succeed(
            toys.script("regenerate").main, "-c", recipe,
            f"regenerate.prompts={folder}/heldout_prompts.jsonl", f"regenerate.output={folder}/heldout.jsonl",
        ),
    }  # fmt: skip
    rows = [json.loads(line) for name in ("train", "heldout") for line in (folder / f"{name}.jsonl").open()]
    used = {token for row in rows for token in row["prompt_ids"] + row["response_ids"]}
    mask = next(i for i in (7, 8, *range(150, toys.VOCAB)) if i not in used)
    mask_knob = f"drafter.mask_token_id={mask}"
    said["inspect"] = succeed(toys.script("inspect_data").main, "-c", recipe, "--no-color", mask_knob)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # an import of it would raise
        said["train"] = succeed(train.main, "-c", recipe, mask_knob)
    run = folder / "run"
    said["evaluate"] = succeed(evaluate.main, run)
    said["check"] = succeed(check.main, run / "export", "--target", target_dir)
    return SimpleNamespace(folder=folder, recipe=recipe, mask=mask, run=run, said=said, rows=rows)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_the_commands_say_what_they_did(pipeline):
    said, run = pipeline.said, pipeline.run
    assert json.loads(said["regenerate"])["rows"] == 10 and json.loads(said["heldout"])["rows"] == 4
    for text in ("kept 10 of 10 rows", f"mask_token_id {pipeline.mask} occurs 0 times"):
        assert text in said["inspect"]
    for text in ("kept 10 of 10 rows", "target_layer_ids: [1, 3]", "gamma 4", "padding", f"{STEPS} in all"):
        assert text in said["train"]
    exported, client, report = said["train"].splitlines()[-3:]
    assert exported == f"exported to {run / 'export'}"
    assert client.startswith("client: ") and f"decoded 4 prompts from {run / 'export'}: tau" in client
    assert report == f"report: {run / 'report.html'}"
    assert (
        "no train/serve gap" in client and "Train-to-serve check passed" in (run / "export" / "README.md").read_text()
    )
    assert "lossless" in said["evaluate"] and "walk_tau: even" in said["evaluate"]
    assert "No faults." in said["check"]


def test_the_saved_recipe_is_the_resolved_one(pipeline):
    saved = load_recipe(str(pipeline.run))
    asked = load_recipe(str(pipeline.recipe), [f"drafter.mask_token_id={pipeline.mask}"])
    asked.provenance = saved.provenance
    assert saved == asked
    assert {"dflash_train", "python", "torch", "transformers", "git_commit", "git_dirty", "command", "world_size"} <= (
        saved.provenance.keys()
    )
    assert saved.provenance["world_size"] == 1
    assert saved.provenance["command"][-1] == f"drafter.mask_token_id={pipeline.mask}"


def test_training_again_from_the_saved_recipe_gives_the_same_drafter(pipeline, tmp_path):
    succeed(train.main, "-c", pipeline.run, f"output_dir={tmp_path}/again")
    first, again = (load_file(p / "export/model.safetensors") for p in (pipeline.run, tmp_path / "again"))
    assert first.keys() == again.keys() and all(first[k].equal(again[k]) for k in first)
    for a, b in zip(metrics(pipeline.run), metrics(tmp_path / "again"), strict=True):
        assert {k: v for k, v in a.items() if "perf/" not in k} == {k: v for k, v in b.items() if "perf/" not in k}


def test_every_metric_is_logged(pipeline):
    lines = metrics(pipeline.run)
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    slots = [f"{kind}/slot_{k:02d}" for kind in ("accuracy", "base_accuracy") for k in range(1, 8)]
    names = {
        f"train/{name}"
        for name in (
            "loss base_loss selector_loss accuracy base_accuracy accept_len base_accept_len candidate_recall "
            "grad_norm lr epoch"
        ).split()
        + slots
    }
    names |= {"perf/tokens_per_second", "perf/blocks_per_second", "perf/memory_gib", "data/coverage"}
    for line in trained:
        assert names <= line.keys()
        assert line["train/loss"] == pytest.approx(line["train/base_loss"] + line["train/selector_loss"])
        assert 1 <= line["train/accept_len"] <= 8 and 0 < line["data/coverage"] <= 1
        assert all(0 <= line[f"train/{slot}"] <= 1 for slot in slots)
        assert min(line["perf/tokens_per_second"], line["perf/blocks_per_second"], line["train/grad_norm"]) > 0
    heldout = [line for line in lines if "heldout/walk_tau" in line]
    assert [line["step"] for line in heldout] == [2, 4]
    assert {"heldout/walk_tau/even", "heldout/walk_tau/odd", "heldout/base_accept_len"} <= heldout[0].keys()


def test_export_of_a_run_a_checkpoint_and_to_another_folder(pipeline, tmp_path):
    weights = {}
    for name, source in (("run", pipeline.run), ("checkpoint", pipeline.run / "checkpoints" / "step-00000002")):
        text = succeed(export.main, source, "--output", tmp_path / name)
        assert text.splitlines()[0] == f"exported to {tmp_path / name}" and "scripts/convert_gguf.py" in text
        weights[name] = load_file(tmp_path / name / "model.safetensors")
        record = json.loads((tmp_path / name / "dflash_train.json").read_text())
        assert record["provenance"]["step"] == (4 if name == "run" else 2)
        assert record["provenance"]["torch"] and "command" not in record["provenance"]
        assert (record["tau"] is not None) == (name == "run")  # what was evaluated is the newest step
    final = load_file(pipeline.run / "export" / "model.safetensors")
    assert all(final[k].equal(weights["run"][k]) for k in final)
    assert not all(final[k].equal(weights["checkpoint"][k]) for k in final)


def test_an_export_replaces_an_earlier_export_and_nothing_else(pipeline, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for arguments in (["--output", foreign], [f"export.output={foreign}"]):
        done = toys.call(export.main, pipeline.run, *arguments)
        assert done.code == 2 and done.err.startswith(f"error: export.output = {foreign}: not empty and not an earlier")
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]
    for _ in range(2):
        succeed(export.main, pipeline.run, "--output", tmp_path / "own")
    done = toys.call(train.main, "-c", pipeline.recipe, f"drafter.mask_token_id={pipeline.mask}", f"export.output={foreign}",
                f"output_dir={tmp_path}/new")  # fmt: skip
    assert done.code == 2 and "not an earlier export" in done.err
    assert not (tmp_path / "new").exists()  # said before the training, not after it


def test_an_export_is_evaluated_with_the_settings_of_its_run(pipeline, tmp_path):
    report = lambda folder: json.loads((folder / "evaluation.json").read_text())
    here = f"output_dir={tmp_path}"
    text = succeed(evaluate.main, pipeline.run / "export", here)
    own = report(tmp_path)
    assert own["source"] == "export" and own["trained_steps"] == STEPS and own["decoded"]["prompts"] == 4
    assert f"written to {tmp_path / 'evaluation.json'}" in text
    succeed(evaluate.main, pipeline.run / "export", here, "evaluate.max_prompts=1", "evaluate.max_new_tokens=4")
    short = report(tmp_path)
    assert short["decoded"]["prompts"] == 2  # one per domain
    assert short["decoded"]["tau_all"]["tokens"] <= 2 * 3 < own["decoded"]["tau_all"]["tokens"]
    succeed(evaluate.main, pipeline.run / "export", here, "evaluate.decode=false")
    assert "decoded" not in report(tmp_path) and report(tmp_path)["teacher_forced"]["walk_tau"]["all"]["rounds"] > 0


def test_an_export_elsewhere_needs_a_recipe(pipeline, tmp_path):
    succeed(export.main, pipeline.run, "--output", tmp_path / "far" / "drafter")
    done = toys.call(evaluate.main, tmp_path / "far" / "drafter")
    assert done.code == 2 and "no recipe beside it; name one with -c" in done.err
    succeed(evaluate.main, tmp_path / "far" / "drafter", "-c", pipeline.recipe, f"output_dir={tmp_path}",
            "evaluate.decode=false")  # fmt: skip


@pytest.mark.parametrize("source", ["nowhere", "empty"])
def test_a_folder_that_is_no_run_is_named(source, tmp_path):
    (tmp_path / "empty").mkdir()
    for main in (evaluate.main, export.main):
        done = toys.call(main, tmp_path / source)
        assert done.code == 2 and done.err.startswith(f"error: {tmp_path / source}: ")


def test_the_module_runs_by_itself_and_wandb_offline_needs_no_network(pipeline, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "dflash_train.train", "-c", str(pipeline.recipe), f"output_dir={tmp_path}/run"]
    command += [f"drafter.mask_token_id={pipeline.mask}", "train.max_steps=2", "track.wandb=offline"]
    done = subprocess.run(command, cwd=tmp_path, env=environment | nowhere, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert (tmp_path / "run" / "wandb_id").read_text() in offline.name
    assert not (tmp_path / "wandb").exists()
    assert [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line] == [1, 2]
    assert (tmp_path / "run" / "export" / "config.json").exists()
