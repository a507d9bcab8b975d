"""`aglite up` on a machine with a small card: refused before anything is loaded, with the plan and what would help."""

import json
import time

from mini_run import INTERRUPT, MiniRun

NVML = """
class NVMLError(Exception):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "Toy GPU"
def nvmlDeviceGetMemoryInfo(handle):
    return type("Info", (), {"total": GIB * 2**30, "used": USED * 2**30})
def nvmlDeviceGetCount(): return 0
"""


class CardRun(MiniRun):
    """A run whose machine seems to have a card of so many GiB, `used` of which other programs hold."""

    def __init__(self, folder, gib, used=0, **recipe):
        super().__init__(folder, engine={"kind": "vllm", "context_length": 512}, **recipe)
        (folder / "pynvml.py").write_text(f"GIB, USED = {gib}, {used}\n{NVML}")

    def waits(self, seconds):
        """Other programs are given so long to free memory."""
        patience = f"import aglite.memory_plan.card as card\ncard.SETTLE_S = {seconds}\n"
        (self.folder / "pynvml.py").write_text(patience + (self.folder / "pynvml.py").read_text())

    @property
    def environment(self):
        found = {**super().environment, "AGLITE_VLLM": "false"}
        found.pop("CUDA_VISIBLE_DEVICES", None)
        return {**found, "PYTHONPATH": f"{self.folder}:{found.get('PYTHONPATH', '')}"}


def test_what_does_not_fit_is_not_started(tmp_path):
    run = CardRun(tmp_path, 3, trainer={"tokens_per_micro_batch": 65536})
    code, output = run.up()
    assert code == 1, output
    assert (
        "memory plan for Toy GPU, 3.0 GiB usable: does not fit: rollout takes 3.7 GiB of 3.0 GiB; training " in output
    )
    assert "-> it fits with --set trainer." in output
    assert not (run.run_dir.logs / "vllm.log").exists() and not (run.run_dir.logs / "worker.log").exists()


def test_what_fits_is_said_in_a_line(tmp_path):
    run = CardRun(tmp_path, 80)
    code, output = run.up("--json")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert any("memory plan: " in json.dumps(line) and "(rollout)" in json.dumps(line) for line in lines), output
    assert code == 1, "the vLLM of this test ends at once"


def test_a_stop_does_not_wait_for_the_memory_of_other_programs(tmp_path):
    run = CardRun(tmp_path, 80, used=70)
    run.waits(250)
    run.start()
    while "waiting for other programs to free memory of Toy GPU" not in (line := run.process.stdout.readline()):
        assert line, "it ended"
    began = time.monotonic()
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130 and time.monotonic() - began < 100, output
