"""Token log-probs: literals, degenerate sizes, and the memory bound."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vapo.functional import logprobs as logprobs_module
from vapo.functional.logprobs import output_logits, token_logprobs
from vapo.system.products import rounded_inputs


def test_logprobs_and_entropy_by_hand() -> None:
    # logits 0 and ln 3: probabilities 1/4, 3/4. At temperature 1/2: 0 and ln 9, 1/10, 9/10.
    hidden = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75], abs=1e-12)
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.tolist() == pytest.approx([expected] * 2, abs=1e-12)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=0.5)
    assert logprobs.exp().tolist() == pytest.approx([0.1, 0.9], abs=1e-12)


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(5, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum().item() == 0.0


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"chunk_size": 0}])
def test_bad_settings_are_refused(setting: dict[str, Any]) -> None:
    hidden = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=next(iter(setting))):
        token_logprobs(hidden, hidden, torch.tensor([0, 1]), **setting)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest float32 tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.numel = max(self.numel, x.numel())
        return result


def test_forward_and_backward_never_hold_all_logits() -> None:
    num_tokens, vocabulary, width, chunk_size = 96, 512, 8, 16
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (num_tokens,))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_size=chunk_size)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    assert largest.numel == chunk_size * vocabulary
    with LargestTensor() as largest:  # the control: the full computation is seen by the probe
        (hidden @ weight.T).log_softmax(dim=1)
    assert largest.numel == num_tokens * vocabulary


def test_weights_in_bfloat16_are_never_float32_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, vocabulary, width, chunk_size = 24, 512, 64, 8
    monkeypatch.setattr(logprobs_module, "_BLOCK", 1024)
    hidden, weight = (torch.randn(n, width).bfloat16() for n in (num_tokens, vocabulary))
    targets = torch.randint(vocabulary, (num_tokens,))
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(
            hidden.requires_grad_(), weight, targets, chunk_size=chunk_size
        )
        logprobs.sum().backward()
    assert largest.numel == chunk_size * vocabulary < weight.numel()


@pytest.mark.parametrize(
    ("on_cpu", "mixed", "dtype", "expected"),
    [
        (True, True, torch.float32, "bf16"),
        (True, False, torch.bfloat16, "bf16"),
        (True, False, torch.float32, None),
        (False, True, torch.float32, "tf32"),
        (False, False, torch.float32, None),
        (False, False, torch.bfloat16, None),  # its own product, with float32 results
        (True, True, torch.float64, None),
    ],
)
def test_inputs_are_rounded_for_the_product_alone(
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: bool,
    mixed: bool,
    dtype: torch.dtype,
    expected: str | None,
) -> None:
    """Of float32 products in mixed precision, and a CPU's of bfloat16 inputs."""
    backends: Any = torch.backends
    settings, others = backends.mkldnn.matmul, backends.cuda.matmul
    if not on_cpu:
        settings, others = others, settings
    before, other, seen = settings.fp32_precision, others.fp32_precision, []

    def product(hidden: Tensor, weight: Tensor, *, on_cpu: bool) -> Tensor:
        seen.append(settings.fp32_precision)
        assert others.fp32_precision == other
        return hidden.float() @ weight.float().T

    monkeypatch.setattr(logprobs_module, "_product", product)
    pair = torch.ones(2, 4, 3, dtype=dtype), torch.ones(5, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = output_logits(*pair, on_cpu=on_cpu, rounding=rounded_inputs)
    assert logits.shape == (2, 4, 5)
    assert seen == [before if expected is None else expected]
    assert settings.fp32_precision == before
    with pytest.raises(ZeroDivisionError), rounded_inputs(on_cpu=on_cpu):
        1 / 0  # noqa: B018
    assert settings.fp32_precision == before


def test_the_backward_rounds_what_the_forward_rounded() -> None:
    """Logits are computed again there: others would not be those of the log-probs."""
    rounded: list[bool] = []

    @contextmanager
    def noting(*, on_cpu: bool) -> Iterator[None]:
        rounded.append(on_cpu)
        yield

    hidden, weight = torch.randn(24, 8, requires_grad=True), torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = token_logprobs(
            hidden, weight, torch.arange(24) % 16, chunk_size=8, rounding=noting
        )
    assert rounded == [True] * 3
    logprobs.sum().backward()
    assert rounded == [True] * 6
