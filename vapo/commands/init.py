"""`vapo init`: a folder to work in, with the default config, its models and the recipes."""

from __future__ import annotations

from pathlib import Path

from vapo.errors import UserError
from vapo.system.starting_files import file_names, root

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
    """Write the files; the ones that are there already stay, if they are the same.

    Raises: UserError, before anything is written, when a file is there with other contents.
    """
    source = root()
    names = file_names(source)
    contents = {name: (source / name).read_bytes() for name in names}
    contents["README.md"] = _README.encode()
    different = [name for name, content in contents.items() if _differs(folder / name, content)]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise UserError(
            f"{folder / different[0]}{more}: there already, with other contents; nothing was "
            "written. Move it away, or name a new folder: vapo init FOLDER"
        )
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    size = sum(map(len, contents.values())) / 1e6
    print(f"{len(contents)} files, {size:.1f} MB, in {folder.resolve()}")
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder}; "
    print(f"next: {where}vapo fit --config conf/vapo.yaml")


def _differs(path: Path, content: bytes) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != content)
