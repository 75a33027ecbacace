"""`vapo validate --value_page` by the real command: its numbers, its words, its refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.config.fits import ON_STATE_TRACKING, ROOT
from tests.diagnostics.value_page.reading import page_json, token_ids, unpacked
from tests.tiny_model import ALPHABET, save_tiny_folder, tiny_model, tiny_tokenizer
from vapo import cli
from vapo.commands import validate
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.functional.advantages import decoupled_gae, whiten
from vapo.networks.new_model import make_tokenizer
from vapo.runs.checkpoints import Checkpoint
from vapo.types import EvaluatedBatch

GAMMA, ALPHA, LAMBDA_CRITIC, TEMPERATURE = 0.9, 0.5, 0.8, 0.7
NUM_PROMPTS, K = 4, 3
COMMON = (
    "data.train.num_examples=16",
    f"data.heldout.num_examples={NUM_PROMPTS}",
    f"evaluation.k={K}",
    f"evaluation.temperature={TEMPERATURE}",
    "rollouts.max_response_tokens=12",
    r"rewards.pattern=(\d)",
    "value_pages.num_groups=9",
    f"algorithm.gamma={GAMMA}",
    "training.microbatch_tokens=100",
    "trainer.accelerator=cpu",
)
WITH_CRITIC = (
    f"components.length_adaptive_gae.alpha={ALPHA}",
    f"components.decoupled_gae.lambda_critic={LAMBDA_CRITIC}",
)


def tiny_critic(**options: Any) -> Qwen2ForSequenceClassification:
    torch.manual_seed(1)
    config = Qwen2Config(**{**tiny_model().config.to_diff_dict(), "num_labels": 1, **options})
    return Qwen2ForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_folder(folder / "policy")
    save_tiny_folder(folder / "critic", tiny_critic())
    return folder


def command(folders: Path, *arguments: str, system: str = "vapo") -> list[str]:
    return [
        "validate",
        *ON_STATE_TRACKING,
        *("--config", str(ROOT / f"conf/algorithm/{system}.yaml")),
        *COMMON,
        *(WITH_CRITIC if system == "vapo" else ()),
        f"actor.path={folders / 'policy'}",
        f"critic.init={folders / 'critic'}",
        *arguments,
    ]


def written(file: Path) -> dict[str, Any]:
    return page_json(file.read_text(encoding="utf-8"))


def shown_responses(page: dict[str, Any]) -> list[tuple[dict[str, Any], list[int], list[int]]]:
    """In the batch's order, each with its prompt's and its own ids."""
    tokenizer = tiny_tokenizer()
    found = [
        (response, list(tokenizer(group["prompt"]).input_ids), token_ids(response))
        for group in page["groups"]
        for response in group["responses"]
    ]
    return sorted(found, key=lambda item: item[0]["row"])


@torch.no_grad()
def by_hand(prompt: list[int], response: list[int]) -> dict[str, Tensor]:
    """Transformers' own forwards, one unpadded sequence at a time."""
    ids, start = torch.tensor([prompt + response]), len(prompt) - 1
    logprobs = (tiny_model()(ids).logits[0, start:-1] / TEMPERATURE).log_softmax(-1)
    critic = tiny_critic()
    states = critic.model(ids).last_hidden_state[0, start:-1]
    return {
        "logprob": logprobs.gather(1, torch.tensor(response)[:, None])[:, 0],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "value": critic.score(states)[:, 0],
    }


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_numbers_are_those_of_the_shipped_functions_by_hand(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "page.html"
    assert cli.main(command(folders, "--value_page", str(file))) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(file)
    page = written(file)
    responses = shown_responses(page)
    assert [response["row"] for response, *_ in responses] == list(range(NUM_PROMPTS * K))
    numbers = [by_hand(prompt, ids) for _, prompt, ids in responses]
    lengths = torch.tensor([len(ids) for *_, ids in responses])
    assert len(set(lengths.tolist())) > 1, "or padding would not show"
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rewards = torch.tensor([response["reward"] for response, *_ in responses])
    assert 0 < int((rewards > 0).sum()) < len(rewards)
    token_rewards = torch.zeros(mask.shape)
    token_rewards[torch.arange(len(rewards)), lengths - 1] = rewards
    values = padded([n["value"] for n in numbers])
    raw, targets = decoupled_gae(
        token_rewards,
        values,
        mask,
        gamma=GAMMA,
        lambda_policy=(1 - 1 / (ALPHA * lengths)).clamp(min=0)[:, None],
        lambda_critic=LAMBDA_CRITIC,
    )
    advantages = whiten(raw, mask)
    returns = rewards[:, None] * GAMMA ** (lengths[:, None] - 1 - torch.arange(mask.shape[1]))
    for row, (response, _, ids) in enumerate(responses):
        columns, num = response["columns"], len(ids)
        expected = {
            **numbers[row],
            "advantage": advantages[row, :num],
            "unwhitened_advantage": raw[row, :num],
            "value_target": targets[row, :num],
            "return": returns[row, :num],
            "value_error": values[row, :num] - returns[row, :num],
        }
        assert {*expected, "rollout_logprob", "engine_gap", "td_error"} == columns.keys()
        for name, column in expected.items():
            torch.testing.assert_close(
                unpacked(columns[name], num), column, atol=2e-5, rtol=1e-4, msg=name
            )
        assert unpacked(columns["engine_gap"], num).abs().max() < 1e-4, "the policy that sampled"
    first = values[:, 0].double() - returns[:, 0].double()
    explained = 1 - first.var() / returns[:, 0].double().var()
    assert page["positions"]["explained_variance"][0] == pytest.approx(float(explained), abs=1e-4)
    assert page["positions"]["value_mean"][0] == pytest.approx(float(values[:, 0].mean()), abs=1e-5)
    assert sum(page["calibration"]["num_tokens"]) == int(lengths.sum())
    errors = (returns - values)[mask].double()
    of_all = 1 - errors.var(correction=0) / returns[mask].double().var(correction=0)
    metrics = dict(line.split(": ") for line in printed if ": " in line)
    assert float(metrics["critic/explained_variance"]) == pytest.approx(float(of_all), abs=1e-3)
    assert float(metrics["eval/avg_at_k"]) == pytest.approx(
        float((rewards > 0).double().mean()), abs=1e-4
    )


@pytest.mark.slow
def test_the_page_names_its_checkpoint_and_settings(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    arguments = ["--value-page", str(file), "evaluation.top_p=0.9", "evaluation.num_prompts=2"]
    assert cli.main(command(folders, *arguments)) == 0
    page = written(file)
    facts, notes = page["facts"], "\n".join(page["notes"])
    assert facts["prompts"] == f"2 held-out ones, {K} responses each"
    assert facts["sampled at"] == "temperature 0.7, top_p 0.9"
    assert (facts["actor"], facts["critic"]) == (f"{folders}/policy", f"{folders}/critic")
    assert facts["lambda of the policy"] == "1 - 1 / (0.5 length)"
    assert facts["lambda of the critic"] == "0.8"
    assert "nothing was trained" in notes
    assert "evaluation.temperature=1 evaluation.top_p=1 removes the difference" in notes
    assert "probability that top_p or top_k cut off" in notes
    assert "whitened" in notes
    gaps = torch.cat([
        unpacked(response["columns"]["engine_gap"], len(ids))
        for response, _, ids in shown_responses(page)
    ])  # fmt: skip
    assert gaps.max() < 1e-4, "the nucleus can only make a token likelier"
    assert gaps.min() < -0.01


@pytest.mark.slow
def test_the_page_says_whose_the_advantages_are(folders: Path, tmp_path: Path) -> None:
    """The critic's own with every baseline, which a run with another one does not train on."""
    notes, shown = [], []
    for baseline in ("critic", "tether"):
        file = tmp_path / f"{baseline}.html"
        options = ["algorithm.gamma=1", f"algorithm.baseline.kind={baseline}"]
        assert cli.main(command(folders, "--value_page", str(file), *options)) == 0
        page = written(file)
        notes.append("\n".join(page["notes"]))
        shown.append([response["columns"]["advantage"] for response, *_ in shown_responses(page)])
    assert ["that a policy iteration would train on" in text for text in notes] == [True, False]
    assert "the critic's alone. A run trains with algorithm.baseline tether" in notes[1]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("system", ["grpo", pytest.param("remax", marks=pytest.mark.slow)])
def test_a_critic_free_system_has_a_page_without_values(
    folders: Path, tmp_path: Path, system: str
) -> None:
    file = tmp_path / "page.html"
    arguments = ["--value_page", str(file), "algorithm.gamma=1", "algorithm.kl.coef=0"]
    assert cli.main(command(folders, *arguments, "critic.init=/nowhere", system=system)) == 0
    page = written(file)
    assert page["calibration"] == {}
    assert "critic" not in page["facts"]
    assert any(note.startswith("No critic") for note in page["notes"])
    for response, _, ids in shown_responses(page):
        assert "value" not in response["columns"]
        advantage = unpacked(response["columns"]["advantage"], len(ids))
        assert bool((advantage == advantage[0]).all())
    right = {r["is_correct"]: r["columns"]["advantage"] for r, *_ in shown_responses(page)}
    assert right[True] > right[False]


@pytest.mark.slow
def test_vineppos_page_has_advantages_of_steps(folders: Path, tmp_path: Path) -> None:
    """Held-out responses are continued, also beyond the training budget of 12 tokens."""
    file = tmp_path / "page.html"
    segments = ("kind=tokens", "num_tokens=2")
    arguments = [
        *("--value_page", str(file), "algorithm.gamma=1", "algorithm.kl.coef=0"),
        *("algorithm.whiten_advantages=false", "algorithm.vine_continuations=4"),
        *(f"algorithm.vine_segments.{segment}" for segment in segments),
        "evaluation.max_response_tokens=16",
    ]
    assert cli.main(command(folders, *arguments, system="vineppo")) == 0
    num_steps = 0
    for response, _, ids in shown_responses(written(file)):
        advantage = unpacked(response["columns"]["advantage"], len(ids))
        starts = advantage[::2]
        num_steps += len(starts)
        steps = starts.repeat_interleave(2)[: len(ids)]
        torch.testing.assert_close(advantage, steps, rtol=0, atol=0)
        value = response["reward"] - float(starts.sum())  # of the prompt: the mean of 4 rewards
        assert round(value, 5) in (-1, -0.5, 0, 0.5, 1)
    assert num_steps > 2 * NUM_PROMPTS * K, "or steps would not show"


@pytest.mark.slow
def test_rollouts_with_bad_numbers_are_left_out_with_their_group(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vapo.diagnostics.value_page import heldout

    evaluate = heldout.add_logprobs_and_values

    def poisoned(*args: Any, **options: Any) -> EvaluatedBatch:
        evaluated = evaluate(*args, **options)
        assert evaluated.old_values is not None
        evaluated.old_values[4, 0] = float("nan")
        return evaluated

    monkeypatch.setattr(heldout, "add_logprobs_and_values", poisoned)
    file = tmp_path / "page.html"
    truth = ("--value_truth", "2", "value_truth.num_responses=12", "value_truth.num_prefixes=0")
    assert cli.main(command(folders, "--value_page", str(file), *truth)) == 0
    page = written(file)
    assert len(page["groups"]) == NUM_PROMPTS - 1
    assert f"{K} responses are left out: old_values not finite in 1 of 12." in page["notes"]
    for response, _, ids in shown_responses(page):
        values = unpacked(response["columns"]["value"], len(ids))
        places = response["truth"]["num_tokens"]
        assert response["truth"]["value"] == pytest.approx(values[places].tolist())


START = "critic.head.start=first_batch"

# ---- refusals, before anything is sampled --------------------------------------------------------


@pytest.fixture
def no_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "evaluate", lambda *_, **__: pytest.fail("it sampled"))


@pytest.mark.usefixtures("no_sampling")
@pytest.mark.parametrize(
    ("system", "arguments", "said"),
    [
        ("vapo", ["--value_page", "{tmp}"], r"give the name of a file, as page\.html"),
        ("vapo", ["--value_page", "seed=3"], r"--value_page seed=3: give the name of a file"),
        ("vapo", ["--value_page", "{tmp}/file/page.html"], r"page\.html: cannot be written \("),
        ("vapo", ["--value_page", "/proc/page.html"], r"page\.html: cannot be written \("),
        ("vapo", ["--value_page", "{tmp}/a.html", "critic.init=/no/critic"], "no such model"),
        ("vapo", ["--value_page", "{tmp}/a.html", "critic.init={tmp}/other"], "share one token"),
        ("vapo", ["--value_page", "{tmp}/a.html", "--ckpt_path", "last"], "no run in"),
        ("vapo", ["--value_page", "{tmp}/a.html", START], r"start first_batch would throw away"),
        ("vapo", ["--value_truth", "4", START], r"critic\.init .* brings a trained value head"),
        ("grpo", ["--value_page", "{tmp}/a.html", "evaluation.k=1"], "evaluation.k is 1: set it"),
    ],
)
def test_bad_requests_are_refused(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    system: str,
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "file").touch()
    save_tiny_folder(tmp_path / "other", tiny_critic())
    make_tokenizer(ALPHABET[::-1]).save_pretrained(tmp_path / "other")
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    given += [f"output_dir={tmp_path / 'runs'}"]
    assert cli.main(command(folders, *given, system=system)) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


def test_a_checkpoint_without_the_critic_or_with_another() -> None:
    from tests.systems import system_config

    state = {f"actor.model.{name}": tensor for name, tensor in tiny_model().state_dict().items()}
    contents = {"state_dict": state, "config": to_yaml(system_config("vapo"))}
    with pytest.raises(UserError, match=r"^last\.ckpt: .* has no critic; .* own config$"):
        Checkpoint(Path("last.ckpt"), contents).fill(tiny_critic(), "critic", "some/critic")
    wider = tiny_critic(hidden_size=64, intermediate_size=128).state_dict()
    state |= {f"critic.model.{name}": tensor for name, tensor in wider.items()}
    critic = tiny_critic()
    expected = (
        r"^last\.ckpt: its critic does not fit some/critic, which is another model: it has "
        r"model\.embed_tokens\.weight \[\d+, 64\], not \[\d+, 32\]; .* and 24 more; "
        r"score it with its run's own config$"
    )
    with pytest.raises(UserError, match=expected):
        Checkpoint(Path("last.ckpt"), contents).fill(critic, "critic", "some/critic")
    state |= {f"critic.model.{n}": t + 1 for n, t in tiny_critic().state_dict().items()}
    Checkpoint(Path("last.ckpt"), contents).fill(critic, "critic", "some/critic")
    assert torch.equal(critic.score.weight, tiny_critic().score.weight + 1)
