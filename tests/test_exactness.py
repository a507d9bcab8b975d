"""The trained tokens are the sampled tokens: a finished run of the real engine and trainer, read back."""

import json
from collections import Counter
from pathlib import Path

import pytest
from mini_run import MiniRun

EPSILON = 1e-3
"""Largest mean difference between engine and trainer that a run accepts in fp32."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = MiniRun(
        tmp_path_factory.mktemp("exact"),
        sampling={"train": {"temperature": 0.8}},
        algorithm={"group_size": 3, "groups_per_step": 2, "groups_in_flight": 4},
        trainer={"steps": 3, "lr": 0.01, "checkpoint_every": 10, "min_free_disk_mb": 0},
        engine={"threads": 1},
    )
    model = made.folder / "model"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    made.emitted = made.folder / "emitted.jsonl"
    made.worker = {
        "AGLITE_WORKER": "recording_worker",
        "AGLITE_EMITTED": str(made.emitted),
        "PYTHONPATH": str(Path(__file__).parent / "helpers"),
    }
    code, output = made.up(timeout=240)
    assert code == 0, output
    made.output = output
    return made


def emissions(path: Path) -> Counter:
    """(prompt, response, log-probabilities, versions) of every generation that the worker finished or was cut in."""
    prompts, responses = {}, {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "prompt" in row:
            prompts[row["id"]] = tuple(row["prompt"])
            responses[row["id"]] = ([], [], [])
        else:
            ids, logprobs, versions = responses[row["id"]]
            ids += row["ids"]
            logprobs += row["logprobs"]
            versions += [row["version"]] * len(row["ids"])
    return Counter((prompts[number], *map(tuple, responses[number])) for number in prompts)


@pytest.mark.slow
def test_every_masked_token_is_what_the_engine_emitted(run):
    store = run.store()
    emitted = emissions(run.emitted)
    samples = store.samples()
    assert samples
    trained = 0
    for sample in samples:
        calls = {call.id: call for call in store.calls(sample.rollout_id)}
        covered = [0] * len(sample.input_ids)
        for call_id, is_trained in sample.calls:
            if not is_trained:
                continue
            start = len(calls[call_id].prompt_ids)
            end = start + len(calls[call_id].response_ids)
            key = (
                tuple(sample.input_ids[:start]),
                tuple(sample.input_ids[start:end]),
                tuple(sample.logprobs[start:end]),
                tuple(sample.versions[start:end]),
            )
            assert emitted[key] > 0, "a trained stretch that the engine never emitted, or trained twice"
            emitted[key] -= 1
            covered[start:end] = [1] * (end - start)
        assert covered == list(sample.loss_mask)
        trained += sum(covered)
    rollouts = [row for row in store.rollouts() if row["split"] == "train"]
    assert trained == sum(row["sampled_tokens"] for row in rollouts) > 0


@pytest.mark.slow
def test_engine_and_trainer_agree_before_and_after_updates(run):
    steps = run.store().steps()
    assert [row["state"] for row in steps] == ["applied"] * 3
    for row in steps:
        assert row["metrics"]["logprob_gap_tokens"] > 0
        assert row["metrics"]["logprob_gap_mean"] < EPSILON
    assert "disagree" not in run.output


@pytest.mark.slow
def test_the_checkpoint_is_an_ordinary_model_and_has_moved(run):
    import transformers

    before = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "model")
    after = transformers.AutoModelForCausalLM.from_pretrained(run.run_dir.checkpoints / "step-3")
    moved = [float((a - b).abs().max()) for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert max(moved) > 1e-3
