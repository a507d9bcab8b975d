"""A run as a whole: its status, events, steps, recipe and sandboxes."""

from __future__ import annotations

from typing import Any, Literal

from aglite.control.shapes.base import Phase, Shape


class Event(Shape):
    id: int
    """The cursor: it only ever grows."""
    at: float
    level: Literal["info", "warning", "error"]
    kind: str
    """`phase`, `rollout`, `step`, `evaluation`, `checkpoint`, `engine`, `tracking`, `run` or `notify`."""
    text: str
    data: dict[str, Any]


class Gate(Shape):
    state: Literal["open", "closed"]
    held: int
    """Requests that wait for it to open."""


class OpenGroups(Shape):
    open: int = 0
    complete: int = 0
    """Groups that wait to be trained."""


class Queue(Shape):
    """Rollouts by state."""

    queued: int
    starting: int
    running: int
    grading: int
    done: int
    failed: int
    error: int
    cancelled: int


class Engine(Shape):
    kind: str
    running: int
    """Requests that are sampled."""
    waiting: int
    tokens_per_s: float
    """Sampled tokens, over the last few seconds."""
    sampled_tokens: int
    """Since the start, like the next two."""
    prefill_tokens: int
    """Prompt tokens that were computed."""
    reused_tokens: int
    """Prompt tokens that came from the KV cache."""
    kv_tokens: int
    kv_capacity: int


class Progress(Shape):
    """Empty while there is nothing to tell."""

    done: int = 0
    of: int = 0
    stage: str = ""


class RewardPoint(Shape):
    step: int
    mean: float
    std: float


class ValidationPoint(Shape):
    step: int
    mean: float
    stderr: float
    n: int
    """Tasks."""


class Point(Shape):
    step: int
    value: float


class ForkPoint(Shape):
    """Calls of a step's rollouts by how they follow from earlier ones."""

    step: int
    continued: int
    first: int
    new_thread: int
    edited: int
    template: int
    retokenised: int


class Checkpoint(Shape):
    step: int
    at: float


class BestCheckpoint(Shape):
    step: int
    mean: float | None
    """Its validation reward."""
    path: str
    """Its folder, in the run directory."""


class GpuProcess(Shape):
    pid: int
    name: str
    """`model worker`, or the program."""
    mem: int | None


class Gpu(Shape):
    name: str
    util: float | None
    """Percent; null, like power and temperature, where the GPU does not tell it."""
    mem_used: int
    mem_total: int
    power_w: float | None
    temp_c: float | None
    processes: list[GpuProcess]
    """Who holds memory of it."""


class Host(Shape):
    cpu_percent: float
    """Of all cores together."""
    cpus: int
    ram_used: int
    ram_total: int
    disk_free: int
    db_bytes: int


class PhaseSpan(Shape):
    phase: Phase
    started_at: float
    finished_at: float | None


class Status(Shape):
    """Where the run stands. Times are Unix seconds, sizes bytes."""

    run: str
    recipe: str
    model: str
    dir: str
    pid: int
    mode: str
    started_at: float
    now: float
    phase: Phase
    phase_since: float
    message: str
    """What it is doing, or what is wrong; mostly empty."""
    policy_version: int
    step: int
    """Steps done."""
    steps: int
    """Steps of the run; 0 where nothing is trained."""
    eta_s: float | None
    last_update_s: float
    """How long agents were held by the last update."""
    max_hold_s: float
    gate: Gate
    groups: OpenGroups
    concurrency: int | None
    """Rollouts that may run at once; null where somebody else launches them."""
    quarantined: list[str]
    """Training tasks that are left out."""
    phases: list[PhaseSpan]
    """Those of the last minutes."""
    queue: Queue
    causes: dict[str, int]
    """Rollouts that ended other than well, by the code of their cause."""
    engine: Engine
    training: Progress
    """Micro-batches of the update under way or the last."""
    evaluation: Progress
    """Rollouts of the evaluation under way."""
    reward: list[RewardPoint]
    val: list[ValidationPoint]
    entropy: list[Point]
    kl: list[Point]
    forks: list[ForkPoint]
    checkpoint: Checkpoint | None
    best: BestCheckpoint | None
    """The checkpoint that did best in validation."""
    gpu: list[Gpu]
    host: Host
    log: list[Event]
    """The latest events."""


class Step(Shape):
    id: int
    step: int
    version: int
    """The policy version it made; of a skipped step the one it left."""
    state: Literal["applied", "skipped", "rolled_back"]
    metrics: dict[str, Any]
    started_at: float
    finished_at: float


class RecipeKey(Shape):
    key: str
    value: Any
    default: Any
    differs: bool
    """Whether the value is not the default."""
    meaning: str


class Sandbox(Shape):
    rollout_id: str
    task_id: str
    split: str
    state: str
    attempt: int
    begun: float
    pid: int | None
    container: str | None
    workdir: str | None
    backend: str | None
    age_s: float
    leaked: bool
    """A process of a rollout that does not run any more."""
    processes: int | None
    cpu_s: float | None
    memory: int | None
    """Bytes, resident."""
