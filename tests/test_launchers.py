"""What the files of accelerate_configs/ start is one and the same run.

Those for GPUs run here on CPU processes, see wrapper_cpu_as_gpu.py, in float32, so that only rounding may differ.
"""

import contextlib
import json
import os
import re
import subprocess
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import transformers
from helpers import (
    ROOT,
    Done,
    check_continued,
    difference,
    free_port,
    kill_tree,
    resume_from,
    run,
    start,
    tiny_config,
    tiny_model,
)

from samerun import early
from samerun.errors import UserError
from samerun.parallel.fsdp import names_of_layers, whole_embeddings
from samerun.run.setup import check_same_layers

SCRIPT = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
FLOAT32 = "--mixed_precision", "no"
REGIONAL = "--dynamo_backend", "eager", "--dynamo_use_regional_compilation"


def start_machines(folder: Path, config: dict, *settings, processes: int) -> list[subprocess.Popen]:
    """multi_node.yaml as two machines on loopback: both have caches of their own, and machine-N/ to work in."""
    port, machines = free_port(), []
    for rank in range(2):
        home = folder / f"machine-{rank}"
        home.mkdir()
        where = "--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port
        caches = {"HF_HOME": str(home / "cache"), "HF_DATASETS_CACHE": str(home / "cache" / "datasets")}
        command = {"processes": processes, "launcher": "multi_node", "options": (*FLOAT32, *where), "script": SCRIPT}
        machines.append(start(folder, config, *settings, **command, cwd=home, env=caches))
    return machines


def finish(*processes: subprocess.Popen, fails: bool = False) -> str:
    """Wait for launchers; the output of all."""
    with ExitStack() as stack:
        for process in processes:
            stack.callback(kill_tree, process)
        output = "\n".join(process.communicate(timeout=240)[0] for process in processes)
    assert all(bool(process.returncode) == fails for process in processes), output
    return output


def launch(folder: Path, config: dict, launcher: str, *settings, processes: int = 2, options=FLOAT32, **more) -> Done:
    """`accelerate launch` of a shipped file with its GPUs replaced by CPU processes."""
    what = {"launcher": launcher, "processes": processes, "options": options, "script": SCRIPT}
    return helpers.launch(folder, config, *settings, **(what | more))


CASES = {  # Launcher file, its options for fewer processes; then how many processes do how many micro-steps.
    "DDP": ("multi_gpu", (), (2, 3)),
    "FSDP2": ("fsdp2", (), (2, 3)),
    "HSDP": ("hsdp", ("--num_machines", 1), (4, 2)),
}
VISION = {  # Gemma 3 for text and images, whose weights for images no text uses.
    "model_type": "gemma3",
    "text_config": {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}
IMMEDIATE = "--batch.accumulation", "immediate"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("data"))
    config["run"] |= {"max_steps": 15, "save_every": 5, "keep_checkpoints": 3}
    config["batch"]["max_micro_batch_size"] = 2
    return config


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
    """runs(case, *settings): the finished run of a case, or for None that of one process. Each is made once."""

    @cache
    def result(case: str | None, *settings, real: bool = False) -> Done:
        folder = tmp_path_factory.mktemp("run")
        if case is None:
            return run(folder, config, "--batch.max_micro_batch_size", 10, *settings)
        launcher, options, plan = CASES[case]
        what = {"processes": plan[0], "options": (*FLOAT32, *options)}
        done = launch(folder, config, launcher, *settings, **what, warm=not real)
        assert (done.metrics[0]["plan/num_processes"], done.metrics[0]["plan/grad_accum_steps"]) == plan
        return done

    return result


def assert_same(done: Done, one: Done, after: int = 0) -> None:
    """From the step after which it began, the run is that of one process."""
    assert done.launches == [after]
    np.testing.assert_allclose(done.losses, one.losses[after:], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), one.logged("train/grad_norm")[after:], rtol=1e-5)
    np.testing.assert_allclose(done.logged("eval/loss"), one.logged("eval/loss"), rtol=1e-6)
    assert difference(done.weights, one.weights) < 1e-5


@pytest.mark.parametrize(
    "case, real",
    [
        ("DDP", False),
        ("FSDP2", False),
        pytest.param("DDP", True, marks=pytest.mark.slow),
        pytest.param("FSDP2", True, marks=pytest.mark.slow),
        pytest.param("HSDP", True, marks=pytest.mark.slow),
    ],
)
def test_is_the_run_of_one_process(runs, case, real):
    """By the real command, too."""
    one = runs(None)
    assert 2 < (np.array(one.logged("train/grad_norm")) > 1.1).sum() < 13  # Clipping matters in some steps only.
    assert_same(runs(case, real=real), one)


CHUNKED = "--model.chunked_loss", "true"
TIED = "a tied output layer"


@pytest.mark.parametrize(
    "case, settings",
    [
        pytest.param("FSDP2", CHUNKED, marks=pytest.mark.slow),
        pytest.param("FSDP2", (*CHUNKED, TIED), marks=pytest.mark.slow),
        pytest.param("FSDP2", (*CHUNKED, *IMMEDIATE, "--model.gradient_checkpointing", "true"), marks=pytest.mark.slow),
        pytest.param("DDP", (*CHUNKED, *IMMEDIATE, TIED), marks=pytest.mark.slow),
        pytest.param("HSDP", CHUNKED, marks=pytest.mark.slow),
    ],
)
def test_chunked_loss_is_the_run_of_one_process(runs, config, tmp_path, case, settings):
    """Of 16 tokens at a time, so that a micro-batch has several chunks. The one process has all logits at once."""
    script = tmp_path / "fork.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nfrom samerun.model import loss\n"
        "loss.chunk_size = lambda *_: 16\nsys.exit(train.main())\n"
    )
    model = ()
    if TIED in settings:
        model = "--model.pretrained", str(tiny_model(tmp_path / "tied", learned_positions=True))
    launcher, options, plan = CASES[case]
    what = {"processes": plan[0], "options": (*FLOAT32, *options), "script": (SCRIPT[0], script), "warm": True}
    settings = [setting for setting in settings if setting != TIED]
    shared = "--run.max_steps", 8, *model
    assert_same(launch(tmp_path, config, launcher, *settings, *shared, **what), runs(None, *shared))


@pytest.mark.slow
def test_checkpoint_moves_between_strategies(runs):
    """From step 5 of DDP to FSDP2, and from step 10 of that to one process; averaging at once this time."""
    one = runs(None)
    moved = runs("FSDP2", *IMMEDIATE, "--run.resume", runs("DDP").folder / "checkpoints" / "step-00000005")
    assert_same(moved, one, after=5)
    checkpoint = moved.folder / "checkpoints" / "step-00000010"
    assert_same(runs(None, "--run.resume", checkpoint), one, after=10)


@pytest.mark.slow
def test_checkpoint_moves_to_hsdp(runs):
    checkpoint = runs("FSDP2").folder / "checkpoints" / "step-00000010"
    assert_same(runs("HSDP", *IMMEDIATE, "--run.resume", checkpoint), runs(None), after=10)


@pytest.mark.slow
def test_one_checkpoint_goes_through_all_strategies(runs, config, tmp_path):
    """DDP 2 -> FSDP2 4 -> tensor parallelism 2 -> sequence parallelism 2 -> context parallelism 2 -> pipeline 2 -> one
    process."""
    whole = runs(None)
    ways = [
        ("DDP", "cpu", 2, {}, ()),
        ("FSDP2", "fsdp2", 4, {}, ()),
        ("tensor", "cpu", 2, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, ()),
        ("sequence", "cpu", 2, {"PARALLELISM_CONFIG_SP_SIZE": "2"}, ()),
        ("context", "cpu", 2, {"PARALLELISM_CONFIG_CP_SIZE": "2"}, ()),
        ("pipeline", "cpu", 2, {}, ("--model.pipeline_ranks", 2)),
    ]
    settings = "--run.save_every", 2, "--run.keep_checkpoints", 8
    found = ()
    for number, (name, launcher, processes, environment, more) in enumerate(ways):
        how = {"options": FLOAT32, "script": SCRIPT} if launcher == "fsdp2" else {}
        how |= {"launcher": launcher, "processes": processes, "env": environment, "warm": True}
        folder = "--run.output_dir", tmp_path / name
        done = helpers.launch(tmp_path, config, *settings, *folder, *found, *more, **how)
        assert done.metrics[0]["plan/num_processes"] == processes
        check_continued(done, whole, 2 * number)
        found = resume_from(done, 2 * number + 2)
    check_continued(run(tmp_path, config, *found, "--run.output_dir", tmp_path / "one"), whole, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, options, script",
    [("fsdp2", (*FLOAT32, "--fsdp_activation_checkpointing", "true"), SCRIPT), ("cpu", REGIONAL, SCRIPT[1:])],
)
def test_layers_in_wrappers_continue(runs, config, tmp_path, launcher, options, script):
    """The launcher's options put each layer into another module, and that one's name into the names of the weights.
    Their optimizer state is found again."""
    found = resume_from(runs("DDP"), 5)
    how = {"launcher": launcher, "options": options, "script": script, "processes": 2, "warm": True}
    check_continued(helpers.launch(tmp_path, config, *found, **how), runs(None), 5)


@pytest.mark.slow
def test_two_machines(runs, config, tmp_path):
    output = finish(*start_machines(tmp_path, config, processes=4))
    assert output.count("nearest_even") == 1  # Only the main process of the first machine speaks.
    assert_same(Done(0, output, tmp_path / "run"), runs(None))


def when_training(folder: Path, machines: list[subprocess.Popen]) -> Done:
    done = Done(0, "", folder / "run")
    while True:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # Not there yet, or half a line.
            if done.losses:
                return done
        assert all(machine.poll() is None for machine in machines)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [subprocess.Popen.terminate, subprocess.Popen.kill])
def test_a_machine_whose_launcher_is_stopped(config, tmp_path, stop):
    """All machines end at once. By itself, the other launcher would wait 5 minutes for this one, and hold the port."""
    machines = start_machines(tmp_path, config, "--run.max_steps", 100_000, processes=2)
    done = when_training(tmp_path, machines)
    stop(machines[1])
    began = time.monotonic()
    output = finish(*machines, fails=True)
    assert time.monotonic() - began < 150 and done.status["status"] == "stopped", output


@pytest.mark.slow
@pytest.mark.parametrize("lost, rank", [(0, 0), (1, 2)])
def test_a_machine_that_is_lost(config, tmp_path, lost, rank):
    """Of two ranks each. It is named, also in status.json if the main process goes on, which no other rank silences."""
    endless = "--run.max_steps", 100_000, "--run.timeout_minutes", 0.2
    machines = start_machines(tmp_path, config, *endless, processes=4)
    done = when_training(tmp_path, machines)
    kill_tree(machines[lost])
    output = finish(*machines, fails=True)
    said = re.findall("^error: .*", output, re.M)
    assert said and all(line.startswith(f"error: no answer from rank {rank}") for line in said), output
    if lost:
        assert len(said) == 1 and done.status["status"] == "failed"
        assert done.status["reason"].startswith("no answer from rank 2 on ")


@pytest.mark.slow
def test_two_machines_without_a_common_run_folder(config, tmp_path):
    """Each would keep its half of every checkpoint, which is noticed too late if it is not noticed now."""
    output = finish(*start_machines(tmp_path, config, "--run.output_dir", "here", processes=2), fails=True)
    assert "error: run.output_dir here" in output and "nearest_even" not in output


@pytest.mark.parametrize(
    "setting, options, message",
    [
        (("--optim.name", "muon"), (), "optim.name muon: it needs whole matrices; use adamw, or DDP"),
        (
            ("--optim.name", "adamw_8bit"),
            (),
            "optim.name adamw_8bit: bitsandbytes has it for whole weights only; use adamw, or DDP",
        ),
        (
            (),
            ("--fsdp_cpu_ram_efficient_loading", "true"),  # With which Accelerate cannot take the buffers of DeepSeek.
            "fsdp_cpu_ram_efficient_loading: each rank reads only its part anyway; set it to false",
        ),
    ],
    ids=["muon", "8 bits", "loading"],
)
def test_refused_under_fsdp2(config, tmp_path, setting, options, message):
    how = {"options": (*FLOAT32, *options), "expect": None, "warm": True}
    output = launch(tmp_path, config, "fsdp2", *setting, **how).output
    assert re.findall("^error: .*", output, re.M) == [f"error: launch: FSDP2: cannot be combined with {message}"]


def test_fsdp1_is_refused(config, tmp_path):
    """As any strategy of Accelerate that is not here. It would begin to train."""
    how = {"options": (*FLOAT32, "--fsdp_version", 1, "--fsdp_sync_module_states", "false"), "expect": 2, "warm": True}
    output = launch(tmp_path, config, "fsdp2", **how).output
    message = "error: launch: FSDP is not supported; take another file of accelerate_configs/"
    assert re.findall("^error: .*", output, re.M) == [message]


@pytest.mark.parametrize("launcher", ["multi_gpu", "fsdp2"])
def test_layers_that_are_left_out_by_chance_are_refused(tmp_path, launcher):
    """Ranks that leave out other layers would wait for each other forever."""
    config = tiny_config(tmp_path)
    shape = {"vocab_size": 384, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 2}
    shape |= {"model_type": "opt", "num_hidden_layers": 2, "max_position_embeddings": 64, "dropout": 0.0}
    config["model"] = {"architecture": shape | {"layerdrop": 0.5}}
    output = launch(tmp_path, config, launcher, expect=2, warm=True).output
    assert "error: model: layerdrop 0.5: ranks would leave out different layers" in output


@pytest.mark.parametrize("layerdrop, processes", [(0.0, 2), (0.5, 1)])
def test_layers_that_all_ranks_compute_are_not_refused(layerdrop, processes):
    """Nor those that one process alone leaves out."""
    found = transformers.OPTConfig(hidden_size=8, word_embed_proj_dim=8, ffn_dim=8, num_attention_heads=1, vocab_size=9)
    found.layerdrop = layerdrop
    parallel = SimpleNamespace(layout=SimpleNamespace(processes=processes))
    check_same_layers(SimpleNamespace(model=transformers.OPTForCausalLM(found), parallel=parallel))


@pytest.mark.slow
def test_weights_that_no_text_uses(tmp_path):
    """DDP waits for their gradients. FSDP2 gives the run of one process, which leaves them as they are."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 3, 0
    config["model"] = {"architecture": VISION}
    done = launch(tmp_path, config, "multi_gpu", "--run.output_dir", tmp_path / "ddp", expect=1)
    assert "error: model: some weights got no gradient" in done.output
    assert (
        "freeze them, or take accelerate_configs/fsdp2.yaml" in done.output
        and "Traceback" not in done.output.partition("error: ")[0]
    )
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    assert difference(launch(tmp_path, config, "fsdp2").weights, one.weights) < 1e-5


@pytest.mark.slow
def test_an_embedding_that_is_to_stay_with_others(tmp_path):
    """As in a BERT. Its output layer has the weight of the embedding, and a bias that is another module's, too."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 3, 0
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config["model"] = {"architecture": {"model_type": "bert", "is_decoder": True, **size}}
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    assert_same(launch(tmp_path, config, "fsdp2"), one)


T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    "model_type, settings, is_hidden",
    [
        ("t5", {"tie_word_embeddings": True}, True),
        ("t5", {"tie_word_embeddings": False}, True),
        ("llama", {"tie_word_embeddings": True}, False),
        ("llama", {"tie_word_embeddings": False}, False),
    ],
)
def test_an_embedding_that_an_encoder_and_a_decoder_share(model_type, settings, is_hidden):
    """Accelerate would put it into a unit of its own, and torch refuses a weight of two units."""
    small = (
        T5
        if model_type == "t5"
        else {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    kind = {"t5": transformers.AutoModelForSeq2SeqLM, "llama": transformers.AutoModelForCausalLM}[model_type]
    model = kind.from_config(transformers.AutoConfig.for_model(model_type, **small, **settings))
    with whole_embeddings(model):
        assert (model.get_input_embeddings() is None) == is_hidden


def test_a_model_without_the_layers_that_are_to_be_sharded(tmp_path):
    """FSDP2 would gather all of it at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    model._no_split_modules = ["OtherLayer"]
    with pytest.raises(UserError, match="launch: FSDP2 finds no layers called OtherLayer; name them in"):
        names_of_layers(model)


NOTEBOOK = """
import gc, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
import train
from accelerate import notebook_launcher

gc.disable()
stores = [dist.TCPStore("127.0.0.1", {ports[0]}, 1, True)]  # Garbage in a cycle, as a launch that failed leaves it.
stores.append(stores)
del stores
notebook_launcher(train.main, (sys.argv[1:],), num_processes=2, mixed_precision="bf16", use_port="{ports[1]}")
"""


def test_a_notebook_launches_two_processes(tmp_path):
    """They are forks, and Accelerate tells them the precision by a name that it does not read."""
    notebook = tmp_path / "notebook.py"
    notebook.write_text(NOTEBOOK.format(root=str(ROOT), ports=[free_port(), free_port()]))
    short = "--run.max_steps", 2, "--optim.warmup_steps", 0
    done = helpers.launch(tmp_path, tiny_config(tmp_path), *short, processes=None, script=notebook)
    assert done.logged("plan/precision") == ["bf16"] and done.logged("plan/num_processes") == [2]
    assert done.status["status"] == "finished"


def test_a_command_in_a_notebook(tmp_path):
    """It inherits the name of the notebook's module for matplotlib, which a virtual environment lacks."""
    short, notebook = ("--run.max_steps", 2, "--optim.warmup_steps", 0), {"MPLBACKEND": "module://of_a_notebook"}
    done = helpers.launch(tmp_path, tiny_config(tmp_path), *short, processes=None, env=notebook)
    assert (done.folder / "curves.png").exists(), done.output


def test_a_notebook_keeps_its_backend(monkeypatch):
    """By which it shows pictures, when it imports train.py."""
    monkeypatch.setenv("MPLBACKEND", "module://of_a_notebook")
    early.begin(is_script=False)
    assert os.environ["MPLBACKEND"] == "module://of_a_notebook"
