"""Measure the memory of single passes by running this package's own code on fake tensors.

A fake tensor has a shape, a dtype and no memory, so a 32B network runs here as a small one.
Activation checkpointing, attention kernels and the chunked log-probs count as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from vapo.config import FitConfig
from vapo.functional.losses import categorical_value_loss
from vapo.networks.actor_critic import Critic
from vapo.networks.build import enable_gradient_checkpointing
from vapo.networks.experts import num_active
from vapo.networks.layouts import choose_layout
from vapo.networks.meta_device import fill_with_fakes, model_of_config
from vapo.networks.packed_attention import PACKED_SDPA, counts_for_gpu
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.recurrent_layers import has_keys, has_recurrent_layers, recurrent_states
from vapo.networks.token_inputs import Layout, TokenInputs, token_inputs
from vapo.rollouts.engines.transformers.kv_cache import decoding_attention, prompt_cache
from vapo.rollouts.engines.transformers.token_sampling import (
    filtered_logprobs,
    float32_logits,
    inverse_cdf,
)
from vapo.studies.estimate.memory_tracker import MemoryTracker
from vapo.studies.estimate.shapes import NetworkShape, frozen_base, make_network, with_first_layers
from vapo.system.private_attributes import attention_implementation


class Parameters(NamedTuple):
    """Numbers of a network's parameters.

    Attributes:
        layer: in the largest decoder layer.
        root: outside the decoder layers.
        head: in the part of the root whose gradients come before the layers': all but an untied
            embedding.
        active: the parameters that compute a token, which are fewer than `total` with experts.
    """

    total: int
    layer: int
    root: int
    head: int
    active: int


class PassMemory(NamedTuple):
    """The bytes of a pass.

    Attributes:
        kept_bytes: the bytes that remain from the forward to the backward; for the sampler, the
            cache.
        peak: the most bytes at any time, `kept_bytes` included.
    """

    kept_bytes: int
    peak: int


class NetworkPasses:
    """Measures passes of a whole network on fake networks of its first two and four layers.

    Equal layers need equally many bytes, so the memory of a pass grows linearly with their number.
    If layers differ, the whole network runs.
    """

    def __init__(self, shape: NetworkShape) -> None:
        self.shape = shape
        self.num_layers = int(shape.backbone.get_text_config().num_hidden_layers)
        model = model_of_config(
            shape.kind,
            copy.deepcopy(shape.config),
            path=str(shape.config.name_or_path),
            dtype=shape.dtype,
            attn_implementation="auto",
        )
        layers = _layer_sizes(model)
        total = sum(p.numel() for p in model.parameters())
        root = total - sum(layers)
        table = model.get_input_embeddings().get_parameter("weight")
        output = model.get_output_embeddings()
        is_tied = output is not None and output.get_parameter("weight") is table
        head = root if is_tied else root - table.numel()
        active = sum(num_active(model).values())
        self.parameters = Parameters(total, max(layers), root, head, active)
        is_uniform = len(set(layers if shape.base is None else _base_sizes(shape.base))) == 1
        counts = (2, 4) if is_uniform and self.num_layers > 4 else (self.num_layers,)
        self._networks = [FakeNetwork(with_first_layers(shape, count)) for count in counts]

    def run(self, one_pass: Callable[..., PassMemory], **sizes: Any) -> PassMemory:
        """Return the memory that a pass through the whole network needs.

        If all layers are equal and more than four, the pass runs on networks of two and of four
        layers. Half of the difference is what one layer needs, and it is added for each further
        layer. Otherwise the pass runs on the whole network.

        Args:
            one_pass: a method of `FakeNetwork` that runs the pass, such as `FakeNetwork.update`.
            sizes: the arguments of that method.
        """
        memories = [one_pass(network, **sizes) for network in self._networks]
        if len(memories) == 1:
            return memories[0]
        two, four = memories
        num_others = self.num_layers - 4
        return PassMemory(
            four.kept_bytes + (four.kept_bytes - two.kept_bytes) * num_others // 2,
            four.peak + (four.peak - two.peak) * num_others // 2,
        )

    @property
    def models(self) -> list[PreTrainedModel]:
        """The fake models that read the tokens, one for each number of layers that is measured."""
        return [fake.backbone for fake in self._networks]


def _layer_sizes(model: PreTrainedModel) -> list[int]:
    modules = model.get_submodule("model.layers").children()
    return [sum(p.numel() for p in layer.parameters()) for layer in modules] or [0]


def _base_sizes(base: PreTrainedConfig) -> list[int]:
    return _layer_sizes(frozen_base(copy.deepcopy(base), dtype="float32").model)


def shares_prompts(networks: Sequence[NetworkPasses], config: FitConfig) -> bool:
    """Whether the responses of a pass share one forward of their prompt in all these networks."""
    if any(n.shape.attn_implementation == "flash_attention_2" for n in networks):
        return False  # flash attention cannot share them; SDPA, which stands for it here, could
    models = [model for network in networks for model in network.models]
    return choose_layout(config.training.packing, models) == "shared_prompts"


class FakeNetwork:
    """An actor or critic of fake tensors. Each pass returns the memory that it needed."""

    def __init__(self, shape: NetworkShape) -> None:
        self.shape = shape
        self.mode = FakeTensorMode()
        self.network, self.backbone = make_network(shape)
        with self.mode:
            for part in {self.backbone, self.network.model}:
                fill_with_fakes(part)
        if shape.attn_implementation == "flash_attention_2":
            # flash attention runs on GPUs only; SDPA without a mask stands for it and, like it,
            # keeps no scores
            self.backbone.base_model.register_forward_pre_hook(_without_mask, with_kwargs=True)
        if shape.gradient_checkpointing:
            enable_gradient_checkpointing(self.network, "model")
        self.network.train()
        self.backbone.train()
        for parameter in self.network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_grad)

    def update(self, **lengths: int) -> PassMemory:
        """Run a micro-batch's forward and backward. A gradient is freed once it is complete.

        Args:
            lengths: the fields of `Lengths`.
        """
        with self._tracked() as tracker, self._autocast():
            total = self._forward(lengths)
            num_bytes = tracker.live
            total.backward()
        return PassMemory(num_bytes, tracker.peak)

    def evaluation(self, **lengths: int) -> PassMemory:
        """Run a forward without gradients, as for old log-probs and values.

        Args:
            lengths: the fields of `Lengths`.
        """
        # the network may be cut to few layers: layer 0 stands for any but the last
        layers = [-1 if layer == -1 else 0 for layer in self.shape.read_layers]
        with self._tracked() as tracker, torch.no_grad(), self._autocast():
            self._forward(lengths, layers)
        return PassMemory(0, tracker.peak)

    def prefill(self, *, rows: int, prompt_tokens: int) -> PassMemory:
        """Run the sampler's forward over prompts.

        The result's `kept_bytes` are those of the cache.
        """
        with self._tracked() as tracker, self._no_autocast_eval():
            self._run(rows, prompt_tokens, cache := self._empty_cache())
            num_bytes = sum(t.nbytes for layer in cache.layers for t in _cached_tensors(layer))
        return PassMemory(num_bytes, tracker.peak)

    def decode(self, *, rows: int, width: int, top_k: int, top_p: float) -> PassMemory:
        """Sample a token for each row. The result's `kept_bytes` are those of the cache.

        Args:
            width: the number of columns of the cache.
        """
        with self.mode, self._no_autocast_eval():
            self._run(rows, 1, cache := self._empty_cache())
            num_bytes = 0
            layers: list[Any] = cache.layers
            for layer in layers:
                num_bytes += sum(t.nbytes for t in recurrent_states(layer))
                if not has_keys(layer):
                    continue
                whole = [
                    torch.empty(*t.shape[:2], width, t.shape[3], dtype=t.dtype)
                    for t in (layer.keys, layer.values)
                ]
                num_bytes += sum(t.nbytes for t in whole)
                layer.keys, layer.values = (t[:, :, : width - 1] for t in whole)
                # the sampler's cache writes in place, where DynamicCache would copy
                layer.update = lambda *_, whole=whole, **__: tuple(whole)
        with (
            self._tracked() as tracker,
            self._no_autocast_eval(),
            decoding_attention(self.backbone),
        ):
            logits = self._run(rows, 1, cache, width=width)
            logprobs = filtered_logprobs(logits[:, -1], temperature=1.0, top_k=top_k, top_p=top_p)
            inverse_cdf(logprobs, torch.empty(rows, dtype=torch.double))
        return PassMemory(num_bytes, tracker.peak)

    # ---- running ------------------------------------------------------------------------------

    @contextmanager
    def _tracked(self) -> Iterator[MemoryTracker]:
        tracker = MemoryTracker()
        for part in (self.network, self.backbone):
            tracker.ignore(*part.parameters(), *part.buffers())
        with self.mode, tracker, counts_for_gpu(self.shape.on_gpu):
            yield tracker

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return Lightning's autocast without a cache of weights; an empty context if it is off."""
        if not self.shape.autocast:
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    @contextmanager
    def _no_autocast_eval(self) -> Iterator[None]:
        self.network.eval()
        with torch.no_grad():
            yield
        self.network.train()

    def _forward(self, lengths: Mapping[str, int], layers: Sequence[int] = ()) -> Tensor:
        inputs = self._inputs(**lengths)
        if isinstance(self.network, Critic):
            return self._value_loss(inputs)
        output = self.network(inputs, temperature=1.0, layers=layers)
        loss: Tensor = output.logprobs.sum()
        return loss + output.entropy.sum() if self.shape.has_entropy_bonus else loss

    def _value_loss(self, inputs: TokenInputs) -> Tensor:
        """Return the critic's loss. That of a categorical head needs target distributions.

        Without gradients, and for other heads, the sum of values stands for it.
        """
        output = self.network(inputs)
        if output.logits is None or not torch.is_grad_enabled():
            return output.values.sum()
        logits = inputs.scatter(output.logits)
        targets = torch.empty_like(logits, requires_grad=False)
        return categorical_value_loss(logits, targets, inputs.response_mask, denominator=1)

    def _empty_cache(self) -> DynamicCache:
        """Make a KV cache as the sampler does."""
        config = self.shape.config
        return prompt_cache(config, is_recurrent=has_recurrent_layers(config))

    def _inputs(
        self, rows: int, prompt_tokens: int, response_tokens: int, prompts: int | None = None
    ) -> TokenInputs:
        """Make fake inputs in the layout that the run uses: `rows` responses to `prompts`
        prompts.
        """
        from torch.utils._mode_utils import no_dispatch

        prompts = rows if prompts is None else prompts
        is_packed = attention_implementation(self.backbone) == PACKED_SDPA
        layout: Layout = "shared_prompts" if is_packed else "padded"
        pairs = [([i % prompts] * prompt_tokens, [0] * response_tokens) for i in range(rows)]
        with no_dispatch():
            real = token_inputs(pairs, pad_id=0, layout=layout)
        fakes: dict[str, Any] = {
            f.name: self.mode.from_tensor(value)
            for f in fields(real)
            if isinstance(value := getattr(real, f.name), Tensor)
        }
        if isinstance(model := self.network.model, ProbeForSequenceClassification):
            fakes["actor_states"] = model.empty_states(len(real.targets), self.shape.states_dtype)
        return replace(real, **fakes)

    def _run(
        self, rows: int, num_tokens: int, cache: DynamicCache, *, width: int | None = None
    ) -> Tensor:
        mask = None if width is None else torch.ones(rows, width, dtype=torch.long)
        with float32_logits(self.network.model):
            logits: Tensor = self.network.model(
                input_ids=torch.zeros(rows, num_tokens, dtype=torch.long),
                attention_mask=mask,
                position_ids=torch.zeros(rows, num_tokens, dtype=torch.long),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        return logits


def _cached_tensors(layer: Any) -> list[Tensor]:
    """Return the tensors in one layer of the cache: keys and values, recurrent states, or both."""
    keys = [layer.keys, layer.values] if has_keys(layer) else []
    return [*keys, *recurrent_states(layer)]


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "attention_mask": None}


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None
