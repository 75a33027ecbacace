"""`vapo rollout-server`: a vLLM engine that trainers on other devices sample from."""

from __future__ import annotations

import signal
from typing import Any

from transformers import AutoConfig

from vapo.config import FitConfig
from vapo.console import quiet_libraries
from vapo.devices import pick_device, set_threads
from vapo.errors import UserError
from vapo.ports import check_port
from vapo.rollouts.selection import check_engine, make_colocated_engine
from vapo.rollouts.vllm.server import EngineServer


def run(config: FitConfig, *, host: str, port: int) -> None:
    """Serve until interrupted. The engine is empty until a trainer pushes weights."""
    if config.rollouts.engine != "vllm" or config.rollouts.vllm.mode != "colocated":
        raise UserError(
            "`vapo rollout-server` is the engine itself: set rollouts.engine=vllm, and leave "
            "rollouts.vllm.mode=server to the trainer"
        )
    quiet_libraries()
    set_threads(config.trainer)
    check_engine(config)
    check_port(host, port, mend=f"choose another port, as --port {port + 1}")
    signal.signal(signal.SIGTERM, _stop)
    model_config = AutoConfig.from_pretrained(config.actor.path)
    engine = make_colocated_engine(config, model_config, pick_device(config.trainer))
    try:
        with _listen(host, port, engine) as server:
            print(f"listening on http://{host}:{server.server_port}", flush=True)
            server.serve_forever()
    finally:
        engine.close()


def _listen(host: str, port: int, engine: Any) -> EngineServer:
    try:
        return EngineServer((host, port), engine)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
