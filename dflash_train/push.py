"""Putting an export, or its GGUF files, on the Hub: one commit, private unless asked otherwise, tried again, gone on with where it was.

Every file that the Hub already has is left out of an upload, so the same command after an interruption sends only the rest; the commit itself
comes last, so that no revision is ever half there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash_train.data.prompts import Patience, is_network

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What goes where. files: name in the repository -> file here; tag: the name under which the commit can be pinned, or None."""

    repo: str
    files: dict[str, Path]
    private: bool = True
    tag: str | None = None
    message: str = "Upload drafter"

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ValueError(f"--push {self.repo}: {error}") from None
        if "/" not in self.repo:
            raise ValueError(f"--push {self.repo}: needs the owner too, as in user/{self.repo}")
        missing = [str(path) for path in self.files.values() if not path.is_file()]
        if missing:
            raise ValueError(f"--push {self.repo}: {', '.join(missing[:3])} not there")

    def text(self) -> str:
        """For a dry run: where, how visible, and every file with its size."""
        from huggingface_hub import constants

        sizes = {name: path.stat().st_size for name, path in sorted(self.files.items())}
        width = max(map(len, sizes))
        lines = [f"{constants.ENDPOINT}/{self.repo} ({'private' if self.private else 'public'})"]
        lines += [f"  {name:{width}}  {size:>14,} bytes" for name, size in sizes.items()]
        lines.append(f"  {'total':{width}}  {sum(sizes.values()):>14,} bytes")
        return "\n".join([*lines, f"tag: {self.tag}"] if self.tag else lines)


def push(plan: Plan, *, say: Callable[[str], None] = print, patience: Patience | None = None) -> str:
    """Upload in one commit and return its URL. The token is the one that huggingface_hub finds (HF_TOKEN, or `hf auth login`).

    Raises ValueError for what a user can mend: no token or one without write access, a tag that exists, a repository of another kind.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, patience = HfApi(), patience or Patience(say=say)

    def call(what: str, function: Callable[[], T]) -> T:
        try:
            return patience.call(what, lambda: _unwrapped(function))
        except Exception as error:
            _explain(error, plan.repo)
            raise

    call("create", lambda: api.create_repo(plan.repo, private=plan.private, exist_ok=True))
    there = call("look", lambda: api.repo_info(plan.repo))
    if bool(there.private) != plan.private:
        say(
            f"note: {plan.repo} exists already and is {'private' if there.private else 'public'}; that is left as it is"
        )
    if plan.tag:
        tags = {ref.name for ref in call("refs", lambda: api.list_repo_refs(plan.repo)).tags}
        if plan.tag in tags:
            raise ValueError(
                f"--tag {plan.tag}: {plan.repo} has it already, and what is pinned stays as it is; name another"
            )
    operations = [CommitOperationAdd(name, str(path)) for name, path in sorted(plan.files.items())]
    commit = call("upload", lambda: api.create_commit(plan.repo, operations, commit_message=plan.message))
    if plan.tag:
        call("tag", lambda: api.create_tag(plan.repo, tag=plan.tag, revision=commit.oid))
    return str(commit.commit_url)


def _unwrapped(function: Callable[[], T]) -> T:
    """An upload's own error rather than the RuntimeError that huggingface_hub wraps around it."""
    try:
        return function()
    except RuntimeError as error:
        raise (error.__cause__ or error) from None


def _explain(error: Exception, repo: str) -> None:
    """Raise ValueError with the remedy for an answer that trying again does not change. Never shows headers: they hold the token."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status == 401:
        raise ValueError(
            f"--push {repo}: the Hub knows no valid token here; `hf auth login`, or set HF_TOKEN"
        ) from None
    if status == 403:
        raise ValueError(
            f"--push {repo}: this token may not write there; use one with write access to {repo.split('/')[0]}"
        ) from None
    if status is not None and 400 <= status < 500:
        text = getattr(error, "server_message", None) or f"status {status}"
        raise ValueError(f"--push {repo}: the Hub refuses it ({text})") from None
    if status is not None or is_network(error):
        raise ValueError(
            f"--push {repo}: the Hub does not answer ({type(error).__name__}); run the same command again, it goes on where it was"
        ) from None
