"""Engines that run on a CPU load our export and draft what we draft, whatever its config says."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import toys

from dflash_train.assets import resolve
from dflash_train.config.load import load_recipe
from dflash_train.export import gguf_files, gguf_measured
from dflash_train.regenerate import regenerate
from dflash_train.train import train

roundtrip = toys.script("engine_roundtrip", "scripts")
pytestmark = pytest.mark.slow

PROMPTS, TOKENS = 6, 28
VARIANTS = ["window - 1", "window + 1", "full", "mixed", "causal", "softcap", "multiplier", "embedding scale"]
# MLX takes the longest; what it does with a window is counted by the script.
MLX = [roundtrip.BASE, "full"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A drafter for the embedded target that has learned its answers to half of the prompts; windows of 16."""
    folder = tmp_path_factory.mktemp("engines")
    knobs = [f"output_dir={folder}/run", "regenerate.limit=3", f"regenerate.output={folder}/rows.jsonl", "regenerate.max_new_tokens=48",
             f"data.train=[{folder}/rows.jsonl]", "data.heldout=[]", "drafter.sliding_window=16", "train.max_steps=50",
             "train.log_every_steps=25", "evaluate.client=off", "track.progress=false"]  # fmt: skip
    recipe = load_recipe("demo", knobs)
    regenerate(recipe)
    return train(recipe)


@pytest.fixture(scope="module")
def work(drafter, tmp_path_factory):
    """(work, ours): every variant, and prompts of which it has seen half."""
    target, prompts = Path(resolve("embedded", "target")), Path(resolve("embedded", "prompts"))
    folder = tmp_path_factory.mktemp("work")
    return roundtrip.prepare(drafter, target, prompts, folder, count=PROMPTS, most=TOKENS, which=VARIANTS)


def some(work, names):
    """The same work with fewer drafters."""
    return roundtrip.Work(
        target=work.target,
        drafters={name: work.drafters[name] for name in names},
        prompts=work.prompts,
        texts=work.texts,
        folder=work.folder,
    )


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}: make rivals")


def rows_of(engine, did, work, ours):
    return [roundtrip.compare(engine, variant, result, work, ours) for variant, result in did["drafters"].items()]


def test_the_reference(work):
    need("dflash")
    work, ours = work
    did = roundtrip.run_worker("reference", work, ours)
    rows = rows_of("reference", did, work, ours)
    assert [roundtrip.wrong(row) for row in rows] == [None] * (1 + len(VARIANTS))
    for row in rows:
        assert row["identical"] == row["proposals"] > 20
        assert row["rounds_identical"] == row["text_identical"] == PROMPTS
        assert row["variant"] == roundtrip.BASE or row["telling"] > 0, row
    # What a client would do that took another window, or none, is found out.
    for other in ("window + 1", "window - 1", "full", "causal", "softcap"):
        row = roundtrip.compare("reference", roundtrip.BASE, did["drafters"][other], work, ours)
        assert row["text_identical"] == PROMPTS and "proposals are ours" in roundtrip.wrong(row)


def test_llama_cpp(work):
    need("xllamacpp", "sentencepiece")
    work, ours = work
    did = roundtrip.run_worker("llama.cpp", work, ours)
    rows = rows_of("llama.cpp", did, work, ours)
    assert [roundtrip.wrong(row) for row in rows] == [None] * (1 + len(VARIANTS))
    for row in rows:
        assert row["accepted"] == row["our_accepted"] > 20
        assert row["rounds_identical"] == row["text_identical"] == PROMPTS
    assert sum(row["telling"] > 0 for row in rows) >= 4
    row = roundtrip.compare("llama.cpp", roundtrip.BASE, did["drafters"]["full"], work, ours)
    assert row["text_identical"] == PROMPTS and "other rounds" in roundtrip.wrong(row)


def test_what_fewer_bits_cost_is_kept_as_a_push_wants_it(work, tmp_path):
    need("xllamacpp", "sentencepiece")
    work, ours = work
    work = some(work, [roundtrip.BASE])
    whole, rounded = roundtrip.stored_as(work, ours, ["f32", "q4_0"], tmp_path, "tiny")
    assert set(gguf_files(tmp_path)) == {"tiny-F32.gguf", "tiny-Q4_0.gguf"}
    assert rounded["mebibytes"] < whole["mebibytes"] / 4 and whole["texts_identical"] == PROMPTS
    engine = roundtrip.ENGINES["llama.cpp"]
    taken = sum(
        r.accepted
        for p, t in zip(work.prompts, work.texts)
        for r in ours.rounds(roundtrip.BASE, t, len(p["ids"]), engine)
    )
    assert whole["accepted"] == taken and whole["passes"] == whole["tokens"] - taken
    measured = gguf_measured(tmp_path)["tiny-Q4_0.gguf"]
    assert measured == {k: rounded[k] for k in ("tau", "tokens")} | {
        "rounds": rounded["passes"],
        "reference": whole["tau"],
    }


def test_mlx(work):
    need("mlx_lm", "dflash")
    work, ours = work
    work = some(work, MLX)
    base, full = rows_of("mlx", roundtrip.run_worker("mlx", work, ours), work, ours)
    assert roundtrip.wrong(base) is roundtrip.wrong(full) is None
    assert full["identical"] == full["proposals"] > 20 and full["rounds_identical"] == PROMPTS
    assert base["proposals"] > 0  # before its ring loses the order


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_of_their_own_environment(work, engine):
    if not os.environ.get("DFLASH_VLLM_PYTHON"):
        pytest.skip("set DFLASH_VLLM_PYTHON: python scripts/install_rivals.py vllm FOLDER (3.4 GB)")
    work, ours = work
    if engine == "vllm":  # a start for each drafter
        work = some(work, [roundtrip.BASE, "mixed"])
    rows = rows_of(engine, roundtrip.run_worker(engine, work, ours), work, ours)
    assert [roundtrip.wrong(row) for row in rows] == [None] * len(rows)
    assert all(row["proposals"] > 20 for row in rows)


def test_a_worker_that_fails_says_why(work):
    need("xllamacpp", "sentencepiece")
    work, ours = work
    nowhere = {roundtrip.BASE: dict.fromkeys(("target", "drafter"), str(work.folder / "nowhere"))}
    with pytest.raises(ValueError, match="llama.cpp: its worker ended with "):
        roundtrip.run_worker("llama.cpp", work, ours, nowhere)
