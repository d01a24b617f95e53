"""The contract of a codec that remembers what it has sent: one object belongs to one cut and one direction.

An object has two ends, what `encode` remembers and what `decode` does, which see the same traffic and stay equal to
the bit. A worker uses one end of each object; a process that plays both sides of a cut may use both.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tahq.quant.codec import Codec

SENT, RECEIVED = "sent/", "received/"
"""What the names of the tensors of either end's state begin with."""


class StatefulCodec(Codec):
    """A codec whose streams are relative to what was sent before for the same sample.

    Unlike other codecs it may wait for the device while it encodes: its state lies in the host's memory.
    """

    is_stateful = True

    @abstractmethod
    def encode(self, x: torch.Tensor, *, key: int = 0, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
        """See `Codec.encode`.

        Args:
            x: [B, …, C].
            key: 64 bits; ignored by deterministic codecs.
            sample_ids: whose activations these are, B numbers from 0; None: nobody's, nothing is remembered.
        """

    @abstractmethod
    def decode(
        self,
        buf: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        key: int = 0,
        sample_ids: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """See `Codec.decode`; `sample_ids` as in `encode`.

        Raises:
            CodecError: also where the two ends do not remember the same of a sample.
        """

    @property
    @abstractmethod
    def state_nbytes(self) -> int:
        """Bytes that are remembered now, of both ends of this object."""

    @abstractmethod
    def predicted_state_nbytes(self, shape: Sequence[int], num_samples: int) -> int:
        """Bytes that one end will remember once so many samples of tensors of this shape have passed."""

    @abstractmethod
    def revisit_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a stream whose samples are all remembered; `encoded_nbytes` is of the longest there is."""

    @abstractmethod
    def keep_in(self, folder: Path) -> None:
        """Where state that is kept on disk goes, from the next sample on."""

    @property
    @abstractmethod
    def keeps_state_on_disk(self) -> bool:
        """Whether the state is mapped from files, and may be larger than the host's memory."""

    @abstractmethod
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What either end remembers, by names that begin with `SENT` or `RECEIVED`; may share memory with it."""

    @abstractmethod
    def load_state(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], sample_shape: Sequence[int]
    ) -> bool:
        """Remember what `state_tensors` of another object said, in place of all that is remembered.

        Args:
            names: all that there is.
            read: a tensor by its name.
            sample_shape: [S, C] of the samples to come; what was remembered of others is of no use.

        Returns:
            Whether there was something to remember.

        Raises:
            SnapshotError: the tensors are not the state of such a codec.
        """
