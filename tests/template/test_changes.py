"""What forks change most: a term of the loss, the optimizer, a setting. Each is a change in one place.

A fork here is a script that imports train.py and replaces one of its functions; test_fork.py changes the file itself.
"""

import functools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from helpers import ROOT, difference, launch, run, tiny_config, write_config
from reference import adamw, shuffled, summed_loss, train_reference
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import train
from samerun.config import Config, MayChange, Optim
from samerun.data.batches import MicroBatch, collate
from samerun.data.order import Order
from samerun.data.rows import Dataset
from samerun.errors import UserError
from samerun.optim import first_update
from samerun.parallel.state import local_tensor
from samerun.run.changes import may_change
from samerun.run.checkpoint import check_same_state
from samerun.run.setup import has_chance, has_dropout

STEPS, Z = 8, 0.01
TOKEN_LOSS = f"""
def token_loss(logits, targets):
    logits = logits.float()
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    z_loss = {Z} * logits.logsumexp(-1)[targets != -100].square().sum()
    hits = (logits.argmax(-1) == targets).sum()
    loss = cross_entropy + z_loss
    return loss, {{"loss": loss, "cross_entropy": cross_entropy, "z_loss": z_loss, "accuracy": hits}}
"""


def fork(folder, function: str):
    """A script that is train.py but for one function."""
    [name] = re.findall(r"^def (\w+)", function, re.M)  # Methods of a class are indented.
    script = folder / "fork.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport torch\nimport train\n{function}\n"
        f"train.{name} = {name}\nsys.exit(train.main())\n"
    )
    return script


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A config, the rows of each of its steps, and the rows to evaluate on."""
    folder = tmp_path_factory.mktemp("changes")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": STEPS, "eval_every": 4}
    config["batch"]["max_micro_batch_size"] = 3
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(config["run"]["seed"], len(rows), STEPS * 10)
    return config, lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]], held_out


# A term of the loss --------------------------------------------------------------------------------------------------


def parts(model, rows) -> tuple[float, float, float, int]:
    """Loss, z-loss and hits, summed over the targets of these rows, each row alone; and the targets."""
    total = np.zeros(4)
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        known = labels != -100
        logits = model(input_ids=ids).logits[0, :-1][known]
        z = torch.log(torch.exp(logits).sum(1))
        hits = logits.max(1).indices == labels[known]
        cross_entropy = F.cross_entropy(logits, labels[known], reduction="sum") if known.any() else torch.tensor(0.0)
        z_loss = Z * (z**2).sum().item()
        total += [cross_entropy.item() + z_loss, z_loss, hits.sum().item(), known.sum().item()]
    return tuple(total)


@pytest.fixture(scope="module")
def with_z_loss(task):
    """The plain loop with the z-loss, and of each step and evaluation: loss, z-loss, accuracy, per target."""
    config, rows_of, held_out = task
    seen = {"train": [], "eval": []}

    def summed(model, rows):
        with torch.no_grad():
            if len(seen["train"]) in (4, 8) and len(seen["eval"]) < len(seen["train"]) // 4:
                seen["eval"].append(parts(model, held_out))
            seen["train"].append(parts(model, rows))
        total, targets = summed_loss(model, rows)
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for r, row in enumerate(rows):
            ids[r, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            labels[r, : len(row["input_ids"])] = torch.tensor(row["labels"])
        scores = model(input_ids=ids).logits[:, :-1][labels[:, 1:] != -100]
        return total + Z * torch.logsumexp(scores, 1).pow(2).sum(), targets

    did = train_reference(config, rows_of, summed_loss=summed)
    with torch.no_grad():
        seen["eval"].append(parts(did.model, held_out))
    means = {kind: np.array([[*row[:3]] for row in rows]) / [[row[3]] for row in rows] for kind, rows in seen.items()}
    return did, means


@pytest.mark.parametrize("processes, chunked", [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_a_term_of_the_loss(task, with_z_loss, tmp_path, monkeypatch, processes, chunked):
    config, *_ = task
    did, means = with_z_loss
    if processes == 1:
        names = {"torch": torch}
        exec(TOKEN_LOSS, names)
        monkeypatch.setattr(train, "token_loss", names["token_loss"])
        monkeypatch.setattr("samerun.model.loss.chunk_size", lambda *_: 16)  # So that a micro-batch has several.
        done = run(tmp_path, config, "--model.chunked_loss", str(chunked).lower())
    else:
        done = launch(tmp_path, config, processes=2, script=fork(tmp_path, TOKEN_LOSS))
    assert difference(done.weights, did.weights) < 1e-5
    for kind in "train", "eval":
        logged = np.array([done.logged(f"{kind}/{name}") for name in ("loss", "z_loss", "accuracy")]).T
        np.testing.assert_allclose(logged, means[kind], rtol=1e-5)
    cross_entropy = means["eval"][:, 0] - means["eval"][:, 1]
    np.testing.assert_allclose(done.logged("eval/perplexity"), np.exp(cross_entropy), rtol=1e-5)


def test_a_loss_that_changes_its_targets(task, tmp_path, monkeypatch):
    """In place, or in a copy: autograd keeps the ids, which lie beside them."""
    config, *_ = task
    weights = []
    for targets_of in torch.Tensor.clone, lambda targets: targets:

        def token_loss(logits, targets, targets_of=targets_of):
            targets = targets_of(targets)
            targets[targets == 5] = -100
            loss = F.cross_entropy(logits, targets, reduction="sum")
            return loss, {"loss": loss}

        monkeypatch.setattr(train, "token_loss", token_loss)
        folder = tmp_path / str(len(weights))
        folder.mkdir()
        weights.append(run(folder, config, "--model.chunked_loss", "false").weights)
    assert difference(*weights) == 0


BY_KIND = """
def token_loss(logits, targets):
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    low, high = (0 <= targets) & (targets < 40), targets >= 40
    sums = {{"of_low": loss[low].sum(), "of_high": loss[high].sum()}}
    if high.sum() > low.sum():
        sums = {instead}
    return loss.sum(), {{"loss": loss, **sums}}
"""
IN_ANOTHER_ORDER = BY_KIND.format(instead="dict(reversed(sums.items()))")
SOME_ONLY = BY_KIND.format(instead='{"of_high": sums["of_high"]}')


TEACHER = """
def loss_function(config):
    from transformers import AutoModelForCausalLM
    from samerun.model.loss import add_up_terms, model_inputs
    from samerun.model.outline import unwrapped

    teacher = AutoModelForCausalLM.from_pretrained(config.model.pretrained)

    def loss_of(wrapped, batch, chunked=False):
        model = unwrapped(wrapped)
        found = wrapped(**model_inputs(model, batch)).logits.flatten(0, 1)
        {attention}
        with torch.no_grad():
            wanted = (2 * teacher(**model_inputs(teacher, batch)).logits.flatten(0, 1)).softmax(1)[:, : found.shape[1]]
        loss = torch.nn.functional.cross_entropy(found, wanted, reduction="none") * (batch.targets.flatten() != -100)
        return loss.sum(), add_up_terms({{"loss": loss}}, batch.source_ends)

    return loss_of
"""


def test_a_teacher_from_the_hub_is_loaded_when_the_network_is_known(task, tmp_path, monkeypatch):
    """Otherwise, huggingface_hub asks for each file six times if there is none."""
    config, *_ = task
    calls = []
    for name in "go_offline_without_network", "loss_function":
        function = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *given, name=name, of=function: calls.append(name) or of(*given))
    run(tmp_path, config, "--run.max_steps", 2, "--optim.warmup_steps", 0)
    assert calls == ["go_offline_without_network", "loss_function"]


def test_prepare_loads_a_teacher(task, tmp_path, monkeypatch):
    """It says that a launch finds all of it in the caches."""
    config, *_ = task
    calls = []
    monkeypatch.setattr("samerun.preflight.prepare.go_offline_without_network", lambda _: calls.append("network"))
    monkeypatch.setattr(train, "loss_function", lambda config: calls.append(config.run.seed))
    assert train.main(["--prepare", "--config", str(write_config(tmp_path, config))]) == 0
    assert calls == ["network", config["run"]["seed"]]


@pytest.mark.slow
def test_a_teacher_whose_rows_ranks_share(task, tmp_path):
    """With transformers' own attention it would see a rank's part of each row, and teach something else in silence."""
    config, rows_of, _ = task
    teacher = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])

    def summed(model, rows):
        total, targets = 0, 0
        for row in rows:
            ids, known = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:] != -100
            with torch.no_grad():
                wanted = torch.softmax(2 * teacher(input_ids=ids).logits[0, :-1][known], 1)
            total -= (wanted * torch.log_softmax(model(input_ids=ids).logits[0, :-1][known], 1)).sum()
            targets += int(known.sum())
        return total, targets

    did = train_reference(config, rows_of, summed_loss=summed)
    how = {"processes": 2, "env": {"PARALLELISM_CONFIG_SP_SIZE": "2"}, "warm": True}
    refused = launch(tmp_path, config, script=fork(tmp_path, TEACHER.format(attention="")), expect=None, **how)
    [message] = re.findall("^error: .*", refused.output, re.M)
    assert "model_inputs: ranks share rows, of which another model would see a part; first call its set_att" in message
    given = "teacher.set_attn_implementation(model.config._attn_implementation)"
    script, again = fork(tmp_path, TEACHER.format(attention=given)), ("--run.output_dir", tmp_path / "again")
    did.check(launch(tmp_path, config, *again, script=script, **how))


def mean_loss(logits, targets):
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return loss, {"loss": loss}


def mean_of_summed_metric(logits, targets):
    loss, _ = mean_loss(logits, targets)
    return loss, {"loss": loss * (targets != -100).sum()}


def comparing_loss(logits, targets):
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return loss.sum() + loss.var(), {"loss": loss}


def test_a_metric_that_is_no_sum_of_rows_is_refused(task, tmp_path, monkeypatch):
    """It would be that of one micro-batch, divided by the targets of all."""
    config, *_ = task
    token_loss = train.token_loss

    def with_mean(logits, targets):
        loss, metrics = token_loss(logits, targets)
        return loss, metrics | {"entropy": torch.distributions.Categorical(logits=logits).entropy().mean()}

    monkeypatch.setattr(train, "token_loss", with_mean)
    told = run(tmp_path, config, expect=2).output
    found = "error: token_loss or compute_loss: two rows have the metric entropy (.*), and alone (.*) and (.*); return"
    together, *alone = map(float, re.search(found, told).groups())
    assert together == pytest.approx(sum(alone) / 2, rel=1e-2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("token_loss", [mean_loss, mean_of_summed_metric, comparing_loss])
def test_a_loss_that_is_no_sum_of_rows_is_refused(task, tmp_path, monkeypatch, token_loss, attention):
    """It would depend on how many rows are in a micro-batch."""
    config, *_ = task
    monkeypatch.setattr(train, "token_loss", token_loss)
    told = run(tmp_path, config, "--model.attention", attention, expect=2).output
    found = "error: token_loss or compute_loss: two rows have the loss (.*), and alone (.*) and (.*); return a sum"
    together, *alone = map(float, re.search(found, told).groups())
    assert together != pytest.approx(sum(alone), rel=1e-4)
    assert token_loss is comparing_loss or together == pytest.approx(sum(alone) / 2, rel=1e-4)


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_a_loss_that_is_not_finite_is_refused(task, tmp_path, monkeypatch, packing):
    """And nothing else is blamed, such as the packing, because nan does not equal itself."""
    config, *_ = task

    def token_loss(logits, targets):
        loss = F.cross_entropy(logits, targets, reduction="sum") * math.nan
        return loss, {"loss": loss}

    monkeypatch.setattr(train, "token_loss", token_loss)
    told = run(tmp_path, config, "--data.packing", packing, expect=2).output
    assert "error: token_loss or compute_loss: the loss of two rows is nan before any step" in told


def one_is_left_out(rows, *more):
    return collate(rows[:1], *more)


def one_token_is_another(rows, *more):
    batch = collate(rows, *more)
    batch.input_ids[0, 0] += 1
    return batch


@pytest.mark.parametrize("collated, ratio", [(one_is_left_out, 2), (one_token_is_another, 1)])
@pytest.mark.parametrize(
    "settings",
    [
        ("--batch.max_micro_batch_size", 2),
        ("--batch.global_batch_size", 1, "--batch.warmup", "[{steps: 1, rows: 2}]"),
    ],
    ids=["batch", "warmup"],
)
def test_rows_of_ones_own_that_are_compared_are_refused(task, tmp_path, monkeypatch, settings, collated, ratio):
    """Where they may be in one micro-batch, and as the model is by then: before, it is tried on rows of text."""
    config, *_ = task
    monkeypatch.setattr(train, "collate", collated)
    told = run(tmp_path, config, *settings, expect=2).output
    one, two = map(float, re.search("the loss of two rows is (.*) in one micro-batch, (.*) in two; ret", told).groups())
    assert two / one == pytest.approx(ratio, rel=0.25) and two != one
    run(tmp_path, config, "--batch.max_micro_batch_size", 1, "--run.max_steps", 2, "--optim.warmup_steps", 0)


class OwnBatch(MicroBatch):
    """Of rows of a fork's own, unlike those that the small model is tried with."""


def minimizes_a_mean(wrapped, batch, loss, metrics):
    return loss / (batch.targets != -100).sum(), metrics


def compares_in_training(wrapped, batch, loss, metrics):  # As a batch norm does.
    return loss + wrapped.training * loss.square(), metrics


def norms_the_batch(wrapped, batch, loss, metrics):  # torch refuses to do that with a single value.
    values = torch.ones(len(batch.documents.lengths), 1)
    return loss + F.batch_norm(values, torch.zeros(1), torch.ones(1), training=wrapped.training).sum(), metrics


def logs_a_mean(wrapped, batch, loss, metrics):
    return loss, metrics | {"mean": loss.detach() / (batch.targets != -100).sum()}


def logs_no_loss(wrapped, batch, loss, metrics):
    return loss, {"cross_entropy": metrics["loss"]}


def logs_values(wrapped, batch, loss, metrics):
    return loss, metrics | {"found": 1.5, "numpy": np.float64(1.5)}


def draws(wrapped, batch, loss, metrics):
    return loss * (1 + torch.rand(()) / 100), metrics


DEPENDS = "token_loss, compute_loss or the model: the loss of two rows is (.*) in one micro-batch, (.*) in two; return"
FAULTS = {
    minimizes_a_mean: DEPENDS,
    compares_in_training: DEPENDS,
    norms_the_batch: "token_loss, compute_loss or the model: a row does not work without others beside it: ValueError",
    logs_a_mean: DEPENDS.replace("the loss", "the metric mean"),
    logs_no_loss: 'token_loss or compute_loss: no metric is called "loss"; log what is minimized',
    logs_values: "compute_loss: these are no tensors of one number, as sums are: found, numpy",
}


def change_own_loss(monkeypatch, fault) -> None:
    """Let the loss of a fork's own rows have this fault."""
    collate, loss_function = train.collate, train.loss_function

    def with_fault(config):
        def loss_of(wrapped, batch, chunked=False):
            loss, metrics = loss_function(config)(wrapped, batch, chunked=chunked)
            return fault(wrapped, batch, loss, metrics) if isinstance(batch, OwnBatch) else (loss, metrics)

        return loss_of

    monkeypatch.setattr(train, "collate", lambda *given: OwnBatch(**vars(collate(*given))))
    monkeypatch.setattr(train, "loss_function", with_fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_loss_for_rows_of_ones_own(task, tmp_path, monkeypatch, fault):
    config, *_ = task
    change_own_loss(monkeypatch, fault)
    assert re.search(f"error: {FAULTS[fault]}", run(tmp_path, config, expect=2).output)


@pytest.mark.parametrize("factor", [0, 1])
def test_rows_of_ones_own_without_loss_are_told(task, tmp_path, monkeypatch, factor):
    """As in reinforcement learning, before any answer is right. No fault of the loss would show."""
    config, *_ = task

    def scaled(wrapped, batch, loss, metrics):
        return loss * factor, metrics

    change_own_loss(monkeypatch, scaled)
    output = run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0).output
    assert output.count("\nThe loss of the first two rows is 0, so it was not found out whether") == (factor == 0)


def test_chance_in_a_loss_of_ones_own_is_told(task, tmp_path, monkeypatch):
    config, *_ = task
    change_own_loss(monkeypatch, draws)
    settings = "--run.max_steps", 2, "--optim.warmup_steps", 0
    assert "\nDropout is on, or other chance: this run is the same only" in run(tmp_path, config, *settings).output


def draws_elsewhere(wrapped, batch, loss, metrics):  # As transformers' models of speech, which mask in training.
    factor = 1 + (np.random.rand() + random.random()) / 100 if wrapped.training else 1
    return loss * factor, {"loss": metrics["loss"] * factor}


def test_chance_that_is_not_of_torch_is_the_same_in_each_run(task, tmp_path, monkeypatch):
    config, *_ = task
    change_own_loss(monkeypatch, draws_elsewhere)
    settings = "--run.max_steps", 3, "--optim.warmup_steps", 0
    one, other = (run(tmp_path, config, *settings, "--run.output_dir", tmp_path / name) for name in ("one", "other"))
    assert "\nDropout is on, or other chance: this run is the same only" in one.output
    assert one.logged("train/loss") == other.logged("train/loss")


@pytest.mark.parametrize("seldom", [4, 10])
@pytest.mark.parametrize("generator", [torch.rand, np.random.rand, random.expovariate])
def test_chance_that_two_passes_may_not_show_is_told(task, tmp_path, monkeypatch, generator, seldom):
    """As of a layer that is left out now and then. By such chance, two rows differ in one micro-batch and in two."""
    config, *_ = task
    numbers = []

    def draws_seldom(wrapped, batch, loss, metrics):
        if wrapped.training:
            numbers.append(generator(1))
        return loss * (1 + (len(numbers) == seldom)), metrics  # Eight passes have both rows, and others one.

    change_own_loss(monkeypatch, draws_seldom)
    settings = "--run.max_steps", 1, "--optim.warmup_steps", 0
    assert "\nDropout is on, or other chance: this run is the same only" in run(tmp_path, config, *settings).output


GATHERS = """
class OwnBatch(train.MicroBatch):
    pass


def loss_function(config):
    import functools
    from samerun.data.batches import collate
    from samerun.model.loss import compute_loss

    plain = functools.partial(compute_loss, token_loss=train.token_loss)
    train.collate = lambda *given: OwnBatch(**vars(collate(*given)))

    def loss_of(wrapped, batch, chunked=False):
        loss, metrics = plain(wrapped, batch, chunked=chunked)
        if isinstance(batch, OwnBatch) and {gathers}:
            of_all = loss.detach().clone()
            torch.distributed.all_reduce(of_all)
            loss = loss * of_all
        return loss, metrics

    return loss_of
"""


@pytest.mark.slow
@pytest.mark.parametrize("gathers", ["True", "wrapped.training", "False"])
def test_a_loss_that_gathers_from_other_ranks_is_refused(task, tmp_path, gathers):
    """Also where each rank has a row at a time, which has none beside it to be tried with."""
    config, *_ = task
    script = fork(tmp_path, GATHERS.format(gathers=gathers))
    settings = "--batch.max_micro_batch_size", 1, "--run.max_steps", 2, "--optim.warmup_steps", 0
    done = launch(
        tmp_path, config, *settings, processes=2, script=script, warm=True, expect=0 if gathers == "False" else 2
    )
    told = re.findall(
        "^error: .*: where ranks have other rows, their loss is (.*) per rank, and (.*) by ", done.output, re.M
    )
    assert len(told) == (gathers != "False")


def test_buffers_are_as_before_the_tries(monkeypatch):
    """A batch norm writes into its own, and other modules have new ones after each pass in training."""
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("passes", torch.zeros(()))
    seen = []

    def check_two_rows(setup, training):
        model.train(training)(torch.randn(4, 2))
        model.passes = model.passes + training
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        return False

    monkeypatch.setattr("samerun.run.setup.check_two_rows", check_two_rows)
    parallel = SimpleNamespace(layout=SimpleNamespace(data_parallel_size=1))
    stage = SimpleNamespace(plan=SimpleNamespace(micro_batch_size=2))
    has_chance(SimpleNamespace(model=model, stages=[stage], parallel=parallel))
    first, second = seen
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, first[name]) and not torch.equal(buffer, second[name])


def test_targets_of_ones_own_that_sizes_do_not_count_are_told(task, tmp_path, monkeypatch):
    """The loss would be that of fewer targets, divided by all."""
    config, *_ = task
    collate = train.collate

    def without_one(rows, *more):
        rows = [row.copy() for row in rows]
        for row in rows:
            row[1, np.flatnonzero(row[1] != -100)[:1]] = -100
        return collate(rows, *more)

    settings = "--run.max_steps", 2, "--optim.warmup_steps", 0
    for changed, others in (lambda *given: collate(*given), 0), (without_one, 2):
        monkeypatch.setattr(train, "collate", changed)
        told = run(tmp_path, config, *settings, "--run.output_dir", tmp_path / str(others)).output
        found = re.findall(r"^Two rows have (\d+) targets, but sizes\(\) counts (\d+), by which", told, re.M)
        assert [int(counted) - int(there) for there, counted in found] == [others] * bool(others)


@pytest.mark.parametrize(
    "without, told",
    [
        (
            lambda data: [data.read(row) for row in range(9)],
            "data: a rank without rows would add loss .*; let read_rows",
        ),
        (lambda data: [], "data: a rank without rows would have nothing to compute; let read_rows"),
    ],
)
def test_a_rank_without_rows_of_ones_own_adds_nothing(task, tmp_path, monkeypatch, without, told):
    """On few processes, there is none. On many, it would change the run."""
    config, *_ = task
    collate, read_rows = train.collate, Dataset.read_rows
    monkeypatch.setattr(train, "collate", lambda *given: collate(*given))
    monkeypatch.setattr(Dataset, "read_rows", lambda data, rows: read_rows(data, rows) if len(rows) else without(data))
    assert re.search(f"error: {told}", run(tmp_path, config, expect=2).output)


def test_a_share_for_evaluation_that_a_fork_forgets(task, tmp_path, monkeypatch):
    """data.eval_fraction is up to what loads the rows."""
    config, *_ = task
    load_data = train.load_data
    monkeypatch.setattr(train, "load_data", lambda *given: (load_data(*given)[0], {}))
    settings = "--data.eval_source", "null", "--data.eval_fraction", 0.2
    told = run(tmp_path, config, *settings, expect=2).output
    assert "error: data.eval_fraction: no rows are held out; let what loads them do so" in told


@pytest.mark.parametrize(
    "setting, value, told",
    [
        ("gradient_checkpointing", True, "no module has gradient_checkpointing = True"),
        ("attention", "eager", "the model has documents"),
    ],
)
@pytest.mark.parametrize("is_heeded", [True, False])
def test_settings_that_a_model_of_ones_own_ignores(task, tmp_path, monkeypatch, setting, value, told, is_heeded):
    """They are up to what builds it."""
    config, *_ = task
    collate, build_model = train.collate, train.build_model

    def heedless(config, tokenizer):
        model = config.model.model_copy(update={setting: type(config.model).model_fields[setting].default})
        return build_model(config.model_copy(update={"model": model}), tokenizer)

    monkeypatch.setattr(train, "collate", lambda *given: collate(*given))
    if not is_heeded:
        monkeypatch.setattr(train, "build_model", heedless)
        monkeypatch.setattr(train, "check_model", lambda *_: (False, False))  # It is for text.
    output = run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0, f"--model.{setting}", value).output
    assert (f"\nmodel.{setting} seems to be ignored: {told}.\n" in output) != is_heeded
    assert output.count("seems to be ignored") == (not is_heeded)


@pytest.mark.parametrize("settings", [{}, {"config": SimpleNamespace(n_layer=1)}], ids=["no config", "another"])
def test_a_plain_module_is_refused(task, tmp_path, monkeypatch, settings):
    config, *_ = task
    model = torch.nn.Linear(2, 2)
    vars(model).update(settings)
    monkeypatch.setattr(train, "build_model", lambda *_: model)
    kind = type(settings.get("config")).__name__
    told = run(tmp_path, config, expect=2).output
    assert f"error: model: its config is a {kind}, not one of transformers; make" in told


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_rows_that_are_drawn_anew_are_told(task, tmp_path, monkeypatch, micro_batch):
    """As a collator that masks tokens draws them. Not even on the same number of processes are they the same again."""
    config, *_ = task
    collate = train.collate

    def masked(rows, *more):
        """By a coin for each row but two, and beside what torch cannot compare, and something of another stride."""
        rows = [row.copy() for row in rows]
        for row in rows[2:]:
            row[0, 0] = 3 if torch.rand(()) < 0.5 else row[0, 0]
        batch = OwnBatch(**vars(collate(rows, *more)))
        object.__setattr__(batch, "sparse", torch.eye(2).to_sparse())
        object.__setattr__(batch, "nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
        object.__setattr__(batch, "labels", batch.targets[:, 0])
        return batch

    monkeypatch.setattr(train, "collate", masked)
    settings = "--run.max_steps", 2, "--optim.warmup_steps", 0, "--batch.max_micro_batch_size", micro_batch
    output = run(tmp_path, config, *settings).output
    assert "\nThe same rows differ each time they are read: the run is another one after a stop, or on other" in output
    assert "this run is the same only" not in output


DRAWS_ON_ONE_RANK = """
import os
collate = train.collate
def masked(rows, *more):
    batch = collate(rows, *more)
    if os.environ["RANK"] == "1":
        batch.input_ids[torch.rand(batch.input_ids.shape) < 0.5] = 3
    return batch
train.collate = masked
"""


@pytest.mark.slow
def test_rows_that_one_rank_draws_anew_are_told(task, tmp_path):
    """All ranks then leave out what they would only try together."""
    config, *_ = task
    script, settings = fork(tmp_path, DRAWS_ON_ONE_RANK), ("--run.max_steps", 2, "--optim.warmup_steps", 0)
    done = launch(tmp_path, config, *settings, processes=2, script=script, warm=True)
    assert done.output.count("The same rows differ each time they are read") == 1


@pytest.mark.parametrize("lora_dropout", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_dropout_in_an_adapter_of_a_fork_is_told(task, tmp_path, monkeypatch, micro_batch, lora_dropout):
    """It changes no loss before the first step, and single rows have no others beside them to be tried with."""
    config, *_ = task
    collate, check_model = train.collate, train.check_model
    monkeypatch.setattr(train, "collate", lambda *given: collate(*given))
    monkeypatch.setattr(train, "check_model", lambda *given: (False, check_model(*given)[1]))  # A fork has none.
    adapter = f"{{r: 2, target_modules: all-linear, lora_dropout: {lora_dropout}}}"
    settings = "--run.max_steps", 2, "--optim.warmup_steps", 0, "--batch.max_micro_batch_size", micro_batch
    told = run(tmp_path, config, *settings, "--model.lora", adapter).output
    assert ("\nDropout is on, or other chance: this run is the same only" in told) == bool(lora_dropout)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_that_is_off_is_not_told(share):
    assert has_dropout(torch.nn.Sequential(torch.nn.Dropout(share))) == bool(share)


@pytest.mark.slow
def test_the_loss_of_ones_own_rows_on_two_processes(task, tmp_path):
    """Each has both rows to try, and the message their loss as it is."""
    config, *_ = task
    script = fork(tmp_path, "collated = train.collate\ndef collate(rows, *more): return collated(rows[:1], *more)")
    found = set()
    for processes in 1, 2:
        told = launch(tmp_path, config, script=script, processes=processes, warm=True, expect=None).output
        found.add(re.search("error: .*the loss of two rows is .* in one micro-batch, .* in two;", told)[0])
    assert len(found) == 1


def test_what_is_not_asked_of_rows_of_ones_own(task, tmp_path, monkeypatch):
    """Neither to be documents of text, as data.packing joins them, nor that their loss is finite: a step tells that."""
    config, *_ = task
    config = config | {"data": config["data"] | {"packing": "concat", "eval_source": None}}
    monkeypatch.setattr(train, "collate", one_token_is_another)
    settings = "--run.max_steps", 1, "--optim.warmup_steps", 0
    run(tmp_path, config, *settings, "--batch.max_micro_batch_size", 1)
    monkeypatch.setattr("samerun.run.setup.check_no_rows", lambda *_: None)
    monkeypatch.setattr("samerun.run.setup.sums_in", lambda *_, **__: {"loss": math.nan})  # Not equal to itself.
    output = run(tmp_path, config, *settings, "--run.output_dir", tmp_path / "again").output
    assert "Dropout is on, or other chance" not in output


def test_a_loss_that_draws_random_numbers_is_accepted(task, tmp_path, monkeypatch):
    config, *_ = task
    token_loss = train.token_loss

    def drawn(logits, targets):
        return token_loss(torch.nn.functional.dropout(logits, 0.1), targets)

    monkeypatch.setattr(train, "token_loss", drawn)
    settings = "--model.chunked_loss", "false"
    run(tmp_path, config, *settings, "--run.max_steps", 2, "--optim.warmup_steps", 0)


SMOOTH = """
def loss_function(config):
    from samerun.model.loss import model_inputs
    from samerun.model.outline import unwrapped

    def loss_of(wrapped, batch, chunked=False):
        logits = wrapped(**model_inputs(unwrapped(wrapped), batch)).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        known = batch.targets.flatten() != -100  # Not that of the last token of a document.
        loss = losses.sum() + losses.diff()[known[1:] & known[:-1]].square().sum()
        return loss, {"loss": loss}

    return loss_of
"""


@pytest.mark.slow
@pytest.mark.parametrize("way, lora", [("SP", "null"), ("CP", "null"), ("CP", "{r: 2, target_modules: [q_proj]}")])
def test_a_loss_that_relates_tokens_needs_whole_rows(task, tmp_path, way, lora):
    """Ranks that share a row would leave out what is between their parts, in silence."""
    config, *_ = task
    how = {"script": fork(tmp_path, SMOOTH), "warm": True, "processes": 2}
    settings = "--run.max_steps", 2, "--optim.warmup_steps", 0, "--model.lora", lora
    launch(tmp_path, config, *settings, **how)
    env = {f"PARALLELISM_CONFIG_{way}_SIZE": "2"}
    shared = launch(tmp_path, config, *settings, "--run.output_dir", tmp_path / "b", expect=None, env=env, **how)
    told = f"_{way.lower()}_size 2: the losses of the parts of a row that ranks share do not add up to that of the row"
    assert re.findall("^error: .*", shared.output, re.M) == [f"error: launch: parallelism_config{told}; take FSDP2"]


def test_metrics_that_some_calls_leave_out_are_refused(task, tmp_path, monkeypatch):
    """Ranks would add up other metrics under their names."""
    config, *_ = task
    names = {"torch": torch}
    exec(SOME_ONLY, names)
    monkeypatch.setattr(train, "token_loss", names["token_loss"])
    done = run(tmp_path, config, "--batch.max_micro_batch_size", 1, expect=2)
    assert "error: token_loss: some calls return the metrics of_low, and others do not; let each call" in done.output


@pytest.mark.slow
def test_metrics_of_several_ranks(task, tmp_path):
    """Each rank may return them in another order, but all must return the same ones, in the first step, too."""
    config, *_ = task
    settings, logged = ("--batch.max_micro_batch_size", 1, "--run.max_steps", 6), []
    for processes in 1, 2:
        folder = tmp_path / str(processes)
        folder.mkdir()
        script = fork(folder, IN_ANOTHER_ORDER)
        done = launch(folder, config, *settings, processes=processes, script=script, warm=True)
        logged.append([done.logged(f"{kind}/{name}") for kind in ("train", "eval") for name in ("of_low", "of_high")])
    for one, two in zip(*logged, strict=True):
        assert len(one) and two == pytest.approx(one, rel=1e-5)
    script = fork(tmp_path, SOME_ONLY)
    one_pass, pipeline = ("--batch.global_batch_size", 2), ("--model.pipeline_ranks", 2)
    for more in one_pass, pipeline:
        words = *settings[:2], *more, "--run.output_dir", tmp_path / more[0]
        refused = launch(tmp_path, config, *words, processes=2, script=script, warm=True, expect=None)
        before, *errors = refused.output.split("error: token_loss: some calls return")
        assert refused.code and len(errors) == 1 and "Traceback" not in before


# The optimizer -------------------------------------------------------------------------------------------------------

SLOW_EMBEDDINGS = """
def build_optimizer(model, config):
    embedding = model.get_input_embeddings().weight
    others = [parameter for parameter in model.parameters() if parameter is not embedding]
    groups = [{"params": others}, {"params": [embedding], "lr": 0.1 * config.learning_rate}]
    return [torch.optim.NAdam(groups, lr=config.learning_rate)]
"""
SGD = """
def build_optimizer(model, config):
    return [torch.optim.SGD(model.parameters(), lr=config.learning_rate)]
"""


@pytest.mark.parametrize("function", [SLOW_EMBEDDINGS, SGD], ids=["two groups, not fused", "no state"])
def test_another_optimizer(task, tmp_path, monkeypatch, function):
    """Learning rates per group follow the schedule, and go on after a stop; no state at all is a checkpoint, too."""
    config, rows_of, _ = task
    names = {"torch": torch}
    exec(function, names)
    monkeypatch.setattr(train, "build_optimizer", names["build_optimizer"])

    def plain(model, optim):
        return names["build_optimizer"](model, Optim(learning_rate=optim["learning_rate"]))

    did = train_reference(config, rows_of, optimizers=plain)
    done = run(tmp_path, config, "--run.save_every", 3, "--run.keep_checkpoints", 3)
    did.check(done)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    again = run(resumed, config, "--run.resume", done.folder / "checkpoints" / "step-00000003")
    assert again.launches == [3] and difference(again.weights, did.weights) < 1e-5
    assert difference(train_reference(config, rows_of, optimizers=adamw).weights, did.weights) > 1e-3


def test_two_optimizers_of_one_weight(task, tmp_path, monkeypatch):
    """The state of one of them would be lost in a checkpoint."""
    config, *_ = task
    build = train.build_optimizer
    monkeypatch.setattr(train, "build_optimizer", lambda *given: [*build(*given), *build(*given)])
    done = run(tmp_path, config, expect=2)
    assert (
        "are in two optimizers; give each weight to one of them" in done.output
        and not done.folder.joinpath("checkpoints").exists()
    )


def test_weights_that_no_optimizer_has(task, tmp_path, monkeypatch):
    """Their gradients are those of each step alone, in the norm of all gradients, too."""
    config, *_ = task
    build, norms = train.build_optimizer, []
    for few in False, True:

        def some_of(model, config, few=few):
            [optimizer] = build(model, config)
            for group in optimizer.param_groups:
                del group["params"][few:]
            return [optimizer]

        monkeypatch.setattr(train, "build_optimizer", some_of if few else build)
        folder = tmp_path / str(few)
        folder.mkdir()
        done = run(folder, config, "--optim.learning_rate", 1e-12, "--optim.weight_decay", 0)
        norms.append(done.logged("train/grad_norm"))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


class OfParts(torch.optim.Optimizer):
    """Momentum, by default of the part of each weight that this rank has; and a count of the updates."""

    def __init__(self, weights, count=None, in_group=False, in_state=False, part_of=local_tensor):
        super().__init__(weights, {"lr": 0.1, "updates": 0})
        self.count, self.in_group, self.in_state, self.part_of = count, in_group, in_state, part_of

    @torch.no_grad()
    def step(self, closure=None):
        if self.in_state:
            self.state.setdefault("all", {})["updates"] = torch.ones(())
        for group in self.param_groups:
            group["updates"] += self.in_group
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("momentum", torch.zeros_like(self.part_of(weight))).add_(self.part_of(weight.grad))
                if self.count is not None:
                    state["updates"] = state.get("updates", self.count) + 1


@pytest.mark.parametrize(
    "options, refused",
    [
        ({"in_group": True}, "OfParts changes updates of its parameter groups, which no checkpoint keeps"),
        ({"in_state": True}, "OfParts keeps 'all' beside the state of each weight; put it into that"),
        ({"count": 0}, "OfParts keeps updates as 1; checkpoints keep plain tensors"),
        ({"count": torch.tensor(0.0)}, None),
    ],
)
def test_what_an_optimizer_keeps_is_in_checkpoints(task, tmp_path, monkeypatch, options, refused):
    """Or the run ends after its first update: one that is continued would begin anew in silence."""
    config, *_ = task
    monkeypatch.setattr(train, "build_optimizer", lambda model, config: [OfParts(model.parameters(), **options)])
    done = run(tmp_path, config, "--run.max_steps", 5, expect=2 if refused else 0)
    assert refused is None or f"error: build_optimizer: {refused}" in done.output


def test_an_optimizer_whose_state_no_checkpoint_keeps_in_a_continued_run(task, tmp_path, monkeypatch):
    """Its state is made before the checkpoint is loaded into it, and that before its first update."""
    config, *_ = task
    run(tmp_path, config, "--run.max_steps", 5)
    monkeypatch.setattr(train, "build_optimizer", lambda model, config: [OfParts(model.parameters(), count=0)])
    done = run(tmp_path, config, "--run.allow_changes", "[optim.name]", expect=2)
    assert "error: build_optimizer: OfParts keeps updates as 1; checkpoints keep plain tensors" in done.output


@pytest.fixture
def divided_weight():
    """As FSDP2 divides it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    yield weight
    dist.destroy_process_group()


def test_the_state_of_a_part_is_refused(divided_weight):
    """A checkpoint would have that of the first rank, for all of them."""
    first_update(OfParts([divided_weight], part_of=lambda whole: whole))
    with pytest.raises(UserError, match="OfParts keeps momentum of each rank, and checkpoints that of the first"):
        first_update(OfParts([divided_weight]))


@pytest.mark.parametrize(
    "kind, options, advice",
    [
        ("SGD", {"fused": True}, "take one without fused=True, another one, or"),
        ("Adagrad", {"fused": True}, "take one without fused=True, another one, or"),
        ("Adafactor", {}, "take another one, or"),
    ],
)
def test_optimizers_of_torch_that_are_not_for_divided_weights(divided_weight, kind, options, advice):
    optimizer = getattr(torch.optim, kind)([divided_weight], lr=0.1, **options)
    told = f"build_optimizer: {kind} cannot update weights that ranks divide .*; {advice} a launcher file"
    with pytest.raises(UserError, match=told):
        first_update(optimizer)


def test_an_optimizer_of_a_weight_that_no_model_has(task, tmp_path, monkeypatch):
    """Nobody would add up its gradients, or forget them, or save it."""
    config, *_ = task
    build, weight = train.build_optimizer, torch.nn.Parameter(torch.ones(2))
    monkeypatch.setattr(train, "build_optimizer", lambda *given: [*build(*given), torch.optim.SGD([weight], lr=0.1)])
    done = run(tmp_path, config, expect=2)
    assert "build_optimizer: not the model's weights, but others: 1; let" in done.output
    assert not done.folder.joinpath("checkpoints").exists()


# What a run keeps beside its weights ---------------------------------------------------------------------------------

AVERAGE = """
class AveragedAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for weight, state in self.state.items():  # Of weights that had gradients.
            state.setdefault("average", weight.clone()).lerp_(weight, 0.1)


def build_optimizer(model, config):
    matrices = train.weight_matrices(model)
    decays = [weight for weight in model.parameters() if weight in matrices]
    others = [weight for weight in model.parameters() if weight not in matrices]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    how = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "weight_decay": config.weight_decay}
    return [AveragedAdamW(groups, lr=config.learning_rate, fused=True, **how)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_average_of_the_weights(task, tmp_path, processes):
    """The example of configs/README.md: an optimizer whose state has one more tensor per weight."""
    config, rows_of, _ = task
    assert AVERAGE.strip().split("\n\n\n")[0] in (ROOT / "configs" / "README.md").read_text()
    settings = "--run.save_every", 1, "--run.keep_checkpoints", STEPS
    script = fork(tmp_path, AVERAGE)
    done = launch(tmp_path, config, *settings, processes=processes, script=script, warm=True)
    # Another launch from step 3, and what it should have: the average over the weights after each of the steps.
    resume = "--run.resume", done.folder / "checkpoints" / "step-00000003", "--run.output_dir", tmp_path / "again"
    done = launch(tmp_path, config, *settings, *resume, processes=processes, script=script, warm=True)
    seen = []
    did = train_reference(config, rows_of, optimizers=lambda model, optim: [*adamw(model, optim), Noted(model, seen)])
    average = dict(seen[0])
    for weights in seen[1:]:
        average = {name: 0.9 * average[name] + 0.1 * weight for name, weight in weights.items()}
    kept = {}
    for file in (done.folder / "checkpoints" / f"step-{STEPS:08}").glob("*.safetensors"):
        kept |= load_file(file)
    assert difference(done.weights, did.weights) < 1e-5
    assert difference({name: kept[f"optimizer.state.{name}.average"] for name in average}, average) < 1e-5


def test_an_average_of_a_weight_that_first_has_no_gradient():
    """As of a head that is not used yet. AdamW begins its moments only where it has kept nothing of the weight."""
    namespace = {"torch": torch, "train": train}
    exec(AVERAGE, namespace)
    used, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, seen = namespace["AveragedAdamW"]([used, late], lr=0.1), []
    for weights in [used], [used, late], [used, late]:
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
        seen.append(late.detach().clone())
    assert seen[0].eq(1).all() and seen[1].lt(1).all()
    torch.testing.assert_close(optimizer.state[late]["average"], 0.9 * seen[1] + 0.1 * seen[2])


def test_an_average_that_begins_in_the_middle(task, tmp_path, monkeypatch):
    """It would begin with the first weights of the model."""
    config, *_ = task
    settings = "--optim.schedule", "constant", "--optim.warmup_steps", 1
    run(tmp_path, config, *settings, "--run.max_steps", 3)
    namespace = {"torch": torch, "train": train}
    exec(AVERAGE, namespace)
    monkeypatch.setattr(train, "build_optimizer", namespace["build_optimizer"])
    done = run(tmp_path, config, *settings, expect=2)
    kept = "exp_avg, exp_avg_sq, step, and build_optimizer now keeps average, exp_avg, exp_avg_sq, step"
    assert f"step-00000003 is of another optimizer: for each weight, it has {kept}; begin a new run" in done.output
    allowed = run(tmp_path, config, *settings, "--run.allow_changes", "[optim.name]")
    assert "now keeps average" in allowed.output and allowed.launches == [0, 3]


def test_moments_that_begin_in_the_middle(task, tmp_path, monkeypatch):
    """The optimizer of before kept nothing."""
    config, *_ = task
    settings = "--optim.schedule", "constant", "--optim.warmup_steps", 1
    with monkeypatch.context() as patch:
        patch.setattr(train, "build_optimizer", lambda model, _: [torch.optim.SGD(model.parameters(), lr=0.1)])
        assert run(tmp_path, config, *settings, "--run.max_steps", 3).launches == [0]
        assert run(tmp_path, config, *settings, "--run.max_steps", 4).launches == [0, 3]
    done = run(tmp_path, config, *settings, expect=2)
    assert "for each weight, it has nothing, and build_optimizer now keeps exp_avg, exp_avg_sq, step" in done.output


def test_a_rank_without_weights_of_one_optimizer():
    """As in the middle of a pipeline, where all weights may be Muon's."""
    kept = {"wte.weight": {"exp_avg"}, "layer.weight": {"momentum_buffer"}}
    of_muon = {"model.layer.weight", "optimizer.state.layer.weight.momentum_buffer"}
    check_same_state(Path("step"), kept, of_muon, allowed=False)
    for others in {"optimizer.state.layer.weight.exp_avg_sq"}, {"optimizer.state.layer.weight.exp_avg"}, set():
        with pytest.raises(UserError, match="momentum_buffer, and build_optimizer now keeps"):
            check_same_state(Path("step"), kept, {"model.layer.weight", *others}, allowed=False)


class Noted(torch.optim.SGD):
    """Notes the weights after each step of the other optimizers."""

    def __init__(self, model, seen: list[dict[str, torch.Tensor]]):
        super().__init__(model.parameters(), lr=0.0)
        self.model, self.seen = model, seen

    def step(self, closure=None):
        self.seen.append({name: weight.detach().clone() for name, weight in self.model.named_parameters()})


LINES = """
def step_metrics(setup, progress, meter, grad_norm, metrics=train.step_metrics):
    progress.own["lines"] = progress.own.get("lines", 0) + 1
    return metrics(setup, progress, meter, grad_norm) | {"train/lines": progress.own["lines"]}
"""


@pytest.mark.slow
def test_numbers_of_a_fork(task, tmp_path):
    """What it keeps in progress.own goes on after a stop."""
    config, *_ = task
    script = fork(tmp_path, LINES)
    settings = "--optim.schedule", "constant", "--optim.warmup_steps", 1
    launch(tmp_path, config, *settings, "--run.max_steps", 3, script=script, warm=True)
    done = launch(tmp_path, config, *settings, script=script, warm=True)
    assert done.launches == [0, 3] and done.logged("train/lines") == [*range(1, STEPS + 1)]


# A setting -----------------------------------------------------------------------------------------------------------


def test_a_setting_that_older_checkpoints_do_not_know(task, tmp_path):
    """It is compared with its default; one that this script does not know, and one that it does, must be the same."""
    config, *_ = task
    done = run(tmp_path, config)

    def edit(change) -> None:
        """Change the config that the checkpoint remembers."""
        for path in done.folder.glob("checkpoints/*/manifest.json"):
            manifest = json.loads(path.read_text())
            change(manifest["config"])
            path.write_text(json.dumps(manifest))

    edit(lambda known: known.pop("optim.decay_fraction"))
    assert run(tmp_path, config, "--run.max_steps", STEPS + 1).status["step"] == STEPS + 1
    edit(lambda known: known.pop("optim.decay_fraction", None))  # The older of the two checkpoints has lost it already.
    changed = run(tmp_path, config, "--run.max_steps", STEPS + 2, "--optim.decay_fraction", 0.5, expect=2)
    assert "  optim.decay_fraction: 1.0 in the checkpoint, 0.5 now" in changed.output
    edit(lambda known: known.update({"optim.of_a_fork": 3}))
    unknown = run(tmp_path, config, "--run.max_steps", STEPS + 2, expect=2)
    assert "  optim.of_a_fork: 3 in the checkpoint, None now" in unknown.output


OWN = """class Own(Section, strict=False):
    z_weight: float = 0.0
    \"\"\"Weight of the z-loss.\"\"\"
    note: MayChange[str] = ""
    \"\"\"Changes nothing.\"\"\"
    range: tuple[int, int] = (0, 1)
    \"\"\"Changes nothing, but must stay what it is.\"\"\"
    file: Path = Path("a.txt")
    \"\"\"Changes nothing.\"\"\"


class OwnOptim(Optim):
    power: float = 1.0
    \"\"\"Of the linear decay.\"\"\"
"""


@pytest.fixture
def with_own_settings(tmp_path):
    """train.py with settings in Own, one of which is handed to the loss where the loss is handed down, and one of
    the schedule."""
    source = (ROOT / "train.py").read_text()
    for old, new in (
        (re.search(r"^class Own.*?\n\n", source, re.M | re.S)[0], f"{OWN}\n"),
        ("import Config, Optim, Section", "import Config, MayChange, Optim, Section"),
        ("    own: Own = Own()\n", "    own: Own = Own()\n    optim: OwnOptim = OwnOptim()\n"),
        ("remaining = 1 - done", "remaining = (1 - done) ** config.power"),
        ("token_loss=token_loss)", "token_loss=functools.partial(token_loss, z=config.own.z_weight))"),
        ("def token_loss(logits: torch.Tensor, targets: torch.Tensor)", "def token_loss(logits, targets, z)"),
        ("return cross_entropy.sum(), {", "return (cross_entropy + z * logits.logsumexp(-1) ** 2).sum(), {"),
    ):
        assert old in source
        source = source.replace(old, new)
    script = tmp_path / "fork.py"
    script.write_text(source)
    return {"script": script, "processes": None, "warm": True}


@pytest.mark.slow
def test_settings_of_a_fork(task, tmp_path, with_own_settings):
    """They stand in train.py, and are settings like any other: in the YAML, --help, hints, and where a run goes on."""
    config, *_ = task
    how = with_own_settings
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    other.mkdir()
    done = launch(plain, config, "--own.note", "first", **how)
    assert "note: first" in (done.folder / "config.yaml").read_text()
    assert "file: a.txt" in (done.folder / "config.yaml").read_text()
    more = "--run.max_steps", STEPS + 1
    assert launch(plain, config, *more, "--own.note", "second", **how).status["step"] == STEPS + 1
    other_values = "--own.z_weight", 0.1, "--own.range", "[0, 2]"
    refused = launch(plain, config, "--run.max_steps", STEPS + 2, *other_values, **how, expect=2).output
    assert "  own.z_weight: 0.0 in the checkpoint, 0.1 now" in refused
    assert "  own.range: [0, 1] in the checkpoint, [0, 2] now" in refused
    assert difference(launch(other, config, "--own.z_weight", 0.1, **how).weights, done.weights) > 1e-5
    linear = tmp_path / "linear"
    linear.mkdir()
    decay = "--optim.schedule", "linear", "--optim.warmup_steps", 1, "--optim.min_learning_rate_ratio", 0
    done = launch(linear, config, *decay, "--optim.power", 2, **how)
    rates = [0.005 * (1 - step / (STEPS - 1)) ** 2 for step in range(STEPS)]
    assert done.logged("train/learning_rate") == pytest.approx(rates)
    assert "did you mean own.z_weight?" in launch(other, config, "--own.z_wieght", 1, **how, expect=2).output
    helped = launch(other, config, "--help", **how).output
    assert "--own.z_weight  float, default 0.0\n      Weight of the z-loss." in helped
    assert "--optim.power  float, default 1.0\n      Of the linear decay." in helped
    planned = launch(other, config, "--plan", 8, "--perf.device_memory_gib", 80, **how).output
    assert "GiB" in planned and "is not known" not in planned


class Counted(Dataset):
    """Rows that are made on the spot: five numbers that follow one another."""

    def __init__(self, count, seed):
        self.count, self.tokens, self.order = count, 5 * count, Order(count, seed)

    def __len__(self):
        return self.count

    def read(self, row):
        ids = 10 + (int(row) + np.arange(5)) % 50
        return np.stack([ids, [*ids[1:], -100], np.arange(5)])

    def sizes(self, rows):
        return np.full(len(rows), 5), np.full(len(rows), 4)

    def attention_length(self):
        return 5.0

    def fingerprint(self):
        return f"{self.count} counted rows"


def test_rows_of_a_fork(task, tmp_path, monkeypatch):
    """All that configs/README.md lists; for the tokens that the model must know, an index, too."""
    config, *_ = task
    monkeypatch.setattr(train, "load_data", lambda data, tokenizer, seed: (Counted(100, seed), {"": Counted(9, seed)}))
    refused = run(tmp_path, config, expect=2)
    assert "the index of Counted lacks highest, lowest_id, lowest_label of the training data; give" in refused.output
    monkeypatch.setattr(Counted, "index", {"lowest_id": 10, "lowest_label": 10, "highest": 59}, raising=False)
    rows = [{"input_ids": Counted(100, 0).read(row)[0].tolist()} for row in shuffled(7, 100, STEPS * 10)]
    did = train_reference(config, lambda step: rows[step * 10 - 10 : step * 10])
    did.check(run(tmp_path, config))


IN_ORDER = """
class InOrder:
    name = "as in the files"

    def __init__(self, count):
        self.count = count

    def rows_at(self, start, count):
        return np.arange(start, start + count) % self.count


def load_data(*given, load=train.load_data):
    train_data, held_out = load(*given)
    train_data.order = InOrder(len(train_data))
    return train_data, held_out
"""


def test_an_order_of_the_rows(task, tmp_path):
    """A run goes on in the order in which it began only."""
    config, *_ = task
    rows = list(datasets.load_from_disk(config["data"]["path"]))
    script = fork(tmp_path, "import numpy as np" + IN_ORDER)
    done = launch(tmp_path, config, "--data.eval_source", "null", script=script, warm=True)
    train_reference(config, lambda step: [rows[i % len(rows)] for i in range(step * 10 - 10, step * 10)]).check(done)
    more = "--data.eval_source", "null", "--run.max_steps", STEPS + 2
    refused = run(tmp_path, config, *more, expect=2).output
    assert "order of the rows: 'as in the files' in the checkpoint, 'Feistel network of 6 rounds' now" in refused


def test_a_new_setting_counts_as_mathematics():
    """Unless it says otherwise."""

    class OptimOfFork(Optim):
        of_a_fork: float = 0.1
        and_harmless: MayChange[float] = 0.1

    class ConfigOfFork(Config):
        optim: OptimOfFork = OptimOfFork()

    changeable = functools.partial(may_change, ConfigOfFork)
    assert not changeable("optim.of_a_fork") and not changeable("optim.learning_rate")
    assert changeable("optim.and_harmless") and changeable("run.log_every")
