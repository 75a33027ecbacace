"""Weights straight into a real vLLM: which models allow it, and that nothing differs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.vllm_engine import make_check, make_engine, vllm_model
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request, generate_all
from vapo.rollouts.engines.sampler import CastWeights, WeightSums
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.weight_loading import load_into, loads_directly

pytestmark = pytest.mark.vllm

PLAIN = SimpleNamespace(quant_config=None, lora_config=None)
REQUESTS = [Request((3, 4, 5 + i), 0, SamplingSettings(12, greedy=True)) for i in range(3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedEngine]:
    """Its linear layers read their parameters as those on a GPU do: oneDNN would pack them."""
    import vllm._custom_ops as ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_supports_onednn", False)
        engine = make_engine(tmp_path_factory.mktemp("policy"))
        yield engine
        engine.close()


def in_worker(engine: ColocatedEngine, action: Any) -> Any:
    with engine._state.entered(), torch.no_grad():
        (result,) = engine._live().collective_rpc(action)
    return result


def is_direct(engine: ColocatedEngine) -> bool:
    return bool(in_worker(engine, lambda w: loads_directly(w.get_model(), w.vllm_config)))


def changed_model() -> Any:
    model = vllm_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)
    return model


def after_vllms_own_way(engine: ColocatedEngine, model: Any) -> list[Generated]:
    weights = model.state_dict().items()
    in_worker(engine, lambda w: w.reload_weights(weights_iterator=iter(weights)))
    assert engine._live().reset_prefix_cache()
    return generate_all(engine, REQUESTS)


def test_the_direct_way_gives_the_log_probs_of_vllms_own(
    engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit; and the old weights are gone."""
    assert is_direct(engine)
    own = [after_vllms_own_way(engine, model) for model in (vllm_model(), changed_model())]
    assert own[0] != own[1]
    worker = in_worker(engine, lambda worker: worker)
    monkeypatch.setattr(worker.worker, "reload_weights", None)  # it would fail
    for model, expected in zip((vllm_model(), changed_model()), own, strict=True):
        sums = WeightSums()
        engine.load(sums.of(CastWeights(torch.float32)(model.state_dict().items())))
        assert generate_all(engine, REQUESTS) == expected
        assert make_check(model)(engine, sums.result()) < 1e-4


def test_what_is_processed_after_loading_is_not_loaded_directly(engine: ColocatedEngine) -> None:
    model = in_worker(engine, lambda worker: worker.get_model())
    assert loads_directly(model, PLAIN)
    for name in ("quant_config", "lora_config"):
        assert not loads_directly(model, SimpleNamespace(**{**vars(PLAIN), name: object()}))
    layer = model.model.layers[0].mlp.down_proj
    for owner, name, value in (
        (layer, "quant_method", object()),  # of fp8, of experts
        (layer, "cpu_linear", lambda: layer),  # a kernel that keeps something
        (model.model.norm, "process_weights_after_loading", print),
        (model, "process_weights_after_loading", print),
        (model.model.layers[1].self_attn.attn.impl, "sinks", torch.zeros(1)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            assert not loads_directly(model, PLAIN), name
        assert loads_directly(model, PLAIN), name
    for name in ("weight", "another"):  # the one is packed elsewhere, the other is vLLM's own
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(layer._parameters, name, nn.Parameter(torch.empty(0)))
            assert not loads_directly(model, PLAIN), name
    assert loads_directly(model, PLAIN)


def test_a_model_finds_vllms_config_while_it_takes_weights(
    engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a model asks for it, as vLLM's own `reload_weights` lets it."""
    from vllm.config import get_current_vllm_config_or_none

    seen: list[Any] = []
    model = in_worker(engine, lambda w: w.get_model())
    monkeypatch.setattr(
        model, "load_weights", lambda weights: seen.append(get_current_vllm_config_or_none())
    )
    assert is_direct(engine)
    in_worker(engine, lambda w: load_into(w, []))
    assert len(seen) == 1
    assert seen[0] is in_worker(engine, lambda w: w.vllm_config)
