"""A vLLM engine in this process, driven step by step."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo.config.engines import ColocatedVllm, VllmOptions
from vapo.errors import UserError
from vapo.rollouts.engines.engine import RESUME_HINT, EngineError, Generated, Request, SteppedEngine
from vapo.rollouts.engines.vllm.cpu_heads import PaddedHeads
from vapo.rollouts.engines.vllm.engine_args import (
    EngineSize,
    check_engine_args,
    check_installed,
    engine_arguments,
)
from vapo.rollouts.engines.vllm.log import EngineLog, write_traceback
from vapo.rollouts.engines.vllm.process_state import (
    OwnDraws,
    ProcessState,
    default_group_kept,
    environment_kept,
)
from vapo.rollouts.engines.vllm.seeded_sampling import unseeded_because
from vapo.rollouts.engines.vllm.weight_loading import load_into
from vapo.rollouts.engines.watchdog import Watchdog

_STEPS = 8  # of vLLM's engine in one `_step`

logger = logging.getLogger(__name__)


def check_options(options: VllmOptions) -> None:
    """Check the engine's options. Raises: UserError if vLLM is missing or refuses an argument."""
    check_installed()
    if options.engine_args:
        with ProcessState({}).entered(), _quiet_import():
            from vllm import EngineArgs
        check_engine_args(options, EngineArgs)


class ColocatedEngine(SteppedEngine):
    """See `Engine`. In a process group each rank has an engine for its own prompts.

    A response is a request of its own, not one of vLLM's `n`: vLLM would make `n` such requests
    of it, with the seeds seed, seed + 1, ... Prompts are shared through the prefix cache either
    way, and alone each request has the seed that the contract gives it and reports when it ends.
    """

    def __init__(
        self,
        options: ColocatedVllm,
        size: EngineSize,
        *,
        model_path: str,
        dtype: str,
        device: torch.device,
        local_rank: int = 0,
        heads: PaddedHeads | None = None,
        log: EngineLog | None = None,
    ) -> None:
        super().__init__()
        self._log = log or EngineLog(None)
        self._heads = heads
        self.max_tokens = size.max_model_len
        self.has_weights = False
        self._timeout_s = options.timeout_s
        self._sleep_level = options.depth if device.type == "cuda" else 0
        self._is_asleep = False
        self._in_process_group = dist.is_initialized()
        ranks = {}
        if self._in_process_group:
            ranks = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(local_rank)}
        self._state = ProcessState(ranks | self._log.environment)
        with self._state.entered(), self._log.start(), _clear_errors("start"):
            arguments = engine_arguments(
                options,
                size,
                model_path=model_path,
                dtype=dtype,
                on_gpu=device.type == "cuda",
                in_process_group=self._in_process_group,
            )
            if heads is not None:
                arguments["hf_overrides"] = heads.overrides | arguments.get("hf_overrides", {})
            self._engine = _create(options, arguments)
            self._draws = _own_draws(self._engine.vllm_config)

    def _begin(self, requests: Mapping[str, Request]) -> None:
        if self._draws is not None and requests and not self._live().has_unfinished_requests():
            self._draws.begin(next(iter(requests.values())).seed)
        with _clear_errors("take requests"):
            for name, request in requests.items():
                self._add(name, request)

    def _step(self) -> dict[str, Generated]:
        """Run the engine until a request is done, or for a few steps once one has given a token."""
        engine, has_output = self._live(), threading.Event()
        draws = nullcontext() if self._draws is None else self._draws.drawn()
        with (
            environment_kept(),
            _clear_errors("sample"),
            Watchdog(self._timeout_s) as dog,
            draws,
        ):
            if self._is_asleep:
                with self._state.entered():
                    engine.wake_up()
                self._is_asleep = False
            if not engine.has_unfinished_requests():
                raise EngineError("requests are missing")
            with _heartbeats(engine, dog.heartbeat, has_output.set):
                for step in itertools.count(1):
                    if finished := engine.step():
                        return {output.request_id: _generated(output) for output in finished}
                    if not engine.has_unfinished_requests() or (
                        has_output.is_set() and step >= _STEPS
                    ):
                        return {}
        raise AssertionError("no end")

    def _drop(self, names: Collection[str]) -> None:
        self._live().abort_request(list(names))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        engine = self._live()
        if self._heads is not None:
            weights = self._heads.weights(weights)
        with self._state.entered(), _clear_errors("take the new weights"), torch.no_grad():
            if self._is_asleep:
                engine.wake_up(tags=["weights"])
            engine.collective_rpc(load_into, args=(weights,))
            # The prefix cache has what the old weights computed. Requests under way compute it
            # again.
            if not engine.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("the prefix cache could not be reset")
            if self._is_asleep:
                engine.wake_up(tags=["kv_cache"])
        self._is_asleep, self.has_weights = False, True

    def sleep(self) -> None:
        """See `Engine.sleep`. On a CPU this does nothing."""
        if self._sleep_level == 0 or self._is_asleep:
            return
        with self._state.entered(), _clear_errors("sleep"):
            self._live().sleep(level=self._sleep_level)
        self._is_asleep = True
        self.has_weights = self.has_weights and self._sleep_level < 2

    def close(self) -> None:
        """Free the engine; the trainer's process group stays."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with self._state.entered(), default_group_kept(self._in_process_group):
                engine.engine_core.shutdown()
        self._log.close()

    def _live(self) -> Any:
        if self._engine is None:
            raise EngineError("the vLLM engine is closed")
        return self._engine

    def _add(self, name: str, request: Request) -> None:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        parameters = request.parameters()
        if self._draws is not None:
            del parameters["seed"]
        self._live().add_request(
            name,
            TokensPrompt(prompt_token_ids=list(request.prompt_ids)),
            SamplingParams(
                **parameters,
                output_kind=RequestOutputKind.FINAL_ONLY,
                # Lists of numbers in place of a dict and an object for each token, which the
                # garbage collector would look at again and again.
                flat_logprobs=True,
                skip_clone=True,  # no other request shares them
            ),
        )


def _create(options: ColocatedVllm, arguments: dict[str, Any]) -> Any:
    with _quiet_import():
        from vllm import EngineArgs, LLMEngine

        check_engine_args(options, EngineArgs)
        return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _own_draws(vllm_config: Any) -> OwnDraws | None:
    """Return random states for an engine that does not draw by its requests' seeds alone.

    Its requests have no seeds, or it decodes speculatively. For any other engine return None.
    """
    reason = unseeded_because(vllm_config)
    if reason is not None:
        logger.warning(
            "this vLLM does not draw for all seeds at once (%s): requests have none, so a response "
            "depends on what is sampled beside it; the same batch still gives the same responses",
            reason,
        )
    # What proposes tokens of a speculative decoder draws without the seeds of requests.
    has_draft = getattr(vllm_config, "speculative_config", None) is not None
    return OwnDraws() if reason is not None or has_draft else None


@contextmanager
def _quiet_import() -> Iterator[None]:
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU has no Triton
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _generated(output: Any) -> Generated:
    (completion,) = output.outputs
    ids, scored = tuple(completion.token_ids), completion.logprobs
    firsts = scored.start_indices  # of each token's log-probs, of which its own is the first
    if tuple(scored.token_ids[first] for first in firsts) != ids:
        raise ValueError("its log-probs belong to other tokens than it returned")
    return Generated(ids, tuple(float(scored.logprobs[first]) for first in firsts))


@contextmanager
def _heartbeats(engine: Any, *heartbeats: Callable[[], None]) -> Iterator[None]:
    """Call all `heartbeats` in the block at every step of the engine that sampled a token.

    What vLLM's own `step` returns does not tell, as it lists finished requests alone.
    """
    core = engine.engine_core
    get_output = core.get_output

    def listening() -> Any:
        outputs = get_output()
        if outputs.outputs:
            for call in heartbeats:
                call()
        return outputs

    core.get_output = listening
    try:
        yield
    finally:
        del core.get_output


@contextmanager
def _clear_errors(doing: str) -> Iterator[None]:
    """Turn whatever vLLM raises into one `EngineError` with a fix."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        fix = "see docs/rollouts.md"
        if isinstance(error, torch.OutOfMemoryError) or "memory" in reason.lower():
            fix = (
                "change rollouts.vllm.gpu_memory_utilization or kv_cache_memory_bytes, or lower "
                "rollouts.max_concurrent_sequences"
            )
        if doing != "start":
            fix += f"; {RESUME_HINT}"
        fix += write_traceback(doing, error)
        raise EngineError(f"the vLLM engine could not {doing}: {reason}; {fix}") from error
