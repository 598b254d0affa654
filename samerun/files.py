"""Files and folders that are replaced whole or not at all, and checksums."""

import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np


def real_path(file: str) -> str:
    """The same for every name of a file."""
    return file if "://" in file else os.path.realpath(file)


def stamp(file: str) -> list[int]:
    """Size and time of a file, which tell whether it has been replaced."""
    status = os.stat(file)
    return [status.st_size, status.st_mtime_ns]


def checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path))


def replace_file(path: Path, text: str) -> None:
    """A reader sees the old content or the new, never half of it."""
    draft = path.with_name(f".{path.name}.tmp")
    if text and not text.endswith("\n"):
        text += "\n"
    draft.write_text(text)
    os.replace(draft, path)


def replace_folder(draft: Path, final: Path) -> None:
    """Give the draft its name. A folder that has the name already is moved away first, and deleted after that."""
    hidden = final.with_name(f".{final.name}.old.tmp")
    if os.path.lexists(final):
        os.replace(final, hidden)
    os.replace(draft, final)
    with suppress(OSError):
        delete(hidden)


def delete(path: Path) -> None:
    """A folder, a file, or nothing. Of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
