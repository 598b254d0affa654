"""What train.py takes for granted of the libraries it is pinned to.

When an upgrade breaks one of these, read its message and the lines of train.py that it names before anything else: the
run may be wrong without any error.
"""

import re

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from helpers import VOCABULARY, launch, tiny_model
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

TWO_PROCESSES = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.backward(model(torch.tensor([[2.0 + 2 * accelerator.process_index]])).sum())
gradient = next(model.parameters()).grad.item()
optimizer.step()
scheduler.step()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print("gradient", gradient, "steps", scheduler.scheduler.last_epoch, flush=True)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The words that the script above prints: the gradients of its processes are 2 and 4."""
    script = tmp_path_factory.mktemp("pins") / "two.py"
    script.write_text(TWO_PROCESSES)
    done = launch(script.parent, {}, processes=2, script=script, warm=True)  # It has no use for the config.
    return re.findall(r"gradient .* steps .*", done.output)[0].split()


def test_gradients_are_averaged_over_ranks(two_processes):
    assert float(two_processes[1]) == 3, "DDP no longer averages: the factor at backward() in the loop is wrong"


def test_a_prepared_scheduler_is_not_to_be_used(two_processes):
    assert int(two_processes[3]) == 2, (
        "accelerate no longer steps a prepared scheduler once per process: "
        "learning_rate_at() could be one, if you like (accelerate#1398)"
    )


def test_backward_divides_by_the_accumulation_steps():
    accelerator, weight = Accelerator(cpu=True), torch.ones((), requires_grad=True)
    accelerator.gradient_accumulation_steps = 4
    accelerator.backward(weight * 1)
    assert weight.grad == 0.25, "backward() no longer divides: the factor at backward() in the loop is wrong"


def test_found_inf_holds_a_fused_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.full((3,), torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert (weight == 1).all() and optimizer.state[weight]["step"] == 0, (
        "found_inf no longer keeps a fused AdamW from stepping: guard() lets what is not finite into the weights"
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_positions_keep_documents_apart(tmp_path, attention):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path), attn_implementation=attention)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (1, 12)))
    with torch.no_grad():
        joint = model(ids, position_ids=torch.arange(6).repeat(2)[None], use_cache=False).logits[0]
        apart = model(ids.view(2, 6), use_cache=False).logits.flatten(0, 1)
    assert torch.allclose(joint, apart, rtol=0, atol=1e-5), (
        "transformers no longer makes masks of position_ids: packed documents see each other, see check_loss()"
    )


def test_an_unknown_attention_gets_no_mask():
    found = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1
    )
    seen = []
    sdpa = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register(
        "pinned", lambda module, q, k, v, mask, **options: seen.append(mask) or sdpa(module, q, k, v, mask, **options)
    )
    model = transformers.LlamaForCausalLM(found)
    model.set_attn_implementation("pinned")
    model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert seen == [None], "transformers masks for unknown attention: document_attention() refuses them"


def test_the_words_of_flash_attention_for_documents():
    words = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert words <= set(FlashAttentionKwargs.__annotations__), (
        "transformers tells its flash attention otherwise where documents end: see model_inputs()"
    )
