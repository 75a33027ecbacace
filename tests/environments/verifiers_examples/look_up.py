"""Tools: a server of the environment has what the model must find."""

from __future__ import annotations

import os

import verifiers.v1 as vf

CAPITALS = {"peru": "Lima", "kenya": "Nairobi"}


class Atlas(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "atlas"

    @vf.tool
    def capital(self, country: str) -> str:
        """The capital of a country."""
        return f"{CAPITALS.get(country.lower(), 'unknown')} (process {os.getpid()})"


class AtlasTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AtlasData(vf.TaskData):
    answer: str


class AtlasTask(vf.Task[AtlasData, vf.State, AtlasTaskConfig]):
    @classmethod
    def toolsets(cls, config: AtlasTaskConfig) -> list[vf.Toolset]:
        return [Atlas(config.tools)]

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages) and self.data.answer in (trace.last_reply or ""))


class AtlasConfig(vf.TasksetConfig):
    task: AtlasTaskConfig = AtlasTaskConfig()


class AtlasTaskset(vf.Taskset[AtlasTask, AtlasConfig]):
    def load(self) -> list[AtlasTask]:
        return [
            AtlasTask(AtlasData(prompt=f"Capital of {name}?", answer=answer), self.config.task)
            for name, answer in CAPITALS.items()
        ]


__all__ = ["AtlasTaskset"]

if __name__ == "__main__":
    Atlas.run()
