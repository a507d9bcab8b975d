"""Token sequences of one rollout in a radix tree: every token once, the longest recorded prefix in one walk."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

WIDTH = array("i").itemsize
"""Sequences are bytes of native int32; all lengths here count tokens."""


class Node:
    """The end of an edge. `owner` is the call that brought the edge, `end` the earliest one that ends here."""

    __slots__ = ("children", "edge", "end", "length", "owner", "parent")

    def __init__(self, parent: Node | None, edge: bytes, owner: Any) -> None:
        self.parent = parent
        self.edge = edge
        self.length: int = (parent.length if parent else 0) + len(edge) // WIDTH
        self.children: dict[bytes, Node] = {}
        self.owner = owner
        self.end: Any = None


class Match:
    """How far a sequence is known. `owner`'s sequence shares its first `length` tokens; `end` is the earliest call
    whose whole sequence is the longest such prefix."""

    __slots__ = ("end", "inside", "length", "node", "owner")

    def __init__(self, node: Node, length: int, inside: Node | None, end: Any) -> None:
        self.node = node
        self.length = length
        self.inside = inside  # the child whose edge was followed in part
        self.owner = (inside or node).owner
        self.end = end


class TokenTree:
    def __init__(self) -> None:
        self.root = Node(None, b"", None)

    def match(self, data: bytes, start: Node | None = None, end: Any = None) -> Match:
        """Walk `data`, of which the sequence up to `start` is known to agree; `end` is the best end up to there."""
        node = start or self.root
        at, size = node.length * WIDTH, len(data)
        end = node.end if node.end is not None else end
        while at < size:
            child = node.children.get(data[at : at + WIDTH])
            if child is None:
                break
            edge = child.edge
            if not data.startswith(edge, at):
                return Match(node, (at + _common(edge, data[at : at + len(edge)])) // WIDTH, child, end)
            node = child
            at += len(edge)
            if node.end is not None:
                end = node.end
        return Match(node, at // WIDTH, None, end)

    def insert(self, data: bytes, owner: Any, start: Node | None = None) -> Node:
        """Add a sequence; returns the node where it ends."""
        found = self.match(data, start)
        node = found.node if found.inside is None else self._split(found.node, found.inside, found.length)
        at = found.length * WIDTH
        if at == len(data):
            return node
        child = Node(node, data[at:], owner)
        node.children[child.edge[:WIDTH]] = child
        return child

    @staticmethod
    def sequence(node: Node) -> bytes:
        """The tokens from the root to `node`."""
        return b"".join(reversed([one.edge for one in _upwards(node)]))

    @staticmethod
    def _split(parent: Node, child: Node, length: int) -> Node:
        cut = (length - parent.length) * WIDTH
        middle = Node(parent, child.edge[:cut], child.owner)
        parent.children[middle.edge[:WIDTH]] = middle
        child.edge = child.edge[cut:]
        child.parent = middle
        middle.children[child.edge[:WIDTH]] = child
        return middle


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _common(one: bytes, other: bytes) -> int:
    """Bytes of whole tokens that two sequences have in common."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low * WIDTH : middle * WIDTH], low * WIDTH):
            low = middle
        else:
            high = middle - 1
    return low * WIDTH
