"""The critic's head: its values by hand, how it starts, and that a folder says what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, Qwen2ForSequenceClassification

from tests.config.fits import fit_config
from tests.networks.test_build import INPUTS, one_process
from tests.systems import system_config
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Critic
from vapo.networks.build import check_head_is_kept, check_value_head, make_critic
from vapo.networks.export import save_network
from vapo.networks.head_layers import start_head
from vapo.networks.loading import load_value_model
from vapo.networks.meta_device import empty_value_model
from vapo.networks.value_head import KEY
from vapo.runs.checkpoints import parameters_of
from vapo.system.distributed import reshard
from vapo.training.optimizers import make_optimizer

__all__ = ["one_process"]
NUM_TOKENS = 5
BOUNDED = ("critic.head.kind=bounded", "critic.head.low=-2", "critic.head.high=2")
BINS = (
    *("critic.head.kind=categorical", "critic.head.low=-1", "critic.head.high=1"),
    *("critic.head.num_bins=3", "critic.head.support=inclusive"),
)
MEAN = ("critic.head.start=mean_reward", "critic.head.mean_reward=-0.5")
FIRST_BATCH = ("critic.head.start=first_batch",)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    return str(save_tiny_folder(tmp_path / "policy"))


@pytest.fixture
def reward_model(tmp_path: Path) -> str:
    torch.manual_seed(1)
    config = tiny_model().config
    config.num_labels = 1
    return str(save_tiny_folder(tmp_path / "reward", Qwen2ForSequenceClassification(config)))


def config_of(folder: Path, policy: str, *overrides: str, init: str = "policy") -> FitConfig:
    return fit_config(folder, f"actor.path={policy}", f"critic.init={init}", *overrides)


def values_of(critic: Critic) -> list[float]:
    return critic(INPUTS).values.tolist()


def assert_same_weights(one: Critic, other: Critic) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name, weight in mine.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(whole, others[name]), name


def biased(critic: Critic, *bias: float) -> Critic:
    critic.get_parameter("model.score.bias").data = torch.tensor(bias)
    return critic


def randomized(critic: Critic) -> Critic:
    torch.manual_seed(2)
    for parameter in critic.get_submodule("model.score").parameters():
        torch.nn.init.normal_(parameter)
    return critic


# ---- values -------------------------------------------------------------------------------


def test_values_of_a_bounded_head_by_hand(tmp_path: Path, policy: str) -> None:
    """z = 1 is three quarters of the range, from -2 to 2."""
    critic = make_critic(config_of(tmp_path, policy, *BOUNDED), None)
    assert values_of(critic) == [0.0] * NUM_TOKENS, "a zero head is in the middle"
    output = biased(critic, 1.0)(INPUTS)
    assert output.values.tolist() == pytest.approx([1.0] * NUM_TOKENS)
    assert (output.values.dtype, output.logits) == (torch.float32, None)


def test_values_of_a_categorical_head_by_hand(tmp_path: Path, policy: str) -> None:
    """Probabilities 1/7, 2/7, 4/7 of -1, 0, 1: the mean is 3/7."""
    critic = make_critic(config_of(tmp_path, policy, *BINS, "critic.dtype=bfloat16"), None)
    logits = torch.tensor([1.0, 2.0, 4.0]).log().bfloat16()
    critic.get_parameter("model.score.bias").data = logits
    output = critic(INPUTS)
    expected = float((logits.float().softmax(0) * torch.tensor([-1.0, 0.0, 1.0])).sum())
    assert expected == pytest.approx(3 / 7, abs=2e-3)
    assert output.values.tolist() == pytest.approx([expected] * NUM_TOKENS, abs=1e-6)
    assert output.logits.shape == (NUM_TOKENS, 3)
    assert {output.values.dtype, output.logits.dtype} == {torch.float32}
    columns = INPUTS.scatter(output.logits)
    assert torch.equal(columns[INPUTS.response_mask], output.logits)
    assert not columns[~INPUTS.response_mask].any()


def test_flops_count_every_output(tmp_path: Path, policy: str) -> None:
    flops = [
        make_critic(config_of(tmp_path, policy, *head), None).forward_flops.per_state
        for head in ((), BOUNDED, BINS)
    ]
    assert flops == [2 * 32, 2 * (32 + 1), 2 * 3 * (32 + 1)]


# ---- starts -------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [(), BOUNDED, BINS], ids=["scalar", "bounded", "categorical"])
@pytest.mark.parametrize("init", ["policy", "reward_model"])
def test_it_starts_at_a_given_mean_reward(
    tmp_path: Path, policy: str, reward_model: str, init: str, head: tuple[str, ...]
) -> None:
    """From a reward model, too: its head is left out, and the backbone is kept."""
    start = (f"critic.reward_model_path={reward_model}", *head, *MEAN)
    critic = make_critic(config_of(tmp_path, policy, *start, init=init), None)
    assert values_of(critic) == pytest.approx([-0.5] * NUM_TOKENS, abs=1e-6)
    assert not critic.get_parameter("model.score.weight").any()
    folder = reward_model if init == "reward_model" else policy
    plain = load_value_model(folder, dtype="float32", attn_implementation="auto")
    name = "model.embed_tokens.weight"
    assert torch.equal(critic.model.get_parameter(name), plain.get_parameter(name))


@pytest.mark.parametrize("head", [(), BOUNDED, BINS], ids=["scalar", "bounded", "categorical"])
def test_a_live_head_starts_at_a_measured_mean_whether_or_not_it_is_sharded(
    tmp_path: Path, policy: str, one_process: DeviceMesh, head: tuple[str, ...]
) -> None:
    """The optimizer keeps its state and its parameters."""
    overrides = [*head, "critic.head.start=first_batch", "trainer.strategy=fsdp"]
    config = config_of(tmp_path, policy, *overrides)
    for mesh in (None, one_process):
        critic = make_critic(config, mesh)
        assert values_of(critic) == [0.0] * NUM_TOKENS  # and the root's weights stay gathered
        optimizer = make_optimizer(critic, config.critic.optimizer)
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        for state in optimizer.state.values():
            state["exp_avg"].fill_(0.25)
        assert start_head(critic, 0.75) == 0.75
        assert values_of(critic) == pytest.approx([0.75] * NUM_TOKENS, abs=1e-6)
        assert [id(p) for p in critic.parameters()] == held
        assert all(bool((state["exp_avg"] == 0.25).all()) for state in optimizer.state.values())
        reshard(critic)
        parameter = critic.get_parameter("model.score.bias")
        assert isinstance(parameter, DTensor) == (mesh is not None)


def test_a_mean_at_a_bound_is_held_inside_of_it(tmp_path: Path, policy: str) -> None:
    """One per cent of the range, of [-2, 2] and of the outer bins -1 and 1."""
    for head, expected in ((BOUNDED, -1.96), (BINS, -0.98)):
        critic = make_critic(
            config_of(tmp_path, policy, *head, "critic.head.start=first_batch"), None
        )
        assert start_head(critic, -2.0) == pytest.approx(expected)
        assert values_of(critic) == pytest.approx([expected] * NUM_TOKENS, abs=1e-5)


@pytest.mark.parametrize("from_reward_model", [False, True])
def test_the_first_layers_alone(
    tmp_path: Path,
    policy: str,
    reward_model: str,
    one_process: DeviceMesh,
    from_reward_model: bool,
) -> None:
    """Its hidden states are those of the whole backbone after its first layer, normed."""
    init = "reward_model" if from_reward_model else "policy"
    start = f"critic.reward_model_path={reward_model}"
    begins = MEAN if from_reward_model else ()
    options = (start, *begins, "critic.layers=1", "trainer.strategy=fsdp")
    config = config_of(tmp_path, policy, *options, init=init)
    check_value_head(config)
    whole: Any = make_critic(config_of(tmp_path, policy, start, init=init), None).model
    critic = make_critic(config, None)
    assert_same_weights(make_critic(config, one_process), critic)
    model: Any = critic.model
    assert (len(model.model.layers), len(whole.model.layers)) == (1, 2)
    ids = INPUTS.input_ids
    states = whole.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(
        model.model(ids, use_cache=False).last_hidden_state, whole.model.norm(states[1])
    )
    randomized(critic)
    save_network(critic, policy, tmp_path / "critic")
    for layers in ("null", "1"):
        options = (f"critic.layers={layers}",)
        again = make_critic(
            config_of(tmp_path, policy, *options, init=str(tmp_path / "critic")), None
        )
        assert_same_weights(again, critic)


def test_layers_that_do_not_fit(tmp_path: Path, policy: str, reward_model: str) -> None:
    """More than there are, or below a head that was trained on the last one."""
    more = config_of(tmp_path, policy, "critic.layers=3")
    folder = f"critic.reward_model_path={reward_model}"
    cut = config_of(tmp_path, policy, folder, "critic.layers=1", init="reward_model")
    for config, message in (
        (more, r"critic\.layers 3 is more than the 2 decoder layers"),
        (cut, r"critic\.layers 1 would put the value head of .*/reward on .*start=first_batch"),
    ):
        for load in (check_value_head, lambda c: make_critic(c, None)):
            with pytest.raises(UserError, match=message):
                load(config)


# ---- folders ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", [MEAN, BOUNDED, BINS], ids=["scalar with a bias", "bounded", "categorical"]
)
def test_a_saved_critic_says_what_it_is(
    tmp_path: Path, policy: str, one_process: DeviceMesh, head: tuple[str, ...]
) -> None:
    critic = randomized(make_critic(config_of(tmp_path, policy, *head), None))
    folder = tmp_path / "critic"
    save_network(critic, policy, folder)
    loads = [] if head is MEAN else [*head]
    config = config_of(tmp_path, policy, *loads, "trainer.strategy=fsdp", init=str(folder))
    check_value_head(config)
    for mesh in (None, one_process):
        again = make_critic(config, mesh)
        assert_same_weights(again, critic)
        # two networks' products may differ in the last bit, by where their weights lie
        assert values_of(again) == pytest.approx(values_of(critic), rel=1e-6)
    save_network(again, policy, tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    assert parameters_of(empty_value_model(str(folder), config.critic)) == parameters_of(
        critic.model
    )
    plain: Any = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
    assert torch.equal(plain.score.weight, critic.get_parameter("model.score.weight"))
    # without a config it is as the folder says
    bare = Critic(load_value_model(str(folder), dtype="float32", attn_implementation="auto"))
    assert_same_weights(bare, critic)
    assert values_of(bare) == pytest.approx(values_of(critic), rel=1e-6)


def test_a_plain_scalar_critic_is_saved_as_ever(tmp_path: Path, policy: str) -> None:
    save_network(make_critic(config_of(tmp_path, policy), None), policy, tmp_path / "critic")
    written = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert KEY not in written


def test_another_head_than_the_folders_is_one_error(
    tmp_path: Path, policy: str, reward_model: str
) -> None:
    save_network(
        make_critic(config_of(tmp_path, policy, *BOUNDED), None), policy, tmp_path / "bounded"
    )
    narrow = (*BOUNDED[:2], "critic.head.high=1")
    for folder, head, theirs, ours in (
        (reward_model, BINS, "scalar", r"categorical \(low -1, high 1, num_bins 3, support incl"),
        (reward_model, BOUNDED, "scalar", r"bounded \(low -2, high 2\)"),
        (str(tmp_path / "bounded"), BINS, r"bounded \(low -2, high 2\)", "categorical"),
        (str(tmp_path / "bounded"), narrow, r"bounded \(low -2, high 2\)", r"bounded .* high 1\)"),
        (str(tmp_path / "bounded"), (), r"bounded \(low -2, high 2\)", "scalar: set"),
    ):
        config = config_of(tmp_path, policy, *head, init=folder)
        message = rf"value head is {theirs}, and critic\.head is {ours}.*start=first_batch"
        for load in (check_value_head, lambda c: make_critic(c, None)):
            with pytest.raises(UserError, match=message):
                load(config)


def test_a_critic_of_another_target_is_one_error(
    tmp_path: Path, policy: str, reward_model: str
) -> None:
    """A reward model's score is no residual, and a text alone has no other responses."""
    residual, folder = ("critic.target=residual",), str(tmp_path / "residual")
    saved = randomized(make_critic(config_of(tmp_path, policy, *residual), None))
    save_network(saved, policy, tmp_path / "residual")
    again = make_critic(config_of(tmp_path, policy, *residual, init=folder), None)
    assert_same_weights(again, saved)
    assert again.head.describe() == "scalar of the residual"
    for path, own, message in (
        (folder, (), r"the residual, and .*target is return: set critic\.target=residual, or name"),
        (folder, (), r"critic\.head\.start=first_batch, which takes the backbone alone$"),
        (reward_model, residual, r"return, and critic\.target is residual: .*mean_reward=0, which"),
    ):
        config = config_of(tmp_path, policy, *own, init=path)
        for load in (check_value_head, lambda c: make_critic(c, None)):
            with pytest.raises(UserError, match=message):
                load(config)
    with pytest.raises(UserError, match=r"cannot be a reward model.* other responses"):
        load_value_model(folder, dtype="float32", attn_implementation="auto")
    zero = ("critic.head.start=mean_reward", "critic.head.mean_reward=0")
    named = f"critic.reward_model_path={reward_model}"
    begun = config_of(tmp_path, policy, *residual, *zero, named, init="reward_model")
    assert values_of(make_critic(begun, None)) == [0.0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("head", [(), BOUNDED], ids=["scalar", "bounded"])
@pytest.mark.parametrize("start", [MEAN, FIRST_BATCH], ids=["mean_reward", "first_batch"])
def test_a_saved_critic_does_not_lose_its_head_unasked(
    tmp_path: Path, policy: str, head: tuple[str, ...], start: tuple[str, ...]
) -> None:
    """As with the overlay of a method that starts its own critic's head at the mean reward."""
    critic = randomized(make_critic(config_of(tmp_path, policy, *head), None))
    folder = str(tmp_path / "critic")
    save_network(critic, policy, tmp_path / "critic")
    kind = "bounded" if head else "scalar"
    message = (
        rf"critic\.init .*/critic brings a trained value head, {kind}.*critic\.head\.start \w+ "
        r"would throw.*start=as_loaded; or .*init=reward_model critic\.reward_model_path=.*/critic$"
    )
    restarted = config_of(tmp_path, policy, *head, *start, init=folder)
    with pytest.raises(UserError, match=message):
        check_head_is_kept(restarted)
    check_head_is_kept(replace(restarted, algorithm=system_config("grpo").algorithm))
    kept = config_of(tmp_path, policy, *head, init=folder)
    check_head_is_kept(kept)
    again = make_critic(kept, None)
    assert_same_weights(again, critic)
    assert values_of(again) == pytest.approx(values_of(critic), rel=1e-6)
    asked = (*head, *start, f"critic.reward_model_path={folder}")
    backbone = config_of(tmp_path, policy, *asked, init="reward_model")
    check_head_is_kept(backbone)
    assert not make_critic(backbone, None).get_parameter("model.score.weight").any()
    check_head_is_kept(config_of(tmp_path, policy, *head, *start, init=policy))


def test_no_critic_of_several_loses_its_head_unasked(tmp_path: Path, policy: str) -> None:
    for name in ("0", "1"):
        save_network(make_critic(config_of(tmp_path, policy), None), policy, tmp_path / name)
    two = config_of(tmp_path, policy, *FIRST_BATCH, "critic.count=2", init=str(tmp_path))
    with pytest.raises(UserError, match=r"critic\.init .* brings a trained value head"):
        check_head_is_kept(two)


@pytest.mark.parametrize(
    "damage",
    [
        "bounded",
        {"kind": "cubic"},
        {"kind": "bounded", "low": 1.0, "high": 0.0},
        {"kind": "categorical", "low": 0.0, "high": 1.0, "num_bins": 9, "support": "midpoint"},
        {"kind": "bounded", "low": 0.0, "high": 1.0, "hook": "os.system"},
        {"target": "return of the group"},
    ],
)
def test_a_damaged_key_is_one_error(tmp_path: Path, policy: str, damage: Any) -> None:
    folder = tmp_path / "critic"
    save_network(make_critic(config_of(tmp_path, policy, *BOUNDED), None), policy, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), KEY: damage}))
    with pytest.raises(
        UserError, match=f"{KEY} in config.json does not describe a value head with 1 outputs"
    ):
        make_critic(config_of(tmp_path, policy, *BOUNDED, init=str(folder)), None)
