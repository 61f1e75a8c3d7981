"""Every command of docs/troubleshooting.md shows what the page says, on a tiny pair that is broken in that way."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import toys

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow  # about 30 seconds, most of them training the pair


def blocks() -> list[tuple[str, str, list[str]]]:
    """(title of the entry, command, what it must print) of every command in a console block."""
    found = []
    for entry in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        title = entry.partition("\n")[0]
        for block in re.findall(r"```console\n(.*?)```", entry, re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.strip().splitlines()
                found.append((title, command, lines))
    return found


COMMANDS = blocks()


def edit(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def place(overfitted, target_dir, tmp_path_factory):
    """A folder with everything that the page names."""
    at = tmp_path_factory.mktemp("trouble")
    (at / "my-target").symlink_to(target_dir)
    another = shutil.copytree(target_dir, at / "another-target")
    edit(another, lambda c: c.update(hidden_size=c["hidden_size"] * 2))
    drafters = {
        "my-drafter": lambda c: None,
        "mask-changed": lambda c: c["dflash_config"].update(mask_token_id=c["dflash_config"]["mask_token_id"] - 1),
        "layers-changed": lambda c: c["dflash_config"].update(target_layer_ids=[0, 2]),
        "window-changed": lambda c: c.update(sliding_window=c["sliding_window"] + 1),
        "mask-is-eos": lambda c: c["dflash_config"].update(mask_token_id=2),
        "quantised": lambda c: c.update(quantization_config={"quant_method": "fp8"}),
        "of-nemo": lambda c: c.update(architectures=["Qwen3DFlash2DraftModel"]),
    }
    for name, change in drafters.items():
        edit(shutil.copytree(overfitted.export, at / name), change)
    (at / "Modelfile").write_text("FROM my-target\nDRAFT my-drafter\n")
    (at / "slots.json").write_text('{"slots": [0.92, 0.84, 0.76, 0.69, 0.62, 0.56, 0.5]}')
    messages = [{"role": "user", "content": "w20 w30"}, {"role": "assistant", "content": "w40 w50"}]
    toys.write_jsonl(
        at / "others.jsonl", [{"id": "a", "messages": messages, "generator": "somebody-else", "model": "somebody-else"}]
    )
    toys.write_jsonl(at / "rows.jsonl", overfitted.rows)
    recipe = overfitted.recipe.read_text()
    (at / "outputs").mkdir()
    shutil.copytree(overfitted.folder, at / "outputs" / "my_run")
    recipe = recipe.replace(f"output_dir: {overfitted.folder}", "output_dir: outputs/my_run")
    kept = at / "outputs" / "my_run" / "config.yaml"
    kept.write_text(kept.read_text().replace(str(overfitted.folder), "outputs/my_run"))
    heldout = [{"id": f"h{i}", "messages": [{"role": "user", "content": f"w{20 + i} w{40 + i}"}]} for i in range(2)]
    toys.write_jsonl(at / "heldout.jsonl", heldout)
    recipe = recipe.replace("data: {", "data: {heldout: [heldout.jsonl], ") + "evaluate: {max_new_tokens: 12}\n"
    (at / "my.yaml").write_text(recipe)
    (at / "no-mask.yaml").write_text(re.sub(r"mask_token_id: \d+, ", "", recipe).replace("my_run", "no_mask"))
    return at


def run(command: str) -> toys.Called:
    """A command line of the page, in this process."""
    words = shlex.split(command)
    assert words[0] == "python", command
    if words[1] == "-m":
        return toys.call(importlib.import_module(words[2]).main, *words[3:])
    folder, name = words[1].removesuffix(".py").split("/")
    return toys.call(toys.script(name, folder).main, *words[2:])


@pytest.mark.parametrize(
    ("title", "command", "lines"), COMMANDS, ids=[f"{i}-{title[:40]}" for i, (title, _, _) in enumerate(COMMANDS)]
)
def test_the_command_shows_it(place, monkeypatch, title, command, lines):
    monkeypatch.chdir(place)
    done = run(command)
    said = " ".join((done.out + done.err).split())
    assert lines, f"{title}: says nothing of what is to be seen"
    for line in lines:
        assert " ".join(line.split()) in said, (
            f"{command}\nmust print {line!r}, printed:\n{done.out[-3000:]}\n{done.err[-1500:]}"
        )


def test_a_sound_pair_has_none_of_it(place, monkeypatch):
    """What the page's commands look for is not there where nothing is broken: else they would show nothing."""
    monkeypatch.chdir(place)
    for title, command, lines in COMMANDS:
        if ".check" in command:
            sound = re.sub(r"check \S+", "check my-drafter", command).partition(" --launch")[0]
            sound = sound.replace("another-target", "my-target")
            assert lines[0] not in run(sound).out, title


def test_every_entry_says_cause_and_mend():
    for entry in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        title = entry.partition("\n")[0]
        assert "**Cause.**" in entry and "**Mend.**" in entry, title
    assert len(COMMANDS) >= 18
