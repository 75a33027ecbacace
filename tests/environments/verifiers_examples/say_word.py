"""One turn: the model says the word that it is given."""

from __future__ import annotations

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.stop
    async def one_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class WordConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("apple", "river", "stone")


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> list[WordTask]:
        return [
            WordTask(
                WordData(prompt=f"Say {word}.", system_prompt="Obey.", answer=word),
                self.config.task,
            )
            for word in self.config.words
        ]


__all__ = ["WordTaskset"]
