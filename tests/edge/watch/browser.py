"""A real Chromium in front of the pages, driven by playwright: Debian's browser, never one that playwright fetches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from tests.edge.test_report_page import BROWSER

_MISSING = "no chromium or chrome on the PATH to look at the pages with" if BROWSER is None else "playwright is not installed (requirements-dev.lock)"  # fmt: skip  # noqa: E501
in_browser = pytest.mark.skipif(BROWSER is None or find_spec("playwright") is None, reason=_MISSING)


@asynccontextmanager
async def browsing(dark: bool = False) -> AsyncIterator[Any]:
    """A page; fails where its console said something: an error of ours, or what the policy refused."""
    from playwright.async_api import async_playwright

    said: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"], ignore_default_args=["--hide-scrollbars"]
        )
        page = await browser.new_page(color_scheme="dark" if dark else "light", viewport={"width": 1240, "height": 900})
        page.set_default_timeout(15_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        yield page
        await browser.close()
    assert not said, said
