"""The section `notify` of a recipe: who is told when a run that nobody watches ends or needs a person."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from aglite.config.sections import Seconds, Section

Occasion = Literal["done", "failed", "stalled", "paused", "stopped"]


class Notify(Section):
    on: list[Occasion] = ["done", "failed", "stalled", "paused"]
    """`done`: all steps are; `failed`: the run ended with an error; `stalled`: nothing has moved for `stalled_after_s`;
    `paused`: it waits until somebody mends what it names (room on the disk, a Docker Engine that is away, ...);
    `stopped`: somebody ended it."""
    command: list[str] = []
    """A program and its arguments, started in the recipe folder with the message as JSON on its standard input."""
    url: str = ""
    """Address that the message is sent to, as JSON by POST."""
    url_env: str = ""
    """Environment variable that holds the address, where that is a secret: recipes are copied into run directories."""
    stalled_after_s: Seconds = 1800
    """How long no token is sampled, no rollout changes its state and no update moves before a run counts as stalled."""

    @model_validator(mode="after")
    def _reachable(self) -> Notify:
        if self.url and self.url_env:
            raise ValueError("give `url` or `url_env`, not both")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise ValueError("url: write it like https://host/path")
        if not (self.command or self.url or self.url_env):
            raise ValueError("it reaches nobody; add `command`, `url` or `url_env`")
        return self
