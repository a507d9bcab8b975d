"""What a preset is: from what a program has to be told to its files, its environment and its command. Pure: no I/O.

A preset knows nothing of the place where the program runs. Its files are placed relative to the home folder that the
backend gives the agent, the first word of its command is a bare name, and paths in its values start at `$HOME` only
where the program itself expands that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Order:
    """One launch, as a preset is told of it."""

    prompt: str
    """What the program is to do."""
    url: str
    """The rollout's own prefix, without `/v1`."""
    token: str
    model: str
    context_length: int
    """Tokens of prompt and response together; programs compact their history before it is full."""
    max_hold_s: float
    """How long the gateway may hold a request before it answers: the program must be more patient."""
    args: Sequence[str] = ()
    """Further arguments, from the recipe."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What the program gets."""

    command: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of each file, by its place relative to the agent's home folder."""
    stdin: str = ""
    """What it reads from its standard input."""


@dataclass(frozen=True, slots=True)
class Harness:
    """An agent program that a recipe can name."""

    name: str
    program: str
    """Its executable."""
    package: str
    """Its name on PyPI or npm."""
    version: str
    """The version the preset was tested with."""
    installer: Literal["pip", "npm"]
    dialect: str
    """Which of the gateway's routes it talks to: chat, responses or anthropic."""
    kit: Callable[[Order], Kit]

    @property
    def install(self) -> str:
        """The command that installs this version."""
        if self.installer == "pip":
            return f"pip install {self.package}=={self.version}"
        return f"npm install -g {self.package}@{self.version}"


def room_for_reply(context_length: int) -> int:
    """Tokens of the context that a program should keep free for one reply: a quarter, at most 32,000."""
    return max(1, min(32_000, context_length // 4))
