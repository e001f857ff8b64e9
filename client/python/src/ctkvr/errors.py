# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, by what to do about it.

Every error that a server sends becomes one of these classes by the reason in its google.rpc.ErrorInfo, or by its code
where it has none. `hint` says what to do; `reason`, `metadata` and `retry_after` are as the server sent them.
Arguments that are wrong whatever the server says are ValueError and TypeError, raised before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    "BeforeIndex",
    "CacheTooSmall",
    "Cancelled",
    "ChecksumMismatch",
    "CtkvrError",
    "DeadlineExceeded",
    "DifferentBytes",
    "Draining",
    "FingerprintMismatch",
    "InvalidRequest",
    "NoRoom",
    "NotAllowed",
    "NotAuthenticated",
    "NotServed",
    "OutOfRange",
    "ProtocolError",
    "QueueFull",
    "QuotaExceeded",
    "RowOverflow",
    "ServerFailed",
    "SessionExists",
    "SessionLost",
    "ShorterLayer",
    "TokenLimit",
    "TooLarge",
    "Unavailable",
    "WrongPosition",
]

REASON_SERVER_RESTARTED = "SERVER_RESTARTED"  # made here, when a reply comes from another boot
REASON_EPOCH_MISMATCH = "EPOCH_MISMATCH"
REASON_DRAINING = "DRAINING"

_DETAILS_KEY = "grpc-status-details-bin"
# What grpc.aio says where it finds a stream ended while it writes, before it has read how.
_BROKEN_WRITE = "Internal error from Core"


class CtkvrError(Exception):
    """An error of the service or of the way to it.

    Attributes:
        code: name of the gRPC code, "OUT_OF_RANGE".
        message: the server's text; names field, value and limit.
        reason: of ErrorInfo, "WRONG_POSITION"; empty where the server gave none.
        metadata: of ErrorInfo, {"expected_position": "4096"}.
        retry_after: seconds after which the same call may succeed; None: waiting does not help.
        attempts: how often the call was tried.
        hint: what to do.

    """

    hint: ClassVar[str] = "read the message"

    def __init__(
        self,
        code: str,
        message: str,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code, message, reason)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.attempts = 1

    def __str__(self) -> str:
        tries = f" after {self.attempts} attempts" if self.attempts > 1 else ""
        return f"{self.reason or self.code}{tries}: {self.message} ({self.hint})"


class SessionLost(CtkvrError):
    """The session is not on the server any more, or never was: closed, lease over, failed, or the server restarted."""

    hint = "open a new session and append the text again"


class SessionExists(CtkvrError):
    """The id is in use."""

    hint = "attach_session(), or take another id"


class FingerprintMismatch(CtkvrError):
    """The session was opened for another model or layout."""

    hint = "use the fingerprint the session was opened with, or open a session of your own"


class WrongPosition(CtkvrError):
    """The chunk would leave a gap, or straddles the end of what is held."""

    hint = "append at expected_position, or truncate first"

    @property
    def expected_position(self) -> int:
        """Where the layer's next token goes."""
        return int(self.metadata["expected_position"])


class DifferentBytes(CtkvrError):
    """The positions are held already, with other contents."""

    hint = "truncate to the first position that differs, then append"


class TokenLimit(CtkvrError):
    """The session has no room for so many tokens: a layer's limit is fixed when the session is opened."""

    hint = "open a session with a larger token_limit"


class OutOfRange(CtkvrError):
    """A layer that is not there, or a position the server cannot serve."""

    hint = "compare layer and position with session.info()"


class BeforeIndex(OutOfRange):
    """The query lies before what the layer's index has taken in."""

    hint = 'ask at a position at or after the indexed length, or with source="exact"'


class ShorterLayer(CtkvrError):
    """A layer holds fewer tokens than the length to truncate to."""

    hint = "truncate to the shortest layer's length or less; session.info() lists lengths"


class RowOverflow(CtkvrError):
    """A stored number does not fit the row format asked for."""

    hint = 'ask with row_format="f32", "bf16" or "storage"'


class CacheTooSmall(CtkvrError):
    """The session's row cache has fewer slots than an answer with new rows may need."""

    hint = 'open the session with more cache_slots, or ask for answer="rows"'


class NoRoom(CtkvrError):
    """The server cannot admit another session of this size: memory or the number of sessions."""

    hint = "wait for retry_after, close sessions, or open with a smaller token_limit"


class QueueFull(CtkvrError):
    """Too many calls wait for the session's lane."""

    hint = "wait for retry_after; send fewer calls at once"


class QuotaExceeded(CtkvrError):
    """The tenant holds all that its quota allows, or calls more often."""

    hint = "wait for retry_after, close sessions, call less often, or ask the operator for more"


class NotAuthenticated(CtkvrError):
    """The server does not know who calls: the token is missing, unknown, revoked or past its time."""

    hint = "connect with a token that the server's operator gave you"


class NotAllowed(CtkvrError):
    """The caller is known, and may not do that."""

    hint = "use a token that may administer the server"


class TooLarge(CtkvrError):
    """A message or an answer over its size limit."""

    hint = "ask for fewer tokens, positions or sessions at once; see server_info().limits"


class ChecksumMismatch(CtkvrError):
    """The bytes changed on their way."""

    hint = "append again; if it repeats, suspect memory or network"


class InvalidRequest(CtkvrError):
    """The message is wrong whatever the state."""

    hint = "correct the field that the message names"


class NotServed(CtkvrError):
    """Part of the contract that this server does not serve."""

    hint = "leave the option out, or use a newer server"


class Unavailable(CtkvrError):
    """Nobody answers at the address, or the connection broke; retries were of no use."""

    hint = "check address and server; sessions are lost only if the server ended"


class Draining(Unavailable):
    """The server is about to end and takes no more work; its sessions end with it."""

    hint = "use another server: open a session there and append the text again"


class DeadlineExceeded(CtkvrError):
    """The time-out passed. Nothing was changed, or an append was done whole: repeat it at the same first_position."""

    hint = "repeat the call, with a longer timeout if it is large"


class Cancelled(CtkvrError):
    """The call was cancelled."""

    hint = "nothing, where this program cancelled it"


class ServerFailed(CtkvrError):
    """The server failed at something that should work."""

    hint = "see the server's log"


class ProtocolError(CtkvrError):
    """A reply that the contract does not allow."""

    hint = "compare the versions of client and server"


_BY_REASON: dict[str, type[CtkvrError]] = {
    "ARENA_FULL": NoRoom,
    "HOST_MEMORY_FULL": NoRoom,
    "SESSION_LIMIT": NoRoom,
    "QUEUE_FULL": QueueFull,
    "MEMORY_QUOTA": QuotaExceeded,
    "SESSION_QUOTA": QuotaExceeded,
    "QUEUE_QUOTA": QuotaExceeded,
    "RATE_QUOTA": QuotaExceeded,
    "WRONG_POSITION": WrongPosition,
    "TOKEN_LIMIT": TokenLimit,
    "DIFFERENT_BYTES": DifferentBytes,
    REASON_EPOCH_MISMATCH: SessionLost,
    "FINGERPRINT_MISMATCH": FingerprintMismatch,
    "SESSION_FAILED": SessionLost,
    "SESSION_UNKNOWN": SessionLost,
    "SESSION_CLOSED": SessionLost,
    "LEASE_EXPIRED": SessionLost,
    REASON_SERVER_RESTARTED: SessionLost,
    REASON_DRAINING: Draining,
    "BEFORE_INDEX": BeforeIndex,
    "SHORTER_LAYER": ShorterLayer,
    "ROW_OVERFLOW": RowOverflow,
    "CACHE_TOO_SMALL": CacheTooSmall,
}

_BY_CODE: dict[str, type[CtkvrError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "ALREADY_EXISTS": SessionExists,
    "OUT_OF_RANGE": OutOfRange,
    "RESOURCE_EXHAUSTED": TooLarge,
    "DATA_LOSS": ChecksumMismatch,
    "UNIMPLEMENTED": NotServed,
    "UNAUTHENTICATED": NotAuthenticated,
    "PERMISSION_DENIED": NotAllowed,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "INTERNAL": ServerFailed,
    "UNKNOWN": ServerFailed,
}

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def make_error(
    code: str,
    message: str,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
) -> CtkvrError:
    """The error of the class that reason, or else code, calls for."""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, CtkvrError)
    return kind(code, message, reason, metadata, retry_after)


def server_restarted(expected_boot_id: int, boot_id: int) -> CtkvrError:
    """The error of a reply from another boot than the session's."""
    return make_error(
        "ABORTED",
        f"the server was restarted: boot id {boot_id:x} answers, the session is of {expected_boot_id:x}",
        REASON_SERVER_RESTARTED,
        {"boot_id": str(boot_id), "expected_boot_id": str(expected_boot_id)},
    )


def from_item_status(code: int, message: str, reason: str, metadata: Mapping[str, str]) -> CtkvrError:
    """The error of one item of a Retrieve or Decode reply."""
    return make_error(_CODE_NAMES.get(code, "UNKNOWN"), message, reason, metadata)


def from_rpc(error: grpc.RpcError) -> CtkvrError:
    """The error of a failed call, with the details of google.rpc.Status where it carries them."""
    code, message = error.code().name, error.details() or ""
    if code == "INTERNAL" and message == _BROKEN_WRITE:
        return Unavailable("UNAVAILABLE", "the connection broke while a message was written")
    info = error_details_pb2.ErrorInfo()
    retry_after = None
    for detail in _details_of(error):
        retry = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return make_error(code, message, info.reason, info.metadata, retry_after)


def _details_of(error: grpc.RpcError) -> list[any_pb2.Any]:
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            return list(status_pb2.Status.FromString(value).details)
        except DecodeError:  # details that do not parse are no reason to lose the error itself
            return []
    return []
