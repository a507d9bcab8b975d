"""One update of a vLLM of aglite's own: what is asked of vLLM and trainer, in which order, and what goes wrong."""

import asyncio
import os
import re
import signal
import time

import pytest
from bench import is_running, until
from fake_vllm import ODD

from aglite.engine import vllm_own
from aglite.engine.base import SamplingParams
from aglite.engine.out_of_memory import OutOfMemory
from aglite.errors import AgliteError, EngineError

PROMPT = [300, 301, 302]
SLOW = 0.1
"""Seconds a token, so that a generation is under way when an update comes, however busy the machine is."""
BATCH = {"plan": [[[0]]], "rows": [], "temperature": 1.0}

UPDATE = [
    "vllm /sleep?level=1&mode=keep",
    "trainer onload",
    "trainer train",
    "trainer logprobs",
    "trainer offload",
    "vllm /wake_up?tags=weights",
    "trainer export",
    "vllm /collective_rpc",
    "vllm /reset_prefix_cache",
    "vllm /wake_up?tags=kv_cache",
    "vllm /resume",
    "vllm probe",
]


async def update(pair, version, steps=1):
    await pair.preempt()
    await pair.sleep()
    for _ in range(steps):
        await pair.train(BATCH)
    await pair.resume(version)


class Reading:
    """Reads one generation; `hold` lets it lie once a token has come."""

    def __init__(self, pair, tokens=60):
        self.chunks = []
        self.held = asyncio.Event()
        self.held.set()
        self.task = asyncio.create_task(self._read(pair.generate(PROMPT, SamplingParams(tokens, seed=1, whole=True))))

    async def _read(self, stream):
        async for chunk in stream:
            self.chunks.append(chunk)
            await self.held.wait()

    @property
    def tokens(self):
        return [(token, chunk.version) for chunk in self.chunks for token in chunk.token_ids]

    async def some(self, count=1):
        await until(lambda: len(self.tokens) >= count)


def check_versions(tokens, count=60):
    """Every token bears the version of the weights that it was made by: those of odd versions are ODD or above."""
    assert len(tokens) == count
    assert all(version == (token >= ODD) for token, version in tokens)
    assert {version for _, version in tokens} == {0, 1}


async def test_a_generation_goes_on_after_the_update_that_interrupted_it(stage):
    async with stage.pair() as pair:
        stage.set(token_s=SLOW)
        reading = Reading(pair)
        await reading.some(5)
        await update(pair, 1)
        stage.set(token_s=0)
        await reading.task
        assert stage.calls == ["vllm /pause?mode=keep&clear_cache=true", *UPDATE]
        check_versions(reading.tokens)


async def test_what_had_arrived_and_was_not_read_bears_the_old_version(stage):
    async with stage.pair() as pair:
        stage.set(token_s=SLOW)
        reading = Reading(pair)
        reading.held.clear()  # its agent reads slowly
        await reading.some(1)
        (events,) = pair.engine._streams
        arrived = events._response.content.total_bytes
        await until(lambda: events._response.content.total_bytes > arrived)  # the engine samples on
        await update(pair, 1)
        stage.set(token_s=0)
        reading.held.set()
        await reading.task
        check_versions(reading.tokens)
        assert sum(version == 0 for _, version in reading.tokens) > 1


async def test_what_begins_while_the_others_are_told_of_an_update_bears_the_new_version(stage, monkeypatch):
    """As when a run goes on from a checkpoint, whose agents ask as soon as they have started."""
    late = []
    async with stage.pair() as pair:
        stage.set(token_s=SLOW)
        reading = Reading(pair)
        await reading.some(1)
        (events,) = pair.engine._streams
        note = events.note

        async def slow(version):
            late.append(Reading(pair, 5))
            await until(lambda: len(pair.engine._streams) == 2)
            await note(version)

        monkeypatch.setattr(events, "note", slow)
        await update(pair, 1)
        stage.set(token_s=0)
        await reading.task
        check_versions(reading.tokens)
        await late[0].task
        assert all(token >= ODD and version == 1 for token, version in late[0].tokens)


async def test_a_drained_engine_is_told_to_wait_and_several_steps_need_one_transfer(stage):
    async with stage.pair() as pair:
        await update(pair, 2, steps=2)
        expected = ["vllm /pause?mode=wait&clear_cache=true", *UPDATE]
        expected.insert(4, "trainer train")
        assert stage.calls == expected


async def test_a_pause_without_a_step_moves_nothing(stage):
    async with stage.pair() as pair:
        await pair.preempt()
        await pair.resume(0)
        assert stage.calls == ["vllm /pause?mode=wait&clear_cache=true", "vllm /reset_prefix_cache", "vllm /resume"]


@pytest.mark.parametrize("level", [1, 2])
async def test_an_update_that_is_not_applied_is_transferred_only_where_sleep_drops_the_weights(stage, level):
    async with stage.pair(script={"train": [{"applied": False}]}, sleep_level=level) as pair:
        await update(pair, 0)
        assert ("vllm /collective_rpc" in stage.calls) is (level == 2)
        assert "vllm probe" not in stage.calls


async def test_parcels_go_one_by_one_between_begin_and_end(stage):
    async with stage.pair() as pair:
        pair._ipc = True
        await update(pair, 1)
        start = stage.calls.index("vllm /wake_up?tags=weights")
        assert stage.calls[start + 1 : -4] == [
            "vllm /init_weight_transfer_engine",
            "vllm /start_weight_update",
            "trainer send_weights",
            "vllm /update_weights",
            "trainer send_weights",
            "vllm /update_weights",
            "trainer send_weights",
            "vllm /finish_weight_update",
        ]
        stage.forget()
        await update(pair, 2)
        assert "vllm /init_weight_transfer_engine" not in stage.calls


async def test_weights_that_do_not_fit_into_memory_go_over_the_disk(stage):
    async with stage.pair(script={"memory_full": True}) as pair:
        await update(pair, 1)
        asked = (stage.folder / "record.txt").read_text()
        assert f'"weights_path":"{stage.run_dir.transfer}"' in asked
        assert stage.calls.count("trainer export") == 2
        assert not stage.run_dir.transfer.exists()


async def test_a_checkpoint_is_brought_to_vllm_when_it_goes_on(stage):
    async with stage.pair() as pair:
        await update(pair, 1)
        await pair.save(stage.folder / "step-1", {"step": 1})
        await update(pair, 2)
        stage.forget()
        assert await pair.load(stage.folder / "step-1") == {"step": 1}
        await pair.resume(1)
        assert stage.calls[:4] == [
            "vllm /pause?mode=wait&clear_cache=true",
            UPDATE[0],
            "trainer onload",
            "trainer load",
        ]
        assert stage.calls[4:] == UPDATE[3:]
        reading = Reading(pair, 3)
        await reading.task
        assert all(token >= ODD and version == 1 for token, version in reading.tokens)


async def test_nothing_of_it_lies_where_an_agent_could_open_it(stage):
    async with stage.pair() as pair:
        folder, shared = stage.reaper.in_memory
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []
        await update(pair, 1)
        assert list(folder.iterdir()) == []
        assert shared.name.startswith("psm_") and shared.exists()
        os.kill(pair.engine.server.child.pid, signal.SIGKILL)
    assert not folder.exists() and not shared.exists()


# what goes wrong


async def test_weights_that_did_not_arrive_are_noticed(stage):
    async with stage.pair() as pair:
        stage.set(stale=True)
        with pytest.raises(EngineError, match=r"vLLM does not have the trainer's weights: .* differ by"):
            await update(pair, 1)


async def test_a_refused_sleep_matters_on_a_gpu_only(stage):
    async with stage.pair() as pair:
        stage.set(refuse={"/sleep": [500, "sleep mode is not enabled"]}, token_s=SLOW)
        reading = Reading(pair)
        await reading.some(5)
        await update(pair, 1)
        stage.set(token_s=0)
        await reading.task
        check_versions(reading.tokens)
        pair._must_sleep = True
        await pair.preempt()
        with pytest.raises(EngineError, match=r"/sleep\?level=1.*sleep mode is not enabled"):
            await pair.sleep()


async def test_what_is_refused_is_no_death_though_a_connection_broke_before(stage):
    async with stage.pair() as pair:
        stage.set(refuse={"/sleep": [500, "sleep mode is not enabled"]})
        pair.engine.server.upstream.lost = True  # as one look at its health that was cut off leaves it
        await update(pair, 1)
        assert not pair.exited.done()


async def test_no_memory_for_waking_says_who_and_what_to_change_and_ends_vllm(stage):
    async with stage.pair() as pair:
        stage.set(refuse={"/wake_up": [500, "CUDA error: out of memory at cumem_allocator.cpp"]})
        with pytest.raises(OutOfMemory, match=r"vLLM server .*out of memory") as caught:
            await update(pair, 1)
        assert "engine.gpu_memory_utilization" in caught.value.mend
        exit = await asyncio.wait_for(pair.exited, 60)
        assert "gpu_memory_utilization" in exit.reason and not exit.stopped


async def test_holders_of_gpu_memory_are_named(stage, monkeypatch):
    processes = [{"pid": 7, "name": "vLLM", "mem": 60 * 2**30}, {"pid": 8, "name": "trainer", "mem": 15 * 2**30}]
    gpu = {"mem_used": 76 * 2**30, "mem_total": 80 * 2**30, "processes": processes}
    monkeypatch.setattr("aglite.engine.out_of_memory.gpus", lambda owners: [gpu])
    async with stage.pair() as pair:
        stage.set(refuse={"/collective_rpc": [500, "torch.OutOfMemoryError: CUDA out of memory. Tried 1 GiB"]})
        with pytest.raises(OutOfMemory) as caught:
            await update(pair, 1)
    assert "76.0 of 80.0 GiB in use: vLLM (process 7) 60.0 GiB, trainer (process 8) 15.0 GiB" in caught.value.message


async def test_a_death_is_noticed_at_once_with_its_last_words(stage):
    async with stage.pair(trainer=False) as pair:
        stage.set(token_s=SLOW)
        reading = Reading(pair)
        await reading.some(1)
        os.kill(pair.engine.server.child.pid, signal.SIGKILL)
        exit = await asyncio.wait_for(pair.exited, 20)
        assert exit.reason == "the vLLM server was killed by SIGKILL" and "Loading weights" in exit.log[-1]
        with pytest.raises(EngineError):
            await reading.task


async def test_a_death_in_the_middle_of_an_update_is_told_by_how_it_ended(stage):
    async with stage.pair() as pair:
        stage.set(die_at="/collective_rpc")
        with pytest.raises(EngineError, match="killed by SIGKILL") as caught:
            await update(pair, 1)
        assert "illegal memory access" in caught.value.message
        assert pair.exited.done()


async def test_one_that_does_not_answer_an_order_is_ended(stage, monkeypatch):
    monkeypatch.setattr(vllm_own, "CONTROL_TIMEOUT_S", 0.5)
    async with stage.pair(trainer=False) as pair:
        stage.set(hang=["/pause"])
        with pytest.raises(EngineError, match=r"did not answer /pause\S* within 0.5 s"):
            await pair.preempt()


async def test_one_that_gives_no_tokens_is_ended(stage, monkeypatch):
    monkeypatch.setattr(vllm_own, "STALL_S", 2)
    async with stage.pair(trainer=False) as pair:
        stage.set(token_s=600)
        reading = Reading(pair)
        assert "gave no token for 2 s" in (await asyncio.wait_for(pair.exited, 60)).reason
        with pytest.raises(EngineError):
            await reading.task


async def test_an_agent_that_reads_nothing_is_not_taken_for_a_hung_server(stage, monkeypatch):
    async with stage.pair(trainer=False) as pair:
        reading = Reading(pair)
        reading.held.clear()
        await reading.some(1)
        with monkeypatch.context() as patch:
            patch.setattr(vllm_own, "STALL_S", 2)
            await asyncio.sleep(5)
        assert not pair.exited.done()
        reading.held.set()
        await reading.task
        assert len(reading.tokens) == 60


async def test_agents_that_give_up_hide_no_hang(stage, monkeypatch):
    monkeypatch.setattr(vllm_own, "STALL_S", 3)
    async with stage.pair(trainer=False) as pair:
        stage.set(hang=["/v1/completions"])
        async with asyncio.timeout(60):
            while not pair.exited.done():  # nobody waits for 3 s, and between two of them nobody waits
                reading = Reading(pair)
                await asyncio.wait({pair.exited}, timeout=1.5)
                reading.task.cancel()
                await asyncio.wait({pair.exited}, timeout=0.6)
        assert "gave no token for 3 s" in pair.exited.result().reason


async def test_that_no_token_comes_is_said_before_it_is_ended(stage, monkeypatch):
    monkeypatch.setattr(vllm_own, "QUIET_S", 2)
    async with stage.pair(trainer=False) as pair:
        stage.set(hang=["/v1/completions"])
        reading = Reading(pair)
        assert pair.stalled == ""
        await until(lambda: pair.stalled)
        assert re.fullmatch(r"the vLLM server has given no token for \d+ s \(it is ended after 300\)", pair.stalled)
        reading.task.cancel()
        stage.set(hang=[])
        await Reading(pair, 3).task
        await until(lambda: not pair.stalled)


async def test_an_update_that_waits_for_a_hung_engine_waits_as_long_as_agents(stage, monkeypatch):
    monkeypatch.setattr(vllm_own, "STALL_S", 3)
    async with stage.pair(trainer=False) as pair:
        stage.set(hang=["/v1/completions", "/pause"])
        reading = Reading(pair)
        await asyncio.sleep(1.2)
        reading.task.cancel()
        with pytest.raises(EngineError, match="gave no token for 3 s"):
            await asyncio.wait_for(pair.preempt(), 60)


async def test_a_hung_front_is_ended(stage, monkeypatch):
    async with stage.pair(trainer=False) as pair:
        monkeypatch.setattr("aglite.engine.vllm_server.HEARTBEAT_TIMEOUT_S", 2)
        monkeypatch.setattr("aglite.engine.vllm_server.PROBE_S", 0.5)
        os.kill(pair.engine.server.child.pid, signal.SIGSTOP)
        assert "gave no sign of life for 2 s" in (await asyncio.wait_for(pair.exited, 60)).reason


async def test_a_supervisor_that_was_suspended_does_not_blame_vllm(stage, monkeypatch):
    looks = []

    async def get_text(path):
        looks.append(path)
        if len(looks) == 1:
            time.sleep(4)  # noqa: ASYNC251 (nothing of this process runs meanwhile)
            await asyncio.sleep(3600)
        return ""

    async with stage.pair(trainer=False) as pair:
        monkeypatch.setattr("aglite.engine.vllm_server.HEARTBEAT_TIMEOUT_S", 3)
        monkeypatch.setattr("aglite.engine.vllm_server.PROBE_S", 0.5)
        monkeypatch.setattr(pair.engine.server.upstream, "get_text", get_text)
        await until(lambda: pair.exited.done() or len(looks) > 2)
        assert not pair.exited.done() and pair.engine.server.silent_s == 0


async def test_the_trainers_end_is_the_end_of_both(stage):
    async with stage.pair() as pair:
        os.kill(pair.trainer.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(pair.exited, 20)).reason == "the model worker was killed by SIGKILL"


async def test_loading_says_what_it_is_at_and_ends_with_its_time(stage, monkeypatch):
    """The time is over as soon as it has said what it is at, however long that took it."""

    class Clock:
        def monotonic(self):
            return time.monotonic() + (1000 if stage.stages else 0)

    monkeypatch.setattr("aglite.engine.vllm_server.time", Clock())
    stage.set(start_s=600)
    async with stage.pair(start=False, trainer=False, start_timeout_s=900) as pair:
        with pytest.raises(EngineError, match=r"not ready within 900 s .*Loading weights"):
            await asyncio.wait_for(pair.start(stage.model, {}, 0, None), 60)
        assert stage.stages == ["Loading weights"]
    assert not any(path.exists() for path in stage.reaper.in_memory)


async def test_no_memory_at_the_start_says_what_to_change(stage):
    words = (
        "ValueError: Free memory on device (10/80 GiB) on startup is less than desired GPU memory utilization (0.85)"
    )
    stage.set(die_at_start=[words, "RuntimeError: Engine core initialization failed."])
    async with stage.pair(start=False, trainer=False) as pair:
        with pytest.raises(OutOfMemory, match="less than desired GPU memory utilization") as caught:
            await pair.start(stage.model, {}, 0, None)
        assert "engine.gpu_memory_utilization" in caught.value.mend


async def test_advice_on_memory_is_not_the_cause_of_an_end(stage):
    advice = "(EngineCore pid=7) WARNING 11-30 12:40:00 [model.py:1] If you run out of memory, lower max_num_seqs."
    stage.set(die_at_start=[advice, "ValueError: the model has no such layer"])
    async with stage.pair(start=False, trainer=False) as pair:
        with pytest.raises(EngineError, match="the vLLM server ended: ValueError: the model has no such layer") as told:
            await pair.start(stage.model, {}, 0, None)
        assert not isinstance(told.value, OutOfMemory)


async def test_it_is_ended_though_what_it_shares_cannot_be_told(stage, monkeypatch):
    async with stage.pair(trainer=False) as pair:
        pid = pair.engine.server.child.pid
        monkeypatch.setattr("aglite.engine.vllm_server.shared_memory", lambda pid: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await pair.stop()
        assert not is_running(pid)


async def test_gpu_memory_cannot_be_passed_on_where_there_is_none(stage, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AgliteError, match="there is none for vLLM and trainer both"):
        async with stage.pair(start=False, transfer="ipc"):
            pass
    async with stage.pair(start=False, trainer=False, transfer="ipc") as pair:
        assert not pair._ipc  # who only samples needs none


async def test_one_that_loads_and_does_not_hear_is_ended_soon(stage, monkeypatch):
    monkeypatch.setenv("AGLITE_VLLM", """sh -c 'trap "" TERM; echo deaf; while true; do sleep 0.1; done'""")
    async with stage.pair(start=False, trainer=False) as pair:
        starting = asyncio.create_task(pair.start(stage.model, {}, 0, None))
        await until(lambda: pair.engine.server.child.pid and pair.engine.server.child.last_lines() == ("deaf",))
        starting.cancel()
        child, given = pair.engine.server.child, []
        wait = child.wait

        async def noted(timeout_s):
            given.append(timeout_s)
            await wait(timeout_s)

        monkeypatch.setattr(child, "wait", noted)
        await pair.stop()
        assert pair.exited.done() and given == [1]


async def test_a_program_that_is_not_there_is_named(stage, monkeypatch):
    monkeypatch.setenv("AGLITE_VLLM", "/no/such/python -m vllm")
    async with stage.pair(start=False, trainer=False) as pair:
        with pytest.raises(AgliteError, match="AGLITE_VLLM: /no/such/python cannot be started: No such file"):
            await pair.start(stage.model, {}, 0, None)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("false", "ended with exit code 1 before it served"),
        ("true", "ended with exit code 0 before it served"),
        ("sh -c 'echo no such module; exit 3'", "ended with exit code 3 before it served\n  | no such module"),
    ],
)
async def test_a_program_that_ends_before_it_serves(stage, monkeypatch, program, said):
    """What was started is named: to start it again would not help."""
    monkeypatch.setenv("AGLITE_VLLM", program)
    async with stage.pair(start=False, trainer=False) as pair:
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(pair.start(stage.model, {}, 0, None), 60)
    assert said in caught.value.message
    assert f"AGLITE_VLLM, `{program}`" in caught.value.mend and "restart" not in caught.value.mend
