"""The features of train.py that a fork may not need, and what takes each of them out.

test_delete.py proves that the rest is the same run.

    python tests/template/features.py LoRA samples      takes them out of train.py
    python tests/template/features.py                   lists them

For most of them this is all: in place of the setting goes the value that switches it off, then goes what can never run
and what nobody uses any more.
"""

import sys
from pathlib import Path

from surgery import Script

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def lora(script: Script) -> None:
    script.drop_setting("model.lora", None)
    script.drop_setting("model.dtype", "float32")  # Frozen weights only may be in bfloat16.
    script.drop_parameter("flops_per_token", "lora", None)
    script.drop_statements("silence_libraries", ".is_gradient_check")
    script.drop_element("ExpertParallel.check", "model.lora")


def samples(script: Script) -> None:
    script.drop_definition("sample")
    script.drop_definition("encode_prompt")
    script.drop_definition("check_prompts")
    script.drop_statements("training_loop", "sampling")
    script.drop_setting("eval.prompts", [])
    script.drop_setting("eval.max_new_tokens", 0)
    script.drop_setting("eval.temperature", 0)


def trackers(script: Script) -> None:
    script.drop_setting("run.trackers", [])
    script.drop_argument("Accelerator", "log_with")
    script.drop_argument("Accelerator", "project_dir")
    script.drop_statements("start_accelerator", "missing")
    script.drop_clause("start_accelerator", "run.trackers")
    script.drop_statements("", "init_trackers")
    script.drop_statements("RunFolder.log", "self.accelerator.log")


def packing(script: Script) -> None:
    script.drop_setting("data.packing", "none")
    script.replace("IndexWriter.add", "self.packing", "'none'")
    for function in "IndexWriter.__init__", "write_index", "cut_into_rows", "check_loss", "settle_attention":
        script.drop_parameter(function, "packing", "none")
    for function in "IndexWriter.__init__", "IndexWriter.add", "IndexWriter.finish", "Dataset.__init__":
        script.drop_statements(function, "packing" if function == "IndexWriter.__init__" else "first")
    script.replace("Dataset.first_piece", "self.first is None", "True")
    script.drop_statements("settle_attention", "data.packing")
    script.drop_statements("pad_rows", "position_ids")


def sources(script: Script) -> None:
    script.drop_element("Config.check", "sources")
    script.drop_definition("Config.check_sources")
    script.drop_statements("nearest_setting", "in_source")
    script.drop_statements("type_words", "additionalProperties")
    script.drop_element("FOREIGN_NAMES", "datasets")
    script.drop_element("FOREIGN_NAMES", "dataset_mixer")
    script.drop_statements("announce", "Mixture")
    script.replace("load_data", "(config.sources or {'': config}).values()", "[config]")
    script.drop_statements("load_step", "Mixture")
    script.drop_field("StepBatch.source_targets")
    script.drop_statements("training_loop", "of_sources")
    script.drop_definition("SourceMetrics")
    script.drop_field("Progress.source_sums")
    script.drop_field("Progress.source_targets")
    script.drop_definition("ends_from")
    script.drop_definition("ends_in")
    script.drop_statements("add_up_terms", "source_ends")
    for function in "add_up_terms", "add_up_chunks", "loss_in_chunks":
        script.drop_parameter(function, "source_ends")
    script.drop_element("model_inputs", "source_ends")
    script.drop_definition("Mixture")
    script.drop_setting("data.sources", None)


def profiler(script: Script) -> None:
    script.drop_definition("Profiler")
    script.drop_statements("training_loop", "profiler")
    script.drop_setting("perf.profile_steps", None)


def curves(script: Script) -> None:
    script.drop_definition("draw_curves")


def compile(script: Script) -> None:
    script.drop_definition("compile_model")
    script.drop_setting("model.compile", "none")
    script.drop_call_in_with("torch.compiler.set_stance")
    for strategy in "DeepSpeed", "ExpertParallel":
        script.drop_element(f"{strategy}.check", "model.compile")


def auto(script: Script) -> None:
    script.drop_choice("batch.max_micro_batch_size", "auto")
    script.drop_clause("Batch.max_micro_batch_size", "auto")
    script.drop_definition("largest_micro_batch")
    script.replace("PlannedLaunch.__init__", "limit == 'auto'", "False")


def keep_best(script: Script) -> None:
    script.drop_setting("run.keep_best", False)
    script.replace("training_loop", "progress.is_best()", "False")
    script.replace("train", "export_best(setup, progress)", "export_model(setup)")
    script.drop_definition("export_best")
    script.drop_statements("resume", "kept_best")
    script.drop_definition("Progress.forget_best")
    script.replace("save_checkpoint", "old.name != manifest['best_checkpoint']", "True")
    script.drop_clause("token_loss", "run.keep_best")
    script.drop_field("Progress.best_loss")
    script.drop_field("Progress.best_checkpoint", "")


def patience(script: Script) -> None:
    script.drop_setting("run.patience", 0)
    script.drop_statements("Config.check", "run.patience")
    script.drop_statements("training_loop", "count_evaluation")
    script.drop_definition("Progress.count_evaluation")
    script.drop_definition("Progress.forget_lowest")
    script.drop_field("Progress.lowest_loss")
    script.drop_field("Progress.evaluations_in_vain", 0)


def chunked_loss(script: Script) -> None:
    script.drop_setting("model.chunked_loss", False)
    script.drop_element("SAVINGS", "model.chunked_loss")
    script.drop_parameter("compute_loss", "chunked", False)
    script.drop_parameter("check_loss", "chunked", False)


def evaluation(script: Script) -> None:
    samples(script)
    keep_best(script)
    patience(script)
    script.drop_definition("evaluate")
    script.drop_definition("check_evaluations")
    script.drop_statements("go_offline_without_network", "eval_sources")
    script.drop_field("Setup.eval_data", None)
    script.drop_field("Setup.token_bytes", None)
    script.drop_statements("build_setup", "token_bytes")
    script.drop_statements("announce", "eval_rows")
    script.drop_statements("announce", "followed")
    script.drop_element("run_record", "evaluation")
    script.drop_statements("resume", "evaluation")
    script.drop_statements("load_data", "eval_sources")
    script.drop_returned("load_data", 1)
    script.drop_statements("prepare", "eval_data")
    script.drop_definition("Config.check_eval_sources")
    script.drop_definition("Data.eval_sources")
    script.drop_setting("run.eval_every", 0)
    script.drop_setting("eval.follow", None)
    script.drop_setting("eval.max_rows", None)
    script.drop_setting("data.eval_fraction", 0)
    script.drop_setting("data.eval_source", None)
    script.drop_definition("say_what_is_shared")
    script.drop_clause("IndexWriter.finish", "data.eval_source")
    script.drop_parameter("load_training_rows", "held_out", False)
    script.drop_parameter("load_rows", "held_out", False)
    script.drop_statements("nearest_setting", "in_evaluation")
    script.drop_element("SHOWN", "eval/loss")
    script.drop_statements("draw_curves", "eval/loss")


def fsdp(script: Script) -> None:
    expert_parallel(script)
    script.replace("choose_strategy", "accelerator.is_fsdp2", "False")


def context_parallel(script: Script) -> None:
    for function in "kind_of_ddp", "kind_of_fsdp2":
        script.replace(function, "context_parallel_size() > 1", "False")
    script.replace("ranks_per_row", "sequence_parallel_size() * context_parallel_size()", "sequence_parallel_size()")
    script.drop_statements("SharedRows.check", "one_way")
    script.drop_field("Documents.row_pieces", ())
    script.replace("attention_by_document", "mask_of", "causal_mask")
    script.drop_parameter("attention_by_document", "mask_of")


def shared_rows(script: Script) -> None:
    """Sequence and context parallelism."""
    context_parallel(script)
    for function in "kind_of_ddp", "kind_of_fsdp2":
        script.replace(function, "sequence_parallel_size() > 1", "False")
    script.replace("ranks_per_row", "sequence_parallel_size()", "1")
    script.drop_field("Documents.row_ranks", None)
    script.replace("DDP.forward_backward", "self.shard(batch)", "batch")
    script.replace("largest_micro_batch", "strategy.shard(batch)", "batch")
    script.drop_statements("eval_batches", "strategy.shard")
    script.drop_statements("trace_pass", "rank_in_group")
    script.drop_statements("trace_pass", "launch.strategy.ranks")
    script.drop_statements("trace_pass", "launch.strategy.shard")
    script.drop_statements("memory_of_passes", "ranks_per_row")
    traced = "traced(config, found, layers, launch, rank)"
    script.replace("memory_of_passes", f"max(({traced} for rank in ranks), key=Pass.peak)", traced)
    script.drop_parameter("trace_pass", "rank", 0)
    script.drop_parameter("traced", "rank", 0)
    script.drop_call_in_with("sending_nothing")


def tensor_parallel(script: Script) -> None:
    script.replace("PlannedLaunch.__init__", "tensor_parallel_size()", "1")
    for function in "kind_of_ddp", "kind_of_fsdp2":
        script.replace(function, "tensor_parallel_size() > 1", "False")
    script.replace("DDP.forward_backward", "self.averages_over", "self.accelerator.num_processes")
    script.replace("train_step", "strategy.dropout_rank", "setup.accelerator.process_index")
    script.drop_statements("DDP.__init__", "averages_over")
    script.drop_statements("DDP.__init__", "dropout_rank")
    script.drop_statements("silence_libraries", "returned a view")
    script.drop_statements("silence_libraries", "_redistribute")


def expert_parallel(script: Script) -> None:
    for function in "choose_strategy", "kind_of_fsdp2":
        script.replace(function, "config.model.expert_ranks > 1", "False")
    script.drop_setting("model.expert_ranks", 1)


def pipeline_parallel(script: Script) -> None:
    for function in "kind_of_ddp", "kind_of_fsdp2":
        script.replace(function, "config.model.pipeline_ranks > 1", "False")
    script.replace("plan_stages", "config.model.pipeline_ranks > 1", "False")
    script.drop_statements("plan_table", "bubble")
    script.drop_parameter("plan_batch", "least_micro_steps", 1)
    script.drop_setting("model.pipeline_ranks", 1)
    script.drop_setting("model.pipeline_schedule", "1F1B")


def deepspeed(script: Script) -> None:
    script.replace("choose_strategy", "kind == 'DEEPSPEED'", "False")
    saved = "self.setup.model, self.setup.optimizers"
    script.replace("Saver.save", f"self.setup.strategy.state({saved})", f"trained_state({saved})")
    script.replace("load_checkpoint", "strategy.state(model, optimizers)", "trained_state(model, optimizers)")
    script.drop_statements("load_checkpoint", "put_back")
    script.drop_parameter("load_checkpoint", "strategy")
    script.never_used |= {"update: optimizer.found_inf"}  # By this script. torch uses it.
    script.drop_definition("DDP.state")
    script.drop_definition("DDP.put_back")


def memory_plan(script: Script) -> None:
    script.drop_setting("perf.device_memory_gib", None)
    script.drop_definition("DDP.division")
    script.drop_definition("DDP.check_model")


def chat(script: Script) -> None:
    script.drop_choice("data.format", "chat")
    script.drop_element("WeightedSource.format", "chat")
    script.drop_setting("data.chat_template", None)
    script.drop_setting("data.special_tokens", [])
    script.drop_element("FORMATS", "chat")
    script.drop_clause("Data.format", "role and content")


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


def without(source: str, features: list[str]) -> Script:
    """The script without these features. A single one must be found wherever it is looked for; several share places."""
    script = Script(source, strict=len(features) == 1)
    for feature in features:
        FEATURES[feature](script)
    script.tidy()
    return script


if __name__ == "__main__":
    if sys.argv[1:]:
        TRAIN.write_text(without(TRAIN.read_text(), sys.argv[1:]).source)
    else:
        print(*FEATURES, sep="\n")
