"""Token ids from gradients: of a trained embedding, and of the first layer behind a frozen one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import Inferred
from fedcdp.errors import DataError, ModelError

WORDS, LENGTH = 60, 8


def texts(*, as_dict: bool = False) -> fedcdp.Federation:
    """Sequences of 5 to 8 token ids from 1 to 59, padded by 0."""
    draws = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(2, WORDS + 1).float()
    ids = 1 + torch.multinomial(shares.expand(240, -1), LENGTH, replacement=True, generator=draws)
    lengths = 5 + torch.randint(4, (240, 1), generator=draws)
    ids = ids * (torch.arange(LENGTH) < lengths)
    inputs: Any = {"input_ids": ids, "attention_mask": (ids > 0).long()} if as_dict else ids
    data = fedcdp.Dataset(inputs, ids[:, 0] % 3, 3)
    own, public = data.take(torch.arange(160)), data.take(torch.arange(160, 240))
    return fedcdp.partition(own, clients=8, scheme="iid", validation=public)


class Reader(nn.Module):
    """The mean of a layer on embeddings, with or without places."""

    def __init__(self, *, frozen: bool, placed: bool, features: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, features)
        self.places = nn.Parameter(torch.randn(LENGTH, features) * placed, requires_grad=False)
        self.layer, self.head = nn.Linear(features, 24), nn.Linear(24, 3)
        self.words.weight.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        shown = (input_ids > 0)[..., None] if attention_mask is None else attention_mask[..., None] > 0
        return self.head((self.layer(self.words(input_ids) + self.places).tanh() * shown).sum(1))


def found(
    model: nn.Module, method: str = "nonprivate", leak: Any = "type2", *, as_dict: bool = False, **plan: Any
) -> Inferred:
    given = {"batch_size": 3, "per_round": 4, "record_sampling": "partition"} | plan
    told = fedcdp.attack(
        fedcdp.Plan(method=method, **given), model=model, federation=texts(as_dict=as_dict), attack="tokens", leak=leak,
        victims=6,
    )  # fmt: skip
    assert isinstance(told, Inferred)
    assert told.tokens is not None
    return told


@pytest.mark.parametrize("leak", ["type2", "type0"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_trained_embedding_names_every_token(leak: str, as_dict: bool) -> None:
    told = found(Reader(frozen=False, placed=False), leak=leak, as_dict=as_dict).summary()
    assert told["token_source"] == "embedding"
    assert (told["token_precision"], told["token_recall"], told["token_sets_exact"]) == (1.0, 1.0, 1.0)
    assert told["token_baseline"]["recall"] < 0.7
    assert told["label_accuracy"] >= told["label_baseline"]


def test_behind_a_frozen_embedding_the_span_names_tokens() -> None:
    told = found(Reader(frozen=True, placed=False), leak="type1").summary()
    assert (told["token_source"], told["token_precision"], told["token_recall"]) == ("span", 1.0, 1.0)
    assert told["sequences_exact"] is None


@pytest.mark.parametrize("frozen", [True, False])
def test_places_give_whole_sequences(frozen: bool) -> None:
    told = found(Reader(frozen=frozen, placed=True)).summary()
    assert told["sequences_exact"] == 1.0
    assert told["token_sets_exact"] == 1.0


def test_a_layer_over_all_places_gives_whole_sequences() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Flatten(), nn.Linear(6 * LENGTH, 16), nn.Tanh(), nn.Linear(16, 3))
    assert found(model).summary()["sequences_exact"] == 1.0


def test_noise_at_the_server_hides_no_token() -> None:
    told = found(Reader(frozen=False, placed=False), "fed-sdp", "type0", noise_at="server").summary()
    assert told["token_recall"] == told["token_precision"] == 1.0


@pytest.mark.parametrize(("method", "leak"), [("fed-cdp", "type2"), ("fed-cdp", "type0"), ("fed-sdp", "type1")])
def test_under_noise_only_frequent_tokens_are_guessed(method: str, leak: str) -> None:
    told = found(Reader(frozen=False, placed=False), method, leak, noise_multiplier=6.0, noise_at="client").summary()
    assert told["token_recall"] <= told["token_baseline"]["recall"] + 0.1
    assert told["token_sets_exact"] == 0
    assert told["token_source"] == "embedding"


def test_little_noise_is_seen_through() -> None:
    told = found(Reader(frozen=False, placed=False), "fed-cdp", noise_multiplier=1e-4).summary()
    assert told["token_recall"] > 0.85 > told["token_baseline"]["recall"]


def test_the_text_says_how_many_tokens_were_found() -> None:
    assert "100 % of tokens found, 100 % of those right" in str(found(Reader(frozen=False, placed=False)))


def test_too_narrow_a_layer_behind_a_frozen_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match="reads more features than a batch has tokens"):
        found(Reader(frozen=True, placed=False, features=4))


def test_real_inputs_have_no_tokens() -> None:
    federation = fedcdp.partition(fedcdp.Dataset(torch.rand(20, 4), torch.arange(20) % 2), clients=2, scheme="iid")
    with pytest.raises(DataError, match="needs token ids"):
        fedcdp.attack(fedcdp.Plan(per_round=2), model=nn.Linear(4, 2), federation=federation, attack="tokens")
