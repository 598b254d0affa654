"""What a strategy does in a step, and DDP."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from samerun.config import Config
from samerun.data.batches import MicroBatch
from samerun.errors import require
from samerun.model.loss import add_metrics
from samerun.parallel.state import full, trained_state

#
# How the ranks share the work of a step. The file given to `accelerate launch --config_file` chooses the strategy, and
# its class holds what it changes about the training. To remove a strategy, delete its class and its lines at the end
# of this section.


@dataclass(frozen=True)
class Division:
    """Among how many ranks a strategy divides what takes memory."""

    weights: int = 1  # The float32 ones, which the optimizer updates.
    gradients: int = 1
    optimizer: int = 1
    matrices: int = 1  # Each of them, and the heads and columns that come out of it.
    layers: int = 1  # As a pipeline.
    experts: int = 1  # With which a rank computes.
    defers: bool = False  # Whether gradients that wait for further micro-steps are whole.
    has_buckets: bool = False  # Whether the buckets of DDP keep memory for gradients all the time.
    gathers: bool = False  # Whether the weights of a layer are gathered to compute with them.
    gathers_all: bool = False  # Whether the gathered weights of all layers stay until their backward pass.


class DDP:
    """One device, or distributed data parallelism: each rank has the whole model, and rows of its own."""

    def __init__(self, config: Config, accelerator: Accelerator, loss_of: Callable):
        self.config = config
        self.accelerator = accelerator
        self.loss_of = loss_of  # compute_loss() with the loss and the settings of this run.
        self.data_parallel_size = accelerator.num_processes  # How many ranks compute on different rows,
        self.data_parallel_rank = accelerator.process_index  # and which of them this one is.
        self.averages_over = accelerator.num_processes  # How many ranks the gradients are averaged over.
        self.dropout_rank = accelerator.process_index  # Ranks with another number draw another dropout.
        self.evaluates_at_a_time = 1  # The micro-batches that evaluate() gets.

    def check(self) -> None:
        """Raises UserError for settings that cannot be combined with the strategy."""

    def check_model(self, bare: torch.nn.Module) -> None:
        """Raises UserError for a model that the strategy cannot divide, as far as that is known without a try."""

    def division(self) -> Division:
        """What --plan wants to know about memory."""
        return Division(has_buckets=self.accelerator.num_processes > 1)

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        """The model, wrapped. Afterwards the optimizers train the parameters of the wrapped model.

        Accelerate's wrappers around the optimizers are not used: Guard decides whether they make an update.
        """
        model, *_ = self.accelerator.prepare(model, *optimizers)
        return model

    def shard(self, batch: MicroBatch) -> MicroBatch:
        """What this rank computes of a micro-batch of collate()."""
        return batch

    def forward_backward(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float
    ) -> dict[str, torch.Tensor]:
        """Leave in .grad the gradient of the loss, summed over all ranks and their micro-batches, times `scale`.

        Returns the metrics of token_loss(), summed over the micro-batches of this rank.
        """
        # Accelerator.backward() divides by the number of micro-steps, and DDP and FSDP2 average the gradients over the
        # ranks. The factor undoes both.
        factor = len(micro_batches) * self.averages_over
        self.accelerator.gradient_accumulation_steps = len(micro_batches)
        self.accelerator.step = 0  # The micro-steps that it has counted. With the last one, it averages the gradients.
        metrics = {}
        for batch in micro_batches:
            with self.accelerator.accumulate(model):
                with self.accelerator.autocast():
                    loss, metrics_of_batch = self.loss_of(model, self.shard(batch))
                self.accelerator.backward(loss * (factor * scale))
            add_metrics(metrics, metrics_of_batch)
        return metrics

    def evaluate(self, model: torch.nn.Module, micro_batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
        """The metrics of token_loss(), summed over micro-batches of shard()."""
        metrics = {}
        for batch in micro_batches:
            with self.accelerator.autocast():
                _, metrics_of_batch = self.loss_of(model, batch)
            add_metrics(metrics, metrics_of_batch)
        return metrics

    def sum_over_ranks(self, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add up the values of the ranks. All of them get the same sums."""
        if self.accelerator.num_processes == 1:
            return metrics
        values = torch.stack(list(metrics.values()))
        dist.all_reduce(values)
        return dict(zip(metrics, values.unbind()))

    def clip_gradients(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Returns the norm of the gradients before they are clipped, a plain tensor that is the same on all ranks."""
        return self.accelerator.clip_grad_norm_(parameters, self.config.optim.max_grad_norm or math.inf)

    def gather_weights(self, bare: torch.nn.Module) -> dict[str, torch.Tensor]:
        """All weights of the model, on the main process."""
        weights = get_model_state_dict(bare, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        for name in bare.all_tied_weights_keys:  # from_pretrained() ties them again.
            weights.pop(name, None)
        return weights

    def state(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, and what it is loaded into."""
        return trained_state(model, optimizers)

    def put_back(
        self, state: dict[str, torch.Tensor], model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Called when a checkpoint was loaded into state(), which here is the model and the optimizers themselves."""

    def zero_gradients(self, optimizers: list[torch.optim.Optimizer]) -> None:
        # The gradients of DDP are views of its buckets, which stay (gradient_as_bucket_view in start_accelerator()).
        in_buckets = self.accelerator.num_processes > 1
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not in_buckets)


class Sharded(DDP):
    """What strategies have in common if each rank holds only a part of each matrix, mostly as a DTensor."""

    def check(self) -> None:
        muon = self.config.optim.name == "muon"
        require(not muon, "optim.name muon: needs whole matrices, and this launch shards them; use adamw, or DDP")

    def clip_gradients(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        return full(super().clip_gradients(parameters))

    def zero_gradients(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
