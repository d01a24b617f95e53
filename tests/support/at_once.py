"""Executors without a thread, for coordinators on a virtual clock."""

from concurrent.futures import Executor, Future


class AtOnce(Executor):
    """Runs each call while it is submitted."""

    def submit(self, call, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Sooner(Executor):
    """Runs a call when somebody waits for it, or when it is asked after and luck has it so.

    Args:
        random: decides.
        chance: that a call has ended whenever somebody asks.
    """

    def __init__(self, random, chance=0.05):
        self._random = random
        self._chance = chance

    def submit(self, call, /, *args, **kwargs):
        return _Drawn(lambda: call(*args, **kwargs), lambda: self._random.random() < self._chance)


class _Drawn(Future):
    def __init__(self, call, has_luck):
        super().__init__()
        self._call = call
        self._has_luck = has_luck

    def done(self):
        if not super().done() and self._has_luck():
            self._end()
        return super().done()

    def result(self, timeout=None):
        if not super().done():
            self._end()
        return super().result(timeout)

    def _end(self):
        try:
            self.set_result(self._call())
        except Exception as error:
            self.set_exception(error)
