"""Recurrent layers: what is refused or left out, and how their states are joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.networks.architectures import ALL, Architecture
from tests.rollouts.turns_contract import check_logprobs
from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from vapo.config.networks import LoraConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.loading import load_causal_lm, load_value_model
from vapo.networks.lora import target_names
from vapo.networks.model_configs import check_supported, read_model_config
from vapo.networks.recurrent_layers import num_attention_layers, recurrent_states
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers.decoding_rows import OpenTurn, prefill_chunks
from vapo.rollouts.engines.transformers.kv_cache import join_caches
from vapo.rollouts.engines.transformers.sampler import TransformersSampler

IDS = torch.arange(3, 22)[None]


def family(name: str) -> Architecture:
    return next(one for one in ALL if one.name == name)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("rwkv", "RwkvForCausalLM keeps a state outside of Transformers' cache"),
        ("xlstm", "xLSTMForCausalLM keeps a state outside of Transformers' cache"),
        ("mamba2", "Mamba2ForCausalLM has no layer with attention"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model_type: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^folder: {said}.*as Qwen3.5 or LFM2$"):
        check_supported("folder", AutoConfig.for_model(model_type))


def test_the_lower_bound_of_time_steps_is_taken_away(tmp_path: Path) -> None:
    """Zamba2 has one of 0.001 over a whole sequence, and none for a token behind a cache."""
    bounded = family("Zamba2").model()
    with torch.no_grad():
        for layer in bounded.modules():
            if hasattr(layer, "dt_bias"):
                layer.get_parameter("dt_bias").fill_(-9.0)  # softplus(-9) is 0.00012
        model = load_causal_lm(
            str(save_tiny_folder(tmp_path, bounded)), dtype="float32", attn_implementation="auto"
        ).eval()
        limits = {m.time_step_limit for m in model.modules() if hasattr(m, "time_step_limit")}
        assert limits == {(0.0, float("inf"))}
        cache = model(IDS[:, :-1], use_cache=True).past_key_values
        token = model(IDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
        whole, other = (one(IDS, use_cache=False).logits[:, -1] for one in (model, bounded))
    torch.testing.assert_close(whole, token, rtol=0, atol=1e-4)
    assert (other - token).abs().max() > 2e-3, "the control"


def test_a_row_of_joined_caches_is_a_copy_of_its_states() -> None:
    """Conv states and recurrent states, and those of layers that have keys, too."""
    model = family("Falcon-H1").model()
    with torch.no_grad():
        caches = [
            model(torch.tensor(rows), use_cache=True).past_key_values
            for rows in ([[5, 6, 7], [8, 9, 10]], [[11, 12, 13]])
        ]
    parts = [(caches[0], torch.tensor([1, 1])), (caches[1], torch.tensor([0]))]
    joined = join_caches(parts, width=3, room=2)
    assert len(joined.layers) == 4
    layers: list[Any] = joined.layers
    for index, layer in enumerate(layers):
        sources = [recurrent_states(cache.layers[index]) for cache in caches]
        assert len(recurrent_states(layer)) == 2
        for number, state in enumerate(recurrent_states(layer)):
            first, second = (states[number] for states in sources)
            assert torch.equal(state, torch.stack([first[1], first[1], second[0]]))
            state.zero_()
            assert first.any(), "it is no view"
        assert layer.keys.shape == (3, 2, 3, 8)
    assert joined.has_previous_state()


def test_only_layers_with_attention_attend() -> None:
    assert num_attention_layers(family("Qwen3.5").config()) == 2
    assert num_attention_layers(family("Nemotron-H").config()) == 1
    assert num_attention_layers(family("Falcon-H1").config()) == 4


def test_flops_count_the_layers_that_attend() -> None:
    flops = Actor(family("Qwen3.5").model()).forward_flops
    assert flops.per_squared_length == 2 * 2 * 4 * 16  # layers, heads and their channels


def test_prompts_of_equal_length_are_prefilled_together() -> None:
    """Padding before a prompt is a token to whatever layer does not mask it."""
    lengths = [3, 9, 3, 4, 9]
    turns = [OpenTurn(TurnRequest((i, 0), 0, (5,) * n, 8)) for i, n in enumerate(lengths)]
    chunks = [[turn.num_new for turn in chunk] for chunk in prefill_chunks(turns, pads=False)]
    assert chunks == [[9, 9], [4], [3, 3]]


def test_a_second_turn_is_computed_anew() -> None:
    """The state of a finished row has gone on since its turn ended."""
    model = family("Qwen3.5").model()
    sampler = TransformersSampler(model, tiny_tokenizer(), max_concurrent_sequences=4, device="cpu")
    found: list[SampledTurn] = []
    with sampler.turns(SamplingSettings(max_response_tokens=12), seed=7) as stream:
        for prompt, most in enumerate((2, 12, 12)):
            stream.submit(TurnRequest((prompt, 0), 0, (5 + prompt, 6), most))
        while stream.num_open:
            for turn in stream.step():
                found.append(turn)
                if turn.request.turn == 0:
                    ids = (*turn.request.ids, *turn.ids, 9, 10)
                    stream.submit(TurnRequest(turn.request.key, 1, ids, 12))
        assert stream.num_kept == 0
    assert len(found) == 6
    for turn in found:
        check_logprobs(model, turn)


def test_adapters_are_not_on_what_a_mamba_layer_reads_by_itself() -> None:
    """Jamba multiplies by the weight of `dt_proj`, and Mamba-2's kernel by that of `out_proj`."""
    for name, left_out in (("Jamba", "dt_proj"), ("Bamba", "out_proj")):
        model = family(name).model()
        names = target_names(model, LoraConfig(), "actor.lora")
        assert any(target.endswith("in_proj") for target in names)
        assert not any(target.endswith(left_out) for target in names)
        assert any(module.endswith(left_out) for module, _ in model.named_modules())
        options = LoraConfig(target_modules=left_out)
        with pytest.raises(UserError, match=f"no linear module '{left_out}' in its layers"):
            target_names(model, options, "actor.lora")


def test_the_text_model_of_a_folder_with_images(tmp_path: Path) -> None:
    """Qwen3.5 is published with the part that reads images."""
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    text = family("Qwen3.5").config().to_dict()
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    folder = save_tiny_folder(tmp_path, whole)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5"
    config = read_model_config(str(folder))
    assert (config.model_type, config.architectures) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    options: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}
    model = load_causal_lm(str(folder), **options).eval()
    critic = load_value_model(str(folder), **options).eval()
    with torch.no_grad():
        expected = whole.eval()(input_ids=IDS)
        torch.testing.assert_close(model(IDS).logits, expected.logits)
        states = whole.model.language_model(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(critic.base_model(IDS).last_hidden_state, states)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
