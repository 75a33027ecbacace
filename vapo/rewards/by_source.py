"""The scorer of a config: one verifier, or in a mixture each source's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from vapo.config.data_rules import source_name, sources_of
from vapo.config.rewards import with_verifier
from vapo.config.schema import DataConfig, MixtureSource, RewardConfig
from vapo.rewards.scorer import Scorer
from vapo.types import Rollout, Verdict


def rewards_by_source(rewards: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
    """Map each source's name, the empty one included, to the rewards with its own verifier."""
    found = {}
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            if not isinstance(source, MixtureSource) or source.verifier is None:
                found[source_name(key)] = rewards
            else:
                found[source_name(key)] = with_verifier(rewards, source)
    return found


class ScorerBySource(Scorer):
    """A scorer for each verifier in use; each has `num_workers` processes.

    Raises:
        UserError: a setting is missing or unusable, or a verifier cannot be imported.
    """

    def __init__(self, rewards: dict[str, RewardConfig], *, max_response_tokens: int) -> None:
        self.by_source: dict[str, Scorer] = {}
        made: list[tuple[RewardConfig, Scorer]] = []
        try:
            for source, config in rewards.items():
                scorer = next((s for known, s in made if known == config), None)
                if scorer is None:
                    scorer = Scorer(config, max_response_tokens=max_response_tokens)
                    made.append((config, scorer))
                self.by_source[source] = scorer
        except BaseException:
            self.close()
            raise

    def score(
        self,
        rollouts: Sequence[Rollout],
        *,
        advance: Callable[[int], None] = lambda n: None,
        shuffle_seed: int | None = None,
    ) -> list[Verdict]:
        """As `Scorer.score`; the negative control permutes over all sources together."""
        verdicts: list[Verdict | None] = [None] * len(rollouts)
        for scorer in dict.fromkeys(self.by_source.values()):
            rows = [i for i, r in enumerate(rollouts) if self.by_source[r.prompt.source] is scorer]
            if not rows:
                continue
            judged = scorer.score([rollouts[row] for row in rows], advance=advance)
            for row, verdict in zip(rows, judged, strict=True):
                verdicts[row] = verdict
        whole = [verdict for verdict in verdicts if verdict is not None]
        assert len(whole) == len(rollouts)
        if shuffle_seed is not None:
            Random(f"shuffle/{shuffle_seed}").shuffle(whole)
        return whole

    def extracts_answers(self, source: str = "") -> bool:
        return self.by_source[source].extracts_answers()

    def votes(
        self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], *, group_size: int
    ) -> list[int | None]:
        """As `Scorer.votes`, by each source's verifier; none where it extracts no answers."""
        votes: list[int | None] = [None] * len(rollouts)
        for scorer in dict.fromkeys(self.by_source.values()):
            rows = [i for i, r in enumerate(rollouts) if self.by_source[r.prompt.source] is scorer]
            if not rows or not scorer.extracts_answers():
                continue
            own = scorer.votes(
                [rollouts[row] for row in rows],
                [verdicts[row] for row in rows],
                group_size=group_size,
            )
            for row, vote in zip(rows, own, strict=True):
                votes[row] = vote
        return votes

    def close(self) -> None:
        for scorer in self.by_source.values():
            scorer.close()


def make_scorer(
    rewards: RewardConfig, *, max_response_tokens: int, data: DataConfig | None = None
) -> Scorer:
    """Make the config's scorer: check its settings and start its verifier processes.

    With `data`, sources of a mixture that name a verifier of their own are judged by it.

    Raises:
        UserError: a setting is missing or unusable, or the verifier cannot be imported.
    """
    by_source = {} if data is None else rewards_by_source(rewards, data)
    if all(own is rewards for own in by_source.values()):
        return Scorer(rewards, max_response_tokens=max_response_tokens)
    return ScorerBySource(by_source, max_response_tokens=max_response_tokens)
