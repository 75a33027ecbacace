"""OPPO's evidence as a critic of the board: how much likelier the answer makes what was sampled.

    python experiments/critics/board/score_critics.py with_answer.py:evidence_of_the_answer

The policy reads each response behind a prompt that tells the answer, in one pass, and nothing is
trained (`vapo.functional.token_baselines.success_values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rollout_set import Response  # beside this file
from small_critics import ValueFunction, Values
from torch.nn.utils.rnn import pad_sequence

from vapo.config import FitConfig
from vapo.config.estimators import OppoConfig
from vapo.config.loading import load_config
from vapo.functional.token_baselines import success_values
from vapo.networks.build import make_actor
from vapo.networks.loading import load_tokenizer
from vapo.networks.token_inputs import token_inputs
from vapo.system.libraries import set_threads

CONFIG = Path(__file__).parents[3] / "conf/worked_sums/vapo.yaml"


def evidence_of_the_answer(training: Sequence[Response]) -> ValueFunction:
    """OPPO's values with the schema's template, a smoothing of 0.5 and no bound on the evidence."""
    config, options = load_config(FitConfig, [CONFIG], []), OppoConfig()
    set_threads(config.trainer)
    actor = make_actor(config, None, trained=False)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")

    @torch.no_grad()
    def with_answer(response: Response) -> torch.Tensor:
        text = options.template.format(answer=response.answer, prompt=response.prompt)
        sequence = (tokenizer(text).input_ids, response.response_ids)
        return actor(token_inputs([sequence], pad_id=0), temperature=1.0).logprobs.float()

    def values(responses: Sequence[Response]) -> Values:
        logprobs = [torch.tensor(response.logprobs) for response in responses]
        padded, padded_with_answer = (
            pad_sequence(list(rows), batch_first=True)
            for rows in (logprobs, map(with_answer, responses))
        )
        lengths = torch.tensor([len(row) for row in logprobs])
        success = success_values(
            torch.tensor([response.reward > 0 for response in responses]),
            padded_with_answer,
            padded,
            torch.arange(padded.shape[1]) < lengths[:, None],
            group_size=len(responses) // len({response.group for response in responses}),
            smoothing=options.smoothing,
            max_evidence=options.max_evidence,
            low=config.rewards.incorrect,
            high=config.rewards.correct,
        )
        return [row[:n].numpy() for row, n in zip(success, lengths.tolist(), strict=True)]

    return values
