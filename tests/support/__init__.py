"""What test files share."""

import pytest

pytest.register_assert_rewrite("tests.support.store_contract")
