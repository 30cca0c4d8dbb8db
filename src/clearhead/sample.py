"""`Sample`: one input as the model takes it, with the units that get scores."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from clearhead.images import RenderedOnAccess
from clearhead.units import UnitAxis, Units


@dataclass
class Sample:
    """One input, ready for the model (tensors without a batch axis), and the units along each axis of attention.

    Attributes:
        inputs: Keyword arguments of the model, without a batch axis.
        axes: The units along each axis of attention, by stream.
        num_truncated: How many tokens were cut off.
        mask_positions: Positions of the mask tokens, of masked language models.
        batch_key: Samples can share a batch only if this is equal.
        image: The image as the model sees it, or a function that renders it when it is first read.
    """

    inputs: dict[str, Tensor]
    axes: dict[str, UnitAxis]
    num_truncated: int = 0
    mask_positions: tuple[int, ...] = ()
    batch_key: tuple[int, ...] = ()
    image: UInt8[np.ndarray, "height width 3"] | None = RenderedOnAccess()  # type: ignore[assignment]  # noqa: RUF009

    @property
    def unrendered_image(self) -> Any:
        """The image, or the function that will render it."""
        return self.__dict__["image"]

    @classmethod
    def from_units(cls, inputs: dict[str, Tensor], units: Units, **fields: Any) -> "Sample":
        """Build a sample of one stream.

        Args:
            inputs: Keyword arguments of the model, without a batch axis.
            units: The units of the stream.
            **fields: The other fields of the sample.

        Returns:
            The sample, with the units along one axis named after their stream.
        """
        return cls(inputs, {units.stream: UnitAxis.concat(units)}, **fields)

    @property
    def units(self) -> Units:
        """The units of a sample of one stream; `ValueError` for several streams."""
        (axis,) = self.axes.values()
        (units,) = axis.unit_groups
        return units

    def derive_seed(self, seed: int) -> int:
        """Derive a random seed from the content of the inputs, so that it does not depend on the batch.

        Args:
            seed: The seed of the call; different seeds give different results for the same content.

        Returns:
            An integer of up to 56 bits.
        """
        digest = hashlib.blake2b(str(seed).encode(), digest_size=7)
        for name in sorted(self.inputs):
            tensor = self.inputs[name].detach().cpu()
            digest.update(name.encode() + str(tuple(tensor.shape)).encode())
            digest.update(np.ascontiguousarray(tensor.double().numpy()).data)
        return int.from_bytes(digest.digest(), "big")
