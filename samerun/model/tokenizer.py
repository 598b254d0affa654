"""The tokenizer, its chat template, and the end of a turn."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from samerun.config import Data, Model
from samerun.data.chat import marks_turns, tokenize_turns
from samerun.data.encode import Encoder
from samerun.errors import explained, say


def load_tokenizer(config: Data, model: Model) -> transformers.PreTrainedTokenizerBase | None:
    """None for tokens that somebody else has made, unless data.tokenizer says how."""
    if config.format == "tokens" and not config.tokenizer:
        return None
    name = config.tokenizer or model.pretrained or "bytes"
    with explained(f"data.tokenizer (null: model.pretrained): cannot load {name}", name):
        if name == "bytes":
            tokenizer = byte_tokenizer()
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
            # It tells whether there was a network, and the key of the tokens must not depend on that.
            tokenizer.init_kwargs.pop("local_files_only", None)
        tokenizer.add_tokens(config.special_tokens, special_tokens=True)
    if config.chat_template:
        with explained(f"data.chat_template: cannot read {config.chat_template} from {os.getcwd()}"):
            tokenizer.chat_template = Path(config.chat_template).read_text("utf-8")
    elif config.format == "chat" or any(source.format == "chat" for source in (config.sources or {}).values()):
        take_training_template(tokenizer)
    set_variables(tokenizer, config.chat_template_kwargs or {})
    return tokenizer


def take_training_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Where the tokenizer's own template does not mark what the assistant says, TRL may have one that does."""
    if tokenizer.chat_template is None or marks_turns(tokenizer.get_chat_template()):
        return
    from trl.chat_template_utils import get_training_chat_template  # Not at the top of the file: it takes two seconds.

    try:
        tokenizer.chat_template = get_training_chat_template(tokenizer)
        say("The tokenizer's chat template does not mark what the assistant says. TRL's training template replaces it.")
    except ValueError:  # TRL does not know it.
        say(
            "The chat template does not mark what the assistant says. It is found in each conversation by what a turn "
            "adds to the text."
        )


def set_variables(tokenizer: transformers.PreTrainedTokenizerBase, variables: dict[str, Any]) -> None:
    """Give variables of the chat template a default value. Jinja writes a value as Python does."""
    lines = ""
    for name, value in variables.items():
        lines += f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = {name: lines + template for name, template in tokenizer.chat_template.items()}
    elif tokenizer.chat_template is not None:
        tokenizer.chat_template = lines + tokenizer.chat_template


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Tokens are bytes of UTF-8, and have the ids of ByT5 (arXiv:2105.13626). Of its further special tokens, the first
    two are the markers of ChatML."""
    alphabet = [name for _, name in sorted(bytes_to_unicode().items())]
    reserved = [f"<extra_id_{number}>" for number in range(123)]
    names = ["<pad>", "</s>", "<unk>", *alphabet, "<|im_start|>", "<|im_end|>", *reserved]
    backend = Tokenizer(BPE({name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([name for name in names if name not in alphabet])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def end_of_turn(tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
    """The token by which the chat template ends what the assistant says; None if it is not a single, special one."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = [token for token, is_said in zip(*tokenize_turns(turns, Encoder(tokenizer, parse=True))) if is_said]
    while said and not tokenizer.decode(said[-1]).strip():  # Some templates add a line's end.
        said.pop()
    is_special = said and said[-1] in tokenizer.added_tokens_decoder
    return said[-1] if is_special else None


def stop_after_turns(bare: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Let generate() stop at the end of the assistant's turn, here and in the exported model."""
    end = end_of_turn(tokenizer)
    if end is None:
        say(
            "The chat template ends a turn with text that is no special token of the tokenizer. So the model will not "
            "stop by itself. Name the markers of the template in data.special_tokens."
        )
        return
    known = bare.generation_config.eos_token_id
    ends = known if isinstance(known, list) else [known]
    bare.generation_config.eos_token_id = [end, *(token for token in ends if token not in (None, end))]
    try:
        bare.generation_config.validate(strict=True)
    except ValueError:  # Published ones set a temperature without do_sample, and then cannot be saved again.
        bare.generation_config.do_sample = True


def use_special_tokens(bare: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase, chosen: dict) -> None:
    """Let a new model begin, end and pad texts with its tokenizer's tokens, unless the config names others.

    Otherwise it would have the usual ids of its family. Call it after the model is built: a model does not train the
    embedding of its pad token, and some tokenizers pad with the token that ends a text, which must be trained.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in chosen:
            for settings in (bare.config, bare.generation_config):
                setattr(settings, name, getattr(tokenizer, name))
