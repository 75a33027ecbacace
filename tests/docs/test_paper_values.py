"""What the configs and `docs/paper_map.md` say of the papers' values, against the values used."""

from __future__ import annotations

import re

from tests.config.fits import ROOT
from tests.systems import system_config
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.config.written import flatten

CONF = ROOT / "conf"


def silent_choices() -> list[list[str]]:
    """Cells of the rows where the paper is silent."""
    page = (ROOT / "docs/paper_map.md").read_text()
    section = page.split("## Where the paper is silent")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_silent_number_of_the_optimizer_has_its_default_in_the_paper_map() -> None:
    """Both networks' are the schema's own in the default config."""
    config = flatten(system_config("vapo"))
    for name in ("beta1", "beta2", "weight_decay", "max_grad_norm"):
        keys = [f"{network}.optimizer.{name}" for network in ("actor", "critic")]
        (choice,) = {what for _, what, where in silent_choices() if f"`{keys[0]}`" in where}
        (where,) = {where for _, _, where in silent_choices() if f"`{keys[0]}`" in where}
        assert f"`{keys[1]}`" in where
        (value,) = {config[key] for key in keys}
        numbers = [float(text) for text in re.findall(r"\d+(?:\.\d+)?", choice)]
        assert value in numbers, (name, choice)


def test_the_paper_map_says_how_value_losses_are_averaged() -> None:
    """`token_level_loss` off is of the policy alone (`objective.value_objective`)."""
    rows = [
        (question, choice)
        for question, choice, where in silent_choices()
        if where == "`components.token_level_loss`"
    ]
    ((question, choice),) = rows
    assert "value loss" in question
    assert "mean over tokens" in choice


def test_grpo_has_its_papers_kl_coefficient() -> None:
    kl = system_config("grpo").algorithm.kl
    assert (kl.coef, kl.estimator, kl.placement) == (0.04, "k3", "loss")
    header, _, values = (CONF / "algorithm/grpo.yaml").read_text().partition("\ntracking:")
    papers, _, ours = header.partition("Not stated")
    assert "0.04" in papers
    assert "coefficient" not in ours
    assert re.search(r"kl: \{coef: 0\.04, .*\} # paper$", values, re.MULTILINE)


def test_the_comment_on_alpha_is_of_the_numbers_that_follow_from_it() -> None:
    """1 / (1 - lambda) = alpha l: alpha is the horizon in units of the response."""
    text = (CONF / "vapo.yaml").read_text()
    comment = " ".join(
        re.findall(r"# (.*)", text.split("length_adaptive_gae:")[1].split("  alpha")[0])
    )
    alpha = resolve(load_config(FitConfig, [CONF / "vapo.yaml"], [])).alpha
    assert alpha is not None
    shortest, longest = 27, 35  # six and eight steps of four tokens, `;`, the answer, the end token
    assert f"{shortest} to {longest} tokens" in comment
    assert "alpha is the horizon in units of the response" in comment
    for value, words in ((alpha, "{:.0f} to {:.0f} tokens"), (0.05, "{:.2f} to {:.2f} tokens")):
        assert words.format(value * shortest, value * longest) in comment, comment
    reach = {round((1 - 1 / (alpha * n)) ** (n - 1), 3) for n in (shortest, longest)}
    (share,) = reach
    assert f"{share} of the reward" in comment
