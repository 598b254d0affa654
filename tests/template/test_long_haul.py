"""A run leaves nothing behind in its process, however long it is: the benchmark of 20,000 steps, shortened."""

import pytest
from benchmarks.long_haul import BYTES_PER_STEP, haul


@pytest.mark.slow
def test_nothing_piles_up(tmp_path):
    """Memory by its slope, file descriptors and threads by their floors.

    The bound is half of what one step reads (8 rows x 32 tokens x 2 columns x 8 bytes = 4 KiB): a run that kept every
    step's batch would break it. So would one that kept the tensors of every save, 6,808 parameters x (1 weight + 2
    moments) x 4 bytes = 80 KiB each 20 steps.
    """
    seen = haul(tmp_path, steps=2000, warmup=500, look_every=0.1, timeout=300)
    assert len(seen.steps) >= 20 and seen.steps[-1] - seen.steps[0] >= 1000  # This process may stand still for a while.
    assert seen.slope() < BYTES_PER_STEP / 2
    for counts in (seen.handles, seen.threads):
        first, later = seen.floors(counts)
        assert first == later
    assert seen.done.status == {"status": "finished", "step": 2000}
    # Saves and evaluations were as frequent as the comparison claims.
    assert len(seen.done.logged("eval/loss")) == 100 and len(seen.done.losses) == 200
    assert seen.done.checkpoints == ["step-00001980", "step-00002000"]
