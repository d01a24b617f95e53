"""Greedy continuations of a few prompts, made by the pipeline itself between two steps.

All prompts are one batch of fixed length. For each token it passes the stages as in an evaluation, with the wire's
codecs; the last stage takes the likeliest tokens, and they go back cut by cut, uncompressed. Frames have the logical
ids of the evaluation, so a stage that is lost meanwhile comes back as from one. No weight changes, and nothing is
drawn at random. Nothing is cached: each token costs a pass of all positions, and a round trip through the pipeline.

Shapes: N prompts, L positions.
"""

from collections.abc import Callable

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.tokenizer import Tokenizer
from tahq.pipeline.boundary import BOUNDARY_DTYPE
from tahq.pipeline.config import SamplesConfig
from tahq.pipeline.engine import Chunk, StageEngine


class Sampler:
    """The part of one stage.

    Args:
        engine: the stage's.
        config: prompts and number of new tokens.
        seq_len: most positions.
        first_number: of the frames of an evaluation that has losses, too; ours are numbered from here.
        tokenizer: the run's; first and last stage need it.
    """

    def __init__(
        self, engine: StageEngine, config: SamplesConfig, seq_len: int, first_number: int, tokenizer: Tokenizer | None
    ) -> None:
        self._engine, self._config, self._first_number = engine, config, first_number
        self._chunks = [chunk for _, chunk in sorted(engine.chunks.items())]
        self._tokenizer = tokenizer
        self._shape = len(config.prompts), config.num_positions(seq_len)

    @torch.no_grad()
    def texts(self, step: int, on_token: Callable[[int], None] = lambda number: None) -> list[str]:
        """The new text behind each prompt, after a step; on the last stage, none elsewhere.

        `on_token` is called with the number of each token, from 0, before it is computed.
        """
        for chunk in self._chunks:
            chunk.module.eval()
            chunk.module.balance = None
            chunk.module.num_pieces = 1
        tokens, ends = self._prompts()
        begins, rows, count = ends.clone(), torch.arange(len(ends)), self._config.max_tokens
        for number in range(count):
            on_token(number)
            newest = self._forward(step, number, tokens, ends)
            if number < count - 1:
                newest = self._back(step, number, newest)
            if newest is not None:
                tokens[rows, ends] = newest
                ends += 1
        if self._chunks[-1].outgoing is not None:
            return []
        return [self._text(row[begin:].tolist()[:count]) for row, begin in zip(tokens, begins, strict=True)]

    def _prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 [N, L], padded behind the prompts, and the length of each prompt, int64 [N].

        Of a prompt that leaves no room for new tokens, the end is taken.
        """
        num_prompts, length = self._shape
        tokens, lengths = torch.zeros(self._shape, dtype=torch.int64), torch.ones(num_prompts, dtype=torch.int64)
        encoded = [] if self._tokenizer is None else self._tokenizer.encode_all(self._config.prompts)
        for row, prompt in enumerate(encoded):
            ids = prompt.tolist()[-(length - self._config.max_tokens) :]
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            lengths[row] = max(len(ids), 1)
        return tokens, lengths

    def _forward(self, step: int, number: int, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | None:
        """The likeliest next token of each text, int64 [N], on the last stage."""
        engine, number = self._engine, self._first_number + number
        for chunk in self._chunks:
            if chunk.incoming is None:
                x = tokens.to(engine.device)
            else:
                id = chunk.incoming.name(step, Purpose.EVAL, number, Direction.FORWARD)
                chunk.incoming.post(id, (*self._shape, engine.shape.hidden_size))
                x = chunk.incoming.receive(id)
            y = chunk.compute(x, None, autocast=engine.autocast)
            if chunk.outgoing is None:
                return self._likeliest(chunk, y, ends)
            id = chunk.outgoing.name(step, Purpose.EVAL, number, Direction.FORWARD)
            chunk.outgoing.send(id, y.to(BOUNDARY_DTYPE))
        return None

    def _likeliest(self, chunk: Chunk, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Of the tokens that the tokenizer has; a model may have more."""
        assert self._tokenizer is not None, "the last stage reads data"
        logits = chunk.logits(y, ends.to(y.device) - 1, autocast=self._engine.autocast)
        return logits[:, : self._tokenizer.vocab_size].argmax(1).cpu()

    def _back(self, step: int, number: int, newest: torch.Tensor | None) -> torch.Tensor:
        """Pass the newest tokens on to the first stage; as fp32, which has all whole numbers below 2^24."""
        for chunk in reversed(self._chunks):
            if chunk.outgoing is not None:
                id = chunk.outgoing.name(step, Purpose.EVAL_RAW, number, Direction.BACKWARD)
                chunk.outgoing.post(id, self._shape[:1])
                newest = chunk.outgoing.receive(id)
            assert newest is not None, "the last chunk has made it"
            if chunk.incoming is not None:
                id = chunk.incoming.name(step, Purpose.EVAL_RAW, number, Direction.BACKWARD)
                chunk.incoming.send(id, newest.to(self._engine.device, BOUNDARY_DTYPE))
        assert newest is not None, "a stage has a chunk"
        return newest.to("cpu", torch.int64)

    def _text(self, ids: list[int]) -> str:
        """The text up to the end of the document, if that was written."""
        assert self._tokenizer is not None, "the last stage reads data"
        end = self._tokenizer.end_of_document
        return self._tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
