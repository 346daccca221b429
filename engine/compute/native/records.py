"""What the kernels take, as ctypes: each record mirrors the C structure of its name, field by field."""

from __future__ import annotations

import ctypes
from enum import IntEnum

POINTER, INDEX, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

ELEMENTS, BLOCKS, MIXED, NUMBERS = 0, 1, 2, 3  # kinds of products, as products.h numbers them


class NormKind(IntEnum):
    """What is done to a number that was divided by its row's size, as rows.h numbers it.

    It is rounded, then multiplied with its weight (Llama); multiplied before it is rounded (OLMo, Gemma 4);
    multiplied with one more than its weight (Gemma up to 3); or the row's mean is taken off first and a bias
    added (LayerNorm).
    """

    ROUNDED = 0
    AT_ONCE = 1
    ONE_MORE = 2
    CENTRED = 3


class Activation(IntEnum):
    """What an MLP's gate goes through, as rows.h numbers it. SWIGLU_LIMITED is gpt-oss's."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    SWIGLU_LIMITED = 3
    RELU_SQUARED = 4


class Product(ctypes.Structure):
    """See products.h."""

    _fields_ = (
        ("kind", INDEX),
        *((name, POINTER) for name in ("packed", "bias")),
        *((name, INDEX) for name in ("out", "k")),
    )


class Experts(ctypes.Structure):
    """See experts.h."""

    _fields_ = (
        *((name, Product) for name in ("gate_up", "down")),
        *((name, INDEX) for name in ("count", "activation")),
    )


class ChosenExperts(ctypes.Structure):
    """See experts.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "experts", "shares", "y", "scratch")),
        *((name, INDEX) for name in ("n", "each")),
    )


class Norm(ctypes.Structure):
    """See rows.h. No weight where there is no norm."""

    _fields_ = (("weight", POINTER), ("eps", FLOAT), ("kind", INDEX), ("bias", POINTER))


class Router(ctypes.Structure):
    """See mixture.h."""

    _fields_ = (
        ("weights", Product),
        *((name, INDEX) for name in ("count", "each", "is_normed", "rounds_shares")),
        ("norm", Norm),
        ("scale", POINTER),
        ("root", FLOAT),
        ("expert_scales", POINTER),
    )


class Routes(ctypes.Structure):
    """See mixture.h."""

    _fields_ = (*((name, POINTER) for name in ("x", "logits", "experts", "shares")), ("n", INDEX))


class Mixture(ctypes.Structure):
    """See mixture.h."""

    _fields_ = (
        ("router", Router),
        ("experts", Experts),
        *((name, Product) for name in ("shared_gate_up", "shared_down")),
        ("shared_gate", POINTER),
        ("shared_activation", INDEX),
    )


class Heads(ctypes.Structure):
    """See rows.h."""

    _fields_ = (
        *((name, INDEX) for name in ("heads", "kv_heads", "dim", "rotary", "in_pairs", "at_once")),
        *((name, INDEX) for name in ("norms_rows", "keys_twice")),
    )


class Rotation(ctypes.Structure):
    """See rows.h."""

    _fields_ = (
        ("form", Heads),
        *((name, POINTER) for name in ("qkv", "cos", "sin")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, POINTER) for name in ("query", "keys", "values", "slots")),
        *((name, INDEX) for name in ("n", "block_size", "of_bytes")),
        ("value_norm", Norm),
        ("places", POINTER),
    )


class Runs(ctypes.Structure):
    """See state_scans.h."""

    _fields_ = (*((name, POINTER) for name in ("slots", "firsts", "counts", "taken")), ("sequences", INDEX))


class DeltaScan(ctypes.Structure):
    """See state_scans.h."""

    _fields_ = (
        ("runs", Runs),
        *((name, POINTER) for name in ("query", "key", "value", "decays", "beta", "state", "output")),
        *((name, INDEX) for name in ("heads", "key_heads", "keys", "values", "decays_channels")),
    )


class StructuredScan(ctypes.Structure):
    """See state_scans.h."""

    _fields_ = (
        ("runs", Runs),
        *((name, POINTER) for name in ("inputs", "decays", "b", "c", "state", "output")),
        *((name, INDEX) for name in ("heads", "groups", "dim", "size")),
    )


class SelectiveScan(ctypes.Structure):
    """See state_scans.h."""

    _fields_ = (
        ("runs", Runs),
        *((name, POINTER) for name in ("inputs", "steps", "rates", "b", "c", "state", "output")),
        *((name, INDEX) for name in ("channels", "size", "stride")),
    )


class Attention(ctypes.Structure):
    """See tiles.h."""

    _fields_ = (
        *((name, POINTER) for name in ("query", "keys", "values", "counts", "lengths")),
        *((name, POINTER) for name in ("tables", "trees", "gaps", "output", "sinks", "records")),
        *((name, INDEX) for name in ("sequences", "max_blocks", "heads", "kv_heads", "dim", "block_size")),
        ("window", INDEX),
        ("chunk", INDEX),
        ("room", INDEX),
        ("of_bytes", INDEX),
        ("scale", FLOAT),
        ("softcap", FLOAT),
    )


class DecoderLayer(ctypes.Structure):
    """See decoder.h."""

    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "attended_norm", "mlp_norm", "transformed_norm")),
        *((name, Norm) for name in ("query_norm", "key_norm", "value_norm")),
        ("form", Heads),
        ("kv_heads", INDEX),
        *((name, Product) for name in ("qkv", "output", "gate_up", "down")),
        ("mixture", ctypes.POINTER(Mixture)),
        *((name, Norm) for name in ("mixture_norm", "aside_norm", "mixed_norm")),
        *((name, INDEX) for name in ("activation", "is_gated", "is_parallel", "table", "window")),
        ("sinks", POINTER),
        *((name, FLOAT) for name in ("scale", "softcap", "residual_multiplier")),
        *((name, Product) for name in ("input_gate", "input_projection")),
        ("input_norm", Norm),
        ("scalar", FLOAT),
    )


class Decoder(ctypes.Structure):
    """See decoder.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("last_norm", Norm),
        *((name, INDEX) for name in ("num_layers", "hidden")),
        ("embedding", POINTER),
        ("num_tokens", INDEX),
        ("multiplier", FLOAT),
        ("head", Product),
    )


class DecoderStep(ctypes.Structure):
    """See decoder.h."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "token_ids")),
        *((name, ctypes.POINTER(POINTER)) for name in ("cos", "sin")),
        *((name, POINTER) for name in ("places", "slots")),
        *((name, ctypes.POINTER(POINTER)) for name in ("keys", "values")),
        ("attention", ctypes.POINTER(Attention)),
        ("scratch", POINTER),
        ("n", INDEX),
        *((name, POINTER) for name in ("taps", "tapped")),
        ("num_taps", INDEX),
        *((name, POINTER) for name in ("layer_inputs", "rows")),
        ("num_rows", INDEX),
        ("logits", POINTER),
    )


class Draw(ctypes.Structure):
    """See draw.h."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "rows", "temperature", "top_k", "top_p", "log_min_p")),
        *((name, POINTER) for name in ("keys", "token_ids")),
        *((name, INDEX) for name in ("n", "vocab", "is_bf16")),
        ("names", POINTER),
    )


class Eagle(ctypes.Structure):
    """See eagle.h."""

    _fields_ = (
        *((name, Norm) for name in ("hidden_norm", "input_norm", "mlp_norm", "last_norm")),
        *((name, Product) for name in ("fuse", "qkv", "output", "gate_up", "down", "head")),
        *((name, POINTER) for name in ("embedding", "keys", "values")),
        *((name, INDEX) for name in ("hidden", "heads", "kv_heads", "dim", "width", "norms_residual")),
    )


class EagleRound(ctypes.Structure):
    """See eagle.h."""

    _fields_ = (
        *((name, POINTER) for name in ("features", "embedded", "cos", "sin", "slots", "lengths", "last")),
        ("drawing", POINTER),
        ("attention", ctypes.POINTER(Attention)),
        ("draw", ctypes.POINTER(Draw)),
        *((name, POINTER) for name in ("wanted", "token_ids", "chances", "scratch")),
        *((name, INDEX) for name in ("n", "sequences", "most")),
        ("least_chance", FLOAT),
    )
