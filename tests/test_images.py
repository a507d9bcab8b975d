"""images/build.sh: what it builds is what the presets were made for."""

import subprocess
from pathlib import Path

import pytest

from aglite.harnesses import HARNESSES

IMAGES = Path(__file__).resolve().parents[1] / "images"


@pytest.mark.parametrize("harness", HARNESSES.values(), ids=lambda harness: harness.name)
def test_each_preset_has_an_image_with_the_version_it_was_tested_with(harness):
    script = (IMAGES / "build.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.strip().startswith(f"{harness.name})")]
    join = "@" if "KIND=npm" in line else "=="
    assert f"{harness.package}{join}{harness.version}" in line
    assert (IMAGES / harness.name / "Dockerfile").is_file() or "KIND=npm" in line


def test_it_says_how_it_is_used():
    said = subprocess.run(["bash", IMAGES / "build.sh", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--offline" in said
    assert all(name in said for name in HARNESSES)
