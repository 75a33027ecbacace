"""Keys that name a folder or file to read, which is looked for beside the YAML file at first.

Then it is looked for in the current folder. Functions have the same rule (`functions.py`). The
shipped configs name what lies beside their folder `conf`. That place is looked at last, so that
they can be used from any folder. A path that exists in one of these places becomes one from the
current folder, as all other paths are: so a config is the same run's on every machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from vapo.config.environment_variables import escape
from vapo.config.layers import Layer, is_interpolation
from vapo.config.origins import Origins
from vapo.config.run_folders import is_run_folder
from vapo.config.trees import Tree, at

_NAMES = {"path", "init", "reward_model_path", "model_path", "policy_path"}
_KEYS = {"components.value_pretraining.data"}
_NO_PATHS = {"critic.init": ("reward_model", "policy")}


def place_paths(tree: Tree, origins: Origins) -> None:
    """Replace each relative path in the tree that exists beside its YAML file.

    The new path is relative to the current folder. All other paths stay, and so do those of a run's
    own `config.yaml`, which are relative to the folder where the run began.
    """
    for key, (_, layer) in origins.layers.items():
        block, _, name = key.rpartition(".")
        if name not in _NAMES and key not in _KEYS:
            continue
        around = at(tree, block) if block else tree
        value = around.get(name)
        if not isinstance(value, str) or not value or is_interpolation(value):
            continue
        if value in _NO_PATHS.get(key, ()) or os.path.isabs(os.path.expanduser(value)):
            continue
        if (place := _beside(layer, value)) is not None:
            around[name] = escape(place)


def _beside(layer: Layer, path: str) -> str | None:
    if layer.folder is None or is_run_folder(layer.folder):
        return None
    here, beside = os.path.abspath(path), os.path.abspath(os.path.join(layer.folder, path))
    if beside != here and os.path.exists(beside):
        return os.path.relpath(beside)
    parents = Path(layer.folder).parts
    if "conf" not in parents or os.path.exists(here):
        return None
    around_conf = Path(*parents[: len(parents) - 1 - parents[::-1].index("conf")])
    return os.path.relpath(around_conf / path) if (around_conf / path).exists() else None
