"""Tests run offline, and every test starts with the same random seed."""

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

# Modules and test items live until the end: garbage collection over them would take a third of the collection time.
gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection while tests run, except for objects that exist after collection."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise C++ bindings report leaks at exit


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a headless chromium with the given flags.

    A process can have one Playwright only: it runs an event loop in the main thread, and a second one fails to start.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        program = None
    if program is None:
        reason = f"no browser: none of {', '.join(names)} is installed, or playwright is missing"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=20_000)  # a busy machine renders slowly
    with sync_playwright() as playwright:
        browsers = []

        def start(*flags: str) -> Any:
            browsers.append(playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *flags]))
            return browsers[-1]

        yield start
        for browser in browsers:
            browser.close()
