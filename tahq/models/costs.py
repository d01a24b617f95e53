"""The cost of each part of a model: counted multiply-adds, or timed forward and backward.

Counting needs the configuration only. Timing builds one part at a time, so it needs memory for the largest part only.
"""

import statistics
import time
from collections.abc import Callable

import torch

from tahq.models.families import head_dim
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import LayerCosts
from tahq.models.slice import ModelSlice, Parts, sharing_copies_of


def counted_costs(spec: ModelSpec, seq_len: int) -> LayerCosts:
    """Multiply-adds per token of the forward pass; the backward pass has twice as many everywhere.

    A block has those of its matrices plus 2 · A · H · D for attention, A being the mean number of positions that a
    query attends to; the embedding, a look-up, has 0; the head has hidden · vocabulary.
    """
    config, layout = spec.hf_config, spec.layout
    matrices = layout.block_weights(config)
    width = config.num_attention_heads * head_dim(config)
    seen = [mean_positions_seen(seq_len, layout.window(config, block)) for block in range(spec.num_layers)]
    return LayerCosts(
        embedding=0.0,
        blocks=tuple(matrices + 2 * positions * width for positions in seen),
        head=float(spec.hidden_size * spec.vocab_size),
    )


def mean_positions_seen(seq_len: int, window: int | None) -> float:
    """Mean of min(q + 1, window) over the queries q of a sample: 1.75 for four tokens and a window of 2."""
    width = seq_len if window is None else min(window, seq_len)
    return (width * (width + 1) / 2 + (seq_len - width) * width) / seq_len


def measured_costs(
    spec: ModelSpec,
    micro_batch: int,
    seq_len: int,
    device: torch.device | str,
    build: Callable[[Parts], ModelSlice],
    *,
    bf16: bool = False,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Median seconds of forward and backward of each part on `device`, over `repeats` after a warm-up.

    Blocks with the same attention window are taken to be equal, so one of each kind is timed. `build` makes a part on
    `device`.
    """

    def seconds(parts: Parts) -> float:
        model, durations = build(parts), []
        x = torch.zeros(micro_batch, seq_len, dtype=torch.int64, device=device)
        if not parts.embedding:
            generator = torch.Generator("cpu").manual_seed(0)
            x = torch.randn(micro_batch, seq_len, spec.hidden_size, generator=generator).to(device).requires_grad_()
        with sharing_copies_of([model]):
            for _ in range(1 + repeats):
                start = clock()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                    output = model(x)
                output.backward(torch.ones_like(output))
                model.zero_grad(set_to_none=True)
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                durations.append(clock() - start)
        return statistics.median(durations[1:])

    windows = [spec.layout.window(spec.hf_config, block) for block in range(spec.num_layers)]
    first_of = {window: windows.index(window) for window in windows}
    seconds_of = {window: seconds(Parts(range(block, block + 1))) for window, block in first_of.items()}
    return LayerCosts(
        embedding=seconds(Parts(range(0), embedding=True)),
        blocks=tuple(seconds_of[window] for window in windows),
        head=seconds(Parts(range(0), head=True)),
    )
