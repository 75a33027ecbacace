"""Log-probabilities and entropies of tokens, without the full [n, V] logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from vapo.functional.logit_transforms import LogitTransform

_BLOCK = 2**20  # weights that a CPU turns into float32 at a time: 4 MiB, which fit its cache

Rounding = Callable[..., Any]  # makes a context, as `vapo.networks.precision.rounded_inputs` does


def token_logprobs(
    hidden: Float[Tensor, "n H"],
    lm_head_weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " n"],
    *,
    temperature: float | int = 1.0,
    transform: LogitTransform | None = None,
    chunk_size: int | None = None,
    on_cpu: bool | None = None,
    rounding: Rounding | None = None,
    wants_entropy: bool = True,
    collisions: Float[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return log pi(target) and the entropy of pi for every token, both differentiable.

        z       = transform(hidden @ lm_head_weight^T) / temperature
        logprob = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum_v softmax(z)_v * z_v
        collision = sum_v softmax(z)_v^2

    At most [chunk_size, V] logits exist at a time, also in the backward, which computes them again.
    Logits and everything after them are float32, whatever the dtype of `hidden` and autocast, since
    in bfloat16 logits above 16 are multiples of 1/8; float64 stays float64. The products with their
    gradient are in the dtype of `hidden` or autocast.
    Units: nats.

    Args:
        chunk_size: the tokens whose logits are computed at once; None: `rows_of_logits`.
        on_cpu: whether to compute as on a CPU; None: as the tensors' device says. It is False on a
            CPU where fake tensors stand for those of a GPU.
        transform: how the architecture scales or caps the logits; None: not at all.
        rounding: makes a context in which a CPU may round the inputs of float32 products
            (`output_logits`); None: they are not rounded.
        wants_entropy: if False the entropies are nan, which saves three passes over the logits.
        collisions: a tensor to be filled with the collision of each token, without gradient. None
            saves three passes over the logits.

    Raises: ValueError when temperature <= 0 or chunk_size < 1.

    >>> logprob, entropy = token_logprobs(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([3]))
    >>> round(logprob.item(), 4), round(entropy.item(), 4)  # uniform over 4: -ln 4, ln 4
    (-1.3863, 1.3863)
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    on_cpu = hidden.device.type == "cpu" if on_cpu is None else on_cpu
    if chunk_size is None:
        chunk_size = rows_of_logits(lm_head_weight.shape[0], on_cpu=on_cpu)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device) and dtype is torch.float32:
        dtype = torch.get_autocast_dtype(device)
    weight = lm_head_weight.to(hidden.dtype)
    settings = _Settings(
        *(temperature, transform, chunk_size, dtype, on_cpu, rounding, wants_entropy, collisions)
    )
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, settings)
    return logprobs, entropy


def rows_of_logits(vocabulary: int, *, on_cpu: bool) -> int:
    """Return for how many tokens logits are computed at once with a vocabulary of this size.

    On a CPU their float32 logits take 32 MiB, the most that the C library's allocator keeps for the
    next chunk. On a GPU, whose products are slow on few rows, they take 512 MiB.
    """
    return max(1, (2**23 if on_cpu else 2**27) // vocabulary)


def output_logits(
    hidden: Float[Tensor, "... H"],
    weight: Float[Tensor, "V H"],
    *,
    on_cpu: bool,
    rounding: Rounding | None = None,
) -> Float[Tensor, "... V"]:
    """Return the product of hidden states with the output layer's weight, in float32 or float64.

    Both inputs have one dtype. Under autocast a GPU multiplies float32 inputs in autocast's dtype
    (`product_inputs`). On a CPU `rounding` makes a context in which the inputs of a float32 product
    may be rounded to bfloat16, as autocast would, where that is faster on the processor (AMX).
    Sums are in the dtype of the result. Products of inputs in half precision have no gradient:
    `token_logprobs` computes its own.
    """
    hidden, weight = product_inputs(hidden, weight, on_cpu=on_cpu)
    # on a CPU bfloat16 inputs are multiplied as float32
    is_rounded = on_cpu and (
        hidden.dtype is torch.bfloat16
        or (hidden.dtype is torch.float32 and torch.is_autocast_enabled(hidden.device.type))
    )
    if rounding is None or not is_rounded:
        return _product(hidden, weight, on_cpu=on_cpu)
    with rounding():
        rows = _product(hidden.flatten(0, -2), weight, on_cpu=on_cpu)
    return rows.unflatten(0, hidden.shape[:-1])


def product_inputs(hidden: Tensor, weight: Tensor, *, on_cpu: bool) -> tuple[Tensor, Tensor]:
    """Cast states and weights for the output layer's product, and return both.

    Under autocast float32 tensors of a GPU are cast to autocast's dtype, as in all other layers. A
    caller that multiplies chunk by chunk casts them first, so that the whole weight is cast once.
    """
    device = hidden.device.type
    if on_cpu or hidden.dtype is not torch.float32 or not torch.is_autocast_enabled(device):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


def _product(hidden: Tensor, weight: Tensor, *, on_cpu: bool) -> Tensor:
    """Multiply states with the output layer's weight; results are float32 or float64."""
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.dtype in (torch.float32, torch.float64):
            return linear(hidden, weight)
        rows = hidden.flatten(0, -2)
        if on_cpu:
            logits = _by_blocks(rows.float(), weight)
        else:
            logits = torch.mm(rows, weight.T, out_dtype=torch.float32)
        return logits.unflatten(0, hidden.shape[:-1])


def _by_blocks(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply float32 states with weights of another dtype, of which one block is cast at a time.

    Torch has no product of bfloat16 inputs with float32 results on a CPU. On a processor that
    emulates bfloat16 this took a sixth of the time of torch's product in bfloat16.
    """
    logits = hidden.new_empty(len(hidden), len(weight))
    size = max(1, _BLOCK // weight.shape[1])
    for block, part in zip(weight.split(size), logits.split(size, dim=1), strict=True):
        torch.mm(hidden, block.float().T, out=part)
    return logits


class _Settings(NamedTuple):
    """The arguments of `token_logprobs` that are not differentiated, for its autograd function.

    `gradient_dtype` is the dtype of the products that make the gradient.
    """

    temperature: float | int
    transform: LogitTransform | None
    chunk_size: int
    gradient_dtype: torch.dtype
    on_cpu: bool
    rounding: Rounding | None
    wants_entropy: bool
    collisions: Tensor | None

    def logits(self, hidden: Tensor, weight: Tensor) -> Float[Tensor, "chunk V"]:
        """Compute the logits of a chunk of tokens, transformed and divided by the temperature."""
        logits = output_logits(hidden, weight, on_cpu=self.on_cpu, rounding=self.rounding)
        if self.transform is not None:
            logits = self.transform.apply_(logits)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def log_softmax(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the whole vocabulary, and the normalizer of each row of logits.

        The normalizer is logsumexp of the row. The logits may be overwritten.
        """
        if self.on_cpu:
            normalizer = logits.logsumexp(dim=1)
            return logits.sub_(normalizer[:, None]), normalizer
        # a GPU's kernel for both reads the logits less often than the sum and the difference do
        log_softmax = logits.log_softmax(dim=1)
        of_targets = (x.gather(1, targets).squeeze(1) for x in (logits, log_softmax))
        return log_softmax, torch.sub(*of_targets)


class _TokenLogprobs(torch.autograd.Function):
    """The autograd function of `token_logprobs`, chunk by chunk, with its gradient in closed form.

    With p = softmax(z):  d logprob / d z_v = [v = target] - p_v
                          d entropy / d z_v = -p_v * (log p_v + entropy)
    and d z / d (hidden @ weight^T) is the slope of `LogitTransform` / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_normalizer = hidden.new_empty(hidden.shape[0], dtype=dtype)
        logprobs = torch.empty_like(log_normalizer)
        entropy = torch.full_like(log_normalizer, torch.nan)
        of_hidden, of_weight = product_inputs(hidden, weight, on_cpu=settings.on_cpu)
        for start in range(0, hidden.shape[0], settings.chunk_size):
            part = slice(start, start + settings.chunk_size)
            logits = settings.logits(of_hidden[part], of_weight)
            log_softmax, log_normalizer[part] = settings.log_softmax(logits, targets[part, None])
            logprobs[part] = log_softmax.gather(1, targets[part, None]).squeeze(1)
            if settings.wants_entropy:
                entropy[part] = -(log_softmax.exp().mul_(log_softmax)).sum(dim=1)
            if settings.collisions is not None:  # last, since this overwrites the log-probs
                settings.collisions[part] = log_softmax.mul_(2).exp_().sum(dim=1)
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.settings = settings
        ctx.is_mixed = torch.is_autocast_enabled(hidden.device.type)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=log_normalizer.dtype)
        device, dtype, transform = hidden.device.type, settings.gradient_dtype, settings.transform
        of_hidden, of_weight = hidden.to(dtype), weight.to(dtype)
        # a GPU multiplied the same tensors in the forward; a CPU multiplied the original ones
        multiplied = (hidden, weight) if settings.on_cpu else (of_hidden, of_weight)
        for start in range(0, hidden.shape[0], settings.chunk_size):
            part = slice(start, start + settings.chunk_size)
            with torch.autocast(device, enabled=ctx.is_mixed):  # as the forward computed them
                logits = settings.logits(multiplied[0][part], multiplied[1])
            is_capped = transform is not None and transform.cap is not None
            transformed = logits * settings.temperature if is_capped else None
            log_softmax = logits.sub_(log_normalizer[part, None])
            of_logprobs = None if grad_logprobs is None else grad_logprobs[part, None]
            of_entropy = None if grad_entropy is None else grad_entropy[part, None]
            grad_logits = _grad_logits(
                log_softmax, entropy[part, None], targets[part, None], of_logprobs, of_entropy
            )
            if settings.temperature != 1:
                grad_logits.div_(settings.temperature)
            if transform is not None:
                grad_logits = transform.times_slope_(grad_logits, transformed)
            grad_logits = grad_logits.to(dtype)
            with torch.autocast(device, enabled=False):
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ of_weight
                if grad_weight is not None:
                    grad_weight += grad_logits.T @ of_hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _grad_logits(
    log_softmax: Tensor,
    entropy: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of one chunk's logits from those of its log-probs and entropies.

    A gradient that is None counts as 0. `log_softmax` are the log-probs of the whole vocabulary,
    which are overwritten.
    """
    if grad_entropy is None:
        scale = torch.zeros_like(entropy) if grad_logprobs is None else -grad_logprobs
        grad_logits = log_softmax.exp_().mul_(scale)
    else:
        grad_logits = (log_softmax + entropy).mul_(-grad_entropy)
        if grad_logprobs is not None:
            grad_logits.sub_(grad_logprobs)
        grad_logits.mul_(log_softmax.exp_())
    if grad_logprobs is not None:
        grad_logits.scatter_add_(1, targets, grad_logprobs)
    return grad_logits


def gradient_weights(logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return (1 - p)^2 in float64, p the probability with which each token was sampled.

    It is the square of the gradient of log p with respect to the sampled token's logit.

    >>> gradient_weights(torch.tensor([[0.0, 0.25]]).log())
    tensor([[1.0000, 0.5625]], dtype=torch.float64)
    """
    return (1 - logprobs.double().exp()).square()
