"""Asks whether the Hugging Face hub can be reached, and if not, what its libraries have in cache.

No torch is loaded here, so that a model which cannot be had is an error after seconds.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from vapo.errors import UserError
from vapo.errors.shown_text import say

_TIMEOUT_S = 5.0


def check_model_on_hub(name: str) -> None:
    """Check that a hub's model can be had: the hub answers, or its config.json is in the cache.

    Raises: UserError: the hub cannot be reached, and the cache has no such model.
    """
    reason = _why_offline()
    if reason is None:
        return
    from huggingface_hub import try_to_load_from_cache

    try:
        config_file = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no hub has such a name
        config_file = None
    if not isinstance(config_file, str):
        raise UserError(
            f"{name}: there is no such folder here, and as a hub id it cannot be had: {reason}, "
            "and its cache has no model of this name. Give a local folder, or run `hf download "
            f"{name}` where there is a network, and copy the cache"
        )
    _say_that_the_cache_is_read(reason)


def check_dataset_on_hub(name: str) -> None:
    """Check that a hub's dataset can be had: the hub answers, or something of it is in the cache.

    Raises: UserError: the hub cannot be reached, and the caches have nothing of this name.
    """
    reason = _why_offline()
    if reason is None:
        return
    from huggingface_hub import constants

    prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    folders = (
        Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}",
        Path(prepared) / name.replace("/", "___"),
    )
    if not any(folder.is_dir() for folder in folders):
        raise UserError(
            f"{name}: there is no such file or folder here, and as a hub id it cannot be had: "
            f"{reason}, and its cache has no dataset of this name. Give a .jsonl or .parquet file, "
            "or a folder"
        )
    _say_that_the_cache_is_read(reason)


@cache
def _say_that_the_cache_is_read(reason: str) -> None:
    say(f"{reason}: only what is in its cache is read", file=sys.stderr)


@cache
def _why_offline() -> str | None:
    """Return why the hub is not asked, as a part of a sentence; None if it is.

    With a proxy nothing is concluded. Where the hub does not answer, its libraries are taken
    offline: they would try five times, half a minute for each file, before they read their cache.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set, so the Hugging Face hub is not asked"
    proxies = getproxies()
    if os.environ.get("HF_HUB_OFFLINE") or "https" in proxies or "all" in proxies:
        return None
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (80 if url.scheme == "http" else 443)
    if (error := _connection_error(url.hostname or "", port)) is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are loaded later, and processes
    if (hub := sys.modules.get("huggingface_hub.constants")) is not None:
        hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return f"the Hugging Face hub ({url.hostname}) cannot be reached ({error})"


def _connection_error(host: str, port: int) -> str | None:
    """Return why a server does not answer within `_TIMEOUT_S`; None if it does.

    A thread asks, since looking up a name has no time limit of its own.
    """
    errors: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
        except OSError as error:
            errors.append(str(error))
        else:
            errors.append(None)

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return errors[0] if errors else f"no answer in {_TIMEOUT_S:g} s"
