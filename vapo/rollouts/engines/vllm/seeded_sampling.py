"""Lets vLLM sample the tokens of requests with seeds without a loop over the requests.

vLLM 0.32 has two model runners. The newer one needs Triton, and a GPU has it unless
`VLLM_USE_V2_MODEL_RUNNER=0` is set. Its kernel computes the noise from a request's seed, the place
and the token, so it is left as it is. The older one, which a CPU has, keeps a generator for each
request and draws from one after the other. This module gives it `seeded_noise`, whose integers are
those of the newer runner's kernel.

vLLM calls `register` of the folder backend in each of its processes, and `register` calls
`put_in_place`. Top-k, top-p, greedy tokens and the draws of requests without a seed stay vLLM's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vapo.rollouts.engines.vllm.seeded_noise import sampled_ids

_SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_METADATA = "vllm.v1.sample.metadata"
_ARGUMENTS = {  # of the runner, the sampler's module, and its class twice
    "_sample": ["self", "logits", "spec_decode_metadata"],
    "random_sample": ["probs", "generators", "use_fp64_gumbel"],
    "forward_cpu": ["self", "logits", "generators", "k", "p"],
    "forward_native": ["self", "logits", "generators", "k", "p"],
}


class SeededRows(dict[int, torch.Generator]):
    """The dict of a batch's generators by row, as vLLM has it, which draws for all rows at once.

    `rows` are the rows with a seed, and `seeds` their seeds. `places` has for each row of the
    current step the index of the newest token that the model has read.
    """

    def __init__(self, generators: dict[int, torch.Generator], device: torch.device) -> None:
        super().__init__(sorted(generators.items()))
        seeds = [generator.initial_seed() for generator in self.values()]
        self.seeds = torch.tensor([_int64(seed) for seed in seeds], device=device)
        self.rows = torch.tensor(list(self), device=device)
        self.places = torch.zeros(0, dtype=torch.int64, device=device)

    def draw(self, probs: Tensor, draw_unseeded: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one token for each row, drawn from its probabilities `probs`.

        Args:
            draw_unseeded: draws the tokens of rows without a seed, and for others any token.
        """
        if len(self) == len(probs):
            return sampled_ids(probs, self.seeds, self.places)
        ids = sampled_ids(probs[self.rows], self.seeds, self.places[self.rows])
        return draw_unseeded(probs).index_copy(0, self.rows, ids)


def _int64(seed: int) -> int:
    """Return the signed 64-bit seed of a request. Its generator reports the seed without sign."""
    return seed - 2**64 if seed >= 2**63 else seed


def put_in_place() -> str | None:
    """Change vLLM's older model runner in this process so that it draws for all seeds at once.

    A second call does nothing.

    Returns: the reason why this version of vLLM cannot be changed; None: it is changed.
    """
    try:
        sampler: Any = import_module(_SAMPLER)
        runner = import_module(_RUNNER).GPUModelRunner
        metadata, kind = import_module(_METADATA).SamplingMetadata, sampler.TopKTopPSampler
        if _is_ours(sampler.random_sample):
            return None
        owners = (runner, sampler, kind, kind)
        places = {name: getattr(o, name) for o, name in zip(owners, _ARGUMENTS, strict=True)}
    except (ImportError, AttributeError) as error:
        return str(error)
    for name, place in places.items():
        arguments = list(inspect.signature(place).parameters)
        if arguments != _ARGUMENTS[name]:
            return f"{name} takes {', '.join(arguments)}"
    if "generators" not in {field.name for field in dataclasses.fields(metadata)}:
        return "SamplingMetadata has no generators"
    constructor: Any = inspect.unwrap(runner.__init__)
    if not {"input_batch", "seq_lens"} <= set(constructor.__code__.co_names):
        return "GPUModelRunner has no input_batch or no seq_lens"
    runner._sample = _with_places(runner._sample)
    sampler.random_sample = _for_all_rows(sampler.random_sample)
    kind.forward_cpu = _by_probabilities(kind.forward_cpu, kind.forward_native)
    return None


def unseeded_because(vllm_config: Any) -> str | None:
    """Return the reason why an engine's requests may have no seeds; None: they may have seeds."""
    if getattr(vllm_config, "use_v2_model_runner", True):
        return None
    return put_in_place()


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__ == __name__


def _with_places(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `GPUModelRunner._sample` so that it first sets the `places` of `SeededRows`."""

    def _sample(self: Any, logits: Tensor, spec_decode_metadata: Any) -> Any:
        metadata = self.input_batch.sampling_metadata
        if metadata.generators and spec_decode_metadata is None:
            if not isinstance(metadata.generators, SeededRows):  # the batch's rows have changed
                metadata.generators = SeededRows(metadata.generators, logits.device)
            metadata.generators.places = self.seq_lens[: len(logits)] - 1
        return sample(self, logits, spec_decode_metadata)

    return _sample


def _for_all_rows(random_sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap vLLM's `random_sample` so that it draws for all rows with seeds at once."""

    def random_sample_at_once(
        probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> Tensor:
        if use_fp64_gumbel or not isinstance(generators, SeededRows):
            return random_sample(probs, generators, use_fp64_gumbel)
        return generators.draw(probs, lambda rows: random_sample(rows, {}))

    return random_sample_at_once


def _by_probabilities(
    forward_cpu: Callable[..., Any], forward_native: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap vLLM's sampling on a CPU (`forward_cpu`) so that batches with seeds are sampled as on
    other devices (`forward_native`), which calls `random_sample`."""

    def forward(self: Any, logits: Tensor, generators: Any, k: Any, p: Any) -> Any:
        is_seeded = isinstance(generators, SeededRows) and not self.use_fp64_gumbel
        return (forward_native if is_seeded else forward_cpu)(self, logits, generators, k, p)

    return forward
