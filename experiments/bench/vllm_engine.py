"""Both sampling engines on one model and the same prompts: tokens a second, log-probs, a sync.

    python experiments/bench/vllm_engine.py [--policy FOLDER] [--threads 1] [--repeats 3]
        [--responses 64 256] [--budgets 16 384]

Random weights of the state-tracking policy's shape, unless a folder is named, and random prompts:
responses end at random, as in sampler.py. With a budget of 16 tokens they are short and nearly
even, with 384 very unequal. The engines alternate, so that a busy machine slows both; the first
round warms up and is not counted. The gap is between the log-probs that vLLM gave with its tokens
and the trainer's own for the same tokens. Needs vLLM (`make vllm`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from all_responses import sample_all  # beside this file
from sampler import CASES, GROUP_SIZE, make_model, make_prompts  # beside this file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.engines import ColocatedVllm
from vapo.config.schema import NewModelConfig
from vapo.networks.actor_critic import Actor
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.new_model import make_tokenizer
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler, Score, SyncCheck
from vapo.rollouts.engines.selection import ActorAccess, score_with
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.cpu_heads import padded_heads
from vapo.rollouts.engines.vllm.engine_args import EngineSize
from vapo.types import Prompt, Rollout

LONGEST_PROMPT, SHORT, LONG = 32, 16, 384


def save_random_policy(folder: Path) -> None:
    tokenizer = make_tokenizer(NewModelConfig().alphabet)
    make_model(CASES[-1], tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engines(
    folder: str, model: PreTrainedModel, *, rows: int, max_tokens: int
) -> tuple[TransformersSampler, EngineSampler, Score]:
    tokenizer = load_tokenizer(folder)
    actor, device = Actor(model), torch.device("cpu")
    access = ActorAccess(
        model=model,
        device=device,
        weights=lambda: model.state_dict().items(),
        logprobs=lambda inputs: inputs.scatter(actor(inputs, temperature=1.0).logprobs),
    )
    engine = ColocatedEngine(
        ColocatedVllm(),
        EngineSize(max_tokens, rows),
        model_path=folder,
        dtype="float32",
        device=device,
        heads=padded_heads(model.config),
    )
    score = score_with(access, pad_id=int(tokenizer.pad_token_id))
    check = SyncCheck(
        score,
        vocab_size=model.config.vocab_size,
        max_tokens=engine.max_tokens,
        max_logprob_gap=1e-3,
    )
    vllm = EngineSampler(
        engine,
        end_ids=end_token_ids(model.generation_config, tokenizer),
        weights=access.weights,
        convert=CastWeights(torch.float32),
        check=check,
    )
    vllm.sync(access.weights())
    sampler = TransformersSampler(model, tokenizer, max_concurrent_sequences=rows, device=device)
    return sampler, vllm, score


def speed(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    budget: int,
    seed: int,
) -> tuple[float, list[Rollout]]:
    """Tokens a second, and what was sampled."""
    start = time.perf_counter()
    rollouts = sample_all(
        sampler,
        tokenizer,
        prompts,
        group_size=GROUP_SIZE,
        settings=SamplingSettings(budget),
        seed=seed,
    )
    num_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    return num_tokens / (time.perf_counter() - start), rollouts


def logprob_gaps(score: Score, rollouts: list[Rollout]) -> list[float]:
    """The difference of each token's log-prob between engine and trainer."""
    gaps = []
    for start in range(0, len(rollouts), GROUP_SIZE):
        rows = rollouts[start : start + GROUP_SIZE]
        scores = score([(row.prompt.prompt_ids, row.response_ids) for row in rows])
        for row, row_scores in zip(rows, scores, strict=True):
            gaps += [abs(a - b) for a, b in zip(row.rollout_logprobs, row_scores, strict=True)]
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", help="a model folder; default: random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--responses", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--budgets", type=int, nargs="+", default=[SHORT, LONG])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        if options.policy is None:
            save_random_policy(Path(folder))
        measure(options, options.policy or folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    model = load_causal_lm(folder, dtype="float32", attn_implementation="auto")
    tokenizer = load_tokenizer(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    our_sampler, vllm, score = engines(
        folder,
        model,
        rows=max(options.responses),
        max_tokens=LONGEST_PROMPT + max(options.budgets),
    )
    print(f"{num_parameters / 1e6:.2f} M parameters, {options.threads} CPU threads, float32,")
    print(f"median of {options.repeats}, engines alternating\n")
    columns = ("responses", "tokens: mean, longest", "transformers tok/s", "vllm tok/s", "ratio")
    print("| " + " | ".join([*columns, "mean log-prob gap", "largest"]) + " |")
    print("|---" * 7 + "|")
    for num_responses in options.responses:
        prompts = make_prompts(num_responses // GROUP_SIZE, model.config.vocab_size)
        for budget in options.budgets:
            speeds = []
            for seed in range(options.repeats + 1):
                (transformers_speed, _), (vllm_speed, rollouts) = (
                    speed(sampler, tokenizer, prompts, budget, seed)
                    for sampler in (our_sampler, vllm)
                )
                speeds.append((transformers_speed, vllm_speed))
            slow, fast = (statistics.median(column) for column in zip(*speeds[1:], strict=True))
            gaps = logprob_gaps(score, rollouts)
            lengths = [len(rollout.response_ids) for rollout in rollouts]
            print(
                f"| {num_responses} | {statistics.fmean(lengths):.0f}, {max(lengths)} "
                f"| {slow:,.0f} | {fast:,.0f} | {fast / slow:.2f}x "
                f"| {statistics.fmean(gaps):.1e} | {max(gaps):.1e} |",
                flush=True,
            )
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        vllm.sync(model.state_dict().items())
        seconds.append(time.perf_counter() - start)
    print(f"\nsync, with its check: {statistics.median(seconds) * 1000:.0f} ms")
    vllm.close()


if __name__ == "__main__":
    main()
