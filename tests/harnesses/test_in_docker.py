"""The real agent programs in sealed containers, each in its image of images/build.sh, on a task of two turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import Bench
from programs import GRADE, LIMITS, PROGRAMS, WRITE
from staging import running

from aglite.errors import AgliteError
from aglite.gateway.app import create_model_app
from aglite.gateway.renderers import ChatRenderer
from aglite.net import Listener, bind
from aglite.rollouts.backends.engine import connect

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(240)]


@pytest.fixture
def image(request):
    name = f"aglite/{request.getfixturevalue('harness')}"
    try:
        client = connect()
    except AgliteError as error:
        pytest.skip(f"{error.message} ({error.mend})")
    found = client.images(name=name)
    client.close()
    if not found:
        pytest.skip(f"there is no image {name} (bash images/build.sh {request.getfixturevalue('harness')})")
    return name


@pytest.mark.parametrize("harness", PROGRAMS)
async def test_a_task_of_two_turns(harness: str, image: str, tmp_path: Path, renderer: ChatRenderer) -> None:
    program = PROGRAMS[harness]
    async with running(tmp_path, renderer, context_length=65536) as stage:
        stage.engine.script = {
            "replies": [
                {"match": "it-is-written", "text": program.finish},
                {"match": "KIWI", "text": program.run(WRITE)},
            ],
        }
        door = Listener(create_model_app(stage.gateway), bind("127.0.0.1", 0, "the test's gateway", "port"))
        await door.start()
        async with Bench(
            tmp_path,
            grade=GRADE,
            gateway=stage.gateway,
            store=stage.store,
            serve=door.also,
            command=[],
            harness=harness,
            image=image,
            attempts=1,
            limits=LIMITS,
        ) as bench:
            outcome = await bench.run({"instruction": "Task KIWI: write forty-two into the file answer.txt"})
        await door.stop()
        assert (outcome.state, outcome.reward) == ("done", 1.0), (outcome, bench.log()[-3000:])
        assert [call.fork_cause for call in stage.store.calls(bench.last, 1)] == ["first", ""]
