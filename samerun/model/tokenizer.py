"""The tokenizer, its chat template, and the end of a turn."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from samerun.config import Config, Data, Model
from samerun.data.chat import accepted_turns, marks_turns, render, tokenize_turns
from samerun.data.encode import Encoder
from samerun.errors import UserError, as_user_error, one_line, require, say


def load_tokenizer(config: Data, model: Model) -> transformers.PreTrainedTokenizerBase | None:
    """None for tokens that somebody else has made, unless data.tokenizer says how."""
    if config.format == "tokens" and not config.tokenizer:
        return None
    name = config.tokenizer or model.pretrained or "bytes"
    with as_user_error(f"data.tokenizer (null: model.pretrained): cannot load {name}", name):
        if name == "bytes":
            tokenizer = byte_tokenizer()
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
            # It tells whether there was a network, and the key of the tokens must not depend on that.
            tokenizer.init_kwargs.pop("local_files_only", None)
            check_chance(tokenizer)
        tokenizer.add_tokens(config.special_tokens, special_tokens=True)
    if config.chat_template:
        with as_user_error(f"data.chat_template: cannot read {config.chat_template} from {os.getcwd()}"):
            tokenizer.chat_template = Path(config.chat_template).read_text("utf-8-sig")
    elif config.has_chats:
        take_training_template(tokenizer)
    set_variables(tokenizer, config.chat_template_kwargs or {})
    if config.has_chats:
        check_template(tokenizer)
    formats = {source.format or config.format for source in (config.sources or {"": config}).values()}
    if "text" in formats and tokenizer.eos_token_id is None:
        say("The tokenizer has no end-of-text token. So the model does not learn where a text ends.")
    return tokenizer


def check_chance(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises UserError for BPE dropout (arXiv:1910.13267), with which a text has other tokens each time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # A slow one has none.
    advice = "set dropout to null in its tokenizer.json"
    require(not getattr(getattr(backend, "model", None), "dropout", None), f"it draws random numbers; {advice}")


def take_training_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Where the tokenizer's own template does not mark what the assistant says, TRL may have one that does."""
    found = tokenizer.chat_template
    if isinstance(found, dict) and "default" not in found:
        problem = (
            f"data.chat_template: null, and {tokenizer.name_or_path} has templates only for {', '.join(sorted(found))}"
        )
        raise UserError(f"{problem}; name a file, such as configs/chat_template.jinja")
    if found is None or marks_turns(tokenizer.get_chat_template()):
        return
    from trl.chat_template_utils import get_training_chat_template  # It takes a while.

    try:
        training = get_training_chat_template(tokenizer)
    except ValueError:  # TRL does not know it.
        training = None
    if training:  # Otherwise TRL finds the blocks that the template has, which marks_turns() does not take.
        tokenizer.chat_template = found | {"default": training} if isinstance(found, dict) else training
        say("The tokenizer's chat template does not mark what the assistant says. TRL's training template replaces it.")
    else:
        say(
            "The chat template does not mark what the assistant says. It is found in each conversation by what a turn "
            "adds to the text."
        )


def set_variables(tokenizer: transformers.PreTrainedTokenizerBase, variables: dict[str, Any]) -> None:
    """Give variables of the chat template a default value. Jinja writes a value as Python does.

    Raises UserError for those that the template does not read, or that it always gets.
    """
    lines, templates = "", tokenizer.chat_template or ""
    given = {"messages", "tools", "add_generation_prompt", *tokenizer.special_tokens_map}
    for name, value in variables.items():
        setting = f"data.chat_template_kwargs: {name}"
        is_read = re.search(rf"\b{name}\b", str(templates))
        require(is_read, f"{setting}: the chat template does not read it")
        require(name not in given, f"{setting}: a chat template always gets it; it cannot be set")
        # Jinja drops the line end after a block: the one written here, and not that by which the template may begin.
        lines += f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = {name: lines + template for name, template in tokenizer.chat_template.items()}
    elif tokenizer.chat_template is not None:
        tokenizer.chat_template = lines + tokenizer.chat_template


def check_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises UserError for a chat template that leaves out what is said, as those do that read only lists of parts."""
    encoder = Encoder(tokenizer, parse=True)
    said = {"user": "question", "assistant": "answer"}
    turns = [{"role": role, "content": content} for role, content in said.items()]
    try:
        text, _ = render(accepted_turns(turns, encoder), encoder)
    except Exception:  # It will refuse the first conversation, too, which says where.
        return
    missing = [role for role, content in said.items() if content not in text.lower()]
    advice = "it may be one for images, which reads no plain text; name another in data.chat_template"
    require(not missing, f"data.chat_template: it leaves out what is said by {' and '.join(missing)}: {advice}")


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


def answer_and_rest(tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that are learned of an answer, and those that the template writes after them, without white space."""
    encoder = Encoder(tokenizer, parse=True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, is_said = tokenize_turns(accepted_turns(turns, encoder), encoder)
    end = max(np.flatnonzero(is_said), default=-1) + 1
    is_shown = [bool(tokenizer.decode(token).strip()) for token in ids]
    said = [token for token, learned, shown in zip(ids, is_said, is_shown) if learned and shown]
    rest = [token for token, shown in zip(ids[end:], is_shown[end:]) if shown]
    return said, rest


def stop_after_turns(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Let generate() stop at the end of the assistant's turn, here and in the exported model."""
    try:
        said, rest = answer_and_rest(tokenizer)
    except Exception as error:  # It may want keys of a message that those of the data have.
        say(f"The chat template refuses a short answer ({one_line(error)}). So the model will not stop by itself.")
        return
    special = tokenizer.added_tokens_decoder
    if not said or said[-1] not in special:
        problem = "by text that is not a special token of the tokenizer"
        advice = "Name the markers of the template in data.special_tokens."
        if rest and rest[0] in special:
            problem = f"by {tokenizer.convert_ids_to_tokens(rest[0])}, but outside of its generation block"
            advice = "Move it to before {% endgeneration %}, so that it is learned."
        say(f"The chat template ends a turn {problem}. So the model will not stop by itself. {advice}")
        return
    others = [token for token in ends_of_text(model) if token not in (None, said[-1])]
    model.generation_config.eos_token_id = [said[-1], *others]
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # Published ones set a temperature without do_sample, and then cannot be saved again.
        model.generation_config.do_sample = True


def ends_of_text(model: torch.nn.Module) -> list[int | None]:
    """The tokens at which generate() stops."""
    known = model.generation_config.eos_token_id
    return known if isinstance(known, list) else [known]


def use_tokenizer(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase | None, config: Config
) -> None:
    """Let the model, and what is exported of it, know the tokens that begin, end and pad texts, and end turns."""
    use_special_tokens(model, tokenizer, config)
    if config.data.has_chats:
        stop_after_turns(model, tokenizer)


def use_special_tokens(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase | None, config: Config
) -> None:
    """Let the model begin, end and pad texts with its tokenizer's tokens, unless the config names others.

    Otherwise a new one would have the usual ids of its family, and one with another tokenizer than its own those of
    its former vocabulary.
    """
    chosen = config.model.architecture or {}
    if config.model.pretrained:
        is_right = tokenizer is None or tokenizer.eos_token_id in ends_of_text(model)
        has_no_end = tokenizer and tokenizer.eos_token_id is None and not config.data.tokenizer
        if is_right or has_no_end:  # A published model may have more ends than its tokenizer.
            return
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in chosen:
            token = getattr(tokenizer, name, None)
            setattr(model.generation_config, name, token)
            if name != "pad_token_id" or not counts_from_padding(model):
                with suppress(StrictDataclassFieldValidationError):  # The configs of some families want a number.
                    setattr(model.config, name, token)


def counts_from_padding(model: torch.nn.Module) -> bool:
    """Whether positions begin after the number of the pad token, as those of a RoBERTa, which must keep it."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
