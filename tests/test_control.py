"""What the control API says to requests that cannot be answered."""

import json
import urllib.error
import urllib.request

import pytest
from mini_run import INTERRUPT, MiniRun


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
            with urllib.request.urlopen(request, timeout=20) as response:
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
        ("GET", "/api/rollouts?state=foo", None, 422, "state"),
        ("GET", "/api/rollouts?limit=0", None, 422, "limit"),
        ("GET", "/api/events?after=soon", None, 422, "after"),
        ("POST", "/api/rollouts", b'{"task": 3}', 422, "task"),
        ("POST", "/api/rollouts", b'{"task": {"public": {}}}', 409, "`id` must be"),
        ("POST", "/api/rollouts", b'{"task": {"id": "a", "public": 3}}', 409, "`public` is"),
        ("POST", "/api/rollouts", b"{", 422, "JSON"),
        ("POST", "/api/rollouts", b"", 422, "the body"),
        ("GET", "/api/nothing", None, 404, "Not Found"),
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
    assert b"/api/rollouts/{rollout_id}/finish" in api("GET", "/openapi.json")[1]


def test_an_external_rollout_ends_with_its_run(api):
    _, said = api("POST", "/api/rollouts", b'{"task": {"question": "hi"}}')
    rollout_id = json.loads(said)["rollout_id"]
    api.run.signal(INTERRUPT)
    api.run.wait()
    rollout = api.run.store().rollout(rollout_id)
    assert (rollout["state"], rollout["cause"]) == ("cancelled", "stopped")
