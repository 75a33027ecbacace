"""The typed configuration: every key, its meaning, unit, range and the paper's value.

Defaults are the paper's values (arXiv 2504.05118) where it states one; `conf/vapo.yaml` holds
the values for the default task on two CPU cores. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omegaconf import MISSING

from vapo.config.algorithm import AlgorithmConfig, KLConfig, MismatchConfig
from vapo.config.checkpoints import CheckpointConfig
from vapo.config.components import Components
from vapo.config.critic import CriticConfig
from vapo.config.data import DataConfig, MixtureSource, PromptSource, SourceConfig
from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.environment_variables import FromEnvironment
from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import choice, not_a_key, option, section
from vapo.config.networks import ActorConfig, OptimizerConfig
from vapo.config.rewards import RewardConfig
from vapo.config.sources import Sources
from vapo.config.values import ValuePagesConfig, ValueTruthConfig
from vapo.config.watch import WatchConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "DataConfig",
    "FitConfig",
    "KLConfig",
    "MismatchConfig",
    "MixtureSource",
    "OptimizerConfig",
    "PromptSource",
    "RewardConfig",
    "RewardModelConfig",
    "SftConfig",
    "SourceConfig",
]


@dataclass
class RolloutConfig:
    engine: Literal["transformers", "vllm", "vllm_server"] = choice(
        "transformers",
        "the sampling engine; vllm: in the trainer's processes; vllm_server: in `vllm serve` "
        "processes, which `vapo serve` starts; docs/rollouts.md",
        vllm=VllmEngine,
        vllm_server=VllmServerEngine,
    )
    max_response_tokens: int = option(1024, "response budget; longer ones are truncated", ge=1)
    temperature: float = option(1.0, "sampling temperature (paper: not stated)", gt=0)
    top_p: float = option(1.0, "nucleus mass (paper: not stated)", gt=0, le=1)
    top_k: int = option(0, "keep the k likeliest tokens; 0: all", ge=0)
    max_concurrent_sequences: int = option(
        256, "rows decoded at a time; a finished row's place is refilled", ge=1
    )


AUTO_TOKENS = 16_384  # of a micro-batch whose size is `auto`, until it is chosen


@dataclass
class TrainingConfig:
    num_iterations: int = option(
        300, "rollout batches after value pretraining (one iteration each)", ge=0
    )
    decay_fraction: float = option(
        0.0,
        "the actor's learning rate falls linearly over this share of num_iterations, the last "
        "ones, and would be 0 after them; 0, or no more than one iteration: it is constant "
        "(paper). A run that is resumed with more iterations has the rate that belongs to those",
        ge=0,
        le=1,
    )
    minibatch_size: int | None = option(
        512,
        "responses per optimizer step (paper: 512 of 8192, so 16 steps an iteration); null: all "
        "of the rollout batch, so that its one step is on-policy",
        ge=1,
    )
    microbatch_tokens: int | Literal["auto"] = option(
        16384,
        "prompt + response tokens of one forward / backward; padded ones count padding, shared "
        "prompts count once; auto: by the memory of one GPU, elsewhere 16384. It changes memory "
        "and speed, never the gradient",
        ge=1,
    )
    packing: Literal["auto", "padded", "packed", "shared_prompts"] = option(
        "auto",
        "padded: sequences of similar length side by side, padded; packed: one after another in "
        "one row, attention confined to each; shared_prompts: packed, and the prompt of several "
        "responses is computed once for all of them; auto: the last of these that all networks "
        "can read",
    )
    max_staleness: int = option(
        0,
        "how many policy iterations older than the actor the weights may be that sampled a "
        "rollout; 0: sampling and training take turns; above, a thread samples the iterations to "
        "come while this one trains: docs/rollouts.md, algorithm.mismatch",
        ge=0,
    )
    update_open_rollouts: bool = option(
        True,
        "with max_staleness above 0: new weights go to the engine at once, and rollouts under way "
        "go on with them; false: those are waited for, so that a batch has one policy and a run "
        "repeated is the same (with an environment up to rounding)",
    )

    @property
    def first_microbatch_tokens(self) -> int:
        """The most tokens of a micro-batch; for `auto`, until the run chooses by its memory."""
        return AUTO_TOKENS if self.microbatch_tokens == "auto" else self.microbatch_tokens


@dataclass
class EvaluationConfig:
    k: int = option(32, "responses per held-out prompt (paper: 32)", ge=1)
    num_prompts: int | None = option(
        None, "use only the first of the held-out prompts, this many; null: all", ge=1
    )
    every_n_iterations: int = option(10, "also before the first and after the last", ge=1)
    temperature: float = option(1.0, "paper: 1.0", gt=0)
    top_p: float = option(0.7, "paper: 0.7", gt=0, le=1)
    top_k: int = option(0, "0: all", ge=0)
    max_response_tokens: int | None = option(None, "null: rollouts.max_response_tokens", ge=1)
    num_table_rows: int = option(32, "sample rollouts written to the MLflow table", ge=0)
    seed: int = option(1234, "the same evaluation seeds in every run", ge=0)
    average_policies: int | None = option(
        None,
        "after the last iteration also score the policy whose weights are the mean of the last so "
        "many iterations' policies, adapters merged; null: none. In one process",
        ge=2,
    )
    export_average: bool = option(
        False, "write that policy into the run's folder, as averaged_policy"
    )


@dataclass
class TrackingConfig:
    uri: str = option(
        "mlruns",
        "MLflow tracking URI, or a folder for a local SQLite store and artifacts; credentials: "
        "docs/tracking.md",
    )
    experiment: str = option("vapo", "MLflow experiment name")
    run_name: str | None = option(None, "MLflow run name; null: config files, overrides and seed")
    tags: dict[str, str] = option({}, "extra tags of the MLflow run")
    also: list[Literal["csv", "wandb"]] = option(
        [],
        "metrics also as csv files in the run's folder, and in Weights & Biases (wandb): "
        "docs/tracking.md",
    )


@dataclass
class TrainerConfig:
    accelerator: Literal["auto", "cpu", "gpu"] = option("auto", "Lightning's accelerator")
    devices: int = option(1, "processes on this host", ge=1)
    num_nodes: int = option(1, "hosts", ge=1)
    strategy: Literal["auto", "fsdp"] = option("auto", "auto: one process; fsdp: sharded")
    precision: Literal["auto", "32-true", "bf16-mixed"] = option(
        "auto",
        "Lightning's precision; auto: bf16-mixed where GPU or processor have fast products in "
        "bfloat16 and the policy is at least 256 wide, else 32-true",
    )
    num_threads: int | None = option(
        None, "torch threads of each process; null: cores / processes", ge=1
    )
    profile: bool = option(
        False, "write a trace of one iteration, for Perfetto, into the run's folder"
    )
    peak_tflops: float | None = option(
        None,
        "a device's peak in TFLOP/s, for throughput/training_mfu; null: that of a known GPU in "
        "bfloat16, else the metric is left out",
        gt=0,
    )
    sharded_checkpoints: bool = option(
        False, "fsdp: checkpoints are folders into which each process writes its own shard"
    )
    reduce_every_microbatch: bool = option(
        False,
        "fsdp: reduce gradients over processes after each micro-batch, not after the last: more "
        "traffic, but no process ever holds a whole gradient",
    )
    cpu_offload: bool = option(
        False, "fsdp on GPUs: shards, their gradients and optimizer states lie in host memory"
    )

    @property
    def num_ranks(self) -> int:
        """The number of processes on all hosts."""
        return self.devices * self.num_nodes

    @property
    def is_one_process(self) -> bool:
        """Whether one process trains, with strategy auto, so that nothing is shared or sharded."""
        return self.num_ranks == 1 and self.strategy == "auto"


@dataclass
class FitConfig:
    """The whole config of `vapo fit` and `vapo validate`."""

    seed: int = option(0, "seeds prompts order, sampling, shuffling", ge=0)
    output_dir: str = option("runs/vapo", "the run's folder is made inside it")
    components: Components = section(Components, "the seven components of VAPO")
    actor: ActorConfig = section(ActorConfig, "the policy")
    critic: CriticConfig = section(CriticConfig, "the value model")
    data: DataConfig = section(DataConfig, "prompts")
    rollouts: RolloutConfig = section(RolloutConfig, "sampling")
    rewards: RewardConfig = section(RewardConfig, "verdicts and rewards")
    environment: EnvironmentConfig = section(
        EnvironmentConfig, "what answers the policy's turns, in place of a verifier"
    )
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "the objective's numbers")
    training: TrainingConfig = section(TrainingConfig, "iterations and batch sizes")
    evaluation: EvaluationConfig = section(EvaluationConfig, "held-out evaluation")
    watch: WatchConfig = section(WatchConfig, "numbers that are not finite; watchers of the run")
    value_pages: ValuePagesConfig = section(ValuePagesConfig, "pages of tokens by value")
    value_truth: ValueTruthConfig = section(
        ValueTruthConfig, "true values of prefixes, beside the critic's"
    )
    tracking: TrackingConfig = section(TrackingConfig, "MLflow")
    trainer: TrainerConfig = section(TrainerConfig, "devices and precision")
    checkpoints: CheckpointConfig = section(CheckpointConfig, "saving, stopping and resuming")
    from_environment: FromEnvironment = not_a_key(FromEnvironment)
    sources: Sources = not_a_key(Sources)


@dataclass
class NewModelConfig:
    """Options of a new model of the Qwen2 architecture with a one-character tokenizer."""

    hidden_size: int = option(96, "width", ge=8)
    intermediate_size: int = option(256, "width of the MLP", ge=8)
    num_layers: int = option(3, "decoder layers", ge=1)
    num_heads: int = option(4, "attention heads", ge=1)
    max_position_embeddings: int = option(512, "context length", ge=8)
    alphabet: str = option("0123456789abcdefghijklmnopqrstuvwxyz=;", "one token a character")


@dataclass
class SftConfig:
    """The whole config of `vapo sft`, which trains a model on demonstrations."""

    seed: int = option(0, "seeds weights, data order", ge=0)
    model_path: str | None = option(None, "start from this folder; null: `new_model`")
    new_model: NewModelConfig = section(NewModelConfig, "the model to build")
    export_dir: str = option(MISSING, "a new folder, for the Hugging Face model")
    data: DataConfig = section(DataConfig, "prompts with demonstrations")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW")
    num_steps: int = option(3000, "optimizer steps", ge=1)
    batch_size: int = option(64, "demonstrations per step", ge=1)
    microbatch_tokens: int = option(
        16384, "tokens of one forward / backward, padding included", ge=1
    )
    decay_fraction: float = option(
        0.3, "share of the steps at the end over which lr falls linearly to 0", ge=0, le=1
    )
    rollouts: RolloutConfig = section(RolloutConfig, "sampling, for the evaluation")
    rewards: RewardConfig = section(RewardConfig, "verifier, for the evaluation")
    environment: EnvironmentConfig = section(
        EnvironmentConfig, "what answers the turns of demonstrations, and of the evaluation"
    )
    evaluation: EvaluationConfig = section(EvaluationConfig, "held-out evaluation")
    tracking: TrackingConfig = section(TrackingConfig, "MLflow")
    trainer: TrainerConfig = section(TrainerConfig, "devices and precision")
    from_environment: FromEnvironment = not_a_key(FromEnvironment)
    sources: Sources = not_a_key(Sources)


@dataclass
class RewardModelConfig:
    """The whole config of `vapo reward-model`, which trains a model to predict rewards.

    It is trained at the last token of responses that a verifier has judged.
    """

    seed: int = option(0, "seeds sampling, data order", ge=0)
    policy_path: str = option(MISSING, "the policy whose responses are scored; also the init")
    export_dir: str = option(MISSING, "a new folder, for the Hugging Face model")
    data: DataConfig = section(DataConfig, "prompts")
    group_size: int = option(4, "responses sampled per prompt", ge=1)
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW")
    num_steps: int = option(60, "optimizer steps", ge=1)
    batch_size: int = option(64, "responses per step", ge=1)
    unfinished_share: float = option(
        0.0,
        "share of the training responses that are cut at a random token and judged as they are "
        "then: makes the bias of a reward model as a critic, which scores unfinished text low",
        ge=0,
        le=1,
    )
    microbatch_tokens: int = option(
        16384, "tokens of one forward / backward, padding included", ge=1
    )
    rollouts: RolloutConfig = section(RolloutConfig, "sampling")
    rewards: RewardConfig = section(RewardConfig, "verifier")
    tracking: TrackingConfig = section(TrackingConfig, "MLflow")
    trainer: TrainerConfig = section(TrainerConfig, "devices and precision")
    from_environment: FromEnvironment = not_a_key(FromEnvironment)
    sources: Sources = not_a_key(Sources)
