"""Kept rollouts are used again for exactly the weights that they were sampled from.

Real module, datamodule, Trainer and files; the sampler's rollouts carry the digest of the weights
that they were sampled from, which is compared whenever kept ones are used.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint

from tests.config.fits import fit_config
from tests.judged import judged_batch
from tests.poisoned import PoisonedModule
from tests.rollout_fixtures import make_rollouts
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedStream
from tests.systems import system_config
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.config import FitConfig, resolve
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.rollouts.source import RolloutSource
from vapo.runs.run_dirs import RunDir, identity_of
from vapo.system.progress import Progress
from vapo.training.datamodule import RolloutDataModule
from vapo.training.module import VapoModule
from vapo.types import IterationStart, Phase, RolloutBatch

NUM_ROLLOUTS, NUM_ITERATIONS = 8, 4
NAN = float("nan")
SKIPPED: dict[tuple[int, int | str], Any] = {(1, 0): ("actor", NAN)}
CPU = torch.device("cpu")
ROLLOUTS = make_rollouts(NUM_ROLLOUTS, vocab_size=30)


class Killed(Exception):
    pass


class Module(PoisonedModule):
    killed_in: int | None = None  # iteration, from 0
    rounding = 0.0  # of gradients, as of a device that sums in another order every time

    def training_step(self, minibatch: Any, batch_idx: int) -> dict[str, float]:
        if int(self.iteration) == self.killed_in:
            raise Killed
        return super().training_step(minibatch, batch_idx)

    def _update(self, name: str, *args: Any, **kwargs: Any) -> dict[str, float]:
        for parameter in getattr(self, name).parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 + self.rounding
        return super()._update(name, *args, **kwargs)


def weights_digest(module: VapoModule) -> float:
    """48 bits, which a float holds."""
    digest = hashlib.sha256()
    for parameter in module.actor.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return float(int.from_bytes(digest.digest()[:6], "big"))


class SourceThatSamples(RolloutSource):
    """Samples something else from other weights; knows what it has sampled and used again."""

    module: VapoModule
    sampled: list[int]
    reused: list[int]

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        collection: Any = self.collection
        collection.sample_batch = lambda i, phase: self._sample(i)
        batch, metrics = super().next_batch(start, last=last)
        if start.index not in self.sampled:
            self.reused.append(start.index)
        assert metrics["digest"] == weights_digest(self.module), "sampled from other weights"
        return batch, metrics

    def _sample(self, iteration: int) -> tuple[RolloutBatch, dict[str, float]]:
        self.sampled.append(iteration)
        digest = weights_digest(self.module)
        rollouts, verdicts = ROLLOUTS
        tokens = torch.Generator().manual_seed(int(digest) + iteration)
        drawn = [
            tuple(torch.randint(2, 30, (len(r.response_ids),), generator=tokens).tolist())
            for r in rollouts
        ]
        batch = judged_batch(
            [replace(r, response_ids=ids) for r, ids in zip(rollouts, drawn, strict=True)],
            verdicts,
            group_size=resolve(self.config).group_size,
            rewards=self.config.rewards,
            max_response_tokens=32,
        )
        return batch, {"digest": digest}


class Sampled:
    """Makes the rollouts of a session."""

    def __init__(self, config: FitConfig, kept: ResumeCache) -> None:
        self.config, self.kept = config, kept
        self.sampled: list[int] = []
        self.reused: list[int] = []

    def __call__(self, module: VapoModule) -> RolloutSource:
        engine = ScriptedEngine(ScriptedStream(lambda request: ""))
        collection: Any = RolloutCollection.__new__(RolloutCollection)
        collection.player = SimpleNamespace(sampler=engine, tokenizer=tiny_tokenizer())
        source = SourceThatSamples(self.config, collection, module.lineage, Progress(), self.kept)
        source.module, source.sampled, source.reused = module, self.sampled, self.reused
        return source


class Saving(Checkpoint):
    """As the run's own: after the iteration is counted; what was kept for it is removed."""

    def __init__(
        self, folder: Path, kept: ResumeCache, every_n: int, killed_at: int | None
    ) -> None:
        self.folder, self.kept = folder, kept
        self.every_n, self.killed_at = every_n, killed_at

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        iteration = int(pl_module.iteration)  # type: ignore[arg-type]
        if iteration % self.every_n:
            return
        trainer.save_checkpoint(self.folder / f"{iteration}.ckpt")
        self.kept.forget(first_kept=iteration)
        if iteration == self.killed_at:
            raise Killed


class Run:
    """Sessions of one run in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = save_tiny_folder(folder / "policy")

    def session(
        self,
        *overrides: str,
        resume: int | None = None,
        killed_in: int | None = None,
        killed_at: int | None = None,
        every_n: int = 1,
        plan: Mapping[tuple[int, int | str], Any] | None = None,
        rounding: float = 0.0,
    ) -> Sampled:
        """Train from checkpoint `resume`, or the start, to the end or until it is killed."""
        config = system_config(
            "vapo",
            f"actor.path={self.policy}",
            "critic.init=policy",
            "components.value_pretraining.enabled=false",
            "components.group_sampling.num_prompts=2",
            "components.group_sampling.group_size=4",
            f"training.num_iterations={NUM_ITERATIONS}",
            "training.minibatch_size=4",
            "actor.optimizer.lr=1e-3",
            "actor.optimizer.warmup_steps=0",
            *overrides,
        )
        module = Module(config, pad_id=0)
        module.killed_in, module.plan, module.rounding = killed_in, plan or {}, rounding
        prompts = [rollout.prompt for rollout in ROLLOUTS[0]]
        kept = ResumeCache(RunDir(self.folder, identity_of(config)), prompts)
        made = Sampled(config, kept)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=NUM_ITERATIONS,
            num_sanity_val_steps=0,
            logger=False,
            callbacks=[Saving(self.folder, kept, every_n, killed_at)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        path = None if resume is None else self.folder / f"{resume}.ckpt"
        try:
            datamodule = RolloutDataModule(config, made, progress=Progress())
            trainer.fit(module, datamodule, ckpt_path=path)
            assert killed_in is killed_at is None
        except Killed:
            pass
        self.module = module
        return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_killed_between_sampling_and_checkpoint(run: Run) -> None:
    assert run.session(killed_in=2).sampled == [0, 1, 2]
    again = run.session(resume=2)
    assert (again.reused, again.sampled) == ([2], [3])


@pytest.mark.slow
def test_all_iterations_since_the_checkpoint_are_trained_again_with_what_was_kept(
    run: Run,
) -> None:
    run.session(killed_in=3, every_n=9)
    again = run.session(every_n=9)
    assert (again.reused, again.sampled) == ([0, 1, 2, 3], [])


@pytest.mark.night  # by day from the latest: test_killed_between_sampling_and_checkpoint
def test_a_fallback_to_an_older_checkpoint(run: Run) -> None:
    """The rollouts of the iteration that is done again are gone, its weights come out the same."""
    run.session(killed_in=2)
    again = run.session(resume=1)
    assert (again.reused, again.sampled) == ([2], [1, 3])


@pytest.mark.night  # by day the name alone: test_another_config_is_another_name
@pytest.mark.parametrize(
    "change", ["actor.optimizer.lr=2e-3", "actor.optimizer.max_grad_norm=1e-3", "seed=1"]
)
def test_another_config_and_back_again(run: Run, change: str) -> None:
    """Weights trained by another config are not the run's, also where the config is again."""
    run.session(killed_in=2)
    assert run.session(change, resume=1, killed_at=2).reused == []
    assert run.session(resume=2).reused == []


@pytest.mark.slow
def test_an_update_that_was_skipped(run: Run) -> None:
    run.session(killed_in=2, plan=SKIPPED, every_n=2)
    assert run.session(resume=2, killed_in=3).reused == [2]
    assert run.session(killed_in=3).reused == []  # nothing is skipped now


@pytest.mark.night  # by day one that is not skipped again: test_an_update_that_was_skipped
def test_an_update_that_is_skipped_again(run: Run) -> None:
    run.session(killed_in=2, plan=SKIPPED, every_n=9)
    assert run.session(plan=SKIPPED, every_n=9).reused == [0, 1, 2]


@pytest.mark.night  # the names by day: test_one_bit_of_a_metric_is_another_name
def test_training_that_does_not_repeat_itself(run: Run) -> None:
    run.session(killed_in=2, every_n=9)
    assert run.session(rounding=1e-4, killed_in=2, every_n=9).reused == [0]


@pytest.mark.slow
def test_other_weights_in_the_models_folder(run: Run) -> None:
    run.session(killed_in=0)
    assert run.session(killed_in=0).reused == [0]
    other = tiny_model()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    save_tiny_folder(run.policy, other)
    assert run.session(killed_in=0).reused == []


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version(run: Run) -> None:
    run.session(killed_in=2)
    path = run.folder / "2.ckpt"
    contents = torch.load(path, weights_only=True)
    del contents["lineage"]
    torch.save(contents, path)
    assert run.session(resume=2).reused == []


# ---- the names themselves -------------------------------------------------------------------


def begun(tmp_path: Path, *overrides: str, device: torch.device = CPU) -> Lineage:
    folder = tmp_path / "policy"
    if not folder.exists():
        save_tiny_folder(folder)
    lineage = Lineage()
    config = fit_config(tmp_path, f"actor.path={folder}", *overrides)
    lineage.begin_session(config, device, loads_weights=True)
    return lineage


def test_only_an_update_of_the_actor_gives_its_weights_another_name(tmp_path: Path) -> None:
    lineage, other = begun(tmp_path), begun(tmp_path)
    first = lineage.weights
    assert other.weights == first
    lineage.add_minibatch({"critic/grad_norm": 1.0}, actor=False)
    assert lineage.weights == first
    for one in (lineage, other):
        one.add_minibatch({"actor/grad_norm": 1.0}, actor=True)
    assert first != lineage.weights != other.weights, "the critics differ, so their advantages do"


@pytest.mark.parametrize(
    "metrics", [{"a": 1.0 + 2**-52, "b": NAN}, {"a": 1.0}, {"a": 1.0, "b": 0.0}, {"b": 1.0}]
)
def test_one_bit_of_a_metric_is_another_name(tmp_path: Path, metrics: dict[str, float]) -> None:
    names = []
    for one in ({"a": 1.0, "b": NAN}, {"b": NAN, "a": 1.0}, metrics):
        lineage = begun(tmp_path)
        lineage.add_minibatch(one, actor=True)
        names.append(lineage.weights)
    assert names[0] == names[1] != names[2]


def test_another_config_is_another_name(tmp_path: Path) -> None:
    names = []
    for overrides in ([], [], ["actor.optimizer.lr=2e-3"]):
        lineage = begun(tmp_path, *overrides)
        lineage.add_minibatch({"a": 1.0}, actor=True)
        names.append(lineage.weights)
    assert names[0] == names[1] != names[2]


def test_a_folder_that_was_moved_away_and_a_copy_with_its_times_are_two(tmp_path: Path) -> None:
    """Times that were set by hand do not pass for the files' own."""
    folder = tmp_path / "policy"
    first, again = begun(tmp_path), begun(tmp_path)
    folder.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", folder)
    assert again.weights == first.weights != begun(tmp_path).weights


def test_what_the_arithmetic_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are a key that may change when a run is resumed, and they change sums."""
    names = set()
    for num in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num: num)
        lineage = begun(tmp_path)
        lineage.add_minibatch({"a": 1.0}, actor=True)
        names.add(lineage.weights)
    assert len(names) == 2


def test_off_the_cpu_only_a_checkpoint_is_known_again(tmp_path: Path) -> None:
    """A GPU may sum in another order: what is trained again has a name of its own."""
    sessions = [begun(tmp_path, device=torch.device("cuda")) for _ in range(2)]
    assert sessions[0].weights == sessions[1].weights, "the model's own"
    for lineage in sessions:
        lineage.add_minibatch({"a": 1.0}, actor=True)
    assert sessions[0].weights != sessions[1].weights
    resumed = Lineage()
    resumed.load_state_dict(sessions[0].state_dict())
    config = fit_config(tmp_path, f"actor.path={tmp_path / 'policy'}")
    resumed.begin_session(config, torch.device("cuda"), loads_weights=False)
    assert resumed.weights == sessions[0].weights


def test_value_pretraining_leaves_the_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Module.on_fit_start
    names = []

    def pretraining(self: Module) -> None:
        start(self)
        self.phase = Phase.VALUE_PRETRAINING
        names.append(self.lineage.weights)

    monkeypatch.setattr(Module, "on_fit_start", pretraining)
    run.session(killed_in=2)
    assert run.module.lineage.weights == names[0]
