"""Makes the sampling engine that the config names, for an actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.engines import EngineOptions, VllmEngine, VllmServerEngine
from vapo.config.schema import ActorConfig, EvaluationConfig
from vapo.networks.actor_critic import Actor
from vapo.networks.precision import may_round_products
from vapo.networks.saved_names import under_saved_names
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.rollouts.engines.contract import Sampler, Weights
from vapo.rollouts.engines.engine import Engine, TensorParallelEngine
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler, Score, SyncCheck
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine, check_options
from vapo.rollouts.engines.vllm.cpu_heads import padded_heads
from vapo.rollouts.engines.vllm.engine_args import EngineSize
from vapo.rollouts.engines.vllm.log import EngineLog
from vapo.rollouts.engines.vllm_server.engine import ServedEngine
from vapo.rollouts.engines.vllm_server.weights import FolderTransfer, NcclTransfer, WeightTransfer
from vapo.system.distributed import rank

_FLOAT32_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # in transformers
_MAX_LOGPROB_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class ActorAccess:
    """What a sampling engine uses of the actor, whether it is sharded or not.

    `weights` returns the full tensors under the names of the model without adapters. `logprobs`
    computes the trainer's log-probs, [b, T], at temperature 1. Inside `gather` the module holds the
    full weights. Every rank must call each of these functions.
    """

    model: PreTrainedModel
    device: torch.device
    weights: Weights
    logprobs: Callable[[TokenInputs], torch.Tensor]
    gather: Callable[[], AbstractContextManager[None]] = nullcontext
    local_rank: int = 0


def access_to(model: PreTrainedModel, device: torch.device) -> ActorAccess:
    """Move an unsharded policy to a device, and return what an engine uses of it."""
    model.to(device)  # type: ignore[arg-type]
    actor = Actor(model)
    return ActorAccess(
        model=model,
        device=device,
        weights=lambda: model.state_dict().items(),
        logprobs=lambda inputs: inputs.scatter(actor(inputs, temperature=1.0).logprobs),
    )


def sampling_config(
    config: SftConfig | RewardModelConfig, path: str, evaluation: EvaluationConfig
) -> FitConfig:
    """Return a training config with which `make_sampler` samples from the policy in the folder
    `path`; its settings are those of `config` and `evaluation`."""
    sampling = FitConfig(
        actor=ActorConfig(path=path),
        data=config.data,
        rollouts=config.rollouts,
        rewards=config.rewards,
        evaluation=evaluation,
        trainer=config.trainer,
    )
    if isinstance(config, SftConfig):
        sampling.environment = config.environment
    return sampling


def check_engine(config: FitConfig) -> None:
    """Check that the sampling engine that the config names can be used.

    Raises: UserError: the engine is vLLM, which is not installed or refuses an option.
    """
    if isinstance(config.rollouts, VllmEngine):
        check_options(config.rollouts.vllm)


def make_sampler(
    config: FitConfig,
    actor: ActorAccess,
    tokenizer: PreTrainedTokenizerBase,
    *,
    run_folder: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Sampler:
    """Make the sampling engine that the config names.

    Args:
        run_folder: where vLLM's log is written; None: the log is kept only if vLLM fails.
        note: called with a line of text for each part of vLLM's start.
    """
    if isinstance(config.rollouts, VllmEngine | VllmServerEngine):
        log = partial(EngineLog, run_folder, rank=rank(), note=note)
        return _make_engine_sampler(config, config.rollouts, actor, tokenizer, log)
    make: Callable[..., TransformersSampler] = TransformersSampler
    mixed_dtype = torch.bfloat16 if has_mixed_copy(config) else None
    if config.training.max_staleness > 0 or mixed_dtype is not None:
        make = partial(DetachedTransformersSampler, lora=config.actor.lora, mixed_dtype=mixed_dtype)
    return make(
        actor.model,
        tokenizer,
        max_concurrent_sequences=config.rollouts.max_concurrent_sequences,
        device=actor.device,
        gather=actor.gather,
        rounds=may_round_products(config),
    )


def has_mixed_copy(config: FitConfig) -> bool:
    """Whether the Transformers engine needs a copy of the actor with weights rounded to bfloat16.

    It does with `trainer.precision` bf16-mixed, except for a sharded actor, which is gathered in
    the dtype that it computes in.
    """
    trainer = config.trainer
    is_mixed = trainer.precision == "bf16-mixed" and trainer.strategy != "fsdp"
    return is_mixed and config.actor.dtype == "float32"


def engine_size(config: FitConfig, num_positions: int | None) -> EngineSize:
    """Return how many tokens and requests a vLLM engine must hold.

    It has room for the longest prompt with the longest response, up to the model's `num_positions`;
    None: the model has no limit.
    """
    training, evaluation = config.rollouts, config.evaluation
    longest = max(training.max_response_tokens, evaluation.max_response_tokens or 0)
    tokens = config.data.max_prompt_tokens + longest
    if num_positions is not None:
        tokens = min(tokens, num_positions)
    return EngineSize(tokens, training.max_concurrent_sequences)


def _make_engine_sampler(
    config: FitConfig,
    rollouts: VllmEngine | VllmServerEngine,
    actor: ActorAccess,
    tokenizer: PreTrainedTokenizerBase,
    open_log: Callable[[], EngineLog],
) -> EngineSampler:
    options, dtype = rollouts.engine_options, engine_dtype(config, rollouts.engine_options)
    cast = CastWeights(dtype, float32_name_parts(actor.model))
    vocab_size = actor.model.config.get_text_config().vocab_size

    def convert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return under_saved_names(actor.model, cast(weights))

    engine: Engine
    if isinstance(rollouts, VllmEngine):
        engine = _colocated_engine(config, rollouts, actor, open_log())
    else:
        urls = [url.strip() for url in rollouts.servers.urls.split(",")]
        transfer = _transfer(config, rollouts, urls, lambda: convert(actor.weights()))
        engine = ServedEngine(urls, transfer, vocab_size=vocab_size, timeout_s=options.timeout_s)
    gap = options.max_logprob_gap
    sampler = EngineSampler(
        engine,
        end_ids=end_token_ids(actor.model.generation_config, tokenizer),
        weights=actor.weights,
        convert=convert,
        check=SyncCheck(
            score_with(actor, pad_id=int(tokenizer.pad_token_id)),
            vocab_size=vocab_size,
            max_tokens=engine.max_tokens,
            max_logprob_gap=_MAX_LOGPROB_GAP[dtype] if gap is None else gap,
        ),
    )
    try:
        sampler.sync(actor.weights())
    except BaseException:
        sampler.close()
        raise
    return sampler


def _colocated_engine(
    config: FitConfig, rollouts: VllmEngine, actor: ActorAccess, log: EngineLog
) -> Engine:
    """Make a vLLM engine in this process, which has no weights yet.

    With `tensor_parallel_size` above 1 it is this rank's part of an engine of several ranks.
    """
    text_config, num_parts = (
        actor.model.config.get_text_config(),
        rollouts.vllm.tensor_parallel_size,
    )
    engine = ColocatedEngine(
        rollouts.vllm,
        engine_size(config, getattr(text_config, "max_position_embeddings", None)),
        model_path=config.actor.path,
        dtype=str(engine_dtype(config, rollouts.vllm)).removeprefix("torch."),
        device=actor.device,
        local_rank=actor.local_rank,
        heads=padded_heads(text_config) if actor.device.type == "cpu" else None,
        log=log,
    )
    return TensorParallelEngine(engine, num_parts) if num_parts > 1 else engine


def _transfer(
    config: FitConfig, rollouts: VllmServerEngine, urls: Sequence[str], weights: Weights
) -> WeightTransfer:
    """Return the object that sends the actor's weights to vLLM servers, as the config says.

    `weights` returns them in the servers' dtype.
    """
    options = rollouts.servers
    if options.weights == "nccl":
        return NcclTransfer(weights, host=options.weights_host)
    folder = config.output_dir if options.weights_folder is None else options.weights_folder
    return FolderTransfer(Path(folder).expanduser(), urls)


def float32_name_parts(model: PreTrainedModel) -> frozenset[str]:
    """Return parts of names; weights whose names contain one stay float32 in every dtype."""
    lists = (getattr(model, name, None) or () for name in _FLOAT32_LISTS)
    return frozenset(part for names in lists for part in names)


def engine_dtype(config: FitConfig, options: EngineOptions) -> torch.dtype:
    name = options.dtype_name(config.trainer.precision, config.actor.dtype)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def score_with(actor: ActorAccess, *, pad_id: int) -> Score:
    """Return a function that computes the trainer's log-probs of (prompt, response) pairs.

    `SyncCheck` compares them with the engine's.
    """

    def score(pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        inputs = token_inputs(pairs, pad_id=pad_id).to(actor.device)
        with torch.no_grad(), actor.gather():
            rows: list[list[float]] = actor.logprobs(inputs).float().tolist()
        return [row[: len(response)] for row, (_, response) in zip(rows, pairs, strict=True)]

    return score
