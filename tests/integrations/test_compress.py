"""The arguments that `compress` takes, and those that it refuses with advice in one line."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from tahq.errors import ConfigError
from tahq.integrations.torch_pipelining import OVERRIDDEN, SUPPORTED, CompressedStage, check_torch, compress

pytestmark = pytest.mark.usefixtures("_group")


def stage(number: int = 0) -> PipelineStage:
    return PipelineStage(torch.nn.Identity(), number, 2, torch.device("cpu"))


def test_a_stage_and_a_list_come_back_as_they_are() -> None:
    one, two = stage(0), [stage(0), stage(1)]
    assert compress(one, seed=np.int64(3), step=np.uint8(2)) is one  # type: ignore[call-overload]
    assert compress(two) is two
    assert all(isinstance(changed, CompressedStage) for changed in (one, *two))


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        ({"activations": "thq"}, "no codec 'thq'; did you mean tah"),
        ({"gradients": "fixed:bits=1"}, "bits must be a whole number from 2 to 16; got 1"),
        ({"activations": "aqsgd"}, "aqsgd remembers samples.*use aqsgd:cache=none"),
        ({"gradients": "aqsgd:cache=file"}, "aqsgd:cache=file remembers samples"),
        ({"backend": "metal"}, "metal"),
        ({"backend": "triton"}, r"activations: codec wf: backend triton takes tensors on cuda, got .* cpu"),
        ({"activations": None}, "activations must be a codec spec, such as 'tah'; got None"),
        ({"seed": -1}, "seed must be a whole number from 0 .* got -1"),
        ({"seed": None}, "seed must be a whole number"),
        ({"step": 2**63}, "step must be a whole number from 0"),
        ({"step": torch.tensor(3.0)}, "step must be a whole number"),
        ({"threads": "2"}, "threads must be a whole number from 1 .* got '2'"),
        ({"backend": None}, "backend must be auto"),
    ],
)
def test_bad_argument_is_refused_and_the_stage_left_alone(
    monkeypatch: pytest.MonkeyPatch, codecs: dict[str, object], says: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    untouched = stage()
    with pytest.raises(ConfigError, match=says):
        compress(untouched, **codecs)  # type: ignore[arg-type]
    assert type(untouched) is PipelineStage


def test_a_stage_is_given_and_compressed_once_and_every_rank_has_one() -> None:
    one = stage()
    with pytest.raises(ConfigError, match="every rank of a pipeline has one"):
        compress([])
    with pytest.raises(ConfigError, match="stage 0 is given twice"):
        compress([one, one])
    assert type(one) is PipelineStage
    with pytest.raises(ConfigError, match="stage 0 is compressed already"):
        compress(compress(one))


def traced() -> object:
    """A stage that torch cuts out of a graph, which is of another class."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    cut = pipeline(module, (torch.zeros(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    return cut.build_stage(0, torch.device("cpu"))


NOT_STAGES: dict[str, Callable[[], object]] = {
    "Identity": torch.nn.Identity,
    "Sequential": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)),
    "_PipelineStage": traced,
    "generator": lambda: (made for made in [stage()]),
    "str": lambda: "stage",
    "NoneType": lambda: None,
}


@pytest.mark.parametrize("kind", NOT_STAGES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of its own
def test_what_is_no_stage_nor_list_of_them_is_refused(kind: str) -> None:
    """A generator, too: nothing would be left of it to be returned."""
    given, first = NOT_STAGES[kind](), stage()
    for stages in (given, [first, given]):
        with pytest.raises(ConfigError, match=f"takes PipelineStage, or a list of them; got {kind}"):
            compress(stages)  # type: ignore[call-overload]
    assert type(first) is PipelineStage


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cu130", "2.1.3", "3.0.0a0+git123", "2.131.0"])
def test_untried_torch_is_refused_with_the_tried_ones(version: str) -> None:
    says = rf"torch {version.replace('+', '.')}: .* work with torch 2\.13.* install one of these"
    with pytest.raises(ConfigError, match=says):
        check_torch(version)
    for tried in ("2.13.0", "2.13.1+cpu", "2.13.0.dev20260601+cu130"):
        check_torch(tried)


def test_stages_without_a_method_that_is_overridden_are_refused() -> None:
    parts = {name: lambda self: None for name in OVERRIDDEN if name != "get_bwd_recv_ops"}
    with pytest.raises(ConfigError, match="Stage has no get_bwd_recv_ops"):
        check_torch(f"{SUPPORTED[-1]}.0", type("Stage", (), parts))


def test_all_that_is_overridden_is_named() -> None:
    """A release of torch that renames one of them is then refused."""
    own = {
        name for name in vars(CompressedStage) if not name.startswith("_") and callable(getattr(CompressedStage, name))
    }
    assert own == set(OVERRIDDEN)
