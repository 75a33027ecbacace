"""The names by which other libraries call what a key of ours means: TRL, verl, OpenRLHF.

Read only where a key is unknown, to say which one is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vapo.config.options import Entry, nearest_key

_GROUP = "components.group_sampling.group_size"
_PROMPTS = "components.group_sampling.num_prompts"
_ITERATIONS = "training.num_iterations"
_MICROBATCH = "training.microbatch_tokens"
_TRAIN, _HELDOUT = "data.train", "data.heldout"

FOREIGN_NAMES: Mapping[str, str] = {
    # earlier names of ours
    "overlap_rollouts": "training.max_staleness",
    "vllm.mode": "rollouts.engine",
    "vllm.server_urls": "rollouts.servers.urls",
    # rollouts of older weights
    "staleness_threshold": "training.max_staleness",
    "max_off_policy_steps": "training.max_staleness",
    "max_head_offpolicyness": "training.max_staleness",
    "max_async_level": "training.max_staleness",
    "async_level": "training.max_staleness",
    # optimizers
    "lr": "actor.optimizer.lr",
    "learning_rate": "actor.optimizer.lr",
    "actor_learning_rate": "actor.optimizer.lr",
    "critic_learning_rate": "critic.optimizer.lr",
    "weight_decay": "actor.optimizer.weight_decay",
    "warmup_steps": "actor.optimizer.warmup_steps",
    "lr_warmup_steps": "actor.optimizer.warmup_steps",
    "max_grad_norm": "actor.optimizer.max_grad_norm",
    "max_norm": "actor.optimizer.max_grad_norm",
    "grad_clip": "actor.optimizer.max_grad_norm",
    "adam_beta1": "actor.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2",
    # the objective
    "beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "epsilon": "algorithm.eps_low",
    "cliprange": "algorithm.eps_low",
    "clip_ratio": "algorithm.eps_low",
    "clip_ratio_low": "algorithm.eps_low",
    "eps_clip": "algorithm.eps_low",
    "epsilon_high": "components.clip_higher.eps_high",
    "clip_ratio_high": "components.clip_higher.eps_high",
    "eps_clip_high": "components.clip_higher.eps_high",
    "delta": "algorithm.dual_clip",
    "clip_ratio_c": "algorithm.dual_clip",
    "cliprange_value": "algorithm.value_clip",
    "gamma": "algorithm.gamma",
    "gae_lambda": "algorithm.lambda_policy",
    "lam": "algorithm.lambda_policy",
    "lambd": "algorithm.lambda_policy",
    "adv_estimator": "algorithm.advantage_estimator",
    "advantage_estimator": "algorithm.advantage_estimator",
    "entropy_coeff": "algorithm.entropy_coef",
    "entropy_loss_coef": "algorithm.entropy_coef",
    "ent_coef": "algorithm.entropy_coef",
    "loss_type": "components.token_level_loss.enabled",
    "loss_agg_mode": "components.token_level_loss.enabled",
    "critic_warmup": "components.value_pretraining.num_iterations",
    "tis_imp_ratio_cap": "algorithm.mismatch.tis_cap",
    "vllm_importance_sampling_cap": "algorithm.mismatch.tis_cap",
    "dynamic_filtering": "algorithm.dynamic_sampling_attempts",
    "max_num_gen_batches": "algorithm.dynamic_sampling_attempts",
    # batches and steps
    "num_generations": _GROUP,
    "n_samples_per_prompt": _GROUP,
    "rollout.n": _GROUP,
    "rollout_batch_size": _PROMPTS,
    "data.train_batch_size": _PROMPTS,
    "train_batch_size": "training.minibatch_size",
    "ppo_mini_batch_size": "training.minibatch_size",
    "per_device_train_batch_size": _MICROBATCH,
    "gradient_accumulation_steps": _MICROBATCH,
    "micro_train_batch_size": _MICROBATCH,
    "ppo_micro_batch_size": _MICROBATCH,
    "ppo_micro_batch_size_per_gpu": _MICROBATCH,
    "ppo_max_token_len_per_gpu": _MICROBATCH,
    "max_steps": _ITERATIONS,
    "num_train_epochs": _ITERATIONS,
    "num_episodes": _ITERATIONS,
    "total_epochs": _ITERATIONS,
    "total_training_steps": _ITERATIONS,
    "eval_steps": "evaluation.every_n_iterations",
    "test_freq": "evaluation.every_n_iterations",
    "save_steps": "trainer.checkpoint_every_n_iterations",
    "save_freq": "trainer.checkpoint_every_n_iterations",
    # sampling
    "max_completion_length": "rollouts.max_response_tokens",
    "max_new_tokens": "rollouts.max_response_tokens",
    "max_response_length": "rollouts.max_response_tokens",
    "response_length": "rollouts.max_response_tokens",
    "generate_max_len": "rollouts.max_response_tokens",
    "temperature": "rollouts.temperature",
    "top_p": "rollouts.top_p",
    "top_k": "rollouts.top_k",
    "val_kwargs.n": "evaluation.k",
    "eval_n_samples_per_prompt": "evaluation.k",
    "use_vllm": "rollouts.engine",
    "vllm_mode": "rollouts.engine",
    "vllm_gpu_memory_utilization": "rollouts.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollouts.vllm.tensor_parallel_size",
    "tensor_model_parallel_size": "rollouts.vllm.tensor_parallel_size",
    # models
    "model_name_or_path": "actor.path",
    "pretrain": "actor.path",
    "model.path": "actor.path",
    "critic_pretrain": "critic.init",
    "value_model_path": "critic.init",
    "reward_pretrain": "rewards.reward_model_path",
    "lora_r": "actor.lora.rank",
    "lora_rank": "actor.lora.rank",
    "lora_alpha": "actor.lora.lora_alpha",
    "enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "gradient_checkpointing": "actor.gradient_checkpointing",
    # prompts and rewards
    "train_files": f"{_TRAIN}.path",
    "prompt_data": f"{_TRAIN}.path",
    "dataset_name": f"{_TRAIN}.path",
    "val_files": f"{_HELDOUT}.path",
    "eval_dataset": f"{_HELDOUT}.path",
    "prompt_key": f"{_TRAIN}.prompt_column",
    "input_key": f"{_TRAIN}.prompt_column",
    "label_key": f"{_TRAIN}.answer_column",
    "input_template": "data.prompt_template",
    "apply_chat_template": "data.chat_template",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "reward_funcs": "rewards.function",
    "remote_rm_url": "rewards.function",
    "custom_reward_function": "rewards.function",
    "overlong_buffer": "rewards.overlong.cache_tokens",
    "mask_truncated_completions": "rewards.overlong.filter_truncated",
    # the run
    "bf16": "trainer.precision",
    "nnodes": "trainer.num_nodes",
    "n_gpus_per_node": "trainer.devices",
    "resume_from_checkpoint": "checkpoints.resume",
    "resume_mode": "checkpoints.resume",
    "default_local_dir": "output_dir",
    "save_path": "output_dir",
    "project_name": "tracking.experiment",
    "wandb_project": "tracking.experiment",
    "experiment_name": "tracking.run_name",
    "wandb_run_name": "tracking.run_name",
}

_NOTES = {
    _ITERATIONS: "an iteration is one batch of rollouts",
    _MICROBATCH: "in tokens, padding included; it does not change the gradient",
    "training.minibatch_size": "responses of one optimizer step",
    _PROMPTS: "prompts of one iteration",
}


def meant_key(key: str, known: Mapping[str, Entry]) -> str | None:
    """The known key that an unknown one means: another library's name for it, or a slip.

    Of two keys of one meaning the one in the same block is taken: critic.optimizer.lr.
    """
    names = key.split(".")
    endings = (".".join(names[start:]) for start in range(len(names)))
    target = next((FOREIGN_NAMES[end] for end in endings if end in FOREIGN_NAMES), None)
    if target is None:
        return nearest_key(key, known)
    found = next((k for k in _candidates(key, target) if k in known), None)
    return nearest_key(key, known) if found is None else found


def _candidates(key: str, target: str) -> Iterable[str]:
    first, _, rest = target.partition(".")
    yield f"{key.rpartition('.')[0]}.{target.rpartition('.')[2]}"
    if first == "actor" and "critic" in key.split("."):
        yield f"critic.{rest}"
    yield target
    yield rest  # `vapo sft` has one optimizer, at the top


def did_you_mean_key(key: str, known: Mapping[str, Entry]) -> str:
    """`; did you mean '...'?`, with the unit where other libraries have another; or nothing."""
    if (meant := meant_key(key, known)) is None:
        return ""
    is_foreign = key.rpartition(".")[2] in FOREIGN_NAMES
    note = f" ({_NOTES[meant]})" if is_foreign and meant in _NOTES else ""
    return f"; did you mean '{meant}'?{note}"
