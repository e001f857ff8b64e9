# SPDX-License-Identifier: Apache-2.0
"""The block of the client's README that needs transformers is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ctkvr
import pytest
from ctkvr.transformers import CtkvrCache

from models import generate, make, text
from server import Server

README = (Path(__file__).parents[2] / "client/python/README.md").read_text()


def test_five_lines(server: Server, tmp_path: Path) -> None:
    found = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
        if "transformers" in block
    ]
    assert len(found) == 1
    make("llama").save_pretrained(tmp_path)
    ids = text(100)
    namespace: dict[str, Any] = {
        "path": tmp_path,
        "inputs": {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)},
    }
    code = compile("import ctkvr\n" + found[0].replace("127.0.0.1:7420", server.address), "README block", "exec")
    exec(code, namespace)  # noqa: S102 (the README's own)
    model = namespace["model"]
    assert namespace["cache"].traffic.answers == 19 * model.config.num_hidden_layers
    with ctkvr.connect(server.address) as client, CtkvrCache(model, client, 8192) as cache:
        assert namespace["ids"].tolist() == generate(model, ids, 20, cache=cache).tolist()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        generate(model, namespace["ids"], 5, cache=namespace["cache"])
