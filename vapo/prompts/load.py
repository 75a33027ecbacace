"""Loads prompts: reads rows of sources, tokenizes them, and splits training from held-out prompts.

`load_prompts` reads rows, applies the template, drops prompts that are too long, and keeps the two
sets disjoint. `vapo.prompts.training_set` chooses the prompts that an iteration trains on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.config.data import FileSource, GeneratedSource, PromptSource, source_name, sources_of
from vapo.config.schema import DataConfig
from vapo.errors import UserError
from vapo.networks.saved_tokenizers import start_ids, with_start
from vapo.prompts.characters import LostCharacters, lost_characters
from vapo.prompts.chat_arguments import check_template_variables
from vapo.prompts.generated_rows import stage_source
from vapo.prompts.heldout import interleaved, split_off, without
from vapo.prompts.rows import LeftOut
from vapo.prompts.sources import SourceRow, read_rows
from vapo.prompts.spelled_text import SpecialTexts, SpelledText
from vapo.prompts.training_set import StagePrompts, TrainingSet, TrainingSource
from vapo.types import Prompt
from vapo.user_code.chat_templates import TemplateRefusal, render_chat

_SYSTEM_ROLES = ("system", "developer")  # some templates call it so


@dataclass(frozen=True)
class PromptReport:
    """The numbers of prompts that were loaded and of those left out, with the reasons."""

    num_train: int
    num_heldout: int
    num_too_long: int
    num_overlapping: int
    num_without_answer: int = 0
    rows: LeftOut = field(default_factory=LeftOut)
    sources: Mapping[str, int] = field(default_factory=dict)
    num_contradicting: int = 0
    lost_characters: LostCharacters | None = None
    special: SpecialTexts | None = None

    def describe(self) -> str:
        """Return the counts in one line for the console."""
        text = f"{self.num_train} training prompts, {self.num_heldout} held out"
        if self.sources:
            parts = ", ".join(f"{name} {number}" for name, number in self.sources.items())
            text += f" (training: {parts})"
        for number, template in (
            (self.num_too_long, "; left out {} longer than data.max_prompt_tokens"),
            (self.num_overlapping, "; left out {} training prompts that are held out too"),
            (
                self.num_without_answer,
                "; {} have an empty answer, which no verifier but your own calls correct",
            ),
            (self.rows.duplicates, "; left out {} duplicates"),
            (self.rows.contradictions, " ({} of them with another answer)"),
            (self.rows.by_pass_rate, "; left out {} by their pass rate"),
            (self.num_contradicting, "; {} ask what another one answers differently"),
        ):
            text += template.format(number) if number else ""
        notes = [
            note.describe() for note in (self.lost_characters, self.special) if note is not None
        ]
        return "; ".join([text, *filter(None, notes)])


@dataclass(frozen=True)
class PromptSplit:
    """The prompts to train on and the held-out prompts to evaluate on. No text is in both."""

    training: TrainingSet
    heldout: list[Prompt]
    report: PromptReport

    @property
    def train(self) -> list[Prompt]:
        """All training prompts, of all sources and stages."""
        return self.training.prompts


@dataclass
class _Reading:
    """What `load_prompts` needs to read each source, and the counts of what was left out so far."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    spelled: SpelledText
    special: SpecialTexts
    rows: LeftOut = field(default_factory=LeftOut)
    num_too_long: int = 0


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSplit:
    """Load the training and the held-out prompts.

    Training prompts whose texts are held out are left out and counted.

    If `data.heldout` is null, `heldout_size` prompts are drawn from the training source with the
    seed `data.train.seed`, so every run on this data holds out the same ones. In a mixture they are
    drawn from each source with its own seed, in proportion to its weight.

    Raises: UserError: a source or row is unusable, a set is empty, or the tokenizer loses
        characters of every prompt; it names the key, file and row.
    """
    if data.chat_template and not tokenizer.chat_template:
        raise UserError(
            "data.chat_template is true, but the tokenizer of actor.path has no chat template: put "
            "the model's into chat_template.jinja in that folder, or set data.chat_template to "
            "false and use data.prompt_template"
        )
    check_template_variables(data.chat_template_kwargs, tokenizer)
    special = SpecialTexts(is_spelled=data.chat_template)
    chat = data.chat_template_kwargs if data.chat_template else None
    reading = _Reading(data, tokenizer, SpelledText(tokenizer, chat=chat), special)
    sources = [_read_stages(reading, *item) for item in sources_of(data, "train").items()]
    if data.heldout is None:
        sources, heldout = split_off(sources, data)
    else:
        heldout = interleaved(
            [
                _read_prompts(reading, source, key, source_name(key))
                for key, source in sources_of(data, "heldout").items()
            ]
        )
    heldout_texts = {prompt.text for prompt in heldout}
    is_split_off = data.heldout is None
    training_sources = [
        without(source, heldout_texts, is_split_off=is_split_off) for source in sources
    ]
    training = TrainingSet(tuple(training_sources))
    prompts, num_read = training.prompts, len(TrainingSet(tuple(sources)).prompts)
    first = {prompt.text: prompt.answer for prompt in reversed(prompts)}
    report = PromptReport(
        len(prompts),
        len(heldout),
        reading.num_too_long,
        num_read - len(prompts),
        sum(not p.answer.strip() for p in [*prompts, *heldout] if not p.metadata),
        reading.rows,
        {s.name: len(TrainingSet((s,)).prompts) for s in training_sources if s.name},
        num_contradicting=sum(first[prompt.text] != prompt.answer for prompt in prompts),
        lost_characters=lost_characters([*prompts, *heldout], tokenizer),
        special=special,
    )
    return PromptSplit(training, heldout, report)


def _read_stages(reading: _Reading, key: str, source: PromptSource) -> TrainingSource:
    """Return one training source, with the prompts of all its stages."""
    name, weight = source_name(key), getattr(source, "weight", 1)
    if not isinstance(source, GeneratedSource) or not source.curriculum:
        return TrainingSource(
            (StagePrompts(_read_prompts(reading, source, key, name)),), name, weight
        )
    stages = []
    for index, stage in enumerate(source.curriculum):
        stage_settings = stage_source(source, index, key=key)
        try:
            prompts = _read_prompts(reading, stage_settings, key, name)
        except UserError as error:
            raise UserError(f"{key}.curriculum, stage {index}: {error}") from None
        stages.append(StagePrompts(prompts, stage.from_iteration))
    return TrainingSource(tuple(stages), name, weight)


def _read_prompts(reading: _Reading, source: PromptSource, key: str, name: str) -> list[Prompt]:
    """Return the prompts of one source that have at most `max_prompt_tokens`; count the others.

    Raises: UserError: the source has no rows, or none of its prompts fits.
    """
    data, tokenizer = reading.data, reading.tokenizer
    rows = read_rows(source, key=key, left_out=reading.rows)
    if not rows:
        where = source.path if isinstance(source, FileSource) else source.generator
        raise UserError(f"{key}: {where} has no rows{_beyond(source, reading.rows)}")
    template = data.prompt_template if source.prompt_template is None else source.prompt_template
    spelled = reading.spelled
    marked = [_render(row, template, reading) for row in rows]
    texts = list(map(spelled.unmarked, marked))
    for row in rows:
        reading.special.look_at(row, spelled.pattern)
    # a longer text has more tokens than fit, and tokenizing it could take hours
    longest_token = max(map(len, tokenizer.get_vocab()), default=1)
    max_chars = data.max_prompt_tokens * longest_token
    none_fits = (
        f"{key}: none of {len(rows)} prompts fits data.max_prompt_tokens = "
        f"{data.max_prompt_tokens}; the shortest has"
    )
    short_rows = [r for r in zip(rows, texts, marked, strict=True) if len(r[1]) <= max_chars]
    if not short_rows:
        raise UserError(f"{none_fits} {min(map(len, texts))} characters")
    # A chat template writes its own special tokens; else the tokenizer's start token is added,
    # but never its end token, which would end the response at once.
    start = () if data.chat_template else start_ids(tokenizer)
    prompts = [
        Prompt(
            prompt_id=row.place,
            text=text,
            prompt_ids=with_start(
                spelled.rendered_ids(marked_text)
                or token_ids(text, tokenizer, row.place, "the prompt "),
                start,
            ),
            answer=row.answer,
            demonstration=row.demonstration,
            metadata=row.metadata,
            source=name,
            record=row.record,
            problem=row.problem,
        )
        for row, text, marked_text in short_rows
    ]
    fitting = [p for p in prompts if len(p.prompt_ids) <= data.max_prompt_tokens]
    if not fitting:
        raise UserError(f"{none_fits} {min(len(p.prompt_ids) for p in prompts)} tokens")
    reading.num_too_long += len(rows) - len(fitting)
    return fitting


def _beyond(source: PromptSource, left_out: LeftOut) -> str:
    if not isinstance(source, FileSource):
        return ""
    if (source.min_pass_rate, source.max_pass_rate) == (None, None):
        return ""
    return f" with a pass rate in the range of its bounds ({left_out.by_pass_rate} left out)"


def _render(row: SourceRow, template: str, reading: _Reading) -> str:
    """Return the policy's input text for a row. The `template` is for plain text, not for messages.

    In a chat template, special tokens' texts in the row are replaced by marks (`SpelledText`).
    Plain text is not marked, because it may have been rendered before with special tokens of its
    own. Messages without a system prompt get the config's.
    """
    data, spelled = reading.data, reading.spelled
    if isinstance(row.problem, str):
        problem = spelled.marked(row.problem) if data.chat_template else row.problem
        text = template.replace("{prompt}", problem)  # problems contain braces
        if not data.chat_template:
            return text
        messages: list[Any] = [{"role": "user", "content": text}]
    elif not data.chat_template:
        raise UserError(
            f"{row.place}: the prompt is a list of messages; set data.chat_template=true, which "
            "needs a tokenizer with a chat template, or write the prompts as plain text"
        )
    else:
        messages = [
            {name: spelled.marked(text) for name, text in message.items()}
            for message in row.problem
        ]
    if data.system_prompt is not None and messages[0]["role"] not in _SYSTEM_ROLES:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        return render_chat(
            reading.tokenizer,
            messages,
            add_generation_prompt=True,
            **data.chat_template_kwargs,
        )
    except TemplateRefusal as error:
        raise UserError(f"{row.place}: the tokenizer's chat template says: {error}") from None


def token_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, place: str, label: str = ""
) -> list[int]:
    """Return the token ids of a text, without adding special tokens.

    Args:
        place: where the text comes from, for errors.
        label: what the text is, with a space behind it, for errors.

    Raises: UserError: the tokenizer cannot encode the text, or makes no token of it.
    """
    try:
        # verbose: prompts above the tokenizer's own limit are counted, not warned about
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # `tokenizers` raises Exception itself
        raise UserError(
            f"{place}: the tokenizer cannot write {label}{text!r:.60}: {error}"
        ) from None
    if not ids:
        raise UserError(f"{place}: the tokenizer makes nothing of {label}{text!r:.60}")
    return ids
