import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything the tests need is here; before transformers is imported
torch.set_num_threads(1)  # the tests run in two processes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
