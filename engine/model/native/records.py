"""What the kernels take, as ctypes: each record mirrors the C structure of its name, field by field."""

from __future__ import annotations

import ctypes

POINTER, INDEX, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

BFLOAT16 = 0  # kinds of products, as products.h numbers them


class Product(ctypes.Structure):
    """See products.h."""

    _fields_ = (
        ("kind", INDEX),
        *((name, POINTER) for name in ("packed", "scales", "bias")),
        *((name, INDEX) for name in ("out", "k")),
    )


class Rotation(ctypes.Structure):
    """See rows.h."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "cos", "sin", "query_norm", "key_norm")),
        *((name, POINTER) for name in ("query", "keys", "values", "slots")),
        *((name, INDEX) for name in ("n", "heads", "kv_heads", "dim", "block_size")),
        ("eps", FLOAT),
    )


class Attention(ctypes.Structure):
    """See attention.h."""

    _fields_ = (
        *((name, POINTER) for name in ("query", "keys", "values", "rows", "sequences", "lengths")),
        *((name, POINTER) for name in ("tables", "output")),
        *((name, INDEX) for name in ("n", "max_blocks", "heads", "kv_heads", "dim", "block_size")),
        *((name, INDEX) for name in ("longest", "window")),
        ("scale", FLOAT),
        ("softcap", FLOAT),
    )
