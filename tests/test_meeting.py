"""Ranks wait for each other outside of collectives: work may take longer than the timeout, and a lost rank is told.

Nodes are those of test_agreement.py.
"""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import Done, difference, free_port, launch, run, start, tiny_config
from test_agreement import finish, fork, start_nodes

from samerun.errors import LostRank, Stopped, UserError, as_user_error
from samerun.meeting import Meeting
from samerun.run.folder import RunFolder
from samerun.run.launch import report

SHORT = "--run.timeout_minutes", 0.2  # 12 seconds.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of this file, and its run on one process."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 6, "save_every": 2, "keep_checkpoints": 9}
    return config, run(folder, config)


def assert_same(folder, whole, outputs) -> None:
    assert difference(Done(0, "", folder / "run").weights, whole.weights) < 1e-5, outputs


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_cold_node_prepares_data(whole, tmp_path, slow):
    """For longer than the timeout of collectives."""
    script = fork(
        tmp_path / "fork.py",
        f"load = train.load_data\ndef load_data(*args):\n    time.sleep(18 if rank == {slow} else 0)\n"
        "    return load(*args)\ntrain.load_data = load_data",
    )
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], *SHORT, script=script))
    assert codes == [0, 0], outputs
    assert_same(tmp_path, whole[1], outputs)


def test_checkpoints_are_read_by_all_ranks(whole, tmp_path):
    """Each rank sums the files that it has written, and verifies its share of them, for longer than the timeout."""
    code = (
        "from samerun.run import checkpoint\nsum_of = checkpoint.size_and_checksum\n"
        "def size_and_checksum(path):\n    print(f'rank {rank} reads {path.parent.name}/{path.name}\\n', end='')\n"
        "    time.sleep(SLEEP)\n    return sum_of(path)\ncheckpoint.size_and_checksum = size_and_checksum"
    )
    config, whole = whole
    script = fork(tmp_path / "fork.py", code.replace("SLEEP", "0"))  # Each rank writes its whole line at once.
    how = {"processes": 2, "warm": True, "script": script}
    done = launch(tmp_path, config, "--run.max_steps", 5, "--run.save_every", 5, **how)
    written = {
        f"rank {rank} reads .step-00000005.tmp/shard-0000{rank + 1}-model-00001-of-00001.safetensors" for rank in (0, 1)
    }
    assert set(re.findall("rank . reads .*", done.output)) == written

    fork(tmp_path / "fork.py", code.replace("SLEEP", "18 if rank == 0 and 'tmp' not in str(path) else 0"))
    done = launch(tmp_path, config, *SHORT, "--run.save_every", 5, **how)
    read = re.findall("rank (.) reads step-00000005/(.*)", done.output)
    assert {rank for rank, _ in read} == {"0", "1"} and len({file for _, file in read}) == len(read) == 2
    assert_same(tmp_path, whole, done.output)


def test_a_damaged_file_is_found_by_any_rank(whole, tmp_path):
    """Also where another rank than the main process reads it, and the checkpoint before it is taken."""
    config, whole = whole
    done = launch(tmp_path, config, "--run.max_steps", 5, processes=2, warm=True)
    for number in (1, 2):
        [file] = (done.folder / "checkpoints" / f"step-0000000{3 + number}").glob(f"shard-0000{number}-*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    done = launch(tmp_path, config, processes=2, warm=True)
    assert done.output.count("Checkpoint passed over: ") == 2 and done.launches[-1] == 2, done.output
    assert_same(tmp_path, whole, done.output)


def test_groups_have_the_timeout(whole, tmp_path):
    """Those of libraries, too, such as the dimensions of a mesh of devices."""
    code = (
        "start_it = train.start_accelerator\ndef start_accelerator(config):\n    accelerator = start_it(config)\n"
        "    mesh = train.torch.distributed.init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))\n"
        "    new = train.torch.distributed.new_group()\n"
        "    for group in (None, mesh.get_group('b'), new):\n"
        "        group = group or train.torch.distributed.group.WORLD\n"
        "        backend = group._get_backend(train.torch.device('cpu'))\n"
        "        train.sys.stdout.write(f'timeout {backend.options._timeout}\\n')\n"
        "    return accelerator\ntrain.start_accelerator = start_accelerator"
    )
    script = fork(tmp_path / "fork.py", code)
    done = launch(tmp_path, whole[0], "--run.timeout_minutes", 7.5, processes=2, warm=True, script=script)
    assert re.findall("timeout (.*)", done.output) == ["0:07:30"] * 6


# Lost ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_dies_while_a_checkpoint_is_loaded(whole, tmp_path):
    """The checkpoint is not to blame."""
    config, _ = whole
    code = (
        "from samerun.run import checkpoint\nload = checkpoint.dcp.load\n"
        "def load_or_die(*args, **how):\n    if rank == 1:\n        os._exit(9)\n    return load(*args, **how)\n"
        "checkpoint.dcp.load = load_or_die"
    )
    run(tmp_path, config, "--run.max_steps", 5)
    script = fork(tmp_path / "fork.py", code)
    codes, outputs = finish(*start_nodes(tmp_path, config, script=script))
    assert codes == [1, 9] and "of another model" not in outputs[0] and "Traceback" not in outputs[0], outputs
    assert outputs[0].count("error: ") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]"), dist.DistNetworkError("gone")]
)
def test_a_lost_rank_is_no_mistake(error):
    """explained() lets it pass, and still explains what a library says of the user's files."""
    with pytest.raises(type(error), match=re.escape(str(error))), as_user_error("the checkpoint"):
        raise error
    with pytest.raises(UserError, match="the checkpoint: RuntimeError: shape"), as_user_error("the checkpoint"):
        raise RuntimeError("shape")


def test_a_rank_that_fails_alone(whole, tmp_path):
    """The main process says why, and on which host, instead of waiting for it."""
    script = fork(
        tmp_path / "fork.py",
        "from samerun.errors import UserError\nload = train.load_data\ndef load_data(*args):\n"
        f"    here = train.Path({str(tmp_path / 'loaded')!r})\n"
        "    if rank == 0:\n        loaded = load(*args)\n        here.touch()\n        return loaded\n"
        "    while not here.exists():\n        time.sleep(0.01)\n"  # The main process is there to be told.
        "    raise UserError('data: not here')\ntrain.load_data = load_data",
    )
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], script=script))
    assert codes == [2, 2], outputs
    assert re.findall("^error: .*", outputs[0], re.M) == [f"error: rank 1 on {socket.gethostname()}: data: not here"]
    assert "error:" not in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, damage, words",
    [
        (("--optim.warmup_steps", 99), None, "optim.warmup_steps exceeds the run's 6 steps"),
        (("--run.max_steps", 7), '{"a": 1}\n', "metrics.jsonl is damaged"),
    ],
)
def test_a_mistake_that_one_message_tells(whole, tmp_path, settings, damage, words):
    """On two nodes, whoever finds it: all ranks, or the main process alone."""
    if damage:
        codes, outputs = finish(*start_nodes(tmp_path, whole[0]))
        assert codes == [0, 0], outputs
        with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
            file.write(damage)
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], *settings))
    assert codes == [2, 2], outputs
    assert words in outputs[0] and "\n".join(outputs).count("error: ") == 1


def test_two_processes_with_one_rank(monkeypatch):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("samerun/taken/1", "process 7 on there")
    launched(monkeypatch, MASTER_PORT=str(port))
    with pytest.raises(UserError, match="launch: process 7 on there has RANK 1, too"), Meeting(0.05):
        pass


def test_a_port_of_something_else(monkeypatch):
    """That says nothing. torch's store would wait for it for ever, and hear no signal."""
    launched(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with pytest.raises(UserError, match="launch: there is no answer from 127.0.0.1:"), Meeting(0.01):
            pass


def test_a_run_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """By another node, for which it is mounted read-only."""
    (tmp_path / ".shared-1.tmp").touch()
    folder = RunFolder(str(tmp_path), Meeting(1))

    def fails(path, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", fails)
    with pytest.raises(UserError, match="run.output_dir: .* cannot write in "):
        folder.check_sees(".shared-1.tmp")


def test_a_silent_rank(monkeypatch):
    """Which neither comes nor says that it is alive."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LostRank, match="rank 1 has been silent for 0.05 minutes"), Meeting(0.05) as meeting:
        assert meeting.timeout == timedelta(seconds=3)
        meeting.gather("here")


def launched(monkeypatch, **more) -> None:
    """This process is rank 1 of 2, or what is given."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", **more}.items():
        monkeypatch.setenv(name, value)


def test_a_lost_rank_has_a_name(monkeypatch):
    """What a collective says of it is an address at most."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LostRank, match="no answer from rank 1 on there: Connection closed"), Meeting(0.05) as meeting:
        meeting.store.set("alive/1", "1.0 there")
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("rank, told", [(0, "^Connection closed"), (1, "^no answer from rank 0: Connection closed")])
def test_a_store_that_is_lost(monkeypatch, rank, told):
    """It may be torchrun's. The main process does not miss itself."""
    store = "torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    holder = f"import time, torch; store = {store}; print(store.port, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        port = process.stdout.readline().strip()
        launched(monkeypatch, RANK=str(rank), MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
        with pytest.raises(RuntimeError, match=told), Meeting(0.05):
            process.kill()
            process.wait()
            raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("status, why", [(0, "SIGTERM"), (1, "out of memory")])
def test_a_rank_that_has_left_explains_a_collective(monkeypatch, status, why):
    """That fails because of it."""
    launched(monkeypatch, RANK="0", MASTER_PORT=str(free_port()))
    told = "^SIGTERM$" if status == 0 else "^rank 1 on there does not go on: out of memory$"
    with pytest.raises(LostRank if status else Stopped, match=told), Meeting(0.05) as meeting:
        meeting.store.set("left/1", json.dumps(["there", status, why]))
        meeting.store.set("left/first", "1")
        raise RuntimeError("Connection closed by peer")


def test_a_bug_of_a_rank_is_raised(monkeypatch):
    """Its traceback is nowhere else, even where the main process has told of it."""
    launched(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for error, status in (KeyError("text"), None), (UserError("data: no"), 2), (MemoryError("out of memory"), 1):
        error.is_said = True
        with nullcontext() if status else pytest.raises(KeyError):
            assert report(error) == status


@pytest.mark.slow
def test_a_node_that_is_lost_in_a_step(whole, tmp_path):
    code = "if rank == 1:\n    train.train_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    script = fork(tmp_path / "fork.py", f"import signal\n{code}")
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], *SHORT, script=script))
    assert codes == [1, -signal.SIGKILL], outputs
    assert re.findall("^error: .*", outputs[0], re.M)[0].startswith(
        f"error: no answer from rank 1 on {socket.gethostname()}: "
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_over, awaited",
    [
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "rank 0 at 127.0.0.1:PORT .*; this is rank 1 of 2: .*refused"),
        ({"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "no-host.invalid"}, "rank 0 at no-host.invalid:PORT .*"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "1 of 2 processes: rank 1"),
    ],
)
def test_what_is_left_over_of_a_launch(whole, tmp_path, left_over, awaited):
    """A line says who is awaited, and the end comes later, with the timeout."""
    port = str(free_port())
    env = left_over | {"WORLD_SIZE": "2", "MASTER_PORT": port}
    process = start(tmp_path, whole[0], "--run.timeout_minutes", 0.2, processes=None, env=env, warm=True)
    line = None
    while not line and process.poll() is None:
        line = re.search(f"^Waiting for {awaited.replace('PORT', port)}.*unset WORLD_SIZE", process.output(), re.M)
        time.sleep(0.1)
    is_early = process.poll() is None
    [code], [output] = finish(process)
    assert line and is_early, output
    assert code == (1 if left_over["RANK"] == "0" else 2) and output.count("error: ") == 1
    assert "Traceback" not in output


# What happens to rank 1.
SIGNALLED_IN = """
import signal
call = train.NAME
def NAME(*args):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return call(*args)
train.NAME = NAME
"""
# There is somebody to be told: a rank that finds no main process leaves by itself.
EARLY = """
import socket
def is_there():
    with socket.socket() as client:
        return not client.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
if rank == 1:
    while not is_there():
        time.sleep(0.1)
    train.early.earlier_signals.append(15)
"""
SIGNALS = {
    "while it imports": EARLY,
    "while process groups are made": SIGNALLED_IN.replace("NAME", "start_accelerator"),
    "while data are loaded": SIGNALLED_IN.replace("NAME", "load_data"),
}


@pytest.mark.parametrize("when", SIGNALS)
def test_a_signal_to_one_rank_before_the_first_step(whole, tmp_path, when):
    """Stops all of them, and is no failure. It leaves when the others notice it, and not when they wait for it."""
    script = fork(tmp_path / "fork.py", SIGNALS[when])
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], script=script))
    assert codes == [0, 0], outputs
    assert outputs[0].count("Stopped by SIGTERM before the first step; the same command continues.") == 1
    assert Done(0, "", tmp_path / "run").status == {"status": "stopped", "step": 0}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_signal_while_the_nodes_wait_for_each_other(whole, tmp_path, rank):
    """Ends the wait at once. Rank 0 writes down that the launch was stopped, so that a scheduler can repeat it."""
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start(tmp_path, whole[0], processes=None, env=env, warm=rank == 0)
    if rank == 0:
        while "Waiting for " not in process.output() and process.poll() is None:
            time.sleep(0.1)
    else:  # Where it leaves depends on the process that has started it.
        while "Waiting for " not in process.stdout.readline() and process.poll() is None:
            pass
    process.send_signal(signal.SIGTERM)
    [code], [output] = finish(process)
    assert code == 0 and "error:" not in output and output.count("Stopped by SIGTERM before ") == 1, output
    if rank == 0:
        assert output.count("Stopped by SIGTERM before the first step; the same command continues.") == 1
        assert Done(0, "", tmp_path / "run").status == {"status": "stopped", "step": 0}


def test_the_main_process_has_another_address(monkeypatch, capsys):
    """It says so, and does not wait in silence until the timeout."""
    monkeypatch.setattr(Meeting, "FIRST_PATIENCE", 0.1)
    where = {"MASTER_ADDR": "no-host.invalid", "MASTER_PORT": str(free_port())}
    for name, value in ({"WORLD_SIZE": "2", "RANK": "0"} | where).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="launch: (MASTER_ADDR|there is no answer from) no-host.invalid"), Meeting(0.05):
        pass
    assert "Waiting for an answer from no-host.invalid:" in capsys.readouterr().out


def test_a_rank_beyond_the_last(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="launch: RANK 2 of WORLD_SIZE 2: ranks, and --machine_rank, begin with 0"):
        Meeting(1)


ALONE = "launch: RANK 1 of WORLD_SIZE 1: .*; without a launcher, unset RANK"


@pytest.mark.parametrize(
    "more, words",
    [
        ({}, ALONE),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, ALONE),
        ({"WORLD_SIZE": "2"}, "launch: WORLD_SIZE or LOCAL_RANK is set without MASTER_ADDR; unset them"),
    ],
)
def test_a_rank_without_a_launch(monkeypatch, more, words):
    """It would wait for a main process that nobody has started, or write nothing and say nothing."""
    for name, value in ({"RANK": "1"} | more).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        Meeting(1)


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_an_address_that_cannot_be_a_name(monkeypatch, host):
    """Python refuses to look it up, by an error that is no OSError."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": host}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"launch: MASTER_ADDR '{host}' is not a host name: "), Meeting(0.05):
        pass


def test_ranks_restarted_with_the_store_of_those_that_failed(monkeypatch):
    """In torch 2.13 they would wait for addresses of processes that are gone."""
    launcher = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"):
        Meeting(1).__enter__()
