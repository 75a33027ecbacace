"""TRL's side of `iterations.py`: its GRPO trainer with vLLM in the same process, as it is.

Runs in an environment with TRL; gets the settings as JSON in its first argument, and writes one
line of JSON for each cycle (what is sampled once, and the optimizer steps on it) into the file
`report` of the settings.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Settings = dict[str, Any]


class Clock:
    """Seconds by stage of the cycle that is running, with the GPU's work waited for."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._since: float | None = None
        self._stages: dict[str, float] = {}
        self.lengths: list[int] = []
        self.gaps: list[float] = []

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return call(*args, **kwargs)
            finally:
                self._stages[stage] = self._stages.get(stage, 0.0) + self.now() - start

        return wrapped

    def cycle(self) -> None:
        """A cycle ends, if one has begun, and the next one begins."""
        now = self.now()
        if self._since is not None:
            on_gpu = torch.cuda.is_available()
            line = {
                "seconds": now - self._since,
                "tokens": sum(self.lengths),
                "longest": max(self.lengths),
                "shortest": min(self.lengths),
                "stages": {name: round(seconds, 3) for name, seconds in self._stages.items()},
                "trl": trl.__version__,
                "gap": sum(self.gaps) / len(self.gaps) if self.gaps else None,
                "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            }
            with self._report.open("a") as lines:
                print(json.dumps(line), file=lines, flush=True)
        self._since, self._stages, self.lengths, self.gaps = now, {}, [], []


class Cycles(TrainerCallback):
    def __init__(self, clock: Clock, num_steps: int) -> None:
        self.clock, self.num_steps = clock, num_steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.num_steps == 0:
            self.clock.cycle()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        gap = (logs or {}).get("sampling/sampling_logp_difference/mean")
        if gap is not None:
            self.clock.gaps.append(float(gap))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.cycle()


def make_trainer(settings: Settings, clock: Clock) -> Any:
    num_responses, num_steps = settings["num_responses"], settings["num_minibatches"]
    rows, model = settings["rows"], settings["model"]
    on_gpu = settings["gpu"]
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": settings["vllm_share"],
        "vllm_max_model_length": settings["max_tokens"],
    }
    config = GRPOConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_responses // num_steps // rows,
        steps_per_generation=num_responses // rows,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_steps=num_steps * settings["num_cycles"],
        max_completion_length=settings["response_tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=num_steps,
        seed=0,
        **(vllm if settings["vllm"] else {}),
    )

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.lengths += [len(ids) for ids in completion_ids]
        return [float(zlib.crc32(text.encode()) % 2) for text in completions]

    lines = Path(model, "problems.jsonl").read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["prompt"]} for line in lines]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=False
        ),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Cycles(clock, num_steps)],
    )
    if settings["vllm"]:
        engine = trainer.vllm_generation
        engine.generate = clock.timed("rollout", engine.generate)
        engine.sync_weights = clock.timed("weight_sync", engine.sync_weights)
    return trainer


def main() -> None:
    settings: Settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    make_trainer(settings, Clock(Path(settings["report"]))).train()


if __name__ == "__main__":
    main()
