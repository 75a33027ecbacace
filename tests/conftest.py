"""Set-up of all tests: no network, one thread, annotated types and tensor shapes are checked.

The process that hands the tests to others loads this file, too; it needs no torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import jaxtyping
import pytest

from tests import shape_checks

if TYPE_CHECKING:
    from tests.forked import Ranks

# Before any test imports vapo.
PACKAGE = Path(__file__).parents[1] / "vapo"
shape_checks.install(
    sorted(f"vapo.{path.stem}" for path in PACKAGE.iterdir() if path.stem[:1] != "_")
)

# Whatever a module that jaxtyping checks is the first to import is compiled anew, for half a
# minute in all: jaxtyping's own names of compiled files hold for it, too.
IMPORTED_BEFORE = (
    "lightning.pytorch",
    "mlflow",
    "torch.distributed.checkpoint",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)
# Above eight seconds. Begun first, or the last process would have one of them alone at the end.
LONGEST = (
    "test_fit.py",
    "test_sharded_fit.py",
    "test_simulation.py",
    "test_critic_grid.py",
    "test_vllm_server.py",
    "test_memory_estimate.py",
    "test_sweep.py",
    "test_value_truth.py",
    "test_algorithms.py",
    "test_transformers_sampler.py",
    "test_staleness.py",
    "test_heads.py",
    "test_commands_run.py",
    "test_probe_fit.py",
    "test_verdicts.py",
    "test_gates.py",
    "test_shared_prompts.py",
    "test_stored_pretraining.py",
    "test_weights_lineage.py",
    "test_pretrained_models.py",
    "test_critics_command.py",
    "test_probe_memory.py",
    "test_truth_figures.py",
    "test_episodes.py",
    "test_composite_resume.py",
    "test_faults.py",
    "test_passes_on_ranks.py",
)
# Whole runs are not checked call by call: the tests of their parts check types and shapes.
WHOLE_RUNS = {Path(__file__).with_name(name) for name in ("integration", "docs", "bench")}


def pytest_configure(config: pytest.Config) -> None:
    """A machine with a GPU has the numbers of the others: only `make gpu` computes on it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The stores that tests name are not among those of whoever runs them.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="vapo-tests-")
    config.add_cleanup(partial(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is loaded here stays to the end: the garbage collector has nothing to find in it."""
    if session.config.pluginmanager.hasplugin("dsession"):
        return (yield)  # the process that hands out the tests imports none of them
    gc.disable()
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    jaxtyping.config.update("jaxtyping_disable", not WHOLE_RUNS.isdisjoint(item.path.parents))
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def pytest_runtest_setup() -> None:
    import torch

    shape_checks.next_test()
    torch.set_num_threads(1)  # commands leave as many as there are cores, which wait by spinning


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of `conf` and `models` are those of the repository."""
    monkeypatch.chdir(PACKAGE.parent)


@pytest.fixture
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs keep their records to themselves, where MLflow is not what is tested."""
    monkeypatch.setattr("vapo.tracking.sink.MlflowSink.send", lambda self, records: None)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """One pair of ranks: what they load and plan at first, they have for every test."""
    from tests.forked import Ranks

    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def heard_hangup() -> Iterator[None]:
    """SIGHUP as from a terminal; under nohup, tests inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
