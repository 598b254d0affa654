"""Continuations of prompts."""

import torch
import transformers

from samerun.config import Config
from samerun.data.chat import accepted_turns, render
from samerun.data.encode import Encoder
from samerun.errors import as_user_error, require, say
from samerun.model.attention import attention
from samerun.model.build import vocabulary_size
from samerun.model.outline import let_go
from samerun.model.small import model_to_try
from samerun.run.launch import StopSignal
from samerun.run.setup import Setup


def encode_prompt(text: str, config: Config, encoder: Encoder) -> torch.Tensor:
    """The ids of a prompt, [1, tokens]. With format chat it is the user's first message."""
    if config.data.format == "chat":
        turns = accepted_turns([{"role": "user", "content": text}], encoder)
        rendered, _ = render(turns, encoder, add_generation_prompt=True)
        ids, _, _ = encoder.conversation(rendered)
    else:
        [ids] = encoder.texts([text])  # Some tokenizers begin each text with a token, as in training.
        if ids[-1:] == [encoder.tokenizer.eos_token_id]:  # And some end it, but the text goes on here.
            ids = ids[:-1]
    return torch.tensor([ids])


def check_prompts(model: torch.nn.Module, config: Config, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises UserError for a prompt that the model cannot continue, which would end the run at the first evaluation."""
    if not config.eval.prompts:
        return
    vocab_size, more = vocabulary_size(model), config.eval.max_new_tokens
    small, encoder = model_to_try(model, config.model), Encoder(tokenizer, config.data.parse_special_tokens)
    for text in config.eval.prompts:
        with as_user_error(f"eval.prompts: the chat template refuses {text!r}"):
            ids = encode_prompt(text, config, encoder)
        require(ids.numel(), f"eval.prompts: {text!r} has no tokens")
        highest, length = ids.max(), ids.numel()
        advice = f"the model's vocabulary is 0 to {vocab_size - 1}; data.tokenizer must be the model's"
        require(highest < vocab_size, f"eval.prompts: {text!r} has the token id {highest}, {advice}")
        too_long = f"the {length} tokens of {text!r} and {more} more are beyond the positions of the model"
        last = length + more - 2  # The last token is not read again.
        fits = has_position(small, last) or not has_position(small, 0)  # Some models cannot be tried this way.
        require(fits, f"eval.prompts: {too_long}; lower eval.max_new_tokens, or shorten the prompt")
    if small is not model:
        let_go(small)


@torch.no_grad()
def has_position(model: torch.nn.Module, position: int) -> bool:
    """Whether the model can read a token there. Positions that are learned end; the others go on."""
    token, positions = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[position]])
    try:
        with attention(model, "eager"):
            model(input_ids=token, position_ids=positions, use_cache=False)
    except Exception:
        return False
    return True


def sample(setup: Setup, stop: StopSignal) -> dict[str, str]:
    """Continuations of the prompts. All ranks make the same ones, because sharded weights need all ranks.

    Raises Stopped at a signal, before the next prompt.
    """
    config, tokenizer, accelerator = setup.config.eval, setup.tokenizer, setup.accelerator
    if not config.prompts:
        return {}
    encoder = Encoder(tokenizer, setup.config.data.parse_special_tokens)
    setup.wrapped.eval()
    torch.manual_seed(setup.config.run.seed)
    samples = {}
    for number, text in enumerate(config.prompts):
        stop.check()
        prompt = encode_prompt(text, setup.config, encoder).to(accelerator.device)
        # Not compiled, because the lengths change, and with the masks of transformers.
        with (
            accelerator.autocast(),
            torch.compiler.set_stance("force_eager"),
            attention(setup.model, setup.config.model.attention),
        ):
            ids = setup.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                use_cache=True,
                synced_gpus=accelerator.num_processes > 1,
                do_sample=config.temperature > 0,
                temperature=config.temperature or None,
                max_new_tokens=config.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id or 0,
                remove_invalid_values=True,  # The step after this one says that the model is not finite any more.
            )
        is_chat = setup.config.data.format == "chat"  # Show where its turns begin and end.
        text = tokenizer.decode(ids[0], skip_special_tokens=not is_chat)
        samples[f"eval/sample_{number}"] = text
        say(f"--- sample {number}\n{text}\n---")
    setup.wrapped.train()
    return samples
