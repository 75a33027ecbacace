"""Critics of other frameworks give, from their folders, the values that their own code computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.errors import UserError
from vapo.studies.inspection.critics import load_critic, responses_with_values
from vapo.studies.inspection.responses import BadRow, InspectedResponse

PROMPT, RESPONSE = (3, 4, 5), (6, 7, 8, 9, 10, 11)
SEQUENCES = [(PROMPT, RESPONSE), ((3,), (4, 5)), (PROMPT, RESPONSE[::-1])]


def classifier(kind: Any, **options: Any) -> Any:
    """A network of the policy's shape with a head that is not zero."""
    config = Qwen2Config(**{**tiny_model().config.to_dict(), "num_labels": 1, **options})
    torch.manual_seed(1)
    model = kind(config).eval()
    nn.init.normal_(model.score.weight, std=0.5)
    if model.score.bias is not None:
        nn.init.constant_(model.score.bias, 0.3)
    return model


def save(model: Any, folder: Path) -> str:
    save_tiny_folder(folder, model)
    return str(folder)


@torch.no_grad()
def expected(model: Any, head: nn.Module) -> list[list[float]]:
    """By the model's own forward: the head at the state before each response token."""
    found = []
    for prompt, response in SEQUENCES:
        states = model.model(input_ids=torch.tensor([[*prompt, *response]])).last_hidden_state
        outputs = head(states)[0, len(prompt) - 1 : -1, 0]
        found.append(outputs.tolist())
    return found


def check(path: str, values: list[list[float]], says: str, **options: Any) -> None:
    critic = load_critic(path, **options)
    assert says in critic.description
    for found, wanted in zip(critic.values(SEQUENCES), values, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


def test_a_token_classifier_as_verl_merges_it(tmp_path: Path) -> None:
    """Its head has a bias, which transformers' sequence classifier would drop."""
    model = classifier(Qwen2ForTokenClassification)
    assert model.score.bias is not None
    with torch.no_grad():  # the forward of the class itself, as verl reads it
        logits = model(input_ids=torch.tensor([[*PROMPT, *RESPONSE]])).logits[0, :, 0]
    values = expected(model, model.score)
    assert values[0] == pytest.approx(logits[len(PROMPT) - 1 : -1].tolist(), abs=1e-6)
    path = save(model, tmp_path)
    check(path, values, "Qwen2ForTokenClassification with the head `score`")


def test_a_sequence_classifier(tmp_path: Path) -> None:
    model = classifier(Qwen2ForSequenceClassification)
    path = save(model, tmp_path)
    check(
        path, expected(model, model.score), "sequence classifier (Qwen2ForSequenceClassification)"
    )


def test_openrlhf_s_critic(tmp_path: Path) -> None:
    """Saved as a class of its own, with a head of any name, whose output it normalises."""
    model = classifier(Qwen2ForSequenceClassification)
    state = {name.replace("score.", "v."): value for name, value in model.state_dict().items()}
    save_tiny_folder(tmp_path, model)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["CriticModel"], "value_head_prefix": "v"}
    config |= {"normalize_reward": True, "mean": 0.5, "std": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = [[(x - 0.5) / 2 for x in row] for row in expected(model, model.score)]
    check(str(tmp_path), values, "CriticModel with the head `v`, its output less 0.5 and divided")


def with_v_head(folder: Path) -> tuple[str, list[list[float]]]:
    """As TRL saves its AutoModelForCausalLMWithValueHead: the policy's weights and the head's."""
    policy = tiny_model()
    head = nn.Linear(policy.config.hidden_size, 1)
    state = {
        **policy.state_dict(),
        **{f"v_head.summary.{n}": p for n, p in head.named_parameters()},
    }
    policy.save_pretrained(folder, state_dict=state)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder), expected(policy, head)


def test_trl_s_value_head(tmp_path: Path) -> None:
    path, values = with_v_head(tmp_path)
    check(path, values, "Qwen2ForCausalLM with the head `v_head.summary`")


@pytest.mark.parametrize(
    ("kind", "task"),
    [(Qwen2ForSequenceClassification, "SEQ_CLS"), (Qwen2ForTokenClassification, "TOKEN_CLS")],
)
def test_an_adapter_with_its_own_head(tmp_path: Path, kind: Any, task: str) -> None:
    base = save_tiny_folder(tmp_path / "base")
    model = kind.from_pretrained(base, num_labels=1)
    wrapped = adapted(model, task_type=task)
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload().eval()
    values = expected(merged, merged.score)
    check(str(tmp_path / "adapter"), values, f"LORA adapter on {base}, with the adapter's own head")


def test_an_adapter_on_a_base_with_a_head(tmp_path: Path) -> None:
    path, before = with_v_head(tmp_path / "base")
    policy = Qwen2ForCausalLM.from_pretrained(path)
    wrapped = adapted(policy, task_type="CAUSAL_LM")
    wrapped.save_pretrained(tmp_path / "adapter")
    critic = load_critic(str(tmp_path / "adapter"))
    assert critic.description == f"LORA adapter on {path}, with its base's head `v_head.summary`"
    merged = wrapped.merge_and_unload().eval()
    values = expected(merged, critic.critic.model.get_submodule("score"))
    assert critic.values(SEQUENCES)[0] == pytest.approx(values[0], abs=1e-5)
    assert values[0] != pytest.approx(before[0], abs=1e-3)


def adapted(model: Any, **options: Any) -> Any:
    """Adapters that do something, as after training."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return wrapped.eval()


def test_what_is_no_critic_is_refused(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy")
    with pytest.raises(UserError, match=r"no value head: Qwen2ForCausalLM .* is this the policy\?"):
        load_critic(str(policy))
    two = save(classifier(Qwen2ForTokenClassification, num_labels=2), tmp_path / "two")
    with pytest.raises(UserError, match="its head has 2 outputs; a value is one"):
        load_critic(two)
    with pytest.raises(UserError, match="--critic: owner/name: no such folder"):
        load_critic("owner/name")
    adapted(tiny_model(), task_type="CAUSAL_LM").save_pretrained(tmp_path / "headless")
    config = tmp_path / "headless/adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(policy)})
    )
    with pytest.raises(UserError, match=r"neither the adapter nor its base .* has a value head"):
        load_critic(str(tmp_path / "headless"))
    (tmp_path / "headless/adapter_model.safetensors").rename(tmp_path / "headless/adapter.bin")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors; pickles are not read"):
        load_critic(str(tmp_path / "headless"))


def response(number: int, **options: Any) -> InspectedResponse:
    told: dict[str, Any] = {"prompt_ids": PROMPT, "response_ids": RESPONSE, **options}
    return InspectedResponse(f"x, row {number}", "p", "r", 1.0, "0", **told)


def test_a_stream_gets_values_and_keeps_its_order(tmp_path: Path) -> None:
    """More rows than are held at once, bad rows and rows without tokens among them."""
    model = classifier(Qwen2ForSequenceClassification)
    critic = load_critic(save(model, tmp_path))
    rows: list[InspectedResponse | BadRow] = [response(n) for n in range(300)]
    rows[5], rows[7] = BadRow("x, row 5", "why"), response(7, response_ids=None)
    notes: list[str] = []
    found = list(responses_with_values(iter(rows), critic, notes=notes))
    wanted = critic.values([(PROMPT, RESPONSE)])[0]
    assert found[5] == rows[5]
    assert found[7] == rows[7]
    for number in (0, 255, 256, 299):
        one = found[number]
        assert isinstance(one, InspectedResponse)
        assert one.place == f"x, row {number}"
        assert one.values == pytest.approx(wanted, abs=1e-5)
    assert "the values of 298 responses are the critic's, computed here" in "\n".join(notes)
    assert "1 responses were not read by the critic (no tokens)" in notes


@pytest.mark.parametrize("shift", [0, 1])
def test_a_file_s_values_are_compared_with_its_critic(tmp_path: Path, shift: int) -> None:
    """A file whose values have seen their own token is found out by the critic's folder."""
    model = classifier(Qwen2ForSequenceClassification)
    critic = load_critic(save(model, tmp_path))
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(40):
        ids = tuple(torch.randint(2, 30, (12,), generator=draw).tolist())
        own = critic.values([(PROMPT, (*ids, 2, 2))])[0]
        rows.append(
            replace(response(number, response_ids=ids), values=tuple(own[shift : shift + 12]))
        )
    notes: list[str] = []
    found = list(responses_with_values(rows, critic, notes=notes))
    assert found == rows  # the file's stay
    said = {0: "the state before its token", 1: "has already seen its own token"}[shift]
    assert said in notes[-1]
    assert notes[-1].startswith("the file's values beside the critic's: ")
