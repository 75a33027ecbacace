"""`vapo serve`: vLLM's own server, started as a trainer of this config needs it."""

from __future__ import annotations

import os
import shlex
import sys
from ipaddress import ip_address

from vapo.config import FitConfig
from vapo.config.engines import VllmServerEngine
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.networks.model_configs import read_model_config
from vapo.networks.precision import resolve_precision
from vapo.rollouts.engines.vllm.colocated import check_options
from vapo.rollouts.engines.vllm_server.command import serve_command, serve_environment
from vapo.system.libraries import pick_device
from vapo.system.ports import check_port
from vapo.user_code.python_child import python_environment


def run(config: FitConfig, *, host: str, port: int, print_command: bool = False) -> None:
    """Replace this process by `vllm serve` with the flags that the config needs, or print them.

    Raises: UserError: another engine is configured, vLLM is missing, or the port is taken.
    """
    rollouts = config.rollouts
    if not isinstance(rollouts, VllmServerEngine):
        raise UserError(
            "`vapo serve` starts a server for rollouts.engine=vllm_server, with the same config as "
            f"the trainer; rollouts.engine is {rollouts.engine}"
        )
    resolve_precision(config)
    command = serve_command(
        config,
        rollouts,
        read_model_config(config.actor.path),
        pick_device(config.trainer),
        host=host,
        port=port,
    )
    variables = serve_environment()
    if print_command:
        sets = [f"{name}={value}" for name, value in variables.items()]
        say(" ".join([*sets, shlex.join(command)]))
        return
    check_options(rollouts.servers)
    check_port(host, port, fix=f"choose another port, as --port {port + 1}")
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        say(
            f"vapo serve: whoever reaches {host}:{port} can use the engine and change its weights: "
            "vLLM guards these routes by no key. Let no network but your own reach it.",
            file=sys.stderr,
        )
    say(
        f"vapo serve: starting vLLM's server on {host}:{port}. It takes requests once it says "
        '"Application startup complete". It also says that its chat template fails. Ignore that: '
        "the server gets token ids and needs no tokenizer.",
        file=sys.stderr,
    )
    os.execve(command[0], command, {**python_environment(), **variables})
