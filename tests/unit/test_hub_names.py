"""A path that cannot be a name on the Hub is refused at once, and a Hub that is not there is said in one line; a slow one is waited for."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import hub as stand_in
import pytest
import toys
from huggingface_hub import constants

from dflash_train import check, evaluate, export, serve
from dflash_train.config import hub
from dflash_train.config.hub import check_place, hub_name, unreachable
from dflash_train.data.chat import load_tokenizer
from dflash_train.data.files import locate, rows
from dflash_train.licences import card_licence
from dflash_train.released.read import read_released
from dflash_train.target.info import read_config

NO_NAMES = ["/no/folder", "./no/folder", "./folder", "../folder", "~/folder", "folder/", "acme/model/", "a/b/c", "a//b"]


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    """Nothing is in the cache, and what an earlier test found out is forgotten."""
    forget = hub._silent.cache_clear
    forget()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/none")
    monkeypatch.setattr(hub, "PAUSE", 0.01)
    yield
    forget()


@pytest.fixture
def no_hub(monkeypatch):
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def no_asking(monkeypatch):
    monkeypatch.setattr(hub, "_silent", lambda: pytest.fail("the Hub was asked"))


@pytest.mark.parametrize("text", NO_NAMES)
def test_no_path_is_looked_for_on_the_hub(text, no_asking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not hub_name(text)
    for read in (read_config, load_tokenizer, lambda path: check_place("--x", path, data=True)):
        with pytest.raises(
            ValueError, match="no such folder here, and it cannot be a Hub id; give a local folder or a Hub id"
        ):
            read(text)  # fmt: skip
    with pytest.raises(ValueError, match="no such folder, and no Hub id"):
        read_released(text, None)
    with pytest.raises(ValueError, match="does not exist"):
        locate(text)
    assert card_licence(text) is None


def test_names_are_names(monkeypatch, tmp_path):
    assert hub_name("acme/model-1.0") and hub_name("gpt2")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match=f"write {tmp_path}/here"):
        check_place("target.path", "~/here")
    check_place("target.path", str(tmp_path / "here"))


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (serve.main, ["--no-drafter", "--target", "{}"]), (evaluate.main, ["{run}", "target.path={}"]), (export.main, ["{run}", "target.path={}"]),
        (check.main, ["{export}", "--target", "{}"]), (toys.script("regenerate").main, ["-c", "debug_cpu", "target.path={}"]),
        (toys.script("inspect_data").main, ["--tokenizer", "{}", "--data", "{rows}"]), (toys.script("clean").main, ["{rows}", "--output", "{rows}.out.jsonl", "--tokenizer", "{}"]),
        (toys.script("serve_target", "scripts").main, ["-c", "debug_cpu", "--engine", "vllm", "--dry-run", "target.path={}"]),
        (toys.script("benchmark", "scripts").main, ["--tokenizer", "{}"]),
        (toys.script("rollout", "scripts").main, ["--target", "{}", "--plain", "http://127.0.0.1:9", "--speculative", "http://127.0.0.1:9"]),
    ],
    ids=["serve", "evaluate", "export", "check", "regenerate", "inspect", "clean", "serve_target", "benchmark", "rollout"],
)  # fmt: skip
@pytest.mark.parametrize("target", ["/no/folder", "outputs/target"])
def test_every_command_says_so_in_a_line(main, words, target, overfitted, tmp_path, no_hub, monkeypatch):
    data = toys.write_jsonl(tmp_path / "rows.jsonl", overfitted.rows)
    monkeypatch.chdir(tmp_path)
    places = {"{run}": overfitted.folder, "{export}": overfitted.export, "{rows}": data}
    filled = []
    for word in words:
        for mark, place in {"{}": target, **places}.items():
            word = word.replace(mark, str(place))
        filled.append(word)
    began = time.monotonic()
    done = toys.call(main, *filled)
    assert time.monotonic() - began < 5
    assert done.code == 2 and f"= {target}: no such folder here" in done.err and done.err.count("\n") == 1, done.err
    assert ("cannot be looked for" in done.err) == (target == "outputs/target")


def test_a_hub_that_is_not_there_is_asked_once_and_not_waited_for(no_hub, tmp_path):
    began = time.monotonic()
    said = f"no such folder here .*cannot be looked for: {constants.ENDPOINT}: .*correct the path"
    for _ in range(3):
        with pytest.raises(ValueError, match=f"target.path = acme/model: {said}"):
            load_tokenizer("acme/model")
        with pytest.raises(ValueError, match=f"data set = acme/rows: {said}"):
            next(rows("acme/rows"))
        assert card_licence("acme/model") is None
    assert time.monotonic() - began < 5 and hub._silent.cache_info().misses == 1


def test_what_is_in_the_cache_needs_no_hub(no_hub, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "tables")
    assert unreachable("acme/model") and unreachable("acme/rows", data=True)
    (tmp_path / "models--acme--model" / "snapshots").mkdir(parents=True)
    (tmp_path / "tables" / "acme___rows").mkdir(parents=True)
    assert unreachable("acme/model") is None and unreachable("acme/rows", data=True) is None
    assert unreachable("acme/rows")  # no model


def test_a_hub_that_answers_or_is_slow_is_left_to_its_library(no_hub, monkeypatch):
    with stand_in.standin() as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        assert unreachable("acme/model") is None
    hub._silent.cache_clear()
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection and says nothing
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert unreachable("acme/model") is None
        check_place("target.path", "acme/model")


def test_one_question_that_the_name_server_misses_is_no_reason(no_hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import httpx

    answers = iter([httpx.ConnectError("not known"), None])

    def head(url, timeout):
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    assert unreachable("acme/model") is None


def test_offline_by_the_environment_is_not_even_asked(no_hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set, and it is not in the cache"):
        load_tokenizer("acme/model")
