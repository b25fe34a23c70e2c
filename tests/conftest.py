import pytest
import torch

torch.set_num_threads(1)  # the tests run in two processes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
