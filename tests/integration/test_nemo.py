"""A recipe of NeMo AutoModel trains here, and its own class loads what we write like it."""

from __future__ import annotations

import json

import pytest
import toys
import yaml

from dflash_train import export, train
from dflash_train.check import check
from dflash_train.config.load import parse_command
from dflash_train.folder import load_drafter_folder, normalised
from dflash_train.released.read import read_released

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps on the embedded target from a YAML with nothing in it but NeMo's words."""
    folder = tmp_path_factory.mktemp("nemo")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i}?"},
                {"role": "assistant", "content": f"The answer is {i + i}."},
            ]
        }
        for i in range(12)
    ]
    data = toys.write_jsonl(folder / "rows.jsonl", rows)
    recipe = {
        "recipe": "TrainDFlash2Recipe",
        "dist_env": {"backend": "nccl", "timeout_minutes": 5},
        "recipe_args": {
            "target_model_name_or_path": "embedded", "train_data_path": str(data), "val_data_path": None, "output_dir": str(folder / "run"),
            "seq_length": 128, "micro_batch_size": 2, "grad_accumulation_steps": 2, "num_workers": 0, "num_epochs": 1, "draft_num_hidden_layers": 2,
            "block_size": 8, "num_anchors": 8, "loss_decay_gamma": 4.0, "mask_token_id": 4080, "target_layer_ids": [0, 2, 4],
            "attention_backend": "sdpa", "draft_sliding_window": 32, "draft_num_attention_heads": 2, "draft_num_key_value_heads": 1,
            "draft_head_dim": 32, "selector_rank": 16, "selector_top_k": 8, "log_every_steps": 1,
        },
        "optimizer": {"lr": 6e-4, "betas": [0.9, 0.95]},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / "run" / "checkpoints"), "save_consolidated": True},
    }  # fmt: skip
    path = folder / "nemo.yaml"
    path.write_text(yaml.safe_dump(recipe))
    train.train(parse_command(["-c", str(path), "--recipe_args.shuffle_seed", "7"], prog="train", description="d"))
    return folder / "run"


def test_it_trains_as_its_fields_say(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]  # 12 rows, 2 x 2 a step
    spec, _, _ = load_drafter_folder(run / "export")
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (
        2,
        1,
        32,
    )  # NeMo AutoModel 0.7.0 ignores these
    assert (spec.sliding_window, spec.is_causal, spec.target_layer_ids) == (32, False, (0, 2, 4))
    assert not check(run / "export").faults


def test_a_nemo_style_export_is_loaded_whole_by_nemos_own_class(run, tmp_path):
    assert export.main([str(run), "--output", str(tmp_path / "out"), "--format", "nemo"]) == 0
    out = tmp_path / "out"
    names = {p.name for p in out.iterdir()}
    assert {
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    } <= names and "model.safetensors" not in names
    pytest.importorskip("nemo_automodel")
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel

    model, info = Qwen3DFlash2DraftModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.block_size, list(model.target_layer_ids)) == (8, [0, 2, 4])
    assert [layer.self_attn.sliding_window for layer in model.layers] == [32, 32]
    _, tensors, _ = load_drafter_folder(run / "export")
    own = model.state_dict()
    assert all(own[n].equal(t.to(own[n].dtype)) for n, t in tensors.items())

    found = read_released(str(out))  # and back: this one states everything, so nothing is asked
    assert not found.unstated and normalised(found.config)["is_causal"] is False
    # the card says what engines cannot load; written again, it replaces the earlier one
    assert {f.rule for f in check(out).faults} == {"architecture"}
    assert export.main([str(run), "--output", str(out), "--format", "nemo"]) == 0
    assert export.main([str(run), "--output", str(out)]) == 0
    assert not check(out).faults
