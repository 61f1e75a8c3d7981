"""Shared fixtures: the toy target as a folder, and a drafter that has learned some of its text by heart."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

# Tokenised data goes below the home folder by default: here, and in every process that tests start, another one.
os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
os.environ["HOME"] = tempfile.mkdtemp(prefix="dflash_train-tests-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest  # noqa: E402
import setuptools  # noqa: E402, F401  (torch's compiler wants it, and does not get it once some library has imported pip)
import torch  # noqa: E402
import toys  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory):
    """Folder of the random target and its tokenizer."""
    return toys.save_toy(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory):
    """The same with tied embeddings; its file holds no lm_head."""
    return toys.save_toy(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def overfitted(tmp_path_factory, target_dir):
    """A drafter trained by the real command's function on a few greedy answers, exported in fp32.

    folder: the run; export: its drafter; rows: what it was trained on; step: the drafter, opened from there.
    """
    from dflash_train.build import open_source
    from dflash_train.config.load import load_recipe
    from dflash_train.train import train

    folder = tmp_path_factory.mktemp("overfitted")
    rows = toys.greedy_rows(toys.toy_model(), toys.prompts(4), 28)
    said = {i for row in rows for i in row["prompt_ids"] + row["response_ids"]}
    mask = next(i for i in range(150, toys.VOCAB) if i not in said)
    data = toys.write_jsonl(folder / "rows.jsonl", rows)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"""
output_dir: {folder}/run
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 64}}
drafter: {{block_size: 8, mask_token_id: {mask}, target_layer_ids: [1, 3], num_hidden_layers: 2,
          sliding_window: 16, layer_types: [sliding_attention, full_attention], selector_rank: 12,
          selector_top_k: 8}}
optimizer: {{lr: 3e-3}}
train: {{max_steps: 120, global_batch_size: 4, micro_batch_size: 4, num_anchors: 64, log_every_steps: 40}}
export: {{precision: float32}}
track: {{wandb: disabled, progress: false}}
""")
    export = train(load_recipe(str(recipe)))
    run = open_source(str(export), str(recipe), [])
    return SimpleNamespace(folder=folder / "run", export=export, rows=rows, step=run.step, recipe=recipe)
