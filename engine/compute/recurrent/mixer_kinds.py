"""The families of recurrent layers: what of a layer is projected, kept, mixed and put out again.

Attributes are those of transformers' classes. What a projection gives is in the model's dtype, as there; what
tokens meet in is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compute.recurrent.delta_rule import delta_scan, gated_delta, unit_keys
from engine.compute.recurrent.pass_rows import PassRows
from engine.compute.recurrent.slot_states import LayerSlots, LayerState
from engine.compute.recurrent.slot_step import take
from engine.compute.recurrent.state_kernel import (
    DeltaInputs,
    GatedDelta,
    GatedStructured,
    SelectiveInputs,
    StructuredInputs,
)
from engine.compute.recurrent.state_space import (
    diagonal_scan,
    gated_structured,
    selective_scan,
    shifted,
    structured_scan,
)
from engine.compute.recurrent.wkv import previous_scan, wkv_scan
from engine.compute.steady_numbers import alike, in_blocks, steady_product


def _alone(_layer: Any, output: Tensor) -> Tensor:
    return output[None]


def _with_nothing(_layer: Any, output: Tensor) -> tuple[Tensor, None]:
    return output[None], None


class Kind(NamedTuple):
    """How a class of layers works on N new tokens, of which the pass makes M rows to mix.

    `state` says what it keeps; `project` gives each new token's row, [N, row_width], and whatever else
    `finish` needs; `mix` is given these rows behind those that slots keep and gives [M, ...]; `finish` makes
    [N, hidden] of the new ones, and `give` of these what the layer is expected to return.
    """

    state: Callable[[Any], LayerState]
    project: Callable[[Any, Tensor], tuple[Tensor, Any]]
    mix: Callable[[Any, PassRows, LayerSlots], Tensor]
    finish: Callable[[Any, Tensor, Any], Tensor]
    give: Callable[[Any, Tensor], Any] = _alone


def _heads(rows: Tensor, num_heads: int) -> Tensor:
    """[M, width] as [M, heads, width of each]."""
    return rows.reshape(len(rows), num_heads, -1)


# --- Mamba ---


def _mamba_state(layer: Any) -> LayerState:
    shape = (layer.intermediate_size, layer.ssm_state_size)
    return LayerState(-1, layer.intermediate_size, layer.conv_kernel_size - 1, shape)


def _mamba_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    inputs, gate = layer.in_proj(hidden).chunk(2, dim=-1)  # [N, channels]
    return inputs, gate


def _mamba_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    inputs, _ = rows.convolved(layer.conv1d)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    steps, b, c = layer.x_proj(inputs).split(sizes, dim=-1)
    if hasattr(layer, "dt_layernorm"):
        steps, b, c = layer.dt_layernorm(steps), layer.b_layernorm(b), layer.c_layernorm(c)
    steps = steady_product(steps, layer.dt_proj.weight).float() + layer.dt_proj.bias.float()
    rates = -torch.exp(layer.A_log.float())  # [channels, state]
    inputs = inputs.float()
    given = SelectiveInputs(inputs, alike(F.softplus, steps), rates, b.float(), c.float())
    return selective_scan(given, slots).addcmul_(inputs, layer.D.float())


def _mamba_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = layer.out_proj((mixed * alike(F.silu, gate.float())).to(gate.dtype))
    return output


# --- Mamba in heads, each with projections of its own (Zamba) ---


def _zamba_state(layer: Any) -> LayerState:
    shape = (layer.n_mamba_heads, layer.mamba_head_dim, layer.ssm_state_size)
    return LayerState(-1, layer.intermediate_size, layer.conv_kernel_size - 1, shape)


def _zamba_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    projected = layer.in_proj(hidden).view(len(hidden), -1, 2)  # a channel's input and gate side by side
    return projected[..., 0], projected[..., 1]


def _zamba_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    inputs = _heads(rows.convolved(layer.conv1d)[0], layer.n_mamba_heads)
    output = torch.empty_like(inputs, dtype=torch.float32)  # [M, heads, dim]
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    for head, fed in enumerate(inputs.unbind(1)):
        steps, b, c = torch.split(steady_product(fed, layer.x_proj_weight[head]), sizes, dim=-1)
        steps = steady_product(steps, layer.dt_proj_weight[head]).float() + layer.dt_proj_bias[head].float()
        rates = -torch.exp(layer.A_log[head].float())
        own = replace(slots, state=slots.state[:, head])
        given = SelectiveInputs(fed.float(), alike(F.softplus, steps), rates, b.float(), c.float())
        output[:, head] = selective_scan(given, own).addcmul_(fed.float(), layer.D[head].float())
    return output.flatten(1)


# --- Mamba 2 ---


def _mamba2_state(layer: Any) -> LayerState:
    shape = (layer.num_heads, layer.head_dim, layer.ssm_state_size)
    return LayerState(-1, layer.conv_dim + layer.num_heads, layer.conv_kernel_size - 1, shape)


def _mamba2_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if hasattr(layer, "mup_vector"):  # Falcon-H1
        projected = layer.in_proj(hidden * layer.ssm_in_multiplier) * layer.mup_vector.flatten()
    else:
        projected = layer.in_proj(hidden)
    gate, rows = projected.split([layer.intermediate_size, layer.conv_dim + layer.num_heads], dim=-1)
    return rows, gate


def _mamba2_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    convolved = rows.convolved(layer.conv1d)
    if rows.convolved_whole is not None:
        sizes = layer.head_dim, layer.n_groups, layer.ssm_state_size, layer.time_step_limit
        given = GatedStructured(rows.convolved_whole, layer.A_log, layer.dt_bias, layer.D, *sizes)
        if (output := gated_structured(given, slots)) is not None:
            return output.flatten(1)
    inputs, steps = (part.float() for part in convolved)  # the latter [M, heads]
    shared = layer.n_groups * layer.ssm_state_size
    inputs, b, c = torch.split(inputs, [layer.intermediate_size, shared, shared], dim=-1)
    inputs = _heads(inputs, layer.num_heads)
    b, c = (gates.reshape(-1, layer.n_groups, layer.ssm_state_size) for gates in (b, c))
    steps = alike(F.softplus, steps + layer.dt_bias.float()).clamp(*layer.time_step_limit)
    logs = steps * -torch.exp(layer.A_log.float())
    output = structured_scan(StructuredInputs(steps[:, :, None] * inputs, logs, b, c), slots)
    return output.addcmul_(inputs, layer.D.float()[:, None]).flatten(1)


def _mamba2_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    has_norm = getattr(layer, "mamba_rms_norm", True)  # Falcon-H1 may have none
    gated = layer.norm(mixed, gate) if has_norm else mixed * alike(F.silu, gate)
    output: Tensor = layer.out_proj(gated.to(gate.dtype))
    return output


# --- gated delta nets ---


def _delta_state(layer: Any) -> LayerState:
    shape = (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return LayerState(-1, layer.conv_dim + 2 * layer.num_v_heads, layer.conv_kernel_size - 1, shape)


def _delta_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if hasattr(layer, "in_proj_together"):
        return layer.in_proj_together(hidden), layer.in_proj_z(hidden)
    parts = (layer.in_proj_qkv(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden))
    return torch.cat(parts, dim=-1), layer.in_proj_z(hidden)


def _delta_project_together(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-Next's, whose heads lie side by side."""
    projected = layer.in_proj_qkvz(hidden)[None], layer.in_proj_ba(hidden)[None]
    query, key, value, z, b, a = (
        part[0].flatten(1) for part in layer.fix_query_key_value_ordering(*projected)
    )
    return torch.cat((query, key, value, b, a), dim=-1), z


def _delta_project_apart(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj")
    return torch.cat([getattr(layer, name)(hidden) for name in names], dim=-1), layer.g_proj(hidden)


def _delta_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    mixed, gates = rows.convolved(layer.conv1d)
    most = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
    if rows.convolved_whole is not None:
        sizes = layer.num_k_heads, layer.head_k_dim, layer.head_v_dim, most
        given = GatedDelta(rows.convolved_whole, layer.A_log, layer.dt_bias, *sizes)
        if (output := gated_delta(given, slots)) is not None:
            return output
    query, key, value = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    query, key = (unit_keys(_heads(part, layer.num_k_heads)) for part in (query, key))
    beta, steps = gates.chunk(2, dim=-1)
    beta = alike(torch.sigmoid, beta).float() * most
    logs = -layer.A_log.float().exp() * alike(F.softplus, steps.float() + layer.dt_bias.float())
    value = _heads(value.float(), layer.num_v_heads)
    inputs = DeltaInputs(query * layer.head_k_dim**-0.5, key, value, logs[..., None], beta)
    return delta_scan(inputs, slots).to(mixed.dtype)


def _delta_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    normed = layer.norm(mixed.flatten(0, 1), gate.reshape(-1, layer.head_v_dim))
    output: Tensor = layer.out_proj(normed.view(len(mixed), -1))
    return output


def _delta_finish_apart(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    normed = layer.o_norm(mixed.flatten(0, 1), gate.reshape(-1, layer.head_v_dim))
    output: Tensor = layer.o_proj(normed.view(len(mixed), -1))
    return output


def _kimi_state(layer: Any) -> LayerState:
    shape = (layer.num_heads, layer.head_dim, layer.head_dim)
    row_width = layer.conv_dim + layer.qkv_dim + layer.num_heads
    return LayerState(-1, row_width, layer.conv_kernel_size - 1, shape)


def _kimi_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    forget = layer.forget_gate
    rows = [layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)]
    rows += [forget.f_b_proj(forget.f_a_proj(hidden)), layer.b_proj(hidden)]
    return torch.cat(rows, dim=-1), layer.g_b_proj(layer.g_a_proj(hidden))


def _bailing_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    names = ("q_proj", "k_proj", "v_proj", "forget_gate.f_proj", "b_proj")
    return torch.cat([layer.get_submodule(name)(hidden) for name in names], dim=-1), layer.g_proj(hidden)


def _kimi_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    mixed, gates = rows.convolved(layer.conv1d)
    query, key, value = (_heads(part, layer.num_heads) for part in mixed.chunk(3, dim=-1))
    steps, beta = torch.split(gates, [layer.qkv_dim, layer.num_heads], dim=-1)
    forget = layer.forget_gate
    steps = _heads(steps.float() + forget.dt_bias.float(), layer.num_heads)
    rates = forget.A_log.float().exp().view(1, -1, 1)
    if getattr(forget, "safe_gate", False):
        logs = forget.lower_bound * alike(torch.sigmoid, rates * steps)
    else:
        logs = -rates * alike(F.softplus, steps)
    query = unit_keys(query) * layer.head_dim**-0.5
    inputs = DeltaInputs(query, unit_keys(key), value, logs, alike(torch.sigmoid, beta).float())
    return delta_scan(inputs, slots).to(mixed.dtype)


def _kimi_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    normed = layer.o_norm(mixed, gate.view_as(mixed))
    output: Tensor = layer.o_proj(normed.flatten(1))
    return output


# --- short convolutions ---


def _conv_state(layer: Any) -> LayerState:
    return LayerState(-1, layer.conv.in_channels, layer.conv_kernel_size - 1, (0,))


def _conv_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    b, c, inputs = layer.in_proj(hidden).chunk(3, dim=-1)
    return b * inputs, c


def _conv_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    return rows.convolved(layer.conv, activated=False)[0]


def _conv_finish(layer: Any, mixed: Tensor, c: Tensor) -> Tensor:
    output: Tensor = layer.out_proj(c * mixed)
    return output


# --- convolutions before attention (Zaya), which gets queries, keys and values ---


def _zaya_state(layer: Any) -> LayerState:
    row_width = layer.conv_qk_depthwise.in_channels + layer.v_proj_delayed.out_features
    return LayerState(-1, row_width, layer.conv_kernel_size, (0,))


def _zaya_project(layer: Any, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    query, key = layer.q_proj(hidden), layer.k_proj(hidden)
    each = layer.num_key_value_groups
    keys = key.view(len(hidden), -1, layer.head_dim).repeat_interleave(each, 1)
    mean = (query.view_as(keys) + keys) * 0.5  # [N, heads, dim]
    kept = mean, mean.unflatten(1, (-1, each)).mean(2), layer.v_proj_current(hidden)
    return torch.cat((query, key, layer.v_proj_delayed(hidden)), dim=-1), kept


def _zaya_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    step, channels, extended = slots.step, layer.conv_qk_depthwise.in_channels, rows.extended
    mixed = layer.conv_qk_grouped(layer.conv_qk_depthwise(extended[:, :channels].T[None]))[0].T
    delayed = take(extended[:, channels:], shifted(step.mixed, 1))
    if layer.v_proj_delayed.bias is not None:  # before a sequence there is a token of zeros
        nothing = layer.v_proj_delayed.bias.expand(len(step.begins), -1)
        delayed = delayed.index_copy(0, step.begins, nothing)
    return torch.cat((take(mixed, shifted(step.mixed, layer.conv_kernel_size)), delayed), dim=-1)


def _zaya_finish(layer: Any, mixed: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    mean, key_mean, value = kept
    residual = torch.cat((mean.flatten(1), key_mean.flatten(1)), dim=-1)
    states, delayed = torch.split(mixed, [residual.shape[1], value.shape[1]], dim=-1)
    return torch.cat((states + residual, value, delayed), dim=-1)


def _in_heads(layer: Any, output: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, each [1, N, heads, dim]."""
    sizes = [layer.num_attention_heads, layer.num_key_value_heads, layer.num_key_value_heads]
    return torch.split(output.view(1, len(output), -1, layer.head_dim), sizes, dim=2)


# --- lightning attention ---


def _lightning_state(layer: Any) -> LayerState:
    heads, dim = layer.num_attention_heads, layer.head_dim
    return LayerState(-1, 3 * heads * dim, 0, (heads, dim, dim))


def _lightning_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return layer.act_fn(layer.qkv_proj(hidden)), layer.output_gate(hidden)


def _lightning_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    heads = _heads(rows.mixed, layer.num_attention_heads)
    query, key, value = heads.chunk(3, dim=-1)  # [M, heads, dim]
    logs = -layer.slope_rate.float().view(1, -1).expand(len(heads), -1)
    mixed = structured_scan(StructuredInputs(value, logs, key, query), slots)
    return mixed.flatten(1).to(rows.mixed.dtype)


def _lightning_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = layer.out_proj(alike(torch.sigmoid, gate) * layer.norm(mixed))
    return output


# --- RWKV: a block's second half reads of the token before what the first half made, so both are mixed ---


def _rwkv_state(block: Any) -> LayerState:
    width = block.config.hidden_size
    return LayerState(-1, 2 * width, 1, (3 * block.attention.attention_hidden_size + width,))


def _rwkv_project(block: Any, hidden: Tensor) -> tuple[Tensor, None]:
    hidden = block.pre_ln(hidden) if hasattr(block, "pre_ln") else hidden
    return torch.cat((block.ln1(hidden), hidden), dim=-1), None


def _rwkv_mix(block: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    attention, feed_forward = block.attention, block.feed_forward
    normed, hidden = rows.mixed.chunk(2, dim=-1)
    before = take(rows.extended, shifted(slots.step.mixed, 1)).chunk(2, dim=-1)[0]
    size = 3 * attention.attention_hidden_size
    sums = replace(slots, state=slots.state[:, :size].view(len(slots.state), 3, -1))

    def between(part: Any, name: str, before: Tensor, now: Tensor) -> Tensor:
        """`part`'s projection `name` of a token and the one before it."""
        share = getattr(part, f"time_mix_{name}").view(-1)
        projected: Tensor = getattr(part, name)(now * share + before * (1 - share))
        return projected

    keys, values = (between(attention, name, before, normed).float() for name in ("key", "value"))
    decay = -torch.exp(attention.time_decay.float())
    mixed = wkv_scan(keys, values, decay, attention.time_first.float(), sums).to(hidden.dtype)
    gate = alike(torch.sigmoid, between(attention, "receptance", before, normed))
    hidden = hidden + attention.output(gate * mixed)
    normed = block.ln2(hidden)
    before = previous_scan(normed.float(), replace(slots, state=slots.state[:, size:])).to(hidden.dtype)
    fed = between(feed_forward, "key", before, normed).relu().square()
    gate = alike(torch.sigmoid, between(feed_forward, "receptance", before, normed))
    output: Tensor = hidden + gate * feed_forward.value(fed)
    return output


def _with_two_nothings(_block: Any, output: Tensor) -> tuple[Tensor, None, None]:
    return output[None], None, None


# --- RG-LRU ---


def _lru_state(layer: Any) -> LayerState:
    return LayerState(-1, layer.lru_width, layer.conv1d_width - 1, (layer.lru_width,))


def _lru_project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return layer.linear_x(hidden), layer.act_fn(layer.linear_y(hidden))


def _lru_mix(layer: Any, rows: PassRows, slots: LayerSlots) -> Tensor:
    inputs, lru = rows.convolved(layer.conv_1d, activated=False)[0], layer.rg_lru
    heads = _heads(inputs, lru.num_attention_heads).transpose(0, 1)  # [heads, M, width]

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        gates = in_blocks(lambda block: torch.baddbmm(bias[:, None], block, weight), heads)
        return alike(torch.sigmoid, gates.transpose(0, 1).flatten(1))

    logs = -8.0 * gate(lru.recurrent_gate_weight, lru.recurrent_gate_bias) * F.softplus(lru.recurrent_param)
    scale = (1 - torch.exp(2 * logs)).sqrt().index_fill_(0, slots.step.begins, 1.0)  # first tokens come whole
    fed = inputs * gate(lru.input_gate_weight, lru.input_gate_bias) * scale.to(inputs.dtype)
    return diagonal_scan(fed.float(), torch.exp(logs).float(), slots).to(inputs.dtype)


def _lru_finish(layer: Any, mixed: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = layer.linear_out(mixed * gate)
    return output


_MAMBA = Kind(_mamba_state, _mamba_project, _mamba_mix, _mamba_finish)
_MAMBA2 = Kind(_mamba2_state, _mamba2_project, _mamba2_mix, _mamba2_finish)
_DELTA = Kind(_delta_state, _delta_project, _delta_mix, _delta_finish)
_KIMI = Kind(_kimi_state, _kimi_project, _kimi_mix, _kimi_finish)
_CONV = Kind(_conv_state, _conv_project, _conv_mix, _conv_finish)
# By the names of transformers' classes.
KINDS = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _MAMBA),
    "ZambaMambaMixer": Kind(_zamba_state, _zamba_project, _zamba_mix, _mamba_finish),
    **dict.fromkeys(("Mamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer"), _MAMBA2),
    **dict.fromkeys(("NemotronHMamba2Mixer", "FalconH1Mixer", "Zamba2MambaMixer"), _MAMBA2),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    "Qwen3NextGatedDeltaNet": _DELTA._replace(project=_delta_project_together),
    "OlmoHybridGatedDeltaNet": _DELTA._replace(project=_delta_project_apart, finish=_delta_finish_apart),
    "BailingHybridDeltaAttention": _KIMI._replace(project=_bailing_project),
    "KimiLinearDeltaAttention": _KIMI,
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _CONV),
    "RwkvBlock": Kind(
        _rwkv_state, _rwkv_project, _rwkv_mix, lambda _, mixed, __: mixed, give=_with_two_nothings
    ),
    "ZayaCCAProjection": Kind(_zaya_state, _zaya_project, _zaya_mix, _zaya_finish, give=_in_heads),
    "MiniMaxLightningAttention": Kind(
        _lightning_state, _lightning_project, _lightning_mix, _lightning_finish, give=_with_nothing
    ),
    "RecurrentGemmaRecurrentBlock": Kind(_lru_state, _lru_project, _lru_mix, _lru_finish, give=_with_nothing),
}
