"""The Transformers engine: order, seeds, ends, distribution, and the module left unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import SamplerContract, ids_of
from tests.tiny_model import ragged_prompts, sample, tiny_model, tiny_tokenizer
from vapo.rollouts.engines.contract import NonFiniteLogitsError, SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler


@pytest.fixture(scope="module")
def model():
    return tiny_model()


class TestContract(SamplerContract):
    largest_gap = 1e-5

    @pytest.fixture
    def make_model(self):
        return tiny_model

    @pytest.fixture
    def sample(self):
        return sample


@pytest.mark.slow
def test_responses_do_not_depend_on_how_many_rows_decode_together(model):
    prompts = ragged_prompts(12)
    one, three, all_ = (sample(model, prompts, group_size=2, rows=n) for n in (1, 3, 64))
    assert ids_of(one) == ids_of(three) == ids_of(all_)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 64])
def test_progress_adds_up_to_the_responses(model, rows):
    sampler = TransformersSampler(
        model, tiny_tokenizer(), max_concurrent_sequences=rows, device="cpu"
    )
    steps: list[int] = []
    sample_all(
        sampler,
        ragged_prompts(6),
        group_size=4,
        settings=SamplingSettings(32),
        seed=0,
        advance=steps.append,
    )
    assert sum(steps) == 24
    assert min(steps) > 0
    assert len(steps) > 3, "progress must show while it runs, not at the end"


def test_the_module_is_left_as_it_was(model):
    model = tiny_model()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sample(model, ragged_prompts(3))
    assert model.training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    loss = model(torch.tensor([[2, 3, 4]]), labels=torch.tensor([[2, 3, 4]])).loss
    loss.backward()  # nothing of the sampling's no-grad mode may be left in the module


def test_diverged_weights_are_an_error_that_names_the_prompt():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogitsError, match="made-up:1"):
        sample(model, ragged_prompts(2)[1:])
