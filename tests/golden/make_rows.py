#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes rows.json: test vectors for the storage format of rows, as proto/README.md, section "Rows", defines it.

An implementation of that section and of nothing else: plain Python, no packages, no code shared with the C++ sources.

    python3 make_rows.py > rows.json

The file is {"cases": [case ...]}. Fields of a case (hex strings are bytes in the order of the wire, little-endian):
    name, format       "k8v4" ...; format as in the proto without FORMAT_, lower case
    head_dim, value_dim
    code_generation    0: keys as they came in raw_dtype, 1: coded (0 for the formats f32, f16, bf16 too)
    raw_dtype          "f32", "f16" or "bf16"; type of the key rows while code_generation is 0
    rotation_seed      decimal string (64 bits do not fit a JSON number)
    mean               hex of binary32 [head_dim]; empty where keys are not coded
    tokens             [{note, key, value, key_row, value_row, decoded_key, decoded_value, sketch_scale_1, _2} ...]
Fields of a token:
    note               what is special about it
    key, value         hex of binary32 [head_dim] and [value_dim]: what was appended
    key_row, value_row hex of the storage rows
    decoded_key, decoded_value   hex of binary32: what the rows decode to, by the arithmetic of the README, exactly
    sketch_scale_1, sketch_scale_2   the binary16 f as a number of 16 bits, for 1 and 2 planes in the first pass; only
                       where keys are coded (f is not part of a row)
"""

import json
import math
import struct
import sys

MASK = (1 << 64) - 1


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def half_bits(x):
    """binary16 nearest to x, ties to even; None when that is infinite."""
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return None


def half_value(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


# All finite binary16 values in ascending order, zero once: the bounds below are found by search.
HALVES = sorted({half_value(b) for b in list(range(0x7C00)) + list(range(0x8000, 0xFC00))})


def smallest_half(holds):
    """The smallest non-negative binary16 for which holds(value); holds is monotonous."""
    low, high = HALVES.index(0.0), len(HALVES) - 1
    if not holds(HALVES[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(HALVES[middle]):
            high = middle
        else:
            low = middle + 1
    return HALVES[low]


def largest_half_at_most(bound):
    low, high = 0, len(HALVES) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if HALVES[middle] <= bound:
            low = middle
        else:
            high = middle - 1
    return HALVES[low]


def pack_half(x):
    return struct.pack("<H", 0) if x == 0 else struct.pack("<e", x)


# --- Rotation ---------------------------------------------------------------------------------------------------------


def splitmix64(seed, count):
    state = seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def rounds_of(dim):
    return 1 if bin(dim).count("1") == 1 else 2


def signs_of(dim, seed):
    total = rounds_of(dim) * dim
    words = list(splitmix64(seed, (total + 63) // 64))
    flat = [-1.0 if words[i // 64] >> (i % 64) & 1 else 1.0 for i in range(total)]
    return [flat[r * dim : (r + 1) * dim] for r in range(rounds_of(dim))]


def blocks_of(dim, r):
    sizes = [1 << b for b in range(dim.bit_length() - 1, -1, -1) if dim >> b & 1]
    return sizes if r == 0 else sizes[::-1]


def hadamard(x):
    size, stride = len(x), 1
    x = list(x)
    while stride < size:
        out = [0.0] * size
        for i in range(size):
            partner = i ^ stride
            out[i] = f32(x[i] + x[partner]) if i < partner else f32(x[partner] - x[i])
        x, stride = out, 2 * stride
    scale = f32(1 / math.sqrt(size))
    return [f32(v * scale) for v in x]


def hadamard_blocks(x, r):
    out, begin = [], 0
    for size in blocks_of(len(x), r):
        out += hadamard(x[begin : begin + size])
        begin += size
    return out


def rotate(x, signs):
    for r, row in enumerate(signs):
        x = hadamard_blocks([v * s for v, s in zip(x, row)], r)
    return x


def unrotate(x, signs):
    for r in reversed(range(len(signs))):
        x = [v * s for v, s in zip(hadamard_blocks(x, r), signs[r])]
    return x


# --- Keys -------------------------------------------------------------------------------------------------------------


def sum_in_order(terms):
    partial = [0.0] * 16
    for i, term in enumerate(terms):
        partial[i % 16] = f32(partial[i % 16] + term)
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [f32(partial[j] + partial[j + half]) for j in range(half)]
    return partial[0]


def encode_key(key, mean, signs, bits):
    x = rotate([f32(k - m) for k, m in zip(key, mean)], signs)
    half_levels = 1 << (bits - 1)
    peak = max(abs(v) for v in x)
    scale = smallest_half(lambda h: peak <= h * half_levels)
    assert scale is not None
    codes = []
    for v in x:
        floor = math.floor(f32(v / scale)) if scale != 0 else 0
        codes.append(min(max(floor + half_levels, 0), 2 * half_levels - 1))
    row = bytearray()
    for plane in range(bits):
        packed = bytearray(len(x) // 8)
        for i, code in enumerate(codes):
            packed[i // 8] |= (code >> (bits - 1 - plane) & 1) << (i % 8)
        row += packed
    row += pack_half(scale)
    sketch = []
    for first in (1, 2):
        levels = [2 * (code >> (bits - first)) + 1 - (1 << first) for code in codes]
        squares = sum_in_order(f32(v * v) for v in x)
        products = sum_in_order(f32(v * u) for v, u in zip(x, levels))
        f = half_bits(f32(squares / products)) if peak != 0 else 0
        assert f is not None
        sketch.append(f)
    return bytes(row), sketch


def decode_key(row, mean, signs, bits):
    dim = len(mean)
    (scale,) = struct.unpack_from("<e", row, bits * dim // 8)
    x = []
    for i in range(dim):
        code = 0
        for plane in range(bits):
            code = code << 1 | row[plane * dim // 8 + i // 8] >> (i % 8) & 1
        x.append(f32(scale * (code + 0.5 - (1 << (bits - 1)))))
    return [f32(v + m) for v, m in zip(unrotate(x, signs), mean)]


# --- Values and floats ------------------------------------------------------------------------------------------------


def encode_value(value, bits):
    levels = (1 << bits) - 1
    headers, codes = b"", []
    for begin in range(0, len(value), 32):
        group = value[begin : begin + 32]
        zero = largest_half_at_most(min(group))
        scale = smallest_half(lambda h: zero + h * levels >= max(group))  # exact in binary64
        assert scale is not None and zero <= min(group)
        headers += pack_half(scale) + pack_half(zero)
        for v in group:
            code = round(f32(f32(v - zero) / scale)) if scale != 0 else 0  # Python rounds ties to even
            codes.append(min(max(code, 0), levels))
    if bits == 8:
        return headers + bytes(codes)
    return headers + bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2))


def decode_value(row, dim, bits):
    groups = (dim + 31) // 32
    out = []
    for i in range(dim):
        scale, zero = struct.unpack_from("<ee", row, 4 * (i // 32))
        code = row[4 * groups + i] if bits == 8 else row[4 * groups + i // 2] >> (4 * (i % 2)) & 15
        out.append(f32(zero + f32(scale * code)))
    return out


def encode_floats(x, dtype):
    if dtype == "f32":
        return struct.pack(f"<{len(x)}f", *x)
    if dtype == "f16":
        return struct.pack(f"<{len(x)}e", *x)
    return struct.pack(f"<{len(x)}H", *(bf16_bits(v) for v in x))


def decode_floats(row, dtype):
    if dtype == "bf16":
        return [bf16_value(b) for b in struct.unpack(f"<{len(row) // 2}H", row)]
    kind, size = ("f", 4) if dtype == "f32" else ("e", 2)
    return list(struct.unpack(f"<{len(row) // size}{kind}", row))


# --- Cases ------------------------------------------------------------------------------------------------------------

PLANES = {"k8v8": 8, "k8v4": 8, "k6v4": 6}
VALUE_BITS = {"k8v8": 8, "k8v4": 4, "k6v4": 4}


class Source:
    """Numbers that look like keys: sums of four uniforms, exact in binary32, the same in every Python."""

    def __init__(self, seed):
        self.words = splitmix64(seed, 1 << 30)

    def row(self, dim, spread):
        out = []
        for _ in range(dim):
            word = next(self.words)
            total = sum(word >> (16 * k) & 0xFFFF for k in range(4)) - 2 * 0xFFFF
            out.append(f32(f32(total / 65536) * spread))
        return out


def special_tokens(source, dim, value_dim, mean):
    """(note, key, value) of tokens at the borders of the format."""
    yield "plain", source.row(dim, 3.0), source.row(value_dim, 1.0)
    yield "key equals the mean, value is zero", list(mean), [0.0] * value_dim
    outlier = source.row(dim, 0.5)
    outlier[dim // 3] = 240.0
    spiked = source.row(value_dim, 0.25)
    spiked[value_dim - 1] = -96.0
    yield "one channel far out, one value far out", outlier, spiked
    yield "constants", [0.75] * dim, [f32(0.1)] * value_dim


def extreme_tokens(source, dim, value_dim):
    tiny = [f32(v * 2.0**-140) for v in source.row(dim, 1.0)]
    yield "subnormal key and value", tiny, [f32(v * 2.0**-24) for v in source.row(value_dim, 0.5)]
    big = [32768.0 if i % 3 == 0 else -32768.0 for i in range(dim)]
    yield "a large key, values at the ends of binary16", big, [65504.0 if i % 2 else -65504.0 for i in range(value_dim)]
    negative = [f32(-abs(v)) for v in source.row(value_dim, 2.0)]
    yield "values all negative", source.row(dim, 2.0**-10), negative


def hex_f32(x):
    return struct.pack(f"<{len(x)}f", *x).hex()


def make_token(note, key, value, case, mean, signs):
    fmt = case["format"]
    if case["code_generation"] == 1:
        key_row, sketch = encode_key(key, mean, signs, PLANES[fmt])
        decoded_key = decode_key(key_row, mean, signs, PLANES[fmt])
    else:
        key_row = encode_floats(key, case["raw_dtype"])
        decoded_key = decode_floats(key_row, case["raw_dtype"])
    if fmt in PLANES:
        value_row = encode_value(value, VALUE_BITS[fmt])
        decoded_value = decode_value(value_row, len(value), VALUE_BITS[fmt])
    else:
        value_row = encode_floats(value, fmt)
        decoded_value = decode_floats(value_row, fmt)
    token = {"note": note, "key": hex_f32(key), "value": hex_f32(value), "key_row": key_row.hex(),
             "value_row": value_row.hex(), "decoded_key": hex_f32(decoded_key), "decoded_value": hex_f32(decoded_value)}
    if case["code_generation"] == 1:
        token["sketch_scale_1"], token["sketch_scale_2"] = sketch
    return token


def make_case(fmt, dim, value_dim, seed, generation, raw_dtype, extremes=False):
    source = Source(seed ^ dim << 32 ^ value_dim)
    coded = generation == 1
    mean = source.row(dim, 1.0) if coded else []
    case = {"name": f"{fmt}-{dim}-{value_dim}" + ("-extremes" if extremes else "") +
                    (f"-raw-{raw_dtype}" if fmt in PLANES and not coded else ""),
            "format": fmt, "head_dim": dim, "value_dim": value_dim, "code_generation": generation,
            "raw_dtype": raw_dtype, "rotation_seed": str(seed), "mean": hex_f32(mean)}
    signs = signs_of(dim, seed)
    if extremes:
        mean = [0.0] * dim
        case["mean"] = hex_f32(mean) if coded else ""
        tokens = extreme_tokens(source, dim, value_dim)
    else:
        tokens = special_tokens(source, dim, value_dim, mean if coded else [0.0] * dim)
    case["tokens"] = [make_token(note, key, value, case, mean, signs) for note, key, value in tokens]
    return case


def main():
    cases = [
        make_case("k8v4", 64, 64, 1, 1, "bf16"),
        make_case("k8v8", 80, 80, 2, 1, "f16"),
        make_case("k6v4", 128, 128, 3, 1, "bf16"),
        make_case("k8v4", 128, 128, MASK, 1, "bf16"),
        make_case("k8v4", 256, 40, 0x123456789ABCDEF0, 1, "bf16"),
        make_case("k6v4", 16, 16, 4, 1, "f32"),
        make_case("k6v4", 72, 256, 5, 1, "f32"),
        make_case("k8v8", 120, 24, 6, 1, "f32"),
        make_case("k8v4", 96, 72, 7, 1, "bf16"),
        make_case("k8v8", 64, 96, 8, 1, "f32", extremes=True),
        make_case("k8v4", 80, 64, 9, 1, "f32", extremes=True),
        make_case("k6v4", 256, 72, 10, 1, "f32", extremes=True),
        make_case("k8v4", 64, 64, 11, 0, "bf16"),
        make_case("k6v4", 80, 48, 12, 0, "f16"),
        make_case("k8v8", 16, 40, 13, 0, "f32"),
        make_case("f32", 16, 24, 0, 0, "f32"),
        make_case("f16", 24, 16, 0, 0, "f16"),
        make_case("bf16", 16, 16, 0, 0, "bf16"),
    ]
    json.dump({"cases": cases}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
