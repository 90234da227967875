"""scikit-learn: a linear classifier with any Ω, whose probabilities can be exactly zero.

Needs ``pip install 'fenchel[sklearn]'``.
"""

from __future__ import annotations

import copy
import math
import warnings
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize

from fenchel.regularizers import Regularizer, Tsallis
from fenchel.regularizers.base import check_omega, simplified

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import compute_class_weight
    from sklearn.utils.extmath import safe_sparse_dot
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"fenchel.integrations.sklearn needs scikit-learn 1.6 or newer ({error}): pip install 'fenchel[sklearn]'",
        name="sklearn",
    ) from error

__all__ = ["FenchelYoungClassifier"]

Array = NDArray[np.float64]


class FenchelYoungClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Linear classifier trained by the Fenchel-Young loss of a regularizer Ω.

    .. math:: \min_{W, b} \; C \sum_i L_\Omega(W x_i + b, y_i) + \tfrac12 \|W\|^2

    ``Shannon()`` is multinomial logistic regression, with the coefficients of scikit-learn's ``LogisticRegression``.
    With a sparse map such as 1.5-entmax, ``predict_proba`` gives probabilities that are exactly zero for classes that
    the classifier rules out, and examples that are classified with a lead of ``omega.margin`` have no loss. With two
    classes there is one row of coefficients, and the scores are (0, w·x + b).

    Solved in float64 by L-BFGS. Takes dense and sparse matrices.

    Args:
        omega: the regularizer, with choices that sum to 1; None is ``Tsallis(1.5)``. Its own parameters are not
            trained.
        C: weight of the losses against the penalty, positive; smaller values regularize more.
        fit_intercept: whether to learn the intercepts b, which are not penalized.
        class_weight: None, ``"balanced"``, or a dictionary from class to weight.
        max_iter: largest number of iterations.
        tol: the solver stops when no component of the gradient of the mean loss is larger.

    Attributes:
        classes_: the classes, in the order of the columns of ``predict_proba``.
        coef_: W, (classes, features); (1, features) for two classes.
        intercept_: b, (classes,); (1,) for two classes.
        n_iter_: iterations that were used.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from fenchel.integrations.sklearn import FenchelYoungClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = FenchelYoungClassifier().fit(X, y)
        >>> classifier.predict_proba(X[[0, 70, 100]]).round(2)
        array([[1.  , 0.  , 0.  ],
               [0.  , 0.46, 0.54],
               [0.  , 0.  , 1.  ]])
        >>> round(classifier.score(X, y), 2)
        0.99

    References: Blondel, Martins & Niculae (2020), section 3.
    """

    def __init__(
        self,
        omega: Regularizer | None = None,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        class_weight: dict[Any, float] | str | None = None,
        max_iter: int = 1000,
        tol: float = 1e-6,
    ) -> None:
        self.omega = omega
        self.C = C
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.tol = tol

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the coefficients.

        Args:
            X: features, (examples, features), dense or sparse.
            y: classes, (examples,): numbers or strings.
            sample_weight: a factor for the loss of each example.

        Returns:
            The classifier itself.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr")
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        classes, features = len(self.classes_), X.shape[1]
        if classes < 2:
            raise ValueError(f"y must have at least two classes, got one class: {self.classes_[0]!r}")
        self._omega = self._make_omega(classes)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if self.class_weight is not None:
            weight = (
                weight
                * compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=weight)[target]
            )
        total = float(weight.sum())
        if total == 0:
            raise ValueError(
                "class_weight and sample_weight must leave a positive weight to some example, got 0 for all"
            )

        rows = 1 if classes == 2 else classes
        labels = torch.from_numpy(target)

        def objective(flat: Array) -> tuple[float, Array]:
            """The mean loss plus penalty, and its gradient."""
            matrix = flat.reshape(rows, features + 1)
            coefficients, intercept = matrix[:, :features], matrix[:, features]
            value, slope = self._loss(safe_sparse_dot(X, coefficients.T) + intercept, labels, weight / total)
            gradient = np.empty_like(matrix)
            gradient[:, :features] = safe_sparse_dot(slope.T, X) + coefficients / (self.C * total)
            gradient[:, features] = slope.sum(0) if self.fit_intercept else 0.0
            return value + 0.5 / (self.C * total) * float((coefficients**2).sum()), gradient.ravel()

        start = np.zeros(rows * (features + 1))
        options = {"maxiter": self.max_iter, "gtol": self.tol, "ftol": 0.0, "maxls": 50}
        result = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
        if result.nit >= self.max_iter:
            warnings.warn(
                f"the largest gradient is {np.abs(result.jac).max():.1e} after {result.nit} iterations, tol is "
                f"{self.tol:g}: raise max_iter or scale the features",
                ConvergenceWarning,
                stacklevel=2,
            )
        solution = result.x.reshape(rows, features + 1)
        self.coef_, self.intercept_ = solution[:, :features].copy(), solution[:, features].copy()
        self.n_iter_ = int(result.nit)
        return self

    def decision_function(self, X: Any) -> Array:
        """Scores W x + b: (examples, classes), or (examples,) for two classes, positive for the second."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, accept_sparse="csr", reset=False)
        scores: Array = safe_sparse_dot(X, self.coef_.T) + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """The class with the highest score of each example, (examples,)."""
        scores = _both(self.decision_function(X))
        predicted: NDArray[Any] = self.classes_[scores.argmax(1)]
        return predicted

    def predict_proba(self, X: Any) -> Array:
        """Probabilities, (examples, classes): argmax_Ω of the scores, with zeros if Ω is sparse."""
        scores = torch.from_numpy(_both(self.decision_function(X)))
        with torch.no_grad():
            probabilities: Array = self._omega.argmax(scores).numpy()
        return probabilities

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities, (examples, classes): −inf where a probability is zero."""
        scores = torch.from_numpy(_both(self.decision_function(X)))
        with torch.no_grad():
            logarithms: Array = self._omega.log_argmax(scores).numpy()
        return logarithms

    def _loss(self, scores: Array, target: torch.Tensor, weight: Array) -> tuple[float, Array]:
        """The weighted sum of the losses of all examples, and its gradient in the scores."""
        both = torch.from_numpy(_both(scores[:, 0] if scores.shape[1] == 1 else scores)).requires_grad_()
        loss = (torch.from_numpy(weight) * self._omega.loss(both, target)).sum()
        (slope,) = torch.autograd.grad(loss, both)
        return float(loss.detach()), slope.numpy()[:, -scores.shape[1] :]

    def _make_omega(self, classes: int) -> Regularizer:
        """A copy of omega in float64 that is not trained; ValueError if its choices do not sum to 1."""
        omega = Tsallis(1.5) if self.omega is None else copy.deepcopy(check_omega(self.omega))
        if omega.mass(classes) != 1:
            raise ValueError(f"omega must give choices that sum to 1, as Tsallis(1.5) or Gini() do, got {omega}")
        return simplified(omega).double().requires_grad_(False)

    def _check_parameters(self) -> None:
        for name, kind in (("C", Real), ("tol", Real), ("max_iter", Integral)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                word = "number" if kind is Real else "whole number"
                raise TypeError(f"{name} must be a {word}, got {value!r}")
            if not 0 < value < math.inf:  # type: ignore[operator]
                raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _both(scores: Array) -> Array:
    """Scores of all classes: (examples, 2) with 0 for the first if there is one score per example."""
    return np.stack([np.zeros_like(scores), scores], axis=1) if scores.ndim == 1 else scores
