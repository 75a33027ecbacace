"""Takes the libraries of the Hugging Face hub offline if there is no network."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

from vapo.errors.shown_text import say

_TIMEOUT_S = 5.0


@cache
def read_cache_if_unreachable() -> None:
    """Set the Hugging Face libraries offline if the hub's host does not answer, and print that.

    They then read only their cache. Otherwise they would first try five times, half a minute for
    each file. With a proxy, or if `HF_HUB_OFFLINE` is set, this does nothing.
    """
    proxies = getproxies()
    if "HF_HUB_OFFLINE" in os.environ or "https" in proxies or "all" in proxies:
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are loaded later, and processes
        if (hub := sys.modules.get("huggingface_hub.constants")) is not None:
            hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        say(
            f"the Hugging Face hub ({url.hostname}) cannot be reached ({error}): only what is in "
            "its cache is read",
            file=sys.stderr,
        )
