"""Models of several families in a real vLLM: whether it has the weights that are pushed to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.networks.architectures import ALL, ON_VLLM, Architecture
from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from tests.vllm_engine import DTYPE, make_check, make_engine
from vapo.networks.loading import load_causal_lm
from vapo.networks.saved_names import under_saved_names
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.engine import EngineError
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler

pytestmark = pytest.mark.vllm
# The least sizes that vLLM's kernels of a CPU know.
SIZES = {"head_dim": 32}
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 32}


def sync_weights(family: Architecture, folder: Path, sizes: dict[str, int]) -> None:
    """Push a random model's weights. The check compares log-probs of vLLM and the trainer."""
    save_tiny_folder(folder, family.model(**sizes))
    model = load_causal_lm(str(folder), dtype="float32", attn_implementation="auto").eval()
    rename, cast = partial(under_saved_names, model), CastWeights(DTYPE)
    engine = make_engine(folder)
    try:
        sampler = EngineSampler(
            engine,
            end_ids=end_token_ids(model.generation_config, tiny_tokenizer()),
            weights=lambda: model.state_dict().items(),
            convert=lambda weights: rename(cast(weights)),
            check=make_check(model),
        )
        sampler.sync(model.state_dict().items())
        changed = {name: value * 1.5 for name, value in model.state_dict().items()}
        with pytest.raises(EngineError, match="log-probs differ"):  # the check can fail
            sampler.sync(changed.items())
    finally:
        engine.close()


@pytest.mark.parametrize(
    "family",
    [one for one in ALL if one.name in ON_VLLM and one.name != "Qwen2.5"],  # that is every other's
    ids=lambda one: one.name,
)
def test_the_pushed_weights_are_the_trainers(family: Architecture, tmp_path: Path) -> None:
    sync_weights(family, tmp_path / "policy", SIZES)


def test_experts_that_do_not_arrive_on_a_cpu_are_one_error(tmp_path: Path) -> None:
    """vLLM 0.32 without a GPU does not take the experts' weights that are pushed to it."""
    family = next(one for one in ALL if one.name == "Qwen3-MoE")
    with pytest.raises(EngineError, match="it does not have the trainer's weights"):
        sync_weights(family, tmp_path / "policy", EXPERTS)
