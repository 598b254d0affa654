"""Ranks wait for each other outside of collectives: work may take longer than the timeout, and a lost rank is told.

Nodes are those of test_agreement.py.
"""

import re
import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import Done, difference, free_port, launch, run, start, tiny_config
from test_agreement import finish, fork, start_nodes

from samerun.errors import LostRank, UserError, as_user_error
from samerun.meeting import Meeting

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
        "from samerun.run import checkpoint\nsum_of = checkpoint.checksum\n"
        "def checksum(path):\n    print(f'rank {rank} reads {path.parent.name}/{path.name}', flush=True)\n"
        "    time.sleep(SLEEP)\n    return sum_of(path)\ncheckpoint.checksum = checksum"
    )
    config, whole = whole
    script = fork(tmp_path / "fork.py", code.replace("SLEEP", "0"))
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
        "    if rank == 1:\n        raise UserError('data: not here')\n"
        "    return load(*args)\ntrain.load_data = load_data",
    )
    codes, outputs = finish(*start_nodes(tmp_path, whole[0], script=script))
    assert codes == [2, 2], outputs
    assert re.findall("^error: .*", outputs[0], re.M) == [f"error: rank 1 on {socket.gethostname()}: data: not here"]


def test_a_silent_rank(monkeypatch):
    """Which neither comes nor says that it is alive."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LostRank, match="rank 1 has been silent for 0.05 minutes"), Meeting(0.05) as meeting:
        assert meeting.timeout == timedelta(seconds=3)
        meeting.gather("here")


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
    """A line says within 10 seconds who is awaited, and the end comes with the timeout."""
    port = str(free_port())
    env = left_over | {"WORLD_SIZE": "2", "MASTER_PORT": port}
    began = time.monotonic()
    process = start(tmp_path, whole[0], "--run.timeout_minutes", 0.2, processes=None, env=env, warm=True)
    line = None
    while not line and time.monotonic() - began < 60:
        line = re.search(f"^Waiting for {awaited.replace('PORT', port)}.*unset WORLD_SIZE", process.output(), re.M)
        time.sleep(0.1)
    seconds = time.monotonic() - began
    [code], [output] = finish(process)
    assert line and seconds < 10, output
    assert code == (1 if left_over["RANK"] == "0" else 2) and output.count("error: ") == 1
    assert "Traceback" not in output
