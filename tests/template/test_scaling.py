"""tests/benchmarks/scaling.py: its formulas against arithmetic by hand, published rates, and what really moves."""

import re
import shlex
import sys

import pytest
import transformers
from helpers import ROOT

from samerun.config import Model
from samerun.model.build import flops_per_token

sys.path.append(str(ROOT / "tests" / "benchmarks"))
import scaling
from scaling import Cost, Weights

README = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
# 1,000 trained parameters of which 800 are gathered twice; an adapter of 100 on 900 frozen ones in bf16.
FULL, LORA = Weights(1000, 800), Weights(100, 800, 900, 2)
TABLE = {  # strategy, accumulation, weights, devices, micro-steps -> gathered, reduced, moved, held
    "DDP: 4 bytes, times 2 x 3/4; 16 held": (("DDP", "deferred", FULL, 4, 8), (0, 4_000, 6_000, 16_000)),
    "DDP, eight times that": (("DDP", "immediate", FULL, 4, 8), (0, 32_000, 48_000, 16_000)),
    "DDP, nothing to defer": (("DDP", "deferred", FULL, 4, 1), (0, 4_000, 6_000, 16_000)),
    "DDP on two": (("DDP", "deferred", FULL, 2, 1), (0, 4_000, 4_000, 16_000)),
    "FSDP2: 8 x 2 bytes x 1,800, and 4 bytes once, times 3/4; 12/4 and 4 held": (
        ("FSDP2", "deferred", FULL, 4, 8),
        (28_800, 4_000, 24_600, 7_000),
    ),
    "FSDP2: 28,800 and 8 x 4,000, times 3/4; 16/4 held": (
        ("FSDP2", "immediate", FULL, 4, 8),
        (28_800, 32_000, 45_600, 4_000),
    ),
    "FSDP2, nothing to defer": (("FSDP2", "deferred", FULL, 4, 1), (3_600, 4_000, 5_700, 4_000)),
    "FSDP2, weights gathered once: 2 bytes x 1,000, and 8 x 4,000, times 3/4; 16/4 and 2 held": (
        ("FSDP2", "kept_weights", FULL, 4, 8),
        (2_000, 32_000, 25_500, 6_000),
    ),
    # Two copies of two shards: within a copy as FSDP2 on two, and an all-reduce of 1/2 of the gradients between two.
    "HSDP: 28,800 and 8 x 4,000, times 1/2, and 8 x 2,000": (
        ("HSDP", "immediate", FULL, 4, 8),
        (28_800, 32_000 + 16_000, 30_400 + 16_000, 8_000),
    ),
    "HSDP, between copies once": (
        ("HSDP", "within_copies", FULL, 4, 8),
        (28_800, 32_000 + 2_000, 30_400 + 2_000, 8_000),
    ),
    "one device": (("DDP", "deferred", FULL, 1, 8), (0, 4_000, 0, 16_000)),
    "LoRA, DDP: 900 x 2 and 100 x 16 held": (("DDP", "deferred", LORA, 4, 8), (0, 400, 600, 3_400)),
    "LoRA, FSDP2: all is gathered, 100 x 4 bytes are reduced": (
        ("FSDP2", "immediate", LORA, 4, 1),
        (3_600, 400, 3_000, 850),
    ),
}


@pytest.mark.parametrize("given, expected", TABLE.values(), ids=TABLE)
def test_cost_by_hand(given, expected):
    assert scaling.cost(*given) == Cost(*expected)


LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=8192,
)


@pytest.mark.slow
def test_published_rates_are_the_published_utilization():
    """TorchTitan (benchmarks/llama3_h100_202412_torchtitan.md): Llama 3.1 8B on 8 H100 by FSDP2, rows of 8,192 tokens:
    5,762 tokens/s per device, 6,667 with compile, 34 % and 39 % of the 989 TFLOP/s of bf16. The third rate, 8,532, is
    one with float8, for which no utilization is defined."""
    flops = flops_per_token(LLAMA_8B, None, 8192)
    assert [round(100 * rate * flops / 989e12) for rate in (5762, 6667)] == [34, 39]


def test_weights_of_8b():
    """8,030,261,248 parameters, as published; all but the final norm and the output layer are gathered twice."""
    weights = scaling.count_weights(LLAMA_8B, Model())
    assert weights == Weights(8_030_261_248, 8_030_261_248 - 4096 - 128_256 * 4096)


def test_weights_of_an_adapter():
    """Rank 4 on the query projections of 2 layers from 32 to 32 dimensions: 2 x (4 x 32 + 32 x 4)."""
    found = transformers.LlamaConfig(**scaling.SHAPE, vocab_size=384, tie_word_embeddings=True)
    lora = Model(lora={"r": 4, "target_modules": ["q_proj"]}, dtype="bfloat16")
    plain, adapted = scaling.count_weights(found, Model()), scaling.count_weights(found, lora)
    assert (adapted.trained, adapted.frozen, adapted.frozen_bytes) == (512, plain.trained, 2)
    assert adapted.regathered == plain.regathered + 512 == plain.trained - 384 * 32 - 32 + 512  # Tied, with the norm.


def options(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/"))


def test_readme_shows_what_is_printed(capsys):
    shown = re.search(r"\$ python tests/benchmarks/scaling\.py ((?:.+\\\n)*.+)\n((?:.+\n)+?)```", README)
    command, table = shown.groups()
    assert scaling.main(options(command)) == 0
    assert capsys.readouterr().out == table


def test_table_by_hand(capsys):
    """17 rows of 100 tokens on 1, 2 and 5 devices, at most 2 rows at once: the busiest has 17, 9 and 4 of them."""
    small = options(
        "--config configs/small.yaml --batch.global_batch_size 17 --batch.max_micro_batch_size 2 "
        "--data.sequence_length 100 --devices 1 2 5 --tflops 0.001 --gb-per-second 0.01"
    )
    assert scaling.main(small) == 0
    model, _, *lines = capsys.readouterr().out.splitlines()
    # Per layer four square projections, three of the MLP and two norms; an embedding that is the output layer, too.
    matrices, norms = 4 * (4 * 192**2 + 3 * 192 * 512) + 384 * 192, 9 * 192
    parameters, flops = matrices + norms, 6 * matrices + 12 * 4 * 192 * 100
    assert model.startswith(f"{parameters:,} parameters, {flops / 1e6:.1f} MFLOPs per token, 1,700 tokens per step")
    expected = {1: (9, 17, 0), 2: (5, 9, 1), 5: (2, 4, 1.6)}  # Accumulation, rows, times the gradients' bytes by DDP.
    seen = {}
    for words in (line.split() for line in lines):
        seen.setdefault(int(words[0]), words)  # The first line of a count: DDP, deferred.
    assert seen.keys() == expected.keys() and len(lines) == 1 + 5 + 5
    for devices, (accumulation, rows, ring) in expected.items():
        words, compute, seconds = seen[devices], rows * 100 * flops / 1e9, ring * parameters * 4 / 1e7
        assert int(words[1]) == accumulation
        assert [float(words[column]) for column in (2, 7)] == pytest.approx([compute, seconds], abs=0.002)
        assert float(words[8].rstrip("%")) == pytest.approx(100 * seconds / (seconds + compute), abs=0.1)


@pytest.mark.parametrize(
    "words",
    [
        "--devices 0 --tflops 1 --gb-per-second 1",
        "--devices 2 --tflops 1",
        "--devices 2 --tflops -1 --gb-per-second 1",
        "--devices 2 4 8 --tflops 1 --gb-per-second 1 2",
        "--devices 2 --tflops 1 --gb-per-second 1 --batch.max_micro_batch_size 0",
    ],
)
def test_unusable_options(words, capsys):
    with pytest.raises(SystemExit) as end:
        sys.exit(scaling.main(options(f"--config configs/small.yaml {words}")))
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, accumulation, processes, tied",
    [
        ("DDP", "deferred", 2, True),
        ("FSDP2", "deferred", 2, False),
        ("FSDP2", "kept_weights", 2, True),
        ("HSDP", "within_copies", 4, True),
    ],
)
def test_what_really_moves_and_is_held(strategy, accumulation, processes, tied, tmp_path):
    """CPU processes with four micro-steps; --count does the rest."""
    counted, expected = scaling.count(tmp_path, strategy, accumulation, processes, tied)
    assert (counted.get("gathered", 0), counted["reduced"]) == (expected.gathered, expected.reduced)
    # Beside what is expected there are buffers, counts of steps and sums. A gradient or a copy of a matrix is far more.
    assert counted["held"] == pytest.approx(expected.held, rel=0.01, abs=4096)
