"""Nothing is downloaded in a test, and every test starts from the same random numbers."""

import atexit
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="agg",
)

import pytest
import torch

from tests.shape_checks import install_shape_checks

if os.environ.get("CLEARHEAD_SHAPE_CHECKS"):  # before anything imports clearhead
    install_shape_checks()

# Modules and test items live until the end: looking for garbage among them would take a third of the collection time.
gc.disable()


def pytest_collection_finish() -> None:
    """Garbage is collected while tests run, but not looked for among what exists by now."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # C++ bindings report what the interpreter cannot collect at the end as leaked


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Any]]:
    """Starts a headless chromium with the flags it is given.

    There is one Playwright in a process: it keeps an event loop in the main thread, and a second would refuse to start.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        program = None
    if program is None:
        reason = f"no browser: none of {', '.join(names)} is installed, or playwright is missing"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=20_000)  # a busy machine draws late; what never comes is still noticed
    with sync_playwright() as playwright:
        browsers = []

        def start(*flags: str) -> Any:
            browsers.append(playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *flags]))
            return browsers[-1]

        yield start
        for browser in browsers:
            browser.close()
