"""YAML recipes and command lines -> one typed `Recipe`. Hydra and OmegaConf stop here.

A recipe is composed by Hydra (its `defaults:` list may name groups in `configs/`), then merged once into the schema.
`key=value` on the command line changes single knobs, `group=name` picks another file of `configs/group/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import errno
import faulthandler
import math
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_train.config import nemo
from dflash_train.config.schema import Recipe
from dflash_train.config.secrets import is_secret_variable, scrubbed, without_keys
from dflash_train.config.validate import validate
from dflash_train.config.values import fits, nearest, printable

PACKAGE = Path(__file__).resolve().parent.parent


def _shipped(name: str) -> Path:
    """`recipes/` and `configs/`: beside the package in a checkout, inside it in an installed wheel."""
    for folder in (PACKAGE.parent / name, PACKAGE / "_shipped" / name):
        if folder.is_dir():
            return folder
    raise ValueError(f"{name}/ is neither beside nor inside the package at {PACKAGE}: reinstall dflash-train")


def find_recipe(name: str) -> Path:
    """A path, or a name in `recipes/` with or without .yaml. Raises ValueError with the nearest names."""
    shipped = _shipped("recipes")
    for path in (Path(name), shipped / name, shipped / f"{name}.yaml"):
        if path.is_file():
            if path.suffix != ".yaml":
                raise ValueError(f"-c {name}: a recipe's name ends in .yaml; rename {path.name} to {path.stem}.yaml")
            return path.resolve()
        if path.is_dir() and (path / "config.yaml").is_file():
            return (path / "config.yaml").resolve()
    known = sorted(p.name for p in shipped.glob("*.yaml"))
    raise ValueError(f"-c {name}: no such file, and recipes/ has only {', '.join(known)}{nearest(name, known)}")


def knobs(cls: type = Recipe, prefix: str = "") -> list[tuple[str, dataclasses.Field, type]]:
    """(dotted name, field, type) of every leaf knob, in the order of the schema."""
    found = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            found += knobs(kind, f"{prefix}{f.name}.")
        else:
            found.append((prefix + f.name, f, kind))
    return found


def type_name(kind: Any) -> str:
    """A type as users write it: `int | null`, `auto | dense | flex`, `list of str`."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(member.value for member in kind)
    if isinstance(kind, types.UnionType):
        return " | ".join("null" if k is type(None) else type_name(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "mapping"
    return kind.__name__


def default_text(f: dataclasses.Field) -> str:
    """The default as YAML writes it; `required` where there is none."""
    value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    if value == MISSING:
        return "required"
    if isinstance(value, enum.Enum):
        return value.value
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


def _check_keys(node: DictConfig, cls: type, where: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(cls)
    everywhere = [name for name, _, _ in knobs()]
    for key in node:
        name = f"{prefix}{key}"
        if str(key) not in hints:
            near = nearest(str(key), list(hints))
            if not near:
                same_leaf = [n for n in everywhere if n.split(".")[-1] == str(key)]
                near = f"; did you mean {same_leaf[0]!r}?" if same_leaf else nearest(name, everywhere)
            section = f"section {prefix[:-1]!r}" if prefix else "the top level"
            raise ValueError(f"{where}: unknown key {name!r} in {section}{near or '; known: ' + ', '.join(hints)}")
        if dataclasses.is_dataclass(hints[str(key)]):
            child = OmegaConf.select(node, str(key))
            if child is None:
                continue
            if not isinstance(child, DictConfig):
                raise ValueError(f"{where}: {name} is a section, not a value; give its keys, such as {name}.key=value")
            _check_keys(child, hints[str(key)], where, f"{name}.")


def _quoted(text: str) -> str:
    """A string as Hydra's grammar quotes it."""
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'") + "'"


def _as_text(override: str) -> str:
    """`output_dir=/tmp/ü` with its value quoted: Hydra's grammar knows neither letters beyond ASCII nor = in a bare value."""
    key, _, value = override.partition("=")
    kinds = {name: kind for name, _, kind in knobs()}
    if str not in (kinds.get(key), *typing.get_args(kinds.get(key))) or typing.get_origin(kinds.get(key)) is not None:
        return override
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{key}={_quoted(value)}"
    return override


def _split_overrides(overrides: list[str]) -> tuple[list[str], list[str]]:
    groups = {p.name for p in _shipped("configs").iterdir() if p.is_dir()}
    for text in overrides:
        if "=" not in text:
            raise ValueError(f"command line: {text!r} is not key=value")
    overrides = [_as_text(text) for text in overrides]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(f"command line: {error}") from error
    chosen, values = [], []
    for text, override in zip(overrides, parsed, strict=True):
        key = override.key_or_group
        if not key:
            raise ValueError(f"command line: {text!r} names no knob; write key=value")
        value = override.value()
        is_choice = key in groups and isinstance(value, str)
        if is_choice:
            options = sorted(p.stem for p in (_shipped("configs") / key).glob("*.yaml"))
            if value not in options:
                raise ValueError(
                    f"command line: {key}={value}: configs/{key}/ has {', '.join(options)}{nearest(value, options)}"
                )
            chosen.append(f"{key}={value}")
        else:
            values.append(text if text.startswith(("+", "~")) else f"++{text}")
    return chosen, values


def _listed(path: Path) -> dict[str, Any]:
    """A recipe as it stands in its file. Raises ValueError for a broken one."""
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, this is a {type(listed).__name__}")
    return listed


def _groups_in_defaults(path: Path) -> set[str]:
    """Groups that the `defaults:` of a recipe choose, or of a recipe that it builds on. Raises ValueError for a broken file."""
    defaults = _listed(path).get("defaults") or []
    if not isinstance(defaults, list):
        raise ValueError(f"{path}: defaults is a list, such as [demo, _self_]; this is a {type(defaults).__name__}")
    found: set[str] = set()
    for entry in defaults:
        if isinstance(entry, dict):
            found |= {str(k).lstrip("/").removeprefix("override ") for k in entry}
        elif entry != "_self_":
            places = [folder / f"{entry}.yaml" for folder in (path.parent, _shipped("recipes"))]
            below = next((p for p in places if p.is_file() and p != path), None)
            found |= _groups_in_defaults(below) if below else set()
    return found


def load_recipe(name: str | None, overrides: list[str] | None = None) -> Recipe:
    """Compose, merge, convert and validate a recipe.

    name: path of a YAML file, or a name in `recipes/`; None: the defaults alone; overrides: `key=value` strings.
    Raises ValueError that names file and key, the rule and the nearest known key.
    """
    path = None if name is None else find_recipe(name)
    where = "command line" if path is None else str(path)
    with _explained(where):
        if path is not None and nemo.is_nemo(listed := _listed(path)):
            return _load_nemo(listed, path, overrides or [])
        chosen, values = _split_overrides(overrides or [])
        in_defaults = set() if path is None else _groups_in_defaults(path)
        chosen = [c if c.split("=")[0] in in_defaults else f"+{c}" for c in chosen]
        return _seal(_compose(path, [*chosen, *values], where), where)


@contextlib.contextmanager
def _explained(where: str) -> typing.Iterator[None]:
    """What OmegaConf has to say, as an error that names the recipe."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {_explain(error)}") from error
    except RecursionError:
        raise ValueError(
            f"{where}: nested too deeply, or something in it contains itself (an anchor, a reference, defaults); write it out"
        ) from None


def _compose(path: Path | None, overrides: list[str], where: str) -> DictConfig:
    """What Hydra makes of a recipe and overrides in its grammar, references not yet followed."""
    OmegaConf.register_new_resolver("oc.env", _variable, replace=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(path.parent if path else _shipped("configs")), version_base="1.3"):
            # A recipe in any folder may build on a shipped one (`defaults: [demo, _self_]`).
            places = ",".join(_quoted(f"file://{_shipped(folder)}") for folder in ("configs", "recipes"))
            return compose(path.stem if path else None, [f"hydra.searchpath=[{places}]", *overrides])
    # ValueError: what Hydra says of a defaults list; the others are what its parsers say.
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: {str(error).strip()}") from error
    except AssertionError as error:  # where Hydra has no words
        raise ValueError(
            f"{where}: its defaults cannot be read; write a list such as [demo, {{target: embedded}}, _self_]"
        ) from error


def _variable(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}`: a recipe is written to config.yaml with its references followed, so a secret cannot come by this way."""
    if is_secret_variable(name):
        raise ValueError(
            f"${{oc.env:{name}}} would be written to config.yaml; leave secrets in the environment (regenerate.api_key_env names a variable)"
        )
    if name not in os.environ and not default:
        raise ValueError(
            f"${{oc.env:{name}}}: the environment has no such variable; set it, or give a default after a comma"
        )
    return os.environ.get(name, *default)


def _load_nemo(listed: dict[str, Any], path: Path, overrides: list[str]) -> Recipe:
    """A recipe of NeMo AutoModel; overrides may name its fields or our knobs, which win."""
    theirs = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if nemo.is_nemo_override(key):
            try:
                theirs[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ValueError(f"command line: {text}: not a YAML value ({error})") from None
    found = nemo.read_nemo(nemo.change(listed, theirs), str(path))
    ours = [text for text in overrides if text.partition("=")[0] not in theirs]
    chosen, values = _split_overrides(ours)
    changes = _compose(None, [*(f"+{c}" for c in chosen), *values], "command line")
    _check_keys(changes, Recipe, "command line")
    merged = OmegaConf.merge(OmegaConf.create(found.recipe), OmegaConf.create(OmegaConf.to_container(changes)))
    try:
        with _explained(str(path)):
            recipe = _seal(merged, str(path))
    except ValueError as error:
        raise ValueError(found.in_its_words(str(error))) from error
    recipe.given, recipe.notes = found.given | frozenset(_leaves(changes)), found.notes
    return recipe


def _seal(composed: DictConfig, where: str) -> Recipe:
    _check_keys(composed, Recipe, where)
    _check_kinds(composed, where)
    merged = OmegaConf.merge(OmegaConf.structured(Recipe), _floats(composed))
    OmegaConf.resolve(merged)
    recipe = _to_dataclass(merged, Recipe)
    for name, _, kind in knobs():
        value = OmegaConf.select(merged, name, throw_on_missing=False)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {name} = {value}: must be a finite number")
        # OmegaConf does not look into a list that may be null.
        if OmegaConf.is_list(value) and not fits(OmegaConf.to_container(value), kind):
            raise ValueError(f"{where}: {name} = {value}: an item has another type (expected {type_name(kind)})")
    recipe.given = frozenset(_leaves(composed))
    validate(recipe, where)
    return recipe


def _leaves(node: DictConfig, cls: type = Recipe, prefix: str = "") -> typing.Iterator[str]:
    """Dotted names of the knobs that a node sets, null included."""
    hints = typing.get_type_hints(cls)
    for key in map(str, node):
        if not dataclasses.is_dataclass(hints[key]):
            yield prefix + key
        elif OmegaConf.select(node, key) is not None:
            yield from _leaves(node[key], hints[key], f"{prefix}{key}.")


def _check_kinds(composed: DictConfig, where: str) -> None:
    """Raise ValueError naming the knob where a list, a mapping or one value stands for another of these, or where a reference leads nowhere."""
    for name, _, kind in knobs():
        try:
            value = OmegaConf.select(composed, name)
        except OmegaConfBaseException as error:
            raise ValueError(f"{where}: {name}: {str(error).splitlines()[0]}") from error
        if value is None:
            continue
        wanted = next(
            (
                k
                for k in (list, dict)
                if typing.get_origin(kind) is k or k in map(typing.get_origin, typing.get_args(kind))
            ),
            None,
        )
        found = list if OmegaConf.is_list(value) else dict if OmegaConf.is_dict(value) else None
        if found is not wanted:
            shape = {list: "a list, such as [a, b]", dict: "a mapping, such as {key: value}", None: "one value"}
            raise ValueError(f"{where}: {name} = {value}: must be {shape[wanted]} (expected {type_name(kind)})")


def _explain(error: OmegaConfBaseException) -> str:
    key = error.full_key or ""
    leaf = {name: (f, kind) for name, f, kind in knobs()}.get(str(key))
    text = str(error).splitlines()[0]
    return f"{key}: {text}" + (f" (expected {type_name(leaf[1])})" if leaf else "")


def _floats(node: DictConfig) -> DictConfig:
    """YAML 1.1 reads `6e-4` as a string: turn such strings into numbers where the schema wants a float."""
    node = node.copy()
    for name, _, kind in knobs():
        if float in (kind, *typing.get_args(kind)):
            value = OmegaConf.select(node, name)
            if isinstance(value, str):
                try:
                    OmegaConf.update(node, name, float(value))
                except ValueError:
                    pass  # the merge below says what is wrong with it
    return node


def _to_dataclass(node: DictConfig, cls: type) -> Any:
    """Typed object with missing values kept as MISSING, so that a command can ask only for what it needs."""
    hints = typing.get_type_hints(cls)
    values = {}
    for f in dataclasses.fields(cls):
        if OmegaConf.is_missing(node, f.name):
            values[f.name] = MISSING
        elif dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = _to_dataclass(node[f.name], hints[f.name])
        else:
            value = node[f.name]
            values[f.name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return cls(**values)


def require(recipe: Recipe, *names: str) -> None:
    """Raise ValueError for the first of the dotted names that has no value."""
    for name in names:
        value: Any = recipe
        for part in name.split("."):
            value = getattr(value, part)
        if value == MISSING or value == []:
            text = next(f.metadata["help"] for n, f, _ in knobs() if n == name)
            raise ValueError(f"{name} has no value; set it in the recipe or as {name}=... on the command line. {text}")


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `-c` accepts again, without secrets: it is kept with a run, and shared."""
    return OmegaConf.to_yaml(scrubbed(OmegaConf.to_container(OmegaConf.structured(recipe), enum_to_str=True)))


def help_text() -> str:
    """Every knob with type, default and meaning, section by section; made from the schema alone."""
    lines, section = [], None
    for name, f, kind in knobs():
        head = name.rsplit(".", 1)[0] if "." in name else "(top level)"
        if head != section:
            section = head
            lines.append(f"\n{section}")
        lines.append(f"  {name}  [{type_name(kind)}; {default_text(f)}]\n      {f.metadata['help']}")
    return "\n".join(lines)


def parser(
    prog: str, description: str, *, source: str | None = None, needs_recipe: bool = True, knobs: str | None = None
) -> argparse.ArgumentParser:
    """The small argparse shared by every command: [SOURCE] -c RECIPE [key=value ...].

    source: what the command works on, where it does not only read a recipe; the recipe is then optional. needs_recipe: whether it
    is required otherwise. knobs: what is said of them where a list of all would hide the options.
    """
    made = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=knobs or "Knobs (key=value):\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if source:
        made.add_argument("source", metavar="RUN_OR_EXPORT", help=source)
    made.add_argument(
        "-c",
        "--config",
        metavar="RECIPE",
        required=needs_recipe and source is None,
        help="YAML file, run folder, or a name in recipes/",
    )
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes single knobs; group=name picks configs/group/name.yaml",
    )
    return made


def parse(commands: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments; without any, explain the command and exit 2."""
    if not argv:
        commands.print_help(sys.stderr)
        raise SystemExit(2)
    return commands.parse_intermixed_args(_without_dashes(argv))


def _without_dashes(argv: list[str]) -> list[str]:
    """`--section.key value` and `--section.key=value`, as NeMo AutoModel's command writes them, as `section.key=value`."""
    out, rest = [], iter(argv)
    for text in rest:
        if re.fullmatch(r"--\w+\.[\w.]+=.*", text, re.DOTALL):
            out.append(text[2:])
        elif re.fullmatch(r"--\w+\.[\w.]+", text):
            value = next(rest, None)
            if value is None or value.startswith("--"):
                raise ValueError(f"command line: {text} has no value; write {text[2:]}=VALUE")
            out.append(f"{text[2:]}={value}")
        else:
            out.append(text)
    return out


def parse_command(argv: list[str], *, prog: str, description: str) -> Recipe:
    """The recipe of `-c RECIPE [key=value ...]`."""
    args = parse(parser(prog, description), argv)
    return load_recipe(args.config, args.overrides)


# A full disk, a quota, a limit on the size of files: written to an open file, so the error names none.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckFailed(Exception):
    """What a command checked does not hold: nothing was asked wrongly, but the result is not good. Exit code 1."""


def run_command(main: typing.Callable[[list[str]], int | None]) -> None:
    """Run a command's main: a user's mistake is one line on stderr and exit code 2, a failed check 1, Ctrl-C one word and 130; no traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # where stderr is no file
        faulthandler.enable()  # a mapped file that is cut off under a run is a bus error: it says where
    try:
        code = main(sys.argv[1:])
    except CheckFailed as error:
        print(f"failed: {without_keys(str(error))}", file=sys.stderr)
        raise SystemExit(1) from None
    except ValueError as error:
        if os.environ.get("DFLASH_TRACEBACK"):
            raise
        print(f"error: {printable(without_keys(str(error)))}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if os.environ.get("DFLASH_TRACEBACK"):
            raise
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it ends
        raise SystemExit(141) from None
    except OSError as error:
        full = error.errno in NO_SPACE
        if (error.filename is None and not full) or os.environ.get("DFLASH_TRACEBACK"):
            raise
        named = "" if error.filename is None else f"{error.filename}: "
        print(
            f"error: {named}{error.strerror}" + ("; make room, then run the same command again" if full else ""),
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    raise SystemExit(code or 0)
