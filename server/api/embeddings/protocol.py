"""The bodies of /v1/embeddings, /v1/rerank and /v1/score. None always means absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainValidator

from server.api.openai.protocol_tokens import Text
from server.api.openai.protocol_values import (
    BodyPart,
    Count,
    Label,
    Milliseconds,
    Positive,
    Prompt,
    Truncation,
    refuse,
)

MAX_TEXTS = 2048  # of one request, as OpenAI has it


def check_texts(value: object) -> list[str]:
    """One text or several, as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or set(map(type, texts)) != {str}:
        refuse("must be a string, or a list of strings that is not empty")
    if len(texts) > MAX_TEXTS:
        refuse(f"has {len(texts)} texts; the limit is {MAX_TEXTS}")
    return texts


def check_documents(value: object) -> list[str]:
    """Texts, plain or as objects with a `text`, which is how some clients send them."""
    if not isinstance(value, list) or not value:
        refuse("must be a list of documents that is not empty")
    texts = [each.get("text") if isinstance(each, dict) else each for each in value]
    if set(map(type, texts)) != {str}:
        refuse("must hold strings, or objects with a string 'text'")
    return check_texts(texts)


_TEXTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_TEXTS},
    ]
}
_DOCUMENT = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "The document's text."}},
    "required": ["text"],
}
_DOCUMENTS: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _DOCUMENT]},
    "minItems": 1,
    "maxItems": MAX_TEXTS,
}


def _described(schema: dict[str, Any]) -> Any:
    return Field(json_schema_extra=lambda found: found.update(schema))


Texts = Annotated[list[str], PlainValidator(check_texts, Any), _described(_TEXTS)]
Documents = Annotated[list[str], PlainValidator(check_documents, Any), _described(_DOCUMENTS)]


class TextsBody(BodyPart):
    """What all three take. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    unread: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    """The embedding model's or reranker's name, as GET /v1/models lists it. Left out: the one there is."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep only this many of each text's first tokens; -1 keeps what the model can read. Left out: a text
    that is too long is refused."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from arrival until the reply must be complete."""
    request_id: Label | None = None
    """The caller's own label, as in the header `x-request-id`."""


class EmbeddingsRequest(TextsBody):
    """POST /v1/embeddings: a vector of each text."""

    input: Prompt
    """What to embed: a text, a list of texts, a list of token ids, or a list of those."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float`: lists of numbers; `base64`: little-endian float32. Left out: `float`."""
    dimensions: Positive | None = None
    """Keep only so many numbers of each vector, which is then made of length 1 again (Matryoshka models)."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to texts. Left out: true."""
    prompt_name: Label | None = None
    """Put this prompt of the model's files before each text, such as `query`."""


class RerankRequest(TextsBody):
    """POST /v1/rerank: documents by how well they answer a query."""

    query: Text
    """What the documents are to answer."""
    documents: Documents
    """The documents: strings, or objects with a `text`."""
    top_n: Count | None = None
    """How many of the best to send. Left out, or 0: all."""
    return_documents: bool | None = None
    """Send the documents' texts, too. Left out: true."""


class ScoreRequest(TextsBody):
    """POST /v1/score: how near the texts of each pair are."""

    text_1: Texts
    """The first texts of the pairs; one alone is paired with each of `text_2`."""
    text_2: Texts
    """The second texts of the pairs."""
