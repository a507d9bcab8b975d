"""The recipe: one typed, validated, documented schema for everything a run can be told.

Every field is followed by what it means. A recipe that cannot work is refused with the path of the field, the value it
has and what to write instead.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from aglite.errors import RecipeError
from aglite.recipe_file import read_mapping

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Tasks(Section):
    train: str
    """Where training tasks come from: `file.py:function` that yields rows, or a `.jsonl` file."""
    val: str
    """Held-out tasks, from the same kinds of source."""


class Limits(Section):
    wall_s: Seconds = 120
    """Wall time of one rollout in seconds; time that the gateway held its requests does not count."""
    calls: Positive = 32
    """Model calls of one rollout."""
    sampled_tokens: Positive = 4096
    """Tokens sampled for one rollout, over all its calls."""
    request_bytes: Positive = 8 * 1024 * 1024
    """Size of one request body."""
    memory_mb: Positive = 2048
    """Private memory of one agent process."""
    log_bytes: Positive = 4 * 1024 * 1024
    """How much of the agent's output is kept; the middle of a longer log is left out."""


class Agent(Section):
    command: list[str] = []
    """The agent program and its arguments, run in a scratch directory of the rollout's own.
    `python` as first word means the interpreter that runs aglite."""
    files: list[str] = []
    """Files and folders of the recipe folder that the agent needs besides those its `command` names. Only these and
    those are copied: graders and task files stay out of the agent's sight."""
    backend: Literal["local", "external"] = "local"
    """`local` runs `command` as a process of this machine; `external` takes rollouts that somebody else launches and
    reports through the control API."""
    env: dict[str, str] = {}
    """Environment variables; `{task.field}` is filled in from the task's public part."""
    limits: Limits = Limits()
    concurrency: Positive = 8
    """Rollouts that run at once."""
    attempts: Positive = 3
    """Launches of one rollout when the infrastructure fails; the agent's own failures are not tried again."""


class Reward(Section):
    grade: str
    """The grader, as `file.py:function`."""
    timeout_s: Seconds = 20
    """Time limit of one grading."""
    on_failure: Literal["grade", "zero"] = "grade"
    """What a rollout whose agent failed is worth: what the grader finds, or 0 without looking."""


class TrainSampling(Section):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of training rollouts, whatever the agent asks for."""


class ValSampling(Section):
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of validation rollouts; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens that have this much of the probability; 1: off."""
    top_k: NonNegative = 0
    """Sample from this many most probable tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less probable than this share of the most probable one; 0: off."""
    seed: Seed | None = 0
    """Makes each validation rollout draw the same random numbers in every evaluation; null: fresh ones."""


class Sampling(Section):
    train: TrainSampling = TrainSampling()
    val: ValSampling = ValSampling()


class Algorithm(Section):
    name: Literal["grpo", "rloo", "dr_grpo", "reinforce"] = "grpo"
    """How a rollout's advantage follows from rewards."""
    mode: Literal["sync", "async"] = "async"
    """`sync` waits for all groups of a step; `async` keeps more in flight and trains when enough are complete."""
    group_size: Positive = 8
    """Rollouts of one task that share a baseline."""
    groups_per_step: Positive = 4
    """Complete groups that one training step takes."""
    groups_in_flight: Positive | None = None
    """Unfinished groups kept running (async); default twice `groups_per_step`."""
    normalize: Literal["rollout", "rollout_constant", "token", "sample"] | None = None
    """Weight of a trained token; default `rollout`, with dr_grpo `rollout_constant`."""
    max_staleness: NonNegative = 8
    """A rollout whose oldest trained token is more policy versions old than this is not trained."""
    max_refills: NonNegative = 1
    """New rollouts for a group that lost members to infrastructure failures."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """See `clip_high`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    correction: Literal["truncated", "none"] = "truncated"
    """Importance weight pi_start/pi_rollout per token, cut at `correction_cap`, or none."""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """The largest importance weight."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the starting model; 0: no reference model is held."""
    updates_per_step: Positive = 1
    """Optimizer updates a step: its rollouts are split into this many mini-batches."""


class Trainer(Section):
    steps: Positive = 10
    """Training steps of the run."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's running means of the gradient and of its square."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """The gradient's norm is cut to this."""
    tokens_per_micro_batch: Positive = 1024
    """Tokens that one forward and backward pass may hold."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints; the last step and a clean stop always write one."""
    keep_last: Positive = 2
    """Checkpoints kept besides the best."""
    min_free_disk_mb: NonNegative = 2048
    """Below this much free disk the run pauses and says so."""


class Evaluation(Section):
    every: NonNegative = 10
    """Steps between evaluations; 0: only before the first and after the last step."""
    tasks: Positive = 64
    """Validation tasks an evaluation takes, always the same ones."""
    rollouts_per_task: Positive = 1
    """Rollouts of each of these tasks; a task counts with their mean."""
    before: bool = True
    """Evaluate the untrained model first."""


class EngineSettings(Section):
    kind: Literal["embedded"] = "embedded"
    """`embedded`: the model worker's own engine."""
    context_length: Positive | None = None
    """Tokens of prompt and response together; default: what the model has, at most 4096 on the CPU."""
    max_running: Positive = 32
    """Requests that are sampled at once."""
    kv_tokens: Positive = 32768
    """Tokens that the KV cache holds."""
    threads: Positive | None = None
    """CPU threads of the model worker; default: all cores."""


class GatewaySettings(Section):
    continuation: Literal["exact", "rerender"] = "exact"
    """`exact` continues the recorded tokens of a conversation; `rerender` tokenises its text anew each turn."""
    close: Literal["preempt", "drain"] = "preempt"
    """What an update does to generations in flight: stop at the next token and go on after it, or let them finish."""
    drain_timeout_s: Seconds = 60
    """How long a drain may take before it turns into a preempt."""
    max_hold_s: Seconds = 240
    """Longest hold of a request during an update; past it the agent gets 503 and Retry-After."""
    host: str = "127.0.0.1"
    """Address that the model routes listen on."""
    port: Port = 0
    """Port of the model routes; 0: a free one."""
    control_port: Port = 0
    """Port of the control API on loopback; 0: a free one."""


class Retention(Section):
    traffic: Literal["all", "tokens"] = "all"
    """Keep messages and tokens, or tokens only."""


class Recipe(Section):
    """Everything about a run. See the fields of each section."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, `.`, `_` and `-`; the run is kept in `runs/<name>`."""
    model: str
    """A built-in name, a folder (looked up beside the recipe first, then where aglite is started), or a Hugging Face
    id."""
    seed: Seed = 0
    """Seeds the task order, the sampling and the trainer."""
    tasks: Tasks
    agent: Agent
    reward: Reward | None = None
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    evaluation: Evaluation = Evaluation()
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    retention: Retention = Retention()

    folder: Path = Field(default=Path(), exclude=True)
    """The folder the recipe was read from; files are looked up there."""

    @field_validator("folder")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.resolve()

    @model_validator(mode="after")
    def _combinations(self) -> Recipe:
        algorithm, agent = self.algorithm, self.agent
        problems = []
        if agent.backend != "external":
            if not agent.command:
                problems.append("agent.command: missing; give the agent program, such as [python, agent.py]")
            if self.reward is None:
                problems.append("reward: missing; add `reward: {grade: grade.py:grade}`")
        if algorithm.name != "reinforce" and algorithm.group_size < 2:
            problems.append(
                f"algorithm.group_size: {algorithm.group_size} leaves {algorithm.name} without a baseline; "
                "use at least 2, or `name: reinforce`"
            )
        in_flight = algorithm.groups_in_flight
        if algorithm.mode == "async" and in_flight is not None and in_flight < algorithm.groups_per_step:
            problems.append(
                f"algorithm.groups_in_flight: {in_flight} is less than groups_per_step "
                f"({algorithm.groups_per_step}); use at least that many"
            )
        if algorithm.normalize == "sample" and algorithm.name == "dr_grpo":
            problems.append("algorithm.normalize: dr_grpo divides by a constant; leave it out or use rollout_constant")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def normalize(self) -> str:
        """The weighting in force (`algorithm.normalize` with its default filled in)."""
        return self.algorithm.normalize or ("rollout_constant" if self.algorithm.name == "dr_grpo" else "rollout")

    @property
    def groups_in_flight(self) -> int:
        """Unfinished groups kept running."""
        algorithm = self.algorithm
        if algorithm.mode == "sync":
            return algorithm.groups_per_step
        return algorithm.groups_in_flight or 2 * algorithm.groups_per_step

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.dump(), sort_keys=False, allow_unicode=True)


RESUMABLE = (
    "trainer.steps",
    "trainer.checkpoint_every",
    "trainer.keep_last",
    "trainer.min_free_disk_mb",
    "agent.limits",
    "agent.concurrency",
    "agent.attempts",
    "evaluation",
    "retention",
    "engine.max_running",
    "engine.kv_tokens",
    "engine.threads",
    "gateway.max_hold_s",
    "gateway.host",
    "gateway.port",
    "gateway.control_port",
    "gateway.drain_timeout_s",
)
"""Keys that may change when a run is resumed; any other change makes it a different run."""


def find_recipe(path: str | Path) -> Path:
    """The recipe.yaml that `path` (a folder or a file) names."""
    path = Path(path)
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(f"no recipe at {path}", "give a folder with a recipe.yaml, such as recipes/instruct")
    return file


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides (values are YAML). Raises RecipeError."""
    file = find_recipe(path)
    data = read_mapping(file)
    for override in overrides:
        _apply(data, override)
    return parse_recipe(data, file)


def parse_recipe(data: dict[str, Any], file: Path) -> Recipe:
    """Validate plain data as the recipe that was read from `file`."""
    try:
        recipe = Recipe(**{**data, "folder": file.parent})
    except ValidationError as error:
        lines = [_explain(problem, data) for problem in error.errors()]
        raise RecipeError(f"{file} cannot be used:\n  " + "\n  ".join(lines), "correct the fields named") from None
    beside = recipe.folder / recipe.model
    if beside.is_dir():
        recipe.model = str(beside)
    return recipe


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {override}: not of the form key.path=value", "for example --set trainer.steps=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is not valid YAML ({error})", "quote it") from None
    if isinstance(value, str):
        value = _number(value)
    here = data
    for part in parts[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f"--set {override}: {part} is not a section", "use the recipe's own field names")
    here[parts[-1]] = value


def _number(text: str) -> str | float:
    """YAML 1.1 reads `5e-5` as text; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(problem: Any, data: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _siblings(problem["loc"])
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{path}: unknown key (value {problem['input']!r}); {advice}"
    if problem["type"] == "missing":
        return f"{path}: missing"
    if not path:
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{path}: {problem['msg']} (it is {problem['input']!r})"


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        model = _section_of(field.annotation)
    return [name for name in getattr(model, "model_fields", {}) if name != "folder"]


def _section_of(annotation: Any) -> Any:
    options = getattr(annotation, "__args__", None) or (annotation,)
    return next((option for option in options if hasattr(option, "model_fields")), None)
