"""Mixtures of experts: the weights that compute a token, counted by hand, and what is left off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe import Qwen3MoeConfig

from tests.networks.architectures import MIXTURES, Architecture
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.experts import num_active, say_experts, spread_evenly
from vapo.networks.loading import load_causal_lm
from vapo.networks.meta_device import model_of_config
from vapo.networks.saved_names import under_saved_names

QWEN = MIXTURES[0]


def test_the_weights_of_qwen3_30b_a3b(capsys: pytest.CaptureFixture[str]) -> None:
    """30.5 billion, 3.3 of which compute a token, by the sizes of its config.json."""
    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )
    plain = {"path": "", "dtype": "bfloat16", "attn_implementation": "auto"}
    model = model_of_config("causal_lm", config, **plain)
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128  # with the norms of queries and keys
    router, expert, norms = 128 * 2048, 3 * 2048 * 768, 2 * 2048
    table = 151_936 * 2048
    total = 48 * (attention + router + 128 * expert + norms) + 2 * table + 2048
    active = 48 * (attention + router + 8 * expert + norms) + 2 * table + 2048
    assert round(total / 1e9, 1) == 30.5
    assert f"{active / 1e9:.2f}" == "3.35"
    assert sum(p.numel() for p in model.parameters()) == total
    assert sum(num_active(model).values()) == active
    flops = Actor(model).forward_flops
    assert flops.per_token == 2 * (active - 2 * table)
    assert flops.per_state == 2 * table
    assert flops.per_squared_length == 2 * 48 * 4096
    say_experts("Qwen3-30B-A3B", model)
    assert capsys.readouterr().err == (
        "Qwen3-30B-A3B: 3,353.0 M of 30,532.1 M parameters compute a token; the router's "
        "auxiliary loss (router_aux_loss_coef 0.001) is off\n"
    )


def test_the_router_is_not_shared_out() -> None:
    model = QWEN.model()
    active = num_active(model)
    gate = model.get_parameter("model.layers.0.mlp.gate.weight")
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert active[id(gate)] == 4 * 32
    assert active[id(down)] == 2 * 24 * 32  # 2 of 4 experts


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        (
            "gemma4_text",
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 24,
                "head_dim": 8,
                "global_head_dim": 8,
            },
        ),
        ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 24}),
    ],
)
def test_other_names_of_the_number_of_chosen_experts(model_type: str, values: Any) -> None:
    model = Architecture("", model_type, values, 1).model()
    name = next(n for n, _ in model.named_parameters() if n.endswith("experts.down_proj"))
    assert num_active(model)[id(model.get_parameter(name))] == 2 * 24 * 32


@pytest.mark.parametrize("number", [5, 10**9])
def test_more_experts_than_a_layer_has(number: int) -> None:
    model = QWEN.model()
    model.config.num_experts_per_tok, model.name_or_path = number, "models/made_up"
    says = f"models/made_up/config.json: num_experts_per_tok is {number}, and a layer has 4 experts"
    with pytest.raises(UserError, match=says):
        Actor(model)


def test_a_number_of_experts_that_is_not_that_of_the_weights(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path, QWEN.model())
    file = folder / "config.json"
    file.write_text(file.read_text().replace('experts": 4', 'experts": 3'))
    says = r"6 have other shapes .*down_proj: \[4, 32, 24\] in the folder, \[3, 32, 24\] by"
    with pytest.raises(UserError, match=says):
        load_causal_lm(str(folder), dtype="float32", attn_implementation="auto")


def test_frozen_experts_cost_no_gradient() -> None:
    model = QWEN.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    frozen = 2 * 2 * 2 * 3 * 24 * 32  # operations, layers, experts, matrices
    assert Actor(model).forward_flops.frozen_per_token == frozen


def test_the_routers_loss_is_off(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path, QWEN.model(output_router_logits=True))
    model = load_causal_lm(str(folder), dtype="float32", attn_implementation="auto")
    assert not model.config.output_router_logits


def test_nothing_is_said_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    say_experts("policy", tiny_model())
    assert not capsys.readouterr().err


@pytest.mark.parametrize("family", [MIXTURES[0], MIXTURES[2]], ids=lambda one: one.name)
def test_fakes_compute_what_experts_compute(family) -> None:
    """Where the router gives each expert equally many neighbours, in value, too."""
    model = family.model()
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    states = torch.randn(8, 32)
    chosen, weights = torch.arange(4).repeat_interleave(2)[:, None], torch.rand(8, 1)
    with torch.no_grad():
        expected = experts(states, chosen, weights)
        spread_evenly(model)
        torch.testing.assert_close(experts(states, chosen, weights), expected)


def test_an_engine_gets_an_expert_at_a_time_and_no_more_than_a_layer_is_held() -> None:
    model = QWEN.model()
    given: list[str] = []
    first_of_layer_1 = "model.layers.1."

    def weights():
        for name, tensor in model.state_dict().items():
            given.append(name)
            yield name, tensor

    for name, tensor in under_saved_names(model, weights()):
        if name == "model.layers.0.mlp.experts.3.up_proj.weight":
            fused = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
            assert torch.equal(tensor, fused[3, 24:])
            assert sum(one.startswith(first_of_layer_1) for one in given) <= 1
            break
    else:
        raise AssertionError("it is not among the names")
