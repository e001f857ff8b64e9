# SPDX-License-Identifier: Apache-2.0
"""Client of ctkvr: keeps the KV caches of long conversations on a server, and asks which tokens matter to a query.

    with ctkvr.connect("127.0.0.1:7420") as client, client.open_session(...) as session:
        session.append(0, keys, values)
        answer = session.retrieve(0, queries)

ctkvr.aio is the same for asyncio, ctkvr.errors what can go wrong, ctkvr.rows the decoder of stored rows, ctkvr.v1 the
messages of the contract.
"""

from ctkvr._version import __version__
from ctkvr.answer import Answer, Selection, Sets
from ctkvr.arrays import from_bfloat16, to_bfloat16, to_torch
from ctkvr.attention import merge_attention
from ctkvr.calls import AppendResult
from ctkvr.client import Client, DecodeStream, Session, connect
from ctkvr.codec import Tags
from ctkvr.decode import Step, StepResult
from ctkvr.errors import CtkvrError, SessionLost
from ctkvr.retry import RetryOptions
from ctkvr.rows import LayerShape, RowDecoder

__all__ = [
    "Answer",
    "AppendResult",
    "Client",
    "CtkvrError",
    "DecodeStream",
    "LayerShape",
    "RetryOptions",
    "RowDecoder",
    "Selection",
    "Session",
    "SessionLost",
    "Sets",
    "Step",
    "StepResult",
    "Tags",
    "__version__",
    "connect",
    "from_bfloat16",
    "merge_attention",
    "to_bfloat16",
    "to_torch",
]
