"""Adapters: what is trained, what engines and exports get, and what does not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.config.fits import fit_config
from tests.tiny_model import (
    full_forward_logits,
    ragged_prompts,
    sample,
    save_tiny_folder,
    tiny_model,
)
from vapo.config import FitConfig
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.networks import build
from vapo.networks.actor_critic import Actor
from vapo.networks.build import make_actor, make_reference
from vapo.networks.export import save_folder
from vapo.networks.loading import load_tokenizer
from vapo.networks.lora import merge_adapters, plain_copy
from vapo.networks.token_inputs import token_inputs
from vapo.runs.checkpoints import network_state
from vapo.training.optimizers import make_optimizer

INPUTS = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)
LORA = ["actor.lora.rank=2", "actor.lora.lora_alpha=3"]


def lora_config(tmp_path: Path, *overrides: str, tied: bool = True) -> FitConfig:
    path = tmp_path / f"policy_{tied}"
    if not path.exists():
        save_tiny_folder(path, tiny_model(tie_word_embeddings=tied))
    return fit_config(tmp_path, f"actor.path={path}", *LORA, *overrides)


def logprobs(actor: Actor) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = actor(INPUTS, temperature=1.0).logprobs
    return values


def trained(config: FitConfig, num_steps: int = 3) -> Actor:
    """An actor whose adapters have moved far."""
    actor = make_actor(config, None)
    options = config.actor.optimizer
    options.lr = 0.05
    optimizer = make_optimizer(actor, options)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (-actor(INPUTS, temperature=1.0).logprobs.sum()).backward()
        optimizer.step()
    return actor


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    plain = make_actor(fit_config(tmp_path, f"actor.path={config.actor.path}"), None)
    assert torch.equal(logprobs(make_actor(config, None)), logprobs(plain))


def test_only_adapters_have_gradients_and_move(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    before = {n: t.clone() for n, t in make_actor(config, None).state_dict().items()}
    actor = trained(config)
    moved = {n for n, t in actor.state_dict().items() if not torch.equal(t, before[n])}
    adapters = {n for n in before if ".lora_" in n}
    assert moved == adapters
    assert len(adapters) == 2 * 7 * 2, "A and B of seven modules in two layers"
    assert {n for n, p in actor.named_parameters() if p.grad is not None} == adapters


def test_equal_seeds_make_equal_adapters(tmp_path: Path) -> None:
    names = [f"seed={s}" for s in (0, 0, 1)]
    states = [make_actor(lora_config(tmp_path, name), None).state_dict() for name in names]
    key = next(n for n in states[0] if ".lora_A" in n)
    assert torch.equal(states[0][key], states[1][key])
    assert not torch.equal(states[0][key], states[2][key])


def test_chosen_modules(tmp_path: Path) -> None:
    config = lora_config(tmp_path, "actor.lora.target_modules='q_proj, v_proj'")
    found = {n.split(".lora_")[0] for n in make_actor(config, None).state_dict() if ".lora_" in n}
    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "all,q_proj"])
def test_unknown_modules(tmp_path: Path, name: str) -> None:
    config = lora_config(tmp_path, f"actor.lora.target_modules='{name}'")
    with pytest.raises(UserError, match=r"actor\.lora\.target_modules: Qwen2ForCausalLM has no"):
        make_actor(config, None)


@pytest.mark.parametrize(("chosen", "most"), [("all", 32), ("k_proj", 16)])
def test_a_rank_above_a_dimension_of_a_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, most: int
) -> None:
    """It is refused before weights are loaded. Keys have 2 heads of 8; the hidden size is 32."""
    names = f"actor.lora.target_modules={chosen}"
    make_actor(lora_config(tmp_path, f"actor.lora.rank={most}", names), None)
    monkeypatch.setattr(build, "load_causal_lm", lambda *_, **__: pytest.fail("loaded"))
    problem = rf"^actor\.lora\.rank is {most + 1}, above {most}, a dimension of model\.layers\.0"
    with pytest.raises(UserError, match=problem) as error:
        make_actor(lora_config(tmp_path, f"actor.lora.rank={most + 1}", names), None)
    assert f"set actor.lora.rank to at most {most}, or" in str(error.value)


def test_merged_hand_value() -> None:
    """W + lora_alpha / rank * B A, under the plain name; what has no adapter stays."""
    options = fit_config_lora(rank=2, lora_alpha=3.0)
    state = {
        "q.base_layer.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "q.base_layer.bias": torch.tensor([7.0, 8.0]),
        "q.lora_A.default.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        "q.lora_B.default.weight": torch.tensor([[2.0, 0.0], [4.0, 1.0]]),
        "norm.weight": torch.tensor([5.0]),
    }
    plain = dict(merge_adapters(state.items(), options))
    assert plain.keys() == {"q.weight", "q.bias", "norm.weight"}
    assert plain["q.weight"].tolist() == [[4.0, 2.0], [9.0, 7.0]]
    assert plain["q.bias"].tolist() == [7.0, 8.0]


def fit_config_lora(**values: float):
    from vapo.config.networks import LoraConfig

    return LoraConfig(**values)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_the_modules_own_policy(tmp_path: Path, tied: bool) -> None:
    """Sampled by an engine's copy, scored by the module; a wrong scale is found."""
    config = lora_config(tmp_path, tied=tied)
    actor = trained(config)
    base = make_actor(fit_config(tmp_path, f"actor.path={config.actor.path}"), None)
    assert (logprobs(actor) - logprobs(base)).abs().max() > 0.1, "adapters that say something"
    copy = plain_copy(actor.model, config.actor.lora)
    assert not any("lora" in name for name in copy.state_dict())
    gaps = []
    for rollout in sample(copy, ragged_prompts(3)):
        logits = full_forward_logits(actor.model, rollout).log_softmax(-1)
        own = logits[range(len(rollout.response_ids)), list(rollout.response_ids)]
        gaps.append((own - torch.tensor(rollout.rollout_logprobs)).abs().max())
    assert max(gaps) < 1e-5
    wrong = plain_copy(actor.model, fit_config_lora(rank=2, lora_alpha=2.9))
    assert (logprobs(Actor(wrong)) - logprobs(actor)).abs().max() > 1e-4
    assert any(".lora_A" in name for name in actor.state_dict()), "the module keeps its adapters"


def test_adapters_of_a_bfloat16_policy_are_float32(tmp_path: Path) -> None:
    actor = trained(lora_config(tmp_path, "actor.dtype=bfloat16"))
    kinds = {".lora_" in n: p.dtype for n, p in actor.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_reference_is_the_actor_without_adapters(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    base = make_actor(fit_config(tmp_path, f"actor.path={config.actor.path}"), None)
    actor = trained(config)
    reference = make_reference(config, None, actor)
    before = logprobs(actor)
    assert torch.equal(logprobs(reference), logprobs(base))  # type: ignore[arg-type]
    assert torch.equal(logprobs(actor), before), "and the adapters are on again"
    assert all(p.requires_grad for n, p in actor.named_parameters() if ".lora_" in n)
    assert not any(p.requires_grad for n, p in actor.named_parameters() if ".lora_" not in n)


@pytest.mark.parametrize("tied", [True, False])
def test_checkpointed_actor_exports_merged(tmp_path: Path, tied: bool) -> None:
    config = lora_config(tmp_path, tied=tied)
    actor = trained(config)
    state = {f"actor.{name}": tensor for name, tensor in actor.state_dict().items()}
    plain = network_state({"state_dict": state, "config": to_yaml(config)}, "actor")
    skeleton = tiny_model(tie_word_embeddings=tied)
    save_folder(skeleton, plain, load_tokenizer(config.actor.path), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logprobs(Actor(again)), logprobs(actor), atol=1e-5, rtol=0)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_flops_of_an_update_leave_out_gradients_of_frozen_weights(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    flops = make_actor(config, None).forward_flops
    plain = make_actor(fit_config(tmp_path, f"actor.path={config.actor.path}"), None)
    per_token = plain.forward_flops.per_token
    assert plain.forward_flops.count_update(INPUTS) == 3 * plain.forward_flops.count(INPUTS)
    assert flops.frozen_per_token == per_token
    tokens, states = INPUTS.num_tokens, len(INPUTS.targets)
    spared = per_token * tokens + flops.per_state * states
    assert flops.count_update(INPUTS) == 3 * flops.count(INPUTS) - spared


def test_merging_holds_one_module_at_a_time(tmp_path: Path) -> None:
    """A sharded actor's weights are gathered one by one, and must not all be held."""
    config = lora_config(tmp_path)
    state = make_actor(config, None).model.state_dict()
    given: list[str] = []
    most = 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            given.append(name)
            yield name, tensor

    for number, _ in enumerate(merge_adapters(weights(), config.actor.lora), start=1):
        adapters = sum(".lora_" in name for name in given)
        most = max(most, len(given) - adapters - number)
    assert len(given) == len(state)
    assert most <= 1
