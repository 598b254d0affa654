"""What only a GPU runs, here with functions that stand in for those of a GPU.

tests/README.md lists every such place in train.py, and what proves it.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train

CUDA = torch.device("cuda")


def test_rows_are_copied_in_the_background(monkeypatch):
    """From pinned memory: otherwise CUDA copies them while the host waits."""
    calls = []

    def pin_memory(tensor):
        calls.append("pin_memory")
        return tensor

    def to(tensor, device, non_blocking=False):
        calls.append((device.type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    row = np.array([[5, 6, 7], [6, 7, -100], [0, 1, 2]])
    batch = train.collate([row], CUDA)
    assert calls == ["pin_memory", ("cuda", True)]
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7]],
        "targets": [[6, 7, -100]],
    }


@pytest.mark.parametrize("device, pinned", [("cuda", True), ("cpu", False)])
def test_a_checkpoint_is_copied_to_pinned_memory(tmp_path, monkeypatch, device, pinned):
    chosen = []
    monkeypatch.setattr(train.dcp.staging, "DefaultStager", chosen.append)
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=1)
    train.Saver(SimpleNamespace(accelerator=accelerator, folder=SimpleNamespace(checkpoints=tmp_path)), {}, 0)
    [options] = chosen
    assert (options.use_pinned_memory, options.use_non_blocking_copy) == (pinned, pinned)
    assert not options.use_async_staging  # The weights may change as soon as stage() returns.


def test_events_take_the_time_of_a_gpu(monkeypatch):
    recorded = []
    stream = SimpleNamespace(record_event=lambda event: recorded.append(event) or event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: ("event", enable_timing))
    meter = train.Meter()
    meter.watch(torch.device("cpu"))
    assert meter.event is None
    meter.watch(CUDA)
    assert meter.event() == ("event", True) and recorded == [("event", True)]


def test_peak_memory_is_that_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: {CUDA: 5}[device])
    assert train.peak_memory(CUDA) == 5 < train.peak_memory(torch.device("cpu"))


def test_seeds_are_the_same_with_and_without_a_gpu(monkeypatch):
    numbers = []
    for there_is_one in True, False:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda answer=there_is_one: answer)
        train.reseed(7)
        numbers.append(torch.rand(3).tolist())
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("there_is_one", [True, False])
def test_a_gpu_is_used_if_there_is_one(tmp_path, monkeypatch, there_is_one):
    class Asked(Exception):
        pass

    def accelerator(cpu, **_):
        raise Asked(cpu)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there_is_one)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(train, "Accelerator", accelerator)
    config = train.Config.model_construct(run=train.Run(output_dir=str(tmp_path)), batch=train.Batch())
    with pytest.raises(train.UserError, match=f"Asked: {not there_is_one}"):
        train.start_accelerator(config)
