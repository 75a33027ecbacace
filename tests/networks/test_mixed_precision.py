"""Log-probs and values are float32 results, whatever precision the networks compute in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.networks.test_build import INPUTS, one_process
from tests.networks.test_value_head import BINS, BOUNDED, MEAN, config_of
from tests.tiny_model import ragged_prompts, save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.functional.logprob_columns import NUM_LOGPROB_COLUMNS, logprob_columns
from vapo.networks import actor_critic
from vapo.networks.actor_critic import Critic
from vapo.networks.build import make_actor, make_critic
from vapo.networks.value_head import LOGPROB_SCORE
from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest
from vapo.rollouts.engines.selection import access_to, make_sampler
from vapo.rollouts.engines.transformers import token_sampling
from vapo.rollouts.engines.transformers.sampler import TransformersSampler

__all__ = ["one_process"]
FSDP = ("trainer.strategy=fsdp", "trainer.precision=bf16-mixed", "trainer.accelerator=cpu")
SAMPLED = replace(INPUTS, sampled_logprobs=-torch.tensor([[0.1, 0.7, 0.0], [0.3, 0.9, 0.2]]))


def sharp_model(tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Logits of about 20, where bfloat16 has eighths."""
    model: Any = tiny_model(tie_word_embeddings=tied)
    with torch.no_grad():
        model.model.norm.weight.mul_(10)
    return model.to(dtype)


def logprobs_of(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = states.double() @ weight.double().T
    return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_of_shards_have_float32_logits(
    tmp_path: Path, one_process: DeviceMesh, tied: bool
) -> None:
    """Of their states and weights, which are bfloat16."""
    policy = str(save_tiny_folder(tmp_path / "policy", sharp_model(tied)))
    actor = make_actor(config_of(tmp_path, policy, *FSDP), one_process)
    output = actor(INPUTS, temperature=1.0, layers=[-1])
    logprobs, states = output.logprobs, output.states[:, 0].detach()
    assert states.dtype == torch.bfloat16
    weight = sharp_model(tied).get_output_embeddings().weight.detach().bfloat16()
    exact = logprobs_of(states, weight, INPUTS.targets)
    assert float((logprobs.detach() - exact).abs().max()) < 1e-4
    coarse = (states @ weight.T).float().log_softmax(dim=1)  # the control
    coarse = coarse.gather(1, INPUTS.targets[:, None])[:, 0]
    assert float((coarse - exact).abs().max()) > 0.01
    logprobs.sum().backward()
    assert actor.model.get_output_embeddings().weight.grad is not None


@torch.no_grad()
def test_an_engine_in_bfloat16_samples_from_float32_logits() -> None:
    """Also in a stream that another, begun before it, does not outlast."""
    model, (prompt,) = sharp_model(True, torch.bfloat16), ragged_prompts(1)
    sampler = TransformersSampler(model, tiny_tokenizer(), max_concurrent_sequences=1, device="cpu")
    settings, turns = SamplingSettings(max_response_tokens=1), []
    other = ExitStack()
    other.enter_context(sampler.turns(settings, seed=0))
    with sampler.turns(settings, seed=7) as stream:
        other.close()
        for number in range(16):
            stream.submit(TurnRequest((0, number), 0, prompt.prompt_ids, max_tokens=1))
        while stream.num_open:
            turns.extend(stream.step())
    states = model.model(torch.tensor([prompt.prompt_ids])).last_hidden_state[0, -1:]
    targets = torch.tensor([turn.ids[0] for turn in turns])
    own = torch.tensor([turn.logprobs[0] for turn in turns])
    exact = logprobs_of(states.expand(16, -1), model.lm_head.weight, targets)
    assert float((own - exact).abs().max()) < 1e-4
    logits = model(torch.tensor([prompt.prompt_ids])).logits[0, -1]
    assert logits.dtype == torch.bfloat16, "left as it was"
    coarse = logits.float().log_softmax(dim=0)[targets]  # the control
    assert float((coarse - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_product_is_rounded_while_another_thread_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The setting is the process's. Neither the trainer's log-probs nor the engine's logits."""
    rounded: list[bool] = []

    @contextmanager
    def noting() -> Iterator[None]:
        rounded.append(True)
        yield

    for module in (actor_critic, token_sampling):
        monkeypatch.setattr(module, "rounded_inputs", noting)
    policy = str(save_tiny_folder(tmp_path / "policy"))
    mixed = ("trainer.precision=bf16-mixed", f"training.max_staleness={ahead}")
    config = config_of(tmp_path, policy, *mixed)
    actor = make_actor(config, None)
    with torch.autocast("cpu", torch.bfloat16):
        actor(INPUTS, temperature=1.0)
    assert bool(rounded) is (ahead == 0)
    rounded.clear()
    sampler = make_sampler(config, access_to(actor.model, torch.device("cpu")), tiny_tokenizer())
    with sampler.turns(SamplingSettings(max_response_tokens=1), seed=0) as stream:
        stream.submit(TurnRequest((0, 0), 0, (5, 6), max_tokens=1))
        stream.step()
    assert bool(rounded) is (ahead == 0)


@pytest.mark.parametrize("head", [MEAN, BOUNDED, BINS], ids=["scalar", "bounded", "categorical"])
@pytest.mark.parametrize("precision", ["autocast", "weights", "fsdp", "probe under fsdp"])
def test_values_are_float32(
    tmp_path: Path, one_process: DeviceMesh, head: tuple[str, ...], precision: str
) -> None:
    """Of the states, which may be bfloat16; a sharded head's own weights are float32, too."""
    policy = str(save_tiny_folder(tmp_path / "policy"))
    options = {"autocast": (), "weights": ("critic.dtype=bfloat16",), "fsdp": FSDP}.get(
        precision, (*FSDP, "critic.kind=probe", "critic.init=policy", "critic.probe.layers=[-1]")
    )
    config = config_of(tmp_path, policy, "critic.sampled_logprobs={}", *head, *options)
    critic = make_critic(config, one_process if "fsdp" in precision else None)
    weights = fill_head(critic)
    seen: list[Tensor] = []
    score = critic.get_submodule("model.score")
    score.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    states = torch.randn(len(INPUTS.targets), 1, 32) if "probe" in precision else None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        values = critic(replace(SAMPLED, actor_states=states)).values.detach()
    assert SAMPLED.sampled_logprobs is not None
    columns = logprob_columns(SAMPLED.sampled_logprobs, SAMPLED.response_mask)
    parts = (seen[-1], columns[SAMPLED.response_mask])
    outputs = sum(
        part.double() @ weights[name].double().T
        for part, name in zip(parts, ("score.weight", f"{LOGPROB_SCORE}.weight"), strict=True)
    )
    outputs = (outputs + weights["score.bias"].double()).float()
    expected = critic.head.values(outputs)
    assert float((values - expected).abs().max()) < 2e-6 * float(outputs.abs().max())
    coarse = critic.head.values(outputs.bfloat16().float())  # the control
    assert float((coarse - expected).abs().max()) > 1e-4


def fill_head(critic: Critic) -> dict[str, Tensor]:
    """Give the head weights that bfloat16 would round; what they are in the critic's dtype."""
    g = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, parameter in critic.model.named_parameters():
        if name.startswith(("score.", LOGPROB_SCORE)):
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.data.copy_(torch.randn(local.shape, generator=g) * 0.3 + 0.7)
            found[name] = local.detach().clone()
    assert found[f"{LOGPROB_SCORE}.weight"].shape[1] == NUM_LOGPROB_COLUMNS
    return found
