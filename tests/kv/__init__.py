"""Tests of the block manager."""

import pytest

pytest.register_assert_rewrite("model.block_manager", "model.driver", "model.side_by_side")
