import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections():
    """Trainer runs the garbage collector at its end; without this it would scan every imported module each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
