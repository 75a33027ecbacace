"""Make the actor and the critic that a config describes.

This decides where they start, which weights are trained, and how a sharded run loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic, CriticEnsemble, FrozenBase
from vapo.networks.adapters import AdapterModelConfig, accept_adapters, checkpoint_contexts
from vapo.networks.critic_folders import critic_path
from vapo.networks.critics_on_actors import AdapterCritic, critic_of
from vapo.networks.experts import say_experts
from vapo.networks.fitted_weights import fitted_parameters
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.networks.lora import add_adapters, target_names
from vapo.networks.meta_device import empty_model, empty_value_model, fill_with_fakes
from vapo.networks.model_configs import as_critic, read_model_config, read_value_config
from vapo.networks.own_head import check_own_head, put_own_head
from vapo.networks.precision import may_round_products
from vapo.networks.probe import ProbeModelConfig, estimator_layers
from vapo.networks.saved_tokenizers import check_same_tokenizer
from vapo.networks.value_head import has_classifier, plan_head, saved_head
from vapo.system.distributed import fill_from_first_rank, shard
from vapo.system.private_attributes import makes_fakes
from vapo.system.process import derive_seed

Network = TypeVar("Network", Actor, Critic)


def check_critic(config: FitConfig) -> None:
    """Check the critic's head, its frozen weights and the estimator's layers before loading models.

    Raises: UserError: the user's head function, the saved head or critic.frozen does not fit, or
        the actor lacks a layer that the advantage estimator reads.
    """
    if config.algorithm.read_layers:
        path = config.actor.path
        estimator_layers(config.algorithm, read_model_config(path), path=path)
    check_own_head(config)
    check_value_head(config)
    check_frozen(config)


def check_value_head(config: FitConfig) -> None:
    """Compare the head and layers of the critic's folder with the config, without loading weights.

    Raises: UserError: they do not fit. The error names both.
    """
    if config.algorithm.has_critic:
        for member in range(config.critic.count):
            path = critic_path(config, member)
            model = read_value_config(path, config.critic)
            plan_head(model, path, config.critic)
            if isinstance(model, ProbeModelConfig):
                _check_actor(model, path, config.actor.path)
            if isinstance(model, AdapterModelConfig):
                _check_base(model, path, config)


def _check_actor(probe: ProbeModelConfig, path: str, actor_path: str) -> None:
    """Check that a saved probe fits the actor.

    Raises: UserError: the probe reads an actor of another width or depth.
    """
    actor: Any = read_model_config(actor_path).get_text_config(decoder=True)
    probe_sizes = probe.state_size, probe.num_actor_layers
    actor_sizes = actor.hidden_size, actor.num_hidden_layers
    if probe_sizes != actor_sizes:
        raise UserError(
            f"critic.init {path}: its probe reads hidden states of {probe_sizes[0]} channels "
            f"in an actor of {probe_sizes[1]} layers, and actor.path {actor_path} has "
            f"{actor_sizes[0]} channels and {actor_sizes[1]} layers: set critic.init=policy"
        )


def _check_base(adapters: AdapterModelConfig, path: str, config: FitConfig) -> None:
    """Check that the adapters in the critic's folder are on the modules that the config chooses.

    `path` is the critic's folder: the actor's, for which new adapters are made, or one of saved
    adapters.

    Raises: UserError: the folder has no saved adapters, or has them on other modules.
    """
    if path != config.actor.path and not has_classifier(adapters):
        raise UserError(
            f"critic.init {path}: it has no adapters of a critic, and the base is actor.path's: "
            "set critic.init=policy, or a folder of saved adapters"
        )
    base = config.actor.path
    config_adapters: Any = as_critic(read_model_config(base), base, config.critic)
    if adapters.targets != config_adapters.targets:
        names = adapters.targets.keys() | config_adapters.targets.keys()
        differing_names = sorted(
            n for n in names if adapters.targets.get(n) != config_adapters.targets.get(n)
        )
        raise UserError(
            f"critic.init {path}: its adapters are on other modules than "
            f"critic.lora.target_modules chooses in actor.path {base} ({differing_names[0]} "
            "differs): set both as they were, or critic.init=policy"
        )


def check_head_is_kept(config: FitConfig) -> None:
    """Refuse a `critic.head.start` that would throw away the trained head of `critic.init`.

    Only a folder that `critic.init` names is refused. From `critic.reward_model_path` a new head
    takes only the backbone. Do not call this for a run that resumes: the checkpoint's head is
    loaded over any start.

    Raises: UserError: `critic.init` names a folder with a head, and the start is not `as_loaded`.
    """
    init, start = config.critic.init, config.critic.head.start
    if (
        not config.algorithm.has_critic
        or start == "as_loaded"
        or init in ("reward_model", "policy")
    ):
        return
    for path in dict.fromkeys(critic_path(config, i) for i in range(config.critic.count)):
        model = read_model_config(path)
        if not has_classifier(model):
            continue
        head = saved_head(model, path).describe()
        from_it = f"critic.init=reward_model critic.reward_model_path={init}"
        backbone = f"take the backbone alone: {from_it}"
        anew = {"probe": "a new probe", "adapters": "new adapters"}.get(config.critic.kind)
        raise UserError(
            f"critic.init {init} brings a trained value head, {head}, which critic.head.start "
            f"{start} would throw away: set critic.head.start=as_loaded; or "
            + (backbone if anew is None else f"begin {anew}: critic.init=policy")
        )


def check_tokenizers(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the critic's tokenizer gives each token the same id as the actor's `tokenizer`.

    A critic that reads other ids than the actor writes would be silently wrong.

    Raises: UserError: the tokenizers differ.
    """
    if config.algorithm.has_critic:
        path = critic_path(config)
        if path != config.actor.path:
            check_same_tokenizer(tokenizer, load_tokenizer(path))


def make_actor(config: FitConfig, mesh: DeviceMesh | None, *, trained: bool = True) -> Actor:
    """Make the policy, sharded over `mesh` if there is one. Unless `trained`, it is frozen."""
    options = config.actor
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}

    def prepare(model: PreTrainedModel) -> Actor:
        if config.algorithm.has_critic and config.critic.kind == "adapters":
            accept_adapters(model)
        if trained and options.lora is not None:
            add_adapters(model, options.lora, seed=derive_seed(config.seed, "lora") % 2**32)
        return Actor(model, rounds=may_round_products(config))

    empty = partial(empty_model, "causal_lm", options.path, **kernels)

    def load() -> Actor:
        if trained and options.lora is not None:  # report its errors before loading the weights
            target_names(empty(), options.lora, "actor.lora")
        return prepare(load_causal_lm(options.path, **kernels))

    actor = _load_or_empty(load, lambda: prepare(empty()), mesh)
    if trained:
        say_experts(options.path, actor.model)
    else:
        actor.requires_grad_(False)
    if trained and options.gradient_checkpointing:
        enable_gradient_checkpointing(actor, "actor")
    return _shard_and_fill(actor, load, mesh, config)


def make_reference(config: FitConfig, mesh: DeviceMesh | None, actor: Actor) -> Actor | FrozenBase:
    """Make the reference policy: with LoRA the actor without its adapters, else a frozen copy."""
    if config.actor.lora is not None:
        return FrozenBase(actor)
    return make_actor(config, mesh, trained=False)


def make_critic(
    config: FitConfig,
    mesh: DeviceMesh | None,
    actor: Actor | None = None,
    *,
    trained: bool = True,
) -> Critic:
    """Make the critic: one value model, or `critic.count` value models as one network.

    It is sharded over `mesh` if there is one.

    Args:
        actor: the actor on whose base a critic of `critic.kind: adapters` works.
        trained: whether the trained weights are chosen (`choose_trained`); otherwise no adapters
            are added and nothing is frozen.
    """
    members = [
        _make_member(config, member, mesh, actor, trained=trained)
        for member in range(config.critic.count)
    ]
    return members[0] if len(members) == 1 else CriticEnsemble(members)


def _make_member(
    config: FitConfig, member: int, mesh: DeviceMesh | None, actor: Actor | None, *, trained: bool
) -> Critic:
    options, path = config.critic, critic_path(config, member)
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}

    def load() -> Critic:
        seed = derive_seed(config.seed, "probe", member) % 2**32
        model = load_value_model(path, **kernels, critic=options, seed=seed)
        put_own_head(model, config)
        return prepare(model)

    def prepare(model: PreTrainedModel) -> Critic:
        if trained:
            choose_trained(model, config)
        return critic_of(model, actor)

    critic = _load_or_empty(load, lambda: prepare(empty_value_model(path, options)), mesh)
    if options.gradient_checkpointing:
        enable_gradient_checkpointing(critic, "critic")
    return _shard_and_fill(critic, load, mesh, config)


def check_frozen(config: FitConfig) -> None:
    """Check that critic.frozen fits the names of the critic's parameters, without loading weights.

    Raises: UserError: a text is in no parameter's name, or nothing would be trained.
    """
    options = config.critic
    if config.algorithm.has_critic and options.frozen:
        model = empty_value_model(critic_path(config), options)
        put_own_head(model, config)
        freeze(model, options.frozen)


def choose_trained(model: PreTrainedModel, config: FitConfig) -> None:
    """Freeze the critic's weights that the optimizer does not train. Call this before making it.

    With critic.lora all but the adapters and the head are frozen; critic.frozen names others; and
    with critic.ridge the weights that the regression fits are frozen.

    Raises: UserError: a text of critic.frozen is in no name, or all weights would be frozen; or the
        adapters cannot be added (`lora.add_adapters`).
    """
    options = config.critic
    if options.lora is not None and options.kind == "network":
        seed = derive_seed(config.seed, "critic lora") % 2**32
        add_adapters(model, options.lora, seed=seed, key="critic.lora")
    if options.frozen:
        freeze(model, options.frozen)
    if options.ridge is not None:
        for parameter in fitted_parameters(model).values():
            parameter.requires_grad_(False)


def freeze(model: PreTrainedModel, texts: Sequence[str]) -> None:
    """Freeze the parameters whose names contain one of the texts.

    Source: SAO (`self_attn.`).
    Raises: UserError: a text is in no name, or all parameters would be frozen.
    """
    parameters = dict(model.named_parameters())
    unused = [text for text in texts if not any(text in name for name in parameters)]
    if unused:
        name_parts = dict.fromkeys(part for name in parameters for part in name.split(".")[:-1])
        parts = ", ".join(f"{part}." for part in name_parts if not part.isdigit())
        raise UserError(
            f"critic.frozen: {', '.join(map(repr, unused))} is in no parameter's name of "
            f"{type(model).__name__}; their parts are {parts}"
        )
    frozen = [name for name in parameters if any(text in name for text in texts)]
    if len(frozen) == len(parameters):
        raise UserError(
            f"critic.frozen: {', '.join(map(repr, texts))} freezes all {len(frozen)} parameters of "
            "the critic, and nothing would be trained: name fewer"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


def _load_or_empty(
    load: Callable[[], Network], empty: Callable[[], Network], mesh: DeviceMesh | None
) -> Network:
    """Return the loaded network; if there is a mesh, return the network without weights.

    It is filled after it has been sharded. In a simulation (`vapo estimate`) the network has fake
    tensors.
    """
    if not makes_fakes():
        return load() if mesh is None else empty()
    with unset_fake_temporarily():
        network = empty()
    fill_with_fakes(network)
    return network


def _shard_and_fill(
    network: Network, load: Callable[[], Network], mesh: DeviceMesh | None, config: FitConfig
) -> Network:
    """Set a network to training mode and return it.

    With a mesh, shard the network first and fill it with the weights that `load` loads.
    """
    network.train()  # loaded in eval mode, in which nothing is checkpointed
    if mesh is not None:
        heads = network.head_layers if isinstance(network, Critic) else ()
        shard(network, mesh, config.trainer, in_float32=heads)
        if not makes_fakes():
            fill_from_first_rank(network, load, mesh, offloads=config.trainer.cpu_offload)
    return network


def enable_gradient_checkpointing(network: Actor | Critic, name: str) -> None:
    """Let a network keep only each decoder layer's input and compute the layer again in backward.

    `name` is the network's block in the config, for the error.

    Raises: UserError: the architecture does not support it.
    """
    model = backbone_of(network)
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{name}.gradient_checkpointing: {type(model).__name__} does not support it; "
            f"set {name}.gradient_checkpointing=false"
        )
    options = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    model.gradient_checkpointing_enable(options)


def backbone_of(network: Actor | Critic) -> PreTrainedModel:
    """Return the model whose layers a network runs; for a critic of adapters it is the actor's."""
    return network.actor.model if isinstance(network, AdapterCritic) else network.model
