"""Rewards that are all equal, or large, are told of in plain words, once in a run."""

from __future__ import annotations

import io

import torch

from tests.integration.without_loss import Notebook
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording


def test_equal_rewards_are_said_once_and_different_ones_never() -> None:
    stream, nothing = io.StringIO(), torch.empty(0)
    with Progress(stream=stream, live=False, enabled=True) as progress:
        recording = Recording(Notebook(), progress)
        for rewards in (torch.tensor([1.0, -1.0]), torch.tensor([-1.0]), nothing):
            recording.note_rewards(rewards)
        assert stream.getvalue() == ""
        for reward in (-1.0, -1.0, 1.0):
            recording.note_rewards(torch.full((8,), reward))
    said = (
        "all 8 rewards are -1: there is nothing to learn from; look at responses with `vapo try`, "
        "or in the run's artifacts, in samples/"
    )
    assert stream.getvalue().count("nothing to learn") == 1
    assert said in stream.getvalue()


def test_large_rewards_are_said_once() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, live=False, enabled=True) as progress:
        recording = Recording(Notebook(), progress)
        recording.note_rewards(torch.tensor([10.0, -10.0, 1.0]))
        assert stream.getvalue() == ""
        for _ in range(2):
            recording.note_rewards(torch.tensor([1.0, -100.0, 50.0]))
    assert stream.getvalue().count("a reward is -100: learning rates are chosen for") == 1
