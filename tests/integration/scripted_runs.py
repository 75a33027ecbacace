"""Two iterations of the real training loop, with nothing around it: no engine, no records.

One process, networks of 20,000 numbers, responses and verdicts by chance: what `vapo fit` runs in
between is the shipped code, from the Trainer to the saved critic of value pretraining.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.rollouts.playing import InstantScorer
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig
from vapo.config.algorithm import AlgorithmConfig, BaselineConfig
from vapo.config.critic import CriticConfig, CriticPromptConfig, HeadConfig
from vapo.config.kinds import make, own_type
from vapo.environments.contract import Verdict
from vapo.networks.build import check_frozen
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.recording import Recording
from vapo.training.module import VapoModule
from vapo.training.parts import Inputs, Sampling, assemble_parts
from vapo.training.trainer import make_trainer
from vapo.types import FinishReason, Prompt, Rollout

BY_KIND = (HeadConfig, CriticPromptConfig, CriticConfig, BaselineConfig, AlgorithmConfig)
NUM_TOKENS = 30  # of the tiny vocabulary, special tokens left out


class ScriptedSampler:
    """Responses of random tokens, the longest of them cut; log-probs of about a flat policy."""

    end_ids = frozenset([1])

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[ScriptedTurns]:
        yield ScriptedTurns(settings.max_response_tokens, seed)

    def sync(self, weights: Any) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


class ScriptedTurns:
    """See `TurnStream`: a response is a function of the seed, its prompt and sample."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self.requests: list[TurnRequest] = []

    @property
    def num_open(self) -> int:
        return len(self.requests)

    def submit(self, request: TurnRequest) -> None:
        self.requests.append(request)

    def step(self) -> list[SampledTurn]:
        requests, self.requests = self.requests, []
        return [self.turn(request) for request in requests]

    def forget(self, key: tuple[int, int]) -> None: ...

    def turn(self, request: TurnRequest) -> SampledTurn:
        draw = random.Random(f"{self.seed}, {request.key}")
        length = self.most if request.key[1] % 4 == 3 else draw.randint(1, self.most - 1)
        length = min(length, request.max_tokens)
        ids = tuple(draw.randrange(2, NUM_TOKENS) for _ in range(length))
        logprobs = tuple(-3.6 + draw.uniform(-0.5, 0.5) for _ in ids)
        return SampledTurn(request, ids, logprobs, has_ended=length < self.most)


class ScriptedScorer(InstantScorer):
    """Right by chance, more often for some prompts than for others; never when cut."""

    def __init__(self, rewards: Any) -> None:
        super().__init__()
        self.rewards = rewards

    def verdicts(self, rollouts: Sequence[Rollout], **_: Any) -> list[Verdict]:
        verdicts = []
        for rollout in rollouts:
            draw = random.Random(rollout.response_text)
            share = 0.2 + 0.15 * (int(rollout.prompt.prompt_id) % 5)
            is_correct = rollout.finish_reason is FinishReason.STOP and draw.random() < share
            reward = self.rewards.correct if is_correct else self.rewards.incorrect
            verdicts.append(Verdict(is_correct, reward))
        return verdicts


class Notebook(RunLogger):
    """A logger without a store: keeps what it is given, each minibatch's and each iteration's."""

    def __init__(self) -> None:
        Logger.__init__(self)
        self.logged: list[dict[str, Any]] = []

    name = version = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.logged.append(dict(metrics))

    def finalize(self, status: str = "success") -> None: ...


def scripted_prompts(num: int = 16) -> PromptSplit:
    made = [Prompt(str(i), f"a{i}", (12, 2 + i % 10), str(i % 10)) for i in range(num)]
    return PromptSplit(TrainingSet.of(made), [], PromptReport(num, 0, 0, 0))


def with_values(block: Any, values: Mapping[str, Any]) -> Any:
    """The block with other values by their dotted keys, in the types of their kinds.

    As `load_config` would make it, which parses and checks for tenths of a second.
    """
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own |= {name: with_values(getattr(block, name), rest) for name, rest in nested.items()}
    base = next((kind for kind in BY_KIND if isinstance(block, kind)), None)
    if base is None:
        return dataclasses.replace(block, **own)
    chosen = vars(block) | own
    known = {field.name for field in dataclasses.fields(own_type(base, chosen))}
    return make(base, **{name: value for name, value in chosen.items() if name in known})


def train(config: FitConfig, folder: Path, notebook: Notebook | None = None) -> VapoModule:
    """Train all iterations of the config, as `vapo fit` does; the trained module.

    With a notebook, their metrics are recorded there.
    """
    torch.manual_seed(0)
    progress, tokenizer = Progress(enabled=False), tiny_tokenizer()
    check_frozen(config)
    module = VapoModule(config, pad_id=0)
    inputs = Inputs(tokenizer, with_critic_prompts(scripted_prompts(), config, tokenizer))
    scorer = ScriptedScorer(config.rewards)
    parts = assemble_parts(
        module,
        Sampling(config, inputs, scorer, progress, make_sampler=lambda module: ScriptedSampler()),
        progress=progress,
        critic_dir=folder / "critic",
    )
    callbacks = [*parts.callbacks, Checkpoint()]  # else Lightning writes checkpoints itself
    if notebook is not None:
        callbacks.append(Recording(notebook, progress))
    trainer = make_trainer(parts, callbacks, notebook or Notebook())
    with closing(parts.datamodule):
        trainer.fit(module, parts.datamodule)
    return module


def weights(module: VapoModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}
