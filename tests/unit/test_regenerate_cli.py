"""The regeneration command: exit codes, what it writes, and how it goes on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import toys

from dflash_train.data.read import read_conversations

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("script_regenerate", ROOT / "data_prep" / "regenerate.py")
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)


@pytest.fixture
def run(tmp_path, target_dir, capsys):
    """Runs the command on rows; returns its exit code and the manifest that it printed."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
target: {{path: {target_dir}}}
regenerate: {{prompts: {tmp_path}/prompts.jsonl, output: {tmp_path}/made/out.jsonl, max_new_tokens: 8, max_length: 32}}
track: {{progress: false}}
""")

    def run(rows: list[dict], *overrides: str) -> tuple[int, dict]:
        toys.write_jsonl(tmp_path / "prompts.jsonl", rows)
        capsys.readouterr()
        code = command.main(["-c", str(recipe), *overrides])
        return code, json.loads(capsys.readouterr().out)

    return run


def asking(name: str, text: str, answer: str | None = None) -> dict:
    turns = [{"role": "user", "content": text}]
    return {"id": name, "messages": turns + ([{"role": "assistant", "content": answer}] if answer else [])}


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "made" / "out.jsonl").open()]


def test_answers_are_the_targets_and_the_rows_can_be_trained_on(run, tmp_path):
    code, manifest = run([asking("a", "w20 w21", "w40"), asking("b", "w22")])
    assert code == 0 and (manifest["rows"], manifest["new_rows"], manifest["failed"]) == (2, 2, 0)
    assert json.loads((tmp_path / "made" / "out.jsonl.manifest.json").read_text()) == manifest
    rows = {row["id"]: row for row in written(tmp_path)}
    assert rows.keys() == {"a", "b"}
    for row in rows.values():
        assert row["response_ids"] == toys.greedy(toys.toy_model(), row["prompt_ids"], 8, stop=(2,))
        assert row["generator"] == manifest["generator"]
    conversations, kept = read_conversations([tmp_path / "made" / "out.jsonl"])
    assert kept.kept == len(conversations) == 2
    assert not (tmp_path / "made" / "out.jsonl.failed.jsonl").exists()


def test_a_failed_conversation_gives_exit_code_3_and_is_tried_again(run, tmp_path):
    rows = [asking("short", "w20"), asking("long", " ".join(f"w{i}" for i in range(20, 60)))]
    for _ in range(2):
        code, manifest = run(rows)
        assert code == 3 and manifest["failed"] == 1
        (failure,) = map(json.loads, (tmp_path / "made" / "out.jsonl.failed.jsonl").open())
        assert failure["id"] == "long" and failure["reason"].startswith("prompt_too_long: ")
        assert [row["id"] for row in written(tmp_path)] == ["short"]
    code, manifest = run(rows, "regenerate.max_length=64")
    assert code == 0 and manifest["new_rows"] == 1
    assert not (tmp_path / "made" / "out.jsonl.failed.jsonl").exists()


def test_a_second_call_writes_nothing_new(run, tmp_path):
    rows = [asking("a", "w20"), asking("b", "w21")]
    run(rows)
    before = written(tmp_path)
    code, manifest = run(rows)
    assert code == 0 and (manifest["rows"], manifest["new_rows"]) == (2, 0)
    assert written(tmp_path) == before


def test_other_sampling_into_the_same_file_is_refused(run):
    run([asking("a", "w20")])
    with pytest.raises(ValueError, match="comes from another generator(?s:.*)name another regenerate.output"):
        run([asking("a", "w20")], "regenerate.temperature=0.7")


def test_what_became_of_the_prompts_is_told(run, capsys):
    """Dropped prompts are in the manifest, which is printed."""
    _, manifest = run([asking("a", "w20"), {"id": "b", "messages": []}], "data.max_dropped=0.5")
    assert manifest["prompts"] == 1 and sum(manifest["dropped_prompts"].values()) == 1


@pytest.mark.parametrize("name", ["prompts", "output"])
def test_a_missing_value_is_named(tmp_path, target_dir, name):
    other = {"prompts": "output", "output": "prompts"}[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(f"target: {{path: {target_dir}}}\nregenerate: {{{other}: {tmp_path}/x.jsonl}}\n")
    with pytest.raises(ValueError, match=f"regenerate.{name} has no value"):
        command.main(["-c", str(path)])
