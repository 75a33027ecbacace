"""An agent's program of the environment's own, which writes its conversation anew each time."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class ForgetsConfig(vf.HarnessConfig):
    pass


class Forgets(vf.Harness[ForgetsConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for text in (data.prompt, "What did I ask?"):
                await client.chat.completions.create(
                    model=ctx.model, messages=[{"role": "user", "content": text}]
                )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ForgetsTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(prompt="Who are you?"), self.config.task)]


__all__ = ["Forgets", "ForgetsTaskset"]
