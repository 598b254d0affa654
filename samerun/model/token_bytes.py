"""How many bytes each token stands for, which bits per byte need."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers

from samerun.config import Data
from samerun.data.batches import MicroBatch, targets_of
from samerun.data.encode import number_of_ids


@dataclass(frozen=True)
class TokenBytes:
    """How many bytes of UTF-8 each token stands for: none for a special one, NaN where that is not known."""

    inside: torch.Tensor  # [vocabulary]
    # SentencePiece puts a space in front of a text. `first` are the bytes of a text's first token without that space,
    # [vocabulary], and `opens` tells the special tokens that such a text follows, bool [vocabulary].
    first: torch.Tensor
    opens: torch.Tensor

    def count(self, batch: MicroBatch) -> torch.Tensor:
        """The bytes of all target tokens of a micro-batch, NaN for one of a fork that has no target for each token."""
        targets = targets_of(batch)
        if targets is None or getattr(batch, "input_ids", targets[:0]).shape != targets.shape:
            return self.inside.new_tensor(math.nan)
        is_target = batch.targets != -100
        targets, before = batch.targets[is_target], batch.input_ids[is_target]
        return torch.where(self.opens[before], self.first[targets], self.inside[targets]).sum()


# A tokenizer that keeps all of these keeps all: spaces, lines, capitals, signs, characters of one to four bytes, and
# those that a Unicode normalization would change.
TEXTS = (
    "Two words",
    "def f(x):\n\n\treturn  x  # 1e-3\n",
    "Größe ½ ² naïve İ",
    "你好, мир 🙂!",
    "cafe\u0301 \ufb01 \u212b",
)

SPACES = ("▁", "Ġ")  # How SentencePiece and GPT-2 write a space at the begin of a token.


def measure_tokens(
    config: Data, tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int, device: torch.device
) -> TokenBytes | None:
    """None for a tokenizer whose tokens do not stand for the exact text, such as one without capitals.

    Tokenizers write bytes in one of two ways. The right one is that by which the tokens of TEXTS add up to these texts.
    """
    try:
        texts = tokenizer(list(TEXTS), add_special_tokens=False)["input_ids"]
    except Exception:  # It has no token for what it does not know, and tokenizers raises nothing more exact.
        return None
    if not all(texts):
        return None
    count = max(vocab_size, number_of_ids(tokenizer))
    has_space, opens = np.zeros((2, count), bool)
    if tokenizer.convert_ids_to_tokens(texts[0][0]).startswith(SPACES):
        has_space[[token for name, token in tokenizer.get_vocab().items() if name.startswith(SPACES)]] = True
        opens[tokens_before_texts(config, tokenizer)] = True
    # GPT-2 and those after it write each byte as a character, and so does ByT5.
    for size_of in (len, sentencepiece_size):
        inside = token_sizes(tokenizer, size_of, count)
        first = inside - has_space
        found = [np.where([True, *opens[ids[:-1]]], first[ids], inside[ids]).sum() for ids in texts]
        if found == [len(text.encode()) for text in TEXTS]:
            return TokenBytes(*(torch.from_numpy(table).to(device) for table in (inside, first, opens)))
    return None


def sentencepiece_size(name: str) -> int:
    """SentencePiece writes text as it is, except for spaces, and for single bytes such as <0x0A>."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", name) else len(name.replace("▁", " ").encode())


def token_sizes(
    tokenizer: transformers.PreTrainedTokenizerBase, size_of: Callable[[str], int], count: int
) -> np.ndarray:
    """The bytes of each of `count` tokens, NaN where they are not known."""
    sizes = np.full(count, np.nan, np.float32)
    for name, token in tokenizer.get_vocab().items():
        sizes[token] = size_of(name)
    for token, added in tokenizer.added_tokens_decoder.items():
        sizes[token] = 0 if added.special else len(added.content.encode())
    sizes[tokenizer.all_special_ids] = 0
    if tokenizer.unk_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        sizes[tokenizer.unk_token_id] = np.nan  # It may stand for any text.
    return sizes


def tokens_before_texts(config: Data, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """The tokens after which the tokenizer puts a space in front of the text that follows."""
    found = []
    if config.format != "chat":  # A chat template writes all special tokens itself.
        found = [token for token in tokenizer("a")["input_ids"] if token in tokenizer.all_special_ids]
    for token, added in tokenizer.added_tokens_decoder.items():
        names = tokenizer.convert_ids_to_tokens(tokenizer(f"{added.content}a", add_special_tokens=False)["input_ids"])
        if names[0] == added.content and names[-1].startswith(SPACES):
            found.append(token)
    return found
