import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 97
PAD, BOS, EOS = 0, 1, 2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama of 100k parameters with a tokenizer, as an ordinary bf16 model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes with one thread: what is compared bit for bit must be added up in the same order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_trainer(tiny_model, one_thread):
    """Trainers of the tiny model in this process; a test names the settings that matter to it."""
    from aglite.worker.trainer import Trainer

    return lambda **settings: Trainer(tiny_model, **{"lr": 1e-3, "tokens_per_micro_batch": 60} | settings)
