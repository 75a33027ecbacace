"""Many turns: the environment says whether the model's digit is too high or too low."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    hidden: int


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.hidden)) / trace.num_turns


class DigitEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    fails_after: int | None = None
    stopped_file: str | None = None


class DigitEnv(vf.Env[DigitEnvConfig]):
    async def run(self, task: DigitTask, agents: vf.Agents) -> None:
        message: str | None = "I think of a digit. Which?"
        async with agents.player.interaction(task) as interaction:
            for turn in range(5):
                if turn == self.config.fails_after:
                    raise ValueError("the game is broken")
                segment = await interaction.turn(message)
                if segment.terminated or segment.last_reply == str(task.data.hidden):
                    break
                message = "higher" if int(segment.last_reply) < task.data.hidden else "lower"

    async def stop(self) -> None:
        if self.config.stopped_file is not None:
            Path(self.config.stopped_file).write_text("stopped")


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[DigitTask]:
        while True:
            for hidden in (7, 2):
                yield DigitTask(DigitData(prompt=None, hidden=hidden), self.config.task)


__all__ = ["DigitEnv", "DigitTaskset"]
