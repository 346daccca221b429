"""Which family's calls a chat template asks the model for."""

from __future__ import annotations

from server.api.tools.family import ToolFamily
from server.api.tools.hermes import HERMES
from server.api.tools.llama import LLAMA
from server.api.tools.mistral import MISTRAL

_FAMILIES = (MISTRAL, HERMES, LLAMA)
# The same marks around something other than JSON.
_OTHER_FORMATS = ("<function=", "<arg_key>", "[ARGS]")


def family_of(template: str) -> ToolFamily | None:
    """The family of a template that takes tools; None if its calls are written in no format known here."""
    if any(sign in template for sign in _OTHER_FORMATS):
        return None
    found = (family for family in _FAMILIES if any(sign in template for sign in family.signs))
    return next(found, None)
