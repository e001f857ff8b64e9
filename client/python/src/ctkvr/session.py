# SPDX-License-Identifier: Apache-2.0
"""What the two kinds of session handles have in common: who they are."""

from __future__ import annotations

from ctkvr.calls import SessionCore
from ctkvr.rows import LayerShape
from ctkvr.v1 import session_pb2

__all__ = ["SessionHandle"]


class SessionHandle:
    """Names one session of one server process.

    Every reply's boot id and epoch are compared with those the session was opened under: a session of the same name
    that someone opened later, or that a restarted server holds, is never taken for this one, but raises SessionLost.
    """

    def __init__(self, core: SessionCore) -> None:
        self.core = core

    @property
    def id(self) -> str:
        """What attach_session takes."""
        return self.core.ref.session_id

    @property
    def epoch(self) -> int:
        """Differs between any two sessions that ever bore the same id."""
        return self.core.ref.epoch

    @property
    def boot_id(self) -> int:
        """Of the server process that holds the session."""
        return self.core.boot_id

    @property
    def options(self) -> session_pb2.SessionOptions:
        """As the server resolved them: every default filled in."""
        return self.core.options

    def shape(self, layer: int) -> LayerShape:
        """The layer's sizes. IndexError: a layer that is not there."""
        return self.core.shape(layer)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id!r}, epoch {self.epoch}>"
