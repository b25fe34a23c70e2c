"""Comparisons that nothing disturbs, made once for all tests that disturb one."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.experiments.processes")

from tests.experiments.processes import SCHEMES, compared, complete  # noqa: E402


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """The folder of a comparison that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    complete(out, compared(out, SCHEMES))
    return out
