"""A disk that is full while weights are written ends the run in good order, whoever writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from tests.components.test_value_pretraining import make_module
from vapo.config import components
from vapo.errors import InterruptedRunError
from vapo.runs.checkpoint_saving import run_on_all_ranks
from vapo.system.progress import Progress
from vapo.training.callbacks import value_pretraining
from vapo.training.callbacks.value_pretraining import ValuePretraining

FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError(FULL),
        OSError(28, FULL),
        RuntimeError(FULL),
        CheckpointException(FULL, {}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_writer_s_own_error_ends_the_run_with_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(InterruptedRunError, match="cannot write it: ") as raised:
        run_on_all_ranks(fail, "cannot write it")
    assert "No space left" in str(raised.value) or isinstance(error, CheckpointException)
    assert raised.value.exit_code == 75
    module = make_module()
    monkeypatch.setattr(value_pretraining, "save_network", fail)
    callback = ValuePretraining(components.ValuePretraining(), 1, tmp_path, Progress(enabled=False))
    assert module.critic is not None
    with pytest.raises(InterruptedRunError, match=r"cannot write the pretrained critic .*resume"):
        callback._save(module.critic, module.config)
