"""Lab 1, re-tokenisation: continue the tokens that were sampled, or tokenise the conversation's text anew.

    python docs/labs/lab1.py

makes the model, trains `lab1.yaml` with `gateway.continuation` exact and rerender, and writes runs/labs/lab1.svg and
lab1.md. What it shows is told in docs/labs/lab1.md.
"""

from __future__ import annotations

import statistics

import lab
from lab import Run

from aglite.gateway.tokenizer import TextTokenizer
from aglite.store import StoredCall

CONDITIONS = {name: [f"gateway.continuation={name}"] for name in ("exact", "rerender")}


def main() -> None:
    options = lab.options(__doc__, seeds=[0, 1, 2])
    runs = lab.train("lab1", CONDITIONS, options)
    tokenizer = TextTokenizer(options.model)

    def every(name: str, metric: str, digits: int = 2) -> str:
        return lab.spread([statistics.fmean(v for _, v in run.curve(metric)) for run in runs[name].values()], digits)

    never = {name: [100 * never_sampled(run, tokenizer) for run in by_seed.values()] for name, by_seed in runs.items()}
    rows = [
        ["rows per rollout", *(every(name, "samples_per_rollout") for name in runs)],
        ["calls that continue no earlier one, of all calls", *(forked(runs[name]) for name in runs)],
        ["tokens encoded for each token trained", *(every(name, "encoded_per_trained") for name in runs)],
        ["seconds of an update", *(every(name, "seconds") for name in runs)],
        ["tokens of the final text that nobody sampled, in % of its replies", *(lab.spread(never[n], 1) for n in runs)],
        ["validation at the end", *(lab.spread([run.validation[-1][1] for run in runs[n].values()]) for n in runs)],
        ["validation, mean of all evaluations", *(lab.spread([run.height for run in runs[n].values()]) for n in runs)],
    ]
    text = lab.table(["", *runs], rows)
    text += (
        f"\n\nMean validation, exact minus rerender: {lab.paired(runs, 'exact', 'rerender', lambda run: run.height)}"
    )
    drawn, axes = lab.figure(3)
    lab.curves(axes[0], runs, lambda run: run.curve("samples_per_rollout"), "rows per rollout")
    lab.curves(axes[1], runs, lambda run: run.curve("encoded_per_trained"), "tokens encoded per token trained")
    lab.curves(axes[2], runs, lambda run: run.validation, "validation reward")
    axes[0].legend()
    lab.save("lab1", drawn, text, options)


def forked(runs: dict[int, Run]) -> str:
    """Share of calls that begin a row of their own though they go on from an earlier one, over all steps."""
    shares = []
    for run in runs.values():
        calls = sum(step["calls"] for step in run.steps)
        shares.append(100 * sum(step["forks"]["retokenised"] for step in run.steps) / calls)
    return f"{lab.spread(shares, 1)} %"


def never_sampled(run: Run, tokenizer: TextTokenizer) -> float:
    """Of the replies in the last prompt of each rollout, the share of tokens that nobody sampled. A trainer that is
    given the conversation's final text would train on them."""
    odd = everything = 0
    with run.store() as store:
        for row in store.rollouts():
            calls = store.calls(row["id"])
            for reply, call in zip(replies(calls[-1], tokenizer) if calls else (), calls, strict=False):
                found, sampled = spans(reply, tokenizer), set(spans(call.response_ids, tokenizer))
                odd += sum(span not in sampled for span in found)
                everything += len(found)
    return odd / everything if everything else 0.0


def replies(call: StoredCall, tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of the assistant's earlier messages in a call's prompt, each with its end token."""
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    opening = tokenizer.encode("<|im_start|>assistant\n")
    prompt, found = call.prompt_ids.tolist(), []
    for place, token in enumerate(prompt):
        if token == start and prompt[place : place + len(opening)] == opening and end in prompt[place:]:
            found.append(prompt[place + len(opening) : prompt.index(end, place) + 1])
    return found


def spans(ids: list[int], tokenizer: TextTokenizer) -> list[tuple[int, int]]:
    """Where in the text each token begins and ends, in bytes."""
    found, at = [], 0
    for token in ids:
        found.append((at, at + len(tokenizer.token_bytes(token))))
        at = found[-1][1]
    return found


if __name__ == "__main__":
    main()
