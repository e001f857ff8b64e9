# SPDX-License-Identifier: Apache-2.0
"""The program `ctkvr`: a live view of a server, a session in detail, pictures of what heads look at."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs it; without the packages of ctkvr[cli] it says so, and exits with 1."""
    try:
        from ctkvr.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ctkvr":
            raise
        sys.exit(f"ctkvr: there is no package {error.name}; pip install 'ctkvr[cli]' brings it")
    app()
