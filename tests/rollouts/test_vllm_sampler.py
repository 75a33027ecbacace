"""The vLLM engine in this process: the samplers' contract, weights, process state, failures."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import SamplerContract, ids_of, largest_gap
from tests.tiny_model import ragged_prompts
from tests.tiny_model import sample as sample_with_transformers
from tests.vllm_engine import make_check, make_engine, make_vllm_sampler, vllm_model
from vapo.errors import UserError
from vapo.rollouts.engines.contract import NonFiniteLogitsError, SamplingSettings
from vapo.rollouts.engines.engine import EngineError, Request, generate_all
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedEngine]:
    engine = make_engine(tmp_path_factory.mktemp("policy"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model():
    return vllm_model()


@pytest.fixture
def sample(engine):
    """Like `tests.tiny_model.sample`; the model's weights are pushed every time."""

    def sample(model, prompts, *, group_size=4, rows=64, seed=7, **settings):
        settings = {"max_response_tokens": 32, **settings}
        return sample_all(
            make_vllm_sampler(engine, model),
            prompts,
            group_size=group_size,
            settings=SamplingSettings(**settings),
            seed=seed,
        )

    return sample


class TestContract(SamplerContract):
    num_draws = 5_000
    largest_gap = 4e-5  # rounding at temperature 0.6: 1e-5 to 2.8e-5 over eight seeds

    @pytest.fixture
    def make_model(self):
        return vllm_model

    @pytest.fixture
    def sample(self, sample):
        return sample


# ---- requests -------------------------------------------------------------------------------


def test_a_response_does_not_depend_on_its_place_in_the_batch(sample, model):
    prompts = ragged_prompts(12)
    rollouts = sample(model, prompts, group_size=8)  # more than the engine decodes at a time
    assert ids_of(sample(model, prompts, group_size=2)) == [
        rollout.response_ids for i in range(12) for rollout in rollouts[8 * i : 8 * i + 2]
    ]


def test_vllms_own_n_is_the_same_requests_with_seeds_counted_up(engine, model):
    """Why a group is not one request with `n`: it would be these, with seeds not the contract's."""
    from vllm import SamplingParams, TokensPrompt

    make_vllm_sampler(engine, model)
    prompt = ragged_prompts(1)[0]
    ours = generate_all(
        engine,
        [
            Request(prompt.prompt_ids, 40 + j, SamplingSettings(16), frozenset([1]))
            for j in range(4)
        ],
    )
    llm = engine._engine
    llm.add_request(
        "group",
        TokensPrompt(prompt_token_ids=list(prompt.prompt_ids)),
        SamplingParams(
            n=4, seed=40, max_tokens=16, stop_token_ids=[1], ignore_eos=True, detokenize=False
        ),
    )
    theirs = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            theirs.update({c.index: tuple(c.token_ids) for c in output.outputs})
    assert [theirs[j] for j in range(4)] == [generated.ids for generated in ours]


def test_a_groups_prompt_is_computed_once(engine, model):
    """The second sample of a prompt of three blocks finds them in the prefix cache."""
    make_vllm_sampler(engine, model)
    prompt = tuple(random.Random(0).randrange(2, 38) for _ in range(100))
    scheduler = engine._engine.engine_core.engine_core.scheduler
    computed: list[int] = []
    schedule = scheduler.schedule

    def counting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    try:
        generate_all(engine, [Request(prompt, j, SamplingSettings(1)) for j in range(8)])
    finally:
        del scheduler.schedule
    assert sum(computed) == 100 + 7 * (100 - 96)


def test_more_prompt_tokens_than_one_step_takes(engine, model):
    """vLLM would cut a prompt in two, and fail at it on a CPU for a request with a seed."""
    make_vllm_sampler(engine, model)
    draw = random.Random(0)
    requests = [
        Request(tuple(draw.randrange(2, 38) for _ in range(100)), seed, SamplingSettings(4))
        for seed in range(64)
    ]
    generated = generate_all(engine, requests)
    assert [len(result.ids) for result in generated] == [4] * 64


def test_progress_shows_while_it_runs(engine, model):
    steps: list[int] = []
    sample_all(
        make_vllm_sampler(engine, model),
        ragged_prompts(6),
        group_size=4,
        settings=SamplingSettings(32),
        seed=0,
        advance=steps.append,
    )
    assert sum(steps) == 24
    assert min(steps) > 0
    assert len(steps) > 3


def test_diverged_weights_are_no_engine_error(engine):
    model = vllm_model()
    sampler = make_vllm_sampler(engine, model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogitsError, match="diverged"):
        sampler.sync(model.state_dict().items())
    sampler._check = lambda engine, sums: 0.0  # type: ignore[assignment]
    sampler.sync(model.state_dict().items())
    with pytest.raises(NonFiniteLogitsError, match="made-up:0"):
        sample_all(sampler, ragged_prompts(1), group_size=1, settings=SamplingSettings(4), seed=0)


# ---- weights --------------------------------------------------------------------------------


def perturbed(scale: float = 1.05):
    """Untied: the output layer alone has moved."""
    model = vllm_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight).mul_(scale)
        model.model.layers[0].self_attn.q_proj.weight.mul_(scale)
    return model


def test_greedy_decoding_is_the_trainers_after_a_sync_and_not_before(engine, model):
    prompts = ragged_prompts(8, longest=90)
    settings = SamplingSettings(32, greedy=True)

    def greedy(sampler):
        return ids_of(sample_all(sampler, prompts, group_size=1, settings=settings, seed=0))

    def trainers(model):
        return ids_of(sample_with_transformers(model, prompts, group_size=1, greedy=True))

    other = vllm_model()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(-1)
    sampler = make_vllm_sampler(engine, model)
    assert greedy(sampler) == trainers(model) != trainers(other)
    sampler = make_vllm_sampler(engine, other)
    assert greedy(sampler) == trainers(other)


def test_gap_to_the_trainer_in_float32(sample, model):
    rollouts = sample(model, ragged_prompts(16), max_response_tokens=64)
    assert largest_gap(model, rollouts) < 1e-4


def test_a_small_step_reaches_the_engine(engine):
    """The weights move by a millionth: the engine must not keep the old ones unnoticed."""
    model = vllm_model()
    sampler = make_vllm_sampler(engine, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6 * parameter.abs().mean())
    sampler.sync(model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6 * parameter.abs().mean())
    engine.load, load = lambda weights: list(weights), engine.load  # walks them, loads nothing
    try:
        with pytest.raises(EngineError, match="did not reach the engine"):
            sampler.sync(model.state_dict().items())
    finally:
        engine.load = load


def test_an_unchanged_model_may_be_synced_again(engine, model):
    sampler = make_vllm_sampler(engine, model)
    sampler.sync(model.state_dict().items())


def test_a_skipped_sync_is_found(engine, model):
    sampler = make_vllm_sampler(engine, model)
    with pytest.raises(EngineError, match="took no weights"):
        sampler.sync([])


def test_a_missing_output_layer_is_found(engine, model):
    """`named_parameters` leaves a tied output layer out; vLLM only warns, in its own log."""
    sampler = make_vllm_sampler(engine, model)
    other = vllm_model()
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(1.05)
    with pytest.raises(EngineError, match="max_logprob_gap"):
        sampler.sync(other.named_parameters())


def test_a_stale_prefix_is_found(engine, model, monkeypatch):
    """The prefix cache of the old weights under the new ones."""
    sampler = make_vllm_sampler(engine, model)
    other = vllm_model()
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.mul_(1.1)
        other.model.layers[1].mlp.down_proj.weight.mul_(0.9)
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda **_: True)
    with pytest.raises(EngineError, match="max_logprob_gap"):
        sampler.sync(other.state_dict().items())


def test_a_prefix_cache_in_use_is_an_error(engine, model, monkeypatch):
    sampler = make_vllm_sampler(engine, model)
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(EngineError, match="prefix cache"):
        sampler.sync(model.state_dict().items())


def test_the_gaps_limit_is_the_configs(engine, model):
    sampler = make_vllm_sampler(engine, model)
    sampler._check = make_check(model, limit=1e-12)
    with pytest.raises(EngineError, match="max_logprob_gap 1e-12"):
        sampler.sync(model.state_dict().items())


# ---- the process ----------------------------------------------------------------------------


PROCESS = """
import gc, json, os, random, subprocess, sys
import numpy as np, torch
from pathlib import Path
from tests.tiny_model import ragged_prompts
from tests.rollouts.playing import sample_all
from tests.vllm_engine import make_engine, make_vllm_sampler, vllm_model
from vapo.rollouts.engines.contract import SamplingSettings

def state():
    child = subprocess.run(["env"], capture_output=True, check=True).stdout
    return {
        "environment": dict(os.environ),
        "a child's environment": sorted(child.decode().splitlines()),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads is set_num_threads,
        "affinity": sorted(os.sched_getaffinity(0)),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "excepthook": sys.excepthook is excepthook,
        "recursion": sys.getrecursionlimit(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
    }

set_num_threads, excepthook = torch.set_num_threads, sys.excepthook
model = vllm_model()
torch.set_num_threads(2)
before = state()
engine = make_engine(Path(sys.argv[1]))
after = {"create": state()}
sampler = make_vllm_sampler(engine, model)
frozen = [gc.get_freeze_count() > 0]
def advance(num):
    after["between two steps"] = state()
    frozen.append(gc.get_freeze_count() > 0)
settings = SamplingSettings(8)
sample_all(sampler, ragged_prompts(3), group_size=2, settings=settings, seed=0, advance=advance)
after["sample"] = state()
sampler.close()
after["close"] = state()
changed = [(when, k) for when, now in after.items() for k in before if now[k] != before[k]]
print("changed:", json.dumps(changed), torch.distributed.is_initialized())
print("looked at", len(after), "frozen", set(frozen), "and then", gc.get_freeze_count())
"""


def test_the_process_is_left_as_it_was(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "changed: [] False" in done.stdout
    assert "looked at 4 frozen {True} and then 0" in done.stdout


# ---- failures -------------------------------------------------------------------------------


def test_a_step_that_fails_is_one_error_and_no_partial_batch(engine, model):
    sampler = make_vllm_sampler(engine, model)
    core, steps = engine._engine.engine_core.engine_core, 0
    step = core.step_fn

    def failing():
        nonlocal steps
        steps += 1
        if steps == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return step()

    core.step_fn = failing
    try:
        with pytest.raises(EngineError, match=r"Tried to allocate 2 GiB; .*--ckpt_path last"):
            sample_all(
                sampler, ragged_prompts(6), group_size=4, settings=SamplingSettings(32), seed=0
            )
    finally:
        core.step_fn = step
        engine._engine.abort_request(list(engine._engine.output_processor.request_states), True)


def test_a_step_that_hangs_is_one_error(engine, model):
    sampler = make_vllm_sampler(engine, model)
    core = engine._engine.engine_core.engine_core
    step = core.step_fn
    core.step_fn = lambda: time.sleep(60)
    engine._timeout_s = 0.5
    start = time.monotonic()
    try:
        with pytest.raises(EngineError, match=r"no token for 0\.5 s .*timeout_s"):
            sample_all(
                sampler, ragged_prompts(2), group_size=1, settings=SamplingSettings(4), seed=0
            )
    finally:
        core.step_fn, engine._timeout_s = step, 600.0
        engine._engine.abort_request(list(engine._engine.output_processor.request_states), True)
    assert time.monotonic() - start < 10
    assert not [t for t in threading.enumerate() if t.name == "vllm-watchdog" and t.is_alive()]


def test_more_than_the_engine_holds_is_an_error_before_sampling(engine, model):
    sampler = make_vllm_sampler(engine, model)
    with pytest.raises(UserError, match="128 positions"):
        sample_all(sampler, ragged_prompts(1), group_size=1, settings=SamplingSettings(128), seed=0)
