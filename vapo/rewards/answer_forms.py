"""The parsed form of an answer, and the parsing of forms with several parts: inequalities and
points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vapo.rewards.answer_expressions import parse_expression
from vapo.rewards.answer_text import Node, NotUnderstoodError, number, symbols_of
from vapo.rewards.answer_words import Unit

FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}


@dataclass(frozen=True)
class Form:
    """The parsed form of an answer, such as a value, a list or an interval.

    Attributes:
        kind: value, words, infinity, list, set, bracket, union, matrix, row, ratio, based,
            equation, relation, choice or unknown.
        items: the parts of a form that has parts.
        node: a value's expression, or the left side of a relation minus its right side.
        mark: what tells forms of a kind apart: the words, the brackets, the relation, the sign, the
            number in a base or the choice's letter.
        label: the name of the value: x in `x = 5`.
        spelling: the cleaned text of a whole answer.
    """

    kind: str
    items: tuple[Form, ...] = ()
    node: Node | None = None
    mark: str = ""
    label: str = ""
    unit: Unit | None = None
    spelling: str = ""

    @property
    def expression(self) -> Node:
        """The form's `node`, which values and relations have."""
        assert self.node is not None
        return self.node


def difference(first: Node, second: Node) -> Node:
    return Node("add", (first, Node("multiply", (number(-1), second))))


def inequality(parts: Sequence[str], relations: Sequence[str]) -> Form:
    """Return the form of relations: an interval for `x < 3` or `1 < x < 3`, else a relation.

    Raises: NotUnderstoodError: it is a chain of several relations that is not an interval.
    """
    nodes, names = [parse_expression(part) for part in parts], list(relations)
    relation = Form("relation", node=difference(*nodes[:2]), mark=names[0])
    if set(names) <= {">", r"\ge"}:
        nodes, names = nodes[::-1], [FLIPPED[name] for name in reversed(names)]
    if len(nodes) <= 3 and set(names) <= {"<", r"\le"}:
        for place in range(len(nodes) - 2, 2):  # where the symbol is: in the middle of three
            if nodes[place].kind != "symbol" or any(
                map(symbols_of, nodes[:place] + nodes[place + 1 :])
            ):
                continue
            ends, brackets = [Form("infinity", mark="-"), Form("infinity")], ["(", ")"]
            if place > 0:
                ends[0] = Form("value", node=nodes[place - 1])
                brackets[0] = "(" if names[place - 1] == "<" else "["
            if place < len(names):
                ends[1] = Form("value", node=nodes[place + 1])
                brackets[1] = ")" if names[place] == "<" else "]"
            label = str(nodes[place].value)
            return Form("bracket", tuple(ends), mark="".join(brackets), label=label)
    if len(nodes) == 2:
        return relation
    raise NotUnderstoodError("a chain of relations")


def union_of(items: Sequence[Form]) -> Form | None:
    """Return the union of intervals of one symbol, as in `x < 1 or x > 3`; None for others."""
    label = items[0].label
    if not label or any(item.kind != "bracket" or item.label != label for item in items):
        return None
    return Form("union", tuple(items), label=label)


def have_an_order(names: Sequence[str]) -> bool:
    r"""Whether the names have a usual order and are in it, as x, y; a, b, c; r, \theta.

    Other names, such as m and b, have no usual order.
    """
    if list(names) == ["r", r"\theta"]:
        return True
    letters = [ord(name) for name in names if len(name) == 1]
    return letters == list(range(letters[0], letters[0] + len(names))) if letters else False


def point_of(items: Sequence[Form]) -> Form | None:
    """Return the point (3, 4) for the items `x = 3` and `y = 4`, in any order; None for others."""
    if len(items) < 2 or any(item.kind != "equation" or not item.items for item in items):
        return None
    ordered = sorted(items, key=lambda item: item.label)
    names = [item.label for item in ordered]
    if not have_an_order(names):
        return None
    values = tuple(item.items[0] for item in ordered)
    return Form("bracket", values, mark="()", label=",".join(names))


def named_point(names: Sequence[str], point: Form) -> Form:
    """Return the point with its coordinates' names, as in `(x, y) = (3, 4)`.

    Raises: NotUnderstoodError: the other side is not a point with as many coordinates as names, or
        the names have no usual order.
    """
    if point.mark != "()" or len(point.items) != len(names) or not have_an_order(names):
        raise NotUnderstoodError("names of something else than a point's coordinates")
    return replace(point, label=",".join(names))
