"""Forks of this template, as the lines that they change. None of them edits a room of samerun/.

make(folder, CLASSIFIER, ROOT / "tests/forks/classifier.py")    another task; its module lies beside train.py
make(folder, VLM, ROOT / "tests/forks/vlm.py")                  images with text
make(folder, DIFFUSION, ROOT / "tests/forks/diffusion.py")      one that draws noise
make(folder, GRPO, ROOT / "tests/forks/grpo.py")                answers that are rewarded
make(folder, OWN_MODEL, ROOT / "tests/forks/own_model.py")      a model that is not of transformers
make(folder, METHOD)    another loss, optimizer, schedule and log line, and what its tests expect of them
"""

import shutil
import subprocess
import sys
from pathlib import Path

from helpers import ROOT

Edits = dict[str, list[tuple[str, str]]]  # By file: a piece of its text, and what stands in its place.


WITHOUT_TEXT = [
    ("    tokenizer = load_tokenizer(config.data, config.model)\n", ""),
    ("load_data(config.data, tokenizer, config.run.seed)", "{load}(config.data, config.run.seed)"),
    ("tokenizer=tokenizer,", "tokenizer=None,"),
]
WITH_TEXT = [
    ("tokenizer = load_tokenizer(config.data, config.model)", "processor = {processor}(config.model)"),
    ("load_data(config.data, tokenizer, config.run.seed)", "{load}(config.data, processor, config.run.seed)"),
    ("tokenizer=tokenizer,", "tokenizer=processor,"),  # Is exported with the model.
]


def of_task(
    module: str, load: str, build: str, collate: str, loss: str, flops: str = "", processor: str = ""
) -> list[tuple[str, str]]:
    """What changes in train.py for a task that is not of text alone, whose module defines these functions.

    The processor of a task with text comes in the place of the tokenizer.
    """
    names = [name for name in (processor, load, build, flops, collate, loss) if name]
    pairs = WITH_TEXT if processor else WITHOUT_TEXT
    return [
        *((old, new.format(load=load, processor=processor)) for old, new in pairs),
        ("from samerun.cli import", f"from {module} import {', '.join(names)}\nfrom samerun.cli import"),
        ("build_model(config, tokenizer)", f"{build}(config.model, config.run.seed)"),
        (
            "flops_per_token(model.config, config.model.lora, round(train_data.attention_length()))",
            f"{flops}(model.config, config.data.sequence_length)" if flops else "math.nan",
        ),
        (
            "    is_random, chunked = check_model("
            "model, config, added_tokens(config, tokenizer), folder.meeting, loss_of)\n"
            "    parallel.loss_of = functools.partial(loss_of, chunked=chunked)\n"
            "    use_tokenizer(model, tokenizer, config)\n",
            "",
        ),
        ("is_random=is_random", "is_random=False"),  # That is tried on text.
        ("    check_prompts(model, config, tokenizer)\n", ""),
        ("config.data.packing, chunked, parallel", "config.data.packing, False, parallel"),
        ("    vocabulary = vocabulary_size(model)  # Read before the ranks divide the weights.\n", ""),
        (
            "    counts_bytes = tokenizer and eval_data  # For bits per byte.\n"
            "    token_bytes = measure_tokens(config.data, tokenizer, vocabulary, accelerator.device)"
            " if counts_bytes else None\n",
            "",
        ),
        ("collate=collate,", f"collate={collate},"),
        ("token_bytes=token_bytes,", "token_bytes=None,"),
        ("vocabulary=vocabulary,", "vocabulary=0,"),
        ("    check_vocabulary(setup)\n    check_rope(model, stages, config.data.sequence_length)\n", ""),
        ('    meter.enter("sampling")\n    metrics |= sample(setup, stop)\n', ""),
    ]


CLASSIFIER: Edits = {
    "train.py": [
        *of_task(
            "classifier",
            load="load_images",
            build="build_classifier",
            flops="flops_per_patch",
            collate="collate_images",
            loss="classification_loss",
        ),
        ("partial(compute_loss, token_loss=token_loss)", "partial(classification_loss, token_loss=token_loss)"),
        ('SHOWN = ("train/loss", "eval/loss",', 'SHOWN = ("train/loss", "eval/loss", "eval/accuracy",'),
    ],
}
VLM: Edits = {
    "train.py": [
        *of_task(
            "vlm",
            load="load_questions",
            build="build_vlm",
            collate="collate_questions",
            loss="answer_loss",
            processor="load_processor",
        ),
        ("partial(compute_loss, token_loss=token_loss)", "partial(answer_loss, token_loss=token_loss)"),
        ('SHOWN = ("train/loss", "eval/loss",', 'SHOWN = ("train/loss", "eval/loss", "eval/accuracy",'),
    ],
}
DIFFUSION: Edits = {
    "train.py": [
        *of_task(
            "diffusion",
            load="load_draws",
            build="build_denoiser",
            flops="flops_per_pixel",
            collate="add_noise",
            loss="denoising_loss",
        ),
        ("functools.partial(compute_loss, token_loss=token_loss)", "denoising_loss"),
    ],
}
GRPO: Edits = {
    "train.py": [
        (
            "from samerun.cli import",
            "from grpo import Sampling, collate_prompts, load_prompts, policy_loss\nfrom samerun.cli import",
        ),
        (
            "load_data(config.data, tokenizer, config.run.seed)",
            "load_prompts(config.data, tokenizer, config.run.seed, config.sampling)",
        ),
        (
            "    is_random, chunked = check_model("
            "model, config, added_tokens(config, tokenizer), folder.meeting, loss_of)\n"
            "    parallel.loss_of = functools.partial(loss_of, chunked=chunked)\n",
            "",
        ),
        ("is_random=is_random", "is_random=False"),
        ("config.data.packing, chunked, parallel", "config.data.packing, False, parallel"),
        ("collate=collate,", "collate=collate_prompts,"),
        ("    check_vocabulary(setup)\n", ""),
        ("    own: Own = Own()\n", "    own: Own = Own()\n    sampling: Sampling = Sampling()\n"),
        (
            "functools.partial(compute_loss, token_loss=token_loss)",
            "functools.partial(policy_loss, sampling=config.sampling)",
        ),
        ('SHOWN = ("train/loss", "eval/loss",', 'SHOWN = ("train/loss", "train/reward", "eval/reward",'),
    ],
}
OWN_MODEL: Edits = {
    "train.py": [("from samerun.cli import", "import own_model  # noqa: F401\nfrom samerun.cli import")],
}

METHOD: Edits = {
    "train.py": [
        (  # A setting of the loss.
            'may differ when a run is continued."""\n',
            'may differ when a run is continued."""\n\n    z_weight: float = 0.01\n    """That of the z-loss."""\n',
        ),
        (
            "targets: torch.Tensor) -> tuple[torch.Tensor, dict",
            "targets: torch.Tensor, z: float = 0.01) -> tuple[torch.Tensor, dict",
        ),
        ("token_loss=token_loss)", "token_loss=functools.partial(token_loss, z=config.own.z_weight))"),
        (  # The loss: z-loss, as in PaLM (arXiv:2204.02311), section 5.
            '    return cross_entropy.sum(), {"loss": cross_entropy}\n',
            "    z_loss = z * (targets != -100) * logits.float().logsumexp(1).square()\n"
            "    loss = cross_entropy + z_loss\n"
            '    return loss.sum(), {"loss": loss, "cross_entropy": cross_entropy, "z_loss": z_loss}\n',
        ),
        (
            "    return [adamw(trained, matrices, config)]\n",
            "    return [torch.optim.NAdam(trained, lr=config.learning_rate, eps=config.adam_eps)]\n",
        ),
        ("remaining = 0.5 * (1 + math.cos(math.pi * done))", "remaining = 1 - math.sqrt(done)"),
        (
            '        "train/grad_norm": grad_norm,\n',
            '        "train/grad_norm": grad_norm,\n        "train/log_step": math.log(progress.step),\n',
        ),
    ],
    "tests/reference.py": [
        (
            '    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), int(',
            "    z = 0.01 * torch.logsumexp(scores[targets != -100], 1).pow(2).sum()\n"
            '    return z + F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), int(',
        ),
        (
            '    betas = optim["adam_beta1"], optim["adam_beta2"]\n'
            '    return [torch.optim.AdamW(groups, lr=optim["learning_rate"], betas=betas, eps=optim["adam_eps"],'
            " foreach=False)]\n",
            '    return [torch.optim.NAdam(trained, lr=optim["learning_rate"], eps=optim["adam_eps"])]\n',
        ),
        (
            "(1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup))) / 2",
            "(1 - ((step - warmup) / (max_steps - warmup)) ** 0.5)",
        ),
    ],
}


def edit(folder: Path, edits: Edits) -> None:
    """Fails if one of the edits has nothing to change any more, or more than one place."""
    for file, pairs in edits.items():
        text = (folder / file).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, f"{file} has {text.count(old)} times what the fork changes: {old}"
            text = text.replace(old, new)
        (folder / file).write_text(text)
    unused = ["ruff", "check", "--select", "F401", "--fix", "--quiet", "--isolated", *(folder / file for file in edits)]
    subprocess.run([sys.executable, "-m", *unused], check=True)


def newer(room: Path) -> None:
    """Change a room as a later commit may: at its beginning, at its end, and in each docstring."""
    text = room.read_text()
    if text:
        lines = text.replace(':\n    """', ':\n    """Newer. ').splitlines(keepends=True)
        room.write_text("".join([*lines, f"\n\ndef newer_in_{room.parent.name}_{room.stem}() -> None:\n    pass\n"]))


def copy(folder: Path) -> None:
    """What a fork has of this repository."""
    ignored = shutil.ignore_patterns("__pycache__", "template", "benchmarks", ".*")
    for name in ".ci", "samerun", "tests", "configs", "accelerate_configs":
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in ROOT / "train.py", ROOT / "pyproject.toml":
        shutil.copy(file, folder)


def make(folder: Path, edits: Edits, *modules: Path) -> None:
    """A fork with these changes and its own modules, that has then merged a commit in which all rooms are newer.

    Raises CalledProcessError for a conflict.
    """

    def git(*words: str) -> None:
        me = "-c", "user.name=fork", "-c", "user.email=fork@example.org"
        subprocess.run(["git", *me, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    copy(folder)
    git("init", "--quiet", "--initial-branch", "template")
    git("add", ".")
    git("commit", "--quiet", "--message", "The template")
    git("switch", "--quiet", "--create", "fork")
    for module in modules:
        shutil.copy(module, folder)
    edit(folder, edits)
    git("add", ".")
    git("commit", "--quiet", "--message", "The fork")
    git("switch", "--quiet", "template")
    for room in (folder / "samerun").rglob("*.py"):
        newer(room)
    git("commit", "--quiet", "--all", "--message", "Newer rooms")
    git("switch", "--quiet", "fork")
    git("merge", "--quiet", "template")
