"""What a document may be: in which columns and of which types, and what is said of one that cannot be used."""

import pytest
import transformers
from helpers import run, tiny_config


@pytest.fixture
def config(tmp_path):
    """A run of two steps."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2}
    config["optim"]["warmup_steps"] = 0
    return config


# Tokens --------------------------------------------------------------------------------------------------------------


def test_tokens_need_no_tokenizer(config, tmp_path):
    """Not even one beside the pretrained model. The run is the same, and the model is exported alone."""
    named = run(tmp_path, config, "--run.output_dir", tmp_path / "named")
    done = run(tmp_path, config, "--data.tokenizer", "null")
    assert (done.losses, done.logged("eval/loss")) == (named.losses, named.logged("eval/loss"))
    assert not list(done.folder.glob("model/token*")) and list(named.folder.glob("model/token*"))
    assert transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert "In the loss is, for example: [" in done.output
