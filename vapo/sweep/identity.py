"""Identities of tasks. Tasks with equal ones have equal results: same config, code and models."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.written import deciding_tree
from vapo.prompts.fingerprint import fingerprint
from vapo.system.installation import __version__

_PACKAGE = Path(__file__).parents[1]
# Parts of the package that no training process loads: if they change, no run is repeated. The code
# that trains the critics of `vapo critics` is not in the list: their results depend on it.
_AFTERWARDS = ("sweep", "studies/gates", "studies/estimate", "studies/critics/report.py", "cli.py",
               "commands/command_line.py", "commands/command_table.py", "commands/early_checks.py",
               "commands/estimate_checks.py", "commands/file_checks.py", "commands/ui.py",
               "commands/sweep.py", "commands/report.py", "commands/rollouts.py",
               "commands/critics.py", "commands/trying.py", "commands/trials.py",
               "commands/sampled_trials.py")  # fmt: skip


def task_identity(config: FitConfig) -> str:
    """Return 12 hex digits, a digest of all that decides a run's numbers: config, code and models.

    It does not depend on where the run is written and recorded, on credentials, or on the number of
    threads, which depends on `--jobs`.
    """
    tree = deciding_tree(config)
    del tree["output_dir"], tree["tracking"], tree["trainer"]["num_threads"]
    folders = [config.actor.path, config.critic.init, config.critic.reward_model_path]
    models = {folder: fingerprint(folder) for folder in folders if folder}
    canonical = json.dumps([tree, models, code_version()], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return the package's version and a digest of the sources that a training process can load.

    The digest takes the place of a commit. It also exists outside a checkout, differs between two
    states of uncommitted changes, and stays the same when a commit changes no code.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        inside = path.relative_to(_PACKAGE).as_posix()
        if not any(inside == part or inside.startswith(f"{part}/") for part in _AFTERWARDS):
            digest.update(f"{inside}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"
