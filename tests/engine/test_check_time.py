"""The time of the model's check is logged: from a second on for users, below it for developers."""

import logging

import pytest

import clearhead
from clearhead.engine import capabilities
from tests import models


@pytest.mark.parametrize(("threshold", "level"), [(0.0, logging.INFO), (1e9, logging.DEBUG)])
def test_check_is_logged_once_after_loading(
    threshold: float, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capabilities, "MIN_REPORTED_SECONDS", threshold)
    ex = clearhead.load(*models.text_model("bert"))
    with caplog.at_level(logging.DEBUG, "clearhead"):
        for _ in range(2):
            ex.explain(models.TEXTS[0], "generic")
    levels = [record.levelno for record in caplog.records if "checking the model" in record.getMessage()]
    assert levels == [level]
