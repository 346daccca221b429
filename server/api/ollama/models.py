"""Ollama's accounts of the one model there is: how it is called, what it can do, how long its context is."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from server.api.openai.models import check_embedding_model, check_model
from server.http.context import ServerContext

Json = dict[str, Any]

_LATEST = ":latest"
_FAMILY = "slipstream"  # Ollama's clients look for the context's length under this name
_NEVER = "2318-01-01T00:00:00Z"  # as Ollama writes that a model stays loaded


def served_name(context: ServerContext, name: str | None) -> str:
    """The name that the server has for what a client calls `name`. Raises ApiError (404)."""
    if name is None:
        return context.served_names[0]
    plain = name.removesuffix(_LATEST)
    found = name if name in context.served_names or plain not in context.served_names else plain
    check_model(context, found)
    return found


def embedding_name(context: ServerContext, name: str | None) -> str:
    """The same of an embedding model. Raises ApiError (400 or 404)."""
    plain = None if name is None else name.removesuffix(_LATEST)
    return check_embedding_model(context, plain if plain in context.embedding_names else name)


def known_name(context: ServerContext, name: str | None) -> str:
    """The same of any model that is listed. Raises ApiError (404)."""
    plain = None if name is None else name.removesuffix(_LATEST)
    embedder = next((each for each in context.embedding_names if each in (name, plain)), None)
    if name is None and not context.generator_names:
        embedder = context.embedding_names[0]
    return embedder or served_name(context, name)


def tagged(name: str) -> str:
    """A served name as Ollama lists it, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def model_row(context: ServerContext, name: str) -> Json:
    """One entry of /api/tags. The size of the weights is not known here."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _started(context),
        "size": 0,
        "digest": sha256(context.settings.model.model.encode()).hexdigest(),
        "details": _details(context),
    }


def running_row(context: ServerContext, name: str) -> Json:
    """One entry of /api/ps."""
    row = model_row(context, name)
    del row["modified_at"]
    return {**row, "expires_at": _NEVER, "size_vram": 0, "context_length": context.engine.info.max_model_len}


def model_card(context: ServerContext, name: str) -> Json:
    """What /api/show tells of a name. Raises Overloaded before the model is loaded."""
    if name in context.embedding_names:
        return _embedder_card(context)
    engine = context.engine
    told = {f"{_FAMILY}.context_length": engine.info.max_model_len}
    return {
        "modelfile": f"FROM {context.settings.model.model}\n",
        "parameters": "\n".join(
            f"{name:<30} {value}" for name, value in engine.info.default_sampling.items()
        ),
        "template": engine.tokenizer.describe()["chat_template"] or "",
        "details": _details(context),
        "model_info": {"general.architecture": _FAMILY, **told},
        "capabilities": capabilities(context),
        "modified_at": _started(context),
    }


def _embedder_card(context: ServerContext) -> Json:
    service, model = context.embeddings, context.settings.model
    assert service is not None
    width = service.info.dimensions
    root = model.embedding_model or model.model
    told = {f"{_FAMILY}.context_length": service.info.max_model_len}
    if width is not None:
        told[f"{_FAMILY}.embedding_length"] = width
    return {
        "modelfile": f"FROM {root}\n",
        "parameters": "",
        "template": "",
        "details": {**_details(context), "format": _format(root), "quantization_level": service.info.dtype},
        "model_info": {"general.architecture": _FAMILY, **told},
        "capabilities": [] if width is None else ["embedding"],
        "modified_at": _started(context),
    }


def capabilities(context: ServerContext) -> list[str]:
    """What the model can do, in Ollama's words."""
    engine = context.engine
    found = {
        "completion": True,
        "tools": engine.reply_format.knows_calls,
        "thinking": engine.reply_format.reasoning is not None,
        "insert": engine.tokenizer.fill_in_middle is not None,
    }
    return [name for name, has in found.items() if has]


def _details(context: ServerContext) -> Json:
    return {
        "parent_model": "",
        "format": _format(context.settings.model.model),
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": "" if context.info is None else context.info.dtype,
    }


def _format(root: str) -> str:
    return "gguf" if ".gguf" in root else "safetensors"


def _started(context: ServerContext) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
