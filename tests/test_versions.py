"""Versions before a run trains: what is missing stops it, what was not tried is said."""

from pathlib import Path

import pytest
from packages import installed

from aglite import versions
from aglite.config import load_recipe
from aglite.errors import AgliteError
from aglite.versions import check_versions, findings, installed_set

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "instruct"
CPU = {"torch": "2.13.0+cpu", "verl": "0.9.1", "transformers": "5.10.4", "tensordict": "0.10.0", "renderers": "0.1.12"}
GPU = {**CPU, "torch": "2.11.0", "vllm": "0.24.0", "transformers": "5.9.0"}


@pytest.fixture(autouse=True)
def no_stand_ins(monkeypatch):
    monkeypatch.delenv("AGLITE_WORKER", raising=False)
    monkeypatch.delenv("AGLITE_VLLM", raising=False)


def checked(found, *settings):
    said = []
    check_versions(load_recipe(RECIPE, settings), said.append, installed(found))
    return said


def test_the_set_is_told_by_vllm():
    assert (installed_set(installed(CPU)), installed_set(installed(GPU))) == ("cpu", "gpu")
    assert all(one.fits for one in findings(installed=installed(CPU)))
    assert all(one.fits for one in findings(installed=installed(GPU)))
    assert not all(one.fits for one in findings("gpu", installed(CPU)))


@pytest.mark.parametrize(
    "version, fits",
    [("5.5.2", False), ("5.5.3", True), ("5.9", True), ("5.10.4", True), ("5.11.0", False), ("6.0", False)],
)
def test_transformers_on_the_cpu_may_be_one_of_several(version, fits):
    found = findings(installed=installed({**CPU, "transformers": version}))
    assert next(one for one in found if one.name == "transformers").fits == fits


def test_what_was_tried_passes_in_silence():
    assert checked(CPU) == [] and checked(GPU) == [] and checked(GPU, "engine.kind=vllm") == []


def test_what_was_not_tried_is_said_with_the_mend():
    (line,) = checked({**CPU, "verl": "0.10.0"})
    assert line == "verl 0.10.0; tried with 0.9.1: AGLITE_EXTRAS=cpu bash quickstart.sh install"
    (line,) = checked({**GPU, "vllm": "0.25.0"}, "engine.kind=vllm")
    assert line.startswith("vllm 0.25.0; tried with 0.24.0: AGLITE_EXTRAS=gpu")
    assert checked({**GPU, "vllm": "0.25.0"}) == [], "the embedded engine needs none"


def test_what_is_missing_stops_the_run():
    with pytest.raises(AgliteError, match="verl is not installed; needed for training") as error:
        checked({name: one for name, one in CPU.items() if name != "verl"})
    assert "AGLITE_EXTRAS=cpu" in error.value.mend
    with pytest.raises(AgliteError, match=r"vllm is not installed; needed for engine\.kind vllm") as error:
        checked(CPU, "engine.kind=vllm")
    assert "aglite[gpu]" in error.value.mend


def test_stand_ins_need_no_packages(monkeypatch):
    monkeypatch.setenv("AGLITE_WORKER", "aglite.engine.scripted")
    assert checked({"renderers": "0.1.12"}) == []
    monkeypatch.setenv("AGLITE_VLLM", "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server")
    assert checked({"renderers": "0.1.12"}, "engine.kind=vllm") == []


def test_flash_attention_has_to_be_installed_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AgliteError, match="flash-attn is not installed"):
        checked(CPU, "trainer.attention=flash_attention_2")
