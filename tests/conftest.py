"""Set-up of all tests: no network, one thread, annotated tensor shapes are checked."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch
from jaxtyping import install_import_hook

from tests import shape_checks

# Before any test imports vapo.
install_import_hook("vapo", f"{shape_checks.__name__}.checked")
torch.set_num_threads(1)
