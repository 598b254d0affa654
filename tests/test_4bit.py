"""Adapters above weights of 4 bits (QLoRA): the run of a plain loop over the numbers that the codes stand for."""

import json
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import test_launchers
import torch
import transformers
from helpers import by_strategy, difference, launch, run, slow_but, tiny_config
from reference import evaluation_loss, shuffled, train_reference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_finetune import check
from test_plan import planned, set_fsdp2

import train
from samerun.config import Config, Model
from samerun.preflight.memory import bytes_of_weights, memory_per_device, model_without_storage

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
LORA = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
STEPS, ROWS = 16, 10


def as_in_qlora() -> transformers.BitsAndBytesConfig:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def rounded(start: Path, folder: Path) -> Path:
    """The model with the numbers that its layers' codes stand for, by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = transformers.AutoModelForCausalLM.from_pretrained(start)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            codes = quantize_4bit(layer.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            layer.weight.data = dequantize_4bit(*codes)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qlora(tmp_path_factory):
    """The config, the held-out rows, and what plain loops did above rounded numbers, and above the model's own."""
    folder = tmp_path_factory.mktemp("qlora")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": STEPS, "save_every": STEPS // 2, "eval_every": STEPS // 2}
    config["batch"] = {"global_batch_size": ROWS, "max_micro_batch_size": 3}
    config["optim"] |= {"learning_rate": 0.01, "max_grad_norm": 0.8}
    start = folder / "start"
    base = transformers.AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():  # Adapters learn next to nothing beside the small weights of a new model.
        for matrix in (p for p in base.parameters() if p.ndim > 1):
            matrix *= 5
    base.save_pretrained(start)
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(7, len(rows), ROWS * STEPS)

    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(7)  # The run's.
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))

    def truth(above: Path):
        own = config | {"model": {"pretrained": str(above)}}
        return train_reference(
            own,
            lambda step: [rows[i] for i in order[ROWS * (step - 1) : ROWS * step]],
            held_out,
            STEPS // 2,
            adapt=adapt,
        )

    config["model"] |= {"lora": LORA, "load_in_4bit": True}
    return config, held_out, truth(rounded(start, folder / "rounded")), truth(start)


@needs_bitsandbytes
def test_equals_the_plain_loop_above_rounded_numbers(qlora, tmp_path):
    """On two processes, and continued on one that shards: evaluations in between change no weight."""
    config, held_out, truth, other = qlora
    assert np.abs(np.subtract(truth.losses, other.losses)).min() > 1e-4  # The codes do make a difference.
    done = launch(tmp_path, config, processes=2, warm=True)
    check(done, truth)
    assert done.logged("eval/loss") == pytest.approx(list(truth.eval_losses.values()), rel=1e-6)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model", quantization_config=as_in_qlora())
    model.train()  # On some CPUs, bitsandbytes would rearrange the weights otherwise, and fails for small ones.
    assert done.logged("eval/loss")[-1] == pytest.approx(evaluation_loss(model, held_out), rel=1e-6)

    checkpoint = done.folder / "checkpoints" / f"step-{STEPS // 2:08d}"
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as saved:
            assert saved.keys() and all("lora_" in name for name in saved.keys())
    (tmp_path / "sharded").mkdir()
    again = test_launchers.launch(tmp_path / "sharded", config, "fsdp2", "--run.resume", checkpoint, warm=True)
    assert again.launches == [STEPS // 2]
    check(again, truth, after=STEPS // 2)

    run(tmp_path, config, "--export", "last", "--merge", "--to", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    above = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model")
    assert evaluation_loss(merged, held_out) == pytest.approx(evaluation_loss(above, held_out), rel=1e-6)
    assert evaluation_loss(merged, held_out) != pytest.approx(done.logged("eval/loss")[-1], rel=1e-5)


@needs_bitsandbytes
@pytest.mark.parametrize("case", slow_but("FSDP2", of=["one device", "DDP", "FSDP2"]))
def test_is_near_the_plain_loop_in_fp16(qlora, tmp_path, case):
    """FSDP2 computes with the codes that the ranks have gathered, and casts none."""
    config, _, truth, _ = qlora
    done = by_strategy(tmp_path, config, case, "--model.dtype", "float16", options=("--mixed_precision", "fp16"))
    assert np.abs(np.array(done.losses) / truth.losses - 1).max() < 2e-3
    assert done.logged("train/skipped_steps")[-1] == 0


@needs_bitsandbytes
def test_files_with_codes_are_trained_alike(qlora, tmp_path):
    """And on any number of processes; but not without adapters, and merged by nobody."""
    config, _, truth, _ = qlora
    start, folder = config["model"]["pretrained"], tmp_path / "in-files"
    kind = transformers.AutoModelForCausalLM
    kind.from_pretrained(start, quantization_config=as_in_qlora()).save_pretrained(folder)
    config = config | {"model": {"pretrained": str(folder), "lora": LORA}}
    done = launch(tmp_path, config, processes=3, warm=True)
    check(done, truth)
    run(tmp_path, config, "--export", "last", "--to", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert difference(exported, load_file(done.folder / "model" / "adapter_model.safetensors")) == 0
    message = run(tmp_path, config, "--export", "last", "--merge", expect=2).output
    assert "error: --merge: model.pretrained has quantized weights; merge the adapter into" in message
    message = run(tmp_path, config, "--plan", 1, "--perf.device_memory_gib", 1).output
    assert "Memory: it is not known for this model: its files have quantized weights" in message
    message = run(tmp_path, config, "--model.load_in_4bit", "true", expect=2).output
    assert "error: model.load_in_4bit: the files of model.pretrained have quantized weights; leave it out" in message
    message = run(tmp_path, config, "--model.lora", "null", expect=2).output
    assert "its weights are quantized, and cannot be trained; give model.lora" in message


@pytest.mark.skipif(torch.accelerator.is_available(), reason="keeps them on a GPU")
def test_files_that_lose_their_codes(tmp_path):
    """Without a GPU, transformers makes whole weights of those in 8 bits. They are trained, and exported as such."""
    config = tiny_config(tmp_path)
    files = Path(config["model"]["pretrained"])
    weights = load_file(files / "model.safetensors")
    for name in [name for name in weights if "layers" in name and weights[name].ndim == 2]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale[None, None]  # One block has all of it.
    save_file(weights, files / "model.safetensors", {"format": "pt"})
    settings = json.loads((files / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [512, 512]}
    (files / "config.json").write_text(json.dumps(settings))
    (files / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    done = run(tmp_path, config)
    run(tmp_path, config, "--export", "last", "--to", tmp_path / "exported")
    for name in "config.json", "generation_config.json":
        exported = json.loads((tmp_path / "exported" / name).read_text())
        assert exported == json.loads((done.folder / "model" / name).read_text())
        assert "quantization_config" not in exported


def bytes_taken(model: torch.nn.Module) -> int:
    """By codes, their scales and other weights."""
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    return scales + sum(weight.nbytes for weight in model.parameters())


@needs_bitsandbytes
def test_the_plan_knows_the_memory(tmp_path):
    """Half a byte for each number of a layer's matrix, and their scales; and the largest one whole, in bf16."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = transformers.LlamaConfig(vocab_size=300, **shape)
    transformers.LlamaForCausalLM(found).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=as_in_qlora(), dtype=torch.bfloat16
    )
    trained = sum(4 * 2 * (3 * (128 + 256) + 4 * (128 + 128)) for _ in range(2))  # Rank 2, in float32.
    config = Model(pretrained=str(tmp_path), lora=LORA | {"r": 2}, load_in_4bit=True, dtype="bfloat16")
    planned = bytes_of_weights(config, model_without_storage(config, found, layers=2))
    assert planned == bytes_taken(model) + trained + 2 * 128 * 256


@needs_bitsandbytes
def test_the_plan_knows_layers_that_are_the_other_way_round(tmp_path):
    """Those of a GPT-2, whose matrices are transposed. The largest one is whole in float32 here."""
    found = transformers.GPT2Config(vocab_size=300, n_embd=128, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(found).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=as_in_qlora())
    trained = 2 * 4 * 2 * (128 + 384 + 128 + 128 + 2 * (128 + 512))
    config = Model(pretrained=str(tmp_path), lora=LORA | {"r": 2}, load_in_4bit=True)
    planned = bytes_of_weights(config, model_without_storage(config, found, layers=2))
    assert planned == bytes_taken(model) + trained + 4 * 128 * 512


def test_the_plan_knows_what_fsdp2_shards(tmp_path, monkeypatch):
    """A rank has a shard of the codes, and gathers them and the rest of two layers. It has all scales, and a whole
    matrix in float32. With many layers and ranks, it takes most before the codes are sharded."""
    matrices, adapters, norms = 3 * 128 * 256 + 4 * 128 * 128, 3 * (128 + 256) + 4 * (128 + 128), 2 * 128
    outside = 2 * 300 * 128 + 128

    def in_all(layers: int) -> tuple[int, float, float]:
        """Bytes that are not in 4 bits, those of codes, and those of scales and the whole matrix."""
        others, numbers = 4 * (outside + layers * (adapters + norms)), layers * matrices
        return others, numbers / 2, numbers / 64 * (1 + 4 / 256) + 4 * 128 * 256

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=300, **shape).save_pretrained(tmp_path)
    model = {"pretrained": str(tmp_path), "load_in_4bit": True, "gradient_checkpointing": True, "lora": LORA | {"r": 1}}
    config = Config.model_validate(
        {
            "run": {"max_steps": 1},
            "batch": {"global_batch_size": 800, "max_micro_batch_size": 1},
            "data": {"path": "absent", "format": "tokens", "sequence_length": 8},
            "model": model,
        }
    )
    set_fsdp2(monkeypatch)
    few, many = (transformers.LlamaConfig(vocab_size=300, num_hidden_layers=layers, **shape) for layers in (3, 40))
    others, codes, kept = in_all(layers=3)
    gathered = 4 * outside + 2 * (matrices / 2 + 4 * (adapters + norms)) + 8 * adapters
    assert memory_per_device(planned(config, 4), few)["weights"] == (others + codes) / 4 + kept + gathered
    assert sum(memory_per_device(planned(config, 800), many).values()) == sum(in_all(layers=40))


@needs_bitsandbytes
@pytest.mark.parametrize(
    "lora, told",
    [
        ({"modules_to_save": ["up_proj"]}, "modules_to_save: model.layers.0.mlp.up_proj is quantized, and cannot"),
        ({"modules_to_save": ["mlp"]}, "modules_to_save: model.layers.0.mlp is quantized, and cannot be trained"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa needs weights that are not quantized; leave it out"),
    ],
    ids=["up_proj", "mlp", "pissa"],
)
def test_what_adapters_cannot_do_with_codes(tmp_path, lora, told):
    config = tiny_config(tmp_path)
    config["model"] |= {"lora": LORA | {"target_modules": ["q_proj"]} | lora, "load_in_4bit": True}
    assert f"model.lora: {told}" in run(tmp_path, config, expect=2).output


@pytest.mark.parametrize(
    "settings",
    [
        ("--model.lora", "null"),
        ("--model.pretrained", "null", "--model.architecture", "{model_type: llama, vocab_size: 99}"),
    ],
    ids=["whole", "new"],
)
def test_only_for_pretrained_weights_below_adapters(tmp_path, settings):
    config = tiny_config(tmp_path)
    config["model"] |= {"lora": LORA, "load_in_4bit": True}
    message = run(tmp_path, config, *settings, expect=2).output
    assert "error: model.load_in_4bit: is for the weights of model.pretrained, below model.lora; give both" in message


def test_a_fork_that_forgets_to_round_is_refused(tmp_path, monkeypatch):
    """What builds its model may not read the setting."""
    build_model = train.build_model

    def forgetful(config, tokenizer):
        model = config.model.model_copy(update={"load_in_4bit": False})
        return build_model(config.model_copy(update={"model": model}), tokenizer)

    monkeypatch.setattr(train, "build_model", forgetful)
    config = tiny_config(tmp_path)
    config["model"] |= {"lora": LORA, "load_in_4bit": True}
    message = run(tmp_path, config, expect=2).output
    assert "error: model.load_in_4bit: the model has no weights in 4 bits; load it with a quantization" in message


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_says_what_it_needs(tmp_path):
    config = tiny_config(tmp_path)
    config["model"] |= {"lora": LORA, "load_in_4bit": True}
    message = run(tmp_path, config, expect=2).output
    assert "model.load_in_4bit needs bitsandbytes; pip install bitsandbytes==" in message
