"""The place of the seeded noise in vLLM's older model runner, on stand-ins for vLLM's modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vapo.rollouts.engines.vllm import seeded_sampling
from vapo.rollouts.engines.vllm.colocated import _own_draws
from vapo.rollouts.engines.vllm.seeded_noise import sampled_ids
from vapo.rollouts.engines.vllm.seeded_sampling import SeededRows, put_in_place, unseeded_because


def make_modules() -> dict[str, ModuleType]:
    """Modules with vLLM 0.32's names and arguments. `random_sample` takes the last token."""

    @dataclass
    class SamplingMetadata:
        generators: Any

    def random_sample(
        probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> Tensor:
        return torch.full((len(probs),), probs.shape[-1] - 1)

    class TopKTopPSampler:
        use_fp64_gumbel = False

        def forward_native(self, logits: Tensor, generators: Any, k: Any, p: Any) -> Any:
            probs = logits.softmax(dim=-1)
            return stand_ins["vllm.v1.sample.ops.topk_topp_sampler"].random_sample(
                probs, generators
            )

        def forward_cpu(self, logits: Tensor, generators: Any, k: Any, p: Any) -> Any:
            return "vLLM's own way on a CPU"

    class GPUModelRunner:
        def __init__(self, generators: dict[int, torch.Generator], seq_lens: list[int]) -> None:
            self.input_batch = SimpleNamespace(sampling_metadata=SamplingMetadata(generators))
            self.seq_lens = torch.tensor(seq_lens)
            self.sampler = TopKTopPSampler()

        def _sample(self, logits: Tensor, spec_decode_metadata: Any) -> Any:
            generators = self.input_batch.sampling_metadata.generators
            return self.sampler.forward_cpu(logits, generators, None, None)

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(contents)
        return made

    stand_ins: dict[str, Any] = {
        made.__name__: made
        for made in (
            module(
                "vllm.v1.sample.ops.topk_topp_sampler",
                random_sample=random_sample,
                TopKTopPSampler=TopKTopPSampler,
            ),
            module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=GPUModelRunner),
            module("vllm.v1.sample.metadata", SamplingMetadata=SamplingMetadata),
        )
    }
    return stand_ins


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = make_modules()
    for name, stand_in in made.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in made:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, stand_in)
    return made


def generators(*seeds: int | None) -> dict[int, torch.Generator]:
    made = {}
    for row, seed in enumerate(seeds):
        if seed is not None:
            made[row] = torch.Generator()
            made[row].manual_seed(seed)
    return made


def runner_of(modules: dict[str, ModuleType], *seeds: int | None, seq_lens: list[int]) -> Any:
    return modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner(generators(*seeds), seq_lens)


def test_rows_with_seeds_are_drawn_at_once_by_seed_and_place(modules) -> None:
    assert put_in_place() is None
    logits = torch.randn(3, 20)
    runner = runner_of(modules, 5, 2**63 - 1, 7, seq_lens=[4, 9, 1, 77, 0])
    wanted = sampled_ids(
        logits.softmax(dim=-1), torch.tensor([5, 2**63 - 1, 7]), torch.tensor([3, 8, 0])
    )
    assert torch.equal(runner._sample(logits, None), wanted)
    rows = runner.input_batch.sampling_metadata.generators
    assert isinstance(rows, SeededRows)
    runner.seq_lens += 1  # the next step, of the same rows
    wanted = sampled_ids(logits.softmax(dim=-1), rows.seeds, torch.tensor([4, 9, 1]))
    assert torch.equal(runner._sample(logits, None), wanted)
    assert runner.input_batch.sampling_metadata.generators is rows


def test_a_row_without_a_seed_is_vllms(modules) -> None:
    put_in_place()
    logits = torch.randn(4, 20)
    runner = runner_of(modules, None, 6, None, -3, seq_lens=[2, 3, 4, 5])
    seeded = sampled_ids(
        logits[[1, 3]].softmax(dim=-1), torch.tensor([6, -3]), torch.tensor([2, 4])
    )
    assert runner._sample(logits, None).tolist() == [19, int(seeded[0]), 19, int(seeded[1])]


def test_what_has_no_seeds_or_a_draft_goes_vllms_own_way(modules) -> None:
    put_in_place()
    logits = torch.randn(2, 20)
    assert runner_of(modules, seq_lens=[2, 3])._sample(logits, None) == "vLLM's own way on a CPU"
    speculative = runner_of(modules, 1, 2, seq_lens=[2, 3])
    assert speculative._sample(logits, object()) == "vLLM's own way on a CPU"
    exact = runner_of(modules, 1, 2, seq_lens=[2, 3])
    exact.sampler.use_fp64_gumbel = True
    assert exact._sample(logits, None) == "vLLM's own way on a CPU"


def test_no_process_wide_generator_is_drawn_from(modules) -> None:
    put_in_place()
    before = torch.get_rng_state()
    runner_of(modules, 1, 2, seq_lens=[2, 3])._sample(torch.zeros(2, 20), None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_call_changes_nothing(modules) -> None:
    put_in_place()
    sampler = modules["vllm.v1.sample.ops.topk_topp_sampler"]
    first = sampler.random_sample, sampler.TopKTopPSampler.forward_cpu
    assert put_in_place() is None
    assert (sampler.random_sample, sampler.TopKTopPSampler.forward_cpu) == first


def drop(name: str, *attributes: str) -> Callable[[dict[str, ModuleType]], None]:
    def change(modules: dict[str, ModuleType]) -> None:
        owner: Any = modules[name]
        for attribute in attributes[:-1]:
            owner = getattr(owner, attribute)
        delattr(owner, attributes[-1])

    return change


GONE: Any = {"vllm.v1.worker.gpu_model_runner": None}


def other_arguments(modules: dict[str, ModuleType]) -> None:
    modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner._sample = lambda self, batch: None


def no_places(modules: dict[str, ModuleType]) -> None:
    modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner.__init__ = lambda self: None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("vllm.v1.sample.ops.topk_topp_sampler", "random_sample"), "random_sample"),
        (drop("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_sample"), "_sample"),
        (drop("vllm.v1.sample.metadata", "SamplingMetadata"), "SamplingMetadata"),
        (other_arguments, "takes self, batch"),
        (no_places, "no input_batch or no seq_lens"),
        (lambda modules: sys.modules.update(GONE), "runner"),
    ],
)
def test_another_vllm_is_left_as_it_is(
    modules, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why, and the engine draws by a seed of its own."""
    change(modules)
    before = dict(modules["vllm.v1.sample.ops.topk_topp_sampler"].__dict__)
    assert reason in str(put_in_place())
    assert modules["vllm.v1.sample.ops.topk_topp_sampler"].__dict__ == before
    older = SimpleNamespace(use_v2_model_runner=False, speculative_config=None)
    assert _own_draws(older) is not None
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "requests have none" in record.getMessage()


def test_the_newer_runner_takes_seeds_and_needs_no_place(monkeypatch) -> None:
    monkeypatch.setattr(seeded_sampling, "put_in_place", lambda: "no place")
    assert unseeded_because(SimpleNamespace(use_v2_model_runner=True)) is None
    assert unseeded_because(SimpleNamespace()) is None  # a vLLM that has no older one
    assert unseeded_because(SimpleNamespace(use_v2_model_runner=False)) == "no place"


def test_a_speculative_decoder_draws_by_a_seed_of_its_own(caplog) -> None:
    """The trainer's random numbers must not depend on what its draft draws."""
    config = SimpleNamespace(use_v2_model_runner=True, speculative_config=object())
    assert _own_draws(config) is not None
    assert _own_draws(SimpleNamespace(use_v2_model_runner=True, speculative_config=None)) is None
    assert not caplog.records
