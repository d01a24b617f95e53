"""The runs that faults happen to: small, of codecs that a bit's difference would show in, and just long enough."""

from typing import Any

from support.runs import tiny


def small_run(
    num_steps: int, *, peer_timeout: str = "10s", stages: int = 3, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A GPT-2 of as many blocks as stages, 8 micro-batches of 2 × 128 tokens a step, TAH-Quant's codecs.

    Args:
        num_steps: steps of the run.
        stages: of the pipeline.
        sections: keys to change.
    """
    own: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "seed": 3, "peer_timeout": "10s", "snapshot_every": 4},
        "model": {"num_layers": stages},
        "data": {"seq_len": 128},
        "training": {"steps": num_steps, "global_batch": 16, "micro_batch": 2},
        "pipeline": {"stages": stages, "in_flight": [8, 4, 2, 1][:stages] if stages <= 4 else None},
        "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
    }
    return tiny(**{name: {**own.get(name, {}), **sections.get(name, {})} for name in {**own, **sections}})
