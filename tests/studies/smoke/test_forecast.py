"""What a whole run takes by the figures of a smoke test, computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from vapo.studies.smoke.forecast import (
    RunPart,
    Session,
    checkpoint_iterations,
    forecast,
    num_due,
)
from vapo.studies.smoke.report import duration, seconds_table, shown_bytes, whole_run

RUN = (
    "components.value_pretraining.num_iterations=5",
    "training.num_iterations=10",
    "training.minibatch_size=8",
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=2",
    "evaluation.every_n_iterations=4",
    "checkpoints.every_n_iterations=6",
    "checkpoints.save_in_background=false",
    "value_pages.every_n_iterations=3",
)
MIB, GIB = 2**20, 2**30


def sessions() -> list[Session]:
    first = [
        RunPart("start", {"loading": 2.0, "evaluation": 7.0, "other": 3.0}, {"loading": GIB}),
        RunPart(
            "value_pretraining",
            {"rollout": 4.0, "training": 1.0, "value_page": 0.5, "other": 0.5},
            {"training": 3 * GIB, "rollout": 2 * GIB},
        ),
        RunPart(
            "policy_optimization",
            {
                "rollout": 3.0,
                "training": 2.0,
                "value_page": 1.5,
                "checkpoint": 6.0,
                "other": 1.0,
            },
            {"training": 2 * GIB},
        ),
    ]
    second = [
        RunPart("start", {"loading": 1.0}),
        RunPart(
            "policy_optimization",
            {"rollout": 5.0, "training": 2.0, "checkpoint": 8.0, "other": 1.0},
        ),
    ]
    sizes = {"num_kept": 2, "critic_bytes": 30 * MIB, "num_evaluated": 6}
    return [
        Session(first, checkpoint_bytes=100 * MIB, **sizes),
        Session(second, checkpoint_bytes=90 * MIB, **sizes),
    ]


def test_a_whole_run_by_hand(tmp_path: Path) -> None:
    """Evaluated at the start and after 4, 8 and 10; saved after 6, 12 and 15, and where a score may
    be the best, after 9, 13 and 15. Pages at 1, 3, 5 and at 1, 3, 6, 9, 10."""
    prediction = forecast(fit_config(tmp_path, *RUN), sessions())
    assert {item.name: (item.times, item.seconds) for item in prediction.items} == {
        "start": (1, 5.0),
        "evaluation": (4, 7.0),
        "iteration of value pretraining": (5, 5.5),
        "iteration of the policy": (10, 7.0),
        "value page": (8, 1.0),
        "checkpoint": (5, 7.0),
    }
    assert prediction.seconds == 5 + 28 + 27.5 + 70 + 8 + 35
    assert prediction.responses == {
        "value pretraining": 40,
        "the policy's training": 80,
        "evaluations": 24,
    }
    assert (prediction.disk_written, prediction.disk_held) == (530 * MIB, 430 * MIB)


def test_a_run_without_a_critic_has_no_value_pretraining(tmp_path: Path) -> None:
    grpo = (
        "algorithm.advantage_estimator=leave_one_out",
        "components.decoupled_gae.enabled=false",
        "components.length_adaptive_gae.enabled=false",
        "components.value_pretraining.enabled=false",
    )
    config = fit_config(tmp_path, *RUN, *grpo)
    measured = [Session(s.parts[:1] + s.parts[-1:], **_sizes(s)) for s in sessions()]
    prediction = forecast(config, measured)
    names = [item.name for item in prediction.items]
    assert "iteration of value pretraining" not in names
    assert prediction.responses["value pretraining"] == 0
    assert checkpoint_iterations(config) == [4, 6, 8, 10]


def _sizes(session: Session) -> dict[str, int]:
    names = ("checkpoint_bytes", "num_kept", "critic_bytes", "num_evaluated")
    return {name: getattr(session, name) for name in names}


def test_stored_rollouts_and_measured_truth(tmp_path: Path) -> None:
    """Stored rollouts are not sampled. True values are measured at the policy's 1, 5 and 10 alone,
    and a measurement's seconds are not those of an iteration."""
    own = ["components.value_pretraining.data=x.parquet", "value_truth.every_n_iterations=5"]
    first, second = sessions()
    first.parts[2].seconds["continuations"] = 50.0
    prediction = forecast(fit_config(tmp_path, *RUN, *own), [first, second])
    times = {item.name: (item.times, item.seconds) for item in prediction.items}
    assert times["measurement of true values"] == (3, 50.0)
    assert times["iteration of the policy"] == (10, 7.0)
    assert prediction.responses["value pretraining"] == 0


@pytest.mark.parametrize(
    ("iterations", "every_n", "times"),
    [(10, 3, 5), (10, 5, 3), (1, 4, 1), (0, 1, 0), (5, None, 0), (3, 1, 3)],
)
def test_how_often_something_is_due(iterations: int, every_n: int | None, times: int) -> None:
    assert num_due(iterations, every_n) == times


def test_a_session_comes_back_from_its_file() -> None:
    (session, _) = sessions()
    assert Session.of(json.loads(json.dumps(asdict(session)))) == session


def test_the_table_of_stages() -> None:
    assert seconds_table(sessions()).splitlines() == [
        "seconds           start  pretraining  policy  resume  policy  host GiB",
        "loading networks    2.0                          1.0              1.00",
        "evaluation          7.0",
        "rollout                          4.0     3.0             5.0      2.00",
        "training                         1.0     2.0             2.0      3.00",
        "value page                       0.5     1.5",
        "checkpoint                               6.0             8.0",
        "other               3.0          0.5     1.0             1.0",
        "in all             12.0          6.0    13.5     1.0    16.0      3.00",
    ]


def test_the_table_has_a_gpu_where_there_is_one() -> None:
    first, second = sessions()
    first.parts[2].gpu.update(rollout=60 * GIB, training=20 * GIB)
    lines = seconds_table([first, second]).splitlines()
    assert lines[0].endswith("host GiB  GPU GiB")
    assert lines[3].endswith("    2.00    60.00")
    assert lines[-1].endswith("    3.00    60.00")


def test_the_whole_run_in_words(tmp_path: Path) -> None:
    config = fit_config(tmp_path, *RUN)
    assert whole_run(config, forecast(config, sessions()), sessions()).splitlines() == [
        "time: about 2.9 minutes",
        "       1 x start, 5 s each: 5 s",
        "       4 x evaluation, 7 s each: 28 s",
        "       5 x iteration of value pretraining, 5.5 s each: 28 s",
        "      10 x iteration of the policy, 7 s each: 70 s",
        "       8 x value page, 1 s each: 8 s",
        "       5 x checkpoint, 7 s each: 35 s",
        "responses: 144 (40 of value pretraining, 80 of the policy's training, 24 of evaluations)",
        "disk: a checkpoint has 100.0 MiB; the run writes up to 530.0 MiB, and holds up to 430.0 "
        "MiB of that at a time",
        "memory: up to 3.0 GiB of the host",
        "what may differ: the policy's responses become longer or shorter while it learns",
    ]


def test_what_may_differ_is_that_of_the_config(tmp_path: Path) -> None:
    own = (
        "components.value_pretraining.stop_explained_variance=0.5",
        "training.max_staleness=1",
        "checkpoints.save_in_background=true",
    )
    config = fit_config(tmp_path, *RUN, *own)
    last = whole_run(config, forecast(config, sessions()), sessions()).splitlines()[-1]
    for text in ("may end early", "so the time is an upper limit", "costs less than it took here"):
        assert text in last


def test_durations_and_sizes_have_units_that_suit_them() -> None:
    assert duration(119) == "119 s"
    assert duration(7199) == "120.0 minutes"
    assert duration(49 * 3600) == "49.0 hours"
    assert [shown_bytes(n) for n in (2**19, 3 * GIB, 41 * 1024 * GIB)] == [
        "0.5 MiB",
        "3.0 GiB",
        "41.0 TiB",
    ]
