"""A model that computes as the trainer does in mixed precision, without casting at each token.

Autocast rounds the weights of linear layers to bfloat16 whenever it enters them: once in a
training step, but for sampling once a token. A copy that holds them rounded gives the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.functional.logprobs import output_logits


class _OutputLayer(nn.Linear):
    """The output layer with float32 logits, as the trainer's log-probs have them."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2).to(self.weight.dtype)
        return output_logits(rows, self.weight, self.bias).unflatten(0, input.shape[:-1])


def mix_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round the weights of a model's linear layers to `dtype`, for sampling under autocast.

    Embeddings, norms and the output layer keep theirs: autocast computes with them in float32,
    and of the output layer the trainer does, too.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.to(dtype)
    if type(head) is nn.Linear:
        own = _OutputLayer(head.in_features, head.out_features, bias=False, device="meta")
        own.weight, own.bias = head.weight, head.bias
        model.set_output_embeddings(own)
    return model
