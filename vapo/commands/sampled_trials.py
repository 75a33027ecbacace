"""`vapo try`: responses of the config's policy to a few training prompts, judged one by one."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from vapo.commands.sampling import load_policy, policy_player_of, read_inputs
from vapo.commands.trials import Policy, Trial, is_unanswered, which_part
from vapo.config import FitConfig
from vapo.config.schema import RewardConfig
from vapo.errors import UserError
from vapo.networks.end_tokens import template_end
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.networks.special_tokens import special_ids
from vapo.prompts.training_set import group_sampling
from vapo.rewards.scorer import Scorer, make_scorer
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rollouts.engines.contract import sampled_text, sampling_settings
from vapo.rollouts.segments import shown_turns, shows_turns
from vapo.system.libraries import quiet_libraries
from vapo.system.process import derive_seed
from vapo.types import Rollout


def start_scorer(config: FitConfig, output: VerifierOutput) -> Scorer:
    """Start the verifiers, each in a single process, and return the scorer that uses them.

    So what a verifier prints belongs to one response.
    """
    quiet_libraries()
    return make_scorer(replace(config, rewards=replace(config.rewards, num_workers=1)), output)


@contextmanager
def sampled_trials(
    config: FitConfig, num: int, scorer: Scorer, output: VerifierOutput
) -> Iterator[tuple[Policy, Iterator[Trial]]]:
    """Load the policy and sample a response to each of the first `num` training prompts.

    Yield what hints need to know of the policy, and an iterator that judges a response at a time.
    """
    tokenizer, prompts = read_inputs(config)
    sampled_prompts = group_sampling(
        prompts.training, num_prompts=num, seed=config.seed, iteration=0
    )
    access = load_policy(config)
    end_ids = end_token_ids(access.model.generation_config, tokenizer)
    ends = tuple(sampled_text((end,), tokenizer) for end in sorted(end_ids))
    settings, seed = sampling_settings(config.rollouts), derive_seed(config.seed, "try")
    with policy_player_of(config, access, tokenizer, scorer) as player:
        played = (
            player.play([prompt], group_size=1, settings=settings, seed=seed, first=number)
            for number, prompt in enumerate(sampled_prompts)
        )
        turn_end = None
        if config.data.chat_template:
            with suppress(UserError):  # the template has no turn of the policy
                turn_end = template_end(tokenizer, config.data.chat_template_kwargs)
        trials = (
            shown_trial(
                rollout,
                tokenizer,
                end_ids,
                output.take_printed(),
                turn_end=turn_end,
                rewards=config.rewards,
            )
            for (rollout,) in played
        )
        yield Policy(ends, bool(tokenizer.chat_template)), trials


def shown_trial(
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Set[int],
    printed: str,
    *,
    turn_end: int | None = None,
    rewards: RewardConfig | None = None,
) -> Trial:
    """Return the trial of a response, with what its verifier printed.

    A response can have special tokens that did not end it. The trial names one of them: `turn_end`,
    with which the chat template ends a turn, if it is there, else the first.

    Args:
        rewards: they decide which part of the response was judged. If None, the defaults.
    """
    prompt, rewards = rollout.prompt, rewards or RewardConfig()
    text = rollout.response_text
    special = special_ids(tokenizer) - end_ids
    tokens = zip(rollout.response_ids, rollout.is_sampled, strict=True)
    sampled = [token for token, is_own in tokens if is_own and token in special]
    foreign = turn_end if turn_end in sampled else next(iter(sampled), None)
    return Trial(
        prompt_id=prompt.prompt_id,
        problem=sampled_text(prompt.prompt_ids, tokenizer),
        answer=prompt.answer,
        response=shown_turns(rollout, tokenizer, end_ids, keeps_special=rewards.keep_special_tokens)
        if shows_turns(rollout)
        else text,
        judged=which_part(rewards, text, prompt.text),
        is_unanswered=is_unanswered(rewards, text, prompt.text),
        response_text=text,
        output=printed,
        num_prompt_tokens=len(prompt.prompt_ids),
        num_response_tokens=rollout.num_sampled,
        finish_reason=str(rollout.finish_reason),
        foreign_end=None if foreign is None else sampled_text((foreign,), tokenizer),
        is_correct=bool(rollout.is_correct),
        reward=rollout.reward,
        extracted=rollout.extracted,
        failure=rollout.failure,
        by_verifier=rollout.by_verifier,
        is_lost=rollout.is_lost,
    )
