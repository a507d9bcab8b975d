"""The status as Prometheus text, in Prometheus' own units and names: seconds, bytes, ratios, counters in `_total`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from aglite import __version__
from aglite.phases import PHASES
from aglite.store import Store

__all__ = ["CONTENT_TYPE", "prometheus"]

Labelled = dict[tuple[str, ...], float | None]


def prometheus(now: dict[str, Any], store: Store) -> str:
    """The status `now` and what the store adds up, as text. What is not known (no step yet, no GPU) is left out."""
    registry = CollectorRegistry()
    registry.register(_Collected([*_run(now, store), *_rollouts(now), *_engine(now), *_learning(now), *_machine(now)]))
    return generate_latest(registry).decode()


class _Collected:
    """Metrics that are made already, in the form that a registry takes."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauge(name: str, text: str, values: Labelled | float | None, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"aglite_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: Labelled | float | None, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"aglite_{name}", text, labels=labels), values)


def _filled(family: Any, values: Labelled | float | None) -> Metric:
    for labels, value in (values if isinstance(values, dict) else {(): values}).items():
        if value is not None:
            family.add_metric(labels, value)
    return family


def _run(now: dict[str, Any], store: Store) -> Iterator[Metric]:
    about = (now["run"], now["model"], now["mode"], __version__)
    yield _gauge("info", "1; what this is, in the labels.", {about: 1}, ("run", "model", "mode", "version"))
    yield _gauge("start_time_seconds", "When the supervisor started, Unix time.", now["started_at"])
    phases = {(phase,): float(phase == now["phase"]) for phase in PHASES}
    yield _gauge("phase", "1 for the phase the accelerator is in.", phases, ("phase",))
    spent = {(phase,): seconds for phase, seconds in store.phase_seconds().items()}
    yield _counter("phase_seconds", "Time spent in each phase over the whole run.", spent, ("phase",))
    yield _gauge("step", "Training steps done.", now["step"])
    yield _gauge("steps", "Training steps of the run.", now["steps"])
    yield _gauge("policy_version", "Policy version in force.", now["policy_version"])
    yield _gauge("eta_seconds", "Expected time to the last step.", now["eta_s"])
    yield _gauge("last_update_seconds", "How long agents were held by the last update.", now["last_update_s"])
    checkpoint = now["checkpoint"] or {}
    yield _gauge("checkpoint_step", "Step of the newest checkpoint.", checkpoint.get("step"))
    yield _gauge("checkpoint_time_seconds", "When the newest checkpoint was written, Unix time.", checkpoint.get("at"))


def _rollouts(now: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge("rollouts", "Rollouts by state.", {(state,): n for state, n in now["queue"].items()}, ("state",))
    causes = {(code,): n for code, n in now["causes"].items()}
    yield _gauge("rollouts_by_cause", "Rollouts that ended other than well.", causes, ("cause",))
    yield _gauge("groups", "Groups by state.", {(state,): n for state, n in now["groups"].items()}, ("state",))
    yield _gauge("gate_closed", "1 while requests are held.", float(now["gate"]["state"] == "closed"))
    yield _gauge("gate_held_requests", "Requests held by the gate.", now["gate"]["held"])


def _engine(now: dict[str, Any]) -> Iterator[Metric]:
    engine = now["engine"]
    requests = {(state,): engine[state] for state in ("running", "waiting")}
    yield _gauge("engine_requests", "Requests at the engine.", requests, ("state",))
    yield _gauge("engine_tokens_per_second", "Sampled tokens, over the last few seconds.", engine["tokens_per_s"])
    yield _counter("engine_sampled_tokens", "Tokens sampled since the start.", engine["sampled_tokens"])
    prompt = {("computed",): engine["prefill_tokens"], ("cache",): engine["reused_tokens"]}
    yield _counter("engine_prompt_tokens", "Prompt tokens since the start, by where they came from.", prompt, ("from",))
    yield _gauge("engine_kv_tokens", "Tokens in the KV cache.", engine["kv_tokens"])
    yield _gauge("engine_kv_capacity_tokens", "Tokens that the KV cache holds.", engine["kv_capacity"])


def _learning(now: dict[str, Any]) -> Iterator[Metric]:
    def last(series: str, key: str) -> float | None:
        return now[series][-1][key] if now[series] else None

    yield _gauge("reward_mean", "Mean training reward of the last step.", last("reward", "mean"))
    yield _gauge("reward_std", "Standard deviation of the last step's rewards.", last("reward", "std"))
    yield _gauge("validation_reward_mean", "Mean reward of the last evaluation.", last("val", "mean"))
    yield _gauge("validation_reward_stderr", "Standard error of that mean.", last("val", "stderr"))
    yield _gauge("entropy", "Entropy of the policy in the last step, nats a token.", last("entropy", "value"))
    yield _gauge("kl_rollout", "KL of the last step between engine and trainer, nats a token.", last("kl", "value"))
    forks = now["forks"][-1] if now["forks"] else {}
    calls = {(follows,): n for follows, n in forks.items() if follows != "step"}
    yield _gauge("step_calls", "Calls of the last step by how they follow from earlier ones.", calls, ("follows",))
    for name, of in (("done", "done"), ("planned", "of")):
        yield _gauge(f"update_micro_batches_{name}", "Of the update under way or the last.", now["training"].get(of))


def _machine(now: dict[str, Any]) -> Iterator[Metric]:
    host = now["host"]
    yield _gauge("host_cpu_ratio", "Load of all cores together.", host["cpu_percent"] / 100)
    yield _gauge("host_memory_used_bytes", "Memory in use.", host["ram_used"])
    yield _gauge("host_memory_bytes", "Memory of the machine.", host["ram_total"])
    yield _gauge("host_disk_free_bytes", "Free room on the run's disk.", host["disk_free"])
    yield _gauge("database_bytes", "Size of the run's database.", host["db_bytes"])
    gpus = {(str(number), gpu["name"]): gpu for number, gpu in enumerate(now["gpu"])}
    for name, text, key, unit in (
        ("gpu_utilization_ratio", "Share of time in which the GPU was busy.", "util", 100),
        ("gpu_memory_used_bytes", "GPU memory in use.", "mem_used", 1),
        ("gpu_memory_bytes", "Memory of the GPU.", "mem_total", 1),
        ("gpu_power_watts", "Power drawn.", "power_w", 1),
        ("gpu_temperature_celsius", "Temperature.", "temp_c", 1),
    ):
        values = {labels: None if gpu[key] is None else gpu[key] / unit for labels, gpu in gpus.items()}
        yield _gauge(name, text, values, ("gpu", "name"))
