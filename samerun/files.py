"""Files and folders that are replaced whole or not at all, and checksums."""

import json
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np


def real_path(file: str) -> str:
    """The same for every name of a file."""
    return file if "://" in file else os.path.realpath(file)


SAMPLE, SAMPLES = 2**13, 8  # Bytes, and how many such parts of a large file.


def size_and_sample(file: str | Path) -> list[int]:
    """The size of a file, and a checksum of a small one or of parts of a large one, with its first and last bytes."""
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= SAMPLE * SAMPLES:
            return [size, zlib.crc32(opened.read())]
        found = 0
        for part in range(SAMPLES):
            opened.seek((size - SAMPLE) * part // (SAMPLES - 1))
            found = zlib.crc32(opened.read(SAMPLE), found)
        return [size, found]


def stamp(file: str) -> list[int]:
    """Time, size and checksum of a file, which tell whether it has been replaced."""
    return [os.stat(file).st_mtime_ns, *size_and_sample(file)]


def note_files(note: Path, files: list[Path]) -> None:
    """Write down that these files beside the note are complete. After that a power loss does not change them."""
    for file in files:
        sync(file)
    replace_file(note, json.dumps({file.name: size_and_checksum(file) for file in files}))


def are_as_noted(note: Path) -> bool:
    """Whether all files of note_files() are there as they were, to the last byte. Then there is a note, too."""
    try:
        noted = json.loads(note.read_text())
        files = [note.with_name(name) for name in noted]
        return [size_and_checksum(file) for file in files] == list(noted.values())
    except (OSError, ValueError, AttributeError):
        return False


def whole_lines(path: Path) -> list[str]:
    """Those of a JSON Lines file, without one that is still being written, or that a full disk has cut short."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def size_and_checksum(path: Path) -> list[int]:
    """The size of a file, and a checksum of all of it."""
    size = path.stat().st_size
    return [size, zlib.crc32(np.memmap(path, mode="r")) if size else 0]


def replace_file(path: Path, text: str, lasting: bool = True, draft: Path | None = None) -> None:
    """A reader sees the old content or the new, never half of it, and after a power loss, too, if it is to last.

    The draft is a new file of the same file system, by default beside the file.
    """
    draft = draft or path.with_name(f".{path.name}.tmp")
    if text and not text.endswith("\n"):
        text += "\n"
    draft.write_text(text, "utf-8")
    if lasting:
        sync(draft)
    os.replace(draft, path)
    if lasting:
        sync(path.parent)


def replace_folder(draft: Path, final: Path) -> None:
    """Give the draft its name. A folder that has the name already is moved away first, and deleted after that."""
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    hidden = final.with_name(f".{final.name}.old.tmp")
    if os.path.lexists(final):
        delete(hidden)  # A process may have been killed while it deleted that.
        os.replace(final, hidden)
    os.replace(draft, final)
    sync(final.parent)
    with suppress(OSError):
        delete(hidden)


def delete(path: Path) -> None:
    """A folder, a file, or nothing. Of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
