"""The faster tokenizer gives the tokens of the model's own, and makes way for it where it cannot."""

import fastokens
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from aglite.gateway.tokenizer import TextTokenizer


def test_both_give_the_same_tokens(model_dir):
    ours, theirs = TextTokenizer(model_dir), tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert ours._fast is not None

    @settings(max_examples=300)
    @given(st.text(max_size=200) | st.text("<|im_start>end\n tool_call{}\"'", max_size=80))
    def same(text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    same()


def test_text_that_it_refuses_goes_the_old_way(model_dir):
    class Refuses:
        def encode(self, text, **_):
            raise ValueError("byte 0x1d has no token in vocabulary")

    ours = TextTokenizer(model_dir)
    expected = ours.encode("say hello")
    ours._fast = Refuses()
    assert ours.encode("say hello") == expected


def test_a_tokenizer_that_it_reads_otherwise_is_left_alone(model_dir, monkeypatch):
    class Otherwise:
        def __init__(self, text):
            self._inner = tokenizers.Tokenizer.from_str(text)
            self.no_padding, self.no_truncation = self._inner.no_padding, self._inner.no_truncation

        from_json_str = classmethod(lambda cls, text: cls(text))

        def encode(self, text, **options):
            return self._inner.encode(text.lower(), **options)

    monkeypatch.setattr(fastokens, "Tokenizer", Otherwise)
    ours = TextTokenizer(model_dir)
    assert ours._fast is None
    assert ours.decode(ours.encode("Say HELLO")) == "Say HELLO"
