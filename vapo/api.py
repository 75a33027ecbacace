"""The Python interface: the commands as functions, which return their results.

`import vapo` gives all of them; torch is loaded when the first one is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.commands.early_checks import checked_command
from vapo.commands.python_values import Overrides, as_overrides
from vapo.config import FitConfig, loading
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.system.process import is_main_process

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    from vapo.studies.inspection.report import Inspection
    from vapo.training.parts import TrainingParts

PathLike = str | Path


def load_config(*files: PathLike, overrides: Overrides = ()) -> FitConfig:
    """Load and check a config from YAML files and overrides. Later ones win.

    Args:
        files: the files, as for `--config`; a file may extend others.
        overrides: `["seed=3", "actor.optimizer.lr=1e-6"]`, or a mapping of dotted keys to values.
            In a mapping a text is the value itself; in a list it is read as in the shell. The
            value of a key that names a function, as `rewards.function`, may be the function.

    Raises:
        UserError: something in them is wrong; names the key and its place.
    """
    return loading.load_config(FitConfig, [Path(file) for file in files], as_overrides(overrides))


@dataclass(frozen=True)
class Run:
    """A finished run, as the files of its folder describe it.

    Attributes:
        folder: config, checkpoints, the pretrained critic and `summary.json`.
        summary: what `summary.json` says; `score_before` and `score_after` are held-out avg@k.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def score_before(self) -> float | None:
        """The held-out score (avg@k) of the policy that the run began with."""
        return self.summary["score_before"]

    @property
    def score_after(self) -> float | None:
        """The held-out score (avg@k) in the run's last evaluation.

        That is after the last iteration, unless the run ended itself before. The score is None if
        it was not measured or is not a finite number.
        """
        return self.summary["score_after"]

    @property
    def config(self) -> FitConfig:
        """The config of the run, with all interpolations resolved."""
        path = self.folder / "config.yaml"
        return loading.from_yaml(FitConfig, path.read_text(encoding="utf-8"), source=str(path))

    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Return the run's metrics as MLflow has them, by the keys of docs/metrics.md.

        Each metric is a list of pairs (step, value). The policy begins at step 0, and value
        pretraining is below it; a run of an earlier version counts from its first minibatch.
        """
        from vapo.tracking.known_stores import check_known
        from vapo.tracking.metric_names import recorded_metrics
        from vapo.tracking.stores import locate_store

        check_known(self._tracking_uri, named_by=self.folder, how="MLFLOW_TRACKING_URI=")
        return recorded_metrics(locate_store(self._tracking_uri), self.summary["mlflow_run_id"])

    def value_pages(self) -> list[Path]:
        """Return the paths of the run's value pages (HTML files), in the order of their names.

        The list is empty if the run's store has no local folder for them.
        """
        from vapo.tracking.stores import locate_store

        store = locate_store(self._tracking_uri)
        folder = store.artifact_folder(self.summary["mlflow_run_id"], "value_pages")
        return [] if folder is None else sorted(folder.glob("*.html"))

    @property
    def _tracking_uri(self) -> str:
        return str(self.summary["tracking_uri"])


def open_run(folder: PathLike) -> Run:
    """Open a finished run by its folder.

    Raises:
        UserError: the folder has no summary.
    """
    path = Path(folder) / "summary.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a run writes it when it ends")
    return Run(Path(folder), json.loads(path.read_text(encoding="utf-8")))


def fit(
    config: FitConfig | None = None,
    *,
    model: PathLike | None = None,
    dataset: Any = None,
    reward: str | Callable[..., Any] | None = None,
    heldout: Any = None,
    overrides: Overrides = (),
    ckpt_path: str | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    quiet: bool = False,
) -> Run:
    """Train as `vapo fit` does: evaluation, checkpoints, value pages and MLflow included.

    Give either a config, or a model, a dataset and a reward. For the latter a suitable config is
    chosen (docs/python.md).

    Args:
        config: the result of `load_config`.
        model: a Hugging Face folder or hub id.
        dataset: a file, a folder or hub id of `datasets`; or a `datasets` object, a DataFrame, or
            rows as mappings.
        reward: the name of a verifier, or a function: `f(response_text, answer, metadata)`, or one
            that was written for TRL or verl.
        heldout: held-out prompts, like `dataset`; if None, part of the dataset is held out.
        overrides: changes of the chosen config, as for `load_config`; only with a model.
        ckpt_path: `last`, `best` or a path: the checkpoint to resume from.
        callbacks: Lightning callbacks of your own; their hooks run after ours and before the
            checkpoint of the iteration is written, which keeps their state.
        loggers: Lightning loggers that get the metrics in addition to MLflow.
        quiet: print nothing but warnings.

    Raises:
        UserError: config, data or machine do not fit; nothing has been trained then.
        StoppedRun: the run ended itself; its summary has been written.
    """
    if config is None:
        if model is None or dataset is None or reward is None:
            raise UserError("vapo.fit needs a config, or model=, dataset= and reward=")
        from vapo.commands.own_model import own_model

        override_list = as_overrides(overrides)
        composed = own_model(
            os.fspath(model), dataset, reward, heldout=heldout, overrides=override_list
        )
        if not quiet and is_main_process():
            say(f"vapo fit: {composed.line}", file=sys.stderr)
        config = loading.load_config(FitConfig, composed.files, composed.overrides)
    elif any(argument is not None for argument in (model, dataset, reward, heldout)) or overrides:
        raise UserError(
            "vapo.fit: a config has its model, data, reward and overrides: leave out either it or "
            "model=, dataset=, reward=, heldout= and overrides="
        )
    with checked_command("fit", config, {"ckpt_path": ckpt_path}):
        from vapo.commands import fit as command

        folder = command.run(
            config, ckpt_path=ckpt_path, callbacks=callbacks, loggers=loggers, quiet=quiet
        )
    return open_run(folder)


def validate(
    config: FitConfig,
    *,
    ckpt_path: str | None = None,
    value_page: PathLike | None = None,
    value_truth: int | None = None,
) -> dict[str, float]:
    """Score a policy on held-out prompts, as `vapo validate` does; return the metrics by name.

    Args:
        value_page: where to write a page that shows the critic's values.
        value_truth: how many continuations to sample of each measured prefix; their figures are in
            the result.

    Raises:
        UserError: config, data or machine do not fit.
    """
    page = None if value_page is None else str(value_page)
    arguments = {"ckpt_path": ckpt_path, "value_page": page, "value_truth": value_truth}
    with checked_command("validate", config, arguments):
        from vapo.commands import validate as command

        return command.run(config, ckpt_path=ckpt_path, value_page=page, value_truth=value_truth)


def run_sweep(
    *files: PathLike,
    grid: PathLike,
    seeds: Sequence[int],
    sweep_dir: PathLike,
    overrides: Overrides = (),
    jobs: int = 1,
) -> Path:
    """Run a grid of configs with every seed, as `vapo sweep` does; return the report's folder.

    Each run is a process of its own. A second call runs only what is missing. The folder has
    `table.md`, `table.csv`, `report.html` and the figures.

    Args:
        files: the config files that every row begins with, as for `--config`.
        jobs: the number of runs at a time.

    Raises:
        UserError: the grid or a row is wrong; or a run failed, which is raised at the end.
    """
    from vapo.commands import sweep as command

    command.run(
        config=[Path(file) for file in files],
        grid=Path(grid),
        seeds=seeds,
        overrides=as_overrides(overrides),
        jobs=jobs,
        sweep_dir=Path(sweep_dir),
    )
    return Path(sweep_dir) / "report"


def report(
    *,
    sweep: str | None = None,
    runs: str | Sequence[str] = (),
    experiment: str | None = None,
    sweep_dir: PathLike | None = None,
    run_dirs: Sequence[PathLike] = (),
    tracking_uri: str | None = None,
    output_dir: PathLike | None = None,
) -> Path:
    """Write table and figures of recorded runs, as `vapo report` does; return the folder.

    Args:
        sweep: a sweep's id. Exactly one of this and the next four must be given.
        runs: MLflow run ids.
        experiment: the name of an experiment.
        sweep_dir: a sweep's folder.
        run_dirs: folders of runs; the others are compared with the first one's row.
        tracking_uri: the MLflow store. None means the store that the folders name, or mlruns
            without a folder.
        output_dir: where to write. None means the folder `report` in the sweep's folder, or
            runs/report without `sweep_dir`.

    Raises:
        UserError: there is no such folder, run, experiment or store, or not exactly one is given.
    """
    from vapo.commands import report as command

    if sum(map(bool, (sweep, runs, experiment, sweep_dir, run_dirs))) != 1:
        names = "sweep=, runs=, experiment=, sweep_dir=, run_dirs="
        raise UserError(f"vapo.report needs one of {names}")
    return command.run(
        sweep=sweep,
        runs=(runs if isinstance(runs, str) else ",".join(runs)) or None,
        experiment=experiment,
        folders=[Path(folder) for folder in (*run_dirs, sweep_dir) if folder is not None],
        tracking_uri=tracking_uri,
        output_dir=None if output_dir is None else Path(output_dir),
    )


def inspect(
    rollouts: Any,
    *,
    policy: str | None = None,
    critic: str | None = None,
    value_truth: int | None = None,
    verifier: str | None = None,
    rewards: Sequence[str] = (),
    gamma: float = 1.0,
    sampling: Sequence[str] = (),
    output: PathLike | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Inspection:
    """Measure what a critic knows from rollouts of any framework, as `vapo inspect` does.

    Args:
        rollouts: a path, several paths, a DataFrame, a `datasets` object, or rows as mappings
            (docs/inspect.md).
        policy: the model that sampled the rollouts; its tokenizer reads the texts.
        critic: the folder of a critic, whose values are computed.
        value_truth: how many continuations to sample of each measured prefix; needs the policy.
        verifier: the verifier that judges continuations.
        rewards: the columns whose sum is the reward.
        gamma: the discount with which the critic was trained.
        sampling: overrides of a config for continuations, as `rollouts.temperature=0.7`.
        output: where to write the page (.html), the figures (.json), or the rollouts for `vapo
            critics` (.parquet).
        chat_template_kwargs: variables that the policy's chat template had when messages were
            prompts, as `{"enable_thinking": False}`.

    Raises:
        UserError: there is no such file or folder, its form is unknown, or options do not fit
            together.
    """
    from vapo.commands.inspecting import inspect_rollouts, write_inspection

    is_path = isinstance(rollouts, (str, Path))
    output_paths = [] if output is None else [Path(output)]
    inspection = inspect_rollouts(
        rollouts,
        name=str(rollouts) if is_path else type(rollouts).__name__,
        policy=policy,
        critic=critic,
        value_truth=value_truth,
        verifier=verifier,
        rewards=rewards,
        gamma=gamma,
        sampling=sampling,
        output=output_paths,
        chat_template_kwargs=chat_template_kwargs,
    )
    for path in output_paths:
        write_inspection(inspection, path)
    return inspection


@contextmanager
def training_parts(config: FitConfig) -> Iterator[TrainingParts]:
    """Make the module, data and callbacks of a config, for a Lightning Trainer of your own.

    Nothing is recorded, evaluated or checkpointed unless you add it. Use it as

        with vapo.training_parts(config) as parts:
            trainer = L.Trainer(**parts.trainer_options, callbacks=[*parts.callbacks, MyOwn()])
            trainer.fit(parts.module, parts.datamodule)

    Verifier processes and the sampling engine end with the context.

    Raises:
        UserError: config, data or machine do not fit.
    """
    with checked_command("fit", config, {"ckpt_path": None}):
        from vapo.commands.fit import checked_inputs
        from vapo.rewards.scorer import make_scorer
        from vapo.system.progress import Progress
        from vapo.training.parts import Sampling, assemble_parts, module_of

        inputs = checked_inputs(config)
        with Progress(live=False) as progress, make_scorer(config) as scorer:
            progress.note(inputs.prompts.report.describe())
            parts = assemble_parts(
                module_of(config, inputs),
                Sampling(config, inputs, scorer, progress),
                progress=progress,
                critic_dir=Path(config.output_dir) / "pretrained_critic",
                stored=inputs.stored,
            )
            with closing(parts.datamodule):
                yield parts
