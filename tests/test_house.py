"""The house: imports go down only, and a name means one thing in it."""

import ast
import runpy
from collections import Counter
from graphlib import TopologicalSorter

from helpers import ROOT

import train

# The first part of a room's name that is here tells its floor.
FLOORS = {
    "early": 0,
    "errors": 1,
    "files": 1,
    "yaml12": 1,
    "dotted": 1,
    "value_types": 2,
    "meeting": 2,
    "config": 2,
    "plan": 2,
    "cli": 3,
    "data": 3,
    "optim": 3,
    "model": 4,
    "parallel": 5,
    "run": 6,
    "preflight": 7,
    "train": 8,
}
TREES = {
    path.relative_to(ROOT).with_suffix("").parts: ast.parse(path.read_text())
    for path in [ROOT / "train.py", *(ROOT / "samerun").rglob("*.py")]
}
ROOMS = {".".join(parts): tree for parts, tree in TREES.items() if parts[-1] != "__init__"}


def imported_rooms(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & ROOMS.keys()


def floor_of(room: str) -> int:
    return FLOORS[room.removeprefix("samerun.").split(".")[0]]


def test_imports_go_down_only():
    uses = {room: imported_rooms(tree) for room, tree in ROOMS.items()}
    upward = [(room, used) for room in uses for used in uses[room] if floor_of(used) > floor_of(room)]
    assert not upward
    assert not [room for room in uses if "train" in uses[room]]
    list(TopologicalSorter(uses).static_order())  # Raises CycleError.


def test_a_name_is_in_one_room():
    kinds = ast.FunctionDef, ast.ClassDef
    names = Counter(node.name for tree in ROOMS.values() for node in tree.body if isinstance(node, kinds))
    assert not [name for name, count in names.items() if count > 1]


def test_packages_export_nothing():
    assert not [parts for parts, tree in TREES.items() if parts[-1] == "__init__" and tree.body]


def test_helpers_are_imported_without_a_loss(monkeypatch):
    """That of a fork may load a teacher. If it fails, the tests that need it fail, and no others."""
    monkeypatch.delattr(train, "loss_function")
    runpy.run_path(str(ROOT / "tests" / "helpers.py"))
