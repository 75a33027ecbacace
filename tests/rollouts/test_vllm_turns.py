"""The vLLM engine's stream of turns: the contract, new weights, parts that sample in step."""

from __future__ import annotations

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import ids_of
from tests.rollouts.turns_contract import (
    SETTINGS,
    TurnContract,
    alone,
    check_logprobs,
    next_request,
)
from tests.tiny_model import ragged_prompts
from tests.vllm_engine import make_engine, make_vllm_sampler, vllm_model
from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = make_engine(tmp_path_factory.mktemp("policy"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model():
    return vllm_model()


class TestTurns(TurnContract):
    @pytest.fixture
    def turn_sampler(self, engine):
        return lambda model, rows: make_vllm_sampler(engine, model)


def test_weights_are_taken_while_turns_are_sampled(engine):
    """What is sampled after the sync has the log-probs of the new weights over all tokens."""
    model = vllm_model()
    sampler = make_vllm_sampler(engine, model)
    settings = SamplingSettings(max_response_tokens=60)
    prompts = ragged_prompts(4, longest=40)
    requests = [TurnRequest((i, 0), 0, p.prompt_ids, 60) for i, p in enumerate(prompts)]
    with sampler.turns(settings, seed=7) as stream:
        for request in requests:
            stream.submit(request)
        found = stream.step()
        assert len(found) < 4
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        sampler.sync(model.state_dict().items())
        open_keys = {r.key for r in requests} - {turn.request.key for turn in found}
        later = []
        while stream.num_open:
            later += stream.step()
        assert {turn.request.key for turn in later} == open_keys
        for turn in later:
            if len(turn.ids) > 30:
                tail = turn.ids[-10:]
                ids = (*turn.request.ids, *turn.ids[:-10])
                whole = type(turn)(
                    TurnRequest(turn.request.key, 0, ids, 10), tail, turn.logprobs[-10:], True
                )
                check_logprobs(model, whole)
        assert any(len(turn.ids) > 30 for turn in later)
        again = alone(stream, next_request(later[0]))
        check_logprobs(model, again)
    first = sample_all(sampler, prompts, group_size=1, settings=SETTINGS, seed=3)
    assert ids_of(sample_all(sampler, prompts, group_size=1, settings=SETTINGS, seed=3)) == ids_of(
        first
    )
