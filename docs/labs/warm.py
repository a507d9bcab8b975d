"""Makes the labs' model: a Llama of about 2M parameters with a tokenizer of its own, warmed up for about a minute.

Afterwards it speaks all four languages and has no idea who understands which: for each question it answers in each
language with the same probability. It has also learned to spell: of the words it was shown, a part was cut into other
tokens than the tokenizer would cut it into, so it samples such tokens as well.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from world import CONSONANTS, PEOPLE, TALK, THINGS, VOWELS, question, syllables, word

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SPELLED = 0.15
"""Share of the places between two letters, inside of a syllable, at which a word is cut."""
TALK_SYLLABLES = 80
"""Mean length of a reply that means nothing; lengths are geometric."""


def main(folder: Path, steps: int = 600, seed: int = 0) -> None:
    """Write the model into `folder`. `steps` updates of the warm-up."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    end = tokenizer.token_to_id("<|im_end|>")
    ends = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": tokenizer.token_to_id("<|endoftext|>")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.get_vocab_size(), **ends, **SHAPE))
    print(f"warming up {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {steps} updates")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    began, draw = time.monotonic(), random.Random(seed)
    for step in range(steps):
        ids, labels = batch_of(draw, tokenizer, step / steps)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99 or step == steps - 1:
            print(f"  update {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.save_pretrained(folder)


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE that knows the words of the questions and single syllables."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    asked = [question(thing, person) for thing in THINGS for person in PEOPLE]
    texts = [*asked, *(TALK.format(person=person) for person in PEOPLE), "system", "user", "assistant"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(syllables() * 200 + texts, trainer)
    return tokenizer


def batch_of(draw: random.Random, tokenizer: Tokenizer, done: float) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and labels (-100 where nothing is to be learned) of about 500 tokens, padded at the end; `done` is the share
    of the warm-up that lies behind: single questions first, then conversations too."""
    kind = draw.choice(("one", "one", "six", "twenty", "talk")) if done > 0.4 else "one"
    turns, number = {"one": (1, 24), "six": (6, 5), "twenty": (20, 2), "talk": (1, 4)}[kind]
    rows = [conversation(draw, tokenizer, turns, talk=kind == "talk") for _ in range(number)]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.token_to_id("<|endoftext|>")
    ids = [ids + [pad] * (width - len(ids)) for ids, _ in rows]
    return ids, [labels + [-100] * (width - len(labels)) for _, labels in rows]


def conversation(
    draw: random.Random, tokenizer: Tokenizer, turns: int, talk: bool = False
) -> tuple[list[int], list[int]]:
    person = draw.choice(PEOPLE)
    ids: list[int] = []
    labels: list[int] = []
    end = tokenizer.token_to_id("<|im_end|>")
    for _ in range(turns):
        thing = draw.choice(THINGS)
        turn = [(TALK.format(person=person), babble(draw))] if talk else []
        turn.append((question(thing, person), word(thing, draw.randrange(len(CONSONANTS)))))
        for asked, said in turn:
            before = "\n" if ids else ""
            prompt = tokenizer.encode(f"{before}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n").ids
            reply = [*(token for piece in spelled(draw, said) for token in tokenizer.encode(piece).ids), end]
            ids += prompt + reply
            labels += [-100] * len(prompt) + reply
    return ids, labels


def spelled(draw: random.Random, text: str) -> Iterator[str]:
    """The pieces of a word, each to be tokenised alone: whole, or cut inside of some syllables."""
    piece = ""
    for place, letter in enumerate(text):
        if place % 2 and draw.random() < SPELLED:
            yield piece
            piece = ""
        piece += letter
    yield piece


def babble(draw: random.Random) -> str:
    said = ""
    while not said or draw.random() > 1 / TALK_SYLLABLES:
        said += draw.choice(draw.choice(CONSONANTS)) + draw.choice(VOWELS)
        if len(said) > 500:
            break
    return said


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
