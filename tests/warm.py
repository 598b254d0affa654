"""Ranks that start at once: forked from a process that has imported the libraries and has done nothing else.

A launch spends 4 to 8 seconds per process on imports. Where a test is not about the launcher, helpers.launch(warm=True)
asks this process to fork instead. What runs is train.py from its first line, in processes of its own, with the
environment that Accelerate's own code computes for the same command line, and what torchrun adds to it. As under
torchrun, the first rank that fails ends the others, and a SIGTERM to the launcher is passed on to all.

What stays different, and why each feature keeps some real commands: the launcher itself, the order of imports, the
hashes of strings, which are the same in all ranks here, curves.png, which is not drawn, and the end of the interpreter,
which end() leaves out.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

LIBRARIES = (
    "accelerate.commands.launch",
    "datasets",
    "filelock",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "pandas.plotting._matplotlib",
    "peft",
    "pydantic.functional_validators",
    "pydantic.main",
    "pydantic.types",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.nn.attention.varlen",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "transformers.models.byt5.tokenization_byt5",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "trl",
)
SECONDS_TO_END = 30  # Between SIGTERM and SIGKILL, as torchrun has it.
ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "train.py")


class Launch:
    """What a test sees of a launch by the warm process, with the methods that subprocess.Popen has for it."""

    def __init__(self, request: dict):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as this does.
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address())
        socket.send_fds(self.connection, [b"\n"], [self.log.fileno()])
        self.answers = self.connection.makefile("rw")
        self.answers.write(json.dumps(request) + "\n")
        self.answers.flush()
        told = self.answers.readline()
        assert told, f"this launch did not begin, perhaps for want of its file in accelerate_configs/: {request}"
        self.pid, self.returncode = int(told), None  # Of the launcher, or of the rank without one.

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm launch", timeout, self.output())
            self.returncode = int(self.answers.readline() or -signal.SIGKILL)  # Nothing: it was killed.
            self.answers.close()
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.output(), None

    def output(self) -> str:
        """All so far. The ranks share the file's position, and so it must not move: they would write where it is."""
        log = self.log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


ENVIRONMENT = dict(os.environ)  # As libraries should find it when they are imported, whatever a test changes later.


@functools.cache
def address() -> str:
    """Where the warm process of this test process listens, which the first call starts."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, __file__, f"{folder}/socket"]
    # It ends when its standard input does: with this process, however that ends.
    process = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    atexit.register(process.communicate)
    while not os.path.exists(f"{folder}/socket"):
        assert process.poll() is None, "the warm process has failed"
        time.sleep(0.02)
    return f"{folder}/socket"


# In the warm process --------------------------------------------------------------------------------------------------


def serve(path: str):
    """Fork a launcher per connection. Returns only in a process that is to run a script: its environment and words."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "critical"}  # As train.py does first.
    sys.path.append(str(ROOT))
    rooms = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted((ROOT / "samerun").rglob("*.py"))
    ]
    for name in [*LIBRARIES, *rooms]:
        importlib.import_module(name)
    warm_up()
    compiled(TRAIN)
    gc.freeze()  # What is here stays, so that no collection copies it page by page.
    with socket.socket(socket.AF_UNIX) as draft:
        draft.bind(f"{path}.tmp")
        draft.listen()
        os.rename(f"{path}.tmp", path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the launchers: they report by themselves.
        while True:
            ready, _, _ = select.select([draft, sys.stdin], [], [])
            if sys.stdin in ready:
                sys.exit()
            connection, _ = draft.accept()
            if not os.fork():
                break
            connection.close()
    return supervise(connection)


def warm_up() -> None:
    """What libraries work out when they first do something. It starts no threads, which a fork would lose.

    No backward pass: after one, torch's builds for GPUs refuse any in a forked process.
    """
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    # At the first from_pretrained().
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    # At a count of FLOPs, here those of helpers.tiny_config(). It takes as long as the steps of most tests.
    shape = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False):
        model.to_empty(device="cpu")
        model(input_ids=torch.ones(1, 17, dtype=torch.long), use_cache=False)


@functools.cache
def compiled(path: str) -> types.CodeType:
    """A script as Python runs it. To compile train.py takes as long as some steps; the warm process does it once."""
    return compile(Path(path).read_bytes(), path, "exec")


def run_path(path: str, run_name: str) -> None:
    """What runpy's function of this name does to run a script, for one that may be compiled already."""
    module = sys.modules[run_name] = types.ModuleType(run_name)
    module.__file__ = path
    exec(compiled(path), vars(module))


def supervise(connection: socket.socket):
    """The launcher: one of these processes per launch."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: not to outlive the warm process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, [log], *_ = socket.recv_fds(connection, 1, 1)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = connection.makefile("rw")
    request = json.loads(answers.readline())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= request["environment"]
    ranks = {}
    for number, environment in enumerate(environments(request)):
        if not (rank := os.fork()):
            answers.close()
            connection.close()
            return environment, request["script"]
        ranks[rank] = number
    _store = agent_store(environment)  # It lives as long as the ranks do.
    wait = answers_signals(ranks)  # Before a test knows whom to signal.
    answers.write(f"{rank if request['launcher'] is None else os.getpid()}\n")
    answers.flush()
    code = wait()
    answers.write(f"{code}\n")
    answers.flush()
    os._exit(0)


def agent_store(environment: dict[str, str]):
    """Where the ranks of a launch meet. If rank 0 held it, the others would often come too early and wait for long."""
    from torch.distributed import TCPStore

    if "MASTER_PORT" not in environment:
        return None
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(*address, int(environment["WORLD_SIZE"]), is_master=True, wait_for_workers=False)


def environments(request: dict) -> list[dict[str, str]]:
    """What each rank finds in its environment: all that `accelerate launch` and torchrun put there."""
    if request["launcher"] is None:  # Just `python train.py`.
        return [{}]
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args = launch_command_parser().parse_args([*request["launcher"], *request["script"]])
    args, defaults, _ = _validate_launch_command(args)
    if args.cpu or not (args.multi_gpu or args.use_fsdp or args.use_deepspeed):
        return [prepare_simple_launcher_cmd_env(args)[1]]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        common = prepare_deepspeed_cmd_env(args)[1]
    else:
        common = prepare_multi_gpu_env(args)
    common |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.main_process_port),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # See agent_store().
    }
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        common[name] = str(args.num_processes)
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [common | dict.fromkeys(names, str(rank)) for rank in range(args.num_processes)]


def answers_signals(ranks: dict[int, int]) -> Callable[[], int]:
    """From now on, signals are passed on to the ranks. Returns what waits for them, and returns the exit status of the
    launch: that of the first rank that fails, which ends the others."""
    failed = 0

    def end(number: int, *_) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # One that has just ended, and is still among them.
                os.kill(rank, number)

    def stop(*_) -> None:
        nonlocal failed
        failed = failed or 1  # As for torchrun, even if all save and end well.
        end(signal.SIGTERM)
        signal.alarm(SECONDS_TO_END)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: end(signal.SIGKILL))

    def wait() -> int:
        nonlocal failed
        while ranks:
            pid, status = os.wait()
            number, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not failed:
                print(f"rank {number} ended with exit status {code}", file=sys.stderr, flush=True)
                failed = code
                stop()
        return failed

    return wait


def end() -> None:
    """The last thing that a script does. To take all libraries down again would take as long as the run of a test."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    environment, sys.argv = serve(sys.argv[1])
    os.environ |= environment
    import datasets
    import numpy as np
    from matplotlib.figure import Figure

    np.random.seed()  # A process of its own begins with numbers of its own.
    if cache := os.environ.get("HF_DATASETS_CACHE"):  # The library has read it when it was imported.
        datasets.config.HF_DATASETS_CACHE = Path(cache)
    Figure.savefig = lambda *_, **__: None  # To draw curves takes as long as the steps of most tests.
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path = run_path  # For scripts that run scripts, too.
    status = 1  # Of an exception that nobody catches.
    atexit.register(end)
    try:
        run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
        raise
