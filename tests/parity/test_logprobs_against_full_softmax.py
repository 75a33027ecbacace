"""Chunked log-probs and entropies against torch's log_softmax on the full logits."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vapo.functional import logprobs as logprobs_module
from vapo.functional.logprobs import output_logits, token_logprobs

N, V, H = 23, 17, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, H, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=g)


def full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float):
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T / temperature
    log_softmax = torch.log_softmax(logits, dim=-1)
    logprobs = -torch.nn.functional.nll_loss(log_softmax, targets, reduction="none")
    return logprobs, torch.distributions.Categorical(logits=logits).entropy()


def gradients(outputs, hidden: Tensor, weight: Tensor, use: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(N, dtype=outputs[0].dtype, generator=g) for _ in range(2)]
    terms = [(w * x).sum() for w, x in zip(weights, outputs, strict=True)]
    total = {"logprobs": terms[0], "entropy": terms[1], "both": terms[0] - 0.3 * terms[1]}[use]
    return torch.autograd.grad(total, (hidden, weight))


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 1024, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use", ["logprobs", "entropy", "both"])
def test_forward_and_backward(chunk_size: int | None, temperature: float, use: str) -> None:
    hidden, weight, targets = inputs()
    actual = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size)
    expected = full(hidden, weight, targets, temperature)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)
    actual_grads = gradients(actual, hidden, weight, use)
    expected_grads = gradients(expected, hidden, weight, use)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)


def test_gradients_against_finite_differences() -> None:
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.7, chunk_size=6),
        (hidden, weight),
        atol=1e-7,
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_frozen_side(frozen: str) -> None:
    hidden, weight, targets = inputs()
    trained = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    actual = torch.stack(token_logprobs(hidden, weight, targets, chunk_size=4)).sum()
    expected = torch.stack(full(hidden, weight, targets, 1.0)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(actual, trained), torch.autograd.grad(expected, trained)
    )


@pytest.mark.parametrize("block", [20, 10**6])  # weights that are float32 at a time: 4 tokens', all
def test_the_product_of_bfloat16_inputs_is_float32(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """As those are which FSDP2's mixed precision gathers. Logits are up to 60."""
    monkeypatch.setattr(logprobs_module, "_BLOCK", block)
    hidden, weight, targets = inputs(torch.bfloat16)
    with torch.no_grad():
        hidden *= 5.0
    actual = token_logprobs(hidden, weight, targets, chunk_size=8)
    expected = full(hidden.double(), weight.double(), targets, 1.0)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, rtol=0, atol=2e-5)
    coarse = (hidden @ weight.T).detach().float().log_softmax(dim=1)  # the control
    coarse = coarse.gather(1, targets[:, None]).squeeze(1)
    assert float((coarse - expected[0].detach()).abs().max()) > 0.05
    for a, e in zip(
        gradients(actual, hidden, weight, "both"),
        gradients(tuple(x.float() for x in expected), hidden, weight, "both"),
        strict=True,
    ):
        assert a.dtype == torch.bfloat16
        error = (a.float() - e.float()).norm() / e.float().norm()
        assert error.item() < 1e-2


def test_a_gpu_multiplies_bfloat16_inputs_without_copies() -> None:
    """On a tensor without values: the one operation is a product with float32 results."""
    with FakeTensorMode():
        states, weight = (torch.empty(n, 5, dtype=torch.bfloat16) for n in (3, 17))
        with torch.profiler.profile() as profiler:
            logits = output_logits(states, weight, on_cpu=False)
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 17))
    assert not {event.name for event in profiler.events()} & {"aten::_to_copy", "aten::to"}


def test_mixed_precision_keeps_float32_after_the_product() -> None:
    """Float32 logits of inputs that are float32, or rounded as autocast would round them.

    In bfloat16 the logits themselves, here of up to 60, would be off by as much as 1/8.
    """
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        hidden *= 5.0
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_size=8)
    rounded = [x.detach().bfloat16().double() for x in (hidden, weight)]
    given = [x.detach().double() for x in (hidden, weight)]
    errors = []
    for h, w in (given, rounded):
        expected = full(h, w, targets, 1.0)
        pairs = zip((logprobs, entropy), expected, strict=True)
        errors.append(max(float((a - e).abs().max()) for a, e in pairs))
    assert min(errors) < 2e-5
    in_bfloat16 = (hidden.bfloat16() @ weight.bfloat16().T).float()  # the control
    coarse = in_bfloat16.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    expected, _ = full(rounded[0], rounded[1], targets, 1.0)
    assert float((coarse - expected).detach().abs().max()) > 1e-2


def test_mixed_precision_multiplies_the_gradient_in_bfloat16() -> None:
    hidden, weight, targets = inputs(torch.float32)
    for which in ("logprobs", "both"):
        plain = token_logprobs(hidden, weight, targets, chunk_size=8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = token_logprobs(hidden, weight, targets, chunk_size=8)
        expected = gradients(plain, hidden, weight, which)
        for a, e in zip(gradients(mixed, hidden, weight, which), expected, strict=True):
            assert a.dtype == torch.float32
            assert 0 < float((a - e).norm() / e.norm()) < 1e-2


def test_a_model_that_gives_bfloat16_states_has_a_float32_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()  # as a model under autocast gives it
    logprobs, _ = token_logprobs(half, weight, targets, chunk_size=8)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert logprobs.dtype == weight.grad.dtype == torch.float32
    expected, _ = full(half, weight.bfloat16(), targets, 1.0)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
