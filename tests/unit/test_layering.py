"""Imports point down: a module may use what stands below it, never what stands above or beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dflash_train"
# From the bottom up. Parts of one layer do not know each other; the files of one part may.
LAYERS = [
    {"types", "config", "ranks", "acceptance"},
    {"metrics", "kernels", "clock", "disk", "stop"},
    {"data", "target", "drafter", "objective", "optim"},
    {"engine", "checkpoint", "track"},
    {"method", "folder", "dashboard", "flops", "engines", "licences", "push"},
    {"released"},
    {"build", "walk", "card", "faults"},
    {"generation", "feed"},
    {"regenerate", "client", "check", "benchmark", "server"},
    {"export", "evaluate", "serve", "advise"},
    {"heldout", "report", "rollout"},
    {"start"},
    {"train"},
]
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
EVERYWHERE = {"assets", "__init__"}
HEAVY = {"nemo_automodel", "deepspeed", "dflash", "wandb", "vllm"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if part_of(p) not in EVERYWHERE]


def imports(path: Path) -> list[tuple[str, str | None, int]]:
    """(dotted name, the function around it or None, line) of every import; `from a import b` is a.b."""
    found = []

    def visit(node: ast.AST, function: str | None) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, function, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.extend((f"{node.module}.{alias.name}", function, node.lineno) for alias in node.names)
        if isinstance(node, ast.FunctionDef):
            function = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), None)
    return found


def test_every_part_has_a_layer():
    assert {part_of(p) for p in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine, wrong = part_of(path), []
    for name, _, line in imports(path):
        names = name.split(".")
        if names[0] != "dflash_train" or len(names) == 1 or names[1] in EVERYWHERE or names[1] not in LEVEL:
            continue  # another package, or an attribute of the package itself
        other = names[1]
        if other != mine and LEVEL[other] >= LEVEL[mine]:
            wrong.append(f"line {line}: {mine} imports {other}")
    assert not wrong


def test_heavy_libraries_are_imported_lazily_and_in_one_file_each():
    places: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name, function, line in imports(path):
            library = name.split(".")[0]
            if library in HEAVY:
                assert function is not None, f"{path}:{line}: {library} is imported with the module"
                places.setdefault(library, set()).add(str(path.relative_to(PACKAGE)))
    assert places["wandb"] == {"track.py"} and places["dflash"] == {"client.py"}
    assert all(len(files) == 1 for files in places.values()), places


def test_recipes_know_nothing_of_torch():
    for path in (PACKAGE / "config").glob("*.py"):
        assert not [n for n, _, _ in imports(path) if n.split(".")[0] in ("torch", "transformers")], path


def test_only_ranks_and_engines_speak_to_other_processes():
    for path in FILES:
        if part_of(path) in ("ranks", "engine"):
            continue
        wrong = [n for n, _, _ in imports(path) if n.startswith(("torch.distributed", "torch.nn.parallel"))]
        wrong += [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
        assert not wrong, path


def test_what_is_really_loaded():
    """The rules above see one file at a time; this sees what else an import pulls in."""
    code = f"""
import sys
import dflash_train.config.load
assert "torch" not in sys.modules, "a recipe needs torch"
import dflash_train.train
loaded = {HEAVY!r} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
