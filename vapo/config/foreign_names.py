"""The names that other libraries (TRL, verl, OpenRLHF) have for the config keys of this one.

They are read only for an unknown key, to say which key is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vapo.config.options import Entry, nearest_key

_PROMPTS = "components.group_sampling.num_prompts"
_ITERATIONS = "training.num_iterations"
_MICROBATCH = "training.microbatch_tokens"

_NAMES = {
    # rollouts of older weights, and earlier names of ours
    "training.max_staleness": (
        "overlap_rollouts staleness_threshold max_off_policy_steps max_head_offpolicyness "
        "max_async_level async_level"
    ),
    "rollouts.engine": "vllm.mode use_vllm vllm_mode",
    "rollouts.servers.urls": "vllm.server_urls vllm_server_base_url",
    # optimizers
    "actor.optimizer.lr": "lr learning_rate actor_learning_rate",
    "critic.optimizer.lr": "critic_learning_rate",
    "actor.optimizer.weight_decay": "weight_decay",
    "actor.optimizer.warmup_steps": "warmup_steps lr_warmup_steps",
    "actor.optimizer.max_grad_norm": "max_grad_norm max_norm grad_clip",
    "training.decay_fraction": "lr_scheduler_type",
    "actor.optimizer.beta1": "adam_beta1",
    "actor.optimizer.beta2": "adam_beta2",
    # the objective
    "algorithm.kl.coef": "beta kl_coef init_kl_coef kl_loss_coef",
    "algorithm.kl.estimator": "kl_estimator kl_loss_type kl_penalty",
    "algorithm.eps_low": "epsilon cliprange clip_ratio clip_ratio_low eps_clip",
    "components.clip_higher.eps_high": "epsilon_high clip_ratio_high eps_clip_high",
    "algorithm.dual_clip": "delta clip_ratio_c",
    "critic.value_clip": "cliprange_value value_clip",
    "algorithm.gamma": "gamma",
    "algorithm.lambda_policy": "gae_lambda lam lambd",
    "algorithm.advantage_estimator": (
        "adv_estimator advantage_estimator norm_adv_by_std_in_grpo scale_rewards"
    ),
    "algorithm.surrogate": "loss_mode importance_sampling_level",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef ent_coef",
    "components.token_level_loss.enabled": "loss_type loss_agg_mode",
    "components.value_pretraining.num_iterations": "critic_warmup",
    "critic.epochs": "critic.ppo_epochs",
    "algorithm.mismatch.tis_cap": (
        "tis_imp_ratio_cap vllm_importance_sampling_cap rollout_is_threshold"
    ),
    "algorithm.mismatch.tis_level": "vllm_importance_sampling_mode rollout_is",
    "algorithm.dynamic_sampling_attempts": "dynamic_filtering max_num_gen_batches",
    # batches and steps
    "components.group_sampling.group_size": "num_generations n_samples_per_prompt rollout.n",
    _PROMPTS: "rollout_batch_size data.train_batch_size generation_batch_size",
    "training.minibatch_size": (
        "train_batch_size ppo_mini_batch_size mini_batch_size steps_per_generation"
    ),
    _MICROBATCH: (
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu"
    ),
    _ITERATIONS: "max_steps num_train_epochs num_episodes total_epochs total_training_steps",
    "evaluation.every_n_iterations": "eval_steps test_freq",
    "checkpoints.every_n_iterations": "save_steps save_freq checkpoint_every_n_iterations",
    "checkpoints.keep": "save_total_limit max_actor_ckpt_to_keep",
    # sampling
    "rollouts.max_response_tokens": (
        "max_completion_length max_new_tokens max_response_length response_length generate_max_len"
    ),
    "rollouts.temperature": "temperature",
    "rollouts.top_p": "top_p",
    "rollouts.top_k": "top_k",
    "rollouts.max_concurrent_sequences": "max_num_seqs",
    "evaluation.k": "val_kwargs.n eval_n_samples_per_prompt num_generations_eval",
    "evaluation.temperature": "val_kwargs.temperature",
    "evaluation.top_p": "val_kwargs.top_p",
    "evaluation.top_k": "val_kwargs.top_k",
    "environment.max_turns": "max_assistant_turns max_tool_calling_iterations",
    "rollouts.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollouts.vllm.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "rollouts.vllm.sleep_level": "vllm_enable_sleep_mode free_cache_engine",
    "rollouts.vllm.engine_args": "vllm_max_model_length max_model_len",
    # models
    "actor.path": "model_name_or_path pretrain model.path",
    "critic.init": "critic_pretrain value_model_path value_model critic.model.path",
    "rewards.reward_model_path": "reward_pretrain",
    "actor.lora.rank": "lora_r lora_rank",
    "actor.lora.lora_alpha": "lora_alpha",
    "actor.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing",
    "training.packing": "use_remove_padding",
    # prompts and rewards
    "data.train.path": "train_files prompt_data dataset_name",
    "data.heldout.path": "val_files eval_dataset",
    "data.train.prompt_column": "prompt_key input_key",
    "data.train.answer_column": "label_key",
    "data.prompt_template": "input_template",
    "data.chat_template": "apply_chat_template",
    "data.chat_template_kwargs": (
        "apply_chat_template_kwargs chat_template_kwargs enable_thinking thinking reasoning_effort"
    ),
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.train.num_examples": "train_max_samples",
    "rewards.function": "reward_funcs remote_rm_url custom_reward_function",
    "rewards.verifier": "reward_weights",
    "rewards.overlong.cache_tokens": "overlong_buffer",
    "rewards.overlong.filter_truncated": "mask_truncated_completions",
    # the run
    "trainer.precision": "bf16",
    "trainer.num_nodes": "nnodes",
    "trainer.devices": "n_gpus_per_node",
    "trainer.cpu_offload": "param_offload optimizer_offload",
    "checkpoints.resume": "resume_from_checkpoint resume_mode",
    "output_dir": "default_local_dir save_path",
    "tracking.experiment": "project_name wandb_project",
    "tracking.run_name": "experiment_name wandb_run_name",
    "tracking.also": "report_to logger",
    "evaluation.num_table_rows": "log_val_generations num_completions_to_print",
}
FOREIGN_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}

_NOTES = {
    _ITERATIONS: "an iteration is one batch of rollouts",
    _MICROBATCH: "in tokens, padding included; it does not change the gradient",
    "training.minibatch_size": "responses of one optimizer step",
    _PROMPTS: "prompts of one iteration",
    "rewards.verifier": "several, of which each has rewards.verifiers.NAME.weight",
    "data.chat_template_kwargs": "a mapping of the template's variables: {enable_thinking: false}",
}


def meant_key(key: str, entries: Mapping[str, Entry]) -> str | None:
    """Return the key that an unknown key most likely means, or None.

    The unknown key is another library's name, or a misspelling. Of two keys with one meaning, the
    one in the unknown key's block is taken, as critic.optimizer.lr.
    """
    names = key.split(".")
    endings = (".".join(names[start:]) for start in range(len(names)))
    target = next((FOREIGN_NAMES[end] for end in endings if end in FOREIGN_NAMES), None)
    if target is None:
        return nearest_key(key, entries)
    nearest = next((k for k in _candidates(key, target) if k in entries), None)
    return nearest_key(key, entries) if nearest is None else nearest


def _candidates(key: str, target: str) -> Iterable[str]:
    first, _, rest = target.partition(".")
    yield f"{key.rpartition('.')[0]}.{target.rpartition('.')[2]}"
    if first == "actor" and "critic" in key.split("."):
        yield f"critic.{rest}"
    yield target
    yield rest  # `vapo sft` has one optimizer, at the top


def did_you_mean_key(key: str, entries: Mapping[str, Entry]) -> str:
    """Return the hint `; did you mean '...'?` for an unknown key, or an empty text.

    If the key is another library's name and counts something else there, the hint says what ours
    counts.
    """
    if (meant := meant_key(key, entries)) is None:
        return ""
    is_foreign = key.rpartition(".")[2] in FOREIGN_NAMES
    note = f" ({_NOTES[meant]})" if is_foreign and meant in _NOTES else ""
    return f"; did you mean '{meant}'?{note}"
