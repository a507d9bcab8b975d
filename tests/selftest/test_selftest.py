"""The self-test for a GPU: every way an item can end, and the items themselves as far as they go without a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import is_running
from tiny import tiny_model

from aglite.errors import AgliteError, RecipeError
from aglite.memory_plan.card import Card
from aglite.paths import RunDir
from aglite.selftest import run, up_items, vllm_items
from aglite.selftest.bench import Bench, Failed
from aglite.selftest.items import ITEMS, NAMED, Item, Outcome

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
FAKE = HELPERS / "fake_vllm.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Tokenizer and configuration; nothing here reads weights."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def bench(tmp_path, model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    return Bench(model, tmp_path, "cpu")


def stand_in(name, timeout_s=240):
    return Item(name, f"selftest_stand_ins:{name}", timeout_s)


# --- how items end


def test_every_end_is_an_outcome_and_none_stops_the_others(bench):
    said = []
    items = [stand_in(name) for name in ("passes", "fails", "skips", "breaks", "dies", "passes")]
    outcomes = run.run_items(items, bench, said.append)
    assert [one.status for one in outcomes] == ["pass", "fail", "skip", "fail", "fail", "pass"]
    assert outcomes[0].figures == {"gap": 0.000123, "device": "cpu", "rows": 4}
    assert outcomes[1].detail == "it is 2, 1 was expected"
    assert outcomes[2].detail == "there is one GPU"
    assert outcomes[3].detail == "ValueError: no such layer"
    assert "exit code 3" in outcomes[4].detail and outcomes[4].detail.endswith("illegal memory access was encountered")
    assert said[0] == "[1/6] passes: Finds what it looks for."
    lines = run.lines_of(outcomes)
    assert lines[1].split()[:2] == ["passes", "pass"] and "gap 0.000123, device cpu" in lines[1]
    assert lines[-1] == "2 pass, 3 fail, 1 skip"
    assert "torch 2." in lines[0]
    told = json.loads(json.dumps(run.report(outcomes)))
    assert [one["status"] for one in told["items"]] == [one.status for one in outcomes] and told["versions"]["torch"]


def test_an_item_that_hangs_is_ended_with_what_it_started(bench):
    note = bench.scratch / "child.pid"
    for timeout_s in (8, 30, 120):  # on a machine on which it has not even begun within the first of them
        (outcome,) = run.run_items([stand_in("hangs", timeout_s=timeout_s)], bench, lambda line: None)
        assert outcome.status == "fail" and f"took more than {timeout_s} s" in outcome.detail
        if note.exists() and note.read_text():
            break
    child = int(note.read_text())
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "the process that it started is alive"
        time.sleep(0.05)


def test_each_item_says_what_it_verifies():
    assert len(NAMED) == len(ITEMS)
    for item in ITEMS:
        assert item.about.endswith("."), item.name


def test_readme_lists_every_item_with_its_command():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    section = readme.partition("## Not yet verified on hardware")[2].partition("\n## ")[0]
    assert section
    for item in ITEMS:
        assert f"| {item.about.removesuffix('.')} | `--only {item.name}` |" in section, item.name


def test_items_are_chosen_by_name_and_an_unknown_one_is_refused():
    assert run.chosen() == list(ITEMS)
    assert [item.name for item in run.chosen(["lora", "cuda"])] == ["cuda", "lora"]
    with pytest.raises(RecipeError, match="--only: the self-test has no item 'warp'") as error:
        run.chosen(["cuda", "warp"])
    assert "vllm-sleep" in error.value.mend
    done = doctor_without_gpu("--selftest", "gpu", "--only", "warp")
    assert done.returncode == 2 and "no item 'warp'" in done.stderr and done.stdout == ""


def doctor_without_gpu(*options):
    command = [sys.executable, "-m", "aglite", "doctor", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )


def test_without_a_gpu_each_item_is_skipped_and_nothing_counts_as_verified():
    done = doctor_without_gpu("--selftest", "gpu")
    assert done.returncode == 2 and "nothing was verified" in done.stderr
    head, *rows, counts = done.stdout.splitlines()
    assert head.startswith("no GPU; ") and counts == f"0 pass, 0 fail, {len(ITEMS)} skip"
    assert [row.split()[:2] for row in rows] == [[item.name, "skip"] for item in ITEMS]
    assert all(row.endswith(run.NO_GPU) for row in rows)
    told = doctor_without_gpu("--selftest", "gpu", "--only", "cuda", "--json")
    assert told.returncode == 2
    assert [(one["name"], one["status"]) for one in json.loads(told.stdout)["items"]] == [("cuda", "skip")]


@pytest.mark.parametrize("statuses, code", [(["skip", "pass"], 0), (["pass", "fail"], 1), (["skip", "skip"], 2)])
def test_the_exit_code_says_whether_anything_was_verified(monkeypatch, statuses, code):
    from aglite.cli import model as command

    monkeypatch.setattr("aglite.memory_plan.card.present_card", lambda: Card("a card", 2**30))
    monkeypatch.setattr("aglite.models.resolve_model", lambda *_: Path())
    outcomes = [Outcome(str(place), status) for place, status in enumerate(statuses)]
    monkeypatch.setattr(run, "run_items", lambda *_: outcomes)
    assert command._selftest("m", [], False) == code


# --- items without a GPU


def test_the_device_and_the_embedded_engine(tmp_path):
    """Weights of random numbers, on the CPU twice."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from aglite.selftest import torch_items

    folder = tiny_model(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    LlamaForCausalLM(config).save_pretrained(folder)
    here = Bench(folder, tmp_path, "cpu")
    assert torch_items.cuda(here)["bf16_error"] < 2e-2
    assert torch_items.embedded_engine(here) == {"gap": 0.0}


def test_answers_are_compared():
    from aglite.selftest.torch_items import _same

    answer = {"logprobs": [[[-1.0, -2.0]]], "results": [{"loss": 0.5, "grad_norm": 2.0, "seconds": 1.0}]}
    assert _same(answer, answer, 1e-3) == {"gap": 0.0, "seconds_a_step": 1.0}
    with pytest.raises(Failed, match=r"differ by up to 0\.5"):
        _same({**answer, "logprobs": [[[-1.5, -2.0]]]}, answer, 1e-3)
    with pytest.raises(Failed, match="grad_norm is 3, expected 2"):
        _same({**answer, "results": [{"loss": 0.5, "grad_norm": 3.0, "seconds": 1.0}]}, answer, 1e-3)


@pytest.fixture
def stand_ins(bench, monkeypatch):
    """A vLLM and a trainer that are stand-ins; `set` says how the first behaves."""

    def set(**settings):
        record = {"record": str(bench.scratch / "record.txt"), "token_s": 0.01, **settings}
        (bench.scratch / "vllm.json").write_text(json.dumps(record))

    set()
    (bench.scratch / "script.json").write_text(json.dumps({"record": str(bench.scratch / "record.txt")}))
    monkeypatch.setattr("aglite.engine.vllm_server.POLL_S", 0.05)
    monkeypatch.setenv("AGLITE_VLLM", f"{sys.executable} {FAKE} {bench.scratch / 'vllm.json'}")
    monkeypatch.setenv("AGLITE_WORKER", f"aglite.engine.scripted --script {bench.scratch / 'script.json'}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return set, lambda: (bench.scratch / "record.txt").read_text().splitlines()


def test_vllm_is_started_and_ended(bench, stand_ins):
    assert vllm_items.vllm_start(bench)["start_s"] >= 0


def test_vllm_sleeps_and_wakes(bench, stand_ins):
    assert vllm_items.vllm_sleep(bench) == {"gap": 0.0}
    calls = [line.split()[1] for line in stand_ins[1]() if line.startswith("vllm /")]
    assert [call.partition("?")[0] for call in calls if "logprobs" not in call][-6:] == [
        "/pause",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/wake_up",
        "/resume",
    ]


def test_updates_arrive_and_times_are_told(bench, stand_ins):
    assert set(vllm_items.transfer_folder(bench)) == {"pause_s", "sleep_onload_s", "train_s", "sync_s"}


def test_weights_that_do_not_arrive_fail_the_item(bench, stand_ins):
    stand_ins[0](stale=True)
    with pytest.raises(AgliteError, match="vLLM does not have the trainer's weights"):
        vllm_items.transfer_folder(bench)


def test_a_database_that_is_being_made_is_waited_for(tmp_path):
    run_dir = RunDir(tmp_path)
    for text in (None, ""):
        if text is not None:
            run_dir.db.write_text(text)
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
        with sleeper as process, pytest.raises(Failed, match="the run ended with exit code 0"):
            up_items._wait_for_rollouts(process, run_dir)


def test_a_generation_spans_an_update(bench, stand_ins):
    counts = vllm_items.preempt(bench)
    assert counts["before_update"] + counts["after_update"] == vllm_items.TOKENS and counts["after_update"] > 0
