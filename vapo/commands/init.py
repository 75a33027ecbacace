"""`vapo init`: a folder to work in, with the default config, its models and the recipes."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.files.whole_files import why_not_writable
from vapo.system.installation import file_names, root

_README = """\
# A folder for vapo

    vapo fit --config conf/vapo.yaml      # the default task, a minute on two cores
    vapo ui                               # its run in MLflow
    vapo sweep --config conf/missed_checks/vapo.yaml \\
      --grid conf/sweep/ablation_missed_checks.yaml --seeds 0,1,2    # the ablation

`conf/` has configs, algorithms, recipes for real models and grids (`vapo fit --help` lists every
key), `models/` the small models of these tasks. Your own model and data: copy a file of
`conf/recipes/`, or write one that says `extends: conf/recipes/...`; `vapo try --config FILE`
shows its prompts, responses and verdicts. `runs/` and `mlruns/` appear with the first run.
"""


def run(folder: Path) -> None:
    """Write the shipped configs and models and a README into a folder to work in.

    A file that exists already stays if it is the same.

    Raises: UserError, before anything is written, when a file is there with other contents, when
        a link or a file stands where a folder must be, or the folder cannot be written.
    """
    if reason := why_not_writable(folder):
        raise _cannot_write(folder, reason)
    source = root()
    names = file_names(source)
    contents = {name: (source / name).read_bytes() for name in names}
    contents["README.md"] = _README.encode()
    for name in contents:
        path = folder / name
        for place in (*path.parents[: len(Path(name).parts) - 1], path):
            if os.path.islink(place):
                reason = f"{place} is a link, and init writes through none"
                raise _cannot_write(folder, reason)
            if place != path and os.path.exists(place) and not place.is_dir():
                raise _cannot_write(folder, f"{place} is a file, where a folder must be")
    there = {name: folder / name for name in contents if os.path.exists(folder / name)}
    different = [
        name
        for name, path in there.items()
        if not path.is_file() or path.read_bytes() != contents[name]
    ]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise UserError(
            f"{folder / different[0]}{more}: there already, with other contents; nothing was "
            "written. Move it away, or name a new folder: vapo init FOLDER"
        )
    try:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:  # as on a full disk, or below /proc
        raise _cannot_write(folder, f"{error.filename or folder}: {error.strerror}") from None
    size = sum(map(len, contents.values())) / 1e6
    say(f"{len(contents)} files, {size:.1f} MB, in {folder.resolve()}")
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}; "
    say(f"next: {where}vapo fit --config conf/vapo.yaml")


def _cannot_write(folder: Path, reason: str) -> UserError:
    return UserError(
        f"vapo init cannot write {folder}: {reason}. Move it away, or name a new folder: vapo "
        "init FOLDER"
    )
