"""Where the ranks of a launch meet outside of collectives, so that one may work alone for as long as it takes."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samerun.errors import AgreedError, LostRank, UserError, one_line, require

OF_A_LAUNCH = ("WORLD_SIZE", "RANK", "MASTER_ADDR")  # What each launcher of several processes sets.


class Meeting:
    """The ranks of a launch, who exchange small values through the store by which torch's process groups are made.

    In a collective, a rank that comes late ends the run after the timeout, however well it is. Here every rank says
    that it is alive every few seconds, and only one that is silent for the timeout is lost. A rank that fails leaves
    its message to those that wait for it. Nothing here depends on a device, so it works before there is an Accelerator.
    """

    # Seconds after which it is said who is awaited: at first, when somebody may never come, and later.
    FIRST_PATIENCE = 3
    PATIENCE = 30

    def __init__(self, timeout_minutes: float):
        self.timeout = timedelta(minutes=timeout_minutes)
        self.host = socket.gethostname()
        self.rank, self.size = 0, 1
        self.store: dist.Store | None = None
        self.rounds = 0
        self.ended = threading.Event()
        self.pulse = threading.Thread(target=self.say_alive, daemon=True)
        if os.environ.keys() >= set(OF_A_LAUNCH) and number_in("WORLD_SIZE") > 1:
            self.rank, self.size = number_in("RANK"), number_in("WORLD_SIZE")
            begin = "they, and --machine_rank, begin with 0"
            require(self.rank < self.size, f"launch: RANK {self.rank} of WORLD_SIZE {self.size}: {begin}")

    def __enter__(self) -> "Meeting":
        if self.size > 1:
            self.store = dist.PrefixStore("samerun", self.open_store())
            self.pulse.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Tell the others that this rank leaves, and why it fails."""
        if not self.store:
            return
        told = [self.host, isinstance(error, UserError), "it has ended before the others"]
        if error:
            told[2] = one_line(error) or kind.__name__
        with suppress(RuntimeError):  # The store may be gone.
            self.store.set(f"left/{self.rank}", json.dumps(told))
        if error and self.rank == 0 and self.size > number_in("LOCAL_WORLD_SIZE"):
            time.sleep(2)  # The store may end with this process. Until then, the other nodes have read that.
        self.ended.set()
        self.pulse.join()
        self.store = None

    def open_store(self) -> dist.TCPStore:
        """The one that torch's process groups will use, too."""
        host, port = os.environ["MASTER_ADDR"], number_in("MASTER_PORT", 29500)  # The default is Accelerate's.
        require(0 < port < 2**16, f"launch: MASTER_PORT {port} is no port; give one up to 65535")
        is_holder = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_holder:
            self.find_main_process(host, port)
        try:
            return dist.TCPStore(
                host, port, self.size, is_holder, self.timeout, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            raise UserError(f"launch: MASTER_ADDR {host}, MASTER_PORT {port}: {one_line(error)}") from error

    def find_main_process(self, host: str, port: int) -> None:
        """Wait until it can be reached. Raises UserError after the timeout."""
        end = time.monotonic() + self.timeout.total_seconds()
        awaited = f"rank 0 at {host}:{port} (MASTER_ADDR and MASTER_PORT); this is rank {self.rank} of {self.size}"
        problem = "no answer"

        def tell() -> None:
            self.say_waiting(f"{awaited}: {problem}")

        patience = threading.Timer(self.FIRST_PATIENCE, tell)  # To look up the name may take longer than that.
        patience.start()
        try:
            while True:
                try:
                    socket.create_connection((host, port), timeout=5).close()
                    return
                except OSError as error:
                    problem = one_line(error)
                require(time.monotonic() < end, f"launch: there is no {awaited}: {problem}")
                time.sleep(0.1)
        finally:
            patience.cancel()

    def say_waiting(self, awaited: str) -> None:
        """By one process of each node."""
        if os.environ.get("LOCAL_RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
            advice = f". For a launch of one process, unset {', '.join(OF_A_LAUNCH)}." if self.rounds <= 1 else ""
            print(f"Waiting for {awaited}{advice}", flush=True)

    def say_alive(self) -> None:
        """Until the end, in a thread of its own."""
        every = min(5.0, self.timeout.total_seconds() / 4)
        with suppress(RuntimeError):  # The store has ended, and with it the launch.
            while not self.ended.wait(every):
                self.store.set(f"alive/{self.rank}", str(time.monotonic()))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which JSON can hold, in the order of the ranks. All ranks call it."""
        if self.size == 1:
            return [value]
        self.rounds += 1
        told = {rank: f"{self.rounds}/{rank}" for rank in range(self.size)}
        read = {rank: f"{self.rounds}/read/{rank}" for rank in range(1, self.size)}
        everything = f"{self.rounds}/all"
        self.store.set(told[self.rank], json.dumps(value))
        if self.rank == 0:
            self.wait_for(told)
            values = self.store.multi_get(list(told.values()))
            self.store.set(everything, "[" + ",".join(value.decode() for value in values) + "]")
            self.wait_for(read)  # The store may end with this process.
        else:
            self.wait_for({0: everything})
        values = json.loads(self.store.get(everything))
        if self.rank:
            self.store.set(read[self.rank], "")
        return values

    def wait_for_all(self) -> None:
        """Return when all ranks have called it."""
        self.gather(None)

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Each rank does its part; returns what JSON can hold of all. A UserError of any rank is raised by all."""
        done, refusal = None, None
        try:
            done = work()
        except UserError as error:
            refusal = str(error)
        parts = self.gather([done, refusal])
        refusals = [refusal for _, refusal in parts if refusal is not None]
        if refusals:
            raise AgreedError(refusals[0])
        return [done for done, _ in parts]

    def wait_for(self, keys: dict[int, str]) -> None:
        """Until each of these ranks has set its key. Raises an error if one of them has failed, or is lost."""
        began = time.monotonic()
        patience = self.FIRST_PATIENCE if self.rounds == 1 else self.PATIENCE
        pause, looked, is_said = 0.005, began, False
        heard = dict.fromkeys(keys, ("", began))  # What each of them said last, and when.
        while not self.store.check(list(keys.values())):
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
            now = time.monotonic()
            if now - looked < 1:
                continue
            looked = now
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
            for rank in missing:
                self.check_alive(rank, keys[rank], heard)
            if not is_said and now - began > patience and missing:
                is_said = True
                which = ", ".join(map(str, missing[:8])) + ("" if len(missing) < 9 else ", ...")
                self.say_waiting(f"{len(missing)} of {self.size} processes: rank {which}")

    def check_alive(self, rank: int, key: str, heard: dict[int, tuple[str, float]]) -> None:
        """Raises an error if the rank has left without its key, or has been silent for too long."""
        if self.store.check([f"left/{rank}"]) and not self.store.check([key]):
            host, is_user_error, message = json.loads(self.store.get(f"left/{rank}"))
            if self.rank:  # The main process says it.
                sys.exit(2 if is_user_error else 1)
            if is_user_error:
                raise AgreedError(f"rank {rank} on {host}: {message}")
            raise LostRank(f"rank {rank} on {host} does not go on: {message}")
        said = ""
        if self.store.check([f"alive/{rank}"]):
            said = self.store.get(f"alive/{rank}").decode()
        before, since = heard[rank]
        if said != before:
            heard[rank] = said, time.monotonic()
        elif time.monotonic() - since > self.timeout.total_seconds():
            minutes = self.timeout.total_seconds() / 60
            raise LostRank(f"rank {rank} has been silent for {minutes:g} minutes (run.timeout_minutes)")


def number_in(name: str, default: int = 1) -> int:
    """An environment variable of the launcher."""
    value = os.environ.get(name, str(default))
    advice = "unset it, or start by accelerate launch"
    require(value.isdecimal(), f"the environment variable {name} is {value!r}, and no number; {advice}")
    return int(value)
