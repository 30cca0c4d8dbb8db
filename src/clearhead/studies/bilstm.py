"""The original setting: a recurrent network with additive attention, which the debate was about (Jain & Wallace, 2019).

    h = BiLSTM(E[x]),   α = softmax(u·tanh(W h_t + b)),   ŷ = softmax(V Σ_t α_t h_t + c)

One query that is no word pools the states of a sentence, and nothing goes past it: all probes at scope S1 are theirs.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.adapters.custom.tokens import Tokens
from clearhead.capture.sources.custom_modules import register_attention
from clearhead.probes.fine_tuning import Bar, seeded
from clearhead.training import Average, Clock, train

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

PAD, UNKNOWN = "[PAD]", "[UNK]"


class AdditiveAttention(nn.Module):
    """One query that weighs the states of a sentence."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.hidden, self.energy = nn.Linear(wide, wide // 2), nn.Linear(wide // 2, 1, bias=False)

    def forward(
        self, states: Float[Tensor, "batch word wide"], real: Bool[Tensor, "batch word"]
    ) -> Float[Tensor, "batch wide"]:
        return _pooled(self, states, real)[0]


@register_attention(AdditiveAttention)
def _pooled(module: AdditiveAttention, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    energies = module.energy(torch.tanh(module.hidden(states))).squeeze(-1).masked_fill(~real, -torch.inf)
    attention, values = energies.softmax(-1)[:, None, None], states[:, None]  # one head, one query
    return (attention @ values).flatten(1), attention, values


class BiLSTM(nn.Module):
    """Words, a recurrent network in both directions, one query, classes."""

    def __init__(self, words: int, classes: int, wide: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide, padding_idx=0)
        self.lstm = nn.LSTM(wide, wide, batch_first=True, bidirectional=True)
        self.attention, self.head = AdditiveAttention(2 * wide), nn.Linear(2 * wide, classes)
        self.dropout = nn.Dropout(0.3)

    def forward(
        self, tokens: Int[Tensor, "batch word"], real: Bool[Tensor, "batch word"]
    ) -> Float[Tensor, "batch label"]:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.embedding(tokens)), real.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(self.dropout(self.attention(states, real)))


def vocabulary(texts: Sequence[str], least: int = 2) -> dict[str, int]:
    """The words that come at least so often, each with its number.

    >>> vocabulary(["so so boring", "boring"])
    {'[PAD]': 0, '[UNK]': 1, 'so': 2, 'boring': 3}
    """
    counts = Counter(word for text in texts for word in split(text))
    return {word: n for n, word in enumerate([PAD, UNKNOWN, *(w for w, count in counts.items() if count >= least)])}


def split(text: str) -> list[str]:
    return text.lower().split()


def original(
    texts: Sequence[str],
    labels: Sequence[int],
    names: Sequence[str],
    *,
    steps: int = 1500,
    batch: int = 32,
    rate: float = 1e-3,
    wide: int = 128,
    seed: int = 0,
    device: str = "cpu",
    checkpoint: Path | None = None,
    progress: Bar | None = None,
) -> "Explainer":
    """Train the network on labelled sentences, and load it as any model of one's own.

    checkpoint: a file where the run is kept: cut, it goes on; finished, it is only opened
    """
    from clearhead.loader import load

    words = vocabulary(texts)

    def read(text: str) -> list[int]:
        return [words.get(word, words[UNKNOWN]) for word in split(text)] or [words[UNKNOWN]]

    with seeded(seed):
        model = BiLSTM(len(words), len(names), wide).to(device)
        rows, true = [torch.tensor(read(text)) for text in texts], torch.tensor(labels)
        # weight decay, but none on the attention, as theirs
        attending = {id(parameter) for parameter in model.attention.parameters()}
        others = [parameter for parameter in model.parameters() if id(parameter) not in attending]
        groups: list[dict[str, Any]] = [
            {"params": others, "weight_decay": 1e-5},
            {"params": list(model.attention.parameters()), "weight_decay": 0.0},
        ]
        optimiser, clock = torch.optim.Adam(groups, lr=rate, amsgrad=True), Clock(steps=steps)

        def loss_of() -> Tensor:
            order = torch.Generator().manual_seed(seed * 1_000_003 + clock.step)
            chosen = torch.randint(len(rows), (batch,), generator=order)
            tokens = nn.utils.rnn.pad_sequence([rows[i] for i in chosen], batch_first=True).to(device)
            return nn.functional.cross_entropy(model(tokens, tokens != 0), true[chosen].to(device))

        train(
            loss_of,
            [optimiser],
            clock,
            average := Average(model.train(), horizon=200),
            clip=5.0,
            checkpoint=checkpoint,
            name="the original setting",
            stored=None,
            progress=None if progress is None else lambda clock: progress("the original setting", clock.fraction),
        )
        average.load(average.tensors)
    reader = Tokens(
        read=read,
        names=words,
        pad=words[PAD],
        inputs=lambda tokens, real: {"tokens": tokens, "real": real},
        pool="attention",
        labels=list(names),
    )
    return load(model.eval(), reader)
