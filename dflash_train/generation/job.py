"""What a regeneration is about: its prompts, its generator and its output, or those of one shard of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.assets import resolve
from dflash_train.config.mixture import Setting, settings
from dflash_train.config.schema import Recipe
from dflash_train.config.validate import shard_of
from dflash_train.data.chat import load_tokenizer
from dflash_train.data.read import Kept, read_conversations
from dflash_train.generation.conversation import Work, finished_row, prepare
from dflash_train.generation.provenance import describe, draw, in_shard, row_generator
from dflash_train.types import Conversation


@dataclass(kw_only=True)
class Job:
    """conversations: those of the shard, in the order of the prompts; kept: what became of all prompts; target: the resolved path."""

    recipe: Recipe
    target: str
    tokenizer: Any
    description: dict[str, Any]
    settings: list[Setting]
    conversations: list[Conversation]
    kept: Kept
    output: Path

    def begin(self, conversation: Conversation) -> Work:
        return prepare(conversation, draw(self.settings, self.recipe.regenerate.seed, conversation.id))

    def row(self, work: Work) -> dict[str, Any]:
        return finished_row(work, row_generator(self.description, work.setting, work.kwargs, self.tokenizer))


def open_job(recipe: Recipe) -> Job:
    """Read tokenizer and prompts. Raises ValueError for a target or prompts that cannot be read, and for too many unusable prompts."""
    config = recipe.regenerate
    target = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(
        target, recipe.target.revision, recipe.target.trust_remote_code, recipe.data.chat_template
    )
    conversations, kept = read_conversations(
        [resolve(config.prompts, "prompts")], limit=config.limit, need_answer=False
    )
    for conversation in conversations:
        if not conversation.messages:
            kept.reject("no_messages", conversation.source)  # bare token ids: nothing to render again
    conversations = [conversation for conversation in conversations if conversation.messages]
    kept.check(recipe.data.max_dropped)
    output = Path(config.output)
    if config.shard is not None:
        shard = shard_of(config.shard)
        conversations = [c for c in conversations if in_shard(c.id, shard)]
        output = shard_path(output, shard)
    return Job(
        recipe=recipe,
        target=target,
        tokenizer=tokenizer,
        description=describe(recipe, tokenizer),
        settings=settings(config),
        conversations=conversations,
        kept=kept,
        output=output,
    )


def shard_path(output: Path, shard: tuple[int, int]) -> Path:
    """`train.jsonl` -> `train.0-of-4.jsonl`."""
    return output.with_name(f"{output.stem}.{shard[0]}-of-{shard[1]}{output.suffix}")
