"""Base class of Beyond Intuition and TAM: attention perception times gradient feedback.

    P = Π_l (I + Ã_l),     F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺],     r = Σ_i w_i P_i ⊙ F_i

Perception P is how attention mixes tokens over the layers. Feedback F is the positive gradient of the target at the
last attention, averaged over the path from zero to the input: first the mean over the points, then the clamp, then the
mean over heads. α scales the normalised pixels of images, and the input of the first layer for texts.

`factors` holds both, w · P and w · F. Each factor can be switched off: `feedback="none"` gives w · P alone,
`perception="none"` w · F alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall, Requirements, Tape, resolve_requirements
from clearhead.methods._path import PathMethod, PathPoint, check_step_count
from clearhead.methods.base import MethodScores

#: Gradient averaged over the path; at the input only; averaged over noisy inputs; no feedback.
FeedbackMode = Literal["integrated", "gradient", "smoothed", "none"]
PerceptionRows = Float[Tensor, "batch row unit"]


class PerceptionMethod(PathMethod):
    """Base class that pushes rows of P from the last layer to the first, one set for each read-out depth.

    For a read-out at a single position, only its row is pushed. For a mean over positions all rows are pushed, since
    each row has a different feedback.
    """

    requires_on_path: ClassVar[Requirements] = resolve_requirements("attention_gradient")
    requires_at_input: ClassVar[Requirements] = resolve_requirements("attention")
    steps: int = 20
    feedback: FeedbackMode = "integrated"
    #: Whether α scales token embeddings without positions (Beyond Intuition's code for CLIP).
    lookups: bool = False

    #: Whether the last layer adds the identity, too.
    adds_identity_at_top: ClassVar[bool] = True

    tile_passes: ClassVar[int] = 1

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int:
        """Return one point per step, one for the gradient at the input, or none without feedback."""
        steps: int = options.get("steps", cls.steps)
        feedback: FeedbackMode = options.get("feedback", cls.feedback)
        return {"integrated": steps, "smoothed": steps, "gradient": 1, "none": 0}[feedback]

    @property
    def uses_perception(self) -> bool:
        """Whether the scores have the factor P."""
        return True

    @property
    def needs_full_maps(self) -> bool:
        """Whether several positions are read out, so that all rows of P must be pushed."""
        return not self.reads_single_token  # otherwise all rows of P are needed, each with its own feedback

    def setup(self) -> None:
        check_step_count(self.steps)
        readout = self.unit_context.readout
        self.reads_single_token = bool(((readout != 0).sum(-1) <= 1).all())
        self.initial_rows: PerceptionRows = readout
        if not self.reads_single_token:
            identity = torch.eye(readout.shape[2], dtype=readout.dtype, device=readout.device)
            self.initial_rows = identity.expand(len(readout), -1, -1)
        self.has_depth_scores = readout.shape[1] == 1
        depths = len(self.unit_context.layers) if self.has_depth_scores else 1
        self.perception_rows = torch.zeros_like(self.initial_rows)[:, None].repeat(1, depths, 1, 1)
        self.feedback_gradient: Tensor | float = 0.0

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """The rows of all depths times E_h A."""
        return MapReduction("attention", self.insert_readout_rows(call).flatten(1, 2))

    def on_call_total(self, call: AttentionCall, total: Tensor) -> None:
        """Update P ← P + P · E_h A · diag(column weights)."""
        self.add_mixed_rows(
            call, total.sum(1).unflatten(1, self.perception_rows.shape[1:3]) * self.compute_column_weights(call)
        )

    def compute_column_weights(self, call: AttentionCall) -> Float[Tensor, "batch 1 1 key"] | float:
        """Return the weights by which Ã multiplies the columns of E_h A.

        Args:
            call: The attention call of the layer.

        Returns:
            One weight per key, or 1.0 for plain attention.
        """
        return 1.0

    def compute_mixing_map(self, call: AttentionCall) -> Float[Tensor, "batch query key"]:
        """Return the full map Ã of one layer.

        Args:
            call: The attention call, with its maps.

        Returns:
            E_h A with its columns multiplied by the weights.
        """
        weight = self.compute_column_weights(call)
        if isinstance(weight, Tensor):
            weight = weight[:, 0]
        return call.mean_attention * weight

    def insert_readout_rows(self, call: AttentionCall) -> Float[Tensor, "batch depth row unit"]:
        """Return the rows that enter a call, after starting those whose read-out depth is this layer.

        Args:
            call: The attention call; calls come from the last layer to the first.

        Returns:
            P, one set of rows for each read-out depth.
        """
        depth = self._find_starting_depth(call)
        if depth is not None:
            self.perception_rows[:, depth] = self.initial_rows
        return self.perception_rows

    def add_mixed_rows(self, call: AttentionCall, mixed_rows: Float[Tensor, "batch depth row unit"]) -> None:
        """Update P ← P + P · Ã, given P · Ã.

        Args:
            call: The attention call of the layer.
            mixed_rows: P · Ã.
        """
        depth = self._find_starting_depth(call)
        if depth is not None and not self.adds_identity_at_top:
            self.perception_rows[:, depth] = 0
        self.perception_rows = self.perception_rows + mixed_rows

    def _find_starting_depth(self, call: AttentionCall) -> int | None:
        """Return the index of the read-out depth whose rows start at this call, if there is one."""
        if self.has_depth_scores:
            return call.layer - self.unit_context.layers.start
        if call.layer == self.unit_context.layers.stop - 1:
            return 0
        return None

    def iter_points(self) -> Iterable[PathPoint]:
        """Return the points α_k, noisy copies of the input, the input alone, or nothing (`feedback`)."""
        point = PathPoint(interpolate_at="inputs" if self.lookups else "layers", stream=self.unit_context.stream)
        if self.feedback == "integrated":
            alphas = np.linspace(0, 1, self.steps).tolist() if self.steps > 1 else [1.0]
            return [replace(point, alpha=alpha) for alpha in alphas]
        if self.feedback == "smoothed":
            return [
                replace(point, noise_std=0.15, noise_relative_to="range", sample_index=draw)
                for draw in range(self.steps)
            ]
        if self.feedback == "gradient":
            return [point]
        return []

    def on_point_call(self, point: PathPoint, call: AttentionCall, queries: slice | None = None) -> None:
        """Add ∂y/∂A_last of one point to the mean over points; of a single read-out token only its row."""
        assert call.attention_gradient is not None
        gradient = call.attention_gradient / (1 if self.feedback == "gradient" else self.steps)
        if self.reads_single_token:
            gradient = self._select_readout_rows(gradient, queries)
        self.feedback_gradient = self.feedback_gradient + gradient

    def _select_readout_rows(
        self, gradient: Float[Tensor, "batch head query key"], queries: slice | None
    ) -> Float[Tensor, "batch head row key"]:
        """Select the rows of the read-out positions; zero if they are not among `queries`."""
        first_query = 0 if queries is None else queries.start
        row_index = self.unit_context.readout.abs().argmax(-1) - first_query
        in_tile = (row_index >= 0) & (row_index < gradient.shape[2]) & self.unit_context.readout.any(-1)
        row_index = row_index.clamp(0, gradient.shape[2] - 1)[:, None, :, None]
        return gradient.take_along_dim(row_index, 2) * in_tile[:, None, :, None]

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r = Σ_i w_i P_i ⊙ F_i for every depth, with w · P and w · F as factors."""
        perception = self.perception_rows
        if not self.uses_perception:  # each row is then weighted by the read-out alone
            perception = self.initial_rows.sum(-1, keepdim=True)[:, None].expand_as(self.perception_rows)
        rows = perception
        factors = None
        if isinstance(self.feedback_gradient, Tensor):
            feedback = self.feedback_gradient.clamp(min=0).mean(1).to(rows)[:, None]
            rows = perception * feedback
            if self.uses_perception and self.has_depth_scores:
                factors = {
                    "perception": self._apply_readout(perception)[:, -1, 0],
                    "feedback": self._apply_readout(feedback)[:, 0, 0],
                }
        rows = self._apply_readout(rows)
        per_layer = rows[:, :, 0] if self.has_depth_scores else None
        return MethodScores(rows[:, -1], per_layer=per_layer, factors=factors)

    def _apply_readout(self, rows: Float[Tensor, "batch depth row unit"]) -> Float[Tensor, "batch depth read unit"]:
        """Average rows by the read-out weights, and set padding to zero."""
        if not self.reads_single_token:
            rows = self.unit_context.readout[:, None] @ rows
        return rows * self.unit_context.valid_mask[:, None, None]
