"""Random references for DeepLIFT-SHAP: texts of random words and images of one colour, keyed by the input.

Neither the other inputs of a batch nor a later truncation of the text changes them.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.capture.recorder import Recorder
from clearhead.engine.baselines import Baselines
from clearhead.engine.target_batch import TargetBatch


class RandomReferences:
    """Texts of random words, and images of one colour."""

    def __init__(
        self,
        batch: TargetBatch,
        inputs: Mapping[str, Tensor],
        token_inputs: Sequence[str],
        baselines: Baselines,
        recorder: Recorder,
    ) -> None:
        self.batch, self.inputs, self.baselines, self.recorder = batch, inputs, baselines, recorder
        self.token_inputs = list(token_inputs)

    @property
    def can_sample(self) -> bool:
        return any(leaf in self.token_inputs or self._is_image(leaf) for leaf in self.inputs)

    def sample(self, draw_index: int, leaf: str) -> Tensor:
        if leaf in self.token_inputs:
            return self._sample_embeddings(draw_index, leaf)
        return self._sample_colours(draw_index, leaf) if self._is_image(leaf) else self.baselines.get(None, leaf)

    def _is_image(self, leaf: str) -> bool:
        given = [self._get_sample_input(sample, leaf) for sample in self.batch.samples]
        return self.inputs[leaf].dim() == 4 and all(part is not None and part.dim() == 3 for part in given)

    def _get_sample_input(self, sample: Sample, leaf: str) -> Tensor | None:
        """What a sample has for a leaf: a model of one's own may call its one input anything."""
        alone = next(iter(sample.inputs.values())) if len(sample.inputs) == len(self.inputs) == 1 else None
        return sample.inputs.get(leaf, alone)

    @torch.no_grad()
    def _sample_embeddings(self, draw: int, leaf: str) -> Tensor:
        """A word's draw depends on the words up to it: a text that is cut off keeps the draws of what is left."""
        x = self.inputs[leaf]
        lookups = self.recorder.get_embedding_modules()
        lookup = lookups[min(self.token_inputs.index(leaf), len(lookups) - 1)]
        count = len(lookup.weight)  # type: ignore[arg-type]
        ids = self.batch.model_inputs[leaf].reshape(len(x), -1)
        drawn = [self._sample_token_ids(row.tolist(), draw, count) for row in ids.cpu()]
        vectors = lookup(torch.tensor(drawn, device=ids.device)).to(x).reshape(x.shape)
        held = self.baselines.get("mean", leaf)  # which leaves special tokens as they are
        return torch.where((held == x).all(-1, keepdim=True), x, vectors)

    def _sample_token_ids(self, ids: Sequence[int], draw: int, count: int) -> list[int]:
        digest = hashlib.blake2b(f"{self.batch.seed} {draw}".encode(), digest_size=8)
        found = []
        for token in ids:
            digest.update(token.to_bytes(8, "big", signed=True))
            found.append(int.from_bytes(digest.digest(), "big") % count)
        return found

    def _sample_colours(self, draw: int, leaf: str) -> Tensor:
        x = self.inputs[leaf]
        pictures = []
        for sample in self.batch.samples:
            pixels = self._get_sample_input(sample, leaf)
            assert pixels is not None
            content = pixels.detach().cpu().double().numpy().tobytes()
            key = hashlib.blake2b(content, digest_size=8).digest()
            random = np.random.default_rng([self.batch.seed, draw, int.from_bytes(key, "big")])
            colours = pixels.flatten(1)
            pictures.append(colours[:, int(random.random() * colours.shape[1])].to(x))
        return torch.stack(pictures)[:, :, None, None].expand_as(x)
