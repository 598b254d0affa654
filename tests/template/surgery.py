"""Takes parts out of Python files by their syntax trees: functions, settings, parameters.

Comments and layout stay, because what goes is cut out of the text, at the places that the trees name.

    house = House(read(ROOT, "train.py", "samerun"))
    house.drop_setting("run.keep_best", False)      each operation fails if it finds nothing to do
    house.tidy()                                    what can never run and what nobody uses any more
    house.sources                                   the text of each file that is left

A top-level name stands for one thing in all files, so no operation needs to know the file. features.py names the
operations that take a feature out.
"""

import ast
import functools
import io
import itertools
import operator
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from itertools import accumulate
from pathlib import Path

OPERATORS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda some, all: some in all,
    ast.NotIn: lambda some, all: some not in all,
}
UNKNOWN = object()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MARKS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)  # Of them there is one for the whole tree.
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
CALLED_BY_TORCH = "forward", "backward"  # Kept, even if nothing in the house calls them by name.


def last_name(node: ast.AST) -> str | None:
    """accumulate of self.accelerator.accumulate, and of a plain accumulate."""
    return getattr(node, "attr", getattr(node, "id", None))


def constant(node: ast.AST):
    """The value of a literal, otherwise UNKNOWN."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def same(some: ast.AST, other: ast.AST) -> bool:
    return ast.dump(some) == ast.dump(other)


def targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def is_of_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def own_parts(statement: ast.stmt) -> list[ast.AST]:
    """What belongs to a statement itself: of an if, for or with its head, not the statements in it."""
    if isinstance(statement, DEFINITIONS):
        return []
    return [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt | ast.ExceptHandler)]


def mentions(node: ast.AST, what: str) -> bool:
    """Whether a name, an attribute (alone, or with what stands before it), a keyword or a string is `what`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute) and what in (last_name(part), ast.unparse(part)):
            return True
        if isinstance(part, ast.keyword) and part.arg == what:
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and what in part.value:
            return True
    return False


def read(root: Path, *names: str) -> dict[str, str]:
    """The Python files of these names and in folders of these names, by their paths below the root."""
    files = [
        file for name in names for file in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    return {str(file.relative_to(root)): file.read_text() for file in sorted(files)}


def write(root: Path, sources: dict[str, str]) -> None:
    for file, source in sources.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(source)


def operation(method):
    """A change that fails if there is nothing to change, unless the script is not strict: then it says so."""

    @functools.wraps(method)
    def tried(self, *args):
        try:
            method(self, *args)
        except LookupError as error:
            if self.strict:
                raise
            self.skipped.append(f"{method.__name__}{args}: {error}")

    return tried


@functools.cache  # Most files are as they were in the house before, and so is what is known of their nodes.
def parsed(file: str, text: bytes) -> list[ast.AST]:
    """All nodes of a file, which nobody changes. The first one is the module."""
    tree = ast.parse(text)
    tree.parent, tree.file, nodes = None, file, [tree]
    for node in nodes:  # Which grows meanwhile. ast.walk() takes three times as long.
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, MARKS):
                    child.parent, child.file = node, file
                    nodes.append(child)
    return nodes


class House:
    """Python files, each by its path."""

    def __init__(self, sources: dict[str, str], strict: bool = True):
        self.texts = {file: source.encode() for file, source in sources.items()}  # Columns of a tree count bytes.
        self.first = sources
        self.strict = strict
        self.skipped = []
        self.harmless = set()  # Those of them that do not change what a run learns.
        self.choices = []  # (setting, value) of those that are gone.
        self.parameters = []  # (function, position, name, value in its place) of those that are gone.
        self.switched_off = {}  # The settings that are gone, and the value that stands in their place.
        self.trees, self.lines, self.starts, self.nodes_of = {}, {}, {}, {}
        for file in self.texts:
            self.parse(file)

    @functools.cached_property
    def never_used(self) -> set[str]:
        """What nobody uses even in the house as it was at first."""
        return set(House(self.first).unused())

    @property
    def sources(self) -> dict[str, str]:
        return {file: text.decode() for file, text in self.texts.items()}

    # The trees and their places in the text

    def parse(self, file: str) -> None:
        self.lines[file] = self.texts[file].splitlines(keepends=True)
        self.starts[file] = [0, *accumulate(map(len, self.lines[file]))]
        self.nodes_of[file] = nodes = parsed(file, self.texts[file])
        self.trees[file] = nodes[0]

    @property
    def nodes(self) -> list[ast.AST]:
        return list(itertools.chain(*self.nodes_of.values()))

    def start_of(self, node: ast.AST, line: int) -> int:
        """The first byte of a line of the file that a node is in. Lines count from 0."""
        return self.starts[node.file][line]

    def span(self, node: ast.AST) -> tuple[str, int, int]:
        start = self.start_of(node, node.lineno - 1) + node.col_offset
        return node.file, start, self.start_of(node, node.end_lineno - 1) + node.end_col_offset

    def text_of(self, node: ast.AST) -> str:
        file, start, end = self.span(node)
        return self.texts[file][start:end].decode()

    def line_span(self, first: ast.stmt, last: ast.stmt | None = None) -> tuple[str, int, int]:
        """Whole lines of one or more statements, with decorators and the comment above."""
        line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))]) - 1
        while line > 0 and self.lines[first.file][line - 1].startswith(b" " * first.col_offset + b"#"):
            line -= 1
        return first.file, self.start_of(first, line), self.start_of(first, (last or first).end_lineno)

    def edit(self, edits: list[tuple[str, int, int, str]]) -> None:
        """Replace pieces of the texts. Of two that overlap, the outer one counts."""
        for file in {file for file, *_ in edits}:
            kept, reached = [], 0
            own = [one for one in edits if one[0] == file]
            for _, start, end, new in sorted(own, key=lambda one: (one[1], -one[2])):
                if start >= reached:
                    kept.append((start, end, new))
                    reached = end
            for start, end, new in reversed(kept):
                self.texts[file] = self.texts[file][:start] + new.encode() + self.texts[file][end:]
            self.parse(file)

    def find(self, path: str) -> ast.AST:
        """A function, class, method or constant by its dotted name."""
        found = list(self.trees.values())
        for name in path.split("."):
            found = [child for node in found for child in node.body if self.name_of(child) == name]
            if not found:
                raise LookupError(f"there is no {path}")
        return found[0]

    @staticmethod
    def name_of(statement: ast.stmt) -> str | None:
        """The name that a statement defines."""
        targets = targets_of(statement)
        return last_name(targets[0]) if targets else getattr(statement, "name", None)

    def block_of(self, statement: ast.stmt) -> tuple[ast.AST, str]:
        """What holds a statement, and under which name: body, orelse, ..."""
        owner = statement.parent
        for name, block in ast.iter_fields(owner):
            if isinstance(block, list) and statement in block:
                return owner, name
        raise AssertionError

    def statement_of(self, node: ast.expr) -> ast.stmt:
        return next(one for one in self.owners(node) if isinstance(one, ast.stmt))

    def owners(self, node: ast.AST) -> list[ast.AST]:
        """What a node stands in, from the inside to the outside."""
        found = []
        while node.parent:
            node = node.parent
            found.append(node)
        return found

    def statements(self, path: str) -> list[ast.stmt]:
        """Those in a function or class; "" has all of them."""
        if not path:
            return [node for node in self.nodes if isinstance(node, ast.stmt)]
        root = self.find(path)
        return [node for node in ast.walk(root) if isinstance(node, ast.stmt) and node is not root]

    def calls(self, name: str) -> list[ast.Call]:
        """All calls of a function or method, or of a class for its __init__."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and last_name(self.called(node)) == name]

    @staticmethod
    def called(call: ast.Call) -> ast.expr:
        """The function, which functools.partial() has as its first argument."""
        return call.args[0] if last_name(call.func) == "partial" else call.func

    # Cutting

    def cut(self, statements: list[ast.stmt], where: str, edits=()) -> None:
        """Remove statements, and make further edits. What they leave empty goes, too: an if, a loop, a function.

        So do the calls of such a function.
        """
        if not statements:
            raise LookupError(f"{where}: nothing to remove")
        outer = [one for one in statements if not set(self.owners(one)) & set(statements)]
        doomed, edits, waiting = set(), list(edits), outer
        while waiting:
            statement = waiting.pop()
            doomed.add(statement)
            edits.append((*self.line_span(statement), ""))
            owner, name = self.block_of(statement)
            block = getattr(owner, name)
            after = block[block.index(statement) + 1 :][:1]
            if isinstance(owner, ast.ClassDef) and isinstance(statement, ast.AnnAssign) and self.is_text(after):
                doomed.add(after[0])  # What it means stands below a setting.
                edits.append((*self.line_span(after[0]), ""))
            left = [one for one in block if one not in doomed and not (block[0] is one and self.is_text([one]))]
            if left or owner in doomed:
                continue
            if name == "orelse":
                edits.append(
                    (
                        owner.file,
                        self.start_of(owner, owner.body[-1].end_lineno),
                        self.start_of(owner, statement.end_lineno),
                        "",
                    )
                )
            elif getattr(owner, "orelse", None) or isinstance(owner, ast.Try):
                raise ValueError(f"{where}: line {owner.lineno} would be left without its body")
            else:
                waiting.append(owner)
                if isinstance(owner, FUNCTIONS) and isinstance(owner.parent, ast.Module):
                    users = [call.parent for call in self.calls(owner.name)]
                    waiting += [user for user in users if isinstance(user, ast.Expr) and user not in doomed]
        self.edit(edits)

    @staticmethod
    def is_text(statements: list[ast.stmt]) -> bool:
        """Whether the first of them is a docstring."""
        return [type(one) for one in statements[:1]] == [ast.Expr] and isinstance(constant(statements[0].value), str)

    def without_element(self, elements: list[ast.AST], at: int, owner: ast.AST) -> tuple[str, int, int, str]:
        """The edit that takes one of several elements away, with its comma."""
        file, start, end = self.span(elements[at])
        if isinstance(owner, ast.Tuple) and len(elements) == 1:
            return (*self.span(owner), "()")
        if isinstance(owner, ast.Tuple) and len(elements) == 2:  # What is left is still a tuple.
            return (*self.span(owner), f"({self.text_of(elements[1 - at])},)")
        if at > 0:
            start = self.span(elements[at - 1])[2]
        elif len(elements) > 1:
            end = self.span(elements[1])[1]
        elif self.texts[file][end : end + 1] == b",":
            end += 1
        return file, start, end, ""

    def without_entry(self, key: ast.expr, value: ast.expr) -> tuple[str, int, int, str]:
        """The edit that takes an entry of a dict away, with its comma."""
        file, start, end = key.file, self.span(key)[1], self.span(value)[2]
        return file, start, end + (self.texts[file][end : end + 1] == b","), ""

    @operation
    def drop_element(self, path: str, value) -> None:
        """Remove a constant from lists, tuples or sets, or a call with it; or the entry of a dict with this key."""
        edits = []
        for node in ast.walk(self.find(path)) if path else self.nodes:
            if isinstance(node, ast.Dict):
                for key, held in zip(node.keys, node.values):
                    if key and constant(key) == value:
                        edits.append(self.without_entry(key, held))
            elif isinstance(node, ast.List | ast.Tuple | ast.Set):
                for at, element in enumerate(node.elts):
                    given = element.args if isinstance(element, ast.Call) else [element]
                    if any(constant(one) in (value, (value,)) for one in given):
                        edits.append(self.without_element(node.elts, at, node))
        if not edits:
            raise LookupError(f"{path}: no element {value!r}")
        self.edit(edits)

    @operation
    def drop_statements(self, path: str, what: str) -> None:
        """Remove the statements in a function or class that mention a name, an attribute or a piece of a string."""
        code = [node for node in self.statements(path) if not self.is_text([node])]
        self.cut([node for node in code if any(mentions(part, what) for part in own_parts(node))], f"{path}: {what}")

    @operation
    def drop_definition(self, path: str) -> None:
        """Remove a function, class, method or constant, and the statements that use it."""
        node, name = self.find(path), path.split(".")[-1]
        users = [self.statement_of(call) for call in self.calls(name)]
        self.cut([node, *(one for one in users if node not in self.owners(one))], path)

    @operation
    def drop_parameter(self, path: str, name: str, value=UNKNOWN) -> None:
        """Remove a parameter of a function, and what all calls pass for it. Inside stands the value instead."""
        function, edits = self.find(path), []
        known = function.args
        names = [argument.arg for argument in known.args]
        if name not in names:
            raise LookupError(f"{path} has no parameter {name}")
        at = names.index(name)
        elements = [*known.args, *known.defaults]
        elements = sorted(elements, key=self.span)  # A default stands after its parameter.
        file, start, end, _ = self.without_element(elements, elements.index(known.args[at]), function)
        if at >= len(names) - len(known.defaults):
            end = self.span(known.defaults[at - len(names)])[2]
        edits.append((file, start, end, ""))
        if value is not UNKNOWN:
            reads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
            edits += [(*self.span(node), repr(value)) for node in reads]

        is_method = names[0] == "self"
        called = path.split(".")[0] if function.name == "__init__" else function.name
        self.parameters.append((called, at - is_method, name, value))
        for call in self.calls(called):
            parts = [*call.args, *call.keywords]
            keywords = [number for number, part in enumerate(parts) if getattr(part, "arg", None) == name]
            position = at - is_method + (self.called(call) is not call.func)
            if keywords:
                edits.append(self.without_element(parts, keywords[0], call))
            elif position < len(call.args):
                edits.append(self.without_element(parts, position, call))
        self.edit(edits)

    @operation
    def read_as(self, path: str, value) -> None:
        """Put a value in place of every read of an attribute, such as "layout.row_ranks"."""
        owner, _, name = path.rpartition(".")
        found = [node for node in self.nodes if isinstance(node, ast.Attribute) and node.attr == name]
        found = [node for node in found if isinstance(node.ctx, ast.Load) and owner in ("", last_name(node.value))]
        if not found:
            raise LookupError(f"nothing reads {path}")
        self.edit([(*self.span(node), repr(value)) for node in found])

    @operation
    def drop_argument(self, callee: str, value: str) -> None:
        """Remove a constant from the arguments of a method; a call that had no other one is 1."""
        edits = []
        for call in self.calls(callee):
            at = [number for number, one in enumerate(call.args) if constant(one) == value]
            if at and len(call.args) == 1:
                edits.append((*self.span(call), "1"))
            elif at:
                edits.append(self.without_element(call.args, at[0], call))
        if not edits:
            raise LookupError(f"no call of {callee} has {value!r}")
        self.edit(edits)

    @operation
    def drop_field(self, path: str, value=UNKNOWN) -> None:
        """Remove a field of a class and the argument that sets it. Where it is read, the value stands instead."""
        owner, name = path.rsplit(".", 1)
        self.find(path)  # Raises LookupError.
        edits = []
        fields = [self.name_of(node) for node in self.find(owner).body if isinstance(node, ast.AnnAssign)]
        for call in self.calls(owner):
            if fields.index(name) < len(call.args):
                edits.append(self.without_element(call.args, fields.index(name), call))
            for at, keyword in enumerate(call.keywords):
                if keyword.arg == name:
                    edits.append(self.without_element(call.keywords, at, call))
        if value is not UNKNOWN:
            for node in self.nodes:
                if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                    edits.append((*self.span(node), repr(value)))
        self.cut([self.find(path)], path, edits)

    # Settings of train.py: fields of the classes that Config holds

    def section_class(self, section: str) -> str | None:
        """The name of the class of a section, None if the config has no such section any more."""
        found = [node for node in self.find("Config").body if self.name_of(node) == section]
        return found[0].annotation.id if found else None

    def is_setting(self, node: ast.AST, section: str, name: str) -> bool:
        """Whether an expression reads section.name."""
        is_read = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        return is_read and self.is_section(node.value, section)

    def is_section(self, node: ast.expr, section: str) -> bool:
        """Whether it is the section of a config: config.section, or a name that stands for it in a function."""
        if isinstance(node, ast.Attribute):
            return node.attr == section
        for function in [one for one in self.owners(node) if isinstance(one, FUNCTIONS)]:
            for argument in function.args.args:
                if argument.arg == last_name(node):
                    return last_name(argument.annotation) == self.section_class(section)
            for name, value in self.assignments(function):
                if name == last_name(node):
                    return isinstance(value, ast.Attribute) and value.attr == section
        return False

    @staticmethod
    def assignments(function: ast.AST) -> list[tuple[str, ast.expr]]:
        """The names that get a value in a function, each with its value; of a, b = 1, 2 both."""
        found = []
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    found += [(last_name(name), value) for name, value in zip(names, values)]
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    found.append((name, value))
        return found

    @operation
    def drop_setting(self, path: str, off) -> None:
        """Remove a setting. Where it is read, the value that switches it off stands instead."""
        section, name = path.split(".")
        holder = self.section_class(section)
        self.switched_off[path] = off
        field = self.find(f"{holder}.{name}")
        if last_name(getattr(field.annotation, "value", None)) == "MayChange":
            self.harmless.add(path)
        edits = []
        for node in self.nodes:
            if self.is_setting(node, section, name):
                edits.append((*self.span(node), repr(off)))
            elif isinstance(node, ast.Dict):
                pairs = [pair for pair in zip(node.keys, node.values) if pair[0]]
                pairs = [pair for pair in pairs if isinstance(constant(pair[1]), str)]  # Names and settings.
                edits += [self.without_entry(*pair) for pair in pairs if path in map(constant, pair)]
            elif isinstance(node, ast.List | ast.Tuple | ast.Set):
                for at, element in enumerate(node.elts):
                    if constant(element) == path:
                        edits.append(self.without_element(node.elts, at, node))
        self.cut([field], path, edits)
        if not any(self.name_of(node) == holder for tree in self.trees.values() for node in tree.body):
            self.switched_off[section] = UNKNOWN
            self.harmless.add(section)
            self.cut([self.find(f"Config.{section}")], path)  # It was the last one of its section.

    @operation
    def drop_choice(self, path: str, value: str) -> None:
        """Let no comparison with a value that a setting may have be true any more."""
        about = [one for one in self.nodes if isinstance(one, ast.Compare) and constant(one.comparators[0]) == value]
        found = [one for one in about if self.is_setting(one.left, *path.split("."))]
        if not found:
            raise LookupError(f"{path} is never compared with {value!r}")
        self.edit([(*self.span(one), repr(isinstance(one.ops[0], ast.NotEq))) for one in found])
        self.choices.append((path, value))

    def mentions_setting(self, path: str) -> bool:
        """Whether a setting is still read anywhere, or named in a message or a comment."""
        if any(self.is_setting(node, *path.split(".")) for node in self.nodes):
            return True
        tokens = [token for text in self.texts.values() for token in tokenize.tokenize(io.BytesIO(text).readline)]
        return any(path in token.string for token in tokens if token.type not in (tokenize.NAME, tokenize.OP))

    # Replacing

    @operation
    def replace(self, path: str, old: str, new: str) -> None:
        """Put one expression in place of another, wherever it stands in a function."""
        wanted = ast.parse(old, mode="eval").body
        found = [node for node in ast.walk(self.find(path)) if isinstance(node, ast.expr) and same(node, wanted)]
        if not found:
            raise LookupError(f"{path}: no {old}")
        self.edit([(*self.span(node), new) for node in found])

    @operation
    def reword(self, old: str, new: str) -> None:
        """Put one text in place of another, wherever it stands."""
        found = [file for file, text in self.texts.items() if old.encode() in text]
        if not found:
            raise LookupError(f"nowhere stands {old!r}")
        for file in found:
            self.texts[file] = self.texts[file].replace(old.encode(), new.encode())
            self.parse(file)

    # Tidying

    def tidy(self) -> None:
        """Remove what can never run, and what has nobody to use it any more. Then what ruff removes and formats."""
        before = None
        while before != self.texts:
            before = dict(self.texts)
            self.fold()
            self.drop_unused()
        self.ruff()
        self.drop_empty_files()

    def ruff(self, unused: str = "F401") -> None:
        """Remove imports that are not used, and format."""
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), self.sources)
            for command in ["check", "--select", unused, "--fix", "--unsafe-fixes"], ["format", "--line-length", "120"]:
                command = [sys.executable, "-m", "ruff", *command, "--isolated", "--quiet", "--no-cache", folder]
                subprocess.run(command, check=True)
            self.texts = {file: Path(folder, file).read_bytes() for file in self.texts}
        for file in self.texts:
            self.parse(file)

    def drop_empty_files(self) -> None:
        """Those that have neither definitions nor statements any more, and packages of no other file."""
        idle = ast.Expr | ast.Import | ast.ImportFrom
        for file, tree in self.trees.items():
            if tree.body and all(isinstance(node, idle) for node in tree.body):
                del self.texts[file]
        for file in [file for file in self.texts if file.endswith("/__init__.py")]:
            if not any(other != file and other.startswith(file.removesuffix("__init__.py")) for other in self.texts):
                del self.texts[file]
        for known in self.trees, self.lines, self.starts, self.nodes_of:
            for file in known.keys() - self.texts.keys():
                del known[file]

    def fold(self) -> None:
        """Work out what follows from constants: `x or False` is x, and what stands under `if False` goes."""
        while True:
            edits = []
            for node in self.nodes:
                simpler = self.simpler(node)
                if simpler is not None:
                    edits.append((*self.span(node), simpler))
                edits += self.simpler_statement(node)
            demands = [call for call in self.calls("require") if self.is_true(call.args[0])]
            if edits:
                self.edit(edits)
            elif demands:
                self.cut([self.statement_of(call) for call in demands], "require")
            else:
                return

    def is_true(self, node: ast.expr) -> bool | None:
        """Whether a condition is true whatever happens; None where that is not known."""
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self.is_true(operand)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                known, decisive = [self.is_true(value) for value in values], isinstance(op, ast.Or)
                if decisive in known:
                    return decisive
                return None if None in known else not decisive
            case ast.Name(id=name):
                functions = [one for one in self.owners(node) if isinstance(one, FUNCTIONS)]
                values = [value for other, value in self.assignments(functions[0]) if other == name]
                return self.is_true(values[0]) if len(values) == 1 else None
        return None if constant(node) is UNKNOWN else bool(constant(node))

    def simpler(self, node: ast.AST) -> str | None:
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand) if constant(operand) is not UNKNOWN:
                return repr(not constant(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
                values = constant(left), constant(right)
                return None if UNKNOWN in values else repr(OPERATORS[type(op)](*values))
            case ast.BinOp(op=ast.Mult(), left=left, right=right) if 1 in (constant(left), constant(right)):
                return self.text_of(right if constant(left) == 1 else left)
            case ast.BinOp(op=ast.FloorDiv(), left=left, right=ast.Constant(value=1)):
                return self.text_of(left)
            case ast.IfExp(test=test) if constant(test) is not UNKNOWN:
                return self.text_of(node.body if constant(test) else node.orelse)
            case ast.BoolOp():
                return self.simpler_choice(node)
            case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name))]):
                return f"{self.text_of(owner)}.{name}"
        return None

    def simpler_choice(self, node: ast.BoolOp) -> str | None:
        """Of `and`, `or`: up to the operand that decides, without those that cannot."""
        decisive = isinstance(node.op, ast.Or)
        kept = []
        for operand in node.values:
            value = constant(operand)
            if value is UNKNOWN:
                kept.append(operand)
            elif bool(value) == decisive:
                kept = [*kept, operand] if decisive else [operand]  # Nothing here has effects: `x and False` is False.
                break
            elif operand is node.values[-1] and (not kept or not isinstance(value, bool)):
                kept.append(operand)  # As in `x or None`.
        if len(kept) == len(node.values):
            return None
        word = " or " if decisive else " and "
        return word.join(self.text_of(operand) for operand in kept)

    def simpler_statement(self, node: ast.AST) -> list[tuple[str, int, int, str]]:
        match node:
            case ast.If(test=test) if constant(test) is not UNKNOWN:
                return [self.settled(node, bool(constant(test)))]
            case ast.Return() | ast.Raise():
                owner, name = self.block_of(node)
                after = getattr(owner, name)
                after = after[after.index(node) + 1 :]
                if after:
                    end = self.start_of(node, after[-1].end_lineno)
                    return [(node.file, self.start_of(node, node.end_lineno), end, "")]
        return []

    def settled(self, node: ast.If, test: bool) -> tuple[str, int, int, str]:
        """The edit for an if whose test is known."""
        file, start, end = self.line_span(node)
        first_line = self.lines[file][node.lineno - 1].lstrip()
        rest = self.start_of(node, node.body[-1].end_lineno)  # Where the else or elif begins.
        if first_line.startswith(b"elif"):
            start = self.start_of(node, node.lineno - 1)
            if not test:
                return file, start, rest, ""
            return file, start, end, " " * node.col_offset + "else:\n" + self.unwrapped(node, dedent=False)
        if test:
            return file, start, end, self.unwrapped(node)
        if not node.orelse:
            return file, start, end, ""
        tail = self.texts[file][rest:end].decode()
        if tail.lstrip().startswith("elif"):
            return file, start, end, tail.replace("elif", "if", 1)
        return file, start, end, self.unwrapped(node, "orelse")

    def unwrapped(self, node: ast.stmt, name: str = "body", dedent: bool = True) -> str:
        """The statements in a block as text, four columns to the left."""
        block = getattr(node, name)
        file, start, end = self.line_span(block[0], block[-1])
        lines = self.texts[file][start:end].decode().splitlines(keepends=True)
        return "".join(line[4:] if dedent and line.startswith("    ") else line for line in lines)

    def unused(self) -> dict[str, list[ast.stmt]]:
        """What is defined and never read, by name: functions, classes, constants, methods, attributes, variables."""
        everywhere, found = Counter(), {}
        for tree in self.trees.values():
            everywhere.update(self.names_read(tree))
        fields = [node for owner in self.nodes if isinstance(owner, ast.ClassDef) for node in owner.body]
        own = {last_name(target) for node in fields for target in targets_of(node)}
        own |= {target.attr for node in self.nodes for target in targets_of(node) if is_of_self(target)}
        for owner in self.nodes:
            if isinstance(owner, ast.Module | ast.ClassDef):
                for node in owner.body:
                    name = self.name_of(node) or "__"
                    is_field = isinstance(owner, ast.ClassDef) and not isinstance(node, FUNCTIONS)
                    is_called = name.startswith("__") or name in CALLED_BY_TORCH
                    if not (is_field or is_called or everywhere[name] > self.names_read(node)[name]):
                        found[f"{getattr(owner, 'name', '')}.{name}"] = [node]
            if isinstance(owner, FUNCTIONS):
                read = self.variables_read(owner)
                for node, target in self.targets_in(owner):
                    name = last_name(target)
                    if isinstance(target, ast.Attribute) and (name not in own or name in CALLED_BY_TORCH):
                        continue  # A library reads it, such as Accelerate its gradient_accumulation_steps.
                    if name and not (name in read if isinstance(target, ast.Name) else everywhere[name]):
                        found.setdefault(f"{owner.name}: {ast.unparse(target)}", []).append(node)
        return found

    @staticmethod
    @functools.cache
    def names_read(node: ast.AST) -> Counter:
        """How often each name or attribute is read, or named by a string."""
        names = Counter()
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Load):
                names[last_name(part)] += 1
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                names[part.value] += 1
        return names

    @staticmethod
    @functools.cache
    def variables_read(node: ast.AST) -> set[str]:
        return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}

    @staticmethod
    @functools.cache
    def targets_in(node: ast.AST) -> list[tuple[ast.AST, ast.expr]]:
        """What is assigned to, and the statement that does it."""
        return [(part, target) for part in ast.walk(node) for target in targets_of(part)]

    def drop_unused(self) -> None:
        new = [nodes for name, nodes in self.unused().items() if name not in self.never_used]
        gone, edits = [node for nodes in new for node in nodes], []
        for node in self.nodes:  # a, b = 1, 2 where one or none of them is read.
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(
                    values
                ):
                    owner = next(one for one in self.owners(node) if isinstance(one, (*FUNCTIONS, ast.Module)))
                    read = self.variables_read(owner)
                    kept = [at for at, name in enumerate(names) if not isinstance(name, ast.Name) or name.id in read]
                    sides = [", ".join(self.text_of(side[at]) for at in kept) for side in (names, values)]
                    if not kept:
                        gone.append(node)
                    elif len(kept) < len(names):
                        edits.append((*self.span(node), " = ".join(sides)))
        if gone:
            self.cut(gone, "unused", edits)
        elif edits:
            self.edit(edits)
