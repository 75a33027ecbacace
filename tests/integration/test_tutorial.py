"""docs/tutorial.ipynb runs from top to bottom, on a small scale."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.config.fits import ROOT
from tests.integration.commands import SMALL
from tests.tracking.ready_stores import ready_store

SMALLER = {
    **dict(item.split("=") for item in SMALL),
    "components.group_sampling.num_prompts": "4",
    "training.minibatch_size": "8",
    "data.train.num_examples": "64",
    "data.heldout.num_examples": "4",
}
# Forked, the runs of the sweep do not load torch, Lightning and MLflow one by one.
PARAMETERS = """
out = Path({folder!r})
quick = {{"output_dir": str(out), "tracking.uri": str(out / "mlruns"), **{small!r}}}
seeds = [0]
import pytest
from tests.integration.forked_runs import ForkedRuns
ForkedRuns(pytest.MonkeyPatch(), out)
"""


@pytest.mark.night
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "docs/tutorial.ipynb", as_version=4)
    (parameters,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    ready_store(tmp_path / "mlruns")
    parameters.source += PARAMETERS.format(folder=str(tmp_path), small=SMALLER)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": ROOT / "docs"}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [o for o in shown if "image/png" in o.get("data", {})]
    assert len(images) == 2
    printed = "".join(o.text for o in shown if o.output_type == "stream")
    assert "unknown key 'actor.lr'" in printed
    assert "held-out score:" in printed
    assert "iteration 4: mean reward" in printed
    texts = [output.get("data", {}).get("text/plain", "") for output in shown]
    (table,) = (text for text in texts if "no value pretraining" in text)
    assert "VAPO" in table


def test_the_stored_notebook_has_been_run() -> None:
    """Readers look at it on a code host: its outputs are there, and none is an error."""
    notebook = nbformat.read(ROOT / "docs/tutorial.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert "display_data" in kinds
    assert str(ROOT) not in (ROOT / "docs/tutorial.ipynb").read_text()
