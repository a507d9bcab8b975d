"""A model folder whose weights are not all there: transformers makes up the missing ones at random and only warns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from aglite.errors import AgliteError

MEND = "give every tensor of the model; check that its config.json belongs to its weights"


@contextlib.contextmanager
def whole_weights(folder: Path) -> Iterator[None]:
    """While it is open, loading `folder` raises AgliteError where a weight is missing or of another shape."""
    found = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **settings: Any) -> Any:
        load = found.__get__(None, cls)
        if settings.get("output_loading_info"):  # whoever asks for it looks at it
            return load(*args, **settings)
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, about = load(*args, **settings)
        if missing := sorted(about["missing_keys"]):
            what = f"{len(missing)} tensors of {cls.__name__} are missing, such as {missing[0]}"
            raise AgliteError(f"model folder {folder}: {what}", MEND)
        for name, has, wanted in sorted(about["mismatched_keys"]):
            what = f"tensor {name} is {list(has)}, and {cls.__name__} expects {list(wanted)}"
            raise AgliteError(f"model folder {folder}: {what}", MEND)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = found
