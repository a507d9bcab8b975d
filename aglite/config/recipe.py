"""The whole recipe: its sections together, what they must not contradict, and what may change in a run."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from aglite.config.notify import Notify
from aglite.config.reward import Reward
from aglite.config.sections import (
    Agent,
    Algorithm,
    EngineSettings,
    Evaluation,
    GatewaySettings,
    Guard,
    Redact,
    Retention,
    Sampling,
    Section,
    Seed,
    Tasks,
)
from aglite.config.trainer import Trainer, trainer_problems
from aglite.config.vllm_flags import flag_problems
from aglite.redact import Redactor


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
    guard: Guard = Guard()
    evaluation: Evaluation = Evaluation()
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    retention: Retention = Retention()
    redact: Redact = Redact()
    notify: Notify | None = None
    tracking: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where steps and evaluations are written besides the run's own database, each with its own library and by its own
    environment variables. wandb stays offline unless `WANDB_MODE` says otherwise."""

    folder: Path = Field(default=Path(), exclude=True)
    """The folder the recipe was read from; files are looked up there."""

    @field_validator("folder")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.resolve()

    @model_validator(mode="after")
    def _combinations(self) -> Recipe:
        algorithm, agent = self.algorithm, self.agent
        if agent.backend is None:
            agent.backend = "local" if agent.image is None else "docker"
        problems = _agent_problems(agent)
        if agent.backend == "kubernetes":
            problems += _kubernetes_problems(agent, self.gateway)
        if agent.backend != "external" and self.reward is None:
            problems.append("reward: missing; add `reward: {grade: grade.py:grade}`")
        if self.reward is not None and self.reward.judge and self.command_is_sealed:
            problems.append(
                "reward.judge: a command in a sealed container cannot reach it; use `grade`, or add `sandbox: false`"
            )
        if algorithm.name != "reinforce" and algorithm.group_size < 2:
            problems.append(
                f"algorithm.group_size: {algorithm.group_size} leaves {algorithm.name} without a baseline; "
                "use at least 2, or `name: reinforce`"
            )
        if algorithm.name == "reinforce" and algorithm.dynamic_sampling:
            problems.append(
                "algorithm.dynamic_sampling: with reinforce equal rewards teach something, too; leave it out"
            )
        in_flight = algorithm.groups_in_flight
        if algorithm.mode == "async" and in_flight is not None and in_flight < algorithm.groups_per_step:
            problems.append(
                f"algorithm.groups_in_flight: {in_flight} is less than groups_per_step "
                f"({algorithm.groups_per_step}); use at least that many"
            )
        if algorithm.normalize == "sample" and algorithm.name == "dr_grpo":
            problems.append("algorithm.normalize: dr_grpo divides by a constant; leave it out or use rollout_constant")
        problems += trainer_problems(self.trainer, self)
        if self.evaluation.patience and not self.evaluation.every:
            problems.append("evaluation.patience: nothing is evaluated before the end; add `every`, or leave it out")
        problems += _engine_problems(self.engine)
        problems += _access_problems(self.gateway)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def normalize(self) -> str:
        """The weighting in force (`algorithm.normalize` with its default filled in)."""
        return self.algorithm.normalize or ("rollout_constant" if self.algorithm.name == "dr_grpo" else "rollout")

    @property
    def command_is_sealed(self) -> bool:
        """Whether the grader is a command that runs in a container of its own."""
        return self.agent.in_container and bool(self.reward and self.reward.command) and self.reward.sandbox

    @property
    def groups_in_flight(self) -> int:
        """Unfinished groups kept running."""
        algorithm = self.algorithm
        if algorithm.mode == "sync":
            return algorithm.groups_per_step
        return algorithm.groups_in_flight or 2 * algorithm.groups_per_step

    @property
    def stored_redactor(self) -> Redactor:
        """What masks text before it is stored; false when it is stored as it is."""
        return self.redact.redactor() if self.redact.stored else Redactor(())

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.dump(), sort_keys=False, allow_unicode=True)


def _engine_problems(engine: EngineSettings) -> list[str]:
    if engine.kind == "embedded":
        given = [name for name in ("url", "model", "key_env", "args") if getattr(engine, name)]
        return [f"engine.{name}: only for engine.kind vllm{'' if name == 'args' else ' and api'}" for name in given]
    if engine.own_vllm:
        given = [name for name in ("model", "key_env") if getattr(engine, name)]
        problems = [f"engine.{name}: only for a server that runs already; give its engine.url too" for name in given]
        return problems + flag_problems(engine.args)
    problems = ["engine.args: only for aglite's own vLLM; leave out engine.url"] if engine.args else []
    if not re.match(r"https?://[^/\s]", engine.url):
        problems.append(f"engine.url: {engine.url!r} is no address such as http://127.0.0.1:8000")
    if engine.kind == "api" and not engine.model:
        problems.append("engine.model: missing; give the name that the endpoint knows the model by")
    return problems


def _agent_problems(agent: Agent) -> list[str]:
    """What is wrong with how the agent is launched."""
    if agent.in_container and not agent.image:
        return [
            f"agent.image: missing; {agent.backend} needs the image of the agent's container "
            "(images/build.sh makes some)"
        ]
    if not agent.in_container and agent.image:
        return [f"agent.image: backend {agent.backend} uses none; leave it out, or the backend"]
    if agent.harness is None:
        problems = [
            f"agent.{name}: it is for a harness; add `harness`, or leave it out"
            for name in ("prompt", "harness_path", "harness_args")
            if getattr(agent, name)
        ]
        if not agent.command and agent.backend != "external":
            problems.append(
                "agent.command: missing; give the agent program, such as [python, agent.py], or name a `harness`"
            )
        return problems
    if agent.command:
        return [f"agent.command: {agent.harness} brings its own; leave out `command`, or `harness` to use a command"]
    if agent.backend == "external":
        return ["agent.harness: external rollouts are launched by somebody else; leave out `harness` or `backend`"]
    return []


def _kubernetes_problems(agent: Agent, gateway: GatewaySettings) -> list[str]:
    problems = []
    if gateway.public_url is None:
        problems.append(
            "gateway.public_url: missing; write where pods reach this machine, such as http://10.0.0.5:8443, and let "
            "the gateway listen there with gateway.host and gateway.port"
        )
    least = agent.limits.wall_s + agent.kubernetes.start_timeout_s
    if agent.kubernetes.deadline_s < least:
        problems.append(
            f"agent.kubernetes.deadline_s: {agent.kubernetes.deadline_s} is less than start_timeout_s and "
            f"limits.wall_s together ({least:g}); time that an update holds an agent comes on top"
        )
    return problems


RESUMABLE = (
    "trainer.steps",
    "trainer.checkpoint_every",
    "trainer.keep_last",
    "trainer.min_free_disk_mb",
    "trainer.tokens_per_micro_batch",
    "trainer.gradient_checkpointing",
    "trainer.offload_optimizer",
    "guard",
    "agent.limits",
    "agent.kubernetes",
    "agent.concurrency",
    "agent.attempts",
    "evaluation",
    "retention",
    "redact",
    "notify",
    "tracking",
    "engine.max_running",
    "engine.kv_tokens",
    "engine.threads",
    "engine.gpu_memory_utilization",
    "engine.enforce_eager",
    "engine.sleep_level",
    "engine.transfer",
    "engine.start_timeout_s",
    "gateway.max_hold_s",
    "gateway.host",
    "gateway.port",
    "gateway.control_port",
    "gateway.tls",
    "gateway.allow_plain",
    "gateway.public_url",
    "gateway.drain_timeout_s",
)
"""Keys that may change when a run is resumed; any other change makes it a different run."""


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's alone. Names other than localhost count as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether an address means all of this machine's."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _access_problems(gateway: GatewaySettings) -> list[str]:
    host = gateway.host
    problems = []
    if not is_loopback(host) and gateway.tls is None and not gateway.allow_plain:
        problems.append(
            f"gateway.host: {host} can be reached from other machines, and all traffic would cross the network in the "
            "clear; add `tls: {cert, key}`, or `allow_plain: true` where nobody else can listen"
        )
    if is_wildcard(host) and gateway.public_url is None:
        problems.append(
            f"gateway.public_url: missing; {host or '(empty)'} is no address that an agent elsewhere could be given, "
            "write the one that reaches this machine, such as https://gpu.example.org:8443"
        )
    return problems
