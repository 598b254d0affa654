"""Sequence and context parallelism: ranks share each row."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import Accelerator

from samerun.config import Config
from samerun.data.batches import Documents, MicroBatch, ends_in, lengthen, places_in
from samerun.errors import require
from samerun.model.attention import DOCUMENTS, piece_of
from samerun.parallel.base import DDP
from samerun.parallel.fsdp import FSDP2
from samerun.parallel.mesh import context_parallel_size, ranks_per_row, sequence_parallel_size


class SharedRows:
    """What sequence and context parallelism have in common: the ranks of a group share each row.

    Each of them computes on a part of the tokens, so that longer rows fit into memory. Only the attention looks at
    other tokens, see document_attention(). The groups are the data-parallel ranks of DDP or FSDP2, which average the
    gradients over all ranks as ever, because each rank has the loss of its own tokens.
    """

    option: str  # Of a launcher file: how many ranks form a group.
    launcher_file: str

    def __init__(self, config: Config, accelerator: Accelerator, loss_of: Callable):
        super().__init__(config, accelerator, loss_of)
        self.size = ranks_per_row()
        self.setting = f"launch: {self.option} {self.size}"
        self.data_parallel_size = accelerator.num_processes // self.size
        self.data_parallel_rank, self.rank_in_group = divmod(accelerator.process_index, self.size)

    def own_pieces(self) -> list[int]:
        """The pieces of a row that this rank has, if all ranks of the group have as many of the same length."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        processes, parallelism = self.accelerator.num_processes, self.accelerator.parallelism_config
        one_way = 1 in (sequence_parallel_size(), context_parallel_size())
        require(one_way, "launch: give parallelism_config_sp_size or parallelism_config_cp_size, not both")
        require(processes % self.size == 0, f"{self.setting}: does not divide the {processes} processes")
        # Accelerate makes no groups of these processes, see launched_groups(). DDP does without dp_replicate_size.
        copies = parallelism.dp_replicate_size if parallelism and self.accelerator.is_fsdp2 else 1
        advice = f"take accelerate_configs/{self.launcher_file}, which shards the model over all processes"
        require(copies == 1, f"{self.setting}: cannot be combined with HSDP; {advice}")

    def prepare(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        self.check_model(model)
        self.ranks, _ = dist.new_subgroups(self.size)  # Neighbours, so that a group is on one machine.
        return super().prepare(model, optimizers)

    def check_model(self, bare: torch.nn.Module) -> None:
        """Raises UserError for a model that the ranks cannot share.

        A model whose documents are kept apart by document_attention() looks at other tokens nowhere else.
        """
        found = bare.config.get_text_config()
        name, joins = found.model_type, bare.config._attn_implementation == DOCUMENTS
        advice = "needs model.attention sdpa, and a model that works without padding"
        require(joins, f"{self.setting} {advice}; not {name}")
        # These frequencies follow from the longest document of a pass, of which each rank would know its part only.
        rope = getattr(found, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("longrope", "dynamic"):
            short = rope.get("original_max_position_embeddings", found.max_position_embeddings)
            is_short = self.config.data.sequence_length <= short
            require(is_short, f"{self.setting}: the rope of this {name} needs data.sequence_length <= {short}")

    def shard(self, batch: MicroBatch) -> MicroBatch:
        """The tokens of this rank. All ranks have as many."""
        count = self.size * len(self.own_pieces())
        length = math.ceil(batch.length / count)
        batch = lengthen(batch, length * count)
        pieces = [(number * length, (number + 1) * length) for number in self.own_pieces()]
        part = {}
        for name in "input_ids", "targets", "position_ids":
            part[name] = torch.cat([getattr(batch, name)[:, begin:end] for begin, end in pieces], dim=1)
        documents = self.documents_of(batch.documents, pieces)
        learned = places_in(batch.learned, pieces)
        return MicroBatch(**part, learned=learned, documents=documents, source_ends=ends_in(batch.source_ends, pieces))

    def documents_of(self, documents: Documents, pieces: list[tuple[int, int]]) -> Documents:
        """What the attention wants to know about the documents of a row."""
        return replace(documents, row_ranks=self.ranks)


class SequenceParallel(SharedRows):
    """Sequence parallelism: in the attention, a rank has all tokens of some heads, see ulysses_attention()."""

    option = "parallelism_config_sp_size"
    launcher_file = "sequence_parallel.yaml"

    def own_pieces(self) -> list[int]:
        return [self.rank_in_group]

    def check_model(self, bare: torch.nn.Module) -> None:
        super().check_model(bare)
        heads = bare.config.get_text_config().num_attention_heads
        advice = "for other sizes take accelerate_configs/context_parallel.yaml"
        even = heads % self.size == 0
        require(even, f"{self.setting} must divide the {heads} attention heads of the model; {advice}")


class SequenceParallelDDP(SequenceParallel, DDP):
    """Each group of ranks has rows of its own, and each rank the whole model."""


class SequenceParallelFSDP2(SequenceParallel, FSDP2):
    """Each group of ranks has rows of its own, and each rank a shard of the model: all ranks together have one."""


class ContextParallel(SharedRows):
    """Context parallelism: in the attention, a rank has its own tokens, and keys and values of all of them.

    See context_attention(). Late tokens of a document see more than early ones. So that all ranks have about as much to
    compute, each has a piece of the first half of a row, and the mirrored one of the second half.
    """

    option = "parallelism_config_cp_size"
    launcher_file = "context_parallel.yaml"

    def own_pieces(self) -> list[int]:
        return [self.rank_in_group, 2 * self.size - 1 - self.rank_in_group]

    def check(self) -> None:
        super().check()
        # Without flash attention, some ranks need larger masks. If one of them has no memory, the others wait forever.
        is_auto = self.config.batch.max_micro_batch_size == "auto"
        advice = "its ranks take different memory; give a number"
        require(not is_auto, f"{self.setting}: cannot be combined with batch.max_micro_batch_size auto: {advice}")

    def documents_of(self, documents: Documents, pieces: list[tuple[int, int]]) -> Documents:
        own = tuple(piece_of(documents, begin, end) for begin, end in pieces)
        return replace(documents, row_ranks=self.ranks, row_pieces=own)


class ContextParallelDDP(ContextParallel, DDP):
    """As SequenceParallelDDP."""


class ContextParallelFSDP2(ContextParallel, FSDP2):
    """As SequenceParallelFSDP2."""
