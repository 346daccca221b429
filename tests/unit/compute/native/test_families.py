"""The installed transformers still computes what the kernels do in every family that is said to."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.compute.native.families import (
    EXPERTS,
    FAMILIES,
    GROUPED_ROUTERS,
    LATENT_ATTENTIONS,
    LIMITED_EXPERTS,
    MIXTURES,
    NORM_NAMES,
    PROJECTIONS,
    READ,
    ROUTERS,
    ROUTERS_TELLING_FLOATS,
    UNGATED_EXPERTS,
    NormNames,
    Pairing,
)
from engine.compute.native.records import NormKind
from engine.compute.recurrent import mixer_kinds
from engine.compute.recurrent.mixer_kinds import KINDS

SEEING = {"gemma4", "gemma4_unified"}  # whose file has classes for what they see, too


@cache
def code_of(family: str) -> dict[str, str]:
    """What each function and each class's `forward` in the family's file does, by name."""
    found = {}
    for node in ast.parse(source_of(family)).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in functions:
            if isinstance(function, ast.FunctionDef) and (
                function.name == "forward" or not isinstance(node, ast.ClassDef)
            ):
                found[node.name if isinstance(node, ast.ClassDef) else function.name] = bare(function)
            elif isinstance(function, ast.FunctionDef) and function.name in ("_norm", "_apply_gate"):
                found[function.name] = bare(function)
    return found


def bare(function: ast.FunctionDef) -> str:
    """Its statements without types, docstrings and dropout.

    Windows, soft caps and sinks are left out too: they are seen when it runs.
    """
    statements = [
        line
        for line in function.body
        if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    text = "\n".join(map(ast.unparse, statements))
    text = re.sub(r"attention_interface: Callable =", "attention_interface =", text)
    text = re.sub(r"\n\w+ = nn\.functional\.dropout\(.*\)", "", text)
    text = re.sub(r"self\.resid_\w+_dropout\((\w+)\)", r"\1", text)
    text = text.replace("hidden_states, self_attn_weights = ", "hidden_states, _ = ")
    text = re.sub(r"dropout=[^,]*", "dropout=0.0", text)
    text = re.sub(r", (softcap|s_aux)=[\w.]+", "", text)
    return re.sub(r", sliding_window=(getattr\([^)]*\)|[\w.]+)( if self.is_sliding else None)?", "", text)


def only(code: dict[str, str], ending: str) -> str:
    (found,) = {text for name, text in code.items() if re.fullmatch(rf"[A-Z]\w*{ending}", name)}
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_are_what_was_read(family: str) -> None:
    """Should these fail: read the new code, then the kernels, then write it down here."""
    code, known = code_of(family), FAMILIES[family]
    text = "Text" if family in SEEING else ""
    attention = only(code, f"{text}Attention")
    if family == "olmoe":  # an attention that clips is left alone
        attention = re.sub(r"if self.config.clip_qkv is not None:\n(    .*\n)+", "", attention)
        attention = attention.replace(".view(*hidden_shape)", ".view(hidden_shape)")
    assert attention.splitlines() in attentions(family)
    if family in SEEING:
        assert (only(code, "Norm").splitlines(), code["_norm"].splitlines()) == GEMMA4S_NORM
    elif family not in NORMED_BY_TORCH:
        assert only(code, "Norm").splitlines() == NORMS[known.norm]
    if known.norm is NormKind.ONE_MORE:
        assert code["_norm"] == "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
    if family not in ("gpt_oss", "mixtral", "olmoe"):  # all of whose layers have experts in its place
        assert only(code, f"{text}MLP").splitlines() in MLPS


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_are_rotated_as_was_read(family: str) -> None:
    code, known = code_of(family), FAMILIES[family]
    if known.has_half_angles:
        assert code["_apply_rotary_emb"].splitlines() == HALF_ANGLES
        assert code["apply_rotary_pos_emb"].splitlines()[2:] == HALF_ROTATED
        assert "emb = freqs\n" in only(code, "RotaryEmbedding")
        return
    assert code["rotate_half"].splitlines() in (PAIRS if known.rotates_pairs else [HALVES])
    rotated = [line for line in code["apply_rotary_pos_emb"].splitlines() if "unsqueeze" not in line]
    assert rotated in ROTATIONS[known.rotates_at_once, known.rotates_pairs]
    angles = only(code, "TextRotaryEmbedding" if family in SEEING else "RotaryEmbedding")
    assert ("emb = torch.repeat_interleave(freqs, 2, dim=-1)" in angles) is known.has_paired_angles
    assert ("emb = torch.cat((freqs, freqs), dim=-1)" in angles) is not known.has_paired_angles


# Those whose files have more models than that of text, whose parts are called so.

HALVES = [
    "x1 = x[..., :x.shape[-1] // 2]",
    "x2 = x[..., x.shape[-1] // 2:]",
    "return torch.cat((-x2, x1), dim=-1)",
]
PAIRS = [
    [
        "x1 = x[..., 0::2]",
        "x2 = x[..., 1::2]",
        "return torch.stack((-x2, x1), dim=-1).flatten(-2)",
    ],
    [
        "x1 = x[..., ::2]",
        "x2 = x[..., 1::2]",
        "rot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)",
        "return rot_x",
    ],
]
ROTATED = [
    "q_embed = q * cos + rotate_half(q) * sin",
    "k_embed = k * cos + rotate_half(k) * sin",
    "return (q_embed, k_embed)",
]
# The angles are in float32.
AT_ONCE = [
    "q_type, k_type = (q.dtype, k.dtype)",
    *ROTATED[:2],
    "return (q_embed.to(q_type), k_embed.to(k_type))",
]
PARTLY_ROTATED = [
    "rotary_dim = cos.shape[-1]",
    "q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])",
    "k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])",
    "q_embed = torch.cat([q_rot * cos + rotate_half(q_rot) * sin, q_pass], dim=-1)",
    "k_embed = torch.cat([k_rot * cos + rotate_half(k_rot) * sin, k_pass], dim=-1)",
    "return (q_embed, k_embed)",
]
HALF_ANGLES = [
    "first_half, second_half = torch.chunk(x, 2, dim=-1)",
    "first_ = first_half * cos - second_half * sin",
    "second_ = second_half * cos + first_half * sin",
    "return torch.cat((first_, second_), dim=-1)",
]
HALF_ROTATED = [
    "q_embed = _apply_rotary_emb(q, cos, sin)",
    "k_embed = _apply_rotary_emb(k, cos, sin)",
    "return (q_embed, k_embed)",
]
_APART = PARTLY_ROTATED[:3]
PAIRS_ROTATED = [
    "cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)",
    "sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)",
    *_APART,
    "q_embed = q_rot * cos + rotate_half(q_rot) * sin",
    "k_embed = k_rot * cos + rotate_half(k_rot) * sin",
    "q_embed = torch.cat([q_embed, q_pass], dim=-1)",
    "k_embed = torch.cat([k_embed, k_pass], dim=-1)",
    "return (q_embed, k_embed)",
]
PAIRS_AT_ONCE = [
    "dtype = q.dtype",
    "q = q.float()",
    "k = k.float()",
    *ROTATED[:2],
    "return (q_embed.to(dtype=dtype), k_embed.to(dtype=dtype))",
]
ROTATED_ALONE = ["return x * cos + rotate_half(x) * sin"]
# By whether numbers are rounded once, and neighbours are rotated together.
ROTATIONS = {
    (False, False): [ROTATED, PARTLY_ROTATED, ROTATED_ALONE],
    (True, False): [AT_ONCE],
    (False, True): [PAIRS_ROTATED],
    (True, True): [PAIRS_AT_ONCE],
}
NORMED_BY_TORCH = {"starcoder2"}
NORMS = {
    NormKind.ROUNDED: [
        "input_dtype = hidden_states.dtype",
        "hidden_states = hidden_states.to(torch.float32)",
        "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
        "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
        "return self.weight * hidden_states.to(input_dtype)",
    ],
    NormKind.AT_ONCE: [
        "input_dtype = hidden_states.dtype",
        "hidden_states = hidden_states.to(torch.float32)",
        "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
        "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
        "return (self.weight * hidden_states).to(input_dtype)",
    ],
    NormKind.CENTRED: [
        "input_dtype = hidden_states.dtype",
        "hidden_states = hidden_states.to(torch.float32)",
        "mean = hidden_states.mean(-1, keepdim=True)",
        "variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)",
        "hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)",
        "hidden_states = self.weight.to(torch.float32) * hidden_states",
        "return hidden_states.to(input_dtype)",
    ],
    NormKind.ONE_MORE: [
        "output = self._norm(x.float())",
        "output = output * (1.0 + self.weight.float())",
        "return output.type_as(x)",
    ],
}
# As one that is AT_ONCE, where it has weights.
GEMMA4S_NORM = (
    [
        "normed_output = self._norm(hidden_states.float())",
        "if self.with_scale:",
        "    normed_output = normed_output * self.weight.float()",
        "return normed_output.type_as(hidden_states)",
    ],
    [
        "mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps",
        "return hidden_states * torch.pow(mean_squared, -0.5)",
    ],
)
MLPS = [
    [
        "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        "return down_proj",
    ],
    [
        "up_states = self.gate_up_proj(hidden_states)",
        "gate, up_states = up_states.chunk(2, dim=-1)",
        "up_states = up_states * self.activation_fn(gate)",
        "return self.down_proj(up_states)",
    ],
    [
        "hidden_states = self.c_fc(hidden_states)",
        "hidden_states = self.act(hidden_states)",
        "hidden_states = self.c_proj(hidden_states)",
        "return hidden_states",
    ],
]
_SHAPES = ["input_shape = hidden_states.shape[:-1]", "hidden_shape = (*input_shape, -1, self.head_dim)"]
_PLAIN = [
    "query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
    "key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
    "value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
]
_NORMED_AT_ONCE = [
    "query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
    "key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
    "value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
]
_NORMED = [*_PLAIN, "query_states = self.q_norm(query_states)", "key_states = self.k_norm(key_states)"]
_NORMED_IN_ROWS = [
    "query_states = self.q_norm(self.q_proj(hidden_states))",
    "key_states = self.k_norm(self.k_proj(hidden_states))",
    "value_states = self.v_proj(hidden_states)",
    "query_states = query_states.view(hidden_shape).transpose(1, 2)",
    "key_states = key_states.view(hidden_shape).transpose(1, 2)",
    "value_states = value_states.view(hidden_shape).transpose(1, 2)",
]
_FUSED = [
    "qkv = self.qkv_proj(hidden_states)",
    "query_pos = self.config.num_attention_heads * self.head_dim",
    "query_states = qkv[..., :query_pos]",
    "key_states = qkv[..., query_pos:query_pos + self.num_key_value_heads * self.head_dim]",
    "value_states = qkv[..., query_pos + self.num_key_value_heads * self.head_dim:]",
    "query_states = query_states.view(hidden_shape).transpose(1, 2)",
    "key_states = key_states.view(hidden_shape).transpose(1, 2)",
    "value_states = value_states.view(hidden_shape).transpose(1, 2)",
]
_ANGLES = ["cos, sin = position_embeddings"]
_ROTATES = ["query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"]
_ATTENDS = [
    "if past_key_values is not None:",
    "    key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)",
    "attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("
    "self.config._attn_implementation, eager_attention_forward)",
    "attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, "
    "attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)",
    "attn_output = attn_output.reshape(*input_shape, -1).contiguous()",
    "attn_output = self.o_proj(attn_output)",
    "return (attn_output, attn_weights)",
]
# Where it projects none itself, keys and values are another layer's; where no values, its keys are these too.
_GEMMA4S = [
    *_ANGLES,
    "query_states = self.q_proj(hidden_states).view(hidden_shape)",
    "query_states = self.q_norm(query_states)",
    "query_states = apply_rotary_pos_emb(query_states, cos, sin, unsqueeze_dim=2)",
    "query_states = query_states.transpose(1, 2)",
    "if self.is_kv_shared_layer:",
    "    key_states, value_states = shared_kv_states[self.layer_type]",
    "else:",
    "    key_states = self.k_proj(hidden_states).view(hidden_shape)",
    "    value_states = "
    "self.v_proj(hidden_states).view(hidden_shape) if self.v_proj is not None else key_states",
    "    key_states = self.k_norm(key_states)",
    "    key_states = apply_rotary_pos_emb(key_states, cos, sin, unsqueeze_dim=2)",
    "    key_states = key_states.transpose(1, 2)",
    "    value_states = self.v_norm(value_states)",
    "    value_states = value_states.transpose(1, 2)",
    *[f"    {line}" for line in _ATTENDS[:2]],
    "if self.store_full_length_kv:",
    "    shared_kv_states[self.layer_type] = (key_states, value_states)",
    *_ATTENDS[2:],
]
PROJECTED = (_PLAIN, _NORMED_AT_ONCE, _NORMED, _NORMED_IN_ROWS, _FUSED)
# What a family's `rotates` says too.
ROTATED_WHERE = {
    "cohere2": "self.sliding_window is not None",
    "exaone4": "self.sliding_window is None or self.is_sliding",
    "smollm3": "self.use_rope",
}


def attentions(family: str) -> list[list[str]]:
    """What an attention of the family may do."""
    if family in SEEING:
        return [[*_SHAPES, *_GEMMA4S]]
    if family not in ROTATED_WHERE:
        return [[*_SHAPES, *projected, *_ANGLES, *_ROTATES, *_ATTENDS] for projected in PROJECTED]
    condition = [f"if {ROTATED_WHERE[family]}:"]
    before = [*_ANGLES, *condition, *indented(_ROTATES)], [*condition, *indented(_ANGLES + _ROTATES)]
    return [[*_SHAPES, *projected, *rotates, *_ATTENDS] for projected in PROJECTED for rotates in before]


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - SEEING))
def test_layers_norm_where_the_names_of_their_norms_say(family: str) -> None:
    text = only(code_of(family), "DecoderLayer")
    text = re.sub(r"self_attn\(.*\)", "self_attn()", text)
    assert text.count("hidden_states * self.residual_multiplier\n") in (0, 2)
    text = text.replace(" * self.residual_multiplier", "")
    # What gives shares as well gives them to nobody.
    text = text.replace("hidden_states, _ = self.mlp(", "hidden_states = self.mlp(")
    assert text.splitlines() in [layer_code(names) for names in NORM_NAMES]


def layer_code(names: NormNames) -> list[str]:
    """What a layer does whose norms are called so, where nothing is multiplied."""
    if not names.before_mlp and not names.after_mlp:
        return PARALLEL
    lines = []
    halves = (
        (names.before_attention, "hidden_states, _ = self.self_attn()", names.after_attention),
        (names.before_mlp, "hidden_states = self.mlp(hidden_states)", names.after_mlp),
    )
    for before, half, after in halves:
        lines.append("residual = hidden_states")
        lines += [f"hidden_states = self.{before}(hidden_states)"] if before else []
        lines.append(half)
        lines += [f"hidden_states = self.{after}(hidden_states)"] if after else []
        lines.append("hidden_states = residual + hidden_states")
    return [*lines, "return hidden_states"]


PARALLEL = [
    "residual = hidden_states",
    "hidden_states = self.input_layernorm(hidden_states)",
    "hidden_states_attention, _ = self.self_attn()",
    "hidden_states_mlp = self.mlp(hidden_states)",
    "hidden_states = residual + hidden_states_attention + hidden_states_mlp",
    "return hidden_states",
]


@pytest.mark.parametrize("family", sorted(SEEING))
def test_gemma_4s_layers_do_what_was_read(family: str) -> None:
    text = only(code_of(family), "TextDecoderLayer")
    text = re.sub(r"self_attn\(.*\)", "self_attn()", text)
    is_unified = family == "gemma4_unified"
    assert text == re.sub(r"if .*\n(    .*\n)+", "", GEMMA4S_LAYER) if is_unified else GEMMA4S_LAYER


GEMMA4S_LAYER = """\
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn()
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.pre_feedforward_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
if self.enable_moe_block:
    hidden_states_1 = self.post_feedforward_layernorm_1(hidden_states)
    hidden_states_flat = residual.reshape(-1, residual.shape[-1])
    _, top_k_weights, top_k_index = self.router(hidden_states_flat)
    hidden_states_2 = self.pre_feedforward_layernorm_2(hidden_states_flat)
    hidden_states_2 = self.experts(hidden_states_2, top_k_index, top_k_weights)
    hidden_states_2 = hidden_states_2.reshape(residual.shape)
    hidden_states_2 = self.post_feedforward_layernorm_2(hidden_states_2)
    hidden_states = hidden_states_1 + hidden_states_2
hidden_states = self.post_feedforward_layernorm(hidden_states)
hidden_states = residual + hidden_states
if self.hidden_size_per_layer_input:
    residual = hidden_states
    hidden_states = self.per_layer_input_gate(hidden_states)
    hidden_states = self.act_fn(hidden_states)
    hidden_states = hidden_states * per_layer_input
    hidden_states = self.per_layer_projection(hidden_states)
    hidden_states = self.post_per_layer_input_norm(hidden_states)
    hidden_states = residual + hidden_states
hidden_states *= self.layer_scalar
return hidden_states"""


def test_gemma_4s_router_is_what_was_read() -> None:
    assert only(code_of("gemma4"), "TextRouter").splitlines() == [
        "hidden_states = self.norm(hidden_states)",
        "hidden_states = hidden_states * self.scale * self.scalar_root_size",
        "expert_scores = self.proj(hidden_states)",
        "router_probabilities = nn.functional.softmax(expert_scores, dim=-1, dtype=torch.float32)",
        "top_k_weights, top_k_index = torch.topk(router_probabilities, k=self.config.top_k_experts, dim=-1)",
        "top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)",
        "top_k_weights = top_k_weights * self.per_expert_scale[top_k_index]",
        "return (router_probabilities, top_k_weights, top_k_index)",
    ]


@pytest.mark.parametrize("family", sorted(SEEING))
def test_nothing_comes_between_gemma_4s_layers(family: str) -> None:
    """But what each layer is given alone, and rows left out where nobody asks for their logits."""
    text = only(code_of(family), "TextModel")
    text = re.sub(r"    hidden_states, .*= self._maybe_slice_kv_shared_inputs\(.*", "", text)
    lines = text.splitlines()
    begin = lines.index("hidden_states = inputs_embeds")
    told = "per_layer_input, " if family == "gemma4" else ""
    embeds = [line for line in lines[:begin] if re.match(r" *(inputs_embeds|per_layer_inputs)\b.*=", line)]
    assert (
        embeds
        == [
            "    inputs_embeds = self.embed_tokens(input_ids)",
            "        per_layer_inputs = self.get_per_layer_inputs(input_ids, inputs_embeds)",
            "    per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)",
        ][: 3 if told else 1]
    )
    in_loop = "per_layer_input = per_layer_inputs[:, :, i, :] if per_layer_inputs is not None else None"
    embedding = "position_embeddings=position_embeddings[self.config.layer_types[i]]"
    mask = "attention_mask=causal_mask_mapping[self.config.layer_types[i]]"
    assert [line for line in lines[begin + 1 : -1] if line.strip()] == [
        "position_embeddings = {}",
        "for layer_type in self.unique_layer_types:",
        "    position_embeddings[layer_type] = self.rotary_emb(hidden_states, position_ids, layer_type)",
        "shared_kv_states = kwargs.pop('shared_kv_states', None)",
        "if not isinstance(shared_kv_states, KVSharingDict):",
        "    shared_kv_states = KVSharingDict(shared_kv_states)",
        "for i, decoder_layer in enumerate(self.layers[:self.config.num_hidden_layers]):",
        "    if i == self.first_kv_shared_layer_idx:",
        *([f"    {in_loop}"] if told else []),
        f"    hidden_states = decoder_layer(hidden_states, {told}shared_kv_states=shared_kv_states, "
        f"{embedding}, {mask}, position_ids=position_ids, past_key_values=past_key_values, **kwargs)",
        "hidden_states = self.norm(hidden_states)",
    ]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - SEEING))
def test_nothing_comes_between_the_layers_of_a_family(family: str) -> None:
    code = code_of(family)
    (name,) = {name for name in code if re.fullmatch(r"[A-Z]\w*Model", name)} - {"Gemma3Model"}
    lines = code[name].splitlines()
    begin = lines.index("hidden_states = inputs_embeds")
    loop, end = lines.index("hidden_states = self.norm(hidden_states)"), len(lines)
    embeds = [line for line in lines if re.match(r" *inputs_embeds\b.*=", line)]
    assert re.match(r" *inputs_embeds(: torch.Tensor)? = self.embed_tokens\(input_ids\)$", embeds[0])
    assert embeds[1:] in ([], ["inputs_embeds = inputs_embeds * self.embedding_multiplier"])
    assert loop + 2 == end
    assert re.match(r"return (Base|Moe)ModelOutputWithPast\(last_hidden_state=hidden_states,", lines[-1])
    assert re.fullmatch(
        rf"({ONE_TABLE}|{TABLES})"
        r"for .*decoder_layer in (enumerate\()?self.layers(\[:self.config.num_hidden_layers\])?\)?:\n"
        r"(    layer_type = self.config.layer_types\[i\]\n)?"  # for the mask
        r"    hidden_states = decoder_layer\(hidden_states, (?=.*attention_mask=).*"
        r"position_embeddings=position_embeddings(?(table)\[self.config.layer_types\[i\]\])[,)].*",
        "\n".join(lines[begin + 1 : loop]),
    )


ONE_TABLE = r"position_embeddings = self.rotary_emb\(hidden_states, (position_ids=)?position_ids\)\n"
TABLES = (
    r"position_embeddings = {}\nfor layer_type in set\(self.config.layer_types\):\n"
    r"    position_embeddings\[layer_type\] = "
    r"self.rotary_emb\(hidden_states, position_ids, (?P<table>layer_type)\)\n"
)


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_experts_are_what_was_read(family: str) -> None:
    lines = (
        only(code_of(family), "Experts").replace("nn.functional", "F").replace("torch.F", "F").splitlines()
    )
    assert lines == EXPERTS_OF_A_MIXTURE
    (made,) = re.findall(r"(@.*)\nclass \w+Experts\(nn.Module\):\n((?:    .*\n|\n)+)", source_of(family))
    decorator, body = made
    assert decorator == "@use_experts_implementation"  # concatenated, not transposed, gated, without biases
    assert re.findall(r"def (\w+)", body) == ["__init__", "forward"]  # gated as the decorator has it
    assert re.findall(r"self\.(\w+) = nn.Parameter", body) == ["gate_up_proj", "down_proj"]


@pytest.mark.parametrize("family", sorted(UNGATED_EXPERTS))
def test_experts_without_gates_are_what_was_read(family: str) -> None:
    lines = only(code_of(family), "Experts").replace("torch.nn.functional", "F").splitlines()
    assert lines == EXPERTS_WITHOUT_GATES
    (made,) = re.findall(r"(@.*)\nclass \w+Experts\(nn.Module\):\n((?:    .*\n|\n)+)", source_of(family))
    decorator, body = made
    assert decorator == "@use_experts_implementation(has_gate=False)"  # not transposed, without biases
    assert re.findall(r"def (\w+)", body) == ["__init__", "forward"]
    assert re.findall(r"self\.(\w+) = nn.Parameter", body) == ["up_proj", "down_proj"]


EXPERTS_OF_A_MIXTURE = [
    "final_hidden_states = torch.zeros_like(hidden_states)",
    "with torch.no_grad():",
    "    expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1)",
    "    expert_mask = expert_mask.permute(2, 1, 0)",
    "    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()",
    "for expert_idx in expert_hit:",
    "    expert_idx = expert_idx[0]",
    "    if expert_idx == self.num_experts:",
    "        continue",
    "    top_k_pos, token_idx = torch.where(expert_mask[expert_idx])",
    "    current_state = hidden_states[token_idx]",
    "    gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)",
    "    current_hidden_states = self.act_fn(gate) * up",
    "    current_hidden_states = F.linear(current_hidden_states, self.down_proj[expert_idx])",
    "    current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]",
    "    final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))",
    "return final_hidden_states",
]


EXPERTS_WITHOUT_GATES = [
    "final_hidden_states = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)",
    "with torch.no_grad():",
    "    expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1)",
    "    expert_mask = expert_mask.permute(2, 1, 0)",
    "    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1)",
    "for expert_idx in expert_hit:",
    "    expert_idx = expert_idx.item()",
    "    top_k_pos, token_idx = torch.where(expert_mask[expert_idx])",
    "    if token_idx.numel() == 0:",
    "        continue",
    "    current_state = hidden_states[token_idx]",
    "    current_hidden_states = F.linear(current_state, self.up_proj[expert_idx])",
    "    current_hidden_states = self.act_fn(current_hidden_states)",
    "    current_hidden_states = F.linear(current_hidden_states, self.down_proj[expert_idx])",
    "    current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]",
    "    final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))",
    "return final_hidden_states.to(hidden_states.dtype)",
]


@pytest.mark.parametrize("family", sorted(ROUTERS | ROUTERS_TELLING_FLOATS))
def test_routers_are_what_was_read(family: str) -> None:
    assert only(code_of(family), "Router").splitlines() == ROUTERS_READ.get(family, ROUTER)


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_mixtures_are_what_was_read(family: str) -> None:
    name = "MLP" if family == "gpt_oss" else "SparseMoeBlock"
    assert only(code_of(family), name).splitlines() in MIXTURES_READ


_MIXED = ["batch_size, sequence_length, hidden_dim = hidden_states.shape"]
_BACK = "reshape(batch_size, sequence_length, hidden_dim)"
_RESHAPED = "hidden_states_reshaped = hidden_states.view(-1, hidden_dim)"
_CHOOSES = "_, routing_weights, selected_experts = self.gate(hidden_states_reshaped)"
_EXPERTS = "self.experts(hidden_states_reshaped, selected_experts, routing_weights)"
MIXTURES_READ = [
    [
        *_MIXED,
        "hidden_states = hidden_states.reshape(-1, hidden_dim)",
        "_, router_scores, router_indices = self.router(hidden_states)",
        "hidden_states = self.experts(hidden_states, router_indices, router_scores)",
        f"hidden_states = hidden_states.{_BACK}",
        "return (hidden_states, router_scores)",
    ],
    [
        *_MIXED,
        _RESHAPED,
        _CHOOSES,
        f"final_hidden_states = {_EXPERTS}",
        f"return final_hidden_states.{_BACK}",
    ],
    [
        *_MIXED,
        "hidden_states = hidden_states.view(-1, hidden_dim)",
        "_, top_k_weights, top_k_index = self.gate(hidden_states)",
        f"final_hidden_states = self.experts(hidden_states, top_k_index, top_k_weights).{_BACK}",
        "return final_hidden_states",
    ],
    [
        *_MIXED,
        "if self.training and self.jitter_noise > 0:",
        "    hidden_states *= torch.empty_like(hidden_states)"
        ".uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)",
        "hidden_states = hidden_states.view(-1, hidden_states.shape[-1])",
        "_, top_k_weights, top_k_index = self.gate(hidden_states)",
        "hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)",
        f"hidden_states = hidden_states.{_BACK}",
        "return hidden_states",
    ],
    [
        *_MIXED,
        _RESHAPED,
        "shared_expert_output = self.shared_expert(hidden_states_reshaped)",
        _CHOOSES,
        f"expert_output = {_EXPERTS}",
        "shared_expert_output = "
        "F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output",
        "expert_output = expert_output + shared_expert_output",
        f"expert_output = expert_output.{_BACK}",
        "return expert_output",
    ],
]
ROUTER = [
    "hidden_states = hidden_states.reshape(-1, self.hidden_dim)",
    "router_logits = F.linear(hidden_states, self.weight)",
    "router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)",
    "router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)",
    "if self.norm_topk_prob:",
    "    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)",
    "router_top_value = router_top_value.to(router_logits.dtype)",
    "router_scores = router_top_value",
    "return (router_logits, router_scores, router_indices)",
]
MIXTRALS_ROUTER = [
    *ROUTER[:2],
    "router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)",
    ROUTER[3],
    ROUTER[5].strip(),
    *ROUTER[7:],
]


# A softmax over those chosen is one over all, normed.
GRANITES_ROUTER = [
    "router_logits = F.linear(hidden_states, self.weight).float()",
    "top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)",
    "top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)",
    "return (router_logits, top_k_weights, top_k_index)",
]
ROUTERS_READ = {
    "mixtral": MIXTRALS_ROUTER,
    "minimax": MIXTRALS_ROUTER,
    "qwen3_5_moe": [*ROUTER[:4], ROUTER[5].strip(), *ROUTER[6:]],
    "granitemoe": GRANITES_ROUTER,
    "granitemoe_swa": GRANITES_ROUTER,
    "granitemoehybrid": GRANITES_ROUTER,
    "granitemoeshared": GRANITES_ROUTER,
    "gpt_oss": [
        "router_logits = F.linear(hidden_states, self.weight, self.bias)",
        "router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)",
        "router_scores = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)",
        ROUTER[-1],
    ],
}


@pytest.mark.parametrize("family", sorted(GROUPED_ROUTERS))
def test_routers_by_groups_are_what_was_read(family: str) -> None:
    assert only(code_of(family), "TopkRouter").splitlines() == GROUPED_ROUTER


def test_deepseek_v2s_router_is_what_was_read() -> None:
    code = only(code_of("deepseek_v2"), "TopkRouter")
    assert re.sub(r"elif .*\n(    .*\n)+", "", code).splitlines() == [
        *GROUPED_ROUTER[:2],
        "scores = router_logits.softmax(dim=-1, dtype=torch.float32)",
        "if self.topk_method == 'greedy':",
        "    topk_weights, topk_indices = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)",
        *GROUPED_ROUTER[-2:],
    ]


GROUPED_ROUTER = [
    "hidden_states = hidden_states.view(-1, self.hidden_dim)",
    "router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))",
    "scores = router_logits.sigmoid()",
    "scores_for_choice = scores + self.e_score_correction_bias",
    "group_scores = scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)"
    ".topk(2, dim=-1)[0].sum(dim=-1)",
    "group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]",
    "group_mask = torch.zeros_like(group_scores)",
    "group_mask.scatter_(1, group_idx, 1)",
    "score_mask = group_mask.unsqueeze(-1)"
    ".expand(-1, self.num_group, self.num_experts // self.num_group).reshape(-1, self.num_experts)",
    "scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float('-inf'))",
    "topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]",
    "topk_weights = scores.gather(1, topk_indices)",
    "if self.norm_topk_prob:",
    "    denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20",
    "    topk_weights /= denominator",
    "topk_weights = topk_weights * self.routed_scaling_factor",
    "return (router_logits, topk_weights, topk_indices)",
]


@pytest.mark.parametrize("family", sorted(LIMITED_EXPERTS))
def test_limited_experts_are_what_was_read(family: str) -> None:
    code = code_of(family)
    loop = only(code, "Experts").splitlines()
    assert loop[-7:] == [
        "    current_state = hidden_states[token_idx]",
        "    gate_up = current_state @ self.gate_up_proj[expert_idx] + self.gate_up_proj_bias[expert_idx]",
        "    gated_output = self._apply_gate(gate_up)",
        "    out = gated_output @ self.down_proj[expert_idx] + self.down_proj_bias[expert_idx]",
        "    weighted_output = out * routing_weights[token_idx, top_k_pos, None]",
        "    next_states.index_add_(0, token_idx, weighted_output.to(hidden_states.dtype))",
        "return next_states",
    ]
    assert code["_apply_gate"].splitlines() == [
        "gate, up = (gate_up[..., ::2], gate_up[..., 1::2])",
        "gate = gate.clamp(min=None, max=self.limit)",
        "up = up.clamp(min=-self.limit, max=self.limit)",
        "glu = gate * torch.sigmoid(gate * self.alpha)",
        "gated_output = (up + 1) * glu",
        "return gated_output",
    ]
    assert (
        "@use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)"
        in source_of(family)
    )


def source_of(family: str) -> str:
    spec = find_spec(f"transformers.models.{family}.modeling_{family}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


@pytest.mark.parametrize("family", sorted(PROJECTIONS.union(FAMILIES, EXPERTS)))
def test_no_familys_code_reads_a_projections_weights(family: str) -> None:
    """Only calls of a replaced module give what the original's give: of its weights the dtype is left.

    What recurrent layers of transformers compute is computed by ours; embeddings are not replaced so.
    """
    source = source_of(family)
    for name in KINDS:
        source = re.sub(
            rf"^class {name}\(.*?(?=^(?:class|def|@))", "", source, flags=re.MULTILINE | re.DOTALL
        )
    assert "experts.gate_up_proj" not in source and "experts.down_proj" not in source
    reads = re.findall(rf"self\.(?!weight|bias){READ_OF}.*", source)
    assert reads == []


READ_OF = r"(?!\w*embed)\w+(?:\[\w+\])?\.(?:weight(?!\.dtype|\.device)|bias)\b"


def test_our_recurrent_layers_read_no_other_projections_weights() -> None:
    source = Path(mixer_kinds.__file__).read_text()
    assert {name.partition(".")[0] for name in re.findall(READ_OF, source)} == READ


LATENT_FAMILIES = {
    "deepseek_v2": ("DeepseekV2", Pairing.NEIGHBOURS),
    "deepseek_v3": ("DeepseekV3", Pairing.AS_CONFIGURED),
    "glm4_moe_lite": ("Glm4MoeLite", Pairing.AS_CONFIGURED),
    "kimi_linear": ("KimiLinear", Pairing.NONE),
    "minicpm3": ("MiniCPM3", Pairing.HALVES),
    "youtu": ("Youtu", Pairing.AS_CONFIGURED),
}
_INTERLEAVED = "apply_rotary_pos_emb_interleave(q_rot, k_rot, cos, sin)"
_HALVED = "apply_rotary_pos_emb(q_rot, k_rot, cos, sin)"
LATENT_ROTATED = {
    Pairing.NONE: [],
    Pairing.HALVES: ["cos, sin = position_embeddings", f"q_rot, k_rot = {_HALVED}"],
    Pairing.NEIGHBOURS: [
        "q_rot, k_rot = apply_rotary_emb(q_rot, k_rot, position_embeddings.to(q_rot.device))"
    ],
    Pairing.AS_CONFIGURED: [
        "cos, sin = position_embeddings",
        "if self.config.rope_interleave:",
        f"    q_rot, k_rot = {_INTERLEAVED}",
        "else:",
        f"    q_rot, k_rot = {_HALVED}",
    ],
}


def test_all_latent_attentions_are_named() -> None:
    assert {f"{name}Attention": how for name, how in LATENT_FAMILIES.values()} == LATENT_ATTENTIONS


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attentions_are_what_was_read(family: str) -> None:
    name, pairing = LATENT_FAMILIES[family]
    code = code_of(family)
    text = code[f"{name}Attention"]
    for theirs, ours in (
        (r"\bq\b", "q_states"),
        (r"\b([qk])_pe\b", r"\1_rot"),
        (r"\bq_nope\b", "q_pass"),
        (r"\bkv_pass\b", "kv_nope"),
        (r"\bk_(pass|nope)\b", "kv_nope"),
        (r"layernorm\(kv_nope\)\.view", "layernorm(kv_nope)\nkv_nope = kv_nope.view"),
    ):
        text = re.sub(theirs, ours, text)
    is_turned = pairing is not Pairing.NONE
    assert text.splitlines() == [
        "batch_size, seq_length = hidden_states.shape[:-1]",
        "query_shape = (batch_size, seq_length, -1, self.qk_head_dim)",
        "if self.q_lora_rank is None:",
        "    q_states = self.q_proj(hidden_states)",
        "else:",
        "    q_states = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))",
        f"{'q' if is_turned else 'query'}_states = q_states.view(query_shape).transpose(1, 2)",
        *["q_pass, q_rot = torch.split(q_states, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)"]
        * is_turned,
        "compressed_kv = self.kv_a_proj_with_mqa(hidden_states)",
        "kv_nope, k_rot = torch.split(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)",
        "kv_nope = self.kv_a_layernorm(kv_nope)",
        "kv_nope = kv_nope.view(batch_size, 1, seq_length, self.kv_lora_rank)",
        "k_rot = k_rot.view(batch_size, 1, seq_length, self.qk_rope_head_dim)",
        *LATENT_ROTATED[pairing],
        "if past_key_values is not None:",
        "    kv_nope, k_rot = past_key_values.update(kv_nope, k_rot, self.layer_idx)",
        *["query_states = torch.cat((q_pass, q_rot), dim=-1)"] * is_turned,
        "key_states, value_states = self.expand_kv(kv_nope, k_rot)",
        "attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("
        "self.config._attn_implementation, eager_attention_forward)",
        "attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, "
        "attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)",
        "attn_output = attn_output.reshape(batch_size, seq_length, -1).contiguous()",
        "attn_output = self.o_proj(attn_output)",
        "return (attn_output, attn_weights)",
    ]
    for turn, lines in LATENT_TURNS.items():
        if f" {turn}(" in text:
            assert code[turn].splitlines() == lines


LATENT_TURNS = {
    "apply_rotary_pos_emb_interleave": [
        "cos = cos[..., :cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)",
        "sin = sin[..., :sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)",
        "q1, q2 = (q[..., 0::2], q[..., 1::2])",
        "k1, k2 = (k[..., 0::2], k[..., 1::2])",
        "q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)",
        "k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)",
        "return (q_embed, k_embed)",
    ],
    "apply_rotary_pos_emb": [
        "cos = cos.unsqueeze(unsqueeze_dim)",
        "sin = sin.unsqueeze(unsqueeze_dim)",
        "q_embed = q * cos + rotate_half(q) * sin",
        "k_embed = k * cos + rotate_half(k) * sin",
        "return (q_embed, k_embed)",
    ],
    "apply_rotary_emb": [
        "xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))",
        "xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))",
        "freqs_cis = freqs_cis.unsqueeze(1).to(xq_.device)",
        "xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3).type_as(xq)",
        "xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3).type_as(xk)",
        "return (xq_out, xk_out)",
    ],
}
