"""What a killed process leaves among MLflow's artifacts: copies that were never completed.

MLflow writes an artifact beside its final name first. Only stores whose artifacts lie beside
their database are looked after: a server's are out of reach.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from vapo.tracking.stores import Store

_PATTERN = ".artifact.uploading.*"  # of mlflow.store.artifact.local_artifact_repo
_UNTOUCHED_S = 3600.0


def remove_partial_uploads(store: Store, own_run: str | None) -> None:
    """Those of `own_run`, whose journal this process holds, so that no other one writes to it.

    Of all other runs, in the background, what nobody has written to for an hour. A copy that is
    in progress is written to all the time. If one were removed all the same, its process would
    find that its upload failed, and repeat it.
    """
    if store.database is None:
        return
    if own := store.artifact_folder(own_run, ""):
        _remove(own, before=None)
    arguments = (store.database.parent / "artifacts", time.time() - _UNTOUCHED_S)
    threading.Thread(target=_remove, args=arguments, name="partial uploads", daemon=True).start()


def _remove(folder: Path, before: float | None) -> None:
    with suppress(OSError):  # of another user, or removed meanwhile: to be left alone
        for path in folder.rglob(_PATTERN):
            with suppress(OSError):
                if before is None or path.stat().st_mtime < before:
                    path.unlink()
