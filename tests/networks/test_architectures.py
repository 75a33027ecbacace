"""Each cell of the table in docs/models.md, on a tiny model of the family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.networks.architectures import ALL, BY_DAY, COLUMNS, HYBRIDS, ON_VLLM, Architecture
from tests.rollouts.sampler_contract import largest_gap
from tests.tiny_model import ragged_prompts, sample, save_tiny_folder, tiny_tokenizer
from vapo.config.critic import CriticConfig
from vapo.config.networks import LoraConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.export import save_folder
from vapo.networks.layouts import choose_layout
from vapo.networks.loading import load_causal_lm, load_value_model
from vapo.networks.lora import add_adapters, merge_adapters
from vapo.networks.packed_attention import hidden_states
from vapo.networks.saved_names import under_saved_names
from vapo.networks.token_inputs import Layout, Sequences, token_inputs

OPTIONS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}
# Two responses to one prompt, and rows of unequal lengths, longer and shorter than a Mamba layer's
# chunk and a convolution.
ROWS: Sequences = [
    ((5, 6, 7, 8), (9, 10, 11)),
    ((5, 6, 7, 8), (3, 30, 12, 13, 14, 15, 16, 17, 20, 21)),
    ((7,), (8, 9)),
]
IDS = torch.arange(3, 22)[None]
TABLE = Path(__file__).parents[2] / "docs/models.md"
FAMILIES = [
    pytest.param(one, id=one.name, marks=[] if one.name in BY_DAY else pytest.mark.night)
    for one in ALL
]
Load = Callable[[Architecture], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Where a family's tiny model is saved, once for all tests."""
    folders: dict[str, Path] = {}

    def saved(family: Architecture) -> Path:
        if family.name not in folders:
            folder = tmp_path_factory.mktemp("family")
            folders[family.name] = save_tiny_folder(folder, family.model())
        return folders[family.name]

    return saved


def policy(folder: Path) -> PreTrainedModel:
    return load_causal_lm(str(folder), **OPTIONS).eval()


def expected_logprobs(model: PreTrainedModel, prompt: Any, response: Any) -> Tensor:
    """Those of the model's own forward pass over one row."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def logprobs(model: PreTrainedModel, rows: Sequences, layout: Layout) -> list[Tensor]:
    inputs = token_inputs(rows, pad_id=0, layout=layout)
    found = inputs.scatter(Actor(model)(inputs, temperature=1.0).logprobs)
    return [row[: len(response)] for row, (_, response) in zip(found, rows, strict=True)]


def gradients(model: PreTrainedModel, rows: Sequences, layout: Layout) -> dict[str, Tensor]:
    model.zero_grad()
    torch.cat(logprobs(model.train(), rows, layout)).sum().neg().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_alone(model: PreTrainedModel, layout: Layout) -> None:
    """Log-probs and gradients of rows in one batch are those of each row by itself."""
    with torch.no_grad():
        for found, row in zip(logprobs(model, ROWS, layout), ROWS, strict=True):
            torch.testing.assert_close(found, expected_logprobs(model, *row), rtol=0, atol=2e-5)
    together = gradients(model, ROWS, layout)
    alone = [gradients(model, [row], "padded") for row in ROWS]
    assert together.keys() == dict(model.named_parameters()).keys()
    for name, gradient in together.items():
        expected = sum((of_row[name] for of_row in alone), torch.zeros(()))
        scale = float(expected.abs().max())
        torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-5 * scale + 1e-7, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded(family: Architecture, folder_of: Load) -> None:
    """Padding on the right changes no earlier token's state, and no token's experts."""
    model = policy(folder_of(family))
    assert choose_layout("padded", [model]) == "padded"
    assert_as_alone(model, "padded")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("column", ["packed", "shared prompts"])
def test_packed(family: Architecture, column: str, folder_of: Load) -> None:
    model = policy(folder_of(family))
    layout: Layout = "packed" if column == "packed" else "shared_prompts"
    if column in family.lacks:
        why = "not every layer of .* has attention" if family in HYBRIDS else "attn_implementation"
        message = f"training.packing is {layout}, but {why}.*auto or padded"
        with pytest.raises(UserError, match=message):
            choose_layout(layout, [model])
        assert choose_layout("auto", [model]) == "padded"
    else:
        assert choose_layout(layout, [model]) == layout
        assert choose_layout("auto", [model]) == "shared_prompts"
        assert_as_alone(model, layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_built_in_engine(family: Architecture, folder_of: Load) -> None:
    """Ragged prompts, of which three at a time are decoded; then a prompt without the others."""
    model, prompts = policy(folder_of(family)), ragged_prompts(5)
    assert len({len(prompt.prompt_ids) for prompt in prompts}) > 2
    rollouts = sample(model, prompts, rows=3, group_size=2, max_response_tokens=24)
    assert len({len(rollout.response_ids) for rollout in rollouts}) > 2
    assert largest_gap(model, rollouts, 1.0) < 1e-4
    last = sample(model, prompts[:1], rows=1, group_size=2, max_response_tokens=24)
    assert [r.response_ids for r in last] == [r.response_ids for r in rollouts[:2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family: Architecture, folder_of: Load) -> None:
    """Every adapter learns, and once merged gives the logits that it gave beside the weights."""
    model, options = policy(folder_of(family)), LoraConfig(rank=2, lora_alpha=4.0)
    if "LoRA" in family.lacks:
        with pytest.raises(UserError, match=r"share the weights of .* set actor\.lora=null"):
            add_adapters(model, options, seed=0)
        return
    add_adapters(model, options, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.train()(IDS, use_cache=False).logits.square().mean().backward()
    still = [n for n, p in model.named_parameters() if p.requires_grad and not _moves(p)]
    assert not still
    plain = policy(folder_of(family))
    with torch.no_grad():
        before = plain(IDS).logits
        plain.load_state_dict(dict(merge_adapters(model.state_dict().items(), options)))
        expected, found = plain(IDS).logits, model.eval()(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - before).abs().max() > 1e-3, "the control"


def _moves(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


@pytest.mark.parametrize("family", FAMILIES)
def test_critic(family: Architecture, folder_of: Load, tmp_path: Path) -> None:
    """The head reads the state before each token, of all layers or of the first; saved and read."""
    folder, inputs = folder_of(family), token_inputs(ROWS, pad_id=0)
    model = policy(folder)
    num_layers = model.config.num_hidden_layers
    with torch.no_grad():
        states = hidden_states(model, inputs, range(num_layers))
        norm = _last_norm(model)
        for count in (1, num_layers - 1, num_layers):
            critic = load_value_model(
                str(folder), **OPTIONS, critic=CriticConfig(layers=count, init="policy")
            ).eval()
            assert not critic.get_parameter("score.weight").any()
            nn.init.normal_(critic.get_parameter("score.weight"))
            read = states[-1] if count == num_layers else norm(states[count])
            read = read[inputs.state_rows, inputs.state_columns]
            expected = (read @ critic.get_parameter("score.weight").T)[:, 0]
            found = Critic(critic)(inputs).values
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        save_folder(critic, _contiguous(critic), tiny_tokenizer(), tmp_path / "critic")
        again = load_value_model(str(tmp_path / "critic"), **OPTIONS).eval()
        torch.testing.assert_close(Critic(again)(inputs).values, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_for_a_probe(family: Architecture, folder_of: Load) -> None:
    """A pass that ends early gives the states of the whole one."""
    model, inputs = policy(folder_of(family)), token_inputs(ROWS, pad_id=0)
    with torch.no_grad():
        for layer in range(model.config.num_hidden_layers):
            whole = hidden_states(model, inputs, (layer,))[layer]
            early = hidden_states(model, inputs, (layer,), wants_last=False)[layer]
            torch.testing.assert_close(early, whole, rtol=0, atol=1e-6)


def _last_norm(model: PreTrainedModel) -> nn.Module:
    names = ("norm", "final_layernorm", "embedding_norm", "norm_f")
    backbone: Any = model.base_model
    found = [getattr(backbone, name) for name in names if hasattr(backbone, name)]
    assert len(found) == 1
    return found[0]


def _contiguous(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_reload(family: Architecture, folder_of: Load, tmp_path: Path) -> None:
    """A saved policy has the names and bits of the folder that it came from, which are those that
    an engine is given, and transformers reads it by itself."""
    folder = folder_of(family)
    model, saved = policy(folder), load_file(folder / "model.safetensors")
    pushed = dict(under_saved_names(model, model.state_dict().items()))
    tied = pushed.keys() - saved.keys()
    assert saved.keys() <= pushed.keys()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in saved.items())
    assert all(any(torch.equal(pushed[name], t) for t in saved.values()) for name in tied)
    save_folder(model, _contiguous(model), tiny_tokenizer(), tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in saved.items())
    with torch.no_grad():
        assert torch.equal(policy(tmp_path / "out")(IDS).logits, model(IDS).logits)
    alone: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def rows_of_the_table() -> dict[str, dict[str, str]]:
    lines = TABLE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| architecture |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(COLUMNS, cells, strict=True))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    assert header == ["architecture", *COLUMNS]
    return rows


def test_the_table_says_what_these_tests_show() -> None:
    expected = {}
    for family in ALL:
        cells = {column: "no" if column in family.lacks else "yes" for column in COLUMNS}
        if family.name not in ON_VLLM and cells["vLLM on a CPU"] == "yes":
            cells["vLLM on a CPU"] = "not tried"
        expected[family.name] = cells
    assert rows_of_the_table() == expected
