"""The model's tokenizer over the `tokenizers` package alone, shaped as `renderers` wants one.

`AutoTokenizer` would pull torch into the supervisor.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the import: one text at a time, and we start children

import fastokens
import tokenizers
from tokenizers.decoders import DecodeStream

from aglite.errors import AgliteError

_LONG, _TOO_LONG = 2048, 131072
"""Characters from which on a text's tokens are remembered, and from which on no more: agents choose the texts."""


class TextTokenizer:
    """Text to token ids and back.

    `name_or_path`, `unk_token_id`, `eos_token_id`, `encode`, `decode` and `convert_tokens_to_ids` are what
    `renderers.Tokenizer` asks for.
    """

    def __init__(self, folder: Path) -> None:
        file = Path(folder) / "tokenizer.json"
        try:
            self._text = file.read_text()
            self._inner = tokenizers.Tokenizer.from_str(self._text)
        except FileNotFoundError:
            raise AgliteError(f"no tokenizer.json in {folder}", "give a Hugging Face model folder") from None
        except Exception as error:  # the package raises plain Exception for what it cannot read
            raise AgliteError(f"{file} cannot be read: {error}", "fetch the model again") from None
        self._inner.no_padding()
        self._inner.no_truncation()
        self.config = read_json(Path(folder) / "tokenizer_config.json")
        self.name_or_path = str(folder)
        self.unk_token_id = self._named("unk_token")
        self.eos_token_id = self._named("eos_token")
        added = self._inner.get_added_tokens_decoder()
        self.added: dict[int, str] = {number: token.content for number, token in added.items()}
        """Tokens outside the learned vocabulary: control tokens, markers of tool calls and reasoning."""
        self.special: frozenset[int] = frozenset(number for number, token in added.items() if token.special)
        """Those of them that are never shown as text."""
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        controls = sorted((re.escape(self.added[number]) for number in self.special), key=len, reverse=True)
        self._control = re.compile("|".join(controls)) if controls else None
        firsts = {self.added[number][0] for number in self.special}
        self._control_start = firsts.pop() if len(firsts) == 1 else ""  # a quick look before the search
        self._plain: tokenizers.Tokenizer | None = None
        self.byte_level = "ByteLevel" in _kinds(json.loads(self._inner.to_str()).get("decoder"))
        # System prompts and tool descriptions are long and come again with every rollout.
        self._encode_long = lru_cache(maxsize=64)(lambda text: array("i", self._encode(text)))
        self._fast = _fast_tokenizer(self._text, self._inner)
        self._bytes = _Table(self._to_bytes)
        self.visible_bytes = _Table(lambda token_id: b"" if token_id in self.special else self._bytes[token_id])
        """By id: the bytes that a token adds to the text that is shown."""

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Token ids of `text`; the names of control tokens in it become those tokens. Adds none of its own."""
        if not _LONG <= len(text) < _TOO_LONG:
            return self._encode(text) if text else []
        return self._encode_long(text).tolist()

    def _encode(self, text: str) -> list[int]:
        if self._fast is not None:
            try:
                return self._fast.encode(text, add_special_tokens=False).ids
            except ValueError:  # a byte that the vocabulary lacks; the other one has a token for what is unknown
                pass
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a whole prompt, with the beginning-of-text token if the model wants one."""
        return self._inner.encode(text, add_special_tokens=True).ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text that somebody else wrote: the name of a control token in it stays text."""
        if not text:
            return []
        if self._control is None or self._control_start not in text or self._control.search(text) is None:
            return self.encode(text)
        if self._plain is None:
            self._plain = tokenizers.Tokenizer.from_str(self._text)
            self._plain.no_padding()
            self._plain.no_truncation()
            self._plain.encode_special_tokens = True
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Sequence[int] | int, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token (or a list of them), `unk_token_id` where there is none."""
        if isinstance(tokens, str):
            number = self._inner.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they need not be whole characters."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token by itself as text; part of a character is shown as �."""
        return self.token_bytes(token_id).decode(errors="replace")

    def detokenizer(self) -> ByteDetokenizer | StreamDetokenizer:
        """A fresh incremental detokeniser."""
        return ByteDetokenizer(self) if self.byte_level else StreamDetokenizer(self, self._inner)

    def _to_bytes(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self._inner.id_to_token(token_id)
        if token is None:  # an id in the padding of the model's embedding
            return b""
        if not self.byte_level:
            return self._inner.decode([token_id]).encode()
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in token)

    def _named(self, key: str) -> int | None:
        value = self.config.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        return self._inner.token_to_id(name) if isinstance(name, str) else None


_SAMPLE = (
    "Hello there, it's 2024-05-06!\n\n\tdef f(x):\n        return {'a': x ** 2}  # don't\r\n",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600\u200d\U0001f527 \u0645\u0631\u062d\u0628\u0627  \u00a0x   ",
)


def _fast_tokenizer(text: str, slow: tokenizers.Tokenizer) -> fastokens.Tokenizer | None:
    """The same tokenizer in a package that is many times faster, if it takes this one and agrees on a sample."""
    try:
        fast = fastokens.Tokenizer.from_json_str(text)
        fast.no_padding()
        fast.no_truncation()
        names = "".join(token.content for token in slow.get_added_tokens_decoder().values())
        for sample in (*_SAMPLE, f"a {names} b"):
            if fast.encode(sample, add_special_tokens=False).ids != slow.encode(sample, add_special_tokens=False).ids:
                return None
    except Exception:  # it raises plain ValueError for kinds of tokenizers that it does not know
        return None
    return fast


class _Table(dict[int, bytes]):
    """A table that fills itself."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        made = self[token_id] = self._make(token_id)
        return made


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Text of a growing list of byte-level tokens. Bytes of an unfinished character wait for their rest."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._bytes_of = tokenizer.visible_bytes.__getitem__
        self._decoder = _Utf8Decoder("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that are complete with these tokens; control tokens are left out."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", True)


class StreamDetokenizer:
    """The same for tokenizers whose text depends on neighbours (SentencePiece, byte fallback)."""

    __slots__ = ("_all", "_inner", "_length", "_stream", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, inner: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._stream = DecodeStream(skip_special_tokens=True)
        self._all: list[int] = []
        self._length = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            self._all.append(token_id)
            pieces.append(self._stream.step(self._inner, token_id) or "")
        text = "".join(pieces)
        self._length += len(text)
        return text

    def finish(self) -> str:
        return self._inner.decode(self._all, skip_special_tokens=True)[self._length :]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; {} if there is none."""
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise AgliteError(f"{file} is not valid JSON: {error}", "fetch the model again") from None
    if not isinstance(data, dict):
        raise AgliteError(f"{file} holds no JSON object", "fetch the model again")
    return data


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    if decoder.get("type") == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that byte-level BPE (GPT-2's) writes for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): bytes([byte]) for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()
