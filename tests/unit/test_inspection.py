"""What inspection prints is what training would see."""

from __future__ import annotations

import io

import numpy as np
import pytest
import toys

from dflash_train.build import build_stream, certify_rows, outline, read_examples
from dflash_train.config.load import load_recipe
from dflash_train.data.blocks import legal_anchors
from dflash_train.data.certificate import read_certificate
from dflash_train.data.chat import check_supervised
from dflash_train.data.inspection import (
    GREEN,
    Share,
    chosen,
    histogram,
    inspect,
    look,
    packing,
    position_shares,
    shares_of_sources,
    show,
    sources_table,
    write_report,
)
from dflash_train.types import TokenizedExample

ROWS = [
    {"id": "a", "domain": "math", "messages": [
        {"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w30 w31 w32"}]},
    {"id": "b", "prompt_ids": [20, 21, 22], "response_ids": [30, 31, 32, 33, 2], "finish_reason": "stop",
     "generator": {"model": "toy"}},
    {"id": "c", "prompt_ids": [40], "response_ids": list(range(50, 90)), "finish_reason": "length"},
    {"id": "d", "messages": []},
]  # fmt: skip


@pytest.fixture
def recipe(tmp_path, target_dir):
    def recipe(*overrides: str, rows=ROWS):
        data = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
target: {{path: {target_dir}}}
data: {{train: [{data}], max_length: 24, max_dropped: 0.5}}
drafter: {{block_size: 4, mask_token_id: 31, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8}}
""")
        return load_recipe(str(path), list(overrides))

    return recipe


def test_counts_are_those_of_training(recipe, capsys):
    report = look(recipe()).counts()
    assert (report["rows"], report["kept"], sum(report["dropped"].values())) == (4, 3, 1)
    assert report["domains"] == {"math": 1, "default": 2}
    assert report["generators"] == {"not recorded": 2, "toy": 1}
    assert report["mask_token_occurrences"] == 2

    trained = recipe("drafter.mask_token_id=155")
    examples = read_examples(outline(trained), trained.data.train, what="train")
    assert report["examples"] == len(examples) == 3
    assert report["tokens"] == sum(len(e.token_ids) for e in examples)
    assert report["supervised"] == sum(int(e.supervised.sum()) for e in examples)
    assert report["ratio"] == report["supervised"] / report["tokens"]


def test_the_report_reads_like_this(recipe):
    out = io.StringIO()
    with pytest.raises(ValueError, match=r"mask_token_id = 31 \(w31\) occurs 2 times in 2 of 3 training rows"):
        inspect(recipe(), out=out)
    text = out.getvalue()
    assert "kept 3 of 4 rows" in text and "rows.jsonl:4" in text
    assert "drafter.mask_token_id 31 occurs 2 times in the data" in text
    assert "--- b (stop)\nw20 w21 w22⟦w30 w31 w32 w33 <eos>⟧" in text
    assert "\033" not in text
    out = io.StringIO()
    inspect(recipe("drafter.mask_token_id=155"), out=out, color=True, samples=1)
    assert GREEN in out.getvalue() and out.getvalue().count("--- ") == 1


def test_the_number_of_shown_examples_and_the_row_limit(recipe):
    out = io.StringIO()
    assert inspect(recipe("data.limit=1", "drafter.mask_token_id=155"), out=out)["rows"] == 1
    assert out.getvalue().count("--- ") == 1


def test_a_mask_token_that_is_not_set_is_not_counted(recipe):
    assert inspect(recipe("drafter.mask_token_id=null"), out=io.StringIO())["mask_token_occurrences"] is None


@pytest.mark.parametrize(
    ("mask", "why"), [(0, "the pad token"), (160, r"must be in \[0, 160\)"), (31, "occurs 2 times")]
)
def test_a_mask_token_that_training_refuses_is_refused_after_the_report(recipe, mask, why):
    r = recipe(f"drafter.mask_token_id={mask}")
    found = look(r, outline(recipe("drafter.mask_token_id=155")).info)
    assert found.certificate is not None
    with pytest.raises(ValueError, match=why):
        found.check()
    with pytest.raises(ValueError, match=why):
        build_stream(outline(r))


def test_all_that_training_would_refuse_is_named_at_once(recipe):
    with pytest.raises(ValueError, match=r"share dropped 0.250(.|\n)*mask_token_id = 31 \(w31\) occurs 2 times"):
        inspect(recipe("data.max_dropped=0.1"), out=io.StringIO())


def test_where_no_mask_token_is_chosen_two_are_named(recipe):
    found = look(recipe("drafter.mask_token_id=null"), outline(recipe("drafter.mask_token_id=155")).info)
    found.check()
    out = io.StringIO()
    write_report(found, [], color=False, out=out)
    assert "drafter.mask_token_id is not set; unused here: 7 or 8" in out.getvalue()


def test_data_without_a_prompt_is_refused(recipe):
    rows = [{"id": f"r{i}", "prompt_ids": [], "response_ids": [20 + i, 21, 22, 23]} for i in range(2)]
    with pytest.raises(ValueError, match=r"0 usable rows of 2(.|\n)*no_prompt .*rows.jsonl:1"):
        inspect(recipe(rows=rows), out=io.StringIO())


@pytest.mark.parametrize("supervised", [[], range(6)], ids=["nothing", "everything"])
def test_a_mask_of_nothing_or_everything_over_the_data_set_is_an_error_with_the_numbers(supervised):
    examples = [toys.document(6, list(supervised)) for _ in range(2)]
    with pytest.raises(
        ValueError, match=rf"train: supervised ratio is [01]: {2 * len(supervised)} of 12 tokens in 2 examples"
    ):
        check_supervised(examples, "train")
    check_supervised([*examples, toys.document(6, [2, 3])], "train")


def test_every_length_is_in_the_histogram():
    lines = histogram(np.array([0, 1, 5, 15, 16]), 16, bins=4, width=8).splitlines()
    assert [int(line.split()[1]) for line in lines[1:]] == [2, 1, 0, 2]
    assert [line.count("#") for line in lines[1:]] == [8, 4, 0, 8]


def test_runs_of_supervised_text_are_decoded_whole():
    example = toys.document(6, [1, 2, 5])
    words = [f"w{i}" for i in example.token_ids]
    text = show(example, toys.toy_tokenizer(), color=False)
    assert text == f"{words[0]}⟦{words[1]} {words[2]}⟧{words[3]} {words[4]}⟦{words[5]}⟧"


def test_shares_by_domain_and_position():
    documents = [toys.document(4, [2, 3]), toys.document(6, [1, 2, 3, 4, 5])]
    edges, shares = position_shares(documents, bins=3)
    assert edges.tolist() == [0, 2, 4, 6] and shares.tolist() == [1 / 4, 1, 1]
    assert position_shares(documents[:1], bins=40)[1].tolist() == [0, 0, 1, 1]


def test_packing_is_that_of_training(recipe):
    found = look(recipe("train.num_anchors=5"))
    stream = build_stream(outline(recipe("train.num_anchors=5", "drafter.mask_token_id=155")))
    rows = packing(found.stream)
    assert rows.rows == stream.rows_per_epoch and found.certificate.fingerprint == stream.fingerprint
    assert rows.padding == pytest.approx(1 - stream.tokens_per_epoch / (stream.rows_per_epoch * 24))
    assert rows.blocks == sum(b.drafted for s in range(stream.steps_per_epoch) for b in stream.micro_batches(s, 0, 1))
    assert rows.anchors == sum(len(legal_anchors(e.supervised)) for e in stream.examples)


@pytest.fixture
def mixture(tmp_path, recipe):
    """A folder, a weighted and tagged file, long rows in windows."""
    (tmp_path / "folder").mkdir()
    long = [{"id": f"l{i}", "prompt_ids": [20], "response_ids": list(range(30 + i, 90))} for i in range(3)]
    toys.write_jsonl(tmp_path / "folder" / "a.jsonl", long)
    toys.write_jsonl(tmp_path / "folder" / "a.failed.jsonl", [{"id": "failed"}])

    def mixture(*overrides: str):
        given = f"data.train=[{tmp_path}/folder,{{path: {tmp_path}/rows.jsonl, weight: 2, domain: twice}}]"
        return recipe(given, "data.long_documents=window", "drafter.mask_token_id=155", *overrides)

    return mixture


def test_a_mixture_is_seen_as_training_sees_it(mixture, capsys):
    found = look(mixture("train.num_anchors=3"))
    o = outline(mixture("train.num_anchors=3"))
    stream = build_stream(o)
    rows = packing(found.stream)
    assert (rows.rows, rows.padding) == (stream.rows_per_epoch, stream.padding)
    assert rows.blocks == sum(b.drafted for s in range(stream.steps_per_epoch) for b in stream.micro_batches(s, 0, 1))
    assert found.domains() == {
        name: Share(
            documents=len(mine),
            tokens=sum(len(e.token_ids) for e in mine),
            supervised=sum(int(e.supervised.sum()) for e in mine),
        )
        for name in ("default", "twice")
        for mine in [[e for e in stream.examples if e.domain == name]]
    }
    shares = shares_of_sources(found.corpus)
    assert [s.weight for s in shares] == [1, 2] and sum(s.share for s in shares) == pytest.approx(1)
    assert shares[1].share == pytest.approx(2 * shares[1].tokens / stream.tokens_per_epoch)
    certificate = certify_rows(o, stream)
    assert certificate == found.certificate
    assert [(f["name"], f.get("weight"), f.get("domain")) for f in certificate.files] == [
        ("a.jsonl", None, None), ("rows.jsonl", 2, "twice")]  # fmt: skip
    out = io.StringIO()
    write_report(found, chosen(found, 1, ["l1"]), color=False, out=out)
    assert sources_table(found.corpus) in out.getvalue() and sources_table(found.corpus) in capsys.readouterr().out
    assert [line for line in out.getvalue().splitlines() if line.startswith("---")][:2] == [
        "--- l1@0 (length)",
        "--- l1@1 (length)",
    ]


def test_the_certificate_is_that_of_training(recipe):
    same = ("drafter.mask_token_id=155",)
    o = outline(recipe(*same))
    assert look(recipe(*same)).certificate == certify_rows(o, build_stream(o))


def test_examples_of_every_domain_are_shown_first(recipe):
    rows = [
        {"id": f"{domain}{i}", "domain": domain, "prompt_ids": [20, 21], "response_ids": [30 + i, 31, 32, 2]}
        for domain in "xyz"
        for i in range(3)
    ]
    found = look(recipe(rows=rows))
    assert [e.id for e in chosen(found, 3)] == ["x0", "y0", "z0"]
    assert [e.id for e in chosen(found, 4)] == ["x0", "x1", "y0", "z0"]
    assert [e.id for e in chosen(found, 3, ["y2", "x1"])] == ["y2", "x1"]
    with pytest.raises(ValueError, match="--ids w9: no example has this id"):
        chosen(found, 3, ["w9"])


def test_another_template_is_shown_and_then_refused(recipe):
    rows = [{**ROWS[0], "generator": {"model": "toy", "template_hash": "0123456789abcdef"}}]
    out = io.StringIO()
    with pytest.raises(ValueError, match="generator.template_hash of 1 of 1 rows is 0123456789abcdef"):
        inspect(recipe(rows=rows), out=out)
    assert "kept 1 of 1 rows" in out.getvalue() and "--- a" in out.getvalue()


# --- the command ---


def run(*argv):
    return toys.call(toys.script("inspect_data").main, *argv)


def test_no_recipe_is_needed(tmp_path, target_dir):
    data = toys.write_jsonl(tmp_path / "rows.jsonl", ROWS)
    file = tmp_path / "new" / "certificate.json"
    done = run("--tokenizer", target_dir, "--data", data, data, "data.max_dropped=0.9", "--certificate", file)
    assert done.code == 0, done.err
    assert "kept 3 of 8 rows" in done.out and f"certificate: {file}" in done.out
    assert read_certificate(file).kept == 3
    done = run(
        "--tokenizer", target_dir, "--data", data, "--kwargs", '{"enable_thinking": false}', "data.max_dropped=0.9"
    )
    assert "thinking off" in done.out and "certificate: not written" in done.out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data", "rows.jsonl"], "give either -c RECIPE, or both --tokenizer"),
        (["--tokenizer", "embedded"], "give either -c RECIPE, or both --tokenizer"),
        (["-c", "demo", "--data", "rows.jsonl"], "give either -c RECIPE, or both --tokenizer"),
        (["--tokenizer", "embedded", "--data", "rows.jsonl", "--kwargs", "{"], "--kwargs {: is no JSON"),
        (["--tokenizer", "embedded", "--data", "rows.jsonl", "--kwargs", "[1]"], "must be a JSON object"),
        (["--tokenizer", "embedded", "--data", "rows.jsonl", "data.max_lenght=3"], "did you mean 'max_length'?"),
    ],
)
def test_what_is_missing_or_wrong_is_named(argv, said):
    done = run(*argv)
    assert done.code == 2 and said in done.err and not done.out


def test_the_certificate_of_a_run_is_left_alone(tmp_path, target_dir):
    data = toys.write_jsonl(tmp_path / "rows.jsonl", ROWS[:3])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: {tmp_path}/run\ntarget: {{path: {target_dir}}}\ndata: {{train: [{data}]}}\n")
    assert f"certificate: {tmp_path}/run/certificate.json" in run("-c", recipe).out
    before = (tmp_path / "run" / "certificate.json").read_text()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert "holds a run, whose certificate stays; this one is the same" in run("-c", recipe).out
    done = run("-c", recipe, "data.max_length=16")
    assert "this one differs from it:" in done.out and 'settings: certified {"max_length": 3072}, now' in done.out
    assert (tmp_path / "run" / "certificate.json").read_text() == before


def test_text_of_the_data_cannot_command_the_terminal(recipe):
    out = io.StringIO()
    inspect(recipe("drafter.mask_token_id=155", rows=[{**ROWS[0], "id": "a\x1b[2J", "domain": "\u202emath"}]), out=out)
    assert "\x1b" not in out.getvalue() and "\u202e" not in out.getvalue() and "a\\u001b[2J" in out.getvalue()

    class Hostile:
        def decode(self, ids):
            return "\x1b[2J\n"

    example = TokenizedExample(
        id="a", domain="d", token_ids=np.array([1]), supervised=np.array([True]), finish_reason="stop"
    )
    assert show(example, Hostile(), color=False) == "⟦\\u001b[2J\n⟧"
