"""Losses with FP8 products, with a bf16 residual stream, gradients and weights, and with COAT, against bf16 products

    python benchmarks/bench_option_loss.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib
    python benchmarks/bench_option_loss.py --model tiny-llama --steps 30 --seeds 1  # on a CPU: that it works

A Llama of 12 blocks of 768 in four stages, by the modules and optimizers of a worker. `bf16 products`: fp32 weights
under autocast, which the other options change; `fp8`: `training.precision: fp8`, gradients of outputs in E4M3, or E5M2;
`bf16 weights`: LLMQ's types, matrices, their gradients, moments and the residual stream in bf16, rounded stochastically
after an update; `coat`: FP8 moments, FP8 activations, or both. Seeds come one after the other, so `--seeds 1` can be
continued by `--seeds 2`: runs are kept beside the result file. Six runs at once took eleven minutes of an H200.
"""

from functools import partial

from bench_agoq_loss import STEPS, tables
from cut_training import BATCH, SEQ_LEN
from harness import main
from option_training import OPTIONS
from stored_training import METHODS as AGOQ
from training_runs import ARGUMENTS, LAST_STEPS

METHOD = (
    f"{BATCH} × {SEQ_LEN} tokens per step, random start. Loss is the mean of the last {LAST_STEPS} steps, nats per "
    "token. A gap is the difference to the first row's run of the same seed; ± is the half width of its 95 % interval "
    "(Student's t over seeds)."
)
NAMES = [name for name in OPTIONS if name not in AGOQ]
METHODS = {"--methods": {"nargs": "+", "choices": list(OPTIONS), "default": NAMES, "help": "the first: base"}}
NUM_PROCESSES = {"--processes": {"type": int, "default": 3, "help": "runs at once per device (default 3)"}}

if __name__ == "__main__":
    main(__doc__, partial(tables, method=METHOD), {**ARGUMENTS, **STEPS, **METHODS, **NUM_PROCESSES})
