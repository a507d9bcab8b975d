"""Training steps in a process of their own, since a process has one device: `python -m aglite.selftest.step REQUEST`.

REQUEST is a JSON file: `model`, `device`, `rows` (token ids), `settings` of the Trainer, and what to do: `steps`,
`offload` (move everything to host memory and back before each), `save`, `load`, `export` (folders). The answer is
written beside it, as `.out.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from aglite.selftest.bench import recipe_with

TEMPERATURE = 0.7
LR = 1e-3


def run_steps(folder: Path, name: str, timeout_s: float = 1200, **request: Any) -> dict[str, Any]:
    """Run a request in a new process and return its answer. Raises RuntimeError with the process's last lines."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(request, default=str))
    done = subprocess.run(
        [sys.executable, "-m", "aglite.selftest.step", str(file)], capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-6:]
        raise RuntimeError(
            f"training on {request['device']} ended with exit code {done.returncode}: " + " | ".join(lines)
        )
    return json.loads(file.with_suffix(".out.json").read_text())


def batch_of(model: Path, rows: list[list[int]], logprobs: list[list[float]], kl: float = 0.0) -> dict[str, Any]:
    """A `train` message: the second half of each row is trained, with advantages of either sign; `logprobs` are the
    recorded ones, of every token but the first. The loss is that of a recipe which says nothing about it."""
    from aglite.training.batch import loss_settings
    from aglite.worker.io import pack_floats, pack_ids

    packed = []
    for index, (ids, values) in enumerate(zip(rows, logprobs, strict=True)):
        trained = [int(place >= len(ids) // 2) for place in range(len(ids))]
        kept = [value * on for value, on in zip(values, trained[1:], strict=True)]
        packed.append(
            {
                "ids": pack_ids(ids),
                "mask": bytes(trained),
                "logprobs": pack_floats([0.0, *kept]),
                "advantage": 1.0 if index % 2 else -0.5,
                "weight": 1 / (len(rows) * sum(trained)),
                "rollout": index,
            }
        )
    recipe = recipe_with(model, sampling={"train": {"temperature": TEMPERATURE}}, algorithm={"kl": kl})
    return {"rows": packed, "plan": [[list(range(len(rows)))]], "lr": LR, **loss_settings(recipe)}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from aglite.worker import verl_world

    verl_world.install(request["device"])
    torch.backends.cuda.matmul.allow_tf32 = False
    from aglite.worker.trainer import Trainer

    settings = request.get("settings", {})
    model = Path(request["model"])
    trainer = Trainer(model, lr=LR, seed=0, **settings)
    on_gpu = request["device"] == "cuda"
    answer: dict[str, Any] = {"results": [], "logprobs": []}
    if request.get("load"):
        trainer.load(Path(request["load"]))
    rows = request["rows"]
    for _ in range(request.get("steps", 1)):
        if request.get("offload"):
            trainer.offload()
            answer["offloaded_bytes"] = torch.cuda.memory_allocated() if on_gpu else 0
            trainer.onload()
            answer["onloaded_bytes"] = torch.cuda.memory_allocated() if on_gpu else 0
        before = trainer.logprobs(rows, TEMPERATURE)
        answer["logprobs"].append(before)
        answer["results"].append(trainer.train(batch_of(model, rows, before, settings.get("kl", 0.0))))
    answer["logprobs"].append(trainer.logprobs(rows, TEMPERATURE))
    if request.get("save"):
        trainer.save(Path(request["save"]), {})
    if request.get("export"):
        trainer.export(Path(request["export"]))
    return answer


def main() -> None:
    file = Path(sys.argv[1])
    file.with_suffix(".out.json").write_text(json.dumps(_answer(json.loads(file.read_text()))))


if __name__ == "__main__":
    main()
