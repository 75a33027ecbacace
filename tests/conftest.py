"""Set-up of all tests: no network, one thread, annotated types and tensor shapes are checked."""

import gc
import importlib
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

from tests import shape_checks

# What is loaded from here to the first test stays: the collector has nothing to find in it.
gc.disable()

# Whatever a module that jaxtyping checks is the first to import is compiled anew, for half a minute
# in all: jaxtyping's own names of compiled files hold for it, too.
for name in (
    "lightning.pytorch",
    "mlflow",
    "torch.distributed.checkpoint",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
):
    importlib.import_module(name)

# Before any test imports vapo. The config has no tensors: its types are checked without the names
# of sizes, which every call would pay for.
beartype_package("vapo.config", conf=shape_checks.TYPES)
PACKAGE = Path(__file__).parents[1] / "vapo"
ROOMS = sorted(f"vapo.{path.stem}" for path in PACKAGE.iterdir() if path.stem[:1] != "_")
install_import_hook(
    [room for room in ROOMS if room != "vapo.config"], f"{shape_checks.__name__}.checked"
)
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
