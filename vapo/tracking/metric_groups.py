"""Under which key MLflow stores a metric, so that its UI shows first what answers a question.

MLflow's UI groups charts by what stands before a key's last `/`, sorts the groups by name, and
shows those below `system/` on a page of their own. So held-out scores are stored in the group
`_score`, which comes first; times, throughput and memory below `system/`; and in groups that
begin with `z_`, which come last, what is read only to find a cause. Everything else of vapo, its
journal, displays and reports, knows the keys of docs/metrics.md.
"""

from __future__ import annotations

from vapo.tracking.stores import Store

_SCORE, _LAST, _SYSTEM = "_score", "z_", "system/"
_SYSTEM_GROUPS = ("time", "throughput", "memory")
_LAST_GROUPS = ("advantage", "faults", "progress", "watch")
_FIRST_LOOK = {
    "eval": ("avg_at_k", "pass_at_k", "maj_at_k"),
    "actor": ("policy_loss", "kl_loss", "entropy", "approx_kl", "clip_fraction_low",
              "clip_fraction_high", "rejected_share", "grad_norm"),
    "critic": ("value_loss", "explained_variance", "heldout_explained_variance", "value_mean",
               "grad_norm"),
    "rollout": ("reward_mean", "accuracy", "sampled_accuracy", "response_length_mean",
                "turns_mean", "truncation_rate", "verifier_failures", "logprob_gap_mean",
                "curriculum_stage"),
}  # fmt: skip
"""Of these groups, the metrics that stay; the others go to the end."""


def stored_key(key: str) -> str:
    """MLflow's key of a metric of docs/metrics.md.

    >>> [stored_key(key) for key in ("eval/avg_at_k", "eval/num_prompts", "time/rollout_s")]
    ['_score/avg_at_k', 'z_eval/num_prompts', 'system/time/rollout_s']
    """
    group, _, name = key.partition("/")
    kind = "eval" if group.startswith("eval_") else group
    if group in _SYSTEM_GROUPS:
        return f"{_SYSTEM}{key}"
    if group in _LAST_GROUPS or (kind in _FIRST_LOOK and name not in _FIRST_LOOK[kind]):
        return f"{_LAST}{key}"
    return key.replace("eval", _SCORE, 1) if kind == "eval" else key


def documented_key(stored: str) -> str:
    """The metric's key in docs/metrics.md, from the one that MLflow stores it under.

    >>> [documented_key(key) for key in ("_score_gsm8k/avg_at_k", "z_watch/entropy", "eval/x")]
    ['eval_gsm8k/avg_at_k', 'watch/entropy', 'eval/x']
    """
    if stored.startswith(_SCORE):
        return stored.replace(_SCORE, "eval", 1)
    for prefix in (_LAST, _SYSTEM):
        key = stored.removeprefix(prefix)
        if key != stored and stored_key(key) == stored:
            return key
    return stored


def recorded_metrics(store: Store, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """A run's record: key of docs/metrics.md -> (optimizer step, value), in order of the steps."""
    client = store.client()
    return {
        documented_key(stored): sorted(
            (metric.step, metric.value) for metric in client.get_metric_history(run_id, stored)
        )
        for stored in sorted(client.get_run(run_id).data.metrics)
    }
