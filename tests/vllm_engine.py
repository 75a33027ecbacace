"""A real vLLM engine over a tiny policy, for the tests with the mark `vllm`.

It is on the CPU, and on a GPU under `make gpu`, the only tests that see one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from tests.config.fits import ON_STATE_TRACKING, ROOT
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.config.engines import ColocatedVllm
from vapo.networks.actor_critic import Actor
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.networks.token_inputs import token_inputs
from vapo.rollouts.engines.engine import Engine
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler, Score, SyncCheck
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.cpu_heads import PaddedHeads
from vapo.rollouts.engines.vllm.engine_args import EngineSize

MAX_TOKENS = 128
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# Beside other engines on the same GPU; nothing that a CPU engine reads.
GPU_SHARE = 0.1


def vllm_model(**options: Any) -> Qwen2ForCausalLM:
    """The tiny policy with heads of 32, the least that vLLM's CPU attention knows."""
    return tiny_model(
        **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, **options}
    )


def make_engine(
    folder: Path, *, heads: PaddedHeads | None = None, **options: Any
) -> ColocatedEngine:
    settings = {
        "kv_cache_memory_bytes": 32 << 20,
        "engine_args": {"block_size": 32},
        "gpu_memory_utilization": GPU_SHARE,
        "enforce_eager": True,
        **options,
    }
    if not (folder / "config.json").exists():
        save_tiny_folder(folder, vllm_model())
    return ColocatedEngine(
        ColocatedVllm(**settings),
        EngineSize(MAX_TOKENS, 64),
        model_path=str(folder),
        dtype=str(DTYPE).removeprefix("torch."),
        device=DEVICE,
        heads=heads,
    )


def score_of(model: PreTrainedModel) -> Score:
    actor = Actor(model)

    @torch.no_grad()
    def score(pairs):
        inputs = token_inputs(pairs, pad_id=0)
        rows = inputs.scatter(actor(inputs, temperature=1.0).logprobs).tolist()
        return [row[: len(response)] for row, (_, response) in zip(rows, pairs, strict=True)]

    return score


def make_check(model: PreTrainedModel, *, limit: float = 0.1 if ON_GPU else 1e-3) -> SyncCheck:
    return SyncCheck(
        score_of(model),
        vocab_size=model.config.vocab_size,
        max_tokens=MAX_TOKENS,
        max_logprob_gap=limit,
    )


def make_vllm_sampler(engine: Engine, model: PreTrainedModel) -> EngineSampler:
    """A sampler with the model's weights pushed."""
    sampler = EngineSampler(
        engine,
        end_ids=end_token_ids(model.generation_config, tiny_tokenizer()),
        weights=lambda: model.state_dict().items(),
        convert=CastWeights(DTYPE),
        check=make_check(model),
    )
    sampler.sync(model.state_dict().items())
    return sampler


@contextmanager
def real_servers(
    folder: Path, *ports: int, config: Sequence[str] = ON_STATE_TRACKING
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`vapo serve` for the policy in the folder on each of the ports, once all answer."""
    processes = [_serve(folder, port, config) for port in ports]
    try:
        until = time.monotonic() + 400
        for process, port in zip(processes, ports, strict=True):
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, "the server did not start"
                assert time.monotonic() < until
                time.sleep(0.5)
        yield processes
    finally:
        for process in processes:
            kill_server(process)


def _serve(folder: Path, port: int, config: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "vapo", "serve", "--port", str(port)]
    options = (
        *config,
        f"actor.path={folder}",
        "critic.init=policy",
        "rollouts.engine=vllm_server",
        f"rollouts.servers.urls=http://127.0.0.1:{port}",
        "rollouts.servers.kv_cache_memory_bytes=33554432",
        f"rollouts.servers.gpu_memory_utilization={GPU_SHARE}",
        "rollouts.servers.enforce_eager=true",
        *(["trainer.precision=bf16-mixed"] if ON_GPU else []),
        "rollouts.max_concurrent_sequences=64",
        "data.max_prompt_tokens=96",
        "rollouts.max_response_tokens=900",
    )
    with open(folder.parent / f"server_{port}.log", "ab") as log:
        return subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            # vLLM would bind all servers of a host to the same cores
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill_server(process: subprocess.Popen[bytes]) -> None:
    """As kill -9 of the server and of its engine's process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
