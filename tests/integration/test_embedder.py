"""Embedder: every family and every way of pooling against transformers' own answer to each text alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from config import ModelSettings
from engine.compute.embedding import attention, encoder, packed_product
from engine.compute.embedding.embedder import load_embedder
from engine.compute.embedding.folder import is_embedding_folder, read_folder
from engine.compute.embedding.packed_product import product_of
from engine.compute.embedding.records import EncodedText
from engine.errors import StartRefused, UnsupportedModel
from engine.text.embedding_tokenizer import EmbeddingTokenizer, cut_longest
from tests.bench.products import onednn_multiplies
from tests.support.embedding_reference import pair_scores, vectors
from tests.support.tiny_embedders import KINDS, MEAN, PAIR_KINDS, save_cross_encoder, save_embedder

SETTINGS = ModelSettings(device="cpu")
TEXTS = [
    "the river is long",
    "a",
    "stones of nile",
    "the nile is a river of stones " * 3,
    "river " * 30,
    "wet",
]
MODES = {
    mode: {f"pooling_mode_{mode}": True} for mode in ("mean_tokens", "cls_token", "lasttoken", "max_tokens")
}


def embed(directory: Path, texts: list[str]) -> np.ndarray:
    tokenizer = EmbeddingTokenizer(directory)
    return load_embedder(directory, SETTINGS).run([EncodedText(*tokenizer.encode(text)) for text in texts])


@pytest.mark.parametrize("kind", KINDS)
def test_each_family(kind: str, tmp_path: Path) -> None:
    directory = save_embedder(tmp_path, kind)
    embedder = load_embedder(directory, SETTINGS)
    assert embedder._encoder.pads == (kind == "mpnet")
    assert np.abs(embed(directory, TEXTS) - vectors(directory, TEXTS)[0]).max() < 2e-6


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling(mode: str, tmp_path: Path) -> None:
    directory = save_embedder(tmp_path, pooling=MODES[mode])
    assert np.abs(embed(directory, TEXTS) - vectors(directory, TEXTS)[0]).max() < 2e-6


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_pairs(kind: str, tmp_path: Path) -> None:
    directory = save_cross_encoder(tmp_path, kind)
    tokenizer = EmbeddingTokenizer(directory)
    pairs = [("the river", text) for text in TEXTS]
    found = load_embedder(directory, SETTINGS).run(
        [EncodedText(*tokenizer.encode_pair(*pair)) for pair in pairs]
    )
    assert found[:, 0].tolist() == pytest.approx(pair_scores(directory, pairs), abs=2e-6)


@pytest.mark.parametrize("kind", ["bert", "qwen3", "gemma3"])
def test_work_in_small_pieces_is_the_same_work(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_embedder(tmp_path, kind)
    tokenizer = EmbeddingTokenizer(directory)
    few: list[None] = []
    pieces: list[None] = []
    encoded = [EncodedText(*tokenizer.encode(text)) for text in TEXTS]
    whole = load_embedder(directory, SETTINGS).run(encoded, lambda: few.append(None))
    for module in (attention, encoder):
        monkeypatch.setattr(module, "UNIT_FLOP", 20_000.0)
    found = load_embedder(directory, SETTINGS).run(encoded, lambda: pieces.append(None))
    assert np.abs(found - whole).max() < 1e-6
    assert len(pieces) > 1.5 * len(few) > 0


def test_a_pass_can_be_ended_between_pieces(tmp_path: Path) -> None:
    directory = save_embedder(tmp_path)
    embedder = load_embedder(directory, SETTINGS)
    encoded = [EncodedText(*EmbeddingTokenizer(directory).encode("river"))]
    before = embedder.run(encoded)

    def give_up() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        embedder.run(encoded, give_up)
    assert np.array_equal(embedder.run(encoded), before)


def test_what_runs_inside_of_a_pass_keeps_ordinary_tensors(tmp_path: Path) -> None:
    directory, kept = save_embedder(tmp_path), torch.zeros(1)
    made: list[torch.Tensor] = []

    def step() -> None:
        made.append(torch.ones(1))

    load_embedder(directory, SETTINGS).run([EncodedText([2, 6, 3])], step)
    for each in made:
        kept += each.add_(1)  # of an inference tensor, torch refuses this
    assert kept.item() == 2 * len(made) > 0


def test_a_text_is_the_same_alone_and_in_a_crowd(tmp_path: Path) -> None:
    directory = save_embedder(tmp_path)
    crowd = embed(directory, TEXTS)
    alone = np.stack([embed(directory, [text])[0] for text in TEXTS])
    assert np.abs(crowd - alone).max() < 1e-6


def test_dense_layers_and_several_poolings_follow_each_other(tmp_path: Path) -> None:
    both = {"pooling_mode_cls_token": True, **MEAN}
    directory = save_embedder(tmp_path / "two", pooling=both, heads=())
    one = {name: save_embedder(tmp_path / name, pooling={name: True}, heads=()) for name in both}
    expected = np.concatenate([embed(one[name], TEXTS) for name in both], axis=1)
    assert np.abs(embed(directory, TEXTS) - expected).max() < 1e-6

    dense = save_embedder(tmp_path / "dense", heads=("Dense", "Normalize"))
    plain = torch.tensor(embed(save_embedder(tmp_path / "plain", heads=()), TEXTS))
    torch.manual_seed(3)
    weight, bias = torch.randn(16, 32) / 4, torch.randn(16)
    made = torch.nn.functional.normalize(torch.tanh(plain @ weight.T + bias), dim=1)
    assert np.abs(embed(dense, TEXTS) - made.numpy()).max() < 1e-6


def test_a_prompt_is_left_out_of_the_pooling_where_the_model_says_so(tmp_path: Path) -> None:
    directory = save_embedder(tmp_path, pooling={**MEAN, "include_prompt": False}, heads=())
    embedder, tokenizer = load_embedder(directory, SETTINGS), EmbeddingTokenizer(directory)
    text = EncodedText(*tokenizer.encode("query: the river"))
    num = tokenizer.num_prompt_tokens("query: ")
    assert num == 3  # [CLS], the word and the colon
    found = embedder.run([replace(text, num_prompt_tokens=num)])
    hidden = embedder._encoder.run(embedder._encoder.batch([text]))
    assert np.abs(found[0] - hidden[num:].mean(0).numpy()).max() < 1e-6


def test_cutting_keeps_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = EmbeddingTokenizer(save_embedder(tmp_path))
    whole = list(tokenizer.encode("the river is long").token_ids)
    assert tokenizer.encode("the river is long", most=4).token_ids == [*whole[:3], whole[-1]]
    pair = tokenizer.encode_pair("the river is long", "a", most=6)
    assert pair.token_ids == [*whole[:3], whole[-1], *tokenizer.encode("a").token_ids[1:]]
    assert pair.type_ids == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("lengths", "room", "cut"),
    [
        ([10, 2], 8, [6, 2]),
        ([2, 10], 8, [2, 6]),
        ([9, 9], 8, [4, 4]),
        ([1, 1], 8, [1, 1]),
        ([5, 9], 3, [1, 2]),
    ],
)
def test_the_longer_of_a_pair_is_cut_first(lengths: list[int], room: int, cut: list[int]) -> None:
    assert cut_longest(lengths, room) == cut


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    labels = save_cross_encoder(tmp_path / "labels", num_labels=3)
    with pytest.raises(UnsupportedModel, match="3 scores"):
        load_embedder(labels, SETTINGS)
    directory = save_embedder(tmp_path / "modules")
    modules = json.loads((directory / "modules.json").read_text())

    def refused(change: Mapping[str, object], match: str) -> None:
        listed = [*modules[:-1], {**modules[-1], **change}]
        (directory / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(StartRefused, match=match):
            read_folder(directory)

    refused({"type": "sentence_transformers.models.CNN"}, "CNN is not served")
    refused({"path": "../elsewhere"}, "outside")
    (directory / "modules.json").write_text("[{]")
    with pytest.raises(StartRefused, match="cannot be read"):
        read_folder(directory)
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "attention"}))
    with pytest.raises(UnsupportedModel, match="attention"):
        read_folder(directory)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"max_position_embeddings": 0}),
        ("config.json", {"model_type": "unheard-of"}),
        ("config.json", {"hidden_size": 31}),
        ("sentence_bert_config.json", {"max_seq_length": 1}),
        ("2_Dense/config.json", {"activation_function": "os.system"}),
    ],
)
def test_a_folder_that_says_nonsense_is_refused_in_a_line(
    name: str, change: dict[str, object], tmp_path: Path
) -> None:
    path = save_embedder(tmp_path, heads=("Dense",)) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StartRefused) as refused:
        load_embedder(tmp_path, SETTINGS)
    assert "\n" not in str(refused.value)


def test_which_folders_hold_such_a_model(tmp_path: Path) -> None:
    assert is_embedding_folder(save_embedder(tmp_path / "a", "qwen3"))
    assert is_embedding_folder(save_cross_encoder(tmp_path / "b"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert not is_embedding_folder(tmp_path)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_product_is_the_layers_own(dtype: torch.dtype, most: float, has_bias: bool) -> None:
    layer = torch.nn.Linear(48, 80, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(300, 48, dtype=dtype)
    expected = layer(x)
    found = product_of(layer)(x)
    assert (found - expected).abs().max() <= most * expected.abs().max()
    assert (layer.weight.numel() == 0) is onednn_multiplies(dtype)


def test_a_layer_that_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(8, 8).requires_grad_(False)
    x = torch.randn(2, 8)

    def wrong(_: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: layer(x) + 1

    def missing(_: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        raise AttributeError("no such operator")

    for packed in (wrong, missing):
        monkeypatch.setattr(packed_product, "_packed", packed)
        assert torch.equal(product_of(layer)(x), layer(x))
