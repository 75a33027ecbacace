"""`make kills`: SIGKILL at random moments, again and again; the result is the uninterrupted one."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.runs import runs
from tests.runs.comparing import assert_same_run
from vapo.runs.run_dirs import read_record

NUM_KILLS = int(os.environ.get("NUM_KILLS", "25"))
NUM_KILLS_IN_BACKGROUND = int(os.environ.get("NUM_KILLS_IN_BACKGROUND", "8"))
NUM_KILLS_OF_TWO = int(os.environ.get("NUM_KILLS_OF_TWO", "6"))
LONGER = ["components.value_pretraining.num_iterations=3", "training.num_iterations=5"]
AUTO = "checkpoints.resume=auto"
SAVE_PAUSE_S = "0.05"
MOST_WAIT_S = 3.0

pytestmark = pytest.mark.kills


def place_of(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "starting"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("num_kills", "saving"),
    [(NUM_KILLS, []), (NUM_KILLS_IN_BACKGROUND, ["checkpoints.save_in_background=true"])],
    ids=["training waits for saves", "saves in the background"],
)
def test_killed_at_random(tmp_path: Path, num_kills: int, saving: list[str]) -> None:
    draw, places = random.Random(int(os.environ.get("SEED", "0"))), Counter[str]()
    whole, store = tmp_path / "whole", tmp_path / "mlruns"
    whole.mkdir()
    assert runs.fit(whole / "log.txt", *runs.where(whole, store), *LONGER) == 0
    num_runs = 0
    while places.total() < num_kills:
        folder = tmp_path / f"killed{num_runs}"
        folder.mkdir()
        num_runs += 1
        finished = False
        while not finished:
            trace = folder / "place"
            trace.unlink(missing_ok=True)
            process = runs.start(
                folder / "log.txt",
                *runs.where(folder, store),
                *LONGER,
                *saving,
                AUTO,
                hook=("traced", str(trace), SAVE_PAUSE_S),
            )
            if places.total() < num_kills:
                while place_of(trace) == "starting" and process.is_alive():
                    time.sleep(0.02)
                process.join(draw.uniform(0, MOST_WAIT_S))
                if process.is_alive():
                    where = place_of(trace)
                    process.kill()
                    process.join()
                    places[where] += 1
                    records = map(read_record, folder.glob("runs/*"))
                    finished = any(record.get("state") == "finished" for record in records)
                    continue
            assert runs.end(process) == 0, (folder / "log.txt").read_text()[-3000:]
            finished = True
        assert_same_run(folder, whole)
    print(f"\n{places.total()} kills in {num_runs} runs: {dict(places.most_common())}")


@pytest.mark.timeout(7200)
def test_one_of_two_processes_killed_at_random(tmp_path: Path) -> None:
    """The other ends by itself with a clear error, and the pair can be resumed."""
    draw, num_kills = random.Random(1), 0
    whole, store = tmp_path / "whole", tmp_path / "mlruns"
    whole.mkdir()
    pair = runs.two_ranks(whole, *runs.where(whole, store), *LONGER)
    assert [runs.end(p) for p in pair] == [0, 0], (whole / "log0.txt").read_text()[-3000:]
    folder = tmp_path / "killed"
    folder.mkdir()
    while True:
        trace = folder / "place"
        trace.unlink(missing_ok=True)
        hook = ("traced", str(trace), SAVE_PAUSE_S)
        pair = runs.two_ranks(folder, *runs.where(folder, store), *LONGER, AUTO, hooks=(hook, ()))
        if num_kills < NUM_KILLS_OF_TWO:
            while place_of(trace) == "starting" and pair[0].is_alive():
                time.sleep(0.02)
            victim = draw.randrange(2)
            pair[victim].join(draw.uniform(0, MOST_WAIT_S))
            if pair[victim].is_alive():
                pair[victim].kill()
                num_kills += 1
                other = 1 - victim
                assert runs.end(pair[other]) == 75
                log = (folder / f"log{other}.txt").read_text()
                assert "vapo: another process of this run has ended" in log.splitlines()[-1]
                continue
        assert [runs.end(p) for p in pair] == [0, 0], (folder / "log0.txt").read_text()[-3000:]
        break
    assert_same_run(folder, whole)
    print(f"\n{num_kills} kills of one of two processes")
