"""The mean of the last policies' weights: what it is, and that the run's own come back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.config.test_validation import problem
from tests.systems import system_config
from tests.tiny_model import tiny_model
from vapo.config.networks import LoraConfig
from vapo.evaluation import EvaluationResult
from vapo.networks.actor_critic import Actor
from vapo.networks.lora import add_adapters, changing_names, whole_weights, with_weights
from vapo.runs.run_dirs import RunDir
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks import averaging
from vapo.training.callbacks.averaging import RunningMean, WeightAverage
from vapo.training.callbacks.prompt_scores import PromptScores
from vapo.types import IterationStart, Phase

LORA = LoraConfig(rank=2)


def network(lora: LoraConfig | None) -> Actor:
    model = tiny_model()
    if lora is not None:
        add_adapters(model, lora, seed=0)
    return Actor(model)


def move(actor: Actor, seed: int) -> None:
    """As an update does: every trained weight, at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def output(actor: Actor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = actor.model(torch.tensor([[2, 3, 4, 5]])).logits
    return logits


class Engine:
    """Remembers each push of weights."""

    def __init__(self) -> None:
        self.pushed: list[dict[str, Tensor]] = []

    def sync(self, weights: Any) -> None:
        self.pushed.append({name: tensor.clone() for name, tensor in weights})


class Run:
    """The callback in a run whose policies are moved at random; `logged` are its metrics."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None):
        self.actor, self.engine, self.logged = network(lora), Engine(), dict[str, float]()
        self.seen: list[Tensor] = []
        config = system_config("vapo", "training.num_iterations=5", "evaluation.average_policies=3")
        config.actor.lora = lora
        self.module: Any = averaging.VapoModule(config, pad_id=0)
        self.module.actor = self.actor
        collection = SimpleNamespace(
            prompts=SimpleNamespace(heldout=[]), player=SimpleNamespace(sampler=self.engine)
        )
        source = SimpleNamespace(collection=collection, engine_free=nullcontext)
        self.start = IterationStart(1, Phase.POLICY_OPTIMIZATION, 0, 0)
        monkeypatch.setattr(averaging, "datamodule_of", lambda _: SimpleNamespace(source=source))
        monkeypatch.setattr(averaging, "iteration_of", lambda _: SimpleNamespace(start=self.start))
        monkeypatch.setattr(averaging, "evaluate", self.evaluate)
        logger, scores = MagicMock(spec=RunLogger), MagicMock(spec=PromptScores)
        logger.log_metrics = lambda found, step: self.logged.update(found)
        progress = Progress(enabled=False)
        self.callback = WeightAverage(RunDir(folder), logger, progress, scores)

    def evaluate(self, *_: Any, **__: Any) -> EvaluationResult:
        self.seen.append(output(self.actor))
        metrics = {f"eval/avg_at_k{end}": 0.5 for end in ("", "_ci_low", "_ci_high")}
        return EvaluationResult(metrics, [], [], 1)

    def finish(self, iteration: int) -> None:
        self.start = IterationStart(iteration, Phase.POLICY_OPTIMIZATION, iteration - 1, 0)
        trainer = MagicMock(spec=L.Trainer, global_step=iteration)
        self.callback.on_train_epoch_end(trainer, self.module)

    def merged(self) -> dict[str, Tensor]:
        weights = averaging.actor_weights(self.module)
        return {name: tensor.detach().clone() for name, tensor in weights}


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "lora"])
def test_the_mean_is_scored_and_the_run_goes_on_with_its_own(
    lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five policies the last three. With LoRA the mean of the merged weights, no product of
    the matrices' means. Resumed from a checkpoint after the fourth."""
    run = Run(tmp_path, monkeypatch, lora)
    policies = []
    for iteration in range(1, 6):
        move(run.actor, iteration)
        policies.append(run.merged())
        before = {name: x.clone() for name, x in run.actor.state_dict().items()}
        run.finish(iteration)
        if iteration == 4:
            assert run.callback.running.count == 2
            saved = run.callback.state_dict()
            run.callback.running = RunningMean()
            run.callback.load_state_dict(saved)
    for name, tensor in run.actor.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    expected = {
        name: sum(policy[name].double() for policy in policies[2:]) / 3 for name in policies[0]
    }
    averaged, own = run.engine.pushed
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-6)
    assert all(torch.equal(own[name], tensor) for name, tensor in policies[-1].items())
    with_mean = network(None)
    with_mean.model.load_state_dict(averaged)
    torch.testing.assert_close(run.seen[0], output(with_mean), rtol=0, atol=1e-5)
    assert float((run.seen[0] - output(run.actor)).abs().max()) > 1e-3
    assert run.logged["average_policy/num_policies"] == 3
    assert run.callback.latest["average_policy/avg_at_k"] == 0.5
    assert run.callback.running == RunningMean(), "its memory is free again"


def test_lora_s_factors_averaged_would_be_another_policy() -> None:
    """What a mean of A and a mean of B would do: A B of two policies and their means differ."""
    actor = network(LORA)
    running, factors = RunningMean(), RunningMean()
    for seed in range(2):
        move(actor, seed)
        names = changing_names(actor.model)
        running.add(((n, x) for n, x in whole_weights(actor, LORA) if n in names), first=1)
        trained = ((n, p) for n, p in actor.model.named_parameters() if p.requires_grad)
        factors.add(trained, first=1)
    with with_weights(actor.model, running.mean()):
        right = output(actor)
    actor.model.load_state_dict(factors.mean(), strict=False)
    assert float((output(actor) - right).abs().max()) > 1e-3


def test_another_window_is_begun_where_a_run_is_resumed_with_more_iterations() -> None:
    running = RunningMean()
    running.add([("w", torch.tensor([1.0]))], first=3)
    running.add([("w", torch.tensor([3.0]))], first=3)
    assert (running.count, running.mean()["w"].item()) == (2, 2.0)
    running.add([("w", torch.tensor([7.0], dtype=torch.bfloat16))], first=8)
    assert (running.count, running.mean()["w"].item()) == (1, 7.0)


def test_weights_come_back_where_the_evaluation_fails() -> None:
    actor = network(LORA)
    move(actor, 1)
    before = {name: x.clone() for name, x in actor.state_dict().items()}
    zeros = {
        name: torch.zeros_like(x)
        for name, x in network(None).model.state_dict().items()
        if name in changing_names(actor.model)
    }
    with pytest.raises(ZeroDivisionError), with_weights(actor.model, zeros):
        raise ZeroDivisionError
    assert all(torch.equal(x, before[name]) for name, x in actor.state_dict().items())


def test_rules(tmp_path: Path) -> None:
    assert "export_average has no effect" in problem(tmp_path, "evaluation.export_average=true")
    sharded = ("evaluation.average_policies=2", "trainer.strategy=fsdp")
    assert "adds up whole weights in one process" in problem(tmp_path, *sharded)
