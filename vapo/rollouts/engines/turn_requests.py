"""What all engines share of a turn: which fit, their seeds, and the error of a broken policy."""

from __future__ import annotations

from vapo.errors import UserError
from vapo.rollouts.engines.contract import TurnRequest
from vapo.system.process import derive_seed


class NonFiniteLogitsError(RuntimeError):
    """The policy's logits are NaN or infinite: its weights have diverged or overflow."""

    def __init__(self, prompt_id: str) -> None:
        super().__init__(
            f"the policy's logits after prompt {prompt_id} are not finite: its weights "
            "have diverged (look at actor/grad_norm) or overflow in this dtype"
        )


def check_turn(request: TurnRequest, num_positions: int | None) -> None:
    """Raises: UserError if there is nothing to continue, or the turn exceeds the positions."""
    name = turn_name(request)
    if request.max_tokens < 1:
        raise ValueError(f"prompt {name}: a turn has at least one token")
    if not request.ids:
        raise UserError(f"prompt {name} has no tokens: nothing to continue")
    needed = len(request.ids) + request.max_tokens
    if num_positions is not None and needed > num_positions:
        has = "has" if request.turn == 0 else "has with its earlier turns"
        raise UserError(
            f"prompt {name} {has} {len(request.ids)} tokens; with {request.max_tokens} of response "
            f"that is more than the model's {num_positions} positions: lower "
            "max_response_tokens or data.max_prompt_tokens"
        )


def turn_name(request: TurnRequest) -> str:
    """What messages call a turn: its prompt's id, and the number of a later turn."""
    return request.prompt_id + (f", turn {request.turn}" if request.turn else "")


def draw_seed(seed: int, request: TurnRequest) -> int:
    """The seed of a turn's random numbers; of a first turn that of (prompt i, sample j) alone."""
    key = request.key if request.turn == 0 else (*request.key, request.turn)
    return derive_seed(seed, "response", *key)
