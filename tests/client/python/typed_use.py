# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees of the package: results have their types, and wrong arguments are errors. Never run.

mypy reports an ignored error that is none, so every line with one proves that the line is refused.
"""

from __future__ import annotations

from typing import Any

import ctkvr
import ctkvr.aio
import numpy as np
import numpy.typing as npt
from ctkvr.v1 import cache_pb2, session_pb2
from typing_extensions import assert_type


def blocking(session: ctkvr.Session, array: npt.NDArray[np.float32]) -> None:
    client = ctkvr.connect("127.0.0.1:7420", timeout=3)
    assert_type(client, ctkvr.Client)
    assert_type(client.server_info(), cache_pb2.GetServerInfoReply)
    assert_type(client.open_session(layers=1, dtype="bfloat16"), ctkvr.Session)
    assert_type(session.append(0, array, array), ctkvr.AppendResult)
    assert_type(session.retrieve(0, array, k=3), ctkvr.Answer)
    assert_type(session.retrieve(0, array).ids[0, 0], npt.NDArray[Any])
    assert_type(session.info(), session_pb2.SessionInfo)
    assert_type(session.truncate(3), list[int])
    assert_type(session.decode().receive(), list[ctkvr.StepResult])
    client.open_session(dtype="float64")  # type: ignore[arg-type]
    client.open_session(1)  # type: ignore[misc]
    session.retrieve(0, array, source="fast")  # type: ignore[arg-type]
    session.retrieve("0", array)  # type: ignore[arg-type]
    session.append(0, array, array, progress=3)  # type: ignore[arg-type]
    session.truncate()  # type: ignore[call-arg]


async def awaiting(session: ctkvr.aio.Session, array: npt.NDArray[np.float32]) -> None:
    client = await ctkvr.aio.connect("127.0.0.1:7420")
    assert_type(await client.open_session(layers=1), ctkvr.aio.Session)
    assert_type(await session.append(0, array, array), ctkvr.AppendResult)
    assert_type(await session.retrieve(0, array), ctkvr.Answer)
    assert_type(await session.decode().step(0, queries=array), ctkvr.StepResult)
    await session.truncate("3")  # type: ignore[arg-type]
