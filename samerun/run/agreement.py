"""One run on all ranks: they have the same settings, code, libraries, launcher and rows before the first step."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers

from samerun.config import FROZEN, Config
from samerun.data.load import evaluation_title
from samerun.data.rows import Dataset
from samerun.dotted import flat_settings
from samerun.errors import AgreedError
from samerun.meeting import Meeting
from samerun.model.outline import check_kind
from samerun.run.replicas import sample_of_weights

PACKAGE = Path(__file__).resolve().parents[1]
MOST_LINES = 12
# Besides those that a run writes down.
LIBRARIES = ("deepspeed", "numpy", "peft", "safetensors", "tokenizers", "torchao", "trl")
# Fields of a transformers config that tell how a model was saved or loaded, and not what it is.
OF_NO_MODEL = "_name_or_path", "transformers_version", "dtype", "torch_dtype"


def agree(meeting: Meeting, facts: dict[str, Any]) -> None:
    """Raises AgreedError with the host, the name and both values unless all ranks have the same facts.

    A fact is something that JSON can hold. As long as they are the same, the ranks exchange a checksum only.
    """
    if len(set(meeting.gather(digest(facts)))) > 1:
        refuse_differences(meeting.gather([meeting.host, facts]))


def agree_on_weights(meeting: Meeting, model: torch.nn.Module, filled: int) -> str | None:
    """Raises AgreedError unless each first weight that several ranks have met was the same on all of them.

    Returns a checksum of samples of the frozen ones, on whatever rank they are, and None if all are trained. `filled`:
    a sample of frozen weights that had no placeholders.
    """
    weights = getattr(model, "first_weights", None)
    samples = weights.samples if weights else {}
    digests = meeting.gather(digest(samples))
    is_first = digests.index(digests[meeting.rank]) == meeting.rank  # Of those that have met the same.
    told = meeting.gather([meeting.host, samples if is_first else {}])
    known = {}
    for _, theirs in told:
        known = theirs | known
    refuse_differences([[host, known | theirs] for host, theirs in told])
    return checksum_of_frozen(known, filled)


def checksum_of_frozen(samples: dict[str, int], filled: int = 0) -> str | None:
    """Of the samples that FirstWeights has met, those of frozen weights. None if there are none."""
    frozen = {name: sample for name, sample in samples.items() if name.startswith(FROZEN)}
    return digest({**frozen, "filled": filled})[:12] if frozen or filled else None


def digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def refuse_differences(told: list[list[Any]]) -> None:
    """Raises AgreedError if some ranks have another fact than others, by [host, facts] of the ranks."""
    lines = differences(told)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"  and {len(lines) - MOST_LINES} more"]
    advice = "the processes are not one run; give all of them the same command, files and code:"
    if lines:
        raise AgreedError("\n".join([f"launch: {advice}", *lines]))


def differences(told: list[list[Any]]) -> list[str]:
    """A line for each name with two values, that of the main process and another, by [host, facts] of the ranks."""
    lines = []
    main_host, main_facts = told[0]
    for name in sorted({name for _, facts in told for name in facts}):
        ours = main_facts.get(name)
        others = [rank for rank, (_, facts) in enumerate(told) if facts.get(name) != ours]
        if others:
            host, facts = told[others[0]]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            there = f"{facts.get(name)!r} on {host} (rank {others[0]}{more})"
            lines.append(f"  {name}: {ours!r} on {main_host} (rank 0), {there}")
    return lines


def launch_facts(config: Config, versions: dict[str, str], code: dict[str, str]) -> dict[str, Any]:
    """What must be the same on all ranks before they do anything together."""
    facts = {name: value for name, value in flat_settings(config).items() if not is_place(name)}
    facts |= launcher_settings()
    # Whether a node has git, and whether its copy is a clone, does not matter: the files are compared.
    facts |= {f"version of {name}": number for name, number in versions.items() if name != "git"}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            facts[f"version of {name}"] = version(name)
    return facts | {f"code of {name}": checksum for name, checksum in code.items()}


def is_place(setting: str) -> bool:
    """Whether its value is a path that may differ from machine to machine, because what lies there is compared."""
    is_of_data = setting.startswith("data.") and setting.endswith((".path", ".files"))
    return is_of_data or setting == "run.output_dir"


def launcher_settings() -> dict[str, str]:
    """What `accelerate launch` has told this process, under the names of its file, and the kind of device here."""
    device = torch.accelerator.current_accelerator(check_available=True)
    told = {"launcher: device": device.type if device else "cpu", "launcher: processes": os.environ.get("WORLD_SIZE")}
    for name, value in os.environ.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            told[f"launcher: {name.removeprefix('ACCELERATE_').lower()}"] = value
    return told


def library_versions(repository: Path) -> dict[str, str]:
    """The versions of Python and the libraries, and the git commit of the repository, empty where there is none."""
    versions = {library.__name__: str(library.__version__) for library in (torch, accelerate, transformers, datasets)}
    versions["python"] = sys.version.split()[0]
    versions["git"] = subprocess.getoutput(
        f"git -C {shlex.quote(str(repository))} describe --always --dirty 2> /dev/null"
    )
    return versions


def checksums_of_code(script: Path) -> dict[str, str]:
    """Checksums of the script, of what it has imported from beside it, and of each file of this package."""
    files = {script.name: script}
    beside, environment = os.path.join(script.parent, ""), os.path.join(sys.prefix, "")
    for module in list(sys.modules.values()):
        path = str(getattr(module, "__file__", None))  # A Path for each of thousands of modules would take a while.
        is_beside = path.startswith(beside) and not path.startswith(environment)
        if is_beside and path.endswith(".py") and os.path.isfile(path):
            files[os.path.relpath(path, script.parent)] = Path(path)
    files |= {str(path.relative_to(PACKAGE.parent)): path for path in PACKAGE.rglob("*.py")}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in files.items()}


def settings_of(model: torch.nn.Module) -> dict[str, Any]:
    """The transformers config of a model as JSON has it, without how the model was saved or loaded."""
    settings = {name: value for name, value in model.config.to_dict().items() if name not in OF_NO_MODEL}
    return json.loads(json.dumps(settings, default=str))


def data_facts(train: Dataset, evaluations: dict[str, Dataset], model: torch.nn.Module) -> dict[str, Any]:
    """The rows, and the model as far as it has no placeholders. With the settings, they fix the length of the run."""
    check_kind(model)
    named = {"data": train} | {evaluation_title(name): data for name, data in evaluations.items()}
    facts = {}
    for name, data in named.items():
        facts[f"{name}: rows"] = len(data)
        facts[f"{name}: fingerprint of the rows"] = data.fingerprint()
    facts["model: config"] = json.dumps(settings_of(model), sort_keys=True)
    facts["model: sample of the weights"] = sample_of_weights(model)
    return facts
