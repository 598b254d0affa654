"""What a device holds: weights, optimizer, and activations.

For the activations, a pass through a few layers of the model is traced: torch runs it on tensors without storage, and
tells how large they would be. The layout says among how many ranks the model is divided.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from samerun.config import Config, Model
from samerun.data.batches import collate
from samerun.data.rows import longest_row
from samerun.errors import require
from samerun.model.architecture import number_of_experts
from samerun.model.build import outlined_model, vocabulary_size
from samerun.model.loss import joins_documents, wants_chunks
from samerun.model.small import with_layers
from samerun.optim import hidden_matrices
from samerun.parallel.fsdp import layers_of
from samerun.parallel.layout import Layout, check_layers_and_heads
from samerun.parallel.mesh import check_divisible
from samerun.parallel.rows import part_of_row
from samerun.preflight.planned_launch import PlannedLaunch


class LiveMemory(TorchDispatchMode):
    """Adds up the bytes of the tensors that a computation makes, as long as they live. `tensors` are not counted.

    In `others` are those of weights that it reads and that are not among them: of a teacher, which the loss asks.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], mode: torch._subclasses.FakeTensorMode):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.mode, self.fakes = mode, []
        self.now = self.peak = self.others = 0

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.nn.Parameter) and tensor.untyped_storage()._cdata not in self.known:
                self.fakes.append(self.mode.from_tensor(tensor))  # What is computed with has a storage of its own.
                self.known |= {one.untyped_storage()._cdata for one in (tensor, self.fakes[-1])}
                self.others += tensor.untyped_storage().nbytes()
        if function is torch.ops.aten._grouped_mm.default:
            result = grouped_mm_without_storage(*args, **(kwargs or {}))
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.add(size)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def take_peak(self) -> int:
        """The most bytes at a time since the last call."""
        peak, self.peak = self.peak, self.now
        return peak


def grouped_mm_without_storage(left: torch.Tensor, right: torch.Tensor, *more, **options) -> torch.Tensor:
    """What multiplies by experts. Without storage, torch knows it for bf16 only."""
    product = torch.ops.aten._grouped_mm.default(left.bfloat16(), right.bfloat16(), *more, **options)
    return product.to(left.dtype)


@dataclass(frozen=True)
class PassMemory:
    """Bytes that one forward and backward pass holds, beyond weights and older gradients."""

    saved: float  # What waits for the backward pass after the last layer.
    layers: float  # The most that is held at a time, while the loss is not computed,
    head: float  # and while it is: from the end of the layers to the gradient of what they have returned.
    others: float = 0  # Weights of other models. Each rank has them whole.

    def peak(self) -> float:
        return max(self.layers, self.head)

    def extended(self, other: "PassMemory", times: float) -> "PassMemory":
        """This pass and so many times what another one holds beyond it."""
        return PassMemory(*(mine + (more - mine) * times for mine, more in zip(astuple(self), astuple(other))))


def model_without_storage(config: Model, found: transformers.PreTrainedConfig, layers: int) -> torch.nn.Module:
    whole, found = found.get_text_config(), with_layers(found, layers)
    text, left_out = found.get_text_config(), whole.num_hidden_layers - layers
    # The first layers of a mixture may be without experts. They are left out before the others, which are larger.
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = max(0, text.first_k_dense_replace - left_out)
    if getattr(text, "mlp_layer_types", None):
        text.mlp_layer_types = whole.mlp_layer_types[left_out:]
    with torch.device("meta"):
        return outlined_model(config.model_copy(update={"pretrained": None}), found, 0, seed=0).train()


class SendingNothing:
    """RowRanks for a rank that traces its part alone: what it gets from others is as large as what it sends."""

    def __init__(self, count: int):
        self.count = count

    def size(self) -> int:
        return self.count

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.clone()


def trace_pass(config: Config, model: torch.nn.Module, launch: PlannedLaunch, rank: int) -> PassMemory:
    """Trace a pass of the largest micro-batch, or of what the rank has of it if ranks share rows."""
    in_16_bits = launch.precision in ("bf16", "fp16")  # Traced in bf16: fp16 takes as much.
    chunked = wants_chunks(config.model, vocabulary_size(model))
    joined = joins_documents(model)
    rows = [longest_row(config.data, joined)] * launch.plan.micro_batch_size
    batch = collate(rows, torch.device("cpu"), joined)
    if launch.layout.row_ranks > 1:
        batch = part_of_row(batch, launch.layout, rank, SendingNothing(launch.layout.row_ranks))
    if joined and in_16_bits:  # On a GPU, they go with flash attention, which holds less than torch's other ones.
        batch = replace(batch, documents=replace(batch.documents, plans_flash=True))
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    if launch.is_sharded and in_16_bits:  # FSDP2 gathers in these. Autocast keeps copies instead.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    with fake:
        model.to_empty(device="cpu")
        live = LiveMemory([*model.parameters(), *model.buffers()], fake)
        saved, in_layers, in_head = [], [], []

        def enter_head(module: torch.nn.Module, args: tuple, outputs: transformers.utils.ModelOutput) -> None:
            saved.append(live.now)
            in_layers.append(live.take_peak())
            outputs[0].register_hook(lambda gradient: in_head.append(live.take_peak()))

        def keep_share(parameter: torch.nn.Parameter) -> None:
            parameter.grad = None
            live.add(parameter.numel() * 4 * launch.kept_share)

        model.get_decoder().register_forward_hook(enter_head)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(keep_share)
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=in_16_bits):
                loss, _ = launch.loss_of(model, batch, chunked=chunked)
            loss.backward()
        in_layers.append(live.take_peak())
    return PassMemory(saved[0], max(in_layers), max(in_head), live.others)


TRACED: dict[tuple, PassMemory] = {}  # What traced() has found before.


def traced(
    config: Config, found: transformers.PreTrainedConfig, layers: int, launch: PlannedLaunch, rank: int
) -> PassMemory:
    """A pass through so many layers. Those beyond the fourth are taken to hold as much as the third and fourth do."""
    few, many = min(layers, 2), min(layers, 4)
    key = (
        found.to_json_string(),
        config.model_dump_json(),
        launch.plan.micro_batch_size,
        layers,
        launch.kept_share,
        launch.precision,
        launch.is_sharded,
        rank,
    )
    if key not in TRACED:
        passes = {}
        for number in {few, many}:
            model = model_without_storage(config.model, found, number)
            passes[number] = trace_pass(config, model, launch, rank)
        times = (layers - few) / (many - few) if many > few else 0
        TRACED[key] = passes[few].extended(passes[many], times)
    return TRACED[key]


def heads_divided(found: transformers.PreTrainedConfig, ranks: int) -> transformers.PreTrainedConfig:
    """The model whose layers are what one of the ranks has of them, with tensor parallelism."""
    found = copy.deepcopy(found)
    text = found.get_text_config()
    kind = text.model_type
    require(not number_of_experts(text), f"that of a {kind}'s experts under tensor parallelism is not calculated")
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in "num_attention_heads", "num_key_value_heads", "intermediate_size":
        setattr(text, name, math.ceil(getattr(text, name) / ranks))
    return found


def experts_divided(
    found: transformers.PreTrainedConfig, ranks: int, computes: bool = False
) -> transformers.PreTrainedConfig:
    """The model with as many experts as one of the ranks has. To compute, it needs at least those that see a token.

    Its router is smaller, too. That is next to nothing.
    """
    found = copy.deepcopy(found)
    text = found.get_text_config()
    if getattr(text, "n_group", None):  # DeepSeek-V3 chooses among groups of experts first, which must be even.
        text.n_group = text.topk_group = 1
    named = number_of_experts(text)
    require(named, f"the config of a {text.model_type} names no number of experts that ranks could divide")
    name, count = named
    require(count % ranks == 0, f"{ranks} ranks cannot evenly divide {count} experts of a {text.model_type}")
    least = text.num_experts_per_tok if computes else 1
    setattr(text, name, max(count // ranks, least))
    return found


@dataclass(frozen=True)
class OwnPart:
    """What a rank has of a model before FSDP2 shards it: its layers, and its part of each matrix."""

    found: transformers.PreTrainedConfig  # Of the model that is as large as this part,
    layers: int  # but for these, of which it has fewer,
    model: torch.nn.Module  # and that model, without storage.
    absent: float  # How many numbers of the model this rank does not have.
    trained: float  # How many numbers are trained,
    moments: float  # and how many bytes the optimizer has for them.


def own_part(config: Config, found: transformers.PreTrainedConfig, layout: Layout) -> OwnPart:
    check_layers_and_heads(layout, config, found)
    check_divisible(model_without_storage(config.model, found, layers=1), config, layout)
    if layout.tp > 1:
        found = heads_divided(found, layout.tp)
    layers = math.ceil(found.get_text_config().num_hidden_layers / layout.pp)
    model = model_without_storage(config.model, found, layers)
    end = model.get_input_embeddings().weight.numel()
    # A rank of a pipeline has no embedding or no output layer. With tensor parallelism, it has a part of both.
    ends = end if model.all_tied_weights_keys else 2 * end
    absent = ends - (end if layout.pp > 1 else ends) / layout.tp
    trained = numbers_in(model, only_trained=True) - absent
    return OwnPart(found, layers, model, absent, trained, bytes_of_moments(config.optim.name, model, trained))


def bytes_of_moments(optimizer: str, model: torch.nn.Module, trained: float) -> float:
    """Of `trained` numbers of a model. AdamW has two moments of each, and Muon one."""
    if optimizer == "adamw_8bit":  # With one scale for 256 of them, see adamw_8bit().
        small = sum(one.numel() for one in model.parameters() if one.requires_grad and one.numel() < 4096)
        return 8 * small + (2 + 8 / 256) * (trained - small)
    hidden = hidden_matrices(model) if optimizer == "muon" else []
    return 8 * trained - 4 * sum(one.numel() for one in hidden)


def in_4bit(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights that load_in_4bit rounds: the matrices of layers, below adapters."""
    head = model.get_output_embeddings().weight
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    return {one for one in linear if one is not head and not one.requires_grad}


def bytes_of_weights(config: Model, model: torch.nn.Module, shards: int = 1) -> float:
    """On a device that has one of so many shards, before it gathers any."""
    held = sum(one.nbytes for one in model.parameters())
    if not config.load_in_4bit:
        return held / shards
    rounded = in_4bit(model)
    numbers, whole = sum(one.numel() for one in rounded), [one.nbytes for one in rounded]
    # Each 64 numbers have a scale of 8 bits, and each 256 of these one of 32 bits (QLoRA, section 3). They are not
    # sharded. One matrix at a time is whole, while its layer computes.
    scales = numbers / 64 * (1 + 4 / 256)
    return (held - sum(whole) + numbers / 2) / shards + scales + max(whole, default=0)


def numbers_in(module: torch.nn.Module, only_trained: bool = False) -> int:
    """How many numbers the parameters of a module have."""
    return sum(one.numel() for one in module.parameters() if one.requires_grad or not only_trained)


def memory_per_device(launch: PlannedLaunch, found: transformers.PreTrainedConfig) -> dict[str, float]:
    """Bytes by what they are for. Their sum is the most that a device holds at a time."""
    require(getattr(found, "quantization_config", None) is None, "its files have quantized weights")
    config, layout = launch.config, launch.layout
    settings = config.model
    if launch.plugin and launch.plugin.activation_checkpointing:
        settings = settings.model_copy(update={"gradient_checkpointing": True})
        config = config.model_copy(update={"model": settings})

    part = own_part(config, found, layout)
    model, found, layers = part.model, part.found, part.layers
    weights = bytes_of_weights(settings, model, layout.shards) - 4 * part.absent / layout.shards
    memory = {"weights": weights, "gradients": 4 * part.trained / layout.shards}
    memory["optimizer"] = part.moments / layout.shards
    if layout.ep > 1:  # All weights are sharded, but a rank computes with its own experts only.
        model = model_without_storage(settings, experts_divided(found, layout.ep), layers)
        found = experts_divided(found, layout.ep, computes=True)
    if launch.is_sharded:
        memory["weights"] += gathered_weights(model, launch, part.absent)
    if launch.defers:
        memory["gradients"] = 4 * (numbers_in(model, only_trained=True) - part.absent)
    known = 0 if launch.has_old_gradients else memory["gradients"]
    activations, most, others = memory_of_passes(config, found, layers, launch)
    memory["weights"] += others
    memory["activations"] = max(0, activations - known)
    memory["logits"] = max(0, most - known) - memory["activations"]
    if config.model.load_in_4bit:  # Each rank loads them all, before FSDP2 shards them.
        memory["weights"] += max(0, bytes_of_weights(settings, model) - sum(memory.values()))
    return memory


def memory_of_passes(
    config: Config, found: transformers.PreTrainedConfig, layers: int, launch: PlannedLaunch
) -> tuple[float, float, float]:
    """The most bytes that the passes of a step hold at a time, beyond weights and older gradients: while the loss is
    not computed, and altogether. And those of the weights of other models that it asks."""
    plan, layout = launch.plan, launch.layout
    # Of the ranks that share a row, the first one keeps longer keys and values, and the last one has larger masks.
    ranks = {0, layout.row_ranks - 1}
    held = max((traced(config, found, layers, launch, rank) for rank in ranks), key=PassMemory.peak)
    saved, most = held.layers, held.peak()
    if layout.pp > 1:
        tokens = plan.micro_batch_size * config.data.sequence_length * plan.grad_accum_steps
        states = 4 * tokens * found.get_text_config().hidden_size
        in_flight = layout.pp * (1 + config.model.chunks_per_rank()) / 2
        saved = held.layers + held.saved * (min(in_flight, plan.grad_accum_steps) - 1) + states
        most = max(saved, most + states)
    return saved, most, held.others


def gathered_weights(model: torch.nn.Module, launch: PlannedLaunch, absent: float) -> float:
    """FSDP2 computes with one layer, gathers the next one, and reduces the gradients of the last one in float32.

    This rank has none of the `absent` weights.
    """
    size = 2 if launch.precision in ("bf16", "fp16") else 4
    rounded = in_4bit(model) if launch.config.model.load_in_4bit else set()

    def bytes_in(module: torch.nn.Module) -> float:
        return sum(one.numel() * (0.5 if one in rounded else size) for one in module.parameters())

    layers = layers_of(model)
    require(layers, "transformers does not name its layers, which FSDP2 gathers")
    sizes = [bytes_in(module) for module in layers]
    others = bytes_in(model) - size * absent - sum(sizes)
    largest = max(sizes)  # DeepSeek's first layers have no experts, and are of another size.
    reduced = (size + 4) * max(numbers_in(module, only_trained=True) for module in layers)
    keeps_all = launch.config.batch.accumulation == "kept_weights" or not launch.plugin.reshard_after_forward
    return others + (sum(sizes) if keeps_all else 2 * largest) + reduced


def total_gib(launch: PlannedLaunch, found: transformers.PreTrainedConfig) -> float:
    return sum(memory_per_device(launch, found).values()) / 2**30
