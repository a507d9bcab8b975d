"""The sections of a recipe. Every field is followed by what it means; docs/recipe.md is made from it."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from aglite.redact import NAMED, Redactor, compiled

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
    rest_solved_after: NonNegative = 0
    """Let a training task rest when so many groups in a row solved it (every reward at least 1); 0: never."""
    rest_unsolved_after: NonNegative = 0
    """Let one rest when so many groups in a row did not (every reward below 1, and all equal); 0: never."""
    rest_epochs: Positive = 2
    """Passes over the tasks that a resting one sits out; then it is tried again."""


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
    """Memory in MB of an agent with all its processes; in a container, what it wrote to its scratch folders counts too.
    Where no control groups can be made, a local agent is limited by the private memory of each process only."""
    disk_mb: Positive = 512
    """Scratch space in MB that an agent in a container has: for its working directory and home together, and as much
    again in /tmp."""
    pids: Annotated[int, Field(ge=2)] = 512
    """Processes and threads of an agent. Local: where control groups can be made. In Kubernetes the nodes set this
    limit."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Processor cores' worth of time for an agent, such as 0.5; default: no limit. Local: as `pids`."""
    log_bytes: Positive = 4 * 1024 * 1024
    """How much of the agent's output is kept; the middle of a longer log is left out."""


class Kubernetes(Section):
    namespace: str | None = None
    """Where the Jobs are made; default: the namespace of the kubeconfig's context, or `default`."""
    context: str | None = None
    """The kubeconfig's context; default: the current one. Without a kubeconfig: the cluster that aglite runs in."""
    requests: dict[str, str] = {"cpu": "250m"}
    """What the agent's container asks the scheduler for; `memory` is `limits.memory_mb` unless it is given here."""
    files_image: str | None = None
    """Image of the two small containers that bring files in and out; it needs sh, tar, find, stat and awk, as busybox
    and Debian have them. Default: the agent's image."""
    ca: str | None = None
    """Certificate authority (PEM) that agents trust, where `gateway.tls` has a certificate that no public one signed: a
    file of the recipe folder or an absolute path."""
    start_timeout_s: Seconds = 300
    """How long quota, scheduling and pulling of images may take together before a launch has failed."""
    deadline_s: Positive = 21600
    """How long a Job lasts at most. When aglite is killed, its Jobs end within ten minutes."""
    job: str | None = None
    """Template of the Job, a file of the recipe folder or an absolute path; default: aglite's own
    (`aglite/rollouts/backends/kube/job.yaml`)."""
    network_policy: str | None = None
    """Template of the NetworkPolicy (`network: sealed`), like `job`."""


class Agent(Section):
    command: list[str] = []
    """The agent program and its arguments, run in a scratch directory of the rollout's own.
    `python` as first word means the interpreter that runs aglite."""
    harness: Literal["mini-swe-agent", "openhands", "opencode", "codex", "claude-code"] | None = None
    """A well-known agent program, instead of `command`: aglite writes its configuration and launches it."""
    prompt: str | None = None
    """What the harness is told to do; `{task.field}` is filled in from the task's public part. Default: the task's
    field `prompt`, `instruction`, `question` or `text`, the first of these that it has."""
    harness_path: str | None = None
    """Folder of the harness's executable, such as `~/mini/bin`; default: it is looked up on PATH."""
    harness_args: list[str] = []
    """Further arguments for the harness's command line."""
    files: list[str] = []
    """Files and folders of the recipe folder that the agent needs besides those its `command` names. Only these and
    those are copied: graders and task files stay out of the agent's sight."""
    backend: Literal["local", "docker", "kubernetes", "external"] | None = None
    """`local` runs the agent as a process of this machine; `docker` in a container made from `image`; `kubernetes` as a
    Job of a cluster, likewise; `external` takes rollouts that somebody else launches and reports through the control
    API. Default: `docker` where `image` is given, otherwise `local`."""
    image: str | None = None
    """The image of the agent's container. Docker: a name that the engine of this machine has, or an id or digest; all
    rollouts of a run use the one that the name means at its start. Kubernetes: a name that its nodes can pull, best
    with a digest."""
    network: Literal["sealed", "open"] = "sealed"
    """What an agent in a container can reach besides the gateway: `sealed`, nothing (in Kubernetes: if the cluster's
    network enforces NetworkPolicies); `open`, what the default network lets it."""
    user: Annotated[str, Field(pattern=r"^[0-9]+:[0-9]+$")] = "1000:1000"
    """User and group number of the agent in its container. With `0:0` it is root there, without any capability."""
    env: dict[str, str] = {}
    """Environment variables; `{task.field}` is filled in from the task's public part."""
    limits: Limits = Limits()
    kubernetes: Kubernetes = Kubernetes()
    concurrency: Positive = 8
    """Rollouts that run at once."""
    attempts: Positive = 3
    """Launches of one rollout when the infrastructure fails; the agent's own failures are not tried again."""

    @property
    def in_container(self) -> bool:
        """Whether it runs in a container made from `image`."""
        return self.backend in ("docker", "kubernetes")


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
    advantage_over: Literal["rollouts", "samples"] = "rollouts"
    """What a group's mean and spread are taken over: its `rollouts`, or the `samples` that its rollouts fell into, each
    with its rollout's reward. The second is here to be compared with the first."""
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
    dynamic_sampling: NonNegative = 0
    """At most so many complete groups a step whose rewards are all equal, and teach nothing, are set aside and replaced
    by further ones; 0: they take their place in the step."""
    skip_zero_advantage: bool = True
    """Do not compute rows with advantage 0, which add nothing to the gradient (they stay in every denominator). A KL or
    entropy term computes them in any case. Entropy and KL are measured on what is computed."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """See `clip_high`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    rollout_is: Literal["token", "sequence", "none"] = "token"
    """Truncated importance weights min(pi_start / pi_rollout, `rollout_is_threshold`): of each token; `sequence`: the
    product over a rollout's trained tokens, one weight for all of them; or none."""
    rollout_is_threshold: Annotated[float, Field(ge=1)] = 2.0
    """The largest importance weight."""
    rollout_rs: Literal["token", "sequence", "none"] = "none"
    """Rejection: what is not trained for having pi_start / pi_rollout outside of [`rollout_rs_threshold_lower`,
    `rollout_rs_threshold`]: single tokens, or `sequence`, rollouts by the geometric mean over their trained tokens. It
    stays in every denominator."""
    rollout_rs_threshold: Annotated[float, Field(ge=1)] = 2.0
    """See `rollout_rs`."""
    rollout_rs_threshold_lower: Annotated[float, Field(ge=0, le=1)] | None = None
    """See `rollout_rs`; default: 1 / `rollout_rs_threshold`."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the starting model, per trained token; 0: no reference model is held."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus, per trained token; 0: none."""
    updates_per_step: Positive = 1
    """Optimizer updates a step: its rollouts are split into this many mini-batches."""


class Guard(Section):
    action: Literal["pause", "warn", "off"] = "pause"
    """What follows when the run seems about to be lost: `pause` holds it until `aglite resume` and says what it saw and
    what to do; `warn` only says so."""
    window: Positive = 4
    """Steps whose mean counts, here and at the beginning of the run (or since somebody let it go on)."""
    not_finite: NonNegative = 2
    """Updates in a row whose loss or gradient is not finite (they are not applied); 0: not watched, like each of
    these."""
    entropy_low: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The entropy has fallen below this share of what it was."""
    entropy_high: Annotated[float, Field(ge=0)] = 4.0
    """It has risen above this many times what it was."""
    length_low: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """The number of tokens sampled per rollout has fallen below this share of what it was."""
    length_high: Annotated[float, Field(ge=0)] = 4.0
    """It has risen above this many times what it was."""
    kl_high: Annotated[float, Field(ge=0)] = 1.0
    """The KL to the starting model is above this, in nats a token (needs `algorithm.kl`)."""
    reward_drop: Annotated[float, Field(ge=0)] = 0.5
    """The mean reward of all tasks, or of those of one `kind`, has fallen by this much, beyond what groups differ."""
    reward_window: Annotated[int, Field(ge=2)] = 4
    """Groups whose mean reward counts; it is compared with up to seven times as many before them."""
    validation_drop: Annotated[float, Field(ge=0)] = 0.2
    """The validation reward of all tasks, or of those of one `kind`, is this far below its best, beyond chance. After
    the last step that is only said."""
    mismatch: Annotated[float, Field(ge=0)] = 0.1
    """Warn, and no more, when the KL between the policy that sampled a step's tokens and the one at its start is above
    this, in nats a token, or more than a fifth of the importance weights are cut."""


class Evaluation(Section):
    every: NonNegative = 10
    """Steps between evaluations; 0: only before the first and after the last step."""
    tasks: Positive = 64
    """Validation tasks an evaluation takes, always the same ones."""
    rollouts_per_task: Positive = 1
    """Rollouts of each of these tasks; a task counts with their mean."""
    before: bool = True
    """Evaluate the untrained model first."""
    solved_at: float = 1.0
    """The reward from which on a rollout counts as solved, for pass@k."""
    patience: Positive | None = None
    """The run ends after this many evaluations in a row that are not better than the best; default: never early."""


class EngineSettings(Section):
    kind: Literal["embedded", "vllm", "api"] = "embedded"
    """`embedded`: the model worker's own engine; `vllm`: a vLLM server that aglite starts and trains, or, with `url`,
    one that runs already, with exact tokens; `api`: a Chat Completions endpoint at `url`, recorded as text. What is at
    a `url` serves and evaluates, it is not trained."""
    url: str = ""
    """Address of a server that runs already (vllm, api), with or without `/v1` at its end."""
    model: str = ""
    """What the server at `url` calls the model; vllm: the first that it serves if left out."""
    key_env: str = ""
    """Environment variable that holds the key of the server at `url`; the key itself is never stored."""
    context_length: Positive | None = None
    """Tokens of prompt and response together; default: what the model or the server has, at most 4096 on the CPU."""
    max_running: Positive = 32
    """Requests that are sampled at once."""
    kv_tokens: Positive = 32768
    """Tokens that the KV cache of the embedded engine holds."""
    threads: Positive | None = None
    """CPU threads of the model worker; default: all cores."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of the GPU's memory that aglite's own vLLM takes while it is awake."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights in aglite's own vLLM; `auto`: bfloat16 on a GPU, float32 on the CPU."""
    enforce_eager: bool = False
    """Let aglite's own vLLM do without compiling and CUDA graphs: it starts sooner, takes less memory and samples more
    slowly."""
    sleep_level: Literal[1, 2] | None = None
    """What aglite's own vLLM does with its weights during an update: 1 moves them to host memory, 2 drops them, since
    new ones come anyway; default 2, with LoRA and on the CPU 1."""
    transfer: Literal["auto", "ipc", "folder"] = "auto"
    """How new weights reach aglite's own vLLM: `ipc`, from GPU memory to GPU memory; `folder`, by files in /dev/shm (or
    in the run directory, where that is too small); `auto`: ipc on a GPU, else folder."""
    args: list[str] = []
    """Further flags of `vllm serve` for aglite's own vLLM, such as [--max-num-batched-tokens, "8192"]; not those that
    have a setting here."""
    start_timeout_s: Seconds = 900
    """How long aglite's own vLLM may take to load and compile the model."""

    @property
    def own_vllm(self) -> bool:
        """Whether it is a vLLM server that aglite starts itself."""
        return self.kind == "vllm" and not self.url


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError("write it like https://host:port")
    return url.rstrip("/")


class Tls(Section):
    cert: str
    """Certificate (chain) in PEM form, a file of the recipe folder or an absolute path."""
    key: str
    """Its private key, not encrypted."""


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
    """Address that the model routes listen on. Elsewhere than on loopback it needs `tls` or `allow_plain`."""
    port: Port = 0
    """Port of the model routes; 0: a free one."""
    control_port: Port = 0
    """Port of the control API on loopback; 0: a free one."""
    tls: Tls | None = None
    """Certificate with which the model routes are served as https."""
    allow_plain: bool = False
    """Let `host` be elsewhere than on loopback without `tls`: whoever can listen on that network reads all traffic."""
    public_url: Annotated[str, AfterValidator(_base_url)] | None = None
    """Where agents on other machines reach the model routes, such as https://gpu.example.org:8443: those in a cluster
    and, as their `base_url`, external ones. Needed for `backend: kubernetes`, and where `host` is a wildcard such as
    0.0.0.0."""


class Retention(Section):
    traffic: Literal["all", "tokens"] = "all"
    """`all` keeps what was said and printed; `tokens` keeps token ids, log-probabilities and numbers, but no messages,
    no text of requests and no output of agents."""
    days: Positive | None = None
    """Traffic of rollouts that ended longer ago than this is removed, at the start and once a day; by default none is.
    What training still needs is never removed."""


def _pattern(pattern: str) -> str:
    compiled(pattern)
    return pattern


class Redact(Section):
    named: list[Literal["emails", "api_keys"]] = []
    """Patterns that need not be written: e-mail addresses, and keys and tokens in the forms that services give them."""
    patterns: list[Annotated[str, AfterValidator(_pattern)]] = []
    """Regular expressions in RE2's syntax; what they match is masked in all that is shown and exported."""
    stored: bool = False
    """Mask also what is stored, before it is written. Graders then see the masked conversation; tokens stay as they
    are."""

    def redactor(self) -> Redactor:
        """What masks by these patterns; false when there are none."""
        return Redactor([*(NAMED[name] for name in self.named), *self.patterns])
