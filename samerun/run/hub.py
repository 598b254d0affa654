"""What run.hub does: the model goes to the Hugging Face Hub, with a card that says how it was trained."""

import inspect
import json
import os
import sys
import tempfile
from pathlib import Path

import huggingface_hub

from samerun.config import Config
from samerun.errors import is_main_process, one_line, require, say
from samerun.files import replace_file, whole_lines
from samerun.run.after_save import Background, run_apart
from samerun.run.checkpoint import step_of
from samerun.yaml12 import to_yaml

SECRET = {"after_save", "tracker_options"}  # Settings of section run that may hold passwords.


class PushCheckpoints(Background):
    """Exports a checkpoint by another process, and pushes that."""

    setting = "run.hub"

    def __init__(self, config: Config):
        self.every = config.run.hub.every if config.run.hub else "end"
        super().__init__(self.every != "end")
        self.config = config
        self.latest: Path | None = None  # What is noted in a checkpoint later changes no weight.
        if config.run.hub and config.run.max_steps != 0 and not huggingface_hub.get_token():
            say("run.hub: nobody is logged in. Before the end of the run, call `hf auth login`, or nothing is pushed.")

    def begin(self, checkpoint: Path) -> None:
        if checkpoint != self.latest:
            self.latest = checkpoint
            super().begin(checkpoint)

    def run(self, checkpoint: Path) -> None:
        folder, step = Path(self.config.run.output_dir), step_of(checkpoint)
        with tempfile.TemporaryDirectory(prefix=".hub-", suffix=".tmp", dir=folder) as draft:
            model = Path(draft) / "model"
            script = inspect.getfile(type(self.config))  # train.py, also that of a fork.
            words = ["--config", folder / "config.yaml", "--export", step, "--to", model]
            words += ["--run.output_dir", json.dumps(str(folder), ensure_ascii=False)]  # In YAML, 2026 is no text.
            status, last_line = run_apart([sys.executable, script, *map(str, words)])
            require(status == 0, f"cannot export it: {last_line}")
            push(model, self.config, step)


def push_export(config: Config) -> None:
    """Push the model of a run that has finished, unless that is done. Only the main process does it.

    A failure is said. It ends nothing, because the same command tries again.
    """
    hub, folder = config.run.hub, Path(config.run.output_dir)
    if hub is None or config.run.max_steps == 0 or not is_main_process():
        return
    note = folder / "hub.json"
    try:
        status = json.loads((folder / "status.json").read_text())
        step = status.get("exported_step", status["step"])
        wanted = json.dumps({"repo_id": hub.repo_id, "step": step}) + "\n"
        if note.exists() and note.read_bytes() == wanted.encode():
            return
        push(folder / "model", config, step)
        replace_file(note, wanted)
    except Exception as error:
        say(f"run.hub failed: {one_line(error)}. The model is in {folder}/model; the same command pushes it.")


def push(model: Path, config: Config, step: int) -> None:
    """Let the repository have the files of this folder and a card, in one commit. What it has is not sent again."""
    hub, run = config.run.hub, Path(config.run.output_dir)
    (run / "hub.json").unlink(missing_ok=True)  # From now on, the repository may have another model than it says.
    model = model.resolve()
    files = {str(path.relative_to(model)): path for path in model.rglob("*") if path.is_file()}
    if (run / "curves.png").exists():  # Read now: the run may draw it anew between its checksum and its upload.
        files["curves.png"] = (run / "curves.png").read_bytes()
    files["README.md"] = model_card(run, config, step).encode()  # peft has written one, too.
    api = huggingface_hub.HfApi()
    name = api.create_repo(hub.repo_id, private=hub.private, exist_ok=True).repo_id
    weights = (".safetensors", ".safetensors.index.json")  # Those of an earlier push may have other names.
    old = [file for file in api.list_repo_files(name) if file.endswith(weights) and file not in files]
    changes = [huggingface_hub.CommitOperationDelete(file) for file in old]
    changes += [huggingface_hub.CommitOperationAdd(file, content) for file, content in files.items()]
    told = api.create_commit(name, changes, commit_message=f"Step {step:,}")
    say(f"Pushed: step {step:,} to {told.repo_url}")


def model_card(run: Path, config: Config, step: int) -> str:
    """From what the run folder has: the plan, the last metrics until this step, the curves, the config."""
    pretrained = config.model.pretrained
    data = huggingface_hub.ModelCardData(
        library_name="peft" if config.model.lora is not None else "transformers",
        base_model=pretrained if pretrained and not os.path.exists(pretrained) else None,
        tags=["samerun"],
    )
    plan, metrics = {}, {}
    for line in map(json.loads, whole_lines(run / "metrics.jsonl")):
        if line["step"] <= step:
            metrics |= {name: value for name, value in line.items() if name.startswith(("train/", "eval/"))}
            plan |= {name: value for name, value in line.items() if name.startswith("plan/")}
    table = ""
    for name, value in (plan | metrics).items():
        is_sample = name.startswith("eval/") and isinstance(value, str)  # Its lines would end the table.
        if value is not None and not is_sample:
            shown = f"{value:.6g}" if isinstance(value, float) else value
            table += f"| {name} | {shown} |\n"
    settings = config.model_dump(mode="json", exclude={"run": SECRET})
    curves = "\n![Loss, learning rate and throughput](curves.png)\n" if (run / "curves.png").exists() else ""
    return f"""---
{data.to_yaml()}
---

# {config.run.hub.repo_id.split("/")[-1]}

The model after step {step:,} of a run of `train.py`. It loads with `from_pretrained()`.
{curves}
| | |
|---|---|
{table}
```yaml
{to_yaml(settings)}```
"""
