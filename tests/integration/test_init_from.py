"""Training that starts from a released drafter, and what a run keeps of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import released_drafters
import torch
import toys
from safetensors.torch import load_file

from dflash_train import evaluate, train
from dflash_train.check import check
from dflash_train.config.load import load_recipe
from dflash_train.drafter.spec import SLIDING
from dflash_train.folder import hash_weights
from dflash_train.released.nemo import repair
from dflash_train.released.read import read_released

pytestmark = pytest.mark.slow
V1 = {
    "two": False,
    "layer_types": [SLIDING, SLIDING],
    "sliding_window": 16,
    "use_sliding_window": True,
    "is_causal": False,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    made = toys.greedy_rows(toys.toy_model(), toys.prompts(8), 28)
    made = [row for row in made if toys.MASK not in row["prompt_ids"] + row["response_ids"]]
    return toys.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", made[:4])


@pytest.fixture
def recipe(tmp_path, target_dir, rows):
    def recipe(folder: Path, *knobs: str, output: str = "run"):
        return load_recipe(None, [
            f"output_dir={tmp_path}/{output}", f"target.path={target_dir}", f"data.train=[{rows}]", "data.max_length=64",
            f"drafter.init_from={folder}", "drafter.selector_rank=12", "drafter.selector_top_k=4", "train.max_steps=2", "train.global_batch_size=2",
            "train.num_anchors=8", "export.precision=float32", "track=jsonl", "track.progress=false", *knobs,
        ])  # fmt: skip

    return recipe


@pytest.fixture
def v1(tmp_path):
    return released_drafters.save(tmp_path / "released", released_drafters.reference_drafter(**V1), **V1)


def test_two_steps_from_a_v1_drafter_give_a_dflash_2_export_without_faults(recipe, v1, target_dir, tmp_path, capsys):
    export = train.train(recipe(v1, "optimizer.lr=1e-4"))
    said = capsys.readouterr().out
    assert (
        "has no convolution: a new one begins as the identity" in said
        and "starting from released (published (z-lab)" in said
    )
    assert not check(export).faults
    released, trained = load_file(v1 / "model.safetensors"), load_file(export / "model.safetensors")
    moved = {n: (trained[n] - released[n]).abs().max().item() for n in released}
    assert 0 < moved["fc.weight"] and max(moved.values()) < 1e-3  # two steps of 1e-4: still that drafter
    assert json.loads((export / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]

    run = tmp_path / "run"
    record = json.loads((run / "init_from.json").read_text())
    assert record == {"name": "released", "revision": None, "license": "mit", "architecture": "DFlashDraftModel", "format": "published (z-lab)",
                      "weights": hash_weights(released)}  # fmt: skip
    saved = load_recipe(str(run)).drafter
    assert (saved.init_from, saved.block_size, saved.sliding_window, saved.conv_kernel_size) == (str(v1), 8, 16, 2)

    # what was trained is evaluated and exported without what it began from
    shutil.rmtree(v1)
    data = f"data.heldout=[{run.parent}/heldout.jsonl]"
    shutil.copyfile(load_recipe(str(run)).data.train[0], run.parent / "heldout.jsonl")
    assert evaluate.main(
        [str(run), data, "evaluate.max_new_tokens=8", "evaluate.client=off", "evaluate.max_prompts=1"]
    ) in (0, None)


def test_a_resume_wants_the_same_first_weights(recipe, v1, tmp_path):
    train.train(recipe(v1, "train.checkpoint_every_steps=1"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    resumed = recipe(v1, "train.resume=true")
    train.train(resumed)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002", ignore_errors=True)
    other = released_drafters.save(tmp_path / "other", released_drafters.reference_drafter(seed=1, **V1), **V1)
    with pytest.raises(
        ValueError, match=r"belongs to another run; init_from: checkpoint has \w{16}, recipe has \w{16}"
    ):
        train.train(recipe(other, "train.resume=true"))


def test_a_contradiction_is_found_before_anything_is_written(recipe, v1, tmp_path):
    with pytest.raises(ValueError, match="drafter.head_dim = 8, the released drafter has 16"):
        train.train(recipe(v1, "drafter.head_dim=8"))
    assert not (tmp_path / "run").exists()


def test_an_export_of_ours_is_a_start_as_well(recipe, v1, tmp_path):
    export = train.train(recipe(v1))
    again = train.train(recipe(export, "optimizer.lr=1e-9", output="again"))
    first, second = load_file(export / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.allclose(first[n], second[n], atol=1e-6) for n in first)


def test_a_real_nemo_export_is_mended_and_started_from(recipe, tmp_path):
    """Saved by NeMo AutoModel's own class, over the config that its recipe builds."""
    pytest.importorskip("nemo_automodel")
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import build_qwen3_dflash_draft_config
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel

    block = released_drafters.published_config(block={"selector_top_k": 4})["dflash_config"]
    block |= {"output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1.0}
    config = build_qwen3_dflash_draft_config(
        toys.toy_config(), num_draft_layers=2, num_target_layers=toys.LAYERS, block_size=8, dflash_config=block, attention_backend="sdpa"
    )  # fmt: skip
    model = Qwen3DFlash2DraftModel(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    folder = tmp_path / "model" / "consolidated"
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["Qwen3DFlashDraftModel"]  # its consolidation writes the config's, not the class's
    (folder / "config.json").write_text(json.dumps(written))
    assert {f.rule for f in check(folder).faults} >= {"architecture"}
    found = read_released(str(tmp_path))
    assert found.format == "NeMo AutoModel" and "sliding_window" in found.unstated
    started = train.train(recipe(tmp_path, "drafter.sliding_window=16", "optimizer.lr=1e-9"))
    own = {n: p.detach() for n, p in model.state_dict().items()}
    trained = load_file(started / "model.safetensors")
    assert all(torch.allclose(own[n], trained[n], atol=1e-6) for n in trained)
    repair(folder, window=16)
    assert not check(folder).faults
