"""model.balance_experts, model.balance_loss: biases, losses and weights are those of a plain loop, on any number of
processes."""

from functools import cache, partialmethod
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from helpers import ROOT, VOCABULARY, Done, check_continued, launch, resume_from, run, tiny_config
from reference import adamw, shuffled, summed_loss, train_reference
from safetensors.torch import load_file

from samerun.config import Model
from samerun.errors import UserError
from samerun.model.balance import ExpertBalance

SCRIPT = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
AMOUNT, WEIGHT = 0.05, 0.1
BIAS = "e_score_correction_bias"
KINDS = {
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "minimax_m2": {},  # Its biases lie beside its routers, not in them.
    "qwen3_moe": {"num_experts": 8},
}
SETTINGS = {
    "glm4_moe": {"balance_experts": AMOUNT},
    "minimax_m2": {"balance_experts": AMOUNT, "balance_loss": WEIGHT},
    "qwen3_moe": {"balance_loss": WEIGHT},
}


def mixture(folder: Path, kind: str) -> Path:
    """A tiny model, in which a few experts get most of the tokens."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"n_routed_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 16}
    tokens = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    found = transformers.AutoConfig.for_model(kind, **shape | heads | experts | tokens | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(found)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer += torch.linspace(0, 0.4, buffer.numel())
    model.save_pretrained(folder)
    return folder


class PlainBalance:
    """Biases and a term of the loss of a plain loop, as an optimizer that has no weights."""

    param_groups = ()

    def __init__(self, model: torch.nn.Module, settings: dict[str, float]):
        self.model, self.settings, self.overload = model, settings, []
        self.counts, self.shares = {}, []
        for name, block in model.named_modules():
            if hasattr(block, "experts"):
                self.counts[name] = 0
                block.experts.register_forward_hook(lambda _, args, __, name=name: self.count(name, args[1]))

    def count(self, name: str, chosen: torch.Tensor) -> None:
        for token in self.is_target.flatten().nonzero()[:, 0].tolist():
            self.counts[name] = self.counts[name] + torch.bincount(chosen[token], minlength=8)

    def term(self, logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """8 experts x share of tokens x probability, of each target and layer."""
        total = 0.0
        for of_layer, shares in zip(logits, self.shares or [torch.ones(8) / 8] * 3):
            for token in self.is_target.flatten().nonzero()[:, 0].tolist():
                total = total + 8 * shares @ torch.exp(of_layer[token] - torch.logsumexp(of_layer[token], 0))
        return self.settings.get("balance_loss", 0.0) * total

    def step(self) -> None:
        counts = [count.float() for count in self.counts.values()]
        self.overload.append(max(float(count.max() / count.mean()) for count in counts) - 1)
        self.shares = [count / count.sum() for count in counts]
        buffers = dict(self.model.named_buffers())
        for name, count in self.counts.items():
            biases = [buffer for path, buffer in buffers.items() if path.startswith(f"{name}.") and path.endswith(BIAS)]
            for bias, expert in product(biases, range(8)):
                bias[expert] += AMOUNT * float(torch.sign(count.float().mean() - count[expert]))

    def zero_grad(self) -> None:
        self.counts = dict.fromkeys(self.counts, 0)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """truth(kind): the config of all cases, the plain loop's result, and by how much its experts were overloaded."""

    @cache
    def result(kind: str):
        folder = tmp_path_factory.mktemp(kind)
        config = tiny_config(folder)
        config["run"] |= {"max_steps": 8, "save_every": 2, "keep_checkpoints": 9}
        config["model"] = {"pretrained": str(mixture(folder / "model", kind)), **SETTINGS[kind]}
        rows = list(datasets.load_from_disk(folder / "rows"))
        order = shuffled(config["run"]["seed"], len(rows), 80)
        plain = []

        def optimizers(model, optim):
            plain.append(PlainBalance(model, SETTINGS[kind]))
            return [*adamw(model, optim), *plain]

        def counted_loss(model, some):
            width = max(len(row["input_ids"]) for row in some)
            learned = [[label != -100 for label in row["labels"][1:]] for row in some]
            plain[0].is_target = torch.tensor([row + [False] * (width - len(row)) for row in learned])
            found = []

            def passed(**inputs):
                found.append(model(**inputs, output_router_logits="balance_loss" in SETTINGS[kind]))
                return found[0]

            loss, targets = summed_loss(passed, some)
            term = plain[0].term(found[0].router_logits) if "balance_loss" in SETTINGS[kind] else torch.zeros(())
            return loss + term - term.detach(), targets  # It is not part of the loss that is logged.

        rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
        did = train_reference(config, rows_of, summed_loss=counted_loss, optimizers=optimizers)
        did.model.save_pretrained(folder / "end")
        did.weights = load_file(folder / "end" / "model.safetensors")
        return config, did, plain[0].overload

    return result


def check(truth, kind: str, done: Done) -> None:
    _, did, overload = truth(kind)
    did.check(done)
    assert done.logged("train/expert_overload") == pytest.approx(overload, rel=1e-6)
    if "balance_experts" in SETTINGS[kind]:
        assert overload[-1] < 0.8 * overload[0]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_loop(truth, tmp_path, kind):
    config, did, _ = truth(kind)
    done = run(tmp_path, config, "--batch.max_micro_batch_size", 3)
    check(truth, kind, done)
    again = run(tmp_path, config, *resume_from(done, 4), "--run.output_dir", tmp_path / "again")
    check_continued(again, did, 4)


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"], ids=str)
def test_an_adapter_learns_from_the_loss_of_the_routers(tmp_path, targets):
    """From the second step on: in the first one, all experts have equal shares. The routers themselves are frozen, or
    have adapters, too."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 6
    config["model"] = {
        "pretrained": str(mixture(tmp_path / "model", "qwen3_moe")),
        "lora": {"target_modules": targets},
    }
    norms = []
    for weight in 0, 100:
        folder = "--run.output_dir", tmp_path / str(weight)
        norms.append(run(tmp_path, config, "--model.balance_loss", weight, *folder).logged("train/grad_norm"))
    without, balanced = norms
    assert balanced[0] == pytest.approx(without[0], rel=1e-3)
    assert balanced[1] > 2 * without[1]


RECOMPUTING, SELECTIVELY = (("--model.gradient_checkpointing", how) for how in ("true", "selective"))
WAYS = {
    "DDP": ("qwen3_moe", "multi_gpu", 3, {}, RECOMPUTING),  # Two of the processes have no fourth row.
    "FSDP2": ("minimax_m2", "fsdp2", 2, {}, (*SELECTIVELY, "--model.chunked_loss", "true")),
    "experts": ("glm4_moe", "fsdp2", 4, {}, ("--model.expert_ranks", 2)),
    "experts x TP": ("qwen3_moe", "fsdp2", 2, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, ("--model.expert_ranks", 2)),
    "SP": ("qwen3_moe", "multi_gpu", 4, {"PARALLELISM_CONFIG_SP_SIZE": "2"}, ()),
    "CP": ("minimax_m2", "fsdp2", 2, {"PARALLELISM_CONFIG_CP_SIZE": "2"}, ()),
    "PP": ("minimax_m2", "multi_gpu", 2, {}, ("--model.pipeline_ranks", 2, *RECOMPUTING)),
    "PP x experts": ("glm4_moe", "fsdp2", 4, {}, ("--model.pipeline_ranks", 2, "--model.expert_ranks", 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_is_the_run_of_one_process(truth, tmp_path, way):
    kind, launcher, processes, environment, settings = WAYS[way]
    how = {"launcher": launcher, "processes": processes, "env": environment, "script": SCRIPT, "warm": True}
    limit = "--batch.max_micro_batch_size", 1
    options = "--mixed_precision", "no"
    done = launch(tmp_path, truth(kind)[0], *limit, *settings, **how, options=options)
    check(truth, kind, done)
    config, did, _ = truth(kind)
    again = run(tmp_path, config, *resume_from(done, 4), "--run.output_dir", tmp_path / "again")
    check_continued(again, did, 4)


@pytest.mark.slow
def test_compiled(truth, tmp_path, monkeypatch):
    """Without the last stage, code for the processor, which takes most of the time."""
    compiled = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = "--batch.max_micro_batch_size", 3, "--model.compile", "regional"
    check(truth, "minimax_m2", run(tmp_path, truth("minimax_m2")[0], *settings))
    assert torch._dynamo.utils.counters["aot_autograd"]["ok"] > 0


def test_a_skipped_step_moves_nothing(tmp_path):
    """Nor does one without targets, whose overload is not known."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture(tmp_path, "glm4_moe"))
    balance = ExpertBalance(model, Model(balance_experts=AMOUNT), torch.device("cpu"))
    balance.load = torch.arange(8).repeat(2, 1)
    before = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)]
    assert balance.metrics() == {"train/expert_overload": pytest.approx(1)}  # 7 tokens, where 3.5 are the mean.
    for is_skipped, moves in (True, [0.0] * 8), (False, [AMOUNT] * 4 + [-AMOUNT] * 4):
        balance.update(torch.tensor(is_skipped))
        assert balance.load_before.any() != is_skipped
        after = [buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)]
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new - old, torch.tensor(moves))
    balance.load.zero_()
    assert balance.metrics() == {"train/expert_overload": None}


@pytest.mark.parametrize(
    "setting, message",
    [
        ("balance_experts", "no router of this llama has biases that are buffers, as those of DeepSeek-V3 are"),
        ("balance_loss", "transformers has no such loss for this llama, as it has for a mixtral or a qwen3_moe"),
    ],
)
def test_refused(tmp_path, setting, message):
    config = tiny_config(tmp_path)
    config["model"][setting] = 0.001
    for words in (), ("--plan", 1):
        assert f"error: model.{setting}: {message}; leave it out" in run(tmp_path, config, *words, expect=2).output


def test_refused_with_an_adapter(tmp_path):
    """A plan says so, too."""
    config = tiny_config(tmp_path)
    config["model"] |= {"lora": {"target_modules": ["q_proj"]}, "balance_experts": 0.001}
    message = "model.balance_experts: an adapter does not hold the biases of routers; leave it out"
    assert message in run(tmp_path, config, "--plan", 1, expect=2).output


def test_experts_in_a_list_are_refused():
    """As code of a model's own may have them. Nothing would count their tokens, and no bias would ever move."""
    block = torch.nn.Module()
    block.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    block.register_buffer(BIAS, torch.zeros(4))
    block.config = transformers.LlamaConfig()
    with pytest.raises(UserError, match="the experts of this llama are a list, and nothing counts the tokens of each"):
        ExpertBalance(block, Model(balance_experts=AMOUNT), torch.device("cpu"))


def test_experts_that_compute_nothing_are_counted():
    """LongCat's routers choose among 8 experts and 2 that return what they are given."""
    shape = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 64}
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16}
    kind = transformers.AutoConfig.for_model("longcat_flash", **shape, **heads, **experts, head_dim=8, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(kind)
    balance = ExpertBalance(model, Model(balance_experts=AMOUNT), torch.device("cpu"))
    passed = balance.counting(lambda model, batch: model(input_ids=batch.targets), add=None)
    passed(model, SimpleNamespace(targets=torch.randint(0, 64, (2, 6))))
    balance.take_load(is_alone=True)
    assert balance.load.shape == (2, 10)
    assert balance.load.sum(1).tolist() == [24, 24]
