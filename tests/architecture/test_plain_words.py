"""Names and sentences of the package say what they mean: no participle for a name, no riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "vapo"

PARTICIPLES = """
asked begun bought brought chosen done drawn ended found given gone held kept known left lost made
named needed paid read said seen sent shown spent taken taught told tried used wanted written
"""
PRONOUNS = "before began its mine most one others ours own theirs what which whose"
NOT_NAMES = frozenset((PARTICIPLES + PRONOUNS).split())
# A participle that is a term: the name that must stand in the same file, which shows the meaning.
TERMS = {"left": "right"}  # the sides of an expression
# Names that cannot change, by the file that defines them.
FIXED_NAMES = {
    "advantages/contract.py": {"kept"},  # a field that users' estimators set (docs/extending.md)
    "diagnostics/value_truth/mistakes.py": {"found"},  # a key of files on disk
}

DETERMINERS = """
the a an each every all both one two three four five six seven eight nine ten twelve several many
half no some any whether how what which why who whatever everything nothing nobody
"""
IMPERATIVES = """
accumulate add allow answer append apply ask assign average become begin bind bound bring broadcast
build call cancel cap cast center change check choose clear clip close collate collect compare
complete compose compute concatenate connect consume continue convert copy count create cut deal
decide decode defer delete deliver describe determine display divide do draw drop emit encode end
enter escape estimate evaluate evict exchange exclude expect explain export express extend fetch
fill find finish fit flag flatten flush follow forbid force forget fork format free freeze gather
generate give go group guess hand handle hash have hide hold ignore import index initialize insert
inspect install interpolate invert join judge keep kill know label lead leave let limit link list
load locate lock log look lose make map mark mask match mean measure merge migrate mix move multiply
name normalize note notify observe offer open order overlap overwrite pack pad parse part pass pause
pick ping place plan play point poll post predict prefill prepare press print project propose
provide prune publish pull put queue quote raise rank reach read reap rebuild recompute record
redact redirect reduce refer refuse register reject release reload remember remind remove rename
render renumber repeat replace report request require reserve reset resolve restore restrict resume
retry return reverse rewrite rotate round run sample save say scale scan schedule score seal search
see seed select send separate serialize serve set shard share shift show shuffle shut silence
simulate skip sleep smooth solve sort spawn specify split spread squash start state step stop store
strip submit subtract suggest sum suppress suspend swap switch sync synchronize take tell test tie
tokenize total trace track train transform translate treat trim truncate try turn undo unpack unwrap
update upload use validate value verify visit wait wake walk warm warn watch weigh weight whiten
withdraw work wrap write yield
"""
AUXILIARIES = """
am is are was were be been has have had do does did can could may might must will would shall should
need comes goes stands lies says hears means needs ends gets costs
"""
BARE_VERBS = frozenset(IMPERATIVES.split())
FINITE_VERBS = {*AUXILIARIES.split(), *(verb + "s" for verb in BARE_VERBS)}
FINITE_VERBS |= {verb + "es" for verb in BARE_VERBS if verb.endswith(("s", "sh", "ch", "x", "o"))}
FINITE_VERBS |= {verb[:-1] + "ies" for verb in BARE_VERBS if verb.endswith("y")}
NOUN_PHRASE_STARTS = frozenset(DETERMINERS.split())
SUBORDINATORS = frozenset(("as", "is", "unless", "this", "was", "has", "does"))

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
DROPPED_SUBJECT = re.compile(
    r"(?:It|Its|They|Their|Theirs|Them|Itself|Those|None|Same|And|Or|But|Else)\b"
)
SUBCLAUSE = re.compile(
    r"\b(?:that|which|who|whose|where|when|as|if|unless|while|until|because|like)\b[^,;:.]*",
    re.IGNORECASE,
)
RIDDLES = re.compile(
    r"(?<!\b[Tt]here )\b(?:is|are) (?:no|none)\b(?! (?:more|less|\w+er than|longer)\b)"
    r"|\b[Ss]o (?:many|much)\b"
    r"|\b(?i:thread|rank|process|worker|engine|server)(?:s|es)?,? who\b"
)
RULES = ("name", "of", "sentence", "riddle")


class Breach(NamedTuple):
    """One place that breaks a rule."""

    rule: str
    line: int
    text: str


def has_no_subject(sentence: str) -> bool:
    """Whether a sentence begins with a pronoun for something that only the writer sees."""
    return bool(DROPPED_SUBJECT.match(sentence))


def has_no_verb(sentence: str) -> bool:
    """Whether a sentence has no verb and is no noun phrase, as far as its words tell."""
    plain = re.sub(r"`[^`]*`", "X", sentence)
    first = (re.findall(r"[\w'-]+", plain) or [""])[0].lower()
    is_plural = first.endswith("s") and first not in SUBORDINATORS
    is_noun_phrase = first in NOUN_PHRASE_STARTS or is_plural or first.isdigit()
    if is_noun_phrase or first in BARE_VERBS or " = " in plain:
        return False
    if BARE_VERBS & set(re.findall(r"[,:] ([a-z]+)", plain)):  # "In the child, read the file."
        return False
    main_clause = SUBCLAUSE.sub("", plain).lower()
    return not FINITE_VERBS & set(re.findall(r"[a-z]+", main_clause))


def first_sentence(docstring: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\d])", " ".join(docstring.split()))[0]


def breaches_of_text(text: str, line: int, owner: type | None) -> Iterator[Breach]:
    """The breaches in a docstring, or in a comment, which has no owner.

    A module or a class is a thing, which a noun may name alone; a function's docstring needs more.
    """
    sentence = first_sentence(text)
    if text.startswith("Of "):
        yield Breach("of", line, text)
    elif owner and (has_no_subject(sentence) or (owner in FUNCTIONS and has_no_verb(sentence))):
        yield Breach("sentence", line, text)
    for _ in RIDDLES.finditer(" ".join(text.split())):
        yield Breach("riddle", line, text)


def comments(source: str) -> Iterator[tuple[str, int]]:
    """Each comment of a file and its line; lines of comment below each other are one comment."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        stripped = line.strip()
        if stripped.startswith("# "):
            block.append(stripped[2:])
            continue
        if block:
            yield " ".join(block), number - len(block)
            block = []
        if "  # " in line:
            code, _, comment = line.rpartition("  # ")
            if code.count('"') % 2 == 0:  # no part of a text
                yield comment, number


def name_that_is_bound(node: ast.AST) -> str:
    """The name that a node gives to a variable, an argument or an attribute; "" for others."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else ""
    if isinstance(node, ast.Attribute):
        return node.attr if isinstance(node.ctx, ast.Store) else ""
    if isinstance(node, ast.arg):
        return node.arg
    return (node.name or "") if isinstance(node, ast.ExceptHandler) else ""


def breaches(source: str) -> list[Breach]:
    """All breaches in a file, which is parsed and walked once."""
    result = [b for text, line in comments(source) for b in breaches_of_text(text, line, None)]
    bound: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(source)):
        if name := name_that_is_bound(node):
            bound.append((name, getattr(node, "lineno", 1)))
        elif isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            result += breaches_of_text(docstring, getattr(node, "lineno", 1), type(node))
    names = {name for name, _ in bound}
    not_names = {word for word in NOT_NAMES if TERMS.get(word) not in names}
    wrong = [(name, line) for name, line in bound if name.strip("_") in not_names]
    return result + [Breach("name", line, name) for name, line in wrong]


@cache
def breaches_in_package() -> dict[str, list[str]]:
    """For each rule, the places of the package that break it."""
    places: dict[str, list[str]] = {rule: [] for rule in RULES}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        for rule, line, text in breaches(path.read_text(encoding="utf-8")):
            if rule != "name" or text not in FIXED_NAMES.get(relative, ()):
                places[rule].append(f"vapo/{relative}:{line}: {text.splitlines()[0]}")
    return places


@pytest.mark.parametrize("rule", RULES)
def test_the_package_speaks_plainly(rule: str) -> None:
    places = breaches_in_package()[rule]
    assert not places, "\n".join(places)


def rules_broken(source: str) -> set[str]:
    return {breach.rule for breach in breaches(source)}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "self._kept = rows",
        "for one in rows: pass",
        "rows = [own for own in rows]",
        "key = lambda given: given.size",
        "def f(what): pass",
        "with open(path) as read: pass",
        "if (said := print_lines()): pass",
        "left, = rows",
    ],
)
def test_a_participle_or_pronoun_is_no_name(source: str) -> None:
    assert rules_broken(source) == {"name"}


@pytest.mark.parametrize(
    "source",
    [
        "matching_rows = found(rows)",
        "row = rows[0].kept",
        "left, right = sides",
        "finished_rows = [row for row in rows if row.is_kept]",
    ],
)
def test_a_name_says_what_the_variable_holds(source: str) -> None:
    assert not rules_broken(source)


def rules_of_docstring(text: str) -> set[str]:
    return rules_broken(f'def f():\n    """{text}"""\n')


@pytest.mark.parametrize(
    ("docstring", "rule"),
    [
        ("Of the rows: their sums.", "of"),
        ("It has its default again.", "sentence"),
        ("None, or more than the run's: the run's.", "sentence"),
        ("Those of the keys that nothing reads.", "sentence"),
        ("`old_values`, of a system that has a critic.", "sentence"),
        ("Around each step of a stream.", "sentence"),
        ("Where the pattern's matches end.", "sentence"),
        ("As YAML has it; the end of a long text, which is where paths differ.", "sentence"),
        ("The text is no number.", "riddle"),
        ("The first so many layers.", "riddle"),
        ("The thread who waits.", "riddle"),
    ],
)
def test_a_riddle_is_no_docstring(docstring: str, rule: str) -> None:
    assert rules_of_docstring(docstring) == {rule}


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the rows that match.",
        "Whether a key has its default.",
        "The key's default. None if it has no default.",
        "The token rewards [B, T] of the value targets.\n\n    Raises: UserError.",
        "Each layer's last state.",
        "Before the first push, every server loads the weights.",
        "The rank which waits; there is no file then, and it is no longer needed.",
        "A reference of each row.",
    ],
)
def test_a_plain_docstring_breaks_no_rule(docstring: str) -> None:
    assert not rules_of_docstring(docstring)


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("# Of the first row", {"of"}),
        ("x = 1  # Of the first row", {"of"}),
        ("# the first row\n# Of two, and the run is no process", {"riddle"}),
        ("x = 'a'  # the first row of all", set()),
        ('x = "#  # Of a text"', set()),
    ],
)
def test_comments_are_read_as_docstrings_are(line: str, rules: set[str]) -> None:
    assert rules_broken(line) == rules
