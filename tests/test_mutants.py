"""The list of faults fits the core as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import random_faults
from faults import MUTANTS
from mutant import Mutant  # noqa: TC001

HOUSE = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_names_one_place_of_the_core_and_tests_that_exist(mutant: Mutant) -> None:
    assert (HOUSE / mutant.file).read_text().count(mutant.was) == 1
    assert "FAULT" in mutant.becomes
    assert all((HOUSE / path.split("::")[0]).exists() for path in mutant.tests.split())


def test_random_faults_are_drawn_by_a_seed_from_different_lines() -> None:
    drawn = random_faults.draw(200, 3)
    assert drawn == random_faults.draw(200, 3)
    assert drawn != random_faults.draw(200, 4)
    assert len({mutant.name for mutant in drawn}) == 200
    assert {mutant.name.split(" ", 1)[1] for mutant in drawn} == {"negated", "off by one", "dropped"}
    assert len({mutant.file for mutant in drawn}) > 15
    for mutant in drawn:
        test_a_fault_names_one_place_of_the_core_and_tests_that_exist(mutant)
