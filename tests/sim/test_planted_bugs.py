"""A simulator that finds nothing proves nothing: bugs that are planted must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim.bugs import Bugs
from tests.sim.run import first_breakage

_SEEDS_MAX = 60
"""From a seed on shortly after which one finds it: what is drawn of a seed may change."""


@pytest.mark.parametrize(
    ("bugs", "symptoms", "start"),
    [
        pytest.param(
            Bugs(skip_second_fence=True), ["published after its lease ended"], 0, id="second fence"
        ),
        pytest.param(
            Bugs(free_before_ack=True), ["writes into it", "delivered"], 0, id="free before ack"
        ),
        pytest.param(
            Bugs(sequence_goes_back=True),
            ["goes back", "go backwards"],
            0,
            id="sequence goes back",
        ),
        pytest.param(Bugs(take_late=True), ["delivered"], 10, id="take late"),
        pytest.param(Bugs(trust_disk=True), ["delivered"], 40, id="trust disk"),
        pytest.param(Bugs(keep_retired=True), ["another growth"], 10, id="keep retired"),
        pytest.param(Bugs(keep_root_lines=True), ["another growth"], 30, id="keep root lines"),
        pytest.param(
            Bugs(take_up_invalidated=True), ["another growth"], 10, id="take up invalidated"
        ),
        pytest.param(
            Bugs(give_named_lines=True), ["while a page names it"], 0, id="give named lines"
        ),
        pytest.param(Bugs(free_limbo=True), ["writes into it"], 280, id="free limbo"),
        pytest.param(Bugs(believe_any_asker=True), ["writes into it"], 440, id="believe any asker"),
        pytest.param(
            Bugs(take_any_weights=True), ["delivered", "holds something else"], 40, id="any weights"
        ),
        pytest.param(Bugs(give_up_filling=True), ["writes into it"], 130, id="give up filling"),
        pytest.param(Bugs(forget_movers=True), ["writes into it"], 0, id="forget movers"),
    ],
)
def test_a_planted_bug_breaks_a_seed(
    bugs: Bugs, symptoms: list[str], start: int, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(start, start + _SEEDS_MAX)
    breakage = first_breakage(seeds, bugs, on_device=bugs.forget_movers)  # seldom found elsewhere
    assert breakage is not None, f"{_SEEDS_MAX} seeds from {start} on did not find {bugs}"
    record_property("seed", breakage.seed)
    print(f"seed {breakage.seed} finds {bugs}")  # noqa: T201
    assert any(symptom in breakage.what for symptom in symptoms), breakage.what
