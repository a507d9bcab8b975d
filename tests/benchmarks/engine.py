"""How fast the embedded engine is, beside transformers, vLLM and the matrix products alone. Everything float32.

    python tests/benchmarks/engine.py MODEL_FOLDER [--quick] [--vllm PYTHON]

All contestants run in turn, round after round, and medians are compared, so that a busy machine slows all alike.

bound:  tokens/s if a decode step were nothing but its matrix products, through F.linear
decode: tokens/s of the engine once all prompts are computed, over the median step (target: 75% of the bound)
whole:  tokens/s from submission to the last token, prompts included, of the engine, transformers and vLLM
turns:  seconds for conversations of six turns, each prompt being the whole conversation so far
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TURNS = 6
TURN_TOKENS = 24  # new ones of the user and of the reply, each turn


class AgliteSide:
    name = "aglite"

    def __init__(self, model: Path, threads: int) -> None:
        from aglite.engine.embedded.engine import EmbeddedEngine

        started = time.perf_counter()
        self.engine = EmbeddedEngine(model, context_length=2048, max_running=32, kv_tokens=32768, threads=threads)
        print(f"engine loaded in {time.perf_counter() - started:.1f} s: {self.engine.info.details}")
        self.steps: list[float] = []  # seconds of steps in which every request got a token

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from aglite.engine.base import SamplingParams

        for number, prompt in enumerate(prompts):
            self.engine.submit(number, prompt, SamplingParams(max_tokens=tokens))
        replies: list[list[int]] = [[] for _ in prompts]
        while self.engine.has_work:
            computed = self.engine.stats().prefill_tokens
            started = time.perf_counter()
            chunks = self.engine.step()
            if len(chunks) == len(prompts) and self.engine.stats().prefill_tokens == computed:
                self.steps.append(time.perf_counter() - started)
            for number, chunk in chunks:
                replies[number] += chunk.token_ids
        return replies


class TransformersSide:
    name = "transformers"

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()


class VllmSide:
    """vLLM in a Python of its own, driven over its standard input and output."""

    name = "vllm"

    def __init__(self, python: str, model: Path, threads: int) -> None:
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self.child = subprocess.Popen(
            [python, __file__, str(model), "--serve-vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **settings},
        )
        self._reply()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        self.child.stdin.write(json.dumps([prompts, tokens]) + "\n")
        self.child.stdin.flush()
        return self._reply()

    def _reply(self) -> list[list[int]]:
        for line in self.child.stdout:
            if line.startswith("REPLY "):
                return json.loads(line.removeprefix("REPLY "))
        raise SystemExit(f"vLLM ended with exit code {self.child.wait()}; run it by hand with --serve-vllm to see why")


def serve_vllm(model: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=32)
    print("REPLY []", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        print("REPLY " + json.dumps([list(out.outputs[0].token_ids) for out in outs]), flush=True)


def matrix_products(model: Path) -> Callable[[int], float]:
    """A function from the number of rows to the seconds that one step's matrix products take."""
    import torch
    import torch.nn.functional as F

    from aglite.engine.embedded.architecture import read_architecture

    arch = read_architecture(model)
    inner, fused = arch.heads * arch.head_dim, (arch.heads + 2 * arch.kv_heads) * arch.head_dim
    shapes = [(fused, arch.hidden), (arch.hidden, inner), (2 * arch.intermediate, arch.hidden)]
    shapes.append((arch.hidden, arch.intermediate))
    weights = [torch.randn(shape) for _ in range(arch.layers) for shape in shapes]
    weights.append(torch.randn(arch.vocab, arch.hidden))

    def seconds(rows: int) -> float:
        inputs = {width: torch.randn(rows, width) for width in (arch.hidden, inner, arch.intermediate)}
        with torch.inference_mode():
            started = time.perf_counter()
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
            return time.perf_counter() - started

    return seconds


def random_prompts(count: int, length: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def conversations(side, count: int, rng: random.Random) -> float:
    """Seconds for `count` conversations at once, all with the same lengths."""
    histories = random_prompts(count, TURN_TOKENS, rng)
    started = time.perf_counter()
    for _ in range(TURNS):
        replies = side.generate(histories, TURN_TOKENS)
        news = random_prompts(count, TURN_TOKENS, rng)
        histories = [h + r + n for h, r, n in zip(histories, replies, news, strict=True)]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face model folder")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vllm-cpu, to run it too")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--serve-vllm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_vllm:
        return serve_vllm(options.model)

    import torch

    torch.set_num_threads(options.threads)
    rounds, prompt, tokens = (3, 64, 32) if options.quick else (5, 128, 64)
    bound = matrix_products(options.model)
    engine = AgliteSide(options.model, options.threads)
    sides = [engine, TransformersSide(options.model, options.threads)]
    if options.vllm:
        sides.append(VllmSide(options.vllm, options.model, options.threads))
    rng = random.Random(0)
    for side in sides:
        side.generate(random_prompts(2, 8, rng), 4)  # warm up

    print(f"prompts of {prompt} tokens, responses of {tokens}, medians of {rounds} rounds, {options.threads} threads")
    for count in options.concurrency:
        bounds, decodes = [], []
        wholes: dict[str, list[float]] = {side.name: [] for side in sides}
        for _ in range(rounds):
            bounds += [count / bound(count) for _ in range(3)]
            for side in sides:
                prompts = random_prompts(count, prompt, rng)
                engine.steps.clear()
                started = time.perf_counter()
                replies = side.generate(prompts, tokens)
                wholes[side.name].append(count * tokens / (time.perf_counter() - started))
                assert all(len(reply) == tokens for reply in replies)
                decodes += [count / seconds for seconds in engine.steps]
        report(f"{count:3d} concurrent", statistics.median(bounds), statistics.median(decodes), wholes)
    for count in options.concurrency[:2]:
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        before = engine.engine.stats()
        for _ in range(rounds):
            for side in sides:
                seconds[side.name].append(conversations(side, count, rng))
        after = engine.engine.stats()
        ours = statistics.median(seconds["aglite"])
        line = f"{count:3d} conversations: aglite {ours:.2f} s"
        for side in sides[1:]:
            theirs = statistics.median(seconds[side.name])
            line += f", {side.name} {theirs:.2f} s ({theirs / ours:.2f}x)"
        computed, reused = after.prefill_tokens - before.prefill_tokens, after.reused_tokens - before.reused_tokens
        print(f"{line}; prompt tokens computed {computed}, reused {reused}", flush=True)


def report(title: str, bound: float, decode: float, wholes: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in wholes.items()}
    line = f"{title}: bound {bound:.1f} tok/s, decode {decode:.1f} ({decode / bound:.0%} of the bound); whole"
    for name, median in medians.items():
        line += f" {name} {median:.1f}" + ("" if name == "aglite" else f" ({medians['aglite'] / median:.2f}x)")
    print(line, flush=True)


if __name__ == "__main__":
    main()
