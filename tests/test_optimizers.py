"""optim.name: which optimizer trains which weights, and that both of two survive a stop; moments of 8 bits.

test_damage.py shows that a step which is not finite changes nothing, test_launchers.py which launchers are refused.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import ROOT, difference, launch, run, tiny_config, tiny_model
from reference import adamw, shuffled, train_reference

import train
from samerun.config import Model
from samerun.model.build import make_model
from samerun.model.weights import put_placeholders
from samerun.optim import hidden_matrices, weight_matrices
from samerun.parallel.state import trained_state
from samerun.preflight.memory import bytes_of_moments

Optim = train.Settings.model_fields["optim"].annotation  # A fork may have one with more settings.
STEPS, RATE = 12, 0.005
# Muon makes its matrices orthogonal in bf16. That can turn a difference of 1e-7 in a gradient into one of an update's
# size, which would hide a mistake. So here it computes in float32, by kellerjordan.github.io/posts/muon.
IN_FLOAT32 = """
def orthogonal(matrix, ns_coefficients, ns_steps, eps):
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


import torch.optim._muon
torch.optim._muon._zeropower_via_newtonschulz = orthogonal
"""


def muon_and_adamw(model: torch.nn.Module, optim: dict) -> list[torch.optim.Optimizer]:
    """Told apart by name: the projections inside the layers are Muon's."""
    named = dict(model.named_parameters())
    inside = {name: weight for name, weight in named.items() if "proj" in name}
    assert all(weight.ndim == 2 for weight in inside.values()) and len(inside) == 2 * 7
    muon = torch.optim.Muon(
        inside.values(), lr=optim["learning_rate"], weight_decay=optim["weight_decay"], adjust_lr_fn="match_rms_adamw"
    )
    [whole] = adamw(model, optim)
    for group in whole.param_groups:
        group["params"] = [weight for weight in group["params"] if not any(weight is one for one in inside.values())]
    return [muon, whole]


@pytest.fixture
def in_float32(monkeypatch):
    names = {}
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", None)  # So that it is undone.
    exec(IN_FLOAT32, names)


@pytest.fixture
def truth(in_float32, tmp_path_factory):
    """A config with optim.name muon, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("muon")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": STEPS, "save_every": 6}
    config["optim"] |= {"name": "muon", "learning_rate": RATE}
    config["batch"]["max_micro_batch_size"] = 3
    steps = reference_steps(config, folder)
    return config, train_reference(config, lambda step: steps[step - 1], optimizers=muon_and_adamw)


def reference_steps(config: dict, folder: Path) -> list[list[dict]]:
    """The rows of each step of a run of 10 rows per step."""
    rows = list(datasets.load_from_disk(folder / "rows"))
    order = shuffled(config["run"]["seed"], len(rows), STEPS * 10)
    return [[rows[i] for i in order[at : at + 10]] for at in range(0, STEPS * 10, 10)]


@pytest.mark.slow
def test_muon_equals_the_plain_loop(truth, tmp_path):
    """On one process, and continued from its middle on two: both optimizers' states are in the checkpoint."""
    config, did = truth
    done = run(tmp_path, config)
    did.check(done)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    chosen = done.folder / "checkpoints" / "step-00000006"
    again = launch(resumed, config, "--run.resume", chosen, processes=2, script=script_in_float32(resumed), warm=True)
    assert again.launches == [6] and difference(again.weights, did.weights) < 1e-5


def script_in_float32(folder: Path) -> Path:
    script = folder / "script.py"
    head = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
    script.write_text(f"{head}{IN_FLOAT32}\nsys.exit(train.main())\n")
    return script


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["pp", "cp", "sp"])
def test_muon_with_whole_matrices_on_each_rank(truth, tmp_path, dimension):
    """Ranks that share layers or rows have some matrices, or all, and each of them whole."""
    config, did = truth
    settings, sizes = (), {f"PARALLELISM_CONFIG_{dimension.upper()}_SIZE": "2"}
    if dimension == "pp":
        settings, sizes = ("--model.pipeline_ranks", 2), {}
    script = ROOT / "tests" / "wrapper_cpu_as_gpu.py", script_in_float32(tmp_path)
    how = {"launcher": "multi_gpu", "options": ("--mixed_precision", "no"), "processes": 2, "env": sizes}
    did.check(launch(tmp_path, config, *settings, script=script, warm=True, **how))


@pytest.mark.parametrize("learned_positions", [False, True])
def test_what_muon_is_not_for(tmp_path, learned_positions):
    """Embeddings of tokens and positions, the output layer, and all that is no matrix, go to AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "m", learned_positions))
    muon, rest = train.build_optimizer(model, Optim(name="muon"))
    of_muon = {id(weight) for group in muon.param_groups for weight in group["params"]}
    of_rest = {id(weight) for group in rest.param_groups for weight in group["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in of_rest}
    assert not of_muon & of_rest and of_muon | of_rest == {id(weight) for weight in model.parameters()}
    gpt2, llama = {"transformer.wte.weight", "transformer.wpe.weight"}, {"model.embed_tokens.weight", "lm_head.weight"}
    outside = {name for name in names if model.get_parameter(name).ndim > 1}
    assert outside == (gpt2 if learned_positions else llama)


SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# What decays of a few families, by the last words of the names.
DECAYING = {
    "gpt_oss": {"embed_tokens.weight", "lm_head.weight", "router.weight", "gate_up_proj", "down_proj"}
    | {f"{name}_proj.weight" for name in "qkvo"},
    "mamba": {"embeddings.weight", "conv1d.weight", "in_proj.weight", "x_proj.weight", "dt_proj.weight"}
    | {"out_proj.weight", "lm_head.weight"},
    "rwkv": {"embeddings.weight", "head.weight"}
    | {f"{name}.weight" for name in ("key", "value", "receptance", "output")},
    "cohere": {"embed_tokens.weight"} | {f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
MORE = {
    "cohere": {"use_qk_norm": True},
    "gpt_oss": {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mamba": {},
    "rwkv": {},
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_decays_is_a_matrix_by_what_it_does(name, optimizer):
    """Biases of experts, a Mamba's A_log and norms of heads have two dimensions. They do not decay, and Muon does not
    take them, nor what has more dimensions."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **SHAPE, **MORE[name])
    )
    named = {id(weight): weight_name for weight_name, weight in model.named_parameters()}
    decaying, others, of_muon = set(), set(), set()
    for part in train.build_optimizer(model, Optim(name=optimizer, weight_decay=0.1)):
        for group in part.param_groups:
            names = {named.pop(id(weight)) for weight in group["params"]}
            (decaying if group["weight_decay"] else others).update(names)
            of_muon |= names if isinstance(part, torch.optim.Muon) else set()
    assert not named
    for weight_name in decaying | others:
        is_matrix = (
            any(weight_name.endswith(end) for end in DECAYING[name]) and model.get_parameter(weight_name).ndim > 1
        )
        assert (weight_name in decaying) == is_matrix, weight_name
    inside = {weight_name for weight_name in decaying if "embed" not in weight_name and "head" not in weight_name}
    hidden = {weight_name for weight_name in inside if model.get_parameter(weight_name).ndim == 2}
    assert of_muon == (hidden if optimizer == "muon" else set())


def test_a_checkpoint_has_the_state_of_all_optimizers_before_their_first_update(tmp_path):
    """As when Muon has skipped all steps so far, and AdamW has its state from a fused update that it skipped itself.
    DDP keeps gradients between steps, as zeros."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "m"))
    muon, whole = train.build_optimizer(model, Optim(name="muon"))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    whole.step()
    kinds = {name.rpartition(".")[2] for name in trained_state(model, [muon, whole]) if name.startswith("optimizer.")}
    assert kinds >= {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}  # A fork may keep more, such as an average.


@pytest.mark.parametrize(
    "is_of_model, message",
    [
        (True, "1 weights are in two optimizers; give each weight to one of them"),
        (False, "not the model's weights, but others: 1; let the model hold them"),
    ],
)
def test_weights_of_two_optimizers_or_of_no_model(tmp_path, monkeypatch, is_of_model, message):
    """As a fork may give them."""
    build = train.build_optimizer

    def build_more(model, config):
        more = model.lm_head.weight if is_of_model else torch.nn.Parameter(torch.ones(2))
        return [*build(model, config), torch.optim.SGD([more])]

    monkeypatch.setattr(train, "build_optimizer", build_more)
    output = run(tmp_path, tiny_config(tmp_path), expect=2).output
    assert re.findall("^error: .*", output, re.M) == [f"error: build_optimizer: {message}"]


def test_what_a_model_marks_does_not_decay(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "m"))
    model.get_parameter("model.layers.0.mlp.up_proj.weight")._no_weight_decay = True
    put_placeholders(model)  # As a run does.
    marked = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    [optimizer] = train.build_optimizer(model, Optim(weight_decay=0.1))
    [group] = [group for group in optimizer.param_groups if any(weight is marked for weight in group["params"])]
    assert group["weight_decay"] == 0


def test_an_embedding_that_norms_its_rows_decays(tmp_path):
    """As that of Inkling, whose class has Norm in its name. The weights of norms do not decay."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "m"))
    model.get_input_embeddings().__class__ = type("NormedEmbedding", (torch.nn.Embedding,), {})
    assert model.get_input_embeddings().weight in weight_matrices(model)


@pytest.mark.parametrize(
    "more", [{"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, {"trainable_token_indices": [3, 5]}]
)
def test_muon_is_not_for_adapters_of_embeddings(more):
    """Nor for those of the output layer, nor for tokens whose embeddings are trained."""
    lora = {"r": 2, "target_modules": ["q_proj"], **more}
    found = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = make_model(Model(lora=lora), found, 0, seed=0)
    hidden = hidden_matrices(model)
    trained = {name for name, weight in model.named_parameters() if weight in hidden and weight.requires_grad}
    assert len(trained) == 2 and all("q_proj.lora_" in name for name in trained)


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes, see optim.name")


def by_bitsandbytes(model: torch.nn.Module, optim: dict) -> list[torch.optim.Optimizer]:
    from bitsandbytes.optim import AdamW8bit

    [whole] = adamw(model, optim)
    groups = [
        {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")} for group in whole.param_groups
    ]
    return [AdamW8bit(groups)]


@pytest.fixture
def config_8bit(tmp_path) -> dict:
    """For a model whose matrices have 4,096 numbers, as few as have moments of 8 bits, but for those of the keys."""
    config = tiny_config(tmp_path)
    start = transformers.LlamaConfig.from_pretrained(config["model"]["pretrained"])
    start.hidden_size = start.intermediate_size = 64
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(start).save_pretrained(tmp_path / "wide")
    config["model"]["pretrained"] = str(tmp_path / "wide")
    config["run"] |= {"max_steps": STEPS, "save_every": 6}
    config["optim"] |= {"name": "adamw_8bit"}
    return config


@needs_bitsandbytes
def test_adamw_8bit_equals_the_plain_loop(config_8bit, tmp_path):
    """And not AdamW. Continued on three processes, it is the same run, too: codes and scales are in the checkpoint.

    Rounding in float32 can turn into another code of 8 bits, and so into another update.
    """
    steps = reference_steps(config_8bit, tmp_path)
    did = train_reference(config_8bit, lambda step: steps[step - 1], optimizers=by_bitsandbytes)
    done = run(tmp_path, config_8bit)
    np.testing.assert_allclose(done.losses, did.losses, atol=5e-6)
    assert difference(done.weights, did.weights) < 3e-4
    assert difference(train_reference(config_8bit, lambda step: steps[step - 1]).weights, did.weights) > 1e-3
    (tmp_path / "resumed").mkdir()
    chosen = done.folder / "checkpoints" / "step-00000006"
    again = launch(tmp_path / "resumed", config_8bit, "--run.resume", chosen, processes=3, warm=True)
    assert again.launches == [6] and difference(again.weights, done.weights) < 1e-4
    np.testing.assert_allclose(again.losses, done.losses[6:], atol=5e-6)


@needs_bitsandbytes
def test_adamw_8bit_takes_the_memory_that_the_plan_says(config_8bit):
    """Two bytes for each number of a matrix of 4,096 or more, and two scales of 4 bytes for each 256 of them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(config_8bit["model"]["pretrained"])
    state = trained_state(model, train.build_optimizer(model, Optim(name="adamw_8bit")))
    taken = sum(value.nbytes for name, value in state.items() if ".state" in name and "qmap" not in name and value.ndim)
    sizes = [weight.numel() for weight in model.parameters()]
    expected = sum(2 * size + 8 * size / 256 if size >= 4096 else 8 * size for size in sizes)
    assert taken == expected == bytes_of_moments("adamw_8bit", model, sum(sizes))


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_adamw_8bit_says_what_it_needs(tmp_path):
    output = run(tmp_path, tiny_config(tmp_path), "--optim.name", "adamw_8bit", expect=2).output
    assert "error: optim.name adamw_8bit: needs bitsandbytes; pip install bitsandbytes==" in output
