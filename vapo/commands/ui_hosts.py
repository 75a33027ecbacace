"""The host names that `vapo ui` answers to; no other web page can then read its runs."""

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
    """Return the values of the header Host that the server answers to, each a name with its port.

    A browser sends the name in the address that it has opened. A page's owner can let a domain name
    resolve to this machine (DNS rebinding), so nothing like `10.*` is among the values. MLflow's
    variable MLFLOW_SERVER_ALLOWED_HOSTS adds further ones, as a proxy's name.
    """
    names = [*_LOOPBACK, *_names_of(host)]
    ports = ("", f":{port}") if port == 80 else (f":{port}",)  # browsers leave 80 out
    own_hosts = [f"{_in_url(name)}{end}" for name in names for end in ports]
    return list(dict.fromkeys([*own_hosts, *_listed(_ALLOWED)]))


def allowed_origins(host: str, port: int) -> list[str]:
    """Return the origins of the web pages whose scripts may change something on the server.

    They are the server's own, and those in MLFLOW_SERVER_CORS_ALLOWED_ORIGINS.
    """
    own_origins = [f"http://{name}" for name in allowed_hosts(host, port)]
    return list(dict.fromkeys([*own_origins, *_listed(_ORIGINS)]))


def _listed(variable: str) -> Iterable[str]:
    return filter(None, (text.strip() for text in os.environ.get(variable, "").split(",")))


def _names_of(host: str) -> list[str]:
    """Return the names and addresses by which a browser may reach the address `host`."""
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
