"""A run's last policies as adapters alone, a few MB each, and the way back to a model's folder.

    python experiments/smollm2/kept_policies.py RUN_CONFIG OUTPUT_FOLDER ADAPTERS [ADAPTERS ...]

writes the policy of one file, or the mean of several: of the weights that they have with their
base, not of the two factors. Then `vapo validate --config RUN_CONFIG actor.path=OUTPUT_FOLDER
actor.lora=null` scores it. `compare.py --policies 5` keeps the files, in each run's folder
`policies`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file, save_file
from torch import Tensor

import vapo
from vapo.config.networks import LoraConfig
from vapo.networks.export import save_folder
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.lora import merge_adapters
from vapo.training.datamodule import iteration_of
from vapo.training.module import VapoModule
from vapo.types import Phase

_PREFIX = "model."  # of the actor's, before the names of the model's folder


class KeepPolicies(Callback):
    """Writes the adapters after each iteration of the policy, and keeps the last `number` files."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        start = iteration_of(trainer).start
        if start.phase is not Phase.POLICY_OPTIMIZATION:
            return
        if pl_module.config.actor.lora is None:
            raise vapo.UserError("only adapters are small enough to be kept: set actor.lora")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"iteration_{start.policy_iterations + 1:04d}.safetensors"
        save_file(adapters(pl_module.actor), path)
        for old in sorted(self.folder.glob("iteration_*.safetensors"))[: -self.number]:
            old.unlink()


def adapters(actor: torch.nn.Module) -> dict[str, Tensor]:
    """What the run trains of an actor with LoRA, in half of its size."""
    return {
        name.removeprefix(_PREFIX): parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in actor.named_parameters()
        if parameter.requires_grad
    }


def with_base(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], options: LoraConfig
) -> dict[str, Tensor]:
    """The plain model's weights: those of the base, each with its adapter if it has one."""
    adapted = {name.partition(".lora_")[0] for name in adapter}

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in base.items():
            module = name.removesuffix(".weight")
            yield (f"{module}.base_layer.weight" if module in adapted else name), tensor
        yield from adapter.items()

    return dict(merge_adapters(named(), options))


def mean_policy(
    base: Mapping[str, Tensor], policies: Sequence[Mapping[str, Tensor]], options: LoraConfig
) -> dict[str, Tensor]:
    """The mean of the policies' weights."""
    total: dict[str, Tensor] = {}
    for adapter in policies:
        for name, tensor in with_base(base, adapter, options).items():
            total[name] = total.get(name, torch.zeros_like(tensor)) + tensor / len(policies)
    return total


def main() -> None:
    config_file, output, *files = map(Path, sys.argv[1:])
    config = vapo.load_config(config_file)
    if config.actor.lora is None:
        raise SystemExit(f"{config_file}: actor.lora is null, so there are no adapters")
    model = load_causal_lm(config.actor.path, dtype="float32", attn_implementation="auto")
    policies = [load_file(path) for path in files]
    state = mean_policy(model.state_dict(), policies, config.actor.lora)
    model.load_state_dict(state)
    save_folder(model, dict(model.state_dict()), load_tokenizer(config.actor.path), output)
    print(f"{output}: the mean of {len(files)} policies" if len(files) > 1 else output)


if __name__ == "__main__":
    main()
