"""What a recipe that names a harness comes to: what the program is told, and what is said when it cannot work."""

from __future__ import annotations

import json
import re
import tomllib
import typing
from pathlib import Path

import pytest
from bench import Bench

from aglite import doctor
from aglite.config import parse_recipe
from aglite.config.sections import Agent
from aglite.errors import RecipeError
from aglite.harnesses import HARNESSES, Order
from aglite.harnesses.find import find, version_of
from aglite.rollouts.environment import prompt_of

ROOT = Path(__file__).resolve().parents[2]
ORDER = Order("--do \"it\"\n'now'", "http://127.0.0.1:1/rollouts/r-1", "secret", "tiny", 40_000, 500.0, ["--more"])

STAND_IN = """#!/usr/bin/env python3
import json, os, pathlib, sys
home = pathlib.Path(os.environ["HOME"])
files = {str(file.relative_to(home)): file.read_text() for file in home.rglob("*") if file.is_file()}
print(json.dumps({"argv": sys.argv[1:], "stdin": sys.stdin.read(), "env": dict(os.environ), "files": files}))
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with a program of each name that prints what it was launched with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for harness in HARNESSES.values():
        (folder / harness.program).write_text(STAND_IN)
        (folder / harness.program).chmod(0o755)
    return folder


def recipe(tmp_path: Path, **agent: object):
    return parse_recipe(
        {
            "name": "r",
            "model": "m",
            "tasks": {"train": "train.jsonl", "val": "train.jsonl"},
            "agent": agent,
            "reward": {"grade": "grade.py:grade"},
        },
        tmp_path / "recipe.yaml",
    )


def test_a_recipe_can_name_every_preset() -> None:
    names, none = typing.get_args(Agent.model_fields["harness"].annotation)
    assert set(typing.get_args(names)) == set(HARNESSES) and none is type(None)


@pytest.mark.parametrize("name", HARNESSES)
async def test_the_program_is_told_all_it_needs(name: str, tmp_path: Path, stand_ins: Path) -> None:
    agent = {
        "harness": name,
        "harness_path": str(stand_ins),
        "harness_args": ["--more"],
        "env": {"TOPIC": "{task.topic}"},
    }
    async with Bench(tmp_path, command=[], **agent) as bench:
        outcome = await bench.run({"topic": "tea", "question": "--what? 'now'"})
        assert (outcome.state, outcome.reward) == ("done", 1.0), outcome
        seen = json.loads(bench.log().splitlines()[0])
        session_path = f"/rollouts/{bench.last}"
    told = json.dumps([seen["argv"], seen["env"], seen["files"]])
    assert f"http://127.0.0.1:1{session_path}" in told and "test-model" in told
    said = seen["stdin"] or seen["argv"][-1].removeprefix("--task=")
    assert said == "--what? 'now'", "all of the task, and no option"
    assert "--more" in seen["argv"]
    assert seen["env"]["TOPIC"] == "tea"
    kit = HARNESSES[name].kit(ORDER)
    assert set(kit.files) == set(seen["files"])
    assert set(kit.env) <= set(seen["env"])


def test_programs_are_more_patient_than_the_gateway_holds() -> None:
    assert "--config=model.model_kwargs.timeout=560" in HARNESSES["mini-swe-agent"].kit(ORDER).command
    settings = json.loads(HARNESSES["openhands"].kit(ORDER).files[".openhands/agent_settings.json"])
    assert settings["llm"]["timeout"] == settings["condenser"]["llm"]["timeout"] == 560
    provider = json.loads(HARNESSES["opencode"].kit(ORDER).files[".config/opencode/opencode.json"])["provider"][
        "aglite"
    ]
    assert provider["options"]["headerTimeout"] == provider["options"]["chunkTimeout"] == 560_000
    config = tomllib.loads(HARNESSES["codex"].kit(ORDER).files[".codex/config.toml"])
    assert config["model_providers"]["aglite"]["stream_idle_timeout_ms"] == 560_000
    env = HARNESSES["claude-code"].kit(ORDER).env
    assert env["API_TIMEOUT_MS"] == env["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "560000"


def test_programs_know_the_context() -> None:
    settings = json.loads(HARNESSES["openhands"].kit(ORDER).files[".openhands/agent_settings.json"])
    assert settings["llm"]["max_input_tokens"] == 40_000
    provider = json.loads(HARNESSES["opencode"].kit(ORDER).files[".config/opencode/opencode.json"])["provider"][
        "aglite"
    ]
    assert provider["models"]["tiny"]["limit"] == {"context": 40_000, "output": 10_000}
    config = tomllib.loads(HARNESSES["codex"].kit(ORDER).files[".codex/config.toml"])
    assert config["model_context_window"] == 40_000 > config["model_auto_compact_token_limit"]
    assert HARNESSES["claude-code"].kit(ORDER).env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"


@pytest.mark.parametrize("name", HARNESSES)
def test_a_preset_names_no_place_of_this_machine(name: str) -> None:
    kit = HARNESSES[name].kit(ORDER)
    assert kit.command[0] == HARNESSES[name].program
    assert not any(place.startswith("/") or ".." in place for place in kit.files)
    assert not re.search(r"/(root|home|tmp)/", json.dumps([list(kit.command), dict(kit.env), dict(kit.files)]))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"harness": "codex", "command": ["codex"]}, "agent.command: codex brings its own; leave out `command`"),
        ({"command": ["a"], "prompt": "{task.x}"}, "agent.prompt: it is for a harness"),
        ({"command": ["a"], "harness_args": ["-x"]}, "agent.harness_args: it is for a harness"),
        ({"harness": "codex", "backend": "external"}, "agent.harness: external rollouts are launched by somebody else"),
        ({"harness": "aider"}, "agent.harness: Input should be 'mini-swe-agent', 'openhands'"),
        ({}, "or name a `harness`"),
    ],
)
def test_contradictions_are_refused(agent: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(tmp_path, **agent)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("public", "agent", "prompt"),
    [
        ({"text": "d", "question": "c", "instruction": "b", "prompt": "a"}, {}, "a"),
        ({"text": "d", "question": "c", "instruction": "b"}, {}, "b"),
        ({"text": "d", "question": "c"}, {}, "c"),
        ({"text": "d"}, {}, "d"),
        ({"issue": "e", "text": "d"}, {"prompt": "Solve: {task.issue}"}, "Solve: e"),
    ],
)
def test_what_the_program_is_told(public: dict, agent: dict, prompt: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, harness="codex", **agent)
    assert prompt_of(made, {"id": "t", "public": public, "hidden": {}}) == prompt


@pytest.mark.parametrize(
    ("public", "agent", "message"),
    [
        ({"issue": "x"}, {}, "task 't' has none of prompt, instruction, question, text in its public part, only issue"),
        ({"issue": "x"}, {"prompt": "{task.isue}"}, "agent.prompt: task 't' has no 'isue'"),
        ({"text": " \n"}, {}, "agent.prompt with task 't': it is empty"),
        ({"text": "x" * 200_000}, {}, "200,000 bytes are more than a process can be given"),
    ],
)
def test_a_task_that_says_nothing_is_refused(public: dict, agent: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        prompt_of(recipe(tmp_path, harness="codex", **agent), {"id": "t", "public": public, "hidden": {}})
    assert message in str(error.value)


async def test_a_program_that_is_missing_stops_the_start_with_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as elsewhere, pytest.raises(RecipeError) as error:
        elsewhere.setenv("PATH", str(tmp_path))
        elsewhere.setattr("sys.executable", str(tmp_path / "python"))
        find(HARNESSES["codex"], None)
    assert "codex is not installed" in error.value.message
    assert "npm install -g @openai/codex@0.171.0" in error.value.mend
    with pytest.raises(RecipeError, match="has no program 'mini'"):
        async with Bench(tmp_path, command=[], harness="mini-swe-agent", harness_path="nowhere"):
            pass


def test_doctor_looks_at_the_harness_and_the_tasks(tmp_path: Path, stand_ins: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"id": "a", "public": {"text": "x"}}\n{"id": "b", "public": {"word": "x"}}\n'
    )
    found = {
        check.name: check for check in doctor.checks(recipe(tmp_path, harness="codex", harness_path=str(stand_ins)))
    }
    assert found["harness"].status == "warning" and "tested: 0.171.0" in found["harness"].detail
    assert found["prompts"].status == "error" and "task 'b' has none of" in found["prompts"].detail
    package = stand_ins / "package.json"
    package.write_text(json.dumps({"name": "@openai/codex", "version": "0.171.0"}))
    (tmp_path / "train.jsonl").write_text('{"id": "a", "public": {"text": "x"}}\n')
    found = {
        check.name: check for check in doctor.checks(recipe(tmp_path, harness="codex", harness_path=str(stand_ins)))
    }
    assert (found["harness"].status, found["prompts"].status) == ("ok", "ok")
    missing = {check.name: check for check in doctor.checks(recipe(tmp_path, harness="codex", harness_path="nowhere"))}
    assert missing["harness"].status == "error" and "npm install" in missing["harness"].mend


def test_the_version_of_a_python_program_is_read_beside_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mini").touch()
    assert version_of(HARNESSES["mini-swe-agent"], tmp_path / "bin" / "mini") is None
    (tmp_path / "lib" / "python3.12" / "site-packages" / "mini_swe_agent-2.4.6.dist-info").mkdir(parents=True)
    assert version_of(HARNESSES["mini-swe-agent"], tmp_path / "bin" / "mini") == "2.4.6"


def test_docs_and_the_tests_install_the_versions_of_the_presets() -> None:
    page = (ROOT / "docs" / "harnesses.md").read_text()
    script = (ROOT / "tests" / "harnesses" / "install.sh").read_text()
    for harness in HARNESSES.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{harness.name}` |"))
        assert f"`{harness.install}`" in row and f"| {harness.version} |" in row
        assert re.search(re.escape(harness.package) + "(==|@)" + re.escape(harness.version) + r"[ )]", script)
        assert harness.version in harness.install
