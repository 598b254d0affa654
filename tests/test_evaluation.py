"""Several evaluations, each with its metrics, of which one is followed; bits per byte, by the bytes of the texts."""

import json
import math
import shutil

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import (
    cross_entropy,
    difference,
    launch,
    make_rows,
    resume_from,
    run,
    tiny_config,
    tiny_model,
    write_rows,
)
from reference import evaluation_loss
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from samerun.config import Data
from samerun.model.token_bytes import TEXTS, measure_tokens

# Several evaluations --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A config with two evaluations, and the rows of each."""
    folder = tmp_path_factory.mktemp("several")
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 8, "eval_every": 4}
    config["optim"]["warmup_steps"] = 2
    others = write_rows(folder / "others", make_rows([20, 3, 24, 24, 2, 17], seed=9))
    paths = {"masked": folder / "held-out", "others-2": others}
    config["data"]["eval_source"] = {name: {"path": str(path)} for name, path in paths.items()}
    return config, {name: list(datasets.load_from_disk(path)) for name, path in paths.items()}


def bytes_in(rows):
    """Each id from 3 to 258 is a byte. The first token of a row is no target, nor is one whose label is -100."""
    labels = [token for row in rows for token in row.get("labels", row["input_ids"])[1:]]
    return sum(3 <= token < 259 for token in labels), sum(token >= 0 for token in labels)


def test_each_evaluation_has_its_metrics(several, tmp_path):
    config, rows = several
    done = run(tmp_path, config, "--eval.max_rows", 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model", attn_implementation="eager")
    last = done.metrics[-2]
    for name in rows:
        loss = evaluation_loss(model, rows[name][:5])
        text_bytes, targets = bytes_in(rows[name][:5])
        assert last[f"eval/{name}/loss"] == pytest.approx(loss, rel=5e-7)
        nats = cross_entropy(last, f"eval/{name}")
        assert last[f"eval/{name}/perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
        bits = nats * targets / math.log(2) / text_bytes
        assert last[f"eval/{name}/bits_per_byte"] == pytest.approx(bits, rel=5e-7)
    metrics = {"loss", "perplexity", "bits_per_byte"}
    expected = {f"eval/{prefix}{metric}" for prefix in ("", "masked/", "others-2/") for metric in metrics}
    assert {key for key in last if key.startswith("eval/")} >= expected
    assert all(last[f"eval/{metric}"] == last[f"eval/masked/{metric}"] for metric in metrics)
    assert "Evaluations: masked (5 rows), others-2 (5 rows); eval/loss is that of masked" in done.output


def test_an_evaluation_before_the_first_step(several, tmp_path):
    """eval.at_start: of the model as it was before, and the run is the same. It counts for run.patience, and is no
    checkpoint for run.keep_best, though it is the best one."""
    config, rows = several
    config = config | {"run": config["run"] | {"eval_every": 2, "save_every": 2, "keep_best": True}}
    config["optim"] = config["optim"] | {"learning_rate": 3.0, "warmup_steps": 0}  # From step to step, it gets worse.
    plain = run(tmp_path, config, "--run.output_dir", tmp_path / "plain")
    done = run(tmp_path, config, "--eval.at_start", "true", "--run.patience", 2)
    assert [line["step"] for line in done.metrics if "eval/loss" in line] == [0, 2, 4]
    assert [line["step"] for line in plain.metrics if "eval/loss" in line] == [2, 4, 6, 8]
    start = transformers.AutoModelForCausalLM.from_pretrained(
        config["model"]["pretrained"], attn_implementation="eager"
    )
    first, *later = (line for line in done.metrics if "eval/loss" in line)
    for name in rows:
        assert first[f"eval/{name}/loss"] == pytest.approx(evaluation_loss(start, rows[name]), rel=5e-7)
    losses = [line["eval/loss"] for line in later]
    assert done.losses == plain.losses[:4] and losses == plain.logged("eval/loss")[:2]
    assert first["eval/loss"] < min(losses)
    assert f"/model (step-{2 if losses[0] < losses[1] else 4:08d}) loads" in done.output


def test_samples_are_drawn_by_the_seed(tmp_path):
    """Of eval.prompts, one after the other, at eval.temperature. What drops out in training does so after them, too."""
    config = tiny_config(tmp_path)
    settings = tmp_path / "start" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"attention_dropout": 0.5}))
    config["run"]["max_steps"] = 5
    without = run(tmp_path, config, "--run.output_dir", tmp_path / "without")
    config["run"]["eval_every"] = 2
    config["eval"] = {"prompts": ["ab", "c"], "temperature": 0.02, "max_new_tokens": 12}
    done = run(tmp_path, config)
    assert done.losses == without.losses
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder / "model")
    torch.manual_seed(7)
    for number, prompt in enumerate([b"ab", b"c"]):
        ids = [3 + byte for byte in prompt]  # Behind three special tokens.
        while len(ids) < len(prompt) + 12 and ids[-1] != 1:
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[:, -1] / 0.02
            likely = scores >= scores.sort().values[:, -50, None]  # transformers draws one of 50.
            ids.append(torch.multinomial(scores.masked_fill(~likely, -torch.inf).softmax(-1), 1).item())
        assert done.logged(f"eval/sample_{number}")[-1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_samples_may_fill_the_positions(tmp_path):
    """A model of 64 reads 2 tokens of eval.prompts and 62 that follow. The last one is not read again."""
    config = tiny_config(tmp_path)
    config["model"]["pretrained"] = str(tiny_model(tmp_path / "gpt2", learned_positions=True))
    config["eval"] = {"prompts": ["ab"]}
    assert run(tmp_path, config, "--run.max_steps", 5, "--eval.max_new_tokens", 63).logged("eval/sample_0")
    refused = run(tmp_path, config, "--run.output_dir", tmp_path / "more", "--eval.max_new_tokens", 64, expect=2)
    assert "eval.prompts: the 2 tokens of 'ab' and 64 more are beyond the positions of the model" in refused.output


def test_samples_of_a_model_that_cannot_be_asked_for_positions(tmp_path, monkeypatch):
    """As the own code of a model may be: eval.prompts are not too long for it, as far as one knows."""
    monkeypatch.setattr("samerun.run.sample.has_position", lambda *_: False)
    config = tiny_config(tmp_path)
    config["eval"] = {"prompts": ["ab"], "max_new_tokens": 4}
    assert run(tmp_path, config, "--run.max_steps", 5).logged("eval/sample_0")


def test_a_loss_whose_perplexity_is_too_large(tmp_path):
    config = tiny_config(tmp_path)
    weights = tmp_path / "start" / "model.safetensors"
    state = load_file(weights)
    save_file(state | {"lm_head.weight": state["lm_head.weight"] * 1e6}, weights, {"format": "pt"})
    done = run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0)
    assert done.logged("eval/loss")[0] > 1000 and done.logged("eval/perplexity") == [math.exp(700)]


@pytest.mark.parametrize("processes, limit", [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_the_evaluation_is_the_same_however_it_is_split(several, tmp_path, processes, limit):
    config, _ = several
    (tmp_path / "one").mkdir()
    one = run(tmp_path / "one", config)
    more = "--batch.max_micro_batch_size", limit, "--eval.follow", "others-2"
    done = launch(tmp_path, config, *more, processes=processes, warm=True)
    for key in {key for line in one.metrics for key in line if key.startswith("eval/") and key.count("/") == 2}:
        assert done.logged(key) == pytest.approx(one.logged(key), rel=1e-6)
    for metric in ("loss", "perplexity", "bits_per_byte"):
        assert done.logged(f"eval/{metric}") == done.logged(f"eval/others-2/{metric}")


def test_one_evaluation_decides(tmp_path):
    """The loss of what is trained on falls, and that of anything else rises. The best checkpoint, and when the run ends
    early, depend on which of the two is followed."""
    rng = np.random.default_rng(0)
    noise = [{"input_ids": rng.integers(3, 200, 24).tolist()} for _ in range(16)]
    sources = {"seen": write_rows(tmp_path / "seen", noise[:8]), "unseen": write_rows(tmp_path / "unseen", noise[8:])}
    config = tiny_config(tmp_path)
    config["data"] |= {"path": str(sources["seen"])}
    config["data"]["eval_source"] = {name: {"path": str(path)} for name, path in sources.items()}
    config["batch"]["global_batch_size"] = 4
    config["optim"] |= {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    config["run"] |= {"max_steps": 40, "eval_every": 4, "keep_best": True, "patience": 2}
    ends = {}
    for name in sources:
        done = run(tmp_path, config, "--eval.follow", name, "--run.output_dir", tmp_path / "runs" / name)
        losses = {line["step"]: line[f"eval/{name}/loss"] for line in done.metrics if "eval/loss" in line}
        best = min(losses, key=losses.get)
        assert f"(step-{best:08d})" in done.output
        ends[name] = done.status["step"]
    assert ends["seen"] == 40 and ends["unseen"] == best + 8 < 40


def test_another_evaluation_forgets_the_lowest_loss(tmp_path):
    """What the evaluation was of is in the manifest. Where that has changed, losses from before do not compare."""
    forgotten = "The evaluation is not of the same rows as before"
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 6, "eval_every": 2, "keep_best": True}
    config["data"]["eval_source"] = {"path": str(tmp_path / "evaluated")}
    easy, hard = make_rows([24] * 8, seed=3), make_rows([24] * 8, seed=5)
    for row in hard:
        np.random.default_rng(0).shuffle(row["input_ids"])
    write_rows(tmp_path / "evaluated", easy)

    def more(steps, *overrides):
        done = run(tmp_path, config, "--run.max_steps", steps, *overrides)
        losses = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
        return done, losses

    def best_of(losses, after=0):
        return f"step-{min((step for step in losses if step > after), key=losses.get):08d}"

    _, losses = more(6)
    done, losses = more(8)
    assert forgotten not in done.output and best_of(losses) in done.output
    manifest = done.folder / "checkpoints" / "step-00000008" / "manifest.json"
    older = json.loads(manifest.read_text())
    del older["evaluation"]  # As of a train.py that did not write it.
    manifest.write_text(json.dumps(older))
    done, losses = more(10)
    assert forgotten not in done.output and best_of(losses) in done.output

    shutil.rmtree(tmp_path / "evaluated")
    write_rows(tmp_path / "evaluated", hard)  # In the same place, and of the same lengths.
    done, losses = more(14)
    assert done.output.count(forgotten) == 1 and done.launches[-1] == 10
    assert min(losses.values()) == min(loss for step, loss in losses.items() if step <= 10)  # It would be kept.
    assert best_of(losses, after=10) in done.output and best_of(losses) not in done.checkpoints
    noted = json.loads((done.folder / "checkpoints" / done.checkpoints[-1] / "manifest.json").read_text())
    assert noted["lowest_loss"] == min(loss for step, loss in losses.items() if step > 10), "For run.patience."

    for overrides in ["--eval.max_rows", 3], ["--data.eval_source.path", config["data"]["path"]]:
        done, losses = more(done.status["step"] + 2, *overrides)
        assert done.output.count(forgotten) == 1 and best_of(losses, after=done.launches[-1]) in done.output


def test_a_checkpoint_is_evaluated_on_other_data(tmp_path):
    """A new folder with no step left to do has the data.eval_source of its own config, and its loss by the plain loop's
    function, also if the checkpoint was evaluated before."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 5, "keep_best": True}
    config["optim"]["warmup_steps"] = 2
    before = run(tmp_path, config)
    rows = make_rows([24, 11, 17], seed=5)
    write_rows(tmp_path / "others", rows)
    others = "--data.eval_source", f"{{path: {tmp_path / 'others'}}}", "--run.output_dir", tmp_path / "new"
    command = config, *resume_from(before, 5), *others
    done = run(tmp_path, *command)
    model = transformers.AutoModelForCausalLM.from_pretrained(before.folder / "model")
    assert before.logged("eval/loss") and done.logged("train/loss") == []
    assert done.logged("eval/loss") == pytest.approx([evaluation_loss(model, rows)], rel=1e-6)
    assert "Finished already" in run(tmp_path, *command).output and len(done.logged("eval/loss")) == 1
    both = f"{{same: {{path: {config['data']['eval_source']['path']}}}, more: {{path: {tmp_path / 'others'}}}}}"
    to = "--run.output_dir", tmp_path / "added"
    added = run(tmp_path, config, *resume_from(before, 5), "--data.eval_source", both, *to)
    assert added.logged("eval/more/loss") == done.logged("eval/loss")  # Though eval/loss is of the same rows.
    assert added.logged("eval/same/loss") == pytest.approx(before.logged("eval/loss")[-1:], rel=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_of_no_steps_is_an_evaluation(several, tmp_path, processes):
    """Of model.pretrained, on each evaluation. What else is for steps may be as it is in the config, and the numbers of
    another launch do not take the place of these."""
    config, rows = several
    config = config | {"batch": config["batch"] | {"warmup": [{"steps": 4, "rows": 2}]}}
    config |= {"optim": config["optim"] | {"warmup_steps": 5, "min_learning_rate_ratio": 0.0}}
    done = launch(tmp_path, config, "--run.max_steps", 0, processes=processes, warm=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])
    for name in rows:
        assert done.logged(f"eval/{name}/loss") == pytest.approx([evaluation_loss(model, rows[name])], rel=1e-6)
    assert done.logged("train/loss") == [] and done.status == {"status": "finished", "step": 0}
    assert f"Finished: {done.folder}/metrics.jsonl has the evaluation." in done.output
    assert not (done.folder / "model").exists()
    again = run(tmp_path, config, "--run.max_steps", 0, expect=2)
    assert "holds a run (finished, step 0) without its checkpoints; choose another folder" in again.output


def test_an_evaluation_is_added_to_a_finished_run(tmp_path):
    """It is made of the last step, beside that which the run had, and the steps before keep theirs. Others are another
    evaluation, whose last number would be lost. A run that goes on makes the next ones only."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 6, "eval_every": 3, "keep_best": True}
    config["optim"]["warmup_steps"] = 2
    before = run(tmp_path, config)
    first, last = before.logged("eval/loss")
    rows = make_rows([24, 11, 17], seed=5)
    others, own = write_rows(tmp_path / "others", rows), config["data"]["eval_source"]["path"]
    both = "--data.eval_source", f"{{same: {{path: {own}}}, more: {{path: {others}}}}}"
    followed = run(tmp_path, config, *both, "--eval.follow", "more")
    assert "Finished already" in followed.output and followed.logged("eval/loss") == [first, last]
    assert "The last step keeps its evaluation. For another one, give run.resume " in followed.output
    added = run(tmp_path, config, *both)
    logged = added.metrics
    model = transformers.AutoModelForCausalLM.from_pretrained(before.folder / "model")
    assert added.logged("eval/loss") == pytest.approx([first, last], rel=1e-6)
    assert added.logged("eval/more/loss") == pytest.approx([evaluation_loss(model, rows)], rel=1e-6)
    assert added.status["status"] == "finished" and difference(added.weights, before.weights) == 0
    fewer = "--run.save_every", 4
    for settings in both, (*both, "--eval.follow", "more"), ("--data.eval_source", f"{{path: {others}}}"), fewer:
        again = run(tmp_path, config, *settings)
        assert "Finished already" in again.output and added.metrics == logged
        assert "keeps its evaluation" not in again.output  # Nobody has asked for one that is not there.
    manifest = added.folder / "checkpoints" / "step-00000006" / "manifest.json"
    older = json.loads(manifest.read_text())
    del older["evaluations"]  # As of a train.py that did not write them.
    manifest.write_text(json.dumps(older))
    assert run(tmp_path, config, *both, "--run.save_every", 4).metrics == logged
    longer = "--run.max_steps", 8, "--run.output_dir", tmp_path / "longer"
    longer = run(tmp_path, config, *resume_from(before, 6), *both, *longer)
    assert [line["step"] for line in longer.metrics if "eval/more/loss" in line] == [8]


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_evaluation_that_is_made_again_is_not_in_vain_twice(tmp_path, where):
    """A run that ends by run.patience, with an evaluation added in its folder or in a new one, goes on with as much
    patience as before."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 9, "eval_every": 1, "save_every": 1, "patience": 2, "keep_checkpoints": 9}
    config["optim"] |= {"warmup_steps": 0, "learning_rate": 1e-30}  # So low that the loss stays as it is.
    before = run(tmp_path, config)
    last = before.status["step"]
    assert last < 9 and "run.patience: evaluations in a row" in before.output
    own = config["data"]["eval_source"]["path"]
    more = ["--data.eval_source", f"{{same: {{path: {own}}}, more: {{path: {config['data']['path']}}}}}"]
    if where == "there":
        more += [*resume_from(before, last), "--run.output_dir", tmp_path / "there"]
    added = run(tmp_path, config, *more)
    assert added.status["step"] == last and len(added.logged("eval/more/loss")) == 1
    manifest = json.loads((added.folder / "checkpoints" / f"step-{last:08d}" / "manifest.json").read_text())
    assert manifest["evaluations_in_vain"] == 2
    assert run(tmp_path, config, *more, "--run.patience", 3).status["step"] > last


def test_a_first_evaluation_of_a_finished_run(tmp_path):
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 4}
    config["optim"]["warmup_steps"] = 2
    config["data"]["eval_source"], source = None, config["data"]["eval_source"]
    assert run(tmp_path, config).logged("eval/loss") == []
    done = run(tmp_path, config, "--data.eval_source", json.dumps(source))
    assert len(done.logged("eval/loss")) == 1 and "not of the same rows" not in done.output
    assert "Finished already" in run(tmp_path, config, "--data.eval_source", json.dumps(source)).output


def test_the_resolved_config_keeps_the_order(several, tmp_path):
    """The first evaluation is followed, also by who starts from the config.yaml of a run."""
    config, _ = several
    names = reversed(config["data"]["eval_source"])
    sources = [f"{name}: {{path: {config['data']['eval_source'][name]['path']}}}" for name in names]
    config = config | {"data": config["data"] | {"eval_source": None}}
    done = run(tmp_path, config, "--run.max_steps", 2, "--data.eval_source", f"{{{', '.join(sources)}}}")
    written = (done.folder / "config.yaml").read_text()
    assert written.index("others-2") < written.index("masked")
    assert done.logged("eval/loss") == done.logged("eval/others-2/loss")


# Bits per byte --------------------------------------------------------------------------------------------------------

WORDS = "It is what it is. The tokens of this text are words, and so are the others; def f(x):\n    return x + 1\n" * 20
# Short enough for a row. None begins with a space, which some tokenizers cannot tell from the one that they put there,
# and none with a character that may be cut into several tokens.
SHORT = [
    "Größe ½, naïve ²",
    "Da: 你好, мир 🙂",
    "a  b\n\n\tc = 1e-3\n",
    "x",
    "It is the text of this. It is.",
    "<0x41> Ġ",
    "a </s> b<pad>",  # Which are no special tokens.
]
LONG = [WORDS[:700], WORDS[40:333]]


def saved(folder, tokenizer, **special):
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def byte_level(folder, prefix=False, bos=True):
    """As GPT-2 and Llama 3 have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens(["  "])  # A token of two spaces that is text, as some tokenizers for code have it.
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return saved(folder, tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece(folder, prefix="first", bos=True):
    """As Llama 2 and Mistral have them: characters, and single bytes for characters that are not in the vocabulary.

    The space before a text comes from Metaspace, for the first text or for that after each special token ("always"), or
    from a normalizer ("legacy").
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=110, special_tokens=special, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    vocabulary = state["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(special)
    if prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return saved(folder, tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def evaluated(folder, texts, tokenizer):
    """The last metrics of a run that is evaluated on these texts."""
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number}.txt").write_text(text, newline="")
    config = tiny_config(folder)
    config["run"]["max_steps"] = 2
    config["optim"]["warmup_steps"] = 0
    config["batch"]["global_batch_size"] = 2
    source = {"files": str(folder / "texts")}
    config["data"] = source | {"eval_source": source, "packing": "none", "sequence_length": 64}
    config["data"]["tokenizer"] = str(tokenizer)
    return run(folder, config).metrics[-2]


TOKENIZERS = {
    "bytes": lambda folder: "bytes",
    "byte-level": byte_level,
    "byte-level without a first token": lambda folder: byte_level(folder, bos=False),
    "byte-level with a space before the text": lambda folder: byte_level(folder, prefix=True),
    "SentencePiece": sentencepiece,
    "SentencePiece, always": lambda folder: sentencepiece(folder, "always"),
    "SentencePiece, never": lambda folder: sentencepiece(folder, "never"),
    "SentencePiece, legacy": lambda folder: sentencepiece(folder, "legacy"),
    "SentencePiece without a first token": lambda folder: sentencepiece(folder, bos=False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bits_per_byte_are_of_the_bytes_of_the_text(tmp_path, kind):
    """Where a text has a token before it, all its bytes are targets, and otherwise all but those of its first token."""
    folder = TOKENIZERS[kind](tmp_path / "tokenizer")
    tokenizer = transformers.ByT5Tokenizer() if kind == "bytes" else transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.split_special_tokens = True
    texts = [*SHORT, *LONG]
    text_bytes = targets = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
        pieces = [ids[start : start + 64] for start in range(0, len(ids), 64)]
        targets += len(ids) - len(pieces)
        # Of whole documents, the bytes are those of the text; a cut loses those of the token behind it. Texts that are
        # cut have one byte per character, and so the place of a token in the text is its place among the bytes.
        text_bytes += len(text.encode())
        lost = range(0, len(ids), 64)
        if kind == "bytes":
            text_bytes -= sum(ids[at] != tokenizer.eos_token_id for at in lost)
            continue
        assert len(pieces) == 1 or text.isascii()
        encoded = tokenizer(text, return_offsets_mapping=True)
        offsets = [*encoded["offset_mapping"], (0, 0)]  # Of the end of the text, too.
        for at in lost:
            start, end = offsets[at]
            is_put_there = at == 0 and tokenizer.convert_ids_to_tokens(ids[0]) == "▁"  # Nothing but the space.
            text_bytes -= 0 if is_put_there else len(text[start:end].encode())
    last = evaluated(tmp_path, texts, folder)
    expected = cross_entropy(last) * targets / math.log(2) / text_bytes
    assert last["eval/bits_per_byte"] == pytest.approx(expected, rel=1e-12)


def test_bytes_alone_have_the_loss_in_bits(several, tmp_path):
    """Without end of text, each target of the bytes tokenizer is a byte. A text of special tokens alone has none."""
    rows = [{"input_ids": [token % 256 + 3 for token in range(n, n + 20)]} for n in range(8)]
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 2
    config["optim"]["warmup_steps"] = 0
    paths = {"bytes": write_rows(tmp_path / "bytes", rows)}
    paths["none"] = write_rows(tmp_path / "none", [{"input_ids": [0, 1, 2] * 4}])
    config["data"]["eval_source"] = {name: {"path": str(path)} for name, path in paths.items()}
    last = run(tmp_path, config).metrics[-2]
    assert "eval/none/loss" in last and "eval/none/bits_per_byte" not in last
    assert last["eval/bits_per_byte"] == pytest.approx(cross_entropy(last) / math.log(2), rel=1e-12)


def small_letters(folder):
    byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    return saved(folder, tokenizer, bos_token="<s>", eos_token="</s>")


def words(folder):
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    special = ["<unk>", "</s>"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    return saved(folder, tokenizer, unk_token="<unk>", eos_token="</s>")


def composed(folder):
    """As Qwen's: e and an accent become one character. What texts without such have, does not show it."""
    byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return saved(folder, tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("lossy", [small_letters, words, composed])
def test_there_are_none_where_tokens_do_not_tell_the_text(tmp_path, lossy):
    last = evaluated(tmp_path, ["It is."] * 4, lossy(tmp_path / "tokenizer"))
    assert "eval/loss" in last and "eval/bits_per_byte" not in last


def test_a_token_for_what_is_not_known_may_stand_for_any_text():
    names = ["<unk>", *sorted({*"".join(TEXTS).replace(" ", "▁")})]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    found = measure_tokens(Data(path="any"), tokenizer, len(names), torch.device("cpu")).inside
    assert found[0].isnan() and found[1:].isfinite().all()


def test_an_end_of_text_that_is_also_what_is_not_known_has_no_bytes(tmp_path):
    """As GPT-2 has it, which knows every byte."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_level(tmp_path), unk_token="</s>")
    found = measure_tokens(Data(path="any"), tokenizer, len(tokenizer), torch.device("cpu")).inside
    assert tokenizer.unk_token_id == tokenizer.eos_token_id and found[tokenizer.eos_token_id] == 0
    assert found.isfinite().all()


def test_there_are_none_without_a_tokenizer(tmp_path):
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 2
    config["optim"]["warmup_steps"] = 0
    config["data"]["tokenizer"] = None
    last = run(tmp_path, config).metrics[-2]
    assert "eval/loss" in last and "eval/bits_per_byte" not in last
    assert not [name for name in last if name.count("/") > 1]  # The only evaluation has no name.


@pytest.mark.parametrize("prefix", ["first", "always", "legacy"])
def test_a_chat_counts_what_the_assistant_says(tmp_path, prefix):
    """The template writes the special tokens, and some tokenizers put a space behind each, which nobody has said."""
    said = ["It is what it is.", "naïve 🙂", "x"] + [" so"] * (prefix == "first")  # Others cannot tell that space.
    template = (
        "{% for m in messages %}{{ m.role }}{% generation %}<s>{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    rows = [json.dumps({"messages": [{"role": "assistant", "content": text}]}) for text in said]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    source = {"files": str(tmp_path / "chat.jsonl")}
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 1
    config["optim"]["warmup_steps"] = 0
    config["batch"]["global_batch_size"] = len(said)
    config["data"] = source | {"eval_source": source, "packing": "none", "sequence_length": 64, "format": "chat"}
    config["data"]["tokenizer"] = str(sentencepiece(tmp_path / "tokenizer", prefix))
    config["data"]["chat_template"] = str(tmp_path / "template.jinja")
    done = run(tmp_path, config)
    last, [targets] = done.metrics[-2], done.logged("train/target_tokens")
    expected = cross_entropy(last) * targets / math.log(2) / sum(len(t.encode()) for t in said)
    assert last["eval/bits_per_byte"] == pytest.approx(expected, rel=1e-12)
