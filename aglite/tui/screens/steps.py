"""Training step by step: what each did, and how the groups of the one under the cursor fared."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from textual.containers import Container
from textual.content import Content
from textual.widget import Widget

from aglite import units
from aglite.errors import AgliteError
from aglite.tui.feed import Snapshot
from aglite.tui.screens.view import View
from aglite.tui.widgets.pages import Pages, wrapped
from aglite.tui.widgets.table import Column, Row, Table

BINS = 10


def _metric(key: str) -> Any:
    return lambda row: row["metrics"].get(key)


class StepTable(Table):
    COLUMNS: ClassVar = (
        Column("step", 4, right=True, sort=lambda row: row["step"]),
        Column("policy", 6, need=60, sort=lambda row: row["version"]),
        Column("state", 11, sort=lambda row: row["state"]),
        Column("reward", 13, right=True, sort=_metric("reward_mean")),
        Column("groups", 6, right=True, need=100, sort=_metric("groups")),
        Column("flat", 4, right=True, sort=_metric("zero_advantage_groups")),
        Column("rollouts", 8, right=True, need=110, sort=_metric("rollouts")),
        Column("rows", 5, right=True, need=66, sort=_metric("samples")),
        Column("rows/rollout", 12, right=True, need=140, sort=_metric("samples_per_rollout")),
        Column("tokens", 7, right=True, sort=_metric("trained_tokens")),
        Column("stale", 10, right=True, need=90, sort=_metric("staleness_mean")),
        Column("left out", 8, right=True, need=124, sort=_metric("rollouts_stale")),
        Column("mismatch", 8, right=True, need=118, sort=_metric("logprob_gap_mean")),
        Column("KL", 8, right=True, need=100, sort=_metric("kl_rollout")),
        Column("entropy", 7, right=True, need=130, sort=_metric("entropy")),
        Column("grad", 6, right=True, need=76, sort=_metric("grad_norm")),
        Column("took", 6, right=True, need=54, sort=lambda row: row["finished_at"] - row["started_at"]),
    )
    WHAT: ClassVar = "steps"

    async def open(self, row: Row) -> None:
        await self.app.show_step(row["step"])

    def cells(self, row: Row) -> dict[str, str]:
        metrics = row["metrics"]
        return {
            "step": str(row["step"]),
            "policy": f"v{row['version']}",
            "state": row["state"].replace("_", " "),
            "reward": f"{units.reward(metrics.get('reward_mean'))} ± {units.reward(metrics.get('reward_std'))}",
            "groups": _whole(metrics.get("groups")),
            "flat": _whole(metrics.get("zero_advantage_groups")),
            "rollouts": _whole(metrics.get("rollouts")),
            "rows": _whole(metrics.get("samples")),
            "rows/rollout": _number(metrics.get("samples_per_rollout"), ".2f"),
            "tokens": units.count(metrics.get("trained_tokens")),
            "stale": f"{_number(metrics.get('staleness_mean'), '.1f')} p95 {_whole(metrics.get('staleness_p95'))}",
            "left out": _whole(metrics.get("rollouts_stale")),
            "mismatch": units.scientific(metrics.get("logprob_gap_mean")),
            "KL": units.scientific(metrics.get("kl_rollout")),
            "entropy": _number(metrics.get("entropy"), ".2f"),
            "grad": _number(metrics.get("grad_norm"), ".3g"),
            "took": units.clock(row["finished_at"] - row["started_at"]),
        }

    def look(self, row: Row) -> dict[str, str]:
        if row["state"] == "rolled_back":
            return dict.fromkeys((column.name for column in self.COLUMNS), "faint")
        metrics = row["metrics"]
        style = {"policy": "faint", "took": "faint", "reward": "bold"}
        style["state"] = "success" if row["state"] == "applied" else "warning"
        if metrics.get("zero_advantage_groups"):
            style["flat"] = "accent" if metrics["zero_advantage_groups"] < metrics.get("groups", 0) else "error"
        if (metrics.get("logprob_gap_mean") or 0) > 1e-3:
            style["mismatch"] = "error"
        if metrics.get("rollouts_stale"):
            style["left out"] = "warning"
        return style


class StepsScreen(View):
    NAME: ClassVar = "steps"

    def body(self) -> Iterable[Widget]:
        yield StepTable(id="steps")
        with Container(id="step"):
            groups = Pages(id="groups")
            groups.border_title = "groups by mean reward"
            yield groups
            facts = Pages(id="step-facts")
            facts.border_title = "step"
            yield facts

    def on_mount(self) -> None:
        self._seen: Any = None

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        status = snapshot.status
        seen = (snapshot.link, status and (status["step"], status["policy_version"]))
        if snapshot.link != "connecting" and seen != self._seen:
            self._seen = seen
            self.load(lambda run: run.steps(), self._tell)

    def _tell(self, steps: list[Row]) -> None:
        self.query_one(StepTable).show(steps[::-1], self.app.clock(), "no step is trained yet")

    def problem(self, error: AgliteError) -> None:
        if not self.query_one(StepTable).all:
            self.query_one(StepTable).show([], 0.0, error.message)

    def on_table_moved(self, message: StepTable.Moved) -> None:
        row = message.row
        self.query_one("#step-facts", Pages).read(lambda width: facts(row, width) if row else [])
        if row is None:
            self.query_one("#groups", Pages).read(wrapped([]))
            return
        step = row["step"]
        self.load(lambda run: run.rollouts(step=step), self._tell_groups, group="groups")

    def _tell_groups(self, rollouts: list[Row]) -> None:
        means = group_means(rollouts)
        self.query_one("#groups", Pages).read(lambda width: histogram(means, width))


def group_means(rollouts: Sequence[Row]) -> list[tuple[float, bool]]:
    """Of each group its mean reward, and whether all of its rewards are equal, so that it teaches nothing."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rollouts:
        if row["reward"] is not None:
            groups[row["group"] or row["id"]].append(row["reward"])
    return [(statistics.fmean(rewards), len(set(rewards)) < 2) for rewards in groups.values()]


def histogram(means: Sequence[tuple[float, bool]], width: int) -> list[Content]:
    """How many groups lie in each tenth of the range of their means, 0 to 1 for rewards that lie in it."""
    if not means:
        return [Content.styled(" no graded group", "$faint")]
    low, high = min(0.0, *(mean for mean, _ in means)), max(1.0, *(mean for mean, _ in means))
    size = (high - low) / BINS
    bins: list[list[bool]] = [[] for _ in range(BINS)]
    for mean, flat in means:
        bins[min(int((mean - low) / size), BINS - 1)].append(flat)
    most = max(map(len, bins))
    room = max(width - 18, 4)
    lines = []
    for index, members in enumerate(bins):
        flat = sum(members)
        full = round((len(members) - flat) / most * room) if most > room else len(members) - flat
        empty = round(flat / most * room) if most > room else flat
        lines.append(
            Content.assemble(
                (f" {low + index * size:.1f}–{low + (index + 1) * size:.1f} ", "$faint"),
                (f"{len(members) or '':>4} ", "bold"),
                ("█" * full, "$primary"),
                ("▒" * empty, "$accent"),
            ).truncate(width)
        )
    flat = sum(each for _, each in means)
    lines.append(
        Content.assemble(
            (" █", "$primary"),
            (f" {len(means) - flat} teach  ", "$faint"),
            ("▒", "$accent"),
            (f" {flat} flat: all rewards equal", "$faint"),
        ).truncate(width, ellipsis=True)
    )
    return lines


def facts(row: Row, width: int) -> list[Content]:
    """Every metric of a step, in words where there are some."""
    metrics = dict(row["metrics"])
    forks = metrics.pop("forks", None) or {}
    causes = metrics.pop("causes", None) or {}
    parts = [
        Content.assemble(
            (f"step {row['step']}", "bold"), f" made policy v{row['version']}, ", row["state"].replace("_", " ")
        ),
    ]
    if metrics.get("groups") and metrics.get("zero_advantage_groups") == metrics["groups"]:
        parts.append(Content.styled("in every group all rewards are equal: nothing could be learned", "$warning"))
    parts.append(
        Content.assemble(
            ("dropped: ", "$faint"),
            f"{_whole(metrics.get('groups_dropped'))} groups so far, ",
            f"{_whole(metrics.get('rollouts_lost'))} rollouts lost, {_whole(metrics.get('rollouts_stale'))} too stale, "
            f"{_whole(metrics.get('rollouts_without_tokens'))} without tokens",
        )
    )
    if forks:
        counted = ", ".join(f"{number} {name}".replace("_", " ") for name, number in forks.items() if number)
        parts.append(Content.assemble(("calls: ", "$faint"), counted or "none"))
    if causes:
        parts.append(Content.assemble(("not well: ", "$faint"), units.causes(causes)))
    lines = [line for part in parts for line in part.wrap(max(width, 2))]
    return [*lines, *_grid(metrics, width)]


def _grid(metrics: dict[str, Any], width: int) -> list[Content]:
    """Names and numbers in as many columns as fit."""
    items = []
    for name, value in metrics.items():
        if isinstance(value, int | float):
            number = f"{value:.4g}" if isinstance(value, float) else str(value)
            items.append(Content.assemble((f"{name.replace('_', ' ')} ", "$faint"), number))
    size = max((item.cell_length for item in items), default=1) + 2
    columns = max(width // size, 1)
    rows = -(-len(items) // columns)
    return [
        Content.assemble(*(item.pad_right(size - item.cell_length) for item in items[row::rows])).truncate(width)
        for row in range(rows)
    ]


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
