#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# Cuts a trace of one layer down to one KV head and the query heads that read it, all positions kept. This is how
# records-layer07 was made from a trace of the whole layer:
#
#   cut_trace.py FULL_TRACE records-layer07
#
# A trace is a folder: q.npy [q_heads, tokens - query_first_position, head_dim], k.npy and v.npy
# [kv_heads, tokens, head_dim], float16 in C order, and meta.json. Without --kv-head the head with the most needles is
# kept: (query head, step) pairs after the prompt where one token between the sinks and the prompt's last 64 tokens holds
# over 10 % of the full attention.
import argparse
import json
import pathlib

import numpy as np

SINKS = 4
WINDOW = 64
NEEDLE_SHARE = 0.1


def count_needles(q, k, meta):
    """Needles of each query head. q [q_heads, queries, dim], k [kv_heads, tokens, dim]."""
    first, prompt, tokens = meta["query_first_position"], meta["prompt_tokens"], k.shape[1]
    group = q.shape[0] // k.shape[0]
    needles = np.zeros(q.shape[0], dtype=int)
    for head in range(q.shape[0]):
        queries = q[head, prompt - first :].astype(np.float32)
        logits = meta["scale"] * (queries @ k[head // group].astype(np.float32).T)
        visible = np.arange(tokens)[None, :] <= np.arange(prompt, tokens)[:, None]
        logits = np.where(visible, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        needles[head] = int((weights[:, SINKS : prompt - WINDOW].max(axis=1) > NEEDLE_SHARE).sum())
    return needles


def main():
    parser = argparse.ArgumentParser(description="Cuts a trace down to one KV head.")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--kv-head", type=int, help="keep this KV head (default: the one with the most needles)")
    arguments = parser.parse_args()

    meta = json.loads((arguments.source / "meta.json").read_text())
    q, k, v = (np.load(arguments.source / f"{name}.npy") for name in "qkv")
    group = q.shape[0] // k.shape[0]
    needles = count_needles(q, k, meta)
    by_kv_head = needles.reshape(k.shape[0], group).sum(axis=1)
    print("needles by query head:", needles.tolist(), "by KV head:", by_kv_head.tolist())
    kv_head = int(by_kv_head.argmax()) if arguments.kv_head is None else arguments.kv_head

    heads = slice(kv_head * group, (kv_head + 1) * group)
    arguments.target.mkdir(parents=True, exist_ok=True)
    np.save(arguments.target / "q.npy", np.ascontiguousarray(q[heads], dtype="<f2"))
    np.save(arguments.target / "k.npy", np.ascontiguousarray(k[kv_head : kv_head + 1], dtype="<f2"))
    np.save(arguments.target / "v.npy", np.ascontiguousarray(v[kv_head : kv_head + 1], dtype="<f2"))
    dim = k.shape[2]
    meta.update(
        q=f"[q_heads={group}, tokens-query_first_position, head_dim={dim}] float16, after RoPE",
        k=f"[kv_heads=1, tokens, head_dim={dim}] float16, after RoPE",
        v=f"[kv_heads=1, tokens, head_dim={dim}] float16",
        group=f"query head h uses KV head h // {group}",
        cut=f"KV head {kv_head} of {k.shape[0]} with its query heads {heads.start} to {heads.stop - 1}; all positions",
        needles=int(by_kv_head[kv_head]),
        licence="SmolLM2-135M-Instruct is licensed under Apache-2.0; the text is made of Debian package records.",
    )
    (arguments.target / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    main()
