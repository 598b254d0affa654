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
    house.drop_setting("model.load_in_4bit", False)
    house.reword("(0.5 if one in rounded else size)", "size")
    house.drop_statements("gathered_weights", "rounded")
    house.drop_parameter("bytes_of_weights", "config")
    house.drop_setting("model.dtype", "float32")  # Frozen weights only may be in bfloat16.
    house.drop_parameter("flops_per_token", "lora", None)
    house.drop_statements("silence_libraries", ".is_gradient_check")
    house.drop_element("REFUSED", "model.lora")
    house.drop_definition("check_type_of_codes")
    house.drop_statements("export_checkpoint", "--merge")
    house.drop_statements("export_checkpoint", "refusal")
    house.drop_definition("check_same_adapter")
    house.drop_definition("check_adapted")
    house.reword(" With model.lora, their rows are trained.", "")
    house.reword("give model.lora, or take another model", "take another model")
    house.reword(
        "model.dtype and the mixed_precision of the launch decide it", "the mixed_precision of the launch decides it"
    )


def samples(house: House) -> None:
    house.drop_element("REFUSED", "eval.prompts")
    house.drop_definition("sample")
    house.drop_definition("encode_prompt")
    house.drop_definition("check_prompts")
    house.drop_statements("evaluate_step", "sampling")
    own = "An evaluation of your own that generates does so as sample() in samerun/run/sample.py"
    house.reword(f"\n\n    {own}, with transformers' masks.\n    ", "")
    house.drop_setting("eval.prompts", [])
    house.drop_setting("eval.max_new_tokens", 0)
    house.drop_setting("eval.temperature", 0)


def trackers(house: House) -> None:
    house.reword("log_with=config.run.trackers or None,", "")
    house.reword('project_dir=f"{config.run.output_dir}/tensorboard",', "")
    house.reword("(see accelerate_configs/), or run.trackers", "(see accelerate_configs/)")
    house.drop_setting("run.trackers", [])
    house.drop_statements("start_accelerator", "missing")
    house.drop_statements("Config.check", "tracker_options")
    house.drop_setting("run.tracker_options", {})
    house.drop_definition("start_trackers")
    house.drop_definition("end_left_trackers")
    house.drop_statements("end_training", "trackers")
    house.drop_statements("RunFolder.__init__", "track")
    house.drop_statements("RunFolder.log", "self.track")


def packing(house: House) -> None:
    house.drop_setting("data.packing", "none")
    house.replace("IndexWriter.add", "self.packing", "'none'")
    for function in "IndexWriter.__init__", "write_index", "cut_into_rows", "check_loss", "settle_attention":
        house.drop_parameter(function, "packing", "none")
    for function in "IndexWriter.__init__", "IndexWriter.add", "IndexWriter.finish", "Dataset.__init__":
        house.drop_statements(function, "packing" if function == "IndexWriter.__init__" else "first")
    house.replace("Dataset.first_segment", "self.first is None", "True")
    house.drop_statements("settle_attention", "data.packing")
    house.drop_parameter("settle_attention", "sequence_length", 0)
    house.reword(", maybe only in a row of `sequence_length` tokens", "")
    house.replace("collate", "positions if has_several else None", "None")
    house.reword("model.compile regional without data.packing concat", "model.compile regional")


def sources(house: House) -> None:
    house.drop_element("Config.check", "sources")
    house.drop_definition("Config.check_sources")
    house.drop_definition("begin_mixture")
    house.drop_definition("Data.weight_stages")
    house.drop_setting("data.stages", [])
    house.drop_statements("nearest_setting", "in_source")
    house.drop_statements("nearest_setting", "WeightStage")
    house.drop_statements("type_words", "additionalProperties")
    house.drop_statements("announce", "Mixture")
    house.drop_statements("load_step", "Mixture")
    house.drop_field("StepBatch.source_targets")
    house.drop_statements("save", "source_metrics")
    house.drop_parameter("save", "source_metrics")
    house.drop_statements("training_loop", "source_metrics")
    house.drop_definition("SourceMetrics")
    house.drop_field("Progress.source_sums")
    house.drop_field("Progress.source_targets")
    house.drop_statements("add_up_terms", "source_ends")
    house.drop_parameter("add_up_terms", "source_ends")
    house.drop_field("MicroBatch.source_ends")
    house.drop_definition("ends_in")
    house.reword(" and, of those that have terms, NAME/SOURCE as well.", ".")
    told = "The tokens of a mixture are those of one source after those of another."
    house.reword(f"\n\n    {told} `source_ends` says where each source ends.\n", "")
    told = "Raises UserError for terms of some tokens only, such as those with a target: their sources are not known."
    house.reword(f"    {told}\n    ", "")
    house.drop_statements("say_if_rows_are_others", "sources")
    house.drop_definition("say_if_sources_do_not_follow")
    house.drop_statements("check_unchanged", "changed_sources")
    house.drop_definition("changed_sources")
    house.drop_element("run_record", "sources")
    house.drop_element("OF_RUN", "sources")
    house.drop_definition("Mixture")
    house.replace("Data.has_chats", "any(source.format == 'chat' for source in (self.sources or {}).values())", "False")
    house.drop_setting("data.sources", None)


def profiler(house: House) -> None:
    house.drop_definition("Profiler")
    house.drop_statements("training_loop", "profiler")
    house.drop_setting("perf.profile_steps", None)


def curves(house: House) -> None:
    house.drop_definition("draw_curves")


def compile(house: House) -> None:
    house.drop_definition("compile_model")
    for function in "loss_in_chunks", "chunk_size":
        house.drop_parameter(function, "is_compiled", False)
    house.drop_statements("compute_loss", "is_compiled")
    house.reword("\n    With model.compile, torch compiles this function on a GPU.", "")
    house.reword(' and config.compile != "full"  # That compiles the whole loss.', "")
    house.drop_setting("model.compile", "none")
    house.reword('torch.compiler.set_stance("force_eager"),', "")
    house.reword("Not compiled, because the lengths change, and with", "With")
    house.drop_element("DeepSpeed.check", "model.compile")
    for way in "regional", "regional without data.packing concat", "full":
        house.drop_element("REFUSED", f"model.compile {way}")


def auto(house: House) -> None:
    house.drop_element("REFUSED", "batch.max_micro_batch_size auto")
    house.drop_choice("batch.max_micro_batch_size", "auto")
    house.reword('PositiveInt | Literal["auto"]', "PositiveInt")
    house.reword("; auto tries at the start what fits into memory", "")
    house.drop_definition("largest_micro_batch")
    house.replace("PlannedLaunch.__init__", "limit == 'auto'", "False")


def keep_best(house: House) -> None:
    house.drop_setting("run.keep_best", False)
    house.replace("training_loop", "progress.is_best()", "False")
    house.replace("Saver.in_background", "progress.is_best()", "False")
    house.drop_statements("Config.check", "pushes_best")
    house.reword('["end", "best", "save"]', '["end", "save"]')
    house.reword(
        "nothing, that of each best checkpoint, or of each checkpoint.", "nothing, or that of each checkpoint."
    )
    house.reword("every: end | best | save}", "every: end | save}")
    house.replace("export_best", "kept_best(setup.folder, progress)", "None")
    house.drop_statements("chosen_checkpoint", "run.keep_best")
    house.drop_statements("RunFolder.__init__", "exported_step")
    house.drop_statements("RunFolder.status_line", "exported_step")
    house.reword("**saved, **exported, **more", "**saved, **more")
    house.reword('status.get("exported_step", status["step"])', 'status["step"]')
    house.drop_statements("resume", "kept_best")
    house.drop_definition("Progress.forget_best")
    house.replace("delete_old", "old.name != manifest['best_checkpoint']", "True")
    house.reword("perplexity, run.keep_best and the\n    curves", "perplexity and the\n    curves")
    house.drop_field("Progress.best_loss")
    house.drop_field("Progress.best_checkpoint", "")


def patience(house: House) -> None:
    house.drop_setting("run.patience", 0)
    house.drop_statements("Config.check", "run.patience")
    house.drop_statements("Progress.count_evaluation", "self.lowest_loss")
    house.drop_parameter("Progress.count_evaluation", "loss")
    house.reword(", and whether that has lowered the loss", "")
    house.drop_definition("Progress.forget_lowest")
    house.drop_statements("note_other_evaluations", "evaluations_in_vain")
    house.drop_field("Progress.lowest_loss")
    house.drop_field("Progress.evaluations_in_vain", 0)


def after_save(house: House) -> None:
    house.drop_setting("run.after_save", None)
    house.reword(", and copy what is saved in it by run.after_save", "")
    hub(house)  # Its pushes are made in the same way.
    house.drop_statements("train", "wait_for_background")
    house.drop_statements("Saver", "after_save")
    house.drop_statements("end_finished", "after_save")
    house.reword(", and make up for what an earlier launch has not copied or pushed", "")
    house.drop_definition("AfterSave")
    house.drop_definition("Background")


def hub(house: House) -> None:
    house.drop_setting("run.hub", None)
    house.drop_statements("train", "push_export")
    house.drop_statements("end_finished", "push_export")
    house.drop_statements("Saver", "pushes")
    house.drop_definition("PushCheckpoints")
    house.reword(', *self.path.glob(".hub-*.tmp")', "")
    house.drop_definition("push_export")


def chunked_loss(house: House) -> None:
    house.drop_setting("model.chunked_loss", False)
    house.reword('{"model.chunked_loss": True},', "")
    for function in "compute_loss", "compile_model", "probe_loss", "probe_sums":
        house.drop_parameter(function, "chunked", False)
    house.reword("is_random, chunked = check_model", "is_random = check_model")
    house.reword("return is_random, chunked", "return is_random")
    house.reword("name, is_random, chunked = meeting", "name, is_random = meeting")
    house.reword("_attn_implementation, is_random, chunked", "_attn_implementation, is_random")
    house.reword("-> tuple[str, bool, bool]", "-> tuple[str, bool]")
    house.drop_statements("settle_model", "chunked")
    house.drop_statements("settle_model", "wants_chunks")
    house.reword("-> tuple[bool, bool]", "-> bool")
    house.reword(", and whether the loss is computed in chunks.", ".")
    house.drop_statements("build_setup", "chunked")
    house.drop_statements("Parallelism.prepare", "loss_scale")
    house.drop_definition("allows_chunks")
    house.reword(", chunked=chunked)", ")")
    house.replace("trace_pass", "wants_chunks(config.model, vocabulary_size(model))", "False")
    house.reword(", chunked=False)", ")")
    told = "With `chunked`, the logits of a few tokens at a time, and none of tokens without a target."
    house.reword(f"\n\n    {told}\n    ", "")


def evaluation(house: House) -> None:
    samples(house)
    keep_best(house)
    patience(house)
    house.replace("training_loop", "setup.lacks_evaluation(progress)", "False")
    house.replace("Setup.is_over", "self.lacks_evaluation(progress)", "False")
    house.drop_definition("evaluate_step")
    house.drop_definition("evaluate")
    house.reword('(progress.evaluated_step if "eval/loss" in line else progress.step)', "progress.step")
    house.drop_definition("say_if_others_are_held_out")
    house.drop_field("Progress.evaluated_step")
    house.drop_definition("check_evaluations")
    house.drop_statements("Config.check", "does_something")
    house.drop_statements("check_vocabulary", "eval_data")
    house.reword(" | {evaluation_title(name): data for name, data in evaluations.items()}", "")
    house.drop_parameter("data_facts", "evaluations")
    house.drop_statements("go_offline_without_network", "eval_sources")
    house.drop_field("Setup.eval_data", None)
    house.drop_field("Setup.token_bytes", None)
    house.drop_statements("build_setup", "token_bytes")
    house.drop_statements("announce", "eval_rows")
    house.drop_statements("announce", "followed")
    runs_of_no_steps(house)
    house.drop_element("run_record", "evaluation")
    house.drop_element("run_record", "evaluations")
    house.drop_definition("note_other_evaluations")
    house.replace("Saver.save", "known", "asdict(progress)")
    house.drop_statements("Saver.save", "evaluations")
    house.reword("-> tuple[Dataset, dict[str, Dataset]]", "-> Dataset")
    house.reword("train_data, eval_data = load_data(", "train_data = load_data(")
    house.reword("return train, held_out", "return train")
    house.reword(', and those of each evaluation by its name. The only evaluation has the name ""', "")
    house.drop_statements("prepare", "eval_data")
    house.drop_definition("Config.check_eval_sources")
    house.drop_definition("Data.eval_sources")
    house.drop_setting("run.eval_every", 0)
    house.drop_setting("eval.follow", None)
    house.drop_setting("eval.at_start", False)
    house.drop_setting("eval.max_rows", None)
    house.drop_setting("data.eval_fraction", 0)
    house.drop_setting("data.eval_source", None)
    house.reword("data or data.eval_source: there", "data: there")
    held_out_rows(house)
    house.drop_statements("nearest_setting", "in_evaluation")
    house.drop_element("SHOWN", "eval/loss")
    house.drop_element("DRAWN", "eval/loss")
    house.drop_statements("draw_picture", "eval/loss")


def runs_of_no_steps(house: House) -> None:
    house.replace("check_length", "max_steps == 0", "False")
    house.replace("export_best", "setup.max_steps == 0", "False")
    house.replace("push_export", "config.run.max_steps == 0", "False")
    house.replace("PushCheckpoints.__init__", "config.run.max_steps != 0", "True")
    house.reword("max_steps: MayChange[NonNegativeInt | None]", "max_steps: MayChange[PositiveInt | None]")
    house.reword("; 0 only evaluates", "")


def held_out_rows(house: House) -> None:
    house.drop_element("ROOMS_OF_ROWS", "overlap")
    house.drop_parameter("load_training_rows", "held_out", False)
    house.drop_parameter("load_rows", "held_out", False)
    house.drop_parameter("load_training_rows", "others", None)
    house.drop_parameter("load_rows", "others", None)
    house.drop_parameter("make_index", "held_out", False)
    house.drop_parameter("make_index", "others", None)
    house.drop_statements("load_data", "eval_sources")
    house.drop_statements("load_data", "held_out")


BY_HAND = "pp", "tp", "ep"


def drop_dimension(house: House, name: str) -> None:
    """Each rank has the first and only place in a dimension of Layout."""
    house.drop_argument("size", name)
    house.drop_element("", name)
    house.drop_field(f"Layout.{name}", 1)
    left = {house.name_of(node) for node in house.find("Layout").body}
    if name in BY_HAND and not left & set(BY_HAND):
        house.read_as("is_divided", False)
        house.reword("        BY_HAND,\n", "        (),\n")
    if name in ("cp", "sp") and not left & {"cp", "sp"}:
        house.read_as("layout.row_ranks", 1)
    if any("        (),\n" in source for source in house.sources.values()):
        house.drop_element("REFUSED", ())


def fsdp(house: House) -> None:
    expert_parallel(house)
    house.drop_choice("batch.accumulation", "kept_weights")
    house.reword(', "within_copies", "kept_weights"]', "]")
    house.reword(
        "once per step, in each micro-step, or in two further ways under FSDP2 and HSDP", "once per step, or in each"
    )
    house.drop_statements("check_combination", "needs")
    house.drop_statements("check_combination", "advice")
    for name in "activation_checkpointing_offload", "cpu_ram_efficient_loading", "offload_params":
        house.drop_element("REFUSED", f"fsdp_{name}")
    house.replace("choose_parallelism", "accelerator.is_fsdp2", "False")
    house.drop_definition("Parallelism.before_micro_step")
    house.drop_definition("PipelineSchedule.average_from_now_on")
    house.replace(
        "Layout.uses", "self.is_sharded if name == 'dp_shard' else self.size(name) > 1", "self.size(name) > 1"
    )
    house.drop_statements("Layout.setting", "dp_shard")
    house.drop_statements("layout_of", "shards")
    house.drop_parameter("layout_of", "is_sharded", False)
    house.drop_parameter("PlannedLaunch.__init__", "is_sharded", False)
    house.replace("PlannedLaunch.__init__", "uses_fsdp()", "False")
    house.drop_field("Layout.is_sharded", False)
    house.reword('place("dp_replicate", "dp_shard")', 'place("dp_replicate")')
    drop_dimension(house, "dp_shard")


def context_parallel(house: House) -> None:
    house.drop_statements("layout_of", "one_way")
    house.reword('place("cp", "sp")', 'place("sp")')
    drop_dimension(house, "cp")
    house.drop_field("Documents.row_pieces", ())
    house.replace("attention_by_document", "mask_of", "causal_mask")
    house.drop_parameter("attention_by_document", "mask_of")


def shared_rows(house: House) -> None:
    """Sequence and context parallelism."""
    context_parallel(house)
    drop_dimension(house, "sp")
    house.drop_field("Documents.row_ranks", None)
    traced = "traced(config, found, layers, launch, rank)"
    house.replace("memory_of_passes", f"max(({traced} for rank in ranks), key=PassMemory.peak)", traced)
    house.drop_parameter("trace_pass", "rank", 0)
    house.drop_parameter("traced", "rank", 0)


def tensor_parallel(house: House) -> None:
    house.drop_statements("layout_of", "whole")
    drop_dimension(house, "tp")
    house.drop_parameter("Parallelism.note_reductions", "partial", [])
    house.drop_parameter("compile_model", "tp", 1)
    house.reword("    tp            the same rows, and a part of each matrix  parallelism_config_tp_size\n", "")


def expert_parallel(house: House) -> None:
    house.replace("check_parts", "model.ep_plan", "False")
    drop_dimension(house, "ep")
    house.replace("Parallelism.divide", "experts", "[]")
    house.reword(
        "\n    and, for the experts of a mixture, in a second mesh, in which ep (model.expert_ranks) and what is", ""
    )
    house.reword(" left of\n    dp_shard x cp x sp x tp take the place of these four.\n", "")
    house.drop_setting("model.expert_ranks", 1)


def balanced_experts(house: House) -> None:
    house.reword("        **setup.parallel.expert_metrics(),\n", "")
    house.drop_statements("Parallelism.__init__", "balance")
    house.drop_statements("Parallelism.prepare", "balance")
    house.drop_statements("Parallelism.divide", "balance")
    house.reword("        self.states_of = states_of\n", "")
    house.reword("self.states_of(", "states_of(")
    house.drop_statements("Parallelism.reduce_gradients", "balance")
    house.drop_definition("Parallelism.balance_experts")
    house.drop_definition("Parallelism.expert_metrics")
    house.drop_definition("check_balance")
    house.drop_definition("Parallelism.expert_load")
    house.drop_definition("Parallelism.continue_expert_load")
    house.drop_field("Progress.expert_load")
    for name in "balance_experts", "balance_loss":
        house.drop_element("DeepSpeed.check", f"model.{name}")
        house.drop_setting(f"model.{name}", 0.0)
    for name in "router_aux_loss_coef", "output_router_logits":
        house.drop_element("SET_ELSEWHERE", name)


def pipeline_parallel(house: House) -> None:
    drop_dimension(house, "pp")
    house.reword("    pp            other layers                            model.pipeline_ranks\n", "")
    house.read_as("self.pipeline", None)
    house.replace("plan_stages", "config.model.pipeline_ranks > 1", "False")
    house.drop_statements("plan_table", "bubble")
    house.drop_parameter("plan_batch", "least_micro_steps", 1)
    house.drop_parameter("plan_table", "pipeline_ranks", 1)
    house.drop_parameter("Plan.even_neighbours", "pipeline_ranks", 1)
    house.drop_setting("model.pipeline_ranks", 1)
    house.drop_setting("model.pipeline_schedule", "1F1B")


def deepspeed(house: House) -> None:
    house.replace("choose_parallelism", "kind == 'DEEPSPEED'", "False")
    house.drop_statements("load_checkpoint", "load_state")
    house.never_used |= {"update: optimizer.found_inf"}  # By this script. torch uses it.
    house.drop_definition("Parallelism.load_state")


def memory_plan(house: House) -> None:
    for setting, default in (("device_memory_gib", None), ("host_memory_gib", None), ("ranks_per_host", 8)):
        house.drop_setting(f"perf.{setting}", default)
    house.drop_definition("PlannedLaunch.changed")
    house.drop_parameter("PlannedLaunch.__init__", "is_sharded", False)


def chat(house: House) -> None:
    house.drop_choice("data.format", "chat")
    house.reword('Literal["text", "chat", "tokens"]', 'Literal["text", "tokens"]')
    house.read_as("has_chats", False)
    house.drop_definition("set_variables")
    house.replace("tokenize_part", "is_chat", "False")
    house.drop_statements("check_unchanged", "strftime_now")
    house.drop_setting("data.chat_template", None)
    house.drop_setting("data.chat_template_kwargs", None)
    house.drop_setting("data.train_on", "all")
    house.drop_element("FORMATS", "chat")
    house.drop_element("ROOMS_OF_TOKENS", "chat")
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
    "after_save": after_save,
    "hub": hub,
    "chunked_loss": chunked_loss,
    "evaluation": evaluation,
    "FSDP": fsdp,
    "context parallelism": context_parallel,
    "sequence and context parallelism": shared_rows,
    "tensor parallelism": tensor_parallel,
    "expert parallelism": expert_parallel,
    "balanced experts": balanced_experts,
    "pipeline parallelism": pipeline_parallel,
    "DeepSpeed": deepspeed,
    "chat": chat,
}


# The files of a feature. The rooms go because nobody uses them any more; this is what makes sure of it.
FILES = {
    "LoRA": ["samerun/model/lora.py", "configs/lora_8b.yaml", "tests/test_4bit.py"],
    "memory plan": ["samerun/preflight/memory.py", "samerun/preflight/host.py"],
    "trackers": ["samerun/run/trackers.py", "tests/test_trackers.py"],
    "after_save": ["samerun/run/after_save.py", "samerun/run/hub.py", "tests/test_after_save.py", "tests/test_hub.py"],
    "hub": ["samerun/run/hub.py", "tests/test_hub.py"],
    "samples": ["samerun/run/sample.py"],
    "packing": ["tests/test_packing.py"],
    "sources": ["tests/test_mixture.py"],
    "evaluation": ["samerun/run/sample.py", "samerun/model/token_bytes.py", "tests/test_evaluation.py"],
    "FSDP": [
        "samerun/parallel/fsdp.py",
        "samerun/parallel/experts.py",
        "tests/test_expert_parallel.py",
        "accelerate_configs/context_parallel.yaml",
        "accelerate_configs/fsdp2.yaml",
        "accelerate_configs/fsdp2_tensor_parallel.yaml",
        "accelerate_configs/hsdp.yaml",
        "accelerate_configs/sequence_parallel.yaml",
    ],
    "context parallelism": ["accelerate_configs/context_parallel.yaml"],
    "sequence and context parallelism": [
        "samerun/parallel/rows.py",
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
    "expert parallelism": ["samerun/parallel/experts.py", "tests/test_expert_parallel.py"],
    "balanced experts": ["samerun/model/balance.py", "tests/test_balance.py"],
    "pipeline parallelism": ["samerun/parallel/pipeline.py", "tests/test_pipeline.py"],
    "DeepSpeed": [
        "samerun/parallel/deepspeed.py",
        "tests/test_deepspeed.py",
        "accelerate_configs/deepspeed_zero2.yaml",
        "accelerate_configs/deepspeed_zero3.yaml",
    ],
    "chat": ["samerun/data/chat.py", "configs/finetune_chat.yaml", "configs/chat_template.jinja"],
}
# What else in a string of a test is about a feature, besides its settings: launcher files, metrics, messages, cases.
# Or the name of a test that mentions nothing of what it needs.
WORDS = {
    "LoRA": ["test_lora_flops"],
    "samples": ["eval/sample"],
    "trackers": ["tensorboard", "test_names_of_other_trainers_are_answered_with_ours"],
    "curves": ["curves.png", "test_curves_show_where_a_run_was_continued"],
    "compile": ["test_how_many_targets_a_chunk_has"],
    "auto": [
        "test_tokens_are_rows",
        "batch.max_micro_batch_size auto",
        "test_auto_finds_what_fits",
        "test_context_parallelism_refuses_auto",
        "test_not_even_one_row_fits",
    ],
    "packing": [
        "134 rows",
        "test_numbers_that_no_loss_scale_mends",
        "test_documents_that_see_each_other_are_found_in_any_precision",
        "test_names_of_other_trainers_are_answered_with_ours",
        "test_a_model_that_needs_its_masks_gets_them",
        "test_an_encoder_is_refused",
        "test_documents_of_a_micro_batch_are_as_if_alone",
        "test_what_a_token_sees",
    ],
    "balanced experts": ["test_damaged_fields_of_a_manifest"],
    "keep_best": [
        "test_damaged_fields_of_a_manifest",
        "test_stopped_while_it_evaluates",
        "test_which_checkpoint",
    ],
    "patience": ["evaluations_in_vain", "test_damaged_fields_of_a_manifest", "test_stopped_while_it_evaluates"],
    "sources": [
        "test_pieces_of_a_row",
        "test_damaged_fields_of_a_manifest",
        "test_prepare_finds_mistakes_and_needs_no_model",
        "test_small_steps_are_loaded_several_at_once",
    ],
    "chunked_loss": ["test_the_vocabulary_of_the_run_decides_on_chunks"],
    "evaluation": [
        "eval/",
        "evaluated_step",
        "less data than",
        "fewer than no steps",
        "test_curves_show_where_a_run_was_continued",
        "test_prepare_finds_mistakes_and_needs_no_model",
        "test_other_code_makes_other_rows",
        "test_damaged_fields_of_a_manifest",
        "test_names_of_other_trainers_are_answered_with_ours",
        "test_other_data_in_the_same_place",
        "test_which_checkpoint",
        "test_a_run_of_no_steps_pushes_nothing",
    ],
    "FSDP": ["fsdp", "hsdp", "FSDP", "HSDP", "test_who_shares_with_whom"],
    "context parallelism": [
        "context_parallel",
        "context, 2 share",
        "context, 3 share",
        "context, 4 share",
        "context, DDP",
        "context, FSDP2",
        "cp_size",
        "CP_SIZE",
        "PP x CP",
        "test_all_ranks_have_as_much_to_compute",
        "test_attention_of_the_pieces",
        "test_parts_of_documents_that_are_rows",
        "test_pieces_of_a_row",
        "tests/test_sequence_parallel.py::test_refused_launches",
        "tests/test_sequence_parallel.py::test_refused_with_one_message",
        "tests/test_sequence_parallel.py::test_who_shares_with_whom",
    ],
    "sequence and context parallelism": [
        "sequence_parallel",
        "context_parallel",
        "sp_size",
        "cp_size",
        "SP_SIZE",
        "CP_SIZE",
        "PP x CP",
    ],
    "tensor parallelism": ["tensor_parallel", "tp_size", "TP_SIZE"],
    "DeepSpeed": ["deepspeed", "DeepSpeed"],
    "chat": [
        "chat",
        "test_a_tokenizer_without_special_tokens_reads_messages",
        "test_of_special_tokens_that_begin_alike_the_longer_one_is_written",
        "test_other_texts_have_the_tokens_of_the_tokenizer",
        "test_ways_to_make_special_tokens_of_text",
    ],
}


# What the tests share and needs another text without a feature: by the file, the old text and the new one.
REWORDED = {
    "evaluation": {
        "tests/helpers.py": (
            'data, held_out = load_data(config, tokenizer, seed)\n    return {"train": data} | held_out\n',
            'return {"train": load_data(config, tokenizer, seed)}\n',
        )
    }
}


def without(sources: dict[str, str], features: list[str]) -> House:
    """The files without these features, which share places with others, also with those of an earlier call."""
    house = House(sources, strict=False)
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


def without_tests(script: str, gone: Iterable[str]) -> str:
    """A shell script without these files of tests, and without a line that would be left with none."""
    kept = []
    for line in script.splitlines():
        left = [word for word in line.split(" ") if word not in gone]
        if " tests/" not in line or any(word.startswith("tests/") for word in left):
            kept.append(" ".join(left))
    return "\n".join(kept) + "\n"


def write_schema(root: Path) -> None:
    """Let configs/schema.json have the settings that are left. A process that imports the script makes it."""
    schema = "import json, train; print(json.dumps(train.Settings.model_json_schema(), indent=2))"
    made = subprocess.run([sys.executable, "-c", schema], cwd=root, capture_output=True, text=True, check=True)
    (root / "configs/schema.json").write_text(made.stdout)


def take_out(root: Path, features: list[str]) -> House:
    """Change a tree of files: rooms and lines, settings, configs and launcher files, tests; all but the schema."""
    before = House(read(root, *SOURCE))
    after = without(before.sources, features)
    words = [word for feature in features for word in WORDS.get(feature, [])]
    paths = {path for feature in features for path in FILES.get(feature, [])}
    for path in before.texts.keys() - after.texts.keys() | paths:
        assert path not in after.texts, f"{path} is still used"
        (root / path).unlink(missing_ok=True)
    write(root, after.sources)
    script = root / ".ci/run"
    if script.exists():
        script.write_text(without_tests(script.read_text(), paths))
    for path in (root / "configs").glob("*.yaml"):
        path.write_text(without_settings(path.read_text(), after.switched_off))
    for feature in features:
        for path, (old, new) in REWORDED.get(feature, {}).items():
            text = (root / path).read_text()
            assert old in text, f"{path} has no longer what goes with {feature}: {old}"
            (root / path).write_text(text.replace(old, new))
    tests = [root / "tests/helpers.py", root / "tests/reference.py", *(root / "tests").glob("test_*.py")]
    tests = Tests(read(root, *(str(path.relative_to(root)) for path in tests)), what_is_gone(before, after, words))
    write(root, tests.prune())
    print(*(f"{name}: {why}" for name, why in tests.went.items()), sep="\n")
    return after


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in FEATURES]
    if unknown:
        sys.exit(f"no feature: {', '.join(unknown)}; without a name, this lists them")
    if sys.argv[1:]:
        take_out(ROOT, sys.argv[1:])
        write_schema(ROOT)
    else:
        print(*FEATURES, sep="\n")
