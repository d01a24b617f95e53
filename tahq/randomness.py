"""Counter-based randomness: a 64-bit seed from the logical name of what is being drawn.

Nothing in tahq draws from a stream whose state depends on what was drawn before. Each draw has
a name (seed, module path, step, replica, micro-batch, purpose), the name is hashed, and the hash
seeds a generator used once. So any draw can be made again, in any order, on any stage.
"""

import hashlib
import struct


def derive_seed(*parts: int | str) -> int:
    """64-bit seed for a name: BLAKE2b-64 over a prefix-free encoding of its parts.

    Args:
        parts: integers (any size that fits 64 bits, signed) and strings, in a fixed order.

    Returns:
        An integer in [0, 2**64).

    Raises:
        TypeError: a part is neither int nor str (bool included: it is no name).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a seed part must be int or str, got {type(part).__name__}")
        if isinstance(part, int):
            digest.update(b"i" + struct.pack("<q", part))
        else:
            text = part.encode()
            digest.update(b"s" + struct.pack("<I", len(text)) + text)
    return int.from_bytes(digest.digest(), "little")
