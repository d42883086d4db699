import numpy as np
import pytest

from distmlp.config import RunConfig
from distmlp.engine import Standardization
from distmlp.engine.device import find_obstacle
from distmlp.engine.select import open_engine
from distmlp.errors import AgreedError, SystemUnfitError
from distmlp.network import Network
from tests.engine.fakes import FakeJob, FakeWorld

NO_GPU = pytest.mark.skipif(not find_obstacle(), reason="there is a GPU")
NETWORK = Network.build([3, 2], "relu", "identity")


def opened(feed: object, **run: str):
    config = RunConfig(model={"layers": (3, 2)}, data={"train": "x"}, run=run)
    return open_engine(config, NETWORK, FakeWorld(), feed, Standardization())


@NO_GPU
def test_auto_without_a_gpu_takes_the_reference_engine_and_says_why():
    engine, reason = opened(None)
    assert engine.name == "reference"
    assert find_obstacle() in reason


@NO_GPU
@pytest.mark.parametrize(
    "run", [{"precision": "bf16"}, {"engine": "fused"}, {"engine": "reference", "precision": "tf32"}]
)
def test_what_a_gpu_trained_can_be_used_without_one(run):
    engine, _ = opened(None, **run)
    assert engine.predict(np.zeros((1, 3), "f4")).shape == (1, 2)


@NO_GPU
@pytest.mark.parametrize(
    ("run", "said"), [({"precision": "bf16"}, "run.precision = bf16"), ({"engine": "fused"}, "run.engine = fused")]
)
def test_training_as_asked_for_is_refused_where_it_cannot_be(run, said):
    with pytest.raises((SystemUnfitError, AgreedError), match=said) as refused:
        opened(object(), **run)
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_transports_of_gpus_are_refused_by_the_reference_engine(transport):
    config = RunConfig(
        model={"layers": (3, 2)}, data={"train": "x"}, run={"engine": "reference", "transport": transport}
    )
    with pytest.raises(SystemUnfitError, match=rf"run\.transport = {transport} needs the fused engine"):
        open_engine(config, NETWORK, FakeWorld(FakeJob(2)), None, Standardization())
