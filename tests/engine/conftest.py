from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import make_model
from transformers import PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """The reference model and its folder."""
    folder = tmp_path_factory.mktemp("llama")
    return make_model("llama", folder), folder
