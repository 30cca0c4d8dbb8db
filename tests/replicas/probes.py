"""Reference implementations of the probes, as the papers state them: on BERT, with loops."""

import itertools

import numpy as np
import torch


def tau_b(a, b):
    """Kendall's tau-b, pair by pair."""
    agree = ties_a = ties_b = pairs = 0
    for i, j in itertools.combinations(range(len(a)), 2):
        agree += np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])
        ties_a += a[i] == a[j]
        ties_b += b[i] == b[j]
        pairs += 1
    return agree / np.sqrt((pairs - ties_a) * (pairs - ties_b))


def bert(model, ids, weights=None, detached=False):
    """Return probabilities, embeddings and attention of a tiny BERT; `weights` (layer → map) replace its attention."""
    embeddings = model.bert.embeddings
    word_embeddings = embeddings.word_embeddings(ids).detach().requires_grad_()
    positions = embeddings.position_embeddings(torch.arange(len(ids)))
    h = embeddings.LayerNorm(word_embeddings + positions + embeddings.token_type_embeddings(torch.zeros_like(ids)))
    maps = []
    for layer_index, layer in enumerate(model.bert.encoder.layer):
        attention = layer.attention.self
        q, k, v = (
            projection(h).reshape(len(ids), 4, 8) for projection in (attention.query, attention.key, attention.value)
        )
        heads, rows = [], []
        for head in range(4):
            a = (q[:, head] @ k[:, head].T / 8**0.5).softmax(-1)
            if weights is not None and layer_index in weights:
                a = weights[layer_index][head]
            a = a.detach() if detached else a
            rows.append(a)
            heads.append(a @ v[:, head])
        maps.append(torch.stack(rows))
        h = layer.attention.output.LayerNorm(layer.attention.output.dense(torch.cat(heads, -1)) + h)
        inner = torch.nn.functional.gelu(layer.intermediate.dense(h))
        h = layer.output.LayerNorm(layer.output.dense(inner) + h)
    pooled = torch.tanh(model.bert.pooler.dense(h[0]))
    return model.classifier(pooled).softmax(-1), word_embeddings, maps


def gradient(model, ids, detached):
    """Σ_o |∂ŷ_o/∂x_t · x_t|."""
    total = torch.zeros(len(ids), dtype=torch.float64)
    for o in range(3):
        probabilities, embeddings, _ = bert(model, ids, detached=detached)
        (slope,) = torch.autograd.grad(probabilities[o], embeddings)
        for t in range(len(ids)):
            total[t] += (slope[t] @ embeddings[t]).abs()
    return total.detach().numpy()


def leave_one_out(model, ids, mask=None):
    """mean_o |ŷ_o(x without t) − ŷ_o(x)| for all tokens but the first and the last."""
    full_output, _, _ = bert(model, ids)
    differences = []
    for t in range(1, len(ids) - 1):
        other = ids.clone()
        other[t] = mask if mask is not None else 0
        other = other if mask is not None else torch.cat([ids[:t], ids[t + 1 :]])
        output, _, _ = bert(model, other)
        differences.append((output - full_output).abs().mean().item())
    return np.array(differences)
