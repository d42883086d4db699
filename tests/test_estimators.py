"""The scikit-learn estimators: its own conformance suite, and what that suite does not ask."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_diabetes, load_digits  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from distmlp.errors import DivergedError  # noqa: E402
from distmlp.estimators import MLPClassifier, MLPRegressor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


FLOAT32 = {
    "check_sample_weight_equivalence_on_dense_data": "asks for 1e-7; float32 gives 1e-6, tested below",
}


@parametrize_with_checks(
    [
        MLPClassifier(max_iter=60, learning_rate_init=0.01, engine="reference"),
        MLPRegressor(max_iter=60, learning_rate_init=0.01, engine="reference"),
    ],
    expected_failed_checks=lambda estimator: FLOAT32,
)
def test_scikit_learn_conformance(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    return train_test_split(*load_digits(return_X_y=True), random_state=0)


def test_digits_are_learned_as_well_as_scikit_learn_does(digits):
    X, X_test, y, y_test = digits
    model = MLPClassifier((64,), max_iter=30, learning_rate_init=0.01, random_state=0).fit(X, y)
    assert model.score(X_test, y_test) > 0.95
    assert model.loss_curve_[0] > model.loss_curve_[-1]
    assert model.predict_proba(X_test).sum(axis=1) == pytest.approx(np.ones(len(X_test)), abs=1e-5)


def test_string_classes_come_back(digits):
    X, _, y, _ = digits
    names = np.array([f"digit {value}" for value in y])
    model = MLPClassifier((32,), max_iter=20, learning_rate_init=0.01, random_state=0).fit(X, names)
    assert list(model.classes_) == sorted(set(names))
    assert (model.predict(X) == names).mean() > 0.9


def test_regression_in_the_targets_own_units():
    X, y = load_diabetes(return_X_y=True)
    model = MLPRegressor((16,), max_iter=60, learning_rate_init=0.01, random_state=0).fit(X, 1e6 + y)
    assert model.score(X, 1e6 + y) > 0.4
    two = MLPRegressor((16,), max_iter=5, random_state=0).fit(X, np.c_[y, -y])
    assert two.predict(X).shape == (len(X), 2)


def test_a_random_state_fixes_every_bit_and_survives_pickle_and_clone(digits):
    X, X_test, y, _ = digits
    model = MLPClassifier((16,), max_iter=3, random_state=4).fit(X, y)
    expected = model.predict_proba(X_test)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X_test), expected)
    assert np.array_equal(clone(model).fit(X, y).predict_proba(X_test), expected)
    assert not np.array_equal(clone(model).set_params(random_state=5).fit(X, y).predict_proba(X_test), expected)


@pytest.mark.parametrize("estimator", [MLPClassifier, MLPRegressor])
def test_a_weight_counts_like_that_many_equal_rows(estimator, digits):
    X, X_test, y, _ = digits
    X, y = X[:120], y[:120]
    times = np.arange(120) % 4  # zero among them
    wrong = np.where(times == 0, (y + 1) % 10, y)
    options = {"max_iter": 40, "random_state": 0, "batch_size": 200, "solver": "momentum", "learning_rate_init": 0.05}
    weighted = estimator((32,), **options).fit(X, wrong, sample_weight=0.5 * times)
    repeated = estimator((32,), **options).fit(np.repeat(X, times, axis=0), np.repeat(y, times))
    predict = "predict_proba" if estimator is MLPClassifier else "predict"
    assert getattr(weighted, predict)(X_test) == pytest.approx(getattr(repeated, predict)(X_test), abs=2e-4)


def test_partial_fit_continues_and_knows_the_classes_of_the_first_call(digits):
    X, X_test, y, y_test = digits
    model = MLPClassifier((64,), random_state=0)
    with pytest.raises(ValueError, match="must name all classes"):
        model.partial_fit(X, y)
    half = len(X) // 2
    for _ in range(20):
        model.partial_fit(X[:half], y[:half], classes=range(10)).partial_fit(X[half:], y[half:])
    assert model.n_iter_ == len(model.loss_curve_) == 40
    assert model.score(X_test, y_test) > 0.9
    with pytest.raises(ValueError, match="not named in the first call"):
        model.partial_fit(X[:5], [1, 2, 3, 11, 12])


def test_early_stopping_keeps_the_best_weights(digits):
    X, _, y, _ = digits
    model = MLPClassifier((64,), early_stopping=True, max_iter=100, n_iter_no_change=3, random_state=0).fit(X, y)
    assert model.n_iter_ < 100
    assert len(model.validation_scores_) == model.n_iter_
    assert max(model.validation_scores_) > 0.9


def test_it_works_in_model_selection(digits):
    X, _, y, _ = digits
    search = GridSearchCV(MLPClassifier(max_iter=5, random_state=0), {"hidden_layer_sizes": [(4,), (64,)]}, cv=2)
    assert search.fit(X, y).best_params_ == {"hidden_layer_sizes": (64,)}
    X, y = load_diabetes(return_X_y=True)
    assert (
        cross_val_score(MLPRegressor((16,), learning_rate_init=0.01, max_iter=30, random_state=0), X, y, cv=2).min()
        > 0.2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "rellu"}, "model.activation"),
        ({"hidden_layer_sizes": (0,)}, "model.layers"),
        ({"solver": "lbfgs"}, "optimizer.name"),
        ({"max_iter": 0}, "max_iter = 0"),
        ({"batch_size": 0}, "data.batch"),
        ({"loss": "mse"}, "loss = 'mse'"),
        ({"standardize": "both"}, "standardize = 'both'"),
    ],
)
def test_unfit_parameters_are_named_at_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLPClassifier(**arguments).fit([[0.0], [1.0]], [0, 1])


def test_weights_that_are_all_zero_and_divergence_are_refused():
    X, y = [[0.0], [1.0]], [0.0, 1.0]
    with pytest.raises(ValueError, match="non-zero"):
        MLPRegressor().fit(X, y, sample_weight=[0.0, 0.0])
    with pytest.raises(DivergedError, match="learning_rate_init"):
        MLPRegressor(solver="sgd", learning_rate_init=1e30, standardize="none").fit(X, y)


def test_without_scikit_learn_the_import_says_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None; import distmlp.estimators"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'distmlp[sklearn]'" in done.stderr.splitlines()[-1]
