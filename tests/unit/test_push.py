"""Pushing an export to a stand-in for the Hub: what goes up, what is refused, what is tried again and what is not sent twice."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from types import SimpleNamespace

import pytest
import toys
from hub import TOKEN, standin
from planted import exported, plant, put

from dflash_train import export
from dflash_train.data.prompts import Patience
from dflash_train.licences import front_matter_of

REPO = "acme/tiny-dflash2"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    place = tmp_path_factory.mktemp("push")
    tokenizer = place / "target"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 5}}}))
    return exported(place / "out", tokenizer_dir=tokenizer)


@pytest.fixture
def folder(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "out")


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, and huggingface_hub pointed at it without Xet, whose protocol it does not speak."""
    from huggingface_hub import constants, hf_api

    with standin() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hf_api.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("dflash_train.push.Patience", lambda say: Patience(wait=0.01, say=say))
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)
        yield hub


def run(folder, *argv):
    return toys.call(export.main, folder, "--push", REPO, *argv)


def test_a_push_is_one_private_commit_with_a_tag(hub, folder):
    (folder / "notes.txt").write_text("mine")
    code, out, err = run(folder, "--tag", "step-2000")
    assert code == 0, err
    repo = hub.repos[REPO]
    assert repo.private and len(repo.commits) == 2 and repo.tags == {"step-2000": repo.oid()}
    record = json.loads((folder / "dflash_train.json").read_text())
    assert set(repo.files) == set(record["files"]) and "notes.txt" not in repo.files
    for name in set(repo.files) - {"README.md"}:
        assert repo.files[name] == (folder / name).read_bytes(), name
    assert f"pushed to {hub.url}/{REPO}/commit/" in out and TOKEN not in out + err
    card = repo.files["README.md"].decode()
    assert front_matter_of(card)["license"] == "mit" and f'"model": "{REPO}"' in card


def test_the_card_takes_the_name_of_the_repository(hub, folder):
    toys.call(export.main, folder, "--push", "other/name", "--public")
    card = hub.repos["other/name"].files["README.md"].decode()
    assert "# other/name" in card and "--speculative-draft-model-path other/name" in card and REPO not in card
    assert not hub.repos["other/name"].private


def test_a_dry_run_sends_nothing(hub, folder):
    code, out, _ = run(folder, "--dry-run", "--tag", "v1")
    size = (folder / "model.safetensors").stat().st_size
    assert code == 0 and hub.requests == []
    assert f"{hub.url}/{REPO} (private)" in out and f"{size:,} bytes" in out and "tag: v1" in out


@pytest.mark.parametrize(
    "where", ["/preupload/", "/commit/", "/lfs/", "/info/lfs", "/api/repos/create", "/tag/", "/refs"]
)
def test_a_busy_hub_is_asked_again(hub, folder, where):
    hub.fail[where] = [503]
    code, _, err = run(folder, "--tag", "v1")
    assert code == 0, err
    assert len(hub.repos[REPO].commits) == 2 and hub.repos[REPO].tags


def test_a_lost_connection_is_tried_again(hub, folder):
    hub.fail["/lfs/"] = [0]
    hub.fail["/commit/"] = [500]
    code, out, err = run(folder)
    assert code == 0, err
    assert "model.safetensors" in hub.repos[REPO].files and "attempt 2" in out


def test_an_interrupted_push_goes_on_where_it_was(hub, folder):
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    hub.fail[weights] = [503] * 200
    code, _, err = run(folder)
    assert code == 2 and "run the same command again" in err
    assert len(hub.repos[REPO].commits) == 1 and len(hub.sent) == 1  # the tokenizer went up, nothing was committed
    hub.fail.clear()
    code, _, err = run(folder)
    assert code == 0, err
    assert set(hub.sent.values()) == {1} and len(hub.sent) == 2
    assert set(hub.repos[REPO].files) >= {"model.safetensors", "tokenizer.json"}


def test_a_tag_is_never_moved(hub, folder):
    assert run(folder, "--tag", "v1")[0] == 0
    pinned = hub.repos[REPO].tags["v1"]
    code, _, err = run(folder, "--tag", "v1")
    assert (
        code == 2
        and "name another" in err
        and hub.repos[REPO].tags["v1"] == pinned
        and len(hub.repos[REPO].commits) == 2
    )


def test_a_faulty_export_is_not_pushed(hub, folder):
    plant(folder, put("is_causal", True))
    code, out, err = run(folder)
    assert code == 1 and "training record" in out and "--force" in err and hub.repos == {}
    assert run(folder, "--force")[0] == 0 and REPO in hub.repos


def test_an_unknown_licence_is_not_pushed(hub, tmp_path):
    from dflash_train.card import CardFacts

    folder = exported(tmp_path / "out", card=CardFacts(name="x", base_model="acme/tiny", license="unknown"))
    code, _, err = run(folder)
    assert code == 1 and "export.license" in err and hub.repos == {}


@pytest.mark.parametrize(("status", "says"), [(403, "may not write"), (401, "HF_TOKEN"), (400, "refuses it")])
def test_what_trying_again_cannot_mend_is_said(hub, folder, status, says):
    hub.fail["/api/repos/create"] = [status] * 9
    code, out, err = run(folder)
    assert code == 2 and says in err and TOKEN not in out + err
    assert hub.requests.count("POST /api/repos/create") == 1 and hub.repos == {}


def test_without_a_network_the_remedy_is_said_and_not_the_token(hub, folder, monkeypatch):
    from huggingface_hub import constants, hf_api

    for module in (constants, hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", "http://127.0.0.1:9")
    code, out, err = run(folder)
    assert code == 2 and "the Hub does not answer" in err and "run the same command again" in err
    assert out.count("attempt") == 5 and TOKEN not in out + err and "Traceback" not in err


def test_wrong_names_and_folders(hub, folder, tmp_path):
    for repo, says in (("tiny", "owner"), ("acme/t iny", "acme/t iny")):
        code, _, err = toys.call(export.main, folder, "--push", repo)
        assert code == 2 and says in err
    code, _, err = toys.call(export.main, folder, "--tag", "v1")
    assert code == 2 and "belong to --push" in err
    assert hub.requests == []


def test_a_record_cannot_send_other_files(hub, folder):
    (folder.parent / "secret").write_text("x")
    record = json.loads((folder / "dflash_train.json").read_text())
    (folder / "dflash_train.json").write_text(json.dumps(record | {"files": [*record["files"], "../secret"]}))
    code, _, err = run(folder, "--force")
    assert code == 2 and "outside the export" in err and hub.requests == []


def test_a_record_of_another_shape_is_named(hub, folder):
    record = json.loads((folder / "dflash_train.json").read_text())
    (folder / "dflash_train.json").write_text(json.dumps(record | {"card": {"surprise": 1}}))
    code, _, err = run(folder)
    assert code == 2 and "export the drafter again" in err and hub.requests == []


def test_visibility_of_an_existing_repository_stays(hub, folder):
    assert run(folder, "--public")[0] == 0
    code, out, _ = run(folder)
    assert code == 0 and "is public; that is left as it is" in out and not hub.repos[REPO].private


def gguf(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"GGUF" + bytes(60))
    return folder


def test_gguf_files_have_a_repository_of_their_own(hub, folder, tmp_path):
    place = gguf(tmp_path / "gguf", "tiny-BF16.gguf", "tiny-Q8_0.gguf")
    code, _, err = run(folder, "--gguf", place)
    assert code == 1 and "measured.json" in err and hub.repos == {}
    measured = {"tiny-Q8_0.gguf": {"tau": 3.96, "tokens": 396, "rounds": 100, "reference": 4.0}}
    (place / "measured.json").write_text(json.dumps(measured))
    code, _, err = run(folder, "--gguf", place, "--tag", "v1")
    assert code == 0, err
    repo = hub.repos[f"{REPO}-GGUF"]
    assert (
        set(repo.files) == {"tiny-BF16.gguf", "tiny-Q8_0.gguf", "README.md"}
        and repo.private
        and set(repo.tags) == {"v1"}
    )
    card = repo.files["README.md"].decode()
    front = front_matter_of(card)
    assert (
        front["base_model"] == [REPO, "acme/tiny"]
        and front["base_model_relation"] == "quantized"
        and front["license"] == "mit"
    )
    assert "3.96 (396/100) | -1.0%" in card and "--spec-draft-n-max 7" in card and f"-hfd {REPO}-GGUF" in card
    assert set(hub.repos[REPO].files) >= {"model.safetensors"}


def test_a_file_that_is_no_gguf_is_refused(hub, folder, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    code, _, err = run(folder, "--gguf", tmp_path / "x.gguf")
    assert code == 2 and "not a GGUF file" in err
    code, _, err = run(folder, "--gguf", tmp_path / "empty")
    assert code == 2 and "no .gguf" in err
