"""What licence a drafter carries, and which one it may not begin from."""

from __future__ import annotations

import json

import pytest
import toys

from dflash_train import export, train
from dflash_train.licences import LICENCES, UNKNOWN, Source, card_licence, data_licences, decide, front_matter


def target(licence):
    return Source("target", "acme/model", licence)


def began(licence):
    return Source("init_from", "acme/drafter", licence)


def data(licence, name="acme/rows"):
    return Source("data", name, licence)


@pytest.mark.parametrize(
    ("sources", "licence"),
    [
        ([target("apache-2.0")], "apache-2.0"),
        ([target("MIT"), data("Apache-2.0"), data("CC-BY-4.0"), data("ODC-By-1.0")], "mit"),
        ([target("apache-2.0"), data("cc-by-nc-4.0")], "cc-by-nc-4.0"),
        ([target("cc-by-nc-4.0"), data("mit"), began("apache-2.0")], "cc-by-nc-4.0"),
        ([target("apache-2.0"), began("cc-by-nc-sa-4.0")], "cc-by-nc-sa-4.0"),
        ([target("apache-2.0"), data("cc-by-nc-4.0"), data("cc-by-sa-4.0", "b")], "cc-by-nc-sa-4.0"),
        ([target("apache-2.0"), data("cc-by-sa-4.0")], "cc-by-sa-4.0"),
        ([target("gpl-3.0"), data("cc-by-sa-4.0")], "other"),
        ([target("llama3.1"), data("apache-2.0")], "llama3.1"),
        ([target("gemma"), data("cc-by-nc-4.0")], "other"),
        ([target("other")], "other"),
        ([target("cc-by-nd-4.0")], "other"),
        ([target(None)], UNKNOWN),
        ([target("apache-2.0"), data("my-own-licence")], UNKNOWN),
        ([target("apache-2.0"), began(None)], UNKNOWN), ([target("other (acme)"), data("mit")], "other"),
    ],
)  # fmt: skip
def test_the_strictest_wins(sources, licence):
    decision = decide(sources, None)
    assert decision.licence == licence
    for source in sources:
        assert any(source.name in note and (source.licence or "no licence found") in note for note in decision.notes)
    if licence == UNKNOWN:
        assert any("read them before" in note for note in decision.notes)


@pytest.mark.parametrize("licence", [name for name, terms in LICENCES.items() if terms.no_derivatives])
def test_a_drafter_that_allows_no_derivatives_is_refused_unless_owned(licence):
    sources = [target("apache-2.0"), began(licence)]
    for stated in (None, "apache-2.0"):
        with pytest.raises(ValueError, match="allows no derivatives.*export.owned=true"):
            decide(sources, stated)
    assert decide(sources, "apache-2.0", owned=True).licence == "apache-2.0"


@pytest.mark.parametrize(
    ("sources", "stated"),
    [
        ([target("cc-by-nc-4.0")], "apache-2.0"), ([target("apache-2.0"), data("cc-by-sa-4.0")], "mit"), ([target("llama3.1")], "apache-2.0"),
        ([target("apache-2.0"), began("cc-by-nc-sa-4.0")], "cc-by-nc-4.0"),
    ],
)  # fmt: skip
def test_a_freer_licence_than_the_sources_is_refused(sources, stated):
    with pytest.raises(ValueError, match=f"export.license = {stated}: is freer"):
        decide(sources, stated)
    assert decide(sources, stated, owned=True).licence == stated


def test_a_stated_licence_may_be_stricter_or_stand_for_an_unknown_one():
    assert decide([target("apache-2.0")], "cc-by-nc-4.0").licence == "cc-by-nc-4.0"
    decision = decide([target(None)], "apache-2.0")
    assert (
        decision.licence == "apache-2.0"
        and "The author states" in decision.notes[-1]
        and "no licence found" in decision.notes[0]
    )
    assert decide([target("cc-by-nc-4.0")], "other").licence == "other"


def test_licences_of_data_are_read_from_the_rows(tmp_path):
    rows = [
        {"id": 1, "source": "org/a", "license": "MIT", "messages": []}, {"id": 2, "source": "org/a", "license": "MIT"},
        {"id": 3, "source": "org/b", "license": "CC-BY-NC-4.0"}, {"id": 4, "messages": [{"content": '"license": "gpl-3.0"'}]},
        {"id": 5, "tools": [{"license": "gpl-3.0"}]}, {"id": 6, "license": "Apache-2.0"},
    ]  # fmt: skip
    path = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    found = data_licences([str(path)])
    assert {(s.name, s.licence) for s in found} == {
        ("org/a", "MIT"),
        ("org/b", "CC-BY-NC-4.0"),
        ("rows.jsonl", "Apache-2.0"),
    }


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"), ("---\nlicense: [mit, gpl-3.0]\n---\n", "mit and gpl-3.0"), ("# no front matter", None),
        ("---\nlicense: [\n---\n", None), ("---\n- a\n---\n", None), ("\n--- \nlicense: other\nlicense_name: acme\n---", "other (acme)"),
    ],
)  # fmt: skip
def test_licence_of_a_card(tmp_path, text, licence):
    (tmp_path / "README.md").write_text(text)
    assert card_licence(str(tmp_path)) == licence
    assert card_licence(str(tmp_path / "nowhere")) is None


def test_a_run_records_licences_and_its_card_follows(overfitted, tmp_path):
    run = overfitted.folder
    recorded = json.loads((run / "licences.json").read_text())["sources"]
    assert recorded == [{"role": "target", "name": recorded[0]["name"], "licence": None}]
    assert front_matter(overfitted.export / "README.md")["license"] == UNKNOWN
    spoilt = {"role": "init_from", "name": "z-lab/some", "licence": "cc-by-nc-nd-4.0"}
    (run / "licences.json").write_text(json.dumps({"sources": [*recorded, spoilt]}))
    try:
        code, _, err = toys.call(export.main, run, "--output", tmp_path / "out")
        assert code == 2 and "z-lab/some" in err and not (tmp_path / "out").exists()
        code, out, err = toys.call(
            export.main, run, "--output", tmp_path / "out", "export.owned=true", "export.license=mit"
        )
        assert code == 0, err
        assert front_matter(tmp_path / "out" / "README.md")["license"] == "mit"
        assert "rules of: SGLang 0.5.23" in out and "scripts/convert_gguf.py" in out
    finally:
        (run / "licences.json").write_text(json.dumps({"sources": recorded}))


def test_a_licence_that_forbids_the_export_is_found_before_the_first_step(overfitted, tmp_path):
    rows = [row | {"source": "org/nc", "license": "CC-BY-NC-4.0"} for row in overfitted.rows]
    path = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    more = [f"output_dir={tmp_path}/run", f"data.train=[{path}]", "export.license=apache-2.0", "train.max_steps=1"]
    code, _, err = toys.call(train.main, "-c", overfitted.recipe, *more)
    assert code == 2 and "org/nc" in err and "is freer" in err
    assert not (tmp_path / "run").exists()
