"""Two agents that answer the same task, one after the other."""

from __future__ import annotations

import verifiers.v1 as vf


class TwoConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoEnv(vf.Env[TwoConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.first.run(task)
        await agents.second.run(task)


class TwoTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "I am") + 10 * float(trace.last_reply == "other")


class TwoTaskset(vf.Taskset[TwoTask, vf.TasksetConfig]):
    def load(self) -> list[TwoTask]:
        return [TwoTask(vf.TaskData(prompt="Who are you?"), self.config.task)]


__all__ = ["TwoEnv", "TwoTaskset"]
