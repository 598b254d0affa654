"""The Accelerator, precision, a missing network, signals, the exit status."""

import logging
import os
import random
import signal
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import accelerate
import datasets
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    memory,
)
from safetensors import SafetensorError

from samerun import early
from samerun.config import Config
from samerun.early import CORES
from samerun.errors import (
    AgreedError,
    Stopped,
    UserError,
    as_user_error,
    is_full,
    is_lost_rank,
    is_main_process,
    one_line,
    prefix_errors,
    require,
    say,
)
from samerun.meeting import Meeting, has_other_launchers, is_elastic, number_in
from samerun.parallel.layout import Layout, layout_of, uses_fsdp
from samerun.plan import Plan


class StopSignal:
    """What to do when a signal comes. From stop_after_steps() on, it stops all ranks after the same step."""

    # All three belong to the process, as signals do.
    requested = ""  # The name of the signal.
    raises = False  # Whether it raises Stopped.
    earlier_handlers = {}  # Of the program that called main(), by the number of the signal.

    def __init__(self):
        StopSignal.requested, StopSignal.raises = "", False
        self.finishes_steps = False
        self.interrupted_since: float | None = None  # The time of the first Ctrl-C.
        self.group: dist.ProcessGroup | None = None
        self.launcher = os.getppid()
        self.is_orphan = False
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # That of a terminal that is closed, but for nohup.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self.earlier_handlers[number] = signal.signal(number, self.on_signal)
        for number in early.earlier_signals:
            StopSignal.requested = signal.Signals(number).name

    @classmethod
    def give_back(cls) -> None:
        """Let the program that called main() answer signals again."""
        while cls.earlier_handlers:
            number, handler = cls.earlier_handlers.popitem()
            signal.signal(number, handler or signal.SIG_DFL)

    def raise_at_signals(self) -> None:
        """From now on a signal raises Stopped at once. So does one that has come before."""
        StopSignal.raises = True
        if self.requested:
            raise Stopped(self.requested)

    def only_note_signals(self) -> None:
        """Until raise_at_signals() is called again."""
        StopSignal.raises = False

    def stop_after_steps(self, accelerator: Accelerator, meeting: Meeting) -> None:
        """From now on a signal only makes all ranks stop when agreed() asks for it.

        Ranks that make a process group notice neither a signal nor a rank that has left. So they begin once none of
        them raises Stopped any more, not even one that is late.
        """
        meeting.wait_for_all()
        StopSignal.raises, self.finishes_steps = False, True
        meeting.wait_for_all()
        self.group = new_host_group(accelerator)

    def on_signal(self, number: int, frame) -> None:
        if number == signal.SIGINT:
            # It often comes twice, from the terminal and from the launcher. But a second Ctrl-C means: stop at once.
            now = time.monotonic()
            self.interrupted_since = self.interrupted_since or now
            if now - self.interrupted_since > 2:
                os._exit(1)
        launcher_has_ended = os.getppid() != self.launcher and not self.is_orphan
        if launcher_has_ended:
            self.is_orphan = True
            if self.group:  # Time to save, and then the end: if another rank is dead, this one would wait forever.
                signal.alarm(20)
        is_first = not self.requested
        StopSignal.requested = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.raises or (number == signal.SIGINT and not self.finishes_steps):
            if is_first:
                raise Stopped(self.requested)
        elif self.finishes_steps and is_main_process():
            with suppress(OSError):  # Ctrl-C has ended `| tee log` as well.
                # Not by print(), because that may be what the signal has interrupted.
                os.write(1, f"\n{self.requested}: saving after this step.\n".encode())

    def agreed(self) -> bool:
        """Whether to stop now: the same answer on every rank, all of which must ask."""
        if not self.group:
            return bool(self.requested)
        wish = torch.tensor(float(bool(self.requested)))
        dist.all_reduce(wish, dist.ReduceOp.MAX, group=self.group)
        return bool(wish)

    def check(self) -> None:
        """Raises Stopped on all ranks if any of them has got a signal."""
        if self.agreed():
            raise Stopped(self.requested)


def set_timeout(minutes: float) -> None:
    """Set the timeout of process groups that libraries make without one, as for a device mesh: torch reads it there."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timedelta(minutes=minutes))


def new_host_group(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """A process group over gloo, in which no device has to wait."""
    return dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None


def start_accelerator(config: Config) -> Accelerator:
    """The Accelerator of this launch. Raises UserError where the processes do not form one run."""
    silence_libraries()
    cpu = not torch.accelerator.is_available()
    if cpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # accelerate launch always says 1.
        torch.set_num_threads(max(1, CORES // number_in("LOCAL_WORLD_SIZE")))
    if "ACCELERATE_FP8_BACKEND" in os.environ:  # The launcher takes `--fp8_backend ao`, and the Accelerator only AO.
        os.environ["ACCELERATE_FP8_BACKEND"] = os.environ["ACCELERATE_FP8_BACKEND"].upper()
    if "NPROC" in os.environ:  # By notebook_launcher, which hands on the precision by a name that nothing reads.
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", os.environ.get("MIXED_PRECISION", "no"))
    launched = number_in("WORLD_SIZE")
    layout = layout_of(config, launched, is_sharded=uses_fsdp())
    set_timeout(config.run.timeout_minutes)
    with as_user_error(f"launch of {launched} processes (see accelerate_configs/), or run.trackers"):
        accelerator = Accelerator(
            cpu=cpu,
            log_with=config.run.trackers or None,
            project_dir=f"{config.run.output_dir}/tensorboard",
            parallelism_config=groups_for_accelerate(layout),
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                InitProcessGroupKwargs(timeout=timedelta(minutes=config.run.timeout_minutes)),
                GradScalerKwargs(enabled=False),  # LossScale takes its place: a step that it skips would be lost.
            ],
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1,  # Each step sets its own number.
                adjust_scheduler=False,
                sync_with_dataloader=False,
                sync_each_batch=config.batch.accumulation != "deferred",
            ),
        )
    with prefix_errors("launch"):
        together = launched == accelerator.num_processes
        require(together, f"the {launched} processes do not see each other; use a file of accelerate_configs/")
        precision = accelerator.mixed_precision
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        has_units = asked != "fp8" or precision == "fp8"  # Accelerate takes fp16 where there are none.
        require(has_units, "mixed_precision fp8: this device does not multiply in float8; use bf16, or no")
        check_precision(precision)
        in_fp16 = precision != "fp16" or accelerator.native_amp  # Accelerate computes in float32 on a CPU.
        require(in_fp16, "mixed_precision fp16 is for GPUs, and not for DeepSpeed; use bf16, or no")
        if precision == "fp8":
            check_float8(accelerator)
    say_if_emulated(accelerator)
    missing = {*config.run.trackers} - {"all", *map(str, accelerator.log_with)}
    require(not missing, f"run.trackers: {', '.join(missing)} is not installed; pip install it, or leave it out")
    has_backward = config.model.attention != "flex_attention" or accelerator.device.type not in ("cpu", "mps")
    require(has_backward, "model.attention flex_attention: torch has no backward pass of it on this device; use sdpa")
    return accelerator


def describe_launch(accelerator: Accelerator, layout: Layout) -> dict[str, str]:
    """Precision, kind of launcher, and the sizes of groups of ranks, for logs and manifests."""
    kind = accelerator.distributed_type.value
    if accelerator.is_fsdp2:
        kind = "FSDP2"
    elif kind == "NO" or kind.startswith("MULTI_"):  # One device computes as each of several does.
        kind = "DDP"
    return {"precision": accelerator.mixed_precision, "launcher": kind, "layout": str(layout)}


def groups_for_accelerate(layout: Layout) -> accelerate.parallelism_config.ParallelismConfig | None:
    """What Accelerate is told of the groups of processes: the copies of the model and their shards.

    It needs to know of no other dimension, and would change the model for it. Ranks that share rows are shards, too.
    """
    has_section = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"  # Otherwise Accelerate would read it.
    copies = layout.dp_replicate if layout.is_sharded else 1
    if copies == 1 and not has_section:
        return None
    shards = layout.processes // copies if layout.is_sharded else 1
    sizes = {"dp_replicate_size": copies, "dp_shard_size": shards, "cp_size": 1, "sp_size": 1, "tp_size": 1}
    return accelerate.parallelism_config.ParallelismConfig(**sizes)


def check_precision(precision: str) -> None:
    is_known = precision in ("no", "bf16", "fp16", "fp8")
    require(is_known, f"mixed_precision {precision} is not supported; use bf16, fp16, or no")


def check_float8(accelerator: Accelerator) -> None:
    """Raises UserError unless torchao is what multiplies in float8."""
    recipe = accelerator.ao_recipe_handler
    require(recipe, "mixed_precision fp8: only torchao's is supported; put --fp8_backend ao after the launcher file")
    # Accelerate's default is to gather weights in float8. These would be other parameters than the optimizer's under
    # DDP, and under FSDP2 the first step after a resume would scale them as if nothing had been loaded.
    recipe.config = replace(recipe.config, enable_fsdp_float8_all_gather=False)


def say_if_emulated(accelerator: Accelerator) -> None:
    """GPUs older than Ampere have no units for bf16. torch emulates it there, and says nothing."""
    in_bf16 = accelerator.mixed_precision == "bf16" and accelerator.device.type == "cuda"
    if in_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        say("This GPU has no units for bf16: --mixed_precision fp16 after the launcher file is faster.")


def silence_libraries() -> None:
    """Switch off warnings that mean nothing here, and progress bars that nobody sees."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # From torch's checkpoints, on one process.
    warnings.filterwarnings("ignore", ".is_gradient_check")  # From peft.
    warnings.filterwarnings("ignore", "Slicing a flattened dim")  # From Accelerate's mesh for HSDP.
    # Of FSDP2 around tensor parallelism: logits must not be changed in place, and weights could be gathered faster.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # Of compiled layers that keep a part of their activations: check_selective() has tried what it warns of.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Of a model that cannot be traced: an error says so in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    if not (is_main_process() and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        datasets.utils.logging.disable_progress_bar()


def go_offline_without_network(config: Config) -> None:
    """Otherwise huggingface_hub asks for each file six times, which takes minutes, even if all are in its cache."""
    sources = [config.data]
    sources += (config.data.sources or {}).values()
    sources += config.data.eval_sources.values()
    names = {config.data.tokenizer, config.model.pretrained, *(source.path for source in sources)}
    needs_hub = any(not os.path.exists(name) for name in names - {None, "bytes"})
    if not needs_hub or huggingface_hub.is_offline_mode():
        return
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
    except Exception as error:
        say(f"The Hub cannot be reached ({one_line(error)}). Only what is in its cache can be used.")
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def reseed(seed: int) -> None:
    """Every generator that a model of transformers may draw from: those of speech mask with numpy's."""
    random.seed(seed)
    np.random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # Faster, because it does not look for devices.
        torch.default_generator.manual_seed(seed)


@contextmanager
def failures_explained(step: int, plan: Plan):
    """What a user can do about a step that finds no memory, or whose gradients DDP waits for in vain."""
    try:
        yield
    except RuntimeError as error:
        if "parameters that were not used in producing loss" in str(error):  # DDP says so in the pass after it.
            problem = "some weights got no gradient, as those for images get none from text, and DDP waits for all"
            advice = "freeze them, or take accelerate_configs/fsdp2.yaml"
            raise UserError(f"model: {problem}; {advice}: {one_line(error)}") from error
        if not memory.should_reduce_batch_size(error):
            raise
        advice = "that is one row: lower data.sequence_length, set model.gradient_checkpointing, or shard the model"
        if (smaller := plan.micro_batch_size // 2) > 0:
            advice = f"set batch.max_micro_batch_size to {smaller} or less; the result will be the same"
        raise MemoryError(f"out of memory in step {step}: {advice}") from error


def end_training(accelerator: Accelerator) -> None:
    accelerator.end_training()
    accelerator.trackers.clear()  # end_left_trackers() does not end them again.
    if accelerator.num_processes > 1:
        time.sleep(0.1)  # gloo's threads need Python's lock to end, and torch waits for them without releasing it.


def exit_status(stopped: bool, stop: StopSignal) -> int:
    """0, except for a rank that stopped because of another node's signal: elastic torchrun restarts it if it fails, and
    other launchers would wait 5 minutes for that of the node, which may have ended."""
    return int(stopped and not stop.requested and (is_elastic() or has_other_launchers()))


def report(error: BaseException) -> int:
    """One message for what may happen to a run, and its exit status. Raises the error again if it is a bug."""
    if isinstance(error, Stopped):
        say(f"Stopped by {error}; the same command continues.")
        return 1
    lost = is_lost_rank(error)  # That rank says why.
    if lost and StopSignal.requested:  # The launcher has asked all ranks to end, because one of them has failed.
        return 1
    is_said = False
    if lost or not is_main_process():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Until then the launcher ends this rank, so that only one of them speaks. Before the ranks have met, all find
        # the same error, and the main process may be late. What it has said already is not said again.
        is_said = not is_main_process() and (isinstance(error, AgreedError) or getattr(error, "is_said", False))
        is_early = not (is_said or dist.is_initialized())
        seconds = 15 if lost or is_early else 5
        # With this rank, its launcher would end the main process on the same host, which speaks after 15 s.
        time.sleep(30 if lost and is_said else seconds)
    if isinstance(error, torch.OutOfMemoryError):
        advice = "if no step was made, the model does not fit: shard it, see --plan"
        error = MemoryError(f"out of memory outside of the passes of a step ({one_line(error)}); {advice}")
    disk = isinstance(error, OSError | SafetensorError)
    expected = isinstance(error, UserError | ArithmeticError | MemoryError | KeyboardInterrupt)
    if not (disk or lost or expected):
        raise error
    if is_said:
        return 2 if isinstance(error, UserError) else 1
    note = ""
    if "temporary directory" in str(error):
        note = "; set TMPDIR to a folder that can be written"
    elif disk:
        note = "; the run folder's checkpoints are complete: once this is fixed, the same command continues"
    if is_full(error):
        note = f"; make room there{note}"
    print(f"error: {str(error) or type(error).__name__}{note}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, UserError) else 1
