"""Which files a source names, how `datasets` opens them, and what identifies them."""

import bisect
import fnmatch
import glob
import inspect
import itertools
import json
import os
import re
import sysconfig
import tempfile
import urllib.parse
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pandas as pd

from samerun.config import Source
from samerun.data import text_files
from samerun.data.stdlib_chats import write_stdlib_chats
from samerun.errors import UserError, as_user_error, require, say
from samerun.files import are_as_noted, note_files, real_path, replace_file, stamp


def list_files(patterns: list[str]) -> list[str]:
    """The files that the patterns name, each of them once, without those of !patterns."""
    patterns = [full_pattern(pattern) for pattern in patterns]
    included = [pattern for pattern in patterns if not pattern.startswith("!")]
    require(included or not patterns, f"data.files: {patterns} only leave out; name what to take, too")
    found = {}  # As an ordered set.
    for pattern in included:
        files = matching_files(pattern)
        require(files, f"data.files: nothing matches {pattern!r} in {os.getcwd()}")
        found |= dict.fromkeys(files)
    kept = list(found)
    for pattern in patterns:
        if pattern.startswith("!"):
            is_named = name_matcher(pattern[1:])
            # A pattern that begins with an asterisk is meant for any folder. Any other that names nothing is a mistake.
            is_right = pattern.startswith("!*") or any(map(is_named, found))
            require(is_right, f"data.files: {pattern!r} leaves nothing out, seen from {os.getcwd()}")
            kept = [file for file in kept if not is_named(file)]
    require(kept or not patterns, f"data.files: {patterns} leave out all that they name")
    for file in kept:
        is_there = not leads_nowhere(file)
        require(is_there, f"data.files: {file} is a link to a file that is not there; to leave it out: '!{file}'")
    return list({real_path(file): file for file in kept}.values())


def full_pattern(pattern: str) -> str:
    """The pattern with the folders that ~ and {stdlib} stand for, and the file that {stdlib_chats} does."""
    if pattern.startswith("!"):
        return f"!{full_pattern(pattern[1:])}"
    if pattern == "{stdlib_chats}":
        cache = data_cache()
        with as_user_error(cannot_use(cache)):
            return write_stdlib_chats(cache)
    return os.path.expanduser(pattern.replace("{stdlib}", sysconfig.get_path("stdlib")))


def matching_files(pattern: str) -> list[str]:
    """The files that a pattern names: a URL, a file, a glob, or a folder, which stands for all files in it."""
    if "://" in pattern:
        return [pattern]
    if os.path.isfile(pattern):
        return [pattern]
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return sorted(file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file) or leads_nowhere(file))


def leads_nowhere(file: str) -> bool:
    """Whether it is a link to what is not there, such as a file of git-annex that was not fetched."""
    return os.path.islink(file) and not os.path.exists(file)


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Tells whether a !pattern names a file or a folder that it is in. An asterisk may stand for several folders."""
    if os.path.exists(pattern):
        pattern = glob.escape(pattern)
    absolute = not pattern.startswith("*")
    if absolute:
        pattern = os.path.join(glob.escape(os.getcwd()), pattern)
    pattern = os.path.normpath(pattern)
    forms = without_folders(pattern)
    inside = [f"{form}/*" for form in forms]
    regex = re.compile("|".join(map(fnmatch.translate, forms + inside)))
    path_of = os.path.abspath if absolute else os.path.normpath
    return lambda file: regex.match(path_of(file)) is not None


def without_folders(pattern: str) -> list[str]:
    """The pattern, and what it is where some of its ** stand for no folder at all."""
    before, stars, after = pattern.partition("**/")
    if not stars:
        return [pattern]
    ends = without_folders(after)
    return [f"{before}**/{end}" for end in ends] + [f"{before}{end}" for end in ends]


BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv"}
BUILDERS |= {".parquet": "parquet", ".arrow": "arrow"}

ARCHIVES = {".zip", ".tar", ".tgz"}

COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", *ARCHIVES}  # datasets unpacks them.


def data_suffix(file: str) -> str:
    """The suffix that tells the format: .jsonl for a.JSONL.gz and for https://host/a.jsonl?download=true."""
    path = urllib.parse.urlsplit(file).path if "://" in file else file
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    packed = []
    while suffixes and suffixes[-1] in COMPRESSED:
        packed.append(suffixes.pop())
    suffix = suffixes[-1] if suffixes else ""
    is_told = ARCHIVES.isdisjoint(packed) or suffix in (".txt", *BUILDERS)
    require(is_told, f"data.files: {file}: unpack it, or name it by what is in it, such as .jsonl.zip or .txt.zip")
    return suffix


def data_cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


def is_read_only(cache: Path) -> bool:
    """Whether all that a launch can do is to take what --prepare has put there."""
    return cache.is_dir() and not os.access(cache, os.W_OK)


def cannot_use(cache: Path) -> str:
    return f"the cache of data sets, {cache}, cannot be used; set HF_HOME or HF_DATASETS_CACHE to another one"


def require_writable(cache: Path) -> None:
    lacks = "it is read-only, and lacks what --prepare makes of these data"
    require(not is_read_only(cache), f"{cannot_use(cache)}: {lacks}")


def load_source(source: Source, note: Callable[[str], None] = say) -> datasets.Dataset:
    """All rows of a source. `note` gets what to tell of it."""
    if source.files:
        return load_files(list_files(source.files))
    require(source.path, "data: neither path nor files; what loads the rows must give load_source() one of them")
    problem = f"data: cannot load {source.path}"
    with as_user_error(problem, source.path):
        folders = saved_folders(source)
        if folders:
            return load_saved(folders, source.split)
        builder = datasets.load_dataset_builder(source.path, source.name)
        files = local_files(builder)
        if files:
            if builder.config.name.startswith("default"):  # Otherwise the folder has a README that names its files.
                note_unread_files(source.path, files, note)
            cache = usable_cache(files)
            builder = datasets.load_dataset_builder(source.path, source.name, cache_dir=cache)
            builder = text_files.leaving_texts(builder, cache)
    try:
        with as_user_error(problem, source.path):
            return read(builder, source.split)
    except UserError:
        if have_formats(files, source.path) and not os.path.exists(builder.cache_dir):
            load_files(files)  # Says which of them is wrong.
        raise


def have_formats(files: list[str], folder: str) -> bool:
    """Whether the name of each file tells how it is read. A README of the folder may say otherwise."""
    if not files or have_archive(files) or os.path.exists(os.path.join(folder, "README.md")):
        return False
    return {".txt", *BUILDERS}.issuperset(map(data_suffix, files))


def have_archive(files: list[str]) -> bool:
    """It may hold several files, of any format."""
    return any(kind in file.lower() for file in files for kind in ARCHIVES)


def place_of_row(documents: datasets.Dataset, source: Source, row: int) -> str:
    """Where the user finds a row of load_source(): its number, and the file if there are several."""
    files = list_files(source.files)
    lengths = documents.info.splits["train"].original_shard_lengths if len(files) > 1 else None
    if lengths and len(lengths) <= len(files) and not have_archive(files):  # Empty files at the end have no length.
        ends = list(itertools.accumulate(lengths))
        number = bisect.bisect(ends, row)
        return f"row {row - ends[number] + lengths[number]}, counted from 0, of {files[number]}"
    return f"row {row}, counted from 0"


def load_saved(folders: dict[str, str], split: str) -> datasets.Dataset:
    """A split, or parts of some, of what saved_folders() has found."""
    # datasets fails to load one without rows, which has no files.
    with_rows = {name: folder for name, folder in folders.items() if saved_files(folder)}
    require(with_rows, "it has no rows")
    saved = {name: datasets.load_from_disk(folder) for name, folder in with_rows.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(data) for name, data in saved.items()})
    found = [saved[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(found).with_format(None)  # They may have been saved with another one.


def local_files(builder: datasets.DatasetBuilder) -> list[str]:
    files = itertools.chain(*(builder.config.data_files or {}).values())
    return [file for file in files if os.path.isfile(file)]


DOCUMENT_CACHE = "train-documents"

# What datasets itself writes into folders.
OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def note_unread_files(folder: str, read: list[str], note: Callable[[str], None]) -> None:
    """Note the data files of a folder that datasets leaves out: it takes those of the most common kind and, if the
    names of some tell a split, only these."""
    known, left = set(map(real_path, read)), []
    for file in matching_files(folder):
        is_data = not {".txt", *BUILDERS}.isdisjoint(suffix.lower() for suffix in Path(file).suffixes)
        if is_data and Path(file).name not in OF_DATASETS and real_path(file) not in known:
            left.append(os.path.relpath(file, folder))
    if left:
        more = f" and {len(left) - 5:,} more" if len(left) > 5 else ""
        note(f"files of {folder} that are not read: {', '.join(left[:5])}{more}; data.files can name them.")


def usable_cache(files: list[str]) -> str:
    """Where datasets keeps what it makes of local files. By itself, it would know them by name and time alone.

    Notes of datasets that are damaged, as by a power loss, are deleted: it would say that the user's files are no JSON.
    """
    folder = data_cache() / DOCUMENT_CACHE / hashed_key(stamps_of(files), inspect.getsource(text_files))
    for about in list(folder.rglob("dataset_info.json")):
        try:
            json.loads(about.read_bytes())
        except ValueError:
            about.unlink()  # read() says that the folder is not as it was.
    return str(folder)


def stamps_of(files: list[str]) -> list[Any]:
    return [[real_path(file), *stamp(file)] for file in files]


def hashed_key(*parts: Any) -> str:
    return datasets.fingerprint.Hasher.hash(parts)


def read(builder: datasets.DatasetBuilder, split: str) -> datasets.Dataset:
    """The documents as Arrow files, which are made unless they are there as they were."""
    folder = Path(builder.cache_dir)
    note = folder / "train-complete.json"
    is_noted = note.exists() or DOCUMENT_CACHE in folder.parts  # Otherwise another program may have made them.
    mode = None
    if folder.exists() and is_noted and not are_as_noted(note):
        say(f"Data: {folder} is not as it was written, and is made anew.")
        mode = "reuse_cache_if_exists"  # Of what is downloaded.
    with warnings.catch_warnings():
        # Otherwise pandas would drop cells that have no column.
        warnings.filterwarnings("error", "Length of header", pd.errors.ParserWarning)
        with text_files.exact_json() if builder.name == "json" else nullcontext():  # For that of the Hub.
            builder.download_and_prepare(download_mode=mode)
    if not note.exists():
        with suppress(PermissionError):  # Another user has made them.
            note_files(note, [*sorted(folder.glob("*.arrow")), *folder.glob("dataset_info.json")])
    require(builder.info.splits.total_num_examples, "it has no rows")
    return builder.as_dataset(split)


def identity_of(source: Source) -> list[Any]:
    """What changes when the data does. Unlike load_source(), this opens no data set, and so is always quick.

    Local files are known by their size, their time, and a checksum of the small ones and of parts of the large ones.
    """
    if source.files:
        files = list_files(source.files)
        try:
            kind = builder_of(files)
            local = [file for file in files if "://" not in file]
            remote = [file for file in files if "://" in file]
            described = describe_files(kind, remote).cache_dir if remote else datasets.__version__
            return [kind, described, list(map(real_path, files)), stamps_of(local)]
        except Exception:
            load_files(files)  # Raises what is wrong, with the name of the file.
            raise
    with as_user_error(f"data: cannot load {source.path}", source.path):
        folders = saved_folders(source)
        if folders:
            return [*(stamps_of([f"{one}/state.json", *saved_files(one)]) for one in folders.values()), source.split]
        return [*identity_of_path(source.path, source.name), source.split]


def identity_of_path(path: str, name: str | None) -> list[Any]:
    """What datasets says of a data set from the Hub or in a folder, which it tells by names, times and revisions."""
    if os.path.exists(path):
        with tempfile.TemporaryDirectory() as empty:  # The cache may be read-only.
            builder = datasets.load_dataset_builder(path, name, cache_dir=empty)
            return [os.path.relpath(builder.cache_dir, empty), stamps_of(local_files(builder))]
    cache = data_cache()
    note = cache / "train-sources" / f"{hashed_key(path, name)}.json"
    if is_read_only(cache) and note.exists():
        return json.loads(note.read_text())
    require_writable(cache)  # datasets would want to write here even to know it.
    identity = [os.path.relpath(datasets.load_dataset_builder(path, name).cache_dir, cache)]
    note.parent.mkdir(parents=True, exist_ok=True)
    replace_file(note, json.dumps(identity))
    return identity


def saved_files(folder: str) -> list[str]:
    """The files of a data set of save_to_disk. There may be others beside them, which a later map() has left."""
    state = json.loads(Path(folder, "state.json").read_text())
    return [os.path.join(folder, file["filename"]) for file in state["_data_files"]]


def saved_folders(source: Source) -> dict[str, str]:
    """Where save_to_disk has put data sets, by their splits. Empty if the path is something else.

    Of several data sets in a folder, datasets itself would guess which are the splits, and take all for train if it
    cannot tell. Besides, it would take for granted that all have the same columns.
    """
    path = source.path
    require(not os.path.isfile(path), "it is a file; name it in the list `files`, in place of `path`")
    if os.path.isfile(os.path.join(path, "state.json")):
        is_whole = source.name is None and source.split == "train"
        require(is_whole, "a folder of save_to_disk holds a single data set; leave out name and split")
        return {"train": path}
    note = Path(path, "dataset_dict.json")
    if note.is_file():
        require(source.name is None, "a folder of save_to_disk has no configurations; leave out name")
        return {split: os.path.join(path, split) for split in json.loads(note.read_text())["splits"]}
    is_plain = not (os.path.isdir(path) and glob.has_magic(os.path.abspath(path)))
    advice = "name the folder in the list `files`, in place of `path`"
    require(is_plain, f"datasets takes its full path for a pattern; {advice}")
    return {}


def builder_of(files: list[str]) -> str:
    """The builder of datasets that reads these files; tsv is that of .csv, with tabs."""
    builders = {BUILDERS.get(data_suffix(file), "text"): data_suffix(file) for file in files}
    kinds = " and ".join(suffix or "text" for suffix in builders.values())
    require(len(builders) == 1, f"data.files: {kinds} files do not mix; choose by a pattern")
    [builder] = builders
    return builder


def load_files(files: list[str]) -> datasets.Dataset:
    builder = builder_of(files)
    for file in files:
        is_plain = "://" in file or "::" not in file
        require(is_plain, f"data.files: {file}: datasets takes '::' for the name of an archive's part; rename the file")
    if len(files) > 1:
        with suppress(Exception):
            return read_files(builder, files)
        bad = first_bad_file(builder, files)
        for file in (bad, files[0]):
            load_files([file])  # Alone, a file gives a clearer error, and then this raises.
        with as_user_error(f"data: cannot load {files[0]} together with {bad}"):
            read_files(builder, [files[0], bad])
    more = f" and {len(files) - 1:,} more files" if len(files) > 1 else ""  # Each pair that was tried can be read.
    with as_user_error(f"data: cannot load {files[0]}{more}"):
        require(any("://" in file or os.path.getsize(file) for file in files), "it is empty")
        return read_files(builder, files)


def read_files(builder: str, files: list[str]) -> datasets.Dataset:
    # For place_of_row(). Not for data of the Hub, in whose cache earlier versions of datasets do not understand it.
    with mock.patch.object(datasets.config, "SAVE_ORIGINAL_SHARD_LENGTHS", True):
        return read(describe_files(builder, files), "train")


def describe_files(builder: str, files: list[str]) -> datasets.DatasetBuilder:
    # datasets reads each name as a pattern, and puts the working folder before it. Escaped, a[1].txt is that file and
    # nothing else.
    names = [file if "://" in file else glob.escape(os.path.abspath(file)) for file in files]
    local = [file for file in files if "://" not in file]
    cache = usable_cache(local) if local else None
    kind, options = builder, {}
    if builder == "tsv":  # As datasets itself reads the .tsv of a folder.
        kind, options = "csv", {"sep": "\t"}
    return text_files.leaving_texts(
        datasets.load_dataset_builder(kind, data_files=names, cache_dir=cache, **options), cache
    )


def first_bad_file(builder: str, files: list[str]) -> str:
    """The first file, after the very first, that cannot be loaded together with those before it."""

    def fails(count: int) -> bool:
        try:
            read_files(builder, files[:count])
        except Exception:
            return True
        return False

    return files[1 + bisect.bisect_left(range(2, len(files)), True, key=fails)]
