"""Several ranks, as for several GPUs: two processes on the CPU, with FSDP2 and gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from training_rows import LORA, ids_of, message, random_rows

from aglite.errors import AgliteError
from aglite.worker.main import Worker

torch = pytest.importorskip("torch")

ROWS = random_rows(31)
IDS = ids_of(ROWS)
PLAN = [[list(range(5))], [[5, 6, 7]]]
SETTINGS = {"lr": 1e-3, "tokens_per_micro_batch": 60, "kl": 0.1}

RANK = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from aglite.worker import verl_world
verl_world.join("cpu")
from aglite.worker.trainer import Trainer
from test_ranks import LORA, SETTINGS, story
model, out = map(Path, sys.argv[1:])
found = [story(Trainer(model, lora=lora, **SETTINGS), out / str(lora is None)) for lora in (None, LORA)]
if os.environ["RANK"] == "0":
    (out / "found.json").write_text(json.dumps(found))
"""

RAY = """
import json, sys
from pathlib import Path
from aglite.worker import verl_world
verl_world.set_platform("cpu")
from aglite.errors import AgliteError
from aglite.worker.ray_trainer import RayTrainer
from test_ranks import SETTINGS, story
if __name__ == "__main__":
    model, out = map(Path, sys.argv[1:])
    trainer = RayTrainer(model, device="cpu", n_gpus=2, **SETTINGS)
    found = story(trainer, out)
    trainer.offload()
    try:
        trainer.logprobs([[1, 2]], 1.0)
    except AgliteError as error:
        found["refusal"] = [error.message, error.mend]
    (out / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def alone(tiny_model, one_thread, tmp_path_factory):
    """What one rank says, all weights trained and an adapter."""
    from aglite.worker.trainer import Trainer

    out = tmp_path_factory.mktemp("alone")
    return [story(Trainer(tiny_model, lora=lora, **SETTINGS), out / str(lora is None)) for lora in (None, LORA)]


def story(trainer, out):
    """What a trainer has to say of a step, and of one after a checkpoint."""
    before = trainer.logprobs(IDS, 0.7)
    first = trainer.train(message(ROWS, before, PLAN, kl=0.1, entropy=0.01))
    trainer.save(out / "step-1", {"step": 1})
    batch = message(ROWS, before, [[list(range(8))]], kl=0.1)
    second = trainer.train(batch)
    assert trainer.load(out / "step-1") == {"step": 1}
    again = trainer.train(batch)
    trainer.export(out / "export", "bfloat16")
    return {"before": before, "first": first, "second": second, "again": again}


def tell(script, arguments, environments):
    """Run a script in a process for each environment."""
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, **here, **one},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in environments
    ]
    try:
        for child in children:
            output, _ = child.communicate(timeout=280)
            assert child.returncode == 0, output
    finally:
        for child in children:
            child.kill()
    return json.loads((arguments[-1] / "found.json").read_text())


def assert_same(one, two):
    for key in ("first", "second"):
        for name in ("loss", "grad_norm", "entropy", "kl_ref", "ratio_max", "kl_rollout", "clip_fraction"):
            assert one[key][name] == pytest.approx(two[key][name], rel=1e-5, abs=2e-6), (key, name)
        for name in ("tokens", "trained_tokens", "constrained_tokens", "updates"):
            assert one[key][name] == two[key][name], (key, name)
    assert one["again"]["grad_norm"] == one["second"]["grad_norm"]
    gaps = [abs(a - b) for x, y in zip(one["before"], two["before"], strict=True) for a, b in zip(x, y, strict=True)]
    assert max(gaps) < 5e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_what_one_trains(tiny_model, tmp_path, alone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = tell(RANK, (tiny_model, tmp_path), [{**place, "RANK": str(rank)} for rank in range(2)])
    for found, expected in zip(both, alone, strict=True):
        assert_same(found, expected)
        assert found["first"]["micro_batches"] % 2, "one rank has to compute a micro-batch that does not count"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif("AGLITE_TEST_RAY" not in os.environ, reason="starts Ray, over a minute: AGLITE_TEST_RAY=1 runs it")
def test_the_ranks_of_a_ray_worker_group_do_the_same(tiny_model, tmp_path, alone):
    found = tell(RAY, (tiny_model, tmp_path), [{}])
    assert_same(found, alone[0])
    assert "host memory" in found["refusal"][0] and "onload" in found["refusal"][1]


def test_several_gpus_where_there_is_none_are_refused():
    class Connection:
        inbox = None

        def send(self, frame):
            pass

    with pytest.raises(AgliteError, match=r"trainer\.n_gpus .* torch sees no GPU"):
        Worker(Connection())._load_trainer("cpu", 1, {"n_gpus": 2, "nnodes": 1})
