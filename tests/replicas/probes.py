"""Slow twins of the probes, as the papers state them: on BERT, with loops, by hooks of their own."""

import itertools

import numpy as np
import torch


def tau_b(a, b):
    """Pair by pair."""
    agree = ties_a = ties_b = pairs = 0
    for i, j in itertools.combinations(range(len(a)), 2):
        agree += np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])
        ties_a += a[i] == a[j]
        ties_b += b[i] == b[j]
        pairs += 1
    return agree / np.sqrt((pairs - ties_a) * (pairs - ties_b))


def bert(model, ids, weights=None, detached=False):
    """Probabilities of a tiny BERT, its embeddings and attention; `weights` (layer → map) replace its own."""
    embeddings = model.bert.embeddings
    words = embeddings.word_embeddings(ids).detach().requires_grad_()
    places = embeddings.position_embeddings(torch.arange(len(ids)))
    h = embeddings.LayerNorm(words + places + embeddings.token_type_embeddings(torch.zeros_like(ids)))
    maps = []
    for number, layer in enumerate(model.bert.encoder.layer):
        own = layer.attention.self
        q, k, v = (part(h).reshape(len(ids), 4, 8) for part in (own.query, own.key, own.value))
        parts, rows = [], []
        for head in range(4):
            a = (q[:, head] @ k[:, head].T / 8**0.5).softmax(-1)
            if weights is not None and number in weights:
                a = weights[number][head]
            a = a.detach() if detached else a
            rows.append(a)
            parts.append(a @ v[:, head])
        maps.append(torch.stack(rows))
        h = layer.attention.output.LayerNorm(layer.attention.output.dense(torch.cat(parts, -1)) + h)
        inner = torch.nn.functional.gelu(layer.intermediate.dense(h))
        h = layer.output.LayerNorm(layer.output.dense(inner) + h)
    pooled = torch.tanh(model.bert.pooler.dense(h[0]))
    return model.classifier(pooled).softmax(-1), words, maps


def gradient(model, ids, detached):
    """Σ_o |∂ŷ_o/∂x_t · x_t|."""
    total = torch.zeros(len(ids), dtype=torch.float64)
    for o in range(3):
        answer, words, _ = bert(model, ids, detached=detached)
        (slope,) = torch.autograd.grad(answer[o], words)
        for t in range(len(ids)):
            total[t] += (slope[t] @ words[t]).abs()
    return total.detach().numpy()


def left_out(model, ids, mask=None):
    """mean_o |ŷ_o(x without t) − ŷ_o(x)| of all but the first and last token."""
    whole, _, _ = bert(model, ids)
    found = []
    for t in range(1, len(ids) - 1):
        other = ids.clone()
        other[t] = mask if mask is not None else 0
        other = other if mask is not None else torch.cat([ids[:t], ids[t + 1 :]])
        answer, _, _ = bert(model, other)
        found.append((answer - whole).abs().mean().item())
    return np.array(found)
