"""Lab 4, sync against collocated async, where tools are slow and where they are not, and two ways to close the gate.

    python docs/labs/lab4.py

makes the model, trains `lab4.yaml` in several ways one after the other, and writes runs/labs/lab4.svg and lab4.md. What
it shows is told in docs/labs/lab4.md.
"""

from __future__ import annotations

import statistics
from typing import Any

import lab
from lab import Run, Runs, percentile

SYNC, ASYNC = "algorithm.mode=sync", "algorithm.mode=async"
ALONE = [SYNC, "algorithm.groups_per_step=1", "trainer.steps=6", "evaluation.before=false", "evaluation.tasks=1"]
NO_TOOLS = ["agent.env.TOOL=0 s"]
LONG = [*NO_TOOLS, ASYNC, "tasks.train=tasks.py:long_train", "tasks.val=tasks.py:long_val"]
CONDITIONS = {
    "one group alone": ALONE,
    "sync": [SYNC],
    "async": [ASYNC],
    "sync, no tools": [SYNC, *NO_TOOLS],
    "async, no tools": [ASYNC, *NO_TOOLS],
    "long calls, preempt": [*LONG, "gateway.close=preempt"],
    "long calls, drain": [*LONG, "gateway.close=drain"],
}


def main() -> None:
    options = lab.options(__doc__, seeds=[0], at_once=1, mini=["agent.env.TOOL=0.01 s"])
    runs = lab.train("lab4", CONDITIONS, options)
    text = "\n\n".join([speed(runs), bound(runs), learning(runs), closing(runs)])
    drawn, axes = lab.figure(4)
    slow = {name: runs[name] for name in ("sync", "async")}
    lab.curves(axes[0], slow, finished, "minutes since the start, by step")
    lab.curves(axes[1], slow, lambda run: run.curve("reward_mean"), "reward of training rollouts")
    lab.curves(axes[2], {n: runs[n] for n in ("sync, no tools", "async, no tools")}, finished, "minutes, no tools")
    for color, name in zip(lab.COLORS, ("long calls, preempt", "long calls, drain"), strict=False):
        times = sorted(closings(runs[name]))
        axes[3].plot(times, [(i + 1) / len(times) for i in range(len(times))], color=color, marker=".", label=name)
    axes[3].set_xscale("log")
    axes[3].set_xlabel("seconds from closing the gate")
    axes[3].set_title("share of updates that could begin", fontsize=10)
    for axis in (axes[0], axes[2], axes[3]):
        axis.legend()
    lab.save("lab4", drawn, text, options)


# time


def phases(run: Run) -> list[dict[str, Any]]:
    """Its phases with `s`, how long they were."""
    with run.store() as store:
        rows = store.phases(limit=1_000_000)
    return [{**row, "s": row["finished_at"] - row["started_at"]} for row in rows if row["finished_at"] is not None]


def began(run: Run) -> float:
    """When the first training rollouts were started."""
    return next(row["started_at"] for row in phases(run) if row["phase"] == "rollout")


def finished(run: Run) -> list[tuple[int, float]]:
    """(step, minutes after the start at which it was made)"""
    start = began(run)
    return [(step["step"], (step["finished_at"] - start) / 60) for step in run.steps]


def step_s(run: Run) -> float:
    """Seconds a step, over the whole run from the first rollouts to the last update."""
    return 60 * finished(run)[-1][1] / len(run.steps)


def steady_s(run: Run, ramp: int = 2) -> float:
    """Seconds a step while as many groups as wanted are in flight: without the first steps, in which they are still
    being started together, and the last, for which no more are started."""
    times = [minutes for _, minutes in finished(run)]
    if len(times) < 2 * ramp + 2:
        return step_s(run)
    return 60 * (times[-1 - ramp] - times[ramp - 1]) / (len(times) - 2 * ramp)


def each(runs: dict[int, Run], of) -> list[float]:
    return [of(run) for run in runs.values()]


def speed(runs: Runs) -> str:
    rows = []
    for what, one, other in (
        ("slow tools: sync and async", "sync", "async"),
        ("no tools: sync and async", "sync, no tools", "async, no tools"),
        ("long calls, async: drain and preempt", "long calls, drain", "long calls, preempt"),
    ):
        ratios = [step_s(runs[one][seed]) / step_s(runs[other][seed]) for seed in runs[one]]
        steady = [steady_s(runs[one][seed]) / steady_s(runs[other][seed]) for seed in runs[one]]
        hours = [f"{3600 / statistics.fmean(each(runs[name], step_s)):.0f}" for name in (one, other)]
        rows.append([what, *hours, lab.spread(ratios, 2), lab.spread(steady, 2)])
    return lab.table(["", "steps an hour, first", "second", "ratio", "ratio while the flight is full"], rows)


def bound(runs: Runs) -> str:
    """What async can give at most: (M + U) / max(W / theta + U, G L0 / F)."""
    lines = []
    for seed, sync in runs["sync"].items():
        algorithm = settings(sync)["algorithm"]
        updates = len(sync.steps)
        rollout = statistics.fmean(row["s"] for row in phases(sync) if row["phase"] == "rollout")
        held = sum(row["s"] for row in phases(sync) if row["phase"] in ("draining", "training", "syncing")) / updates
        work = statistics.fmean(step["trained_tokens"] for step in sync.steps)
        rate = engine_rate(runs["sync, no tools"][seed])
        group = group_alone(runs["one group alone"][seed], sync)
        engine, waiting = work / rate + held, algorithm["groups_per_step"] * group / in_flight(algorithm)
        limit = (rollout + held) / max(engine, waiting)
        reached = steady_s(sync) / steady_s(runs["async"][seed])
        lines.append(
            f"Seed {seed}: M = {rollout:.1f} s of rollouts and U = {held:.2f} s of update a step in sync; "
            f"W = {work:.0f} tokens at theta = {rate:.0f} a second; L0 = {group:.1f} s for a group alone. "
            f"The bound is ({rollout:.1f} + {held:.2f}) / max({engine:.1f}, {waiting:.1f}) = {limit:.2f}; async made "
            f"{reached:.2f} times as many steps while its flight was full, {100 * reached / limit:.0f}% of it."
        )
    return "\n\n".join(lines)


def settings(run: Run) -> dict[str, Any]:
    with run.store() as store:
        return store.meta("manifest")["recipe"]


def in_flight(algorithm: dict[str, Any]) -> int:
    return algorithm["groups_in_flight"] or 2 * algorithm["groups_per_step"]


def engine_rate(run: Run) -> float:
    """Tokens that are sampled in a second when no tool is waited for."""
    seconds = sum(row["s"] for row in phases(run) if row["phase"] == "rollout")
    return sum(step["trained_tokens"] for step in run.steps) / seconds


def group_alone(alone: Run, sync: Run) -> float:
    """Mean latency of the groups of `sync`, each alone on the machine: its slowest rollout's tools, and on top of them
    what the groups of `alone` took beyond their tools."""
    tools, taken = zip(*_groups(alone), strict=True)
    beyond = statistics.fmean(t - w for w, t in zip(tools, taken, strict=True))
    return beyond + statistics.fmean(tools for tools, _ in _groups(sync))


def _groups(run: Run) -> list[tuple[float, float]]:
    """(seconds of the slowest member's tools, seconds of the group) of every training group."""
    recipe = settings(run)
    tool_s = float(recipe["agent"]["env"]["TOOL"].split()[0])
    with run.store() as store:
        tasks = {row["id"]: row["public"] for row in store.tasks("train")}
        groups = [row for row in store.groups(split="train") if row["finished_at"]]
    found = []
    for group in groups:
        waits = tasks[group["task_id"]]["waits"][: group["size"]]
        found.append((tool_s * max(map(sum, waits)), group["finished_at"] - group["created_at"]))
    return found


# learning and the gate


def learning(runs: Runs) -> str:
    rows = []
    for name in ("sync", "async", "sync, no tools", "async, no tools"):
        by_seed = runs[name]
        rows.append(
            [
                name,
                lab.spread(each(by_seed, lambda run: statistics.fmean(v for _, v in run.curve("reward_mean")))),
                lab.spread(each(by_seed, lambda run: run.validation[-1][1])),
                lab.spread(each(by_seed, lambda run: statistics.fmean(v for _, v in run.curve("staleness_mean"))), 2),
                max(step["staleness_max"] for run in by_seed.values() for step in run.steps),
                sum(step["rollouts_stale"] for run in by_seed.values() for step in run.steps),
            ]
        )
    head = [
        "",
        "reward, mean of all steps",
        "validation at the end",
        "staleness, mean",
        "largest",
        "rollouts too stale",
    ]
    return lab.table(head, rows)


def closings(runs: dict[int, Run]) -> list[float]:
    """Seconds from closing the gate to an engine that does nothing, of every update."""
    return [row["s"] for run in runs.values() for row in phases(run) if row["phase"] == "draining"]


def engine_steps(runs: dict[int, Run]) -> list[float]:
    """Seconds of an engine step, as calls of at least 16 tokens saw it on average from their first token on."""
    found = []
    for run in runs.values():
        with run.store() as store:
            for row in store.rollouts():
                for call in store.calls(row["id"]):
                    tokens = len(call.response_ids)
                    if tokens >= 16 and call.first_token_at and call.held_s == 0 and len(call.versions) == 1:
                        found.append((call.finished_at - call.first_token_at) / (tokens - 1))
    return found


def closing(runs: Runs) -> str:
    rows = []
    for name in ("async", "async, no tools", "long calls, preempt", "long calls, drain"):
        times, tokens = closings(runs[name]), engine_steps(runs[name])
        steps = [f"{1e3 * percentile(tokens, share):.1f}" for share in (0.5, 0.99)] if tokens else ["", ""]
        rows.append([name, len(times), *(f"{1e3 * percentile(times, share):.1f}" for share in (0.5, 0.99)), *steps])
    head = ["", "updates", "closing, median ms", "99th percentile", "engine step, median ms", "99th percentile"]
    return lab.table(head, rows)


if __name__ == "__main__":
    main()
