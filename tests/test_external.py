"""Agents that somebody else launches: opened, used, finished and trained on through the control API."""

import json
import urllib.error
import urllib.request

import pytest
from mini_run import INTERRUPT, MiniRun
from openai import AuthenticationError, OpenAI


class Api:
    """The control API by hand."""

    def __init__(self, run: MiniRun) -> None:
        control = json.loads(run.run_dir.control.read_text())
        self.url, self.token = control["url"], control["token"]

    def __call__(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, object]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture
def run(tmp_path):
    made = MiniRun(
        tmp_path,
        agent={"backend": "external"},
        algorithm={"name": "grpo", "group_size": 2, "groups_per_step": 2},
        trainer={"steps": 2},
    )
    made.start()
    made.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "rollout")
    yield made
    if made.process.poll() is None:
        made.signal(INTERRUPT)
        made.wait()


def play(api: Api, group: str, reward: float) -> dict:
    status, opened = api("POST", "/api/rollouts", {"task": {"question": "hi"}, "group": group})
    assert status == 200, opened
    client = OpenAI(base_url=opened["base_url"] + "/v1", api_key=opened["token"])
    messages = [{"role": "user", "content": "hi"}]
    client.chat.completions.create(model="m", messages=messages, max_tokens=5)
    status, ended = api("POST", f"/api/rollouts/{opened['rollout_id']}/finish", {"reward": reward})
    assert (status, ended["state"]) == (200, "done")
    return opened


def test_groups_of_external_rollouts_are_trained(run):
    api = Api(run)
    opened = [play(api, f"task-{number // 2}", number % 2) for number in range(8)]
    code, output = run.wait()
    assert code == 0, output
    store = run.store()
    assert [row["state"] for row in store.steps()] == ["applied", "applied"]
    assert [row["metrics"]["rollouts"] for row in store.steps()] == [4, 4]
    assert all(row["metrics"]["zero_advantage_groups"] == 0 for row in store.steps())
    for one in opened:
        rollout = store.rollout(one["rollout_id"])
        assert rollout["state"] == "done" and rollout["trained_tokens"] == rollout["sampled_tokens"] == 5


def test_a_rollout_token_opens_nothing_else(run):
    api = Api(run)
    _, mine = api("POST", "/api/rollouts", {"task": {}})
    _, other = api("POST", "/api/rollouts", {"task": {}})
    assert api("GET", "/api/status", token=mine["token"])[0] == 401
    client = OpenAI(base_url=other["base_url"] + "/v1", api_key=mine["token"], max_retries=0)
    with pytest.raises(AuthenticationError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    api("POST", f"/api/rollouts/{mine['rollout_id']}/finish", {"error": "its machine went away"})
    client = OpenAI(base_url=mine["base_url"] + "/v1", api_key=mine["token"], max_retries=0)
    with pytest.raises(AuthenticationError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert run.store().rollout(mine["rollout_id"])["cause"] == "external: its machine went away"


@pytest.mark.parametrize(
    ("body", "words"),
    [({}, "either"), ({"reward": 1, "error": "x"}, "either"), ({"reward": float("inf")}, "finite")],
)
def test_bad_ends_are_refused(run, body, words):
    api = Api(run)
    _, opened = api("POST", "/api/rollouts", {"task": {}})
    status, said = api("POST", f"/api/rollouts/{opened['rollout_id']}/finish", body)
    assert status == 409 and words in said["detail"] + said["mend"]
    assert api("POST", "/api/rollouts/r-none/finish", {"reward": 1})[0] == 409


def test_a_task_of_the_recipe_is_not_shadowed(run):
    api = Api(run)
    mine = run.store().task("train", "train-3")
    status, said = api("POST", "/api/rollouts", {"task": {"id": "train-3", "question": "something else"}})
    assert status == 409 and "`id` train-3 is that of another task" in said["detail"]
    same = {"id": "train-3", "public": mine["public"], "hidden": {"answer": "made up"}}
    assert api("POST", "/api/rollouts", {"task": same})[0] == 200
    assert run.store().task("train", "train-3") == mine
    assert api("POST", "/api/rollouts", {"task": {"id": "new", "question": "a"}})[0] == 200
    assert api("POST", "/api/rollouts", {"task": {"id": "new", "question": "a"}})[0] == 200
    assert api("POST", "/api/rollouts", {"task": {"id": "new", "question": "b"}})[0] == 409


def test_status_metrics_and_events(run):
    api = Api(run)
    status, now = api("GET", "/api/status")
    assert status == 200 and now["phase"] == "rollout" and now["queue"]["running"] == 0
    request = urllib.request.Request(f"{api.url}/metrics", headers={"Authorization": f"Bearer {api.token}"})
    text = urllib.request.urlopen(request).read().decode()
    assert 'aglite_phase{phase="rollout"} 1' in text and "aglite_policy_version 0" in text
    request = urllib.request.Request(f"{api.url}/api/events?after=0", headers={"Authorization": f"Bearer {api.token}"})
    with urllib.request.urlopen(request, timeout=120) as stream:
        lines = iter(lambda: stream.readline().decode(), "")
        assert next(line for line in lines if line.startswith("id: ")) == "id: 1\n"
        data = next(line for line in lines if line.startswith("data: "))
    assert json.loads(data.removeprefix("data: "))["text"] == "starting"


def test_a_group_with_one_graded_rollout_is_dropped(run):
    api = Api(run)
    play(api, "lonely", 1.0)
    _, opened = api("POST", "/api/rollouts", {"task": {"question": "hi"}, "group": "lonely"})
    api("POST", f"/api/rollouts/{opened['rollout_id']}/finish", {"error": "its machine went away"})
    run.until(lambda store: store.groups(state="dropped"))
    assert not run.store().groups(state="complete")
