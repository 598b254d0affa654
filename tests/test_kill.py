"""Kills and signals at any moment, to anybody: the run that comes of it is the run that nobody disturbed.

Ranks are frozen (SIGSTOP) before they are killed, so that the moment of a kill can be checked from outside: a draft of
a checkpoint that lies there while everybody stands still is a checkpoint that is half written.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import transformers
from helpers import (
    ROOT,
    VOCABULARY,
    Done,
    difference,
    free_port,
    kill_tree,
    launch,
    make_rows,
    run,
    start,
    tiny_config,
    write_config,
    write_rows,
)
from torch.distributed.checkpoint import CheckpointException
from warm import Launch

import train
from samerun.run import folder as folder_room
from samerun.run.launch import StopSignal, report
from samerun.run.saver import Saver

MAX_STEPS, SAVE_EVERY, EVAL_EVERY = 72, 4, 6  # No step is followed by a checkpoint and then by one with an evaluation.
ALLOWED_SECONDS = 30  # Between SIGTERM and SIGKILL, by torchrun and by most schedulers.


def alive(processes: list[psutil.Process], *other: str) -> list[int]:
    """Who still runs: an orphan that has exited may stay as a zombie where nobody reaps it. `other`: not in these."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            running += [process.pid] if process.status() not in (psutil.STATUS_ZOMBIE, *other) else []
    return running


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def ranks_of(launcher: subprocess.Popen, count: int) -> list[psutil.Process]:
    """The processes that a launcher has started to train, by rank."""
    if isinstance(launcher, Launch):  # They were forked, in this order, before the launcher had a number.
        return sorted(psutil.Process(launcher.pid).children(), key=lambda child: (child.create_time(), child.pid))
    ranks, deadline = {}, time.monotonic() + 300
    while len(ranks) < count and launcher.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(launcher.pid).children():
            with contextlib.suppress(psutil.Error):
                if str(ROOT / "train.py") in child.cmdline():
                    ranks[int(child.environ().get("RANK", 0))] = child
        time.sleep(0.05)
    return [ranks[rank] for rank in range(count)]


def steps_logged(done: Done) -> list[int]:
    return [line["step"] for line in done.metrics if "train/loss" in line]


def assert_complete(checkpoint: Path) -> None:
    """Every file of it is there as it was written."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    contents = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}
    assert files == {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}


def drafts(folder: Path) -> list[str]:
    """What is written under a hidden name until it is complete."""
    return sorted(path.name for path in folder.rglob(".*.tmp"))


def exported(done: Done) -> list[str]:
    """The files of the exported model."""
    return sorted(path.name for path in (done.folder / "model").glob("*") if path.is_file())


# Kills ----------------------------------------------------------------------------------------------------------------
def config_to_kill(folder: Path) -> dict:
    """Saving, evaluating and exporting take long enough to be hit, and steps are short: positions that no row reaches
    cost little but are saved, and there are many rows to evaluate on."""
    config = tiny_config(folder)
    config["run"] |= {"max_steps": MAX_STEPS, "save_every": SAVE_EVERY, "eval_every": EVAL_EVERY}
    lengths = np.random.default_rng(4).integers(2, 25, 1000).tolist()
    config["data"]["eval_source"]["path"] = str(write_rows(folder / "many", make_rows(lengths, seed=5, masked=0.4)))
    torch.manual_seed(1)
    architecture = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=30_000,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.AutoModelForCausalLM.from_config(architecture).save_pretrained(folder / "long")
    config["model"]["pretrained"] = str(folder / "long")
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of the kills, and its run on one process that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    config = config_to_kill(folder)
    with pytest.MonkeyPatch.context() as patch:
        # One thread: where other work shares the cores, a second costs a run of small steps far more than it gives.
        torch.set_num_threads(1)
        patch.setenv("OMP_NUM_THREADS", "2")  # Anything but 1 makes train.py leave the number as it is.
        return config, run(folder, config)


class Watch:
    """One launch of the run, looked at from outside, and killed."""

    def __init__(self, process: subprocess.Popen, count: int, done: Done, launches: int, orphans: list[psutil.Process]):
        self.process, self.done, self.launches, self.orphans = process, done, launches, orphans
        self.export = done.folder / ".model.tmp"
        self.ranks = ranks_of(process, count)
        self.began = self.last = None  # The step after which this launch began, and the last one logged.
        self.is_evaluated = False  # Whether that one is.
        self.changed, self.size = 0.0, None  # When that was, and how long the file was then.
        self.started = time.monotonic()

    def look(self) -> None:
        """Read what is new. Raises AssertionError for ranks of a killed launcher that have not stopped as they must."""
        if self.began is None:
            time.sleep(0.05)  # Nothing is to be hit yet: leave the cores to the ranks.
            late = time.monotonic() - self.started > ALLOWED_SECONDS and alive(self.orphans)
            assert not late, f"still there {ALLOWED_SECONDS} seconds after their launcher was killed: {late}"
        with contextlib.suppress(FileNotFoundError, IndexError, json.JSONDecodeError):  # Empty or half a line so far.
            size = (self.done.folder / "metrics.jsonl").stat().st_size
            if size == self.size and self.began is not None:
                return
            metrics, self.size = self.done.metrics, size
            began = [line["step"] for line in metrics if "plan/num_processes" in line]
            if self.began is None and len(began) == self.launches:  # The first line of a launch: it has the folder.
                self.began = began[-1]
            self.is_evaluated = "eval/loss" in metrics[-1]
            if self.last != metrics[-1]["step"]:
                self.last, self.changed = metrics[-1]["step"], time.monotonic()

    def at(self, moment: str, after: int, delay: float) -> bool:
        """Whether the launch is now at this moment, at least `after` steps after its begin."""
        if moment == "export":
            return len(list(self.export.glob("*"))) > 1  # More than the pipe. Of a folder that is gone, nothing.
        if moment == "checkpoint":
            found = [int(path.name[6:-4]) for path in (self.done.folder / "checkpoints").glob(".step-????????.tmp")]
            return any(step > self.began + after for step in found)  # Others are left over from earlier kills.
        if moment == "evaluation":  # It comes when its step is logged and lasts many times as long as the step.
            evaluating = self.last % EVAL_EVERY == 0 and not self.is_evaluated and self.last > self.began
            return evaluating and time.monotonic() - self.changed > 0.1 + delay
        return self.began + after < self.last < MAX_STEPS

    def hold_export(self) -> None:
        """An export comes once and lasts milliseconds. So the first file of its tokenizer, which follows the weights,
        is a pipe: to open it lasts until somebody reads. It is laid after the launch has removed older drafts."""
        with contextlib.suppress(FileExistsError):  # The launch was quicker.
            self.export.mkdir()
            os.mkfifo(self.export / "tokenizer_config.json")

    def freeze(self, moment: str, after: int, delay: float) -> bool:
        """Return with all ranks standing still at the moment. False if an export was over before it was seen."""
        deadline = time.monotonic() + 300  # Most of a run, maybe where others keep all the cores busy.
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
            self.look()
            if self.began is None:
                continue
            if moment == "export" and not self.export.exists():
                self.hold_export()
            if not self.at(moment, after, delay):
                continue
            time.sleep(delay if moment in ("checkpoint", "export") else 0)
            send(self.ranks, signal.SIGSTOP)
            while alive(self.ranks, psutil.STATUS_STOPPED):
                time.sleep(0.001)
            before = self.last
            self.look()
            if before == self.last and self.at(moment, after, delay):
                # An open() that was stopped while it waits starts over: then as a plain file. There is no pipe where
                # the export came first, because others keep the cores busy.
                pipe = self.export / "tokenizer_config.json"
                if moment == "export" and pipe.is_fifo():
                    pipe.unlink()
                return True
            send(self.ranks, signal.SIGCONT)  # Too late, it has ended: the next one.
        if moment == "export" and self.process.poll() == 0:
            return False
        send(self.ranks, signal.SIGKILL)
        kill_tree(self.process)
        raise AssertionError(f"{moment} was not reached after step {self.last}:\n{self.process.communicate()[0]}")


def assert_gone(orphans: list[psutil.Process]) -> None:
    """Ranks of a killed launcher may be about to end when the next launch gets their folder, but not train on."""
    since = time.monotonic()
    while alive(orphans) and time.monotonic() - since < ALLOWED_SECONDS:
        time.sleep(0.02)
    assert not alive(orphans), "ranks of a killed launcher beside a new run"


def kill(victim: str, process: subprocess.Popen, ranks: list[psutil.Process], rank: psutil.Process) -> None:
    """SIGKILL to one rank, to the launcher, or to all of them. The others, which were frozen, go on."""
    if victim == "rank":
        send([rank], signal.SIGKILL)
        send(ranks, signal.SIGCONT)
        process.communicate(timeout=ALLOWED_SECONDS + 15)
        assert process.returncode != 0
    elif victim == "all":
        send([psutil.Process(process.pid), *ranks], signal.SIGKILL)
        assert_end(ranks, process)  # Their output ends a little before they do.
    else:
        process.kill()
        send(ranks, signal.SIGCONT)
        process.wait()


def check_orphans(launcher: subprocess.Popen, found: list, expected: list | None) -> None:
    """What the ranks of a killed launcher did: they saved, or completed the export if that is expected."""
    output = launcher.communicate(timeout=10)[0]
    assert ("Stopped by SIGTERM after step" if expected is None else "Finished:") in output
    assert "Traceback" not in output and found == (expected or [])


@pytest.mark.slow
def test_killed_in_every_way(whole, tmp_path):
    """11 kills on 1, 2 and 3 processes in turn: of any rank, of the launcher or of all; in a step, in an evaluation, in
    the middle of a checkpoint or of the export. The same command goes on each time. KILL_SEED repeats an order."""
    config, undisturbed = whole
    seed = int(os.environ.get("KILL_SEED", random.randrange(10_000)))
    print(f"KILL_SEED={seed}")
    rng, done = random.Random(seed), Done(0, "", tmp_path / "run")
    victims = ("rank", "launcher", "all")
    kills = [(moment, victim) for moment in ("step", "checkpoint", "evaluation") for victim in victims]
    rng.shuffle(kills)
    # An export that lost only its launcher is completed all the same; the other is left to the launch without a kill.
    kills += [("export", "launcher"), ("export", rng.choice(("rank", "all")))]
    orphans, orphaned, early, first, launches = [], None, 0, rng.randrange(3), 0

    for number, (moment, victim) in enumerate(kills):
        count = 1 + (first + number) % 3
        # Anywhere up to the second new checkpoint, but once surely before the first.
        after = 0 if number == 0 else rng.randrange(0, SAVE_EVERY + 2)
        delay, tries = rng.uniform(0, 0.02), 0
        frozen = False
        while not frozen:  # Where others keep the cores busy, an export may be over before this process has seen it.
            tries += 1
            assert tries <= 5, f"the {moment} was not seen in {tries - 1} launches"
            # Without its last checkpoint, a run repeats steps. So no launch begins with the export.
            if moment == "export":
                shutil.rmtree(done.folder / "checkpoints" / f"step-{MAX_STEPS:08d}", ignore_errors=True)
            # Where the launcher goes with them or has to notice, it is the real one.
            process, launches = start(tmp_path, config, processes=count, warm=victim == "all"), launches + 1
            watch = Watch(process, count, done, launches, orphans)
            frozen = watch.freeze(moment, after, delay)
        assert_gone(orphans)  # Not before: meanwhile the new launch would go on, maybe to its last step.
        logged, left = steps_logged(done), drafts(done.folder)
        assert logged == list(range(1, len(logged) + 1))
        complete = sorted((done.folder / "checkpoints").glob("step-*"))
        early += not complete or int(complete[-1].name[5:]) <= watch.began
        print(f"kill {number + 1}: {count} processes, {victim} at {moment}, step {watch.began} to {watch.last}, {left}")

        if orphaned:  # The ranks of the last launcher: seen to be gone when this launch began.
            exporting = kills[number - 1][0] == "export"
            check_orphans(orphaned, exported(done), exported(undisturbed) if exporting else None)
        orphans, orphaned = [], None
        # The export is written by rank 0 alone: what loses another rank may be completed before anybody notices.
        kill(victim, process, watch.ranks, watch.ranks[0] if moment == "export" else rng.choice(watch.ranks))
        if victim == "all":
            assert drafts(done.folder) == left  # Nobody was left to write anything else.
        if victim == "launcher":
            orphans, orphaned = watch.ranks, process
        if victim != "launcher":
            assert not alive(watch.ranks)
            for checkpoint in (done.folder / "checkpoints").glob("step-*"):
                assert_complete(checkpoint)

    # The last launch has nothing to do but the export; one more finds it done.
    assert [path.name for path in sorted((done.folder / "checkpoints").glob("step-*"))][-1] == f"step-{MAX_STEPS:08d}"
    final = launch(tmp_path, config, warm=True)
    assert final.launches[launches:] == [MAX_STEPS] and "Finished already" in run(tmp_path, config).output
    assert final.status == {"status": "finished", "step": MAX_STEPS} and exported(final) == exported(undisturbed)
    assert early >= 1 and steps_logged(final) == list(range(1, MAX_STEPS + 1)) and not drafts(final.folder)
    np.testing.assert_allclose(final.losses, undisturbed.losses, rtol=1e-6)
    evaluated = final.logged("eval/loss")
    assert len(evaluated) == MAX_STEPS // EVAL_EVERY
    np.testing.assert_allclose(evaluated, undisturbed.logged("eval/loss"), rtol=1e-6)
    assert difference(final.weights, undisturbed.weights) < 1e-5


# Signals --------------------------------------------------------------------------------------------------------------
def start_ranks(folder: Path, config: dict, *overrides, count: int = 2, **more) -> list[Launch]:
    """The ranks without a launcher, each with the environment that accelerate launch gives it: their exit statuses are
    seen, and nobody but the test signals them."""
    common = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    environments = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    environments = [{name: str(value) for name, value in environment.items()} for environment in environments]
    return [start(folder, config, *overrides, processes=None, env=one, warm=True, **more) for one in environments]


def wait_for_step(processes: list[subprocess.Popen], done: Done, launches: int) -> None:
    """Return once launch number `launches` has logged a step of its own, while all its processes run."""
    deadline = time.monotonic() + 300
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError, json.JSONDecodeError):  # Empty or half a line so far.
            if len(began := done.launches) == launches and steps_logged(done)[-1] > began[-1]:
                return
        time.sleep(0.02)
    [kill_tree(process) for process in processes]
    raise AssertionError("no step was reached:\n" + "\n".join(process.communicate()[0] or "" for process in processes))


def assert_stopped(done: Done, output: str, launches: int) -> None:
    """A complete checkpoint of the last step done, nothing half written, and a last line that says how to go on."""
    step = done.status["step"]
    assert done.status["status"] == "stopped" and step > done.launches[launches - 1]
    assert steps_logged(done) == list(range(1, step + 1)) and not drafts(done.folder)
    assert done.checkpoints[-1] == f"step-{step:08d}" and not (done.folder / "model").exists()
    assert_complete(done.folder / "checkpoints" / done.checkpoints[-1])
    said = [line for line in output.splitlines() if line.startswith(("Stopped", "Finished", "error:"))]
    assert len(said) == 1 and f"after step {step};" in said[0] and "the same command continues" in said[0]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A run in which signals arrive in the middle of steps, mostly while it evaluates and samples after each."""
    config = tiny_config(tmp_path_factory.mktemp("slow"))
    config["run"] |= {"max_steps": 300, "eval_every": 1}
    config["eval"] = {"prompts": ["[a, b]", "[c]"], "max_new_tokens": 60}
    return config


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "SIGHUP")])
def test_a_signal_is_answered_at_once(tmp_path, monkeypatch, capfd, number, name):
    """While the step goes on, and by the name that people have for it."""
    said, train_step = [], train.train_step

    def interrupted(*args):
        capfd.readouterr()
        signal.raise_signal(number)
        said.append(capfd.readouterr().out)
        return train_step(*args)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    monkeypatch.setattr(train, "train_step", interrupted)
    done = run(tmp_path, tiny_config(tmp_path))
    assert said == [f"\n{name}: saving after this step.\n"]
    assert_stopped(done, done.output, 1)
    assert f"Stopped by {name} after step 1;" in done.output


def test_with_nohup_it_outlives_its_terminal(tmp_path, monkeypatch):
    """nohup starts a program that ignores SIGHUP, and it must go on to do so."""
    handled, saver = [], Saver

    def hung_up(*args):
        handled.append(signal.getsignal(signal.SIGHUP))
        signal.raise_signal(signal.SIGHUP)
        return saver(*args)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(train, "Saver", hung_up)
    done = run(tmp_path, tiny_config(tmp_path))
    assert handled == [signal.SIG_IGN] and "Finished:" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal(slow, tmp_path, nohup):
    """As where the connection to a machine is lost: the run saves, though nobody reads what it says any more. With
    nohup it goes on, by the way that accelerate_configs/README.md tells for several processes."""
    done = Done(0, "", tmp_path / "run")
    launcher = "--config_file", ROOT / "accelerate_configs" / "cpu.yaml", "--num_processes", 2
    command = sys.executable, "-m", "accelerate.commands.launch", *launcher, "--main_process_port", free_port()
    command = *command, ROOT / "train.py", "--config", write_config(tmp_path, slow)
    if nohup:
        command = "env", "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT", "nohup", *command
    in_terminal = "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])"
    terminal = subprocess.Popen(
        [sys.executable, "-c", in_terminal, *map(str, command)], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    wait_for_step([terminal], done, 1)
    [launched] = psutil.Process(terminal.pid).children()
    processes = [launched, *launched.children(recursive=True)]
    terminal.kill()
    terminal.wait()
    closed = time.monotonic()
    if nohup:
        launched.send_signal(signal.SIGHUP)  # As a shell in the terminal does to its jobs.
        last = done.status["step"]
        while done.status["step"] < last + 3:
            assert len(alive(processes)) == len(processes) and time.monotonic() - closed < 90
            time.sleep(0.05)
        send(processes, signal.SIGTERM)
        closed = time.monotonic()
    while alive(processes) and time.monotonic() - closed < ALLOWED_SECONDS:
        time.sleep(0.05)
    assert not alive(processes) and done.status["status"] == "stopped"
    assert_complete(done.folder / "checkpoints" / done.checkpoints[-1])
    assert done.checkpoints[-1] == f"step-{done.status['step']:08d}"


def test_signal_to_any_rank(slow, tmp_path):
    """SIGTERM or SIGINT to one of two ranks, or to both: all stop after the same step and exit with 0. A repetition
    within two seconds, by which launchers insist on nothing, is the same request."""
    done = Done(0, "", tmp_path / "run")
    names = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
    cases = [([1], signal.SIGTERM), ([0, 1], signal.SIGINT)]
    for launches, (targets, number) in enumerate(cases, start=1):
        ranks = start_ranks(tmp_path, slow)
        wait_for_step(ranks, done, launches)
        signalled = time.monotonic()
        for _ in range(2):
            [ranks[rank].send_signal(number) for rank in targets]
            time.sleep(0.03)
        outputs = [rank.communicate(timeout=ALLOWED_SECONDS)[0] for rank in ranks]
        assert time.monotonic() - signalled < ALLOWED_SECONDS
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
        assert_stopped(done, outputs[0], launches)
        assert outputs[0].splitlines()[-1].startswith(f"Stopped by {names[number] if 0 in targets else 'a signal'}")
        assert not any("Stopped" in output for output in outputs[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, count, everybody", [(signal.SIGINT, 3, False), (signal.SIGTERM, 2, True), (signal.SIGINT, 1, False)]
)
def test_signal_to_the_launcher(slow, tmp_path, number, count, everybody):
    """Alone, or together with all its ranks as a scheduler does it. The launcher itself may report what it likes."""
    done = Done(0, "", tmp_path / "run")
    process = start(tmp_path, slow, processes=count)
    ranks = ranks_of(process, count)
    wait_for_step([process], done, 1)
    signalled = time.monotonic()
    send([psutil.Process(process.pid), *(ranks if everybody else [])], number)
    while alive(ranks) and time.monotonic() - signalled < ALLOWED_SECONDS:
        time.sleep(0.05)
    assert not alive(ranks)
    output, _ = process.communicate(timeout=15)
    assert_stopped(done, output, 1)


ONE_IS_LATE = """
import os, sys, time
sys.path.insert(0, {root!r})
import train
def stop_after_steps(*args, stop_after_steps=train.StopSignal.stop_after_steps):
    open("{folder}/there-" + os.environ["RANK"], "w").close()
    while os.environ["RANK"] == "1":
        time.sleep(0.01)
    stop_after_steps(*args)
train.StopSignal.stop_after_steps = stop_after_steps
sys.exit(train.main())
"""


def test_a_signal_while_a_rank_waits_for_a_late_one(slow, tmp_path):
    """Before the first step. The one that is there would never hear of it while it makes a process group."""
    script = tmp_path / "fork.py"
    script.write_text(ONE_IS_LATE.format(root=str(ROOT), folder=str(tmp_path)))
    ranks = start_ranks(tmp_path, slow, script=script)
    while len(list(tmp_path.glob("there-*"))) < 2:
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.02)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    try:
        outputs = [rank.communicate(timeout=ALLOWED_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            kill_tree(rank)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert "Stopped by SIGTERM before the first step" in outputs[0]
    assert Done(0, "", tmp_path / "run").status == {"status": "stopped", "step": 0}


def test_ranks_make_a_group_once_none_of_them_would_leave(monkeypatch):
    """They wait for a late one before that, and for each other after it."""
    seen = []
    monkeypatch.setattr("samerun.run.launch.new_host_group", lambda _: seen.append("group"))
    meeting = SimpleNamespace(wait_for_all=lambda: seen.append(StopSignal.raises))
    stop = StopSignal()
    stop.raise_at_signals()
    stop.stop_after_steps(None, meeting)
    assert seen == [True, False, "group"]


@pytest.mark.parametrize("signalled", [True, False])
def test_a_rank_that_is_ended_does_not_speak_of_lost_connections(monkeypatch, capsys, signalled):
    """Another one has failed, and says why. Only where nobody ends this one is the connection the news."""
    monkeypatch.setattr(StopSignal, "requested", "SIGTERM" if signalled else "")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert report(RuntimeError("Connection closed by peer")) == 1
    assert capsys.readouterr().err == ("" if signalled else "error: Connection closed by peer\n")


@pytest.mark.slow
def test_a_signal_in_a_long_evaluation(slow, tmp_path):
    """To one of two ranks, where the evaluation would take minutes: both save within seconds, and exit with 0."""
    done = Done(0, "", tmp_path / "run")
    ranks = start_ranks(tmp_path, slow, "--eval.prompts", json.dumps(["a"] * 500))
    wait_for_step(ranks, done, 1)
    ranks[1].send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=ALLOWED_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert_stopped(done, outputs[0], 1)
    assert done.status["step"] == 1 and not done.logged("eval/loss")


SAYS_WHEN_IT_SAMPLES = """
import os, sys
sys.path.insert(0, {root!r})
import train
from samerun.run import sample
def encode_prompt(*args, encode_prompt=sample.encode_prompt):
    if os.path.exists("{folder}/run/metrics.jsonl"):  # Not when the prompts are checked.
        open("{folder}/samples-" + os.environ["RANK"], "w").close()
    return encode_prompt(*args)
sample.encode_prompt = encode_prompt
sys.exit(train.main())
"""


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(slow, tmp_path):
    """Where what goes on would take long: not within two seconds of the first one, but after them. A second SIGTERM,
    which schedulers send, does not."""
    done = Done(0, "", tmp_path / "run")
    long = "--eval.prompts", "a", "--eval.max_new_tokens", 20_000, "--eval.temperature", 0
    script = tmp_path / "fork.py"
    script.write_text(SAYS_WHEN_IT_SAMPLES.format(root=str(ROOT), folder=str(tmp_path)))
    ranks = start_ranks(tmp_path, slow, *long, script=script)
    wait_for_step(ranks, done, 1)
    while len(list(tmp_path.glob("samples-*"))) < 2:  # Before they sample, a first signal stops them at once.
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.02)
    for number, seconds in (signal.SIGTERM, 2.5), (signal.SIGTERM, 0.1), (signal.SIGINT, 0.1), (signal.SIGINT, 2):
        send([psutil.Process(rank.pid) for rank in ranks], number)
        time.sleep(seconds)
        assert all(rank.poll() is None for rank in ranks)
    insisted = time.monotonic()
    while any(rank.poll() is None for rank in ranks) and time.monotonic() - insisted < 20:
        for rank in ranks:  # Again and again: one that answered the first of them late counts from then.
            rank.send_signal(signal.SIGINT)
        time.sleep(0.2)
    for rank in ranks:  # If one has not ended, which is an error.
        kill_tree(rank)
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], "\n".join(outputs)
    assert done.checkpoints == [] if (done.folder / "checkpoints").exists() else True
    assert done.status["status"] == "running" and steps_logged(done) == [1]


@pytest.mark.parametrize("error", [(), ("--run.max_steps", "none")])
def test_signals_after_main_are_those_of_the_caller(tmp_path, error):
    """A sweep or a notebook would ignore the first Ctrl-C, and the next one would end it at once."""
    for number, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, lambda *_: None):
        signal.signal(number, handler)
        run(tmp_path, tiny_config(tmp_path), *error, expect=None)
        assert signal.getsignal(number) is handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_while_saving(tmp_path, monkeypatch):
    """Schedulers send it again. The checkpoint is written all the same."""
    exits, save = [], Saver.save

    def signalled_again(*args):
        time.sleep(2.1)
        signal.raise_signal(signal.SIGTERM)
        return save(*args)

    def signalled(*args):
        signal.raise_signal(signal.SIGTERM)
        return train_step(*args)

    train_step = train.train_step
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(Saver, "save", signalled_again)
    monkeypatch.setattr(train, "train_step", signalled)
    done = run(tmp_path, tiny_config(tmp_path))
    assert not exits
    assert_stopped(done, done.output, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_that_is_full_at_a_log_line(slow, tmp_path, count):
    """The run saves, where that is possible, and says what is wrong and what to do. Then it goes on."""
    done = Done(0, "", tmp_path / "run")
    ranks = start_ranks(tmp_path, slow, "--run.eval_every", 0, "--run.max_steps", 100_000, count=count)
    wait_for_step(ranks, done, 1)
    (done.folder / "full").symlink_to("/dev/full")
    metrics = done.metrics
    os.replace(done.folder / "full", done.folder / "metrics.jsonl")
    outputs = [rank.communicate(timeout=ALLOWED_SECONDS)[0] for rank in ranks]
    assert ranks[0].returncode == 1, outputs[0]
    (done.folder / "metrics.jsonl").unlink()
    step = int(done.checkpoints[-1].removeprefix("step-"))
    assert step >= metrics[-1]["step"]
    assert done.status["status"] == "failed" and "No space left" in done.status["reason"]
    [error] = [line for line in outputs[0].splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: [Errno 28] No space left on device: '{done.folder}'; make room there; ")
    assert run(tmp_path, slow, "--run.eval_every", 0, "--run.max_steps", step + 6).launches == [step]


def test_a_status_on_a_full_disk(tmp_path, monkeypatch):
    """There is no place for another file, but for other words in this one."""

    def full(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*args):
        monkeypatch.setattr(folder_room, "replace_file", full)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "train_step", fails)
    done = run(tmp_path, tiny_config(tmp_path), expect=1)
    assert done.status == {"status": "failed", "step": 0, "reason": "[Errno 28] No space left on device"}


def test_a_full_disk_is_the_reason_of_a_failed_save(tmp_path, monkeypatch):
    """torch wraps it into a traceback of many lines. The reason names the folder, which the error does not."""

    def full(*args, **kwargs):
        raise CheckpointException("save", {0: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)})

    monkeypatch.setattr("samerun.run.checkpoint.dcp.save", full)
    done = run(tmp_path, tiny_config(tmp_path), "--run.save_every", 2, expect=1)
    assert done.status["reason"] == f"[Errno 28] No space left on device: '{done.folder}/checkpoints'"


def assert_end(processes: list[psutil.Process], launcher: subprocess.Popen, seconds: float = ALLOWED_SECONDS) -> None:
    """All of them end by themselves in the time allowed."""
    since = time.monotonic()
    while alive(processes) and time.monotonic() - since < seconds:
        time.sleep(0.05)
    late = alive(processes)
    send(processes, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=10)
    assert not late, f"{late} are left over:\n{output}"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_launcher_killed_while_ranks_start(slow, tmp_path, count):
    """Before the ranks have the folder, handlers or each other; one without anybody to stop it would train on."""
    process = start(tmp_path, slow, processes=count)
    ranks, deadline = ranks_of(process, count), time.monotonic() + 60
    while not all("libtorch" in Path(f"/proc/{rank.pid}/maps").read_text() for rank in ranks):  # Importing libraries.
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "run").exists()
    process.kill()
    process.wait()
    assert_end(ranks, process, seconds=240)  # A rank alone imports all before it answers, which takes its time.
    assert not list((tmp_path / "run").glob("metrics.jsonl"))


# In place of Accelerate, the first library that train.py imports: waits for the end of its parent, and lives on.
WAITS = """
import os, time
parent = os.getppid()
print("waits", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
print("lives on", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody is told of a parent's end")
def test_in_the_background_it_outlives_its_shell(tmp_path):
    """`nohup python train.py &`, here where somebody has set variables of Accelerate. A launcher's rank would end."""
    (tmp_path / "accelerate.py").write_text(WAITS)
    log = tmp_path / "log"
    command = f"nohup {sys.executable} {ROOT / 'train.py'} > {log} 2>&1 & read line"  # The shell ends with its input.
    own = {"PYTHONPATH": str(tmp_path), "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    shell = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, env=os.environ | own)
    wait_for_line(log, "waits")
    [process] = psutil.Process(shell.pid).children()
    shell.communicate()
    process.wait(timeout=30)
    assert "lives on" in log.read_text()


def test_ctrl_c_while_libraries_are_imported(tmp_path):
    """One line, at once: a library would take an exception for an error of its own."""
    (tmp_path / "accelerate.py").write_text(WAITS)
    command = sys.executable, ROOT / "train.py"
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, **pipe)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert output == "\nStopped by Ctrl-C before anything was done.\n" and process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("number, words", [(signal.SIGINT, ["--prepare"]), (signal.SIGTERM, [])])
def test_a_signal_while_documents_are_tokenized(slow, tmp_path, number, words):
    """To all processes, as from a terminal: within seconds, with one line, and nobody is left. The next launch works.
    A launch says in its status that it was stopped."""
    texts = [{"text": f"{i} is a number, and so on. " * 4000} for i in range(1000)]
    config = slow | {"data": {"path": str(write_rows(tmp_path / "texts", texts)), "tokenizer": "bytes"}, "eval": {}}
    config["data"] |= {"sequence_length": 24}
    config["run"] = slow["run"] | {"max_steps": 1, "eval_every": 0}
    process = start(tmp_path, config, *words, processes=None, env={"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    assert process.stdout.readline() == "Tokenizing 1,000 documents.\n"
    workers, deadline = [], time.monotonic() + 90
    while len(workers) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        workers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    send([psutil.Process(process.pid), *workers], number)
    signalled = time.monotonic()
    line = process.stdout.readline()
    assert line.startswith(f"Stopped by {'Ctrl-C' if words else 'SIGTERM'}") and "the same command continues" in line
    assert time.monotonic() - signalled < 10
    assert process.communicate(timeout=ALLOWED_SECONDS)[0] == "" and process.returncode == (1 if words else 0)
    assert not alive(workers)
    if not words:
        assert Done(0, "", tmp_path / "run").status == {"status": "stopped", "step": 0}


DIES_WITH_THE_LOCK = """
import os, signal
from tqdm.auto import tqdm
from samerun.errors import say
say("first")
if (child := os.fork()) == 0:
    tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
say("second")
"""


def test_a_worker_that_is_killed_while_it_draws_a_bar():
    """Nobody waits for the lock that it has taken with it."""
    command = sys.executable, "-c", DIES_WITH_THE_LOCK
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout == "first\nsecond\n"


def wait_for_line(file: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or line not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_while_tokenizing(slow, tmp_path):
    """No worker outlives its rank, and the same command then finishes."""
    texts = [{"text": f"{i} is a number, and so on. " * 2000} for i in range(200)]
    config = slow | {"data": {"path": str(write_rows(tmp_path / "texts", texts)), "format": "text"}, "eval": {}}
    config["data"] |= {"tokenizer": "bytes", "packing": "concat", "sequence_length": 24}
    config["run"] = slow["run"] | {"max_steps": 5, "eval_every": 0}
    process = start(tmp_path, config)
    [rank], workers, deadline = ranks_of(process, 1), [], time.monotonic() + 90
    while len(workers) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        workers = rank.children(recursive=True)
        time.sleep(0.02)
    time.sleep(0.5)
    workers = rank.children(recursive=True)
    rank.kill()
    process.wait(timeout=15)
    assert_end([rank, *workers], process)
    done = launch(tmp_path, config, warm=True)
    assert done.status == {"status": "finished", "step": 5} and steps_logged(done) == [1, 2, 3, 4, 5]
