"""Under which names `vapo ui` may be asked for, so that no page of the internet reads its runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address

import psutil

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALLOWED = "MLFLOW_SERVER_ALLOWED_HOSTS"
_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"


def allowed_hosts(host: str, port: int) -> list[str]:
    """The values of the header Host that the server answers to, each a name with its port.

    A browser sends the name in the address that it has opened. A page's owner can have a name of
    his own resolve to this machine (DNS rebinding), so nothing like `10.*` is among them. Further
    ones, as a proxy's name, are those of MLflow's own variable MLFLOW_SERVER_ALLOWED_HOSTS.
    """
    names = [*_LOOPBACK, *_names_of(host)]
    ports = ("", f":{port}") if port == 80 else (f":{port}",)  # browsers leave 80 out
    ours = [f"{_in_url(name)}{end}" for name in names for end in ports]
    return list(dict.fromkeys([*ours, *_listed(_ALLOWED)]))


def allowed_origins(host: str, port: int) -> list[str]:
    """The pages whose scripts may change something: the server's own."""
    ours = [f"http://{name}" for name in allowed_hosts(host, port)]
    return list(dict.fromkeys([*ours, *_listed(_ORIGINS)]))


def _listed(variable: str) -> Iterable[str]:
    return filter(None, (text.strip() for text in os.environ.get(variable, "").split(",")))


def _names_of(host: str) -> list[str]:
    """What a user may call the address that the server listens on."""
    try:
        address = ip_address(host)
    except ValueError:
        return [host.lower()] if host else _names_of("0.0.0.0")
    if not address.is_unspecified:
        return [str(address)]
    interfaces = psutil.net_if_addrs().values()
    families = (socket.AF_INET, socket.AF_INET6)
    numbers = [a.address for addresses in interfaces for a in addresses if a.family in families]
    names = {socket.gethostname(), socket.getfqdn()}
    return [*sorted(name.lower() for name in names), *(a.partition("%")[0] for a in numbers)]


def _in_url(name: str) -> str:
    return f"[{name}]" if ":" in name else name
