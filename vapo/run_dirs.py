"""A run's folder: where it is, what is in it, and how a later run finds it again.

<output_dir>/<time>_<name>/
    config.yaml           the resolved config
    run.json              the MLflow run that a resumed run continues
    checkpoints/          last.ckpt, best.ckpt
    pretrained_critic/    Hugging Face folder, after value pretraining
    summary.json          at the end
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.loading import to_yaml
from vapo.config.schema import TrainerConfig
from vapo.errors import UserError
from vapo.progress import is_main_process
from vapo.summary import CONFIG_NAME, make_run_dir


@dataclass
class RunDir:
    """A run's folder. Only the first process makes one.

    On the others `path` is the folder that it lies in: they write nothing of their own, and
    their checkpoint callbacks are told where by Lightning, which broadcasts the first's folder.
    So any launcher will do.
    """

    path: Path
    mlflow_run_id: str | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def record_mlflow_run(self, run_id: str | None) -> None:
        if is_main_process() and run_id is not None:
            (self.path / "run.json").write_text(json.dumps({"mlflow_run_id": run_id}) + "\n")


def open_run_dir(config: FitConfig, name: str, *, resume_from: Path | None) -> RunDir:
    """A new folder, or the one that the checkpoint to resume from lies in."""
    if resume_from is not None:
        path = resume_from.parent.parent
        record = path / "run.json"
        run_id = json.loads(record.read_text())["mlflow_run_id"] if record.exists() else None
        return RunDir(path, run_id)
    if not is_main_process():
        return RunDir(Path(config.output_dir).expanduser().absolute())
    path = make_run_dir(config.output_dir, name)
    (path / CONFIG_NAME).write_text(to_yaml(config))
    return RunDir(path)


def check_resumable(checkpoint: Path, trainer: TrainerConfig) -> None:
    """A folder of shards goes on sharded, over any number of processes; a file goes on anywhere.

    Raises: UserError naming the mend.
    """
    if checkpoint.is_dir() and trainer.strategy != "fsdp":
        raise UserError(
            f"{checkpoint} is a sharded checkpoint: set trainer.strategy=fsdp to go on with it "
            "(trainer.devices=1 will do)"
        )


def find_checkpoint(output_dir: str, ckpt_path: str) -> Path:
    """`last` and `best` mean the newest run in `output_dir` that has one; else a path.

    Raises: UserError when there is none.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path).absolute()
        if not path.exists():
            raise UserError(f"--ckpt_path: no file {path}")
        return path
    found = sorted(Path(output_dir).absolute().glob(f"*/checkpoints/{ckpt_path}.ckpt"))
    if not found:
        raise UserError(
            f"--ckpt_path {ckpt_path}: no run in {Path(output_dir).absolute()} has a "
            f"{ckpt_path}.ckpt; start one without --ckpt_path, or set output_dir"
        )
    return found[-1]
