"""What the critic's options cost: an iteration of the critic with each, beside the scalar head's.

    python experiments/bench/critics.py [--repeats 7]
    python experiments/bench/critics.py --memory

An iteration is what `vapo fit` does with a critic once there are rollouts: values before the
update, value targets, minibatches, forward and backward of the value loss, and AdamW's steps, by
the product's own functions. Each option takes turns with the scalar head at its defaults in one
process, so that what else the machine does slows both; the ratio is that of each turn. --memory
prints instead what `vapo estimate` says of each option on one GPU, and runs nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measuring import Report, arguments, setting, start, timed  # beside this file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.value_loss_columns import check_value_targets
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.build import make_critic
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.model_configs import read_model_config
from vapo.rollouts.batch import make_rollout_batch
from vapo.studies.estimate.memory import estimate_memory
from vapo.system.host_memory import GIB
from vapo.training.minibatches import make_minibatches, passes
from vapo.training.objective import Totals, value_objective
from vapo.training.optimizers import clip_gradient, make_optimizer
from vapo.types import FinishReason, Phase, Prompt, Rollout, RolloutBatch, Turn

ROOT = Path(__file__).parents[2]
STATE_TRACKING = ROOT / "conf/state_tracking/vapo.yaml"
PRIVILEGED = ("critic.prompt.kind=privileged", "critic.prompt.template='{prompt}{answer}'")
OPTIONS = {
    "the scalar head again": (),
    "head bounded": ("critic.head.kind=bounded",),
    "head categorical, 101 bins, cross-entropy": (
        *("critic.head.kind=categorical", "critic.head.num_bins=101"),
        "critic.loss=cross_entropy",
    ),
    "epochs 2": ("critic.epochs=2",),
    "frozen self_attn.": ("critic.frozen=[self_attn.]",),
    "lora, rank 8": ("critic.lora.rank=8",),
    "privileged prompt, 32 tokens more": PRIVILEGED,
    "weights prompt_noise": ("critic.weights=prompt_noise",),
    "anchors 0.3, 0.6, 0.9": ("critic.anchors=[0.3,0.6,0.9]",),
}
IN_POLICY_PHASE = {"anchors 0.3, 0.6, 0.9"}  # elsewhere they do nothing
VOCABULARY = 64


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    prompts: int
    median: int  # response tokens
    longest: int


FULL, TOY = Size(96, 3, 4, 60, 500), Size(32, 2, 2, 8, 20)
GROUP = 8


def make_config(policy: Path, size: Size, *overrides: str) -> FitConfig:
    fixed = [
        f"actor.path={policy}",
        "critic.init=policy",
        "critic.optimizer.lr=1e-9",  # every turn sees the same weights
        f"rollouts.max_response_tokens={size.longest}",
        f"components.group_sampling.num_prompts={size.prompts}",
        f"components.group_sampling.group_size={GROUP}",
        f"training.minibatch_size={size.prompts * GROUP // 2}",
    ]
    return load_config(FitConfig, [STATE_TRACKING], [*fixed, *overrides])


def save_policy(folder: Path, size: Size) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(config: FitConfig, size: Size, *, privileged: bool) -> RolloutBatch:
    """Responses of log-normal length, sigma 1; a privileged prompt has 32 tokens more."""
    draw = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, VOCABULARY) for _ in range(length))

    rollouts = []
    for number in range(size.prompts):
        prompt_ids, more = ids(16), ids(32)
        critic_prompt = (*prompt_ids, *more) if privileged else None
        prompt = Prompt(f"made-up:{number}", "", prompt_ids, "1", critic_prompt_ids=critic_prompt)
        for _ in range(GROUP):
            length = round(draw.lognormvariate(0, 1) * size.median)
            response = ids(min(size.longest, max(1, length)))
            logprobs = (-1.0,) * len(response)
            is_correct = draw.random() < 0.5
            rewards = config.rewards
            reward = rewards.correct if is_correct else rewards.incorrect
            turns = (Turn(0, len(response), reward),)
            rollouts.append(
                Rollout(prompt, response, "", logprobs, FinishReason.STOP, turns, is_correct)
            )
    return make_rollout_batch(
        rollouts,
        group_size=GROUP,
        rewards=config.rewards,
        max_response_tokens=size.longest,
        critic_truncated=config.critic.truncated,
    )


class Side:
    """One critic with its optimizer; called, it runs an iteration and returns the value loss."""

    def __init__(self, config: FitConfig, size: Size, phase: Phase, device: torch.device) -> None:
        self.config, self.phase, self.device = config, phase, device
        self.critic = make_critic(config, None).to(device)
        self.optimizer = make_optimizer(self.critic, config.critic.optimizer)
        self.layout = choose_layout("packed", [self.critic.model])
        privileged = config.critic.prompt.kind == "privileged"
        self.batch = make_batch(config, size, privileged=privileged)
        self.num_tokens = int(self.batch.response_mask.sum())

    def __call__(self) -> float:
        config, phase = self.config, self.phase
        networks = ForwardNetworks(
            actor=None,
            reference=None,
            critic=self.critic,
            temperature=1.0,
            max_tokens=config.training.first_microbatch_tokens,
            pad_id=0,
            layout=self.layout,
            device=self.device,
        )
        evaluated = add_logprobs_and_values(self.batch, networks, with_entropy=False)
        if phase is Phase.POLICY_OPTIMIZATION:  # as the actor's forward pass would give them
            evaluated = replace(evaluated, old_logprobs=evaluated.rollout_logprobs)
        training = estimate_advantages(evaluated, phase, config)
        check_value_targets(training, config.critic)
        total = 0.0
        for index, part in enumerate(passes(config, phase)):
            if "critic" not in part.networks:
                continue
            for minibatch in make_minibatches(
                training,
                num_minibatches=part.num_minibatches,
                max_tokens=config.training.first_microbatch_tokens,
                pad_id=0,
                layout=self.layout,
                seed=index,
                networks=("critic",),
            ):
                for micro in minibatch.of("critic"):
                    micro = micro.to(self.device)
                    columns = self.critic(micro.inputs)._asdict().items()
                    output: dict[str, Tensor] = {
                        name: micro.inputs.scatter(x) for name, x in columns if x is not None
                    }
                    loss = value_objective(output, micro.rows, minibatch, config, Totals())
                    loss.backward()
                    total += loss.item()
                clip_gradient(self.critic, config.critic.optimizer.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return total


def in_turns(
    option: Callable[[], object], plain: Callable[[], object], repeats: int, device: torch.device
) -> list[tuple[float, float]]:
    """Seconds of both in each turn; which comes first alternates, and a first turn warms up."""
    turns = []
    for number in range(repeats + 1):
        if number % 2:
            seconds = timed(option, device), timed(plain, device)
        else:
            of_plain = timed(plain, device)
            seconds = timed(option, device), of_plain
        turns.append(seconds)
    return turns[1:]


def row(name: str, num_tokens: int, turns: list[tuple[float, float]], num_trained: int) -> str:
    ratios = sorted(plain / option for option, plain in turns)
    option, plain = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    return (
        f"| {name} | {num_trained:,} | {num_tokens / plain:,.0f} | {num_tokens / option:,.0f} "
        f"| {statistics.median(ratios):.2f}x | {ratios[0]:.2f}x to {ratios[-1]:.2f}x |"
    )


def measure(options: argparse.Namespace) -> Report:
    device = start(options)
    size = TOY if options.toy else FULL
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder), size)
        for name, overrides in OPTIONS.items():
            is_late = name in IN_POLICY_PHASE
            phase = Phase.POLICY_OPTIMIZATION if is_late else Phase.VALUE_PRETRAINING
            plain = Side(make_config(policy, size), size, phase, device)
            side = Side(make_config(policy, size, *overrides), size, phase, device)
            trained = sum(p.numel() for p in side.critic.parameters() if p.requires_grad)
            turns = in_turns(side, plain, options.repeats, device)
            rows.append(row(name, side.num_tokens, turns, trained))
    columns = (
        *("option", "trained numbers", "scalar head tokens/s", "with it tokens/s"),
        *("its speed", "least and most of a turn"),
    )
    description = (
        f"{size.hidden} x {size.layers}, {size.prompts * GROUP} responses of "
        f"{plain.num_tokens:,} tokens in 2 minibatches, packed, float32; "
        "tokens are the rollouts', counted once an iteration; the machine was shared with other "
        "work, so the ratios count, not the tokens/s"
    )
    return Report("What a critic's options cost", setting(options, description), columns, rows)


def memory() -> Report:
    """The memory (GiB) of a 1.5 B actor and critic on one GPU, as `vapo estimate` computes it."""
    shape = ROOT / "models/shapes/qwen2.5_1.5b"
    files = [STATE_TRACKING, ROOT / "conf/scale/one_gpu.yaml"]
    model = read_model_config(str(shape))
    rows = []
    for name, overrides in {**OPTIONS, "the scalar head again": ()}.items():
        config = load_config(FitConfig, files, list(overrides))
        stages = estimate_memory(config, actor=model, critic=model).stages
        update = stages["critic update"]
        totals = [sum(stages[stage].values()) for stage in ("critic update", "optimizer step")]
        parts = [update["critic weights"], update["optimizer states"], update["gradients"]]
        cells = [f"{value / GIB:.2f}" for value in (*parts, *totals)]
        title = "scalar head" if name == "the scalar head again" else name
        rows.append(f"| {' | '.join([title, *cells])} |")
    columns = (
        *("option", "critic weights", "optimizer states of both", "gradients of both"),
        *("in all, critic update", "in all, optimizer step"),
    )
    description = (
        "GiB on one GPU by estimate, not measured: qwen2.5_1.5b twice, conf/scale/one_gpu.yaml"
    )
    return Report("What a critic's options need", description, columns, rows)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--memory", action="store_true", help="what each needs, by estimate")
    return parser.parse_args(arguments_)


if __name__ == "__main__":
    parsed = options()
    print((memory() if parsed.memory else measure(parsed)).text())
