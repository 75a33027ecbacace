"""Private attributes of other libraries stand in one file, and are still there."""

from __future__ import annotations

import ast
import importlib

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.architecture.test_doors import PACKAGE, imports_of, sources
from tests.tiny_model import tiny_model
from vapo.system.private_attributes import (
    attention_implementation,
    can_change_attention,
    leave_signals_alone,
    storage_key,
)

HOME = "system/private_attributes.py"
LIBRARIES = ("torch", "lightning", "mlflow", "transformers")
# Private modules with what the documentation names without a public place to import it from.
MODULES = {
    "torch._subclasses.fake_tensor",  # FakeTensorMode
    "torch.distributed._tools",  # MemTracker, FSDPMemTracker
    "torch.distributed.tensor._sharding_prop",  # DTensor's sharding, and what it runs on fakes
    "torch.testing._internal.distributed.fake_pg",  # ranks that do not exist
    "torch.utils._mode_utils",  # no_dispatch
    "torch.utils._python_dispatch",  # TorchDispatchMode
    "torch.utils._pytree",  # tree_iter
    "lightning.fabric.utilities.device_dtype_mixin._update_properties",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector",
}
STANDARD = {"_replace", "_asdict", "_fields", "_actions", "_exit", "_getframe"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.slow
def test_they_are_touched_in_one_file() -> None:
    """Every `x._name` elsewhere is a name of our own: a class or module of ours assigns it."""
    ours, touched = {"_bootstrap"}, dict[str, str]()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                if is_private(node.attr) and path != PACKAGE / HOME:
                    touched[f"{path}:{node.lineno} {node.attr}"] = node.attr
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
    foreign = {place for place, name in touched.items() if name not in ours | STANDARD}
    assert not foreign


@pytest.mark.slow
def test_private_modules_are_those_without_a_public_name() -> None:
    imported = {
        name
        for path in sources()
        for name in imports_of(path)
        if name.split(".")[0] in LIBRARIES and any(map(is_private, name.split(".")))
    }
    found = {max((m for m in MODULES if name.startswith(m)), default=name) for name in imported}
    assert found == MODULES
    for name in MODULES:
        if name.startswith("torch."):
            importlib.import_module(name)


def test_they_are_still_there() -> None:
    """What needs a run or two processes is held by the tests of checkpoints and of sharding."""
    trainer = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    assert hasattr(trainer, "_signal_connector"), "Lightning has another place for its handlers"
    leave_signals_alone(trainer)
    assert callable(trainer._checkpoint_connector.dump_checkpoint)
    model = tiny_model()
    assert can_change_attention(model)
    assert attention_implementation(model) == "sdpa"
    tensor = torch.ones(3)
    assert hasattr(ShardingPropagator, "_fake_mode_lock"), "DTensor has another lock"
    assert storage_key(tensor) == storage_key(tensor[1:]) != storage_key(torch.ones(3))
