"""Turn a GGUF file into an ordinary Hugging Face folder: `python -m aglite.convert_gguf FILE.gguf FOLDER`.

A program of its own because it loads torch and needs some 2 GB for a few seconds.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Write `target` with bf16 weights, configuration, tokenizer and chat template of `gguf`."""
    import gguf as gguf_package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers parses the file four times and makes this table for each block: once takes a third of the time
    gguf_package.GGUFReader = functools.cache(gguf_package.GGUFReader)
    gguf_package.get_tensor_name_map = functools.cache(gguf_package.get_tensor_name_map)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # the weights are dequantised; saving would otherwise refuse, or mark them as quantised
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
