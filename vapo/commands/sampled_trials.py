"""`vapo try`: responses of the config's policy to a few training prompts, judged one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from vapo.commands.sampling import load_policy, read_inputs
from vapo.commands.trial_hints import Policy
from vapo.commands.trials import Trial
from vapo.config import FitConfig
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.prompts.group_sampling import group_sampling
from vapo.rewards.scorer import Scorer, scorer_of
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.engines.selection import ActorAccess, make_sampler
from vapo.rollouts.player import Player
from vapo.rollouts.segments import shown_turns, shows_turns
from vapo.system.quiet import quiet_libraries
from vapo.system.seeding import derive_seed
from vapo.types import Prompt, Rollout


@dataclass(frozen=True)
class TriedPolicy:
    """The config's policy and the training prompts that it is tried on."""

    config: FitConfig
    prompts: list[Prompt]
    access: ActorAccess
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]

    @property
    def policy(self) -> Policy:
        ends = tuple(_decoded(self.tokenizer, (end,)) for end in sorted(self.end_ids))
        return Policy(ends, bool(self.tokenizer.chat_template))


def start_scorer(config: FitConfig, output: VerifierOutput) -> Scorer:
    """The verifiers, a process each: so what is printed belongs to the one response in work."""
    quiet_libraries()
    return scorer_of(replace(config, rewards=replace(config.rewards, num_workers=1)), output)


def load_tried(config: FitConfig, num: int) -> TriedPolicy:
    """Load the policy and the first `num` prompts of training."""
    tokenizer, prompts = read_inputs(config)
    chosen = group_sampling(prompts.training, num_prompts=num, seed=config.seed, iteration=0)
    access = load_policy(config)
    end_ids = end_token_ids(access.model.generation_config, tokenizer)
    return TriedPolicy(config, chosen, access, tokenizer, end_ids)


def sampled_trials(start: TriedPolicy, scorer: Scorer, output: VerifierOutput) -> Iterator[Trial]:
    """Play one response after the other, sampled as in training."""
    config, tokenizer = start.config, start.tokenizer
    with closing(make_sampler(config, start.access, tokenizer)) as sampler:
        player = Player(config, sampler, scorer, tokenizer)
        for number, prompt in enumerate(start.prompts):
            (rollout,) = player.play(
                [prompt],
                group_size=1,
                settings=sampling_settings(config.rollouts),
                seed=derive_seed(config.seed, "try"),
                first=number,
            )
            yield shown_trial(rollout, start, output.take())


def shown_trial(rollout: Rollout, start: TriedPolicy, printed: str) -> Trial:
    """What is shown of a response, with what was printed while it was judged."""
    prompt, tokenizer = rollout.prompt, start.tokenizer
    return Trial(
        prompt_id=prompt.prompt_id,
        problem=_decoded(tokenizer, prompt.prompt_ids),
        answer=prompt.answer,
        response=shown_turns(rollout, tokenizer)
        if shows_turns(rollout)
        else _decoded(tokenizer, rollout.response_ids),
        response_text=rollout.response_text,
        output=printed,
        num_prompt_tokens=len(prompt.prompt_ids),
        num_response_tokens=rollout.num_sampled,
        finish_reason=str(rollout.finish_reason),
        foreign_end=_foreign_end(start, rollout),
        is_correct=bool(rollout.is_correct),
        reward=rollout.reward,
        extracted=rollout.extracted,
        failure=rollout.failure,
    )


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _foreign_end(start: TriedPolicy, rollout: Rollout) -> str | None:
    """The first special token that the policy sampled and that does not end a turn."""
    special = set(start.tokenizer.all_special_ids) - start.end_ids
    tokens = zip(rollout.response_ids, rollout.is_sampled, strict=True)
    found = next((token for token, is_own in tokens if is_own and token in special), None)
    return None if found is None else _decoded(start.tokenizer, (found,))
