"""Show what training would see: python data_prep/inspect_data.py -c recipe.yaml [options] [key=value ...]

Rows kept and dropped, the supervised share, lengths, who wrote the answers, how they pack, and examples with the supervised text in
green. Without a recipe: --tokenizer PATH_OR_HUB_ID --data FILE [FILE ...]. --html writes the same as a page, with blocks and anchors.
The certificate of the data goes to --certificate, else to <output_dir>/certificate.json if no run is there yet.

Exit code 2, after the report: training would refuse the data.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from omegaconf import MISSING

from dflash_train.assets import resolve
from dflash_train.config.load import load_recipe, parse, parser, require, run_command
from dflash_train.config.schema import Recipe
from dflash_train.config.values import parse_json
from dflash_train.data.certificate import CERTIFICATE, differences, read_certificate, write_certificate
from dflash_train.data.inspection import Inspection, chosen, look, write_report
from dflash_train.data.inspection_page import inspection_page
from dflash_train.released.start import derive
from dflash_train.target.info import read_target_info
from dflash_train.types import TargetInfo


def arguments(argv: list[str]) -> argparse.Namespace:
    commands = parser("data_prep/inspect_data.py", __doc__ or "", needs_recipe=False)
    commands.add_argument(
        "--tokenizer", metavar="PATH_OR_HUB_ID", help="instead of -c: the target whose template and tokenizer to use"
    )
    commands.add_argument(
        "--data", metavar="FILE", nargs="+", default=[], help="instead of -c: the data, as in data.train"
    )
    commands.add_argument(
        "--kwargs", metavar="JSON", help="arguments of the chat template, such as '{\"enable_thinking\": true}'"
    )
    commands.add_argument("--html", metavar="PAGE", help="also write a self-contained HTML page")
    commands.add_argument("--samples", metavar="N", type=int, default=3, help="examples to show (3)")
    commands.add_argument("--ids", metavar="A,B", help="show the examples of these rows instead")
    commands.add_argument("--certificate", metavar="FILE", help="where the certificate goes")
    commands.add_argument("--no-color", action="store_true", help="mark supervised text with brackets, not with colour")
    return parse(commands, argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of -c, or one made of --tokenizer and --data."""
    # `--data a.jsonl data.limit=5`: the option takes all that follows, the change of a knob too
    changes = [text for text in args.data if re.match(r"[\w.]+=", text) and not Path(text).exists()]
    files = [text for text in args.data if text not in changes]
    own = (bool(args.tokenizer), bool(files))
    if own != ((False, False) if args.config else (True, True)):
        raise ValueError("give either -c RECIPE, or both --tokenizer PATH_OR_HUB_ID and --data FILE [FILE ...]")
    recipe = load_recipe(args.config, args.overrides + changes)
    if not args.config:
        recipe.target.path, recipe.data.train = args.tokenizer, files
    if args.kwargs is not None:
        recipe.data.chat_template_kwargs = _object(args.kwargs)
    require(recipe, "target.path", "data.train")
    return recipe


def _object(text: str) -> dict:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"--kwargs {text}: is no JSON ({error}); write it as '{{\"enable_thinking\": true}}'"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"--kwargs {text}: must be a JSON object, such as '{{\"enable_thinking\": true}}'")
    return value


def target_info(recipe: Recipe) -> TargetInfo | None:
    """What the target's config.json says; None where only its tokenizer is there."""
    target = recipe.target
    try:
        return read_target_info(resolve(target.path, "target"), target.revision, target.trust_remote_code)
    except ValueError:
        return None


def save_certificate(found: Inspection, named: str | None) -> str:
    """Write it where it was asked for, or beside the run to come; never over that of a run. Returns a line about it."""
    assert found.certificate is not None
    folder = None if found.recipe.output_dir == MISSING else Path(found.recipe.output_dir)
    if named is None and folder is None:
        return "certificate: not written (--certificate FILE does)"
    path = Path(named) if named is not None else folder / CERTIFICATE
    if named is None and (folder / "config.yaml").exists():
        changed = differences(read_certificate(path), found.certificate) if path.exists() else []
        verdict = (
            "\n  ".join(["differs from it:", *changed])
            if changed
            else "has none"
            if not path.exists()
            else "is the same"
        )
        return f"certificate: {folder} holds a run, whose certificate stays; this one {verdict} (--certificate FILE writes it)"
    write_certificate(found.certificate, path)
    return f"certificate: {path}"


def main(argv: list[str]) -> int:
    args = arguments(argv)
    recipe, _ = derive(recipe_of(args))
    found = look(recipe, target_info(recipe))
    shown = chosen(found, args.samples, args.ids.split(",") if args.ids else None)
    color = not args.no_color and "NO_COLOR" not in os.environ and sys.stdout.isatty()
    write_report(found, shown, color=color, out=sys.stdout)
    if args.html:
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
        Path(args.html).write_bytes(inspection_page(found, shown).encode("utf-8", "replace"))
        print(f"page: {args.html}")
    found.check()
    print(save_certificate(found, args.certificate))
    return 0


if __name__ == "__main__":
    run_command(main)
