"""Starts vLLM on a tiny model made on the spot and samples from it, for `vapo doctor`.

It is done in a process of its own with a time limit, as an engine that does not start may hang or
crash: `python -m vapo.commands.engine_trial FOLDER`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path

from vapo.errors import UserError
from vapo.errors.redactor import redacted
from vapo.errors.shown_text import say
from vapo.user_code.python_child import python_command, python_environment

TIME_LIMIT_S = 600.0  # on a GPU vLLM's first start compiles for more than a minute
_LOG, _RESULT = "doctor.log", "result.json"
_NUM_TOKENS = 16


def try_engine(*, time_limit_s: float = TIME_LIMIT_S) -> str:
    """Start vLLM in a process of its own and sample from it. Return how long that took, in words.

    Raises: UserError: vLLM does not work, with the cause and the folder that has the whole output.
    """
    folder = Path(tempfile.mkdtemp(prefix="vapo-doctor-"))
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            python_command("vapo.commands.engine_trial", str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=python_environment(),
            start_new_session=True,
        )
        try:
            process.wait(time_limit_s)
            outcome = f"its process ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"it has not sampled within {time_limit_s:g} s"
        finally:  # the process may have ended while its children still run
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        result = json.loads((folder / _RESULT).read_text())
    except (OSError, ValueError):
        result = {"problem": outcome}
    if "problem" in result:
        raise UserError(f"cannot start: {result['problem']}; the whole output is in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    return str(result["seconds"])


def sample_once(folder: Path) -> str:
    """Make a tiny model, start vLLM on it, push weights and sample.

    Returns: how long the start and the sampling took, in words.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from vapo.config.engines import ColocatedVllm
    from vapo.config.schema import TrainerConfig
    from vapo.rollouts.engines.contract import SamplingSettings
    from vapo.rollouts.engines.engine import Request, generate_all
    from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
    from vapo.rollouts.engines.vllm.engine_args import EngineSize
    from vapo.rollouts.engines.vllm.log import EngineLog
    from vapo.system.libraries import pick_device

    device = pick_device(TrainerConfig())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "model")
    # a small share, which is also free on a GPU that other programs use
    options = ColocatedVllm(gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 26)
    engine_start = time.monotonic()
    with closing(
        ColocatedEngine(
            options,
            EngineSize(64, 4),
            model_path=str(folder / "model"),
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            log=EngineLog(folder),
        )
    ) as engine:
        sampling_start = time.monotonic()
        weights = Qwen2ForCausalLM(config).state_dict().items()
        engine.load((name, tensor.to(device, dtype)) for name, tensor in weights)
        requests = [Request((3, 4, 5), seed, SamplingSettings(_NUM_TOKENS)) for seed in range(2)]
        responses = generate_all(engine, requests)
        sampling_end = time.monotonic()
    for response in responses:
        if len(response.ids) != _NUM_TOKENS or not all(map(math.isfinite, response.logprobs)):
            raise UserError(
                f"it returned {len(response.ids)} of {_NUM_TOKENS} tokens, or a log-prob that is "
                "not a finite number"
            )
    starting_s, sampling_s = sampling_start - engine_start, sampling_end - sampling_start
    return f"started in {starting_s:.1f} s, sampled in {sampling_s:.1f} s"


def report_trial(folder: Path) -> None:
    """Try vLLM, and write to the folder how long that took, or what the problem is."""
    result = {}
    try:
        result["seconds"] = sample_once(folder)
    except Exception as error:
        say(redacted(traceback.format_exc()), file=sys.stderr)
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        result["problem"] = redacted(f"{type(cause).__name__}: {reason}")
    (folder / _RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    report_trial(Path(sys.argv[1]))
