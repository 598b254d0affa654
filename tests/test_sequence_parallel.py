"""Sequence parallelism is the run of a plain loop, too: ranks that share rows, under DDP and FSDP2."""

from itertools import accumulate
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import ROOT, VOCABULARY, difference, launch, make_rows, run, tiny_config, tiny_model, write_rows
from reference import shuffled, train_reference

import train

AS_GPU = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"


def share(size: int) -> dict:
    """For a launcher file without a parallelism section: what Accelerate makes of one."""
    return {"env": {"PARALLELISM_CONFIG_SP_SIZE": str(size)}, "warm": True}


def by_file(size: int, *more) -> dict:
    """The launcher file that ships, with its GPUs replaced by CPU processes."""
    options = "--mixed_precision", "no", "--parallelism_config_sp_size", size, *more
    return {"launcher": "sequence_parallel", "options": options, "script": AS_GPU, "warm": True}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all cases, ragged rows of an odd number of tokens, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("sequence-parallel")
    config = tiny_config(folder)
    config["run"] |= {"eval_every": 15, "save_every": 10, "keep_checkpoints": 3}
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    order = shuffled(config["run"]["seed"], len(rows), 300)
    did = train_reference(config, lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]], held_out)
    assert 5 < sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms) < 25
    tokens = [sum(len(rows[i]["input_ids"]) for i in order[: 10 * step]) for step in range(1, 31)]
    assert any(count % 4 for count in tokens)  # Not all micro-batches are divisible without more.
    return config, did, tokens


# Processes, how they are launched, settings; then how many groups share the 10 rows of a step, and in how many passes.
IMMEDIATE = "--batch.sync_each_micro_step", "true"
CASES = {
    "2 share": (2, share(2), (), {"data_parallel_size": 1, "micro_batch_size": 3, "grad_accum_steps": 4}),
    "4 share 2 key heads": (4, share(4), (), {"data_parallel_size": 1, "micro_batch_size": 3, "grad_accum_steps": 4}),
    "DDP": (4, share(2), IMMEDIATE, {"data_parallel_size": 2, "micro_batch_size": 3, "grad_accum_steps": 2}),
    "FSDP2": (4, by_file(2), (), {"data_parallel_size": 2, "micro_batch_size": 3, "grad_accum_steps": 2}),
    "FSDP2, synchronized at once": (2, by_file(2), IMMEDIATE, {"data_parallel_size": 1, "grad_accum_steps": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, tmp_path, case):
    """With clipping, uneven batches and evaluation. Every token is counted once."""
    config, did, tokens = truth
    processes, how, settings, plan = CASES[case]
    done = launch(tmp_path, config, "--batch.max_micro_batch_size", 3, *settings, processes=processes, **how)
    assert {name: done.metrics[0][f"plan/{name}"] for name in plan} == plan
    assert done.metrics[0]["plan/num_processes"] == processes
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.logged("train/tokens")[:30] == tokens
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    assert "UserWarning" not in done.output and "FutureWarning" not in done.output
