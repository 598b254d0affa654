"""Marks the tests of this folder, so that the workflow can run them by themselves."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.template)
    items.sort(key=lambda item: "passes_its_suite" not in item.name)  # The longest first, so that nobody waits for it.
