# SPDX-License-Identifier: Apache-2.0
"""When a failed call is tried again: only where the contract says that trying again cannot do harm.

UNAVAILABLE: calls that read, Append (idempotent by position), Open (its id is drawn first), Close, KeepAlive and
Maintain, after a back-off that doubles; not when the server drains, and never Truncate, whose late first attempt could
remove what was appended since. RESOURCE_EXHAUSTED: every call whose error carries RetryInfo, after at least the delay
it names: the server refused before it began. Everything else is raised as it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ctkvr.errors import REASON_DRAINING, CtkvrError

__all__ = ["RetryOptions"]


@dataclass(frozen=True)
class RetryOptions:
    """How often and how patiently. Times are seconds."""

    attempts_max: int = 4  # of a call in all; 1 switches retries off
    backoff_initial: float = 0.05  # before the second attempt; doubles with each further one
    backoff_max: float = 2.0

    def delay(self, error: CtkvrError, attempts: int, repeatable: bool) -> float | None:
        """Seconds to wait before another attempt; None: there must not be one. `attempts` have been made."""
        if attempts >= self.attempts_max:
            return None
        # Spread, so that clients refused together do not come back together.
        spread = random.uniform(0.8, 1.2)  # noqa: S311 (no secret)
        backoff: float = min(self.backoff_initial * 2.0 ** (attempts - 1), self.backoff_max) * spread
        if error.code == "RESOURCE_EXHAUSTED":
            # Without RetryInfo it is a limit that waiting does not lift.
            return None if error.retry_after is None else max(error.retry_after, backoff)
        if error.code == "UNAVAILABLE" and repeatable and error.reason != REASON_DRAINING:
            return max(error.retry_after or 0.0, backoff)
        return None
