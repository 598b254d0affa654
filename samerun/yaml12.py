"""YAML as people read it: version 1.2, in which 1e-4 is a number and 010 is ten."""

import re
from typing import IO, Any

import yaml
from pydantic_core import to_jsonable_python

INT = "tag:yaml.org,2002:int"
FLOAT = "tag:yaml.org,2002:float"
LEFT_OUT = {INT, FLOAT, "tag:yaml.org,2002:timestamp"}  # As PyYAML reads them, by version 1.1.
KEPT = {
    first: [(tag, regex) for tag, regex in resolvers if tag not in LEFT_OUT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
DIGITS = "[0-9][0-9_]*"
NUMBERS = {
    INT: rf"[-+]?{DIGITS}|0x[0-9a-fA-F][0-9a-fA-F_]*",
    FLOAT: rf"[-+]?({DIGITS})?\.{DIGITS}([eE][-+]?[0-9]+)?|[-+]?{DIGITS}(\.([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    yaml_implicit_resolvers = {first: list(resolvers) for first, resolvers in KEPT.items()}

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As a file has it: what is merged into it later may have the same keys."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key_node, _ in node.value:
            key, is_merge = key_node.value, key_node.tag == "tag:yaml.org,2002:merge"
            if isinstance(key, str) and not is_merge:
                if key in seen:
                    raise yaml.composer.ComposerError(None, None, f"found duplicate key {key}", key_node.start_mark)
                seen.add(key)
        return node

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = node.value.replace("_", "")
        return int(text, 16) if text.startswith("0x") else int(text)


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads as it was: it quotes the text 1e5."""

    yaml_implicit_resolvers = {first: list(resolvers) for first, resolvers in KEPT.items()}


# Of a fork's settings: a Path is a text, an Enum its value.
Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_data(to_jsonable_python(value)))
Loader.add_constructor(INT, Loader.construct_int)
for number_tag, pattern in NUMBERS.items():
    for side in (Loader, Dumper):
        side.add_implicit_resolver(number_tag, re.compile(f"(?:{pattern})$"), list("-+.0123456789"))


def parse_yaml(text: str | IO[str]) -> Any:
    """Raises yaml.YAMLError, which tells line and column, and the name of an opened file."""
    try:
        return unshared(yaml.load(text, Loader))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an alias stands within what it stands for") from None
    except (AttributeError, LookupError):  # Of PyYAML, which takes any text for what its tag says.
        raise yaml.YAMLError("a value is not of the kind that its tag says, as in !!bool x") from None


def comment_in(text: str) -> str:
    """What follows the value of a text that can be parsed: nothing, or a comment."""
    around = yaml.StreamStartToken, yaml.BlockEndToken, yaml.StreamEndToken  # They end behind a comment.
    end = max((token.end_mark.index for token in yaml.scan(text) if not isinstance(token, around)), default=0)
    return text[end:].strip()


def unshared(value: Any) -> Any:
    """Copies of what several aliases stand for, so that each can be changed alone."""
    if isinstance(value, dict):
        return {key: unshared(part) for key, part in value.items()}
    return [unshared(part) for part in value] if isinstance(value, list) else value


def to_yaml(value: Any) -> str:
    # The first of several evaluations is to stay the first.
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
