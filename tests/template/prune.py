"""Takes out of a fork's tests what is about features that are gone.

What mentions a setting, a room, a name or a word that is gone goes: an entry of a table or of a dict, an assertion, or
the whole test. So does what needs a helper or a fixture that went.
"""

import ast
import re
from dataclasses import dataclass
from typing import Any

from surgery import UNKNOWN, House, constant, last_name

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Gone:
    settings: dict[str, Any]  # By the dotted path: the value that switches it off.
    harmless: set[str]  # Those of the settings that do not change what a run learns.
    names: set[str]  # "samerun.run.sample" or "samerun.run.sample.encode_prompt".
    # (function, position of the parameter, name of the parameter, constant that stands for it now).
    parameters: list[tuple[str, int, str, Any]]
    keywords: set[str]  # Parameters that no function has any more.
    choices: list[tuple[str, str]]  # Values that a setting cannot have any more.
    words: list[str]  # In a string, such as the name of a launcher file.


def what_is_gone(before: House, after: House, words: list[str]) -> Gone:
    return Gone(
        after.switched_off,
        after.harmless,
        names_of(before) - names_of(after),
        after.parameters,
        keywords_of(before) - keywords_of(after),
        after.choices,
        words,
    )


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_of(house: House) -> set[str]:
    """The rooms, and what each of them defines."""
    names = {module_of(file) for file in house.trees}
    for file, tree in house.trees.items():
        names |= {f"{module_of(file)}.{house.name_of(node)}" for node in tree.body}
    return names


def keywords_of(house: House) -> set[str]:
    fields = {house.name_of(node) for node in house.nodes if isinstance(node, ast.AnnAssign)}
    return fields | {node.arg for node in house.nodes if isinstance(node, ast.arg)}


class Tests:
    """The test files of a fork, each by its path."""

    def __init__(self, sources: dict[str, str], gone: Gone):
        self.house, self.gone = House(sources), gone
        self.lost: dict[str, set[str]] = {file: set() for file in sources}  # The names that each file has lost.
        self.went: dict[str, str] = {}  # What went as a whole, and why.
        self.keys = {path.split(".")[-1]: path for path in gone.settings}  # Settings, and sections without any.
        paths = "|".join(re.escape(path) for path in gone.settings if "." in path) or "$^"
        self.is_setting = re.compile(rf"(^|[^\w.])({paths})\b")

    def prune(self) -> dict[str, str]:
        self.drop_arguments()
        before, known = None, {}
        while before != self.house.texts:
            before = dict(self.house.texts)
            for file in list(self.house.trees):
                self.lose_imports(file)
                now = self.house.texts[file], set(self.lost[file])
                if known.get(file) == now:
                    continue
                known[file], edits = now, []
                for statement in self.house.trees[file].body:
                    edits += self.pruned(statement)
                if edits:
                    self.house.edit(edits)
        self.house.ruff("F401,F841")
        return self.house.sources

    def drop_arguments(self) -> None:
        """Where a constant is passed for a parameter that is gone: by its name, only the one that stands for it now."""
        for function, at, name, value in self.gone.parameters:
            edits = []
            for call in self.house.calls(function):
                parts = [*call.args, *call.keywords]
                named = [keyword for keyword in call.keywords if keyword.arg == name]
                if len(call.args) > at and constant(call.args[at]) is not UNKNOWN:
                    edits.append(self.house.without_element(call.args, at, call))
                elif named and constant(named[0].value) is not UNKNOWN and constant(named[0].value) == value:
                    edits.append(self.house.without_element(parts, parts.index(named[0]), call))
            self.house.edit(edits)

    # What is mentioned

    def lose_imports(self, file: str) -> None:
        """Note which names that a file imports are gone."""
        for node in self.house.trees[file].body:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
                module = getattr(node, "module", None)
                path = f"{module}.{alias.name}" if module else alias.name
                of_tests = self.lost.get(f"tests/{module}.py", ())
                is_deleted = str(module).startswith("test_") and f"tests/{module}.py" not in self.lost
                if is_deleted or path in self.gone.names or module in self.gone.names or alias.name in of_tests:
                    self.lost[file].add(alias.asname or alias.name)

    def modules(self, file: str) -> dict[str, str]:
        """The modules that a file has imported, by the names that they have there."""
        found = {}
        for node in self.house.trees[file].body:
            if isinstance(node, ast.Import):
                found |= {alias.asname or alias.name: alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def is_gone(self, node: ast.AST, lost: set[str]) -> bool:
        """Whether a single node names what is gone."""
        match node:
            case ast.Name(id=name):
                return name in lost
            case ast.arg(arg=name):
                return name in lost
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in self.imported:
                return f"{self.imported[owner]}.{name}" in self.gone.names
            case ast.Attribute() if ast.unparse(node) in self.gone.names:
                return True
            case ast.Attribute(value=ast.Attribute(attr=section), attr=name):
                return f"{section}.{name}" in self.gone.settings
            case ast.keyword(arg=name, parent=ast.Call()):  # Not of a class, as strict=False.
                function = House.called(node.parent)
                is_lost = any((last_name(function), name) == (one, other) for one, _, other, _ in self.gone.parameters)
                return (is_lost or name in self.keys or name in self.gone.keywords) and self.is_ours(function)
            case ast.Constant(value=str(text)):
                if any(word in text for word in self.gone.words) or self.is_setting.search(text):
                    return True
                return text in self.gone.names or text in self.keys and self.is_key(node) or self.is_choice(node)
        return False

    def is_choice(self, node: ast.Constant) -> bool:
        """Whether this is a value that is gone: in {"format": "chat"}, in format="chat", or after "--data.format"."""
        match node.parent:
            case ast.keyword(arg=setting):
                pass
            case ast.Dict(keys=keys, values=values) if node in values:
                setting = constant(keys[values.index(node)])
            case ast.Tuple(elts=words) | ast.List(elts=words) | ast.Call(args=words) if node in words[1:]:
                setting = constant(words[words.index(node) - 1])
            case _:
                return False
        gone = [path for path, value in self.gone.choices if value == node.value]
        return any(setting in (path.split(".")[-1], f"--{path}") for path in gone)

    def is_ours(self, function: ast.expr) -> bool:
        """Whether a function is of the house or of the tests, not of a library."""
        name = function.value if isinstance(function, ast.Attribute) else function
        module = self.imported.get(getattr(name, "id", None), "" if name is function else "a library")
        return module.split(".")[0] in ("", "train", "samerun", "helpers", "reference")

    @staticmethod
    def is_key(node: ast.Constant) -> bool:
        owner = node.parent
        return (isinstance(owner, ast.Dict) and node in owner.keys) or (
            isinstance(owner, ast.Subscript) and owner.slice is node
        )

    def mentions(self, node: ast.AST, lost: set[str], without: set[ast.AST] = frozenset()) -> bool:
        """Whether anything in a node names what is gone, besides the nodes `without`."""
        if node in without or self.house.is_text([node]):
            return False
        if self.is_gone(node, lost):
            self.reason = ast.unparse(node)
            return True
        return any(self.mentions(child, lost, without) for child in ast.iter_child_nodes(node))

    # What goes

    def pruned(self, statement: ast.stmt) -> list:
        """The edits of a statement of a file. Those for all of it if it goes."""
        self.imported, lost = self.modules(statement.file), self.lost[statement.file]
        if isinstance(statement, ast.Import | ast.ImportFrom) or self.house.is_text([statement]):
            return []
        name = getattr(statement, "name", None)
        if name in self.gone.words or f"{statement.file}::{name}" in self.gone.words:
            self.reason, edits = "named by its feature", None
        elif isinstance(statement, FUNCTIONS):
            edits = self.pruned_function(statement, lost)
        else:
            edits = self.pruned_constant(statement, lost)
        if edits is None:
            self.went[f"{statement.file}::{self.house.name_of(statement)}"] = self.reason
            lost |= {
                self.house.name_of(statement),
                *(one.id for one in ast.walk(statement) if self.is_new(one, statement)),
            }
            return [(*self.house.line_span(statement), "")]
        return edits

    def pruned_constant(self, statement: ast.stmt, lost: set[str]) -> list | None:
        entries = self.idle_entries(statement, is_test=False)
        idle = {node for pair in entries for node in pair}
        edits = []
        if isinstance(getattr(statement, "value", None), ast.Dict | ast.List | ast.Set):
            edits = self.thinned(statement.value, lost, idle)
        if edits is None or self.mentions(statement, lost, idle | {node for node, _ in edits}):
            return None
        return [edit for _, edit in edits] + [self.house.without_entry(*pair) for pair in entries]

    def thinned(
        self, display: ast.expr, lost: set[str], idle: set[ast.AST] = frozenset()
    ) -> list[tuple[ast.AST, tuple]] | None:
        """The elements of a list or dict that go, each with its edit; None if nothing would be left."""
        if isinstance(display, ast.Dict):
            pairs = list(zip(display.keys, display.values))
            pairs = [pair for pair in pairs if any(one and self.mentions(one, lost, idle) for one in pair)]
            if pairs and len(pairs) == len(display.keys):
                return None
            return [(one, self.house.without_entry(*pair)) for pair in pairs for one in pair]
        if not isinstance(display, ast.List | ast.Tuple | ast.Set):
            return []
        at = [number for number, element in enumerate(display.elts) if self.mentions(element, lost, idle)]
        if at and len(at) == len(display.elts):
            return None
        return self.without_elements(display, at)

    def without_elements(self, display: ast.expr, at: list[int]) -> list[tuple[ast.AST, tuple]]:
        if not at:
            return []
        left = [self.house.text_of(one) for number, one in enumerate(display.elts) if number not in at]
        opening, closing = self.house.text_of(display)[0], self.house.text_of(display)[-1]
        if opening not in "([{":
            opening, closing = "(", ")"
        text = f"{opening}{', '.join(left)}{',' if isinstance(display, ast.Tuple) else ''}{closing}"
        edit = (*self.house.span(display), text)
        return [(display.elts[number], edit) for number in at]

    def thinned_table(self, decorator: ast.expr, lost: set[str]) -> list[tuple[ast.AST, tuple]] | None:
        """As thinned(), of the cases of a pytest.mark.parametrize, with their ids."""
        if not (isinstance(decorator, ast.Call) and last_name(decorator.func) == "parametrize"):
            return []
        edits = self.thinned(decorator.args[1], lost)
        for keyword in decorator.keywords if edits else []:
            if keyword.arg == "ids" and isinstance(keyword.value, ast.List):
                gone = {node for node, _ in edits}
                at = [number for number, one in enumerate(decorator.args[1].elts) if one in gone]
                edits += self.without_elements(keyword.value, at)
        return edits

    def pruned_function(self, function: ast.FunctionDef, lost: set[str]) -> list | None:
        """The edits of a function, None if it goes."""
        is_test = function.name.startswith("test_")
        edits, lost = [], set(lost)
        for decorator in function.decorator_list:
            cases = self.thinned_table(decorator, lost)
            if cases is None or self.mentions(decorator, lost, {node for node, _ in cases}):
                return None
            edits += [edit for _, edit in cases]
        if self.mentions(function.args, lost):
            return None
        dropped = []
        for statement in function.body:
            entries = self.idle_entries(statement, is_test)
            if self.mentions(statement, lost, {node for pair in entries for node in pair}):
                if not self.can_go(statement, function, is_test):
                    return None
                dropped.append(statement)
                lost |= {name.id for name in ast.walk(statement) if self.is_new(name, statement)}
            else:
                edits += [self.house.without_entry(*pair) for pair in entries]
        left = [one for one in function.body if one not in dropped and not self.house.is_text([one])]
        if dropped and not (self.proves_something(left) if is_test else left):
            return None
        return edits + [(*self.house.line_span(statement), "") for statement in dropped]

    @staticmethod
    def is_new(node: ast.AST, statement: ast.stmt) -> bool:
        binds = isinstance(statement, ast.Assign | ast.With)  # Such as `with raises(...) as refusal`.
        return binds and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)

    def idle_entries(self, statement: ast.stmt, is_test: bool) -> list[tuple[ast.expr, ast.expr]]:
        """The entries of dicts that switch a feature off, or in what tests share do not change what is learned."""
        found = []
        for node in ast.walk(statement):
            for key, value in zip(node.keys, node.values) if isinstance(node, ast.Dict) else ():
                path = self.keys.get(constant(key)) if isinstance(key, ast.Constant) else None
                if path and (self.is_off(path, value) or (path in self.gone.harmless and not is_test)):
                    found.append((key, value))
        return found

    def is_off(self, path: str, value: ast.expr) -> bool:
        return constant(value) is not UNKNOWN and constant(value) == self.gone.settings[path]

    def can_go(self, statement: ast.stmt, function: ast.FunctionDef, is_test: bool) -> bool:
        """Whether what is left of the function still means what it did."""
        match statement:
            case ast.Assert() | ast.Delete():
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="pop"))):
                return True
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=func)), *_]) if last_name(func) == "raises":
                return True
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=key))], value=value) if key in self.keys:
                path = self.keys[key]
                return self.is_off(path, value) or (path in self.gone.harmless and not is_test)
            case ast.Assign():
                own = {node.id for node in ast.walk(statement) if self.is_new(node, statement)}
                others = [one for one in ast.walk(function) if isinstance(one, ast.Assign) and one is not statement]
                again = {node.id for one in others for node in ast.walk(one) if self.is_new(node, one)}
                return is_test and bool(own) and not own & again
        return False

    @staticmethod
    def proves_something(statements: list[ast.stmt]) -> bool:
        for node in [part for statement in statements for part in ast.walk(statement)]:
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.Call) and re.match("check|raises|assert_", last_name(node.func) or ""):
                return True
        return False
