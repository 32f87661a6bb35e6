"""Hours of random operations in minutes: `UNDERSTUDY_SOAK_OPS=1000000 pytest -m soak`."""

from __future__ import annotations

import os
import random

import pytest

from model.driver import drive
from model.side_by_side import DUPLICATES, POLICIES, DuplicatesName, PolicyName

OPERATIONS = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
SEED = os.environ.get("UNDERSTUDY_SOAK_SEED", "0")
OPERATIONS_EACH = -(-OPERATIONS // (len(POLICIES) * len(DUPLICATES)))
FRESH_AFTER = 2000  # operations: then a new manager, of another size

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(OPERATIONS <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations"),
]


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_manager_stays_equal_to_its_model_for_long(
    policy: PolicyName, duplicates: DuplicatesName
) -> None:
    rng = random.Random(f"{SEED} {policy} {duplicates}")
    for done in range(0, OPERATIONS_EACH, FRESH_AFTER):
        drive(rng, policy, duplicates, min(FRESH_AFTER, OPERATIONS_EACH - done))
