import gc
import os
import shutil
from importlib.util import find_spec

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything the tests need is here; before transformers is imported
torch.set_num_threads(1)  # the tests run in two processes

if find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton decides at its import whether it interprets. Afterwards nothing may differ for other tests: those of the
    # Triton back end set the variable again, and processes that tests start do not have it.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

TOGETHER = {
    "tests/analysis/test_variance.py": "variance",
    "tests/cli/test_training.py": "processes",
    "tests/experiments/test_ray.py": "processes",
    "tests/experiments/test_survival.py": "processes",
    "tests/experiments/test_torchrun.py": "processes",
}
"""Files whose tests share something expensive -> its name: one fork server, one cluster, one measured model."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, tests that share something expensive run in one process. All others run where there is room."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0], nodeid)

    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Takes the objects of imported modules out of garbage collection: it would scan all of them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens a file; at the end nothing may have gone wrong in it."""
    contexts, problems = [], []

    def open_page(path, width=1400, height=900, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def quick_inspection(monkeypatch):
    """Inspections with small sizes."""
    from locant.analysis import inspection
    from tests.inspections import QUICK

    for name, value in QUICK.items():
        monkeypatch.setattr(inspection, name, value)
