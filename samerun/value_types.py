"""Types of the values of settings, beside those that Python and pydantic have."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from samerun.errors import require


def as_list(value: Any) -> Any:
    """One text stands for a list of one, and null for none."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]

Texts = Annotated[list[Text], BeforeValidator(as_list, json_schema_input_type=Text | list[Text] | None)]

# A column, or two: of prompts and of their completions.
Columns = Annotated[Texts, Field(max_length=2)]

Location = Annotated[Text, AfterValidator(os.path.expanduser)]  # In a YAML file, no shell has replaced the ~.


def as_folder(path: str) -> str:
    """A path with :// would be taken for folders of such names."""
    require("://" not in path, f"{path} is not a folder here; give one, and copy what is saved in it by run.after_save")
    return path


Folder = Annotated[Location, AfterValidator(as_folder)]
