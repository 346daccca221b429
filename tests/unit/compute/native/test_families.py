"""The installed transformers still computes what the kernels do in every family that is said to."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.compute.native.families import PLAIN, PROJECTIONS, WHOLE


@cache
def code_of(family: str) -> dict[str, str]:
    """What each function and each class's `forward` in the family's file does, by name."""
    spec = find_spec(f"transformers.models.{family}.modeling_{family}")
    assert spec is not None and spec.origin is not None
    found = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in functions:
            if isinstance(function, ast.FunctionDef) and (
                function.name == "forward" or not isinstance(node, ast.ClassDef)
            ):
                found[node.name if isinstance(node, ast.ClassDef) else function.name] = bare(function)
    return found


def bare(function: ast.FunctionDef) -> str:
    """Its statements without types and docstrings, and without the window, which is seen when it runs."""
    statements = [
        line
        for line in function.body
        if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    text = "\n".join(map(ast.unparse, statements))
    text = re.sub(r"attention_interface: Callable =", "attention_interface =", text)
    return re.sub(r", sliding_window=(getattr\([^)]*\)|[\w.]+)", "", text)


def only(code: dict[str, str], ending: str) -> str:
    (found,) = {text for name, text in code.items() if re.fullmatch(rf"[A-Z]\w*{ending}", name)}
    return found


@pytest.mark.parametrize("family", sorted(WHOLE))
def test_a_family_is_llama_or_qwen3_in_all_but_name(family: str) -> None:
    code, llama, qwen3 = code_of(family), code_of("llama"), code_of("qwen3")
    assert only(code, "Attention") in (only(llama, "Attention"), only(qwen3, "Attention"))
    assert only(code, "RMSNorm") == only(llama, "RMSNorm")
    for name in ("apply_rotary_pos_emb", "rotate_half"):
        assert code[name] == llama[name]
    if family != "mixtral":  # whose experts are computed together
        assert only(code, "MLP") == only(llama, "MLP")


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_nothing_comes_between_the_parts_of_a_plain_family(family: str) -> None:
    code = code_of(family)
    assert only(code, "DecoderLayer") == only(code_of("llama"), "DecoderLayer")
    lines = code[f"{family.capitalize()}Model"].splitlines()
    begin = lines.index("hidden_states = inputs_embeds")
    loop, end = lines.index("hidden_states = self.norm(hidden_states)"), len(lines)
    assert re.match(r" *inputs_embeds(: torch.Tensor)? = self.embed_tokens\(input_ids\)$", lines[3])
    assert loop + 2 == end and lines[-1].startswith(
        "return BaseModelOutputWithPast(last_hidden_state=hidden_states,"
    )
    assert re.fullmatch(
        r"position_embeddings = self.rotary_emb\(hidden_states, (position_ids=)?position_ids\)\n"
        r"for .*decoder_layer in (enumerate\()?self.layers\[:self.config.num_hidden_layers\]\)?:\n"
        r"    hidden_states = decoder_layer\(hidden_states, attention_mask=.*\)",
        "\n".join(lines[begin + 1 : loop]),
    )


def test_a_plain_layer_is_what_was_read() -> None:
    text = re.sub(r"self_attn\(.*\)", "self_attn()", only(code_of("llama"), "DecoderLayer"))
    assert text.splitlines() == [
        "residual = hidden_states",
        "hidden_states = self.input_layernorm(hidden_states)",
        "hidden_states, _ = self.self_attn()",
        "hidden_states = residual + hidden_states",
        "residual = hidden_states",
        "hidden_states = self.post_attention_layernorm(hidden_states)",
        "hidden_states = self.mlp(hidden_states)",
        "hidden_states = residual + hidden_states",
        "return hidden_states",
    ]


def test_llama_and_qwen3_are_what_was_read() -> None:
    """Should these fail: read the new code, then the kernels, then write it down here."""
    llama, qwen3 = code_of("llama"), code_of("qwen3")
    plain = only(llama, "Attention")
    for name in ("q", "k"):
        plain = plain.replace(
            f"self.{name}_proj(hidden_states).view(hidden_shape)",
            f"self.{name}_norm(self.{name}_proj(hidden_states).view(hidden_shape))",
        )
    assert plain == only(qwen3, "Attention")
    assert only(llama, "MLP").splitlines() == [
        "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        "return down_proj",
    ]
    assert llama["apply_rotary_pos_emb"].splitlines()[2:4] == [
        "q_embed = q * cos + rotate_half(q) * sin",
        "k_embed = k * cos + rotate_half(k) * sin",
    ]


@pytest.mark.parametrize("family", sorted(WHOLE | PROJECTIONS))
def test_no_familys_code_reads_a_projections_weights(family: str) -> None:
    """Only calls of a replaced module give what the original's give: its weights are gone."""
    spec = find_spec(f"transformers.models.{family}.modeling_{family}")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    reads = re.findall(r"self\.(?!weight|bias)\w+(?:\[\w+\])?\.(?:weight|bias)\b.*", source)
    assert reads == []
