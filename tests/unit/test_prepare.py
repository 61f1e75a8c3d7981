"""Tokenised data: the same however it is made, made once, and made again when anything that decides it changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toys

from dflash_train.build import build_stream, heldout_examples, outline, read_examples, run_identity
from dflash_train.config.load import load_recipe
from dflash_train.data import prepare as prepare_module
from dflash_train.data import prepare as preparing
from dflash_train.data.corpus import Corpus, occurrences
from dflash_train.data.inspection import look
from dflash_train.data.stream import RowStream
from dflash_train.data.template import Template
from dflash_train.data.workers import spread

TEMPLATE = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor -%}
{% if add_generation_prompt %}<|im_start|> assistant {% if enable_thinking is defined and not enable_thinking %}<think> {% endif %}{% endif %}"""


def rows(count: int, first: int = 0) -> list[dict]:
    """Conversations of toy words, with a row of ids and a bad one among them."""
    made = []
    for i in range(first, first + count):
        words = [f"w{12 + (i * 7 + k) % 130}" for k in range(3 + i % 9)]
        messages = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": " ".join(words)}]
        made.append({"id": f"r{i}", "domain": f"d{i % 3}", "messages": messages})
    made[1] = {
        "id": "ids",
        "prompt_ids": [20, 21],
        "response_ids": [30, 31, 32],
        "finish_reason": "length",
        "generator": {"model": "m"},
    }
    made[2] = {"id": "bad", "messages": []}
    return made


@pytest.fixture
def recipe(tmp_path, target_dir):
    data = toys.write_jsonl(tmp_path / "rows.jsonl", rows(40))
    (tmp_path / "template.jinja").write_text(TEMPLATE)

    def recipe(*overrides: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 64, cache_dir: {tmp_path}/cache, chat_template: {tmp_path}/template.jinja}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8}}
train: {{global_batch_size: 2, num_anchors: 8}}
""")
        return load_recipe(str(path), list(overrides))

    return recipe


def read(recipe) -> Corpus:
    return read_examples(outline(recipe), recipe.data.train, what="train", limit=recipe.data.limit)


def content(corpus) -> list[tuple]:
    return [(e.id, e.domain, e.token_ids.tolist(), e.supervised.tolist(), e.finish_reason) for e in corpus]


def keys(text: str) -> list[str]:
    return re.findall(r"tokenised data ([0-9a-f]{24}) of", text)


def test_examples_are_views_of_what_tokenising_gives(recipe):
    corpus = read(recipe())
    assert len(corpus) == 39 and corpus.kept.dropped == {"no_messages": 1}
    e = corpus[1]
    assert (e.id, e.domain, e.finish_reason) == ("ids", "default", "length")
    assert e.token_ids.tolist() == [20, 21, 30, 31, 32] and e.supervised.tolist() == [False] * 2 + [True] * 3
    assert e.token_ids.dtype == np.int32 and np.shares_memory(e.token_ids, corpus.tokens)
    assert corpus[-1].id == "r39" and [x.id for x in corpus[:2]] == ["r0", "ids"]
    assert len(list(corpus)) == 39 and sum(corpus.origins.values()) == 39
    with pytest.raises(IndexError):
        corpus[39]


def test_a_sequence_on_disk_is_the_stream_that_a_list_is(recipe):
    corpus = read(recipe())
    listed = list(corpus)
    config = build_stream(outline(recipe())).config
    a, b = RowStream(corpus, config), RowStream(listed, config)
    assert a.fingerprint == b.fingerprint
    assert [a.rows_of_step(s) for s in range(9)] == [b.rows_of_step(s) for s in range(9)]
    for token in (20, 31, 155):
        assert occurrences(corpus, token) == occurrences(listed, token)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_result_does_not_depend_on_the_number_of_processes(recipe, tmp_path, workers):
    data = toys.write_jsonl(tmp_path / "many.jsonl", rows(700) + [{"id": "late", "messages": []}])
    given = [f"data.train=[{data}]", "data.cache_dir=null"]
    one, several = read(recipe(*given, "data.workers=1")), read(recipe(*given, f"data.workers={workers}"))
    assert content(one) == content(several) and one.kept == several.kept and one.fingerprint == several.fingerprint
    assert len(one) == 699


def test_a_process_needs_no_guard_in_the_script_that_starts_it(tmp_path):
    """Nor a script at all."""
    code = "from dflash_train.data.workers import spread; print(list(spread(abs, range(-5, 0), 2)))"
    for command in (["-c", code], ["-"]):
        done = subprocess.run([sys.executable, *command], input=code, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "[5, 4, 3, 2, 1]", done.stderr


def test_a_process_that_dies_or_fails_is_an_error_and_leaves_none_behind():
    with pytest.raises(ValueError, match="data.workers = 2: a tokenising process ended with code 3"):
        list(spread(os._exit, [3] * 8, 2))
    with pytest.raises(RuntimeError, match="(?s)in a tokenising process:.*ZeroDivisionError"):
        list(spread(divmod_by_zero, range(8), 2))
    assert not toys.tokenising_processes()


divmod_by_zero = (1).__mod__  # an importable function would need a module of its own


def test_data_is_made_once(recipe, monkeypatch, capsys):
    first = read(recipe())
    assert "39 documents tokenised in" in capsys.readouterr().out
    monkeypatch.setattr(preparing, "tokenize_chunk", None)
    second = read(recipe())
    assert content(first) == content(second) and first.kept == second.kept
    assert "tokenised in" not in capsys.readouterr().out


def test_every_input_of_the_result_is_in_the_key_which_is_printed_with_them(recipe, tmp_path, capsys):
    def key(*overrides: str, template: str = TEMPLATE) -> str:
        (tmp_path / "template.jinja").write_text(template)
        read(recipe(*overrides))
        out = capsys.readouterr().out
        assert "content [" in out and "max_length" in out and "template" in out and "code" in out
        return keys(out)[0]

    made = {
        key("data.max_length=32"),
        key("data.max_length=64"),
        key("data.max_length=64", template=TEMPLATE.replace("{% endfor -%}", "{% endfor %}")),
        key("data.max_length=64", "data.chat_template_kwargs.enable_thinking=true"),
        key("data.drop_truncated=true"),
        key("data.reasoning_rows=whole"),
        key("data.long_documents=window"),
        key("data.long_documents=window", "data.window_overlap=3"),
        key("data.limit=15"),
    }
    assert len(made) == 9
    assert key() == key("data.max_length=64") == key("train.seed=3", "data.workers=1", "data.pack=false")
    same = key()
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text)
    assert key() == same
    (tmp_path / "rows.jsonl").write_text(text.replace("w12", "w13"))
    assert key() != same


def test_each_length_and_template_gets_its_own_data(recipe, tmp_path):
    data = toys.write_jsonl(tmp_path / "long.jsonl", [{"id": "a", "prompt_ids": [20] * 4, "response_ids": [30] * 90}])
    lengths = [len(read(recipe(f"data.train=[{data}]", f"data.max_length={n}"))[0].token_ids) for n in (32, 64, 32)]
    assert lengths == [32, 64, 32]
    before = read(recipe())[0].token_ids.tolist()
    (tmp_path / "template.jinja").write_text(
        TEMPLATE.replace("<|im_start|> {{ m.role }}", "<|im_start|> {{ m.role }} w99")
    )
    (tmp_path / "template.jinja").write_text(
        TEMPLATE.replace("{{ m.role }} {{", "{{ m.role }} w99 {{").replace("assistant {%", "assistant w99 {%")
    )
    assert read(recipe())[0].token_ids.tolist() != before


def test_a_change_of_code_is_a_change_of_key(recipe, monkeypatch, tmp_path, capsys):
    read(recipe())
    monkeypatch.setattr(preparing, "CODE_HASH", "0" * 16)
    read(recipe())
    first, second = keys(capsys.readouterr().out)
    assert first != second
    assert {"answers.py", "chat.py", "read.py", "layouts.py", "files.py", "template.py", "windows.py"} <= set(
        preparing.CODE
    )


@pytest.mark.parametrize("name", ["tokens.bin", "masks.bin", "ids.bin", "length.bin", "header.json"])
@pytest.mark.parametrize("how", ["truncated", "changed", "missing"])
def test_damaged_data_is_made_again_and_says_so(recipe, tmp_path, capsys, name, how):
    expected = content(read(recipe()))
    [path] = (tmp_path / "cache").glob(f"*/{name}")
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if how == "truncated" else bytes([whole[0] ^ 1]) + whole[1:])
    capsys.readouterr()
    assert content(read(recipe())) == expected
    out = capsys.readouterr().out
    assert "is damaged" in out and "made again" in out and "39 documents tokenised" in out
    read(recipe())
    assert "is damaged" not in capsys.readouterr().out


def test_a_run_that_was_killed_while_it_wrote_leaves_nothing_that_is_read(recipe, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing.CorpusWriter, "finish_with", killed)
        with pytest.raises(KeyboardInterrupt):
            read(recipe())
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    key = next((tmp_path / "cache").glob("*.lock")).stem
    (tmp_path / "cache" / f"{key}.tmp-abc").mkdir()  # of one that could not even clean up
    assert len(read(recipe())) == 39
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [key, f"{key}.lock"]


def test_the_same_rows_under_another_name_are_found_and_places_follow(recipe, tmp_path, capsys):
    read(recipe())
    moved = tmp_path / "moved.jsonl"
    (tmp_path / "rows.jsonl").rename(moved)
    corpus = read(recipe(f"data.train=[{moved}]"))
    assert len(set(keys(capsys.readouterr().out))) == 1
    assert corpus.kept.examples == {"no_messages": [f"{moved}:3"]}


def test_without_a_cache_nothing_is_left(recipe, tmp_path):
    before = set(Path("/tmp").glob("dflash_train-*"))
    corpus = read(recipe("data.cache_dir=null"))
    assert len(content(corpus)) == 39 and not (tmp_path / "cache").exists()
    assert set(Path("/tmp").glob("dflash_train-*")) == before


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"data.cache_dir = .*file/cache: Not a directory; name a folder that can be written, or null"
    ):
        read(recipe(f"data.cache_dir={tmp_path}/file/cache"))


def test_a_file_that_grows_while_it_is_read_is_refused(recipe, tmp_path, monkeypatch):
    def growing(*args, **more):
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write("\n")
        return done(*args, **more)

    done = preparing.tokenize_chunk
    monkeypatch.setattr(preparing, "tokenize_chunk", growing)
    with pytest.raises(ValueError, match="a file was written while it was read"):
        read(recipe("data.workers=1"))


def test_processes_that_want_the_same_data_wait_for_the_one_that_makes_it(recipe, tmp_path):
    """Without any collective: four processes, as the ranks of a machine, one of which tokenises."""
    recipe()
    data = toys.write_jsonl(tmp_path / "many.jsonl", rows(600))
    code = f"""
from dflash_train.build import outline, read_examples
from dflash_train.config.load import load_recipe
r = load_recipe({str(tmp_path / "recipe.yaml")!r}, ["data.train=[{data}]"])
c = read_examples(outline(r), r.data.train, what="train")
print("result", len(c), c.fingerprint)
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "LOCAL_RANK": str(i)}, text=True)
        for i in range(4)
    ]  # fmt: skip
    outs = [process.communicate(timeout=120)[0] for process in running]
    assert len({re.search("result .*", out)[0] for out in outs}) == 1
    assert sum("documents tokenised in" in out for out in outs) == 1


# --- the recipe ---


def test_sources_are_reported_with_their_share_and_tagged(recipe, tmp_path, capsys):
    other = toys.write_jsonl(tmp_path / "other.jsonl", rows(20, first=100)[3:])
    given = f"data.train=[{tmp_path}/rows.jsonl,{{path: {other}, weight: 2, domain: code}}]"
    o = outline(recipe(given))
    stream = build_stream(o)
    out = capsys.readouterr().out
    assert re.search(rf" 39 +39 +\d+ +[\d.]+% +1 +[\d.]+%  {tmp_path}/rows.jsonl", out)
    assert re.search(rf" 17 +17 +\d+ +[\d.]+% +2 +[\d.]+%  {other} \(code\)", out)
    assert re.search(r"packing: \d+ rows of 64 tokens, [\d.]+% padding, [\d.]+ s", out)
    assert {e.domain for e in stream.examples[39:]} == {"code"} and stream.examples[0].domain == "d0"
    assert run_identity(o, stream)["weights"] == [1.0, 2.0]
    one = outline(recipe())
    assert "weights" not in run_identity(one, build_stream(one))


def test_weights_and_tags_need_no_new_tokenising(recipe, tmp_path, capsys):
    read(recipe())
    corpus = read(recipe(f"data.train=[{{path: {tmp_path}/rows.jsonl, weight: 0.5, domain: all}}]"))
    assert len(set(keys(capsys.readouterr().out))) == 1 and corpus[0].domain == "all"


def test_windows_are_for_training_and_held_out_rows_are_cut(recipe, tmp_path):
    row = {"id": "a", "prompt_ids": [20] * 4, "response_ids": list(range(30, 130))}
    data = toys.write_jsonl(tmp_path / "long.jsonl", [row])
    o = outline(recipe(f"data.train=[{data}]", f"data.heldout=[{data}]", "data.long_documents=window"))
    assert [e.id for e in build_stream(o).examples] == ["a@0", "a@1"]
    [held] = heldout_examples(o)
    assert held.id == "a" and len(held.token_ids) == 64


def test_who_wrote_the_rows_is_kept_with_them(recipe, tmp_path, capsys):
    origin = {"model": "m", "template_hash": "0" * 16, "chat_template_kwargs": {}}
    made = {"id": "a", "prompt_ids": [9], "response_ids": [10, 11], "generator": origin}
    given = f"data.train=[{toys.write_jsonl(tmp_path / 'made.jsonl', [made])}]"
    for _ in range(2):
        read(recipe(given))
        out = capsys.readouterr().out
        assert "1 of 1 by m" in out and "token ids of 1 of 1 rows were rendered by another chat template" in out
    assert "tokenised in" not in out


def test_why_no_row_can_be_used_is_kept_with_the_rows(recipe, tmp_path):
    """And found again under another name of the file; who wrote the rows is looked at first."""
    (tmp_path / "template.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w30"}]
    for name in ("a", "b"):
        data = toys.write_jsonl(tmp_path / f"{name}.jsonl", [{"id": "r", "messages": messages}])
        with pytest.raises(ValueError, match=rf"row r \({data}:1\).*renders nothing for this answer"):
            read(recipe(f"data.train=[{data}]"))
    other = {"id": "r", "messages": messages, "generator": {"model": "toy", "template_hash": "0" * 16}}
    toys.write_jsonl(tmp_path / "b.jsonl", [other])
    with pytest.raises(ValueError, match="generator.template_hash of 1 of 1 rows"):
        read(recipe(f"data.train=[{tmp_path / 'b.jsonl'}]"))


def test_the_tokens_that_stop_serving_are_in_the_key(recipe, target_dir):
    tokenizer = toys.toy_tokenizer()
    data = recipe().data
    located = [preparing.locate(data.train[0])]
    options = {"reasoning_rows": data.reasoning_rows}
    first, second = (
        preparing.key_inputs(located, Template(tokenizer, ids), options, None)
        for ids in ([], [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    )
    assert first != second and {k for k in first if first[k] != second[k]} == {"stops"}


def test_rows_that_were_made_without_knowing_the_target_are_held_against_its_vocabulary(recipe, tmp_path):
    made = {"id": "a", "prompt_ids": [9], "response_ids": [10, 5000]}
    r = recipe(f"data.train=[{toys.write_jsonl(tmp_path / 'made.jsonl', [made])}]")
    assert len(look(r).corpus) == 1
    with pytest.raises(ValueError, match="train row a: .* token id 5000, but the target's embedding has only"):
        read(r)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.window_overlap=8", "data.window_overlap = 8: has no effect with data.long_documents = cut"),
        (
            "data={long_documents: window, window_overlap: 63, max_length: 64}",
            r"must be in \[0, data.max_length - 2 = 62\]",
        ),
        ("data.workers=0", "data.workers = 0: must be null or at least 1"),
        ("data.train=[{path: a, wait: 1}]", r"data.train\[0\]: unknown key 'wait'; did you mean 'weight'"),
    ],
)
def test_contradictions_are_refused_with_the_recipe(recipe, override, message):
    with pytest.raises(ValueError, match=f"recipe.yaml: {message}|recipe.yaml: data.*{message}"):
        recipe(override)


def test_the_header_is_json_that_says_what_is_there(recipe, tmp_path):
    read(recipe())
    [path] = (tmp_path / "cache").glob("*/header.json")
    body = json.loads(json.loads(path.read_text())["body"])
    assert body["documents"] == 39 and body["rows"] == [39] and body["kept"]["kept"] == 39


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    def nowhere(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    with pytest.raises(ValueError, match="data.cache_dir = ~/x.*set HOME"):
        prepare_module._home_of("~/x")
