"""Anyone could write another UI: the control API's document says what it answers, its events resume, its metrics are
Prometheus'."""

from __future__ import annotations

import copy
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from mini_run import INTERRUPT, MiniRun
from prometheus_client.parser import text_string_to_metric_families

from aglite.phases import PHASES

ROOT = Path(__file__).resolve().parent.parent


class Api:
    """The control API of a run that has done a step and is paused."""

    def __init__(self, run: MiniRun) -> None:
        control = json.loads(run.run_dir.control.read_text())
        self.run = run
        self.client = httpx.Client(
            base_url=control["url"], headers={"Authorization": f"Bearer {control['token']}"}, timeout=120
        )
        self.document = self.client.get("/api/openapi.json", headers={"Authorization": ""}).json()

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pause(self) -> None:
        """Nothing moves when this is done."""
        assert self.client.post("/api/pause").status_code == 200
        self.run.until(lambda store: store.phases()[-1]["phase"] == "paused")

    def metrics(self) -> tuple[str, dict[str, Any]]:
        """The metrics, and the status that they are of: it was the same before and after."""
        before: dict[str, Any] = {}
        for _ in range(100):
            text, after = self.client.get("/metrics").text, self.get("/api/status")
            if all(after[key] == before.get(key) for key in ("step", "reward", "val")):
                return text, after
            before = after
        raise AssertionError("the run never stood still")

    def check(self, value: Any, path: str, method: str = "get", status: str = "200") -> None:
        """Hold `value` against the document, and see that the document names every key in it."""
        response = self.document["paths"][path][method]["responses"][status]
        schema = response["content"]["application/json"]["schema"]
        components = _closed(copy.deepcopy(self.document["components"]))
        jsonschema.validate(value, {**schema, "components": components}, jsonschema.Draft202012Validator)


def _closed(node: Any) -> Any:
    """A schema that allows no other properties than it names."""
    if isinstance(node, dict):
        if "properties" in node:
            node.setdefault("additionalProperties", False)
        for value in node.values():
            _closed(value)
    elif isinstance(node, list):
        for value in node:
            _closed(value)
    return node


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    run = MiniRun(tmp_path_factory.mktemp("document"), trainer={"steps": 500})
    run.start()
    run.until(lambda store: store.steps() and store.checkpoints() and store.evaluations())
    api = Api(run)
    api.pause()
    yield api
    run.signal(INTERRUPT)
    run.wait()


def test_the_published_document_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "update_openapi.py", "--check"], check=True)


def test_the_document_names_every_route_and_how_to_be_let_in(api: Api) -> None:
    published = json.loads((ROOT / "docs" / "control-openapi.json").read_text())
    assert set(api.document["paths"]) == set(published["paths"])
    page = (ROOT / "docs" / "control-api.md").read_text()
    for path, operations in api.document["paths"].items():
        for method, operation in operations.items():
            shown = path.replace("{rollout_id}", "{id}")
            assert f"`{method.upper()} {shown}" in page, f"docs/control-api.md does not tell of {method} {path}"
            assert operation["description"], path
            if path != "/healthz":
                (scheme,) = operation["security"][0]
                assert api.document["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
                answer = httpx.request(method, str(api.client.base_url) + path, timeout=120)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
                api.check(answer.json(), path, method, "401")


def test_what_it_answers_is_what_the_document_says(api: Api) -> None:
    api.check(api.get("/api/status"), "/api/status")
    rows = api.get("/api/rollouts?limit=5")
    assert len(rows) == 5
    api.check(rows, "/api/rollouts")
    done = api.get("/api/rollouts?state=done")
    detail = api.get(f"/api/rollouts/{done[-1]['id']}")
    assert detail["call_rows"] and detail["states"]
    api.check(detail, "/api/rollouts/{rollout_id}")
    api.check(api.get("/api/steps"), "/api/steps")
    api.check(api.client.get("/api/rollouts/r-none").json(), "/api/rollouts/{rollout_id}", status="404")
    api.check(api.client.get("/api/rollouts?limit=0").json(), "/api/rollouts", status="422")


def test_a_wrong_way_is_shown_the_right_one(api: Api) -> None:
    missing = api.client.get("/api/roll").json()
    assert missing == {"detail": "there is no route /api/roll", "mend": "GET /api/openapi.json lists what there is"}
    wrong = api.client.delete("/api/status")
    assert wrong.status_code == 405 and wrong.json()["detail"] == "/api/status does not take DELETE"


def _stream(api: Api, path: str, opened: Callable[[], None] = lambda: None, **headers: str) -> Iterator[dict[str, Any]]:
    """The events of a stream, each checked against its own `id`. `opened` is called once the connection is."""
    with api.client.stream("GET", path, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        opened()
        cursor = ""
        for line in response.iter_lines():
            if line.startswith("id: "):
                cursor = line.removeprefix("id: ")
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert str(event["id"]) == cursor
                yield event


def _events(api: Api, number: int, path: str, **headers: str) -> list[dict[str, Any]]:
    return list(itertools.islice(_stream(api, path, **headers), number))


def test_events_resume_where_a_connection_broke_off(api: Api) -> None:
    first = _events(api, 6, "/api/events")
    assert [event["id"] for event in first] == sorted(event["id"] for event in first)
    cursor = first[2]["id"]
    assert _events(api, 3, f"/api/events?after={cursor}") == first[3:]
    # a client that reconnects asks for the address it was given at first, and says how far it had come
    assert _events(api, 3, "/api/events?after=0", **{"Last-Event-ID": str(cursor)}) == first[3:]
    wanted = {**api.document["components"]["schemas"]["Event"], "components": _closed(api.document["components"])}
    for event in first:
        jsonschema.validate(event, wanted, jsonschema.Draft202012Validator)


def test_new_events_come_while_the_connection_is_open(api: Api) -> None:
    last = api.get("/api/status")["log"][-1]["id"]
    came: queue.Queue[dict[str, Any]] = queue.Queue()
    opened = threading.Event()

    def read() -> None:
        for event in _stream(api, f"/api/events?after={last}", opened.set):
            came.put(event)
            if event["kind"] == "phase":
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert opened.wait(60)
    assert api.client.post("/api/resume").status_code == 200
    reader.join(60)
    got = list(came.queue)
    api.pause()
    assert got[-1]["kind"] == "phase" and all(event["id"] > last for event in got)


def test_metrics_are_prometheus_text(api: Api) -> None:
    answer = api.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    text, status = api.metrics()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "version")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values[("aglite_info", "async", status["model"], "mini")] == 1
    assert {name[1] for name in values if name[0] == "aglite_phase"} == set(PHASES)
    assert sum(value for name, value in values.items() if name[0] == "aglite_phase") == 1
    assert values[("aglite_phase_seconds_total", "rollout")] > 0
    assert values[("aglite_rollouts", "done")] >= 4
    assert values[("aglite_step",)] >= 1 and values[("aglite_steps",)] == 500
    assert values[("aglite_reward_mean",)] == status["reward"][-1]["mean"]
    assert values[("aglite_validation_reward_mean",)] == status["val"][-1]["mean"]
    assert values[("aglite_engine_sampled_tokens_total",)] > 0
    assert values[("aglite_gate_held_requests",)] >= 0 and values[("aglite_gate_closed",)] in (0, 1)
    assert values[("aglite_host_memory_bytes",)] > 2**30
    assert families["aglite_engine_sampled_tokens"].type == "counter"
    assert all(family.documentation for family in families.values())
