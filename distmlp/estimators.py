"""scikit-learn's estimator interface over the same engine: `MLPClassifier` and `MLPRegressor`.

One process, rows in memory, no files. Names and defaults are those of `sklearn.neural_network` wherever both
have the thing; what is ours alone (`weight_decay`, `standardize`, `precision`, …) has the name it has in a run's
configuration.
"""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ImportError:
    raise ImportError(
        "distmlp.estimators needs scikit-learn 1.6 or newer: pip install 'distmlp[sklearn]' brings it"
    ) from None

from distmlp.config import RunConfig
from distmlp.data.arrays import take
from distmlp.data.shards import Rows
from distmlp.engine import Engine
from distmlp.engine.functions import softmax
from distmlp.errors import ConfigError
from distmlp.in_memory import Training

_FLOATS = (np.float64, np.float32)


class _MLP(BaseEstimator):
    """What both estimators share. Constructor arguments are kept as they are, as scikit-learn wants it.

    hidden_layer_sizes: widths of the hidden layers. activation: of the hidden layers, one name or one per layer.
    solver: sgd momentum nesterov rmsprop adam adamw lamb. loss: "auto", for a regressor also mse, mae or huber.
    standardize: none, inputs or both; "auto" is inputs for classes and both for regression.
    batch_size: "auto" is min(200, rows). max_iter: most epochs. A fit ends earlier when the loss (with
    `early_stopping` the score of a held-out `validation_fraction`) has not improved by `tol` in
    `n_iter_no_change` epochs. random_state: of initial weights, sample order and the held-out rows.
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: Any = "relu",
        *,
        solver: str = "adam",
        loss: str = "auto",
        standardize: str = "auto",
        batch_size: Any = "auto",
        learning_rate_init: float = 1e-3,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        init: str = "he_normal",
        momentum: float = 0.9,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        engine: str = "auto",
        precision: str = "fp32",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.solver = solver
        self.loss = loss
        self.standardize = standardize
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.init = init
        self.momentum = momentum
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.engine = engine
        self.precision = precision

    # What a subclass answers.
    _losses: tuple[str, ...]
    _standardizations: tuple[str, ...]  # the first is "auto"

    def _encode(self, y: NDArray) -> tuple[NDArray, int]:
        """`(targets for the engine, outputs)` of checked `y`; sets what the task learns from `y`."""
        raise NotImplementedError

    def _score(self, outputs: NDArray, targets: NDArray, weights: NDArray | None) -> float:
        """Higher is better; of the engine's `outputs` on held-out rows."""
        raise NotImplementedError

    def _checked_pair(self, X: Any, y: Any, reset: bool) -> tuple[NDArray, NDArray]:
        """X float (rows, features) and y as the task takes it."""
        raise NotImplementedError

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from fresh weights. X (rows, features), y (rows,) or (rows, outputs), sample_weight (rows,).

        Raises ValueError for unfit arguments or data, DivergedError when the loss stops being finite.
        """
        self.__dict__.pop("classes_", None)
        rows, outputs = self._checked(X, y, sample_weight, reset=True)
        self._start(rows, outputs)
        held_out = None
        if self.early_stopping:
            rows, held_out = self._hold_out(rows)
        if self._run(rows, held_out, int(self.max_iter)):
            warnings.warn(
                f"fit: {self.max_iter} epochs are over and the loss still falls; raise max_iter or learning_rate_init",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, first: bool) -> Self:
        rows, outputs = self._checked(X, y, sample_weight, reset=first)
        if first:
            self._start(rows, outputs)
        self._run(rows, None, 1)
        return self

    def _checked(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> tuple[Rows, int]:
        X, y = self._checked_pair(X, y, reset)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        targets, outputs = self._encode(y)
        return Rows(X, targets, weights), outputs

    def _start(self, rows: Rows, outputs: int) -> None:
        """Fresh weights and counters."""
        self._random = check_random_state(self.random_state)
        self._training = Training(self._configuration(rows.inputs.shape, outputs), rows)
        self.loss_curve_, self.validation_scores_ = self._training.losses, self._training.scores
        self.n_layers_, self.n_outputs_ = len(self._training.config.model.layers), outputs
        self.n_iter_, self.t_ = 0, 0

    def _configuration(self, shape: tuple[int, int], outputs: int) -> RunConfig:
        for name in ("max_iter", "n_iter_no_change"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} = {value!r}: expected a whole number of at least 1")
        widths = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=object)).tolist()
        activation = self.activation if isinstance(self.activation, str) else list(self.activation)
        loss = self._losses[0] if self.loss == "auto" else self.loss
        if loss not in self._losses:
            raise ValueError(f"loss = {self.loss!r}: expected auto or one of {', '.join(self._losses)}")
        standardize = self._standardizations[0] if self.standardize == "auto" else self.standardize
        if standardize not in self._standardizations:
            raise ValueError(
                f"standardize = {standardize!r}: expected auto or one of {', '.join(self._standardizations)}"
            )
        batch = min(200, shape[0]) if self.batch_size == "auto" else _plain(self.batch_size)
        document = {
            "model": {
                "layers": [shape[1], *(_plain(width) for width in widths), outputs],
                "activation": activation, "loss": loss, "init": self.init,
            },
            "data": {
                "train": "memory", "batch": batch, "streams": 1, "shuffle": bool(self.shuffle),
                "standardize": standardize,
            },
            "optimizer": {
                "name": self.solver, "learning_rate": float(self.learning_rate_init),
                "weight_decay": float(self.weight_decay), "clip_norm": float(self.clip_norm),
                "momentum": float(self.momentum), "beta1": float(self.beta_1), "beta2": float(self.beta_2),
                "epsilon": float(self.epsilon),
            },
            "run": {
                "epochs": int(self.max_iter), "seed": int(self._random.randint(2**31)),
                "engine": self.engine, "precision": self.precision,
            },
        }  # fmt: skip
        try:
            return RunConfig.parse(document, type(self).__name__)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def _hold_out(self, rows: Rows) -> tuple[Rows, Rows]:
        labels = rows.targets if rows.targets.ndim == 1 else None
        kept, held = train_test_split(
            np.arange(len(rows.inputs)),
            test_size=self.validation_fraction,
            random_state=self._random.randint(2**31),
            stratify=labels,
        )
        return take(rows, kept), take(rows, held)

    def _run(self, rows: Rows, held_out: Rows | None, epochs: int) -> bool:
        """Up to `epochs` more epochs; True if the last was used up and the loss was still falling."""

        def score(engine: Engine) -> float:
            assert held_out is not None
            return self._score(engine.predict(held_out.inputs), held_out.targets, held_out.weights)

        goes_on = self._training.run(
            rows, epochs, self.tol, int(self.n_iter_no_change), score if held_out is not None else None
        )
        self.t_ += (len(self.loss_curve_) - self.n_iter_) * -(-len(rows.inputs) // self._training.config.data.batch)
        self.n_iter_, self.loss_ = len(self.loss_curve_), self.loss_curve_[-1]
        return goes_on

    def _outputs(self, X: Any) -> NDArray:
        """The output layer (rows, outputs), float32, in target units."""
        check_is_fitted(self)
        return self._training.outputs(validate_data(self, X, dtype=_FLOATS, reset=False))

    @property
    def coefs_(self) -> list[NDArray]:
        """Weights (fan_in, fan_out) of every layer, behind the standardization."""
        return [weight for weight, _ in self._training.views]

    @property
    def intercepts_(self) -> list[NDArray]:
        """Biases (fan_out,) of every layer."""
        return [bias for _, bias in self._training.views]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_training")


class MLPClassifier(ClassifierMixin, _MLP):
    """A multilayer perceptron that predicts classes, trained with softmax cross-entropy.

    After a fit: `classes_ n_features_in_ n_iter_ loss_ loss_curve_ coefs_ intercepts_`, with `early_stopping`
    also `validation_scores_` (accuracy). Parameters: see `_MLP`.
    """

    _losses = ("softmax_cross_entropy",)
    _standardizations = ("inputs", "none")

    classes_: NDArray

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One more epoch, over X and y, from the weights so far. The first call names all `classes` to come.

        The standardization is that of the first call.
        """
        first = not self.__sklearn_is_fitted__()
        if first and classes is None:
            raise ValueError("partial_fit: the first call must name all classes")
        if classes is not None:
            known = unique_labels(classes)
            if not first and not np.array_equal(self.classes_, known):
                raise ValueError(f"partial_fit: classes {known} are not those of the first call, {self.classes_}")
            self.classes_ = known
        return self._partial_fit(X, y, sample_weight, first)

    def predict_proba(self, X: Any) -> NDArray:
        """Class probabilities (rows, classes), float32, in the order of `classes_`."""
        return softmax(self._outputs(X))

    def predict_log_proba(self, X: Any) -> NDArray:
        """Logarithms of `predict_proba`; -inf where a probability is zero."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> NDArray:
        """The likeliest class (rows,) of every row."""
        outputs = self._outputs(X)
        return self.classes_[np.argmax(outputs, axis=1)]

    def _checked_pair(self, X: Any, y: Any, reset: bool) -> tuple[NDArray, NDArray]:
        X, y = validate_data(self, X, y, reset=reset, dtype=_FLOATS, multi_output=True)
        check_classification_targets(y)
        return X, column_or_1d(y, warn=True)

    def _encode(self, y: NDArray) -> tuple[NDArray, int]:
        if not hasattr(self, "classes_"):
            self.classes_ = unique_labels(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"partial_fit: classes {unknown} were not named in the first call, {self.classes_}")
        return np.searchsorted(self.classes_, y), len(self.classes_)

    def _score(self, outputs: NDArray, targets: NDArray, weights: NDArray | None) -> float:
        return float(accuracy_score(targets, np.argmax(outputs, axis=1), sample_weight=weights))


class MLPRegressor(RegressorMixin, _MLP):
    """A multilayer perceptron that predicts one value or several, trained with `loss` mse (auto), mae or huber.

    After a fit: `n_features_in_ n_iter_ loss_ loss_curve_ coefs_ intercepts_`, with `early_stopping` also
    `validation_scores_` (R²). Losses are of standardized targets. Parameters: see `_MLP`.
    """

    _losses = ("mse", "mae", "huber")
    _standardizations = ("both", "inputs", "none")

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One more epoch, over X and y, from the weights so far; the standardization is that of the first call."""
        return self._partial_fit(X, y, sample_weight, not self.__sklearn_is_fitted__())

    def predict(self, X: Any) -> NDArray:
        """Predicted values, float32, of the shape that y had: (rows,) or (rows, outputs)."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def _checked_pair(self, X: Any, y: Any, reset: bool) -> tuple[NDArray, NDArray]:
        X, y = validate_data(self, X, y, reset=reset, dtype=_FLOATS, multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        return X, y.astype(np.float64, copy=False)

    def _encode(self, y: NDArray) -> tuple[NDArray, int]:
        self._flat = y.ndim == 1
        targets = y.reshape(len(y), -1)
        return targets, targets.shape[1]

    def _score(self, outputs: NDArray, targets: NDArray, weights: NDArray | None) -> float:
        return float(r2_score(targets, outputs, sample_weight=weights))


def _plain(value: Any) -> Any:
    """NumPy's whole numbers as Python's: the configuration is strict."""
    return int(value) if isinstance(value, Integral) else value
