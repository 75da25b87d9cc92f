"""Fixtures, jobs, servers and helpers that test files share."""

import pytest

pytest.register_assert_rewrite("tests.support.store_contract")
