"""What a saved embedding model gives by transformers alone, each text by itself, plainly pooled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer


@torch.inference_mode()
def vectors(directory: Path, texts: Sequence[str | list[int]]) -> tuple[np.ndarray, int]:
    """Vectors of length 1 by the first pooling mode that is on, and how many tokens were read."""
    model = AutoModel.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = json.loads((directory / "1_Pooling" / "config.json").read_text())
    mode = next(name for name, is_on in config.items() if is_on is True).removeprefix("pooling_mode_")
    found = []
    num_tokens = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
        hidden = model(input_ids=torch.tensor([ids]))[0][0]
        num_tokens += len(ids)
        pooled = {
            "mean_tokens": hidden.mean(0),
            "cls_token": hidden[0],
            "lasttoken": hidden[-1],
            "max_tokens": hidden.max(0).values,
        }[mode]
        found.append(torch.nn.functional.normalize(pooled, dim=0).numpy())
    return np.stack(found), num_tokens


@torch.inference_mode()
def pair_scores(directory: Path, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """A cross-encoder's logit of each pair, between 0 and 1."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    given = [tokenizer(*pair, return_tensors="pt") for pair in pairs]
    return [torch.sigmoid(model(**each).logits)[0, 0].item() for each in given]
