"""Random references, keyed by the content of the input: neither the batch nor what is cut off later changes them."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.capture.recorder import Recorder
from clearhead.engine.baselines import Baselines
from clearhead.engine.target_batch import Plan


class RandomReferences:
    """Texts of random words, and pictures of one colour."""

    def __init__(
        self, plan: Plan, inputs: Mapping[str, Tensor], words: Sequence[str], baselines: Baselines, recorder: Recorder
    ) -> None:
        self.plan, self.inputs, self.baselines, self.recorder = plan, inputs, baselines, recorder
        self.words = list(words)

    @property
    def possible(self) -> bool:
        return any(leaf in self.words or self._is_picture(leaf) for leaf in self.inputs)

    def of(self, draw: int, leaf: str) -> Tensor:
        if leaf in self.words:
            return self._texts(draw, leaf)
        return self._colours(draw, leaf) if self._is_picture(leaf) else self.baselines.of(None, leaf)

    def _is_picture(self, leaf: str) -> bool:
        given = [self._given(sample, leaf) for sample in self.plan.given]
        return self.inputs[leaf].dim() == 4 and all(part is not None and part.dim() == 3 for part in given)

    def _given(self, sample: Sample, leaf: str) -> Tensor | None:
        """What a sample has for a leaf: a model of one's own may call its one input anything."""
        alone = next(iter(sample.inputs.values())) if len(sample.inputs) == len(self.inputs) == 1 else None
        return sample.inputs.get(leaf, alone)

    @torch.no_grad()
    def _texts(self, draw: int, leaf: str) -> Tensor:
        """A word's draw depends on the words up to it: a text that is cut off keeps the draws of what is left."""
        x = self.inputs[leaf]
        lookups = self.recorder.lookups()
        lookup = lookups[min(self.words.index(leaf), len(lookups) - 1)]
        count = len(lookup.weight)  # type: ignore[arg-type]
        ids = self.plan.batch[leaf].reshape(len(x), -1)
        drawn = [self._drawn(row.tolist(), draw, count) for row in ids.cpu()]
        vectors = lookup(torch.tensor(drawn, device=ids.device)).to(x).reshape(x.shape)
        held = self.baselines.of("mean", leaf)  # which leaves special tokens as they are
        return torch.where((held == x).all(-1, keepdim=True), x, vectors)

    def _drawn(self, ids: Sequence[int], draw: int, count: int) -> list[int]:
        digest = hashlib.blake2b(f"{self.plan.seed} {draw}".encode(), digest_size=8)
        found = []
        for token in ids:
            digest.update(token.to_bytes(8, "big", signed=True))
            found.append(int.from_bytes(digest.digest(), "big") % count)
        return found

    def _colours(self, draw: int, leaf: str) -> Tensor:
        x = self.inputs[leaf]
        pictures = []
        for sample in self.plan.given:
            pixels = self._given(sample, leaf)
            assert pixels is not None
            content = pixels.detach().cpu().double().numpy().tobytes()
            key = hashlib.blake2b(content, digest_size=8).digest()
            random = np.random.default_rng([self.plan.seed, draw, int.from_bytes(key, "big")])
            colours = pixels.flatten(1)
            pictures.append(colours[:, int(random.random() * colours.shape[1])].to(x))
        return torch.stack(pictures)[:, :, None, None].expand_as(x)
