"""Where the seconds of a training step go: by stage, by operation, in waits and in compilations.

    python experiments/gpu/training_steps.py --out experiments/gpu/training_steps_DEVICE.json
    python experiments/gpu/training_steps.py --toy       # on a CPU, in seconds

It trains on rollouts of drawn tokens, which needs no sampling engine: log-probs and values, then
the updates of actor and critic, by the product's own stages and Trainer. The policy has the shape
of `--shape` and random weights. The first iteration warms up and does not count; the seconds of
the stages are medians of the next ones, without a profiler, and the operations are those of the
log-probs and the first minibatch of one iteration more. Tables are printed once they are there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function
from training_tables import (  # beside this file
    Operation,
    by_stage,
    median,
    operation_tables,
    response_lengths,
    stage_figures,
    stage_table,
)
from transformers import AutoConfig, AutoModelForCausalLM

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.precision import resolve_precision
from vapo.networks.token_inputs import rollout_inputs
from vapo.rollouts.batch import make_rollout_batch
from vapo.system.libraries import quiet_libraries
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import memory_metrics, peak_tflops
from vapo.training.datamodule import iteration_of
from vapo.training.module import VapoModule
from vapo.training.parts import assemble_parts
from vapo.types import FinishReason, IterationStart, Prompt, Rollout, RolloutBatch, Turn

ROOT = Path(__file__).parents[2]
RANGES = {
    "logprobs_values": "log-probs and values",
    "actor_update": "actor's update",
    "critic_update": "critic's update",
    "Optimizer.step#AdamW.step": "optimizers",
}
TOY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "bos_token_id": None,
    "eos_token_id": 1,
    "layer_types": None,
}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--shape", default="qwen2.5_0.5b", help="a folder of models/shapes, or a path")
    add("--rows", type=int, default=256, help="responses of an iteration")
    add("--group_size", type=int, default=8)
    add("--prompt_tokens", type=int, default=130)
    add("--response_tokens", type=int, default=512, help="the longest response")
    add("--lengths", choices=["equal", "drawn"], default="equal")
    add("--minibatches", type=int, default=4, help="optimizer steps of an iteration")
    add("--precision", default="bf16-mixed", choices=["auto", "bf16-mixed", "32-true"])
    add("--microbatch_tokens", default="16384")
    add("--gradient_checkpointing", default="true")
    add("--repeats", type=int, default=3, help="timed iterations")
    add("--operations", type=int, default=12, help="how many of each stage are shown")
    add("--accelerator", default="auto", choices=["auto", "cpu", "gpu"])
    add("--toy", action="store_true", help="sizes that only try the script")
    add("--out", type=Path, help="a JSON file for all figures")
    add("overrides", nargs="*", help="further config keys, as KEY=VALUE")
    parsed = parser.parse_args(arguments)
    if parsed.toy:
        parsed.rows, parsed.group_size, parsed.minibatches, parsed.repeats = 8, 4, 2, 1
        parsed.prompt_tokens, parsed.response_tokens, parsed.microbatch_tokens = 6, 40, "128"
    return parsed


def save_policy(folder: Path, arguments: argparse.Namespace) -> int:
    """A policy of the shape with random weights, as a folder that a run loads; its vocabulary."""
    shape_folder = ROOT / "models/shapes" / arguments.shape
    config = AutoConfig.from_pretrained(
        shape_folder if shape_folder.is_dir() else arguments.shape, trust_remote_code=False
    )
    if arguments.toy:
        config = type(config)(**{**config.to_dict(), **TOY})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(config.vocab_size)


def make_config(folder: Path, arguments: argparse.Namespace) -> FitConfig:
    files = [ROOT / "conf/data/gsm8k.yaml", ROOT / "conf/scale/own_model_gpu.yaml"]
    sizes = {
        "actor.path": folder / "policy",
        "output_dir": folder / "runs",
        "trainer.accelerator": arguments.accelerator,
        "trainer.precision": arguments.precision,
        "components.value_pretraining.enabled": "false",
        "components.group_sampling.num_prompts": arguments.rows // arguments.group_size,
        "components.group_sampling.group_size": arguments.group_size,
        "data.max_prompt_tokens": arguments.prompt_tokens,
        "rollouts.max_response_tokens": arguments.response_tokens,
        "training.minibatch_size": arguments.rows // arguments.minibatches,
        "training.microbatch_tokens": arguments.microbatch_tokens,
        "training.num_iterations": arguments.repeats + 2,
        "actor.gradient_checkpointing": arguments.gradient_checkpointing,
        "critic.gradient_checkpointing": arguments.gradient_checkpointing,
    }
    overrides = [f"{key}={value}" for key, value in sizes.items()]
    config = load_config(FitConfig, files, [*overrides, *arguments.overrides])
    resolve_precision(config)
    return config


class DrawnRollouts:
    """The same responses of drawn tokens in each iteration, half of them right."""

    def __init__(self, config: FitConfig, arguments: argparse.Namespace, vocabulary: int) -> None:
        draw = random.Random(0)

        def ids(length: int) -> tuple[int, ...]:
            return tuple(draw.randrange(2, vocabulary) for _ in range(length))

        lengths = response_lengths(arguments.lengths, arguments.rows, arguments.response_tokens)
        rollouts = []
        for row, length in enumerate(lengths):
            if row % arguments.group_size == 0:
                prompt = Prompt(f"drawn:{row}", "", ids(arguments.prompt_tokens), "")
            reward = float(draw.random() < 0.5)
            logprobs, turns = (-1.0,) * length, (Turn(0, length, reward),)
            stop = FinishReason.STOP
            rollouts.append(
                Rollout(prompt, ids(length), "", logprobs, stop, turns, is_correct=reward > 0)
            )
        self.batch = make_rollout_batch(
            rollouts,
            group_size=arguments.group_size,
            rewards=config.rewards,
            max_response_tokens=arguments.response_tokens,
        )

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        return self.batch, {}


class Watching(Callback):
    """Seconds of the stages of each iteration; operations of the first minibatch of the last."""

    def __init__(self, progress: Progress, arguments: argparse.Namespace) -> None:
        self.progress, self.arguments = progress, arguments
        self.seconds: list[dict[str, float]] = []
        self.flops: dict[str, float] = {}
        self.compiled_before = compiled_graphs()
        self.compiled = 0
        self.memory: dict[str, float] = {}
        self.profiler: Any = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.arguments.repeats + 1:  # the last
            self.compiled = compiled_graphs() - self.compiled_before
            self.memory = memory_metrics()
            activities = [ProfilerActivity.CPU]
            if pl_module.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.progress.annotate = record_function
            self.profiler = profile(activities=activities)
            self.profiler.start()
        self.since = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self.profiler is not None and trainer.current_epoch == self.arguments.repeats + 1:
            self.profiler.stop()
            trainer.should_stop = True
            trainer.limit_train_batches = 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        total = time.monotonic() - self.since
        stages = self.progress.pop_iteration_seconds()
        seconds = {"logprobs_values": stages["logprobs_values"], **pl_module.update_seconds}
        between = total - sum(seconds.values())
        self.seconds.append({**seconds, "between": between, "iteration": total})
        if not self.flops:
            self.flops = count_flops(pl_module, trainer)


def compiled_graphs() -> int:
    """How many graphs torch has compiled in this process, recompilations included."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is None:
        return 0
    return int(dynamo.counters["stats"].get("unique_graphs", 0))


def count_flops(module: VapoModule, trainer: L.Trainer) -> dict[str, float]:
    """Operations of each stage by the product's own count, and the tokens of the batch."""
    iteration = iteration_of(trainer)
    networks: list[Any] = [module.actor, *([module.critic] if module.critic is not None else [])]
    rows = range(len(iteration.batch))
    inputs = rollout_inputs(iteration.batch, rows, pad_id=module.pad_id, layout=module.layout)
    stage_flops: dict[str, float] = {
        "logprobs_values": sum(n.forward_flops.count(inputs) for n in networks)
    }
    for name, network in (("actor", module.actor), ("critic", module.critic)):
        if network is not None:
            parts = (m for minibatch in iteration.minibatches for m in minibatch.of(name))
            flops = sum(network.forward_flops.count_update(micro.inputs) for micro in parts)
            stage_flops[f"{name}_update"] = flops
    prompts = sum(len(r.prompt.prompt_ids) for r in iteration.batch.rollouts)
    stage_flops["tokens"] = prompts + float(iteration.batch.response_mask.sum())
    return stage_flops


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the iterations; print each table once it is there; return all figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = save_policy(folder / "policy", arguments)
        config = make_config(folder, arguments)
        rollouts, progress = DrawnRollouts(config, arguments, vocabulary), Progress(enabled=False)
        module = VapoModule(config, pad_id=0)
        parts = assemble_parts(module, lambda _: rollouts, progress=progress, critic_dir=None)
        watching = Watching(progress, arguments)
        trainer = L.Trainer(
            **parts.trainer_options,
            callbacks=[*parts.callbacks, watching],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, parts.datamodule)
        peak = peak_tflops(config.trainer, config.actor.dtype, module.device)
    seconds = median(watching.seconds[1:-1], lambda name: True)
    stages = {
        RANGES.get(stage, stage): stage_figures(
            value,
            watching.flops["tokens"] if stage != "between" else 0.0,
            watching.flops.get(stage, 0.0),
            peak,
        )
        for stage, value in seconds.items()
    }
    record: dict[str, Any] = {
        **provenance(module.device),
        "options": {k: str(v) for k, v in vars(arguments).items()},
        "precision": config.trainer.precision,
        "layout": module.layout,
        "microbatch_tokens": module.microbatching.tokens,
        "recomputing": list(module.microbatching.recomputing),
        "peak_tflops": peak,
        "tokens": watching.flops["tokens"],
        "compiled_graphs": watching.compiled,
        "memory": watching.memory,
        "stages": stages,
    }
    print(describe(record), stage_table(stages), sep="\n\n", flush=True)
    operations = by_stage(operations_of(watching.profiler), RANGES)
    record["operations"] = {
        name: stage_operations.record(arguments.operations)
        for name, stage_operations in operations.items()
    }
    print("\n" + operation_tables(record["operations"]), flush=True)
    return record


def operations_of(profiler: Any) -> list[Operation]:
    """The host's calls, with the device time of the kernels that each of them started."""
    return [
        Operation(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.self_cpu_time_total,
            event.self_device_time_total,
        )
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CPU
    ]


def provenance(device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else f"CPU, {platform.machine()}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "experiments/gpu/training_steps.py", *sys.argv[1:]]),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "vapo")},
    }


def describe(record: dict[str, Any]) -> str:
    memory = ", ".join(f"{name} {value:.2f}" for name, value in record["memory"].items())
    return (
        f"{record['device']}, {record['date']}: {record['precision']}, {record['layout']}, "
        f"{record['tokens']:,.0f} tokens an iteration, {record['compiled_graphs']} graphs "
        f"compiled; {memory}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = options(arguments)
    quiet_libraries()
    record = measure(parsed)
    if parsed.out is not None:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\n{parsed.out}")


if __name__ == "__main__":
    main()
