"""Who forks train.py deletes what they do not need. Each feature here goes with these few changes, and nothing of it is
left: the rest is the same run, and ruff finds no name that is unused or missing."""

import ast
import re
import subprocess
import sys

import pytest
import yaml
from helpers import ROOT, Done, difference, run, tiny_config, write_config

SOURCE = (ROOT / "train.py").read_text()
CUTS = re.search(r" {8}else:  # Cut every document.*\n((?: {12}.*\n)+)", SOURCE)  # Without packing, nothing else.
# Of each feature: what goes whole (top-level names and lines that begin so), and pieces of text that change.
FEATURES = {
    "LoRA": (
        ["add_lora"],
        ["lora: dict[str, Any]", "model = add_lora(model, config.lora)", "model = add_lora(model, lora)"],
        {
            "PreTrainedConfig, lora: dict[str, Any] | None, ": "PreTrainedConfig, ",
            "bare.config, config.model.lora, length": "bare.config, length",
        },
    ),
    "samples": (
        ["sample"],
        ["prompts: Texts", "max_new_tokens: int", "temperature: float", 'meter.enter("sampling")', "line |= sample("],
        {},
    ),
    "trackers": (
        [],
        [
            "trackers: Texts",
            "missing = {*config.run.trackers}",
            "require(not missing,",
            "accelerator.log(",
            "accelerator.init_trackers(",
        ],
        {", or run.trackers": "", "log_with=config.run.trackers or None, ": ""},
    ),
    "packing": (
        [],
        [
            "packing: Literal",
            "cuts = np.append(np.arange(0, offsets[-1], length), offsets[-1])",
            'if packing == "concat":',
            'if packing == "best_fit":',
            "from trl",
            "documents = pack_dataset(",
            'elif packing == "best_fit":',
            "cuts, offsets = offsets, np.cumsum(",
            "packed = any(",
            'if "position_ids" in batch',
            'document = (batch["position_ids"]',
            'inputs["attention_mask"] = (document',
        ],
        {
            CUTS[0]: re.sub("^    ", "", CUTS[1], flags=re.M),
            "documents: datasets.Dataset, packing: str, ": "documents: datasets.Dataset, ",
            "Dataset(part, config.packing, ": "Dataset(part, ",
            "batch if packed else batch[:2]": "batch[:2]",
            ' - {"seq_lengths"}': "",
            "check_loss(bare, config.data.packing, ": "check_loss(bare, ",
            '("sdpa", "eager") * (config.data.packing != "none") + ': "",
            "packing: str, chunked": "chunked",
            'rows if packing == "none" else [np.hstack(rows)]': "rows",
            'length if config.data.packing == "none" else length // 2': "length",
        },
    ),
}


def without(source: str, feature: str) -> str:
    names, lines, pieces = FEATURES[feature]
    for before, after in pieces.items():
        assert before in source, before
        source = source.replace(before, after)
    for line in lines:
        assert re.search(rf"^ *{re.escape(line)}", source, re.M), line
        source = re.sub(rf"^ *{re.escape(line)}.*\n", "", source, flags=re.M)
    text = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if getattr(node, "name", None) in names:
            del text[node.lineno - 1 : node.end_lineno + 1]  # And the empty line after it.
    return "".join(text)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_run_is_the_same_without(tmp_path, feature):
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 6, "save_every": 3}
    if feature == "trackers":
        del config["run"]["trackers"]
    if feature == "packing":
        del config["data"]["packing"]
    whole = run(
        tmp_path,
        config,
        *(("--run.trackers", "[]") if feature == "trackers" else ()),
        *(("--data.packing", "none") if feature == "packing" else ()),
    )
    script = tmp_path / "train.py"
    script.write_text(without(SOURCE, feature))
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", script], check=True)
    fork = tmp_path / "fork"
    fork.mkdir()
    command = [sys.executable, script, "--config", write_config(fork, config)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    done = Done(0, "", fork / "run")
    assert difference(done.weights, whole.weights) == 0 and done.losses == whole.losses
    assert done.checkpoints == whole.checkpoints
    kept = yaml.safe_load((fork / "run" / "config.yaml").read_text())
    gone = {
        "LoRA": ("model", "lora"),
        "samples": ("eval", "prompts"),
        "trackers": ("run", "trackers"),
        "packing": ("data", "packing"),
    }[feature]
    assert gone[1] not in kept[gone[0]]
