"""What a processor, a device or an installed package decides is tried both ways on every machine.

A branch that only some machines take is seen by nobody else until it fails there. So each question
that the package asks of its machine has a test that gives it the other answer, and each test that
may be skipped has another, of the same code, that never is. The two tables below are whole: a
further skip or question is red here until it has its line. Tests with the marks `gpu` and `vllm`
run on machines of their own (`make gpu`, `make vllm-test`).

bfloat16: products of it are tried with the processor's kernels and by torch's own, which emulate
them (tests/rollouts/test_decoding.py), and the choice of the precision with both answers
(tests/networks/test_precision.py). `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before a
command makes it run as on an older processor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPING = {"skip", "skipif", "importorskip", "xfail", "skipIf", "skipUnless", "SkipTest"}

SKIPS = {
    # file with the skip: (what decides, the tests of the same code that always run)
    "tests/diagnostics/value_page/browser.py": (
        "chromium, else Node",
        [
            "tests/diagnostics/value_page/test_hostile_text.py",
            "tests/studies/inspection/test_page.py",
        ],
    ),
    "tests/user_code/test_process_memory.py": (
        "Linux",
        ["tests/user_code/test_process_memory_elsewhere.py"],
    ),
    "tests/environments/test_verifiers_package.py": (
        "the package verifiers",
        ["tests/environments/test_verifiers_stand_in.py"],
    ),
    "tests/rewards/test_math_verify_package.py": (
        "the package math-verify",
        ["tests/rewards/test_math_verify.py"],
    ),
}

QUESTIONS = {
    # (file, question): the test that gives it another answer than this machine's
    ("system/private_attributes.py", "_is_avx512_bf16_supported"): "networks/test_precision.py",
    ("system/private_attributes.py", "_is_amx_tile_supported"): "networks/test_precision.py",
    ("system/private_attributes.py", "_is_mkldnn_bf16_supported"): "networks/test_precision.py",
    ("system/private_attributes.py", "mkldnn.is_available"): "networks/test_precision.py",
    ("system/private_attributes.py", "platform.machine"): "networks/test_precision.py",
    ("networks/precision.py", "cpu_has_bfloat16_products"): "networks/test_precision.py",
    ("networks/precision.py", "is_bf16_supported"): "networks/test_precision.py",
    ("system/libraries.py", "cuda.is_available"): "system/test_devices.py",
    ("commands/doctor.py", "cuda.is_available"): "system/test_devices.py",
    ("training/callbacks/recording.py", "cuda.is_available"): "system/test_devices.py",
    ("training/trainer.py", "cuda.is_available"): "system/test_devices.py",
    ("training/strategy.py", "cuda.is_available"): "networks/test_offload.py",
    ("commands/own_model.py", "cuda.is_available"): "commands/test_own_model.py",
    ("studies/estimate/engine_beside.py", "cuda.is_available"): (
        "studies/estimate/test_engine_beside.py"
    ),
    ("rollouts/engines/vllm_server/folder_backend.py", "accelerator.is_available"): (
        "rollouts/test_folder_backend.py"
    ),
    ("commands/own_model.py", "find_spec"): "commands/test_own_model.py",
    ("networks/importing.py", "find_spec"): "networks/test_import.py",
    ("prompts/generated_rows.py", "find_spec"): "rewards/test_verifiers.py",
    ("rewards/verifiers.py", "find_spec"): "rewards/test_math_verify.py",
    ("rollouts/engines/vllm/engine_args.py", "find_spec"): "rollouts/test_vllm_arguments.py",
    ("tracking/also.py", "find_spec"): "tracking/test_also.py",
}
NO_QUESTIONS = {
    "user_code/user_functions.py": "looks for a user's module",
    "user_code/function_files.py": "looks for a user's module",
    "networks/weights_lineage.py": "an instruction set is one word of a digest",
    "tracking/provenance.py": "a machine is recorded",
}
ASKED = {
    *("cpu_has_bfloat16_products", "_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    *("_is_mkldnn_bf16_supported", "is_bf16_supported", "get_cpu_capability", "find_spec"),
    *("get_device_capability", "is_available", "machine", "processor"),
}

DEVICES = {"cuda", "accelerator", "mkldnn", "mps", "xpu", "platform"}  # whose `is_available` counts


def calls(path: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """Name and owner of each of some functions that a file calls, also as a decorator."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in names):
        return
    for node in ast.walk(ast.parse(text)):
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute) and function.attr in names:
            yield function.attr, ast.unparse(function.value).rpartition(".")[2]
        elif isinstance(function, ast.Name) and function.id in names:
            yield function.id, ""


def test_each_test_that_may_be_skipped_has_one_that_never_is() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    skipping = {str(path.relative_to(ROOT)) for path in files if list(calls(path, SKIPPING))}
    assert skipping == set(SKIPS), "give the new skip a test that always runs, and a line above"
    for _, always in SKIPS.values():
        for path in always:
            assert path not in skipping
            assert "def test_" in (ROOT / path).read_text(encoding="utf-8")


def test_each_question_to_the_machine_is_answered_both_ways() -> None:
    asked = set()
    for path in (ROOT / "vapo").rglob("*.py"):
        file = str(path.relative_to(ROOT / "vapo"))
        for name, owner in calls(path, ASKED) if file not in NO_QUESTIONS else ():
            is_general = name in ("is_available", "machine", "processor")
            if not is_general or owner in DEVICES:
                asked.add((file, f"{owner}.{name}" if is_general else name))
    assert asked == set(QUESTIONS), "try the new question with both answers, and give it a line"


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: "-".join(question))
def test_its_test_gives_the_answer(question: tuple[str, str]) -> None:
    """By putting a function in the place of the real one, in a file that no machine skips."""
    name = question[1].rpartition(".")[2]
    text = (ROOT / "tests" / QUESTIONS[question]).read_text(encoding="utf-8")
    patched = [line for line in text.splitlines() if name in line]
    assert patched, f"{QUESTIONS[question]} does not answer {name}"
    assert "pytestmark = pytest.mark.gpu" not in text
    assert "pytestmark = pytest.mark.vllm" not in text
