"""Rules between keys: the message names the keys, the numbers, the fix and the place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.config.fits import fit_config, write
from vapo.config import RewardModelConfig, SftConfig
from vapo.config.loading import load_config
from vapo.config.validation import RULES
from vapo.errors import UserError
from vapo.system.libraries import pick_device

CRITIC_FREE = (
    "components.value_pretraining.enabled=false",
    "components.decoupled_gae.enabled=false",
    "components.length_adaptive_gae.enabled=false",
)


def problem(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        fit_config(folder, *overrides)
    message = str(caught.value)
    assert message.startswith("command line: ")
    return message.removeprefix("command line: ")


@pytest.mark.parametrize("estimator", ["group_relative", "leave_one_out"])
@pytest.mark.parametrize(
    "single",
    ["components.group_sampling.group_size=1", "components.group_sampling.enabled=false"],
)
def test_group_estimators_need_groups(tmp_path: Path, estimator: str, single: str) -> None:
    chosen = f"algorithm.advantage_estimator={estimator}"
    message = problem(tmp_path, chosen, single, *CRITIC_FREE)
    assert estimator in message
    assert "components.group_sampling.group_size" in message
    assert "components.group_sampling.enabled" in message
    fit_config(tmp_path, chosen, *CRITIC_FREE, "components.group_sampling.group_size=2")
    fit_config(tmp_path, single)


@pytest.mark.parametrize("switched_off", CRITIC_FREE)
def test_critic_free_estimators_reject_components_of_the_critic(
    tmp_path: Path, switched_off: str
) -> None:
    chosen = "algorithm.advantage_estimator=group_relative"
    others = [switch for switch in CRITIC_FREE if switch != switched_off]
    message = problem(tmp_path, chosen, *others)
    assert message.endswith(f"set {switched_off}")
    assert problem(tmp_path, chosen).endswith("set " + ", ".join(CRITIC_FREE))
    message = problem(tmp_path, chosen, *CRITIC_FREE, "critic.value_clip=0.2")
    assert "critic.value_clip has no effect" in message


def test_critic_from_a_reward_model_needs_one(tmp_path: Path) -> None:
    assert "critic.reward_model_path" in problem(tmp_path, "critic.init=reward_model")
    fit_config(tmp_path, "critic.init=reward_model", "critic.reward_model_path=rm")
    fit_config(tmp_path, "critic.init=runs/critic")
    fit_config(
        tmp_path,
        "critic.init=reward_model",
        "algorithm.advantage_estimator=leave_one_out",
        *CRITIC_FREE,
    )


def test_k1_as_a_loss_term_is_refused(tmp_path: Path) -> None:
    """Whether the coefficient is set already or comes later: its gradient is noise around 0."""
    loss = ["algorithm.kl.estimator=k1", "algorithm.kl.placement=loss"]
    for overrides in (loss, loss[:1], [*loss, "algorithm.kl.coef=0.04"]):
        message = problem(tmp_path, *overrides)
        assert "algorithm.kl.estimator k1" in message
        assert "expected gradient" in message
        assert "algorithm.kl.estimator=k2 or k3" in message
        assert "algorithm.kl.placement=reward" in message
    fit_config(tmp_path, loss[0], "algorithm.kl.placement=reward", "algorithm.kl.coef=0.04")
    for estimator in ("k2", "k3"):
        fit_config(tmp_path, f"algorithm.kl.estimator={estimator}", "algorithm.kl.coef=0.04")


def test_pretraining_range(tmp_path: Path) -> None:
    overrides = (
        "components.value_pretraining.num_iterations=3",
        "components.value_pretraining.min_iterations=4",
        "components.value_pretraining.stop_value_loss=0.1",
    )
    assert "min_iterations 4 is above" in problem(tmp_path, *overrides)
    fit_config(tmp_path, *overrides, CRITIC_FREE[0])
    fit_config(tmp_path, overrides[0], "components.value_pretraining.min_iterations=3")
    fit_config(tmp_path, *overrides[:2])  # without a stop rule it means nothing


def test_minibatches_divide_the_iteration(tmp_path: Path) -> None:
    group = (
        "components.group_sampling.num_prompts=32",
        "components.group_sampling.group_size=8",
    )
    message = problem(tmp_path, *group, "training.minibatch_size=100")
    assert "100 does not divide the 256 responses of an iteration (32 prompts x 8)" in message
    assert message.endswith("is 64")
    message = problem(tmp_path, *group, "training.minibatch_size=512")
    assert message.endswith("is 256")
    off = "components.group_sampling.enabled=false"
    assert "(256 prompts x 1)" in problem(tmp_path, *group, off, "training.minibatch_size=100")
    fit_config(tmp_path, *group, "training.minibatch_size=64")


@pytest.mark.parametrize("name", ["sharded_checkpoints", "reduce_every_microbatch", "cpu_offload"])
def test_options_of_shards_need_shards(tmp_path: Path, name: str) -> None:
    on = f"trainer.{name}=true"
    message = problem(tmp_path, on)
    assert message == (
        f"trainer.{name} has no effect without trainer.strategy=fsdp: set that, or "
        f"trainer.{name}=false"
    )
    fit_config(tmp_path, on, "trainer.strategy=fsdp")


def test_offload_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = ("trainer.cpu_offload=true", "trainer.strategy=fsdp")
    message = problem(tmp_path, *on, "trainer.accelerator=cpu")
    assert message == (
        "trainer.cpu_offload has no effect with trainer.accelerator=cpu: set "
        "trainer.cpu_offload=false"
    )
    trainer = fit_config(tmp_path, *on).trainer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cpu_offload needs a GPU, but torch sees none"):
        pick_device(trainer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device(trainer).type == "cuda"


def test_ranks(tmp_path: Path) -> None:
    assert "trainer.strategy=fsdp" in problem(tmp_path, "trainer.devices=2")
    several = ("trainer.strategy=fsdp", "trainer.devices=2", "trainer.num_nodes=3")
    message = problem(tmp_path, *several)
    assert "components.group_sampling.num_prompts 512" in message
    assert message.endswith("a multiple of 6")
    prompts = "components.group_sampling.num_prompts=6"
    sizes = ("components.group_sampling.group_size=8", "training.minibatch_size=16")
    assert "training.minibatch_size 16" in problem(tmp_path, *several, prompts, *sizes)
    fit_config(tmp_path, *several, prompts, *sizes[:1], "training.minibatch_size=24")
    # Off: every response has its own prompt, so there are prompts enough to share.
    fit_config(
        tmp_path,
        *several,
        "components.group_sampling.enabled=false",
        "components.group_sampling.num_prompts=3",
        sizes[0],
        "training.minibatch_size=24",
    )


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.prompt_template=Solve {problem}"], ["data.prompt_template", "{prompt}"]),
        (["data.system_prompt=Think."], ["data.system_prompt", "data.chat_template=true"]),
        (["data.train.kind=procedural"], ["data.train.kind procedural needs data.train."]),
        (["data.train.kind=reasoning_gym", "data.train.task=x"], ["data.train.num_examples"]),
        (["data.heldout.kind=jsonl"], ["data.heldout.kind jsonl needs data.heldout.path"]),
        (["rewards.verifier=regex"], ["rewards.verifier regex needs rewards.pattern"]),
        (["rewards.verifier=regex", "rewards.pattern=(a"], ["not a regular expression"]),
        (
            ["rewards.verifier=regex", f"rewards.pattern={'(' * 5000}"],
            ["rewards.pattern '(((", "nested"],
        ),
        (
            ["rewards.verifier=regex", "rewards.pattern=(a{99999999999999999999})"],
            ["rewards.pattern", "too large"],
        ),
        (["rewards.verifier=regex", "rewards.pattern=a"], ["needs a group"]),
        (["rewards.verifier=python"], ["needs rewards.function"]),
        (["rewards.verifier=python", "rewards.function=a.b"], ["package.module:function"]),
        (["rewards.verifier=reward_model"], ["needs rewards.reward_model_path"]),
        (["rewards.correct=-1"], ["rewards.correct -1 must be above rewards.incorrect -1"]),
        (
            ["rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=1024"],
            ["cache_tokens 1024 must be below rollouts.max_response_tokens 1024"],
        ),
    ],
)
def test_data_and_rewards(tmp_path: Path, overrides: list[str], parts: list[str]) -> None:
    message = problem(tmp_path, *overrides)
    assert all(part in message for part in parts), message


def test_data_and_rewards_that_fit(tmp_path: Path) -> None:
    fit_config(tmp_path, "rewards.verifier=regex", "rewards.pattern=(a)")
    fit_config(tmp_path, "rewards.verifier=python", "rewards.function=a.b:c")
    fit_config(tmp_path, "data.system_prompt=Think.", "data.chat_template=true")
    fit_config(tmp_path, "rewards.overlong.cache_tokens=9999")
    fit_config(
        tmp_path, "rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=1023"
    )


def test_place_of_a_problem_is_the_last_written_of_its_keys(tmp_path: Path) -> None:
    first = write(tmp_path, "export_dir: out\ndata:\n  train: {path: x.jsonl}\n", "first.yaml")
    second = write(tmp_path, "rewards:\n  verifier: regex\n", "second.yaml")
    with pytest.raises(UserError, match=r"second\.yaml:2: rewards\.verifier regex needs"):
        load_config(SftConfig, [first, second], [])
    fewer = write(tmp_path, "rollouts: {max_response_tokens: 100}", "fewer.yaml")
    punished = "rewards: {overlong: {soft_punishment: true,\n  cache_tokens: 200}}"
    ramp = write(tmp_path, punished, "ramp.yaml")
    with pytest.raises(UserError, match=r"ramp\.yaml:2: "):
        load_config(SftConfig, [first, fewer, ramp], [])
    with pytest.raises(UserError, match=r"fewer\.yaml:1: "):
        load_config(SftConfig, [first, ramp, fewer], [])
    with pytest.raises(UserError, match=r"^data\.train\.kind jsonl needs data\.train\.path: "):
        load_config(SftConfig, [], ["export_dir=out"])


@pytest.mark.parametrize("schema", [SftConfig, RewardModelConfig])
def test_commands_of_one_process_say_so(schema: type) -> None:
    overrides = ["export_dir=out", "data.train.path=x.jsonl"]
    if schema is RewardModelConfig:
        overrides.append("policy_path=policy")
    load_config(schema, [], overrides)
    with pytest.raises(UserError, match=r"^command line: .*one process"):
        load_config(schema, [], [*overrides, "trainer.devices=2"])


def test_every_rule_belongs_to_a_schema() -> None:
    assert {schema.__name__ for schema in RULES} == {
        "FitConfig",
        "SftConfig",
        "RewardModelConfig",
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollouts.vllm.dtype=bfloat16"],
            "unknown key 'rollouts.vllm' with rollouts.engine 'transformers': it is a key of vllm",
        ),
        (
            ["rollouts.engine=vllm", "rollouts.servers.urls=http://a:1"],
            "with rollouts.engine 'vllm': it is a key of vllm_server",
        ),
        (["rollouts.engine=vllm", "rollouts.vllm.mode=server"], "rollouts.engine"),
        (
            ["rollouts.engine=vllm", "rollouts.vllm.server_urls=http://a:1"],
            "rollouts.servers.urls",
        ),
        (
            ["rollouts.engine=vllm_server", "rollouts.servers.urls='http://a:1, gpu2'"],
            "'gpu2' is not like http://gpu2:8100",
        ),
        (
            ["rollouts.engine=vllm", "rollouts.vllm.tensor_parallel_size=2"],
            "does not divide trainer.devices 1",
        ),
        (["rollouts.engine=vllm", "rollouts.temperature=0.001"], "below 0.01"),
        (["rollouts.engine=vllm", "evaluation.temperature=0.001"], "below 0.01"),
    ],
)
def test_engine_options_of_another_kind_are_unknown(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    assert said in problem(tmp_path, *overrides)


def test_servers_have_addresses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollouts\.servers\.urls must be set"):
        fit_config(tmp_path, "rollouts.engine=vllm_server")


@pytest.mark.parametrize(
    "urls",
    ["http://me:pa55word@gpu2:81x", "me:pa55word@gpu2", "http://me:pa5,5word@gpu2:80"],
)
def test_an_error_on_the_servers_addresses_shows_no_password(tmp_path: Path, urls: str) -> None:
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, "rollouts.engine=vllm_server", f"rollouts.servers.urls='{urls}'")
    assert "rollouts.servers.urls has a user or password in it" in str(caught.value)
    assert "pa5" not in str(caught.value)
    assert "5word" not in str(caught.value)
