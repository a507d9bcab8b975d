"""How vLLM is started, what its log tells, and where it listens."""

import json
import mmap
import multiprocessing
import os
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from aglite.config import EngineSettings
from aglite.engine.child import Child
from aglite.engine.vllm_server import cause_of, command, environment, flags, last_stage, private_folder
from aglite.engine.vllm_server import shared_memory as find_shared
from aglite.errors import AgliteError


def started(tmp_path, device="cuda", trained=True, ipc=True, length=0, **settings):
    return flags(
        EngineSettings(kind="vllm", **settings),
        tmp_path,
        device=device,
        trained=trained,
        ipc=ipc,
        context_length=length,
        seed=3,
    )


def value(found, name):
    return found[found.index(name) + 1]


def test_flags_of_a_trained_vllm_on_a_gpu(tmp_path):
    found = started(tmp_path, gpu_memory_utilization=0.7, max_running=64, length=8192, args=["--swap-space", "0"])
    assert value(found, "--model") == str(tmp_path) and value(found, "--seed") == "3"
    assert value(found, "--logprobs-mode") == "processed_logprobs"
    assert value(found, "--gpu-memory-utilization") == "0.7" and value(found, "--max-num-seqs") == "64"
    assert value(found, "--dtype") == "bfloat16" and value(found, "--max-model-len") == "8192"
    assert json.loads(value(found, "--weight-transfer-config")) == {"backend": "ipc"}
    assert {"--enable-sleep-mode", "--enable-prefix-caching", "--enable-chunked-prefill"} <= set(found)
    assert "--enforce-eager" not in found
    assert found[-2:] == ["--swap-space", "0"]


def test_flags_of_one_that_only_serves_and_of_one_on_the_cpu(tmp_path):
    assert not {"--enable-sleep-mode", "--weight-transfer-config"} & set(started(tmp_path, trained=False, ipc=False))
    found = started(tmp_path, device="cpu", ipc=False)
    assert value(found, "--dtype") == "float32" and "--enforce-eager" in found
    assert not {"--enable-sleep-mode", "--gpu-memory-utilization", "--max-model-len"} & set(found)


def test_environment_is_local_and_holds_the_cache_that_the_recipe_wants(tmp_path, monkeypatch):
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineSettings(kind="vllm", kv_tokens=60_000)
    monkeypatch.delenv("AGLITE_VLLM", raising=False)
    found = environment({"PYTHONPATH": "p"}, settings, tmp_path, tmp_path / "x", device="cpu", ipc=False)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"  # 60,000 tokens * 20 layers * 2 * 4 heads * 64 * 4 bytes = 2.3 GiB
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["HF_HUB_OFFLINE"] == "1" and found["PYTHONPATH"] == "p"
    assert found["VLLM_RPC_BASE_PATH"] == str(tmp_path / "x")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in found
    monkeypatch.setenv("AGLITE_VLLM", "/venv/bin/python -m vllm")
    found = environment({"PYTHONPATH": "p"}, settings, tmp_path, tmp_path, device="cuda", ipc=True)
    assert found["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1" and "PYTHONPATH" not in found
    assert "VLLM_CPU_KVCACHE_SPACE" not in found
    assert command() == ["/venv/bin/python", "-m", "vllm"]
    monkeypatch.setenv("AGLITE_VLLM", "'/venv/bin/python -m vllm")
    with pytest.raises(AgliteError, match="AGLITE_VLLM: No closing quotation"):
        command()


def test_the_cache_of_a_model_that_also_reads_pictures_is_that_of_its_text(tmp_path):
    text = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 20}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vision_config": {}}))
    settings = EngineSettings(kind="vllm", kv_tokens=60_000)
    found = environment({}, settings, tmp_path, tmp_path / "x", device="cpu", ipc=False)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"


@pytest.mark.parametrize(
    ("lines", "stage"),
    [
        (
            ["(EngineCore pid=7) INFO 11-30 11:44:57 [core.py:100] Initializing a V1 LLM engine"],
            "Initializing a V1 LLM",
        ),
        (["INFO 11-30 11:44:57 [a.py:1] Loading", "some other line"], "Loading"),
        (
            ["INFO 11-30 11:44:57 [a.py:1] x", "Loading shards:  50%|####  | 1/2\rLoading shards: 100%|###|"],
            "Loading sh",
        ),
        (
            ["(A pid=6) INFO 11-30 11:44:57 [a.py:1] Loading", "(A pid=6) INFO 11-30 11:44:58 [a.py:2]   ▀▀ ▀▀▀▀"],
            "Loading",
        ),
        (["nothing that vLLM writes"], ""),
    ],
)
def test_what_it_is_at_is_read_from_its_log(lines, stage):
    found = last_stage(lines)
    assert found.startswith(stage) and bool(found) == bool(stage)


def test_the_end_of_the_log_is_what_it_did_and_no_list_of_its_routes(tmp_path):
    log = tmp_path / "vllm.log"
    routes = [
        f"(APIServer pid=6) INFO 11-30 11:44:57 [launcher.py:195] Route: /v1/{n}, Methods: POST" for n in range(40)
    ]
    log.write_text("\n".join(["Loading", *routes, "Application startup complete."]))
    assert Child("vLLM", log).last_lines() == ("Loading", "Application startup complete.")


def test_a_private_folder_is_new_each_time_and_one_per_run(tmp_path):
    folder = private_folder(tmp_path)
    try:
        (folder / "left over").write_text("x")
        assert private_folder(tmp_path) == folder and list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o777 == 0o700
        other = private_folder(tmp_path / "other")
        assert other != folder
        other.rmdir()
    finally:
        folder.rmdir()


def test_the_cause_of_a_failed_start_is_found_behind_what_follows_from_it():
    cause = "(EngineCore pid=7) ERROR 11-30 12:40:00 [core.py:1100] torch.cuda.SomeError: no such layer"
    later = [
        "(APIServer pid=6)   raise RuntimeError(",
        "(APIServer pid=6) RuntimeError: Engine core initialization failed.",
    ]
    assert cause_of([cause, *later]) == "torch.cuda.SomeError: no such layer"
    settings = [
        "pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, too long",
        "    more",
    ]
    assert cause_of(settings).endswith("1 validation error for ModelConfig Value error, too long")
    usage = ["usage: api_server.py [-h]", "  [model_tag]", "api_server.py: error: unrecognized arguments: --warp"]
    assert cause_of(usage) == "unrecognized arguments: --warp"
    assert cause_of([]) == ""
    assert cause_of(["INFO 11-30 12:40:00 [core.py:1] all is well"]) == ""


def test_what_is_shared_in_memory_is_found():
    lock = multiprocessing.get_context("spawn").Lock()
    block = shared_memory.SharedMemory(create=True, size=64)
    try:
        names = {path.name for path in find_shared(os.getpid())}
        assert block.name in names and f"sem.{lock._semlock.name.strip('/')}" in names
    finally:
        block.close()
        block.unlink()
    assert block.name not in {path.name for path in find_shared(os.getpid())}


def test_a_file_whose_name_is_no_text_is_no_obstacle(tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(odd, "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        with mmap.mmap(file.fileno(), 4096):
            assert b"caf\xe9" in Path("/proc/self/maps").read_bytes()
            find_shared(os.getpid())


def test_a_machine_without_memory_for_files_shares_none(tmp_path, monkeypatch):
    monkeypatch.setattr("aglite.engine.vllm_server.MEMORY", tmp_path / "none")
    assert find_shared(os.getpid()) == set()
    folder = private_folder(tmp_path)
    assert folder.is_dir() and not folder.is_relative_to(tmp_path / "none")
    folder.rmdir()
