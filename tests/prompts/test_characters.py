"""Characters that the policy's tokenizer drops are named before anything is sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, SourceConfig
from vapo.errors import UserError
from vapo.networks.loading import load_tokenizer
from vapo.prompts.characters import lost_characters
from vapo.prompts.load import load_prompts
from vapo.types import Prompt

TOKENIZER = load_tokenizer(str(ROOT / "models" / "state_tracking" / "policy"))


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"file:{i + 1}", text, (2,), "1") for i, text in enumerate(texts)]


def test_lost_characters_are_counted_and_the_first_place_named() -> None:
    found = lost_characters(prompts("3a12=", "1+2=", "what is 2?", "2+2=", "4a=\n"), TOKENIZER)
    assert found is not None
    assert (found.characters, found.num_prompts, found.total) == ("+?", 3, 5)
    assert found.describe() == (
        "the tokenizer of actor.path has no token for '+', '?': it leaves them out of 3 of 5 "
        "prompts, the first is file:2"
    )
    assert lost_characters(prompts("3a12=", "1a 34="), TOKENIZER) is None, "a space may go"
    many = lost_characters(prompts("3a12=", "+-*/?!ABCD"), TOKENIZER)
    assert many is not None
    assert "'-', '/', '?', 'A', 'B' and 2 more" in many.describe()


def test_a_special_token_is_no_text_that_is_lost() -> None:
    """A chat template writes them into every prompt."""
    end = TOKENIZER.eos_token
    assert lost_characters(prompts(f"{end}3a12={end}"), TOKENIZER) is None
    found = lost_characters(prompts(f"{end}3a12=", "1<2="), TOKENIZER)
    assert found is not None
    assert (found.characters, found.place) == ("<", "file:2")


def test_every_prompt_without_a_character_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=make(SourceConfig, path=str(path)), heldout_size=2)
    with pytest.raises(
        UserError, match=r"no token for '\+': .* 10 of 10 prompts, the first is .*:1"
    ):
        load_prompts(data, TOKENIZER)
    assert load_prompts(data, character_tokenizer()).report.lost_characters is None
    path.write_text(path.read_text() + '{"prompt": "3a12=", "answer": "3"}\n')
    described = load_prompts(data, TOKENIZER).report.describe()
    assert "of 10 of 11 prompts" in described
