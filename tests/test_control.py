"""What the control API says to requests that cannot be answered."""

import json
import math
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import httpx
import pytest
from mini_run import AGENT, INTERRUPT, MiniRun

from aglite.client import ControlError
from aglite.control import create_control_app


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    run = MiniRun(tmp_path_factory.mktemp("control"), agent={"backend": "external"}, trainer={"steps": 1})
    run.start()
    run.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "rollout")
    control = json.loads(run.run_dir.control.read_text())

    def ask(method, path, body=None, **headers):
        headers = {"Authorization": f"Bearer {control['token']}", "Content-Type": "application/json", **headers}
        request = urllib.request.Request(control["url"] + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    ask.run = run
    yield ask
    if run.process.poll() is None:
        run.signal(INTERRUPT)
        run.wait()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/api/rollouts/r-none", None, 404, "no rollout r-none"),
        ("POST", "/api/rollouts/r-none/kill", b"", 409, "not running"),
        ("POST", "/api/rollouts/r-none/retry", b"", 404, "no rollout r-none"),
        ("GET", "/api/rollouts?state=foo", None, 422, "state"),
        ("GET", "/api/rollouts?limit=0", None, 422, "limit"),
        ("GET", "/api/events?after=soon", None, 422, "after"),
        ("POST", "/api/rollouts", b'{"task": 3}', 422, "task"),
        ("POST", "/api/rollouts", b'{"task": {"public": {}}}', 409, "`id` must be"),
        ("POST", "/api/rollouts", b'{"task": {"id": "a", "public": 3}}', 409, "`public` is"),
        ("POST", "/api/rollouts", b"{", 422, "JSON"),
        ("POST", "/api/rollouts", b"", 422, "the body"),
        ("GET", "/api/nothing", None, 404, "no route /api/nothing"),
    ],
)
def test_errors_are_one_sentence(api, method, path, body, status, words):
    code, said = api(method, path, body)
    assert code == status
    assert words in json.loads(said)["detail"]


def test_a_bad_event_cursor_is_refused(api):
    code, said = api("GET", "/api/events", **{"Last-Event-ID": "soon"})
    assert code == 422 and "last-event-id" in json.loads(said)["detail"]


def test_no_page_loads_scripts_from_elsewhere(api):
    assert api("GET", "/docs")[0] == api("GET", "/redoc")[0] == 404
    assert b"/api/rollouts/{rollout_id}/finish" in api("GET", "/api/openapi.json")[1]


def test_an_external_rollout_is_killed_and_leaves_its_place_in_the_group(api):
    opened = [
        json.loads(api("POST", "/api/rollouts", b'{"task": {"question": "hi"}, "group": "pair"}')[1]) for _ in range(2)
    ]
    killed = opened[0]["rollout_id"]
    assert api("POST", f"/api/rollouts/{killed}/kill")[0] == 200
    assert api.run.store().rollout(killed)["state"] == "cancelled"
    assert api("POST", f"/api/rollouts/{killed}/finish", b'{"reward": 1}')[0] == 409
    code, said = api("POST", f"/api/rollouts/{killed}/retry")
    assert code == 409 and "somebody else" in json.loads(said)["detail"]
    assert api("POST", f"/api/rollouts/{opened[1]['rollout_id']}/finish", b'{"reward": 1}')[0] == 200
    (group,) = [row for row in api.run.store().groups() if row["id"] == api.run.store().rollout(killed)["group"]]
    assert group["state"] == "open"


def test_an_external_rollout_ends_with_its_run(api):
    _, said = api("POST", "/api/rollouts", b'{"task": {"question": "hi"}}')
    rollout_id = json.loads(said)["rollout_id"]
    api.run.signal(INTERRUPT)
    api.run.wait()
    rollout = api.run.store().rollout(rollout_id)
    assert (rollout["state"], rollout["cause"]) == ("cancelled", "stopped")


HOLDING = (
    """
import os, pathlib, time
while pathlib.Path(os.environ["HOLD"]).exists():
    time.sleep(0.02)
"""
    + AGENT
)


def test_killed_and_retried(tmp_path):
    """A rollout that a person ended runs again as a new attempt, and is trained with its group."""
    hold = tmp_path / "hold"
    hold.touch()
    run = MiniRun(
        tmp_path / "run",
        program=HOLDING,
        agent={"env": {"HOLD": str(hold)}, "concurrency": 1},
        algorithm={"groups_per_step": 1, "groups_in_flight": 1},
        trainer={"steps": 1},
        evaluation={"before": False},
    )
    run.start()
    run.until(lambda store: (counts := store.counts_by_state())["running"] == counts["queued"] == 1)
    (running,) = run.store().rollouts(state="running")
    (waiting,) = run.store().rollouts(state="queued")
    client = run.client
    for rollout in (waiting, running):
        with pytest.raises(ControlError, match="still running or about to"):
            client.post(f"rollouts/{rollout['id']}/retry")
        client.post(f"rollouts/{rollout['id']}/kill")
        run.until(lambda store, id=rollout["id"]: store.rollout(id)["state"] == "cancelled")
        if rollout is waiting:
            client.post(f"rollouts/{waiting['id']}/retry")
    client.post(f"rollouts/{running['id']}/retry")
    hold.unlink()
    code, output = run.wait()
    assert code == 0, output
    store = run.store()
    assert [row["state"] for row in store.rollout_states(waiting["id"])] == [
        *("queued", "cancelled", "queued", "starting", "running", "grading", "done")
    ]
    again = store.rollout(running["id"])
    assert (again["state"], again["attempt"]) == ("done", 2) and again["trained_tokens"] > 0
    assert store.steps()[0]["metrics"]["rollouts"] == 2


def test_a_run_whose_numbers_are_none_any_more_is_told_all_the_same(tmp_path):
    """JSON has no word for what is not finite."""
    none = {"applied": False, "skipped": 1, "updates": 0, **dict.fromkeys(("loss", "grad_norm", "entropy"), math.nan)}
    run = MiniRun(tmp_path, script={"train": [{}, none]}, guard={"not_finite": 1}, trainer={"steps": 4})
    run.start()
    run.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "paused")
    control = json.loads(run.run_dir.control.read_text())

    def get(path):
        request = urllib.request.Request(control["url"] + path, headers={"Authorization": f"Bearer {control['token']}"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response, parse_constant=pytest.fail)

    steps = get("/api/steps")
    assert [row["state"] for row in steps] == ["applied", "skipped"]
    assert steps[0]["metrics"]["grad_norm"] == 1.0 and "grad_norm" not in steps[1]["metrics"]
    now = get("/api/status")
    assert now["phase"] == "paused" and [point["step"] for point in now["entropy"]] == [1]
    events = [event for event in now["log"] if event["kind"] == "step" and "reward_mean" in event["data"]]
    assert ["loss" in event["data"] for event in events] == [True, False]
    run.signal(INTERRUPT)
    assert run.wait()[0] == 130
    where = ("--dir", str(run.run_dir.path))
    assert json.loads(run.aglite("status", "--json", *where).stdout, parse_constant=pytest.fail)["step"] == 2
    assert json.loads(run.aglite("steps", "--json", *where).stdout, parse_constant=pytest.fail) == steps


async def test_a_rollout_in_full_is_put_together_beside_the_event_loop_that_serves_agents(monkeypatch):
    threads, detail = [], {"id": "r-1", "task": "half of 😀: \ud83d"}

    def put_together(*_, **__):
        threads.append(threading.current_thread())
        return detail

    monkeypatch.setattr("aglite.show.rollout_detail", put_together)
    app = create_control_app(SimpleNamespace(store=None, run_dir=None, runtime=None), "t0ken")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://control") as client:
        answer = await client.get("/api/rollouts/r-1", headers={"Authorization": "Bearer t0ken"})
    assert answer.json() == detail and threads != [threading.main_thread()]


def test_single_rollouts_are_ended_and_launched_again_from_the_command_line(tmp_path):
    """The agent waits for a file; a killed rollout leaves a hole in its group that a retry fills."""
    agent = f"import os, pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)\n"
    run = MiniRun(tmp_path, program=agent + AGENT, evaluation={"before": False}, trainer={"steps": 1})
    run.start()
    rows = run.until(lambda store: len(found := store.rollouts(state="running")) == 4 and found)
    chosen, where = rows[0]["id"], ("--dir", str(run.run_dir.path))
    refused = run.aglite("retry", chosen, *where)
    assert refused.returncode == 1 and "only one that failed or was cancelled" in refused.stderr
    killed = run.aglite("kill", chosen[:9], "--json", *where)
    assert json.loads(killed.stdout) == {"id": chosen, "state": "cancelled"}
    run.until(lambda store: store.rollout(chosen)["cause"] == "killed")
    assert run.aglite("retry", chosen, *where).stdout == f"rollout {chosen} is queued\n"
    run.until(lambda store: store.rollout(chosen)["state"] == "running")
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    row = run.store().rollout(chosen)
    assert (row["state"], row["attempt"]) == ("done", 2)
    assert "no supervisor runs" in run.aglite("kill", chosen, *where).stderr
