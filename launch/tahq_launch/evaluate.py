"""`tahq eval`: loss and perplexity of a trained model on held-out data or on other text, and tasks of lm-eval.

The loss of a run's held-out data is that of its own validations without codecs, `validation.loss_raw` in
metrics.jsonl: the same samples and the same arithmetic, but for the division into stages.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.config.stage_estimate import autocast_dtype
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import NO_LOSS, ValidationSet, load_dataset, load_validation
from tahq.data.tokenizer import Tokenizer, load_tokenizer
from tahq.errors import DataError, UserError
from tahq.models.loss import cross_entropy
from tahq.observe import figures
from tahq.observe.metrics import perplexity
from tahq_launch.command_line import progress_of
from tahq_launch.loaded_model import default_device, is_run, load_model, model_folder
from tahq_launch.run_source import source_of
from tahq_launch.runs.pull import Which, checkpoint_of
from tahq_launch.start.run_folder import RunFolder

_FOLDER_SEQ_LEN = 1024
"""Tokens per sample of a model that no run of tahq describes, or the most that it takes."""
_SAMPLES = 8
"""Of text at a time."""
_PROBE = "The 3 quick brown foxes — naïve, of course — said: «def main(x):\n\treturn x»"
"""A text that different tokenizers cut differently."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to evaluate, and on what; see `tahq eval`."""

    model: Path
    text: tuple[str, ...] = ()
    data: Path | None = None
    step: Which = None
    batches: int | None = None
    tasks: tuple[str, ...] = ()
    task_folder: Path | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """Nats per token over so many tokens."""

    loss: float
    tokens: int


MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Tokens, labels, and positions where rows have several records, each int64 [B, S]."""


@dataclass(frozen=True, slots=True)
class Data:
    """Micro-batches to evaluate on, their number, and what they are; the only ones may have no name."""

    batches: Iterable[MicroBatch]
    total: int
    what: str
    name: str = ""


def print_evaluation(request: EvalRequest, *, as_json: bool) -> None:
    """Evaluate a model and print the figures, as text or as one JSON object.

    Raises:
        UserError: there is no such model, data or task, or lm-eval is missing.
    """
    tasks = _tasks_of(request) if request.tasks else None
    run = request.model if is_run(request.model) else request.data
    manifest = None if run is None else checkpoint_of(run, request.step if run == request.model else None)[1]
    config = None if manifest is None else config_from_json(json.dumps(manifest.config))
    device = request.device or default_device()
    values: dict[str, Any] = {"model": str(request.model)}
    if manifest is not None and run == request.model:
        values["step"] = manifest.step
    with model_folder(request.model, request.step) as folder:
        model, tokenizer = load_model(folder, device)
        if request.text or request.data is not None or tasks is None:
            parts = _data(request, run, config, folder, model)
            found = [_values(part, loss_of(model, part, _precision(config, device))) for part in parts]
            named = {part.name: each for part, each in zip(parts, found, strict=True) if part.name}
            values |= found[0] | ({"sets": named} if named else {})
        if tasks is not None:
            values["tasks"] = _results(model, tokenizer, tasks, request)
    print(json.dumps(values) if as_json else "\n".join(_lines(values)))


def _values(data: Data, found: Loss) -> dict[str, Any]:
    return {"data": data.what, "tokens": found.tokens, "loss": found.loss, "perplexity": perplexity(found.loss)}


def _lines(values: dict[str, Any]) -> Iterator[str]:
    step = f" after step {values['step']}" if "step" in values else ""
    yield f"{values['model']}{step}"
    for each in values.get("sets", {"": values} if "loss" in values else {}).values():
        yield f"  {'data':<12}{each['data']}, {each['tokens']:,} tokens with a loss"
        yield f"  {'loss':<12}{figures.loss(each['loss'])} nats per token"
        yield f"  {'perplexity':<12}{each['perplexity']:.4g}"
    for task, metrics in values.get("tasks", {}).items():
        yield f"  {task:<12}{', '.join(f'{name} {value:.4g}' for name, value in metrics.items())}"


# -- loss --------------------------------------------------------------------------------------------


@torch.no_grad()
def loss_of(model: Any, data: Data, precision: AbstractContextManager[object]) -> Loss:
    """The mean loss of a model over all labels of micro-batches.

    Args:
        model: a transformers model for causal language modelling, in evaluation mode.
        data: the micro-batches.
        precision: a context in which the model computes.
    """
    loss_sum, tokens, progress = 0.0, 0, progress_of("evaluating")
    for done, (inputs, labels, positions) in enumerate(data.batches, start=1):
        # transformers finds the records of a row by positions, if it keeps no cache
        packed = {} if positions is None else {"position_ids": positions.to(model.device), "use_cache": False}
        with precision:
            logits = model(inputs.to(model.device), **packed).logits
            loss_sum += float(cross_entropy(logits, labels.to(model.device))[1])
        tokens += int((labels != NO_LOSS).sum())
        progress(done / data.total)
    return Loss(loss_sum / tokens, tokens)


def _precision(config: ClusterConfig | None, device: str) -> AbstractContextManager[object]:
    kind = torch.device(device).type
    dtype = None if config is None else autocast_dtype(config, kind)
    return nullcontext() if dtype is None else torch.autocast(kind, dtype)


def _data(request: EvalRequest, run: Path | None, config: ClusterConfig | None, folder: Path, model: Any) -> list[Data]:
    if run is None or config is None:
        if not request.text:
            raise UserError(f"{request.model} does not say on which data; give --text FILE, or --data RUN")
        tokenizer = load_tokenizer(DataConfig(text="-", tokenizer=str(folder)))
        longest = getattr(model.config, "max_position_embeddings", None) or _FOLDER_SEQ_LEN
        return [_text(request.text, tokenizer, min(longest, _FOLDER_SEQ_LEN))]
    tokenizer = source_of(RunFolder(run), config)[1]
    if run != request.model:
        _check_same_tokenizer(request, tokenizer, folder)
    if request.text:
        return [_text(request.text, tokenizer, config.data.seq_len)]
    return _held_out(config, tokenizer, request.batches, run)


def _check_same_tokenizer(request: EvalRequest, tokenizer: Tokenizer, folder: Path) -> None:
    theirs = load_tokenizer(DataConfig(text="-", tokenizer=str(folder)))
    if list(theirs.encode(_PROBE)) != list(tokenizer.encode(_PROBE)):
        raise UserError(
            f"{request.model} has another tokenizer than {request.data}, so losses per token cannot be compared; give "
            "--text FILE instead of --data"
        )


def _text(files: Sequence[str], tokenizer: Tokenizer, seq_len: int) -> Data:
    """All samples of text files."""
    dataset = load_dataset(DataConfig(text=list(files), seq_len=seq_len, validation=0.0), tokenizer)
    starts = range(0, dataset.num_train_samples, _SAMPLES)

    def micro_batches() -> Iterator[MicroBatch]:
        for start in starts:
            numbers = np.arange(start, min(start + _SAMPLES, dataset.num_train_samples), dtype=np.int64)
            tokens, labels = (torch.from_numpy(np.ascontiguousarray(array)) for array in dataset.gather(numbers))
            yield tokens, labels, None

    return Data(micro_batches(), len(starts), ", ".join(files))


def _held_out(config: ClusterConfig, tokenizer: Tokenizer, batches: int | None, run: Path) -> list[Data]:
    """The first batches of each validation set, in the order of the run's own validations."""
    training = config.training
    if training.dpo is not None:
        raise UserError(
            f"{run} learned from pairs (training.dpo), whose loss and accuracy it has in metrics.jsonl if it evaluates "
            "(training.eval_every); for a loss of tokens give a text (--text FILE)"
        )
    try:
        dataset = load_dataset(config.data, tokenizer, training.global_batch)
        sets = load_validation(config.data, dataset, tokenizer)
    except DataError as error:
        raise DataError(f"{error}; run tahq eval where the run's data is, or give other text (--text FILE)") from error
    if not any(each.num_samples for each in sets):
        raise DataError("the run holds no data out (data.validation); give other text (--text FILE)")
    global_batch, micro_batch = training.global_batch, training.micro_batch
    source = BatchSource(dataset, seed=config.run.seed, global_batch=global_batch, micro_batch=micro_batch, sets=sets)

    def data_of(place: int, one: ValidationSet) -> Data:
        num_batches = min(batches or training.eval_batches, -(-one.num_samples // global_batch))
        held_out = (source.validation(number, place) for number in range(num_batches))
        micro_batches = (
            (*batch.micro_batch(i), batch.micro_batch_positions(i))
            for batch in held_out
            for i in range(training.num_micro_batches)
        )
        what = f"the held-out part of {run}'s data" if one.dataset is dataset else f"{run}'s validation files"
        what = f"{one.name}: {what}" if one.name else what
        return Data(micro_batches, num_batches * training.num_micro_batches, what, one.name)

    return [data_of(place, one) for place, one in enumerate(sets) if one.num_samples]


# -- tasks -------------------------------------------------------------------------------------------


def _tasks_of(request: EvalRequest) -> Any:
    """lm-eval's tasks, checked before anything is loaded."""
    try:
        from lm_eval.models import huggingface  # noqa: F401, found missing now rather than after the model is loaded
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError:
        raise UserError("--tasks needs lm-eval; install it with: pip install 'lm-eval[hf]'") from None
    manager = TaskManager(include_path=None if request.task_folder is None else str(request.task_folder))
    unknown = [task for task in request.tasks if task not in manager.all_tasks]
    if unknown:
        raise UserError(f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them")
    return manager


def _results(model: Any, tokenizer: Any, tasks: Any, request: EvalRequest) -> dict[str, dict[str, float]]:
    """Figures by task."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    try:
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_SAMPLES),
            tasks=list(request.tasks),
            task_manager=tasks,
        )
    except OSError as error:
        raise UserError(f"lm-eval cannot load the data of {', '.join(request.tasks)}: {error}") from error
    return {
        task: {name.partition(",")[0]: value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in found["results"].items()
    }
