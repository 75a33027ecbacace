"""Finds the variables that a template takes from outside: it reads them without setting them."""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import meta, nodes

_OF_MACROS = ("caller", "varargs", "kwargs")


def names_from_outside(template: nodes.Template) -> set[str]:
    """Return the names that a template reads in places where it may not have set them.

    jinja's own function knows the scopes. But it also returns names that are set and read inside
    one branch of an `if`, as `reasoning` in `{% if a %}{% set reasoning = a %}{{ reasoning }}`. So
    a name is returned only if one of the places that read it comes before it is set.
    """
    reads: set[str] = set()
    _read_all(template.body, set(), reads)
    return reads & meta.find_undeclared_variables(template)


def _read_all(all_nodes: Iterable[nodes.Node], defined: set[str], reads: set[str]) -> None:
    for node in all_nodes:
        _read(node, defined, reads)


def _read(node: nodes.Node, defined: set[str], reads: set[str]) -> None:
    """Add the names that the node reads undefined to `reads`, and those that it certainly sets to
    `defined`."""
    if isinstance(node, nodes.Name):
        if node.ctx == "load" and node.name not in defined:
            reads.add(node.name)
        elif node.ctx != "load":
            defined.add(node.name)
    elif isinstance(node, nodes.Assign):
        _read_all((node.node, node.target), defined, reads)  # the value first
    elif isinstance(node, nodes.If):
        _read(node.test, defined, reads)
        branches = [
            node.body,
            *([elif_node.test, *elif_node.body] for elif_node in node.elif_),
            node.else_,
        ]
        names_after_branches = []
        for branch in branches:  # without an else there is an empty one
            names_after_branches.append(set(defined))
            _read_all(branch, names_after_branches[-1], reads)
        defined |= set.intersection(*names_after_branches)
    elif isinstance(node, nodes.For):
        _read(node.iter, defined, reads)
        inside = {*defined, "loop"}
        _read_all((node.target, *filter(None, [node.test]), *node.body), inside, reads)
        _read_all(node.else_, set(defined), reads)
    elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
        if isinstance(node, nodes.CallBlock):
            _read(node.call, defined, reads)
        else:
            defined.add(node.name)
        _read_all(node.defaults, defined, reads)
        _read_all((*node.args, *node.body), {*defined, *_OF_MACROS}, reads)
    elif isinstance(node, nodes.With):
        _read_all(node.values, defined, reads)
        _read_all((*node.targets, *node.body), set(defined), reads)
    elif isinstance(node, nodes.AssignBlock):
        _read_all((*filter(None, [node.filter]), *node.body), set(defined), reads)
        _read(node.target, defined, reads)
    elif isinstance(node, (nodes.FilterBlock, nodes.Block, nodes.Scope)):
        _read_all(node.iter_child_nodes(), set(defined), reads)
    else:
        _read_all(node.iter_child_nodes(), defined, reads)
