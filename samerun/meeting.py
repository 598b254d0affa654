"""How the ranks of a launch find rank 0, and tell each other things while one works alone for as long as it takes."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samerun.early import earlier_signals
from samerun.errors import AgreedError, LostRank, Stopped, UserError, is_lost_rank, one_line, require

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
        self.pulse_seconds = min(5.0, 60 * timeout_minutes / 4)
        self.host = socket.gethostname()
        self.store: dist.Store | None = None
        self.rounds = 0
        self.stopped_by = ""  # What has stopped this rank, for those that wait for it.
        self.note_failure: Callable[[str], None] = lambda reason: None  # RunFolder's, once that has noted a lost rank.
        self.ended = threading.Event()
        self.pulse = threading.Thread(target=self.say_alive, daemon=True)
        check_environment()
        self.rank, self.size = number_in("RANK", 0), number_in("WORLD_SIZE")
        begin = "ranks, and --machine_rank, begin with 0; without a launcher, unset RANK"
        require(self.rank < self.size, f"launch: RANK {self.rank} of WORLD_SIZE {self.size}: {begin}")

    def __enter__(self) -> "Meeting":
        if self.size > 1:
            self.store = dist.PrefixStore("samerun", self.open_store())
            own = f"process {os.getpid()} on {self.host}"
            holder = self.store.compare_set(f"taken/{self.rank}", "", own).decode()
            # In a notebook, the store of an interrupted launch still answers.
            advice = "give each process another rank; if that process has ended, give the launch another port"
            require(holder == own, f"launch: {holder} has RANK {self.rank}, too; {advice}")
            self.pulse.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Tell the others that this rank leaves, and why."""
        if not self.store:
            return
        lost = []
        # The store does not answer if the main process stands still, and then nothing ends a question.
        thread = threading.Thread(target=lambda: lost.append(self.leave(kind, error)), daemon=True)
        thread.start()
        thread.join(1.5 * self.pulse_seconds + 8)
        self.ended.set()
        self.pulse.join(1)
        if not thread.is_alive():
            self.store = None
        if lost and lost[0]:
            raise lost[0] from error

    def leave(self, kind: type | None, error: BaseException | None) -> LostRank | Stopped | None:
        """Returns a better reason than the error, if there is one."""
        lost = self.lost_rank_behind(error) if error else None
        if isinstance(lost, LostRank):
            self.note_failure(one_line(lost))
        status, why = 1, "it has ended before the others"
        if self.stopped_by:
            status, why = 0, self.stopped_by
        elif error:
            status = 2 if isinstance(error, UserError) else 1
            why = one_line(lost or error) or kind.__name__
        with suppress(RuntimeError):  # The store may be gone.
            self.store.set(f"left/{self.rank}", json.dumps([self.host, status, why]))
            if self.stopped_by or (error and not is_lost_rank(lost or error)):
                self.store.compare_set("left/first", "", str(self.rank))
            if (error or self.stopped_by) and not self.is_on_one_node:
                told = self.exchange_reasons()
                if self.rank and told and isinstance(error, Exception):
                    is_same = f": {told}".endswith(f": {why}") or why.endswith(f": {told}")
                    (lost or error).is_said = is_same or is_lost_rank(error)  # By the main process.
        return lost

    def lost_rank_behind(self, error: BaseException) -> LostRank | Stopped | None:
        """Why a collective has failed: another rank has left with a reason, or some are silent.

        Not asked on one node, where the launcher says it, nor in an elastic launch, which should restart without delay.
        """
        is_named = isinstance(error, LostRank) or not is_lost_rank(error)
        if is_named or self.is_on_one_node or is_elastic():
            return None
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            before = self.all_said(others)
            end = time.monotonic() + 1.5 * self.pulse_seconds
            while time.monotonic() < end:
                if self.store.check(["left/first"]):
                    rank = int(self.store.get("left/first"))
                    host, status, why = self.left_by(rank)
                    return LostRank(f"rank {rank} on {host} does not go on: {why}") if status else Stopped(why)
                time.sleep(0.25)
            now = self.all_said(others)
            silent = [rank for rank in others if now[rank] == before[rank] and not self.left_by(rank)[2]]
            names = ", ".join(self.name_of(rank, before[rank]) for rank in silent[:8])
        except RuntimeError:  # The store has gone with the main process, or with torchrun beside it.
            names = "rank 0" if self.rank else ""
        return LostRank(f"no answer from {names}: {one_line(error)}") if names else None

    @property
    def is_on_one_node(self) -> bool:
        return self.size <= number_in("LOCAL_WORLD_SIZE")

    def last_said(self, rank: int) -> str:
        """When and where a rank was alive, as it has said it last."""
        key = f"alive/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def all_said(self, ranks: list[int]) -> dict[int, str]:
        """last_said() of each, in a single question if all have come: many ranks may ask at a time."""
        keys = [f"alive/{rank}" for rank in ranks]
        if self.store.check(keys):
            return {rank: said.decode() for rank, said in zip(ranks, self.store.multi_get(keys))}
        return {rank: self.last_said(rank) for rank in ranks}

    def name_of(self, rank: int, said: str) -> str:
        """The rank, with its host if it has ever come."""
        return f"rank {rank}" + (f" on {said.split()[1]}" if said else "")

    def exchange_reasons(self) -> str:
        """Wait a few seconds until the main process and the others have read each other's reason, because the store
        ends with the main process. Returns the main process's reason."""
        others = [f"told/{rank}" for rank in range(1, self.size)]
        awaited = ["left/0"] if self.rank else others
        seconds = 5
        if self.rank == 0:
            seconds = 2
        elif is_elastic():  # Which should restart without delay.
            seconds = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.store.check(awaited):
            time.sleep(0.05)
        _, _, why = self.left_by(0)
        if self.rank:
            self.store.set(f"told/{self.rank}", "")
        return why

    def left_by(self, rank: int) -> tuple[str, int, str]:
        """The host of a rank that has left, its exit status, and why; 0 and no words for another one."""
        key = f"left/{rank}"
        if not self.store.check([key]):
            return "", 0, ""
        host, status, why = json.loads(self.store.get(key))
        return host, status, why

    def open_store(self) -> dist.TCPStore:
        """The one that torch's process groups will use, too."""
        host, port = os.environ["MASTER_ADDR"], number_in("MASTER_PORT", 29500)  # The default is Accelerate's.
        require(0 < port < 2**16, f"launch: MASTER_PORT {port} is not a port; give one up to 65535")
        is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # By torchrun, with its own processes.
        # It still has the keys of the ranks that have failed, which torch would take for those of the new ones.
        advice = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        is_stale = is_shared and number_in("TORCHELASTIC_RESTART_COUNT", 0) > 0
        require(not is_stale, f"launch: torch cannot restart ranks with the store that torchrun shares; {advice}")
        is_holder = self.rank == 0 and not is_shared
        if not is_holder:
            self.find_main_process(host, port)
        which = "this host" if is_holder else "that of rank 0"
        awaited = f"an answer from {host}:{port} (MASTER_ADDR and MASTER_PORT), which should be {which}"
        patience = threading.Timer(self.FIRST_PATIENCE, self.say_waiting, [awaited])
        patience.start()
        try:
            return in_time(
                lambda: dist.TCPStore(
                    host, port, self.size, is_holder, self.timeout, wait_for_workers=False, multi_tenant=True
                ),
                self.timeout.total_seconds() + 2,
                f"launch: there is no {awaited.removeprefix('an ')}",
            )
        except dist.DistError as error:
            advice = "; give all nodes another port by --main_process_port" if "EADDRINUSE" in str(error) else ""
            raise UserError(f"launch: MASTER_ADDR {host}, MASTER_PORT {port}: {one_line(error)}{advice}") from error
        finally:
            patience.cancel()

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
                except UnicodeError as error:  # Later it would be no name either.
                    raise UserError(f"launch: MASTER_ADDR {host!r} is not a host name: {one_line(error)}") from error
                except OSError as error:
                    problem = one_line(error)
                leave_at_signals()  # Nobody can be told. Later, all ranks stop.
                require(time.monotonic() < end, f"launch: there is no {awaited}: {problem}")
                time.sleep(0.1)
        finally:
            patience.cancel()

    def say_waiting(self, awaited: str, nobody_came: bool = True) -> None:
        """Print on one process of each node who is awaited."""
        if os.environ.get("LOCAL_RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
            advice = f". For a launch of one process, unset {', '.join(OF_A_LAUNCH)}." if nobody_came else ""
            print(f"Waiting for {awaited}{advice}", flush=True)

    def say_alive(self) -> None:
        """Tell the store every few seconds that this rank is alive, in a thread of its own, until the end."""
        with suppress(RuntimeError):  # The store has ended, and with it the launch.
            while True:
                self.store.set(f"alive/{self.rank}", f"{time.monotonic()} {self.host}")
                if self.ended.wait(self.pulse_seconds):
                    return

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

    def by_main(self, work: Callable[[], Any]) -> Any:
        """What the main process finds, which JSON can hold, for all ranks. Its UserError is raised by all."""
        found, *_ = self.together(lambda: work() if self.rank == 0 else None)
        return found

    def wait_for(self, keys: dict[int, str]) -> None:
        """Return when each of these ranks has set its key. Raises an error if one of them has failed, or is lost."""
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
                has_come = any(self.store.check([f"alive/{rank}"]) for rank in missing)
                self.say_waiting(f"{len(missing)} of {self.size} processes: rank {which}", not has_come)

    def check_alive(self, rank: int, key: str, heard: dict[int, tuple[str, float]]) -> None:
        """Raises an error if the rank has left without its key, or has been silent for too long."""
        host, status, why = self.left_by(rank)
        if why and not self.store.check([key]):
            if status == 0:
                raise Stopped(why)
            if self.rank:  # The main process says it.
                sys.exit(status)
            if status == 2:
                raise AgreedError(f"rank {rank} on {host}: {why}")
            raise LostRank(f"rank {rank} on {host} does not go on: {why}")
        said = self.last_said(rank)
        before, since = heard[rank]
        if said != before:
            heard[rank] = said, time.monotonic()
        elif time.monotonic() - since > self.timeout.total_seconds():
            minutes = self.timeout.total_seconds() / 60
            silence = f"has been silent for {minutes:g} minutes (run.timeout_minutes)"
            raise LostRank(f"{self.name_of(rank, said)} {silence}")


def in_time(work: Callable[[], Any], seconds: float, refusal: str) -> Any:
    """What `work` returns or raises, or UserError after so many seconds. It may be deaf to time and to signals."""
    done = []

    def work_on() -> None:
        try:
            done.append((work(), None))
        except Exception as error:
            done.append((None, error))

    thread = threading.Thread(target=work_on, daemon=True)
    began = time.monotonic()
    thread.start()
    while not done:
        thread.join(0.1)
        waited = time.monotonic() - began
        if not done and waited > Meeting.FIRST_PATIENCE:  # Usually the others can still be told of a signal.
            leave_at_signals()
        require(done or waited < seconds, refusal)
    result, error = done[0]
    if error:
        raise error
    return result


def is_elastic() -> bool:
    """Whether torchrun starts the ranks again when some fail."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def has_other_launchers() -> bool:
    """Whether each of several nodes has a launcher, as those of torchrun and Accelerate, which waits for the others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and number_in("WORLD_SIZE") > number_in("LOCAL_WORLD_SIZE")


def leave_at_signals() -> None:
    """End this process if a signal has come: it has not begun anything."""
    if earlier_signals:
        print(f"Stopped by {signal.Signals(earlier_signals[0]).name} before the ranks have met.", flush=True)
        sys.exit(0)


def check_environment() -> None:
    """Raises UserError for what a launcher would not say."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
        is_count = name.endswith("WORLD_SIZE")
        advice = "unset it, or start by accelerate launch"
        require(number_in(name) > 0 or not is_count, f"the environment variable {name} is 0; {advice}")
    has_parts = number_in("WORLD_SIZE") > 1 or "LOCAL_RANK" in os.environ
    # Without its RANK, as scripts for SLURM may leave it, a process would wait for itself, and for no signal.
    missing = " and ".join(name for name in ("MASTER_ADDR", "RANK") if name not in os.environ)
    advice = "unset them, or start by accelerate launch"
    require(not (has_parts and missing), f"launch: WORLD_SIZE or LOCAL_RANK is set without {missing}; {advice}")


def number_in(name: str, default: int = 1) -> int:
    """An environment variable of the launcher."""
    value = os.environ.get(name, str(default))
    advice = "unset it, or start by accelerate launch"
    is_number = value.isdecimal() and len(value) < 10  # Python's int() has a limit of digits.
    require(is_number, f"the environment variable {name} is {value[:50]!r}, not a number; {advice}")
    return int(value)
