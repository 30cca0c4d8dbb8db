"""Random references for DeepLIFT-SHAP: texts of random words and images of one colour, keyed by the input.

Neither the other inputs of a batch nor a later truncation of the text changes them.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.capture.recorder import Recorder
from clearhead.engine.baselines import Baselines
from clearhead.engine.target_batch import TargetBatch
from clearhead.sample import Sample


class RandomReferences:
    """Draws references for one batch: texts of random tokens, and images of one colour.

    Args:
        batch: The batch.
        inputs: Input vectors by leaf.
        token_inputs: The leaves that are embeddings of tokens.
        baselines: The baselines of the batch.
        recorder: Recorder of the model.
    """

    def __init__(
        self,
        batch: TargetBatch,
        inputs: Mapping[str, Tensor],
        token_inputs: Sequence[str],
        baselines: Baselines,
        recorder: Recorder,
    ) -> None:
        self.batch = batch
        self.inputs = inputs
        self.baselines = baselines
        self.recorder = recorder
        self.token_inputs = list(token_inputs)

    @property
    def can_sample(self) -> bool:
        """Whether the model has an input, tokens or an image, for which references can be drawn."""
        return any(leaf in self.token_inputs or self._is_image(leaf) for leaf in self.inputs)

    def sample(self, draw_index: int, leaf: str) -> Tensor:
        """Return one reference of each example; other inputs than tokens and images keep their default baseline.

        Args:
            draw_index: The number of the draw.
            leaf: Name of the input.
        """
        if leaf in self.token_inputs:
            return self._sample_embeddings(draw_index, leaf)
        return self._sample_colours(draw_index, leaf) if self._is_image(leaf) else self.baselines.get(None, leaf)

    def _is_image(self, leaf: str) -> bool:
        sample_inputs = [self._get_sample_input(sample, leaf) for sample in self.batch.samples]
        is_channel_first = all(tensor is not None and tensor.dim() == 3 for tensor in sample_inputs)
        return self.inputs[leaf].dim() == 4 and is_channel_first

    def _get_sample_input(self, sample: Sample, leaf: str) -> Tensor | None:
        """The sample's tensor for a leaf; a custom module with a single input may have any name for it."""
        single_input = next(iter(sample.inputs.values())) if len(sample.inputs) == len(self.inputs) == 1 else None
        return sample.inputs.get(leaf, single_input)

    @torch.no_grad()
    def _sample_embeddings(self, draw_index: int, leaf: str) -> Tensor:
        """Draw tokens. Each draw depends on the tokens up to it, so that truncation keeps the remaining draws."""
        vectors = self.inputs[leaf]
        embedding_modules = self.recorder.get_embedding_modules()
        embed = embedding_modules[min(self.token_inputs.index(leaf), len(embedding_modules) - 1)]
        vocab_size = len(embed.weight)  # type: ignore[arg-type]
        ids = self.batch.model_inputs[leaf].reshape(len(vectors), -1)
        drawn_ids = [self._sample_token_ids(row.tolist(), draw_index, vocab_size) for row in ids.cpu()]
        drawn_vectors = embed(torch.tensor(drawn_ids, device=ids.device)).to(vectors).reshape(vectors.shape)
        baseline = self.baselines.get("mean", leaf)  # equal to the input at special tokens
        return torch.where((baseline == vectors).all(-1, keepdim=True), vectors, drawn_vectors)

    def _sample_token_ids(self, ids: Sequence[int], draw_index: int, vocab_size: int) -> list[int]:
        digest = hashlib.blake2b(f"{self.batch.seed} {draw_index}".encode(), digest_size=8)
        drawn_ids = []
        for token_id in ids:
            digest.update(token_id.to_bytes(8, "big", signed=True))
            drawn_ids.append(int.from_bytes(digest.digest(), "big") % vocab_size)
        return drawn_ids

    def _sample_colours(self, draw_index: int, leaf: str) -> Tensor:
        """Draw the colour of one pixel of each image, for all of its pixels."""
        images = self.inputs[leaf]
        drawn_colours = []
        for sample in self.batch.samples:
            pixels = self._get_sample_input(sample, leaf)
            assert pixels is not None
            content = pixels.detach().cpu().double().numpy().tobytes()
            key = hashlib.blake2b(content, digest_size=8).digest()
            generator = np.random.default_rng([self.batch.seed, draw_index, int.from_bytes(key, "big")])
            colours = pixels.flatten(1)
            drawn_colours.append(colours[:, int(generator.random() * colours.shape[1])].to(images))
        return torch.stack(drawn_colours)[:, :, None, None].expand_as(images)
