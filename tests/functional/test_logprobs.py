"""Token log-probs: literals, degenerate sizes, and the memory bound."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vapo.functional import logprobs as logprobs_module
from vapo.functional.logprobs import output_logits, token_logprobs
from vapo.networks.precision import rounded_inputs


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
        (True, True, torch.float32, ("bf16", torch.float32)),
        (True, False, torch.bfloat16, ("bf16", torch.bfloat16)),
        (True, False, torch.float32, (None, torch.float32)),
        (False, True, torch.float32, (None, torch.bfloat16)),  # cast, with float32 results
        (False, False, torch.float32, (None, torch.float32)),
        (False, False, torch.bfloat16, (None, torch.bfloat16)),
        (True, True, torch.float64, (None, torch.float64)),
    ],
)
def test_inputs_are_rounded_for_the_product_alone(
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: bool,
    mixed: bool,
    dtype: torch.dtype,
    expected: tuple[str | None, torch.dtype],
) -> None:
    """Of float32 products in mixed precision, and a CPU's of bfloat16 inputs."""
    backends: Any = torch.backends
    settings = backends.mkldnn.matmul
    before, on_gpu, seen = settings.fp32_precision, backends.cuda.matmul.fp32_precision, []

    def product(hidden: Tensor, weight: Tensor, *, on_cpu: bool) -> Tensor:
        assert hidden.dtype == weight.dtype
        seen.append((settings.fp32_precision, hidden.dtype))
        assert backends.cuda.matmul.fp32_precision == on_gpu
        return hidden.float() @ weight.float().T

    monkeypatch.setattr(logprobs_module, "_product", product)
    pair = torch.ones(2, 4, 3, dtype=dtype), torch.ones(5, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = output_logits(*pair, on_cpu=on_cpu, rounding=rounded_inputs)
    assert logits.shape == (2, 4, 5)
    setting, multiplied = expected
    assert seen == [(before if setting is None else setting, multiplied)]
    assert settings.fp32_precision == before
    with pytest.raises(ZeroDivisionError), rounded_inputs():
        1 / 0  # noqa: B018
    assert settings.fp32_precision == before


class Casts(TorchDispatchMode):
    """The shapes that are made of another dtype, and the inputs of products."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: list[tuple[int, ...]] = []
        self.multiplied: list[set[torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.cast.append(tuple(result.shape))
        if func.overloadpacket is torch.ops.aten.mm:
            self.multiplied.append({x.dtype for x in args if isinstance(x, Tensor)})
        return result


def test_a_gpu_casts_the_matrix_once_and_multiplies_in_bfloat16() -> None:
    """On tensors without values: once forward and once backward, whatever the chunks are."""
    width, vocabulary, num_tokens = 5, 64, 24
    with FakeTensorMode():
        hidden = torch.empty(num_tokens, width, requires_grad=True)
        weight = torch.empty(vocabulary, width, requires_grad=True)
        targets = torch.empty(num_tokens, dtype=torch.long)
        with Casts() as forward, torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = token_logprobs(hidden, weight, targets, chunk_size=8, on_cpu=False)
        with Casts() as backward:
            logprobs.sum().backward()
    for casts in (forward, backward):
        assert casts.cast.count((vocabulary, width)) == 1
    assert logprobs.dtype == torch.float32
    assert forward.multiplied == [{torch.bfloat16}] * 3, "one product a chunk"
    assert backward.multiplied == [{torch.bfloat16}] * 9, "logits, and the gradient of both inputs"
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_gpus_order_of_operations_gives_the_same_numbers() -> None:
    """Its log-softmax is one operation. Here the products are a CPU's, in float64."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64) for n in (20, 33))
    targets = torch.randint(33, (20,))
    found = []
    for on_cpu in (True, False):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        settings: Any = {"temperature": 0.7, "chunk_size": 8, "on_cpu": on_cpu}
        logprobs, entropy = token_logprobs(h, w, targets, **settings)
        gradients = torch.autograd.grad((2 * logprobs + 0.3 * entropy).sum(), [h, w])
        found.append((logprobs, entropy, *gradients))
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-9, atol=1e-12)


def test_without_entropies_the_logprobs_and_their_gradient_are_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 6, requires_grad=True), torch.randn(33, 6)
    targets = torch.randint(33, (20,))
    whole, _ = token_logprobs(hidden, weight, targets, chunk_size=8)
    alone, entropy = token_logprobs(hidden, weight, targets, chunk_size=8, wants_entropy=False)
    assert bool(entropy.isnan().all())
    assert torch.equal(alone, whole)
    gradients = [torch.autograd.grad(x.sum(), hidden)[0] for x in (alone, whole)]
    assert torch.equal(*gradients)


def test_at_temperature_1_nothing_is_divided() -> None:
    """To divide by 1 changes no number, and is one more pass over all logits."""
    pair = torch.ones(4, 3), torch.ones(5, 3)
    divisions = []
    for temperature in (1.0, 0.5):
        with torch.profiler.profile() as profiler:
            token_logprobs(*pair, torch.zeros(4, dtype=torch.long), temperature=temperature)
        divisions.append(sum(event.name == "aten::div_" for event in profiler.events()))
    assert divisions == [0, 1]


def test_the_backward_rounds_what_the_forward_rounded() -> None:
    """Logits are computed again there: others would not be those of the log-probs."""
    rounded: list[bool] = []

    @contextmanager
    def noting() -> Iterator[None]:
        rounded.append(True)
        yield

    hidden, weight = torch.randn(24, 8, requires_grad=True), torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = token_logprobs(
            hidden, weight, torch.arange(24) % 16, chunk_size=8, rounding=noting
        )
    assert rounded == [True] * 3
    logprobs.sum().backward()
    assert rounded == [True] * 6
