"""What only a GPU runs, here with functions that stand in for those of a GPU.

tests/README.md lists every such place in train.py, and what proves it.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samerun.config import Batch, Config, Model, Run
from samerun.data.batches import Documents, collate
from samerun.errors import UserError
from samerun.model.attention import (
    attention_by_document,
    attention_of_rows,
    document_attention,
    flash_attention,
    has_cudnn,
    has_flash,
    piece_of,
)
from samerun.model.checks import states_of_chance
from samerun.parallel.mesh import Parallelism
from samerun.run.agreement import launcher_settings
from samerun.run.launch import reseed, say_if_emulated, start_accelerator
from samerun.run.meter import Meter, peak_memory
from samerun.run.saver import Saver

CUDA = torch.device("cuda")


def test_the_norm_of_no_gradients():
    """Of weights that got none. It is where the other numbers of a step are."""
    parallel = SimpleNamespace(layout=SimpleNamespace(is_sharded=False, is_divided=False, has_buckets=True))
    parallel.accelerator = SimpleNamespace(device=torch.device("meta"))
    weight = torch.nn.Parameter(torch.ones(2))
    norm = Parallelism.norm_of_gradients(parallel, [weight])
    assert (norm.device.type, norm.dtype, norm.shape) == ("meta", torch.float32, ())
    Parallelism.forget_gradients(parallel, [weight])


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
    batch = collate([row], CUDA, joined=False)
    assert calls == ["pin_memory", ("cuda", True)]
    assert (batch.input_ids.tolist(), batch.targets.tolist()) == ([[5, 6, 7]], [[6, 7, -100]])
    assert batch.position_ids is batch.documents is None
    calls.clear()
    batch = collate([row], CUDA, joined=True)
    assert calls == ["pin_memory", ("cuda", True)] * 2  # Its tokens, and where its documents end.
    assert batch.documents.lengths == (3,) and batch.documents.ends.tolist() == [0, 3]


@pytest.mark.parametrize("device, kind", [(CUDA, "cuda"), (None, "cpu")])
def test_ranks_compare_their_kind_of_device(monkeypatch, device, kind):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert launcher_settings()["launcher: device"] == kind


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What torch says of torch.nn.attention.varlen.varlen_attn, by the formula of attention.

    query [tokens, heads, head size], key and value with fewer heads only if enable_gqa, all of 16 bits; ends as int32;
    window_size: how many tokens before and after each one it sees, -1 for all of them. With more keys than queries, the
    last query is beside the last key: so FlashAttention says since 2.1, whose kernel it is ("bottom right").
    """
    assert {states.dtype for states in (query, key, value)} == {torch.bfloat16}
    for ends, longest, states in (cu_seq_q, max_q, query), (cu_seq_k, max_k, key), (cu_seq_k, max_k, value):
        assert ends.dtype == torch.int32 and longest == ends.diff().max() and ends[-1] == len(states)
    assert enable_gqa or query.shape[1] == key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    before, after = window_size
    spans = (cu_seq_q, query), (cu_seq_k, key), (cu_seq_k, value)
    outputs = []
    for q, k, v in zip(*(states.split(ends.diff().tolist()) for ends, states in spans)):
        q, k, v = (states.transpose(0, 1) for states in (q, k, v))
        distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden = distance < -after
        if before >= 0:
            hidden |= distance > before
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).bfloat16()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_flash_attention_of_documents(monkeypatch, window, key_heads, scaling):
    """The kernel's stand-in gets what it needs. To rounding it is the same as one document after the other."""
    monkeypatch.setattr("samerun.model.attention.varlen_attn", varlen_attn)
    torch.manual_seed(0)
    lengths = (5, 1, 6, 6)
    documents = Documents(lengths, 6, torch.tensor([0, 5, 6, 12, 18], dtype=torch.int32))
    query = torch.randn(1, 4, 18, 8)
    key, value = torch.randn(2, 1, key_heads, 18, 8).unbind()
    options = {"scaling": scaling, "sliding_window": window}
    module = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True)
    expected = attention_by_document(module, query, key, value, documents, documents, **options)
    found = flash_attention(*(states.bfloat16() for states in (query, key, value)), documents, documents, **options)
    assert found.shape == expected.shape == (1, 18, 4, 8)
    assert torch.allclose(found.float(), expected, rtol=0, atol=0.05)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)  # Rotary embeddings are in float32 then.
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    under_autocast = flash_attention(query, key, value.bfloat16(), documents, documents, **options)
    assert torch.equal(under_autocast, found)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("begin, end", [(0, 9), (3, 8), (12, 18)])
def test_flash_attention_of_a_piece_of_a_row(monkeypatch, begin, end, window):
    """With context parallelism. To rounding it is what the whole row has there."""
    monkeypatch.setattr("samerun.model.attention.varlen_attn", varlen_attn)
    torch.manual_seed(0)
    documents = Documents((5, 1, 12), 12, torch.tensor([0, 5, 6, 18], dtype=torch.int32))
    query, (key, value) = torch.randn(1, 4, 18, 8).bfloat16(), torch.randn(2, 1, 2, 18, 8).bfloat16()
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    options = {"sliding_window": window}
    row = attention_by_document(module, query, key, value, documents, documents, **options)
    piece = piece_of(documents, begin, end)
    queries, seen = query[:, :, begin:end], [states[:, :, piece.begin : end] for states in (key, value)]
    found = flash_attention(queries, *seen, piece.own, piece.seen, **options)
    assert torch.allclose(found, row[:, begin:end], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "capability, dtype, head, value_head, dropout, flash",
    [
        ((9, 0), torch.bfloat16, 128, 128, 0.0, True),
        ((8, 0), torch.float16, 256, 256, 0.0, True),
        ((7, 5), torch.float16, 128, 128, 0.0, False),  # Turing
        ((9, 0), torch.float32, 128, 128, 0.0, False),
        ((9, 0), torch.bfloat16, 512, 512, 0.0, False),
        ((9, 0), torch.bfloat16, 100, 100, 0.0, False),
        ((9, 0), torch.bfloat16, 192, 128, 0.0, False),  # DeepSeek's latent attention
        ((9, 0), torch.bfloat16, 128, 128, 0.1, False),
    ],
)
def test_what_flash_attention_takes(monkeypatch, capability, dtype, head, value_head, dropout, flash):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(is_cuda=True, device=CUDA, shape=(1, 4, 8, head))
    value = SimpleNamespace(dtype=dtype, shape=(1, 4, 8, value_head))
    documents = SimpleNamespace(plans_flash=False)
    assert has_flash(query, value, documents, dropout=dropout, scaling=None, sliding_window=4) == flash


@pytest.mark.parametrize(
    "capability, head, lengths, window, cudnn",
    [
        ((9, 0), 128, (256, 256), None, True),
        ((10, 0), 64, (256,), 256, True),
        ((8, 0), 128, (256, 256), None, False),  # Ampere
        ((9, 0), 256, (256, 256), None, False),
        ((9, 0), 128, (256, 128), None, False),
        ((9, 0), 64, (64, 64), 64, True),
        ((9, 0), 128, (200, 200), None, False),  # It would be one of very many lengths.
        ((9, 0), 128, (256, 256), 255, False),
    ],
)
def test_what_cudnn_takes(monkeypatch, capability, head, lengths, window, cudnn):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows = [np.array([np.arange(length), np.arange(length), np.arange(length)]) for length in lengths]
    documents = collate(rows, torch.device("cpu"), joined=True).documents
    query = SimpleNamespace(is_cuda=True, device=CUDA, shape=(1, 4, sum(lengths), head))
    assert has_cudnn(query, documents, sliding_window=window, scaling=None) == cudnn


def by_document(module, states, documents, **options):
    return attention_by_document(module, *states, documents, documents, **options)


def as_on_a_cpu(module, states, documents, **options):
    return document_attention(module, *states, None, documents, **options)[0]


def by_flash(module, states, documents, **options):
    states = (one.bfloat16() for one in states)
    return flash_attention(*states, documents, documents, **options).float()


def by_cudnn(module, states, documents, **options):
    """A CPU takes its flash attention."""
    return attention_of_rows(*states, documents, **options)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("way", [by_document, as_on_a_cpu, by_flash, by_cudnn])
@pytest.mark.parametrize("are_joined", [True, False])
def test_attention_of_rows(monkeypatch, are_joined, way, key_heads, scaling, window):
    """Documents of one length, joined or each in a row of its own: each is as if alone."""
    window = None if way is by_cudnn else window  # has_cudnn() leaves windows to the others.
    monkeypatch.setattr("samerun.model.attention.varlen_attn", varlen_attn)
    torch.manual_seed(0)
    documents = Documents((6, 6, 6), 6, torch.tensor([0, 6, 12, 18], dtype=torch.int32), are_rows=True)
    alone = Documents((6,), 6, torch.tensor([0, 6], dtype=torch.int32))
    states = [torch.randn(3, 6, heads, 8).transpose(1, 2) for heads in (4, key_heads, key_heads)]
    module = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True)
    options = {"scaling": scaling, "sliding_window": window}
    each = [by_document(module, [one[row : row + 1] for one in states], alone, **options) for row in range(3)]
    if are_joined:
        states = [one.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for one in states]
    found = way(module, states, documents, **options)
    expected = torch.cat(each, dim=1 if are_joined else 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if way is by_flash else 1e-6)


@pytest.mark.parametrize("device, pinned", [("cuda", True), ("cpu", False)])
def test_a_checkpoint_is_copied_to_pinned_memory(tmp_path, monkeypatch, device, pinned):
    chosen = []
    monkeypatch.setattr("samerun.run.saver.StateDictStager", lambda pin_memory: chosen.append(pin_memory))
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=1)
    config = SimpleNamespace(run=SimpleNamespace(after_save=None, hub=None))
    folder = SimpleNamespace(checkpoints=tmp_path)
    Saver(SimpleNamespace(accelerator=accelerator, folder=folder, config=config), {}, None)
    assert chosen == [pinned]


def test_events_take_the_time_of_a_gpu(monkeypatch):
    recorded = []
    stream = SimpleNamespace(record_event=lambda event: recorded.append(event) or event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: ("event", enable_timing))
    meter = Meter()
    meter.watch(torch.device("cpu"))
    assert meter.event is None
    meter.watch(CUDA)
    assert meter.event() == ("event", True) and recorded == [("event", True)]


def test_peak_memory_is_that_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: {CUDA: 5}[device])
    assert peak_memory(CUDA) == 5 < peak_memory(torch.device("cpu"))


def test_seeds_are_the_same_with_and_without_a_gpu(monkeypatch):
    numbers = []
    for there_is_one in True, False:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda answer=there_is_one: answer)
        reseed(7)
        numbers.append(torch.rand(3).tolist())
    assert numbers[0] == numbers[1]


def test_chance_on_a_gpu_is_seen(monkeypatch):
    numbers = torch.zeros(2)
    module = SimpleNamespace(get_rng_state=numbers.clone)
    monkeypatch.setattr(torch, "get_device_module", lambda device: {CUDA: module}[device])
    before = states_of_chance(CUDA)
    assert states_of_chance(CUDA) == before
    numbers += 1
    assert states_of_chance(CUDA) != before


@pytest.mark.parametrize("there_is_one", [True, False])
def test_a_gpu_is_used_if_there_is_one(tmp_path, monkeypatch, there_is_one):
    class Asked(Exception):
        pass

    def accelerator(cpu, **_):
        raise Asked(cpu)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there_is_one)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr("samerun.run.launch.Accelerator", accelerator)
    config = Config.model_construct(run=Run(output_dir=str(tmp_path)), batch=Batch())
    with pytest.raises(UserError, match=f"Asked: {not there_is_one}"):
        start_accelerator(config)


@pytest.mark.parametrize(
    "device, precision, has_units, is_said",
    [
        ("cuda", "bf16", False, True),
        ("cuda", "bf16", True, False),
        ("cuda", "fp16", False, False),
        ("cpu", "bf16", False, False),
    ],
)
def test_a_gpu_that_only_emulates_bf16(monkeypatch, capsys, device, precision, has_units, is_said):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_units)
    say_if_emulated(SimpleNamespace(mixed_precision=precision, device=torch.device(device)))
    assert ("This GPU has no units for bf16" in capsys.readouterr().out) == is_said


def test_processes_for_which_accelerate_makes_no_group(tmp_path, monkeypatch):
    """As without LOCAL_RANK, where there are GPUs."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("samerun.run.launch.Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    config = Config.model_construct(model=Model(pretrained="any"), run=Run(output_dir=str(tmp_path)), batch=Batch())
    with pytest.raises(UserError, match="launch: the 2 processes do not see each other; use a file of accelerate_conf"):
        start_accelerator(config)
