"""Where numbers go: metrics.jsonl always, Weights & Biases when asked. Rank 0 only; the only file importing wandb."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from dflash_train.config.schema import Recipe, WandbMode


class Tracker:
    """Appends one JSON object per line to <output_dir>/metrics.jsonl, and mirrors it to W&B."""

    def __init__(self, recipe: Recipe, *, resumed_at: int | None):
        self.path = Path(recipe.output_dir) / "metrics.jsonl"
        self._drop_after(resumed_at or 0)
        self._run = _start_wandb(recipe)

    def _drop_after(self, step: int) -> None:
        """A resumed run continues its curve: lines of steps that will be done again are removed."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept if step))

    def log(self, step: int, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._run is not None:
            self._run.log(values, step=step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()


def _start_wandb(recipe: Recipe) -> Any:
    mode = recipe.track.wandb
    if mode is WandbMode.disabled or (mode is WandbMode.auto and recipe.track.wandb_project is None):
        return None
    import wandb

    if mode is WandbMode.auto:
        if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False)):
            print(
                "track: wandb_project is set but you are not logged in (wandb login); metrics go to metrics.jsonl only",
                flush=True,
            )
            return None
        mode = WandbMode.online
    from omegaconf import OmegaConf

    folder = Path(recipe.output_dir)
    mark = folder / "wandb_id"
    if not mark.exists():
        mark.write_text(uuid.uuid4().hex[:8])
    return wandb.init(
        project=recipe.track.wandb_project or "dflash-train",
        name=recipe.track.wandb_name or folder.name,
        id=mark.read_text(),
        resume="allow",
        mode=mode.value,
        dir=str(folder),
        config=OmegaConf.to_container(OmegaConf.structured(recipe), enum_to_str=True),
    )
