"""The rollouts that one step trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from aglite import units
from aglite.errors import AgliteError
from aglite.tui.screens.view import View
from aglite.tui.widgets.rollouts import RolloutTable


class StepRollouts(View):
    NAME: ClassVar = "steps"
    BINDINGS: ClassVar = [Binding("escape,backspace", "app.pop_screen", "back", key_display="esc")]

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def body(self) -> Iterable[Widget]:
        yield Static(Content.styled(f" the rollouts of step {self._step}", "bold"), id="step-title")
        yield RolloutTable(id="step-rollouts")

    def on_mount(self) -> None:
        self.load(lambda run: units.plain_json(run.rollouts(step=self._step)), self._tell)

    def _tell(self, rows: list[dict[str, Any]]) -> None:
        self.query_one(RolloutTable).show(rows, self.app.clock(), "this step trained none")

    def problem(self, error: AgliteError) -> None:
        self.query_one(RolloutTable).show([], 0.0, error.message)
