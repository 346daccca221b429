"""What a pass under way was told, for layers that their model does not hand its keywords on to."""

from __future__ import annotations

from typing import Any

from torch import nn

# Their decoder layers take the keywords and call them without.
_UNTOLD = frozenset({"NemotronAttention", "StableLmAttention"})
_NAME = "slipstream_pass"
_MARK = "slipstream_hands_on"
_PREFIX = "slipstream_"


class PassKeywords:
    """Our keywords of the pass of a model that is under way; none between passes."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def begin(self, _model: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        """Before the model's forward pass."""
        self.held = {name: value for name, value in options.items() if name.startswith(_PREFIX)}

    def end(self, *_: Any) -> None:
        """After it, also where it failed."""
        self.held = {}

    def tell(self, _layer: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before a layer that would not hear of them."""
        return args, options | self.held


def keywords_of(model: nn.Module) -> PassKeywords:
    """Those of `model`, the same at every call."""
    held: PassKeywords | None = getattr(model, _NAME, None)
    if held is None:
        held = PassKeywords()
        setattr(model, _NAME, held)
        model.register_forward_pre_hook(held.begin, with_kwargs=True)
        model.register_forward_hook(held.end, always_call=True)
    return held


def hand_on_keywords(model: nn.Module) -> None:
    """Have every attention layer of `model` hear of a pass; a second call changes nothing."""
    layers = [layer for layer in model.modules() if type(layer).__name__ in _UNTOLD]
    if not layers or hasattr(model, _MARK):
        return
    setattr(model, _MARK, True)
    held = keywords_of(model)
    for layer in layers:
        layer.register_forward_pre_hook(held.tell, with_kwargs=True)
