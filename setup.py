"""Puts the starting files (configs and the models of the shipped tasks) into the wheel.

They lie at the top of the repository, outside the package. `vapo init` writes them into a folder.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
starting_files = runpy.run_path(str(ROOT / "vapo/system/installation.py"))


class BuildWithStartingFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout has them where they belong
            return
        target = Path(self.build_lib) / "vapo" / starting_files["FOLDER"]
        for name in starting_files["file_names"](ROOT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


setup(cmdclass={"build_py": BuildWithStartingFiles})
