"""From text to token ids: what a document or a message says is never a special token."""

import itertools
import json
import re
import secrets
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from samerun.errors import require


class Encoder:
    """A tokenizer that reads special tokens only where a chat template, or the tokenizer itself, has written them.

    Otherwise whoever writes <|im_end|> into a document or a message could end it, and begin the turn of another. Where
    the tokenizer cannot tell the two apart, a twin of it does. The twin calls each special token by a secret name, and
    their usual names are text to it. With `parse`, they are special tokens wherever they stand.
    """

    def __init__(self, tokenizer, parse: bool = False):
        self.tokenizer = tokenizer
        self.parse = parse
        self.secret = secrets.token_hex(16)
        added = tokenizer.added_tokens_decoder.values()
        names = sorted({token.content for token in added if token.special}, key=len, reverse=True)
        self.written = {name: f"<{self.secret}:{number}>" for number, name in enumerate(names)}  # By a template.
        self.said = {name: f"[{self.secret}:{number}]" for number, name in enumerate(names)}  # By a message.

    def texts(self, texts: list[str]) -> list[list[int]]:
        """The ids of documents, with the tokens by which the tokenizer begins or ends a text."""
        if self.parse:
            return self.tokenizer(texts, split_special_tokens=False)["input_ids"]
        if self.needs_twin:
            return [encoding.ids for encoding in self.twin.encode_batch_fast(texts)]
        if self.tokenizer.is_fast:
            return self.tokenizer(texts, split_special_tokens=True)["input_ids"]
        # Slow ones then split all added tokens, also those that are text.
        splits = [any(name in text for name in self.said) for text in texts]
        return [self.tokenizer(text, split_special_tokens=split)["input_ids"] for text, split in zip(texts, splits)]

    def ends(self, texts: list[str]) -> list[list[int]]:
        """Where in its text each token of texts() ends; 0 for those by which the tokenizer begins or ends it. Needs a
        fast tokenizer."""
        if self.needs_twin and not self.parse:
            offsets = [encoding.offsets for encoding in self.twin.encode_batch(texts)]
        else:
            how = {"split_special_tokens": not self.parse, "return_offsets_mapping": True}
            offsets = self.tokenizer(texts, **how)["offset_mapping"]
        return [[end for _, end in places] for places in offsets]

    def said_by_message(self, value: Any) -> Any:
        """What goes to a chat template: texts in which special tokens have another name, so that conversation() can
        tell them from those that the template writes."""
        if self.parse or not self.said:
            return value
        if isinstance(value, dict):
            return {self.said_by_message(name): self.said_by_message(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.said_by_message(part) for part in value]
        if isinstance(value, str):
            return any_of(self.said).sub(lambda found: self.said[found[0]], value)
        return value

    def conversation(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The ids of what a chat template has made of said_by_message(), and where in this text each token begins and
        ends."""
        # Names that said_by_message() has given. A template that writes a text in capitals has changed them as well,
        # and one that shortens a text may have cut them.
        whole = re.findall(rf"\[{self.secret}:\d+\]", text)
        if max(text.casefold().count(part) for part in (self.secret[:8], self.secret[-8:])) > len(whole):
            raise ValueError("a message names a special token, and the chat template changes that text")
        if self.parse or not (self.needs_twin or self.secret in text):
            how = {"add_special_tokens": False, "split_special_tokens": False, "return_offsets_mapping": True}
            encoding = self.tokenizer(text, **how)
            ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
            first = last = np.arange(len(text) + 1)
        else:
            text, first, last = self.for_twin(text)
            encoding = self.twin.encode(text, add_special_tokens=False)
            ids, offsets = encoding.ids, encoding.offsets
        begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        begins = np.minimum(begins, np.maximum(ends - 1, 0))  # Some tokenizers say that a token of spaces has no width.
        return ids, first[begins], last[ends]

    def for_twin(self, text: str) -> tuple[str, np.ndarray, np.ndarray]:
        """The text with special tokens as the twin calls them, and two maps from places in it to places in `text`: for
        where a token begins, and for where it ends. Within a special token, they lead to its begin and to its end."""
        usual = {other: name for name, other in self.said.items()}
        parts, first, last, at = [], [], [np.zeros(1, np.int64)], 0
        names = self.written | usual
        for match in any_of(names).finditer(text):
            part = names[match[0]]
            parts += [text[at : match.start()], part]
            first += [np.arange(at, match.start()), np.full(len(part), match.start())]
            last += [np.arange(at, match.start()) + 1, np.full(len(part), match.end())]
            at = match.end()
        first.append(np.arange(at, len(text) + 1))
        last.append(np.arange(at, len(text)) + 1)
        return "".join([*parts, text[at:]]), np.concatenate(first), np.concatenate(last)

    @cached_property
    def needs_twin(self) -> bool:
        """Whether the tokenizer makes a special token also of text that is not to be parsed, as Unigram models do."""
        special = [token for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        read = [self.ids_of_text(text) for name in self.written for text in (name, f"a{name}a")]
        ids = set(self.tokenizer.convert_tokens_to_ids(list(self.written))) - {self.tokenizer.unk_token_id}
        found = any(not ids.isdisjoint(tokens) for tokens in read)
        problem = "data.tokenizer: makes special tokens of text that only looks like them"
        advice = "take a fast one, or data.parse_special_tokens: true"
        require(not found or self.tokenizer.is_fast, f"{problem}; {advice}")
        return found or (self.tokenizer.is_fast and any(token.normalized for token in special))

    def ids_of_text(self, text: str) -> list[int]:
        """The ids of a text that is not to be parsed. An empty list if the tokenizer has no token for it, not even one
        for what it does not know."""
        try:
            return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        except Exception:  # tokenizers raises nothing more exact.
            return []

    @cached_property
    def twin(self) -> tokenizers.Tokenizer:
        """The tokenizer with the secret names, and the same ids."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        state |= {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            token["content"] = self.written.get(token["content"], token["content"])
        rename_in_vocabulary(state["model"], self.written)
        twin = tokenizers.Tokenizer.from_str(json.dumps(state))
        for name, secret in self.written.items():
            assert twin.token_to_id(secret) == self.tokenizer.convert_tokens_to_ids(name)
        return twin


def common_length(ids: list[int], prompt: list[int]) -> int:
    """The tokens with which both begin. A token may reach over the end of the prompt, which then ends differently."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt))
    return sum(1 for _ in same)


def number_of_ids(tokenizer) -> int:
    """The ids that a model needs for it. Some vocabularies have gaps, so that they have fewer tokens than ids."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def any_of(names: dict[str, str]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, names)))


def rename_in_vocabulary(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in the state of a model of `tokenizers`. No text makes them any more: merges into them go, too."""
    if isinstance(model["vocab"], list):  # Unigram: pairs of a token and its score.
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        return
    model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        merges = [(one, other, one + other.removeprefix(prefix)) for one, other in model["merges"]]
        model["merges"] = [list(merge[:2]) for merge in merges if names.keys().isdisjoint(merge)]
