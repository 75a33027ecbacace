"""What vLLM is given and what is taken back from it, without vLLM."""

from __future__ import annotations

from contextlib import closing
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from vapo.config.engines import ColocatedVllm, ServerOptions
from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Request, SteppedEngine, generate_all
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.engine_args import (
    EngineSize,
    check_engine_args,
    check_installed,
    engine_arguments,
)

# ---- what a server and a trainer give vLLM --------------------------------------------------


def test_vllm_runs_no_code_of_the_model_folder() -> None:
    arguments = engine_arguments(
        ColocatedVllm(),
        EngineSize(64, 8),
        model_path="policy",
        dtype="float32",
        on_gpu=False,
        in_process_group=False,
    )
    assert arguments["trust_remote_code"] is False


@pytest.mark.parametrize("value", [True, False, None])
def test_nobody_can_ask_vllm_to_run_it(value: Any) -> None:
    engine_args = make_dataclass("EngineArgs", ["model", "trust_remote_code"])
    with pytest.raises(UserError, match="vapo runs no code out of model folders"):
        check_engine_args(ColocatedVllm(engine_args={"trust_remote_code": value}), engine_args)


def test_an_argument_that_vapo_sets_is_named_by_its_own_key() -> None:
    engine_args = make_dataclass("EngineArgs", ["model", "dtype"])
    servers = ServerOptions(urls="http://a:1", engine_args={"dtype": "half"})
    for options, key in (
        (ColocatedVllm(engine_args={"dtype": "half"}), "vllm"),
        (servers, "servers"),
    ):
        with pytest.raises(
            UserError,
            match=rf"rollouts\.{key}\.engine_args\.dtype is set by rollouts\.{key}\.dtype",
        ):
            check_engine_args(options, engine_args)


# ---- what is left in vLLM when a call ends early --------------------------------------------


def test_a_call_that_ends_early_leaves_no_requests_in_the_engine() -> None:
    aborted: list[str] = []

    class Core:
        def get_output(self) -> Any: ...

    class Engine:
        engine_core = Core()

        def has_unfinished_requests(self) -> bool:
            return True

        def step(self) -> list[Any]:
            raise UserError("the client has left")

        def abort_request(self, names: list[str]) -> None:
            aborted.extend(names)

    colocated = ColocatedEngine.__new__(ColocatedEngine)
    SteppedEngine.__init__(colocated)
    added: list[str] = []
    fakes: Any = {
        "_engine": Engine(),
        "_timeout_s": 20.0,
        "_is_asleep": False,
        "_draws": None,
        "_state": SimpleNamespace(entered=lambda: closing(SimpleNamespace(close=lambda: None))),
        "_add": lambda name, *_: added.append(name),
    }
    colocated.__dict__.update(fakes)
    requests = [Request((2,), seed, SamplingSettings(4)) for seed in range(2)]
    with pytest.raises(UserError, match="the client has left"):
        generate_all(colocated, requests)
    assert len(added) == 2
    assert sorted(aborted) == added


@pytest.mark.parametrize("found", [None, object()])
def test_without_the_package_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    monkeypatch.setattr("vapo.rollouts.engines.vllm.engine_args.find_spec", lambda name: found)
    if found is not None:
        return check_installed()
    with pytest.raises(UserError, match=r"vLLM is not installed; .*make vllm"):
        check_installed()
    return None
