"""`make soak`: hundreds of iterations do not gather memory, open files or threads."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.runs import runs

NUM_ITERATIONS = int(os.environ.get("NUM_ITERATIONS", "500"))
SMALLEST = [
    "components.value_pretraining.num_iterations=20",
    "components.group_sampling.num_prompts=2",
    "training.minibatch_size=4",
    "rollouts.max_response_tokens=8",
    "evaluation.every_n_iterations=25",
    f"training.num_iterations={NUM_ITERATIONS - 20}",
]
POLL_S = 0.5


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_hundreds_of_iterations_gather_nothing(tmp_path: Path) -> None:
    """After a fifth of the iterations, the last fifth's median is within 5 % of the first."""
    log, samples = tmp_path / "log.txt", []
    process = runs.start(log, *runs.where(tmp_path, tmp_path / "mlruns"), *SMALLEST)
    watched = psutil.Process(process.pid)
    while process.is_alive():
        process.join(POLL_S)
        try:
            done = log.read_text().count("\niteration ") if log.exists() else 0
            rss_mib = watched.memory_info().rss / 2**20
            samples.append((done, rss_mib, watched.num_fds(), watched.num_threads()))
        except psutil.NoSuchProcess:
            break
    assert runs.end(process) == 0, log.read_text()[-3000:]
    fifth = NUM_ITERATIONS // 5
    rows = [median([s for s in samples if k * fifth <= s[0] < (k + 1) * fifth]) for k in range(5)]
    print("\niterations  rss MiB  open files  threads")
    for k, (_, rss, files, threads) in enumerate(rows):
        print(f"{k * fifth:4}-{(k + 1) * fifth:<5}  {rss:7.1f}  {files:10.0f}  {threads:7.0f}")
    (_, rss, files, threads), (_, rss_end, files_end, threads_end) = rows[1], rows[-1]
    assert rss_end <= 1.05 * rss
    assert files_end <= files
    assert threads_end <= threads


def median(samples: list[tuple[int, float, int, int]]) -> tuple[float, ...]:
    columns = [sorted(column) for column in zip(*samples, strict=True)]
    return tuple(float(column[len(column) // 2]) for column in columns)
