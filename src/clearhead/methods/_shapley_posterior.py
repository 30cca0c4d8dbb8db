"""Shapley values and their uncertainty from a few pairs of coalitions, given a guess of the scores and of their size.

    prior       φ = c·r + s∘u,   u ~ N(0, τ²I),   Σ φ = v(all) − v(∅)
    data        y_k = (v(z_k) − v(¬z_k)) / 2 = (z_k − ½)·φ + ε_k,   k = 1 … n,   weights w_k with Σ w_k = 1
    misfit      ε with √(n w_k) in front of row k: N(0, σ²(I − f H)),   H the projection on the columns of the data

c has a flat prior, which makes the result independent of the sign and the size of r; σ² has the prior 1/σ², and the
share of misfit in the data, σ²/(σ² + κτ²) with κ the mean prior variance of the data at τ = 1, the prior Beta(1, 1).
c and σ² are integrated in closed form for each ratio τ²/σ² of a grid, and the results averaged by their probabilities.

ε is no noise, but what is not additive in v: it is the same each time that a pair is evaluated, and pairs are
drawn without replacement from a finite set. f is the share of the kernel mass that was evaluated. Over the whole set,
where f = 1, no misfit is left in the columns of the data, and φ are the exact Shapley values, without uncertainty.

Nor has ε the same variance for all coalitions. So the covariance of the estimates is the mean of two: that of the
posterior, and the sandwich estimate, in which the square of each pair's error, when it is predicted from all other
pairs, takes the place of its variance. The first alone covers large scores too rarely, and the second is too narrow
with few pairs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

#: Grid of log(κτ²/σ²).
_LOG_SIGNAL_TO_MISFIT = torch.linspace(-8, 24, 49, dtype=torch.float64)
#: Grid points with less than this share of the largest probability are left out.
_MIN_RELATIVE_PROBABILITY = 1e-3
#: c is not estimated where what it multiplies is a rounding error: this share of the squares of the guess's data.
_MIN_TREND = 1e-18
#: The smallest variance of the misfit, relative to the squares of the data: less is a rounding error.
_MIN_MISFIT = 1e-28
#: Singular values of the data below this share of the largest are zero.
_RANK_RTOL = 1e-9


@dataclass(frozen=True)
class ShapleyPosterior:
    """Estimated Shapley values with the factors of their covariance, diag(v) + P Pᵀ − N Nᵀ.

    Attributes:
        mean: The estimates.
        diagonal: v.
        positive_factors: P.
        negative_factors: N.
        degrees_of_freedom: Those of the t distribution of the estimates.
        tau: τ, the root mean square over the grid.
        sigma: σ, likewise.
        guess_weight: c, the mean over the grid.
    """

    mean: Float[Tensor, "player"]
    diagonal: Float[Tensor, "player"]
    positive_factors: Float[Tensor, "player factor"]
    negative_factors: Float[Tensor, "player negative"]
    degrees_of_freedom: int
    tau: float
    sigma: float
    guess_weight: float

    @property
    def variances(self) -> Float[Tensor, "player"]:
        """The variance of each estimate."""
        low_rank = self.positive_factors.square().sum(1) - self.negative_factors.square().sum(1)
        return (self.diagonal + low_rank).clamp(min=0)

    def compute_covariance(self, groups: Float[Tensor, "unit player"]) -> Float[Tensor, "unit unit"]:
        """Return the covariance of weighted sums of the estimates.

        Args:
            groups: The weight of each player in each sum.
        """
        positive = groups @ self.positive_factors
        negative = groups @ self.negative_factors
        return (groups * self.diagonal) @ groups.mT + positive @ positive.mT - negative @ negative.mT


def make_certain_posterior(scores: Float[Tensor, "player"]) -> ShapleyPosterior:
    """Return known values without uncertainty.

    Args:
        scores: The values.
    """
    no_factors = scores.new_zeros(len(scores), 0)
    return ShapleyPosterior(scores, torch.zeros_like(scores), no_factors, no_factors, 1, 0.0, 0.0, 0.0)


def compute_shapley_posterior(
    coalitions: Bool[Tensor, "pair player"],
    half_differences: Float[Tensor, "pair"],
    weights: Float[Tensor, "pair"],
    evaluated_share: float,
    total: Float[Tensor, ""],
    guess: Float[Tensor, "player"],
    scales: Float[Tensor, "player"],
) -> ShapleyPosterior:
    """Estimate the scores of players from pairs of a coalition and its complement.

    Args:
        coalitions: One coalition z of each pair.
        half_differences: y = (v(z) − v(¬z)) / 2.
        weights: w; they sum to one.
        evaluated_share: f, less than one.
        total: v(all) − v(∅).
        guess: r; zeros for none.
        scales: s, all positive.
    """
    data = _WhitenedData.build(coalitions, half_differences, weights, evaluated_share, total, guess, scales)
    if not bool(data.response.any()):  # the prior alone explains the data
        return make_certain_posterior(data.offset)
    log_probabilities = data.compute_log_evidence()
    log_probabilities += logsigmoid(_LOG_SIGNAL_TO_MISFIT) + logsigmoid(-_LOG_SIGNAL_TO_MISFIT)
    probabilities = (log_probabilities - log_probabilities.max()).exp()
    kept = probabilities > _MIN_RELATIVE_PROBABILITY
    probabilities = probabilities[kept] / probabilities[kept].sum()
    fits = [data.fit(ratio) for ratio in data.ratios[kept][:, None]]
    means = torch.stack([fit.mean for fit in fits])
    mean = probabilities @ means
    roots = (probabilities / 2).sqrt()[:, None]  # half of each of the two covariances
    spread = (2**0.5 * roots * (means - mean)).mT
    scaled = list(zip(roots, fits, strict=True))
    signal_variance = probabilities @ torch.cat([fit.signal_variance for fit in fits])
    return ShapleyPosterior(
        mean=mean,
        diagonal=signal_variance * data.prior_variances / 2,
        positive_factors=torch.cat(
            [spread, *(r * f.trend_factor for r, f in scaled), *(r * f.sandwich_factor for r, f in scaled)], 1
        ),
        negative_factors=torch.cat([r * f.explained_factor for r, f in scaled], 1),
        degrees_of_freedom=data.degrees_of_freedom,
        tau=float(signal_variance.sqrt()),
        sigma=float((probabilities @ torch.cat([fit.misfit_variance for fit in fits])).sqrt()),
        guess_weight=float(probabilities @ torch.cat([fit.guess_weight for fit in fits])),
    )


@dataclass(frozen=True)
class _Fit:
    """The estimates for one ratio τ²/σ², and the factors of their covariances.

    Attributes:
        mean: The estimates.
        guess_weight: c.
        misfit_variance: σ².
        signal_variance: τ².
        explained_factor: What the data take away from the covariance of the prior, and what the sum of φ does.
        trend_factor: The uncertainty of c.
        sandwich_factor: The errors of the pairs, propagated to the scores.
    """

    mean: Float[Tensor, "player"]
    guess_weight: Float[Tensor, "1"]
    misfit_variance: Float[Tensor, "1"]
    signal_variance: Float[Tensor, "1"]
    explained_factor: Float[Tensor, "player factor"]
    trend_factor: Float[Tensor, "player trend"]
    sandwich_factor: Float[Tensor, "player pair"]


@dataclass(frozen=True)
class _WhitenedData:
    """The data, in coordinates in which the misfit has the covariance σ²I and the prior a diagonal one.

    Attributes:
        offset: The mean of the prior at c = 0.
        regressor: What c multiplies.
        prior_variances: s².
        rotation: Its transpose maps the weighted data to these coordinates.
        eigenvalues: The prior variances of the data at τ = 1.
        response: The data without the offset.
        trend: The data of the regressor.
        has_trend: Whether they are more than rounding errors, so that c can be estimated.
        loadings: The prior covariance of the scores with the data at τ = 1.
        ratios: The grid of τ²/σ².
        evaluated_share: f.
    """

    offset: Float[Tensor, "player"]
    regressor: Float[Tensor, "player"]
    prior_variances: Float[Tensor, "player"]
    rotation: Float[Tensor, "pair datum"]
    eigenvalues: Float[Tensor, "datum"]
    response: Float[Tensor, "datum"]
    trend: Float[Tensor, "datum"]
    has_trend: bool
    loadings: Float[Tensor, "player datum"]
    ratios: Float[Tensor, "ratio"]
    evaluated_share: float

    @classmethod
    def build(
        cls,
        coalitions: Bool[Tensor, "pair player"],
        half_differences: Float[Tensor, "pair"],
        weights: Float[Tensor, "pair"],
        evaluated_share: float,
        total: Float[Tensor, ""],
        guess: Float[Tensor, "player"],
        scales: Float[Tensor, "player"],
    ) -> "_WhitenedData":
        """Condition the prior on the sum of the scores, and rotate the data."""
        variances = scales.square()
        sum_shares = variances / variances.sum()  # how the prior divides a change of the sum
        offset = total * sum_shares
        regressor = guess - guess.sum() * sum_shares
        roots = (len(coalitions) * weights).sqrt()
        rows = roots[:, None] * (coalitions.double() - 0.5)
        covariance_rows = rows * variances - (rows @ variances)[:, None] * sum_shares
        # (I − f H)^(−½), where H projects on what scores that sum to zero can explain
        left, singular_values, _ = torch.linalg.svd(rows - rows.mean(1, keepdim=True), full_matrices=False)
        columns = left[:, singular_values > _RANK_RTOL * singular_values.max()]
        whitening = torch.eye(len(rows), dtype=rows.dtype)
        whitening += ((1 - evaluated_share) ** -0.5 - 1) * columns @ columns.mT
        kernel = covariance_rows @ rows.mT
        eigenvalues, vectors = torch.linalg.eigh(whitening @ kernel @ whitening)
        rotation = whitening @ vectors
        response = rotation.mT @ (roots * half_differences - rows @ offset)
        trend = rotation.mT @ (rows @ regressor)
        return cls(
            offset=offset,
            regressor=regressor,
            prior_variances=variances,
            rotation=rotation,
            eigenvalues=eigenvalues.clamp(min=0),
            response=response,
            trend=trend,
            has_trend=bool(trend.square().sum() > _MIN_TREND * (rows @ guess).square().sum()),
            loadings=covariance_rows.mT @ rotation,
            ratios=_LOG_SIGNAL_TO_MISFIT.exp() / kernel.diagonal().mean(),
            evaluated_share=evaluated_share,
        )

    @property
    def degrees_of_freedom(self) -> int:
        """The number of pairs, less one if c is estimated."""
        return len(self.response) - int(self.has_trend)

    def _regress(
        self, ratios: Float[Tensor, "*ratio 1"]
    ) -> tuple[Float[Tensor, "*ratio datum"], Float[Tensor, "*ratio 1"], Float[Tensor, "*ratio 1"]]:
        """Return the precisions of the data times σ², c (zero without a trend), and σ²."""
        precisions = 1 / (1 + ratios * self.eigenvalues)
        information = self._compute_information(precisions)
        weight = torch.zeros_like(ratios)
        if self.has_trend:
            weight = (precisions * self.trend * self.response).sum(-1, keepdim=True) / information
        residuals = self.response - weight * self.trend
        misfit_variance = (precisions * residuals.square()).sum(-1, keepdim=True) / self.degrees_of_freedom
        return precisions, weight, misfit_variance

    def _compute_information(self, precisions: Float[Tensor, "*ratio datum"]) -> Float[Tensor, "*ratio 1"]:
        """The information about c times σ²; one without a trend."""
        if not self.has_trend:
            return torch.ones_like(precisions[..., :1])
        return (precisions * self.trend.square()).sum(-1, keepdim=True)

    def compute_log_evidence(self) -> Float[Tensor, "ratio"]:
        """Return the log probability of the data for each ratio, with c and σ² integrated."""
        precisions, _, misfit_variances = self._regress(self.ratios[:, None])
        information = self._compute_information(precisions)
        scale = self.response.square().sum()  # residuals below rounding errors are no evidence
        log_variances = (misfit_variances / scale).clamp(min=_MIN_MISFIT).log()
        log_evidence = precisions.log().sum(-1, keepdim=True) - information.log()
        return (log_evidence - self.degrees_of_freedom * log_variances)[:, 0] / 2

    def fit(self, ratio: Float[Tensor, "1"]) -> _Fit:
        """Return the estimates for τ²/σ² = `ratio`."""
        precisions, weight, misfit_variance = self._regress(ratio)
        information = self._compute_information(precisions)
        weighted_trend = precisions * self.trend
        gains = ratio * self.loadings * precisions  # how the residuals change the scores
        trend_effect = self.regressor - gains @ self.trend  # how c changes the scores, at the same data
        signal_variance = ratio * misfit_variance
        sum_factor = (signal_variance / self.prior_variances.sum()).sqrt() * self.prior_variances[:, None]
        data_factor = (signal_variance * ratio * precisions).sqrt() * self.loadings
        # A datum's error when predicted from all others is its entry of P y over that of the diagonal of P, where P is
        # the inverse covariance of the data after the estimation of c.
        projection = torch.diag(precisions)
        score_gains = gains
        trend_factor = self.loadings[:, :0]
        if self.has_trend:
            projection = projection - torch.outer(weighted_trend, weighted_trend) / information
            score_gains = gains + torch.outer(trend_effect, weighted_trend) / information
            trend_factor = (misfit_variance / information).sqrt() * trend_effect[:, None]
        residuals = self.response - weight * self.trend
        diagonal = ((self.rotation @ projection) * self.rotation).sum(1)
        errors = (self.rotation @ (precisions * residuals)) / diagonal.clamp(min=torch.finfo(diagonal.dtype).tiny)
        return _Fit(
            mean=self.offset + weight * self.regressor + gains @ residuals,
            guess_weight=weight,
            misfit_variance=misfit_variance,
            signal_variance=signal_variance,
            explained_factor=torch.cat([sum_factor, data_factor], 1),
            trend_factor=trend_factor,
            sandwich_factor=(1 - self.evaluated_share) ** 0.5 * (score_gains @ self.rotation.mT) * errors,
        )
