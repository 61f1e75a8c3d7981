"""What is named by a folder here or by its name on the Hugging Face Hub."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

# A name server may miss a question. Seconds between two of them, and for an answer.
TRIES, PAUSE, PATIENCE = 3, 1.0, 5.0


def hub_name(text: str) -> bool:
    """Whether the Hub could have a model or a data set of this name. No path that is absolute, begins with `.` or `~`, ends in `/` or has two of them."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def check_place(what: str, text: str, *, data: bool = False) -> None:
    """Raise ValueError, at once, for a text that names nothing here and cannot name anything on the Hub, or of which the Hub cannot be asked: its
    library would try for a minute. A slow network is left to the library. what: the knob or option; data: a data set, not a model."""
    if os.path.exists(text):
        return
    if not hub_name(text):
        home = os.path.expanduser(text)  # which no library does
        remedy = (
            f"write {home}" if home != text and os.path.exists(home) else "give a local folder or a Hub id (owner/name)"
        )
        raise ValueError(f"{what} = {text}: no such folder here, and it cannot be a Hub id; {remedy}")
    if (why := unreachable(text, data=data)) is not None:
        raise ValueError(
            f"{what} = {text}: no such folder here ({Path.cwd()}), and as a Hub id it cannot be looked for: {why}; correct the path, "
            "name a folder that holds it, or run where the Hub can be reached (HF_ENDPOINT names a mirror)"
        )


def unreachable(name: str, *, data: bool = False) -> str | None:
    """Why nothing can be had of a name on the Hub; None where something of it is in the cache, or where the Hub answers or may only be slow."""
    return None if _cached(name, data) else _silent()


def _cached(name: str, data: bool) -> bool:
    from huggingface_hub import constants

    kept = Path(constants.HF_HUB_CACHE) / f"{'datasets' if data else 'models'}--{name.replace('/', '--')}" / "snapshots"
    if kept.is_dir():
        return True
    if not data:
        return False
    from datasets import config  # which also keeps the tables that it made of one

    return any(Path(config.HF_DATASETS_CACHE).glob(f"{name.partition('/')[0]}___*"))


@functools.cache
def _silent() -> str | None:
    """Why the Hub cannot be reached from this process; asked once."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import httpx

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set, and it is not in the cache"
    why = None
    for number in range(TRIES):
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except httpx.ConnectError as error:  # nobody there; a timeout is another error
            why = f"{constants.ENDPOINT}: {str(error) or type(error).__name__}"
        except httpx.HTTPError:
            return None
        else:
            return None
        if number + 1 < TRIES:
            time.sleep(PAUSE)
    return why
