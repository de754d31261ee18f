"""What the tests of all layouts share: the references."""

import pytest

from tests.support.layouts import Alone


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs on one process."""
    return Alone(tmp_path_factory.mktemp("alone"))
