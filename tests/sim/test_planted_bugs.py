"""A simulator that finds nothing proves nothing: bugs that are planted must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim.bugs import Bugs
from tests.sim.run import first_breakage

_SEEDS_MAX = 60


@pytest.mark.parametrize(
    ("bugs", "symptoms"),
    [
        pytest.param(
            Bugs(skip_second_fence=True), ["published after its lease ended"], id="second fence"
        ),
        pytest.param(
            Bugs(free_before_ack=True), ["writes into it", "delivered"], id="free before ack"
        ),
        pytest.param(
            Bugs(sequence_goes_back=True),
            ["goes back", "go backwards"],
            id="sequence goes back",
        ),
        pytest.param(Bugs(take_late=True), ["delivered"], id="take late"),
        pytest.param(Bugs(trust_disk=True), ["delivered"], id="trust disk"),
    ],
)
def test_a_planted_bug_breaks_a_seed(
    bugs: Bugs, symptoms: list[str], record_property: Callable[[str, object], None]
) -> None:
    breakage = first_breakage(range(_SEEDS_MAX), bugs)
    assert breakage is not None, f"{_SEEDS_MAX} seeds did not find {bugs}"
    record_property("seed", breakage.seed)
    print(f"seed {breakage.seed} finds {bugs}")  # noqa: T201
    assert any(symptom in breakage.what for symptom in symptoms), breakage.what
