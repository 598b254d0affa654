"""The features that a fork may not need, and what takes each of them out.

test_delete.py proves that the rest is the same run.

    python tests/template/features.py LoRA samples      takes them out: rooms, lines, settings, configs and tests
    python tests/template/features.py                   lists them

For most of them this is all: in place of the setting goes the value that switches it off, then goes what can never run
and what nobody uses any more, rooms included. What of the tests mentions what is gone goes, too, see prune.py.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from prune import Tests, what_is_gone
from surgery import House, read, write

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "train.py", "samerun"


def lora(house: House) -> None:
    house.drop_setting("model.lora", None)
    house.drop_setting("model.dtype", "float32")  # Frozen weights only may be in bfloat16.
    house.drop_parameter("flops_per_token", "lora", None)
    house.drop_statements("silence_libraries", ".is_gradient_check")
    house.drop_element("ExpertParallel.check", "model.lora")


def samples(house: House) -> None:
    house.drop_definition("sample")
    house.drop_definition("encode_prompt")
    house.drop_definition("check_prompts")
    house.drop_statements("training_loop", "sampling")
    house.drop_setting("eval.prompts", [])
    house.drop_setting("eval.max_new_tokens", 0)
    house.drop_setting("eval.temperature", 0)


def trackers(house: House) -> None:
    house.reword("log_with=config.run.trackers or None,", "")
    house.reword('project_dir=f"{config.run.output_dir}/tensorboard",', "")
    house.reword("(see accelerate_configs/), or run.trackers", "(see accelerate_configs/)")
    house.drop_setting("run.trackers", [])
    house.drop_statements("start_accelerator", "missing")
    house.drop_statements("", "init_trackers")
    house.drop_statements("RunFolder.log", "self.accelerator.log")


def packing(house: House) -> None:
    house.drop_setting("data.packing", "none")
    house.replace("IndexWriter.add", "self.packing", "'none'")
    for function in "IndexWriter.__init__", "write_index", "cut_into_rows", "check_loss", "settle_attention":
        house.drop_parameter(function, "packing", "none")
    for function in "IndexWriter.__init__", "IndexWriter.add", "IndexWriter.finish", "Dataset.__init__":
        house.drop_statements(function, "packing" if function == "IndexWriter.__init__" else "first")
    house.replace("Dataset.first_piece", "self.first is None", "True")
    house.drop_statements("settle_attention", "data.packing")
    house.drop_statements("pad_rows", "position_ids")


def sources(house: House) -> None:
    house.drop_element("Config.check", "sources")
    house.drop_definition("Config.check_sources")
    house.drop_statements("nearest_setting", "in_source")
    house.drop_statements("type_words", "additionalProperties")
    house.drop_element("FOREIGN_NAMES", "datasets")
    house.drop_element("FOREIGN_NAMES", "dataset_mixer")
    house.drop_statements("announce", "Mixture")
    house.replace("load_data", "(config.sources or {'': config}).values()", "[config]")
    house.drop_statements("load_step", "Mixture")
    house.drop_field("StepBatch.source_targets")
    house.drop_statements("training_loop", "of_sources")
    house.drop_definition("SourceMetrics")
    house.drop_field("Progress.source_sums")
    house.drop_field("Progress.source_targets")
    house.drop_definition("ends_from")
    house.drop_definition("ends_in")
    house.drop_statements("add_up_terms", "source_ends")
    for function in "add_up_terms", "add_up_chunks", "loss_in_chunks":
        house.drop_parameter(function, "source_ends")
    house.drop_field("MicroBatch.source_ends")
    house.drop_definition("Mixture")
    house.drop_setting("data.sources", None)


def profiler(house: House) -> None:
    house.drop_definition("Profiler")
    house.drop_statements("training_loop", "profiler")
    house.drop_setting("perf.profile_steps", None)


def curves(house: House) -> None:
    house.drop_definition("draw_curves")


def compile(house: House) -> None:
    house.drop_definition("compile_model")
    house.drop_setting("model.compile", "none")
    house.reword('torch.compiler.set_stance("force_eager"),', "")
    house.reword(', torch.compiler.set_stance("force_eager")', "")
    house.reword("Not compiled, because the lengths change, and with", "With")
    for strategy in "DeepSpeed", "ExpertParallel":
        house.drop_element(f"{strategy}.check", "model.compile")


def auto(house: House) -> None:
    house.drop_choice("batch.max_micro_batch_size", "auto")
    house.reword('PositiveInt | Literal["auto"]', "PositiveInt")
    house.reword("; auto tries at the start what fits into memory", "")
    house.drop_definition("largest_micro_batch")
    house.replace("PlannedLaunch.__init__", "limit == 'auto'", "False")


def keep_best(house: House) -> None:
    house.drop_setting("run.keep_best", False)
    house.replace("training_loop", "progress.is_best()", "False")
    house.replace("train", "export_best(setup, progress)", "export_model(setup)")
    house.drop_definition("export_best")
    house.drop_statements("resume", "kept_best")
    house.drop_definition("Progress.forget_best")
    house.replace("save_checkpoint", "old.name != manifest['best_checkpoint']", "True")
    house.reword("perplexity, run.keep_best and the\n    curves", "perplexity and the curves")
    house.drop_field("Progress.best_loss")
    house.drop_field("Progress.best_checkpoint", "")


def patience(house: House) -> None:
    house.drop_setting("run.patience", 0)
    house.drop_statements("Config.check", "run.patience")
    house.drop_statements("training_loop", "count_evaluation")
    house.drop_definition("Progress.count_evaluation")
    house.drop_definition("Progress.forget_lowest")
    house.drop_field("Progress.lowest_loss")
    house.drop_field("Progress.evaluations_in_vain", 0)


def chunked_loss(house: House) -> None:
    house.drop_setting("model.chunked_loss", False)
    house.reword('{"model.chunked_loss": True},', "")
    for function in "compute_loss", "check_loss", "probe_loss":
        house.drop_parameter(function, "chunked", False)
    house.reword(", chunked=False)", ")")
    house.reword(" With `chunked`, the logits of a few tokens at a time.", "")


def evaluation(house: House) -> None:
    samples(house)
    keep_best(house)
    patience(house)
    house.drop_definition("evaluate")
    house.drop_definition("check_evaluations")
    house.drop_statements("go_offline_without_network", "eval_sources")
    house.drop_field("Setup.eval_data", None)
    house.drop_field("Setup.token_bytes", None)
    house.drop_statements("build_setup", "token_bytes")
    house.drop_statements("announce", "eval_rows")
    house.drop_statements("announce", "followed")
    house.drop_element("run_record", "evaluation")
    house.drop_statements("resume", "evaluation")
    house.drop_statements("load_data", "eval_sources")
    house.reword("-> tuple[Dataset, dict[str, Dataset]]", "-> Dataset")
    house.reword("train_data, eval_data = load_data(", "train_data = load_data(")
    house.reword("return train, held_out", "return train")
    house.reword(', and those of each evaluation by its name. The only evaluation has the name ""', "")
    house.drop_statements("prepare", "eval_data")
    house.drop_definition("Config.check_eval_sources")
    house.drop_definition("Data.eval_sources")
    house.drop_setting("run.eval_every", 0)
    house.drop_setting("eval.follow", None)
    house.drop_setting("eval.max_rows", None)
    house.drop_setting("data.eval_fraction", 0)
    house.drop_setting("data.eval_source", None)
    house.drop_definition("say_what_is_shared")
    house.reword("data or data.eval_source: there", "data: there")
    house.drop_parameter("load_training_rows", "held_out", False)
    house.drop_parameter("load_rows", "held_out", False)
    house.drop_statements("nearest_setting", "in_evaluation")
    house.drop_element("SHOWN", "eval/loss")
    house.drop_statements("draw_curves", "eval/loss")


def fsdp(house: House) -> None:
    expert_parallel(house)
    house.replace("choose_strategy", "accelerator.is_fsdp2", "False")


def context_parallel(house: House) -> None:
    for function in "kind_of_ddp", "kind_of_fsdp2":
        house.replace(function, "context_parallel_size() > 1", "False")
    house.replace("ranks_per_row", "sequence_parallel_size() * context_parallel_size()", "sequence_parallel_size()")
    house.drop_statements("SharedRows.check", "one_way")
    house.drop_field("Documents.row_pieces", ())
    house.replace("attention_by_document", "mask_of", "causal_mask")
    house.drop_parameter("attention_by_document", "mask_of")


def shared_rows(house: House) -> None:
    """Sequence and context parallelism."""
    context_parallel(house)
    for function in "kind_of_ddp", "kind_of_fsdp2":
        house.replace(function, "sequence_parallel_size() > 1", "False")
    house.replace("ranks_per_row", "sequence_parallel_size()", "1")
    house.drop_field("Documents.row_ranks", None)
    house.replace("DDP.forward_backward", "self.shard(batch)", "batch")
    house.replace("largest_micro_batch", "strategy.shard(batch)", "batch")
    house.drop_statements("eval_batches", "strategy.shard")
    house.drop_statements("trace_pass", "rank_in_group")
    house.drop_statements("trace_pass", "launch.strategy.ranks")
    house.drop_statements("trace_pass", "launch.strategy.shard")
    house.drop_statements("memory_of_passes", "ranks_per_row")
    traced = "traced(config, found, layers, launch, rank)"
    house.replace("memory_of_passes", f"max(({traced} for rank in ranks), key=Pass.peak)", traced)
    house.drop_parameter("trace_pass", "rank", 0)
    house.drop_parameter("traced", "rank", 0)
    house.reword(", sending_nothing()", "")


def tensor_parallel(house: House) -> None:
    house.replace("PlannedLaunch.__init__", "tensor_parallel_size()", "1")
    for function in "kind_of_ddp", "kind_of_fsdp2":
        house.replace(function, "tensor_parallel_size() > 1", "False")
    house.replace("DDP.forward_backward", "self.averages_over", "self.accelerator.num_processes")
    house.replace("train_step", "strategy.dropout_rank", "setup.accelerator.process_index")
    house.drop_statements("DDP.__init__", "averages_over")
    house.drop_statements("DDP.__init__", "dropout_rank")
    house.drop_statements("silence_libraries", "returned a view")
    house.drop_statements("silence_libraries", "_redistribute")


def expert_parallel(house: House) -> None:
    for function in "choose_strategy", "kind_of_fsdp2":
        house.replace(function, "config.model.expert_ranks > 1", "False")
    house.drop_setting("model.expert_ranks", 1)


def pipeline_parallel(house: House) -> None:
    for function in "kind_of_ddp", "kind_of_fsdp2":
        house.replace(function, "config.model.pipeline_ranks > 1", "False")
    house.replace("plan_stages", "config.model.pipeline_ranks > 1", "False")
    house.drop_statements("plan_table", "bubble")
    house.drop_parameter("plan_batch", "least_micro_steps", 1)
    house.drop_setting("model.pipeline_ranks", 1)
    house.drop_setting("model.pipeline_schedule", "1F1B")


def deepspeed(house: House) -> None:
    house.replace("choose_strategy", "kind == 'DEEPSPEED'", "False")
    house.drop_statements("load_checkpoint", "put_back")
    house.never_used |= {"update: optimizer.found_inf"}  # By this house. torch uses it.
    house.drop_definition("DDP.put_back")


def memory_plan(house: House) -> None:
    house.drop_setting("perf.device_memory_gib", None)
    house.drop_definition("PlannedLaunch.changed")
    house.drop_parameter("PlannedLaunch.__init__", "is_sharded", False)
    house.drop_parameter("imagined_accelerator", "is_sharded", False)
    house.drop_definition("DDP.division")
    house.drop_definition("DDP.check_model")


def chat(house: House) -> None:
    house.drop_choice("data.format", "chat")
    house.reword('Literal["text", "chat", "tokens"]', 'Literal["text", "tokens"]')
    house.drop_setting("data.chat_template", None)
    house.drop_setting("data.special_tokens", [])
    house.drop_element("FORMATS", "chat")
    house.reword("a text; a chat, a list of role and content; or tokens", "a text, or tokens")


FEATURES = {
    "LoRA": lora,
    "memory plan": memory_plan,
    "samples": samples,
    "trackers": trackers,
    "packing": packing,
    "sources": sources,
    "profiler": profiler,
    "curves": curves,
    "compile": compile,
    "auto": auto,
    "keep_best": keep_best,
    "patience": patience,
    "chunked_loss": chunked_loss,
    "evaluation": evaluation,
    "FSDP": fsdp,
    "context parallelism": context_parallel,
    "sequence and context parallelism": shared_rows,
    "tensor parallelism": tensor_parallel,
    "expert parallelism": expert_parallel,
    "pipeline parallelism": pipeline_parallel,
    "DeepSpeed": deepspeed,
    "chat": chat,
}


# The files of a feature. The rooms go because nobody uses them any more; this is what makes sure of it.
FILES = {
    "LoRA": ["configs/lora_8b.yaml"],
    "samples": ["samerun/run/sample.py"],
    "packing": ["tests/test_packing.py"],
    "sources": ["tests/test_mixture.py"],
    "evaluation": ["samerun/run/sample.py", "samerun/model/token_bytes.py", "tests/test_evaluation.py"],
    "FSDP": [
        "samerun/parallel/fsdp.py",
        "samerun/parallel/expert.py",
        "tests/test_expert_parallel.py",
        "accelerate_configs/context_parallel.yaml",
        "accelerate_configs/fsdp2.yaml",
        "accelerate_configs/fsdp2_tensor_parallel.yaml",
        "accelerate_configs/hsdp.yaml",
        "accelerate_configs/sequence_parallel.yaml",
    ],
    "context parallelism": ["accelerate_configs/context_parallel.yaml"],
    "sequence and context parallelism": [
        "samerun/parallel/sequence.py",
        "tests/test_sequence_parallel.py",
        "accelerate_configs/context_parallel.yaml",
        "accelerate_configs/sequence_parallel.yaml",
        "configs/long_context.yaml",
    ],
    "tensor parallelism": [
        "samerun/parallel/tensor.py",
        "tests/test_tensor_parallel.py",
        "accelerate_configs/fsdp2_tensor_parallel.yaml",
        "accelerate_configs/tensor_parallel.yaml",
    ],
    "expert parallelism": ["samerun/parallel/expert.py", "tests/test_expert_parallel.py"],
    "pipeline parallelism": ["samerun/parallel/pipeline.py", "tests/test_pipeline.py"],
    "DeepSpeed": [
        "samerun/parallel/deepspeed.py",
        "tests/test_deepspeed.py",
        "accelerate_configs/deepspeed_zero2.yaml",
        "accelerate_configs/deepspeed_zero3.yaml",
    ],
    "chat": ["configs/finetune_chat.yaml", "configs/chat_template.jinja"],
}
# What else in a string of a test is about a feature, besides its settings: launcher files, metrics, messages.
WORDS = {
    "samples": ["samples.jsonl"],
    "trackers": ["tensorboard"],
    "curves": ["curves.png"],
    "auto": ["auto tries"],
    "evaluation": ["eval/"],
    "FSDP": ["fsdp", "hsdp", "FSDP", "HSDP"],
    "context parallelism": ["context_parallel", "cp_size", "CP_SIZE"],
    "sequence and context parallelism": ["sequence_parallel", "context_parallel", "sp_size", "SP_SIZE", "CP_SIZE"],
    "tensor parallelism": ["tensor_parallel", "tp_size", "TP_SIZE"],
    "DeepSpeed": ["deepspeed", "DeepSpeed"],
    "chat": ["chat"],
}


def without(sources: dict[str, str], features: list[str]) -> House:
    """The files without these features. A single one must be found wherever it is looked for; several share places."""
    house = House(sources, strict=len(features) == 1)
    for feature in features:
        FEATURES[feature](house)
    house.tidy()
    return house


def without_settings(text: str, gone: Iterable[str]) -> str:
    """A file of configs/ without the lines of these settings."""
    kept, section, dropping = [], "", False
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        if indent == 0 and line.strip() and line[0] != "#":
            section, dropping = line.split(":")[0], False
        elif indent == 2 and line[2] not in "#-\n":
            dropping = f"{section}.{line.split(':')[0].strip()}" in gone
        if not dropping:
            kept.append(line)
    return "".join(kept)


def take_out(root: Path, features: list[str]) -> House:
    """Change a tree of files: rooms and lines, settings, configs and launcher files, tests."""
    before = House(read(root, *SOURCE))
    after = without(before.sources, features)
    words = [word for feature in features for word in WORDS.get(feature, [])]
    paths = {path for feature in features for path in FILES.get(feature, [])}
    for path in before.texts.keys() - after.texts.keys() | paths:
        assert path not in after.texts, f"{path} is still used"
        (root / path).unlink(missing_ok=True)
    write(root, after.sources)
    for path in (root / "configs").glob("*.yaml"):
        path.write_text(without_settings(path.read_text(), after.switched_off))
    schema = "import json; from samerun.config import Config; print(json.dumps(Config.model_json_schema(), indent=2))"
    made = subprocess.run([sys.executable, "-c", schema], cwd=root, capture_output=True, text=True, check=True)
    (root / "configs/schema.json").write_text(made.stdout)
    tests = [root / "tests/helpers.py", root / "tests/reference.py", *(root / "tests").glob("test_*.py")]
    tests = Tests(read(root, *(str(path.relative_to(root)) for path in tests)), what_is_gone(before, after, words))
    write(root, tests.prune())
    print(*(f"{name}: {why}" for name, why in tests.went.items()), sep="\n")
    return after


if __name__ == "__main__":
    if sys.argv[1:]:
        take_out(ROOT, sys.argv[1:])
    else:
        print(*FEATURES, sep="\n")
