"""When everything fails by infrastructure: launching pauses, says so, probes, and goes on by itself."""

import asyncio
import math
import time

import pytest
from bench import Bench, until

from aglite.rollouts.breaker import IN_A_ROW, Breaker
from aglite.rollouts.causes import Cause
from aglite.rollouts.slots import Slots

DOWN = Cause("backend", "Docker does not answer")


def make(first_wait_s=0.05):
    said = []
    slots = Slots(4)
    return slots, Breaker(slots, first_wait_s, lambda is_open, text: said.append((is_open, text))), said


async def test_one_task_that_cannot_be_graded_is_not_everything_but_a_lot_of_it_is():
    _, breaker, said = make()
    for number in range(3 * IN_A_ROW):
        assert not breaker.ended(object(), f"t{number}", Cause("grader", "never worked")), "the recipe's mistake"
    assert not breaker.ended(object(), "t", None)
    for _ in range(3 * IN_A_ROW - 1):
        assert not breaker.ended(object(), "only", Cause("grader", "x"))
    assert not breaker.is_open and said == []
    assert breaker.ended(object(), "only", Cause("grader", "x"))
    assert breaker.is_open
    breaker.stop()


async def test_a_rollout_that_works_in_between_keeps_it_closed_and_recipe_errors_do_not_count():
    _, breaker, _ = make()
    for number in range(4 * IN_A_ROW):
        breaker.ended(object(), f"t{number}", Cause("recipe", "x"))
        assert not breaker.ended(object(), f"t{number}", None if number % IN_A_ROW == 0 else DOWN)
    assert not breaker.is_open


async def test_open_it_lets_in_one_probe_at_a_time_with_growing_waits():
    slots, breaker, said = make()
    stop = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    for number in range(IN_A_ROW):
        breaker.ended(object(), f"t{number % 2}", DOWN)
    assert said[0][0] and "backend: Docker does not answer" in said[0][1] and "tried again in" in breaker.text
    for order, wait_s in enumerate((0.05, 0.1, 0.2)):
        others = asyncio.create_task(slots.take(100 + order, stop))
        assert await slots.take(order, stop)
        assert time.monotonic() - began >= wait_s - 0.01
        probe = object()
        breaker.begin(probe)
        await asyncio.sleep(0.02)
        assert not others.done()
        began = time.monotonic()
        assert breaker.ended(probe, "t", Cause("backend", f"try {order}"))
        slots.give()
    assert "try 2" in breaker.text
    assert await slots.take(3, stop)
    probe = object()
    breaker.begin(probe)
    breaker.started(probe)
    assert not breaker.is_open and said[-1][1].startswith("launching goes on") and breaker.text == ""
    assert await asyncio.wait_for(others, 60)
    stop.set_result(None)


async def test_a_grader_that_is_broken_is_not_mended_by_an_agent_that_starts_nor_by_a_killed_probe():
    slots, breaker, _ = make()
    stop = asyncio.get_running_loop().create_future()
    breaker.ended(object(), "t", Cause("exit"))
    for number in range(IN_A_ROW):
        breaker.ended(object(), f"t{number}", Cause("grader", "no judge"))
    for end in (Cause("killed"), None):
        assert await slots.take(0, stop)
        probe = object()
        breaker.begin(probe)
        breaker.started(probe)
        assert breaker.is_open
        assert not breaker.ended(probe, "t", end)
        assert breaker.is_open == (end is not None)


@pytest.mark.parametrize("killed", ["before it asks for its turn", "as its turn comes"])
async def test_a_rollout_that_is_killed_does_not_take_the_place_of_the_probe(killed):
    """Nobody would be let in ever after."""
    slots, breaker, _ = make(first_wait_s=0.02)
    for number in range(IN_A_ROW):
        breaker.ended(object(), f"t{number}", DOWN)
    stop, never = (asyncio.get_running_loop().create_future() for _ in range(2))
    if killed == "as its turn comes":
        taking = asyncio.create_task(slots.take(0, stop))
        await asyncio.sleep(0)
        while slots._waiting:  # noqa: ASYNC110 (until one is let in)
            await asyncio.sleep(0)
        assert not taking.done(), "it does not know yet: the test tests nothing"
        stop.set_result("killed")
        assert not await taking
    else:
        await asyncio.sleep(0.1)
        stop.set_result("killed")
        assert not await slots.take(0, stop)
    assert await asyncio.wait_for(slots.take(1, never), 60)
    breaker.stop()


async def test_a_machine_that_starts_nothing_costs_no_rollout_and_goes_on_when_it_does(tmp_path):
    """The scratch folder is in the way of every launch, then it is mended."""
    async with Bench(tmp_path, concurrency=2, attempts=3) as bench:
        bench.run_dir.scratch.rmdir()
        bench.run_dir.scratch.write_text("in the way")
        tasks = [await bench.submit(id=f"t{n}") for n in range(8)]
        await until(lambda: bench.launcher.blocked)
        launched, began = len(bench.gateway.opened), time.monotonic()
        await asyncio.sleep(1)
        assert "launch: " in bench.launcher.blocked and "Not a directory" in bench.launcher.blocked
        probes = 1 + math.log2(1 + (time.monotonic() - began) / 0.1)  # 0.1 s, 0.2 s, 0.4 s ... lie between them
        assert len(bench.gateway.opened) - launched <= probes, "only probes"
        bench.run_dir.scratch.unlink()
        bench.run_dir.scratch.mkdir()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        assert [outcome.state for outcome in outcomes] == ["done"] * 8
        assert bench.launcher.blocked == ""
        texts = [event["text"] for event in bench.store.events()]
        assert texts[0].startswith("launching is paused: the last 5 attempts") and texts[-1].startswith(
            "launching goes on"
        )


async def test_a_broken_grader_loses_a_few_rollouts_not_all(tmp_path):
    """Its import is gone for a while, as that of a judge's client would be."""
    grade = "def grade(task, rollout, workdir):\n    import opinion\n    return opinion.ON\n"
    bench = Bench(tmp_path, grade=grade, concurrency=2)
    opinion = bench.recipe.folder / "opinion.py"
    opinion.write_text("ON = 1\n")
    async with bench:
        assert (await bench.run()).state == "done"
        opinion.unlink()
        tasks = [await bench.submit(id=f"t{n}") for n in range(12)]
        await until(lambda: bench.launcher.blocked)
        opinion.write_text("ON = 1\n")
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        states = [outcome.state for outcome in outcomes]
        assert states.count("error") <= IN_A_ROW and states.count("done") >= 12 - IN_A_ROW


async def test_stopping_while_it_is_open(tmp_path):
    bench = Bench(tmp_path, attempts=3)
    async with bench:
        bench.run_dir.scratch.rmdir()
        bench.run_dir.scratch.write_text("in the way")
        tasks = [await bench.submit(id=f"t{n}") for n in range(6)]
        await until(lambda: bench.launcher.blocked)
        bench.run_dir.scratch.unlink()
        bench.run_dir.scratch.mkdir()
        await bench.launcher.stop()
        assert {outcome.state for outcome in await asyncio.gather(*tasks)} == {"cancelled"}
