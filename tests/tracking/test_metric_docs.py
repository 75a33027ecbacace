import re

import pytest

from tests.tracking.metric_docs import documented_keys, documented_rows

FIXED_KEYS = {
    "eval/avg_at_k",
    "eval/pass_at_k",
    "eval/maj_at_k",
    "rollout/reward_mean",
    "rollout/accuracy",
    "rollout/response_length_mean",
    "actor/entropy",
    "critic/value_loss",
    "critic/explained_variance",
}


def test_fixed_keys_are_documented():
    assert documented_keys() >= FIXED_KEYS
    assert "advantage/lambda_policy_min" in documented_keys()


def test_every_row_names_a_known_unit_and_a_stage():
    units = {"1", "nats", "tokens", "share", "s", "tokens/s", "TFLOP/s", "GiB"}
    for key, (_, unit, _) in documented_rows().items():
        assert unit in units, key
        assert re.fullmatch(r"[a-z_]+(_NAME)?/[a-z0-9_]+", key), key
        if key.endswith("_s") and not key.endswith("_per_s"):
            assert unit == "s", key
        if key.endswith("_gib"):
            assert unit == "GiB", key


@pytest.mark.parametrize(
    "page", ["| `a/b` | x | nats |\n", "| `a/b` | x | nats | |\n", "| `a/b` | x | s | y |\n" * 2]
)
def test_a_malformed_table_is_noticed(page):
    with pytest.raises(ValueError, match="a/b"):
        documented_rows(page)
