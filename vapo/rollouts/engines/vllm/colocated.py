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
    """Check that vLLM is installed and has the arguments that `engine_args` names.

    Raises: UserError: vLLM is missing, or does not have an argument.
    """
    check_installed()
    if options.engine_args:
        with ProcessState({}).entered(), _quiet_import():
            from vllm import EngineArgs
        check_engine_args(options, EngineArgs)


class ColocatedEngine(SteppedEngine):
    """An `Engine` with vLLM in this process. In a process group each rank has one for its prompts.

    Each response is a request of its own. A request for `n` responses would give them the seeds
    seed, seed + 1, ...; here each has the seed that `draw_seed` gives it, and is reported when it
    ends. Responses to one prompt share what vLLM computes for it either way, by its prefix cache.

    Args:
        heads: how attention heads are padded for a CPU; None: they are not.
        log: where vLLM's output is written; None: into a temporary file.
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
        """Run the engine until a request ends, or for a few steps once some token was sampled.

        Return the results of the requests that have ended, by name.
        """
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
        """Free the GPU's memory until the next `submit` or `load`. On a CPU this does nothing."""
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
    """Return the random states that an engine draws from besides its requests' seeds.

    None: it draws by its requests' seeds alone. An engine needs them if its requests have no seeds,
    or if it decodes speculatively.
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
    """Inside the block, call all `heartbeats` after each step of the engine that samples a token.

    vLLM's own `step` returns finished requests alone, so it does not tell.
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
    """Inside the block, turn every error of vLLM into an `EngineError` that names a fix.

    `doing` is what the engine could not do, for the message.
    """
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
