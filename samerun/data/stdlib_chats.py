"""Conversations about Python's own library: what a first chat can learn from on any machine, without a network."""

import ast
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import datasets

from samerun.files import replace_file

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}

LONGEST = 120  # Characters of an answer.


def write_stdlib_chats(cache: Path) -> str:
    """The file that {stdlib_chats} stands for, in this folder. It is made once for each Python."""
    made_by = datasets.fingerprint.Hasher.hash([sys.version, inspect.getsource(sys.modules[__name__])])
    file = cache / f"stdlib-chats-{made_by}.jsonl"
    if not file.exists():
        os.makedirs(cache, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        lines = [json.dumps({"messages": chat}) for chat in chats_about(library)]
        replace_file(file, "\n".join(lines))
    return str(file)


def chats_about(library: Path) -> Iterator[list[dict[str, str]]]:
    """A conversation about each public function and method of a library that has a docstring."""
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if parts[-1] == "__init__":  # A package.
            parts = parts[:-1]
        if LEFT_OUT.isdisjoint(parts) and not any(part.startswith("_") for part in parts):
            yield from chats_in(ast.parse(file.read_bytes()), ".".join(parts))


def chats_in(scope: ast.AST, name: str) -> Iterator[list[dict[str, str]]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from chats_in(node, f"{name}.{node.name}")
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if not is_function or not ast.get_docstring(node):
            continue
        call = f"{name}.{node.name}({ast.unparse(node.args)})"
        purpose = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
        if len(call) <= LONGEST and len(purpose) <= LONGEST:
            yield [
                {"role": "user", "content": f"How do I call {name}.{node.name}?"},
                {"role": "assistant", "content": call},
                {"role": "user", "content": "What does it do?"},
                {"role": "assistant", "content": purpose},
            ]
