"""`vapo report`: the table and the figures, in a folder and in the sweep's parent run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.sweep.folders import SWEEP_RECORD, read_run_folders, read_sweep_folder
from vapo.sweep.report.figures import draw_all
from vapo.sweep.report.render import as_csv, markdown, page
from vapo.sweep.report.runs import Collection, Reader
from vapo.sweep.report.table import make_table
from vapo.tracking.known_stores import check_known
from vapo.tracking.records import NOTE_TAG
from vapo.tracking.stores import locate_store

_PLAN = "\n\n## Plan\n\n"
_MAX_NOTE = 7500  # MLflow bounds a tag at 8000 characters
_NO_DATE = {"svg": {"Date": None}}


def run(
    *,
    sweep: str | None = None,
    runs: str | None = None,
    experiment: str | None = None,
    folders: Sequence[Path] = (),
    tracking_uri: str | None = None,
    output_dir: Path | None = None,
    full_system: str | None = None,
    policy_steps: int | None = None,
) -> Path:
    """Write the table and the figures of recorded runs, and return their folder.

    Exactly one of the first four arguments says which runs they are.

    Args:
        sweep: a sweep's id.
        runs: MLflow run ids, separated by commas.
        experiment: the name of an experiment.
        folders: a sweep's folder, or folders of runs.
        tracking_uri: the MLflow store; None: the one that the folders name, or mlruns.
        output_dir: where to write; None: `report` in the sweep's folder, or runs/report.
        full_system: the name of the row with which all other rows are compared.
        policy_steps: report each run's last evaluation up to this optimizer step of the policy.

    Raises: UserError: the folder, run, experiment or store does not exist.
    """
    run_folders = read_run_folders(folders, tracking_uri) if folders else None
    sweep_folder = (
        read_sweep_folder(folders[0], tracking_uri) if folders and run_folders is None else None
    )
    output_dir = output_dir or (
        Path("runs/report") if sweep_folder is None else sweep_folder.path / "report"
    )
    source = run_folders or sweep_folder
    if source is not None and tracking_uri is None:
        check_known(source.tracking_uri, named_by=Path(folders[0]), how="--tracking_uri ")
    reader = open_reader(source.tracking_uri if source else tracking_uri or "mlruns")
    if sweep_folder is not None:
        parent = f"{sweep_folder.path / SWEEP_RECORD}: parent run"
        collection = reader.sweep(sweep_folder.parent_run_id, full_system, flag=parent)
    elif run_folders is not None:
        collection = reader.chosen(
            run_folders.run_ids, full_system, flag="FOLDER of run", first_is_compared=True
        )
    elif sweep:
        collection = reader.sweep(sweep, full_system)
    elif runs:
        collection = reader.chosen([part for part in runs.split(",") if part], full_system)
    else:
        collection = reader.experiment(str(experiment), full_system)
    collection = replace(
        collection, within=policy_steps
    )  # if None, the runs' last evaluations are reported
    table = write_report(collection, output_dir)
    say(table)
    if collection.parent_run_id is not None and policy_steps is None:
        publish(reader, collection.parent_run_id, output_dir, table)
    say(f"table and figures:\n{output_dir.absolute()}")
    return output_dir


def open_reader(tracking_uri: str) -> Reader:
    """Open a store for reading. Raises: UserError: it has no database."""
    store = locate_store(tracking_uri)
    if store.database is not None and not store.database.is_file():
        raise UserError(
            f"--tracking_uri {tracking_uri}: nothing is recorded in {store.database.parent}"
        )
    return Reader(store)


def write_report(collection: Collection, folder: Path) -> str:
    """Write table.md, table.csv, report.html and the figures (PNG, SVG). Return the Markdown."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    results = make_table(collection)
    text = markdown(collection, results)
    (folder / "table.md").write_text(text)
    (folder / "table.csv").write_text(as_csv(results))
    figures = {}
    for drawing in draw_all(collection):
        for suffix in ("png", "svg"):
            path = folder / f"{drawing.name}.{suffix}"
            drawing.figure.savefig(path, metadata=_NO_DATE.get(suffix))
            drawing.figure.set_layout_engine(
                "none"
            )  # it is laid out; saving again need not repeat that
        figures[drawing.name] = (drawing.caption, folder / f"{drawing.name}.png")
        pyplot.close(drawing.figure)
    (folder / "report.html").write_text(page(collection, results, figures))
    return text


def publish(reader: Reader, parent_run_id: str, folder: Path, table: str) -> None:
    """Log the report's folder as artifacts of a sweep's parent run.

    The table is put before the description of this run.
    """
    reader.client.log_artifacts(parent_run_id, str(folder), "report")
    description = reader.client.get_run(parent_run_id).data.tags.get(NOTE_TAG, "")
    plan = description.partition(_PLAN)[2] or description  # without the table of an earlier report
    reader.client.set_tag(parent_run_id, NOTE_TAG, f"{table}{_PLAN}{plan}"[:_MAX_NOTE])
