"""`vapo rollout-server`: an engine that trainers on other devices sample from."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from typing import Any

from vapo.config import FitConfig
from vapo.config.credentials import ROLLOUT_SERVER_TOKEN
from vapo.config.engines import ServersEngine
from vapo.errors import UserError
from vapo.networks.meta_device import empty_model
from vapo.networks.precision import settle_precision
from vapo.rollouts.engines.access_token import access_token, is_loopback
from vapo.rollouts.engines.selection import check_engine, make_served_engine
from vapo.rollouts.engines.server import EngineServer
from vapo.rollouts.engines.server_requests import Limits
from vapo.system.devices import pick_device, set_threads
from vapo.system.ports import check_port
from vapo.system.quiet import quiet_libraries
from vapo.system.shown_text import say

_NAMES_BYTES = 16 << 20


def run(config: FitConfig, *, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> None:
    """Serve until interrupted. The engine is empty until a trainer pushes weights.

    Args:
        allowed_hosts: further names by which trainers call this host.
    """
    if isinstance(config.rollouts, ServersEngine):
        raise UserError(
            "`vapo rollout-server` is the engine itself: set rollouts.engine to transformers or "
            "vllm, and leave rollouts.engine=servers to the trainer"
        )
    token = required_token(host)
    quiet_libraries()
    set_threads(config.trainer)
    settle_precision(config)
    check_engine(config)
    check_port(host, port, fix=f"choose another port, as --port {port + 1}")
    signal.signal(signal.SIGTERM, _stop)
    limits = Limits(weights_bytes=max_push_bytes(config.actor.path))
    names = [*allowed_hosts, host, socket.gethostname(), socket.getfqdn()]
    engine = make_served_engine(config, pick_device(config.trainer))
    try:
        address = (host, port)
        try:
            server = EngineServer(address, engine, limits=limits, token=token, host_names=names)
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        shown = f"[{host}]" if ":" in host else host
        with server:
            say(f"listening on http://{shown}:{server.port}")
            server.serve_forever()
    finally:
        engine.close()


def required_token(host: str) -> str | None:
    """The environment's token; beyond this machine there must be one.

    Raises: UserError
    """
    token = access_token()
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host}: anyone who reaches the port could use the engine and change its "
            f"weights; set {ROLLOUT_SERVER_TOKEN} to the same secret here and for the trainer "
            "(`openssl rand -hex 32` makes one), or listen on 127.0.0.1"
        )
    return token


def max_push_bytes(path: str) -> int:
    """The model's tensors in float32, the widest that is pushed, and room for their names.

    A weight that is tied is sent under each of its names.
    """
    model = empty_model("causal_lm", path, dtype="float32", attn_implementation="auto")
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + _NAMES_BYTES


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
