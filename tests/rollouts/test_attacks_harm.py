"""Agents in containers that harm what they can, all at once beside others that work. See tests/helpers/harm.py."""

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import harm
import psutil
import pytest
from bench import Bench
from staging import running
from tiny import tiny_model

from aglite.gateway.app import create_model_app
from aglite.gateway.renderers import load_renderer
from aglite.net import Listener, bind

pytestmark = pytest.mark.docker

GRADE = """
    def grade(task, rollout, workdir):
        answer = workdir / "answer"
        return float(answer.is_file() and answer.read_text() == "42")
"""
LOG_BYTES = 1 << 20
LIMITS = {"pids": 64, "memory_mb": 320, "disk_mb": 32, "log_bytes": LOG_BYTES, "wall_s": 25, "cpus": 1.0}

# role: (how it ended, its cause's code, flags besides no_calls)
ENDINGS = {
    "stops_itself": ("failed", "wall_time", {"limit:wall_s"}),
    "fork_bomb": ("done", "", set()),
    "memory_bomb": ("failed", "memory", set()),
    "memory_in_files": ("done", "", set()),
    "very_many_files": ("done", "", {"oversize"}),
    "log_flood": ("done", "", {"log_cut"}),
    "log_that_is_slow_to_search": ("done", "", set()),
    "connections_without_end": ("done", "", set()),
    "headers_without_end": ("done", "", set()),
    "daemon_that_goes_on_working": ("done", "", set()),
    "zombies": ("done", "", set()),
    "kill_all": ("done", "", set()),
    "killed_as_by_the_machine": ("failed", "signal", set()),
    "exit_code_of_the_machines": ("failed", "signal", set()),
    "prints_a_reward": ("done", "", {"printed_marker"}),
    "writes_to_the_terminal": ("failed", "exit", set()),
    "odd_names": ("done", "", set()),
    "links_and_specials": ("done", "", {"symlinks", "special_files", "oversize"}),
    "another_folder_in_place_of_its_own": ("done", "", {"special_files"}),
    "nothing_is_readable": ("done", "", {"special_files"}),
}


@dataclass
class Evidence:
    outcomes: dict
    works: list
    logs: dict
    busy_s: float
    grown_mb: float
    left: list
    stragglers: list


@pytest.fixture(scope="module")
def evidence(tmp_path_factory, image, docker_client):
    return asyncio.run(_harmed(tmp_path_factory.mktemp("harm"), image, docker_client))


async def _harmed(folder, image, docker_client):
    renderer = load_renderer(tiny_model(folder / "tiny"))
    async with running(folder, renderer) as stage:
        door = Listener(create_model_app(stage.gateway), bind("127.0.0.1", 0, "the gateway", "gateway.port"))
        await door.start()
        bench = Bench(
            folder,
            "import harm; harm.main()",
            grade=GRADE,
            gateway=stage.gateway,
            store=stage.store,
            serve=door.also,
            image=image,
            files=["harm.py"],
            concurrency=6,
            limits=LIMITS,
        )
        shutil.copy(harm.__file__, bench.recipe.folder / "harm.py")
        opened = stage.gateway.open_session

        def open_session(rollout_id, *arguments, **options):
            """The time of those that end by themselves is long, for busy machines."""
            session = opened(rollout_id, *arguments, **options)
            if rollout_id != tasks["stops_itself"].rollout_id:
                session._held += 150
            return session

        stage.gateway.open_session = open_session
        tasks = {}
        process = psutil.Process()
        before = process.memory_info().rss
        async with bench:
            for number, role in enumerate(ENDINGS):
                tasks[role] = await bench.submit({"role": role})
                if number % 3 == 0:
                    tasks[f"works {number}"] = await bench.submit({"role": "works"})
            busy = most = 0.0
            while not all(task.done() for task in tasks.values()):
                slept = time.thread_time()  # of this thread alone: others of this machine may keep it waiting
                await asyncio.sleep(0.1)
                busy = max(busy, time.thread_time() - slept)
                most = max(most, process.memory_info().rss - before)
            outcomes = {role: task.result() for role, task in tasks.items()}
            logs = {role: bench.run_dir.rollout_log(task.rollout_id, 1) for role, task in tasks.items()}
            logs = {role: path.read_bytes() if path.exists() else b"" for role, path in logs.items()}
            stragglers = [
                one.pid for one in psutil.process_iter(["cmdline"]) if harm.MARK in (one.info["cmdline"] or ())
            ]
        await door.stop()
        left = docker_client.containers(all=True, filters={"label": f"aglite.run={(folder / 'run').resolve()}"})
    works = [outcome for role, outcome in outcomes.items() if role.startswith("works")]
    return Evidence(outcomes, works, logs, busy, most / (1 << 20), left, stragglers)


@pytest.mark.parametrize("role", ENDINGS)
def test_it_gets_nothing_for_it(evidence, role):
    outcome = evidence.outcomes[role]
    state, code, flags = ENDINGS[role]
    assert (outcome.state, outcome.cause.partition(":")[0], outcome.reward) == (state, code, 0.0), outcome
    assert outcome.attempt == 1, "what looks like the machine's failure is not tried again"
    assert set(outcome.flags) == flags | {"no_calls"}


def test_those_beside_it_work_as_ever(evidence):
    assert len(evidence.works) == 7
    assert {(one.state, one.reward, one.attempt, tuple(one.flags)) for one in evidence.works} == {("done", 1.0, 1, ())}


def test_the_supervisor_neither_stands_still_nor_grows(evidence):
    assert evidence.busy_s < 5
    assert evidence.grown_mb < 400


def test_nothing_outlives_it(evidence):
    assert evidence.left == [] and evidence.stragglers == []


def test_logs_are_bounded_and_causes_harmless(evidence):
    assert all(len(log) < LOG_BYTES + 4096 for log in evidence.logs.values())
    cause = evidence.outcomes["writes_to_the_terminal"].cause
    assert cause.isprintable() and "bold red" in cause


def test_every_role_is_played():
    roles = {name for name, one in vars(harm).items() if callable(one) and one.__module__ == "harm"}
    assert roles - {"main", "works"} == set(ENDINGS)
    assert Path(harm.__file__).is_file()
