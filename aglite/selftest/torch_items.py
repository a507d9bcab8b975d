"""Items about torch on the GPU: the device itself, the embedded engine, and the trainer in all its ways."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from aglite.selftest.bench import Bench, Figures, Skip, expect, largest_gap, mean_gap, recipe_with
from aglite.selftest.step import run_steps

FP32 = 2e-3
"""Nats by which log-probabilities in fp32 may differ between two devices."""
BF16 = 0.1
"""The same on average where a pass computes in bfloat16."""
MIB = 2**20


def cuda(bench: Bench) -> Figures:
    """torch computes on the GPU, in fp32 and in bf16, and NVML sees the same card."""
    import torch

    if bench.device == "cuda":
        expect(torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    exact, figures = a @ b, {"torch": torch.__version__}
    for name, dtype, allowed in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 2e-2)):
        found = (a.to(bench.device, dtype) @ b.to(bench.device, dtype)).double().cpu()
        error = float((found - exact).norm() / exact.norm())
        figures[f"{name}_error"] = error
        expect(error < allowed, f"a matrix product in {name} is off by {error:.2g}, {allowed:g} is allowed")
    if bench.device == "cuda":
        from aglite.memory_plan.card import present_card

        properties, card = torch.cuda.get_device_properties(0), present_card()
        figures |= {
            "gpu": properties.name,
            "gib": round(properties.total_memory / 2**30, 2),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
        expect(card is not None, "NVML does not answer")
        expect(card.name == properties.name, f"NVML's first card is {card.name}, torch's is {properties.name}")
        figures["reserved"] = round(1 - properties.total_memory / card.total, 4)
    return figures


def embedded_engine(bench: Bench) -> Figures:
    """The embedded engine gives the log-probabilities on the GPU that it gives on the CPU (fp32)."""
    import torch

    from aglite.engine.embedded.engine import EmbeddedEngine

    torch.backends.cuda.matmul.allow_tf32 = False
    rows = bench.rows()
    found = []
    for device in ("cpu", bench.device):
        engine = EmbeddedEngine(bench.model, context_length=128, max_running=4, kv_tokens=4096, device=device)
        found.append(engine.logprobs(rows, 1.0))
    gap = largest_gap(*found)
    expect(gap < FP32, f"log-probabilities differ by up to {gap:.2g}, {FP32:g} is allowed")
    return {"gap": gap}


def trainer(bench: Bench) -> Figures:
    """Two steps of verl's FSDP2 worker in fp32 are those of the CPU: loss, gradient, log-probabilities after."""
    here, there = _steps(bench, "fp32", dtype="float32", attention="sdpa"), _on_cpu(bench)
    return _same(here, there, FP32)


def trainer_bf16(bench: Bench) -> Figures:
    """In bf16 mixed precision the step is that of fp32 up to rounding, with sdpa and shared prefixes."""
    here, there = _steps(bench, "bf16", dtype="bfloat16", attention="sdpa"), _on_cpu(bench)
    gap = mean_gap(here["logprobs"][0], there["logprobs"][0])
    expect(gap < BF16, f"log-probabilities differ by {gap:.2g} on average, {BF16:g} is allowed")
    norms = [one["results"][0]["grad_norm"] for one in (here, there)]
    expect(abs(norms[0] / norms[1] - 1) < 0.1, f"gradient norm {norms[0]:.4g}, in fp32 {norms[1]:.4g}")
    return {"mean_gap": gap, "grad_norm": norms[0], "grad_norm_fp32": norms[1], **_peaks(here)}


def flash_attention(bench: Bench) -> Figures:
    """Flash attention gives the log-probabilities that sdpa gives, without shared prefixes."""
    if importlib.util.find_spec("flash_attn") is None:
        raise Skip("the package flash-attn is not installed; attention is sdpa then")
    flash = _steps(bench, "flash", dtype="bfloat16", attention="flash_attention_2")
    sdpa = _steps(bench, "bf16", dtype="bfloat16", attention="sdpa")
    gap = mean_gap(flash["logprobs"][0], sdpa["logprobs"][0])
    expect(gap < BF16, f"log-probabilities differ by {gap:.2g} on average, {BF16:g} is allowed")
    return {"mean_gap": gap, **_peaks(flash)}


def checkpointing(bench: Bench) -> Figures:
    """With gradient checkpointing the same is computed in less memory."""
    less = _steps(bench, "checkpointing", dtype="float32", attention="sdpa", gradient_checkpointing=True)
    more = _steps(bench, "fp32", dtype="float32", attention="sdpa")
    figures = _same(less, more, FP32)
    before, after = (one["results"][0].get("gpu_peak_mb", {}).get("train", 0) for one in (more, less))
    if bench.device == "cuda":
        expect(after < before, f"it takes {after} MB, without it {before} MB")
    return {**figures, "train_mb": after, "train_mb_without": before}


def offload(bench: Bench) -> Figures:
    """Weights, gradients and optimizer leave the GPU for host memory and come back; the next step is the same."""
    moved = _steps(bench, "offload", dtype="float32", attention="sdpa", offload=True)
    figures = _same(moved, _steps(bench, "fp32", dtype="float32", attention="sdpa"), 1e-6)
    left, back = moved["offloaded_bytes"] / MIB, moved["onloaded_bytes"] / MIB
    if bench.device == "cuda":
        expect(left < 0.1 * back, f"{left:.0f} MiB stay on the GPU, of {back:.0f}")
    return {**figures, "left_mib": round(left), "back_mib": round(back)}


def offloaded_optimizer(bench: Bench) -> Figures:
    """With trainer.offload_optimizer the optimizer is on the GPU only while it is applied; steps are the same."""
    here = _steps(bench, "optimizer", dtype="float32", attention="sdpa", offload_optimizer=True)
    return _same(here, _steps(bench, "fp32", dtype="float32", attention="sdpa"), 1e-6) | _peaks(here)


def reference(bench: Bench) -> Figures:
    """A KL term: the reference in host memory gives what the policy gave at the start."""
    here = _steps(bench, "reference", dtype="float32", attention="sdpa", kl=0.1)
    first, second = (result["kl_ref"] for result in here["results"])
    expect(abs(first) < 1e-4, f"before the first update the KL to the starting model is {first:.2g}")
    expect(second > first, f"after an update it is {second:.2g}, before it {first:.2g}")
    return {"kl_first": first, "kl_second": second, **_peaks(here)}


def lora(bench: Bench) -> Figures:
    """An adapter is trained, and the merged weights that are exported compute what it computes."""
    folder = bench.folder("merged")
    settings = {"dtype": "float32", "attention": "sdpa", "lora": {"rank": 8, "alpha": 16, "targets": []}}
    here = _steps(bench, "lora", export=folder, **settings)
    expect(here["logprobs"][0] != here["logprobs"][-1], "two steps have changed nothing")
    there = run_steps(
        bench.scratch, "lora-merged", model=folder, device=bench.device, rows=bench.rows(), steps=0,
        settings={"dtype": "float32", "attention": "sdpa"},
    )  # fmt: skip
    gap = largest_gap(here["logprobs"][-1], there["logprobs"][0])
    expect(gap < FP32, f"merged weights differ by up to {gap:.2g}, {FP32:g} is allowed")
    return {"gap": gap, **_peaks(here)}


def checkpoint(bench: Bench) -> Figures:
    """A checkpoint written on the GPU goes on exactly in another process."""
    folder = bench.folder("checkpoint")
    settings = {"dtype": "float32", "attention": "sdpa"}
    _steps(bench, "saved", steps=1, save=folder, **settings)
    again = _steps(bench, "loaded", steps=1, load=folder, **settings)
    whole = _steps(bench, "fp32", **settings)
    gap = largest_gap(again["logprobs"][-1], whole["logprobs"][-1])
    expect(gap < 1e-5, f"after the second step log-probabilities differ by up to {gap:.2g}")
    return {"gap": gap}


def memory_plan(bench: Bench) -> Figures:
    """What a step takes at its peak is no more than was planned."""
    from aglite.memory_plan.card import shape_in
    from aglite.memory_plan.plan import Trainer

    tokens = 2048
    rows = bench.rows(count=4, length=tokens // 4)
    settings = {"dtype": "bfloat16", "attention": "sdpa", "tokens_per_micro_batch": tokens}
    answer = run_steps(
        bench.scratch, "memory", model=bench.model, device=bench.device, rows=rows, steps=2, settings=settings
    )
    result = answer["results"][-1]
    recipe = recipe_with(bench.model, trainer=settings)
    held = Trainer(recipe, shape_in(bench.model), result["micro_batch_tokens_max"], result["trained_tokens"])
    # the allocator's slack is what it cannot use; what is measured is what it was asked for
    planned = sum(size for owner, size in held.training().items() if owner != "allocator slack") / MIB
    measured = result.get("gpu_peak_mb", {}).get("train", 0)
    if bench.device == "cuda":
        expect(measured <= 1.02 * planned, f"a step took {measured} MiB, {planned:.0f} were planned")
    return {"planned_mib": round(planned), "measured_mib": measured, **_peaks(answer)}


def _steps(bench: Bench, name: str, *, steps: int = 2, **options: Any) -> dict[str, Any]:
    """The answer of a request, from an earlier item where it was asked before."""
    request = {key: options.pop(key) for key in ("offload", "save", "load", "export") if key in options}
    return _cached(bench, f"{name}-{bench.device}", device=bench.device, settings=options, steps=steps, **request)


def _on_cpu(bench: Bench) -> dict[str, Any]:
    return _cached(bench, "baseline-cpu", device="cpu", settings={"dtype": "float32", "attention": "sdpa"}, steps=2)


def _cached(bench: Bench, name: str, **request: Any) -> dict[str, Any]:
    known = bench.scratch / f"{name}.out.json"
    if known.exists():
        return json.loads(known.read_text())
    return run_steps(bench.scratch, name, model=bench.model, rows=bench.rows(), **request)


def _same(here: dict[str, Any], there: dict[str, Any], allowed: float) -> Figures:
    """Whether two answers are of the same steps: log-probabilities before and after, loss and gradient norm."""
    gaps = [largest_gap(one, other) for one, other in zip(here["logprobs"], there["logprobs"], strict=True)]
    expect(max(gaps) < allowed, f"log-probabilities differ by up to {max(gaps):.2g}, {allowed:g} is allowed")
    for mine, other in zip(here["results"], there["results"], strict=True):
        for name in ("loss", "grad_norm"):
            off = abs(mine[name] - other[name])
            expect(off <= 1e-2 * max(1e-3, abs(other[name])), f"{name} is {mine[name]:.6g}, expected {other[name]:.6g}")
    return {"gap": max(gaps), "seconds_a_step": here["results"][-1]["seconds"]}


def _peaks(answer: dict[str, Any]) -> Figures:
    return {f"{phase}_mb": peak for phase, peak in answer["results"][-1].get("gpu_peak_mb", {}).items()}
