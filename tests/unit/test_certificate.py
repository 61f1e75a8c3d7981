"""A certificate changes with all that decides the data, and with nothing else."""

from __future__ import annotations

import json

import pytest
import toys

from dflash_train.build import build_stream, certify_rows, outline
from dflash_train.config.load import load_recipe
from dflash_train.data.certificate import (
    check_certificate,
    differences,
    digest_of,
    file_hashes,
    read_certificate,
    write_certificate,
)
from dflash_train.data.template import tokenizer_hash
from dflash_train.export import _data_facts

ROWS = [
    {"id": f"r{i}", "messages": [{"role": "user", "content": f"w{20 + i}"}, {"role": "assistant", "content": "w30 w31 w32"}]}
    for i in range(3)
] + [{"id": "bad", "messages": []}]  # fmt: skip


@pytest.fixture
def certify(tmp_path, target_dir):
    def certify(*overrides: str, rows=ROWS, name="rows.jsonl"):
        data = toys.write_jsonl(tmp_path / name, rows)
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 24, max_dropped: 0.5}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8}}
""")
        o = outline(load_recipe(str(path), list(overrides)))
        return certify_rows(o, build_stream(o))

    return certify


def test_counts(certify):
    found = certify()
    assert (found.rows, found.kept, found.dropped) == (4, 3, {"no_messages": 1})
    assert (found.documents, found.supervised, found.mask_token_occurrences) == (3, 12, 0)
    assert found.ratio == round(found.supervised / found.tokens, 6)
    assert found.digest == digest_of(found) and found.digest in found.line()


def test_the_same_data_have_the_same_certificate(certify):
    assert certify() == certify()
    assert differences(certify(), certify(name="renamed.jsonl")) == []


@pytest.mark.parametrize(
    ("field", "override"),
    [
        ("settings", "data.max_length=12"),
        ("settings", "data.limit=2"),
        ("chat_template_kwargs", "data.chat_template_kwargs={enable_thinking: true}"),
        ("template", "data.chat_template={template}"),
    ],
)
def test_what_decides_the_data_is_named_with_both_values(certify, tmp_path, field, override):
    template = tmp_path / "other.jinja"
    template.write_text(toys.TEMPLATE.replace("{{ m.content }}", "w99 {{ m.content }}"))
    before, after = certify(), certify(override.replace("{template}", str(template)))
    lines = differences(before, after)
    assert any(line.startswith(f"{field}: certified ") and ", now " in line for line in lines)
    assert before.digest != after.digest


def test_other_rows_are_refused_by_hash_and_by_what_came_out(certify, tmp_path):
    path = tmp_path / "certificate.json"
    write_certificate(certify(), path)
    certify(f"data.certificate={path}")
    changed = [
        {**ROWS[0], "messages": [*ROWS[0]["messages"][:1], {"role": "assistant", "content": "w40 w41"}]},
        *ROWS[1:],
    ]
    with pytest.raises(ValueError, match=rf"(?s)data.certificate = {path}.*files: certified.*sha256.*now.*fingerprint"):
        certify(f"data.certificate={path}", rows=changed)


def test_another_tokenizer_is_refused(certify):
    found = certify()
    tokenizer = toys.toy_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["w20", "w20 w21"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before, "using a tokenizer does not change it"
    tokenizer.add_tokens(["another"])
    assert tokenizer_hash(tokenizer) != before == found.tokenizer


def test_a_changed_or_missing_file_is_no_certificate(certify, tmp_path):
    path = tmp_path / "certificate.json"
    with pytest.raises(ValueError, match="no such file"):
        read_certificate(path)
    found = certify()
    write_certificate(found, path)
    assert read_certificate(path) == found
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"kept": 4}))
    with pytest.raises(ValueError, match=f"digest is {found.digest}, its content has .*changed after"):
        check_certificate(str(path), found)
    for text in ("{}", "[1", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no certificate"):
            read_certificate(path)


def test_every_kind_of_source_has_hashes(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/a.jsonl", "a.jsonl", "a.failed.jsonl", "README.md"):
        (tmp_path / name).write_text(name)
    folder = file_hashes(str(tmp_path))
    assert [record["name"] for record in folder] == ["a.jsonl", "b/a.jsonl"], "those that are read"
    (weighted,) = file_hashes({"path": str(tmp_path / "a.jsonl"), "weight": 0.5})
    assert weighted == {**folder[0], "weight": 0.5}
    assert file_hashes({"path": str(tmp_path / "a.jsonl"), "weight": 1, "domain": "x"}) == [
        {**folder[0], "domain": "x"}
    ]
    assert file_hashes("owner/name:train") == [{"name": "owner/name:train", "sha256": None}]


def test_a_run_keeps_its_certificate_and_its_export_names_it(overfitted):
    found = read_certificate(overfitted.folder / "certificate.json")
    assert found.documents == len(overfitted.rows)
    record = json.loads((overfitted.export / "dflash_train.json").read_text())["provenance"]
    assert record["data_certificate"] == found.digest and record["data_tokens"] == found.tokens
    card = (overfitted.export / "README.md").read_text()
    assert f"- data_certificate: {found.digest}" in card and "rows.jsonl" not in card
    assert _data_facts(overfitted.folder / "nothing") == {}
