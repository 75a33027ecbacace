"""A run through the real module, datamodule, Trainer and callbacks, of made-up rollouts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from tests.diagnostics.value_page.reading import page_json
from tests.poisoned import Notebook, PoisonedModule, fixed_rollouts
from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from vapo.system.progress import Progress
from vapo.training.callbacks.diagnostics import DiagnosticTables, ValuePages
from vapo.training.callbacks.value_pretraining import ValuePretraining
from vapo.training.minibatches import Microbatch
from vapo.training.module import VapoModule
from vapo.training.parts import num_pretraining_iterations
from vapo.types import EvaluatedBatch, Phase, RolloutBatch

SMALL = (
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=4",
    "training.minibatch_size=8",
    "training.microbatch_tokens=60",
    "trainer.accelerator=cpu",
    "value_pages.num_groups=4",
)


class Texts(Notebook):
    """What would be artifacts of the run."""

    run_id, experiment_id, is_resumed = "run", "1", False

    def __init__(self) -> None:
        super().__init__()
        self.tags = {}
        self.texts: dict[str, str] = {}

    def log_text(self, text: str, artifact_file: str) -> None:
        self.texts[artifact_file] = text


class Watching(Callback):
    """What is alive at the end of each iteration, and the values from before its update."""

    def __init__(self) -> None:
        self.old_values: dict[int, torch.Tensor] = {}
        self.masks: list[weakref.ref[torch.Tensor]] = []  # in the batches of all stages
        self.cut_values: list[weakref.ref[torch.Tensor]] = []
        self.num_batches: list[int] = []  # of iterations before, when values are asked for
        self.num_cut: list[int] = []  # micro-batches, when the iteration ends

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.num_cut.append(num_alive(self.cut_values))


def num_alive(references: Sequence[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


class WatchedModule(PoisonedModule):
    watching: Watching

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        watching = self.watching
        watching.num_batches.append(num_alive(watching.masks))
        evaluated = super().add_logprobs_and_values(batch, phase, with_entropy=with_entropy)
        watching.masks.append(weakref.ref(evaluated.response_mask))
        if evaluated.old_values is not None:
            watching.old_values[self.start.number] = evaluated.old_values.clone()
        return evaluated

    def _value_forward(self, micro: Microbatch) -> dict[str, torch.Tensor]:
        assert micro.rows.old_values is not None
        self.watching.cut_values.append(weakref.ref(micro.rows.old_values))
        return super()._value_forward(micro)


def train(
    folder: Path, *overrides: str, system: str = "vapo", plan: Mapping[Any, Any] | None = None
) -> tuple[dict[str, dict[str, Any]], Watching, VapoModule]:
    """The pages by iteration, what was seen, and the module at the end."""
    config = system_config(system, *SMALL, *overrides)
    torch.set_num_threads(1)
    module = WatchedModule(config, pad_id=0)
    module.plan = plan or {}
    watching = module.watching = Watching()
    progress, texts = Progress(enabled=False), Texts()
    datamodule = fixed_rollouts(config, progress)
    num_pretraining = num_pretraining_iterations(module)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=num_pretraining + config.training.num_iterations,
        callbacks=[
            ValuePretraining(
                config.components.value_pretraining,
                num_iterations=num_pretraining,
                critic_dir=folder / "critic",
                progress=progress,
            ),
            ValuePages(texts, tiny_tokenizer(), progress),
            DiagnosticTables(texts),
            watching,
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule)
    pages = {
        name.removeprefix("value_pages/").removesuffix(".html"): page_json(text)
        for name, text in texts.texts.items()
        if name.startswith("value_pages/")
    }
    return pages, watching, module
