# SPDX-License-Identifier: Apache-2.0
"""The package keeps in step with the contract and the server: messages, settings, calls, reasons, version."""

from __future__ import annotations

import re
import types
from dataclasses import fields
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import get_args

import ctkvr
import pytest
from ctkvr import answer, errors
from ctkvr.v1 import cache_pb2, session_pb2, tensor_pb2
from google.protobuf import descriptor, descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[3]
# Not served yet, so without a method here.
NOT_CALLED = {"ForkSession", "SnapshotSession", "RestoreSession"}


def without_json_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file


@pytest.mark.parametrize("module", [cache_pb2, session_pb2, tensor_pb2], ids=lambda module: module.__name__)
def test_the_installed_messages_are_those_of_the_repository(module: types.ModuleType, tmp_path: Path) -> None:
    file: descriptor.FileDescriptor = module.DESCRIPTOR
    out = tmp_path / "set"
    command = ["protoc", f"-I{ROOT / 'proto'}", f"-I{files('grpc_tools') / '_proto'}", f"--descriptor_set_out={out}"]
    assert protoc.main([*command, file.name]) == 0
    (wanted,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    installed = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
    assert installed == without_json_names(wanted)


def test_every_setting_of_a_selection_can_be_given() -> None:
    names = {"k_tokens" if field.name == "k" else field.name for field in fields(ctkvr.Selection)}
    assert names == {field.name for field in session_pb2.Selection.DESCRIPTOR.fields}


def test_the_names_of_settings_are_those_of_the_contract() -> None:
    for literal, enum, prefix in (
        (answer.Source, session_pb2.Source, "SOURCE_"),
        (answer.Reduction, session_pb2.GroupReduction, "GROUP_REDUCTION_"),
        (answer.RowFormat, tensor_pb2.RowFormat, "ROW_FORMAT_"),
        (answer.AnswerMode, cache_pb2.AnswerMode, "ANSWER_MODE_"),
    ):
        known = {name.removeprefix(prefix).lower() for name in enum.keys()}  # noqa: SIM118
        assert set(get_args(literal)) <= known - {"unspecified"}


def test_every_call_that_is_served_is_made() -> None:
    package = files("ctkvr")
    text = "".join((package / name).read_text() for name in ("calls.py", "client.py"))
    service = cache_pb2.DESCRIPTOR.services_by_name["Cache"]
    assert {method.name for method in service.methods if f'"{method.name}"' not in text} == NOT_CALLED


def test_every_reason_of_the_server_has_its_error() -> None:
    header = (ROOT / "server/core/error.h").read_text()
    reasons = re.findall(r'kReason\w+\[\] = "([A-Z_]+)"', header)
    assert len(reasons) >= 16
    for reason in reasons:
        error = errors.make_error("UNKNOWN", "text", reason)
        assert type(error) not in (errors.CtkvrError, errors.ServerFailed), reason
        assert error.hint in str(error)


def test_the_version_is_the_projects() -> None:
    (project,) = re.findall(r"project\(ctkvr VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert ctkvr.__version__ == version("ctkvr") == project
