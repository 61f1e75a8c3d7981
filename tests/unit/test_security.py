"""Nothing from outside is run, no secret is written, nothing leads out of a folder, and what is packed small stays small in memory."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import browser
import pytest
import toys
import yaml
import zstandard
from transformers import PreTrainedTokenizerBase

from dflash_train import check
from dflash_train import train as training
from dflash_train.assets import html_page
from dflash_train.config.load import load_recipe, to_yaml
from dflash_train.config.secrets import scrubbed, without_keys
from dflash_train.config.values import RESERVED, fits, parse_json, printable, trusted
from dflash_train.dashboard.page import write_report
from dflash_train.data.chat import load_tokenizer
from dflash_train.data.read import read_conversations
from dflash_train.export import check_output
from dflash_train.folder import INDEX, read_headers
from dflash_train.target.info import read_target_info

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("dflash_train/**/*.py"), *ROOT.glob("data_prep/*.py"), *ROOT.glob("scripts/*.py")])
# Pickles over the pipes of processes that this one started; the error that weights_only=True raises.
PICKLES = {
    "dflash_train/data/workers.py": {"pickle.dumps", "pickle.loads"},
    "dflash_train/checkpoint.py": {"pickle.UnpicklingError"},
}


# --- nothing from outside is run ---


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults_of(source: str, name: str = "x.py") -> list[str]:
    """What a file does that could run what comes from outside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and dotted(node).startswith(
            ("pickle.", "cPickle.", "dill.", "marshal.", "shelve.", "joblib.")
        ):
            if dotted(node) not in PICKLES.get(name, set()):
                found.append(dotted(node))
        if not isinstance(node, ast.Call):
            continue
        called, given = dotted(node.func), {k.arg: k.value for k in node.keywords}
        constant = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        if called in (
            "eval",
            "exec",
            "__import__",
            "os.system",
            "os.popen",
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
        ):
            found.append(called)
        if called == "torch.load" and constant.get("weights_only") is not True:
            found.append("torch.load")
        if called in ("np.load", "numpy.load") and constant.get("allow_pickle") is True:
            found.append("np.load")
        if called.startswith("subprocess.") and "shell" in given:
            found.append("shell")
        if "trust_remote_code" in given and constant.get("trust_remote_code") is True:
            found.append("trust_remote_code")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_runs_what_comes_from_outside(path):
    assert faults_of(path.read_text(), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize("line", [
    "pickle.load(f)", "torch.load(p)", "torch.load(p, weights_only=False)", "torch.load(p, weights_only=w)", "yaml.load(t, Loader=L)", "eval(t)", "exec(t)", "os.system(t)",
    "subprocess.run(t, shell=True)", "np.load(p, allow_pickle=True)", "A.from_pretrained(p, trust_remote_code=True)", "dill.loads(b)",
])  # fmt: skip
def test_the_search_finds(line):
    assert faults_of(line)


def test_only_the_parts_that_need_it_import_pickle():
    named = {str(p.relative_to(ROOT)) for p in SOURCES if "import pickle" in p.read_text()}
    assert named <= set(PICKLES)


def test_a_target_in_pickles_is_refused(tmp_path, target_dir):
    import torch

    folder = tmp_path / "pickled"
    toys.save_toy(folder)
    torch.save(toys.toy_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    from dflash_train.config.schema import TargetConfig
    from dflash_train.target.hf import load_model

    with pytest.raises(ValueError, match="cannot be loaded.*safetensors"):
        load_model(TargetConfig(path=str(folder)), str(folder), torch.device("cpu"))


REMOTE = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path(__file__).parent
open({mark!r}, "a").write("ran")
class Odd(PretrainedConfig):
    model_type = "odd"
"""


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """(folder of a target whose config comes with code, file that the code writes)."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, mark = toys.save_toy(tmp_path / "odd"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(REMOTE.format(mark=str(mark)))
    trusted.cache_clear()
    return folder, mark


def test_code_of_a_target_is_not_run_unless_asked_for(with_code, capsys):
    folder, mark = with_code
    with pytest.raises(ValueError, match="set target.trust_remote_code=true if you trust it"):
        read_target_info(str(folder))
    assert not mark.exists() and "trust_remote_code" not in capsys.readouterr().out


def test_code_of_a_target_is_announced_before_it_runs(with_code, capsys):
    folder, mark = with_code
    read_target_info(str(folder), None, True)
    assert mark.exists()
    load_tokenizer(str(folder), None, True)
    line = f"target.trust_remote_code: running Python code that comes with {folder}"
    assert capsys.readouterr().out.count(line) == 1, "once per process, by whichever comes first"
    trusted.cache_clear()
    load_tokenizer(str(folder), None, True)
    assert line in capsys.readouterr().out


def test_a_row_cannot_replace_what_renders_it(tmp_path):
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs", "documents"}
    assert own <= RESERVED, "documents alone is meant for templates"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    toys.write_jsonl(
        tmp_path / "rows.jsonl", [{**row, "id": key, "chat_template_kwargs": {key: "x"}} for key in sorted(own)]
    )
    found, kept = read_conversations([tmp_path / "rows.jsonl"])
    assert not found and kept.dropped == {"bad_chat_template_kwargs": len(own)}
    for knob in ("data", "regenerate"):
        with pytest.raises(
            ValueError, match=f"{knob}.chat_template_kwargs.chat_template = x: is no argument of the template"
        ):
            load_recipe(None, ["output_dir=x", f"{knob}.chat_template_kwargs={{chat_template: x}}"])


@pytest.mark.parametrize(
    "text", ["target: !!python/object/apply:os.system ['touch {mark}']", "target: !!python/name:os.system"]
)
def test_yaml_makes_no_objects(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text.format(mark=tmp_path / "mark"))
    with pytest.raises(ValueError, match="not valid YAML"):
        load_recipe(str(tmp_path / "r.yaml"))
    assert not (tmp_path / "mark").exists()


# --- no secret is written ---

SECRETS = {
    "HF_TOKEN": "hf_correcthorsebattery", "WANDB_API_KEY": "w" * 36 + "1234", "OPENAI_API_KEY": "sk-stapleunderthestable", "MY_PASSPHRASE_SECRET": "open sesame please",
}  # fmt: skip


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return [*SECRETS.values(), "s3cr3t-in-url", "k1-in-body"]


KNOBS = (
    "regenerate.base_urls=['http://me:s3cr3t-in-url@host:8000/v1']", "regenerate.backend=openai", "regenerate.extra_body={api_key: k1-in-body}",
    "regenerate.model=hf_correcthorsebattery",
)  # fmt: skip


def test_a_run_writes_no_secret(tmp_path, target_dir, secrets):
    """Into none of its files, nor on the terminal: from the recipe, the command line, the environment."""
    ids = [p + p[::-1] for p in toys.prompts(4)]
    rows = [{"id": f"r{i}", "prompt_ids": r[:4], "response_ids": r[4:]} for i, r in enumerate(ids)]
    toys.write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "recipe.yaml").write_text(f"""
output_dir: {tmp_path}/run
target: {{path: {target_dir}}}
data: {{train: [{tmp_path}/rows.jsonl], heldout: [{tmp_path}/rows.jsonl], max_length: 32, cache_dir: null}}
drafter: {{block_size: 4, mask_token_id: 155, target_layer_ids: [1, 3], num_hidden_layers: 1, selector_rank: 8, selector_top_k: 4}}
train: {{max_steps: 1, global_batch_size: 2, num_anchors: 4}}
evaluate: {{client: "off"}}
track: {{wandb: offline, wandb_project: p, progress: false}}
""")
    code, out, err = toys.call(training.main, "-c", tmp_path / "recipe.yaml", *KNOBS)
    assert code == 0, err
    written = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} | {
        "stdout": out.encode(),
        "stderr": err.encode(),
    }
    found = [(str(p), secret) for p, data in written.items() for secret in secrets if secret.encode() in data]
    assert not found and "***" in (tmp_path / "run" / "config.yaml").read_text()
    again = load_recipe(str(tmp_path / "run" / "config.yaml"))
    assert again.drafter.mask_token_id == 155 and again.provenance["command"][-4:] == [
        "regenerate.base_urls=['http://***@host:8000/v1']", "regenerate.backend=openai", "regenerate.extra_body={api_key: ***}", "regenerate.model=***",
    ]  # fmt: skip


def test_an_error_names_no_secret(tmp_path, secrets):
    for knob in (
        *KNOBS,
        "regenerate.base_urls=['ftp://me:s3cr3t-in-url@host']",
        "train.seed=hf_correcthorsebattery",
        "nonsense.x=sk-stapleunderthestable",
    ):
        code, _, err = toys.call(training.main, "-c", "debug_cpu", knob, "train.seed=six")
        assert code == 2 and not [s for s in secrets if s in err], err


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MY_PASSPHRASE_SECRET", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"],
)
@pytest.mark.parametrize("form", ["${oc.env:%s}", "${oc.env:%s,none}", "${oc.decode:${oc.env:%s}}"])
def test_a_reference_to_a_secret_variable_is_refused(name, form, secrets, tmp_path):
    (tmp_path / "r.yaml").write_text(f"output_dir: '{form % name}'\n")
    with pytest.raises(ValueError, match=r"would be written to config.yaml; leave secrets in the environment"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_other_variables_may_be_referred_to(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    (tmp_path / "r.yaml").write_text(
        "output_dir: ${oc.env:SCRATCH}/run\ntarget: {path: '${oc.env:NO_SUCH_ONE,embedded}'}\n"
    )
    recipe = load_recipe(str(tmp_path / "r.yaml"))
    assert (recipe.output_dir, recipe.target.path) == ("/scratch/me/run", "embedded")
    (tmp_path / "r.yaml").write_text("output_dir: ${oc.env:NO_SUCH_ONE}\n")
    with pytest.raises(ValueError, match="the environment has no such variable"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_tokens_of_a_vocabulary_are_no_secrets():
    kwargs = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "[M]", "access_token": "abc"}
    assert scrubbed(kwargs) == {**kwargs, "access_token": "***"}
    recipe = load_recipe(None, ["output_dir=x", "data.chat_template_kwargs={bos_token: s}"])
    assert yaml.safe_load(to_yaml(recipe))["data"]["chat_template_kwargs"] == {"bos_token": "s"}
    assert without_keys("this is the pad token: <pad>") == "this is the pad token: <pad>"


# --- nothing leads out of a folder ---


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "a/../b", "", 3, None, ["x"]])
def test_an_index_names_files_of_its_folder(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    with pytest.raises(ValueError, match="must name a file of this folder"):
        read_headers(tmp_path)


@pytest.mark.parametrize("files", [3, "x", {"a": 1}, [["x"]], [None]])
def test_an_export_whose_record_lists_no_files_is_not_replaced(tmp_path, files):
    (tmp_path / "dflash_train.json").write_text(json.dumps({"files": files}))
    with pytest.raises(ValueError, match="does not list its files"):
        check_output(tmp_path)


NAMES = [
    "../../escaped",
    "/tmp/escaped-by-a-row",
    "..",
    "a/b",
    "a\\b",
    "\x00",
    "~",
    "-rf",
    "CON",
    "x" * 5000,
    "\u202egnp.exe",
    "*.jsonl",
]


def test_names_in_rows_and_knobs_make_no_files(tmp_path):
    """Ids and domains of rows, the W&B name: through cleaning, splitting and inspection, whose pages are named by their commands alone."""
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    rows = [
        {
            "id": name,
            "domain": name,
            "messages": [
                {"role": "user", "content": f"{words[i]} {i} of {words[-i]}?"},
                {"role": "assistant", "content": f"It is {i} {words[i]}."},
            ],
        }
        for i, name in enumerate(NAMES)
    ]
    base = tmp_path / "a" / "b"
    base.mkdir(parents=True)
    toys.write_jsonl(base / "rows.jsonl", rows)
    out = base / "out"
    assert toys.call(toys.script("clean").main, base / "rows.jsonl", "--output", out / "clean.jsonl").code == 0
    assert (
        toys.call(
            toys.script("split").main, base / "rows.jsonl", "--output-dir", out / "split", "--heldout", "0.4"
        ).code
        == 0
    )
    page, certificate = out / "page.html", out / "certificate.json"
    code, _, err = toys.call(
        toys.script("inspect_data").main, "--tokenizer", "embedded", "--data", base / "rows.jsonl", "--html", page, "--certificate", certificate, "data.cache_dir=null",
    )  # fmt: skip
    assert code == 0, err
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    wanted = [
        "certificate.json",
        "clean.jsonl",
        "clean.jsonl.report.json",
        "page.html",
        "split/heldout.jsonl",
        "split/split.json",
        "split/train.jsonl",
    ]
    assert names == sorted(["a/b/rows.jsonl", *(f"a/b/out/{name}" for name in wanted)])
    assert not Path("/tmp/escaped-by-a-row").exists()


# --- pages ---

ATTACKS = (
    "</script><script>window.hit=1</script>", "<img src=x onerror=window.hit=1>", "<svg onload=window.hit=1>", "\"><script>window.hit=1</script>",
    "' onmouseover='window.hit=1", "</style><script>window.hit=1</script>", "</title><script>window.hit=1</script>", "<a href=javascript:window.hit=1>x</a>",
    "<!--<script>window.hit=1", "]]><script>window.hit=1</script>", "<iframe srcdoc='<script>parent.hit=1</script>'>", "<base href=//evil.example>", "\u202e evil \u2066 marks \u200f",
)  # fmt: skip
EVIL = " ".join(ATTACKS)


def looked_at(path: Path) -> None:
    """In a real browser: nothing ran, nothing was asked for, every element that can run or load is ours, and marks are seen."""
    with browser.page() as page:
        page.open(path, width=900)
        page.evaluate(
            "[...document.querySelectorAll('*')].forEach((e) => ['mouseover', 'focus', 'click', 'error', 'load'].forEach((n) => e.dispatchEvent(new Event(n, {bubbles: true}))))"
        )
        assert page.evaluate("typeof window.hit") == "undefined"
        assert page.evaluate("document.scripts.length") == 1
        assert (
            page.evaluate("document.querySelectorAll('a[href], img, iframe, base, object, embed, form, link').length")
            == 0
        )
        assert (
            page.evaluate(
                "[...document.querySelectorAll('*')].filter((e) => [...e.attributes].some((a) => a.name.startsWith('on'))).length"
            )
            == 0
        )
        text = page.evaluate("document.documentElement.textContent")
        assert page.complaints == []
    assert "\\u202e" in text and not set(text) & set("\u202e\u2066\u200f")
    assert "onerror=window.hit" in text, "it is there, as text"


def test_the_page_of_a_run_runs_nothing_of_the_run(tmp_path):
    cell = {"value": 2.5, "rounds": 40, "tokens": 100, "prompts": 4, "interval": [2.1, 2.9]}
    run = tmp_path / "run"
    run.mkdir()
    recipe = load_recipe(None, ["output_dir=x", "train.max_steps=20", "target.path=embedded"])
    recipe.target.path, recipe.export.license, recipe.data.heldout = EVIL, EVIL, [EVIL]
    recipe.provenance = {"dflash_train": EVIL, "torch": EVIL, "git_commit": EVIL, "command": [EVIL]}
    (run / "config.yaml").write_text(to_yaml(recipe))
    metrics = [
        {
            "step": s,
            "train/loss": 1.0 / s,
            f"heldout/walk_tau/{EVIL}": 2.0,
            EVIL: float(s),
            f"train/{EVIL}": float("nan"),
        }
        for s in range(1, 20)
    ]
    toys.write_jsonl(run / "metrics.jsonl", metrics)
    (run / "notes.json").write_text(json.dumps([f"WARNING: {EVIL}", EVIL]))
    (run / "certificate.json").write_text(json.dumps({
        "digest": EVIL, "rows": 9, "kept": 8, "dropped": {EVIL: 1}, "documents": 8, "tokens": 99, "ratio": 0.5, "files": [{"name": EVIL, "sha256": EVIL}],
    }))  # fmt: skip
    (run / "evaluation.json").write_text(json.dumps({"source": EVIL, "trained_steps": 9, "decoded": {
        "prompts": 4, "tau": {EVIL: cell}, "tau_all": cell, "tau_by_tag": {EVIL: {EVIL: cell}}, "tau_by_context": {EVIL: cell}, "walk_tau": cell, "walk_tau_by_domain": {EVIL: cell},
        "slots": [], "losslessness": {"lossless": False, "identical": 0, "near_ties": 0, "different": 1, "different_ids": [EVIL], "unchecked": 0},
    }}))  # fmt: skip
    sample = {
        "id": EVIL,
        "domain": EVIL,
        "tags": {EVIL: EVIL},
        "prompt": EVIL,
        "prompt_tokens": 3,
        "pieces": [EVIL, EVIL, EVIL],
        "rounds": [1, 1],
        "verdict": EVIL,
    }
    toys.write_jsonl(run / "decoded.jsonl", [sample])
    looked_at(write_report(run))


def test_the_page_of_data_runs_nothing_of_the_data(tmp_path):
    row = {
        "id": EVIL, "domain": EVIL, "finish_reason": EVIL, "chat_template_kwargs": {EVIL: EVIL}, "generator": {"model": EVIL, "revision": EVIL, "extra_body": {EVIL: EVIL}},
        "messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": f"{EVIL} {EVIL}"}],
    }  # fmt: skip
    rows = tmp_path / "<img src=x onerror=window.hit=1>.jsonl"
    toys.write_jsonl(rows, [row, {"id": EVIL, "messages": []}])
    page = tmp_path / "page.html"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "target": {"path": "embedded"},
                "data": {"train": [{"path": str(rows), "domain": EVIL}], "max_dropped": 1.0, "cache_dir": None},
            }
        )
    )
    code, out, err = toys.call(
        toys.script("inspect_data").main, "-c", recipe, "--html", page, "--certificate", tmp_path / "c.json"
    )
    assert code == 0, err
    looked_at(page)
    assert not set(out) & set("\u202e\u2066\u200f\x1b"), "nor does the terminal get them"


def test_a_title_is_shown_as_it_is():
    page = html_page("\u202e<b>", "<main></main>", styles=(), script="report.js")
    assert "<title>\\u202e&lt;b&gt;</title>" in page and printable("a\u2067b\x1b") == "a\\u2067b\\u001b"


# --- what is packed small ---

PEAK = """
import resource, sys
from dflash_train.data.read import read_conversations
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_, kept = read_conversations([sys.argv[1]], need_answer=False)
print(dict(kept.dropped), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_small_file_that_unpacks_to_much_takes_little_memory(tmp_path):
    """512 MiB of zeros in one small zstd frame; the line is longer than any may be and is skipped and counted."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    block = bytes(2**24)
    with (tmp_path / "bomb.jsonl.zst").open("wb") as file:
        for _ in range(32):
            file.write(packer.compress(block))
        file.write(packer.flush())
    assert (tmp_path / "bomb.jsonl.zst").stat().st_size < 2**17
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / "bomb.jsonl.zst")], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    reasons, grown = done.stdout.rsplit(" ", 1)
    assert reasons == "{'line_over_64_MiB': 1}" and int(grown) < 400, f"{grown} MiB"


DEEP = "[" * 200_000 + "]" * 200_000


def test_json_without_end_is_an_error_like_any_other(tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    (tmp_path / "config.json").write_text(DEEP)
    assert "nested too deeply" in toys.call(check.main, tmp_path).err
    (tmp_path / "rows.jsonl").write_text('{"messages": ' + DEEP + "}\n")
    assert read_conversations([tmp_path / "rows.jsonl"])[1].dropped == {"nested_too_deeply": 1}
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "config.yaml", "certificate.json", "evaluation.json", "decoded.jsonl", "notes.json"):
        (run / name).write_text(DEEP)
    write_report(run)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**31, 0, 1])
def test_a_header_that_promises_more_than_its_file_has(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="cannot be read"):
        read_headers(tmp_path)
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "run" / "export" / "model.safetensors")
    write_report(tmp_path / "run")


# --- values of other types ---


@pytest.mark.parametrize(("value", "kind", "does"), [
    (1, int, True), (True, int, False), (1.0, int, False), (1, float, True), ("1", float, False), (None, int | None, True), ([1, 2], list[int], True), ([1, "a"], list[int], False),
    ([True], list[int], False), ({"a": 1}, dict[str, int], True), ({1: 1}, dict[str, int], False), ("x", list[str] | None, False), (object(), list, False), ("x", str, True),
])  # fmt: skip
def test_fits(value, kind, does):
    assert fits(value, kind if kind is not list else list[int]) is does


@pytest.mark.parametrize("text", [
    "a: &a [*a]", "data: &x {train: [*x]}", "output_dir: ${output_dir}", "train: ${train}", "defaults: [r]", "defaults: 3", "defaults: [1.5]", "defaults: [[r]]", "defaults: [{}]",
    "defaults: [{target: [1]}]", "drafter: {layer_types: [{a: 1}]}", "drafter: {target_layer_ids: [1, a]}", "drafter: {target_layer_ids: [null]}", "output_dir: ${oc.decode:'['}",
    "train: " + "[" * 3000, "1: 2", "? [a]\n: b", "regenerate: {mixture: [{chat_template_kwargs: {1: 2}}]}",
])  # fmt: skip
def test_recipes_that_are_none_are_named(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError) as raised:
        load_recipe(str(tmp_path / "r.yaml"))
    assert str(tmp_path / "r.yaml") in str(raised.value)


@pytest.mark.parametrize("text", ["=x", "+=x", "++=x", "~=x", "=", "@=x"])
def test_an_override_without_a_name_is_named(text):
    with pytest.raises(ValueError, match="command line"):
        load_recipe("debug_cpu", [text])
