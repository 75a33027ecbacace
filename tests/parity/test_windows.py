"""Sliding windows and changed logits: log-probs against transformers' own forward, and gradients
that do not depend on the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.networks.windowed_models import CONFIGS, PACKED, WINDOW, windowed_model
from vapo.networks import packed_attention
from vapo.networks import token_inputs as inputs_module
from vapo.networks.actor_critic import Actor
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import Layout, token_inputs

SHORT, LONG = (5, 6, 7), (3, 2, 9, 11, 4, 2, 7, 8, 12, 6)
# below the window, at it, above; one response crosses from its prompt, one leaves it behind
PAIRS = [
    (SHORT, (8, 9)),
    (SHORT, (4, 8, 2, 6, 3)),
    (LONG, (9,)),
    (LONG, (4, 5, 6, 7, 8, 9, 2)),
    (SHORT, tuple(range(2, 21))),
    ((9, 8), tuple(range(30, 2, -1))),
]
LENGTHS = [len(prompt) + len(response) for prompt, response in PAIRS]
assert min(LENGTHS) < WINDOW
assert WINDOW in LENGTHS
assert max(LENGTHS) > 2 * WINDOW


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel) -> Tensor:
    """Of every response token, by a forward of transformers alone, each sequence by itself."""
    parts = []
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt, *response]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        parts.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(parts)


def computed(model: PreTrainedModel, layout: Layout) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of all weights of a sum of them and the entropies."""
    output = Actor(model)(token_inputs(PAIRS, pad_id=0, layout=layout), temperature=0.7)
    weights = torch.linspace(-1, 2, len(output.logprobs))
    loss = (output.logprobs * weights + 0.3 * output.entropy).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    at_1 = Actor(model)(token_inputs(PAIRS, pad_id=0, layout=layout), temperature=1.0)
    return at_1.logprobs.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_are_those_of_transformers_and_gradients_of_no_layout(family: str) -> None:
    model = windowed_model(family)
    alone = expected_logprobs(windowed_model(family, attn_implementation="eager"))
    logprobs, gradient = computed(model, "padded")
    assert float((logprobs - alone).abs().max()) < 1e-5
    assert (choose_layout("auto", [model]) == "shared_prompts") == (family in PACKED)
    layouts: tuple[Layout, ...] = ("packed", "shared_prompts") if family in PACKED else ()
    for layout in layouts:
        logprobs, same = computed(model, layout)
        assert float((logprobs - alone).abs().max()) < 1e-5
        assert relative(same, gradient) < 1e-5


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_a_window_matters_behind_its_length_alone(family: str) -> None:
    windowed = expected_logprobs(windowed_model(family))
    whole = expected_logprobs(windowed_model(family, sliding_window=max(LENGTHS)))
    longer = torch.cat([torch.arange(len(p), len(p) + len(r)) > WINDOW for p, r in PAIRS])
    torch.testing.assert_close(windowed[~longer], whole[~longer], rtol=0, atol=1e-5)
    assert float((windowed - whole)[longer].abs().max()) > 1e-2


@pytest.mark.parametrize("block", [1, 256], ids=["many blocks", "one block"])
@pytest.mark.parametrize("call_costs", [0, 300_000], ids=["segment by segment", "by group"])
def test_however_a_row_is_cut_into_calls(
    block: int, call_costs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "_MIN_BLOCK", block)
    monkeypatch.setattr(packed_attention, "_CALL_COST", call_costs)
    model = windowed_model("gemma3")
    alone = expected_logprobs(model)
    _, gradient = computed(model, "padded")
    choose_layout("auto", [model])
    logprobs, same = computed(model, "shared_prompts")
    assert float((logprobs - alone).abs().max()) < 1e-5
    assert relative(same, gradient) < 1e-5


@pytest.mark.parametrize("layout", ["packed", "shared_prompts"])
def test_negative_control_without_the_window_in_the_mask(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = windowed_model("qwen2_moe")
    alone = expected_logprobs(model)
    choose_layout("auto", [model])
    without: Any = packed_attention.window_mask(None)
    monkeypatch.setattr(packed_attention, "window_mask", lambda window: without)
    logprobs, _ = computed(model, layout)
    assert float((logprobs - alone).abs().max()) > 1e-2
