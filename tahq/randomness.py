"""Counter-based randomness: a 64-bit seed from the logical name of what is being drawn.

Nothing in tahq draws from a stream whose state depends on what was drawn before. Each draw has
a name (seed, module path, step, replica, micro-batch, purpose), the name is hashed, and the hash
seeds a generator used once. So any draw can be made again, in any order, on any stage.
"""

import hashlib
import struct

_INTEGER = struct.Struct("<cq")
_LENGTH = struct.Struct("<cI")


def derive_seed(*parts: int | str) -> int:
    """64-bit seed for a name: BLAKE2b-64 over a prefix-free encoding of its parts.

    Args:
        parts: integers (any size that fits 64 bits, signed) and strings, in a fixed order.

    Returns:
        An integer in [0, 2**64).

    Raises:
        TypeError: a part is neither int nor str (bools are refused too).
    """
    name = b"".join(map(_encode, parts))
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _encode(part: int | str) -> bytes:
    if isinstance(part, int) and not isinstance(part, bool):
        return _INTEGER.pack(b"i", part)
    if isinstance(part, str):
        text = part.encode()
        return _LENGTH.pack(b"s", len(text)) + text
    raise TypeError(f"a seed part must be int or str, got {type(part).__name__}")
