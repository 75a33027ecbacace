"""How networks are made: recomputed layers, and shards filled from the first process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.builders import free_port
from tests.config.fits import fit_config
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.build import enable_gradient_checkpointing, make_actor, make_critic
from vapo.networks.token_inputs import token_inputs

INPUTS = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    """A process group of one, over which FSDP shards as over many."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def layer_calls(tmp_path: Path, checkpointing: bool) -> int:
    """How often the first decoder layer's MLP runs in a forward and backward."""
    overrides = [f"actor.path={save_tiny_folder(tmp_path / 'policy')}"]
    overrides.append(f"actor.gradient_checkpointing={str(checkpointing).lower()}")
    actor = make_actor(fit_config(tmp_path, *overrides), None)
    calls: list[int] = []
    mlp = actor.get_submodule("model.model.layers.0.mlp")
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    output = actor(INPUTS, temperature=1.0)
    (output.logprobs.sum() + output.entropy.sum()).backward()
    return len(calls)


def test_checkpointed_layers_run_again_in_the_backward(tmp_path: Path) -> None:
    assert layer_calls(tmp_path, checkpointing=False) == 1
    assert layer_calls(tmp_path, checkpointing=True) == 2


def test_an_architecture_that_cannot_is_one_clear_error() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10))
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"actor\.gradient_checkpointing: GPT2LMHeadModel does not"):
        enable_gradient_checkpointing(Actor(model), "actor")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_shards_made_empty_and_filled_equal_loaded_networks(
    tmp_path: Path, one_process: DeviceMesh, tied: bool
) -> None:
    """Weights, tied weights, and the rotary frequencies that no file holds."""
    path = save_tiny_folder(tmp_path / "policy", tiny_model(tie_word_embeddings=tied))
    config = fit_config(tmp_path, f"actor.path={path}", "trainer.strategy=fsdp")
    for make in (make_actor, make_critic):
        loaded, filled = make(config, None), make(config, one_process)
        expected = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        found = dict(filled.named_parameters()) | dict(filled.named_buffers())
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full, expected[name]), name
    actor, sharded = make_actor(config, None), make_actor(config, one_process)
    for ours, theirs in zip(
        actor(INPUTS, temperature=1.0, layers=[-1]),
        sharded(INPUTS, temperature=1.0, layers=[-1]),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    head = sharded.model.get_output_embeddings()
    assert (head.weight is sharded.model.get_input_embeddings().weight) == tied
