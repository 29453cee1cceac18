"""Shared pytest set-up."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadlines: a loaded machine is no bug. pytest-randomly prints its seed, Hypothesis prints how to repeat a failure.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
PROFILE = "ci" if os.environ.get("CI") else "local"
settings.load_profile(PROFILE)


def pytest_report_header() -> str:
    return f"hypothesis profile: {PROFILE}"
