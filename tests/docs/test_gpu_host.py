"""What docs/gpu_host.md and the Dockerfile say of a GPU host is what the code does."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.config.fits import ROOT
from vapo.commands import doctor, engine_trial
from vapo.system import libraries

PAGE = (ROOT / "docs/gpu_host.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def shown(name: str) -> list[str]:
    """The lines of the page's block of this name."""
    (block,) = re.findall(rf"<!-- {name} -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    return block.splitlines()


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==(\S+)$", CONSTRAINTS, re.MULTILINE)
    return version


def instructions(name: str) -> list[str]:
    """The arguments of the Dockerfile's instructions of this name, with continued lines joined."""
    joined = re.sub(r"\s*\\\n\s*", " ", DOCKERFILE)
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


@pytest.fixture
def on_the_pages_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the CUDA build of torch, vLLM and one H200."""
    monkeypatch.setattr(torch, "__version__", f"{pinned('torch')}+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(doctor, "num_cores", lambda: 16)
    monkeypatch.setattr(doctor, "installed", {"vllm": doctor.VLLM_VERSION}.get)
    monkeypatch.setattr(doctor, "version", pinned)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.11.2")
    monkeypatch.setattr(doctor, "try_engine", lambda: "started in 75.0 s, sampled in 1.0 s")
    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=lambda name: None))


@pytest.mark.usefixtures("on_the_pages_machine")
def test_the_doctor_says_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.run("transformers")
    assert capsys.readouterr().out.splitlines() == shown("doctor")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor, "num_cores", lambda: 2)
    doctor.run("transformers")
    assert capsys.readouterr().out.splitlines() == shown("doctor without a GPU")


@pytest.mark.usefixtures("on_the_pages_machine")
def test_the_page_has_the_doctors_complaints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = [libraries.about_gpus()]
    monkeypatch.setattr(torch.version, "cuda", None)
    said.append(libraries.about_gpus())
    table = PAGE.partition("| you see |")[2].partition("## First run")[0]
    for complaint in (*said, f"has not sampled within {engine_trial.TIME_LIMIT_S:g} s"):
        assert f"`{complaint}`" in table


def test_the_page_names_the_pinned_versions() -> None:
    assert set(re.findall(r"\btorch (\d\.\d+\.\d+)", PAGE)) == {pinned("torch")}
    assert set(re.findall(r"vLLM (\d\.\d+\.\d+)", PAGE)) == {doctor.VLLM_VERSION}


def test_page_and_image_install_the_same() -> None:
    (install,) = [run for run in instructions("RUN") if "pip install" in run]
    (extras,) = [text for text in instructions("ARG") if text.startswith("EXTRAS=")]
    commands = re.findall(r"^```sh\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)[1]
    (without,) = re.findall(r"grep -vE .*? > vllm-constraints.txt", install)
    assert without in commands
    assert f"-c vllm-constraints.txt -e '.[{extras.partition('=')[2]}]'" in commands
    assert '-c vllm-constraints.txt ".[${EXTRAS}]"' in install
    (packages,) = re.findall(r"--no-install-recommends (.*?) && rm", instructions("RUN")[0])
    (listed,) = re.findall(r"--no-install-recommends (.*)", PAGE)
    assert set(listed.split()) == {*packages.split(), "git", "make"}
    assert {"g++", "python3-dev"} <= set(packages.split())  # what Triton compiles with


def test_the_image_has_what_it_copies_and_keeps_its_caches_in_the_volume() -> None:
    for copied in instructions("COPY"):
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources), copied
    assert "XDG_CACHE_HOME=/cache" in instructions("ENV")[0]
    assert "vapo doctor" in instructions("RUN")
    (cuda,) = re.findall(r"built for CUDA ([\d.]+),", "".join(shown("doctor without a GPU")))
    assert f'NVIDIA_REQUIRE_CUDA="cuda>={cuda}"' in instructions("ENV")
    assert f"`unsatisfied condition: cuda>={cuda}`" in PAGE
    commands = re.sub(r"\\\n#? *", "", DOCKERFILE.partition("ARG")[0] + PAGE)
    runs = re.findall(r"docker run (.*)", commands)
    assert len(runs) == 4
    assert all("--gpus all" in run and "-v vapo_cache:/cache" in run for run in runs)
