"""What other libraries may print: warnings and errors, not banners and bars of their own."""

from __future__ import annotations

import logging
import warnings

from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Leave the terminal to `Progress`."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    # one process reads the rollout buffer, which is in memory: workers would only copy it
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*`IterableDataset` has `__len__` defined.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # a finished run was resumed: a note of our own says so
    warnings.filterwarnings("ignore", message="Total length of `.*` across ranks is zero.*")
    # checkpoints are of whole iterations, whose numbers of minibatches may differ by phase
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    # vLLM begins a process group of one
    warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True.*")
    # a dependency of reasoning_gym, when it is first compiled
    warnings.filterwarnings("ignore", message='"is" with .*literal', category=SyntaxWarning)
