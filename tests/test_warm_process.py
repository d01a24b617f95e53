import os
import threading

from support.warm_process import WarmProcess

NUM_THREADS = 3
NUM_TRIES = 10


def test_all_who_ask_after_a_process_are_told_the_same(tmp_path):
    """Without a lock 47 of 60 tries had a thread that was told 255."""
    for _ in range(NUM_TRIES):
        process = WarmProcess("tahq", ["--version"], tmp_path, dict(os.environ))
        told = []

        def ask(process=process, told=told):
            while (status := process.poll()) is None:
                pass
            told.append(status)

        threads = [threading.Thread(target=ask) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        process.communicate()
        assert told == [0] * NUM_THREADS
