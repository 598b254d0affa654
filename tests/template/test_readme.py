"""The five READMEs and the heads of the configs: their commands work, and what they name exists.

A command is a block of bash, a line that begins with $, or a piece of code in a sentence that begins as one. Commands
that train run here at tiny size in one process; that the launcher files start several, test_launchers.py shows. What
runs elsewhere is in ELSEWHERE, with the test that runs it.
"""

import ast
import io
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT, run, tiny_config
from shipped import CONFIGS, LAUNCHERS
from torch.distributed.run import get_args_parser
from warm import environments

import train
from samerun.cli import load_config, take_mode
from samerun.config import Config
from samerun.dotted import config_fields
from samerun.parallel.layout import REFUSED

PAGES = [ROOT / folder / "README.md" for folder in ("", "accelerate_configs", "configs", "tests", "tests/benchmarks")]
TEXT = {page: page.read_text() for page in PAGES}
README = "\n".join(TEXT.values())

LAUNCH = r"accelerate launch (?:[^`\n;']*? )?train\.py [^`\n;']+"
TORCHRUN = r"torchrun [^`\n;']*train\.py [^`\n;']+"
PYTHON = r"python (?:train\.py|tests/benchmarks/\w+\.py)(?: [^`\n;']+)?"
# What no test of this file runs: how the command begins, and who runs it.
ELSEWHERE = {
    "python3 -m venv .venv && . .venv/bin/activate": "the main job of .github/workflows/ci.yml",
    "python3 -m venv .venv && .venv/bin/pip": ".ci/run",
    ".venv/bin/python -m pytest": ".ci/run",
    "python -m pytest": ".ci/run",
    "for n in 1 2;": "test_the_same_run_on_one_and_on_two_processes",
    "paste <(grep": "test_the_same_run_on_one_and_on_two_processes",
    "export ACCELERATE_MIXED_PRECISION": "tests/test_elastic.py::test_a_node_is_lost_and_comes_back",
    "python -c 'import signal;": "tests/test_elastic.py::test_meeting_point_elsewhere",
    "python tests/template/features.py": "tests/template/test_delete.py::test_the_run_is_the_same_without",
    "#!/bin/bash": "test_slurm_script",
}


def joined(text: str) -> str:
    """Each command on one line."""
    return re.sub(r"\\\n *", "", text)


def blocks(language: str) -> list[str]:
    return [joined(block) for block in re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)]


def heads() -> str:
    """The comments at the top of configs and launcher files, without their marks."""
    files = [*CONFIGS, *LAUNCHERS]
    return "\n".join(re.sub("^# *", "", file.read_text(), flags=re.M) for file in files)


def commands(pattern: str) -> list[str]:
    """Every different one, wherever it stands."""
    return sorted({words.strip() for words in re.findall(pattern, f"{joined(README)}\n{heads()}")})


def test_every_block_of_bash_is_run_by_a_test():
    used = set()
    for block in blocks("bash"):
        lines = [block] if block.startswith("#!") else block.splitlines()
        for line in lines:
            if re.fullmatch(f"{LAUNCH}|{TORCHRUN}|{PYTHON}", line):
                continue
            found = [beginning for beginning in ELSEWHERE if line.startswith(beginning)]
            assert found, f"no test runs {line!r}"
            used.update(found)
    assert used == ELSEWHERE.keys()
    sources = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    for name in ELSEWHERE.values():
        file, _, test = name.rpartition("::")
        if test.startswith("test_"):
            assert f"def {test}(" in sources[Path(file).stem if file else "test_readme"], name
        else:
            assert (ROOT / name.split()[-1]).is_file(), name


TINY = {
    "run.max_steps": 1,
    "run.max_tokens": "null",
    "run.trackers": "[]",
    "optim.warmup_steps": 0,
    "eval.prompts": "[]",
    "eval.max_rows": 2,
    "batch.global_batch_size": 5,
    "batch.global_batch_tokens": "null",
    "data.path": "null",
    "data.name": "null",
    "data.tokenizer": "bytes",
    "data.sequence_length": 32,
    "data.eval_source": "null",
    "data.eval_fraction": 0.1,
}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"What is written here, in text {number}, can be learned. " * 20)
    return folder


@dataclass(frozen=True)
class Launched:
    """What a launcher hands on, by its own parser."""

    config: str
    settings: tuple[str, ...]


def in_words(command: str) -> str:
    """With numbers in place of the shell's variables."""
    return re.sub(r"\$\(\(.*?\)\)|\$\w+", "2", command)


def parse(command: str) -> Launched:
    """Raises SystemExit if the launcher does not take its options."""
    words = shlex.split(in_words(command))
    is_torchrun = words[0] == "torchrun"
    parser = get_args_parser() if is_torchrun else launch_command_parser()
    args = parser.parse_args(words[1 if is_torchrun else 2 :])
    assert args.training_script == "train.py" and args.training_script_args[0] == "--config", command
    launcher = getattr(args, "config_file", None)
    assert launcher is None or (ROOT / launcher).is_file(), command
    _, config, *settings = args.training_script_args
    return Launched(config, tuple(settings))


LAUNCHES = commands(f"{LAUNCH}|{TORCHRUN}")


@pytest.mark.parametrize("command", LAUNCHES)
def test_launches_parse(command):
    """Accelerate or torchrun takes the command, and asks train.py for settings that exist."""
    launched = parse(command)
    words, _ = take_mode(["--config", str(ROOT / launched.config), *launched.settings])
    load_config(words)


@pytest.mark.parametrize("command", [command for command in LAUNCHES if "--config_file" in command])
def test_launches_are_not_refused(command, monkeypatch, capsys):
    """The config that ships suits the launcher file: nothing that cannot be combined, and heads that can be divided."""
    if "fp8" in command:
        pytest.importorskip("torchao")  # Accelerate's launcher asks for it.
    launcher, _, _ = in_words(command).partition(" train.py ")
    environment, *_ = environments({"launcher": shlex.split(launcher)[2:], "script": ["train.py"]})
    for name, value in environment.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(name, value)
    launched = parse(command)
    plan = [] if "--plan" in launched.settings else ["--plan", environment.get("WORLD_SIZE", "1")]
    code = train.main(["--config", str(ROOT / launched.config), *launched.settings, *plan])
    assert code == 0, capsys.readouterr().err


def different_runs() -> list[Launched]:
    """Each config and settings once, without what test_finetune.py compiles and the command that has its own test.

    The configs that need a model of the Hub run in test_configs.py, on stand-ins.
    """
    found = set()
    for command in LAUNCHES:
        launched = parse(command)
        settings = tuple(word for word in launched.settings if word not in ("--model.compile", "regional"))
        alone = "$n" not in command and not {"--model.pipeline_ranks", "--plan"} & {*settings}  # They have own tests.
        if Path(launched.config).stem in ("small", "pretrain_1b") and alone:
            found.add(Launched(launched.config, settings))
    return sorted(found, key=str)


@pytest.mark.parametrize("launched", different_runs(), ids=lambda one: " ".join([one.config, *one.settings]))
def test_what_they_launch_runs(tmp_path, texts, launched):
    """With the config that ships, its sizes made tiny."""
    settings = TINY | {"run.output_dir": tmp_path / "run", "data.files": texts}
    settings |= {f"model.architecture.{name}": value for name, value in SHAPE.items()}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        code = train.main(["--config", str(ROOT / launched.config), *launched.settings, *words])
    assert code == 0, output.getvalue()
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"status": "finished", "step": 1}


def test_enough_commands_are_found():
    assert len(LAUNCHES) > 12 and len(different_runs()) >= 2
    table = re.findall(r"^\| (?:a CPU|\d+ (?:GPUs?|nodes).*?) \| .*?`(accelerate launch [^`]+)`", TEXT[PAGES[0]], re.M)
    assert len(table) == 6 and set(table) <= set(LAUNCHES)


@pytest.mark.parametrize("shown", re.findall(r"^\$ (python train\.py .*)\n((?:.+\n)+?)```", README, re.M))
def test_what_train_py_is_shown_to_print(shown, capsys, monkeypatch):
    command, expected = shown
    monkeypatch.chdir(ROOT)
    code = train.main(shlex.split(command)[2:])
    printed = capsys.readouterr()
    assert (printed.out or printed.err) == expected and code == (2 if expected.startswith("error") else 0)


@pytest.mark.parametrize("command", commands(PYTHON))
def test_other_commands_of_python(command, capsys):
    """A benchmark has the options that its command gives. Tests of their own start the quick ones."""
    _, script, *words = shlex.split(command)
    if script == "train.py":
        not_here = {"--plan", "--optim.schedule"}
        not_here |= {"--prepare", "--export"}  # They need the Hub, or a run: see test_prepare.py and test_export.py.
        assert not words or not_here & set(words) or train.main(words) == 0
        return
    source = (ROOT / script).read_text()
    options = {word for word in words if word.startswith("--") and "." not in word} - {"--config"}
    assert options <= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source)), command


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "benchmarks").glob("*.py")), ids=lambda file: file.stem)
def test_benchmarks_use_what_train_py_has(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "train":
            assert hasattr(train, node.attr), f"line {node.lineno}: train.{node.attr}"


@pytest.mark.slow
def test_the_same_run_on_one_and_on_two_processes(tmp_path, texts):
    """The comparison of "The batch" finds no difference, and its model writes by the snippet that loads it."""
    [command] = [block for block in blocks("bash") if block.startswith("for n in 1 2;")]
    [snippet] = [block for block in blocks("python") if "from_pretrained" in block]
    names = ("data.eval_fraction", "data.sequence_length", "eval.prompts", "batch.global_batch_size")
    settings = {name: TINY[name] for name in names} | {"data.files": texts}
    settings |= {f"model.architecture.{name}": value for name, value in SHAPE.items()}
    settings = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in settings.items())
    command = command.replace("; done", f"{settings}; done").replace("runs/same", f"{tmp_path}/same")
    command = command.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    losses = np.array(re.findall(r'^"train/loss": ([\d.]+)\t"train/loss": ([\d.]+)$', done.stdout, re.M), float)
    assert losses.shape == (12, 2), done.stdout + done.stderr
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-6)
    exec(snippet.replace("runs/small/model", f"{tmp_path}/same2/model"), {"print": (said := []).append})
    assert len(said) == 1 and said[0].startswith("def main(") and len(said[0]) > 20


STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$*" >> requeued; fi',
    "srun": 'for rank in 0 1; do SLURM_NODEID=$rank "$@"; done',
    "accelerate": 'echo "accelerate $*" >> launched; [ ! "$STATUS" ] || echo "$STATUS" > runs/pretrain_1b/status.json',
}


@pytest.mark.parametrize("status", ["stopped", "finished", "failed", "refused"])
def test_slurm_script(tmp_path, status):
    """Each node launches with its own rank. A run that was stopped goes back into the queue. A job fails with its run,
    and with a launch that is refused: that leaves the status as it was."""
    [script] = [block for block in blocks("bash") if "#SBATCH" in block]
    for name, body in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "runs" / "pretrain_1b").mkdir(parents=True)
    (tmp_path / "runs" / "pretrain_1b" / "status.json").write_text(json.dumps({"status": "stopped", "step": 1}))
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "17",
        "STATUS": "" if status == "refused" else json.dumps({"status": status, "step": 2}),
    }
    script = script.replace("/path/to/this/folder", str(tmp_path))
    done = subprocess.run(["bash", "-c", script], env=os.environ | environment, timeout=60)
    assert (done.returncode != 0) == (status in ("failed", "refused"))
    launched = (tmp_path / "launched").read_text().splitlines()
    assert len(launched) == 2
    for rank, command in enumerate(launched):
        args = launch_command_parser().parse_args(shlex.split(command)[2:])
        assert (args.machine_rank, args.num_machines, args.num_processes) == (rank, 2, 16)
        assert args.main_process_ip == "node-a" and parse(command).config == "configs/pretrain_1b.yaml"
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (status == "stopped")
    assert not requeued.exists() or requeued.read_text() == "requeue 17\n"


def test_settings_are_all_there():
    """No page names a setting that does not exist, and configs/README.md names each that does."""
    sections = "|".join(Config.model_fields)
    known = config_fields(Config).keys()
    assert set(re.findall(rf"(?<!torch\.)\b((?:{sections})\.(?!py\b)\w+)", README)) <= known
    named = set(re.findall(rf"\b((?:{sections})\.\w+)", TEXT[ROOT / "configs" / "README.md"]))
    assert known <= named, f"configs/README.md does not name {known - named}"


def test_metrics_are_those_of_a_run(tmp_path):
    """What the tables name is what a run with all features writes, no more and no less."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2, "eval_every": 2}
    config["optim"]["warmup_steps"] = 0
    done = run(tmp_path, config, "--eval.prompts", "[a]", "--eval.max_new_tokens", 2)
    written = {key for line in done.metrics for key in line if not key.startswith("summary/")}
    named = set(re.findall(r"`((?:train|perf|eval)/[a-z]\w+)`", README)) | {"step"}
    named |= {f"plan/{name}" for name in re.findall(r"`(\w+)`", re.search(r"^\| `plan/...` \|(.*)", README, re.M)[1])}
    named.remove("train/expert_overload")  # This model has no experts.
    assert written == named, "the table of metrics.jsonl names others"
    phases = {key[8:-8] for line in done.metrics for key in line if re.fullmatch(r"summary/\w+_seconds", key)}
    assert phases == set(re.findall(r"(\w+) [\d.]+", re.search(r"^Seconds: (.*)", README, re.M)[1]))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]) if not target.startswith("https://")]
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_files_exist():
    named = re.findall(r"(?:accelerate_configs|configs|tests)/[\w./]+\.\w+|\b\w+\.yaml", README)
    for name in {name for name in named if name != "config.yaml"}:  # That one is in the run folder.
        places = [ROOT / name, ROOT / "accelerate_configs" / name, ROOT / "configs" / name]
        assert any(place.is_file() for place in places), name


@pytest.mark.parametrize("folder", ["accelerate_configs", "configs", "tests", "tests/benchmarks"])
def test_pages_name_every_file_of_their_folder(folder):
    page = TEXT[ROOT / folder / "README.md"]
    files = [file for file in [*CONFIGS, *LAUNCHERS] if file.parent == ROOT / folder]
    if folder.startswith("tests"):
        files = [*(ROOT / folder).glob("*.py"), *(ROOT / folder / "template").glob("*.py")]
    assert files
    missing = [file.name for file in files if file.name not in page]
    assert not missing, f"{folder}/README.md does not name {missing}"


def test_pictures_are_shown():
    for picture in (ROOT / ".github").glob("*.png"):
        assert picture.stat().st_size < 150_000 and f"({picture.relative_to(ROOT)})" in README.replace("../", "")


def test_the_front_page_is_short():
    assert len(TEXT[PAGES[0]].splitlines()) <= 150


def matrix() -> str:
    """What can be combined, as accelerate_configs/README.md has it."""
    names = {"dp_shard": "FSDP2, HSDP", "cp": "`cp`", "sp": "`sp`", "tp": "`tp`", "ep": "`ep`", "pp": "`pp`"}
    lines = [f"| | {' | '.join(names.values())} | why not |", "|---" * (len(names) + 2) + "|"]
    for refusal in REFUSED:
        cells = ["no" if name in refusal.dimensions else "yes" for name in names]
        setting, *rest = refusal.setting.split(" ", 1)
        lines.append(f"| {' '.join([f'`{setting}`', *rest])} | {' | '.join(cells)} | {refusal.reason} |")
    return "\n".join(lines)


def test_the_page_has_the_matrix():
    assert matrix() in TEXT[ROOT / "accelerate_configs" / "README.md"]


def test_lines_are_short():
    """At most 120 columns, but for tables, and for what is to be copied or was printed."""
    for page, text in TEXT.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        long = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
        assert not long, f"{page}: {long}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_config_has_a_plan(config, capsys):
    assert train.main(["--config", str(config), "--plan", "1", "2", "4", "8", "16", "32", "64"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Idle: ")]
    assert len(lines) == 8
    head = config.read_text()
    assert head.startswith("# yaml-language-server: $schema=schema.json\n")
    settings = load_config(["--config", str(config)])
    rows, length = settings.global_batch_size, settings.data.sequence_length
    assert f"{rows:,} rows x {length:,} " in head and f"{rows * length:,} tokens per step" in head


def asks_for_a_gpu(node: ast.AST) -> bool:
    """Whether there is a word about cuda, torch.accelerator or flash attention in a piece of code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id == "varlen_attn":
            return True
        if isinstance(part, ast.Constant) and part.value == "cuda":
            return True
        if isinstance(part, ast.Attribute) and ast.unparse(part) in ("torch.cuda", "torch.accelerator"):
            return True
        if isinstance(part, ast.Attribute) and part.attr == "is_cuda":
            return True
    return False


def test_what_only_a_gpu_runs_is_listed():
    functions = {}
    files = [ROOT / "train.py", *(ROOT / "samerun").rglob("*.py")]
    for node in itertools.chain(*(ast.parse(file.read_text()).body for file in files)):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        if isinstance(node, ast.ClassDef):
            functions |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    [table] = re.findall(r"^\| where it is .*\n((?:\|.*\n)+)", (ROOT / "tests" / "README.md").read_text(), re.M)
    listed = {name for line in table.splitlines() for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}
    assert listed == {name for name, node in functions.items() if asks_for_a_gpu(node)}
