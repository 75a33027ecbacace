"""Logs metrics to CSV files and to Weights & Biases in addition to MLflow, by Lightning's loggers.

MLflow stays the record: if one of these loggers fails, the run says so once and continues without
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.delivery import one_line

WANDB = "wandb"
_CSV, _WANDB = "tracking.also: csv", "tracking.also: wandb"
# W&B would send the command's arguments, in which a URI may have a password, and the output.
_SETTINGS = {"x_disable_meta": True, "console": "off", "save_code": False}


def check_also(tracking: TrackingConfig) -> None:
    """Check that the packages and keys which `tracking.also` needs are there.

    Raises: UserError: a package or a key is missing; the message names it.
    """
    if WANDB not in tracking.also:
        return
    spec = find_spec(WANDB)
    if spec is None or spec.origin is None:  # none: a folder `wandb` without a package in it
        raise UserError(
            "tracking.also: wandb is not installed: `pip install wandb` in the environment of "
            "vapo, or take it out of tracking.also"
        )
    logins = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()  # where `wandb login` keeps it
    has_login = logins.is_file() and "wandb" in logins.read_text(errors="replace")
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or has_login):
        raise UserError(
            "tracking.also: no key for Weights & Biases: export WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep the record in the run's folder until `wandb sync` sends it"
        )


class Also:
    """A run's loggers besides MLflow: those of `tracking.also`, and the `user_loggers`.

    They write into the run's `folder`. If one of them fails during the run, `note` gets a line, and
    the run continues without it.

    Raises: UserError: one of them cannot begin.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        folder: Path,
        run_name: str,
        run_id: str,
        note: Callable[[str], None],
        user_loggers: Sequence[Logger],
    ) -> None:
        self._note = note
        self._loggers: dict[str, Logger] = {}  # by their names in notes
        for name in dict.fromkeys(tracking.also):
            try:
                if name == WANDB:
                    wandb = WandbLogger(
                        name=run_name,
                        project=tracking.experiment,
                        id=run_id,  # so a resumed run continues there too
                        save_dir=folder,
                        tags=[f"{key}={value}"[:64] for key, value in tracking.tags.items()],
                        settings=_SETTINGS,
                    )
                    _ = wandb.experiment  # begins the run now: what is wrong is said at the start
                    self._loggers[_WANDB] = wandb
                else:
                    self._loggers[_CSV] = CSVLogger(folder, "csv", flush_logs_every_n_steps=1)
            except Exception as error:
                raise UserError(f"tracking.also: {name} cannot begin: {one_line(error)}") from error
        for i, logger in enumerate(user_loggers, start=1):
            self._loggers[f"logger {i} given from Python, {type(logger).__name__},"] = logger

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._each(lambda logger: logger.log_metrics(dict(metrics), step), list(self._loggers))

    def log_config(self, flat_params: Mapping[str, Any]) -> None:
        """Log the config to all loggers except CSV, whose folder has config.yaml beside it."""
        names = [name for name in self._loggers if name != _CSV]
        self._each(lambda logger: logger.log_hyperparams(dict(flat_params)), names)

    def close(self, *, is_finished: bool) -> None:
        """End all loggers. W&B sends what is left; offline it keeps that in the folder."""
        status, code = ("success", 0) if is_finished else ("failed", 1)
        self._each(lambda logger: logger.finalize(status), list(self._loggers))
        self._each(lambda logger: logger.experiment.finish(code), [_WANDB])
        self._loggers.clear()

    def _each(self, call: Callable[[Any], object], names: Sequence[str]) -> None:
        """Call `call` with each named logger. If it raises, note that and drop the logger."""
        for name in filter(self._loggers.__contains__, names):
            try:
                call(self._loggers[name])
            except Exception as error:  # whatever it is, the training must not end of it
                del self._loggers[name]
                self._note(
                    f"{name} failed, and the run continues without it, recorded in MLflow: "
                    f"{one_line(error)}"
                )
