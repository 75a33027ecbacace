"""`vapo fit --smoke`: begin, save and resume a run, and predict what the whole run will take."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from vapo.config import FitConfig, resolve
from vapo.config.validation import first_problem
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.errors.secret_rule import TRACKING_URI
from vapo.errors.shown_text import say
from vapo.files.made_folders import make_folders
from vapo.studies.smoke.forecast import Session, forecast, session_file
from vapo.studies.smoke.report import seconds_table, shown_bytes, whole_run
from vapo.sweep.launch import fit_command
from vapo.sweep.plan import set_key
from vapo.system.process import STARTER, kill_started_by
from vapo.tracking.opening import check_store_answers
from vapo.tracking.stores import locate_store
from vapo.user_code.python_child import python_environment

_MORE = 3
"""More iterations than a smoke test trains, so that it does not train the run's last one."""
_GRACE_S = 15.0
"""How long a session that was told to stop is waited for, beyond `checkpoints.stop_grace_s`."""


def run(config: FitConfig, *, ckpt_path: str | None = None, quiet: bool = False) -> None:
    """Run the first iterations of a config, resume them, and print what the whole run will take.

    Everything is written into a folder in `output_dir`, and removed at the end.

    Raises: UserError: the config cannot be tried this way, its tracking server does not answer, or
        a session failed. A session prints its own error.
    """
    if ckpt_path is not None:
        raise UserError(
            "--smoke begins a run, and resumes that run: leave --ckpt_path out, or --smoke"
        )
    check_one_host(config)
    if (store := locate_store(config.tracking.uri)).is_http:
        check_store_answers(store)
    tell: Callable[[str], None] = _tell_nothing if quiet else _tell
    with temporary_folder(Path(config.output_dir).expanduser().absolute()) as folder:
        smoke_config, num_first = shortened(config, folder)
        file = folder / "smoke.yaml"
        file.write_text(to_yaml(smoke_config), encoding="utf-8")
        tell("1 of 2: evaluate, train one iteration of each phase, and save a checkpoint")
        sessions = [run_session(config, file, num_first, None, quiet=quiet)]
        tell("2 of 2: resume from the checkpoint in a new process, and train one iteration more")
        (checkpoint,) = folder.glob("runs/*/checkpoints/last.ckpt")
        sessions.append(run_session(config, file, num_first + 1, checkpoint, quiet=quiet))
        warnings = [
            line for path in folder.glob("runs/*/summary.json") for line in warnings_in(path)
        ]
        free = shutil.disk_usage(folder).free
    say(smoke_text(config, sessions, warnings, free))


def shortened(config: FitConfig, folder: Path) -> tuple[FitConfig, int]:
    """Return the config of a smoke test, and how many iterations its first session has.

    It has one iteration of value pretraining, and evaluates only before training. Batches, lengths
    and evaluation keep their sizes. What it writes and records is in `folder`.

    Raises: UserError: the config has no iteration, or does not allow these changes.
    """
    has_pretraining = config.algorithm.has_critic
    has_pretraining &= resolve(config).value_pretraining_iterations > 0
    has_policy = config.training.num_iterations > 0
    num_first = has_pretraining + has_policy
    if num_first == 0:
        raise UserError(
            "--smoke: this run has no iteration: set training.num_iterations above 0, or "
            "components.value_pretraining.num_iterations"
        )
    changes: dict[str, object] = {
        "output_dir": str(folder / "runs"),
        "tracking.uri": str(folder / "mlruns"),
        "tracking.experiment": "smoke",
        "tracking.run_name": "smoke",
        "tracking.also": [],
        "checkpoints.resume": "never",
        "checkpoints.every_n_iterations": num_first,
    }
    if has_pretraining:
        changes["components.value_pretraining.num_iterations"] = 1 if has_policy else _MORE
        changes["components.value_pretraining.min_iterations"] = 0
    if has_policy:
        num_iterations = max(config.training.num_iterations, _MORE)
        changes["training.num_iterations"] = num_iterations
        changes["evaluation.every_n_iterations"] = num_iterations
    smoke_config = config
    for key, value in changes.items():
        smoke_config = set_key(smoke_config, key, value)
    if (problem := first_problem(smoke_config)) is not None:
        raise UserError(f"--smoke shortens the run, and then: {problem.message}")
    return smoke_config, num_first


def check_one_host(config: FitConfig) -> None:
    """Check that a smoke test can start the run's processes by itself.

    Raises: UserError: the run has several hosts, or a launcher has started this process.
    """
    if config.trainer.num_nodes > 1:
        raise UserError(
            "--smoke is of one host, and trainer.num_nodes is "
            f"{config.trainer.num_nodes}: start the run itself with training.num_iterations=2 and "
            "an output_dir and a tracking.uri of its own"
        )
    if launched := {"RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & os.environ.keys():
        raise UserError(
            f"--smoke starts the run's processes by itself, and a launcher has set {min(launched)}:"
            " start `vapo fit --smoke` without torchrun or srun"
        )


@contextmanager
def temporary_folder(output_dir: Path) -> Iterator[Path]:
    """Make a new folder in `output_dir` and yield it.

    At the end it is removed, and so are the folders that had to be made around it.
    """
    new_folders = make_folders(output_dir)
    folder = Path(tempfile.mkdtemp(prefix="smoke_", dir=output_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            _tell(f"cannot remove {folder}: remove it by hand")
        for path in new_folders:
            with suppress(OSError):  # another program may have put something there
                path.rmdir()


def run_session(
    config: FitConfig, file: Path, last: int, checkpoint: Path | None, *, quiet: bool
) -> Session:
    """Run `vapo fit` on the config in `file` in a process, up to iteration `last`.

    Return what the session measured. With a checkpoint the run resumes from it.

    Raises: UserError: it has failed. The message says how, and the process itself has said why.
    """
    command = [*fit_command(file, checkpoint), "--smoke_until", str(last)]
    environment = python_environment() | {
        STARTER: str(os.getpid()),
        TRACKING_URI: str(file.parent / "mlruns"),  # so that it is not remembered as the user's
    }
    process = subprocess.Popen(
        [*command, *(["--quiet"] if quiet else [])], stdin=subprocess.DEVNULL, env=environment
    )
    try:
        code = process.wait()
    except BaseException:  # Ctrl-C, or a signal that ends this command
        _stop(process, config.checkpoints.stop_grace_s + _GRACE_S)
        raise
    if code:
        how = f"exit code {code}, its reason is above"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += ", as the system does where the host's memory is full"
        raise UserError(f"--smoke: the run failed ({how}); its files are removed")
    return Session.of(json.loads(session_file(file.parent, last).read_text()))


def warnings_in(summary: Path) -> list[str]:
    """Return the warnings and faults that a run's summary.json has."""
    contents = json.loads(summary.read_text())
    faults = {name: number for name, number in contents["faults"].items() if number}
    return [*contents["warnings"], *([f"faults: {faults}"] if faults else [])]


def smoke_text(config: FitConfig, sessions: list[Session], warnings: list[str], free: int) -> str:
    """Return the text that ends a smoke test.

    `free` is how many bytes are left on the disk of output_dir.
    """
    prediction = forecast(config, sessions)
    where = "" if free >= prediction.disk_held else ", which is too little"
    lines = [
        "",
        "The run began, saved a checkpoint, was resumed from it in a new process, and went on.",
        "",
        seconds_table(sessions),
        "",
        "The whole run, extrapolated from this (docs/scaling.md):",
        whole_run(config, prediction, sessions),
        f"the disk of output_dir has {shown_bytes(free)} free{where}",
        *(f"warned: {text}" for text in warnings),
        "Nothing was recorded in the tracking store, and all files of the test are removed.",
    ]
    return "\n".join(lines)


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask the process to stop at its next safe point; after `seconds` end it and its children."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_started_by(psutil.Process(process.pid))
        process.kill()
        process.wait()


def _tell(line: str) -> None:
    say(f"vapo fit --smoke: {line}")


def _tell_nothing(line: str) -> None:
    pass
