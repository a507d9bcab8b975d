"""Whole runs whose agents are sealed containers: real gateway and processes, a scripted engine."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest
import yaml
from mini_run import MiniRun

pytestmark = [pytest.mark.docker, pytest.mark.slow]
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "instruct"


@pytest.fixture
def no_containers(docker_client, tmp_path):
    """What there is of the run's containers: a function of the test's; no container and no volume at its end."""
    filters = {"label": [f"aglite.run={(tmp_path / 'runs' / 'mini').resolve()}"]}

    def found():
        return docker_client.containers(all=True, filters=filters)

    found.filters = filters
    yield found
    assert found() == []
    assert not docker_client.volumes(filters=filters)["Volumes"]


def use_instruct(run, image):
    """Put the recipe instruct, its files as they are, in the place of the small one."""
    folder = run.folder / "recipe"
    shutil.rmtree(folder)
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["model"] = run.recipe["model"]
    recipe["agent"] |= {"image": image, "concurrency": 4}
    recipe["algorithm"] |= {"group_size": 2, "groups_per_step": 2, "groups_in_flight": 2}
    recipe["trainer"]["steps"] = 2
    recipe["evaluation"]["tasks"] = 4
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_the_recipe_instruct_trains_in_sealed_containers(tmp_path, image, no_containers):
    run = MiniRun(tmp_path)
    use_instruct(run, image)
    code, output = run.up(timeout=280)
    assert code == 0, output
    with contextlib.closing(run.store()) as store:
        rollouts = store.rollouts(limit=1000)
        assert len(rollouts) >= 2 * 2 * 2 + 2 * 4
        assert {row["backend"] for row in rollouts} == {"docker"}
        assert {row["state"] for row in rollouts} == {"done"}
        assert all(row["calls"] >= 1 for row in rollouts)
        # the scripted engine says nothing that is worth anything, so a step may have nothing to learn
        assert [row["step"] for row in store.steps()] == [1, 2]
        assert store.meta("sandbox")["image"] == image
    assert "answer: " in run.run_dir.rollout_log(rollouts[0]["id"], 1).read_text()


@pytest.mark.timeout(600)
def test_200_rollouts_16_at_once_and_a_supervisor_killed_in_the_middle_leave_no_container(
    tmp_path, image, no_containers, docker_client
):
    """The whole program, as a person has it: it is killed when half is done, and started again."""
    run = MiniRun(
        tmp_path,
        agent={"image": image, "concurrency": 16, "limits": {"wall_s": 120}},
        algorithm={"group_size": 4, "groups_per_step": 4, "groups_in_flight": 8},
        trainer={"steps": 13},
        script={"train_s": 0.05},
    )
    agents = {"label": [*no_containers.filters["label"], "aglite.role=agent"]}
    most = 0

    def watch():
        nonlocal most
        most = max(most, len(docker_client.containers(all=True, filters=agents)))

    def half(store):
        watch()
        return store.counts_by_state()["done"] >= 100 and docker_client.containers(filters=agents)

    run.start()
    run.until(half, timeout=240)
    run.kill()
    deadline = time.monotonic() + 90
    while no_containers() or docker_client.volumes(filters=no_containers.filters)["Volumes"]:
        assert time.monotonic() < deadline, "the reaper and the sidecars' own end leave nothing"
        time.sleep(0.2)
    run.start("--resume")
    run.until(lambda store: watch() or store.steps()[-1]["step"] == 13, timeout=240)
    code, output = run.wait(240)
    assert code == 0, output
    assert 2 <= most <= 16
    with contextlib.closing(run.store()) as store:
        applied = [row["step"] for row in store.steps() if row["state"] == "applied"]
        assert applied == list(range(1, 14))
        states = [row["state"] for row in store.rollouts(limit=1000)]
        assert states.count("done") >= 13 * 4 * 4
    assert os.listdir(run.run_dir.scratch) == []
