"""Simulators that are not installed in every environment."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import isaac_assets

Need = Callable[[str], None]


@pytest.fixture(scope="session")
def need() -> Need:
    """Skips a test where this simulator is not installed, and says what would install it."""

    def check(simulator: str) -> None:
        if importlib.util.find_spec(simulator) is None:
            pytest.skip(f"{simulator} is not installed here: `make test-{simulator}` does it")

    return check


@pytest.fixture(scope="session")
def assets(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Robots for Isaac Lab, in the place where it looks for them."""
    need("isaaclab")
    root = tmp_path_factory.mktemp("assets")
    os.environ["ISAACSIM_ASSET_ROOT"] = str(root)  # read once, when its modules are imported
    return isaac_assets.author(root)
