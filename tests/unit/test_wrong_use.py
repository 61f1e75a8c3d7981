"""Uses that once gave wrong numbers or a traceback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import toys

from dflash_train.build import open_drafter
from dflash_train.config.load import load_recipe, run_command
from dflash_train.evaluate import is_near_tie
from dflash_train.generation.output import lock
from dflash_train.generation.single import plain_decode
from dflash_train.start import check_folder


@pytest.mark.parametrize(
    "override", ["drafter.block_size=4", "drafter.is_causal=true", "drafter.target_layer_ids=[0,2]"]
)
def test_a_drafter_is_opened_only_as_it_was_trained(overfitted, override):
    with pytest.raises(ValueError, match="evaluated and exported as it was trained"):
        open_drafter(str(overfitted.folder), None, [override])
    with pytest.raises(ValueError, match="an export is what its config.json says"):
        open_drafter(str(overfitted.export), None, [override])


@pytest.mark.parametrize("token", [toys.VOCAB, 2**32 + 7, 2**70])
def test_a_token_id_that_the_target_lacks_names_its_row(overfitted, tmp_path, token):
    rows = [overfitted.rows[0], {"prompt_ids": [5, 6], "response_ids": [7, token, 8]}]
    data = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    from dflash_train.build import build_stream, heldout_prompts, outline

    o = outline(load_recipe(str(overfitted.recipe), [f"data.train=[{data}]", f"data.heldout=[{data}]"]))
    for read in (build_stream, heldout_prompts):
        with pytest.raises(ValueError, match=rf"rows.jsonl:2: token id {token} is outside the vocabulary"):
            read(o)


def test_an_empty_prompt_is_counted(overfitted, tmp_path):
    from dflash_train.build import heldout_prompts, outline

    data = toys.write_jsonl(tmp_path / "rows.jsonl", [{"prompt_ids": [], "response_ids": [7, 8]}])
    with pytest.raises(ValueError, match="empty_prompt"):
        heldout_prompts(outline(load_recipe(str(overfitted.recipe), [f"data.heldout=[{data}]"])))


def test_a_domain_called_all_is_one_domain(overfitted):
    from dflash_train.config.schema import EvaluateConfig
    from dflash_train.evaluate import decode_report
    from dflash_train.types import Prompt

    prompts = [Prompt(id="x", domain="all", token_ids=overfitted.rows[0]["prompt_ids"])]
    report = decode_report(overfitted.step, prompts, EvaluateConfig(max_new_tokens=12), {2})
    assert report["tau"] == {"all": report["tau_all"]}
    assert report["tau_all"]["tokens"] == 11


def test_a_near_tie_is_between_the_tokens_that_differ():
    target = toys.toy_target()
    prompt = [5, 6, 7]
    plain = plain_decode(target, prompt, 4, set()).token_ids
    import torch

    logits = target.model(input_ids=torch.tensor([prompt])).logits[0, -1].float()
    first, second, worst = logits.topk(2).indices.tolist() + [int(logits.argmin())]
    gap = float(logits[first] - logits[second])
    assert plain[0] == first
    assert is_near_tie(target, prompt, plain, [second], gap + 1e-3)
    assert not is_near_tie(target, prompt, plain, [worst], gap + 1e-3)
    assert not is_near_tie(target, prompt, plain, plain[:2], 1e9)


def test_two_writers_of_one_output_are_refused(tmp_path):
    held = lock(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="another process is writing it"):
        lock(tmp_path / "out.jsonl")
    held.close()
    lock(tmp_path / "out.jsonl").close()


def test_recipes_anywhere_build_on_shipped_ones_and_must_be_the_file_that_was_named(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\noutput_dir: mine\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"), ["drafter=dflash_k16"])
    assert (recipe.output_dir, recipe.data.max_length, recipe.drafter.selector_rank) == ("mine", 512, 0)
    assert load_recipe("debug_cpu", ["drafter=dflash_k16"]).drafter.conv_kernel_size == 0
    (tmp_path / "mine.yml").write_text("output_dir: other\n")
    with pytest.raises(ValueError, match="ends in .yaml; rename mine.yml"):
        load_recipe(str(tmp_path / "mine.yml"))


@pytest.mark.parametrize("text", [b"output_dir: a\noutput_dir: b\n", "output_dir: ü\n".encode("latin-1")])
def test_a_broken_recipe_names_its_file(tmp_path, text):
    (tmp_path / "r.yaml").write_bytes(text)
    with pytest.raises(ValueError, match="r.yaml: "):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize("path", ["/tmp/ü/é", "x=y", "it's", "a b", "c\\d"])
def test_any_path_can_be_given_on_the_command_line(path):
    assert load_recipe("demo", [f"output_dir={path}"]).output_dir == path


@pytest.mark.parametrize("override", ["optimizer.lr=inf", "train.num_epochs=inf", "evaluate.near_tie=nan"])
def test_numbers_are_finite(override):
    with pytest.raises(ValueError, match="must be a finite number"):
        load_recipe("demo", [override])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="is a file; name a folder"):
            check_folder(folder)

    def fails(argv):
        (tmp_path / "file" / "below").mkdir()

    with pytest.raises(SystemExit) as stop:
        run_command(fails)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")


def test_a_damaged_checkpoint_is_named(overfitted, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(overfitted.folder, run)
    weights = next(run.glob("checkpoints/step-*/model.safetensors"))
    weights.write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match="model.safetensors: damaged"):
        open_drafter(str(run), None, [])


def test_answers_end_where_regeneration_ends_them(overfitted):
    from types import SimpleNamespace

    from dflash_train.build import stop_ids

    o = SimpleNamespace(info=SimpleNamespace(eos_token_ids=[2]), tokenizer=SimpleNamespace(eos_token_id=9))
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[4]))
    assert stop_ids(o, SimpleNamespace(model=model)) == {4, 9}
    assert json.dumps(sorted(stop_ids(o, SimpleNamespace(model=SimpleNamespace(generation_config=None))))) == "[2, 9]"


def test_a_new_run_does_not_state_what_an_earlier_one_measured(overfitted, tmp_path):
    from dflash_train.train import train

    measured = {"tau": {"default": {"value": 9.9, "rounds": 10, "tokens": 99}}, "walk_tau": {"value": 9.8}}
    (tmp_path / "evaluation.json").write_text(json.dumps({"trained_steps": 1, "decoded": measured}))
    export = train(load_recipe(str(overfitted.recipe), [f"output_dir={tmp_path}", "train.max_steps=1"]))
    assert "Not measured yet." in (export / "README.md").read_text()


def test_rows_that_another_model_wrote_are_named(tmp_path, capsys):
    import json

    import toys

    from dflash_train.build import outline, read_examples
    from dflash_train.config.load import load_recipe

    folder = toys.save_toy(tmp_path / "target")
    row = {"id": "a", "prompt_ids": [9, 10], "response_ids": [11, 12, 13], "generator": {"model": "somebody/else"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "r.yaml").write_text(f"target: {{path: {folder}}}\ndrafter: {{mask_token_id: 7, selector_top_k: 4}}\n")
    o = outline(load_recipe(str(tmp_path / "r.yaml")))
    assert len(read_examples(o, [str(tmp_path / "rows.jsonl")], what="train")) == 1
    assert "1 by somebody/else" in capsys.readouterr().out


def test_ctrl_c_is_one_word_and_exit_code_130(monkeypatch, capsys):
    def stopped(argv):
        raise KeyboardInterrupt

    monkeypatch.delenv("DFLASH_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        run_command(stopped)
    assert stop.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_prompts_without_a_domain_have_a_row_beside_named_ones(overfitted):
    from dflash_train.acceptance import domain_rows
    from dflash_train.types import Prompt
    from dflash_train.walk import answered, teacher_forced

    assert domain_rows(["all", "all"]) == {} and domain_rows(["b", "all"]) == {"all": "no_domain", "b": "b"}
    examples = [answered(Prompt(id=d, domain=d, token_ids=[5, 6, 7]), [8, 9, 10, 11], "stop") for d in ("all", "b")]
    table = teacher_forced(overfitted.step, examples)["walk_tau"]
    assert list(table) == ["no_domain", "b", "all"]
    assert table["all"]["tokens"] == table["no_domain"]["tokens"] + table["b"]["tokens"] == 6
    assert teacher_forced(overfitted.step, examples[:1])["walk_tau"] == {"all": table["no_domain"]}


def test_a_prompt_that_fills_the_context_is_counted(overfitted, tmp_path, capsys):
    from dflash_train.build import heldout_prompts, outline

    most = overfitted.step.target.model.config.max_position_embeddings
    lengths = (3, most, most - 1)
    rows = [{"id": f"p{n}", "prompt_ids": [5] * n, "response_ids": [7, 8]} for n in lengths]
    data = toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = [f"data.heldout=[{data}]", "evaluate.max_new_tokens=12"]
    found = heldout_prompts(outline(load_recipe(str(overfitted.recipe), [*settings, "data.max_dropped=0.5"])))
    assert [len(p.token_ids) for p in found] == [3, most - 1]
    shown = capsys.readouterr().out
    assert "beyond_context" in shown and f"1  prompts whose answers may pass the target's {most} positions" in shown
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"data.heldout = \[.*empty.jsonl.*0 usable rows"):
        heldout_prompts(outline(load_recipe(str(overfitted.recipe), [f"data.heldout=[{tmp_path}/empty.jsonl]"])))


@pytest.mark.parametrize("odd", [None, "x", [1], {"a": 1}, 2.5, True, -1])
def test_a_config_of_an_export_with_other_types_is_refused_by_name(overfitted, tmp_path, odd):
    import shutil

    from dflash_train.folder import load_drafter_folder

    folder = tmp_path / "export"
    shutil.copytree(overfitted.export, folder)
    config = json.loads((folder / "config.json").read_text())
    free = {"architectures", "model_type", "dtype", "initializer_range", "attention_dropout", "max_window_layers"}
    for key in config:
        for changed in (
            ({**config, key: odd}, *({**config, key: {**config[key], k: odd}} for k in config[key]))
            if isinstance(config[key], dict)
            else ({**config, key: odd},)
        ):
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                load_drafter_folder(folder)  # a key that nothing reads may hold anything
            except ValueError as error:
                assert key not in free, error


def test_drafters_of_two_targets_are_not_compared(overfitted):
    import copy

    from dflash_train.build import open_source
    from dflash_train.evaluate import check_same_target

    run = open_source(str(overfitted.folder), None, [])
    other = copy.copy(run)
    other.outline = copy.copy(run.outline)
    other.outline.info = copy.copy(run.outline.info)
    check_same_target(run, other)
    other.outline.info.path = "another"
    with pytest.raises(ValueError, match="tau compares drafters of one target"):
        check_same_target(run, other)


def test_a_block_size_beyond_the_trained_one_is_found_before_decoding(overfitted):
    from dflash_train.build import open_source

    size = overfitted.step.drafter.spec.block_size
    with pytest.raises(ValueError, match=rf"evaluate.block_sizes = \[{size + 1}\]: each must be in \[2, {size}\]"):
        open_source(str(overfitted.folder), None, [f"evaluate.block_sizes=[{size + 1}]"])


@pytest.mark.parametrize(
    ("script", "words", "package", "said"),
    [
        ("measure_rounding", ["gone"], "torchao", "error: rounding needs torchao, which is not installed here: pip install torchao\n"),
        ("compare_nemo", [], "nemo_automodel", "needs nemo_automodel, which is not installed here: pip install 'dflash-train[nemo]'\n"),
        ("compare_nemo", [], "dflash", "needs dflash, which is not installed here: pip install --no-deps dflash"),
        ("bench_nemo_step", [], "torchdata", "needs torchdata, which is not installed here: pip install"),
        ("bench_step", ["--rival"], "nemo_automodel", "--rival needs nemo_automodel, which is not installed here"),
    ],
)  # fmt: skip
def test_a_script_says_at_once_which_package_it_needs(script, words, package, said, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # one of them sets it
    main, find = toys.script(script, "scripts").main, importlib.util.find_spec
    installed = {"nemo_automodel", "dflash", "dill", "multiprocess", "torchao", "torchdata"} - {package}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == package else True if name in installed else find(name, *a),
    )
    done = toys.call(main, *words)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1


def test_a_row_for_which_the_tokenizer_has_no_token_is_counted_in_training_data_and_held_out_prompts(
    overfitted, tmp_path, capsys
):
    from dflash_train.build import build_stream, heldout_prompts, outline

    def row(text: str) -> dict:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "w30 w31 w32"}]}

    data = toys.write_jsonl(tmp_path / "rows.jsonl", [row("w20 zebra"), row("w21")])
    overrides = [f"data.train=[{data}]", f"data.heldout=[{data}]", f"data.cache_dir={tmp_path}/cache"]
    for read in (build_stream, heldout_prompts):
        with pytest.raises(ValueError, match=r"share dropped 0.500(.|\n)*not_encodable(.|\n)*rows.jsonl:1"):
            read(outline(load_recipe(str(overfitted.recipe), [*overrides, "data.max_dropped=0"])))
    assert "give its model an unk_token" in capsys.readouterr().out
    toys.write_jsonl(data, [row("w20 zebra")])
    with pytest.raises(ValueError, match=r"row .*rows.jsonl:1.*no token for a word"):
        build_stream(outline(load_recipe(str(overfitted.recipe), overrides)))
