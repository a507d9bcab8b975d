"""What a run leaves on disk and shows of its traffic, with real runs: nothing more than its recipe says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mini_run import AGENT, MiniRun

from aglite.gateway.tokenizer import TextTokenizer
from aglite.lock import hold

WHO = "jane.doe@mail.example"

TALK = (
    AGENT.replace('"again"', f'"tell {WHO}"')
    + f"""
print("sent to {WHO}", flush=True)
if task["question"].startswith("train"):
    sys.exit("{WHO} did not answer")
"""
)
"""An agent that says and prints an address, and fails on it in training."""

GRADE = """
def grade(task, rollout, workdir):
    return int(rollout["id"][2:], 16) / 2**40
"""


def on_disk(run: MiniRun, text: str = WHO) -> list[str]:
    """The files of a run directory that hold a text."""
    files = [path for path in run.run_dir.path.rglob("*") if path.is_file()]
    assert run.run_dir.db in files
    return sorted(str(path.relative_to(run.run_dir.path)) for path in files if text.encode() in path.read_bytes())


def mini(folder: Path, **recipe) -> MiniRun:
    return MiniRun(
        folder, program=TALK, grade=GRADE, trainer={"steps": 1}, evaluation={"tasks": 1, "every": 1}, **recipe
    )


def said_by(run: MiniRun, *commands: list[str]) -> str:
    """All that commands print, which must work."""
    output = ""
    for command in commands:
        done = run.aglite(*command, "--dir", str(run.run_dir.path))
        assert done.returncode == 0, done.stderr
        output += done.stdout
    return output


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> MiniRun:
    """A finished run whose text is masked when it is shown, and stored as it was."""
    run = mini(tmp_path_factory.mktemp("shown"), redact={"named": ["emails"]})
    code, output = run.up()
    assert code == 0, output
    assert WHO not in output
    return run


def test_no_token_of_an_agent_is_kept(shown: MiniRun) -> None:
    # new_token() begins every token so; what follows is random
    assert on_disk(shown, "aglite-") == []
    assert on_disk(shown) == ["aglite.db", *[name for name in on_disk(shown) if name.startswith("logs/rollouts/")]]


def test_only_the_owner_can_read_it(shown: MiniRun) -> None:
    path = shown.run_dir.path
    assert path.stat().st_mode & 0o777 == 0o700
    private = [shown.run_dir.db, shown.run_dir.recipe, *(path / "logs" / "rollouts").iterdir()]
    assert {file.stat().st_mode & 0o777 for file in private} == {0o600}


def test_masked_where_it_is_shown(shown: MiniRun) -> None:
    store = shown.store()
    failed = next(row for row in store.rollouts() if row["state"] == "failed")
    assert failed["cause"] == f"exit: code 1: {WHO} did not answer"
    store.close()
    name = failed["id"]
    commands = (["show", name], ["show", name, "--json"], ["show", name, "--tokens"], ["logs", name], ["rollouts"])
    output = said_by(shown, *commands, ["rollouts", "--json"], ["status"], ["status", "--json"], ["attach"])
    assert WHO not in output and output.count("[redacted] did not answer") >= 4
    assert "tell [redacted]" in output and "sent to [redacted]" in output


def test_an_export_says_that_it_is_masked(shown: MiniRun, tmp_path: Path) -> None:
    def export(*options: str) -> list[dict]:
        said_by(shown, ["export", "--out", str(tmp_path / "out"), *options])
        return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]

    rollouts = export("--what", "rollouts")
    assert WHO not in json.dumps(rollouts) and all(row["redacted"] is True for row in rollouts)
    for what, ids in (("samples", {"input_ids"}), ("calls", {"prompt_ids", "response_ids"})):
        undecided = shown.aglite("export", "--what", what, "--out", "-", "--dir", str(shown.run_dir.path))
        assert undecided.returncode == 1 and "--no-tokens" in undecided.stderr and undecided.stdout == ""
        without, whole = export("--what", what, "--no-tokens"), export("--what", what, "--tokens")
        assert without and all(ids.isdisjoint(row) and row["redacted"] for row in without)
        for row in whole:
            for name in ids:
                assert row.pop(name)
        assert whole == without
    said_by(shown, ["export", "--no-tokens", "--format", "parquet", "--out", str(tmp_path / "out")])
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "out")
    assert "input_ids" not in table.column_names and set(table["redacted"].to_pylist()) == {True}


def test_masked_for_good_afterwards(shown: MiniRun) -> None:
    store = shown.store()
    before = {row["id"]: [call.json() for call in store.calls(row["id"])] for row in store.rollouts()}
    store.close()
    with hold(shown.run_dir):
        refused = shown.aglite("db", "redact", "--dir", str(shown.run_dir.path))
        assert refused.returncode == 1 and "in use by another aglite" in refused.stderr
    result = json.loads(said_by(shown, ["db", "redact", "--json"]))
    assert result["changed"]["messages"] and result["changed"]["rollouts"] and result["changed"]["logs"]
    assert on_disk(shown) == []
    assert json.loads(said_by(shown, ["db", "check", "--json"])) == {"ok": True, "problems": [], "unused_messages": 0}
    store = shown.store()
    assert {row["id"]: [call.json() for call in store.calls(row["id"])] for row in store.rollouts()} == before
    store.close()
    # the run is complete; to go on with it is still possible
    code, output = shown.up("--steps", "2")
    assert code == 0, output


def test_masked_before_it_is_stored(tmp_path: Path) -> None:
    run = mini(tmp_path, redact={"named": ["emails"], "patterns": ["train [0-9]+"], "stored": True})
    code, output = run.up()
    assert code == 0, output
    assert on_disk(run) == [] and WHO not in output
    store = run.store()
    row = next(row for row in store.rollouts() if row["state"] == "failed")
    assert row["cause"] == "exit: code 1: [redacted] did not answer"
    call = store.calls(row["id"])[-1]
    said = [message["content"] for message in store.messages(call)]
    assert said[0] == "[redacted]?" and said[2] == "tell [redacted]"
    # what the model read and what is trained is whole
    text = TextTokenizer(Path(run.recipe["model"])).decode(call.prompt_ids)
    assert f"tell {WHO}" in text and "train " in text
    assert any(sample.rollout_id == row["id"] for sample in store.samples()) and store.check() == []
    store.close()
    log = run.run_dir.rollout_log(row["id"], 1).read_text()
    assert log == "sent to [redacted]\n[redacted] did not answer\n"


def test_tokens_only_and_days(tmp_path: Path) -> None:
    run = mini(tmp_path)
    code, output = run.up()
    assert code == 0 and "aglite.db" in on_disk(run), output
    # retention may change when a run goes on: what is there is brought down to it
    code, output = run.up("--steps", "2", "--set", "retention.traffic=tokens")
    assert code == 0, output
    assert "retention: removed what was said in" in output
    # the tasks are of the recipe and stay
    assert on_disk(run) == [] and on_disk(run, "tell ") == []
    store = run.store()
    rows = store.rollouts()
    assert {row["cause"] for row in rows if row["state"] == "failed"} == {"exit", "exit: code 1"}
    assert all(store.conversations(row["id"]) and store.samples(rollout_id=row["id"]) for row in rows if row["samples"])
    assert store.check() == []
    store.close()
    logs = [run.run_dir.rollout_log(row["id"], 1) for row in rows]
    assert {log.read_text()[:5] for log in logs if log.exists()} == {"\n[..."}
    pruned = json.loads(said_by(run, ["db", "prune", "--older-than", "0", "--dry-run", "--json"]))
    assert pruned["rollouts"] == len(rows) and pruned["spared"] == 0
    out = tmp_path / "out.jsonl"
    said_by(run, ["db", "prune", "--step", "1"], ["export", "--out", str(out)])
    assert {json.loads(line)["step"] for line in out.read_text().splitlines()} == {2}
    assert "pruned" in said_by(run, ["rollouts", "--json"])
    refused = run.aglite("db", "prune", "--dir", str(run.run_dir.path))
    assert refused.returncode == 2 and "--older-than" in refused.stderr
    assert "removed the traffic of" in said_by(run, ["db", "prune", "--state", "done", "--state", "failed"])
    assert said_by(run, ["export", "--what", "calls", "--out", "-"]) == ""
    assert "is whole" in said_by(run, ["db", "check"])
    code, output = run.up("--steps", "3", "--set", "retention.days=1")
    assert code == 0, output
