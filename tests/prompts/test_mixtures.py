"""Mixtures: whose turn it is, which prompt comes, after a resume too; curricula likewise."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config.data import CurriculumStage
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, MixtureSource, SourceConfig
from vapo.errors import UserError
from vapo.prompts.load import load_prompts
from vapo.prompts.training_set import (
    StagePrompts,
    TrainingSet,
    TrainingSource,
    Turns,
    group_sampling,
)
from vapo.types import Prompt


def prompts(name: str, number: int) -> list[Prompt]:
    return [Prompt(f"{name}{i}", f"{name}{i}", (2,), "1", source=name) for i in range(number)]


def training_set(**sources: tuple[int, int]) -> TrainingSet:
    """name=(weight, number of prompts)"""
    return TrainingSet(
        tuple(
            TrainingSource((StagePrompts(prompts(name, number)),), name, weight)
            for name, (weight, number) in sources.items()
        )
    )


def ids(picked: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in picked]


def test_turns_by_hand() -> None:
    assert Turns((3, 1)).order == (0, 0, 0, 1)
    assert Turns((2, 2)).order == (0, 1)  # in lowest terms
    assert Turns((1,)).order == (0,)
    turns = Turns((3, 1))
    assert [turns.source(place) for place in range(9)] == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert [turns.count(0, place) for place in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert [turns.count(1, place) for place in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_every_beginning_has_each_weight_to_within_one_turn() -> None:
    draw = Random(0)
    some = [tuple(draw.randint(1, 30) for _ in range(draw.randint(2, 6))) for _ in range(25)]
    for weights in [(1, 1000), (7, 5, 3), (1, 1, 1, 97), *some]:
        turns = Turns(weights)
        assert Counter(turns.order) == dict(enumerate(turns.weights))
        counts = [0] * len(weights)
        for place in range(2 * turns.period):
            for source, weight in enumerate(weights):
                assert abs(counts[source] - Fraction(place * weight, sum(weights))) < 1
                assert turns.count(source, place) == counts[source]
            counts[turns.source(place)] += 1


def test_iterations_have_the_weights_and_no_prompt_repeats_early() -> None:
    mixture = training_set(a=(3, 12), b=(1, 5))
    walk = [
        p for i in range(10) for p in group_sampling(mixture, num_prompts=8, seed=1, iteration=i)
    ]
    for start in range(0, 80, 8):
        assert Counter(p.source for p in walk[start : start + 8]) == {"a": 6, "b": 2}
    for name, number in (("a", 12), ("b", 5)):
        of_source = [p.prompt_id for p in walk if p.source == name]
        for start in range(0, len(of_source) - number + 1, number):
            assert len(set(of_source[start : start + number])) == number
    other = group_sampling(mixture, num_prompts=8, seed=2, iteration=0)
    assert ids(other) != ids(walk[:8])


def test_each_source_is_shuffled_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sources than any fixed number of permutations that are kept."""
    shuffled = list[int]()
    monkeypatch.setattr(Random, "shuffle", lambda self, order: shuffled.append(len(order)))
    sources = tuple(
        TrainingSource((StagePrompts(prompts("a", 50)),), name=str(n)) for n in range(40)
    )
    group_sampling(TrainingSet(sources), num_prompts=400, seed=0, iteration=0)
    assert len(shuffled) == len(sources)


def test_an_iteration_does_not_depend_on_what_came_before() -> None:
    late = ids(group_sampling(training_set(a=(2, 9), b=(5, 7)), num_prompts=6, seed=0, iteration=9))
    mixture = training_set(a=(2, 9), b=(5, 7))
    for iteration in range(9):
        group_sampling(mixture, num_prompts=6, seed=0, iteration=iteration)
    assert ids(group_sampling(mixture, num_prompts=6, seed=0, iteration=9)) == late


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_slices_of_the_same_iteration(world_size: int) -> None:
    mixture = training_set(a=(3, 12), b=(2, 5), c=(2, 5))
    whole = ids(group_sampling(mixture, num_prompts=8, seed=2, iteration=5))
    parts = [
        group_sampling(
            mixture, num_prompts=8, seed=2, iteration=5, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    assert [name for part in parts for name in ids(part)] == whole


def test_one_source_has_the_order_of_a_set_without_mixtures() -> None:
    """Literals of the walk that runs recorded so far have seen."""
    plain = prompts("p", 6)
    picked = [ids(group_sampling(plain, num_prompts=4, seed=3, iteration=i)) for i in range(2)]
    assert picked == [["p0", "p1", "p4", "p3"], ["p2", "p5", "p0", "p1"]]


def test_stages_of_a_curriculum_begin_at_their_iteration() -> None:
    stages = (StagePrompts(prompts("easy", 5)), StagePrompts(prompts("hard", 4), from_iteration=3))
    for name, weight in (("", 1), ("s", 2)):
        source = TrainingSource(stages, name, weight)
        other = TrainingSource((StagePrompts(prompts("o", 3)),), "o", 1)
        mixture = TrainingSet((source,) if not name else (source, other))
        easy: list[str] = []
        hard: list[str] = []
        for iteration in range(6):
            picked = group_sampling(mixture, num_prompts=6, seed=0, iteration=iteration)
            mine = [p for p in picked if p.source != "o"]
            assert len(mine) == (4 if name else 6)
            assert {p.source for p in mine} == {"easy" if iteration < 3 else "hard"}
            assert source.stage_at(iteration) == int(iteration >= 3)
            (easy if iteration < 3 else hard).extend(ids(mine))
        assert len(set(easy[:5])) == 5
        assert len(set(hard[:4])) == 4  # a whole walk from the stage's beginning
        assert len(set(hard[4:8])) == 4


def jsonl(folder: Path, name: str, number: int) -> str:
    path = folder / f"{name}.jsonl"
    rows = [{"prompt": f"{name}{i}", "answer": "1"} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture_of(folder: Path, **fields: Any) -> DataConfig:
    return DataConfig(
        train=make(
            SourceConfig,
            kind="mixture",
            sources={
                "letters": make(MixtureSource, path=jsonl(folder, "letters", 30), weight=3),
                "digits": make(
                    MixtureSource,
                    path=jsonl(folder, "digits", 10),
                    weight=1,
                    prompt_template="#{prompt}",
                ),
            },
        ),
        **fields,
    )


def test_load_a_mixture_and_hold_out_by_weight(tmp_path: Path) -> None:
    data = mixture_of(tmp_path, heldout_size=8)
    split = load_prompts(data, character_tokenizer())
    assert Counter(p.source for p in split.heldout) == {"letters": 6, "digits": 2}
    assert Counter(p.source for p in split.train) == {"letters": 24, "digits": 8}
    assert not {p.text for p in split.heldout} & {p.text for p in split.train}
    assert all(p.text.startswith("#") == (p.source == "digits") for p in split.train)
    # the first held-out prompts have both, for evaluation.num_prompts
    assert Counter(p.source for p in split.heldout[:4]) == {"letters": 3, "digits": 1}
    assert "(training: letters 24, digits 8)" in split.report.describe()
    again = load_prompts(data, character_tokenizer())
    assert [p.text for p in again.heldout] == [p.text for p in split.heldout]
    data.heldout_size = 40
    with pytest.raises(
        UserError, match=r"heldout_size is 40, 30 of data\.train\.sources\.letters, but .* has 30"
    ):
        load_prompts(data, character_tokenizer())


def test_held_out_mixture_and_errors_name_the_source(tmp_path: Path) -> None:
    heldout = {
        "letters": make(MixtureSource, path=jsonl(tmp_path, "vowels", 2)),
        "signs": make(MixtureSource, path=jsonl(tmp_path, "signs", 3)),
    }
    fields: dict[str, Any] = {"heldout": make(SourceConfig, kind="mixture", sources=heldout)}
    split = load_prompts(mixture_of(tmp_path, **fields), character_tokenizer())
    assert Counter(p.source for p in split.heldout) == {"letters": 2, "signs": 3}
    data = mixture_of(tmp_path, **fields)
    data.train.sources["digits"].path = str(tmp_path / "digit.jsonl")  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"^data\.train\.sources\.digits\.path: there is no .*did you mean"
    ):
        load_prompts(data, character_tokenizer())
    data.train.sources["digits"].path = str(tmp_path / "bad.jsonl")  # type: ignore[attr-defined]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x", "solution": "1"}\n')
    with pytest.raises(
        UserError, match=r"bad\.jsonl:1: .*\(data\.train\.sources\.digits\.answer_column\)"
    ):
        load_prompts(data, character_tokenizer())


def curriculum(kind: str, task: str, *stages: CurriculumStage, **fields: Any) -> DataConfig:
    return DataConfig(
        train=make(
            SourceConfig,
            kind=kind,
            task=task,
            num_examples=20,
            curriculum=list(stages),
            **fields,
        ),
        heldout=make(
            SourceConfig, kind="procedural", task="state_tracking", num_examples=5, seed=9
        ),
    )


def test_stages_of_a_procedural_task() -> None:
    data = curriculum(
        "procedural",
        "state_tracking",
        CurriculumStage(0, options={"max_steps": 2}),
        CurriculumStage(4, options={"min_steps": 6, "max_steps": 6}),
        options={"num_positions": 3, "min_steps": 2},
    )
    easy, hard = load_prompts(data, character_tokenizer()).training.sources[0].stages
    assert {len(p.text) for p in easy.prompts} == {2 + 2 * 3}  # a start, two swaps, =
    assert {len(p.text) for p in hard.prompts} == {2 + 6 * 3}
    assert hard.from_iteration == 4
    assert {p.answer for p in [*easy.prompts, *hard.prompts]} == {"1", "2", "3"}
    data.train.curriculum[1].options = {"min_step": 6}  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"^data\.train\.curriculum, stage 1: .*did you mean 'min_steps'"
    ):
        load_prompts(data, character_tokenizer())


def test_stages_by_the_levels_of_reasoning_gym() -> None:
    data = curriculum(
        "reasoning_gym",
        "chain_sum",
        CurriculumStage(0, level=0),
        CurriculumStage(5, level=2, options={"max_digits": 1, "min_terms": 4}),
        options={"allow_negation": False},
    )
    easy, hard = load_prompts(data, character_tokenizer()).training.sources[0].stages

    def terms(stage: StagePrompts) -> set[int]:
        entries = [prompt.metadata["entry"]["metadata"] for prompt in stage.prompts]
        return {entry["num_terms"] for entry in entries}

    assert terms(easy) == {2}
    assert terms(hard) == {4}  # the level says 2 to 4, the stage's own options 4 at least
    data.train.curriculum[1].level = 99  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"curriculum: chain_sum has levels 0 to 10, not 99"):
        load_prompts(data, character_tokenizer())
    data.train.curriculum[1].level, data.train.curriculum[1].options = 1, {"max_term": 4}  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"chain_sum, level 1: TypeError: .*max_term"):
        load_prompts(data, character_tokenizer())
