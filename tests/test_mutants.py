"""The list of faults fits the core as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import MUTANTS, Mutant

HOUSE = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_names_one_place_of_the_core_and_tests_that_exist(mutant: Mutant) -> None:
    assert (HOUSE / mutant.file).read_text().count(mutant.was) == 1
    assert "FAULT" in mutant.becomes
    assert all((HOUSE / path.split("::")[0]).exists() for path in mutant.tests.split())
