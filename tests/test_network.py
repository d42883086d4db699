"""The parameter layout and the initial values."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmlp.network import ALIGNMENT, Network

widths = st.lists(st.integers(1, 70), min_size=2, max_size=6)


@given(widths)
@settings(max_examples=50)
def test_every_parameter_has_one_place_of_its_own(sizes):
    network = Network.build(sizes, "relu", "identity")
    flat = np.zeros(network.size, np.int64)
    for layer, (weight, bias) in zip(network.layers, network.views(flat), strict=True):
        assert weight.shape == (layer.fan_in, layer.fan_out)
        assert bias.shape == (layer.fan_out,)
        assert layer.weight_offset % ALIGNMENT == layer.bias_offset % ALIGNMENT == 0
        weight += 1
        bias += 1
    assert flat.max() == 1
    assert flat.sum() == network.parameter_count == sum(a * b + b for a, b in itertools.pairwise(sizes))
    assert network.size % ALIGNMENT == 0


def test_views_share_memory_with_the_buffer():
    network = Network.build([3, 2], "relu", "identity")
    flat = np.zeros(network.size)
    weight, bias = network.views(flat)[0]
    weight[1, 0], bias[1] = 5.0, 7.0
    assert flat[2] == 5.0  # C order: row 1, column 0 of (3, 2)
    assert flat[ALIGNMENT + 1] == 7.0


def test_activations_one_per_layer():
    assert Network.build([4, 3, 2, 1], "tanh", "identity").activations == ("tanh", "tanh", "identity")
    assert Network.build([4, 3, 2, 1], ["relu", "sine"], "sigmoid").activations == ("relu", "sine", "sigmoid")
    with pytest.raises(ValueError, match="3 activations for 2 hidden"):
        Network.build([4, 3, 2, 1], ["relu"] * 3, "identity")


def test_initial_values_of_a_layer_depend_on_seed_and_layer_alone():
    first = Network.build([20, 30, 5], "relu", "identity")
    other = Network.build([9, 20, 30, 5], "relu", "identity")
    deeper = Network.build([20, 30, 5, 8, 8], "relu", "identity")
    same, same_too = (net.views(net.initial(7, "he_normal"))[0][0] for net in (first, deeper))
    np.testing.assert_array_equal(same, same_too)
    weights = [w for w, _ in first.views(first.initial(7, "he_normal"))]
    assert not np.array_equal(weights[0], other.views(other.initial(7, "he_normal"))[1][0])
    assert not np.array_equal(weights[0], first.views(first.initial(8, "he_normal"))[0][0])
    wide_seed = first.initial(7 + (1 << 40), "he_normal")
    assert not np.array_equal(wide_seed, first.initial(7, "he_normal"))


@pytest.mark.parametrize(
    ("init", "variance"),
    [
        ("he_normal", 2 / 300), ("he_uniform", 2 / 300), ("glorot_normal", 2 / 500), ("glorot_uniform", 2 / 500),
        ("lecun_normal", 1 / 300), ("zeros", 0.0),
    ],
)  # fmt: skip
def test_initial_distribution(init, variance):
    network = Network.build([300, 200], "relu", "identity")
    flat = network.initial(3, init, np.float64)
    weight, bias = network.views(flat)[0]
    assert not bias.any()
    assert flat.sum() == pytest.approx(weight.sum())  # the gaps are zero
    assert abs(weight.mean()) <= 5 * (variance / weight.size) ** 0.5
    assert weight.var() == pytest.approx(variance, rel=0.03)
    if "uniform" in init:
        assert abs(weight).max() <= (3 * variance) ** 0.5
    elif variance:
        assert abs(weight).max() > 3 * variance**0.5


def test_hash_is_over_weights_and_biases_in_layer_order_without_the_gaps():
    network = Network.build([3, 4, 2], "relu", "identity")
    flat = network.initial(1, "he_normal")
    digest = hashlib.sha256()
    for weight, bias in network.views(flat):
        digest.update(weight.astype("<f4").tobytes())
        digest.update(bias.astype("<f4").tobytes())
    assert network.sha256(flat) == digest.hexdigest()
    assert network.sha256(flat.astype(np.float64)) == digest.hexdigest()
    changed = flat.copy()
    network.views(changed)[1][1][1] += 1
    assert network.sha256(changed) != digest.hexdigest()


def test_fingerprint_tells_any_changed_value():
    network = Network.build((7, 5, 3), "relu", "identity")
    flat = network.initial(0, "he_normal")
    other = flat.copy()
    assert network.fingerprint(other) == network.fingerprint(flat)
    for place in (0, 1, network.layers[1].bias_offset):
        other = flat.copy()
        other[place] = np.nextafter(other[place], np.float32(9))
        assert network.fingerprint(other) != network.fingerprint(flat)
