"""A vLLM server of aglite's own: its process, its flags, and a socket that nobody else can reach."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from aglite.config import EngineSettings
from aglite.engine.child import HEARTBEAT_TIMEOUT_S, LOG_LINES, Child, ChildExit, quoted
from aglite.engine.out_of_memory import is_out_of_memory, out_of_memory
from aglite.engine.upstream import Upstream
from aglite.errors import AgliteError, EngineError
from aglite.memory_plan.shape import FP32, kv_bytes_per_token
from aglite.paths import MEMORY, near_tmp

NAME = "vLLM server"
NO_PROGRAM = "name a Python that has vLLM: /path/to/python -m vllm.entrypoints.openai.api_server"
POLL_S = 0.3
PROBE_S = 5.0
"""How long one question after its health may take."""
LOADING_STOP_S = 1.0
"""How long it may take to end before it has served."""
REFUSALS = 4
"""Seconds in a row in which it answers, but says that it is not well, before it is ended."""

_LOG_LINE = re.compile(r"^(?:\(.*?\) )?(?:INFO|WARNING) \S+ \S+ \[[^\]]*\] (?P<text>.*)")
_ERROR = re.compile(r"^(?:\(.*?\) )?(?:ERROR \S+ \S+ \[[^\]]*\] )?(?P<text>(?:\w+\.)*\w*(?:Error|Exception): .*)")
_USAGE = re.compile(r"^\S+: error: (?P<text>.+)")
"""How argparse refuses flags."""


class VllmServer:
    """One process; `upstream` speaks to it once it is ready.

    vLLM has routes that move weights and run functions by name, behind no key. So it listens on a Unix socket in a
    folder that only this user can enter, and whose name is deleted before anything is served: this process holds on to
    the socket itself, agents of the same user find nothing that they could open.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        log_path: Path,
        env: dict[str, str],
        start_timeout_s: float,
        on_start: Callable[[int], None] = lambda pid: None,
        on_memory: Callable[[Path], None] = lambda path: None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`arguments` follow the command of `AGLITE_VLLM`; `folder` is empty and ours alone. `on_start` is told the
        process id, `on_memory` of what it shares in memory between its processes."""
        self.child = Child(NAME, log_path, self._explain)
        self.log_name = f"logs/{log_path.name}"
        self.upstream: Upstream
        self.silent_s = 0
        """How long it has not answered."""
        self._arguments = [*arguments, "--uds", str(folder / "socket")]
        self._folder = folder
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._on_start = on_start
        self._on_memory = on_memory
        self._on_stage = on_stage
        self._handle = -1
        self._shared: set[Path] = set()
        self._watch: asyncio.Task[None] | None = None

    @property
    def exited(self) -> asyncio.Future[ChildExit]:
        return self.child.exited

    async def start(self) -> None:
        """Start the process. Raises AgliteError if there is no such program."""
        try:
            await self.child.start([*command(), *self._arguments], self._env)
        except OSError as error:
            raise AgliteError(
                f"AGLITE_VLLM: {command()[0]} cannot be started: {error.strerror}",
                NO_PROGRAM,
            ) from None
        assert self.child.pid is not None
        self._on_start(self.child.pid)

    async def ready(self) -> None:
        """Wait until it serves; what it is doing meanwhile is told to `on_stage`. Raises EngineError with its last
        lines, OutOfMemory among them."""
        deadline, said = time.monotonic() + self._start_timeout_s, ""
        while not await self._serves():
            if time.monotonic() > deadline:
                await self.note_shared()
                await self.child.kill(
                    f"the {NAME} was not ready within {self._start_timeout_s:g} s (engine.start_timeout_s); it was at: "
                    f"{said or 'nothing it told'}"
                )
            if self.child.ended:
                raise self.exited.result().error()
            if (stage := last_stage(self.child.last_lines())) and stage != said:
                self._on_stage(said := stage)
                await self.note_shared()
            await asyncio.wait({self.exited}, timeout=POLL_S)
        for name in os.listdir(self._folder):  # sockets between its own processes, which are connected by now
            with contextlib.suppress(OSError):
                os.unlink(self._folder / name)
        await self.note_shared()
        self._watch = asyncio.create_task(self._watch_health())

    async def note_shared(self) -> None:
        """Take note of what its processes share in memory: nobody deletes it for one that is killed."""
        found = await asyncio.to_thread(shared_memory, self.child.pid)
        for path in found - self._shared:
            self._on_memory(path)
        self._shared |= found

    async def _serves(self) -> bool:
        if self._handle < 0 and not self._take_socket():
            return False
        try:
            async with asyncio.timeout(PROBE_S):
                await self.upstream.get_text("/health")
        except (EngineError, TimeoutError):
            return False
        self.upstream.lost = False
        return True

    def _take_socket(self) -> bool:
        """Hold on to the socket and delete its name."""
        path = self._folder / "socket"
        try:
            self._handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        path.unlink()
        self.upstream = Upstream("http://vllm", "vLLM", socket=f"/proc/self/fd/{self._handle}", log=self.log_name)
        return True

    def _explain(self, code: int, lines: Sequence[str]) -> EngineError | None:
        """The cause of its end: its processes tell it one after the other, each with a traceback."""
        # advice on what to do if memory ran out is no sign that it did
        text = "\n".join(line for line in lines if not _LOG_LINE.match(line))
        if is_out_of_memory(text):
            return out_of_memory(f"the {NAME}", "start" if self._watch is None else "wake", text, {})
        whole = f"{self.log_name} has the whole of it"
        if code > 0 and (cause := cause_of(lines)):
            return EngineError(
                f"the {NAME} ended: {cause}",
                f"{whole}; what it is started with is the section `engine` of the recipe",
            )
        if code >= 0 and self._watch is None:
            given = os.environ.get("AGLITE_VLLM")
            how = f"AGLITE_VLLM, `{given}`" if given else "the vLLM of aglite's own Python"
            return EngineError(
                f"the {NAME} ended with exit code {code} before it served" + quoted(lines[-LOG_LINES:]),
                f"{whole}; it was started by {how}",
            )
        return None

    async def _watch_health(self) -> None:
        """End it when it hangs or is not well; what follows is the business of whoever waits for `exited`.

        A look counts for no longer than it may take: a supervisor that was suspended must not blame vLLM.
        """
        unwell, silent_s = 0, 0.0
        while not self.child.ended:
            began = time.monotonic()
            await asyncio.sleep(1)
            try:
                async with asyncio.timeout(PROBE_S):
                    await self.upstream.get_text("/health")
            except TimeoutError:
                pass
            except EngineError as error:
                unwell += 1
                if unwell >= REFUSALS:
                    await self.child.kill(f"the {NAME} is not well: {error.message}")
            else:
                unwell, silent_s, self.silent_s = 0, 0.0, 0
                continue
            silent_s += min(time.monotonic() - began, 1 + PROBE_S)
            self.silent_s = round(silent_s)
            if self.silent_s >= HEARTBEAT_TIMEOUT_S:
                await self.child.kill(f"the {NAME} gave no sign of life for {HEARTBEAT_TIMEOUT_S:g} s")

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End it with all its processes; one that loads does not hear that it should, and has nothing to end in order.
        Safe to call twice."""
        if self.child.pid is None or self.child.stopping:
            return
        self.child.stopping = True
        if self._watch is not None:
            self._watch.cancel()
        try:
            await self.note_shared()
        finally:  # whatever became of that: it must not outlive the run
            self.child.terminate()
            await self.child.wait(timeout_s if self._watch is not None else LOADING_STOP_S)
            for path in self._shared:
                path.unlink(missing_ok=True)
            if self._handle >= 0:
                await self.upstream.close()
                os.close(self._handle)


def command() -> list[str]:
    """How vLLM is started; `AGLITE_VLLM` names another one, such as that of a Python of its own. Raises AgliteError."""
    try:
        given = shlex.split(os.environ.get("AGLITE_VLLM", ""))
    except ValueError as error:
        raise AgliteError(f"AGLITE_VLLM: {error}", "write it as in a shell, each quotation mark closed") from None
    return given or [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]


def flags(
    settings: EngineSettings, model_dir: Path, *, device: str, trained: bool, ipc: bool, context_length: int, seed: int
) -> list[str]:
    """What `vllm serve` is told; the recipe's `engine.args` come last. `context_length` 0: the model's."""
    found = ["--model", str(model_dir), "--served-model-name", "policy", "--seed", str(seed)]
    found += ["--max-num-seqs", str(settings.max_running), "--dtype", dtype(settings, device)]
    # without these, log-probabilities would be those before temperature, and sampling would follow the model's file
    found += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    found += ["--enable-prefix-caching", "--enable-chunked-prefill", "--disable-uvicorn-access-log"]
    if context_length:
        found += ["--max-model-len", str(context_length)]
    if settings.enforce_eager or device == "cpu":
        found.append("--enforce-eager")
    if device == "cuda":
        found += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        if trained:
            found.append("--enable-sleep-mode")
        if ipc:
            found += ["--weight-transfer-config", '{"backend": "ipc"}']
    return [*found, *settings.args]


def environment(
    base: dict[str, str], settings: EngineSettings, model_dir: Path, folder: Path, *, device: str, ipc: bool
) -> dict[str, str]:
    """What it finds in its environment: `base`, and what makes it quiet, local and ours."""
    found = {**base, "VLLM_SERVER_DEV_MODE": "1", "VLLM_RPC_BASE_PATH": str(folder), "HF_HUB_OFFLINE": "1"}
    found |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if os.environ.get("AGLITE_VLLM"):
        found.pop("PYTHONPATH", None)  # ours, and it is another Python
    if ipc:
        found["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory come pickled; only we can send any
    if device == "cpu":
        found.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_kv_gib(settings, model_dir)))
        found.setdefault("OMP_WAIT_POLICY", "passive")  # see aglite.worker.main: the trainer uses the same cores
    return found


def dtype(settings: EngineSettings, device: str) -> str:
    """The type of its weights."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if device == "cuda" else "float32"


def _kv_gib(settings: EngineSettings, model_dir: Path) -> int:
    """GiB that `engine.kv_tokens` tokens take in float32, at least 1."""
    config = json.loads((model_dir / "config.json").read_text())
    return max(1, -(-settings.kv_tokens * kv_bytes_per_token(config, FP32) // 2**30))


def last_stage(lines: Sequence[str]) -> str:
    """What its log says that it is doing; '' if nothing can be made of it."""
    for line in reversed(lines):
        line = line.rpartition("\r")[2].strip()
        if (found := _LOG_LINE.match(line)) and re.search(r"\w", found["text"]):  # no line of its logo
            return found["text"].strip()[:100]
        if re.search(r"\d+%\|", line):  # a bar, such as that of the weights or of the CUDA graphs
            return line.partition("|")[0].strip()[:100]
    return ""


def cause_of(lines: Sequence[str]) -> str:
    """The error that its log names as the first in a chain of processes, '' if there is none."""
    for line, after in reversed(list(pairwise([*lines, ""]))):
        if (found := _ERROR.match(line) or _USAGE.match(line)) and "Engine core initialization failed" not in line:
            more = f" {after.strip()}" if "validation error" in line else ""  # pydantic says there what is wrong
            return (found["text"] + more)[:500]
    return ""


def shared_memory(pid: int | None) -> set[Path]:
    """What a process and its children share in memory, by the files that stand for it. They are known by number: a
    semaphore is mapped under the name that it had before it got its own."""
    if not MEMORY.is_dir():
        return set()
    files = {each.inode(): Path(each) for each in os.scandir(MEMORY) if each.is_file(follow_symlinks=False)}
    found = set()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in [first, *first.children(recursive=True)]:
            with contextlib.suppress(OSError):  # it has ended
                lines = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
                found |= {int(line.split(maxsplit=5)[4]) for line in lines if f" {MEMORY}/" in line}
    return {files[number] for number in found & files.keys()}


def private_folder(run_dir: Path) -> Path:
    """A new folder in memory, where there is one, that only this user can enter. What an earlier process of the same
    run left in it is gone. Hold the run directory's lock."""
    base = MEMORY
    if not os.access(base, os.W_OK):
        base = near_tmp(64)  # its own sockets are called by a UUID
    folder = base / f"aglite-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise AgliteError(
            f"{folder} cannot be made: {error}", "delete it; it is a leftover, or somebody else's"
        ) from None
    return folder
