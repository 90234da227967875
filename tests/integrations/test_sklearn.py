"""The linear classifier against scikit-learn's own, a general-purpose solver, and scikit-learn's checks."""

import pickle

import cvxpy
import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

import fenchel
from fenchel.integrations.sklearn import FenchelYoungClassifier


def problem(classes: int, examples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    return make_classification(
        examples, 5, n_informative=4, n_redundant=0, n_classes=classes, n_clusters_per_class=1, random_state=0
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")  # the check takes the logarithm of zeros
@pytest.mark.filterwarnings("ignore:.*n_iter_:sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:the largest gradient:sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([FenchelYoungClassifier(), FenchelYoungClassifier(fenchel.Gini(), C=0.1)])
def test_scikit_learn_finds_nothing_wrong(estimator, check) -> None:
    check(estimator)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("intercept", [True, False])
def test_shannon_is_logistic_regression(classes: int, intercept: bool) -> None:
    X, y = problem(classes)
    weight = np.random.default_rng(0).uniform(0.1, 2, len(y))
    ours = FenchelYoungClassifier(fenchel.Shannon(), C=0.3, fit_intercept=intercept, tol=1e-9, class_weight="balanced")
    theirs = LogisticRegression(C=0.3, fit_intercept=intercept, tol=1e-10, max_iter=10_000, class_weight="balanced")
    ours.fit(X, y, weight)
    theirs.fit(X, y, weight)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-5)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)


def test_sparsemax_solves_the_quadratic_program() -> None:
    X, y = problem(3, 30)
    ours = FenchelYoungClassifier(fenchel.Gini(), C=0.5, tol=1e-9).fit(X, y)
    # The loss is max_p <p, s> - (|p|^2 - 1)/2 - s_y; its minimum by the dual program over the p of all examples, where
    # W = C sum_i (e_y - p_i) x_i and intercepts force sum_i (e_y - p_i) = 0.
    hot = np.eye(3)[y]
    p = cvxpy.Variable((len(y), 3), nonneg=True)
    W = 0.5 * (hot - p).T @ X
    dual = 0.5 * cvxpy.sum_squares(W) + 0.5 * (0.5 * cvxpy.sum_squares(p))
    cvxpy.Problem(cvxpy.Minimize(dual), [cvxpy.sum(p, axis=1) == 1, cvxpy.sum(hot - p, axis=0) == 0]).solve(
        solver="CLARABEL"
    )
    np.testing.assert_allclose(ours.coef_, W.value, atol=1e-5)
    np.testing.assert_allclose(ours.predict_proba(X), p.value, atol=1e-5)
    assert (ours.predict_proba(X) == 0).any()


def test_sparse_and_dense_features_give_the_same() -> None:
    X, y = problem(3)
    X[np.abs(X) < 0.7] = 0.0
    dense, sparse = (FenchelYoungClassifier().fit(form, y) for form in (X, scipy.sparse.csr_matrix(X)))
    np.testing.assert_allclose(dense.coef_, sparse.coef_, atol=1e-6)
    np.testing.assert_allclose(dense.predict_proba(X), sparse.predict_proba(scipy.sparse.csr_matrix(X)), atol=1e-6)


def test_logarithms_are_those_of_the_probabilities() -> None:
    X, y = problem(3)
    classifier = FenchelYoungClassifier(fenchel.Gini()).fit(X, y)
    probabilities = classifier.predict_proba(X)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(classifier.predict_log_proba(X), np.log(probabilities), rtol=1e-9)
    assert np.isneginf(classifier.predict_log_proba(X)).any()


def test_the_users_omega_is_neither_trained_nor_changed() -> None:
    X, y = problem(3)
    omega = fenchel.Tsallis(1.5, learnable=True)
    before = {name: value.clone() for name, value in omega.state_dict().items()}
    classifier = FenchelYoungClassifier(omega).fit(X, y)
    assert all(torch.equal(before[name], value) for name, value in omega.state_dict().items())
    assert next(omega.parameters()).requires_grad
    assert next(omega.parameters()).dtype == torch.float32
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))
    np.testing.assert_allclose(clone(classifier).fit(X, y).coef_, classifier.coef_, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"omega": fenchel.KSubsets(2)}, ValueError, "omega must give choices that sum to 1"),
        ({"omega": 1.5}, TypeError, "omega"),
        ({"C": 0.0}, ValueError, "C must be positive"),
        ({"C": "1"}, TypeError, "C must be a number"),
        ({"tol": -1.0}, ValueError, "tol must be positive"),
        ({"max_iter": 2.5}, TypeError, "max_iter must be a whole number"),
    ],
)
def test_wrong_parameters_are_named(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        FenchelYoungClassifier(**arguments).fit(*problem(3))


def test_weights_that_are_all_zero_are_refused() -> None:
    X, y = problem(2)
    with pytest.raises(ValueError, match="class_weight and sample_weight must leave a positive weight"):
        FenchelYoungClassifier(class_weight={0: 0.0, 1: 0.0}).fit(X, y)
