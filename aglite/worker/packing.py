"""Rows of a micro-batch laid out in one sequence, a prefix that several share computed once. Pure Python.

The rollouts of a group begin with the same prompt, and every conversation with the same system prompt. In a causal
model the hidden state of a token depends only on the tokens before it, so equal prefixes have equal hidden states and
need one forward and backward pass between them: the gradient of the shared part is the sum over the rows that go
through it, exactly what separate rows would have added up. A micro-batch is therefore a forest of token nodes, laid out
depth first in one sequence; a node may attend to its ancestors and to itself. That takes a mask of its own, which not
every way to compute attention knows: `row_by_row` lays the same rows out one after the other, nothing shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aglite.arrays import common_prefix


@dataclass(slots=True)
class Forest:
    """`ids` and `positions` of all nodes, depth first; `paths[r][t]` is the node of token t of row r.

    `spans` says for each row which nodes are its own, (first node, one past the last, tokens shared before them): node
    `first + k` attends to `paths[r][: shared + k + 1]`.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)


def build_forest(rows: Sequence[Sequence[int]]) -> Forest:
    """Merge the common prefixes of `rows` (token ids; any order, repetitions allowed)."""
    forest = Forest(paths=[[] for _ in rows], spans=[(0, 0, 0)] * len(rows))
    previous: Sequence[int] = []
    path: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: tuple(rows[i])):
        row = rows[index]
        shared = common_prefix(previous, row)
        first = len(forest.ids)
        forest.ids += row[shared:]
        forest.positions += range(shared, len(row))
        end = len(forest.ids)
        path = path[:shared] + list(range(first, end))
        forest.paths[index] = path
        forest.spans[index] = (first, end, shared)
        previous = row
    return forest


def row_by_row(rows: Sequence[Sequence[int]]) -> Forest:
    """The rows one after the other; a row's positions begin at 0, which is what tells where it begins."""
    forest = Forest()
    for row in rows:
        first = len(forest.ids)
        forest.ids += row
        forest.positions += range(len(row))
        forest.paths.append(list(range(first, len(forest.ids))))
        forest.spans.append((first, len(forest.ids), 0))
    return forest


def plan_rows(rows: Sequence[Sequence[int]], budget: int, shared: bool = True) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` nodes each, rows with common prefixes side by side.

    Returns the row numbers of each micro-batch. The micro-batches are about equally large. A row longer than the
    budget gets one of its own: the supervisor has refused rows that must not be. `shared`: whether a common prefix
    counts once.
    """
    order = sorted(range(len(rows)), key=lambda i: tuple(rows[i]))
    added = _own_nodes(rows, order) if shared else [(index, len(rows[index])) for index in order]
    total = sum(own for _, own in added)
    target = total / max(1, -(-total // budget))
    batches: list[list[int]] = []
    size = 0
    for index, own in added:
        whole = len(rows[index])
        if not batches or size + own > budget or (size >= target and own > whole // 2):
            batches.append([])
            size, own = 0, whole
        batches[-1].append(index)
        size += own
    return batches


def _own_nodes(rows: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[int, int]]:
    """(row, nodes it adds to the row before it) in `order`."""
    pairs: list[tuple[int, int]] = []
    previous: Sequence[int] = []
    for index in order:
        pairs.append((index, len(rows[index]) - common_prefix(previous, rows[index])))
        previous = rows[index]
    return pairs
