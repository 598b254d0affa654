"""Learning rates against closed forms written here, and against the schedulers of transformers."""

import random

import numpy as np
import pytest
import torch
import transformers

import train

Optim = train.Settings.model_fields["optim"].annotation  # A fork may have one with more settings.
PEAK, STEPS = 0.004, 100


def config(schedule, warmup=10, ratio=0.1, **settings):
    if schedule == "wsd":  # Warmup, stable, decay.
        schedule, settings = "linear", {"decay_fraction": 0.2} | settings
    return Optim(learning_rate=PEAK, schedule=schedule, warmup_steps=warmup, min_learning_rate_ratio=ratio, **settings)


def rates(optim, steps=STEPS):
    return np.array([train.learning_rate_at(optim, step, steps, optim.learning_rate) for step in range(1, steps + 1)])


def closed_form(schedule, warmup, ratio, decay=20, steps=STEPS):
    """A ramp from one notch above zero to the peak, then a curve from one notch below the peak to its floor."""
    rest, floor = steps - warmup, PEAK * ratio
    return np.concatenate(
        [
            np.linspace(0, PEAK, warmup + 1)[1:],
            {
                "constant": lambda: np.full(rest, PEAK),
                "linear": lambda: np.linspace(PEAK, floor, rest + 1)[1:],
                "cosine": lambda: (PEAK + floor) / 2 + (PEAK - floor) / 2 * np.cos(np.linspace(0, np.pi, rest + 1)[1:]),
                "wsd": lambda: np.append(np.full(rest - decay, PEAK), np.linspace(PEAK, floor, decay + 1)[1:]),
            }[schedule](),
        ]
    )


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 10, 80])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_closed_forms(schedule, warmup, ratio):
    found, expected = rates(config(schedule, warmup, ratio)), closed_form(schedule, warmup, ratio)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("fraction, decay", [(0.01, 1), (0.25, 25), (0.29, 29), (0.5, 50), (0.9, 90)])
def test_wsd_decays_over_its_share_of_the_run(fraction, decay):
    found = rates(config("wsd", 10, decay_fraction=fraction))
    np.testing.assert_allclose(found, closed_form("wsd", 10, 0.1, decay), rtol=1e-12)
    assert (found == PEAK).sum() == STEPS - 10 - decay + 1  # The warmup's last step is at the peak too.


def test_wsd_decay_does_not_eat_into_the_warmup():
    """A run that is all decay starts it where the warmup ends, and is then the linear schedule."""
    np.testing.assert_array_equal(rates(config("wsd", 30, decay_fraction=0.9)), rates(config("linear", 30)))


def test_a_cosine_after_a_plateau():
    expected = np.append(closed_form("constant", 10, 0.1, steps=60), closed_form("cosine", 0, 0.1, steps=40))
    np.testing.assert_allclose(rates(config("cosine", decay_fraction=0.4)), expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_ends(schedule):
    """For every length of run: the first warmup rate is peak / warmup_steps, the last rate the floor."""
    last = PEAK if schedule == "constant" else PEAK / 10
    for steps in range(1, 40):
        found = rates(config(schedule, warmup=steps // 3), steps)
        assert found[-1] == pytest.approx(last), f"of {steps} steps"
        if steps >= 3:
            assert found[0] == pytest.approx(PEAK / (steps // 3)) and found[steps // 3 - 1] == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_run_that_is_all_warmup_only_rises(schedule):
    np.testing.assert_allclose(rates(config(schedule, warmup=STEPS)), np.arange(1, STEPS + 1) / STEPS * PEAK)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_rises_then_falls_within_bounds(schedule):
    found = rates(config(schedule, warmup=10, decay_fraction=0.3))
    assert found.argmax() == 9 and (np.diff(found[:10]) > 0).all() and (np.diff(found[9:]) <= 1e-18).all()
    assert found.max() == pytest.approx(PEAK) and found[9:].min() >= PEAK / 10 * (1 - 1e-12)
    assert schedule == "constant" or (np.diff(found[70:]) < 0).all()  # Nothing is flat where it decays.


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_function_of_the_step_alone(schedule):
    """Asked for in any order, and again, the same step has the same rate: there is no state to resume."""
    optim, steps = config(schedule), list(range(1, STEPS + 1))
    in_order = dict(zip(steps, rates(optim)))
    random.Random(0).shuffle(steps)
    shuffled = [train.learning_rate_at(optim, step, STEPS, optim.learning_rate) for step in steps * 2]
    assert shuffled == [in_order[step] for step in steps * 2]


@pytest.mark.parametrize(
    "schedule, ratio, name, settings",
    [
        ("constant", 0.1, "constant_with_warmup", {}),
        ("linear", 0.0, "linear", {}),
        ("cosine", 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("wsd", 0.0, "warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
    ],
)
def test_same_curve_as_transformers(schedule, ratio, name, settings):
    """transformers' schedulers reach our rate of step N after N calls: there step 1 trains at a rate of zero."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    length = None if schedule == "constant" else STEPS
    theirs, expected = transformers.get_scheduler(name, optimizer, 10, length, settings), []
    for _ in range(STEPS):
        optimizer.step()
        theirs.step()
        expected += theirs.get_last_lr()
    np.testing.assert_allclose(rates(config(schedule, ratio=ratio)), expected, rtol=1e-9, atol=1e-15)
