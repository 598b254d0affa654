"""Nodes that come and go under torchrun: two nodes of one process each on loopback.

They are started as accelerate_configs/README.md says.

Whatever happens to the nodes, the run is that of one process that nobody disturbed.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import ROOT, Done, difference, free_port, kill_tree, run, tiny_config, write_config

pytestmark = pytest.mark.slow
README = (ROOT / "accelerate_configs" / "README.md").read_text()
PLAN = {1: 4, 2: 2}  # Processes: how often they accumulate, when 10 rows are processed at most 3 at a time.
# A lost node is given up after 3 s, and a round begins 3 s after the first node is ready, not after 15 s and 30 s.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of this file, and the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder)
    config["run"]["save_every"] = 5
    config["batch"]["max_micro_batch_size"] = 3
    return config, run(folder, config)


class Nodes:
    """Nodes of one run by name, each a torchrun and its process; all that still lives is killed in the end."""

    def __init__(self, folder, config, stack: ExitStack):
        self.folder, self.stack, self.running, self.port = folder, stack, {}, free_port()
        self.config, self.done = write_config(folder, config), Done(0, "", folder / "run")

    def start(self, name: str, command: list) -> None:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("a"))
        env = {"ACCELERATE_MIXED_PRECISION": "no", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}
        self.running[name] = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=os.environ | env
        )
        self.stack.callback(kill_tree, self.running[name])

    def join(self, name: str, hosts: bool) -> None:
        """The README's command on one more node. Which of them holds the meeting point is told by HOST's name there;
        here all are the same machine."""
        self.start(
            name,
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "1:2",
                "--nproc-per-node",
                1,
                "--max-restarts",
                3,
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{self.port}",
                "--rdzv-id",
                "test",
                "--rdzv-conf",
                f"{QUICK},is_host={hosts}",
                "--local-addr",
                "127.0.0.1",
                ROOT / "train.py",
                "--config",
                self.config,
                # Sampling after every step leaves the time to kill in the middle, and must not change the weights.
                "--run.eval_every",
                1,
                "--eval.max_new_tokens",
                40,
                "--eval.prompts",
                "[a]",
            ],
        )

    def kill(self, name: str) -> None:
        kill_tree(self.running[name])
        self.running.pop(name).wait()

    @contextlib.contextmanager
    def paused(self, name: str):
        """The node's process stands still, until its agent has asked it to stop: however slowly others start, the run
        is not over before that."""
        [process] = psutil.Process(self.running[name].pid).children()
        process.suspend()
        yield
        pending = re.compile(r"^ShdPnd:\s*(\w+)$", re.M)  # A bit mask of the signals that the process has yet to see.
        status = Path(f"/proc/{process.pid}/status")
        mask = 1 << (signal.SIGTERM - 1)
        self.wait(f"{name} is asked to stop", lambda: int(pending.search(status.read_text())[1], 16) & mask)
        process.resume()

    def launches(self) -> list[dict]:
        """The plan line of every launch of which the run still holds something."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # Not there yet, or half a line.
            return [line for line in self.done.metrics if "plan/num_processes" in line]
        return []

    def wait(self, what: str, condition, timeout: float = 300):
        """Return the first true answer, while no node has failed."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not any(node.poll() for node in self.running.values()):
            if answer := condition():
                return answer
            time.sleep(0.02)
        raise AssertionError(f"{what}: not so\n" + self.logs())

    def wait_for_launch(self, processes: int, steps: int = 1) -> dict:
        """The plan line of the newest launch once it is one of so many processes and has done so many steps."""

        def found():
            newest = (self.launches() or [{}])[-1]
            with contextlib.suppress(json.JSONDecodeError):
                good = newest.get("plan/num_processes") == processes
                return good and self.done.metrics[-1]["step"] >= newest["step"] + steps and newest

        return self.wait(f"{processes} processes did {steps} steps", found)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def finish(self, *names: str) -> None:
        self.wait(f"{names} finish", lambda: all(self.running[name].poll() == 0 for name in names))


@pytest.fixture
def nodes(whole, tmp_path):
    with ExitStack() as stack:
        yield Nodes(tmp_path, whole[0], stack)


def assert_same(nodes: Nodes, whole: Done, launches: list[int]) -> None:
    """The finished run had launches of these process counts, the same global batch in all of them, and is `whole`."""
    done, plans = nodes.done, nodes.launches()
    # Nodes that did not become ready together may have begun with a launch of one.
    assert [plan["plan/num_processes"] for plan in plans][-len(launches) :] == launches, nodes.logs()
    for plan in plans:
        assert plan["plan/grad_accum_steps"] == PLAN[plan["plan/num_processes"]]
        assert plan["plan/micro_batch_size"] == 3 and plan["plan/global_batch_size"] == 10
    assert done.status == {"status": "finished", "step": 30}
    assert [line["step"] for line in done.metrics if "train/loss" in line] == list(range(1, 31))
    np.testing.assert_allclose(done.losses, whole.losses, rtol=1e-6)
    assert difference(done.weights, whole.weights) < 1e-5


def test_a_node_is_lost_and_comes_back(nodes, whole):
    """kill -9 to a node; the other goes on alone from the newest checkpoint; the node returns and is taken in."""
    nodes.join("host", hosts=True)
    nodes.join("guest", hosts=False)
    nodes.wait_for_launch(processes=2, steps=6)
    nodes.kill("guest")
    saved = max(name for name in nodes.done.checkpoints if not name.startswith("."))
    alone = nodes.wait_for_launch(processes=1)
    assert alone["step"] % 5 == 0 and f"step-{alone['step']:08d}" >= saved >= "step-00000005"
    assert "Continuing after step" in (nodes.folder / "host.log").read_text()

    with nodes.paused("host"):
        nodes.join("guest", hosts=False)
    together = nodes.wait_for_launch(processes=2)
    # The agent asked the lone process to stop, which saved: nothing that it did is done again.
    assert together["step"] > alone["step"]
    nodes.finish("host", "guest")
    assert_same(nodes, whole[1], [2, 1, 2])


def test_a_node_leaves(nodes, whole):
    """SIGTERM to a node, as before a pre-emption: the run is saved, and the other node goes on alone from there."""
    nodes.join("host", hosts=True)
    nodes.join("guest", hosts=False)
    nodes.wait_for_launch(processes=2, steps=6)
    guest = nodes.running.pop("guest")
    guest.send_signal(signal.SIGTERM)
    guest.wait(timeout=60)
    ends = re.compile("successfully finished|will restart worker group")
    nodes.wait("host's agent decides", lambda: ends.search((nodes.folder / "host.log").read_text()))
    assert "successfully finished" not in (nodes.folder / "host.log").read_text()
    alone = nodes.wait_for_launch(processes=1)
    assert re.findall(r"Stopped by .* after step (\d+)", nodes.logs()) == [str(alone["step"])]
    nodes.finish("host")
    assert_same(nodes, whole[1], [2, 1])


def test_meeting_point_elsewhere(nodes, whole):
    """With the README's stand-alone meeting point no node is special: either of them may be lost."""
    [command] = re.findall(r"^python -c .*TCPStore.*$", README, re.M)
    python, *words = shlex.split(command.replace("29400", str(nodes.port)))
    nodes.start("meeting-point", [sys.executable, *words])
    nodes.join("first", hosts=False)
    nodes.join("second", hosts=False)
    nodes.wait_for_launch(processes=2, steps=6)
    [main] = [name for name in ("first", "second") if "nearest_even" in (nodes.folder / f"{name}.log").read_text()]
    nodes.kill(main)  # The node of rank 0, which writes the run folder and holds the processes' own meeting point.
    nodes.wait_for_launch(processes=1)
    nodes.finish("second" if main == "first" else "first")
    assert_same(nodes, whole[1], [2, 1])
