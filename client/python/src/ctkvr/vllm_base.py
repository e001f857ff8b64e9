# SPDX-License-Identifier: Apache-2.0
"""What ctkvr.vllm_connector derives from: vLLM's own classes, or stand-ins of the same shape where there is no vLLM.

The stand-ins keep what the adapter relies on: the arguments of the constructor, and the metadata of a step.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

__all__ = ["KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole"]

if TYPE_CHECKING:
    _vllm: Any = None
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base as _vllm
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        _vllm = None


class _Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _Metadata:
    """From the scheduler's connector to the workers', for one step."""


class _Base:
    def __init__(self, vllm_config: Any, role: _Role, kv_cache_config: Any) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError("kv_transfer_config is None; it must be set")
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: _Metadata | None = None

    @property
    def role(self) -> _Role:
        return self._role

    def bind_connector_metadata(self, connector_metadata: _Metadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None


if TYPE_CHECKING:
    KVConnectorBase_V1 = _Base
    KVConnectorMetadata = _Metadata
    KVConnectorRole = _Role
else:
    KVConnectorBase_V1 = _vllm.KVConnectorBase_V1 if _vllm else _Base
    KVConnectorMetadata = _vllm.KVConnectorMetadata if _vllm else _Metadata
    KVConnectorRole = _vllm.KVConnectorRole if _vllm else _Role
