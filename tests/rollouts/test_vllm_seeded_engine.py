"""Seeds of requests in a real vLLM: its own kernel, its place on a CPU, the tokens of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_model import ragged_prompts
from tests.vllm_engine import make_engine, make_vllm_sampler, vllm_model
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Request, generate_all
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.process_state import OwnDraws, ProcessState
from vapo.rollouts.engines.vllm.seeded_noise import hashes, sampled_ids

SETTINGS = SamplingSettings(24, temperature=1.3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedEngine]:
    engine = make_engine(tmp_path_factory.mktemp("policy"))
    make_vllm_sampler(engine, vllm_model())
    yield engine
    engine.close()


def requests_of(num: int, *, settings: SamplingSettings = SETTINGS) -> list[Request]:
    prompts = ragged_prompts(num)
    ends = frozenset([1])
    return [Request(p.prompt_ids, 31 * i, settings, ends) for i, p in enumerate(prompts)]


@pytest.mark.vllm
def test_equal_requests_give_equal_responses_in_any_company_and_order(engine) -> None:
    requests = requests_of(20)
    together = [made.ids for made in generate_all(engine, requests)]
    assert [made.ids for made in generate_all(engine, requests[::-1])] == together[::-1]
    assert [generate_all(engine, [request])[0].ids for request in requests[:5]] == together[:5]
    greedy = requests_of(6, settings=SamplingSettings(24, greedy=True))
    mixed = generate_all(engine, [*greedy, *requests[:7]])
    assert [made.ids for made in mixed[6:]] == together[:7]
    assert mixed[:6] == generate_all(engine, greedy)
    same = generate_all(engine, [requests[3]] * 6)
    assert {made.ids for made in same} == {together[3]}
    assert len(set(together)) > 15


@pytest.mark.vllm
def test_the_engines_tokens_are_the_definitions(engine, monkeypatch) -> None:
    """From the probabilities that vLLM hands over: place n - 1 for the token behind n others."""
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    given: list[Any] = []
    draw = sampler.random_sample

    def recorded(probs: torch.Tensor, generators: Any, use_fp64_gumbel: bool = False) -> Any:
        given.append(probs.clone())
        return draw(probs, generators, use_fp64_gumbel)

    monkeypatch.setattr(sampler, "random_sample", recorded)
    settings = SamplingSettings(6, top_k=5, top_p=0.9)
    request = Request((3, 4, 5, 6), 2**62 + 9, settings)
    (made,) = generate_all(engine, [request])
    places = torch.arange(3, 9)
    wanted = sampled_ids(torch.cat(given), torch.tensor([request.seed] * 6), places)
    assert made.ids == tuple(wanted.tolist())
    assert all(2 <= int((probs > 0).sum()) <= 5 for probs in given)  # top-k and top-p are vLLM's


@pytest.mark.vllm
def test_without_a_place_a_batch_is_the_seeds_and_the_trainers_numbers_stay(engine) -> None:
    requests = requests_of(6)
    with_seeds = [made.ids for made in generate_all(engine, requests)]
    engine._draws = OwnDraws()
    try:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first, again = generate_all(engine, requests), generate_all(engine, requests)
        other = generate_all(
            engine, [Request(r.prompt_ids, r.seed + 1, SETTINGS) for r in requests]
        )
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        engine._draws = None
    assert first == again
    assert [made.ids for made in first] != with_seeds
    assert [made.ids for made in first] != [made.ids for made in other]


class Lanes(np.ndarray):
    """Numbers of a Triton kernel, side by side."""

    def to(self, kind: Any) -> Any:
        return self.astype(kind)


TRITON = SimpleNamespace(int64=np.int64, uint32=np.uint32, int32=np.int32, float32=np.float32)


@contextmanager
def vllms_kernel() -> Iterator[Any]:
    """The module of vLLM's newer runner, whose kernel's functions numpy runs here.

    Without Triton, as beside a vLLM for CPUs, they are plain functions of Python.
    """
    with ProcessState({}).entered():
        from vllm.v1.worker.gpu.sample import gumbel
    language, gumbel.tl = gumbel.tl, TRITON
    try:
        yield gumbel
    finally:
        gumbel.tl = language


@pytest.mark.vllm
def test_vllms_own_kernel_has_the_same_integers() -> None:
    """So a GPU's noise is the one whose definition is tested in test_vllm_seeded_noise.py."""

    def lanes(number: int) -> Any:
        return np.full(40, number, dtype=np.int64).view(Lanes)

    ids = np.arange(40, dtype=np.int64).view(Lanes)
    with vllms_kernel() as gumbel:
        for seed, place in ((0, 0), (7, 3), (2**62 + 11, 2**20), (-5, 1), (2**63 - 1, 131_071)):
            theirs = gumbel.murmur3_hash32(lanes(seed), lanes(place), ids)
            ours = hashes(torch.tensor([seed]), torch.tensor([place]), 40)[0]
            assert theirs.tolist() == ours.numpy().view(np.uint32).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [40, 151_936])
def test_a_gpus_tokens_are_the_definitions(vocab_size: int) -> None:
    """vLLM's kernel on logits, and ours on probabilities and on the CPU: the same tokens, but for
    ties within rounding."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows = 64
    logits = 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    seeds, places = torch.arange(rows) * 2**40 + 3, torch.arange(rows) + 100
    theirs = gumbel_sample(
        logits.cuda(),
        torch.arange(rows, dtype=torch.int32).cuda(),
        torch.ones(rows).cuda(),
        seeds.cuda(),
        places.cuda(),
        apply_temperature=False,
        is_drafting=False,
    ).cpu()
    probs = logits.softmax(dim=-1)
    on_cpu = sampled_ids(probs, seeds, places)
    on_gpu = sampled_ids(probs.cuda(), seeds.cuda(), places.cuda()).cpu()
    assert int((theirs != on_cpu).sum()) <= 1
    assert int((on_gpu != on_cpu).sum()) <= 1
