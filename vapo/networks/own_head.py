"""A value head that the user wrote, in the place of the critic's linear one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.loading import remove_dropout
from vapo.networks.model_configs import read_model_config
from vapo.system.process import derive_seed
from vapo.user_code.user_functions import check_arguments, import_function, raised_in

_KEY = "critic.head_function"


def put_own_head(model: PreTrainedModel, config: FitConfig) -> None:
    """Replace the value model's `score` by the user's head, if the config names a head function.

    Raises: UserError: the head cannot be made, or does not give each state one value of its own.
    """
    if config.critic.head_function is not None:
        hidden_size = model.config.get_text_config().hidden_size
        model.score = make_own_head(config, hidden_size)


def check_own_head(config: FitConfig) -> None:
    """Check the user's value head, if the config names one, by making it once.

    The width of the model is read from config.json; no model is loaded.

    Raises: UserError: the head cannot be made, or does not give each state one value of its own.
    """
    if config.critic.head_function is not None:
        text_config: Any = read_model_config(config.actor.path).get_text_config()
        make_own_head(config, text_config.hidden_size)


def make_own_head(config: FitConfig, hidden_size: int) -> nn.Module:
    """Make the user's module, which maps states [..., H] to values [..., 1], in the critic's dtype.

    The user's code initialises the weights, with a seed derived from the run's. The probability of
    dropout is set to 0, as in the rest of the critic.

    Raises: UserError: the module cannot be imported or made, has no parameters to train, or does
        not give each state one finite value that depends on that state alone.
    """
    path = config.critic.head_function
    function = import_function(path, key=_KEY, folder=config.critic.head_function_folder)
    name = f"{_KEY} {path}"
    check_arguments(function, name, hidden_size="H")
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "value head") % 2**32)
        try:
            head = function(hidden_size=hidden_size)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{name} {raised_in(function, error)}") from error
        if not isinstance(head, nn.Module):
            raise UserError(f"{name} returned {type(head).__name__}, not a torch.nn.Module")
        remove_dropout(head)
        head.float().train()
        _check_values(head, hidden_size, name)
    if not any(parameter.requires_grad for parameter in head.parameters()):
        raise UserError(f"{name} returned a module without parameters to train")
    return head.to(getattr(torch, config.critic.dtype))


def _check_values(head: nn.Module, hidden_size: int, name: str) -> None:
    """Check that a state's value is a finite number that depends on no other state.

    Otherwise a minibatch's gradient would depend on how it is cut, as with batch normalization.
    """
    states = torch.randn(2, 3, hidden_size)
    with torch.no_grad():
        values = _values(head, states, name)
        alone = torch.stack([_values(head, state, name) for state in states.flatten(0, 1)])
    if not bool(torch.isfinite(values).all()):
        raise UserError(f"{name}: the values of ordinary states are not finite")
    if not torch.allclose(values.flatten(0, 1), alone, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"{name}: a state's value is another one without the states beside it, or when it is "
            "computed again; it must depend on the state alone (no batch normalization, attention "
            "or random numbers)"
        )


def _values(head: nn.Module, states: Tensor, name: str) -> Tensor:
    """Return the head's values of states.

    Raises: UserError: the head raises, or its result is not a float tensor of the right shape.
    """
    try:
        values = head(states)
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"{name}: its module {raised_in(head.forward, error)}, when it was called with states "
            f"{list(states.shape)}"
        ) from error
    expected = [*states.shape[:-1], 1]
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise UserError(f"{name}: its module returned no floating-point tensor")
    if list(values.shape) != expected:
        raise UserError(
            f"{name}: its module made values {list(values.shape)} of states "
            f"{list(states.shape)}, but must make {expected}"
        )
    return values
