"""Who forks this template deletes what they do not need: features.py takes each feature out, and nothing of it is left.

The rest is the same run, to the last bit of its weights and checkpoints, and ruff finds no name unused or missing.
"""

import ast
import importlib
import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import forks
import pytest
from features import FEATURES, FILES, SOURCE, take_out, without, without_tests, write_schema
from helpers import ROOT, Done, difference, run, tiny_config, write_config
from safetensors.torch import load_file
from surgery import DEFINITIONS, FUNCTIONS, House, constant, read, write

from samerun.config import Config
from samerun.dotted import config_fields

HOUSE = read(ROOT, *SOURCE)
# Each feature alone, and all of them. Evaluation takes the samples, the best checkpoint and patience along, and FSDP
# takes expert parallelism.
CASES = {name: [name] for name in FEATURES}
TAKEN_ALONG = "samples", "keep_best", "patience", "expert parallelism"
CASES["everything"] = [name for name in FEATURES if name not in TAKEN_ALONG]
# Without everything, a test that needs two features goes with the first of them, and nobody sees that it would fail
# without the second alone. So there are forks without some, too, of which few tests need two.
GROUPS = [
    CASES["everything"],
    ["evaluation", "chunked_loss", "memory plan", "pipeline parallelism", "balanced experts", "LoRA", "chat"]
    + ["after_save", "profiler", "trackers"],
    ["packing", "compile", "sources", "auto", "curves", "hub", "FSDP", "tensor parallelism"]
    + ["sequence and context parallelism", "context parallelism", "DeepSpeed"],
]


def numbers(done: Done) -> list[dict]:
    """What the lines of metrics.jsonl say about the training, without times. Evaluations have lines of their own."""
    lines = [line for line in done.metrics if "eval/loss" not in line]
    return [{name: line[name] for name in line if not name.startswith(("perf/", "summary/"))} for line in lines]


def without_return(house: House) -> set[str]:
    """Functions with a return type and no `return`. The whole template has a few: generators and abstract ones."""
    found = [node for node in house.nodes if isinstance(node, ast.FunctionDef) and node.returns]
    found = [node for node in found if constant(node.returns) is not None]
    found = [node for node in found if not any(isinstance(part, ast.Return) for part in ast.walk(node))]
    return {f"{node.file}: {getattr(node.parent, 'name', '')}.{node.name}" for node in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of a tiny run that uses none of the features, and the run of the whole template."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 6, "save_every": 3}
    return config, run(folder, config)


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_where_it_is_looked_for(feature):
    """The tests marked slow run what is left. This one tells at once that features.py does not know a changed line."""
    FEATURES[feature](House(HOUSE))


def test_one_after_the_other():
    """Samples and evaluations share places. Two calls leave what a single one with both of them does."""
    one_by_one = without(without(HOUSE, ["samples"]).sources, ["evaluation"])
    assert one_by_one.sources == without(HOUSE, ["samples", "evaluation"]).sources


def test_the_script_of_ci_runs_no_test_that_is_gone():
    """Without a file, pytest would run all tests."""
    before = (ROOT / ".ci/run").read_text()
    gone = [*FILES["DeepSpeed"], *FILES["trackers"], *FILES["LoRA"]]
    after = without_tests(before, gone)
    assert not [file for file in gone if file in after]
    dropped = '.venv/bin/python -m pytest tests/test_deepspeed.py -m "not slow"\n'
    two = ".venv/bin/python -m pytest tests/test_trackers.py tests/test_optimizers.py tests/test_4bit.py\n"
    assert after == before.replace(dropped, "").replace(two, ".venv/bin/python -m pytest tests/test_optimizers.py\n")
    assert before.count(dropped) == before.count(two) == 1 and without_tests(before, []) == before


def test_an_unknown_feature_is_told():
    command = [sys.executable, ROOT / "tests/template/features.py", "lora"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "no feature: lora; without a name, this lists them\n")


def test_without_lora_nothing_exports_an_adapter():
    assert "unwrap_layers" not in without(HOUSE, ["LoRA"]).sources["samerun/run/export.py"]


def names_defined(tree: ast.Module) -> set[str]:
    imported = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    return set().union(*map(defined, tree.body), *({one.asname or one.name for one in node.names} for node in imported))


def missing_names(fork: Path) -> set[str]:
    """What a file imports from another, or reads of it as module.name, and the other has not."""
    house = House(read(fork, "train.py", "samerun", "tests"))
    known, modules, wanted = set(), set(), set()
    for file, tree in house.trees.items():
        module = file.removeprefix("tests/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules.add(module)
        known |= {f"{module}.{name}" for name in names_defined(tree)}
    for nodes in house.nodes_of.values():
        stands_for = {}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                stands_for |= {one.asname or one.name: f"{before}{one.name}" for one in node.names}
        wanted.update(stands_for.values())
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in stands_for:
                wanted.add(f"{stands_for[ast.unparse(node.value)]}.{node.attr}")
    return {name for name in wanted - modules - known if name.rpartition(".")[0] in modules}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_run_is_the_same_without(whole, tmp_path, monkeypatch, case):
    """The tests that are left use no name that is gone."""
    config, expected = whole
    forks.copy(tmp_path / "fork")
    rest = take_out(tmp_path / "fork", CASES[case])
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", tmp_path / "fork"], check=True
    )
    assert not [room for name in CASES[case] for room in FILES.get(name, []) if room in rest.sources]
    assert not without_return(rest) - without_return(House(HOUSE))
    assert not missing_names(tmp_path / "fork") - missing_names(ROOT)

    for name in [name for name in sys.modules if name.split(".")[0] in ("train", "samerun")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "fork")
    fork = importlib.import_module("train")
    assert fork.__file__ == str(tmp_path / "fork" / "train.py")
    theirs = importlib.import_module("samerun.config")
    gone = config_fields(Config).keys() - config_fields(theirs.Config).keys()
    assert not [name for name in gone if rest.mentions_setting(name)]
    kept = {section: dict(settings) for section, settings in config.items()}
    for section, name in (name.split(".") for name in gone):
        kept.get(section, {}).pop(name, None)

    path = write_config(tmp_path, kept)
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        code = fork.main(["--config", str(path)])
    assert code == 0, output.getvalue()
    done = Done(code, output.getvalue(), tmp_path / "run")
    assert difference(done.weights, expected.weights) == 0
    assert numbers(done) == numbers(expected)
    assert done.checkpoints == expected.checkpoints == ["step-00000003", "step-00000006"]
    for path in expected.folder.glob("checkpoints/*/*.safetensors"):
        assert difference(load_file(done.folder / path.relative_to(expected.folder)), load_file(path)) == 0


def defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def used(statement: ast.stmt) -> set[str]:
    return {getattr(one, "id", None) or getattr(one, "arg", None) for one in ast.walk(statement)} - {None}


def alike(whole: House, bare: House) -> set[tuple[str, str]]:
    """By file and name: the tests that are the same in both, with all of their file that they use."""
    found = set()
    for file, tree in bare.trees.items():
        body, texts = whole.trees[file].body, {ast.unparse(one) for one in tree.body}
        changed, before = set().union(*(defined(one) for one in body if ast.unparse(one) not in texts)), None
        while before != changed:
            before, changed = changed, changed.union(*(defined(one) for one in body if used(one) & changed))
        names = set().union(*map(defined, tree.body))
        found |= {(file, name) for name in names - changed if name.startswith("test_")}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("features", GROUPS, ids=["everything", *map("-".join, GROUPS[1:])])
def test_a_fork_passes_its_suite(tmp_path, features):
    """The tests that are left, of what is left.

    The whole template passes its tests, and so does the fork without everything. Those that are the same in both need
    nothing that the forks between them lack or have: they are left out of these.
    """
    fork, bare = tmp_path / "fork", tmp_path / "bare"
    forks.copy(fork)
    whole = House(read(fork, "tests"))
    take_out(fork, features)
    write_schema(fork)
    if features != GROUPS[0]:
        forks.copy(bare)
        take_out(bare, GROUPS[0])
        known, left = alike(whole, House(read(bare, "tests"))), House(read(fork, "tests"))
        tests = [one for one in left.nodes if isinstance(one, FUNCTIONS) and (one.file, one.name) in known]
        left.edit([(*left.line_span(one), "") for one in tests])
        write(fork, left.sources)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-n1", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=fork, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]


def test_nothing_else_is_tidied_away():
    house = House(HOUSE)
    house.tidy()
    assert house.sources == HOUSE
