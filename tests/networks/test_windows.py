"""Masks of windows by hand, what a config may say of them, and critics with windows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForSequenceClassification,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granite import GraniteConfig
from transformers.models.hyperclovax import HyperCLOVAXConfig
from transformers.models.llama4 import Llama4TextConfig

from tests.networks.windowed_models import CONFIGS, SMALL, WINDOW, windowed_model
from vapo.config.critic import CriticConfig
from vapo.errors import UserError
from vapo.functional.logit_transforms import LogitTransform
from vapo.networks import packed_attention
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.attention_windows import attention_options
from vapo.networks.layouts import choose_layout, say_layout
from vapo.networks.loading import load_causal_lm, load_value_model
from vapo.networks.logit_transforms import logit_transform
from vapo.networks.meta_device import empty_model
from vapo.networks.model_configs import check_supported, read_model_config
from vapo.networks.packed_attention import (
    _by_segments,
    _varlen_flash,
    hidden_states,
    packed_sdpa,
)
from vapo.networks.token_inputs import PackedRow, Segment, blocks, token_inputs

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}
# a prompt of 3 tokens, two responses of 2 and 3 to it, a sequence of 4
SEGMENTS = [Segment(3), Segment(2, 0, 3), Segment(3, 0, 3), Segment(4)]
LONG = (3, 2, 9, 11, 4, 2, 7, 8, 12, 6)
PAIRS = [((5, 6, 7), (8, 9)), (LONG, (4, 5, 6, 7, 8, 9, 2)), (LONG, (9,)), ((9, 8), LONG)]


def seen(mask: Tensor) -> list[str]:
    """A row of a mask as text, x where a token may attend."""
    return ["".join("x" if value == 0 else "." for value in row) for row in mask.tolist()]


# ---- masks -----------------------------------------------------------------------------------


def test_the_mask_of_a_response_by_hand() -> None:
    """Three tokens behind a prompt of three: each sees itself and the token before it."""
    row = PackedRow(SEGMENTS, CPU)
    assert seen(row.mask(3, 3, torch.float32)) == ["xxxx..", "xxxxx.", "xxxxxx"]
    assert seen(row.mask(3, 1, torch.float32, window=2)) == ["xx..", ".xx.", "..xx"]
    assert seen(row.mask(2, 0, torch.float32, window=1)) == ["x.", ".x"]


def test_the_mask_of_a_group_by_hand() -> None:
    """Windows count positions: from a second response's first token the prompt's end is near."""
    row = PackedRow(SEGMENTS, CPU)
    assert seen(row.group_mask(0, torch.float32, window=2)) == [
        "x.......",
        "xx......",
        ".xx.....",
        "..xx....",
        "...xx...",
        "..x..x..",
        ".....xx.",
        "......xx",
    ]
    assert seen(row.group_mask(0, torch.float32))[5] == "xxx..x.."


def test_blocks_of_queries_and_the_keys_of_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vapo.networks.token_inputs._MIN_BLOCK", 1)
    found = [(q.start, q.stop, k.start, k.stop) for q, k in blocks(7, 2, 3)]
    assert found == [(0, 3, 0, 5), (3, 6, 3, 8), (6, 7, 6, 9)]


def windowed_kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """As FlashAttention documents its window: aligned to the last key, so many keys to the left."""
    parts = []
    for start in range(len(cu_q) - 1):
        one_q = q[cu_q[start] : cu_q[start + 1]]
        one_k, one_v = (x[cu_k[start] : cu_k[start + 1]] for x in (k, v))
        place = torch.arange(len(one_q))[:, None] + len(one_k) - len(one_q)
        keys = torch.arange(len(one_k))
        left, right = window_size
        assert left < 2**31
        left = len(one_k) if left == -1 else left
        may = (keys <= place + right) & (keys >= place - left)
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (one_q, one_k, one_v))
        attended = scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=may, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [1, 2, 4, 100, 10**12])
def test_the_window_of_the_variable_length_kernel(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same keys and gradients; the kernel is CUDA's, here a stand-in."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", windowed_kernel)
    monkeypatch.setattr(packed_attention, "_CALL_COST", 0)
    row = PackedRow(SEGMENTS, CPU)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 12, 8, requires_grad=True) for n in (4, 2, 2))
    weights = torch.randn(1, 12, 4, 8)
    found = []
    for attend in (_varlen_flash, partial(_by_segments, dtype=torch.float32)):
        output = attend(query, key, value, scaling=0.3, row=row, window=window)
        found.append((output, *torch.autograd.grad((output * weights).sum(), [query, key, value])))
    for by_kernel, by_segments in zip(*found, strict=True):
        torch.testing.assert_close(by_kernel, by_segments)


@pytest.mark.gpu
def test_the_variable_length_kernel_has_the_window() -> None:
    """Shared prompts of a GPU in bfloat16 against a forward of each sequence."""
    model = windowed_model("mistral").to("cuda", torch.bfloat16)  # type: ignore[arg-type]
    backbone: Any = model.base_model
    with torch.no_grad():
        alone = [
            backbone(torch.tensor([[*prompt, *response]], device="cuda"), use_cache=False)
            .last_hidden_state[0, len(prompt) - 1 : -1]
            for prompt, response in PAIRS
        ]  # fmt: skip
        assert choose_layout("auto", [model]) == "shared_prompts"
        inputs = token_inputs(PAIRS, pad_id=0, layout="shared_prompts").to(torch.device("cuda"))
        found = hidden_states(model, inputs)[-1][inputs.state_rows, inputs.state_columns]
    expected = torch.cat(alone)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


def test_a_network_that_makes_its_masks_itself_is_not_packed_by_mistake() -> None:
    query = torch.randn(1, 2, 12, 8)
    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    row = PackedRow(SEGMENTS, CPU)
    with pytest.raises(ValueError, match=r"makes its attention masks itself.*packing to padded"):
        packed_sdpa(torch.nn.Module(), query, query, query, causal, packed_row=row)


def test_one_line_says_why_rows_are_padded(capsys: pytest.CaptureFixture[str]) -> None:
    models = [windowed_model("gemma3"), windowed_model("gpt_oss")]
    assert choose_layout("auto", models) == "padded"
    say_layout("padded", "padded", models)
    say_layout("auto", choose_layout("auto", models[:1]), models[:1])
    assert capsys.readouterr().err == ""
    say_layout("auto", "padded", models)
    line = "training.packing auto: padded, since attn_implementation eager supports padded rows"
    assert capsys.readouterr().err == f"{line} only\n"


# ---- what a config says ----------------------------------------------------------------------


def written(folder: Path, config: PreTrainedConfig, **changes: Any) -> str:
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


KINDS = ["full_attention", "sliding_attention"]
REFUSED: list[tuple[PreTrainedConfig, dict[str, Any], str]] = [
    (MistralConfig(**SMALL), {"sliding_window": 0}, r"sliding_window is 0: give.*or null"),
    (MistralConfig(**SMALL), {"sliding_window": -4}, r"sliding_window is -4: give"),
    (MistralConfig(**SMALL), {"sliding_window": "8"}, "sliding_window"),
    (
        CONFIGS["gemma3"](**SMALL),
        {"sliding_window": None},
        r"layer_types has sliding_attention, and sliding_window is null: give both",
    ),
    (
        Qwen2Config(**SMALL),
        {"layer_types": KINDS, "sliding_window": 8, "use_sliding_window": False},
        "layer_types has sliding_attention, and use_sliding_window is false: give both",
    ),
    (CONFIGS["gemma3"](**SMALL), {"layer_types": KINDS[:1]}, r"num_hidden_layers.*\(2\).*\(1\)"),
    (CONFIGS["gemma3"](**SMALL), {"layer_types": ["wide", *KINDS[:1]]}, r"layer_types.*wide"),
    (
        Qwen2Config(**SMALL),
        {"layer_types": ["conv", "full_attention"]},
        r"json: layer_types has conv, and Qwen2ForCausalLM .* of full_attention and sliding_atten",
    ),
    (GptOssConfig(**SMALL), {"layer_types": ["mamba", "hybrid"]}, "has hybrid, linear_attention, "),
    (CONFIGS["gemma3"](**SMALL), {"layer_types": ["moe", *KINDS[:1]]}, "layer_types has moe, and"),
    (CONFIGS["gemma3"](**SMALL), {"use_bidirectional_attention": True}, "use_bidirectional_at"),
    (CONFIGS["gemma2"](**SMALL), {"attn_logit_softcapping": float("nan")}, "ing is nan: give"),
    (CONFIGS["gemma2"](**SMALL), {"final_logit_softcapping": float("inf")}, "softcapping is inf;"),
    (Llama4TextConfig(**SMALL, head_dim=8), {}, r"attend to chunks \(attention_chunk_size\)"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED)
def test_a_window_that_means_nothing(
    config: PreTrainedConfig, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, config, **changes)
    with pytest.raises(UserError, match=message) as error:
        empty_model("causal_lm", folder, **OPTIONS)
    assert str(error.value).startswith(folder)
    assert "\n" not in str(error.value)


def test_what_windows_a_model_may_have(tmp_path: Path) -> None:
    """None, one that is switched off, and one that is longer than any row."""
    off = written(tmp_path / "off", Qwen2Config(**SMALL), sliding_window=4)
    assert read_model_config(off).layer_types == ["full_attention"] * 2
    for name, window in (("none", None), ("long", 10**9)):
        folder = written(tmp_path / name, MistralConfig(**SMALL), sliding_window=window)
        config = read_model_config(folder)
        check_supported(folder, config)
        assert config.sliding_window == window


def test_capped_attention_is_eager_and_windows_not_the_package_s(tmp_path: Path) -> None:
    windowed_model("gemma2").save_pretrained(tmp_path / "gemma2")
    model = load_causal_lm(str(tmp_path / "gemma2"), **OPTIONS)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match=r"attn_logit_softcapping is 2\.0, .*sdpa.*auto or eager"):
        load_causal_lm(str(tmp_path / "gemma2"), dtype="float32", attn_implementation="sdpa")
    windowed_model("mistral").save_pretrained(tmp_path / "mistral")
    with pytest.raises(UserError, match=r"sliding window, .*flash_attention_2.*auto or sdpa"):
        load_causal_lm(
            str(tmp_path / "mistral"), dtype="float32", attn_implementation="flash_attention_2"
        )


def test_what_becomes_of_logits_depends_on_the_architecture() -> None:
    """The same name divides in one and multiplies in another, which is refused."""
    assert logit_transform("", GraniteConfig(logits_scaling=4.0)) == LogitTransform(scale=0.25)
    assert logit_transform("", GraniteConfig(logits_scaling=1.0)) is None
    assert logit_transform("", CONFIGS["gemma2"](**SMALL)) == LogitTransform(cap=3.0)
    assert Actor(windowed_model("cohere2")).logit_transform == LogitTransform(scale=0.25)
    with pytest.raises(UserError, match=r"here: logits_scaling is 4\.0; .*hyperclovax"):
        check_supported("here", HyperCLOVAXConfig(logits_scaling=4.0))


def test_flops_count_the_pairs_within_a_window() -> None:
    """Of 20 tokens 8 have all that are before them, and 12 have 8; behind 5 others it is 3 and 17.

    A layer has 4 heads of 8 channels.
    """
    both, all_layers = (Actor(windowed_model(f)).forward_flops for f in ("gemma3", "mistral"))
    assert both.attention(20) == 64 * (20 * 20 + 8 * 8 + 2 * 12 * 8)
    assert all_layers.attention(20) == 64 * 2 * (8 * 8 + 2 * 12 * 8)
    assert all_layers.attention(20, num_earlier=5) == 64 * 2 * (3 * (3 + 2 * 5) + 2 * 17 * 8)
    assert all_layers.attention(20, num_earlier=50) == 64 * 2 * 2 * 20 * 8
    assert all_layers.attention(8) == 64 * 2 * 8 * 8


# ---- critics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_critic_with_windows(family: str, layers: int | None, tmp_path: Path) -> None:
    """Its values are its head's of the backbone's last states, in every layout that it reads."""
    windowed_model(family).save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), **OPTIONS, critic=CriticConfig(layers=layers))
    torch.nn.init.normal_(model.get_submodule("score").weight)  # type: ignore[arg-type]
    backbone: Any = AutoModelForSequenceClassification.from_config(
        model.config, attn_implementation="eager"
    ).base_model
    backbone.load_state_dict(model.base_model.state_dict())
    backbone.eval()
    expected = []
    with torch.no_grad():
        for prompt, response in PAIRS:
            ids = torch.tensor([[*prompt, *response]])
            states = backbone(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            expected.append(model.get_submodule("score")(states)[:, 0])
        assert len(backbone.layers) == (layers or 2)
        layout = choose_layout("auto", [model])
        inputs = token_inputs(PAIRS, pad_id=0, layout=layout)
        values = Critic(model.eval())(inputs).values
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-5, atol=1e-5)
    longer = max(len(prompt) + len(response) for prompt, response in PAIRS)
    assert longer > WINDOW


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_the_states_that_a_probe_reads(family: str) -> None:
    """The layers behind them are not run."""
    model = windowed_model(family)
    layout = choose_layout("auto", [model])
    inputs = token_inputs(PAIRS, pad_id=0, layout=layout)
    alone = []
    with torch.no_grad():
        for prompt, response in PAIRS:
            ids = torch.tensor([[*prompt, *response]])
            states = model(ids, use_cache=False, output_hidden_states=True).hidden_states[1]
            alone.append(states[0, len(prompt) - 1 : -1])
        found = hidden_states(model, inputs, [1], wants_last=False)[1]
    places = inputs.state_rows, inputs.state_columns
    torch.testing.assert_close(found[places], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_kernel_that_an_architecture_lacks_is_one_error() -> None:
    """Transformers would answer with a request to open an issue."""
    config = GptOssConfig(**SMALL)
    assert attention_options("m", config, "auto") == {}
    assert attention_options("m", config, "eager") == {"attn_implementation": "eager"}
    message = r"no attn_implementation sdpa of gpt_oss: set attn_implementation to auto or eager"
    with pytest.raises(UserError, match=message):
        attention_options("m", config, "sdpa")
    plain = Qwen2Config(**SMALL)
    assert attention_options("m", plain, "sdpa") == {"attn_implementation": "sdpa"}
