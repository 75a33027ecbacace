"""Runs the `vapo` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import forked
from tests.config.fits import ON_STATE_TRACKING
from tests.tracking.ready_stores import ready_store
from vapo import cli
from vapo.runs.checkpoints import network_state, read_checkpoint

ROOT = Path(__file__).parents[2]

# small enough for seconds, with both phases and every component on
FEW_PROMPTS = ["data.train.num_examples=128", "data.heldout.num_examples=16"]
SMALL = [
    *FEW_PROMPTS,
    "components.value_pretraining.num_iterations=2",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=8",
    "components.group_sampling.group_size=4",
    "training.num_iterations=3",
    "training.minibatch_size=16",
    "evaluation.k=2",
    "evaluation.every_n_iterations=2",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
]
# the same with short responses, scored on a few
SHORT = [
    *SMALL,
    "rollouts.max_response_tokens=16",
    "data.heldout.num_examples=4",
    "evaluation.k=1",
]
# one iteration of value pretraining, two of the policy, two minibatches in each
SHORTEST = [
    *SHORT,
    "components.value_pretraining.num_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.num_iterations=2",
    "training.minibatch_size=8",
]

Result = subprocess.CompletedProcess[str]


def vapo(*args: str) -> Result:
    """`vapo ARGS` in the repository's root, in this process: loading torch and Lightning takes
    longer than a small run. Shapes are checked in it, too."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), chdir(ROOT):
        code = cli.main(args)
    return Result(args, code, out.getvalue(), err.getvalue())


def vapo_process(*args: str, timeout_s: float = 240) -> Result:
    """The same as a process of its own: what starts others, or an engine that ends with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "vapo", *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def vapo_forked(*args: str, without: str = "-", timeout_s: float = 240, **variables: str) -> Result:
    """The same as a process that is forked from one that has loaded the package.

    It has the environment of this process, but for variables that begin with `without`, and its
    own `variables`.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(without)}
    (result,) = _forked(args, [environment | variables], timeout_s)
    return result


def vapo_on_two_ranks(*args: str, timeout_s: float = 240) -> Result:
    """The same as two processes that torchrun would have started; the first one's result."""
    first, second = _forked(
        args, [{**os.environ, **of_rank} for of_rank in forked.rank_variables(2)], timeout_s
    )
    assert second.returncode == first.returncode, second.stderr[-4000:]
    return first


def vapo_under_srun(*args: str, timeout_s: float = 240) -> Result:
    """The same as two processes with the variables that srun gives them; the first one's result."""
    shared = {
        "SLURM_JOB_NAME": "vapo",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": forked.rank_variables(2)[0]["MASTER_PORT"],
    }
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    first, second = _forked(args, [{**os.environ, **shared, **rank} for rank in ranks], timeout_s)
    assert second.returncode == first.returncode, second.stderr[-4000:]
    return first


def _forked(
    args: tuple[str, ...], environments: Sequence[dict[str, str]], timeout_s: float
) -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(len(environments))]
        for folder in folders:
            folder.mkdir()
        processes = [
            forked.start(folder / "out", {}, _command, args, folder / "err", environment)
            for folder, environment in zip(folders, environments, strict=True)
        ]
        codes = [forked.end(process, timeout_s) for process in processes]
        return [
            Result(args, code, (folder / "out").read_text(), (folder / "err").read_text())
            for code, folder in zip(codes, folders, strict=True)
        ]


def _command(args: tuple[str, ...], err: Path, environment: dict[str, str]) -> int:
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.clear()
    os.environ.update(environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    # what Lightning starts further processes by
    sys.argv = ["vapo", *args]
    sys.modules["__main__"].__spec__ = find_spec("vapo.__main__")
    return cli.main(args)


def store(tmp_path: Path) -> Path:
    """The session's tracking store."""
    return ready_store(tmp_path.parent / "mlruns")


def output_options(folder: Path) -> list[str]:
    """A command writes its runs into the folder, and records them in the session's store."""
    return [f"output_dir={folder / 'runs'}", f"tracking.uri={store(folder)}"]


def fit(
    tmp_path: Path,
    *args: str,
    run: Callable[..., Result] = vapo,
    small: Sequence[str] = SMALL,
) -> Path:
    """A small `vapo fit` that must succeed; returns the run's folder, the last line printed."""
    result = run(
        "fit",
        *ON_STATE_TRACKING,
        *small,
        *output_options(tmp_path),
        *args,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return Path(result.stdout.strip().splitlines()[-1])


def initial_weights(network: str) -> dict[str, torch.Tensor]:
    """What the policy or the critic of the state-tracking task starts from."""
    folder = {"actor": "policy", "critic": "reward_model"}[network]
    return load_file(ROOT / "models/state_tracking" / folder / "model.safetensors")


def final_weights(run_dir: Path, network: str) -> dict[str, torch.Tensor]:
    """What the run's last checkpoint has of the `actor` or the `critic`."""
    return network_state(read_checkpoint(run_dir / "checkpoints/last.ckpt"), network)


def summary(run_dir: Path) -> dict[str, Any]:
    contents = json.loads((run_dir / "summary.json").read_text())
    assert isinstance(contents, dict)
    return contents
