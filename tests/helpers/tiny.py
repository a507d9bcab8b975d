"""A model folder made on the spot: a byte-level BPE with ChatML's control tokens and a tiny random Llama's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SYSTEM = "You are a tiny assistant"

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello world to every user",
    'You are a helpful assistant. {"name": "bash", "arguments": {"command": "ls -la"}} <tool_call> </tool_call>',
    "system user assistant tool weather city Paris temperature answer question number one two three",
    "<tool_response> </tool_response> <tools> </tools> # Tools function parameters properties string",
]


def random_llama(folder: Path) -> Path:
    """A tiny Llama with random weights whose choices are far from even, its tokenizer and all."""
    import torch
    import transformers

    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_model(folder, config=shape)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        made.lm_head.weight.mul_(8)
    made.save_pretrained(folder)
    return folder


def tiny_model(
    folder: Path,
    *,
    markers: list[str] | None = None,
    template: str | None = TEMPLATE,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write tokenizer and config into `folder`. `markers` become tokens of their own that are shown as text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    for marker in markers or ():
        tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "unk_token": None, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps({**shape, **(config or {})}))
    return folder
