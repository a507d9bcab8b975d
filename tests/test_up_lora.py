"""`aglite up` with an adapter: the real engine and trainer."""

import json

import pytest
from mini_run import MiniRun


@pytest.mark.slow
def test_a_run_trains_an_adapter(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run = MiniRun(
        tmp_path,
        sampling={"train": {"temperature": 0.8}},
        algorithm={"group_size": 3, "groups_per_step": 2, "groups_in_flight": 2, "kl": 0.01},
        trainer={
            "steps": 2,
            "lr": 0.01,
            "checkpoint_every": 10,
            "min_free_disk_mb": 0,
            "lora": {"rank": 4, "alpha": 8},
        },
        evaluation={"before": False},
        engine={"threads": 1},
    )
    model = run.folder / "model"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    run.worker = {"AGLITE_WORKER": "aglite.worker"}
    code, output = run.up(timeout=240)
    assert code == 0, output

    steps = run.store().steps()
    assert [(row["step"], row["state"]) for row in steps] == [(1, "applied"), (2, "applied")]
    assert all(row["metrics"]["logprob_gap_tokens"] > 0 for row in steps)
    assert all(row["metrics"]["logprob_gap_mean"] < 1e-3 for row in steps)
    assert steps[0]["metrics"]["kl_ref"] == pytest.approx(0, abs=1e-6) and steps[1]["metrics"]["kl_ref"] > 1e-5

    folder = run.run_dir.checkpoints / "step-2"
    before, after = (
        dict(transformers.AutoModelForCausalLM.from_pretrained(one).named_parameters()) for one in (model, folder)
    )
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "_proj." in name}
    about = json.loads((folder / "trainer" / "adapter_config.json").read_text())
    assert about["r"] == 4 and about["base_model_name_or_path"] == str(model)
