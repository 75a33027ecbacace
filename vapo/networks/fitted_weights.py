"""The weights of a critic that a regression fits instead of an optimizer (`critic.ridge`)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vapo.functional.regression import RidgeSolution
from vapo.networks.actor_critic import Critic
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.token_inputs import TokenInputs
from vapo.networks.value_head import LOGPROB_SCORE
from vapo.system.distributed import reshard

_BIAS, _ON_STATES, _ON_LOGPROBS = "score.bias", "score.weight", f"{LOGPROB_SCORE}.weight"


def fitted_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return by name the critic's parameters that a ridge regression fits: weights, then the bias.

    The weights are in the order of the columns of `fitted_inputs`. A probe's states do not depend
    on its weights, so all of its head is fitted. A network's states change with each optimizer
    step, so the optimizer trains the score, and the regression fits the other weights and the bias.
    """
    is_probe = isinstance(model, ProbeForSequenceClassification)
    names = (*((_ON_STATES,) if is_probe else ()), _ON_LOGPROBS, _BIAS)
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in names if name in parameters}


def fitted_inputs(critic: Critic, inputs: TokenInputs) -> Float[Tensor, "n F"]:
    """Return what the critic's fitted weights multiply before each response token.

    These are the actor's states if the critic is a probe, and the log-prob columns if its head
    reads them.
    """
    parts = []
    if isinstance(critic.model, ProbeForSequenceClassification):
        parts.append(critic.states(inputs).float())
    if critic.head.num_logprob_columns is not None:
        parts.append(critic.columns(inputs))
    return torch.cat(parts, dim=1)


@torch.no_grad()
def current_fitted_weights(critic: Critic) -> tuple[Float[Tensor, " F"], Float[Tensor, ""]]:
    """Return whole copies of the weights and the bias of a critic that a ridge regression fits.

    Every rank must call this, because they may be sharded.
    """
    *weights, bias = (_full_tensor(p)[0] for p in fitted_parameters(critic.model).values())
    return torch.cat(weights), bias


def _full_tensor(parameter: Tensor) -> Tensor:
    tensor: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().clone()


@torch.no_grad()
def put_fitted(critic: Critic, solution: RidgeSolution) -> None:
    """Set the weights of a critic that a ridge regression fits (`critic.ridge`) to its solution.

    The critic is changed in place and may be sharded, so every rank must call this.
    """
    reshard(critic)  # else weights gathered by an earlier forward would stay
    *names, bias = fitted_parameters(critic.model)
    sizes = [critic.model.get_parameter(name).shape[1] for name in names]
    parts = solution.weights.float().split(sizes)
    state = {f"model.{name}": part[None] for name, part in zip(names, parts, strict=True)}
    state[f"model.{bias}"] = solution.intercept.float()[None]
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(critic, state, options=options)
