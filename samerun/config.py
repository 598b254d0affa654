"""Every setting, with its default, its docstring and its checks."""

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from samerun.dotted import config_fields, eval_setting, setting_of
from samerun.errors import UserError, require
from samerun.value_types import Columns, Folder, Location, Text, Texts

# What decides a run besides its settings. Checkpoints and run.allow_changes have them under these names.
ROWS, ROW_ORDER, FROZEN, GONE = "data fingerprint", "order of the rows", "frozen weights", "settings that are gone"

# A run that has begun may continue with another value of such a setting. Any other setting decides what the run learns.
MAY_CHANGE = "may change"

MayChange = Annotated[TypeVar("Type"), MAY_CHANGE]  # MayChange[int] is int with this mark, for may_change().


class Section(BaseModel):
    """A part of the config. --help, configs/schema.json and editors show the line below each setting."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Hub(Section):
    repo_id: Text
    """Repository of the model, OWNER/NAME. It is made if it does not exist."""
    private: bool = True
    """Whether a repository that is made is private."""
    every: Literal["end", "best", "save"] = "end"
    """What is pushed besides the model at the end: nothing, that of each best checkpoint, or of each checkpoint."""


class Run(Section):
    output_dir: MayChange[Folder] = "runs/default"
    """Folder of the run. The same command continues what it finds there."""
    max_steps: MayChange[NonNegativeInt | None] = None
    """Length of the run in optimizer steps; 0 only evaluates. Give one of max_steps, max_epochs and max_tokens."""
    max_epochs: MayChange[PositiveFloat | None] = None
    """Length of the run in passes over the data, rounded up to whole steps."""
    max_tokens: MayChange[PositiveInt | None] = None
    """Length of the run in tokens without padding, by the mean of the rows; rounded up to whole steps."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights, of the order of the rows and of dropout."""
    log_every: MayChange[PositiveInt] = 10
    """Steps between two log lines. To log, the host waits for values from the device."""
    eval_every: MayChange[NonNegativeInt] = 100
    """Steps between two evaluations; 0 evaluates after the last step only."""
    save_every: MayChange[NonNegativeInt] = 100
    """Steps between two checkpoints; 0 saves after the last step only."""
    keep_checkpoints: MayChange[PositiveInt] = 2
    """How many checkpoints are kept. An older one is deleted when a newer one is complete."""
    keep_best: MayChange[bool] = False
    """Also save and keep the checkpoint with the lowest evaluation loss, and export its model at the end."""
    patience: MayChange[NonNegativeInt] = 0
    """Finish early, after this many evaluations in a row that did not lower the evaluation loss; 0 never does."""
    after_save: MayChange[Text | None] = None
    """Shell command to run in the background for each complete checkpoint, whose folder is $CHECKPOINT."""
    hub: MayChange[Hub | None] = None
    """Repository on the Hub for the model: {repo_id: OWNER/NAME, private: true, every: end | best | save}."""
    resume: MayChange[Location] = "auto"
    """'auto': continue from the newest checkpoint. 'never': refuse if there is one. Or the folder of a checkpoint."""
    init_from: Location | None = None
    """Folder of a checkpoint whose weights start this run at step 0."""
    allow_changes: MayChange[Texts] = []
    """Settings that decide what a run learns, and may all the same differ from the checkpoint that it continues."""
    max_skipped_steps: MayChange[NonNegativeInt] = 0
    """How many updates in a row may be skipped because a number is not finite."""
    export_dtype: MayChange[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Type of the exported weights. auto: that of model.pretrained or, of a new model, the precision of the launch."""
    timeout_minutes: MayChange[float] = Field(30, gt=0, le=1e6)
    """Minutes without a word from another process after which it is lost, and the run ends. Work may take longer."""
    trackers: MayChange[Texts] = ["tensorboard"]
    """Accelerate's trackers that get every metric, such as tensorboard and wandb."""
    tracker_options: MayChange[dict[Text, dict[str, Any]]] = {}
    """Options of these trackers, such as {wandb: {entity: NAME, tags: [TAG]}}, as Accelerate's init_kwargs."""


class BatchStage(Section):
    steps: PositiveInt
    """How many steps have this batch."""
    rows: PositiveInt | None = None
    """Rows per optimizer step. Give this or tokens."""
    tokens: PositiveInt | None = None
    """Tokens per optimizer step, a multiple of data.sequence_length."""


class Batch(Section):
    global_batch_size: PositiveInt | None = None
    """Rows per optimizer step, over all devices. Give this or global_batch_tokens."""
    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step, a multiple of data.sequence_length."""
    warmup: list[BatchStage] = []
    """Stages before the global batch, each with its number of steps and its rows or tokens per step."""
    max_micro_batch_size: MayChange[PositiveInt | Literal["auto"]] = 8
    """The most rows that one device computes at a time; auto tries at the start what fits into memory."""
    accumulation: MayChange[Literal["deferred", "immediate", "within_copies", "kept_weights"]] = "deferred"
    """When ranks reduce gradients: once per step, in each micro-step, or in two further ways under FSDP2 and HSDP."""


class Source(Section):
    path: Location | None = None
    """Data set as load_dataset takes it, a Hub name or a local folder; or a folder of save_to_disk."""
    name: str | None = None
    """Configuration of the data set, as load_dataset takes it."""
    files: Texts = []
    """Files, folders, globs, URLs; !pattern leaves out; {stdlib}: Python's library; {stdlib_chats}: chats on it."""
    split: str = "train"
    """Split of the data set."""


def as_sources(value: Any) -> Any:
    known = isinstance(value, dict | Source)
    require(known, f"a source is path: NAME or files: FILE, and several sources have names; not {value!r}")
    if isinstance(value, dict) and kind_of_sources(value) == "several sources":
        of_one = [name for name in Source.model_fields if name in value and not isinstance(value[name], dict | Source)]
        advice = "on the command line, put --data.eval_source null before the sources to replace it"
        require(not of_one, f"has {', '.join(of_one)} of a single source beside several; {advice}")
    return value


def kind_of_sources(value: Any) -> str:
    """Tells pydantic one source from several with names: no setting of a source is a mapping itself."""
    parts = value.values() if isinstance(value, dict) else []
    return "several sources" if any(isinstance(part, dict | Source) for part in parts) else "one source"


Sources = Annotated[
    Annotated[Source, Tag("one source")] | Annotated[dict[Text, Source], Tag("several sources")],
    Discriminator(kind_of_sources),
    BeforeValidator(as_sources),
]


class WeightedSource(Source):
    weight: NonNegativeFloat
    """Share of the rows, in proportion to the weights of the other sources."""
    format: Literal["text", "chat", "tokens"] | None = None
    """What a document of this source is; null is data.format."""
    column: Columns = []
    """Column of the documents of this source, or two of pairs; null is data.column."""


class WeightStage(Section):
    from_step: int = Field(ge=2)
    """The first step with these weights."""
    weights: dict[Text, NonNegativeFloat]
    """The weight of each source."""


class Data(Source):
    sources: dict[str, WeightedSource] | None = None
    """In place of path or files: several sources by name, each with its path or files and a weight."""
    stages: list[WeightStage] = []
    """Other weights of the sources, each from a step on: [{from_step: 8001, weights: {NAME: WEIGHT}}]."""
    format: Literal["text", "chat", "tokens"] = "text"
    """What a document is: a text; a chat, a list of role and content; or tokens, input_ids with optional labels."""
    column: Columns = []
    """Column of the documents, or two of pairs; null: text, messages, conversations, input_ids, prompt + completion."""
    train_on: Literal["all", "last"] = "all"
    """Of a chat, learn all that the assistant says, or its last turn."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Type of the tokens in files .bin or .npy that do not tell it."""
    drop_nulls: bool = False
    """Leave out documents that are null, such as an empty cell of a .csv. Otherwise they end the run."""
    chat_template: Location | None = None
    """File with a Jinja chat template to use in place of the tokenizer's own."""
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Any] | None = None
    """Variables of the chat template, such as enable_thinking, in training, in samples and in the exported template."""
    special_tokens: Texts = []
    """Tokens to add to the tokenizer, such as markers of a chat template. With model.lora, their rows are trained."""
    parse_special_tokens: bool = False
    """Read a special token where a document or a prompt says one, as <|endoftext|>. Otherwise that is plain text."""
    tokenizer: Location | None = None
    """Hub name or folder, or bytes for UTF-8; null: that of model.pretrained, or bytes; with format tokens, none."""
    sequence_length: int = Field(512, ge=2, lt=2**31)
    """The most tokens in a row. A longer document continues in further rows."""
    packing: Literal["none", "concat", "best_fit"] = "concat"
    """none gives each document its own row, concat cuts the joined documents, best_fit keeps them whole."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the documents that is held out for evaluation. Give this or eval_source."""
    eval_source: MayChange[Sources | None] = None
    """Other data to evaluate on: path, name and split, or files. Or several such sources, each under its name."""

    @property
    def has_chats(self) -> bool:
        """Whether the model learns conversations, maybe as one source of several."""
        return self.format == "chat" or any(source.format == "chat" for source in (self.sources or {}).values())

    def weight_stages(self) -> list[tuple[int, dict[str, float]]]:
        """(first step, weight of each source) of each stage of the mixture."""
        first = {name: source.weight for name, source in self.sources.items()}
        later = [(stage.from_step, {name: stage.weights[name] for name in first}) for stage in self.stages]
        return [(1, first), *later]

    @property
    def eval_sources(self) -> dict[str, Source]:
        """The sources to evaluate on by their names. A single one has the name ""."""
        found = self.eval_source or {}
        return {"": found} if isinstance(found, Source) else found


class Model(Section):
    pretrained: Location | None = None
    """Hub name or folder of a model to train further. Give this or architecture."""
    architecture: dict[str, Any] | None = None
    """Model to train from scratch: model_type, and fields of its transformers config."""
    trust_remote_code: MayChange[bool] = False
    """Run the Python code that comes with the model or the tokenizer."""
    attention: MayChange[str] = "sdpa"
    """Attention of transformers: sdpa, eager, flex_attention, flash_attention_2 and others."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights. Those of 16 bits are for the frozen weights below a LoRA adapter."""
    lora: dict[str, Any] | None = None
    """Train only a LoRA adapter. Fields of peft.LoraConfig, such as r and lora_alpha."""
    load_in_4bit: bool = False
    """QLoRA: hold the layers' matrices below a LoRA adapter in 4 bits per number (needs bitsandbytes)."""
    gradient_checkpointing: MayChange[bool | Literal["selective"]] = False
    """Compute activations again in the backward pass; selective: those that take little time. This saves memory."""
    chunked_loss: MayChange[bool | Literal["auto"]] = "auto"
    """Hold the logits of some targets at a time. auto does so for 4,096 tokens or more, if the model allows it."""
    compile: MayChange[Literal["none", "regional", "full"]] = "none"
    """torch.compile: regional compiles one decoder layer for all of them, full compiles the whole model."""
    balance_experts: NonNegativeFloat = 0.0
    """After each step, change the biases of a mixture's routers by this, toward equally many tokens for all experts."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of a term of the loss that lowers the probabilities of a mixture's experts with many tokens."""
    expert_ranks: MayChange[PositiveInt] = 1
    """Expert parallelism: divide the experts of each layer among this many processes, which send each other tokens."""
    pipeline_ranks: MayChange[PositiveInt] = 1
    """Pipeline parallelism: divide the layers among this many processes, which pass on what they have computed."""
    pipeline_schedule: MayChange[Literal["1F1B", "Interleaved1F1B"]] = "1F1B"
    """Order of the passes in a pipeline. With Interleaved1F1B, processes have two parts each and wait for less time."""

    def chunks_per_rank(self) -> int:
        return 2 if self.pipeline_schedule == "Interleaved1F1B" else 1


class Optim(Section):
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """AdamW, the same with moments of 8 bits, or Muon for the matrices inside the layers and AdamW for the rest."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate goes on after the warmup."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises in equal parts from learning_rate / warmup_steps to learning_rate."""
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """The last learning rate as a share of the peak, unless schedule is constant."""
    decay_fraction: float = Field(1.0, gt=0, le=1)
    """The learning rate falls during this last share of the run. Below 1: warmup, stable, decay (WSD)."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices, embeddings included. Norms and biases do not decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Number that AdamW adds to the denominator of its update."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the norm of all gradients together to this; null never clips."""


class Eval(Section):
    follow: MayChange[str | None] = None
    """Name of the evaluation that decides, and whose loss is eval/loss; null takes the first of several."""
    at_start: MayChange[bool] = False
    """Also evaluate before the first step."""
    max_rows: MayChange[PositiveInt | None] = None
    """Evaluate on this many rows of each source, the first ones; null evaluates on all."""
    prompts: MayChange[Texts] = []
    """Prompts to continue after each evaluation. With format chat they are the user's first message."""
    max_new_tokens: MayChange[PositiveInt] = 128
    """The most tokens in each continuation."""
    temperature: MayChange[NonNegativeFloat] = 0.8
    """Sampling temperature of the continuations; 0 always takes the likeliest token."""


class Perf(Section):
    peak_tflops: MayChange[PositiveFloat | None] = None
    """Peak TFLOP/s of one device, for MFU; null takes it from a table of known devices."""
    device_memory_gib: MayChange[PositiveFloat | None] = None
    """Memory of one device in GiB. With it, --plan says what a run takes, and how to make it fit."""
    host_memory_gib: MayChange[PositiveFloat | None] = None
    """Memory of one host in GiB. With it, --plan says what the start, a checkpoint and the export take of it."""
    ranks_per_host: MayChange[PositiveInt] = 8
    """How many processes share a host, for --plan with perf.host_memory_gib."""
    profile_steps: MayChange[list[PositiveInt] | None] = Field(None, min_length=2, max_length=2)
    """[first, last]: the steps to profile."""


class Config(Section):
    run: Run = Run()
    batch: Batch = Batch()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    eval: Eval = Eval()
    perf: Perf = Perf()

    @model_validator(mode="after")
    def check(self) -> "Config":
        require_exactly_one("run", self.run, ["max_steps", "max_epochs", "max_tokens"])
        require_exactly_one("batch", self.batch, ["global_batch_size", "global_batch_tokens"])
        require_exactly_one("model", self.model, ["pretrained", "architecture"])
        check_source("data", self.data, ["path", "files", "sources"])
        self.check_sources()
        self.check_eval_sources()
        evaluates = self.data.eval_source or self.data.eval_fraction
        require(evaluates or not self.run.keep_best, "run.keep_best needs data.eval_fraction or data.eval_source")
        pushes_best = self.run.hub is not None and self.run.hub.every == "best"
        require(self.run.keep_best or not pushes_best, "run.hub: every best needs run.keep_best")
        require(evaluates or not self.eval.prompts, "eval.prompts need data.eval_fraction or data.eval_source")
        require(evaluates or not self.eval.at_start, "eval.at_start needs data.eval_fraction or data.eval_source")
        does_something = evaluates or self.run.max_steps != 0
        require(does_something, "run.max_steps 0 only evaluates, and needs data.eval_fraction or data.eval_source")
        regular = evaluates and self.run.eval_every
        needed = "run.patience needs data.eval_fraction or eval_source, and run.eval_every"
        require(regular or not self.run.patience, needed)
        dtype_fits = self.model.dtype == "float32" or self.model.lora is not None
        of_frozen = f"model.dtype {self.model.dtype} is for frozen weights, under model.lora; otherwise use float32"
        require(dtype_fits, of_frozen)
        alone = self.model.lora is None or self.model.balance_experts == 0
        require(alone, "model.balance_experts: an adapter does not hold the biases of routers; leave it out")
        self.check_batch()
        self.check_tokenizer()
        for name in self.run.tracker_options:
            require({name, "all"} & {*self.run.trackers}, f"run.tracker_options: {name!r} is not one of run.trackers")
        for name in self.run.allow_changes:
            known = name in (ROWS, ROW_ORDER, FROZEN, GONE) or setting_of(name) in config_fields(type(self))
            require(known, f"run.allow_changes: {name!r} is not a setting; write them as optim.learning_rate")
        return self

    def check_sources(self) -> None:
        if not self.data.sources:
            require(not self.data.stages, "data.stages: are of data.sources, and there are none")
            return
        for name, source in self.data.sources.items():
            where = f"data.sources.{name}"
            require(re.fullmatch(r"[\w-]+", name), f"{where}: a name has only letters, digits, - and _")
            check_source(where, source, ["path", "files"])
            is_tokens = (source.format or self.data.format) == "tokens"
            alike = is_tokens == (self.data.format == "tokens")
            advice = "tokenize all sources and give data.format: tokens, or none"
            require(alike, f"{where}.format: tokens do not mix with texts or chats; {advice}")
        self.check_stages()
        epochs = "data.sources: each has epochs of its own, so give run.max_steps or run.max_tokens, not run.max_epochs"
        require(not self.run.max_epochs, epochs)
        first_only = self.data.eval_fraction and self.eval.max_rows
        require(not first_only, "eval.max_rows: would take held-out rows of the first of data.sources only; use null")

    def check_stages(self) -> None:
        """Each stage of a mixture weighs all sources, and begins within the run."""
        names, before = self.data.sources.keys(), 1
        for number, stage in enumerate(self.data.stages):
            where = f"data.stages.{number}"
            advice = f"give one for each of {', '.join(names)}; 0 is for no rows"
            given = ", ".join(stage.weights) or "no sources"
            require(stage.weights.keys() == names, f"{where}.weights: are of {given}; {advice}")
            require(stage.from_step > before, f"{where}.from_step: must be later than {before}, where others begin")
            before = stage.from_step
        if self.data.stages:
            steps = self.run.max_steps
            require(steps is not None, "data.stages: begin at steps, so give run.max_steps as the length of the run")
            fits = before <= steps or steps == 0
            require(fits, f"data.stages: the last one begins with step {before}, and the run has {steps}")
        for number, (_, weights) in enumerate(self.data.weight_stages()):
            rows_per_block(f"data.stages.{number - 1}.weights" if number else "data.sources", weights)

    def check_eval_sources(self) -> None:
        """The names of several sources become a part of the names of their metrics."""
        sources, follow = self.data.eval_sources, self.eval.follow
        two_held_out = sources and self.data.eval_fraction
        require(not two_held_out, "give at most one of data.eval_fraction and eval_source")
        for name, source in sources.items():
            setting = eval_setting(name)
            is_plain = re.fullmatch(r"[\w-]*", name)
            require(is_plain, f"{setting}: a name has only letters, digits, _ and -, as in eval/NAME/loss")
            is_taken = name in EVAL_METRICS or name in Source.model_fields
            require(not is_taken, f"{setting}: is what a metric or a setting is called; take another name")
            check_source(setting, source, ["path", "files"])
        names = ", ".join(sources) or "no names"
        require(follow is None or follow in sources, f"eval.follow {follow!r}: data.eval_source has {names}")

    def check_batch(self) -> None:
        check_tokens("batch.global_batch_tokens", self.batch.global_batch_tokens, self.data.sequence_length)
        for number, stage in enumerate(self.batch.warmup):
            require_exactly_one(f"batch.warmup.{number}", stage, ["rows", "tokens"])
            check_tokens(f"batch.warmup.{number}.tokens", stage.tokens, self.data.sequence_length)

    def check_tokenizer(self) -> None:
        """Tokens need no tokenizer, and only data.tokenizer can say which one made them."""
        if self.data.format != "tokens" or self.data.tokenizer:
            return
        require(not self.eval.prompts, "eval.prompts need data.tokenizer, the one that made the tokens")
        has_size = self.model.pretrained or "vocab_size" in self.model.architecture
        require(has_size, "model.architecture: give its vocab_size, or data.tokenizer to take it from")

    @property
    def global_batch_size(self) -> int:
        return self.batch.global_batch_size or self.batch.global_batch_tokens // self.data.sequence_length

    def batch_stages(self) -> list[tuple[int, int]]:
        """(first step, rows per step) of each stage of the run. The last one has the global batch."""
        stages, step = [], 1
        for stage in self.batch.warmup:
            stages.append((step, stage.rows or stage.tokens // self.data.sequence_length))
            step += stage.steps
        return [*stages, (step, self.global_batch_size)]


def require_exactly_one(name: str, section: Section, choices: list[str]) -> None:
    given = [choice for choice in choices if getattr(section, choice) not in (None, [], {})]
    require(len(given) == 1, f"{name}: give exactly one of {', '.join(choices)}, and null for the others")


def check_tokens(setting: str, tokens: int | None, length: int) -> None:
    """Raises UserError for tokens that are no whole rows of this length."""
    if tokens is None or tokens % length == 0:
        return
    below = tokens // length * length
    near = f"{below} and {below + length} are" if below else f"{length} are"
    raise UserError(f"{setting} {tokens} is not a multiple of data.sequence_length; {near}")


def check_source(setting: str, source: Source, choices: list[str]) -> None:
    require_exactly_one(setting, source, choices)
    split_given = not source.path and (source.name or source.split != "train")
    require(not split_given, f"{setting}.name and {setting}.split go with {setting}.path")


EVAL_METRICS = ("loss", "perplexity", "bits_per_byte")  # Each as eval/METRIC or eval/NAME/METRIC.
MAX_BLOCK = 10_000  # Rows of a block of a mixture, in which the share of each source is exact.


def rows_per_block(setting: str, weights: dict[str, float]) -> list[int]:
    """How many rows of each source there are in a block: the smallest whole numbers in the ratio of the weights."""
    require(any(weights.values()), f"{setting}: all weights are 0")
    weights = [Fraction(str(weight)) for weight in weights.values()]
    denominator = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * denominator) for weight in weights]
    counts = [number // math.gcd(*whole) for number in whole]
    given = " and ".join(str(float(weight)) for weight in weights)
    advice = f"are whole numbers only in blocks of {sum(counts):,} rows, and {MAX_BLOCK:,} are the most; round them"
    require(sum(counts) <= MAX_BLOCK, f"{setting}: the weights {given} {advice}")
    return counts
