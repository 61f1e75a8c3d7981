"""The regeneration command: exit codes, what it writes, and how it goes on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import toys

from dflash_train.config.load import load_recipe
from dflash_train.config.mixture import settings
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

    def run(rows: list[dict], *arguments: str) -> tuple[int, dict]:
        toys.write_jsonl(tmp_path / "prompts.jsonl", rows)
        capsys.readouterr()
        code = command.main(["-c", str(recipe), *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def asking(name: str, text: str, answer: str | None = None) -> dict:
    turns = [{"role": "user", "content": text}]
    return {"id": name, "messages": turns + ([{"role": "assistant", "content": answer}] if answer else [])}


def written(folder: Path, name: str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "made" / name).open()]


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
    with pytest.raises(ValueError, match=r"differs in max_length\)"):  # rows of two limits are not mixed
        run(rows, "regenerate.max_length=64")
    code, manifest = run([rows[0], asking("long", "w20 w21")])
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


def test_the_help_tells_exit_codes_and_options(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    for part in ("--shard i/n", "--merge", "143: SIGTERM", "regenerate.mixture", "regenerate.base_urls"):
        assert part in said


# --- shards ---


MANY = [asking(f"p{i}", f"w{20 + i} w{30 + i}") for i in range(30)]
TOO_LONG = asking("long", " ".join(f"w{i}" for i in range(20, 60)))


def test_shards_of_two_sizes_join_to_what_one_run_writes(run, tmp_path):
    rows = [*MANY, TOO_LONG]
    code, whole = run(rows, "regenerate.output=" + str(tmp_path / "made" / "whole.jsonl"))
    assert code == 3 and whole["failed"] == 1
    for count in (1, 3):
        made = {}
        for i in range(count):
            code, manifest = run(rows, "--shard", f"{i}/{count}")
            ids = [row["id"] for row in written(tmp_path, f"out.{i}-of-{count}.jsonl")]
            made[i] = set(ids)
            assert manifest["shard"] == f"{i}/{count}" and manifest["prompts"] == 31
            assert manifest["rows"] == len(ids) == manifest["shard_prompts"] - manifest["failed"]
        assert sum(map(len, made.values())) == 30 == len(set.union(*made.values())) and all(made.values())
        code, merged = run(rows, "--merge")
        assert (code, merged["rows"], merged["failed"], merged["complete"]) == (3, 30, 1, True)
        assert [shard["rows"] for shard in merged["shards"]] == [len(ids) for ids in made.values()]
        assert [row["id"] for row in written(tmp_path)] == [row["id"] for row in MANY]
        by_id = {row["id"]: row for row in written(tmp_path, "whole.jsonl")}
        assert {row["id"]: row for row in written(tmp_path)} == by_id
        (failure,) = written(tmp_path, "out.jsonl.failed.jsonl")
        assert failure["id"] == "long" and failure["reason"].startswith("prompt_too_long: ")
        assert run(rows, "--merge")[1]["sha256"] == merged["sha256"]  # once more changes nothing
        code, again = run(rows)  # nor does a run without shards, which finds every row there
        assert (again["new_rows"], again["sha256"]) == (0, merged["sha256"])
        for path in (tmp_path / "made").glob("out.*-of-*"):
            path.rename(path.with_name("old-" + path.name))
    assert {path.name for path in (tmp_path / "made").iterdir() if "old-" not in path.name} == {
        "out.jsonl", "out.jsonl.manifest.json", "out.jsonl.failed.jsonl", "whole.jsonl", "whole.jsonl.manifest.json",
        "whole.jsonl.failed.jsonl",
    }  # fmt: skip


def test_a_shard_depends_on_the_ids_alone(run, tmp_path):
    run(MANY, "--shard", "1/3")
    before = {row["id"] for row in written(tmp_path, "out.1-of-3.jsonl")}
    code, manifest = run([asking("new", "w20"), *MANY[::-1]], "--shard", "1/3")
    assert code == 0 and manifest["new_rows"] <= 1
    assert {row["id"] for row in written(tmp_path, "out.1-of-3.jsonl")} - {"new"} == before


def test_shards_that_are_not_the_whole_are_refused_with_counts_and_names(run, tmp_path):
    made = tmp_path / "made"
    with pytest.raises(ValueError, match="no shard such as out.0-of-4.jsonl; write them first"):
        run(MANY, "--merge")
    for i in range(3):
        run(MANY, "--shard", f"{i}/3")
    files = [made / f"out.{i}-of-3.jsonl" for i in range(3)]
    good = [path.read_bytes() for path in files]
    lines = [text.splitlines(keepends=True) for text in good]
    ids = [[json.loads(line)["id"] for line in part] for part in lines]

    def refused(*contents: bytes | None) -> str:
        for path, content in zip(files, contents, strict=True):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        with pytest.raises(ValueError, match="its shards are not the whole of it") as error:
            run(MANY, "--merge")
        assert not (made / "out.jsonl").exists() and not (made / "out.jsonl.manifest.json").exists()
        return str(error.value)

    lost = [row["id"] for row in MANY if row["id"] in ids[1]]
    said = refused(good[0], None, good[2])
    assert f"shard 1/3, out.1-of-3.jsonl (does not exist): {len(lost)} missing: {', '.join(lost[:3])}, ..." in said
    assert "shard 0/3" not in said and "shard 2/3" not in said
    said = refused(good[0][:-5], good[1], good[2])  # cut in its last line
    assert f"1 missing: {ids[0][-1]}" in said
    assert f"1 there twice: {ids[2][0]}" in refused(good[0], good[1], good[2] + lines[2][0])
    foreign = json.dumps({**json.loads(lines[0][0]), "id": "nobody"}).encode() + b"\n"
    assert "1 not of this shard's prompts: nobody" in refused(good[0] + foreign, good[1], good[2])
    assert f"1 not of this shard's prompts: {ids[0][0]}" in refused(good[0], good[1] + lines[0][0], good[2])

    files[0].write_bytes(good[0])
    files[1].write_bytes(good[1])
    with pytest.raises(ValueError, match="comes from another generator .differs in max_new_tokens"):
        run(MANY, "--merge", "regenerate.max_new_tokens=9")
    (made / "out.0-of-2.jsonl").write_text("")
    with pytest.raises(ValueError, match="shards of 2, 3 parts are there; move those of all but one away"):
        run(MANY, "--merge")
    (made / "out.0-of-2.jsonl").unlink()
    (made / "out.jsonl").write_bytes(good[0])
    with pytest.raises(ValueError, match="is there with other rows; move it away"):
        run(MANY, "--merge")
    (made / "out.jsonl").unlink()
    with pytest.raises(ValueError, match="regenerate.shard = 0/3: --merge joins all shards; leave it out"):
        run(MANY, "--merge", "regenerate.shard=0/3")
    assert run(MANY, "--merge")[1]["rows"] == 30
    with pytest.raises(SystemExit):
        run(MANY, "--merge", "--shard", "0/3")


def test_only_the_first_prompts_of_a_limit_are_divided(run):
    shards = [run(MANY, "regenerate.limit=10", "--shard", f"{i}/2")[1] for i in range(2)]
    assert sum(manifest["rows"] for manifest in shards) == 10
    assert run(MANY, "regenerate.limit=10", "--merge")[1]["rows"] == 10


# --- what is refused before anything is loaded ---


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("regenerate.shard=4/4", "regenerate.shard = 4/4: must be i/n with i from 0 to n - 1"),
        ("regenerate.shard=first", "must be i/n"),
        ("regenerate.mixture=[{weight: 0}]", r"regenerate.mixture\[0\].weight = 0: must be positive"),
        (
            "regenerate.mixture=[{}, {temprature: 1}]",
            r"mixture\[1\]: unknown key 'temprature'; did you mean 'temperature'",
        ),
        ("regenerate.mixture=[{zzz: 1}]", "unknown key 'zzz'; known: name, weight, "),
        ("regenerate.mixture=[{top_p: 1.5}]", r"top_p = 1.5: must be in \(0, 1\]"),
        ("regenerate.mixture=[{top_k: 1.5}]", "must be a whole number"),
        ("regenerate.mixture=[{temperature: hot}]", "temperature = hot: must be a finite number"),
        ("regenerate.mixture=[{chat_template_kwargs: 1}]", "must be a mapping"),
        ("regenerate.mixture=[0.7]", r"mixture\[0\] = 0.7: must be a mapping"),
        ("regenerate.mixture=[{name: a}, {name: a}]", "the name 'a' is there twice"),
        ("regenerate.mixture=[{extra_body: {a: 1}}]", "only the openai backend sends it"),
        ("regenerate.extra_body={a: 1}", "only the openai backend sends it"),
        ("regenerate.top_p=0", r"regenerate.top_p = 0.0: must be in \(0, 1\]"),
        ("regenerate.backend=openai", "the openai backend needs a server's address"),
        ("regenerate.base_urls=['localhost:8000']", "begins with http:// or https://"),
        ("regenerate.concurrency=0", "must be at least 1"),
        ("regenerate.timeout_seconds=0", "must be positive"),
        ("regenerate.max_retries=-1", "must not be negative"),
        ("regenerate.max_length=1", "at least 2"),
        ("regenerate.output=rows.jsonl.gz", "plain JSONL"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("demo", [override])


def test_numbers_of_a_mixture_may_be_written_as_yaml_reads_them(tmp_path):
    (tmp_path / "r.yaml").write_text("regenerate: {mixture: [{temperature: 6e-1, weight: 2}, {top_k: 5}]}\n")
    config = load_recipe(str(tmp_path / "r.yaml"), ["regenerate.shard=0/4"]).regenerate
    assert config.shard == "0/4"
    assert [(s.name, s.weight, s.temperature, s.top_k) for s in settings(config)] == [("0", 2, 0.6, 0), ("1", 1, 0, 5)]


def test_a_prompt_for_which_the_tokenizer_has_no_token_is_named_and_the_others_go_on(run, tmp_path, capsys):
    """The toy tokenizer is a list of words without one for unknown words."""
    rows = [asking("a", "w20 zebra w21"), asking("b", "w22")]
    toys.write_jsonl(tmp_path / "prompts.jsonl", rows)
    code = command.main(["-c", str(tmp_path / "recipe.yaml")])
    said = capsys.readouterr()
    assert code == 3 and json.loads(said.out)["rows"] == 1
    (failed,) = [json.loads(line) for line in (tmp_path / "made" / "out.jsonl.failed.jsonl").open()]
    assert failed["id"] == "a"
    for part in (f"prompt a ({tmp_path}/prompts.jsonl:1)", "no token for a word", "give its model an unk_token"):
        assert part in failed["reason"] and part in said.err
