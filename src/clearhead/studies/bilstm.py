"""BiLSTM classifier with additive attention, the model of "Attention is not Explanation" (Jain & Wallace, 2019).

    h = BiLSTM(E[x]),   α = softmax(u·tanh(W h_t + b)),   ŷ = softmax(V Σ_t α_t h_t + c)

One learned query pools the states of a sentence, and no other path leads to the output: the attention probes at scope
S1 correspond to the experiments of the debate.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.adapters.custom.tokens import TokenReader
from clearhead.capture.sources.custom_modules import register_attention
from clearhead.probes.fine_tuning import TrainingProgress, fixed_seed
from clearhead.training import ExponentialMovingAverage, TrainingBudget, train

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

PAD_TOKEN = "[PAD]"
UNKNOWN_TOKEN = "[UNK]"
#: Name of the run in progress reports.
_RUN_NAME = "BiLSTM"


class AdditiveAttention(nn.Module):
    """Additive attention with one learned query: a weighted mean of the states.

    Args:
        hidden_size: Width of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(hidden_size, hidden_size // 2)
        self.energy = nn.Linear(hidden_size // 2, 1, bias=False)

    def forward(
        self, states: Float[Tensor, "batch word wide"], mask: Bool[Tensor, "batch word"]
    ) -> Float[Tensor, "batch wide"]:
        """Return the attention-weighted sum of the states, without the weights."""
        return _compute_additive_attention(self, states, mask)[0]


@register_attention(AdditiveAttention)
def _compute_additive_attention(
    module: AdditiveAttention, states: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, attention and values, with one head and one query; `mask` is False for padding."""
    energies = module.energy(torch.tanh(module.hidden(states))).squeeze(-1).masked_fill(~mask, -torch.inf)
    attention = energies.softmax(-1)[:, None, None]
    values = states[:, None]
    return (attention @ values).flatten(1), attention, values


class BiLSTM(nn.Module):
    """Word embeddings, a bidirectional LSTM, additive attention, and a linear classifier.

    Args:
        vocab_size: Number of words.
        num_classes: Number of classes.
        hidden_size: Width of the embeddings and of each direction of the LSTM.
    """

    def __init__(self, vocab_size: int, num_classes: int, hidden_size: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size, padding_idx=0)
        self.lstm = nn.LSTM(hidden_size, hidden_size, batch_first=True, bidirectional=True)
        self.attention = AdditiveAttention(2 * hidden_size)
        self.head = nn.Linear(2 * hidden_size, num_classes)
        self.dropout = nn.Dropout(0.3)

    def forward(
        self, tokens: Int[Tensor, "batch word"], mask: Bool[Tensor, "batch word"]
    ) -> Float[Tensor, "batch label"]:
        """Compute the logits; `mask` is False for padding."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.embedding(tokens)), mask.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(self.dropout(self.attention(states, mask)))


def build_vocabulary(texts: Sequence[str], min_count: int = 2) -> dict[str, int]:
    """Number the words that occur at least `min_count` times, after padding and unknown.

    >>> build_vocabulary(["so so boring", "boring"])
    {'[PAD]': 0, '[UNK]': 1, 'so': 2, 'boring': 3}
    """
    counts = Counter(word for text in texts for word in split_words(text))
    frequent_words = [word for word, count in counts.items() if count >= min_count]
    return {word: index for index, word in enumerate([PAD_TOKEN, UNKNOWN_TOKEN, *frequent_words])}


def split_words(text: str) -> list[str]:
    """Split at white space, in lower case."""
    return text.lower().split()


def train_bilstm(
    texts: Sequence[str],
    labels: Sequence[int],
    label_names: Sequence[str],
    *,
    steps: int = 1500,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    hidden_size: int = 128,
    seed: int = 0,
    device: str = "cpu",
    checkpoint: Path | None = None,
    progress: TrainingProgress | None = None,
) -> "Explainer":
    """Train the BiLSTM on labelled sentences and load it as a custom model.

    Args:
        texts: Sentences.
        labels: Class index of each sentence.
        label_names: Names of the classes.
        steps: Number of training steps.
        batch_size: Sentences per step.
        learning_rate: Learning rate of Adam.
        hidden_size: Width of the embeddings and of each direction of the LSTM.
        seed: Seed of initialisation, dropout and batches.
        device: Device to train on.
        checkpoint: File that stores the run: an interrupted run resumes from it, a finished one is loaded.
        progress: Function that is called with the name and the completed fraction of the run.

    Returns:
        Explainer of the trained model.
    """
    from clearhead.loader import load

    vocabulary = build_vocabulary(texts)

    def encode(text: str) -> list[int]:
        unknown_id = vocabulary[UNKNOWN_TOKEN]
        return [vocabulary.get(word, unknown_id) for word in split_words(text)] or [unknown_id]

    with fixed_seed(seed):
        model = BiLSTM(len(vocabulary), len(label_names), hidden_size).to(device)
        encoded_texts = [torch.tensor(encode(text)) for text in texts]
        targets = torch.tensor(labels)
        # weight decay except on the attention, as in the original code
        attention_parameters = list(model.attention.parameters())
        attention_ids = {id(parameter) for parameter in attention_parameters}
        parameter_groups: list[dict[str, Any]] = [
            {
                "params": [parameter for parameter in model.parameters() if id(parameter) not in attention_ids],
                "weight_decay": 1e-5,
            },
            {"params": attention_parameters, "weight_decay": 0.0},
        ]
        optimiser = torch.optim.Adam(parameter_groups, lr=learning_rate, amsgrad=True)
        budget = TrainingBudget(total_steps=steps)

        def compute_loss() -> Tensor:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + budget.step)
            indices = torch.randint(len(encoded_texts), (batch_size,), generator=generator)
            batch = [encoded_texts[index] for index in indices]
            tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
            return nn.functional.cross_entropy(model(tokens, tokens != 0), targets[indices].to(device))

        def report_progress(budget: TrainingBudget) -> None:
            if progress is not None:
                progress(_RUN_NAME, budget.fraction)

        weight_average = ExponentialMovingAverage(model.train(), horizon=200)
        train(
            compute_loss,
            [optimiser],
            budget,
            weight_average,
            max_grad_norm=5.0,
            checkpoint=checkpoint,
            name=_RUN_NAME,
            checkpoint_dtype=None,
            progress=None if progress is None else report_progress,
        )
        weight_average.load_weights(weight_average.tensors)
    reader = TokenReader(
        read=encode,
        token_names=vocabulary,
        pad_id=vocabulary[PAD_TOKEN],
        inputs=lambda tokens, mask: {"tokens": tokens, "mask": mask},
        pooling_module="attention",
        labels=list(label_names),
    )
    return load(model.eval(), reader)
