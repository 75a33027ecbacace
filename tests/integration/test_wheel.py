"""The wheel by itself: in an empty folder, without the checkout, the default command works."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.integration.commands import SMALL

pytestmark = pytest.mark.slow
DEFAULT = ["--config", "conf/vapo.yaml"]
SHORT = [*SMALL, "components.value_pretraining.num_iterations=1", "training.num_iterations=1"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel installs. Built from a copy: a build leaves files in its folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        parts = ("vapo/", "conf/", "models/", "setup.py", "pyproject.toml", "MANIFEST.in", "README")
        if name.startswith(parts) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *build, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("vapo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_the_wheel_has_all_files_and_init_runs(unpacked: Path, tmp_path: Path) -> None:
    wanted = {
        path.relative_to(ROOT)
        for path in (ROOT / "vapo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= {path.relative_to(unpacked) for path in unpacked.rglob("*")}
    run(unpacked, "init", "new", folder=tmp_path)
    printed = run(unpacked, "fit", *DEFAULT, "--print_config", folder=tmp_path / "new")
    assert "\ncomponents:\n" in printed


@pytest.mark.night
def test_init_and_fit_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    run(unpacked, "init", "new", folder=tmp_path)
    printed = run(unpacked, "fit", *DEFAULT, *SHORT, folder=tmp_path / "new")
    assert "held-out score" in printed or "avg@" in printed
    assert (tmp_path / "new/mlruns").is_dir()


def run(unpacked: Path, *words: str, folder: Path) -> str:
    """What `vapo WORDS` of the wheel prints in the folder.

    `-P`: the current folder is not searched, and the checkout is not on the path.
    """
    code = (
        "import sys, vapo, vapo.cli; "
        f"assert vapo.__file__.startswith({str(unpacked)!r}), vapo.__file__; "
        "sys.exit(vapo.cli.main())"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}",
            *words,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
