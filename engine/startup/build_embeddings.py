"""The embedding model of a start: which one it is, if any, and its parts."""

from __future__ import annotations

import logging

from config import ModelSettings, Settings
from engine.compute.embedding.embedder import describe_embedder, load_embedder
from engine.compute.embedding.folder import read_folder
from engine.compute.embedding.source import (
    find_embedding_model,
    is_embedding_model,
    repo_of,
    resolve_embedding_model,
)
from engine.compute.loading.loader import choose_device
from engine.compute.loading.model_source import beside_model
from engine.embeddings.text_reader import EmbeddingParts
from engine.errors import StartRefused
from engine.startup import build
from engine.startup.diagnosis import Diagnosis, EmbeddingFacts
from engine.text.embedding_tokenizer import EmbeddingTokenizer

log = logging.getLogger("slipstream.engine")


def embedding_settings(settings: Settings, *, may_fetch: bool = True) -> ModelSettings | None:
    """The settings of the embedding model: the one beside MODEL, or MODEL itself. None if there is neither.

    Raises StartRefused where MODEL is an embedding model and another is given beside it.
    """
    model = settings.model
    alone = is_embedding_model(model, may_fetch=may_fetch)
    if model.embedding_model is None:
        return model if alone else None
    if alone:
        raise StartRefused(
            f"--embedding-model {model.embedding_model}: {model.model} is an embedding model itself, and one "
            "is served. Name a model that generates as MODEL, or leave one out."
        )
    return beside_model(model, model.embedding_model)


def examine_embeddings(found: Diagnosis, settings: Settings) -> None:
    """Note what of embeddings a start would serve, as far as it is here. Raises StartRefused as that does."""
    asked = embedding_settings(settings, may_fetch=False)
    if asked is None:
        return
    directory = find_embedding_model(asked)
    facts = found.embeddings = EmbeddingFacts(
        asked.model, None if directory is None else str(directory), pending=None
    )
    if directory is None and repo_of(asked.model) is None:
        resolve_embedding_model(asked)  # refuses it
    folder = None if directory is None else read_folder(directory)
    if folder is None or (
        repo_of(asked.model) is not None and not any(folder.directory.glob("*.safetensors"))
    ):
        facts.pending = "downloads it from the Hugging Face hub"
        found.warnings.append(f"The embedding model {asked.model}: a start {facts.pending}.")
        return
    described = describe_embedder(folder, asked)
    facts.architecture, facts.max_model_len = described.architecture, described.max_model_len
    facts.weight_bytes = described.weight_bytes
    facts.pooling = () if folder.is_classifier else folder.pooling


@build.refused_without_memory()
def load_embedding_parts(settings: Settings) -> EmbeddingParts | None:
    """Load the embedding model, if there is one; on the thread that will run it. Raises StartRefused."""
    asked = embedding_settings(settings)
    if asked is None:
        return None
    if settings.model.embedding_model is None:
        build.use_compute_threads()
        build.use_memory_nodes(choose_device(asked.device))
    directory = resolve_embedding_model(asked)
    folder = read_folder(directory)
    tokenizer = EmbeddingTokenizer(folder.directory, lower_case=folder.lower_case)
    embedder = load_embedder(directory, asked)
    info = embedder.info
    kind = "scores of pairs" if info.scores_pairs else f"vectors of {info.dimensions} numbers"
    log.info("%s gives %s, of up to %d tokens, in %s", asked.model, kind, info.max_model_len, info.dtype)
    return EmbeddingParts(
        embedder, tokenizer, dict(folder.prompts), folder.default_prompt, folder.pools_prompt
    )
